//! An engine in memory, for tests: it refuses what the kernel's IPVS would refuse and forwards nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};

use lvs_core::api::{
    Failure, FailureCode, Info, LocalPool, ServerInfo, ServiceId, ServiceInfo, Stats,
};

use crate::config::Dataplane;
use crate::engine::control::{Control, ControlError, Op};
use crate::engine::{ConnectError, Host};
use crate::host_addresses::Addresses;

/// The state of the engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engine {
    pub(crate) services: Vec<ServiceInfo>,
    pub(crate) vips: BTreeSet<IpAddr>,
    pub(crate) sysctls: BTreeMap<String, String>,
    pub(crate) marks: Vec<String>,
    pub(crate) local: LocalPool,
}

fn refuse<T>(code: FailureCode, message: &str) -> Result<T, ControlError> {
    Err(ControlError::Refused(Failure::new(
        code,
        message.to_owned(),
    )))
}

impl Engine {
    pub(crate) fn service(&mut self, id: ServiceId) -> Result<&mut ServiceInfo, ControlError> {
        match self.services.iter_mut().find(|s| s.service == id) {
            Some(service) => Ok(service),
            None => refuse(FailureCode::NoService, "no such service"),
        }
    }

    pub(crate) fn server(
        &mut self,
        id: ServiceId,
        server: SocketAddr,
    ) -> Result<&mut ServerInfo, ControlError> {
        match self
            .service(id)?
            .servers
            .iter_mut()
            .find(|s| s.server == server)
        {
            Some(server) => Ok(server),
            None => refuse(FailureCode::NoServer, "no such server"),
        }
    }

    pub(crate) fn apply(&mut self, op: &Op) -> Result<(), ControlError> {
        match op {
            Op::SetSysctl(sysctl) => {
                self.sysctls
                    .insert(sysctl.name.clone(), sysctl.value.clone());
            }
            Op::SetMarks(marks) => self.marks.clone_from(marks),
            Op::SetLocal(pool) => self.local.clone_from(pool),
            Op::OwnVips(vips) => self.vips.clone_from(vips),
            Op::AddService(spec) => {
                if self.service(spec.service).is_ok() {
                    return refuse(FailureCode::Exists, "the service exists");
                }
                self.services.push(ServiceInfo {
                    service: spec.service,
                    config: spec.config.clone(),
                    owner: spec.owner.clone(),
                    stats: Stats::default(),
                    servers: Vec::new(),
                });
            }
            Op::EditService(spec) => {
                let service = self.service(spec.service)?;
                service.config = spec.config.clone();
                service.owner.clone_from(&spec.owner);
            }
            Op::DeleteService(id) => {
                self.service(*id)?;
                self.services.retain(|s| s.service != *id);
            }
            Op::AddServer(spec) => {
                if self.server(spec.service, spec.server).is_ok() {
                    return refuse(FailureCode::Exists, "the server exists");
                }
                let server = ServerInfo {
                    server: spec.server,
                    config: spec.config,
                    active: 0,
                    inactive: 0,
                    persistent: 0,
                    overloaded: false,
                    slow_start: None,
                    latency_us: None,
                    stats: Stats::default(),
                };
                self.service(spec.service)?.servers.insert(0, server);
            }
            Op::EditServer(spec) => self.server(spec.service, spec.server)?.config = spec.config,
            Op::DeleteServer(id, address) => {
                self.server(*id, *address)?;
                self.service(*id)?.servers.retain(|s| s.server != *address);
            }
        }
        Ok(())
    }
}

/// A machine with at most one engine, shared between a test and the daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct World(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    engine: Option<Engine>,
    /// Grows with each engine: a connection belongs to one.
    epoch: u32,
    starts: u32,
    foreign: bool,
    refuses: bool,
    /// Takes requests and does not answer.
    hangs: bool,
    /// One does not get an answer.
    hung: bool,
    ops: Vec<Op>,
}

impl World {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn host(&self) -> FakeHost {
        FakeHost {
            world: self.clone(),
        }
    }

    pub(crate) fn control(&self) -> Box<dyn Control> {
        Box::new(FakeControl {
            world: self.clone(),
            epoch: self.state().epoch,
        })
    }

    pub(crate) fn engine(&self) -> Engine {
        self.state().engine.clone().unwrap_or_default()
    }

    pub(crate) fn running(&self) -> bool {
        self.state().engine.is_some()
    }

    pub(crate) fn starts(&self) -> u32 {
        self.state().starts
    }

    /// All changes that any engine has made.
    pub(crate) fn ops(&self) -> Vec<Op> {
        self.state().ops.clone()
    }

    pub(crate) fn crash(&self) {
        self.state().engine = None;
    }

    pub(crate) fn hang(&self, hangs: bool) {
        self.state().hangs = hangs;
    }

    pub(crate) fn hung(&self) -> bool {
        self.state().hung
    }

    pub(crate) fn start_foreign(&self) {
        let mut state = self.state();
        state.engine = Some(Engine::default());
        state.epoch += 1;
        state.foreign = true;
    }

    pub(crate) fn refuse_to_start(&self) {
        self.state().refuses = true;
    }

    /// Servers of a service with their weights, by address.
    pub(crate) fn weights(&self, id: ServiceId) -> Vec<(SocketAddr, i32)> {
        let mut engine = self.engine();
        let mut all: Vec<_> = engine
            .service(id)
            .map(|s| {
                s.servers
                    .iter()
                    .map(|s| (s.server, s.config.weight))
                    .collect()
            })
            .unwrap_or_default();
        all.sort_unstable();
        all
    }
}

pub(crate) struct FakeHost {
    world: World,
}

impl Host for FakeHost {
    fn connect(&mut self) -> Result<Box<dyn Control>, ConnectError> {
        if self.world.running() {
            Ok(self.world.control())
        } else {
            Err(ConnectError::Absent("nobody listens".into()))
        }
    }

    fn start(&mut self, _: &Dataplane) -> Result<(), String> {
        let mut state = self.world.state();
        state.starts += 1;
        if !state.refuses {
            state.engine = Some(Engine::default());
            state.epoch += 1;
            state.foreign = false;
        }
        Ok(())
    }

    fn ended(&mut self) -> Option<String> {
        let state = self.world.state();
        (state.starts > 0 && state.engine.is_none()).then(|| "it ended with exit status: 1".into())
    }

    fn kill(&mut self) {
        self.world.crash();
    }

    fn alive(&mut self, _: u32) -> bool {
        self.world.running()
    }

    fn started_by_us(&self, _: u32) -> bool {
        !self.world.state().foreign
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
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut state = self.world.state();
        if state.engine.is_none() || state.epoch != self.epoch {
            return Err(ControlError::Lost("the connection ended".into()));
        }
        Ok(work(&mut state))
    }
}

impl Control for FakeControl {
    fn info(&mut self) -> Result<Info, ControlError> {
        self.with(|s| Info {
            pid: s.epoch,
            own_vips: s.engine.iter().flat_map(|e| e.vips.clone()).collect(),
            ..Info::default()
        })
    }

    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        self.with(|s| s.engine.clone().unwrap_or_default().services)
    }

    fn sysctl(&mut self, name: &str) -> Result<String, ControlError> {
        self.with(|s| {
            let engine = s.engine.as_ref();
            engine
                .and_then(|e| e.sysctls.get(name).cloned())
                .unwrap_or_default()
        })
    }

    fn marks(&mut self) -> Result<Vec<String>, ControlError> {
        self.with(|s| s.engine.clone().unwrap_or_default().marks)
    }

    fn local(&mut self) -> Result<LocalPool, ControlError> {
        self.with(|s| s.engine.clone().unwrap_or_default().local)
    }

    fn apply(&mut self, op: &Op) -> Result<(), ControlError> {
        self.with(|s| {
            s.ops.push(op.clone());
            s.engine.as_mut().map_or(Ok(()), |e| e.apply(op))
        })?
    }

    fn stop(&mut self) -> Result<(), ControlError> {
        self.with(|s| s.engine = None)
    }
}
