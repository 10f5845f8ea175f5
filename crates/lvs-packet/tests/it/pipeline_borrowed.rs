//! Frames in a backend's memory are changed in place, and return to the backend, whatever their
//! fate.

use std::net::Ipv4Addr;
use std::sync::Arc;

use crate::lab::{CLIENTS, GW_MAC, Lab, SERVERS, Service, from_client};
use etherparse::PacketBuilder;
use lvs_core::{Forwarding, Protocol};
use lvs_packet::fragment::Cutter;
use lvs_packet::frame::{
    Arena, Frame, HEADROOM, MAX_FRAME, Offload, PartialChecksum, SegmentKind, Segments,
};
use lvs_packet::net::PortId;
use lvs_packet::pipeline::{Env, Output};
use lvs_packet::wire::checksum::Sum;
use lvs_packet::wire::{ETHERNET_LEN, ipv4, put16, tcp};

const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 80);

fn web(method: Forwarding) -> Lab {
    Lab::new(&[
        Service::new(method, Protocol::TCP, "10.0.0.80:80", "10.1.0.11:80"),
        Service::new(method, Protocol::UDP, "10.0.0.80:53", "10.1.0.11:53"),
    ])
}

/// A backend's ring of slots, some of which contain received frames.
struct Ring {
    arena: Arc<Arena>,
    headroom: usize,
    next: usize,
}

impl Ring {
    fn new(headroom: usize) -> Self {
        Self {
            arena: Arena::new(4, HEADROOM + MAX_FRAME).expect("memory is available"),
            headroom,
            next: 0,
        }
    }

    fn receive(&mut self, bytes: &[u8], offload: Offload) -> Frame {
        let mut slot = self.arena.lend(self.next).expect("the slot was returned");
        self.next = (self.next + 1) % self.arena.slots();
        let place = self.headroom..self.headroom + bytes.len();
        slot[place.clone()].copy_from_slice(bytes);
        Frame::lent(slot, place, offload)
    }
}

/// Sent frames: for each, the port, the bytes, and whether it is still in the slot in which it was
/// received.
type Sent = Vec<(PortId, Vec<u8>, bool)>;

fn pass(lab: &mut Lab, mut batch: Vec<Frame>, out: &mut Output) -> Sent {
    let env = Env::new(&lab.net, &lab.intercept);
    let lent = batch.iter().any(|frame| frame.slot().is_some());
    lab.pipeline
        .process(CLIENTS, &mut batch, &env, &mut lab.decide, lab.now, out);
    assert!(!lent || batch.iter().all(|frame| frame.slot().is_none()));
    let mut sent = Vec::new();
    for (port, frames) in out.queues() {
        for frame in frames {
            sent.push((port, frame.bytes().to_vec(), frame.slot().is_some()));
        }
    }
    out.recycle();
    sent
}

/// A name, frames, and the work that the device has left to the receiver.
type Case = (&'static str, Vec<Vec<u8>>, Offload);

fn segment(ttl: u8, payload: &[u8]) -> Vec<u8> {
    let mut ip = Vec::new();
    PacketBuilder::ipv4(CLIENT.octets(), VIP.octets(), ttl)
        .tcp(4000, 80, 1000, 500)
        .ack(77)
        .write(&mut ip, payload)
        .expect("writing to a vector succeeds");
    ip
}

fn fragments() -> Vec<Vec<u8>> {
    let mut ip = Vec::new();
    PacketBuilder::ipv4(CLIENT.octets(), VIP.octets(), 64)
        .udp(4000, 53)
        .write(&mut ip, &[7; 3000])
        .expect("writing to a vector succeeds");
    put16(&mut ip, ipv4::field::FLAGS, 0);
    ipv4::finish_header(&mut ip);
    let cutter = Cutter::v4(&ip, 1500, None, false).expect("the datagram can be fragmented");
    cutter
        .frames()
        .map(|piece| from_client(piece.bytes()))
        .collect()
}

fn aggregate() -> Case {
    let mut ip = segment(64, &[7; 20_000]);
    let sum = Sum::ZERO
        .pseudo(CLIENT.into(), VIP.into(), 6, ip.len() - ipv4::HEADER_LEN)
        .fold();
    put16(&mut ip, ipv4::HEADER_LEN + tcp::field::CHECKSUM.start, sum);
    let offload = Offload {
        checksum: Some(PartialChecksum {
            start: 34,
            offset: 16,
        }),
        segments: Some(Segments {
            kind: SegmentKind::Tcp4,
            size: 1400,
            header_len: 54,
            ecn: false,
        }),
        verified: false,
    };
    ("aggregate", vec![from_client(&ip)], offload)
}

fn cases() -> Vec<Case> {
    let none = Offload::default();
    let arp = lvs_packet::arp::probe(GW_MAC, VIP).as_ref().to_vec();
    vec![
        ("request", vec![from_client(&segment(64, b"GET /"))], none),
        ("to be answered", vec![from_client(&segment(1, b""))], none),
        ("fragments", fragments(), none),
        aggregate(),
        ("not for us", vec![arp], none),
        ("no packet", vec![vec![0; 9]], none),
    ]
}

/// Frames with different fates, with NAT, direct routing and tunnels, with and without headroom.
/// The sent packets equal those for frames in the pipeline's own memory, and the backend gets all
/// slots back.
#[test]
fn borrowed_and_own_frames_send_same_packets_and_all_slots_are_returned() {
    for method in [Forwarding::Nat, Forwarding::Route, Forwarding::Tunnel] {
        for headroom in [HEADROOM, 0] {
            for offloading in [true, false] {
                let mut ring = Ring::new(headroom);
                let (mut lent, mut own) = (web(method), web(method));
                let (mut lent_out, mut own_out) = (Output::new(), Output::new());
                for lab in [&mut lent, &mut own] {
                    crate::lab::set_offload(&mut lab.net, offloading);
                }
                for (name, frames, offload) in cases() {
                    let here = format!("{name}, {method:?}, {headroom} in front, {offloading}");
                    for bytes in frames {
                        let batch = vec![ring.receive(&bytes, offload)];
                        let got = pass(&mut lent, batch, &mut lent_out);
                        let mut frame = Frame::from_bytes(&bytes);
                        frame.offload = offload;
                        let want = pass(&mut own, vec![frame], &mut own_out);
                        let plain = |sent: &Sent| {
                            let plain = sent.iter().map(|(port, bytes, _)| (*port, bytes.clone()));
                            plain.collect::<Vec<_>>()
                        };
                        assert_eq!(plain(&got), plain(&want), "{here}");
                        assert_eq!(ring.arena.lent(), 0, "{here}");
                        if name == "request" {
                            let tunnel = method == Forwarding::Tunnel;
                            let in_place = headroom > 0 || !tunnel;
                            assert_eq!(got[0].2, in_place, "{here}");
                        }
                    }
                }
                let (lent, own) = (&lent.pipeline.counters, &own.pipeline.counters);
                let copied = headroom == 0 && method == Forwarding::Tunnel;
                let here = format!("{method:?}, {headroom} in front, {offloading}");
                assert_eq!((lent.copied > 0, own.copied), (copied, 0), "{here}");
                assert_eq!(
                    (lent.accounted(), lent.emitted),
                    (own.accounted(), own.emitted),
                    "{here}"
                );
            }
        }
    }
}

/// A packet that waits for a neighbour is copied, so that the backend gets its slot back.
#[test]
fn packet_that_waits_for_neighbour_keeps_no_ring_slot() {
    let mut ring = Ring::new(HEADROOM);
    let mut lab = web(Forwarding::Nat);
    lab.net.all_neighbours = None;
    let mut out = Output::new();
    let frame = ring.receive(&from_client(&segment(64, b"GET /")), Offload::default());
    assert!(pass(&mut lab, vec![frame], &mut out).is_empty());
    assert_eq!((lab.pipeline.held.len(), ring.arena.lent()), (1, 0));
}

/// The backend gets a slot back only when the frame in it has been sent.
#[test]
fn queued_frame_keeps_its_ring_slot_until_sent() {
    let mut ring = Ring::new(HEADROOM);
    let mut lab = web(Forwarding::Nat);
    let mut out = Output::new();
    let mut batch = [ring.receive(&from_client(&segment(64, b"GET /")), Offload::default())];
    let env = Env::new(&lab.net, &lab.intercept);
    lab.pipeline.process(
        CLIENTS,
        &mut batch,
        &env,
        &mut lab.decide,
        lab.now,
        &mut out,
    );
    assert!(ring.arena.lend(0).is_none());
    // The backend can pass the slot to the kernel without a copy.
    let frame = out.frames(SERVERS).first().expect("a frame was sent");
    let slot = frame.slot().expect("the frame is in its original slot");
    assert!(slot.is_of(&ring.arena));
    assert_eq!(frame.place().start, ring.headroom);
    assert_eq!(frame.len(), ETHERNET_LEN + 45);
    out.recycle();
    assert_eq!(ring.arena.lent(), 0);
}
