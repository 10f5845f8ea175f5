//! What the control socket can ask for, done on the director.

use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use lvs_core::api::{
    Call, CaptureFilter, CapturedPacket, ConnInfo, Failure, FailureCode, Info, ListEnd, MarkText,
    ServerInfo, ServiceId, ServiceInfo, Sysctl, Timeouts,
};
use lvs_core::{Connection, Error, Protocol, Service, Sysctls, Tuple};
use serde_json::Value;

use super::bench::{self, BenchFrame};
use super::capture;
use super::shared::{Command, Question, Shared};
use crate::control::server::{Engine, Sink};

/// Slots of the table that are looked at in one go, so that a listing never holds up packets for long.
const LIST_PIECE: usize = 512;
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
        match call {
            // Answered by the server.
            Call::Hello { .. } => Ok(done()),
            Call::Info {} => to_value(&self.info()?),

            Call::ServiceList { service } => {
                // The list is short next to the connections, and copied at once: it shows one moment.
                let services = self.services(service)?;
                for service in &services {
                    out.item(service)?;
                }
                to_value(&ListEnd { count: out.count() })
            }
            Call::ConnList {} => {
                self.list_connections(out)?;
                to_value(&ListEnd { count: out.count() })
            }
            Call::TimeoutsGet {} => {
                let (tcp, tcp_fin, udp) = self.control().timeouts();
                to_value(&Timeouts { tcp, tcp_fin, udp })
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
            Call::DaemonList {} => {
                let daemons = self.control().daemons().to_vec();
                for daemon in &daemons {
                    out.item(daemon)?;
                }
                to_value(&ListEnd { count: out.count() })
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
                let rules = self.marks();
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
            Call::LocalGet {} => to_value(&self.ask(Command::LocalInfo)?),
            Call::Stop {} => {
                self.stop();
                Ok(done())
            }
            Call::Apply { changes } => self.apply(changes, true),
            Call::ServiceAdd(_)
            | Call::ServiceEdit(_)
            | Call::ServiceDelete { .. }
            | Call::ServiceFlush {}
            | Call::ServiceZero { .. }
            | Call::ServerAdd(_)
            | Call::ServerEdit(_)
            | Call::ServerDelete { .. }
            | Call::TimeoutsSet(_)
            | Call::SysctlSet(_)
            | Call::DaemonStart(_)
            | Call::DaemonStop { .. }
            | Call::MarkAdd { .. }
            | Call::MarkDelete { .. }
            | Call::MarkSet { .. }
            | Call::VipsOwn { .. }
            | Call::LocalSet(_) => self.apply(vec![call], false),
        }
    }

    fn test(&self, method: &str, params: Value, out: &mut Sink<'_>) -> Result<Value, Failure> {
        if !self.has_virtual_time() {
            return Err(Failure::new(
                FailureCode::Malformed,
                format!(
                    "{method}: only an engine started with --no-interfaces --virtual-time has it"
                ),
            ));
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
    /// Makes these changes, or none, and waits until the packet path has followed: when the caller has its answer, the
    /// next packet is handled the new way.
    fn apply(&self, changes: Vec<Call>, list: bool) -> Result<Value, Failure> {
        match self.ask(|reply| Command::Apply(changes, reply))? {
            Ok(done) => to_value(&done),
            Err(refused) => Err(Failure {
                change: list.then_some(refused.change),
                ..refused.failure
            }),
        }
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
                    return Err(Failure::new(
                        FailureCode::Unsupported,
                        "no packet ever comes: the engine has no interfaces or ends",
                    ));
                }
            }
            out.flush()?;
        }
        to_value(&ListEnd { count: out.count() })
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
        answer.recv_timeout(WORKER_TIMEOUT).map_err(|_| {
            Failure::new(
                FailureCode::Internal,
                "the packet worker does not answer; the engine's log tells why",
            )
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

fn done() -> Value {
    Value::Object(serde_json::Map::new())
}

fn to_value(value: &impl serde::Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|error| {
        Failure::new(
            FailureCode::Internal,
            format!("cannot write the answer: {error}"),
        )
    })
}
