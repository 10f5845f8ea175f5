//! The link header of an outgoing packet.

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::wire::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac, ethernet_header, is_ipv6};

/// Prepends an Ethernet header to an IP packet.
///
/// # Errors
/// [`FrameDrop::NoRoom`] if the frame has too little headroom for the header.
#[inline]
pub fn ethernet(frame: &mut Frame, dst: Mac, src: Mac) -> Result<(), FrameDrop> {
    let ethertype = if is_ipv6(frame.bytes()) {
        ETHERTYPE_IPV6
    } else {
        ETHERTYPE_IPV4
    };
    let header = frame.push_front(ETHERNET_LEN).ok_or(FrameDrop::NoRoom)?;
    ethernet_header(header, dst, src, ethertype);
    Ok(())
}
