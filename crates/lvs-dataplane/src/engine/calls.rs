//! What the control socket can ask for, done on the director.

use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lvs_core::api::{
    Call, CaptureFilter, CapturedPacket, ConnInfo, Failure, FailureCode, Info, ListEnd, MarkText,
    ServerInfo, ServiceId, ServiceInfo, SyncDaemon, SyncRole, Sysctl, Timeouts,
};
use lvs_core::mark::MarkRule;
use lvs_core::{Connection, Control, Error, Protocol, Service, ServiceKey, Sysctls, Tuple, sync};
use serde_json::Value;

use super::access::Wish;
use super::bench::{self, BenchFrame};
use super::capture;
use super::local;
use super::shared::{Change, Command, Question, Shared};
use crate::control::server::{Engine, Sink};

/// Slots of the table that are looked at in one go, so that a listing never holds up packets for long.
const LIST_PIECE: usize = 512;
/// Rules for marks at most: each packet is compared with them one after the other.
const MARK_RULES_MAX: usize = 1024;
/// How long the worker may take to answer; it looks at its commands after every batch.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a capture without packets is silent.
const CAPTURE_IDLE: Duration = Duration::from_secs(1);
/// The size of the kernel's connection table, which listings print.
const KERNEL_TABLE_SIZE: u32 = 4096;

impl Engine for Shared {
    fn name(&self) -> String {
        concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn table_size(&self) -> u32 {
        KERNEL_TABLE_SIZE
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let now = self.now();
        match call {
            // Answered by the server.
            Call::Hello { .. } => Ok(done()),
            Call::Info {} => to_value(&self.info()?),

            Call::ServiceAdd(spec) => {
                self.permits(Wish::Service(spec.service.into()))?;
                self.change_service(spec.service, |control| {
                    let key = spec.service.into();
                    control.add_service(key, spec.config.clone(), spec.owner.clone())
                })
            }
            Call::ServiceEdit(spec) => self.change_service(spec.service, |control| {
                control.edit_service(
                    &spec.service.into(),
                    spec.config.clone(),
                    spec.owner.clone(),
                )
            }),
            Call::ServiceDelete { service } => self.change_service(service, |control| {
                control.delete_service(&service.into(), now)
            }),
            Call::ServiceFlush {} => self.change(|control| {
                control.flush(now);
                Ok(())
            }),
            Call::ServiceList { service } => {
                // The list is short next to the connections, and copied at once: it shows one moment.
                let services = self.services(service)?;
                for service in &services {
                    out.item(service)?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            Call::ServiceZero { service } => {
                let key = service.map(ServiceKey::from);
                self.control().zero(key.as_ref()).map_err(failure)?;
                Ok(done())
            }

            Call::ServerAdd(spec) => {
                self.permits(Wish::Server(spec.config.forwarding))?;
                let addr = spec.server.ip();
                let broadcast = self.ask(|reply| Command::IsBroadcast(addr, reply))?;
                self.change_service(spec.service, |control| {
                    let key = spec.service.into();
                    if broadcast {
                        // The kernel looks at the address last.
                        let service = control.service(&key).ok_or(Error::NoService)?;
                        lvs_core::Server::check(&spec.config)?;
                        let mut servers = service.servers().iter();
                        return Err(match servers.any(|server| server.addr() == spec.server) {
                            true => Error::ServerExists,
                            false => Error::NotUnicast,
                        });
                    }
                    control.add_server(&key, spec.server, &spec.config, now)
                })
            }
            Call::ServerEdit(spec) => {
                self.permits(Wish::Server(spec.config.forwarding))?;
                self.change_service(spec.service, |control| {
                    control.edit_server(&spec.service.into(), spec.server, &spec.config)
                })
            }
            Call::ServerDelete { service, server } => self.change_service(service, |control| {
                control.delete_server(&service.into(), server, now)
            }),

            Call::ConnList {} => {
                self.list_connections(out)?;
                to_value(&ListEnd { count: out.count() })
            }
            Call::TimeoutsGet {} => {
                let (tcp, tcp_fin, udp) = self.control().timeouts();
                to_value(&Timeouts { tcp, tcp_fin, udp })
            }
            Call::TimeoutsSet(Timeouts { tcp, tcp_fin, udp }) => {
                self.change(|control| control.set_timeouts(tcp, tcp_fin, udp))
            }
            Call::SysctlGet { name } => {
                let sysctls = self.control().sysctls().clone();
                let names: Vec<&str> = match &name {
                    Some(name) => vec![name],
                    None => Sysctls::NAMES.to_vec(),
                };
                for name in names {
                    let value = sysctls.get(name).map_err(failure)?;
                    out.item(&Sysctl {
                        name: name.to_owned(),
                        value,
                    })?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            Call::SysctlSet(Sysctl { name, value }) => {
                self.change(|control| control.set_sysctl(&name, &value))
            }
            Call::DaemonList {} => {
                let daemons = self.daemons().clone();
                for daemon in &daemons {
                    out.item(daemon)?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            // A director that takes part in no synchronisation must not say that it does; tests only want its bookkeeping.
            Call::DaemonStart(_) if !self.has_virtual_time() => {
                Err(failure(Error::Unsupported("synchronisation daemon")))
            }
            Call::DaemonStart(daemon) => self.start_daemon(daemon),
            Call::DaemonStop { role, .. } => {
                self.change(|control| match role {
                    SyncRole::Master => control.stop_master(),
                    SyncRole::Backup => control.stop_backup(),
                })?;
                self.daemons().retain(|daemon| daemon.role != role);
                Ok(done())
            }
            Call::Drops {} => {
                for reason in self.ask(Command::Reasons)? {
                    out.item(&reason)?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            Call::Explain {
                protocol,
                client,
                virt,
                mark,
                interface,
            } => {
                let tuple = Tuple {
                    protocol: Protocol(protocol),
                    src: client,
                    dst: virt,
                };
                let question = Question {
                    tuple,
                    mark,
                    interface,
                };
                to_value(&self.ask(|reply| Command::Explain(question, reply))?)
            }
            Call::Capture(filter) => self.capture(filter, out),
            Call::MarkList {} => {
                let rules = self.marks().clone();
                let taken = self.ask(Command::Marked)?;
                for (number, rule) in rules.iter().enumerate() {
                    out.item(&MarkText {
                        position: number + 1,
                        rule: rule.to_string(),
                        packets: taken.get(number).copied().unwrap_or(0),
                    })?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            Call::MarkAdd { rule, position } => {
                let rule = parse_mark(&rule)?;
                self.permits(Wish::Mark(rule.clone()))?;
                self.change_marks(|rules| {
                    let last = rules.len() + 1;
                    let position = position.unwrap_or(last);
                    if !(1..=last).contains(&position) {
                        return Err(invalid(format!(
                            "position {position}: expected 1 to {last}"
                        )));
                    }
                    rules.insert(position - 1, rule);
                    Ok(())
                })
            }
            Call::MarkDelete { position } => self.change_marks(|rules| {
                if !(1..=rules.len()).contains(&position) {
                    let count = rules.len();
                    return Err(invalid(format!(
                        "there is no rule {position}: there are {count}"
                    )));
                }
                rules.remove(position - 1);
                Ok(())
            }),
            Call::MarkSet { rules: texts } => {
                let rules: Vec<MarkRule> = texts
                    .iter()
                    .map(|text| parse_mark(text))
                    .collect::<Result<_, _>>()?;
                for rule in &rules {
                    self.permits(Wish::Mark(rule.clone()))?;
                }
                self.change_marks(|all| {
                    *all = rules;
                    Ok(())
                })
            }
            Call::VipsOwn { addresses } => {
                self.ask(|reply| Command::OwnVips(addresses, reply))??;
                Ok(done())
            }
            Call::LocalSet(pool) => {
                local::check(&pool.addresses)?;
                self.ask(|reply| Command::LocalPool(pool, reply))??;
                Ok(done())
            }
            Call::LocalGet {} => to_value(&self.ask(Command::LocalInfo)?),
            Call::Stop {} => {
                self.stop();
                Ok(done())
            }
        }
    }

    fn test(&self, method: &str, params: Value, out: &mut Sink<'_>) -> Result<Value, Failure> {
        if !self.has_virtual_time() {
            return Err(Failure {
                code: FailureCode::Malformed,
                message: format!(
                    "{method}: only an engine started with --no-interfaces --virtual-time has it"
                ),
            });
        }
        let ports = self.bench_ports().clone();
        let test = bench::read(method, params, &ports)?;
        let tested = self.ask(|reply| Command::Test(test, reply))?;
        for (port, frame) in &tested.sent {
            let place = port.index().checked_sub(1);
            let name = place.and_then(|place| ports.get(place));
            out.item(&BenchFrame {
                dev: name.cloned().unwrap_or_default(),
                frame: bench::hex(frame),
            })?;
        }
        to_value(&serde_json::json!({
            "now_ms": tested.now.as_nanos() / 1_000_000,
            "to_host": tested.to_host,
        }))
    }
}

impl Shared {
    /// Whether the engine could do it; asked before anything is changed.
    fn permits(&self, wish: Wish) -> Result<(), Failure> {
        self.ask(|reply| Command::Permits(wish, reply))?
    }

    /// Changes the director, and waits until the packet path has followed: when the caller has its answer, the next
    /// packet is handled the new way.
    fn change(
        &self,
        change: impl FnOnce(&mut Control) -> Result<(), Error>,
    ) -> Result<Value, Failure> {
        change(&mut self.control()).map_err(failure)?;
        self.ask(|reply| Command::Follow(Change::Any, reply))??;
        Ok(done())
    }

    /// The same, where only one service and its servers change.
    fn change_service(
        &self,
        service: ServiceId,
        change: impl FnOnce(&mut Control) -> Result<(), Error>,
    ) -> Result<Value, Failure> {
        change(&mut self.control()).map_err(failure)?;
        let what = Change::Service(service.into());
        self.ask(|reply| Command::Follow(what, reply))??;
        Ok(done())
    }

    /// Changes the rules for marks.
    fn change_marks(
        &self,
        change: impl FnOnce(&mut Vec<MarkRule>) -> Result<(), Failure>,
    ) -> Result<Value, Failure> {
        {
            let mut marks = self.marks();
            let mut rules = marks.to_vec();
            change(&mut rules)?;
            if rules.len() > MARK_RULES_MAX {
                return Err(Failure {
                    code: FailureCode::Full,
                    message: format!(
                        "there are {MARK_RULES_MAX} rules for marks already, and no more are taken"
                    ),
                });
            }
            *marks = Arc::from(rules);
        }
        self.ask(|reply| Command::Follow(Change::Any, reply))??;
        Ok(done())
    }

    fn services(&self, only: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Failure> {
        let (control, now) = (self.control(), self.now());
        let info = |service: &Service| ServiceInfo {
            service: service.key().into(),
            config: service.config().clone(),
            owner: service.owner().map(ToOwned::to_owned),
            stats: service.stats(),
            servers: service
                .servers()
                .iter()
                .map(|server| ServerInfo {
                    server: server.addr(),
                    config: server.config(),
                    active: server.active(),
                    inactive: server.inactive(),
                    persistent: server.templates(),
                    overloaded: server.is_overloaded(),
                    slow_start: server.slow_start(),
                    latency_us: server
                        .latency()
                        .average(now)
                        .map(|average| u64::try_from(average.as_micros()).unwrap_or(u64::MAX)),
                    stats: control.server_stats(server.id()).unwrap_or_default(),
                })
                .collect(),
        };
        match only {
            Some(id) => {
                let service = control
                    .service(&id.into())
                    .ok_or_else(|| failure(Error::NoService))?;
                Ok(vec![info(service)])
            }
            None => Ok(control.services().map(info).collect()),
        }
    }

    fn list_connections(&self, out: &mut Sink<'_>) -> Result<(), Failure> {
        let mut start = 0;
        loop {
            let slots = start..start + LIST_PIECE;
            let (piece, all) = self.ask(|reply| Command::Connections(slots, reply))?;
            for connection in &piece {
                out.item(&conn_info(connection))?;
            }
            if start == 0 {
                // A listing begins at once.
                out.flush()?;
            }
            start += LIST_PIECE;
            if start >= all {
                break;
            }
        }
        start = 0;
        loop {
            let (piece, all) = self.templates(start..start + LIST_PIECE);
            for template in &piece {
                out.item(template)?;
            }
            start += LIST_PIECE;
            if start >= all {
                return Ok(());
            }
        }
    }

    /// The persistence templates in some slots, and the number of slots.
    fn templates(&self, slots: Range<usize>) -> (Vec<ConnInfo>, usize) {
        let now = self.now();
        let control = self.control();
        let templates = control.templates_in(slots, now).map(|template| {
            let engine = control.template_engine(template.id);
            ConnInfo {
                engine: engine.map(|(name, data)| (name.to_owned(), data.to_vec())),
                ..conn_info(&template)
            }
        });
        (templates.collect(), control.template_slots())
    }

    /// Hands out packets until the client is gone.
    fn capture(&self, filter: CaptureFilter, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let (sender, packets) = mpsc::sync_channel(capture::QUEUE);
        self.send(Command::Capture(filter, sender));
        while !self.is_stopping() {
            match packets.recv_timeout(CAPTURE_IDLE) {
                Ok(packet) => {
                    out.item(&packet)?;
                    for packet in packets.try_iter().take(capture::QUEUE) {
                        out.item(&packet)?;
                    }
                }
                // Shows whether the client is still there.
                Err(mpsc::RecvTimeoutError::Timeout) => out.item(&CapturedPacket::default())?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Failure {
                        code: FailureCode::Unsupported,
                        message: "no packet ever comes: the engine has no interfaces or ends"
                            .into(),
                    });
                }
            }
            out.flush()?;
        }
        to_value(&ListEnd { count: out.count() })
    }

    /// Starts a synchronisation daemon (`start_sync_thread`).
    fn start_daemon(&self, mut daemon: SyncDaemon) -> Result<Value, Failure> {
        let name = daemon.interface.clone();
        let mtu = self.ask(|reply| Command::Interface(name, reply))?;
        let ipv6 = daemon.group.is_some_and(|group| group.is_ipv6());
        let mut maxlen = 0;
        self.change(|control| {
            // The kernel looks for mixed families before it looks for the interface, and for another daemon after it.
            control.check_families()?;
            let mtu = mtu.ok_or(Error::NoDevice)?;
            match daemon.role {
                SyncRole::Master => {
                    let master = sync::Master::new(daemon.syncid, daemon.maxlen, ipv6);
                    maxlen = master.maxlen;
                    control.start_master(master)
                }
                SyncRole::Backup => {
                    let backup = sync::Backup::new(daemon.syncid, daemon.maxlen, mtu, ipv6);
                    maxlen = backup.maxlen;
                    control.start_backup(backup)
                }
            }
        })?;
        daemon.maxlen = Some(maxlen);
        daemon.group.get_or_insert(sync::GROUP.into());
        daemon.port.get_or_insert(sync::PORT);
        daemon.ttl.get_or_insert(1);
        self.daemons().push(daemon);
        Ok(done())
    }

    fn info(&self) -> Result<Info, Failure> {
        let mut info = self.ask(Command::Info)?;
        info.pid = std::process::id();
        info.uptime = self.uptime().as_secs();
        info.ftp_ports = self.control().ftp_ports().to_vec();
        Ok(info)
    }

    /// Puts a question to the worker and waits for its answer.
    fn ask<T>(&self, command: impl FnOnce(mpsc::SyncSender<T>) -> Command) -> Result<T, Failure> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.send(command(reply));
        answer.recv_timeout(WORKER_TIMEOUT).map_err(|_| Failure {
            code: FailureCode::Internal,
            message: "the packet worker does not answer; the engine's log tells why".into(),
        })
    }
}

fn conn_info(connection: &Connection) -> ConnInfo {
    ConnInfo {
        protocol: connection.protocol.0,
        client: connection.client,
        virt: connection.virt,
        server: connection.server,
        state: connection.state.to_owned(),
        expires_ms: u64::try_from(connection.expires.as_millis()).unwrap_or(u64::MAX),
        forwarding: connection.method,
        template: connection.template,
        synced: connection.synced,
        engine: None,
    }
}

/// The refusal that the kernel would give for the same reason.
pub(super) fn failure(error: Error) -> Failure {
    error.into()
}

fn parse_mark(text: &str) -> Result<MarkRule, Failure> {
    MarkRule::parse(&text.split_whitespace().collect::<Vec<_>>()).map_err(invalid)
}

fn invalid(message: String) -> Failure {
    Failure {
        code: FailureCode::Invalid,
        message,
    }
}

fn done() -> Value {
    Value::Object(serde_json::Map::new())
}

fn to_value(value: &impl serde::Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|error| Failure {
        code: FailureCode::Internal,
        message: format!("cannot write the answer: {error}"),
    })
}
