//! Checks that a change is possible.
//!
//! The checks read a [`View`]: the state of a director now, or after the earlier changes of a list.
//! A change in a list is therefore refused for the same reason as a single change, in the kernel's
//! order of checks.

use alloc::boxed::Box;
use core::net::{IpAddr, SocketAddr};

use super::service::Census;
use crate::service::ServiceKeyOrd;
use crate::sync::SyncRole;
use crate::{
    Control, Error, Family, Forwarding, Protocol, Scheduler, Server, ServerConfig, ServiceConfig,
    ServiceFlags, ServiceKey, persistence_sip,
};

/// Maximum timeout in seconds: the kernel stores timeouts in ticks of 4 ms in an `int`.
const TIMEOUT_MAX: u32 = 8_589_934;

/// State that changes are checked against.
pub(crate) trait View {
    fn service(&self, key: &ServiceKey) -> Option<Facts>;
    /// The forwarding method of the server at `addr` in the service with this key and these facts;
    /// `None` if the service has no such server.
    fn server(&self, key: &ServiceKey, facts: &Facts, addr: SocketAddr) -> Option<Forwarding>;
    /// Whether a synchronisation daemon of this role is running.
    fn runs(&self, role: SyncRole) -> bool;
    fn mixed(&self) -> usize;
    fn full_nat(&self, family: Family) -> usize;
    /// Whether full NAT has a local address of this family.
    fn has_local(&self, family: Family) -> bool;
    /// Number of rules that set firewall marks.
    #[cfg(feature = "api")]
    fn marks(&self) -> usize;
}

/// The properties of a service on which checks depend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// The number of the service; `None` for a service that an earlier change of the list adds.
    pub(crate) number: Option<u32>,
    pub(crate) one_packet: bool,
    /// Whether the service's scheduler uses the response time of servers.
    pub(crate) needs_replies: bool,
    pub(crate) census: Census,
}

pub(crate) fn is_mixed(key: &ServiceKey, addr: SocketAddr) -> bool {
    Family::of(&addr.ip()) != key.family()
}

/// Checks that a service can be added; returns its scheduler.
pub(crate) fn add_service(
    view: &impl View,
    control: &Control,
    key: &ServiceKey,
    config: &ServiceConfig,
) -> Result<Box<dyn Scheduler>, Error> {
    match key {
        ServiceKey::Mark { mark: 0, .. } => return Err(Error::ZeroMark),
        ServiceKey::Mark { .. }
        | ServiceKey::Address {
            protocol: Protocol::TCP | Protocol::UDP | Protocol::SCTP,
            ..
        } => {}
        ServiceKey::Address { .. } => return Err(Error::Protocol),
    }
    if view.service(key).is_some() {
        return Err(Error::ServiceExists);
    }
    scheduler(control, key, config)
}

/// Checks new settings of a service; returns its scheduler.
pub(crate) fn edit_service(
    view: &impl View,
    control: &Control,
    key: &ServiceKey,
    config: &ServiceConfig,
) -> Result<Box<dyn Scheduler>, Error> {
    let facts = view.service(key).ok_or(Error::NoService)?;
    let scheduler = scheduler(control, key, config)?;
    if facts.census.full_nat > 0 {
        full_nat(
            view,
            key,
            config.flags.has(ServiceFlags::ONE_PACKET),
            Forwarding::FullNat,
        )?;
    }
    if scheduler.needs_replies() && facts.census.one_way > 0 {
        return Err(Error::NeedsReplies);
    }
    Ok(scheduler)
}

fn scheduler(
    control: &Control,
    key: &ServiceKey,
    config: &ServiceConfig,
) -> Result<Box<dyn Scheduler>, Error> {
    let scheduler = control.scheduler(&config.scheduler)?;
    if config
        .engine
        .as_deref()
        .is_some_and(|name| name != persistence_sip::SIP)
    {
        return Err(Error::UnknownEngine);
    }
    if key.family() == Family::V6 && !(1..=128).contains(&config.netmask) {
        return Err(Error::PrefixLength);
    }
    Ok(scheduler)
}

#[cfg(feature = "api")]
pub(crate) fn service(view: &impl View, key: &ServiceKey) -> Result<(), Error> {
    view.service(key).map(drop).ok_or(Error::NoService)
}

/// Checks that a server can be added to a service.
pub(crate) fn add_server(
    view: &impl View,
    key: &ServiceKey,
    addr: SocketAddr,
    config: &ServerConfig,
) -> Result<(), Error> {
    let facts = view.service(key).ok_or(Error::NoService)?;
    family(key, addr, config)?;
    synchronised(view, key, addr)?;
    full_nat(view, key, facts.one_packet, config.forwarding)?;
    Server::check(config)?;
    if view.server(key, &facts, addr).is_some() {
        return Err(Error::ServerExists);
    }
    replies(&facts, config)?;
    unicast(addr.ip())
}

/// Checks that a server has the family of its service if a synchronisation daemon is running: a
/// message about a connection contains addresses of one family.
fn synchronised(view: &impl View, key: &ServiceKey, addr: SocketAddr) -> Result<(), Error> {
    let runs = view.runs(SyncRole::Master) || view.runs(SyncRole::Backup);
    if runs && is_mixed(key, addr) {
        return Err(Error::FamilyMismatch);
    }
    Ok(())
}

/// Checks new settings of a server; returns the server's present forwarding method.
pub(crate) fn edit_server(
    view: &impl View,
    key: &ServiceKey,
    addr: SocketAddr,
    config: &ServerConfig,
) -> Result<Forwarding, Error> {
    let facts = view.service(key).ok_or(Error::NoService)?;
    family(key, addr, config)?;
    synchronised(view, key, addr)?;
    full_nat(view, key, facts.one_packet, config.forwarding)?;
    Server::check(config)?;
    let before = view.server(key, &facts, addr).ok_or(Error::NoServer)?;
    replies(&facts, config)?;
    Ok(before)
}

#[cfg(feature = "api")]
pub(crate) fn delete_server(
    view: &impl View,
    key: &ServiceKey,
    addr: SocketAddr,
) -> Result<(), Error> {
    let facts = view.service(key).ok_or(Error::NoService)?;
    let server = view.server(key, &facts, addr);
    server.map(drop).ok_or(Error::NoServer)
}

pub(crate) fn timeouts(seconds: [u32; 3]) -> Result<(), Error> {
    if seconds.iter().any(|&timeout| timeout > TIMEOUT_MAX) {
        return Err(Error::TimeoutRange);
    }
    Ok(())
}

/// Checks a change of the local addresses of full NAT. `serves` is true for the families that have
/// a local address after the change.
pub(crate) fn local_pool(
    view: &impl View,
    serves: impl Fn(Family) -> bool,
    hairpin: bool,
) -> Result<(), Error> {
    let families = [Family::V4, Family::V6];
    let missing = families
        .iter()
        .any(|&family| view.full_nat(family) > 0 && !serves(family));
    if missing || (hairpin && !families.iter().any(|&family| serves(family))) {
        return Err(Error::LocalAddressNeeded);
    }
    Ok(())
}

/// Checks that all servers have the family of their service, because a message about a connection
/// contains addresses of one family.
pub(crate) fn families(view: &impl View) -> Result<(), Error> {
    if view.mixed() > 0 {
        return Err(Error::FamilyMismatch);
    }
    Ok(())
}

pub(crate) fn start_daemon(view: &impl View, role: SyncRole) -> Result<(), Error> {
    if view.runs(role) {
        return Err(Error::DaemonRunning);
    }
    families(view)
}

pub(crate) fn stop_daemon(view: &impl View, role: SyncRole) -> Result<(), Error> {
    if !view.runs(role) {
        return Err(Error::DaemonNotRunning);
    }
    Ok(())
}

fn family(key: &ServiceKey, addr: SocketAddr, config: &ServerConfig) -> Result<(), Error> {
    if is_mixed(key, addr) && config.forwarding != Forwarding::Tunnel {
        return Err(Error::FamilyMismatch);
    }
    Ok(())
}

/// Checks that a server may use full NAT, if its method is full NAT.
fn full_nat(
    view: &impl View,
    key: &ServiceKey,
    one_packet: bool,
    forwarding: Forwarding,
) -> Result<(), Error> {
    if forwarding != Forwarding::FullNat {
        return Ok(());
    }
    if one_packet {
        return Err(Error::FullNatOnePacket);
    }
    if !view.has_local(key.family()) {
        return Err(Error::LocalAddressNeeded);
    }
    Ok(())
}

/// Checks that the answers of a server pass through the director if the service's scheduler
/// measures their latency.
fn replies(facts: &Facts, config: &ServerConfig) -> Result<(), Error> {
    if facts.needs_replies && !config.forwarding.translates() {
        return Err(Error::NeedsReplies);
    }
    Ok(())
}

/// Checks that a server may have this address. The program that embeds this crate also refuses
/// broadcast addresses of the host's networks.
fn unicast(addr: IpAddr) -> Result<(), Error> {
    let refused = match addr {
        IpAddr::V4(addr) => addr.is_unspecified() || addr.is_multicast() || addr.is_broadcast(),
        IpAddr::V6(addr) => {
            addr.is_unspecified()
                || addr.is_multicast()
                || addr.is_unicast_link_local()
                || addr.to_ipv4_mapped().is_some()
        }
    };
    if refused {
        return Err(Error::NotUnicast);
    }
    Ok(())
}

impl View for Control {
    fn service(&self, key: &ServiceKey) -> Option<Facts> {
        let number = *self.index.get(&ServiceKeyOrd::from(key))?;
        let service = self.services.get(&number)?;
        Some(Facts {
            number: Some(number),
            one_packet: service.config.flags.has(ServiceFlags::ONE_PACKET),
            needs_replies: service.pool.needs_replies(),
            census: service.census,
        })
    }

    fn server(&self, _: &ServiceKey, facts: &Facts, addr: SocketAddr) -> Option<Forwarding> {
        let server = self.services.get(&facts.number?)?.pool.find(addr)?;
        Some(server.forwarding())
    }

    fn runs(&self, role: SyncRole) -> bool {
        match role {
            SyncRole::Master => self.settings.master.is_some(),
            SyncRole::Backup => self.backup.is_some(),
        }
    }

    fn mixed(&self) -> usize {
        self.mixed
    }

    fn full_nat(&self, family: Family) -> usize {
        self.full_nat.servers(family)
    }

    fn has_local(&self, family: Family) -> bool {
        self.full_nat.serves(family)
    }

    #[cfg(feature = "api")]
    fn marks(&self) -> usize {
        self.marks.len()
    }
}
