//! A worker without interfaces: the director and its clock, and for tests a network in memory.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lvs_core::api::{Call, Done, Failure, FailureCode, Host, Info, Need, Refused};
use lvs_core::{Control, Error, Instant, LocalAddress, Options, Shard};
use tracing::error;

use super::bench::{BenchNet, HOST_PORT, Marking, Test, Tested};
use super::decider::Decider;
use super::local;
use super::shared::{Command, Shared};
use crate::netlink::Netlink;
use crate::packet::frame::Frame;
use crate::packet::intercept::Intercept;
use crate::packet::net::PortId;
use crate::packet::pipeline::{Env, Output, Pipeline, Settings};
use crate::sys::Poller;

/// Between two looks at the timers.
const TICK: Duration = Duration::from_millis(500);
/// Frames that an answer carries at most; what a test wants to see is little.
const SENT_MAX: usize = 4096;
/// Connections that are looked at in one go after a server went down.
const DOWN_BUDGET: usize = 4096;

/// A host whose interfaces this engine does not touch, or one that a test describes.
struct NoHost<'a> {
    net: &'a BenchNet,
    virtual_time: bool,
}

impl Host for NoHost<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        match need {
            Need::Own(_) => Err(Failure::new(
                FailureCode::Unsupported,
                "this engine has no interfaces (--no-interfaces): it can own no address",
            )),
            // A director that takes part in no synchronisation must not say that it does; tests only want its bookkeeping.
            Need::Daemon(_) if !self.virtual_time => {
                Err(Error::Unsupported("synchronisation daemon").into())
            }
            _ => Ok(()),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.net.is_broadcast(addr)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        if self.virtual_time {
            return self.net.mtu(interface);
        }
        let (_, state) = Netlink::open().ok()?;
        Some(state.link_by_name(interface)?.mtu)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        local::ports(addr, false)
    }
}

/// What [`Worker`](super::worker::Worker) is for an engine with interfaces.
pub(super) struct Offline {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    decider: Decider,
    options: Options,
    net: BenchNet,
    pipeline: Pipeline,
    hidden: Intercept,
    output: Output,
}

impl Offline {
    pub(super) fn new(
        shared: Arc<Shared>,
        commands: mpsc::Receiver<Command>,
        shard: Shard,
        options: Options,
    ) -> Self {
        let mut worker = Self {
            decider: Decider::new(shared.clone(), shard, None),
            shared,
            commands,
            options,
            net: BenchNet::default(),
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            hidden: Intercept::default(),
            output: Output::new(),
        };
        worker.advance();
        worker
    }

    pub(super) fn run(mut self) {
        let mut poller = Poller::new();
        while !self.shared.is_stopping() {
            poller.clear();
            poller.add(self.shared.wake().as_fd());
            if let Err(error) = poller.wait(Some(TICK)) {
                return error!("cannot wait for commands: {error}");
            }
            self.shared.wake().take();
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            if !self.shared.has_virtual_time() {
                self.advance();
                self.end_down(&mut Tested::default());
            }
        }
    }

    /// Does what is due.
    fn advance(&mut self) {
        let now = self.shared.now();
        let shard = &mut self.decider.shard;
        self.shared.control().advance_with(shard, now);
        // Nobody is there to send them to.
        while shard.take_sync_message(now).is_some() {}
        self.pipeline.expire(now);
    }

    fn obey(&mut self, command: Command) {
        // Whoever asked may have given up waiting; then nobody needs the answer.
        match command {
            Command::Apply(changes, reply) => {
                let _ = reply.send(self.apply(&changes));
            }
            Command::LocalInfo(reply) => {
                let _ = reply.send(local::info(&self.shared.control(), &self.decider.shard));
            }
            Command::Connections(slots, reply) => {
                let _ = reply.send(self.decider.connections(slots));
            }
            Command::Test(test, reply) => {
                let mut done = match test {
                    Test::Reset(net) => self.reset(*net),
                    Test::Advance(advance) => {
                        self.shared.set_now(advance.target(self.shared.now()));
                        self.advance();
                        self.follow();
                        let mut done = Tested::default();
                        self.end_down(&mut done);
                        done
                    }
                    Test::Inject { frames, repeat } => self.inject(&frames, repeat),
                };
                done.now = self.shared.now();
                let _ = reply.send(done);
            }
            Command::Explain(question, reply) => {
                let _ = reply.send(self.decider.explain(&question));
            }
            // Whoever asked is told by the closed channel: no packet ever comes.
            Command::Capture(..) => {}
            Command::Marked(reply) => {
                let _ = reply.send(self.decider.marked.clone());
            }
            Command::Info(reply) => {
                let _ = reply.send(Info {
                    connections: self.decider.shard.len() as u64,
                    capacity: self.decider.shard.capacity() as u64,
                    ..Info::default()
                });
            }
            Command::Reasons(reply) => {
                let _ = reply.send(self.decider.reasons().collect());
            }
        }
    }

    /// Makes changes, or none, and follows them.
    fn apply(&mut self, changes: &[Call]) -> Result<Done, Refused> {
        let host = NoHost {
            net: &self.net,
            virtual_time: self.shared.has_virtual_time(),
        };
        let now = self.shared.now();
        self.shared.control().apply(changes, &host, now)?;
        self.follow();
        self.decider.follow_marks();
        Ok(Done::default())
    }

    /// Brings the packet path in line with the director.
    fn follow(&mut self) {
        let mut control = self.shared.control();
        control.sweep(&mut self.decider.shard);
        self.hidden = Intercept::of(&control, &self.hidden);
        self.net.vips = self.hidden.vips();
    }

    /// Forgets everything.
    fn reset(&mut self, net: BenchNet) -> Tested {
        *self.shared.bench_ports() = net.names();
        {
            let mut control = self.shared.control();
            let ftp_ports = control.ftp_ports().to_vec();
            *control = Control::new(self.options.clone());
            if let Err(error) = control.set_ftp_ports(ftp_ports) {
                error!("cannot keep the helper's ports: {error}");
            }
            control.set_local_addresses(net.local());
            let shard = control.shard(0).expect("there is at least one");
            self.decider = Decider::new(self.shared.clone(), shard, None);
        }
        self.net = net;
        self.pipeline = Pipeline::alone(Settings::UNLIMITED);
        self.shared.set_now(Instant::ZERO);
        self.advance();
        self.follow();
        Tested::default()
    }

    /// Passes frames through the packet path, one at a time.
    fn inject(&mut self, frames: &[(PortId, Vec<u8>)], repeat: u64) -> Tested {
        let now = self.shared.now();
        let pmtu_disc = self.shared.control().sysctls().pmtu_disc;
        let mut done = Tested::default();
        self.end_down(&mut done);
        for _ in 0..repeat {
            for (port, bytes) in frames {
                let env = Env {
                    net: &self.net,
                    intercept: &self.hidden,
                    pmtu_disc,
                };
                let mut decide = Marking {
                    decider: &mut self.decider,
                    net: &self.net,
                };
                let mut batch = [Frame::from_bytes(bytes)];
                self.pipeline
                    .process(*port, &mut batch, &env, &mut decide, now, &mut self.output);
                self.take_output(&mut done);
            }
        }
        done
    }

    /// Ends the connections of servers that went down.
    fn end_down(&mut self, done: &mut Tested) {
        let now = self.shared.now();
        let pmtu_disc = self.shared.control().sysctls().pmtu_disc;
        while self.decider.shard.has_down() {
            for reset in self.decider.shard.end_down(now, DOWN_BUDGET) {
                let env = Env {
                    net: &self.net,
                    intercept: &self.hidden,
                    pmtu_disc,
                };
                self.pipeline
                    .send_reset(&reset, &env, now, &mut self.output);
                self.take_output(done);
            }
        }
    }

    /// Keeps what would be sent.
    fn take_output(&mut self, done: &mut Tested) {
        for (to, frames) in self.output.queues() {
            if to == HOST_PORT {
                done.to_host += frames.len() as u64;
                continue;
            }
            let room = SENT_MAX.saturating_sub(done.sent.len());
            let kept = frames.iter().take(room);
            done.sent
                .extend(kept.map(|frame| (to, frame.bytes().to_vec())));
        }
        self.output.recycle();
    }
}
