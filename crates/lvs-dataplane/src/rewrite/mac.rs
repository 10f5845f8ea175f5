//! The link header of a packet that leaves.

use crate::drop::FrameDrop;
use crate::frame::Frame;
use crate::wire::{ETHERNET_LEN, ETHERTYPE_IPV4, Mac, ethernet_header};

/// Puts an Ethernet header in front of an IPv4 packet.
///
/// # Errors
/// [`FrameDrop::NoRoom`] if the frame has no headroom left.
#[inline]
pub fn ethernet(frame: &mut Frame, dst: Mac, src: Mac) -> Result<(), FrameDrop> {
    let header = frame.push_front(ETHERNET_LEN).ok_or(FrameDrop::NoRoom)?;
    ethernet_header(header, dst, src, ETHERTYPE_IPV4);
    Ok(())
}
