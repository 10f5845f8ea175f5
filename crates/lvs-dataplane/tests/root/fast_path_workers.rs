//! Several packet workers and the program at an interface's ingress, which looks for a connection
//! in the region of the worker that owns it.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;

use lvs_core::{
    Control, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceKey, Shard, Transport, Tuple, Verdict,
};
use lvs_dataplane::fast_path::{FastPath, FastPathError, WayOut};
use lvs_packet::steer::Steering;
use lvs_packet::wire::Mac;

const LOOPBACK: u32 = 1;
const REDIRECTED: i32 = 7;
const WORKERS: usize = 3;
/// Number of clients of each address family.
const CLIENTS: u16 = 40;

/// The addresses and ports of a service and a server, for each address family.
const ENDS: [[&str; 2]; 2] = [
    ["198.51.100.1:443", "10.0.0.1:4433"],
    ["[2001:db8::1]:443", "[fd00::1]:4433"],
];

fn addr(text: &str) -> SocketAddr {
    text.parse().expect("the address is valid")
}

/// Returns the address and port of client `n`, which are spread over all bits.
fn client(n: u16, of: [&str; 2]) -> SocketAddr {
    let [high, low] = n.wrapping_mul(0x9e37).to_be_bytes();
    let ip = match addr(of[0]) {
        SocketAddr::V4(_) => IpAddr::from([192, 0, high, low]),
        SocketAddr::V6(_) => {
            let word = u16::from_be_bytes([high, low]);
            IpAddr::from([0x2001, 0xdb8, word, 7, word ^ 0xff, 0, n, word])
        }
    };
    SocketAddr::new(ip, 1024 + n.wrapping_mul(331))
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// The sum of 16-bit words, folded to 16 bits (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2);
    let mut sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

/// A frame with a datagram of four bytes, to the MAC address of `lo`.
fn frame(src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
    let ends = [octets(src.ip()), octets(dst.ip())].concat();
    let mut frame = vec![0; 12];
    if src.is_ipv4() {
        let mut header = vec![0x45, 0, 0, 32, 0, 1, 0x40, 0, 64, 17, 0, 0];
        header.extend(&ends);
        let check = !sum(&header);
        header[10..12].copy_from_slice(&check.to_be_bytes());
        frame.extend([0x08, 0x00]);
        frame.extend(header);
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 12, 17, 64]);
        frame.extend(&ends);
    }
    // The programs update the checksum, but do not verify it.
    for word in [src.port(), dst.port(), 12, 0x1234] {
        frame.extend(word.to_be_bytes());
    }
    frame.extend([1, 2, 3, 4]);
    frame
}

/// Opens a connection in a worker's table and offloads it.
fn offload(
    kernel: &FastPath,
    control: &mut Control,
    shard: &mut Shard,
    [src, dst]: [SocketAddr; 2],
) {
    let packet = PacketMeta::new(Hook::Local, Tuple::udp(src, dst), Transport::Udp(&[]), 32);
    let now = Instant::ZERO;
    let verdict = match shard.handle_packet(&packet, now) {
        Ok(verdict) => verdict,
        Err(pending) => control.admit(shard, &packet, pending, now),
    };
    let Verdict::Forward(forward) = verdict else {
        panic!("the packet was not forwarded");
    };
    let conn = forward.conn.expect("the packet has a connection");
    let offer = shard.offer(conn).expect("the connection can be offloaded");
    let way = WayOut {
        ifindex: LOOPBACK,
        mtu: 1500,
        to: Mac([2, 0, 0, 0, 0, 1]),
        from: Mac([2, 0, 0, 0, 0, 2]),
    };
    let (hop, epoch) = (
        kernel.hop(way, now).expect("the next hop has a number"),
        kernel.epoch(),
    );
    assert!(kernel.set_server(offer.record, hop, epoch));
    assert!(shard.publish(conn, epoch, Some(hop)));
}

/// The programs and a table for each worker. Without permission for BPF, ends the test as not run,
/// or fails it for root.
fn opened(steering: &Steering) -> (FastPath, Control, Vec<Shard>) {
    let options = Options {
        max_connections: 500,
        shards: WORKERS,
        ..Options::default()
    };
    let mut control = Control::new(options);
    let kernel = match FastPath::open_with_regions(control.layout(), steering) {
        Ok(kernel) => kernel,
        Err(error @ FastPathError::Permission(_)) => {
            assert!(!lvs_sys::is_root_of_all(), "{error}");
            lvs_sys::testing::not_run(&format!("needs BPF: {error}"));
        }
        Err(error) => panic!("{error}"),
    };
    kernel.set_virtual_time(Instant::ZERO);
    for (family, [virt, server]) in [Family::V4, Family::V6].into_iter().zip(ENDS) {
        let (service, server) = (ServiceKey::udp(addr(virt)), addr(server));
        let config = ServiceConfig::new(family, "rr");
        let added = control.add_service(service, config, None);
        added.expect("the service can be added");
        let config = ServerConfig::new(1, Forwarding::Nat);
        let added = control.add_server(&service, server, &config, Instant::ZERO);
        added.expect("the server can be added");
    }
    let shard = |n| {
        control.shard_in(
            n,
            kernel
                .memory(n)
                .expect("the memory of the worker is available"),
        )
    };
    let shards = (0..WORKERS).map(|n| shard(n).expect("the shard is free"));
    let shards = shards.collect();
    (kernel, control, shards)
}

/// Whether the program at the ingress forwards a packet.
fn forwarded(kernel: &FastPath, src: SocketAddr, dst: SocketAddr) -> bool {
    let done = kernel
        .ingress()
        .test_run(LOOPBACK, &frame(src, dst), 0, false);
    done.expect("the kernel runs the program").0 == REDIRECTED
}

#[test]
fn bpf_programs_search_only_region_of_worker_selected_by_steering() {
    let workers = NonZeroUsize::new(WORKERS).expect("WORKERS is not zero");
    for by_address in [false, true] {
        let steering = Steering::new(workers, 77, by_address);
        let (kernel, mut control, mut shards) = opened(&steering);
        let mut owned = [0; WORKERS];
        for of in ENDS {
            let [virt, server] = of.map(addr);
            for n in 0..CLIENTS {
                let client = client(n, of);
                let home = steering.of_client(client.ip(), client.port());
                // Every fourth connection is at another worker than the one that its address
                // selects.
                let strays = n % 4 == 3;
                let at = (home + usize::from(strays)) % WORKERS;
                offload(&kernel, &mut control, &mut shards[at], [client, virt]);
                owned[at] += 1;
                let both = [
                    forwarded(&kernel, client, virt),
                    forwarded(&kernel, server, client),
                ];
                assert_eq!(
                    both, [!strays; 2],
                    "{client} of worker {home}, in table {at}"
                );
            }
        }
        assert!(
            owned.iter().all(|&count| count >= 5),
            "by address {by_address}: {owned:?}"
        );
    }
}
