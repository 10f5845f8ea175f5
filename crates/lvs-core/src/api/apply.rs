//! The one way in for changes: a list of calls is checked as a whole, then made as a whole.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::plan::{Noted, Plan};
use super::{Call, Failure, FailureCode, LocalPool, ServerSpec, ServiceSpec, Sysctl, Timeouts};
use crate::control::ServiceKeyOrd;
use crate::control::check::{self, View};
use crate::mark::MarkRule;
use crate::sync::{self, SyncDaemon, SyncRole};
use crate::{
    Control, Error, Family, Forwarding, Instant, LocalAddress, ServiceConfig, ServiceFlags,
    ServiceKey, SourceFilter, Sysctls,
};

/// Changes that one [`Call::Apply`] takes at most.
pub const CHANGES_MAX: usize = 1 << 16;
/// Rules for marks at most: each packet is compared with them one after the other.
const MARK_RULES_MAX: usize = 1024;
/// Local addresses of full NAT at most: each connection may have to try all of them.
const LOCAL_ADDRESSES_MAX: usize = 256;

/// Answer to a call that changes something: it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// What the packet path does not follow yet, and what to do about it. Absent if all is well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What only the host of a director knows, and changes depend on.
///
/// It answers from what it has at hand: the lock of [`Control`] is held while it is asked.
pub trait Host {
    /// Whether the way in which packets come to the director permits something. Asked before anything else.
    ///
    /// # Errors
    /// Why not, and what to do instead.
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        let _ = need;
        Ok(())
    }

    /// Whether this is the broadcast address of one of the host's networks.
    fn is_broadcast(&self, addr: IpAddr) -> bool {
        let _ = addr;
        false
    }

    /// The MTU of a network interface in bytes; `None` if there is none of this name.
    fn mtu(&self, interface: &str) -> Option<u32> {
        let _ = interface;
        Some(1500)
    }

    /// The ports of a local address that may stand for clients: those that the host's own programs are not given.
    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        LocalAddress::new(addr)
    }
}

/// A host that permits everything and has every interface: for rehearsals and tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permissive;

impl Host for Permissive {}

/// What a change needs of the way in which packets come to the director.
#[derive(Clone, Copy, Debug)]
pub enum Need<'a> {
    /// A service to be added.
    Service(ServiceKey),
    /// A server with this method, to be added or edited.
    Server(Forwarding),
    /// A rule for marks.
    Mark(&'a MarkRule),
    /// An address that is to stand for clients.
    Local(IpAddr),
    /// A virtual address that is to be answered for.
    Own(IpAddr),
    /// A synchronisation daemon to be started.
    Daemon(SyncRole),
}

/// A list of changes that cannot be made. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The first change that cannot be made, from 0.
    pub change: usize,
    /// Why.
    pub failure: Failure,
}

/// What the packet side has to follow after changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    services: BTreeSet<ServiceKeyOrd>,
    /// Services are gone: what belonged to them has to be looked for.
    pub flushed: bool,
    /// Rules for marks ([`Control::marks`]).
    pub marks: bool,
    /// Virtual addresses to answer for ([`Control::own_vips`]).
    pub vips: bool,
    /// Addresses that stand for clients ([`Control::local_pool`]).
    pub local: bool,
    /// Timeouts, sysctls or synchronisation daemons.
    pub settings: bool,
}

impl Applied {
    /// Services that were added, edited or deleted, or whose servers were.
    pub fn services(&self) -> impl ExactSizeIterator<Item = ServiceKey> + '_ {
        self.services.iter().map(|&key| key.into())
    }

    /// Nothing concerns the packet side.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Nothing but services is concerned, each of which is named.
    pub fn is_services_only(&self) -> bool {
        !(self.flushed || self.marks || self.vips || self.local || self.settings)
    }

    /// Adds what another list of changes asks to follow.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.flushed |= other.flushed;
        self.marks |= other.marks;
        self.vips |= other.vips;
        self.local |= other.local;
        self.settings |= other.settings;
    }
}

/// A change that has been checked, with what the host had to say.
enum Step<'a> {
    AddService(&'a ServiceSpec),
    EditService(&'a ServiceSpec),
    DeleteService(ServiceKey),
    Flush,
    Zero(Option<ServiceKey>),
    AddServer(&'a ServerSpec),
    EditServer(&'a ServerSpec),
    DeleteServer(ServiceKey, SocketAddr),
    SetTimeouts(Timeouts),
    SetSysctl(&'a Sysctl),
    StartMaster(sync::Master, &'a SyncDaemon),
    StartBackup(sync::Backup, &'a SyncDaemon),
    StopDaemon(SyncRole),
    /// At this place, from 0.
    InsertMark(usize, MarkRule),
    DeleteMark(usize),
    SetMarks(Vec<MarkRule>),
    SetFilter(Option<ServiceKey>, &'a SourceFilter),
    OwnVips(&'a [IpAddr]),
    SetLocal(Vec<LocalAddress>, bool),
}

impl Control {
    /// Makes these changes, or none: every call that changes what the director is to do, in the order of the list. All
    /// are checked before the first is made, each against what those before it leave. The packet side follows once,
    /// by what is returned.
    ///
    /// A change is refused as the operation itself would refuse it: in the kernel's order of checks.
    ///
    /// # Errors
    /// The first change that cannot be made. Nothing has changed then. [`Call::Apply`], [`Call::Stop`] and calls that read
    /// have no place in a list.
    pub fn apply(
        &mut self,
        calls: &[Call],
        host: &dyn Host,
        now: Instant,
    ) -> Result<Applied, Refused> {
        let mut changes = Changes::new(calls)?;
        changes.check(self, host, usize::MAX)?;
        let applied = changes.make(self, now, usize::MAX);
        Ok(applied.unwrap_or_default())
    }

    fn make(
        &mut self,
        step: Step<'_>,
        marks: &mut Vec<MarkRule>,
        applied: &mut Applied,
        now: Instant,
    ) -> Result<(), Error> {
        step.announce(applied);
        match step {
            Step::AddService(spec) => {
                let key = spec.service.into();
                self.add_service(key, spec.config.clone(), spec.owner.clone())?;
            }
            Step::EditService(spec) => {
                let key = spec.service.into();
                self.edit_service(&key, spec.config.clone(), spec.owner.clone())?;
            }
            Step::DeleteService(key) => self.delete_service(&key, now)?,
            Step::Flush => self.flush(now),
            Step::Zero(key) => self.zero(key.as_ref())?,
            Step::AddServer(spec) => {
                self.add_server(&spec.service.into(), spec.server, &spec.config, now)?;
            }
            Step::EditServer(spec) => {
                self.edit_server(&spec.service.into(), spec.server, &spec.config)?;
            }
            Step::DeleteServer(key, addr) => self.delete_server(&key, addr, now)?,
            Step::SetTimeouts(Timeouts { tcp, tcp_fin, udp }) => {
                self.set_timeouts(tcp, tcp_fin, udp)?;
            }
            Step::SetSysctl(sysctl) => self.set_sysctl(&sysctl.name, &sysctl.value)?,
            Step::StartMaster(master, daemon) => {
                self.start_master(master)?;
                self.note_daemon(completed(daemon, master.maxlen));
            }
            Step::StartBackup(backup, daemon) => {
                self.start_backup(backup)?;
                self.note_daemon(completed(daemon, backup.maxlen));
            }
            Step::StopDaemon(SyncRole::Master) => self.stop_master()?,
            Step::StopDaemon(SyncRole::Backup) => self.stop_backup()?,
            Step::InsertMark(place, rule) => marks.insert(place, rule),
            Step::DeleteMark(place) => drop(marks.remove(place)),
            Step::SetMarks(all) => *marks = all,
            Step::SetFilter(service, filter) => {
                self.set_filter(service.as_ref(), filter.clone())?;
            }
            Step::OwnVips(addresses) => self.set_own_vips(addresses),
            Step::SetLocal(pool, hairpin) => self.set_local_pool(pool, hairpin)?,
        }
        Ok(())
    }
}

/// A list of changes on its way into a [`Control`], as [`Control::apply`] makes them, but in pieces: whoever has a lock around
/// it can let go of it in between, so that a long list holds up no packets. First everything is checked, then everything is
/// made. Nobody else may make changes meanwhile; packets and the clock may go on.
pub struct Changes<'a> {
    calls: &'a [Call],
    /// Calls that were checked.
    checked: usize,
    noted: Option<Noted>,
    steps: VecDeque<Step<'a>>,
    marks: Option<Vec<MarkRule>>,
    applied: Applied,
}

impl fmt::Debug for Changes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes")
            .field("calls", &self.calls.len())
            .field("checked", &self.checked)
            .field("unmade", &self.steps.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Changes<'a> {
    /// Nothing is checked yet.
    ///
    /// # Errors
    /// If there are more than [`CHANGES_MAX`].
    pub fn new(calls: &'a [Call]) -> Result<Self, Refused> {
        if calls.len() > CHANGES_MAX {
            return Err(Refused {
                change: CHANGES_MAX,
                failure: Failure::new(
                    FailureCode::Full,
                    format!(
                        "{} changes: {CHANGES_MAX} at most are taken at once",
                        calls.len()
                    ),
                ),
            });
        }
        Ok(Self {
            calls,
            checked: 0,
            noted: None,
            steps: VecDeque::with_capacity(calls.len()),
            marks: None,
            applied: Applied::default(),
        })
    }

    /// Checks up to `count` more, each against what those before it leave. `false`: all are checked.
    ///
    /// # Errors
    /// The first change that cannot be made. Nothing has changed, and the rest is not to be made.
    pub fn check(
        &mut self,
        control: &Control,
        host: &dyn Host,
        count: usize,
    ) -> Result<bool, Refused> {
        let refused = |change, failure| Refused { change, failure };
        if let [call] = self.calls {
            let step = check_call(control, control, call, host);
            self.steps
                .push_back(step.map_err(|failure| refused(0, failure))?);
            self.checked = 1;
            return Ok(false);
        }
        let noted = self.noted.take().unwrap_or_else(|| Noted::new(control));
        let mut plan = Plan::resume(control, noted);
        let end = self.checked.saturating_add(count).min(self.calls.len());
        for (change, call) in self.calls.iter().enumerate().take(end).skip(self.checked) {
            let step = check_call(&plan, control, call, host);
            let step = step.map_err(|failure| refused(change, failure))?;
            step.note(&mut plan);
            self.steps.push_back(step);
        }
        self.checked = end;
        self.noted = Some(plan.into_noted());
        Ok(self.checked < self.calls.len())
    }

    /// Makes up to `count` more of those that were checked. When all are made: what the packet side has to follow.
    pub fn make(&mut self, control: &mut Control, now: Instant, count: usize) -> Option<Applied> {
        if self.marks.is_none() && self.steps.iter().any(Step::is_about_marks) {
            self.marks = Some(control.marks().to_vec());
        }
        let marks = self.marks.get_or_insert_default();
        for _ in 0..count {
            let Some(step) = self.steps.pop_front() else {
                break;
            };
            // A flush counts as one change for each service.
            if matches!(step, Step::Flush) && control.flush_one(now) {
                self.steps.push_front(step);
                continue;
            }
            let made = control.make(step, marks, &mut self.applied, now);
            debug_assert!(made.is_ok(), "what was checked can be done: {made:?}");
        }
        if !self.steps.is_empty() {
            return None;
        }
        let applied = core::mem::take(&mut self.applied);
        if applied.marks {
            control.set_marks(Arc::from(core::mem::take(marks)));
        }
        Some(applied)
    }
}

impl Step<'_> {
    /// Changes the plan as [`Control::make`] will change the director.
    fn note(&self, plan: &mut Plan<'_>) {
        let settings = |spec: &ServiceSpec| {
            let once = spec.config.flags.has(ServiceFlags::ONE_PACKET);
            (once, measures(plan.control(), &spec.config))
        };
        match self {
            Self::AddService(spec) => {
                let (once, measures) = settings(spec);
                plan.add_service(&spec.service.into(), once, measures);
            }
            Self::EditService(spec) => {
                let (once, measures) = settings(spec);
                plan.edit_service(&spec.service.into(), once, measures);
            }
            Self::DeleteService(key) => plan.delete_service(key),
            Self::Flush => plan.flush(),
            Self::AddServer(spec) | Self::EditServer(spec) => {
                let forwarding = Some(spec.config.forwarding);
                plan.set_server(&spec.service.into(), spec.server, forwarding);
            }
            Self::DeleteServer(key, addr) => plan.set_server(key, *addr, None),
            Self::StartMaster(..) => plan.set_daemon(SyncRole::Master, true),
            Self::StartBackup(..) => plan.set_daemon(SyncRole::Backup, true),
            Self::StopDaemon(role) => plan.set_daemon(*role, false),
            Self::InsertMark(..) => plan.noted().marks += 1,
            Self::DeleteMark(_) => plan.noted().marks -= 1,
            Self::SetMarks(rules) => plan.noted().marks = rules.len(),
            Self::SetLocal(pool, _) => plan.set_local(|family| serves(pool, family)),
            Self::Zero(_)
            | Self::SetTimeouts(_)
            | Self::SetSysctl(_)
            | Self::SetFilter(..)
            | Self::OwnVips(_) => {}
        }
    }

    const fn is_about_marks(&self) -> bool {
        matches!(
            self,
            Self::InsertMark(..) | Self::DeleteMark(_) | Self::SetMarks(_)
        )
    }

    /// Tells what the packet side has to follow.
    fn announce(&self, applied: &mut Applied) {
        match self {
            Self::AddService(spec) | Self::EditService(spec) => {
                let key = ServiceKey::from(spec.service);
                applied.services.insert((&key).into());
            }
            Self::AddServer(spec) | Self::EditServer(spec) => {
                let key = ServiceKey::from(spec.service);
                applied.services.insert((&key).into());
            }
            Self::DeleteService(key) | Self::DeleteServer(key, _) => {
                applied.services.insert(key.into());
            }
            Self::Flush => applied.flushed = true,
            Self::Zero(_) | Self::SetFilter(..) => {}
            Self::SetTimeouts(_)
            | Self::SetSysctl(_)
            | Self::StartMaster(..)
            | Self::StartBackup(..)
            | Self::StopDaemon(_) => applied.settings = true,
            Self::InsertMark(..) | Self::DeleteMark(_) | Self::SetMarks(_) => applied.marks = true,
            Self::OwnVips(_) => applied.vips = true,
            Self::SetLocal(..) => applied.local = true,
        }
    }
}

/// Whether a change can be made; reads what it says.
fn check_call<'a>(
    view: &impl View,
    control: &Control,
    call: &'a Call,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    Ok(match call {
        Call::ServiceAdd(spec) => {
            let key = spec.service.into();
            host.permits(&Need::Service(key))?;
            check::add_service(view, control, &key, &spec.config)?;
            Step::AddService(spec)
        }
        Call::ServiceEdit(spec) => {
            check::edit_service(view, control, &spec.service.into(), &spec.config)?;
            Step::EditService(spec)
        }
        Call::ServiceDelete { service } => {
            let key = (*service).into();
            check::service(view, &key)?;
            Step::DeleteService(key)
        }
        Call::ServiceFlush {} => Step::Flush,
        Call::ServiceZero { service } => {
            let key = service.map(ServiceKey::from);
            if let Some(key) = &key {
                check::service(view, key)?;
            }
            Step::Zero(key)
        }
        Call::ServerAdd(spec) => {
            host.permits(&Need::Server(spec.config.forwarding))?;
            check::add_server(view, &spec.service.into(), spec.server, &spec.config)?;
            if host.is_broadcast(spec.server.ip()) {
                return Err(Error::NotUnicast.into());
            }
            Step::AddServer(spec)
        }
        Call::ServerEdit(spec) => {
            host.permits(&Need::Server(spec.config.forwarding))?;
            check::edit_server(view, &spec.service.into(), spec.server, &spec.config)?;
            Step::EditServer(spec)
        }
        Call::ServerDelete { service, server } => {
            let key = (*service).into();
            check::delete_server(view, &key, *server)?;
            Step::DeleteServer(key, *server)
        }
        Call::TimeoutsSet(timeouts) => {
            check::timeouts([timeouts.tcp, timeouts.tcp_fin, timeouts.udp])?;
            Step::SetTimeouts(*timeouts)
        }
        Call::SysctlSet(sysctl) => {
            // Whether a value is taken depends on no other one.
            Sysctls::default().set(&sysctl.name, &sysctl.value)?;
            Step::SetSysctl(sysctl)
        }
        Call::DaemonStart(daemon) => start_daemon(view, daemon, host)?,
        Call::DaemonStop { role, .. } => {
            check::stop_daemon(view, *role)?;
            Step::StopDaemon(*role)
        }
        Call::MarkAdd { .. } | Call::MarkDelete { .. } | Call::MarkSet { .. } => {
            change_marks(view, call, host)?
        }
        Call::VipsOwn { addresses } => {
            for &addr in addresses {
                host.permits(&Need::Own(addr))?;
            }
            Step::OwnVips(addresses)
        }
        Call::FilterSet(spec) => {
            let key = spec.service.map(ServiceKey::from);
            if let Some(key) = &key {
                check::service(view, key)?;
            }
            Step::SetFilter(key, &spec.filter)
        }
        Call::LocalSet(pool) => set_local(view, pool, host)?,
        no_change!() => return Err(misplaced()),
    })
}

/// Looks at a synchronisation daemon (`start_sync_thread`): the kernel looks for mixed families before it looks for the
/// interface, and for another daemon after it.
fn start_daemon<'a>(
    view: &impl View,
    daemon: &'a SyncDaemon,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    host.permits(&Need::Daemon(daemon.role))?;
    check::families(view)?;
    let mtu = host.mtu(&daemon.interface).ok_or(Error::NoDevice)?;
    check::start_daemon(view, daemon.role)?;
    let ipv6 = daemon.group.is_some_and(|group| group.is_ipv6());
    Ok(match daemon.role {
        SyncRole::Master => {
            let master = sync::Master::new(daemon.syncid, daemon.maxlen, ipv6);
            Step::StartMaster(master, daemon)
        }
        SyncRole::Backup => {
            let backup = sync::Backup::new(daemon.syncid, daemon.maxlen, mtu, ipv6);
            Step::StartBackup(backup, daemon)
        }
    })
}

/// A daemon with what it was not told.
fn completed(daemon: &SyncDaemon, maxlen: u16) -> SyncDaemon {
    SyncDaemon {
        maxlen: Some(maxlen),
        group: Some(daemon.group.unwrap_or_else(|| sync::GROUP.into())),
        port: Some(daemon.port.unwrap_or(sync::PORT)),
        ttl: Some(daemon.ttl.unwrap_or(1)),
        ..daemon.clone()
    }
}

fn change_marks<'a>(
    view: &impl View,
    call: &'a Call,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    let read = |text: &String| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let rule = MarkRule::parse(&words).map_err(invalid)?;
        host.permits(&Need::Mark(&rule))?;
        Ok::<_, Failure>(rule)
    };
    let (step, count) = match call {
        Call::MarkAdd { rule, position } => {
            let rule = read(rule)?;
            let last = view.marks() + 1;
            let position = position.unwrap_or(last);
            if !(1..=last).contains(&position) {
                let expected = format!("position {position}: expected 1 to {last}");
                return Err(invalid(expected));
            }
            (Step::InsertMark(position - 1, rule), last)
        }
        Call::MarkDelete { position } => {
            let count = view.marks();
            if !(1..=count).contains(position) {
                let text = format!("there is no rule {position}: there are {count}");
                return Err(invalid(text));
            }
            (Step::DeleteMark(position - 1), count - 1)
        }
        Call::MarkSet { rules } => {
            let rules = rules.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let count = rules.len();
            (Step::SetMarks(rules), count)
        }
        _ => return Err(misplaced()),
    };
    if count > MARK_RULES_MAX {
        return Err(Failure::new(
            FailureCode::Full,
            format!("there are {MARK_RULES_MAX} rules for marks already, and no more are taken"),
        ));
    }
    Ok(step)
}

fn set_local<'a>(
    view: &impl View,
    wanted: &'a LocalPool,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    check_local(&wanted.addresses)?;
    let mut pool = Vec::with_capacity(wanted.addresses.len());
    for &addr in &wanted.addresses {
        host.permits(&Need::Local(addr))?;
        pool.push(host.local_ports(addr));
    }
    check::local_pool(view, |family| serves(&pool, family), wanted.hairpin)?;
    Ok(Step::SetLocal(pool, wanted.hairpin))
}

/// Whether these addresses can stand for clients.
fn check_local(addresses: &[IpAddr]) -> Result<(), Failure> {
    if addresses.len() > LOCAL_ADDRESSES_MAX {
        let count = addresses.len();
        return Err(invalid(format!(
            "{count} local addresses: {LOCAL_ADDRESSES_MAX} at most are taken"
        )));
    }
    let mut seen = BTreeSet::new();
    for addr in addresses {
        let unusable = match addr {
            IpAddr::V4(addr) => addr.is_broadcast() || addr.is_link_local(),
            IpAddr::V6(addr) => addr.is_unicast_link_local() || addr.to_ipv4_mapped().is_some(),
        };
        if unusable || addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() {
            return Err(invalid(format!(
                "{addr} cannot be a local address: servers have to reach it as one host's"
            )));
        }
        if !seen.insert(addr) {
            return Err(invalid(format!("{addr} is named twice")));
        }
    }
    Ok(())
}

fn serves(pool: &[LocalAddress], family: Family) -> bool {
    pool.iter().any(|local| Family::of(&local.addr) == family)
}

/// Whether the scheduler of a service that has been checked goes by the servers' answers.
fn measures(control: &Control, config: &ServiceConfig) -> bool {
    let scheduler = control.scheduler(&config.scheduler);
    scheduler.is_ok_and(|scheduler| scheduler.needs_replies())
}

fn misplaced() -> Failure {
    invalid(
        "a list of changes holds calls that change what the director is to do, and no others"
            .to_string(),
    )
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureCode::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_stand_for_a_client_is_refused() {
        for addr in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
            "ff02::1",
            "::1",
        ] {
            let failure = check_local(&[addr.parse().unwrap()]).unwrap_err();
            assert!(failure.message.contains(addr), "{}", failure.message);
        }
        let addr: IpAddr = "10.0.0.1".parse().unwrap();
        assert!(check_local(&[addr]).is_ok() && check_local(&[]).is_ok());
        let twice = check_local(&[addr, addr]).unwrap_err();
        assert!(twice.message.contains("twice"));
        let many = check_local(&[addr; 257]).unwrap_err();
        assert!(many.message.contains("257"));
    }
}
