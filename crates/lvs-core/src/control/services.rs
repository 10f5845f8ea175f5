//! Adds, edits, deletes and finds services.

use alloc::boxed::Box;
use alloc::string::String;
use core::net::SocketAddr;

use super::check;
use super::limiter::Limiter;
use super::service::Census;
use super::slow_start::SlowStart;
use super::{Control, FTP, FTP_DATA, Service};
use crate::filter::SourceFilter;
use crate::recent::ReasonCounters;
use crate::service::ServiceKeyOrd;
use crate::stats::ObjectStats;
use crate::{
    Error, Family, Forwarding, Instant, Pool, Protocol, Scheduler, ServiceConfig, ServiceKey,
};

impl Control {
    /// All services, the oldest first.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values().map(|service| &**service)
    }

    /// The service with this key.
    pub fn service(&self, key: &ServiceKey) -> Option<&Service> {
        Some(
            self.services
                .get(self.index.get(&ServiceKeyOrd::from(key))?)?,
        )
    }

    /// Adds a service (`ip_vs_add_service`).
    ///
    /// # Errors
    /// [`Error::ServiceExists`], [`Error::UnknownScheduler`], [`Error::UnknownEngine`],
    /// [`Error::Protocol`], [`Error::ZeroMark`], [`Error::PrefixLength`].
    pub fn add_service(
        &mut self,
        key: ServiceKey,
        config: ServiceConfig,
        owner: Option<String>,
    ) -> Result<(), Error> {
        let scheduler = check::add_service(self, self, &key, &config)?;
        let number = self.next_service;
        self.next_service += 1;
        let service = Service {
            key,
            config,
            owner,
            next_tick: self.first_tick(&*scheduler),
            pool: Pool::new(scheduler),
            stats: ObjectStats::new(self.options.shards),
            slow: SlowStart::default(),
            limiter: Limiter::default(),
            census: Census::default(),
            refusals: ReasonCounters::default(),
            drops: ReasonCounters::default(),
        };
        self.ftp_services += usize::from(key.port() == FTP);
        self.any_port_services += usize::from(key.port() == 0);
        self.families[key.family() as usize] += 1;
        self.engines += usize::from(service.config.engine.is_some());
        self.services.insert(number, Box::new(service));
        self.index.insert((&key).into(), number);
        self.plan_service(number);
        self.changed();
        Ok(())
    }

    /// Replaces all settings of a service (`ip_vs_edit_service`). The scheduler keeps its state if
    /// its name does not change.
    ///
    /// # Errors
    /// [`Error::NoService`], [`Error::UnknownScheduler`], [`Error::UnknownEngine`],
    /// [`Error::PrefixLength`], [`Error::FullNatOnePacket`], [`Error::NeedsReplies`].
    pub fn edit_service(
        &mut self,
        key: &ServiceKey,
        config: ServiceConfig,
        owner: Option<String>,
    ) -> Result<(), Error> {
        let scheduler = check::edit_service(self, self, key, &config)?;
        let engine = usize::from(config.engine.is_some());
        let next_tick = self.first_tick(&*scheduler);
        let (number, service) = self.service_mut(key)?;
        if service.config.scheduler != config.scheduler {
            service.pool.reschedule(scheduler);
            service.next_tick = next_tick;
        }
        if service.config.extras.slow_start == 0 && config.extras.slow_start != 0 {
            service.slow.take_as_established(service.pool.servers());
        }
        if service.config.extras.limits != config.extras.limits {
            service.limiter = Limiter::default();
        }
        let before = core::mem::replace(&mut service.config, config);
        service.owner = owner;
        for server in service.pool.servers() {
            service.set_watches(server);
        }
        self.engines = self.engines - usize::from(before.engine.is_some()) + engine;
        self.apply_slow_start(number, self.clock.unwrap_or_default());
        self.plan_service(number);
        self.changed();
        Ok(())
    }

    /// Sets the filter for new connections of a service, or the director's filter for all services.
    /// Open connections continue.
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn set_filter(
        &mut self,
        service: Option<&ServiceKey>,
        filter: SourceFilter,
    ) -> Result<(), Error> {
        let Some(key) = service else {
            self.filters.director = filter;
            return Ok(());
        };
        let number = self.number_of(key)?;
        if filter.is_off() {
            self.filters.services.remove(&number);
        } else {
            self.filters.services.insert(number, filter);
        }
        Ok(())
    }

    /// The filters that have prefixes: the director's filter first, then the filters of services.
    pub fn filters(&self) -> impl Iterator<Item = (Option<ServiceKey>, SourceFilter)> + '_ {
        let director = [(None, self.filters.director.clone())].into_iter();
        let services = self.filters.services.iter().filter_map(|(number, filter)| {
            let service = self.services.get(number)?;
            Some((Some(service.key), filter.clone()))
        });
        director
            .filter(|(_, filter)| !filter.is_off())
            .chain(services)
    }

    /// Deletes a service (`ip_vs_del_service`). Its connections are treated like the connections of
    /// removed servers: see [`delete_server`](Self::delete_server).
    ///
    /// # Errors
    /// [`Error::NoService`].
    pub fn delete_service(&mut self, key: &ServiceKey, now: Instant) -> Result<(), Error> {
        self.take_service(key)?;
        self.retire_some(usize::MAX, now);
        Ok(())
    }

    /// Deletes a service, so that packets no longer match it. The caller must
    /// [retire](Self::retire_some) its servers before it makes any other change than to delete
    /// further services.
    pub(crate) fn take_service(&mut self, key: &ServiceKey) -> Result<(), Error> {
        let number = self
            .index
            .remove(&ServiceKeyOrd::from(key))
            .ok_or(Error::NoService)?;
        let service = self.services.remove(&number).ok_or(Error::NoService)?;
        self.filters.services.remove(&number);
        let family = service.key.family();
        self.ftp_services -= usize::from(service.key.port() == FTP);
        self.any_port_services -= usize::from(service.key.port() == 0);
        self.families[family as usize] -= 1;
        self.engines -= usize::from(service.config.engine.is_some());
        self.agenda.set(number, None);
        self.mixed -= service.census.mixed;
        self.full_nat.count(family, service.census.full_nat, 0);
        self.records.note_trashed(key);
        self.leaving.extend(service.pool.servers().iter().cloned());
        self.changed();
        Ok(())
    }

    /// Deletes every service (`ip_vs_flush`). The connections are treated like the connections of
    /// removed servers: see [`delete_server`](Self::delete_server).
    pub fn flush(&mut self, now: Instant) {
        while self.take_one() {}
        self.retire_some(usize::MAX, now);
    }

    /// Deletes one service by [`take_service`](Self::take_service); `false` if there was none.
    pub(crate) fn take_one(&mut self) -> bool {
        let Some(key) = self.services.values().next().map(|service| service.key) else {
            return false;
        };
        let taken = self.take_service(&key);
        debug_assert!(taken.is_ok(), "a listed service can be deleted");
        taken.is_ok()
    }

    pub(super) fn number_of(&self, key: &ServiceKey) -> Result<u32, Error> {
        let number = self.index.get(&ServiceKeyOrd::from(key));
        number.copied().ok_or(Error::NoService)
    }

    pub(super) fn service_mut(&mut self, key: &ServiceKey) -> Result<(u32, &mut Service), Error> {
        let number = self.number_of(key)?;
        let service = self.services.get_mut(&number).ok_or(Error::NoService)?;
        Ok((number, service))
    }

    pub(crate) fn scheduler(&self, name: &str) -> Result<Box<dyn Scheduler>, Error> {
        let schedulers = &self.options.schedulers;
        let mut scheduler = schedulers.create(name).ok_or(Error::UnknownScheduler)?;
        scheduler.seed(self.options.seed ^ u64::from(self.next_service) << 32);
        scheduler.sysctls_changed(&self.settings.sysctls);
        Ok(scheduler)
    }

    /// Time of the first [`tick`](Scheduler::tick) of a new scheduler.
    pub(super) fn first_tick(&self, scheduler: &dyn Scheduler) -> Option<Instant> {
        Some(self.clock? + scheduler.period()?)
    }

    /// Updates the counts by method for a server of service `number`, whose forwarding method was
    /// `before` and is `after`; `None` means that the server is not in the service.
    pub(super) fn recount(
        &mut self,
        number: u32,
        addr: SocketAddr,
        before: Option<Forwarding>,
        after: Option<Forwarding>,
    ) {
        let Some(service) = self.services.get_mut(&number) else {
            return;
        };
        let mixed = check::is_mixed(&service.key, addr);
        let old = service.census;
        if let Some(forwarding) = before {
            service.census.leave(mixed, forwarding);
        }
        if let Some(forwarding) = after {
            service.census.enter(mixed, forwarding);
        }
        let (new, family) = (service.census, service.key.family());
        self.mixed = self.mixed - old.mixed + new.mixed;
        self.full_nat.count(family, old.full_nat, new.full_nat);
    }

    /// The service that a packet matches (`ip_vs_service_find`).
    pub(crate) fn find_service(
        &self,
        mark: u32,
        protocol: Protocol,
        virt: SocketAddr,
    ) -> Option<u32> {
        let exact = |port| {
            let addr = SocketAddr::new(virt.ip(), port);
            self.index
                .get(&ServiceKeyOrd::Address(protocol, addr))
                .copied()
        };
        if mark != 0 {
            let family = Family::of(&virt.ip());
            if let Some(&number) = self.index.get(&ServiceKeyOrd::Mark(family, mark)) {
                return Some(number);
            }
        }
        exact(virt.port())
            .or_else(|| {
                // The packet is to the data port of active FTP, or to a port that passive FTP may
                // use (`net.ipv4.ip_unprivileged_port_start`).
                let data = virt.port() == FTP_DATA || virt.port() >= 1024;
                (protocol == Protocol::TCP && self.ftp_services > 0 && data).then(|| exact(FTP))?
            })
            .or_else(|| (self.any_port_services > 0).then(|| exact(0))?)
    }
}
