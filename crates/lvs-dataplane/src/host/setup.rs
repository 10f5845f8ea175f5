//! The configuration of the keeper.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Backend;
use crate::fast_path::FastPath;
use lvs_packet::steer::Steering;

/// The TUN device that stays for a warm restart.
#[derive(Debug, Default)]
pub(crate) struct Outliving {
    /// Whether the device stays after the process is killed.
    pub(crate) wanted: bool,
    /// Whether this dataplane is a successor that uses the predecessor's device.
    pub(crate) goes_on: bool,
    /// The predecessor's device; `None` if it left none.
    pub(crate) device: Option<OwnedFd>,
}

#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) backend: Backend,
    /// The interfaces to use; empty for all suitable interfaces.
    pub(crate) interfaces: Vec<String>,
    /// Whether the dataplane owns every virtual address that the host does not have.
    pub(crate) own_all_vips: bool,
    /// The kernel fast path; `None` if it is not used.
    pub(crate) fast_path: Option<Arc<FastPath>>,
    /// The interfaces that the operator has named for the XDP program.
    pub(crate) xdp: Vec<String>,
    /// Whether other suitable interfaces get the XDP program, too.
    pub(crate) xdp_auto: bool,
    /// The rule that divides packets among several workers; `None` for one worker.
    pub(crate) steering: Option<Arc<Steering>>,
    pub(crate) warm_restart: Outliving,
}

impl Setup {
    /// Whether the operator has named this interface.
    pub(super) fn names(&self, interface: &str) -> bool {
        self.interfaces.iter().any(|name| name == interface)
    }
}
