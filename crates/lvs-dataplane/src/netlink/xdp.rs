//! Determines the interfaces that can send frames from XDP, that is, without a socket buffer
//! (family `netdev` of generic netlink).

use std::collections::HashSet;
use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;

use super::message::{attributes, u32_at};
use super::requests::Requests;

/// The netlink family of the generic netlink controller (`GENL_ID_CTRL`), and its command.
const CONTROL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Constants of `linux/netdev.h`.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NETDEV_XDP_ACT_NDO_XMIT: u8 = 1 << 2;
/// `genlmsghdr`: command, version, 2 bytes unused.
const HEADER: usize = 4;

/// Reads the XDP features of interfaces from the kernel.
#[derive(Debug)]
pub(crate) struct XdpFeatures {
    requests: Requests,
    family: u16,
}

impl XdpFeatures {
    /// Finds the kernel's netlink family for the features of interfaces.
    ///
    /// # Errors
    /// `Unsupported` before Linux 6.3.
    pub(crate) fn open() -> io::Result<Self> {
        let mut requests = Requests::of(NETLINK_GENERIC)?;
        let mut family = None;
        requests.dump(CONTROL, &[CTRL_CMD_GETFAMILY, 1, 0, 0], |message| {
            let all = message.payload.get(HEADER..).unwrap_or_default();
            let value = |kind| attributes(all).find(|(k, _)| *k == kind).map(|(_, v)| v);
            if value(CTRL_ATTR_FAMILY_NAME) == Some(b"netdev\0".as_slice()) {
                let id = value(CTRL_ATTR_FAMILY_ID).and_then(<[u8]>::first_chunk);
                family = id.copied().map(u16::from_ne_bytes).or(family);
            }
        })?;
        let family = family.ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { requests, family })
    }

    /// Returns the interfaces of this network namespace that can send frames from XDP. Other
    /// interfaces drop such frames.
    ///
    /// # Errors
    /// If the kernel refuses the request or does not answer.
    pub(crate) fn takers(&mut self) -> io::Result<HashSet<u32>> {
        let mut takers = HashSet::new();
        let header = [NETDEV_CMD_DEV_GET, 1, 0, 0];
        self.requests.dump(self.family, &header, |message| {
            let all = message.payload.get(HEADER..).unwrap_or_default();
            let value = |kind| attributes(all).find(|(k, _)| *k == kind).map(|(_, v)| v);
            let features = value(NETDEV_A_DEV_XDP_FEATURES).and_then(|v| v.first_chunk::<8>());
            let features = features.copied().map_or(0, u64::from_ne_bytes);
            let ifindex = value(NETDEV_A_DEV_IFINDEX).and_then(|v| u32_at(v, 0));
            if features & u64::from(NETDEV_XDP_ACT_NDO_XMIT) != 0 {
                takers.extend(ifindex);
            }
        })?;
        Ok(takers)
    }
}
