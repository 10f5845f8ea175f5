//! ICMP echo requests of both IP versions through a raw socket, for machines without a `ping`.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use socket2::{Domain, Protocol, Socket, Type};

/// Time limit for the reply, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time after which the request is sent again. The kernel drops packets while its queue of received
/// packets, which all network namespaces share, is full.
const AGAIN: Duration = Duration::from_secs(1);

/// Options of `lvs-testbed ping`.
#[derive(Clone, Debug, clap::Args)]
pub struct PingOptions {
    /// Address to send to
    addr: IpAddr,
    /// Payload bytes
    #[arg(long, default_value_t = 56)]
    size: u16,
}

/// Sends a request until a reply with the same bytes arrives.
///
/// # Errors
///
/// No reply arrives within 30 s, the reply has other bytes, or the kernel does not permit a raw
/// socket.
pub fn run(options: &PingOptions) -> Result<()> {
    const HEADER: usize = 8;
    let (domain, protocol, request, reply) = match options.addr {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))
        .context("cannot open a raw socket (CAP_NET_RAW is needed)")?;
    socket.connect(&SocketAddr::new(options.addr, 0).into())?;
    let [a, b] = (std::process::id() & 0xffff).to_be_bytes()[2..] else {
        bail!("the process id cannot be split into bytes");
    };
    let mut message = vec![request, 0, 0, 0, a, b, 0, 1];
    message.extend((0..options.size).map(|number| number.to_be_bytes()[1]));
    if domain == Domain::IPV4 {
        // The host fills in the checksum of ICMPv6 only.
        let sum = message.chunks(2).fold(0_u32, |sum, word| {
            sum + u32::from(word[0]) * 256 + u32::from(word.get(1).copied().unwrap_or(0))
        });
        let sum = (sum >> 16) + (sum & 0xffff);
        let sum = !(sum + (sum >> 16)) & 0xffff;
        message[2..4].copy_from_slice(&sum.to_be_bytes()[2..]);
    }
    let begun = Instant::now();
    let mut next = begun;
    let mut buffer = vec![0; 65_536];
    loop {
        let now = Instant::now();
        if now >= begun + PATIENCE {
            bail!("{} has not answered for {PATIENCE:?}", options.addr);
        }
        if now >= next {
            socket.send(&message)?;
            next = now + AGAIN;
        }
        socket.set_read_timeout(Some(next - now))?;
        let length = match (&socket).read(&mut buffer) {
            Ok(length) => length,
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                continue;
            }
            Err(error) => return Err(error).context("cannot receive the reply"),
        };
        // An IPv4 raw socket also returns the IP header.
        let header = match options.addr {
            IpAddr::V4(_) => usize::from(buffer[0] & 15) * 4,
            IpAddr::V6(_) => 0,
        };
        let answer = buffer[..length].get(header..).unwrap_or_default();
        if answer.len() == message.len()
            && answer[0] == reply
            && answer[4..HEADER] == message[4..HEADER]
        {
            anyhow::ensure!(
                answer[HEADER..] == message[HEADER..],
                "the reply contains other bytes than the request"
            );
            println!("{} bytes from {}", answer.len(), options.addr);
            return Ok(());
        }
    }
}
