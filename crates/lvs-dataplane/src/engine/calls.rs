//! What the control socket can ask for, done on the director.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use lvs_core::api::{
    Call, ConnInfo, Failure, FailureCode, Info, ListEnd, MarkText, ServerInfo, ServiceId,
    ServiceInfo, Sysctl, Timeouts,
};
use lvs_core::mark::MarkRule;
use lvs_core::{Connection, Control, Error, Service, ServiceKey, Sysctls};
use serde_json::Value;

use super::shared::{Command, Shared};
use crate::control::server::{Engine, Sink};

/// Connections that the worker hands out at a time, so that a listing never holds up packets for long.
const LIST_PIECE: usize = 512;
/// Rules for marks at most: each packet is compared with them one after the other.
const MARK_RULES_MAX: usize = 1024;
/// How long the worker may take to answer; it looks at its commands after every batch.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
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

            Call::ServiceAdd(spec) => self.change(|control| {
                control.add_service(spec.service.into(), spec.config.clone(), spec.owner.clone())
            }),
            Call::ServiceEdit(spec) => self.change(|control| {
                control.edit_service(
                    &spec.service.into(),
                    spec.config.clone(),
                    spec.owner.clone(),
                )
            }),
            Call::ServiceDelete { service } => {
                self.change(|control| control.delete_service(&service.into(), now))
            }
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
                self.change(|control| control.zero(service.map(ServiceKey::from).as_ref()))
            }

            Call::ServerAdd(spec) => {
                let addr = spec.server.ip();
                if self.ask(|reply| Command::IsBroadcast(addr, reply))? {
                    return Err(failure(Error::NotUnicast));
                }
                self.change(|control| {
                    control.add_server(&spec.service.into(), spec.server, &spec.config, now)
                })
            }
            Call::ServerEdit(spec) => self.change(|control| {
                control.edit_server(&spec.service.into(), spec.server, &spec.config)
            }),
            Call::ServerDelete { service, server } => {
                self.change(|control| control.delete_server(&service.into(), server, now))
            }

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
            Call::DaemonList {} => to_value(&ListEnd { count: 0 }),
            Call::DaemonStart(_) => Err(Failure {
                code: FailureCode::Unsupported,
                message: "synchronisation daemons are not supported yet".into(),
            }),
            Call::DaemonStop { .. } => Err(Failure {
                code: FailureCode::NotRunning,
                message: "no synchronisation daemon is running".into(),
            }),
            Call::Drops {} => {
                for reason in self.ask(Command::Reasons)? {
                    out.item(&reason)?;
                }
                to_value(&ListEnd { count: out.count() })
            }
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
                self.change_marks(|all| {
                    *all = rules;
                    Ok(())
                })
            }
            Call::VipsOwn { addresses } => {
                self.ask(|reply| Command::OwnVips(addresses, reply))??;
                Ok(done())
            }
            Call::Stop {} => {
                self.stop();
                Ok(done())
            }
        }
    }
}

impl Shared {
    /// Changes the director, and waits until the packet path has followed: when the caller has its answer, the next
    /// packet is handled the new way.
    fn change(
        &self,
        change: impl FnOnce(&mut Control) -> Result<(), Error>,
    ) -> Result<Value, Failure> {
        change(&mut self.control()).map_err(failure)?;
        self.ask(Command::Follow)??;
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
        self.ask(Command::Follow)??;
        Ok(done())
    }

    fn services(&self, only: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Failure> {
        let control = self.control();
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
            let piece = self.ask(|reply| Command::Connections {
                start,
                max: LIST_PIECE,
                reply,
            })?;
            let Some(last) = piece.last() else {
                return Ok(());
            };
            start = last.id.index() + 1;
            for connection in &piece {
                out.item(&conn_info(connection))?;
            }
        }
    }

    fn info(&self) -> Result<Info, Failure> {
        let mut info = self.ask(Command::Info)?;
        info.pid = std::process::id();
        info.uptime = self.uptime().as_secs();
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
        synced: false,
        engine: None,
    }
}

/// The refusal that the kernel would give for the same reason.
pub(super) fn failure(error: Error) -> Failure {
    let code = match error {
        Error::ServiceExists | Error::ServerExists => FailureCode::Exists,
        Error::NoService => FailureCode::NoService,
        Error::NoServer | Error::UnknownSysctl => FailureCode::NoServer,
        Error::UnknownScheduler | Error::UnknownEngine => FailureCode::NoScheduler,
        Error::WeightRange | Error::ThresholdRange => FailureCode::Range,
        Error::Unsupported(_) => FailureCode::Unsupported,
        _ => FailureCode::Invalid,
    };
    Failure {
        code,
        message: error.to_string(),
    }
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
