//! The receiving end of an IPIP tunnel for kernels that have no `ipip` module.
//!
//! A raw socket of protocol 4 gets every tunnelled packet, reassembled where it came in fragments. The inner packet is
//! put into an Ethernet frame and sent into one end of a veth pair; the host receives it at the other end as if it had
//! come from a wire. Other than a TUN device this needs no `/dev/net/tun`, so it works in every user namespace.
//! `rp_filter` has to be 0 there, because the clients' addresses are not routed through the pair.

use std::io::Read;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{SockaddrLike as _, bind, setsockopt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::netns::Host;

/// The end of the pair that the packets are written to; the host receives them on [`RECEIVER`].
const SENDER: &str = "ipip0-in";
/// The end of the pair that stands in for the kernel's `tunl0`.
pub const RECEIVER: &str = "ipip0";

/// The commands that make the veth pair on a real server.
#[must_use]
pub fn setup_script() -> String {
    format!(
        "ip link add {RECEIVER} mtu 65535 type veth peer name {SENDER} mtu 65535\n\
         for i in {RECEIVER} {SENDER}; do\n\
             echo 0 > /proc/sys/net/ipv4/conf/$i/rp_filter\n\
             if [ -d /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/$i/disable_ipv6; fi\n\
             ip link set $i arp off up\n\
         done\n\
         echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter\n"
    )
}

/// Sets the pair up on the host and starts the relay there.
///
/// # Errors
///
/// When the pair cannot be made or the program cannot be found.
pub fn start(host: &Host) -> Result<crate::Proc> {
    host.sh(&setup_script())?;
    let relay = host.spawn(crate::programs::own()?, &["decap"])?;
    crate::wait_until(
        &format!("the decapsulator on {}", host.name()),
        std::time::Duration::from_secs(5),
        || relay.log().contains("ready"),
    )
    .with_context(|| relay.log())?;
    Ok(relay)
}

/// Relays until killed; the subcommand `decap`.
///
/// # Errors
///
/// Without the right to open the sockets, or without the veth pair.
pub fn run() -> Result<()> {
    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4)))
        .context("cannot open a raw socket for IPIP (CAP_NET_RAW is needed)")?;
    // Bursts of a whole window arrive faster than they are relayed. The forced size needs privileges in the initial
    // user namespace; without them the usual limit has to do.
    if setsockopt(&raw, RcvBufForce, &(16 << 20)).is_err() {
        raw.set_recv_buffer_size(4 << 20)?;
    }

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
    let mut buffer = vec![0; ETHERNET + 65_536];
    loop {
        let length = match (&raw).read(&mut buffer[ETHERNET..]) {
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("reading from the raw socket"),
        };
        if let Some(frame) = unwrap(&mut buffer[..ETHERNET + length], destination, source) {
            // A full queue drops, as it would on a wire.
            let _ = packet.send(frame);
        }
    }
}

/// Length of an Ethernet header.
const ETHERNET: usize = 14;

/// Turns `[14 bytes][outer IPv4 header][inner IPv4 packet]` into `[Ethernet header][inner IPv4 packet]`, in place: the
/// new header overwrites the end of the outer one. None if it is no IPv4 packet inside.
fn unwrap(buffer: &mut [u8], destination: [u8; 6], source: [u8; 6]) -> Option<&[u8]> {
    let outer = usize::from(buffer.get(ETHERNET)? & 0x0f) * 4;
    let inner = ETHERNET + outer;
    if outer < 20 || buffer.len() < inner + 20 || buffer[inner] >> 4 != 4 {
        return None;
    }
    let frame = &mut buffer[inner - ETHERNET..];
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&source);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outer_header_is_replaced() {
        let mut buffer = vec![0xa5; ETHERNET];
        buffer.extend([0x46; 24]);
        buffer.extend([0x45; 20]);
        buffer.extend([1, 2, 3]);
        let frame = unwrap(&mut buffer, [2; 6], [3; 6]).expect("a whole packet");
        assert_eq!(frame[..14], [2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 8, 0]);
        assert_eq!(frame.len(), 14 + 23);
        assert_eq!(frame[34..], [1, 2, 3]);
    }

    #[test]
    fn what_is_no_tunnelled_packet_is_left_out() {
        assert_eq!(unwrap(&mut [0; 14], [2; 6], [3; 6]), None);
        assert_eq!(
            unwrap(&mut [0x45; 40], [2; 6], [3; 6]),
            None,
            "too short for an inner header"
        );
        assert_eq!(
            unwrap(&mut [0x44; 80], [2; 6], [3; 6]),
            None,
            "an outer header of 16 bytes"
        );
        assert_eq!(unwrap(&mut [0x65; 80], [2; 6], [3; 6]), None, "IPv6 inside");
    }
}
