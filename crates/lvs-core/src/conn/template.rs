//! Persistence templates: the real server that the clients of a network use.
//!
//! [`Control`](crate::Control) finds, renews and removes a template. The shards share it: without a
//! lock, they count their connections of the template in it, and read it for synchronisation.

use alloc::boxed::Box;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use super::Key;
use super::flag;
use crate::Instant;

/// A persistence template. [`Templates`] contains its timer.
#[derive(Debug)]
pub(crate) struct Template {
    /// The client's network with port 0, the virtual address, and the protocol. For a service of a
    /// firewall mark, the protocol is 0 and the mark is in the virtual address.
    pub(crate) key: Key,
    /// The server's address. The port is 0 if the template applies to several ports.
    pub(crate) server_addr: SocketAddr,
    pub(crate) server: AtomicU32,
    pub(crate) flags: AtomicU32,
    pub(crate) mark: u32,
    /// Name of the persistence engine and its data (for SIP, the Call-ID).
    pub(crate) engine: Option<(&'static str, Box<[u8]>)>,
    /// Seconds from the latest new connection until the template expires.
    pub(crate) timeout: AtomicU32,
    /// Whether one of the template's connections was established.
    pub(crate) assured: AtomicBool,
    /// Number of connections of this template.
    pub(crate) controlled: AtomicU32,
    /// Number of connections for which the decision whether to synchronise the template was made.
    pub(crate) in_packets: AtomicU32,
    /// The end of the timer that synchronisation sent last, in ticks of 4 ms; the lower two bits
    /// count retries.
    pub(crate) sync_end: AtomicU32,
    /// Adjustment of sequence numbers, as received by synchronisation.
    sequences: [AtomicU32; 6],
    /// Whether look-ups skip the template, such as after the removal of its server. The template
    /// then ends at its deadline.
    pub(crate) invalid: AtomicBool,
}

impl Template {
    pub(crate) fn new(
        key: Key,
        server_addr: SocketAddr,
        flags: u32,
        timeout: u32,
        now: Instant,
    ) -> Self {
        Self {
            key,
            server_addr,
            server: AtomicU32::new(super::NO_SLOT),
            flags: AtomicU32::new(flags | flag::TEMPLATE),
            mark: 0,
            engine: None,
            timeout: AtomicU32::new(timeout),
            assured: AtomicBool::new(false),
            controlled: AtomicU32::new(0),
            in_packets: AtomicU32::new(0),
            sync_end: AtomicU32::new(now.ticks() & !3),
            sequences: Default::default(),
            invalid: AtomicBool::new(false),
        }
    }

    pub(crate) fn sequences(&self) -> [u32; 6] {
        core::array::from_fn(|n| self.sequences[n].load(Relaxed))
    }

    pub(crate) fn set_sequences(&self, sequences: [u32; 6]) {
        for (place, number) in self.sequences.iter().zip(sequences) {
            place.store(number, Relaxed);
        }
    }

    /// The kernel's name of the template's state.
    pub(crate) fn state_name(&self) -> &'static str {
        if self.assured.load(Relaxed) {
            "ASSURED"
        } else {
            "NONE"
        }
    }

    /// Counts that a connection of the template has ended. Returns `true` if it was the last one,
    /// and no connection of the template was ever established: the caller then removes the template
    /// if it removes the connection by force.
    pub(crate) fn release(&self) -> bool {
        self.controlled.fetch_sub(1, Relaxed) == 1 && !self.assured.load(Relaxed)
    }
}
