//! Real servers: addition, changes and removal, and the records of removed servers.

use alloc::sync::Arc;
use core::net::SocketAddr;
use core::ops::Range;
use core::time::Duration;

use super::Control;
use super::check;
use super::records::Trash;
use crate::attempts::RecentAttempts;
use crate::stats::{ServerDrops, Stats};
use crate::{Error, Instant, Server, ServerConfig, ServerId, ServiceKey};

/// Interval between two searches for records of removed servers that can be freed
/// (`IP_VS_DEST_TRASH_PERIOD`).
const TRASH_PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of removed servers that are examined before a pause.
const TRASH_PORTION: usize = 256;
/// Pause between two portions of a search for records that can be freed.
const TRASH_STEP: Duration = Duration::from_millis(10);
/// Maximum number of counts that one call of [`Control::count_drops`] moves.
const DROPS_PORTION: usize = 256;

impl Control {
    /// Adds a real server to a service (`ip_vs_add_dest`). A server that was removed within the
    /// last minutes gets its record and its remaining connections back.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::ServerExists`], [`Error::NotUnicast`],
    /// [`Error::FamilyMismatch`], [`Error::FullNatOnePacket`], [`Error::LocalAddressNeeded`],
    /// [`Error::NeedsReplies`], and the errors of [`Server::check`].
    pub fn add_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
        now: Instant,
    ) -> Result<(), Error> {
        check::add_server(self, key, addr, config)?;
        let (number, service) = self.service_mut(key)?;
        let key = service.key;
        let shards = self.options.shards;
        let server = self.records.enter(number, key, addr, config, shards)?;
        server.configure(config);
        server.reset_last_weight();
        let service = self.services.get_mut(&number).ok_or(Error::NoService)?;
        service.set_watches(&server);
        service.pool.add(server);
        self.recount(number, addr, None, Some(config.forwarding));
        self.apply_slow_start(number, now);
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a real server (`ip_vs_edit_dest`). A new forwarding method affects
    /// new connections only.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`], [`Error::FamilyMismatch`],
    /// [`Error::FullNatOnePacket`], [`Error::LocalAddressNeeded`], [`Error::NeedsReplies`], and the
    /// errors of [`Server::check`].
    pub fn edit_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        config: &ServerConfig,
    ) -> Result<(), Error> {
        let before = check::edit_server(self, key, addr, config)?;
        let (number, service) = self.service_mut(key)?;
        let id = service.pool.configure(addr, config)?.id();
        self.records.note(id.0);
        self.recount(number, addr, Some(before), Some(config.forwarding));
        self.apply_slow_start(number, self.clock.unwrap_or_default());
        self.changed();
        Ok(())
    }

    /// Removes a real server from a service (`ip_vs_del_dest`). Packets of clients on its
    /// connections are dropped until the server is added again or the connection expires; with
    /// `expire_nodest_conn` the connections are removed at the next [`sweep`](Self::sweep). This
    /// applies to [`OnServerDown::Kernel`](crate::settings::OnServerDown::Kernel); other
    /// values of the service have precedence.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::NoServer`].
    pub fn delete_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        now: Instant,
    ) -> Result<(), Error> {
        let (number, service) = self.service_mut(key)?;
        let server = service.pool.remove(addr)?;
        self.recount(number, addr, Some(server.forwarding()), None);
        self.trash(server.id(), now);
        self.apply_slow_start(number, now);
        self.changed();
        Ok(())
    }

    /// Orders the servers of a service: the first of `order` gets the position of the most recently
    /// added server. Servers that are not in `order` follow, in their present order; addresses that
    /// the service does not have are ignored. If the order changes, the scheduler restarts. The
    /// kernel has no such operation: there, a server that is removed and added again is the first.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::UnknownScheduler`].
    pub fn arrange_servers(&mut self, key: &ServiceKey, order: &[SocketAddr]) -> Result<(), Error> {
        let service = self.service(key).ok_or(Error::NoService)?;
        let scheduler = self.scheduler(&service.config.scheduler)?;
        let next_tick = self.first_tick(&*scheduler);
        let (number, service) = self.service_mut(key)?;
        if !service.pool.arrange(order, scheduler) {
            return Ok(());
        }
        service.next_tick = next_tick;
        self.plan_service(number);
        self.changed();
        Ok(())
    }

    /// Counters and rates of a real server; `None` if the director has no record of it.
    pub fn server_stats(&self, id: ServerId) -> Option<Stats> {
        Some(self.records.get(id.index())?.stats.stats())
    }

    /// Attempts of clients to open connections to a real server; `None` if the director has no
    /// record of it.
    pub fn server_attempts(&self, id: ServerId) -> Option<RecentAttempts> {
        let entry = self.records.get(id.index())?;
        Some(entry.attempts.recent(entry.server.attempts().total()))
    }

    /// Adds counts of dropped packets to the counters of their services, and removes them from
    /// `drops`: at most 256 counts at each call. Packets of a service that was removed are not
    /// counted.
    pub fn count_drops(&mut self, drops: &mut ServerDrops, now: Instant) {
        let portion = core::iter::from_fn(|| drops.pop()).take(DROPS_PORTION);
        for ((server, reason), packets) in portion {
            let record = self.records.get(server.index());
            let service = record.and_then(|record| self.services.get_mut(&record.service));
            if let Some(service) = service {
                service.drops.add(reason, packets, now);
            }
        }
    }

    /// Whether the director still has records of removed servers.
    pub fn has_removed(&self) -> bool {
        self.next_trash.is_some()
    }

    /// Every server that is configured or that connections, templates or schedulers still refer to,
    /// with its present or former service. These are all servers that may still send or receive
    /// packets.
    pub fn endpoints(&self) -> impl Iterator<Item = (ServiceKey, &Arc<Server>)> {
        self.endpoints_in(0..self.endpoint_places())
    }

    /// The servers of [`endpoints`](Self::endpoints) whose record indexes, below
    /// [`endpoint_places`](Self::endpoint_places), are in a range: for callers that iterate in
    /// portions.
    pub fn endpoints_in(
        &self,
        places: Range<usize>,
    ) -> impl Iterator<Item = (ServiceKey, &Arc<Server>)> {
        self.records
            .iter_in(places)
            .filter(|entry| !entry.is_trashed() || entry.server.is_referenced())
            .map(|entry| (entry.key, &entry.server))
    }

    /// Number of record indexes, in use or free.
    pub fn endpoint_places(&self) -> usize {
        self.records.len()
    }

    /// Moves a removed server into the trash (`__ip_vs_del_dest`).
    pub(super) fn trash(&mut self, id: ServerId, now: Instant) {
        let gone = self.records.trash(id);
        if gone.is_some_and(|entry| entry.server.has_gone()) {
            self.sweep_work
                .iter_mut()
                .for_each(|work| work.end_down = true);
        }
        self.next_trash.get_or_insert(now + TRASH_PERIOD);
        self.plan();
        if self.settings.sysctls.expire_nodest_conn {
            self.sweep_work
                .iter_mut()
                .for_each(|work| work.flush_removed = true);
        }
    }

    /// Examines a portion of the records of removed servers, and frees the records to which no
    /// connection has referred for long enough (`ip_vs_dest_trash_expire`).
    pub(super) fn empty_trash(&mut self, now: Instant) {
        let before = self.records.changes();
        self.next_trash = match self.records.empty_trash(now, TRASH_PORTION) {
            Trash::Unseen => Some(now + TRASH_STEP),
            Trash::Waiting => Some(now + TRASH_PERIOD),
            Trash::Empty => None,
        };
        if self.records.changes() != before {
            self.changed();
        }
    }

    /// Moves up to `count` servers of [deleted](Self::take_service) services into the trash;
    /// returns their number.
    pub(crate) fn retire_some(&mut self, count: usize, now: Instant) -> usize {
        let count = count.min(self.leaving.len());
        for _ in 0..count {
            if let Some(server) = self.leaving.pop_front() {
                server.retire();
                self.trash(server.id(), now);
            }
        }
        if count > 0 {
            self.changed();
        }
        count
    }

    /// Whether servers of deleted services remain for [`retire_some`](Self::retire_some).
    #[cfg(feature = "api")]
    pub(crate) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }
}
