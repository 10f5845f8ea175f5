//! IP in IP (RFC 2003) by the rules of `ip_vs_tunnel_xmit`.

use std::net::Ipv4Addr;

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::wire::{ipv4, put16};

/// Bytes that the encapsulation adds.
pub const OVERHEAD: usize = ipv4::HEADER_LEN;

/// The protocol number of IPv4 in IP.
const IPIP: u8 = 4;

/// The fields of an outer header that do not follow from the inner packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer {
    /// The director's address on the way to the server.
    pub src: Ipv4Addr,
    /// The server.
    pub dst: Ipv4Addr,
    /// Identification, where `df` is clear.
    pub id: u16,
    /// "Don't fragment": the inner one, if path MTU discovery is on.
    pub df: bool,
}

/// Encapsulates the IPv4 packet in `frame`, whose TTL has been decremented and whose checksums are finished.
///
/// # Errors
/// [`FrameDrop::NoRoom`] without headroom or beyond 64 KiB.
pub fn encapsulate(frame: &mut Frame, outer: &Outer) -> Result<(), FrameDrop> {
    let len = u16::try_from(frame.len() + OVERHEAD).map_err(|_| FrameDrop::NoRoom)?;
    let (tos, ttl) = match frame.bytes() {
        [_, tos, _, _, _, _, _, _, ttl, ..] => (*tos, *ttl),
        _ => return Err(FrameDrop::Truncated),
    };
    let header = frame.push_front(OVERHEAD).ok_or(FrameDrop::NoRoom)?;
    header.fill(0);
    header[0] = 0x45;
    // ECN is copied, but CE leaves as ECT(0) (RFC 3168 section 9.1.1, as INET_ECN_encapsulate does).
    header[1] = if tos & 3 == 3 { tos & 0xfc | 2 } else { tos };
    put16(header, 2, len);
    put16(header, 4, if outer.df { 0 } else { outer.id });
    put16(header, 6, if outer.df { ipv4::DF } else { 0 });
    header[8] = ttl;
    header[9] = IPIP;
    header[12..16].copy_from_slice(&outer.src.octets());
    header[16..20].copy_from_slice(&outer.dst.octets());
    ipv4::finish_header(header);
    Ok(())
}
