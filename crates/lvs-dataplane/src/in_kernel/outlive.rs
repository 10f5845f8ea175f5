//! What outlives an engine that is killed: connections go on for a while, and its successor takes
//! them over with their counters, the services and the settings.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::ops::DerefMut;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use lvs_core::{Control, Instant};
use tracing::debug;

use super::layout::{COUNT_WORDS, SERVICE_WORDS, conf};
use super::{InKernel, SERVERS, lock};
use crate::outlive::{Area, Record};
use crate::sys;

/// How long a program may still work on a frame after what it went by is not in force any more.
const SETTLED: Duration = Duration::from_millis(2);

impl InKernel {
    /// Another engine has left its connections.
    pub(crate) const fn is_successor(&self) -> bool {
        self.found
    }

    /// How far the clock by which deadlines are is ahead of one that says `now`.
    pub(crate) fn clock_ahead(&self, now: Instant) -> Duration {
        let base = self.arrays.conf.words()[conf::BASE].load(Relaxed);
        let then = sys::monotonic().wrapping_sub(base);
        Duration::from_nanos(then.saturating_sub(now.as_nanos()))
    }

    /// What programs still do for frames that came before nothing was in force any more.
    pub(crate) fn settle(&self) {
        std::thread::sleep(SETTLED);
    }

    /// Everything is taken over, and the host kept from it: takes programs away from interfaces
    /// that are not used any more.
    pub(crate) fn has_taken_over(&self) {
        self.set(conf::TAKING_OVER, 0);
        self.taking_over.store(false, Relaxed);
        let attached = lock(&self.attached);
        if let Some(pins) = &self.pins {
            for ifindex in pins.links() {
                if !attached.contains(&ifindex) {
                    let _ = fs::remove_file(pins.link(ifindex));
                }
            }
            for ifindex in pins.xdp_links() {
                if !self.has_xdp(ifindex) {
                    let _ = fs::remove_file(pins.xdp_link(ifindex));
                }
            }
            drop(attached);
            self.sweep_filters();
        }
    }

    /// Where services, settings and counters are kept.
    pub(crate) fn area(&self) -> Area<'_> {
        Area {
            counts: self.arrays.kept.words(),
            text: self.arrays.saved.words(),
        }
    }

    /// Counts for the servers of this engine what was counted for those of the one before it.
    pub(crate) fn take_counts(&self, control: &mut Control, records: &[Record]) {
        let mut taken = lock(&self.taken);
        let mut sums = vec![[0_u64; COUNT_WORDS]; SERVERS as usize];
        self.sum(&mut sums);
        self.area().take_counts(control, records, &sums);
        *taken = sums;
    }

    /// Keeps counters for a successor.
    pub(crate) fn keep_counts<C: DerefMut<Target = Control>>(&self, control: impl FnOnce() -> C) {
        let taken = lock(&self.taken);
        self.area().keep_counts(&control(), &taken);
    }

    /// Tells the programs which services there are: protocol, address and port (0 for all).
    pub(crate) fn set_services(&self, services: impl Iterator<Item = (u8, SocketAddr)>) {
        let services: HashSet<_> = services
            .map(|(protocol, at)| service_key(protocol, at))
            .collect();
        let mut known = lock(&self.known_services);
        for gone in known.difference(&services) {
            let _ = self.services.remove(gone);
        }
        for new in services.difference(&known) {
            if let Err(error) = self.services.insert(new) {
                debug!("lvs_services: {error}");
            }
        }
        *known = services;
    }

    /// The engine ends in an orderly way, and leaves nothing.
    pub(crate) fn leave_nothing(&self) {
        if let Some(pins) = &self.pins {
            self.sweep_filters();
            pins.remove();
        }
    }
}

/// A service, as programs look for it.
fn service_key(protocol: u8, at: SocketAddr) -> [u64; SERVICE_WORDS] {
    let mut bytes = [0; 16];
    let six = match at.ip() {
        IpAddr::V4(addr) => {
            bytes[..4].copy_from_slice(&addr.octets());
            0
        }
        IpAddr::V6(addr) => {
            bytes = addr.octets();
            1
        }
    };
    let half = |at: usize| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(half)
    };
    let port = u64::from(at.port().to_be());
    [
        half(0),
        half(8),
        port | u64::from(protocol) << 16 | six << 24,
    ]
}
