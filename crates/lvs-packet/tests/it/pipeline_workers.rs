//! Two workers of one director: the director's counters include the packets of both, and limits
//! apply to both together.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use crate::lab::{CL_MAC, CLIENTS, GW_MAC, SERVERS, SV_MAC, Table, ethernet, server_mac, table};
use etherparse::PacketBuilder;
use lvs_core::{
    Control, Family, Forwarding, IcmpError, Instant, Options, PacketMeta, Protocol, ServerConfig,
    ServiceConfig, ServiceKey, Shard, Verdict,
};
use lvs_packet::common::Common;
use lvs_packet::fragment::Cutter;
use lvs_packet::frame::Frame;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortId;
use lvs_packet::pipeline::{Counters, Decide, Env, Output, Pipeline};
use lvs_packet::settings::Settings;
use lvs_packet::wire::icmp::{self, ErrorKind};
use lvs_packet::wire::{be16, ipv4, put16};

const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 80);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 11);
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const WORKERS: NonZeroUsize = NonZeroUsize::new(2).expect("the number of workers is not zero");

/// A worker: its pipeline and its shard.
struct Worker {
    shard: Shard,
    pipeline: Pipeline,
}

/// Decides as a worker does: by its own shard, or by the `Control` that the workers share.
struct Asked<'a> {
    control: &'a Mutex<Control>,
    shard: &'a mut Shard,
}

impl Decide for Asked<'_> {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        match self.shard.handle_packet(meta, now) {
            Ok(verdict) => verdict,
            Err(pending) => {
                let mut control = self
                    .control
                    .lock()
                    .expect("no thread panicked with the lock");
                control.admit(self.shard, meta, pending, now)
            }
        }
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        match self.shard.handle_icmp_error(error, now) {
            Ok(verdict) => verdict,
            Err(pending) => {
                let mut control = self
                    .control
                    .lock()
                    .expect("no thread panicked with the lock");
                control.admit_icmp_error(self.shard, error, pending, now)
            }
        }
    }
}

/// A director with two workers and one UDP service.
struct Site {
    control: Mutex<Control>,
    common: Arc<Common>,
    workers: Vec<Worker>,
    net: Table,
    intercept: Intercept,
    now: Instant,
}

impl Site {
    fn new(method: Forwarding, settings: Settings) -> Self {
        let mut control = Control::new(Options {
            max_connections: 4096,
            shards: WORKERS.get(),
            ..Options::default()
        });
        let now = Instant::from_secs(10);
        control.advance(now);
        let service = ServiceKey::Address {
            protocol: Protocol::UDP,
            addr: SocketAddr::new(VIP.into(), 53),
        };
        let config = ServiceConfig::new(Family::V4, "rr");
        control
            .add_service(service, config, None)
            .expect("the service is new");
        let server = SocketAddr::new(SERVER.into(), 53);
        let config = ServerConfig::new(1, method);
        control
            .add_server(&service, server, &config, now)
            .expect("the server is new");
        let common = Arc::new(Common::new(settings).with_workers(WORKERS));
        let worker = |number| Worker {
            shard: control
                .shard(number)
                .expect("the number is that of a worker"),
            pipeline: Pipeline::new(Arc::clone(&common)),
        };
        let workers = (0..WORKERS.get()).map(worker).collect();
        let mut net = table();
        net.vips.insert(VIP.into());
        net.local.insert(VIP.into());
        Self {
            intercept: Intercept::of(&control, &Intercept::default()),
            control: Mutex::new(control),
            common,
            workers,
            net,
            now,
        }
    }

    /// Passes an IP packet to a worker, and returns the packets that the worker sends, with link
    /// headers.
    fn send(&mut self, worker: usize, port: PortId, ip: &[u8]) -> Vec<(PortId, Vec<u8>)> {
        let (dst, src) = if port == CLIENTS {
            (CL_MAC, GW_MAC)
        } else {
            (SV_MAC, server_mac(SERVER))
        };
        let frame = Frame::from_bytes(&ethernet(dst, src, ip));
        let env = Env::new(&self.net, &self.intercept);
        let Worker { shard, pipeline } = &mut self.workers[worker];
        let mut asked = Asked {
            control: &self.control,
            shard,
        };
        let mut out = Output::new();
        pipeline.process(port, &mut [frame], &env, &mut asked, self.now, &mut out);
        let all = |(port, frames): (PortId, &mut [Frame])| {
            let bytes = |frame: &Frame| (port, frame.bytes().to_vec());
            frames.iter().map(bytes).collect::<Vec<_>>()
        };
        out.queues().flat_map(all).collect()
    }

    fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for worker in &self.workers {
            sum += &worker.pipeline.counters;
        }
        assert_eq!(sum.received + sum.reassembled, sum.accounted());
        sum
    }
}

fn udp(src: Ipv4Addr, ttl: u8, len: usize) -> Vec<u8> {
    let mut ip = Vec::new();
    PacketBuilder::ipv4(src.octets(), VIP.octets(), ttl)
        .udp(4000, 53)
        .write(&mut ip, &vec![7; len])
        .expect("writing to a vector succeeds");
    ip
}

/// The MTU in an ICMP error "fragmentation needed"; `None` for another frame.
fn reported(frame: &[u8]) -> Option<u16> {
    (frame[14 + 9] == 1 && frame[34..36] == [3, 4]).then(|| be16(frame, 40))
}

#[test]
fn path_mtu_learned_by_one_worker_applies_to_all_workers() {
    let mut site = Site::new(Forwarding::Tunnel, Settings::UNLIMITED);
    let request = udp(CLIENT, 64, 1300);
    // Both workers have sent packets to the server, and have stored references to its path.
    for worker in [0, 1] {
        let sent = site.send(worker, CLIENTS, &request);
        assert_eq!((sent.len(), sent[0].0), (1, SERVERS));
    }
    let tunnelled = site.send(0, CLIENTS, &request).remove(0).1;
    let mut complaint = Frame::new();
    let router = IpAddr::from([10, 1, 200, 9]);
    let kind = ErrorKind::FragmentationNeeded(1300);
    assert!(icmp::error(
        &mut complaint,
        kind,
        &tunnelled[14..],
        router,
        1
    ));
    site.send(0, SERVERS, complaint.bytes());
    for worker in [1, 0] {
        let sent = site.send(worker, CLIENTS, &request);
        assert_eq!(sent.len(), 1, "worker {worker}");
        assert_eq!(reported(&sent[0].1), Some(1280), "worker {worker}");
    }
    // There is one entry for the director about the packets that were too long.
    let noted = site.common.oversize.all();
    assert_eq!((noted.len(), noted[0].packets), (1, 2));
}

#[test]
fn icmp_errors_of_workers_share_one_limit() {
    let limits = Settings::default();
    let mut site = Site::new(Forwarding::Nat, limits);
    let answered = |site: &mut Site, client: Ipv4Addr, n: usize| {
        let sent = site.send(n % 2, CLIENTS, &udp(client, 1, 10));
        sent.iter().filter(|(_, frame)| frame[34] == 11).count()
    };
    // A single receiver gets six errors at once.
    let to_one: usize = (0..40).map(|n| answered(&mut site, CLIENT, n)).sum();
    assert_eq!(to_one, 6);
    // All receivers together get fifty errors at once.
    let to_all: usize = (0..200)
        .map(|n| {
            answered(
                &mut site,
                Ipv4Addr::from_bits(0xc612_0000 + n * 7919),
                n as usize,
            )
        })
        .sum();
    assert_eq!(to_one + to_all, limits.limits.burst as usize);
    let counters = site.counters();
    assert_eq!(counters.icmp_sent, 50);
    assert_eq!(site.common.rate_limit.suppressed(), 190);
}

#[test]
fn fragments_at_different_workers_are_reassembled() {
    let mut site = Site::new(Forwarding::Nat, Settings::UNLIMITED);
    let mut ip = udp(CLIENT, 64, 3000);
    put16(&mut ip, ipv4::field::FLAGS, 0);
    ipv4::finish_header(&mut ip);
    let cutter = Cutter::v4(&ip, 1500, None, false).expect("the datagram can be fragmented");
    let pieces: Vec<Frame> = cutter.frames().collect();
    let mut sent = Vec::new();
    for (n, piece) in pieces.iter().enumerate() {
        assert!(sent.is_empty());
        sent = site.send(n % 2, CLIENTS, piece.bytes());
    }
    assert_eq!(sent.len(), pieces.len());
    assert!(sent.iter().all(|(port, _)| *port == SERVERS));
    assert_eq!(site.common.reassembler.memory(), 0);
    let counters = site.counters();
    assert_eq!((counters.fragments, counters.reassembled), (3, 1));
}

#[test]
fn ip_identifications_of_workers_are_unique() {
    let mut site = Site::new(Forwarding::Tunnel, Settings::UNLIMITED);
    let mut request = udp(CLIENT, 64, 10);
    put16(&mut request, ipv4::field::FLAGS, 0);
    ipv4::finish_header(&mut request);
    let ids: std::collections::BTreeSet<u16> = (0..100)
        .map(|n| site.send(n % 2, CLIENTS, &request).remove(0).1)
        .map(|frame| be16(&frame[14..], ipv4::field::ID))
        .collect();
    assert_eq!(ids.len(), 100);
}
