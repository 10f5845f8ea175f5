//! GSO super-packets of datagrams at an interface's ingress: the program forwards some as a whole,
//! and passes the others to the dataplane.

use lvs_core::{
    Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceKey, Transport, Tuple, Verdict,
};
use lvs_dataplane::fast_path::{FastPath, FastPathError, WayOut};
use lvs_packet::wire::Mac;

const LOOPBACK: u32 = 1;
const REDIRECTED: i32 = 7;
const MTU: u32 = 1500;

/// The sum of 16-bit words, folded to 16 bits (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

/// The sum over a datagram and its pseudo-header: 0xffff if the checksum is correct.
fn sum_of_udp(packet: &[u8]) -> u16 {
    let length = u16::try_from(packet.len() - 20).unwrap_or(0).to_be_bytes();
    let mut all = packet[12..20].to_vec();
    all.extend([0, 17, length[0], length[1]]);
    all.extend(&packet[20..]);
    sum(&all)
}

/// A frame with a datagram of `data` bytes from the client to the service.
fn frame(data: usize) -> Vec<u8> {
    let (ip, udp) = (28 + data, 8 + data);
    let word = |n: usize| u16::try_from(n).unwrap_or(0).to_be_bytes();
    let mut packet = vec![0x45, 0];
    packet.extend(word(ip));
    packet.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 1]);
    let check = !sum(&packet);
    packet[10..12].copy_from_slice(&check.to_be_bytes());
    packet.extend(word(1000));
    packet.extend(word(443));
    packet.extend(word(udp));
    packet.extend([0, 0]);
    packet.extend((0..data).map(|n| u8::try_from(n % 251).unwrap_or(0)));
    let check = !sum_of_udp(&packet);
    packet[26..28].copy_from_slice(&check.to_be_bytes());
    // Both MAC addresses are 0, as on `lo`.
    let mut frame = vec![0; 12];
    frame.extend([8, 0]);
    frame.extend(packet);
    frame
}

/// The kernel fast path, and a director with an offloaded connection. Without permission for BPF,
/// ends the test as not run, or fails it for root.
fn published(method: Forwarding) -> (FastPath, Director) {
    let options = Options {
        max_connections: 1000,
        ..Options::default()
    };
    let mut opened = None;
    let mut director = Director::new_in(options, |layout| {
        let kernel = FastPath::open(layout, Instant::ZERO);
        let memory = kernel.as_ref().map(|kernel| {
            kernel
                .memory(0)
                .expect("the memory of the worker is available")
        });
        let memory = memory.unwrap_or_else(|_| lvs_core::memory::Memory::heap(layout));
        opened = Some(kernel);
        memory
    });
    let kernel = match opened.expect("the director has requested its memory") {
        Ok(kernel) => kernel,
        Err(error @ FastPathError::Permission(_)) => {
            assert!(!lvs_sys::is_root_of_all(), "{error}");
            lvs_sys::testing::not_run(&format!("needs BPF: {error}"));
        }
        Err(error) => panic!("{error}"),
    };
    let virt = "198.51.100.1:443".parse().expect("the address is valid");
    let service = ServiceKey::udp(virt);
    let control = &mut director.control;
    let config = ServiceConfig::new(Family::V4, "rr");
    control
        .add_service(service, config, None)
        .expect("the service can be added");
    let config = ServerConfig::new(1, method);
    let server = "10.0.0.1:4433".parse().expect("the address is valid");
    let server = control.add_server(&service, server, &config, Instant::ZERO);
    server.expect("the server can be added");
    let meta = PacketMeta::new(
        Hook::Local,
        Tuple::udp(
            "192.0.2.1:1000".parse().expect("the address is valid"),
            virt,
        ),
        Transport::Udp(&[]),
        28,
    );
    let Verdict::Forward(forward) = director.handle_packet(&meta, Instant::ZERO) else {
        panic!("the packet was not forwarded");
    };
    let conn = forward.conn.expect("the packet has a connection");
    let offer = director
        .shard
        .offer(conn)
        .expect("the connection can be offloaded");
    let way = WayOut {
        ifindex: LOOPBACK,
        mtu: MTU,
        to: Mac([2, 0, 0, 0, 0, 1]),
        from: Mac([2, 0, 0, 0, 0, 2]),
    };
    let hop = kernel
        .hop(way, Instant::ZERO)
        .expect("the next hop has a number");
    let epoch = kernel.epoch();
    assert!(kernel.set_server(offer.record, hop, epoch));
    assert!(director.shard.publish(conn, epoch, Some(hop)));
    (kernel, director)
}

#[test]
fn udp_super_packets_are_forwarded_whole_or_passed_unchanged_to_dataplane() {
    let (kernel, _director) = published(Forwarding::Nat);
    let run = |data: usize, segment: u32| {
        let sent = frame(data);
        assert_eq!(sum_of_udp(&sent[14..]), 0xffff);
        let done = kernel.ingress().test_run(LOOPBACK, &sent, segment, false);
        let (verdict, out) = done.expect("the kernel runs the program");
        if verdict != REDIRECTED {
            assert_eq!(
                out, sent,
                "a packet that was passed to the dataplane was changed"
            );
            return None;
        }
        Some(out)
    };
    for (data, segment) in [(100, 0), (2800, 1400), (2600, 600)] {
        let out = run(data, segment).unwrap_or_else(|| {
            panic!("{data} bytes in segments of {segment} were not forwarded");
        });
        let packet = &out[14..];
        assert_eq!(packet.len(), 28 + data);
        assert_eq!(&out[..12], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
        assert_eq!((packet[8], &packet[16..20]), (63, &[10, 0, 0, 1][..]));
        assert_eq!(&packet[22..24], 4433_u16.to_be_bytes());
        assert_eq!((sum(&packet[..20]), sum_of_udp(packet)), (0xffff, 0xffff));
    }
    // A super-packet that does not fit, and one of few bytes, are not forwarded either.
    assert!(run(2800, 0).is_none());
    assert!(run(2800, 1473).is_none());
    assert!(run(2800, 100).is_none());
    let shares = kernel.shares();
    assert_eq!((shares.requests, shares.unfit), (3, 0), "{shares:?}");
}
