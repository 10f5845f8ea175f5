//! The XDP program, which forwards frames before the kernel allocates a socket buffer, on
//! interfaces that the operator has named or the dataplane has chosen.
//!
//! The program cannot see that the network card has removed a VLAN tag from a frame, so it must not
//! be attached to interfaces that receive such frames. It passes frames with partial checksums,
//! from a neighbouring virtual host, to the kernel.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, Release};

use lvs_core::api::NoXdp;

use super::FastPath;
use super::layout::{HOP_WORDS, MAC_PLACES, MAC_WORDS, TOLD_BYTES, hop, mac};
use super::pins::attach;
use lvs_packet::wire::Mac;
use lvs_sys::lock;
use lvs_sys::{PerCpuArray, Program, ProgramLink, SharedArray};

/// The memory of the XDP program. A successor creates its own.
#[derive(Debug)]
pub(super) struct XdpMemory {
    met: PerCpuArray,
    macs: SharedArray,
}

impl XdpMemory {
    pub(super) fn number(&self, name: &str) -> Option<i32> {
        match name {
            "lvs_met" => Some(self.met.number()),
            "lvs_macs" => Some(self.macs.number()),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Xdp {
    program: Program,
    memory: XdpMemory,
    interfaces: Mutex<HashSet<u32>>,
    /// Interfaces on which XDP may send frames.
    takers: Mutex<HashSet<u32>>,
    /// With `--xdp auto`: why interfaces do not have the program.
    refused: Mutex<HashMap<u32, NoXdp>>,
}

impl Xdp {
    pub(super) fn memory() -> io::Result<XdpMemory> {
        Ok(XdpMemory {
            met: PerCpuArray::new("lvs_met", TOLD_BYTES)?,
            macs: SharedArray::new("lvs_macs", MAC_WORDS, MAC_PLACES)?,
        })
    }

    pub(super) fn new(program: Program, memory: XdpMemory) -> Self {
        Self {
            program,
            memory,
            interfaces: Mutex::default(),
            takers: Mutex::default(),
            refused: Mutex::default(),
        }
    }

    /// Reserves the interface's entry in the array of MAC addresses. Fails if another interface
    /// uses it.
    fn take_up(&self, ifindex: u32) -> io::Result<()> {
        let mut interfaces = lock(&self.interfaces);
        let place = ifindex % MAC_PLACES;
        if interfaces.iter().any(|other| other % MAC_PLACES == place) {
            return Err(io::Error::other(
                "another interface uses the same entry of the table of addresses (interface index modulo 4,096)",
            ));
        }
        interfaces.insert(ifindex);
        Ok(())
    }

    /// Sets the MAC address of an interface. The program forwards only frames to this address; none
    /// if `addr` is `None`.
    fn know(&self, ifindex: u32, addr: Option<Mac>) {
        if !lock(&self.interfaces).contains(&ifindex) {
            return;
        }
        let at = (ifindex % MAC_PLACES) as usize * MAC_WORDS;
        let words = &self.memory.macs.words()[at..at + MAC_WORDS];
        let Some(Mac([a, b, c, d, e, f])) = addr else {
            return words[mac::LINK].store(0, Release);
        };
        let addr = u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]);
        words[mac::ADDR].store(addr, Relaxed);
        words[mac::LINK].store(ifindex.into(), Release);
    }
}

/// The XDP program of an interface. It is detached when this value is dropped. If the process is
/// killed, the program stays attached if its link is pinned.
#[derive(Debug)]
pub(crate) struct AttachedXdp {
    kernel: Arc<FastPath>,
    ifindex: u32,
    _link: Option<ProgramLink>,
}

impl Drop for AttachedXdp {
    fn drop(&mut self) {
        if let Some(xdp) = &self.kernel.xdp {
            xdp.know(self.ifindex, None);
            lock(&xdp.interfaces).remove(&self.ifindex);
        }
        if let Some(pins) = &self.kernel.pins {
            let _ = fs::remove_file(pins.xdp_link(self.ifindex));
        }
    }
}

impl FastPath {
    /// Attaches the XDP program to an interface. It passes all frames to the kernel until the MAC
    /// address is set.
    pub(crate) fn attach_xdp(self: &Arc<Self>, ifindex: u32) -> io::Result<AttachedXdp> {
        let xdp = self.xdp.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let pin = self.pins.as_ref().map(|pins| pins.xdp_link(ifindex));
        xdp.take_up(ifindex)?;
        let mut attached = AttachedXdp {
            kernel: self.clone(),
            ifindex,
            _link: None,
        };
        let link = attach(&xdp.program, ifindex, pin.as_deref());
        attached._link = Some(link.map_err(explained)?);
        Ok(attached)
    }

    /// The XDP program; `None` if XDP is not configured.
    pub fn xdp(&self) -> Option<&Program> {
        self.xdp.as_ref().map(|xdp| &xdp.program)
    }

    pub(crate) fn has_xdp(&self, ifindex: u32) -> bool {
        let xdp = self.xdp.as_ref();
        xdp.is_some_and(|xdp| lock(&xdp.interfaces).contains(&ifindex))
    }

    /// Whether a link of the XDP program is pinned for an interface, by this dataplane or by a
    /// killed predecessor.
    pub(crate) fn has_pinned_xdp(&self, ifindex: u32) -> bool {
        let pins = self.pins.as_ref();
        pins.is_some_and(|pins| pins.xdp_link(ifindex).exists())
    }

    /// Sets why `--xdp auto` has not chosen an interface; `None` if it has.
    pub(crate) fn set_no_xdp(&self, ifindex: u32, why: Option<NoXdp>) {
        let Some(xdp) = &self.xdp else { return };
        let mut refused = lock(&xdp.refused);
        match why {
            Some(why) => refused.insert(ifindex, why),
            None => refused.remove(&ifindex),
        };
    }

    /// Returns why `--xdp auto` has not chosen an interface; `None` if no reason is set.
    pub(crate) fn no_xdp(&self, ifindex: u32) -> Option<NoXdp> {
        lock(&self.xdp.as_ref()?.refused).get(&ifindex).cloned()
    }

    /// Sets the MAC address of an interface with the program. The program ignores frames to other
    /// addresses.
    pub(crate) fn set_address(&self, ifindex: u32, mac: Mac) {
        if let Some(xdp) = &self.xdp {
            xdp.know(ifindex, Some(mac));
        }
    }

    /// For tests: registers an interface to which the program may send frames, and sets its MAC
    /// address.
    ///
    /// # Errors
    /// This interface or another one already uses the entry in the array of MAC addresses.
    #[cfg(any(test, feature = "testing"))]
    pub fn try_interface(&self, ifindex: u32, mac: Mac) -> io::Result<()> {
        if let Some(xdp) = &self.xdp {
            xdp.take_up(ifindex)?;
        }
        self.set_address(ifindex, mac);
        self.set_takers(HashSet::from([ifindex]));
        Ok(())
    }

    /// Whether [`xdp`](Self::xdp) may send frames on an interface.
    pub(super) fn takes_frames(&self, ifindex: u32) -> bool {
        let xdp = self.xdp.as_ref();
        xdp.is_some_and(|xdp| lock(&xdp.takers).contains(&ifindex))
    }

    /// Sets the interfaces that can send frames without a socket buffer. Other interfaces would
    /// drop them.
    pub(crate) fn set_takers(&self, takers: HashSet<u32>) {
        let Some(xdp) = &self.xdp else { return };
        let hops = lock(&self.hops);
        *lock(&xdp.takers) = takers;
        let words = self.arrays.hops.words();
        for (way, &number) in &hops.known {
            let word = &words[usize::from(number) * HOP_WORDS + hop::XDP];
            word.store(self.takes_frames(way.ifindex).into(), Relaxed);
        }
    }
}

fn explained(error: io::Error) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => "the driver of the interface has no native XDP",
        Some(libc::EBUSY | libc::EEXIST) => {
            "the interface already has an XDP program (`ip link` shows it), or its driver has no resources for one"
        }
        Some(libc::EINVAL | libc::ERANGE) => {
            "the driver of the interface refuses an XDP program with the present settings (see `dmesg`: MTU, large receive offload, queues)"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{why} ({error})"))
}
