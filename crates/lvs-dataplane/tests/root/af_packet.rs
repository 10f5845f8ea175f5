//! Packet sockets and TUN devices against a real kernel. Needs root.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::Host;
use lvs_dataplane::io::{
    BATCH, PacketIo,
    af_packet::{AfPacket, OpenError},
    tun::{HostDevice, TunError},
};
use lvs_packet::frame::Frame;
use lvs_sys::Poller;

fn frames() -> Vec<Frame> {
    (0..BATCH).map(|_| Frame::new()).collect()
}

fn open(name: &str) -> AfPacket {
    AfPacket::open(lvs_sys::if_index(name).unwrap(), name).unwrap()
}

fn open_without_ring(name: &str) -> AfPacket {
    AfPacket::open_without_ring(lvs_sys::if_index(name).unwrap(), name).unwrap()
}

/// Opens a packet socket with a separate queue for SYNs.
fn open_two_queues(name: &str) -> AfPacket {
    let packets = AfPacket::open_with(lvs_sys::if_index(name).unwrap(), name, None, None).unwrap();
    assert!(
        packets.other_fd().is_some(),
        "SYNs have no queue of their own (this needs Linux 6.0 or newer)"
    );
    packets
}

/// A host that passes every frame between its interfaces `a` and `b`.
struct Wire {
    stop: Arc<AtomicBool>,
    longest: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<(AfPacket, AfPacket)>>,
}

impl Wire {
    fn new(host: &Host, open: fn(&str) -> AfPacket) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let longest = Arc::new(AtomicUsize::new(0));
        let (stopped, longest_seen) = (Arc::clone(&stop), Arc::clone(&longest));
        let (mut a, mut b) = host.run(move || (open("wa"), open("wb")));
        let thread = thread::spawn(move || {
            let mut batch = frames();
            let mut poller = Poller::new();
            while !stopped.load(Ordering::Relaxed) {
                poller.clear();
                for io in [&a, &b] {
                    poller.add(io.fd().unwrap());
                    io.other_fd().map(|fd| poller.add(fd));
                }
                poller.wait(Some(Duration::from_millis(20))).unwrap();
                for forward in [true, false] {
                    let (from, to) = if forward {
                        (&mut a, &mut b)
                    } else {
                        (&mut b, &mut a)
                    };
                    let count = from.recv(&mut batch).unwrap();
                    for frame in &batch[..count] {
                        longest_seen.fetch_max(frame.len(), Ordering::Relaxed);
                    }
                    to.send(&mut batch[..count]);
                }
            }
            (a, b)
        });
        Self {
            stop,
            longest,
            thread: Some(thread),
        }
    }

    fn end(mut self) -> (AfPacket, AfPacket) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// Two hosts with the addresses 10.0.0.1 and 10.0.0.2, and between them a host without addresses,
/// whose interfaces are `wa` and `wb`.
fn hosts() -> (Host, Host, Host) {
    let (left, middle, right) = (Host::new(), Host::new(), Host::new());
    left.veth("wl", &middle, "wa");
    right.veth("wr", &middle, "wb");
    left.ip("addr add 10.0.0.1/24 dev wl");
    right.ip("addr add 10.0.0.2/24 dev wr");
    (left, middle, right)
}

#[test]
fn tcp_super_packets_through_packet_sockets_arrive_complete() {
    aggregates_pass(open);
}

#[test]
#[ignore = "long"]
fn tcp_super_packets_through_packet_sockets_without_ring_arrive_complete() {
    aggregates_pass(open_without_ring);
}

#[test]
#[ignore = "long"]
fn tcp_super_packets_through_packet_sockets_with_two_queues_arrive_complete() {
    aggregates_pass(open_two_queues);
}

fn aggregates_pass(open: fn(&str) -> AfPacket) {
    const LEN: usize = 256 << 20;
    let (left, middle, right) = hosts();
    // Without offloads of the other device, the kernel must segment and compute checksums when this
    // test sends.
    for offload in [true, false] {
        if !offload {
            middle.sh("ethtool -K wb tx off tso off gso off");
        }
        let wire = Wire::new(&middle, open);
        let listener = right.run(|| TcpListener::bind("10.0.0.2:5000").unwrap());
        let receiver = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buf = vec![0; 1 << 20];
            let mut position = 0;
            loop {
                let len = stream.read(&mut buf).unwrap();
                if len == 0 {
                    return position;
                }
                for byte in &buf[..len] {
                    assert_eq!(*byte, pattern(position), "byte {position}");
                    position += 1;
                }
            }
        });
        let started = Instant::now();
        left.run(|| {
            let mut stream = TcpStream::connect("10.0.0.2:5000").unwrap();
            let mut position = 0;
            let mut buf = vec![0; 1 << 20];
            while position < LEN {
                for byte in &mut buf {
                    *byte = pattern(position);
                    position += 1;
                }
                stream.write_all(&buf).unwrap();
            }
        });
        assert_eq!(receiver.join().unwrap(), LEN);
        let seconds = started.elapsed().as_secs_f64();
        let longest = wire.longest.load(Ordering::Relaxed);
        let (mut a, b) = wire.end();
        println!(
            "offload {offload}: {LEN} bytes in {seconds:.2} s (unoptimised sender and checker), longest frame {longest}, \
             {:?}, drops {}",
            b.counters(),
            a.drops()
        );
        assert!(longest > 60_000, "no super-packet was received: {longest}");
    }
}

fn pattern(position: usize) -> u8 {
    let x = position ^ position >> 8 ^ position >> 17;
    x.to_le_bytes()[0]
}

#[test]
fn echo_through_idle_packet_sockets_is_answered() {
    idle_round_trip(open);
    idle_round_trip(open_without_ring);
    idle_round_trip(open_two_queues);
}

fn idle_round_trip(open: fn(&str) -> AfPacket) {
    let (left, middle, right) = hosts();
    let wire = Wire::new(&middle, open);
    let server = right.run(|| UdpSocket::bind("10.0.0.2:7").unwrap());
    thread::spawn(move || {
        let mut buf = [0; 64];
        while let Ok((len, from)) = server.recv_from(&mut buf) {
            let _ = server.send_to(&buf[..len], from);
        }
    });
    let mut times = left.run(|| {
        let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(2)))
            .unwrap();
        socket.connect("10.0.0.2:7").unwrap();
        let mut times = Vec::new();
        let mut sent = 0;
        for number in 0..2000_u32 {
            let started = Instant::now();
            // The kernel drops packets while its queue, which all namespaces share, is full.
            let answered = (0..60).any(|_| {
                sent += 1;
                socket.send(&number.to_be_bytes()).unwrap();
                let mut answer = [0; 4];
                while socket.recv(&mut answer).is_ok() {
                    if answer == number.to_be_bytes() {
                        return true;
                    }
                }
                false
            });
            assert!(answered, "no answer to datagram {number}");
            times.push(started.elapsed());
        }
        // A frame that stays in the ring until the next one arrives would be frequent.
        assert!(
            sent <= 2020,
            "{sent} datagrams were sent until 2000 were answered"
        );
        times
    });
    times.sort();
    println!(
        "UDP round trip through an idle wire: p50 {:?}, p99 {:?}",
        times[1000], times[1980]
    );
    wire.end();
}

/// A numbered frame of length `len` to an unused group.
fn numbered(number: u32, len: usize) -> Frame {
    let mut bytes = vec![0; len];
    bytes[..6].copy_from_slice(&[0x33, 0x33, 0x0a, 0, 0, 1]);
    bytes[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 0x88, 0xb5]);
    bytes[14..18].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in bytes[18..].iter_mut().enumerate() {
        *byte = pattern(at + number as usize);
    }
    Frame::from_bytes(&bytes)
}

/// The number in a test frame, and whether the frame is unchanged; `None` for other frames.
fn number_of(frame: &Frame) -> Option<(u32, bool)> {
    let bytes = frame.bytes();
    let number = u32::from_be_bytes(bytes.get(14..18)?.try_into().unwrap());
    (bytes[12..14] == [0x88, 0xb5]).then(|| {
        let whole = numbered(number, bytes.len()).bytes() == bytes;
        (number, whole)
    })
}

#[test]
fn frames_of_all_lengths_arrive_in_order_without_loss() {
    const ALL: u32 = 30_000;
    let (left, middle, _right) = hosts();
    left.ip("link set wl mtu 9000");
    middle.ip("link set wa mtu 9000");
    for open in [
        open as fn(&str) -> AfPacket,
        open_without_ring,
        open_two_queues,
    ] {
        let mut receiver = middle.run(move || open("wa"));
        let mut sender = left.run(|| open_without_ring("wl"));
        let mut batch = frames();
        let (mut sent, mut expected) = (0, 0);
        let end = Instant::now() + Duration::from_secs(600);
        while expected < ALL {
            assert!(
                Instant::now() < end,
                "only {expected} of {ALL} frames arrived in time"
            );
            let mut some: Vec<_> = (sent..ALL.min(sent + 64))
                .map(|number| {
                    // Some frames are exactly as long as a slot can store.
                    let len = match number % 7 {
                        0..4 => 60 + number as usize % 1400,
                        4 => 1500 + number as usize % 200,
                        _ => 1600 + number as usize % 7000,
                    };
                    numbered(number, len)
                })
                .collect();
            sent += u32::try_from(some.len()).unwrap();
            assert_eq!(sender.send(&mut some), 0);
            loop {
                let count = receiver.recv(&mut batch).unwrap();
                for frame in &batch[..count] {
                    let Some((number, whole)) = number_of(frame) else {
                        continue;
                    };
                    assert_eq!((number, whole), (expected, true));
                    expected += 1;
                }
                // Frames that were sent may not have arrived yet. The kernel's queue of received
                // frames has room for 1,000.
                if sent == expected || (count == 0 && sent < expected + 500) {
                    break;
                }
            }
        }
        assert_eq!(receiver.drops(), 0);
        assert_eq!(receiver.counters(), Default::default());
    }
}

#[test]
fn full_ring_counts_losses_and_keeps_borrowed_frames() {
    let (left, middle, _right) = hosts();
    let mut receiver = middle.run(move || open("wa"));
    let mut sender = left.run(|| open_without_ring("wl"));
    let mut send = |numbers: std::ops::Range<u32>| {
        for number in numbers {
            let len = if number % 100 == 99 { 1500 } else { 60 };
            assert_eq!(sender.send(&mut [numbered(number, len)]), 0);
        }
    };
    let next = |receiver: &mut AfPacket, batch: &mut [Frame]| {
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            let count = receiver.recv(batch).unwrap();
            let found = batch[..count].iter().filter_map(number_of);
            let found: Vec<_> = found.inspect(|(_, whole)| assert!(whole)).collect();
            if !found.is_empty() {
                return found;
            }
            assert!(Instant::now() < end, "no frame arrived in time");
        }
    };
    let mut kept = frames();
    send(0..64);
    let first = next(&mut receiver, &mut kept[..32]);
    assert_eq!(first[0].0, 0);
    assert!(
        kept[0].slot().is_some(),
        "the frame is not in a slot of the ring"
    );
    // More than the number of slots in the ring, while some of the first slots are still lent.
    const FLOOD: u32 = 20_000;
    send(64..FLOOD);
    let mut batch = frames();
    let mut last = u32::try_from(first.len()).unwrap() - 1;
    let mut came = last + 1;
    let deadline = Instant::now() + Duration::from_secs(120);
    while came < 8000 {
        assert!(
            Instant::now() < deadline,
            "only {came} frames arrived in time"
        );
        for (number, _) in next(&mut receiver, &mut batch) {
            assert!(number > last, "frame {number} arrived after frame {last}");
            (last, came) = (number, came + 1);
        }
    }
    let lost = receiver.drops();
    assert!(lost > 5000, "only {lost} frames were lost; {came} arrived");
    // The host sends frames of its own, too.
    let still: Vec<_> = kept[..32].iter().filter_map(number_of).collect();
    assert_eq!(still, first, "lent frames were overwritten");
    drop(kept);
    while receiver.recv(&mut batch).unwrap() > 0 {}
    drop(batch);
    let mut batch = frames();
    // First receive a full batch, then smaller ones, which leave the rest of the batch unused.
    send(FLOOD - 64..FLOOD);
    let mut came = FLOOD - 64;
    while came < FLOOD {
        for (number, _) in next(&mut receiver, &mut batch) {
            assert_eq!(number, came);
            came += 1;
        }
    }
    // The ring continues at its previous position, and wraps around.
    for start in (FLOOD..FLOOD + 20_000).step_by(50) {
        send(start..start + 50);
        let mut came = start;
        while came < start + 50 {
            for (number, _) in next(&mut receiver, &mut batch) {
                assert_eq!(number, came);
                came += 1;
            }
        }
    }
    assert_eq!(receiver.drops(), lost);
}

/// Frames that are longer than a slot of the ring wait in the socket's buffer.
#[test]
fn long_frames_are_queued_up_to_socket_limit_and_further_frames_are_counted_as_dropped() {
    let (left, middle, _right) = hosts();
    left.ip("link set wl mtu 9000");
    middle.ip("link set wa mtu 9000");
    let mut receiver = middle.run(|| open("wa"));
    let mut sender = left.run(|| open_without_ring("wl"));
    // Less than the number of slots in the ring.
    const ALL: u64 = 7000;
    const LEN: u64 = 9000;
    for number in 0..7000 {
        assert_eq!(sender.send(&mut [numbered(number, 9000)]), 0);
    }
    let mut batch = frames();
    let mut came = 0;
    let end = Instant::now() + Duration::from_secs(120);
    while came + receiver.drops() < ALL {
        assert!(Instant::now() < end, "only {came} frames arrived in time");
        let count = receiver.recv(&mut batch).unwrap();
        for (_, whole) in batch[..count].iter().filter_map(number_of) {
            assert!(whole);
            came += 1;
        }
    }
    let lost = receiver.drops();
    assert_eq!(came + lost, ALL);
    // The kernel counts the memory that it has allocated for a frame, and doubles the requested
    // size.
    let bytes = came * LEN;
    assert!(
        (8 << 20..=32 << 20).contains(&bytes),
        "the socket has queued {came} frames: not between 8 and 32 MiB"
    );
    for number in 0..20 {
        assert_eq!(sender.send(&mut [numbered(number, 9000)]), 0);
    }
    let mut next = 0;
    while next < 20 {
        assert!(Instant::now() < end, "only {next} frames arrived in time");
        let count = receiver.recv(&mut batch).unwrap();
        for found in batch[..count].iter().filter_map(number_of) {
            assert_eq!(found, (next, true));
            next += 1;
        }
    }
    assert_eq!(receiver.drops(), lost);
}

/// A numbered TCP segment with these flags and `data` bytes.
fn segment(number: u32, v6: bool, flags: u8, data: usize) -> Frame {
    let mut bytes = vec![0x33, 0x33, 0x0a, 0, 0, 1, 2, 0, 0, 0, 0, 9];
    let len = u16::try_from(20 + data).unwrap();
    if v6 {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend(len.to_be_bytes());
        bytes.extend([6, 64]);
        bytes.extend([0xfd; 32]);
    } else {
        // Every third segment has an option.
        let options = if number.is_multiple_of(3) { 4 } else { 0 };
        bytes.extend([8, 0, 0x45 + options / 4, 0]);
        bytes.extend((20 + u16::from(options) + len).to_be_bytes());
        bytes.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2]);
        bytes.extend([1, 1, 1, 0].iter().take(options.into()));
    }
    bytes.extend([0x10, 0, 0, 80]);
    bytes.extend(number.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    bytes.extend((0..data).map(pattern));
    bytes.resize(bytes.len().max(60), 0);
    Frame::from_bytes(&bytes)
}

/// Returns the sequence number and flags of a segment of this test; `None` for other frames.
fn number_of_segment(frame: &Frame) -> Option<(u32, u8)> {
    let bytes = frame.bytes();
    let at = match bytes.get(12..15)? {
        [8, 0, first] => 14 + usize::from(first & 15) * 4,
        [0x86, 0xdd, _] => 54,
        _ => return None,
    };
    let tcp = bytes
        .get(at..at + 20)
        .filter(|_| bytes[..6] == [0x33, 0x33, 0x0a, 0, 0, 1])?;
    let number = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
    Some((number, tcp[13]))
}

const SYN: u8 = 2;
const ACK: u8 = 16;
const FIN: u8 = 1;

#[test]
fn interfaces_that_share_a_batch_allocate_no_buffers() {
    const MARK: [u8; 8] = *b"the same";
    let (left, middle, right) = hosts();
    left.ip("link set wl mtu 9000");
    middle.sh("ip link set wa mtu 9000; ip link set wb mtu 9000");
    right.ip("link set wr mtu 9000");
    let (mut short, mut long) = middle.run(|| (open("wa"), open("wb")));
    let mut near = left.run(|| open_without_ring("wl"));
    let mut far = right.run(|| open_without_ring("wr"));
    let mut batch: Vec<_> = (0..2 * BATCH).map(|_| Frame::new()).collect();
    let mut unmarked = 0;
    for round in 0..40 {
        for (sender, receiver, len) in [(&mut near, &mut short, 60), (&mut far, &mut long, 5000)] {
            // The counts differ, so that each position of the batch contains frames of both kinds
            // in turn.
            let count = 1 + pattern(round * len) as usize % (BATCH - 1);
            let mut some: Vec<_> = (0..count).map(|_| numbered(7, len)).collect();
            assert_eq!(sender.send(&mut some), 0);
            let end = Instant::now() + Duration::from_secs(120);
            let mut came = 0;
            while came < count {
                assert!(
                    Instant::now() < end,
                    "only {came} of {count} frames arrived in time"
                );
                let received = receiver.recv(&mut batch).unwrap();
                came += batch[..received].iter().filter(|f| f.len() == len).count();
                // The packet path does the same with lent frames.
                for frame in batch.iter_mut().filter(|frame| frame.slot().is_some()) {
                    drop(frame.take());
                }
                for frame in batch.iter_mut().filter(|frame| frame.capacity() > 60_000) {
                    let buffer = frame.receive_buffer();
                    let mark = buffer.len() - MARK.len();
                    if round >= 10 && buffer[mark..] != MARK {
                        unmarked += 1;
                    }
                    buffer[mark..].copy_from_slice(&MARK);
                }
            }
        }
    }
    assert_eq!(
        unmarked, 0,
        "buffers were allocated although enough existed"
    );
}

#[test]
fn syn_flood_displaces_no_other_packets() {
    let (left, middle, _right) = hosts();
    let mut receiver = middle.run(|| open_two_queues("wa"));
    let mut sender = left.run(|| open_without_ring("wl"));
    const ALL: u32 = 60_000;
    for start in (0..ALL).step_by(60) {
        let mut some: Vec<_> = (start..start + 60)
            .map(|number| match number % 10 {
                9 => segment(number, number % 4 == 1, SYN | ACK, 100),
                8 => segment(number, true, SYN, 0),
                7 => segment(number, number % 4 == 1, SYN | FIN, 0),
                _ => segment(number, false, SYN, 0),
            })
            .collect();
        assert_eq!(sender.send(&mut some), 0);
    }
    let mut batch = frames();
    let (mut syns, mut others, mut last_syn) = (0, 0, None);
    let end = Instant::now() + Duration::from_secs(120);
    // Frames that were sent may not have arrived yet.
    while others < ALL / 10 {
        assert!(
            Instant::now() < end,
            "only {others} frames with ACK arrived in time"
        );
        let count = receiver.recv(&mut batch).unwrap();
        for (number, flags) in batch[..count].iter().filter_map(number_of_segment) {
            if flags & ACK == 0 {
                assert!(last_syn < Some(number));
                (syns, last_syn) = (syns + 1, Some(number));
            } else {
                assert_eq!(number, others * 10 + 9);
                others += 1;
            }
        }
    }
    while let count @ 1.. = receiver.recv(&mut batch).unwrap() {
        let came = batch[..count].iter().filter_map(number_of_segment);
        syns += came.filter(|&(_, flags)| flags & ACK == 0).count() as u64;
    }
    let lost = receiver.drops();
    assert!(syns >= 16_384, "{syns}");
    assert_eq!(syns + lost, u64::from(ALL / 10 * 9));
}

#[test]
fn syn_is_received_after_all_earlier_packets() {
    let (left, middle, _right) = hosts();
    let mut receiver = middle.run(|| open_two_queues("wa"));
    let mut sender = left.run(|| open_without_ring("wl"));
    // Neither queue receives frames that the host itself sends.
    let mut host = middle.run(|| open_without_ring("wa"));
    let sending = thread::spawn(move || {
        for start in (0..50_000).step_by(8) {
            let mut some: Vec<_> = (start..start + 8)
                .map(|number| match pattern(number as usize * 31) % 4 {
                    0 => segment(number, false, SYN, 0),
                    1 => segment(number, true, SYN, 0),
                    // With data, the segment is longer than a slot, as with TCP Fast Open.
                    2 if number % 16 == 2 => segment(number, number % 32 == 2, SYN, 1200),
                    _ => segment(number, number % 2 == 0, ACK, number as usize % 1000),
                })
                .collect();
            assert_eq!(sender.send(&mut some), 0);
            let mut own = [
                segment(1 << 20, false, SYN, 0),
                segment(1 << 20, false, ACK, 0),
            ];
            assert_eq!(host.send(&mut own), 0);
            thread::sleep(Duration::from_micros(u64::from(
                pattern(start as usize) % 64,
            )));
        }
    });
    let mut batch = frames();
    let mut came = vec![false; 50_000];
    let (mut last_syn, mut last_other, mut count) = (None, None, 0);
    let end = Instant::now() + Duration::from_secs(600);
    while count < 50_000 {
        assert!(Instant::now() < end, "only {count} frames arrived in time");
        let received = receiver.recv(&mut batch).unwrap();
        for frame in &batch[..received] {
            let Some((number, flags)) = number_of_segment(frame) else {
                continue;
            };
            assert!(number < 50_000, "a frame of this host was received");
            let last = if flags == SYN {
                &mut last_syn
            } else {
                &mut last_other
            };
            assert!(*last < Some(number));
            *last = Some(number);
            came[number as usize] = true;
            count += 1;
            if flags == SYN {
                let before = &came[(number as usize).saturating_sub(1000)..number as usize];
                let missing = before.iter().rposition(|came| !came);
                assert_eq!(
                    missing, None,
                    "the SYN {number} was received before an earlier packet"
                );
            }
        }
    }
    sending.join().unwrap();
    assert_eq!(receiver.drops(), 0);
}

/// In a ring, the kernel cannot describe a guest's datagram that the host must fragment
/// (`VIRTIO_NET_HDR_GSO_UDP`), and drops it.
#[test]
fn ring_that_stops_at_unsupported_frame_is_replaced_and_full_ring_stays_open() {
    let host = Host::new();
    let guest = host.run(|| lvs_sys::TunDevice::create_tap("guest").unwrap());
    host.ip("link set guest up");
    let mut receiver = host.run(|| open("guest"));
    let write = |header: [u8; 10], frame: &Frame| {
        let end = Instant::now() + Duration::from_secs(120);
        while let Err(error) = guest.write(&header, frame.bytes()) {
            assert!(Instant::now() < end, "{error}");
        }
    };
    // A datagram of 3,000 bytes with an unfinished checksum, to be fragmented at 1,480 bytes.
    let mut whole = vec![0; 14 + 20 + 8 + 3000];
    whole[..6].fill(0xff);
    whole[12..14].copy_from_slice(&[0x08, 0x00]);
    whole[14..34].copy_from_slice(&[
        0x45, 0, 0x0b, 0xd4, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
    ]);
    whole[34..42].copy_from_slice(&[0x12, 0x34, 0x56, 0x78, 0x0b, 0xc0, 0, 0]);
    let mut ufo = [0; 10];
    (ufo[0], ufo[1]) = (1, 3);
    ufo[2..4].copy_from_slice(&42_u16.to_ne_bytes());
    ufo[4..6].copy_from_slice(&1480_u16.to_ne_bytes());
    ufo[6..8].copy_from_slice(&34_u16.to_ne_bytes());
    ufo[8..10].copy_from_slice(&6_u16.to_ne_bytes());
    let mut batch = frames();
    let mut gave_up = 0;
    for round in 0..20 {
        write(ufo, &Frame::from_bytes(&whole));
        let end = Instant::now() + Duration::from_secs(120);
        'came: loop {
            // The frames in the ring were lost when it was closed.
            write([0; 10], &numbered(round, 60));
            let count = receiver.recv(&mut batch).unwrap();
            for frame in &batch[..count] {
                if number_of(frame) == Some((round, true)) {
                    break 'came;
                }
            }
            assert!(
                Instant::now() < end,
                "no frame arrives, {} were lost",
                receiver.drops()
            );
            if count == 0 {
                gave_up += u32::from(receiver.keep());
            }
        }
    }
    // A corrected kernel keeps its ring.
    assert!(gave_up <= 1 && receiver.drops() >= 20);
    // A ring that is only full stays open.
    let (left, middle, _right) = hosts();
    let mut receiver = middle.run(|| open("wa"));
    let mut sender = left.run(|| open_without_ring("wl"));
    for number in 0..10_000 {
        sender.send(&mut [numbered(number, 60)]);
    }
    assert!(receiver.drops() > 0 && !receiver.keep());
    while receiver.recv(&mut batch).unwrap() > 0 {}
    assert!(!receiver.keep() && !receiver.keep());
}

#[test]
fn packet_socket_with_refused_ring_receives_by_system_calls() {
    const PACKET_VNET_HDR: i32 = 15;
    let (left, middle, _right) = hosts();
    let mut sender = left.run(|| open_without_ring("wl"));
    for (slots, len) in [
        (0, 1728),
        (8, 0),
        (8, 24),
        (usize::MAX, 1728),
        (1 << 30, 1 << 16),
    ] {
        let socket = middle.run(move || {
            let socket = lvs_sys::PacketSocket::new().unwrap();
            socket.set_packet_option(PACKET_VNET_HDR, 1).unwrap();
            let ring = lvs_sys::PacketRing::new(&socket, slots, len, 0);
            assert!(
                ring.is_err(),
                "a ring of {slots} slots of {len} bytes was accepted: {ring:?}"
            );
            socket.bind(lvs_sys::if_index("wa").unwrap()).unwrap();
            socket
        });
        assert_eq!(sender.send(&mut [numbered(1, 60)]), 0);
        let mut poller = Poller::new();
        poller.add(socket.as_fd());
        poller.wait(Some(Duration::from_secs(120))).unwrap();
        let mut batch = lvs_sys::MessageBatch::new(1);
        let mut buffer = [0; 2048];
        let buffers = [&mut buffer[..]].into_iter();
        assert_eq!(batch.receive(socket.as_fd(), buffers).unwrap(), 1);
    }
}

#[test]
fn packet_socket_reports_down_interface_until_up_and_removed_interface() {
    down_and_away(open);
    down_and_away(open_without_ring);
    down_and_away(open_two_queues);
}

fn down_and_away(open: fn(&str) -> AfPacket) {
    let (left, middle, _right) = hosts();
    let mut packets = middle.run(move || open("wa"));
    let mut batch = frames();
    let mut until = |packets: &mut AfPacket, kind: ErrorKind| {
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            match packets.recv(&mut batch) {
                Err(err) if err.kind() == kind => return,
                Err(err) => panic!("{err}"),
                Ok(_) => assert!(Instant::now() < end, "{kind:?} was not reported in time"),
            }
        }
    };
    middle.ip("link set wa down");
    until(&mut packets, ErrorKind::NetworkDown);
    let mut one = [Frame::from_bytes(&[0xff; 60])];
    assert_eq!(packets.send(&mut one), 1);
    assert_eq!(packets.counters().send_down, 1);
    // The same socket continues when the interface comes up.
    middle.ip("link set wa up");
    let end = Instant::now() + Duration::from_secs(120);
    while packets.send(&mut one) != 0 {
        assert!(
            Instant::now() < end,
            "frames are still refused on the interface, which is up again"
        );
    }
    let mut long = [Frame::from_bytes(&[0xff; 9000])];
    assert_eq!(packets.send(&mut long), 1);
    assert_eq!(packets.counters().send_too_long, 1);
    left.ip("link delete wl");
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        match packets.recv(&mut frames()) {
            Err(err) if err.kind() == ErrorKind::NotFound => break,
            Err(err) => assert_eq!(err.kind(), ErrorKind::NetworkDown),
            Ok(_) => assert!(
                Instant::now() < end,
                "the removal of the interface was not reported in time"
            ),
        }
    }
    assert_eq!(packets.send(&mut one), 1);
    // A new interface of this name is opened, too.
    left.veth("wl", &middle, "wa");
    middle.run(move || open("wa"));
    let gone = middle.run(|| AfPacket::open(9999, "ghost"));
    assert!(
        matches!(gone, Err(OpenError::NoInterface { .. })),
        "{gone:?}"
    );
}

/// The checksum of RFC 1071: the complement of the one's complement sum.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap()
}

#[test]
fn host_device_reinjects_and_receives_packets_and_restores_rp_filter() {
    let host = Host::new();
    // Reverse-path filtering is strict on all interfaces, as in some distributions, and the client
    // is behind another interface.
    let other = Host::new();
    host.veth("e0", &other, "o0");
    host.sh(
        "sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.e0.rp_filter=2
         ip addr add 10.0.0.1/24 dev e0",
    );
    let filters = || {
        host.sh("sysctl -n net.ipv4.conf.all.rp_filter net.ipv4.conf.e0.rp_filter net.ipv4.conf.lo.rp_filter")
    };
    let before = filters();
    let mut device = host.run(|| HostDevice::create().unwrap());
    let second = host.run(HostDevice::create);
    assert!(matches!(second, Err(TunError::Exists { .. })), "{second:?}");
    assert_eq!(filters(), "0\n2\n1\n");
    let about = host.sh("ip addr show lvs-host0");
    assert!(
        about.contains("mtu 65535") && about.contains(",UP"),
        "{about}"
    );
    assert!(!about.contains("inet"), "{about}");

    let socket = host.run(|| UdpSocket::bind("10.0.0.1:4000").unwrap());
    socket
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    let mut packet = vec![
        0x45, 0, 0, 33, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 77, 10, 0, 0, 1, 0x10, 0, 0x0f,
        0xa0, 0, 13, 0, 0,
    ];
    let sum = checksum(&packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(b"hello");
    assert_eq!(device.send(&mut [Frame::from_bytes(&packet)]), 0);
    let mut buf = [0; 64];
    let (len, from) = socket.recv_from(&mut buf).unwrap();
    assert_eq!(
        (&buf[..len], from.to_string()),
        (&b"hello"[..], "10.0.0.77:4096".to_owned())
    );

    // A packet that the host routes to the device is received from it.
    host.ip("route add 192.0.2.1/32 dev lvs-host0");
    host.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.send_to(b"to a VIP", "192.0.2.1:53").unwrap();
    });
    let mut batch = frames();
    let mut poller = Poller::new();
    poller.add(device.fd().unwrap());
    poller.wait(Some(Duration::from_secs(120))).unwrap();
    assert_eq!(device.recv(&mut batch).unwrap(), 1);
    assert!(batch[0].bytes().ends_with(b"to a VIP"));
    assert_eq!(&batch[0].bytes()[16..20], [192, 0, 2, 1]);

    // The settings are read in the namespace of the thread that drops the device.
    host.run(move || drop(device));
    assert_eq!(filters(), before);
    assert!(!host.sh("ip -br link").contains("lvs-host0"));
}
