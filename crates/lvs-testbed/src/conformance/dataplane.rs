//! The test bed of the recordings behind a control socket, for tests of the socket's clients.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use lvs_api::Address;
use lvs_core::api::{
    Call, Done, Failure, FailureCode, Host, Info, ListEnd, Need, ServiceId, ServiceInfo, Sysctl,
    Timeouts,
};
use lvs_core::settings::Sysctls;
use lvs_core::{Error, Instant, Options, Protocol, ServiceKey, Tuple};
use lvs_packet::net::Net;
use lvs_packet::testing::Table;
use lvs_process::server::{Handle, Handler, Permissions, Server, Sink};
use serde::Serialize;
use serde_json::{Value, json};

use super::bed::{Bed, KERNEL_TABLE_SIZE, port_named};
use super::report::Log;

const LOOPBACK_MTU: u32 = 65_536;
/// Broadcast addresses of the test bed's networks.
const BROADCASTS: [[u8; 4]; 3] = [[127, 255, 255, 255], [10, 255, 0, 255], [10, 1, 255, 255]];

/// A dataplane in memory. Tests inject its packets and set its clock.
#[derive(Debug)]
pub struct MemoryDataplane(Mutex<Bed>);

impl MemoryDataplane {
    /// Creates a director with these options, without services, in the network of the recordings.
    ///
    /// # Errors
    /// The director refuses the options.
    pub fn new(options: Options) -> Result<Arc<Self>> {
        let bed = Bed::of(options, &Log::default())?;
        Ok(Arc::new(Self(Mutex::new(bed))))
    }

    /// Answers at `address` until the handle is dropped.
    ///
    /// # Errors
    /// The socket cannot be bound, or the process cannot start a thread.
    pub fn serve(self: &Arc<Self>, address: &Address) -> Result<Handle> {
        let server = Server::bind(address, Permissions::default())?;
        Ok(server.serve(self.clone())?)
    }

    /// Makes a call like a client of the control socket. The items of a list are discarded.
    ///
    /// # Errors
    /// The refusal that a client would receive. Nothing has changed then.
    pub fn ask(&self, call: Call) -> Result<Value, Failure> {
        self.call(call, &mut Sink::new(0, &mut std::io::sink()))
    }

    /// Applies a recording's network and host; see [`Bed::set_up`].
    pub(crate) fn set_up(&self, config: &Value) -> Result<()> {
        Ok(self.bed().set_up(config)?)
    }

    /// Advances the clock to this time after the start. A past time has no effect.
    pub(crate) fn advance_to(&self, time: Duration) {
        let mut bed = self.bed();
        let left = (Instant::ZERO + time).saturating_since(bed.now);
        bed.wait(left);
    }

    /// Injects a frame on a link of the test bed, and discards the sent frames.
    pub(crate) fn inject(&self, link: &str, frame: &[u8]) -> Result<()> {
        let port = port_named(link).with_context(|| format!("the test bed has no link {link}"))?;
        self.bed().inject(port, frame);
        Ok(())
    }

    fn bed(&self) -> MutexGuard<'_, Bed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn services(&self, only: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Failure> {
        let bed = self.bed();
        let only = only.map(ServiceKey::from);
        if let Some(key) = &only {
            bed.director.control.service(key).ok_or(Error::NoService)?;
        }
        Ok(bed.services(only))
    }

    fn sysctls(&self, name: Option<String>) -> Result<Vec<Sysctl>, Failure> {
        let bed = self.bed();
        let sysctls = bed.director.control.sysctls();
        let names = name.map_or_else(
            || {
                Sysctls::NAMES
                    .iter()
                    .map(|name| (*name).to_owned())
                    .collect()
            },
            |name| vec![name],
        );
        let values = names.into_iter().map(|name| {
            let value = sysctls.get(&name)?;
            Ok(Sysctl { name, value })
        });
        values.collect()
    }

    fn apply(&self, changes: &[Call], list: bool) -> Result<Value, Failure> {
        let mut bed = self.bed();
        let bed = &mut *bed;
        let applied = bed
            .director
            .control
            .apply(changes, &Around(&bed.net), bed.now);
        applied.map_err(|refused| Failure {
            change: list.then_some(refused.change),
            ..refused.failure
        })?;
        bed.follow();
        Ok(value(&Done::default()))
    }
}

impl Handler for MemoryDataplane {
    fn name(&self) -> String {
        concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn table_size(&self) -> u32 {
        KERNEL_TABLE_SIZE
    }

    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure> {
        match call {
            // The server of the control socket answers this call.
            Call::Hello { .. } => Ok(json!({})),
            Call::Info {} => Ok(value(&Info::default())),
            Call::ServiceList { service } => items(&self.services(service)?, out),
            Call::ConnList {} => items(&self.bed().connections(), out),
            Call::TimeoutsGet {} => {
                let (tcp, tcp_fin, udp) = self.bed().director.control.timeouts();
                Ok(value(&Timeouts { tcp, tcp_fin, udp }))
            }
            Call::SysctlGet { name } => items(&self.sysctls(name)?, out),
            Call::DaemonList {} => {
                let daemons = self.bed().director.control.daemons().to_vec();
                items(&daemons, out)
            }
            Call::Explain {
                protocol,
                client,
                virt,
                mark,
                ..
            } => {
                let tuple = Tuple::new(Protocol(protocol), client, virt);
                let bed = self.bed();
                let (control, shard) = (&bed.director.control, &bed.director.shard);
                Ok(value(&control.explain(
                    shard,
                    tuple,
                    mark.unwrap_or(0),
                    bed.now,
                )))
            }
            Call::ServerPin {
                service,
                server,
                client,
            } => {
                let mut bed = self.bed();
                let now = bed.now;
                let (control, _) = bed.change();
                control.pin(&service.into(), server, client, now)?;
                Ok(value(&Done::default()))
            }
            Call::Apply { changes } => self.apply(&changes, true),
            lvs_core::any_change!() => self.apply(&[call], false),
            _ => Err(Failure::new(
                FailureCode::Unsupported,
                "a dataplane in memory has no interfaces, and does not support this call",
            )),
        }
    }
}

/// The host of the test bed. It permits everything, except that the dataplane owns an address.
struct Around<'a>(&'a Table);

impl Host for Around<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        match need {
            Need::Own(_) => Err(Failure::new(
                FailureCode::Unsupported,
                "a dataplane in memory has no interfaces, so it cannot own an address",
            )),
            _ => Ok(()),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        BROADCASTS
            .iter()
            .any(|&broadcast| addr == IpAddr::from(broadcast))
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        match interface {
            "lo" => Some(LOOPBACK_MTU),
            _ => Some(self.0.port(port_named(interface)?)?.mtu),
        }
    }
}

fn items(items: &[impl Serialize], out: &mut Sink<'_>) -> Result<Value, Failure> {
    for item in items {
        out.item(item)?;
    }
    Ok(value(&ListEnd { count: out.count() }))
}

fn value(answer: &impl Serialize) -> Value {
    serde_json::to_value(answer).expect("the answer can be written as JSON")
}
