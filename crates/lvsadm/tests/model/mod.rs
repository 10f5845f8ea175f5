//! An engine that forwards nothing: it keeps services, servers, timeouts and daemons by the kernel's rules.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use lvs_core::api::{
    Call, Failure, FailureCode, ListEnd, ServerInfo, ServerSpec, ServiceId, ServiceInfo,
    ServiceSpec, Stats, SyncDaemon, SyncRole, Timeouts,
};
use lvs_core::{Family, Forwarding, ServiceKey, Tunnel};
use lvs_dataplane::control::server::{Engine, Sink};
use serde::Serialize;
use serde_json::{Value, json};

const SCHEDULERS: [&str; 13] = [
    "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "fo", "ovf",
];
/// Interfaces of the machine on which the sessions were recorded, with their MTU.
const INTERFACES: [(&str, u32); 3] = [("lo", 65_536), ("cl", 1500), ("sv", 1500)];

pub(crate) struct Model(Mutex<State>);

struct State {
    services: Vec<ServiceInfo>,
    daemons: Vec<SyncDaemon>,
    timeouts: Timeouts,
    /// The kernel has the scheduler `twos`.
    twos: bool,
}

impl Model {
    pub(crate) fn new(kernel: &str) -> Self {
        Self(Mutex::new(State {
            services: Vec::new(),
            daemons: Vec::new(),
            timeouts: Timeouts {
                tcp: 900,
                tcp_fin: 120,
                udp: 300,
            },
            twos: !kernel.starts_with("6.1."),
        }))
    }
}

fn refuse<T>(code: FailureCode) -> Result<T, Failure> {
    Err(Failure {
        code,
        message: format!("{code:?}"),
    })
}

impl Engine for Model {
    fn name(&self) -> String {
        "model".into()
    }

    fn table_size(&self) -> u32 {
        4096
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.call(call, out)
    }
}

impl State {
    fn call(&mut self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        match call {
            Call::ServiceAdd(spec) => self.add_service(spec)?,
            Call::ServiceEdit(spec) => self.edit_service(spec)?,
            Call::ServiceDelete { service } => {
                let at = self.find(service)?;
                self.services.remove(at);
            }
            Call::ServiceFlush {} => self.services.clear(),
            Call::ServiceZero { service } => {
                if let Some(service) = service {
                    self.find(service)?;
                }
            }
            Call::ServiceList { service } => {
                let only = match service {
                    Some(service) => Some(self.find(service)?),
                    None => None,
                };
                for (i, service) in self.services.iter().enumerate() {
                    if only.is_none_or(|only| only == i) {
                        out.item(service)?;
                    }
                }
                return end(out);
            }
            Call::ServerAdd(spec) => self.add_server(spec)?,
            Call::ServerEdit(spec) => {
                let at = self.find(spec.service)?;
                self.check_server(&spec)?;
                let Some(server) = server(&mut self.services[at], spec.server) else {
                    return refuse(FailureCode::NoServer);
                };
                server.config = spec.config;
            }
            Call::ServerDelete {
                service,
                server: address,
            } => {
                let at = self.find(service)?;
                let servers = &mut self.services[at].servers;
                let before = servers.len();
                servers.retain(|server| server.server != address);
                if servers.len() == before {
                    return refuse(FailureCode::NoServer);
                }
            }
            Call::ConnList {} => return end(out),
            Call::TimeoutsGet {} => return value(&self.timeouts),
            Call::TimeoutsSet(new) => {
                for (old, new) in [
                    (&mut self.timeouts.tcp, new.tcp),
                    (&mut self.timeouts.tcp_fin, new.tcp_fin),
                    (&mut self.timeouts.udp, new.udp),
                ] {
                    if new != 0 {
                        *old = new;
                    }
                }
            }
            Call::DaemonList {} => {
                for daemon in &self.daemons {
                    out.item(daemon)?;
                }
                return end(out);
            }
            Call::DaemonStart(daemon) => self.start(daemon)?,
            Call::DaemonStop { role, .. } => {
                let before = self.daemons.len();
                self.daemons.retain(|daemon| daemon.role != role);
                if self.daemons.len() == before {
                    return refuse(FailureCode::NotRunning);
                }
            }
            _ => return refuse(FailureCode::Unsupported),
        }
        Ok(json!({}))
    }

    fn find(&self, service: ServiceId) -> Result<usize, Failure> {
        self.services
            .iter()
            .position(|info| info.service == service)
            .map_or_else(|| refuse(FailureCode::NoService), Ok)
    }

    fn check_service(&self, spec: &ServiceSpec) -> Result<(), Failure> {
        let scheduler = spec.config.scheduler.as_str();
        let known = SCHEDULERS.contains(&scheduler)
            || scheduler == "none"
            || scheduler == "twos" && self.twos;
        if !known || spec.config.engine.as_deref().is_some_and(|pe| pe != "sip") {
            return refuse(FailureCode::NoScheduler);
        }
        let v6 = ServiceKey::from(spec.service).family() == Family::V6;
        if v6 && !(1..=128).contains(&spec.config.netmask) {
            return refuse(FailureCode::Invalid);
        }
        Ok(())
    }

    fn add_service(&mut self, spec: ServiceSpec) -> Result<(), Failure> {
        if self.find(spec.service).is_ok() {
            return refuse(FailureCode::Exists);
        }
        self.check_service(&spec)?;
        self.services.push(ServiceInfo {
            service: spec.service,
            config: spec.config,
            owner: spec.owner,
            stats: Stats::default(),
            servers: Vec::new(),
        });
        Ok(())
    }

    fn edit_service(&mut self, spec: ServiceSpec) -> Result<(), Failure> {
        let at = self.find(spec.service)?;
        self.check_service(&spec)?;
        self.services[at].config = spec.config;
        Ok(())
    }

    fn check_server(&self, spec: &ServerSpec) -> Result<(), Failure> {
        let config = &spec.config;
        let mixed = Family::of(&spec.server.ip()) != ServiceKey::from(spec.service).family();
        if mixed && (config.forwarding != Forwarding::Tunnel || !self.daemons.is_empty()) {
            return refuse(FailureCode::Invalid);
        }
        if config.weight < 0 || config.lower > config.upper {
            return refuse(FailureCode::Range);
        }
        if matches!(config.tunnel, Tunnel::Gue { port: 0, .. }) {
            return refuse(FailureCode::Invalid);
        }
        Ok(())
    }

    fn add_server(&mut self, spec: ServerSpec) -> Result<(), Failure> {
        let at = self.find(spec.service)?;
        self.check_server(&spec)?;
        let service = &mut self.services[at];
        if server(service, spec.server).is_some() {
            return refuse(FailureCode::Exists);
        }
        if !usable(spec.server.ip()) {
            return refuse(FailureCode::Invalid);
        }
        service.servers.insert(
            0,
            ServerInfo {
                server: spec.server,
                config: spec.config,
                active: 0,
                inactive: 0,
                persistent: 0,
                overloaded: false,
                slow_start: None,
                latency_us: None,
                stats: Stats::default(),
            },
        );
        Ok(())
    }

    fn start(&mut self, mut daemon: SyncDaemon) -> Result<(), Failure> {
        let mixed = self.services.iter().any(|service| {
            let family = ServiceKey::from(service.service).family();
            service
                .servers
                .iter()
                .any(|server| Family::of(&server.server.ip()) != family)
        });
        if mixed {
            return refuse(FailureCode::Invalid);
        }
        let Some((_, mtu)) = INTERFACES
            .iter()
            .find(|(name, _)| *name == daemon.interface)
        else {
            return refuse(FailureCode::NoDevice);
        };
        if self.daemons.iter().any(|other| other.role == daemon.role) {
            return refuse(FailureCode::Running);
        }
        let headers = match daemon.group {
            Some(IpAddr::V6(_)) => 48,
            _ => 28,
        };
        let (default, least) = match daemon.role {
            SyncRole::Master => (1500 - headers, 1),
            SyncRole::Backup => ((*mtu).clamp(1500, 65_535) - headers, 1024),
        };
        let maxlen = daemon
            .maxlen
            .map_or(default, |len| u32::from(len).clamp(least, 65_535 - headers));
        daemon.maxlen = u16::try_from(maxlen).ok();
        daemon.group.get_or_insert(IpAddr::from([224, 0, 0, 81]));
        daemon.port.get_or_insert(8848);
        daemon.ttl.get_or_insert(1);
        self.daemons.push(daemon);
        Ok(())
    }
}

fn server(service: &mut ServiceInfo, address: SocketAddr) -> Option<&mut ServerInfo> {
    service
        .servers
        .iter_mut()
        .find(|server| server.server == address)
}

/// Whether the recording machine has a unicast or local route to `address`.
fn usable(address: IpAddr) -> bool {
    const BROADCAST: [[u8; 4]; 4] = [
        [255, 255, 255, 255],
        [127, 255, 255, 255],
        [10, 255, 0, 255],
        [10, 1, 255, 255],
    ];
    match address {
        IpAddr::V4(v4) => {
            !v4.is_unspecified() && !v4.is_multicast() && !BROADCAST.contains(&v4.octets())
        }
        IpAddr::V6(v6) => {
            !v6.is_unspecified()
                && !v6.is_multicast()
                && !v6.is_unicast_link_local()
                && v6.to_ipv4_mapped().is_none()
        }
    }
}

fn value(value: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|error| Failure {
        code: FailureCode::Internal,
        message: error.to_string(),
    })
}

fn end(out: &Sink<'_>) -> Result<Value, Failure> {
    value(&ListEnd { count: out.count() })
}
