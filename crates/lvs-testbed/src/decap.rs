//! The receiving end of tunnels, for kernels without the modules `ipip`, `sit`, `gre` and `fou`.
//!
//! Raw sockets receive tunnel packets, reassembled: IPIP (protocol 4), IPv6 in IP (41), GRE (47),
//! over IPv4 and IPv6. UDP sockets receive GUE, so that the kernel checks its checksum; a raw
//! socket receives GUE over IPv6 without a checksum, which UDP sockets refuse. The relay writes the
//! inner packet as an Ethernet frame to one end of a veth pair, and the host receives it at the
//! other end. Unlike a TUN device, a veth pair works in every user namespace. `rp_filter` must be 0
//! on the pair, because the clients' addresses are not routed through it.

use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{SockaddrLike as _, bind, setsockopt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Host;

/// The end of the veth pair to which the relay writes; the host receives on [`RECEIVER`].
const SENDER: &str = "ipip0-in";
/// The end of the veth pair that replaces the kernel's `tunl0`.
pub const RECEIVER: &str = "ipip0";

/// The commands that create the veth pair on a real server.
#[must_use]
pub fn setup_script() -> String {
    format!(
        "ip link add {RECEIVER} mtu 65535 type veth peer name {SENDER} mtu 65535\n\
         for i in {RECEIVER} {SENDER}; do\n\
             echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter\n\
             if [ -d /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/$i/addr_gen_mode; fi\n\
             ip link set $i arp off up\n\
         done\n\
         echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter\n"
    )
}

/// Creates the veth pair on the host, and starts the relay there.
///
/// # Errors
///
/// The pair cannot be created, the program is missing, or the relay is not ready in time.
pub fn start(host: &Host) -> Result<crate::Proc> {
    host.sh(&setup_script())?;
    let relay = host.spawn(crate::programs::own()?, &["decap"])?;
    crate::wait_until(
        &format!("the decapsulator on {} to be ready", host.name()),
        std::time::Duration::from_secs(5),
        || relay.log().contains("ready"),
    )
    .with_context(|| relay.log())?;
    Ok(relay)
}

/// Runs `lvs-testbed decap`: relays until the process is killed.
///
/// # Errors
///
/// The veth pair does not exist, a socket cannot be opened, or a packet cannot be read.
pub fn run() -> Result<()> {
    let mut sources = Vec::new();
    for domain in [Domain::IPV4, Domain::IPV6] {
        for protocol in [IPV4, IPV6, GRE] {
            sources.push((raw(domain, protocol)?, Source { domain, protocol }));
        }
        sources.push((
            gue(domain)?,
            Source {
                domain,
                protocol: GUE,
            },
        ));
    }
    sources.push((
        raw(Domain::IPV6, UDP)?,
        Source {
            domain: Domain::IPV6,
            protocol: UDP,
        },
    ));

    let packet =
        Socket::new(Domain::PACKET, Type::RAW, None).context("cannot open a packet socket")?;
    let mut address = None;
    let mut destination = None;
    for interface in nix::ifaddrs::getifaddrs()? {
        let Some(link) = interface
            .address
            .as_ref()
            .and_then(|address| address.as_link_addr().copied())
        else {
            continue;
        };
        if interface.interface_name == SENDER {
            address = Some(link);
        } else if interface.interface_name == RECEIVER {
            destination = link.addr();
        }
    }
    let (Some(address), Some(destination)) = (address, destination) else {
        bail!("the devices {SENDER} and {RECEIVER} are missing; make them as a veth pair first");
    };
    ensure!(address.len() > 0, "{SENDER} has no link-layer address");
    bind(packet.as_raw_fd(), &address).with_context(|| format!("cannot bind to {SENDER}"))?;
    let source = address.addr().unwrap_or_default();

    eprintln!("ready");
    let (packet, sent) = (&packet, &(destination, source));
    std::thread::scope(|scope| {
        let threads: Vec<_> = sources
            .into_iter()
            .map(|(socket, from)| scope.spawn(move || relay(&socket, from, packet, *sent)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| bail!("a thread of the relay panicked"))
        })
    })
}

const IPV4: i32 = 4;
const UDP: i32 = 17;
const IPV6: i32 = 41;
const GRE: i32 = 47;
/// The value of [`Source::protocol`] for GUE, which is no IP protocol: a UDP socket receives it.
const GUE: i32 = 0;
/// The port on which GUE is accepted.
pub const GUE_PORT: u16 = 6080;

/// Kind of the received packets, and the headers that precede their inner packets.
#[derive(Clone, Copy, Debug)]
struct Source {
    domain: Domain,
    protocol: i32,
}

fn raw(domain: Domain, protocol: i32) -> Result<Socket> {
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(protocol)))
        .context("cannot open a raw socket (CAP_NET_RAW is needed)")?;
    grow(&socket)?;
    Ok(socket)
}

fn gue(domain: Domain) -> Result<Socket> {
    let socket = Socket::new(domain, Type::DGRAM, None)?;
    let any = if domain == Domain::IPV6 {
        socket.set_only_v6(true)?;
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, GUE_PORT))
    } else {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, GUE_PORT))
    };
    socket
        .bind(&any.into())
        .with_context(|| format!("cannot bind port {GUE_PORT} for GUE"))?;
    grow(&socket)?;
    Ok(socket)
}

/// Enlarges the receive buffer of a socket for bursts: to 16 MiB, or to at most 4 MiB without
/// privileges in the initial user namespace.
fn grow(socket: &Socket) -> Result<()> {
    if setsockopt(socket, RcvBufForce, &(16 << 20)).is_err() {
        socket.set_recv_buffer_size(4 << 20)?;
    }
    Ok(())
}

fn relay(
    socket: &Socket,
    from: Source,
    packet: &Socket,
    (destination, source): ([u8; 6], [u8; 6]),
) -> Result<()> {
    let mut socket = socket;
    let mut buffer = vec![0; ETHERNET + 65_536];
    loop {
        let length = match socket.read(&mut buffer[ETHERNET..]) {
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot read the packets of a tunnel"),
        };
        if let Some(frame) = unwrap(&mut buffer[..ETHERNET + length], from, destination, source) {
            // A full queue drops packets, as a link does.
            let _ = packet.send(frame);
        }
    }
}

const ETHERNET: usize = 14;

/// Replaces the headers before the inner packet by an Ethernet header, in place. The packet begins
/// at byte 14 of `buffer`. `None` if the headers are invalid, or the inner packet is too short or
/// has another IP version.
fn unwrap(buffer: &mut [u8], from: Source, destination: [u8; 6], source: [u8; 6]) -> Option<&[u8]> {
    let received = buffer.get(ETHERNET..)?;
    // An IPv4 raw socket also returns the IP header.
    let header = if from.domain == Domain::IPV4 && from.protocol != GUE {
        let len = usize::from(received.first()? & 0x0f) * 4;
        if len < 20 {
            return None;
        }
        len
    } else {
        0
    };
    let payload = received.get(header..)?;
    let (version, between) = match from.protocol {
        IPV4 => (4, 0),
        IPV6 => (6, 0),
        GRE => gre_header(payload)?,
        GUE => gue_header(payload)?,
        // The UDP socket receives packets with a checksum.
        _ if payload.get(2..4)? == GUE_PORT.to_be_bytes() && payload.get(6..8)? == [0, 0] => {
            let (version, len) = gue_header(payload.get(8..)?)?;
            (version, 8 + len)
        }
        _ => return None,
    };
    let inner = ETHERNET + header + between;
    let least = if version == 4 { 20 } else { 40 };
    if buffer.len() < inner + least || buffer[inner] >> 4 != version {
        return None;
    }
    let ethertype = if version == 4 {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    };
    let frame = &mut buffer[inner - ETHERNET..];
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&source);
    frame[12..14].copy_from_slice(&ethertype);
    Some(frame)
}

/// Returns the IP version of the packet inside a GRE packet, and the length of the GRE header.
/// `None` if the content is no IP packet, the header has another option than a checksum, or the
/// checksum is wrong.
fn gre_header(payload: &[u8]) -> Option<(u8, usize)> {
    let version = match payload.get(2..4)? {
        [0x08, 0x00] => 4,
        [0x86, 0xdd] => 6,
        _ => return None,
    };
    match payload.get(..2)? {
        [0, 0] => Some((version, 4)),
        [0x80, 0] => {
            let words = payload.chunks(2);
            let sum: u64 = words
                .map(|word| u64::from(word[0]) << 8 | word.get(1).map_or(0, |&low| u64::from(low)))
                .sum();
            // Ones' complement: a correct sum is a multiple of 2^16 - 1.
            sum.is_multiple_of(0xffff).then_some((version, 8))
        }
        _ => None,
    }
}

/// Returns the IP version of the packet inside a GUE packet, and the length of the GUE header.
/// `None` if the content is no IP packet, or the header has options.
fn gue_header(payload: &[u8]) -> Option<(u8, usize)> {
    match payload.get(..4)? {
        [0, 4, 0, 0] => Some((4, 4)),
        [0, 41, 0, 0] => Some((6, 4)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unwrapped(from: Source, headers: &[u8], first: u8) -> Option<Vec<u8>> {
        let mut buffer = vec![0xa5; ETHERNET];
        buffer.extend(headers);
        buffer.push(first);
        buffer.extend([0; 42]);
        unwrap(&mut buffer, from, [2; 6], [3; 6]).map(<[u8]>::to_vec)
    }

    const V4: Domain = Domain::IPV4;
    const V6: Domain = Domain::IPV6;

    fn source(domain: Domain, protocol: i32) -> Source {
        Source { domain, protocol }
    }

    #[test]
    fn outer_tunnel_headers_are_replaced_by_ethernet_header() {
        let four = [2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 8, 0];
        let six = [2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 0x86, 0xdd];
        let gre6 = [0, 0, 0x86, 0xdd];
        let gue = [0, 4, 0, 0];
        let udp = [[1, 1, 0x17, 0xc0, 0, 20, 0, 0].as_slice(), &gue].concat();
        for (from, headers, first, want) in [
            (source(V4, IPV4), &[0x46; 24][..], 0x45, four),
            (source(V6, IPV4), &[], 0x45, four),
            (source(V6, IPV6), &[], 0x60, six),
            (source(V6, GRE), &gre6, 0x60, six),
            (source(V4, GUE), &gue, 0x45, four),
            (source(V6, UDP), &udp, 0x45, four),
        ] {
            let frame = unwrapped(from, headers, first).expect("the packet is unpacked");
            assert_eq!(frame[..14], want, "{from:?}");
            assert_eq!(frame.len(), 14 + 43, "{from:?}");
        }
    }

    #[test]
    fn invalid_tunnel_packets_are_ignored() {
        let mut short = [0x45; 40];
        assert_eq!(unwrap(&mut short, source(V4, IPV4), [2; 6], [3; 6]), None);
        assert_eq!(unwrap(&mut [0; 14], source(V4, IPV4), [2; 6], [3; 6]), None);
        assert_eq!(
            unwrapped(source(V4, IPV4), &[0x44; 16], 0x45),
            None,
            "an IPv4 header of 16 bytes is accepted"
        );
        assert_eq!(
            unwrapped(source(V6, IPV4), &[], 0x60),
            None,
            "IPv6 inside IPIP is accepted"
        );
        let wrong = [0x80, 0, 8, 0, 0, 1, 0, 0];
        assert_eq!(
            unwrapped(source(V6, GRE), &wrong, 0x45),
            None,
            "a wrong checksum is accepted"
        );
        let port = [1, 1, 0x17, 0xc1, 0, 20, 0, 0, 0, 4, 0, 0];
        assert_eq!(
            unwrapped(source(V6, UDP), &port, 0x45),
            None,
            "a datagram to another port is accepted"
        );
    }
}
