//! The records of all servers by number: servers in services, and removed servers (the trash).

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::ops::{Bound, Range};
use core::time::Duration;

use crate::attempts::Windows;
use crate::server::Marks;
use crate::service::ServiceKeyOrd;
use crate::stats::ObjectStats;
use crate::{Error, Instant, Server, ServerConfig, ServerId, ServiceKey};

/// Time after which the record of a removed server without connections is freed.
const TRASH_IDLE: Duration = Duration::from_secs(120);
/// The log keeps at least this number of latest changes. With more records than this, it keeps at
/// least as many changes as there are records.
const LOG_MIN: usize = 1024;

/// A server with its service and its counters. It is kept for some time after the server was
/// removed from its service.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) server: Arc<Server>,
    /// Number of the service; for a removed server, of its last service.
    pub(crate) service: u32,
    pub(crate) key: ServiceKey,
    pub(crate) stats: ObjectStats,
    pub(crate) attempts: Windows,
    trashed: Option<Trashed>,
}

#[derive(Clone, Copy, Debug)]
struct Trashed {
    /// Time since which no connection has referred to the record.
    idle_since: Option<Instant>,
}

/// Result of a call of [`Records::empty_trash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trash {
    /// Records of the trash may remain that were not examined.
    Unseen,
    /// All records of the trash were examined, and some cannot be freed yet.
    Waiting,
    Empty,
}

impl Registered {
    pub(crate) const fn is_trashed(&self) -> bool {
        self.trashed.is_some()
    }
}

/// All records. A change of one record, and the update of a shard after it, take a time that does
/// not depend on the number of records: the log contains the numbers of changed records.
#[derive(Debug, Default)]
pub(crate) struct Records {
    places: Vec<Option<Registered>>,
    /// Indexes that are not in use; a new record gets the lowest.
    free: BTreeSet<u32>,
    /// Records of removed servers; at most one for each service and address.
    trash: BTreeMap<(ServiceKeyOrd, SocketAddr), u32>,
    /// The record in the trash that was examined last; `None` after all were examined.
    looked_at: Option<(ServiceKeyOrd, SocketAddr)>,
    /// Records by the addresses of their servers; `None` unless the index was requested.
    addresses: Option<BTreeSet<(SocketAddr, u32)>>,
    /// Indexes of changed records, in the order of the changes.
    log: Vec<u32>,
    /// Number of changes that the log does not contain any more.
    log_start: u64,
    /// The bits by which servers request that their schedulers examine them again.
    marks: Marks,
}

impl Records {
    /// Number of record indexes, in use or free.
    pub(crate) const fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn get(&self, place: usize) -> Option<&Registered> {
        self.places.get(place)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: ServerId) -> Option<&mut Registered> {
        self.places.get_mut(id.index())?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Registered> {
        self.places.iter().flatten()
    }

    pub(crate) fn iter_in(&self, places: Range<usize>) -> impl Iterator<Item = &Registered> {
        let places = places.start.min(self.len())..places.end.min(self.len());
        self.places.get(places).into_iter().flatten().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Registered> {
        self.places.iter_mut().flatten()
    }

    /// Takes a snapshot of the counters of the servers with these indexes; for a removed server,
    /// only of its connection attempts, which may still expire.
    pub(crate) fn tick(&mut self, places: Range<usize>) {
        let entries = self.places.get_mut(places).unwrap_or_default();
        for entry in entries.iter_mut().flatten() {
            if !entry.is_trashed() {
                entry.stats.tick();
            }
            entry.attempts.tick(entry.server.attempts().total());
        }
    }

    /// Records of the servers at this address, the highest number first; empty unless they are
    /// [indexed](Self::index_addresses).
    pub(crate) fn at(&self, addr: SocketAddr) -> impl Iterator<Item = &Registered> {
        let index = self.addresses.iter();
        let places = index.flat_map(move |index| index.range((addr, 0)..=(addr, u32::MAX)).rev());
        places.filter_map(|&(_, place)| self.get(place as usize))
    }

    /// Switches the index of records by address on or off.
    pub(crate) fn index_addresses(&mut self, wanted: bool) {
        if self.addresses.is_some() == wanted {
            return;
        }
        let addresses = self
            .iter()
            .map(|entry| (entry.server.addr(), entry.server.id().0));
        self.addresses = wanted.then(|| addresses.collect());
    }

    /// Returns the record for a new server of service `number`: the record of a removed server with
    /// the same service and address, including its connections, or a new record.
    pub(crate) fn enter(
        &mut self,
        number: u32,
        key: ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
        shards: usize,
    ) -> Result<Arc<Server>, Error> {
        // `ip_vs_trash_get_dest`
        if let Some(place) = self.trash.remove(&((&key).into(), addr)) {
            self.note(place);
            if let Some(entry) = self.get_mut(ServerId(place)) {
                entry.trashed = None;
                if entry.service != number {
                    entry.stats.zero();
                    entry.attempts = Windows::new(entry.server.attempts().total());
                    entry.service = number;
                }
                return Ok(entry.server.clone());
            }
        }
        let place = match self.free.first() {
            Some(&place) => place,
            None => {
                u32::try_from(self.places.len()).map_err(|_| Error::Unsupported("2^32 servers"))?
            }
        };
        let mut server = Server::new(ServerId(place), addr, config)?;
        server.mark_in(&mut self.marks);
        let server = Arc::new(server);
        let entry = Registered {
            server: server.clone(),
            service: number,
            key,
            stats: ObjectStats::new(shards),
            attempts: Windows::default(),
            trashed: None,
        };
        if self.free.pop_first().is_some() {
            self.places[place as usize] = Some(entry);
        } else {
            self.places.push(Some(entry));
        }
        if let Some(addresses) = &mut self.addresses {
            addresses.insert((addr, place));
        }
        self.note(place);
        Ok(server)
    }

    /// Moves the record of a removed server into the trash (`__ip_vs_del_dest`).
    pub(crate) fn trash(&mut self, id: ServerId) -> Option<&Registered> {
        let entry = self.places.get_mut(id.index())?.as_mut()?;
        entry.trashed = Some(Trashed { idle_since: None });
        let key = ((&entry.key).into(), entry.server.addr());
        self.trash.insert(key, id.0);
        self.note(id.0);
        self.get(id.index())
    }

    /// Logs a change of the removed servers of a deleted service: they belong to no service from
    /// now on.
    pub(crate) fn note_trashed(&mut self, key: &ServiceKey) {
        let key = ServiceKeyOrd::from(key);
        let first = SocketAddr::from(([0, 0, 0, 0], 0));
        let of_service = self.trash.range((key, first)..);
        let of_service = of_service.take_while(|((of, _), _)| *of == key);
        let places: Vec<u32> = of_service.map(|(_, &place)| place).collect();
        for place in places {
            self.note(place);
        }
    }

    /// Examines up to `count` records of removed servers, and frees each that has been without
    /// references for long enough (`ip_vs_dest_trash_expire`). The next call continues after the
    /// examined records.
    pub(crate) fn empty_trash(&mut self, now: Instant, count: usize) -> Trash {
        let from = self.looked_at.map_or(Bound::Unbounded, Bound::Excluded);
        let portion = self.trash.range((from, Bound::Unbounded)).take(count);
        let portion: Vec<_> = portion.map(|(&key, &place)| (key, place)).collect();
        self.looked_at = portion.last().map(|&(key, _)| key);
        for &(key, place) in &portion {
            if self.is_to_be_freed(place, now) {
                self.trash.remove(&key);
                self.free(place);
            }
        }
        if portion.len() == count {
            return Trash::Unseen;
        }
        self.looked_at = None;
        if self.trash.is_empty() {
            Trash::Empty
        } else {
            Trash::Waiting
        }
    }

    /// Whether the record of a removed server has been without connections for long enough. The
    /// time starts at the first call without connections.
    fn is_to_be_freed(&mut self, place: u32, now: Instant) -> bool {
        let Some(entry) = self.get_mut(ServerId(place)) else {
            return false;
        };
        let referenced = entry.server.is_referenced();
        let Some(trashed) = &mut entry.trashed else {
            return false;
        };
        if referenced {
            return false;
        }
        now >= *trashed.idle_since.get_or_insert(now) + TRASH_IDLE
    }

    fn free(&mut self, place: u32) {
        let Some(entry) = self.places[place as usize].take() else {
            return;
        };
        if let Some(addresses) = &mut self.addresses {
            addresses.remove(&(entry.server.addr(), place));
        }
        self.free.insert(place);
        self.note(place);
    }

    /// Logs a change of a record, so that shards apply it.
    pub(crate) fn note(&mut self, place: u32) {
        let kept = self.places.len().max(LOG_MIN);
        if self.log.len() >= 2 * kept {
            // A shard that has not applied these changes yet reads all records, which are not more
            // than the remaining changes.
            let gone = self.log.len() - kept;
            self.log_start += gone as u64;
            self.log.drain(..gone);
        }
        self.log.push(place);
    }

    /// Number of changes logged so far.
    pub(crate) fn changes(&self) -> u64 {
        self.log_start + self.log.len() as u64
    }

    /// Records changed after the first `seen` changes; `None` if the log does not contain all of
    /// these changes any more.
    pub(crate) fn changed_since(&self, seen: u64) -> Option<&[u32]> {
        let skip = usize::try_from(seen.checked_sub(self.log_start)?).ok()?;
        self.log.get(skip..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Forwarding;

    fn enter(records: &mut Records, n: u8) -> ServerId {
        let addr = SocketAddr::from(([10, 0, 0, n], 80));
        let key = ServiceKey::tcp("198.51.100.1:80".parse().unwrap());
        let config = ServerConfig::new(1, Forwarding::Nat);
        records.enter(0, key, addr, &config, 1).unwrap().id()
    }

    #[test]
    fn record_number_of_removed_server_is_reused_by_same_address_or_after_idle_time() {
        let mut records = Records::default();
        let ids: Vec<u32> = (1..=3).map(|n| enter(&mut records, n).0).collect();
        assert_eq!(ids, [0, 1, 2]);
        records.trash(ServerId(1));
        assert_eq!(
            enter(&mut records, 2).0,
            1,
            "a server with the same address reuses the record"
        );
        let sizes = [0..1, 1..9, 3..3, 7..9].map(|places| records.iter_in(places).count());
        assert_eq!(sizes, [1, 2, 0, 0]);
        records.trash(ServerId(1));
        records.trash(ServerId(0));
        let look = |records: &mut Records, now| records.empty_trash(now, 100);
        assert_eq!(look(&mut records, Instant::ZERO), Trash::Waiting);
        let idle = Instant::ZERO + TRASH_IDLE;
        assert_eq!(look(&mut records, idle), Trash::Empty);
        assert_eq!(records.iter().count(), 1);
        assert_eq!([4, 5, 6].map(|n| enter(&mut records, n).0), [0, 1, 3]);
    }

    #[test]
    fn removed_servers_are_examined_in_portions() {
        let mut records = Records::default();
        let ids: Vec<ServerId> = (1..=5).map(|n| enter(&mut records, n)).collect();
        for &id in &ids {
            records.trash(id);
        }
        let later = Instant::ZERO + TRASH_IDLE;
        for (now, left, after) in [
            (Instant::ZERO, [5, 5, 5], Trash::Waiting),
            (later, [3, 1, 0], Trash::Empty),
        ] {
            for (left, expected) in left.into_iter().zip([Trash::Unseen, Trash::Unseen, after]) {
                assert_eq!(records.empty_trash(now, 2), expected);
                assert_eq!(records.iter().count(), left);
            }
        }
    }

    #[test]
    fn change_log_returns_changes_after_recent_position_and_none_after_old_position() {
        let mut records = Records::default();
        enter(&mut records, 1);
        let seen = records.changes();
        assert_eq!(records.changed_since(seen), Some(&[][..]));
        enter(&mut records, 2);
        records.note(0);
        assert_eq!(records.changed_since(seen), Some(&[1, 0][..]));
        assert_eq!(records.changed_since(0), Some(&[0, 1, 0][..]));
        for _ in 0..3 * LOG_MIN {
            let seen = records.changes().saturating_sub(LOG_MIN as u64);
            records.note(0);
            assert!(
                records.changed_since(seen).is_some(),
                "changes are missing in the log already"
            );
        }
        assert_eq!(
            records.changed_since(seen),
            None,
            "the log never drops changes"
        );
        assert_eq!(records.changed_since(records.changes()), Some(&[][..]));
    }
}
