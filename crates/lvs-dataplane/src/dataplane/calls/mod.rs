//! The calls of the control socket, by subject.

mod capture;
mod change;
mod connections;
mod services;
mod state;

use lvs_core::api::{Call, Done, Failure, FailureCode, ListEnd, Sysctl, Timeouts, Unpinned};
use lvs_core::settings::Sysctls;
use lvs_core::{Protocol, Tuple};
use serde_json::Value;

use super::decider::Question;
use super::handle::Handle;
use lvs_process::server::{Handler, Sink};

/// The default size of the connection table of IPVS in the kernel. Listings print it as ipvsadm
/// does.
const KERNEL_TABLE_SIZE: u32 = 4096;

impl Handler for Handle {
    fn name(&self) -> String {
        concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn table_size(&self) -> u32 {
        KERNEL_TABLE_SIZE
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        match call {
            // The server of the control socket answers this call.
            Call::Hello { .. } => Ok(done()),
            Call::Info {} => to_value(&self.info()?),
            Call::ServiceList { service } => self.list_services(service, out),
            Call::ConnList {} => self.list_connections(out),
            Call::TimeoutsGet {} => {
                let (tcp, tcp_fin, udp) = self.context.control().timeouts();
                to_value(&Timeouts { tcp, tcp_fin, udp })
            }
            Call::SysctlGet { name } => self.list_sysctls(name.as_deref(), out),
            Call::DaemonList {} => {
                let daemons = self.context.control().daemons().to_vec();
                items(&daemons, out)
            }
            Call::SyncGet {} => to_value(&self.sync_state()),
            Call::VipsAnnounce(spec) => to_value(&self.announce(spec)?),
            Call::Drops {} => items(&self.reasons()?, out),
            Call::Explain {
                protocol,
                client,
                virt,
                mark,
                interface,
            } => self.explain(Question {
                tuple: Tuple::new(Protocol(protocol), client, virt),
                mark,
                interface,
            }),
            Call::Capture(filter) => self.capture(filter, out),
            Call::MarkList {} => self.list_marks(out),
            Call::FilterList {} => self.list_filters(out),
            Call::LocalGet {} => to_value(&self.local_info()?),
            Call::ServerReturnPath { server } => to_value(&self.return_path(server)?),
            Call::Stop {} => {
                self.stop();
                Ok(done())
            }
            Call::ServerPin {
                service,
                server,
                client,
            } => {
                let now = self.context.now();
                let mut control = self.context.control();
                let pinned = control.pin(&service.into(), server, client, now);
                drop(control);
                pinned.map_err(Failure::from)?;
                to_value(&Done::default())
            }
            Call::ServerUnpin { service, client } => {
                let now = self.context.now();
                let unopened = self.context.control().unpin(&service.into(), client, now);
                let unopened = unopened.map_err(Failure::from)?;
                to_value(&Unpinned { unopened })
            }
            Call::Apply { changes } => to_value(&self.apply(changes, true)?),
            lvs_core::any_change!() => to_value(&self.apply(vec![call], false)?),
        }
    }
}

impl Handle {
    /// Asks all packet workers about a packet, and returns the explanation of the worker that has
    /// the packet's connection. If no worker has it, returns the explanation of any worker.
    fn explain(&self, question: Question) -> Result<Value, Failure> {
        let all = self.threads.ask(move |worker| worker.explain(&question))?;
        // All workers decide alike on a packet that opens a connection. Only one worker has an
        // existing connection.
        to_value(&all.into_iter().max_by_key(|one| one.connection.is_some()))
    }

    fn list_sysctls(&self, name: Option<&str>, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let sysctls = self.context.control().sysctls().clone();
        let names = name.map_or_else(|| Sysctls::NAMES.to_vec(), |name| vec![name]);
        for name in names {
            let value = sysctls.get(name).map_err(Failure::from)?;
            out.item(&Sysctl {
                name: name.to_owned(),
                value,
            })?;
        }
        end(out)
    }
}

/// Sends items to the client, and returns the final answer of the list.
fn items(items: &[impl serde::Serialize], out: &mut Sink<'_>) -> Result<Value, Failure> {
    for item in items {
        out.item(item)?;
    }
    end(out)
}

/// The final answer of a list.
fn end(out: &Sink<'_>) -> Result<Value, Failure> {
    to_value(&ListEnd { count: out.count() })
}

fn done() -> Value {
    Value::Object(serde_json::Map::new())
}

pub(super) fn to_value(value: &impl serde::Serialize) -> Result<Value, Failure> {
    serde_json::to_value(value).map_err(|error| {
        Failure::new(
            FailureCode::Internal,
            format!("cannot write the answer: {error}"),
        )
    })
}
