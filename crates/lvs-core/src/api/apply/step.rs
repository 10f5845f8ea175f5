//! A checked change: its application, and its effect on later changes and on the dataplane.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::super::plan::Plan;
use super::super::types::{ServerSpec, ServiceSpec, Sysctl, Timeouts};
use super::Applied;
use crate::filter::SourceFilter;
use crate::full_nat::LocalAddress;
use crate::mark::MarkRule;
use crate::sync::{self, SyncDaemon, SyncRole};
use crate::{Control, Error, Family, Instant, ServiceConfig, ServiceFlags, ServiceKey};

/// A checked change, with the properties of the host that it needs.
pub(super) enum Step<'a> {
    AddService(&'a ServiceSpec),
    EditService(&'a ServiceSpec),
    DeleteService(ServiceKey),
    Flush,
    Zero(Option<ServiceKey>),
    AddServer(&'a ServerSpec),
    EditServer(&'a ServerSpec),
    DeleteServer(ServiceKey, SocketAddr),
    ArrangeServers(ServiceKey, &'a [SocketAddr]),
    SetTimeouts(Timeouts),
    SetSysctl(&'a Sysctl),
    StartMaster(sync::Master, SyncDaemon),
    StartBackup(sync::Backup, SyncDaemon),
    StopDaemon(SyncRole),
    /// The index in the list of rules, from 0, and the rule.
    InsertMark(usize, MarkRule),
    DeleteMark(usize),
    SetMarks(Vec<MarkRule>),
    SetFilter(Option<ServiceKey>, &'a SourceFilter),
    OwnVips(&'a [IpAddr]),
    SetLocal(Vec<LocalAddress>, bool),
}

impl Control {
    /// Applies the change. Changes of the firewall-mark rules are made in the list `marks`; the
    /// caller sets this list after all changes.
    pub(super) fn make(
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
            Step::DeleteService(key) => self.take_service(&key)?,
            // Services are removed one by one, and their servers after them.
            Step::Flush => while self.take_one() {},
            Step::Zero(key) => self.zero(key.as_ref())?,
            Step::AddServer(spec) => {
                self.add_server(&spec.service.into(), spec.server, &spec.config, now)?;
            }
            Step::EditServer(spec) => {
                self.edit_server(&spec.service.into(), spec.server, &spec.config)?;
            }
            Step::DeleteServer(key, addr) => self.delete_server(&key, addr, now)?,
            Step::ArrangeServers(key, order) => self.arrange_servers(&key, order)?,
            Step::SetTimeouts(Timeouts { tcp, tcp_fin, udp }) => {
                self.set_timeouts(tcp, tcp_fin, udp)?;
            }
            Step::SetSysctl(sysctl) => self.set_sysctl(&sysctl.name, &sysctl.value)?,
            Step::StartMaster(master, daemon) => {
                self.start_master(master)?;
                self.note_daemon(daemon);
            }
            Step::StartBackup(backup, daemon) => {
                self.start_backup(backup)?;
                self.note_daemon(daemon);
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

impl Step<'_> {
    /// Records the change in the plan, against which later changes of the list are checked.
    pub(super) fn note(&self, plan: &mut Plan<'_>) {
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
            | Self::ArrangeServers(..)
            | Self::SetTimeouts(_)
            | Self::SetSysctl(_)
            | Self::SetFilter(..)
            | Self::OwnVips(_) => {}
        }
    }

    pub(super) const fn is_about_marks(&self) -> bool {
        matches!(
            self,
            Self::InsertMark(..) | Self::DeleteMark(_) | Self::SetMarks(_)
        )
    }

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
            Self::Zero(_) | Self::ArrangeServers(..) | Self::SetFilter(..) => {}
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

/// Whether the scheduler of a service with these settings uses the servers' measured latency.
fn measures(control: &Control, config: &ServiceConfig) -> bool {
    let scheduler = control.scheduler(&config.scheduler);
    scheduler.is_ok_and(|scheduler| scheduler.needs_replies())
}

pub(super) fn serves(pool: &[LocalAddress], family: Family) -> bool {
    pool.iter().any(|local| Family::of(&local.addr) == family)
}
