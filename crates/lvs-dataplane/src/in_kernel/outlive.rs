//! What outlives an engine that is killed: connections go on for a while, and its successor takes
//! them over with their counters, the services and the settings.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::ops::DerefMut;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use lvs_core::{Control, Counts, Instant, ServiceKey};
use tracing::debug;

use super::layout::{COUNT_WORDS, KEPT_WORDS, SERVICE_WORDS, conf, count};
use super::{InKernel, SERVERS, lock};
use crate::sys;

/// How long a program may still work on a frame after what it went by is not in force any more.
const SETTLED: Duration = Duration::from_millis(2);

/// Where a server's counters are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) service: ServiceKey,
    pub(crate) server: SocketAddr,
    pub(crate) record: u32,
}

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
        }
    }

    /// Counts for the servers of this engine what was counted for those of the one before it.
    pub(crate) fn take_counts(&self, control: &mut Control, records: &[Record]) {
        let mut taken = lock(&self.taken);
        let mut sums = vec![[0_u64; COUNT_WORDS]; SERVERS as usize];
        self.sum(&mut sums);
        for Record {
            service,
            server,
            record,
        } in records
        {
            let (Some(sums), Some(kept)) = (sums.get(*record as usize), self.kept(*record)) else {
                continue;
            };
            let servers = control
                .service(service)
                .map_or(&[][..], |service| service.servers());
            let found = servers.iter().find(|known| known.addr() == *server);
            let Some(found) = found.and_then(|server| u32::try_from(server.id().index()).ok())
            else {
                continue;
            };
            let all = |n: usize| {
                let since = sums[n].wrapping_sub(kept[5 + n].load(Relaxed));
                kept[1 + n].load(Relaxed).wrapping_add(since)
            };
            let counts = Counts {
                conns: kept[0].load(Relaxed),
                in_packets: all(count::IN_PACKETS),
                in_bytes: all(count::IN_BYTES),
                out_packets: all(count::OUT_PACKETS),
                out_bytes: all(count::OUT_BYTES),
            };
            control.count_forwarded(found, &counts);
        }
        *taken = sums;
    }

    fn kept(&self, record: u32) -> Option<&[AtomicU64]> {
        let at = record as usize * KEPT_WORDS;
        self.arrays.kept.words().get(at..at + KEPT_WORDS)
    }

    /// Keeps counters for a successor.
    pub(crate) fn keep_counts<C: DerefMut<Target = Control>>(&self, control: impl FnOnce() -> C) {
        let taken = lock(&self.taken);
        let control = control();
        for (_, server) in control.endpoints() {
            let record = u32::try_from(server.id().index()).unwrap_or(u32::MAX);
            let (Some(words), Some(taken)) = (self.kept(record), taken.get(record as usize)) else {
                continue;
            };
            let live = control.server_stats(server.id()).unwrap_or_default().live;
            let mut all = [0; KEPT_WORDS];
            all[0] = live.conns;
            all[1 + count::IN_PACKETS] = live.in_packets;
            all[1 + count::IN_BYTES] = live.in_bytes;
            all[1 + count::OUT_PACKETS] = live.out_packets;
            all[1 + count::OUT_BYTES] = live.out_bytes;
            all[5..].copy_from_slice(taken);
            for (word, value) in words.iter().zip(all) {
                word.store(value, Relaxed);
            }
        }
    }

    /// Keeps a text for a successor; `false` if it is too long.
    pub(crate) fn save(&self, text: &[u8]) -> bool {
        let words = self.arrays.saved.words();
        let (first, halves) = (words[0].load(Relaxed), &words[1..]);
        let half = halves.len() / 2;
        // Whoever is killed meanwhile leaves the other half.
        let place = 1 - (first >> 63 & 1) as usize;
        if text.len() > half * 8 {
            words[0].store(0, Release);
            return false;
        }
        for (word, bytes) in halves[place * half..].iter().zip(text.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Relaxed);
        }
        words[0].store(text.len() as u64 | (place as u64) << 63, Release);
        true
    }

    /// The text that was kept.
    pub(crate) fn saved(&self) -> Option<Vec<u8>> {
        let words = self.arrays.saved.words();
        let (first, halves) = (words[0].load(Acquire), &words[1..]);
        let half = halves.len() / 2;
        let len = usize::try_from(first & !(1 << 63)).ok()?;
        if len == 0 || len > half * 8 {
            return None;
        }
        let from = (first >> 63) as usize * half;
        let words = halves[from..from + len.div_ceil(8)].iter();
        let mut text: Vec<u8> = words
            .flat_map(|word| word.load(Relaxed).to_le_bytes())
            .collect();
        text.truncate(len);
        Some(text)
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
