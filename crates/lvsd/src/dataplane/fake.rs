//! A dataplane in memory for tests: a director of `lvs-core` that applies changes, but forwards
//! nothing.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use lvs_core::api::{
    Call, Done, Failure, FailureCode, Info, LocalPool, Permissive, ServerInfo, ServiceId,
    ServiceInfo, Sysctl,
};
use lvs_core::attempts::Attempts;
use lvs_core::filter::FilterLists;
use lvs_core::settings::Sysctls;
use lvs_core::sync::SyncDaemon;
use lvs_core::{Control, Instant, Options};

use crate::config::Dataplane;
use crate::dataplane::control::{ControlError, DataplaneControl};
use crate::dataplane::{ConnectError, Given, Host};
use crate::facts::Addresses;
use crate::reconcile::Actual;

#[derive(Debug)]
pub(crate) struct FakeDataplane(Control);

impl Default for FakeDataplane {
    fn default() -> Self {
        Self(Control::new(Options {
            max_connections: 1,
            ..Options::default()
        }))
    }
}

impl FakeDataplane {
    /// Makes all changes or none.
    pub(crate) fn apply(&mut self, changes: &[Call]) -> Result<(), ControlError> {
        match self.0.apply(changes, &Permissive, Instant::ZERO) {
            Ok(_) => Ok(()),
            Err(refused) => {
                let mut failure = refused.failure;
                failure.change = (changes.len() > 1).then_some(refused.change);
                Err(ControlError::Refused(failure))
            }
        }
    }

    /// The servers that the scheduler would choose for new clients.
    pub(crate) fn choices(&self, id: ServiceId, clients: u16) -> Vec<Option<SocketAddr>> {
        let shard = self.0.shard(0).expect("the director has a shard");
        let ServiceId::Tcp { address } = id else {
            panic!("the service is not a TCP service")
        };
        let choice = |n: u16| {
            let tuple = lvs_core::Tuple::new(
                lvs_core::Protocol::TCP,
                (
                    std::net::Ipv4Addr::from_bits(0xc000_0200 + 7 * u32::from(n)),
                    40_000 + n,
                )
                    .into(),
                address,
            );
            self.0.explain(&shard, tuple, 0, Instant::ZERO).server
        };
        (0..clients).map(choice).collect()
    }

    pub(crate) fn held(&self) -> Held {
        let control = &self.0;
        let service = |service: &lvs_core::Service| ServiceInfo {
            service: service.key().into(),
            config: service.config().clone(),
            owner: service.owner().map(ToOwned::to_owned),
            stats: service.stats(),
            refused: service.refusals().count(),
            refusals: Vec::new(),
            drops: Vec::new(),
            servers: service.servers().iter().map(|s| server_info(s)).collect(),
        };
        let sysctl = |name: &&str| {
            let value = control.sysctls().get(name).ok()?;
            Some(((*name).to_owned(), value))
        };
        let (local, hairpin) = control.local_pool();
        Held(Actual {
            services: control.services().map(service).collect(),
            vips: control.own_vips().iter().copied().collect(),
            sysctls: Sysctls::NAMES.iter().filter_map(sysctl).collect(),
            daemons: control.daemons().to_vec(),
            marks: control.marks().iter().map(ToString::to_string).collect(),
            filters: control
                .filters()
                .map(|(key, filter)| (key.map(ServiceId::from), filter.lists()))
                .collect(),
            local: LocalPool {
                addresses: local.iter().map(|local| local.addr).collect(),
                hairpin,
            },
            ..Actual::default()
        })
    }
}

fn server_info(server: &lvs_core::Server) -> ServerInfo {
    ServerInfo {
        active: server.active(),
        inactive: server.inactive(),
        persistent: server.templates(),
        overloaded: server.is_overloaded(),
        ..ServerInfo::new(server.addr(), server.config())
    }
}

/// The state of a dataplane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(pub(crate) Actual);

impl Held {
    pub(crate) fn service(&self, id: ServiceId) -> Option<&ServiceInfo> {
        self.0.services.iter().find(|s| s.service == id)
    }

    pub(crate) fn vips(&self) -> &BTreeSet<IpAddr> {
        &self.0.vips
    }

    pub(crate) fn sysctl(&self, name: &str) -> Option<&str> {
        let mut all = self.0.sysctls.iter();
        all.find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }
}

/// A host with at most one dataplane, shared by test and daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct World(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    dataplane: Option<FakeDataplane>,
    /// Number of the present dataplane. Connections to an earlier one are closed.
    epoch: u32,
    starts: u32,
    foreign: bool,
    refuses: bool,
    /// Whether the dataplane accepts requests without answering.
    hangs: bool,
    /// Whether a request waits without an answer.
    hung: bool,
    /// Whether the dataplane does not answer until it is killed.
    silent: bool,
    /// Number of connection attempts that a starting dataplane does not answer.
    slow: u32,
    /// Whether the dataplane accepts a request to stop, but continues to run.
    stays: bool,
    /// Process ids of hung dataplanes that lvsd has killed.
    ended: Vec<u32>,
    changes: Vec<Call>,
    requests: usize,
    /// Faults of the next requests.
    faults: Vec<Fault>,
    directory: Option<tempfile::TempDir>,
    /// Settings that a daemon has stored for its successor.
    given: Given,
    /// Whether the dataplane refuses all lists of changes, because it cannot parse one of them.
    reads_no_lists: bool,
    /// Servers with an active connection.
    busy: Vec<(ServiceId, SocketAddr)>,
    /// Connection attempts in the last minute by server address.
    attempts: HashMap<SocketAddr, Attempts>,
}

/// Fault of a request with changes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Refuses the list because of the change with this index.
    Refuses(usize),
    /// Refuses the list without the index of a change.
    RefusesAll,
    /// Makes the changes, but closes the connection without an answer.
    Made,
    /// Closes the connection, and changes nothing.
    Lost,
}

impl World {
    /// Sets the faults of the next requests, the last fault for the first request.
    pub(crate) fn go_wrong(&self, faults: &[Fault]) {
        self.state().faults = faults.to_vec();
    }

    /// The path of the file with operator overrides.
    pub(crate) fn admin(&self) -> std::path::PathBuf {
        let mut state = self.state();
        let directory = state
            .directory
            .get_or_insert_with(|| tempfile::tempdir().unwrap());
        directory.path().join("admin.json")
    }

    /// Makes the dataplane refuse all lists without the index of a change.
    pub(crate) fn read_no_lists(&self) {
        self.state().reads_no_lists = true;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn host(&self) -> FakeHost {
        FakeHost {
            world: self.clone(),
        }
    }

    pub(crate) fn control(&self) -> Box<dyn DataplaneControl> {
        Box::new(FakeControl {
            world: self.clone(),
            epoch: self.state().epoch,
        })
    }

    /// The state of the present dataplane; empty if none runs.
    pub(crate) fn dataplane(&self) -> Held {
        let state = self.state();
        state
            .dataplane
            .as_ref()
            .map(FakeDataplane::held)
            .unwrap_or_default()
    }

    pub(crate) fn running(&self) -> bool {
        self.state().dataplane.is_some()
    }

    pub(crate) fn starts(&self) -> u32 {
        self.state().starts
    }

    /// All changes so far, by any dataplane.
    pub(crate) fn changes(&self) -> Vec<Call> {
        self.state().changes.clone()
    }

    /// Number of requests with changes so far, to any dataplane.
    pub(crate) fn requests(&self) -> usize {
        self.state().requests
    }

    pub(crate) fn crash(&self) {
        self.state().dataplane = None;
    }

    /// Adds an active connection of a server; the connection never ends.
    pub(crate) fn connect(&self, service: ServiceId, server: SocketAddr) {
        self.state().busy.push((service, server));
    }

    pub(crate) fn hang(&self, hangs: bool) {
        self.state().hangs = hangs;
    }

    /// Sets the numbers of opened and unanswered connections in the last minute for a server
    /// address.
    pub(crate) fn set_attempts(&self, server: &str, opened: u64, unanswered: u64) {
        let attempts = Attempts { opened, unanswered };
        let server = server.parse().expect("the address is valid");
        self.state().attempts.insert(server, attempts);
    }

    pub(crate) fn hung(&self) -> bool {
        self.state().hung
    }

    pub(crate) fn fall_silent(&self) {
        self.state().silent = true;
    }

    /// Makes a starting dataplane ignore this number of connection attempts.
    pub(crate) fn start_slowly(&self, attempts: u32) {
        self.state().slow = attempts;
    }

    pub(crate) fn stay(&self) {
        self.state().stays = true;
    }

    pub(crate) fn ended(&self) -> Vec<u32> {
        self.state().ended.clone()
    }

    pub(crate) fn start_foreign(&self) {
        let mut state = self.state();
        state.dataplane = Some(FakeDataplane::default());
        state.epoch += 1;
        state.foreign = true;
    }

    pub(crate) fn refuse_to_start(&self) {
        self.state().refuses = true;
    }

    /// Sorted servers of a service with their weights.
    pub(crate) fn weights(&self, id: ServiceId) -> Vec<(SocketAddr, i32)> {
        let held = self.dataplane();
        let servers = held.service(id).map_or(&[][..], |service| &service.servers);
        let mut all: Vec<_> = servers
            .iter()
            .map(|server| (server.server, server.config.weight))
            .collect();
        all.sort_unstable();
        all
    }
}

pub(crate) struct FakeHost {
    world: World,
}

impl Host for FakeHost {
    fn connect(&mut self, _: Duration) -> Result<Box<dyn DataplaneControl>, ConnectError> {
        let mut state = self.world.state();
        let slow = state.dataplane.is_some() && state.slow > 0;
        state.slow -= u32::from(slow);
        let (silent, pid) = (state.silent || slow, Some(state.epoch));
        drop(state);
        if silent {
            let why = "the dataplane does not answer".into();
            Err(ConnectError::Silent { why, pid })
        } else if self.world.running() {
            Ok(self.world.control())
        } else {
            Err(ConnectError::Absent("nobody listens".into()))
        }
    }

    fn start(&mut self, _: &Dataplane) -> Result<(), String> {
        let mut state = self.world.state();
        state.starts += 1;
        if !state.refuses {
            state.dataplane = Some(FakeDataplane::default());
            state.epoch += 1;
            state.foreign = false;
        }
        Ok(())
    }

    fn ended(&mut self) -> Option<String> {
        let state = self.world.state();
        (state.starts > 0 && state.dataplane.is_none())
            .then(|| "it ended with exit status: 1".into())
    }

    fn kill(&mut self) {
        self.world.crash();
    }

    fn end(&mut self, pid: u32) -> Result<(), String> {
        let mut state = self.world.state();
        assert_eq!(pid, state.epoch);
        state.ended.push(pid);
        state.silent = false;
        state.dataplane = None;
        Ok(())
    }

    fn alive(&mut self, _: u32) -> bool {
        self.world.running()
    }

    fn started_by_us(&self, _: u32) -> bool {
        !self.world.state().foreign
    }

    fn identity(&self, pid: u32) -> String {
        pid.to_string()
    }

    fn remember(&mut self, given: &Given) {
        self.world.state().given = given.clone();
    }

    fn recall(&self) -> Given {
        self.world.state().given.clone()
    }

    fn addresses(&self) -> Addresses {
        Addresses::default()
    }
}

struct FakeControl {
    world: World,
    epoch: u32,
}

impl FakeControl {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> Result<T, ControlError> {
        while self.world.state().hangs {
            self.world.state().hung = true;
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut state = self.world.state();
        if state.silent {
            return Err(ControlError::Silent("it does not answer".into()));
        }
        if state.dataplane.is_none() || state.epoch != self.epoch {
            return Err(ControlError::Lost("the connection ended".into()));
        }
        Ok(work(&mut state))
    }

    fn held(&self) -> Result<Actual, ControlError> {
        self.with(|state| {
            let dataplane = state.dataplane.as_ref();
            dataplane.map(FakeDataplane::held).unwrap_or_default().0
        })
    }
}

impl DataplaneControl for FakeControl {
    fn info(&mut self) -> Result<Info, ControlError> {
        let own_vips = self.held()?.vips.into_iter().collect();
        self.with(|state| Info {
            pid: state.epoch,
            own_vips,
            ..Info::default()
        })
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        let mut services = self.held()?.services;
        let (busy, attempts) = self.with(|state| (state.busy.clone(), state.attempts.clone()))?;
        for service in &mut services {
            for server in &mut service.servers {
                server.active += u32::from(busy.contains(&(service.service, server.server)));
                let attempts = attempts.get(&server.server);
                server.attempts.last_minute = attempts.copied().unwrap_or_default();
            }
        }
        Ok(services)
    }

    fn sysctls(&mut self) -> Result<Vec<Sysctl>, ControlError> {
        let all = self.held()?.sysctls.into_iter();
        Ok(all.map(|(name, value)| Sysctl { name, value }).collect())
    }

    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        Ok(self.held()?.marks)
    }

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        Ok(self.held()?.filters)
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, ControlError> {
        Ok(self.held()?.daemons)
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        Ok(self.held()?.local)
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.with(|state| {
            state.requests += 1;
            let fault = state.faults.pop();
            match fault {
                Some(Fault::Refuses(n)) => {
                    let mut failure = Failure::new(FailureCode::Invalid, "by chance");
                    failure.change = (changes.len() > 1).then_some(n % changes.len());
                    return Err(ControlError::Refused(failure));
                }
                Some(Fault::RefusesAll) => {
                    let failure = Failure::new(FailureCode::Malformed, "by chance");
                    return Err(ControlError::Refused(failure));
                }
                Some(Fault::Lost) => return Err(ControlError::Lost("by chance".into())),
                Some(Fault::Made) | None => {}
            }
            if state.reads_no_lists && changes.len() > 1 {
                let failure = Failure::new(FailureCode::Malformed, "apply: not a list");
                return Err(ControlError::Refused(failure));
            }
            if let Some(dataplane) = &mut state.dataplane {
                dataplane.apply(changes)?;
            }
            state.changes.extend_from_slice(changes);
            if let Some(Fault::Made) = fault {
                return Err(ControlError::Lost("by chance".into()));
            }
            Ok(Done::default())
        })?
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.with(|state| {
            if !state.stays {
                state.dataplane = None;
            }
        })
    }
}
