//! The programs at the interfaces.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tracing::warn;

use super::pins::Pins;
use super::{InKernel, lock};
use crate::sys::TcLink;

/// A program at an interface; it goes with this value, not with the process.
#[derive(Debug)]
pub struct Attached {
    kernel: Arc<InKernel>,
    ifindex: u32,
    _link: TcLink,
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
    /// Puts the program at the ingress of an interface, whose packet socket has the filter.
    ///
    /// # Errors
    /// As [`Program::attach`](crate::sys::Program::attach).
    pub(crate) fn attach(self: &Arc<Self>, ifindex: u32) -> io::Result<Attached> {
        let link = match &self.pins {
            Some(pins) => self.attach_pinned(ifindex, pins)?,
            None => self.ingress.attach(ifindex)?,
        };
        lock(&self.attached).insert(ifindex);
        Ok(Attached {
            kernel: self.clone(),
            ifindex,
            _link: link,
        })
    }

    /// In the place of the program of an engine that was killed, or anew.
    fn attach_pinned(&self, ifindex: u32, pins: &Pins) -> io::Result<TcLink> {
        let path: PathBuf = pins.link(ifindex);
        if let Ok(link) = TcLink::pinned(&path) {
            match link.update(&self.ingress) {
                Ok(()) => return Ok(link),
                // Of an interface that is gone; another one has its number now.
                Err(_) => fs::remove_file(&path)?,
            }
        }
        let link = self.ingress.attach(ifindex)?;
        if let Err(error) = link.pin(&path) {
            warn!(
                "connections do not outlive this engine: {}: {error}",
                path.display()
            );
        }
        Ok(link)
    }

    /// Whether the program is the first one at the ingress of an interface: others could keep
    /// frames from it.
    pub(crate) fn is_first_at(&self, ifindex: u32) -> bool {
        let first = self.ingress.is_first_at(self.ingress_id, ifindex);
        first.unwrap_or(false)
    }
}
