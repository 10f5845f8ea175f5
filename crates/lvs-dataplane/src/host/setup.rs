//! The configuration of the keeper.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Backend;
use crate::fast_path::FastPath;
use lvs_packet::steer::Steering;

/// The TUN device that a warm restart keeps.
#[derive(Debug, Default)]
pub(crate) struct Outliving {
    /// The device of this dataplane stays after a kill.
    pub(crate) wanted: bool,
    /// This dataplane is a successor.
    pub(crate) goes_on: bool,
    /// The device of the predecessor.
    pub(crate) device: Option<OwnedFd>,
}

/// The configuration of the keeper.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) backend: Backend,
    /// The interfaces to use; empty for all suitable interfaces.
    pub(crate) interfaces: Vec<String>,
    /// Own every virtual address that the host does not have.
    pub(crate) own_all_vips: bool,
    /// The kernel fast path.
    pub(crate) fast_path: Option<Arc<FastPath>>,
    /// The interfaces that get the XDP program.
    pub(crate) xdp: Vec<String>,
    /// The rule that divides packets among several workers; `None` for one worker.
    pub(crate) steering: Option<Arc<Steering>>,
    /// The TUN device that a warm restart keeps.
    pub(crate) warm_restart: Outliving,
}

impl Setup {
    /// Whether the configuration names an interface.
    pub(super) fn names(&self, interface: &str) -> bool {
        self.interfaces.iter().any(|name| name == interface)
    }
}
