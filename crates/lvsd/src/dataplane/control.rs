//! Requests to a dataplane: a trait, its implementation over the control socket, and the
//! application of a list of changes with as few requests as possible, without the changes that the
//! dataplane refuses.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lvs_api::words::counted;
use lvs_api::{Address, Client, Error};
use lvs_core::api::{
    Call, Done, Failure, FailureCode, FilterItem, Info, LocalInfo, LocalPool, MarkText,
    ReasonCount, ServiceId, ServiceInfo, Sysctl,
};
use lvs_core::filter::FilterLists;
use lvs_core::sync::SyncDaemon;
use lvs_sys::lock;
use serde::de::IgnoredAny;
use tokio::time::Instant;

use super::ConnectError;
use super::describe::{Names, Tense};
use super::memory::Base;

/// The reason why a request to the dataplane failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The dataplane refused the request; nothing has changed.
    #[error("{}", .0.message)]
    Refused(Failure),
    /// The connection to the dataplane failed, for example because the dataplane closed it.
    #[error("the dataplane does not answer: {0}")]
    Lost(String),
    /// The dataplane is connected and does not answer, or reports that a part of it hangs.
    #[error("the dataplane hangs: {0}")]
    Silent(String),
}

impl ControlError {
    /// The reason, without the beginning that names the dataplane.
    pub(super) fn why(self) -> String {
        match self {
            Self::Refused(failure) => failure.message,
            Self::Lost(why) | Self::Silent(why) => why,
        }
    }
}

/// Time of the dataplane's last answer, shared with the thread that reports it.
#[derive(Clone, Debug, Default)]
pub struct LastAnswer(Arc<Mutex<Option<Instant>>>);

impl LastAnswer {
    /// The time of the last answer; `None` before the first answer.
    pub fn get(&self) -> Option<Instant> {
        *lock(&self.0)
    }

    /// Records the time of a result that is an answer. A refusal is an answer.
    pub(super) fn note<T>(&self, result: &Result<T, ControlError>) {
        if let Ok(_) | Err(ControlError::Refused(_)) = result {
            *lock(&self.0) = Some(Instant::now());
        }
    }
}

/// A connection to a dataplane. Its calls block, so the daemon makes them outside of its event
/// loop. The default implementations suit the proxy, which lacks these settings.
pub trait DataplaneControl: Send {
    /// Reads the state of the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn info(&mut self) -> Result<Info, ControlError> {
        Ok(Info::default())
    }

    /// Lists all services of all owners, with their servers.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError>;

    /// Lists all sysctls.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the synchronisation daemons.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the mark rules.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        Ok(Vec::new())
    }

    /// Lists the source filters that are not empty, by service; `None` is the filter of all
    /// services.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError>;

    /// Reads the local addresses of full NAT.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn local(&mut self) -> Result<LocalPool, ControlError> {
        Ok(LocalPool::default())
    }

    /// Reads the numbers of packets that were dropped or passed to the host, by reason.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn drops(&mut self) -> Result<Vec<ReasonCount>, ControlError> {
        Ok(Vec::new())
    }

    /// The version of the dataplane; empty if unknown.
    fn version(&self) -> String {
        String::new()
    }

    /// Makes all of these changes in order, or none.
    ///
    /// # Errors
    /// See [`ControlError`]. A refusal of several changes contains the index of the first change
    /// that cannot be made, if it is known.
    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError>;

    /// Sets the time without an answer after which the dataplane counts as hung.
    fn set_patience(&mut self, _patience: Duration) {}

    /// Stops the dataplane.
    ///
    /// # Errors
    /// See [`ControlError`].
    fn stop(&mut self) -> Result<(), ControlError> {
        Ok(())
    }
}

/// Connects to the dataplane at `address`. The dataplane counts as hung if it does not answer
/// within `patience`.
///
/// # Errors
/// See [`ConnectError`].
pub fn connect(
    address: &Address,
    patience: Duration,
) -> Result<Box<dyn DataplaneControl>, ConnectError> {
    let client = Client::connect_patiently(address, patience).map_err(|error| match error {
        Error::Absent { .. } | Error::Stale { .. } | Error::Gone { .. } => {
            ConnectError::Absent(error.to_string())
        }
        Error::Silent { pid, .. } => ConnectError::Silent {
            why: error.to_string(),
            pid,
        },
        _ => ConnectError::Refused(error.to_string()),
    })?;
    if !client.hello().writable {
        return Err(ConnectError::Refused(format!(
            "the dataplane at {address} allows this process read access only; run lvsd as root with CAP_NET_ADMIN, as the dataplane's user, or in the group of its --group"
        )));
    }
    Ok(Box::new(Connection(client, patience)))
}

/// A client, and the timeout of its requests without changes.
struct Connection(Client, Duration);

/// Minimum timeout of a request with changes, which may contain thousands of servers.
const CHANGES_PATIENCE: Duration = Duration::from_secs(60);

fn translate(error: Error) -> ControlError {
    match error {
        Error::Refused(failure) => ControlError::Refused(failure),
        Error::Silent { .. } => ControlError::Silent(error.to_string()),
        other => ControlError::Lost(other.to_string()),
    }
}

impl DataplaneControl for Connection {
    fn info(&mut self) -> Result<Info, ControlError> {
        self.0.call(&Call::Info {}).map_err(|error| match error {
            // The control socket answers, but the packet path or the keeper hangs.
            Error::Refused(failure) if failure.code == FailureCode::Internal => {
                ControlError::Silent(failure.message)
            }
            other => translate(other),
        })
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        self.0
            .collect(&Call::ServiceList { service: None })
            .map_err(translate)
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        self.0.collect(&Call::DaemonList {}).map_err(translate)
    }

    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        self.0
            .collect(&Call::SysctlGet { name: None })
            .map_err(translate)
    }

    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        let all: Vec<MarkText> = self.0.collect(&Call::MarkList {}).map_err(translate)?;
        Ok(all.into_iter().map(|rule| rule.rule).collect())
    }

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        let items: Vec<FilterItem> = self.0.collect(&Call::FilterList {}).map_err(translate)?;
        let mut all: HashMap<_, FilterLists> = HashMap::new();
        for FilterItem { service, lists } in items {
            let whole = all.entry(service).or_default();
            whole.allow.extend(lists.allow);
            whole.deny.extend(lists.deny);
        }
        Ok(all)
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        let info: LocalInfo = self.0.call(&Call::LocalGet {}).map_err(translate)?;
        Ok(LocalPool {
            addresses: info.addresses.iter().map(|local| local.address).collect(),
            hairpin: info.hairpin,
        })
    }

    fn drops(&mut self) -> Result<Vec<ReasonCount>, ControlError> {
        self.0.collect(&Call::Drops {}).map_err(translate)
    }

    fn version(&self) -> String {
        let name = &self.0.hello().dataplane;
        name.rsplit(' ').next().unwrap_or_default().to_owned()
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.0.set_patience(self.1.max(CHANGES_PATIENCE));
        let done = match changes {
            [one] => self.0.call(one),
            changes => self.0.call(&Call::Apply {
                changes: changes.to_vec(),
            }),
        };
        self.0.set_patience(self.1);
        done.map_err(translate)
    }

    fn set_patience(&mut self, patience: Duration) {
        self.0.set_patience(patience);
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.0
            .call::<IgnoredAny>(&Call::Stop {})
            .map(|_| ())
            .map_err(translate)
    }
}

/// Maximum number of changes of one request. Between two requests, lvsd can apply results of health
/// checks.
const PIECE: usize = lvs_core::api::CHANGES_MAX / 8;

/// Maximum number of changes that are logged one by one at the level `info`. More changes share one
/// line at this level, and each has a line at the level `debug`.
pub(super) const LOGGED_MAX: usize = 20;

/// Applies a list of changes, and collects the results.
pub(super) struct CarryOut<'a> {
    control: &'a mut dyn DataplaneControl,
    answered: &'a LastAnswer,
    names: &'a Names<'a>,
    /// Services that the dataplane refuses; changes of their servers are not sent.
    broken: HashSet<ServiceId>,
    /// Numbers of changes that share one log line.
    unlogged: Numbers,
    /// Whether all changes are logged at the level `debug` only: the log has a line about their
    /// cause, such as a reload.
    pub(super) is_quiet: bool,
    /// Refusals of the dataplane as text.
    pub(super) refusals: Vec<String>,
    /// VIPs that lvsd last set as owned; `None` if it has not set any.
    pub(super) own_vips: Option<BTreeSet<IpAddr>>,
    /// The state of lvsd's services and settings after the changes.
    pub(super) base: Base,
}

impl<'a> CarryOut<'a> {
    pub(super) fn new(
        control: &'a mut dyn DataplaneControl,
        answered: &'a LastAnswer,
        names: &'a Names<'a>,
        base: Base,
    ) -> Self {
        Self {
            control,
            answered,
            names,
            broken: HashSet::new(),
            unlogged: Numbers::default(),
            is_quiet: false,
            refusals: Vec::new(),
            own_vips: None,
            base,
        }
    }

    /// Applies the changes in order, and returns true. If `news` is set between two requests, stops
    /// there and returns false, because new input must be handled first.
    ///
    /// # Errors
    /// The connection to the dataplane is lost, or the dataplane hangs.
    pub(super) fn run(
        &mut self,
        changes: &[Call],
        news: &AtomicBool,
    ) -> Result<bool, ControlError> {
        let done = self.run_pieces(changes, news);
        let numbers = std::mem::take(&mut self.unlogged).words();
        if !numbers.is_empty() && !self.is_quiet {
            tracing::info!("the dataplane has {numbers}");
        }
        done
    }

    fn run_pieces(&mut self, changes: &[Call], news: &AtomicBool) -> Result<bool, ControlError> {
        self.unlogged.in_use = self.is_quiet || changes.len() > LOGGED_MAX;
        for (n, piece) in changes.chunks(PIECE).enumerate() {
            if n > 0 && news.load(Ordering::Acquire) {
                return Ok(false);
            }
            let waits = piece.iter().any(|change| self.waits(change));
            if !waits && self.attempt(piece)?.is_none() {
                continue;
            }
            // A refused change must not delay changes of other services. Changes of a service stay
            // together, in order.
            let together = |a: &Call, b: &Call| subject(a).is_some() && subject(a) == subject(b);
            for group in piece.chunk_by(together) {
                self.without_refused(group)?;
            }
        }
        Ok(true)
    }

    /// Applies changes without those that the dataplane refuses.
    fn without_refused(&mut self, mut rest: &[Call]) -> Result<(), ControlError> {
        let mut limit = rest.len();
        while let Some(first) = rest.first() {
            if self.waits(first) {
                rest = &rest[1..];
                limit = rest.len();
                continue;
            }
            let Some(failure) = self.attempt(&rest[..limit])? else {
                rest = &rest[limit..];
                limit = rest.len();
                continue;
            };
            match failure.change.filter(|at| (1..limit).contains(at)) {
                // The changes before the refused one are applied separately.
                Some(at) => limit = at,
                // The dataplane refused the whole list, perhaps because it cannot parse one of the
                // changes.
                None if failure.change.is_none() && limit > 1 => limit = 1,
                None => {
                    self.refused(first, &failure);
                    rest = &rest[1..];
                    limit = rest.len();
                }
            }
        }
        Ok(())
    }

    /// Applies all of these changes, or none. Logs and records applied changes; otherwise returns
    /// the refusal.
    fn attempt(&mut self, changes: &[Call]) -> Result<Option<Failure>, ControlError> {
        if changes.is_empty() {
            return Ok(None);
        }
        let result = self.control.apply(changes);
        self.answered.note(&result);
        let done = match result {
            Ok(done) => done,
            Err(ControlError::Refused(failure)) => return Ok(Some(failure)),
            Err(lost) => return Err(lost),
        };
        for change in changes {
            if self.unlogged.in_use {
                tracing::debug!("{}", self.names.describe(change, Tense::Done));
                self.unlogged.count(change);
            } else {
                tracing::info!("{}", self.names.describe(change, Tense::Done));
            }
            self.base.note(change);
            if let Call::VipsOwn { addresses } = change {
                self.own_vips = Some(addresses.iter().copied().collect());
            }
        }
        for warning in &done.warnings {
            tracing::warn!("the dataplane has made the changes, but {warning}");
        }
        Ok(None)
    }

    fn refused(&mut self, change: &Call, failure: &Failure) {
        let what = self.names.describe(change, Tense::Wish);
        let mut refusal = format!("cannot {what}: {}", failure.message);
        if let Call::ServiceAdd(spec) = change {
            self.broken.insert(spec.service);
            refusal.push_str("; its servers are added only after the service");
        }
        self.refusals.push(refusal);
    }

    /// Whether the change is omitted because its service could not be added.
    fn waits(&self, change: &Call) -> bool {
        !self.broken.is_empty() && subject(change).is_some_and(|id| self.broken.contains(&id))
    }
}

/// Numbers of changes by kind.
#[derive(Debug, Default)]
pub struct Numbers {
    /// Whether changes are counted, and logged only at the level `debug`.
    in_use: bool,
    /// Numbers of added, changed and removed services.
    pub services: [usize; 3],
    /// Numbers of added, changed and removed servers.
    pub servers: [usize; 3],
    /// Number of other changes, such as sysctls and VIPs.
    others: usize,
}

impl Numbers {
    const fn count(&mut self, change: &Call) {
        match change {
            Call::ServiceAdd(_) => self.services[0] += 1,
            Call::ServiceEdit(_) => self.services[1] += 1,
            Call::ServiceDelete { .. } => self.services[2] += 1,
            Call::ServerAdd(_) => self.servers[0] += 1,
            Call::ServerEdit(_) => self.servers[1] += 1,
            Call::ServerDelete { .. } => self.servers[2] += 1,
            _ => self.others += 1,
        }
    }

    /// Formats the numbers; empty if all are 0.
    pub fn words(&self) -> String {
        let of = |[new, changed, gone]: [usize; 3], thing: &str| {
            [(new, "new"), (changed, "changed"), (gone, "removed")]
                .into_iter()
                .filter(|(number, _)| *number > 0)
                .map(|(number, how)| counted(number, &format!("{how} {thing}")))
                .collect::<Vec<_>>()
        };
        let mut all = of(self.services, "service");
        all.append(&mut of(self.servers, "server"));
        if self.others > 0 {
            all.push(counted(self.others, "other change"));
        }
        all.join(", ")
    }
}

/// The service to which a change belongs; `None` if it belongs to no service.
const fn subject(change: &Call) -> Option<ServiceId> {
    match change {
        Call::ServiceAdd(spec) | Call::ServiceEdit(spec) => Some(spec.service),
        Call::ServerAdd(spec) | Call::ServerEdit(spec) => Some(spec.service),
        Call::ServiceDelete { service }
        | Call::ServerDelete { service, .. }
        | Call::ServerArrange { service, .. } => Some(*service),
        _ => None,
    }
}

#[cfg(test)]
mod tests {

    use lvs_core::api::{ServerSpec, ServiceSpec, Sysctl};
    use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};

    use super::*;
    use crate::dataplane::fake::World;
    use crate::reconcile::{Desired, DesiredService};

    fn id(n: u8) -> ServiceId {
        ServiceId::Tcp {
            address: ([192, 0, 2, n], 80).into(),
        }
    }

    fn service(n: u8, scheduler: &str) -> Call {
        Call::ServiceAdd(ServiceSpec {
            service: id(n),
            config: ServiceConfig::new(Family::V4, scheduler),
            owner: None,
        })
    }

    fn server(n: u8, host: u8) -> Call {
        Call::ServerAdd(ServerSpec {
            service: id(n),
            server: ([10, 0, 0, host], 80).into(),
            config: ServerConfig::new(1, Forwarding::Nat),
        })
    }

    fn sysctl(value: &str) -> Call {
        Call::SysctlSet(Sysctl {
            name: "sync_version".to_owned(),
            value: value.to_owned(),
        })
    }

    #[test]
    fn log_summarises_long_list_of_changes_and_lists_each_change_of_short_list() {
        let log = crate::daemon::tests::Log::default();
        let _listening = log.listen();
        let mut changes = vec![service(1, "rr")];
        changes.extend((0..50).map(|host| server(1, host)));
        changes.push(sysctl("1"));
        run(&changes);
        let text = log.text();
        let lines: Vec<_> = text.lines().filter(|line| line.contains("INFO")).collect();
        assert_eq!(lines.len(), 1, "{text}");
        let words = "the dataplane has 1 new service, 50 new servers, 1 other change";
        assert!(lines[0].ends_with(words), "{text}");
        run(&changes[..2]);
        assert!(log.text().lines().count() > 2, "{}", log.text());
    }

    /// For each service, the last octet of its address and of its servers' addresses.
    type Hosts = Vec<(u8, Vec<u8>)>;

    /// Applies changes to a new dataplane. Returns refusals, number of requests, and the services
    /// afterwards.
    fn run(changes: &[Call]) -> (Vec<String>, usize, Hosts) {
        let world = World::default();
        world.start_foreign();
        run_in(&world, changes)
    }

    fn run_in(world: &World, changes: &[Call]) -> (Vec<String>, usize, Hosts) {
        let desired = Desired {
            file: "lvsd.toml".into(),
            services: vec![DesiredService {
                name: "web".to_owned(),
                line: 7,
                ..DesiredService::of(id(1), ServiceConfig::new(Family::V4, "rr"), Vec::new())
            }],
            ..Desired::default()
        };
        let names = Names::new(&desired);
        let mut control = world.control();
        let answered = LastAnswer::default();
        let mut work = CarryOut::new(control.as_mut(), &answered, &names, Base::default());
        work.run(changes, &AtomicBool::new(false))
            .expect("the connection is not lost");
        let refusals = work.refusals;
        let mut held = Hosts::new();
        for n in 0..200 {
            let weights = world.weights(id(n));
            let last = |address: &std::net::SocketAddr| match address.ip() {
                IpAddr::V4(ip) => ip.octets()[3],
                IpAddr::V6(_) => 0,
            };
            if world.dataplane().service(id(n)).is_some() {
                held.push((
                    n,
                    weights.iter().map(|(address, _)| last(address)).collect(),
                ));
            }
        }
        (refusals, world.requests(), held)
    }

    #[test]
    fn interrupted_change_list_records_time_of_last_answer() {
        let world = World::default();
        world.start_foreign();
        let mut changes = vec![service(1, "rr")];
        changes.extend((0..=PIECE).map(|_| sysctl("1")));
        let desired = Desired::default();
        let names = Names::new(&desired);
        let mut control = world.control();
        let answered = LastAnswer::default();
        let mut work = CarryOut::new(control.as_mut(), &answered, &names, Base::default());
        let done = work.run(&changes, &AtomicBool::new(true));
        assert!(matches!(done, Ok(false)), "{done:?}");
        assert!(answered.get().is_some());
    }

    #[test]
    fn accepted_changes_need_one_request() {
        let changes = [sysctl("1"), service(1, "rr"), server(1, 1), server(1, 2)];
        assert_eq!(run(&changes), (vec![], 1, vec![(1, vec![1, 2])]));
        assert_eq!(run(&[]).1, 0);
    }

    #[test]
    fn refused_change_is_reported_and_independent_changes_are_applied() {
        let (refusals, _, held) = run(&[
            sysctl("7"),
            service(1, "no-such"),
            server(1, 1),
            server(1, 2),
            service(2, "rr"),
            server(2, 1),
            server(2, 255),
            server(2, 1),
            server(2, 3),
            service(3, "rr"),
            Call::VipsOwn { addresses: vec![] },
        ]);
        assert_eq!(held, [(2, vec![1, 3, 255]), (3, vec![])]);
        assert_eq!(refusals.len(), 3, "{refusals:#?}");
        assert!(
            refusals[0].starts_with("cannot set sysctl sync_version = 7: "),
            "{refusals:#?}"
        );
        assert!(
            refusals[1].starts_with(
                "cannot add service web (tcp 192.0.2.1:80, scheduler no-such) at lvsd.toml:7: "
            ) && refusals[1].ends_with("; its servers are added only after the service"),
            "{refusals:#?}"
        );
        assert!(
            refusals[2].starts_with(
                "cannot add server 10.0.0.1:80 (weight 1) to service tcp 192.0.2.2:80: "
            ),
            "{refusals:#?}"
        );
    }

    #[test]
    fn change_list_refused_without_index_is_applied_change_by_change() {
        let world = World::default();
        world.start_foreign();
        world.read_no_lists();
        let changes = [
            service(1, "rr"),
            server(1, 1),
            server(1, 1),
            server(1, 2),
            service(2, "no-such"),
            server(2, 1),
            service(3, "rr"),
        ];
        let (refusals, requests, held) = run_in(&world, &changes);
        assert_eq!(held, [(1, vec![1, 2]), (3, vec![])]);
        assert_eq!(refusals.len(), 2, "{refusals:#?}");
        assert!(requests <= 2 * changes.len(), "{requests}");
    }

    /// The number of requests is at most proportional to the numbers of services and of refusals.
    #[test]
    fn many_refused_changes_need_a_limited_number_of_requests() {
        let mut changes = Vec::new();
        for n in 0..200 {
            changes.push(service(n, if n % 2 == 0 { "rr" } else { "no-such" }));
            changes.extend((1..10).map(|host| server(n, host / 2)));
        }
        let (refusals, requests, held) = run(&changes);
        // Each valid service gets four servers twice, and server 0 (10.0.0.0) once.
        assert_eq!(refusals.len(), 100 + 100 * 4, "{:?}", &refusals[..9]);
        assert_eq!(held.len(), 100);
        assert!(requests <= 3 * refusals.len() + 200 + 1, "{requests}");
    }
}
