//! Attaches the BPF programs to interfaces: as tcx links, or as clsact filters if the kernel has no
//! tcx.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::sync::{Arc, Mutex};

use tracing::warn;

use super::FastPath;
use super::pins::attach;
use crate::netlink::Filters;
use lvs_sys::attached::{self, Place};
use lvs_sys::lock;
use lvs_sys::{Instruction, Program, ProgramKind, ProgramLink};

/// An attached BPF program of an interface. It is detached when this value is dropped. If the
/// process is killed, the program stays attached if it is a filter or its link is pinned.
#[derive(Debug)]
pub struct Attached {
    kernel: Arc<FastPath>,
    ifindex: u32,
    /// The link that keeps the program attached; `None` if the program is a filter.
    _link: Option<ProgramLink>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        lock(&self.kernel.attached).remove(&self.ifindex);
        if let Some(filters) = &self.kernel.filters {
            // The interface may have been removed.
            let _ = lock(filters).take_away(self.ifindex);
        }
        if let Some(pins) = &self.kernel.pins {
            let _ = fs::remove_file(pins.link(self.ifindex));
        }
    }
}

impl FastPath {
    /// Attaches the ingress program to an interface whose packet socket has the
    /// [filter](Self::filter).
    ///
    /// # Errors
    /// The kernel refuses the link or the filter, except if filters of another program are in the
    /// way: this is logged.
    pub(crate) fn attach(self: &Arc<Self>, ifindex: u32) -> io::Result<Attached> {
        let pin = self.pins.as_ref().map(|pins| pins.link(ifindex));
        let link = match &self.filters {
            Some(filters) => {
                match lock(filters).put(ifindex, self.ingress.fd()) {
                    // Another program has filters there. Continue as if they had been added later.
                    Err(error) if is_taken(&error) => warn!(
                        interface = ifindex,
                        "tc filters of another program run before the kernel fast path (lvs_ingress), and may drop or redirect its packets: {error}"
                    ),
                    put => put?,
                }
                // Remove the pin of a dataplane that attached the program by a link.
                if let Some(pin) = &pin {
                    let _ = fs::remove_file(pin);
                }
                None
            }
            None => Some(attach(&self.ingress, ifindex, pin.as_deref())?),
        };
        lock(&self.attached).insert(ifindex);
        Ok(Attached {
            kernel: self.clone(),
            ifindex,
            _link: link,
        })
    }

    /// Attaches another program, which reads the map of [`settings`](Self::settings), to an
    /// interface without packet sockets. It stays attached for a successor if the programs of the
    /// kernel fast path do.
    ///
    /// # Errors
    /// As [`Program::attach`].
    pub(crate) fn attach_other(
        self: &Arc<Self>,
        program: &Program,
        ifindex: u32,
    ) -> io::Result<Attached> {
        let pin = self.pins.as_ref().map(|pins| pins.link(ifindex));
        let link = attach(program, ifindex, pin.as_deref())?;
        lock(&self.attached).insert(ifindex);
        Ok(Attached {
            kernel: self.clone(),
            ifindex,
            _link: Some(link),
        })
    }

    /// The descriptor of the map of settings, for the instructions of another program.
    pub(crate) fn settings(&self) -> i32 {
        self.arrays.conf.number()
    }

    /// Whether the ingress program is the first one at the ingress of an interface: an earlier one
    /// could drop frames. Returns false if the kernel does not report it.
    pub(crate) fn is_first_at(&self, ifindex: u32) -> bool {
        let Some(filters) = &self.filters else {
            let first = self.ingress.is_first_at(self.ingress_id, ifindex);
            return first.unwrap_or(false);
        };
        // The kernel runs tcx programs before filters.
        let before = attached::ids(ifindex, Place::Ingress).unwrap_or_default();
        let first = lock(filters).first(ifindex);
        before.is_empty() && first.is_ok_and(|first| first == self.ingress_id)
    }

    /// The mechanism that attaches the programs: `tcx` or `clsact`.
    pub(crate) const fn attached_by(&self) -> &'static str {
        match self.filters {
            Some(_) => "clsact",
            None => "tcx",
        }
    }

    /// Removes filters that dataplanes have left in this network namespace, except from interfaces
    /// to which this dataplane has attached its filter.
    pub(super) fn sweep_filters(&self) {
        let attached = lock(&self.attached);
        let done = match &self.filters {
            Some(filters) => sweep(&mut lock(filters), &attached),
            None => sweep_all(),
        };
        if let Err(error) = done {
            warn!("cannot remove the tc filters that other dataplanes have left: {error}");
        }
    }
}

/// Opens access to tc filters, after a test on `lo` whether the kernel supports them. `None` if the
/// kernel has tcx, which replaces filters.
pub(super) fn filters() -> io::Result<Option<Mutex<Filters>>> {
    /// Index of `lo` in every network namespace.
    const LOOPBACK: u32 = 1;
    let has_tcx = || match attached::ids(LOOPBACK, Place::Ingress) {
        Err(error) => error.raw_os_error() != Some(libc::EINVAL),
        Ok(_) => true,
    };
    if has_tcx() {
        return Ok(None);
    }
    let mut filters = Filters::open()?;
    // `w0 = TC_ACT_UNSPEC; exit`
    let op = |code, immediate| Instruction {
        code,
        registers: 0,
        offset: 0,
        immediate,
    };
    let nothing = Program::load(
        ProgramKind::Ingress,
        "lvs_nothing",
        &[op(0xb4, -1), op(0x95, 0)],
    )?;
    match filters.put(LOOPBACK, nothing.fd()) {
        Err(error) if is_taken(&error) => {}
        put => {
            put?;
            filters.take_away(LOOPBACK)?;
        }
    }
    Ok(Some(Mutex::new(filters)))
}

/// Whether the error means that the first preference of tc filters is in use at the interface: by
/// filters of another kind, or for some protocols only.
fn is_taken(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::AlreadyExists | io::ErrorKind::InvalidInput
    )
}

/// Removes the filters of all dataplanes in this network namespace. Returns their number.
pub(super) fn sweep_all() -> io::Result<usize> {
    sweep(&mut Filters::open()?, &HashSet::new())
}

fn sweep(filters: &mut Filters, but_for: &HashSet<u32>) -> io::Result<usize> {
    let mut count = 0;
    for ifindex in filters.interfaces()? {
        if !but_for.contains(&ifindex) && filters.take_away(ifindex)? {
            count += 1;
        }
    }
    Ok(count)
}
