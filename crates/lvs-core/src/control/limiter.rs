//! Limits of a service: connections, new connections a second, and new connections a second from
//! one source, so that a flood to one service, or from one source, leaves capacity for other
//! services and sources.

use crate::settings::Limits;
use crate::{DropReason, Instant, Server};
use alloc::vec;
use alloc::vec::Vec;
use core::hash::Hasher;
use core::net::IpAddr;
use core::ops::Range;
use core::time::Duration;
use siphasher::sip::SipHasher13;

/// Number of sources in a set; a new source evicts the source that has opened the fewest
/// connections recently.
const WAYS: usize = 4;

/// Number of sets: together 16,384 sources, which need 256 KiB for each service with such a limit.
const SETS: usize = 4096;

/// Nanoseconds in a second. A burst may use the tokens of one second at once.
const SECOND: u64 = 1_000_000_000;

/// A service that had its maximum number of connections counts them again after this pause.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
pub(crate) struct Limiter {
    rate: Meter,
    sources: Vec<Source>,
    /// Number of connections when they were last counted, plus the connections that the limiter has
    /// permitted since then, even if they have ended.
    connections: u64,
    looked: Option<Instant>,
}

/// A token bucket with the tokens of one second, stored as the time at which the bucket is full
/// again.
#[derive(Clone, Copy, Debug, Default)]
struct Meter(u64);

impl Meter {
    fn take(&mut self, rate: u32, now: Instant) -> bool {
        let Some(cost) = SECOND.checked_div(rate.into()) else {
            return true;
        };
        let now = now.as_nanos();
        let full_at = self.0.max(now).saturating_add(cost);
        let allowed = full_at <= now.saturating_add(SECOND);
        if allowed {
            self.0 = full_at;
        }
        allowed
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Source {
    /// Hash of the source's prefix; 0 for a free place.
    prefix: u64,
    meter: Meter,
}

impl Limiter {
    /// Counts a new connection from `client`, unless it would exceed a limit. The limit for each
    /// source counts the connection even if another limit refuses it. `seed` is the key of the hash
    /// of sources.
    ///
    /// # Errors
    /// The limit that the connection would exceed.
    pub(crate) fn check<'a>(
        &mut self,
        limits: &Limits,
        client: IpAddr,
        servers: impl Iterator<Item = &'a Server>,
        seed: u64,
        now: Instant,
    ) -> Result<(), DropReason> {
        // A client above its own limit must not use up the limits that all clients share.
        if limits.source_rate > 0 && !self.takes_source(limits, client, seed, now) {
            return Err(DropReason::SourceRate);
        }
        if limits.connections > 0 && !self.has_room(limits.connections, servers, now) {
            return Err(DropReason::ServiceFull);
        }
        if !self.rate.take(limits.rate, now) {
            return Err(DropReason::ServiceRate);
        }
        self.connections += 1;
        Ok(())
    }

    /// A copy of the part that [`check`](Self::check) needs for `client`, for a preview.
    pub(crate) fn preview(&self, limits: &Limits, client: IpAddr, seed: u64) -> Self {
        let set = self.sources.get(self.set(hash(limits, client, seed)));
        Self {
            rate: self.rate,
            sources: set.map_or_else(|| vec![Source::default(); WAYS], <[Source]>::to_vec),
            connections: self.connections,
            looked: self.looked,
        }
    }

    /// The range of slots in which the source with this hash may be stored.
    fn set(&self, prefix: u64) -> Range<usize> {
        let sets = (self.sources.len() / WAYS).max(1);
        let set = usize::try_from(prefix % sets as u64).unwrap_or(0) * WAYS;
        set..set + WAYS
    }

    /// Whether the service has fewer than `most` connections. The servers' connections are counted
    /// only if necessary, and at most every [`LOOK_AGAIN`]. Until then, an upper bound decides, so
    /// the result may be `false` although connections have ended.
    fn has_room<'a>(
        &mut self,
        most: u32,
        servers: impl Iterator<Item = &'a Server>,
        now: Instant,
    ) -> bool {
        let fresh = |looked: Instant| now.saturating_since(looked) < LOOK_AGAIN;
        if self.looked.is_none()
            || (self.connections >= most.into() && !self.looked.is_some_and(fresh))
        {
            self.connections = servers.map(|server| u64::from(server.total())).sum();
            self.looked = Some(now);
        }
        self.connections < most.into()
    }

    fn takes_source(&mut self, limits: &Limits, client: IpAddr, seed: u64, now: Instant) -> bool {
        if self.sources.is_empty() {
            self.sources = vec![Source::default(); SETS * WAYS];
        }
        let prefix = hash(limits, client, seed);
        let set = self.set(prefix);
        let set = &mut self.sources[set];
        let known = set.iter().position(|source| source.prefix == prefix);
        let place = known.unwrap_or_else(|| {
            let least = (0..WAYS).min_by_key(|&way| set[way].meter.0).unwrap_or(0);
            set[least] = Source {
                prefix,
                meter: Meter::default(),
            };
            least
        });
        set[place].meter.take(limits.source_rate, now)
    }
}

/// Keyed hash of the prefix of `client` that counts as one source; never 0, which marks a free
/// place.
fn hash(limits: &Limits, client: IpAddr, seed: u64) -> u64 {
    let bits = |bits: u8, default: u32| match u32::from(bits) {
        0 => default,
        bits => bits,
    };
    let mut hasher = SipHasher13::new_with_keys(seed, !seed);
    match client {
        IpAddr::V4(addr) => {
            let host = 32u32.saturating_sub(bits(limits.source_bits_v4, 32));
            hasher.write_u32(addr.to_bits() >> host);
        }
        IpAddr::V6(addr) => {
            let host = 128u32.saturating_sub(bits(limits.source_bits_v6, 64));
            hasher.write_u128(addr.to_bits() >> host);
        }
    }
    hasher.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(limiter: &mut Limiter, limits: &Limits, client: &str, n: u32, now: Instant) -> usize {
        let client = client.parse().unwrap();
        (0..n)
            .filter(|_| {
                limiter
                    .check(limits, client, core::iter::empty(), 1, now)
                    .is_ok()
            })
            .count()
    }

    #[test]
    fn rate_limit_permits_burst_of_one_second_and_refills_with_time() {
        let limits = Limits {
            rate: 10,
            ..Limits::default()
        };
        let mut limiter = Limiter::default();
        let at = Instant::from_secs(5);
        assert_eq!(taken(&mut limiter, &limits, "192.0.2.1", 100, at), 10);
        let later = at + Duration::from_millis(500);
        assert_eq!(taken(&mut limiter, &limits, "192.0.2.2", 100, later), 5);
        let later = at + Duration::from_secs(60);
        assert_eq!(taken(&mut limiter, &limits, "192.0.2.2", 100, later), 10);
    }

    #[test]
    fn source_or_ipv6_64_network_over_its_rate_does_not_use_up_service_rate() {
        let limits = Limits {
            rate: 50,
            source_rate: 5,
            ..Limits::default()
        };
        let mut limiter = Limiter::default();
        let now = Instant::from_secs(5);
        assert_eq!(taken(&mut limiter, &limits, "192.0.2.1", 1000, now), 5);
        for n in 2..8 {
            let client = alloc::format!("192.0.2.{n}");
            assert_eq!(taken(&mut limiter, &limits, &client, 5, now), 5, "{client}");
        }
        // An IPv6 host counts as its /64 network.
        assert_eq!(taken(&mut limiter, &limits, "2001:db8::1", 5, now), 5);
        assert_eq!(taken(&mut limiter, &limits, "2001:db8::2", 5, now), 0);
        assert_eq!(taken(&mut limiter, &limits, "2001:db8:0:1::2", 5, now), 5);
    }

    #[test]
    fn limiter_table_is_bounded_in_source_flood_and_keeps_busy_source_limited() {
        let limits = Limits {
            source_rate: 5,
            ..Limits::default()
        };
        let mut limiter = Limiter::default();
        let now = Instant::from_secs(5);
        let mut busy = 0;
        for n in 0..200_000u32 {
            let client = IpAddr::from((0x0a00_0000 + n).to_be_bytes());
            let _ = limiter.check(&limits, client, core::iter::empty(), 1, now);
            busy += taken(&mut limiter, &limits, "192.0.2.1", 1, now);
        }
        assert_eq!(limiter.sources.len(), SETS * WAYS);
        assert_eq!(
            busy, 5,
            "the busiest source was evicted, and could open more connections"
        );
    }
}
