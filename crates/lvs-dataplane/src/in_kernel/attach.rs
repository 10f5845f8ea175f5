//! The programs at the interfaces.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tracing::warn;

use super::xdp::AttachedXdp;
use super::{InKernel, lock};
use crate::sys::{Program, ProgramLink};

/// A program at an interface; it goes with this value, not with the process.
#[derive(Debug)]
pub struct Attached {
    kernel: Arc<InKernel>,
    ifindex: u32,
    _xdp: Option<AttachedXdp>,
    _link: ProgramLink,
}

impl Drop for Attached {
    fn drop(&mut self) {
        lock(&self.kernel.attached).remove(&self.ifindex);
        if let Some(pins) = &self.kernel.pins {
            let _ = fs::remove_file(pins.link(self.ifindex));
        }
    }
}

impl InKernel {
    /// Puts the program at the ingress of an interface, whose packet socket has the filter; and with
    /// `xdp` the one that is before there is a socket buffer.
    ///
    /// # Errors
    /// As [`Program::attach`].
    pub(crate) fn attach(self: &Arc<Self>, ifindex: u32, xdp: bool) -> io::Result<Attached> {
        let pin = self.pins.as_ref().map(|pins| pins.link(ifindex));
        let link = attach(&self.ingress, ifindex, pin.as_deref())?;
        lock(&self.attached).insert(ifindex);
        let mut attached = Attached {
            kernel: self.clone(),
            ifindex,
            _xdp: None,
            _link: link,
        };
        if xdp {
            attached._xdp = Some(self.attach_xdp(ifindex)?);
        }
        Ok(attached)
    }
    /// Whether the program is the first one at the ingress of an interface: others could keep
    /// frames from it.
    pub(crate) fn is_first_at(&self, ifindex: u32) -> bool {
        let first = self.ingress.is_first_at(self.ingress_id, ifindex);
        first.unwrap_or(false)
    }
}

/// Attaches a program: in the place of that of an engine that was killed, or anew. With `pin`, it
/// outlives this engine under that name.
pub(super) fn attach(
    program: &Program,
    ifindex: u32,
    pin: Option<&Path>,
) -> io::Result<ProgramLink> {
    let Some(path) = pin else {
        return program.attach(ifindex);
    };
    if let Ok(link) = ProgramLink::pinned(path) {
        match link.update(program) {
            Ok(()) => return Ok(link),
            // Of an interface that is gone; another one has its number now.
            Err(_) => fs::remove_file(path)?,
        }
    }
    let link = program.attach(ifindex)?;
    if let Err(error) = link.pin(path) {
        warn!(
            "connections do not outlive this engine: {}: {error}",
            path.display()
        );
    }
    Ok(link)
}
