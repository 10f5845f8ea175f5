//! The cache in which `lblc` and `lblcr` store servers by destination address.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use super::HashSlot;
use crate::Instant;
use crate::hash::{fold, hash_32};

const BITS: u32 = 10;
const BUCKETS: usize = 1 << BITS;
/// If the cache has more entries than this, unused entries are removed once a minute (`max_size`).
const MAX: usize = BUCKETS * 16;
/// No entries are added above this number (`atomic_read(&tbl->entries) < tbl->max_size * 3 / 2`).
const HARD_MAX: usize = MAX * 3 / 2;
/// Interval between two checks for expired entries (`CHECK_EXPIRE_INTERVAL`).
pub(super) const CHECK_PERIOD: Duration = Duration::from_secs(60);
/// A check whose number is a multiple of this searches the whole cache for expired entries
/// (`COUNT_FOR_FULL_EXPIRATION`).
const FULL_CHECK: u32 = 30;
/// Time after which an unused entry is removed if there are too many (`ENTRY_TIMEOUT`).
const IDLE: Duration = Duration::from_secs(6 * 60);

#[derive(Clone, Debug)]
pub(super) struct Entry<T> {
    pub(super) value: T,
    pub(super) last_use: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Cache<T> {
    /// The entries in the kernel's buckets, which the checks for expired entries visit in turn. The
    /// kernel's hash has no key, so clients can choose destinations that fill one bucket. Each
    /// bucket is therefore a tree, so that no packet causes a search of a whole bucket.
    buckets: Vec<BTreeMap<IpAddr, Entry<T>>>,
    len: usize,
    /// Number of the next check, from 1 after a full one. As in the kernel, checks of a cache with
    /// more than [`MAX`] entries do not increase it.
    counter: u32,
    /// Number of the bucket at which the last partial check ended.
    rover: usize,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| BTreeMap::new()).collect(),
            len: 0,
            counter: 1,
            rover: 0,
        }
    }
}

impl<T> Cache<T> {
    pub(super) fn get_mut(&mut self, addr: IpAddr) -> Option<&mut Entry<T>> {
        self.buckets[bucket(addr)].get_mut(&addr)
    }

    pub(super) fn remove(&mut self, addr: IpAddr) {
        let removed = self.buckets[bucket(addr)].remove(&addr);
        self.len -= usize::from(removed.is_some());
    }

    /// Inserts or replaces an entry, unless the cache is full ([`HARD_MAX`]).
    pub(super) fn insert(&mut self, addr: IpAddr, value: T, now: Instant) {
        if self.len >= HARD_MAX {
            return;
        }
        let entry = Entry {
            value,
            last_use: now,
        };
        let replaced = self.buckets[bucket(addr)].insert(addr, entry);
        self.len += usize::from(replaced.is_none());
    }

    /// Removes expired entries; to be called once in each [`CHECK_PERIOD`]
    /// (`ip_vs_lblc_check_expire`). If `counter` is a multiple of [`FULL_CHECK`], removes all
    /// entries that were not used for `expiration`. Otherwise, if the cache has more than [`MAX`]
    /// entries, removes some that were not used for [`IDLE`].
    pub(super) fn check(&mut self, now: Instant, expiration: Duration) {
        if self.counter.is_multiple_of(FULL_CHECK) {
            for bucket in 0..BUCKETS {
                self.drop_idle(bucket, now, expiration);
            }
            self.counter = 1;
        } else if self.len <= MAX {
            self.counter += 1;
        } else {
            let goal = ((self.len - MAX) * 4 / 3).min(MAX / 2);
            let mut dropped = 0;
            for _ in 0..BUCKETS {
                self.rover = (self.rover + 1) % BUCKETS;
                dropped += self.drop_idle(self.rover, now, IDLE);
                if dropped >= goal {
                    break;
                }
            }
        }
    }

    fn drop_idle(&mut self, bucket: usize, now: Instant, idle: Duration) -> usize {
        let bucket = &mut self.buckets[bucket];
        let before = bucket.len();
        bucket.retain(|_, entry| now.saturating_since(entry.last_use) < idle);
        let dropped = before - bucket.len();
        self.len -= dropped;
        dropped
    }
}

pub(super) fn slot(addr: IpAddr) -> HashSlot {
    HashSlot {
        number: hash_32(fold(addr), BITS),
        of: 1 << BITS,
    }
}

fn bucket(addr: IpAddr) -> usize {
    hash_32(fold(addr), BITS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(n: u32) -> IpAddr {
        core::net::Ipv4Addr::from_bits(n).into()
    }

    #[test]
    fn lblc_cache_is_bounded_and_shrinks_when_idle() {
        let mut cache = Cache::default();
        for n in 0..30_000 {
            cache.insert(addr(n), (), Instant::ZERO);
        }
        assert_eq!(cache.len, HARD_MAX);
        cache.check(Instant::from_secs(60), Duration::from_secs(86_400));
        assert_eq!(
            cache.len, HARD_MAX,
            "entries that were not idle for long enough have expired"
        );
        cache.check(Instant::from_secs(360), Duration::from_secs(86_400));
        let dropped = HARD_MAX - cache.len;
        assert!((MAX / 2..MAX / 2 + 100).contains(&dropped), "{dropped}");
    }

    #[test]
    fn lblc_cache_finds_and_expires_colliding_destinations() {
        let mut cache = Cache::default();
        let chosen = (0..).map(addr).filter(|addr| bucket(*addr) == 7);
        let chosen: Vec<_> = chosen.take(2000).collect();
        for (n, addr) in chosen.iter().enumerate() {
            cache.insert(*addr, n, Instant::ZERO);
        }
        for (n, addr) in chosen.iter().enumerate() {
            assert_eq!(cache.get_mut(*addr).map(|entry| entry.value), Some(n));
        }
        cache.remove(chosen[3]);
        assert!(cache.get_mut(chosen[3]).is_none());
        assert_eq!((cache.len, cache.buckets[7].len()), (1999, 1999));
        assert_eq!(cache.drop_idle(7, Instant::from_secs(360), IDLE), 1999);
        assert_eq!(cache.len, 0);
    }

    #[test]
    fn lblc_cache_full_check_runs_every_thirty_checks() {
        let mut cache = Cache::default();
        cache.insert(addr(1), (), Instant::ZERO);
        for look in 1..=30 {
            assert_eq!(cache.len, 1, "{look}");
            cache.check(Instant::from_secs(look * 60), Duration::from_secs(30));
        }
        assert_eq!(cache.len, 0);
    }
}
