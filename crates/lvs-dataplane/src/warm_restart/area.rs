//! Services, settings and counters that are stored for a successor, in any kind of memory.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use lvs_core::stats::Counts;
use lvs_core::{Control, ServiceKey};

/// Number of counters of packets and bytes of a server, in both directions.
const COUNTED: usize = 4;
/// Number of words for a server: its connections, packets and bytes, and the part of the packets
/// and bytes that the BPF programs have counted.
pub(crate) const KEPT_WORDS: usize = 1 + 2 * COUNTED;

/// A server, and the index of the record that contains its counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) service: ServiceKey,
    pub(crate) server: SocketAddr,
    pub(crate) record: u32,
}

/// Number of words of [`Area::text`] for services and settings of at most `bytes` bytes: two
/// copies, and the word that selects the valid one.
pub(crate) const fn text_words(bytes: usize) -> usize {
    1 + 2 * bytes.div_ceil(8)
}

/// The shared memory for counters and services, as words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area<'a> {
    /// The stored counters: [`KEPT_WORDS`] words for each record.
    pub(crate) counts: &'a [AtomicU64],
    /// One word that selects the valid half, and two halves for the services and settings.
    pub(crate) text: &'a [AtomicU64],
}

impl Area<'_> {
    fn kept(&self, record: u32) -> Option<&[AtomicU64]> {
        let at = record as usize * KEPT_WORDS;
        self.counts.get(at..at + KEPT_WORDS)
    }

    /// Stores the counters of the servers at these indices, as far as `counts` has room for them.
    /// `elsewhere` contains for each record the packets and bytes that the BPF programs have
    /// counted.
    pub(crate) fn keep_counts(
        &self,
        control: &Control,
        places: Range<usize>,
        elsewhere: &[[u64; COUNTED]],
    ) {
        for (_, server) in control.endpoints_in(places) {
            let record = u32::try_from(server.id().index()).unwrap_or(u32::MAX);
            let Some(words) = self.kept(record) else {
                continue;
            };
            let live = control.server_stats(server.id()).unwrap_or_default().live;
            let own = [
                live.in_packets,
                live.in_bytes,
                live.out_packets,
                live.out_bytes,
            ];
            let elsewhere = elsewhere.get(record as usize).copied().unwrap_or_default();
            let all = std::iter::once(live.conns).chain(own).chain(elsewhere);
            for (word, value) in words.iter().zip(all) {
                word.store(value, Relaxed);
            }
        }
    }

    /// Adds the counters of the predecessor's servers to those of this dataplane, with the packets
    /// and bytes that the BPF programs have counted since the counters were stored. Omits servers
    /// that this dataplane does not have. `elsewhere` contains for each record the packets and
    /// bytes that the BPF programs have counted so far.
    pub(crate) fn take_counts(
        &self,
        control: &mut Control,
        records: &[Record],
        elsewhere: &[[u64; COUNTED]],
    ) {
        for Record {
            service,
            server,
            record,
        } in records
        {
            let Some(kept) = self.kept(*record) else {
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
            let now = elsewhere.get(*record as usize).copied().unwrap_or_default();
            let all = |n: usize| {
                let since = now[n].wrapping_sub(kept[1 + COUNTED + n].load(Relaxed));
                kept[1 + n].load(Relaxed).wrapping_add(since)
            };
            let counts = Counts {
                conns: kept[0].load(Relaxed),
                in_packets: all(0),
                in_bytes: all(1),
                out_packets: all(2),
                out_bytes: all(3),
            };
            control.count_forwarded(found, &counts);
        }
    }

    /// Stores the services and settings. Returns false if `text` is too long; a successor then
    /// finds none.
    pub(crate) fn save(&self, text: &[u8]) -> bool {
        let (first, halves) = (self.text[0].load(Relaxed), &self.text[1..]);
        let half = halves.len() / 2;
        // If the process is killed during the write, the other half stays valid.
        let place = 1 - (first >> 63 & 1) as usize;
        if text.len() > half * 8 {
            self.text[0].store(0, Release);
            return false;
        }
        for (word, bytes) in halves[place * half..].iter().zip(text.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Relaxed);
        }
        self.text[0].store(text.len() as u64 | (place as u64) << 63, Release);
        true
    }

    /// The stored services and settings; `None` if none are stored or their length is not valid.
    pub(crate) fn saved(&self) -> Option<Vec<u8>> {
        let (first, halves) = (self.text[0].load(Acquire), &self.text[1..]);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_text_that_fits_is_saved_and_too_long_text_leaves_no_saved_text() {
        let words = text_words(32);
        let words: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let area = Area {
            counts: &[],
            text: &words,
        };
        assert_eq!(area.saved(), None);
        for text in [&b"one"[..], b"another one", b"", b"while the area has room"] {
            let kept = area.save(text);
            assert!(kept);
            assert_eq!(area.saved().unwrap_or_default(), text);
        }
        assert!(!area.save(&[b'x'; 33]));
        assert_eq!(area.saved(), None);
    }
}
