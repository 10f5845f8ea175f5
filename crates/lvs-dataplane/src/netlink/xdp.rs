//! Reads the properties of an interface on which the use of XDP depends: the XDP features of its
//! driver (family `netdev` of generic netlink), its offloads (family `ethtool`), and an attached
//! program.

use std::collections::{BTreeSet, HashSet};
use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;

use super::message::{attributes, text, u32_at};
use super::requests::Requests;

/// The netlink family of the generic netlink controller (`GENL_ID_CTRL`).
const CONTROL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Constants of `linux/netdev.h`.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NETDEV_XDP_ACT_BASIC: u64 = 1;
const NETDEV_XDP_ACT_REDIRECT: u64 = 1 << 1;
const NETDEV_XDP_ACT_NDO_XMIT: u64 = 1 << 2;
/// Constants of `linux/ethtool_netlink.h`.
const ETHTOOL_MSG_FEATURES_GET: u8 = 11;
const ETHTOOL_A_FEATURES_HEADER: u16 = 1;
const ETHTOOL_A_HEADER_DEV_INDEX: u16 = 1;
const ETHTOOL_A_FEATURES_WANTED: u16 = 3;
const ETHTOOL_A_FEATURES_ACTIVE: u16 = 4;
const ETHTOOL_A_BITSET_BITS: u16 = 3;
const ETHTOOL_A_BITSET_BIT_NAME: u16 = 2;
/// Constants of `linux/if_link.h`.
const IFLA_XDP_ATTACHED: u16 = 2;
/// `genlmsghdr`: command, version, 2 bytes unused.
const HEADER: usize = 4;

/// The XDP features of a driver (`enum netdev_xdp_act`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Driver(pub(crate) u64);

impl Driver {
    /// Whether the driver runs XDP programs and redirects their frames.
    pub(crate) const fn redirects(self) -> bool {
        let needed = NETDEV_XDP_ACT_BASIC | NETDEV_XDP_ACT_REDIRECT;
        self.0 & needed == needed
    }

    /// Whether the interface can send frames that programs of other interfaces redirect to it. Many
    /// drivers can do so only while the interface itself has a program.
    pub(crate) const fn transmits(self) -> bool {
        self.0 & NETDEV_XDP_ACT_NDO_XMIT != 0
    }
}

/// The offloads of an interface that concern XDP, by their names in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offloads {
    /// Offloads that the driver enables by default or that the operator has enabled, without those
    /// that the operator has disabled. On a veth with an XDP program, `rx-gro` is active even if it
    /// is not in this set.
    pub(crate) wanted: BTreeSet<String>,
    /// Offloads that are active at present.
    pub(crate) active: BTreeSet<String>,
}

/// Access to the XDP features of interfaces.
#[derive(Debug)]
pub(crate) struct XdpFeatures {
    requests: Requests,
    links: Requests,
    netdev: u16,
    /// Number of the netlink family `ethtool`; `None` if the kernel does not have it.
    ethtool: Option<u16>,
}

impl XdpFeatures {
    /// Finds the kernel's netlink families for the features and offloads of interfaces.
    ///
    /// # Errors
    /// `Unsupported` before Linux 6.3, which has no family `netdev`; otherwise the error of a
    /// socket or of the request.
    pub(crate) fn open() -> io::Result<Self> {
        let mut requests = Requests::of(NETLINK_GENERIC)?;
        let (mut netdev, mut ethtool) = (None, None);
        requests.dump(CONTROL, &[CTRL_CMD_GETFAMILY, 1, 0, 0], |message| {
            let id = value(message.payload, HEADER, CTRL_ATTR_FAMILY_ID);
            let id = id.and_then(<[u8]>::first_chunk).copied();
            let id = id.map(u16::from_ne_bytes);
            match value(message.payload, HEADER, CTRL_ATTR_FAMILY_NAME) {
                Some(b"netdev\0") => netdev = id,
                Some(b"ethtool\0") => ethtool = id,
                _ => {}
            }
        })?;
        Ok(Self {
            requests,
            links: Requests::open()?,
            netdev: netdev.ok_or(io::ErrorKind::Unsupported)?,
            ethtool,
        })
    }

    /// Returns the interfaces of this network namespace that can send frames from XDP. Other
    /// interfaces drop such frames.
    ///
    /// # Errors
    /// If the kernel refuses the request or does not answer.
    pub(crate) fn takers(&mut self) -> io::Result<HashSet<u32>> {
        let mut takers = HashSet::new();
        let header = [NETDEV_CMD_DEV_GET, 1, 0, 0];
        self.requests.dump(self.netdev, &header, |message| {
            if driver(message.payload).transmits() {
                let ifindex = value(message.payload, HEADER, NETDEV_A_DEV_IFINDEX);
                takers.extend(ifindex.and_then(|v| u32_at(v, 0)));
            }
        })?;
        Ok(takers)
    }

    /// Returns the features of an interface's driver.
    ///
    /// # Errors
    /// If the kernel refuses the request or does not answer.
    pub(crate) fn driver(&mut self, ifindex: u32) -> io::Result<Driver> {
        let mut found = Driver::default();
        let header = [NETDEV_CMD_DEV_GET, 1, 0, 0];
        self.requests.ask(
            self.netdev,
            0,
            &header,
            |b| b.attr(NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes()),
            |message| found = driver(message.payload),
        )?;
        Ok(found)
    }

    /// Returns the offloads of an interface.
    ///
    /// # Errors
    /// `Unsupported` if the kernel does not report offloads by netlink. Also if the kernel refuses
    /// the request or does not answer.
    pub(crate) fn offloads(&mut self, ifindex: u32) -> io::Result<Offloads> {
        let family = self.ethtool.ok_or(io::ErrorKind::Unsupported)?;
        let mut found = Offloads::default();
        self.requests.ask(
            family,
            0,
            &[ETHTOOL_MSG_FEATURES_GET, 1, 0, 0],
            |b| {
                b.nest(ETHTOOL_A_FEATURES_HEADER, |b| {
                    b.attr(ETHTOOL_A_HEADER_DEV_INDEX, &ifindex.to_ne_bytes());
                });
            },
            |message| {
                let names = |kind| names(value(message.payload, HEADER, kind).unwrap_or_default());
                found = Offloads {
                    wanted: names(ETHTOOL_A_FEATURES_WANTED),
                    active: names(ETHTOOL_A_FEATURES_ACTIVE),
                };
            },
        )?;
        Ok(found)
    }

    /// Whether an interface has an XDP program, of any owner and in any mode.
    ///
    /// # Errors
    /// If the kernel refuses the request or does not answer.
    pub(crate) fn has_program(&mut self, ifindex: u32) -> io::Result<bool> {
        // struct ifinfomsg
        const LINK: usize = 16;
        let mut header = [0; LINK];
        header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        let mut found = false;
        self.links.ask(
            libc::RTM_GETLINK,
            0,
            &header,
            |_| {},
            |message| {
                let xdp = value(message.payload, LINK, libc::IFLA_XDP).unwrap_or_default();
                let mode = value(xdp, 0, IFLA_XDP_ATTACHED).and_then(<[u8]>::first);
                found |= mode.is_some_and(|mode| *mode != 0);
            },
        )?;
        Ok(found)
    }
}

/// Returns the value of an attribute after a header of `header` bytes.
fn value(payload: &[u8], header: usize, kind: u16) -> Option<&[u8]> {
    let all = payload.get(header..)?;
    attributes(all).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

fn driver(payload: &[u8]) -> Driver {
    let features = value(payload, HEADER, NETDEV_A_DEV_XDP_FEATURES);
    let features = features.and_then(<[u8]>::first_chunk).copied();
    Driver(features.map_or(0, u64::from_ne_bytes))
}

/// Returns the names in a bit set that lists only bits that are set.
fn names(bit_set: &[u8]) -> BTreeSet<String> {
    let bits = value(bit_set, 0, ETHTOOL_A_BITSET_BITS).unwrap_or_default();
    let names = attributes(bits).filter_map(|(_, bit)| value(bit, 0, ETHTOOL_A_BITSET_BIT_NAME));
    names.map(text).collect()
}
