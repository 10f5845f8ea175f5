//! Packets of another worker's connections: they are passed to that worker.

use std::sync::Arc;

use lvs_core::{Hook, Instant};

use super::datagram::Job;
use super::{Cx, Decide, Env, Fate, Output, Pipeline, Whole};
use crate::drop::FrameDrop;
use crate::fragment::History;
use crate::frame::Frame;
use crate::net::{Net, PortId, PortInfo};
use crate::parse::{self, Packet};
use crate::steer::Steering;
use crate::wire::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, be16, ethernet, vlan};

/// The number of a pipeline's worker, and the rule that divides packets among workers.
#[derive(Clone, Debug)]
pub struct Share {
    /// The number of this worker, from 0.
    pub number: usize,
    /// The rule that divides packets among the workers.
    pub steering: Arc<Steering>,
}

impl Pipeline {
    /// The worker that has the connection of a received frame. `None` if this worker must process
    /// the frame: it is the only worker or has the connection, or the frame is for another host, is
    /// not IP, or is invalid.
    pub fn home_of<N: Net>(
        &self,
        info: &PortInfo,
        frame: &Frame,
        env: &Env<'_, N>,
    ) -> Option<usize> {
        let share = self.share.as_ref()?;
        let bytes = frame.bytes();
        let ip = if info.ethernet {
            let mut ethertype = be16(bytes.get(..ETHERNET_LEN)?, ethernet::ETHERTYPE);
            let mut at = ETHERNET_LEN;
            if bytes[..6] != info.mac.0 {
                return None;
            }
            // A priority tag.
            if ethertype == vlan::TAG && be16(bytes.get(..at + 2)?, at) & 0xfff == 0 {
                at += vlan::TAG_LEN;
                ethertype = be16(bytes.get(..at)?, at - 2);
            }
            if ethertype != ETHERTYPE_IPV4 && ethertype != ETHERTYPE_IPV6 {
                return None;
            }
            bytes.get(at..)?
        } else {
            bytes
        };
        // For an invalid packet, no worker is chosen: this one drops it.
        let packet = parse::ip(ip, frame.offload.segments.is_some()).ok()?;
        self.other_home(share, &packet, ip, env)
    }

    fn other_home<N: Net>(
        &self,
        share: &Share,
        packet: &Packet,
        ip: &[u8],
        env: &Env<'_, N>,
    ) -> Option<usize> {
        let home = share.steering.home(packet, ip, env.net, env.intercept);
        (home != share.number).then_some(home)
    }

    /// Counts packets that this worker has passed to other workers. `frames` is the number of
    /// received frames among them, which are not counted yet; `lost` is the number of frames and
    /// datagrams that were dropped because a queue was full.
    pub const fn count_handed_over(&mut self, frames: usize, lost: usize) {
        let (frames, lost) = (frames as u64, lost as u64);
        self.counters.received += frames;
        // Datagrams were counted when they were queued for the other worker.
        self.counters.handed_over = (self.counters.handed_over + frames).saturating_sub(lost);
        self.counters.dropped[FrameDrop::WorkerBusy.index()] += lost;
    }

    /// Counts frames that other workers passed to this one as taken, after
    /// [`process`](Self::process) has counted them as received.
    pub const fn count_taken(&mut self, frames: usize) {
        self.counters.received -= frames as u64;
        self.counters.taken += frames as u64;
    }

    /// Queues a reassembled datagram for the worker that has its connection; returns whether that
    /// is another worker.
    pub(super) fn hand_over<N: Net>(
        &self,
        whole: &mut Frame,
        packet: &Packet,
        history: &History,
        job: &Job<'_>,
        cx: &mut Cx<'_, N>,
    ) -> bool {
        let Some(share) = &self.share else {
            return false;
        };
        let Some(home) = self.other_home(share, packet, whole.bytes(), cx.env) else {
            return false;
        };
        let port = job.arrival.map(|arrival| arrival.port);
        let port = port.or_else(|| cx.env.net.host_port());
        let whole = Whole {
            frame: whole.take(),
            history: history.clone(),
            from_host: job.from_host,
            arrival: job.arrival,
        };
        cx.out
            .elsewhere
            .push((home, port.unwrap_or(PortId::HOST), whole));
        true
    }

    /// Processes a datagram that another worker has reassembled.
    pub fn process_whole<N: Net, D: Decide>(
        &mut self,
        mut whole: Whole,
        env: &Env<'_, N>,
        decide: &mut D,
        now: Instant,
        out: &mut Output,
    ) {
        let mut cx = Cx::new(env, now, out);
        self.counters.taken += 1;
        let fate = match parse::ip(whole.frame.bytes(), false) {
            Ok(packet) => {
                let to_host = env.net.is_local(packet.dst);
                let virt = env.net.is_vip(packet.dst) || env.net.is_own_vip(packet.dst);
                let hook = match (whole.from_host, to_host || virt) {
                    (true, _) => Hook::Output,
                    (false, true) => Hook::Local,
                    (false, false) => Hook::Transit,
                };
                let job = Job {
                    arrival: whole.arrival,
                    history: Some(&whole.history),
                    ..Job::new(packet, hook, whole.from_host, to_host)
                };
                self.datagram(&mut whole.frame, job, decide, &mut cx)
            }
            Err(reason) => Fate::Dropped(reason),
        };
        self.counters.count(fate);
        cx.out.keep(whole.frame);
        self.finish_own_error(decide, &mut cx);
    }
}
