//! What an engine leaves for the one that comes after it, should it be killed: services, servers,
//! settings and counters, beside the connection table in the [kernel](crate::in_kernel).

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant as SystemInstant};

use lvs_core::api::{
    Call, FailureCode, FilterSpec, Host, LocalPool, ServerSpec, ServiceId, ServiceSpec, SyncDaemon,
    Sysctl, Timeouts,
};
use lvs_core::memory::Adoption;
use lvs_core::{Control, Instant, Shard, Sysctls};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::shared::Shared;
use crate::in_kernel::{InKernel, Record};

/// Services and servers up to which every change is kept at once; with more it is within a second.
pub(super) const FEW: usize = 256;

/// What is kept, beside connections and counters.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Kept {
    /// What leads to the same services, servers and settings.
    calls: Vec<Call>,
    /// Where counters are: service, server, record.
    records: Vec<(ServiceId, SocketAddr, u32)>,
    /// Synchronisation daemons that ran.
    daemons: Vec<SyncDaemon>,
}

/// What a successor goes on with beside what is made of it at once.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Where counters are.
    pub(super) records: Vec<Record>,
    /// Synchronisation daemons to be started when there are threads.
    pub(super) daemons: Vec<SyncDaemon>,
}

/// Keeps what there is now.
pub(super) fn keep(control: &Control, in_kernel: &InKernel) {
    let mut kept = Kept::default();
    let (tcp, tcp_fin, udp) = control.timeouts();
    kept.calls
        .push(Call::TimeoutsSet(Timeouts { tcp, tcp_fin, udp }));
    let (usual, now) = (Sysctls::default(), control.sysctls());
    for &name in Sysctls::NAMES {
        if let (Ok(usual), Ok(value)) = (usual.get(name), now.get(name))
            && usual != value
        {
            let name = name.to_owned();
            kept.calls.push(Call::SysctlSet(Sysctl { name, value }));
        }
    }
    for service in control.services() {
        let id = ServiceId::from(service.key());
        kept.calls.push(Call::ServiceAdd(ServiceSpec {
            service: id,
            config: service.config().clone(),
            owner: service.owner().map(ToOwned::to_owned),
        }));
        for server in service.servers() {
            kept.calls.push(Call::ServerAdd(ServerSpec {
                service: id,
                server: server.addr(),
                config: server.config(),
            }));
            let record = u32::try_from(server.id().index()).unwrap_or(u32::MAX);
            kept.records.push((id, server.addr(), record));
        }
    }
    if !control.marks().is_empty() {
        let rules = control.marks().iter().map(ToString::to_string).collect();
        kept.calls.push(Call::MarkSet { rules });
    }
    for (key, filter) in control.filters() {
        let service = key.map(ServiceId::from);
        kept.calls
            .push(Call::FilterSet(FilterSpec { service, filter }));
    }
    if !control.own_vips().is_empty() {
        let addresses = control.own_vips().to_vec();
        kept.calls.push(Call::VipsOwn { addresses });
    }
    let (pool, hairpin) = control.local_pool();
    if !pool.is_empty() {
        let addresses = pool.iter().map(|local| local.addr).collect();
        kept.calls
            .push(Call::LocalSet(LocalPool { addresses, hairpin }));
    }
    kept.daemons = control.daemons().to_vec();
    let services = control.services().filter_map(|service| {
        let virt = match ServiceId::from(service.key()) {
            ServiceId::Tcp { address } => (6, address),
            ServiceId::Udp { address } => (17, address),
            _ => return None,
        };
        Some(virt)
    });
    in_kernel.set_services(services);
    match serde_json::to_vec(&kept) {
        Ok(text) if in_kernel.save(&text) => {}
        _ => warn!(
            "there are so many services and servers that a successor of this engine would not find them, should it be killed"
        ),
    }
}

/// Whether so little is kept that it is kept at every change.
pub(super) fn is_small(control: &Control) -> bool {
    control.endpoint_places() < FEW && control.services().take(FEW).count() < FEW
}

/// Makes what a predecessor has left: services, servers and settings, and gives the rest.
pub(super) fn restore(
    control: &mut Control,
    host: &dyn Host,
    in_kernel: &InKernel,
    now: Instant,
) -> Left {
    let kept: Kept = match in_kernel.saved().map(|text| serde_json::from_slice(&text)) {
        Some(Ok(kept)) => kept,
        Some(Err(error)) => {
            warn!("what the engine before this one has left cannot be read: {error}");
            return Left::default();
        }
        None => return Left::default(),
    };
    if control.apply(&kept.calls, host, now).is_err() {
        // What this engine cannot do any more is left out, and nothing else.
        for call in &kept.calls {
            if let Err(refused) = control.apply(std::slice::from_ref(call), host, now) {
                warn!(
                    "of what the engine before this one had: {}",
                    refused.failure.message
                );
            }
        }
    }
    info!(
        services = control.services().count(),
        "going on where another engine was killed"
    );
    let records = kept.records.into_iter();
    let records = records.map(|(service, server, record)| Record {
        service: service.into(),
        server,
        record,
    });
    Left {
        records: records.collect(),
        daemons: kept.daemons,
    }
}

/// Between two attempts to start a daemon whose interface is not there.
const AGAIN: Duration = Duration::from_millis(500);

/// Starts synchronisation daemons that ran, and gives those whose interface is down or gone.
pub(super) fn start_daemons(shared: &Shared, daemons: Vec<SyncDaemon>) -> Vec<SyncDaemon> {
    let starts = |daemon: &SyncDaemon| {
        let started = shared.apply(vec![Call::DaemonStart(daemon.clone())], false);
        let Err(failure) = started else { return false };
        let waits = matches!(
            failure.code,
            FailureCode::NoDevice | FailureCode::Unreachable
        );
        // Whoever has started one meanwhile has decided.
        if !waits && failure.code != FailureCode::Running {
            warn!(
                "of what the engine before this one had: {}",
                failure.message
            );
        }
        waits
    };
    daemons.into_iter().filter(starts).collect()
}

/// As [`start_daemons`], when their interfaces are there.
pub(super) fn start_daemons_in_time(shared: &Shared, mut waiting: Vec<SyncDaemon>) {
    for daemon in &waiting {
        warn!(
            "a synchronisation daemon of the engine before this one waits for {}",
            daemon.interface
        );
    }
    while !waiting.is_empty() && !shared.is_stopping() {
        thread::sleep(AGAIN);
        waiting = start_daemons(shared, waiting);
    }
}

/// Takes over the connections that a predecessor has left, and what was counted of `records`, from
/// the path in the kernel, which holds back meanwhile.
pub(super) fn take_over(
    shared: &Shared,
    shard: &mut Shard,
    in_kernel: &Arc<InKernel>,
    adoption: Adoption,
    records: &[Record],
) {
    let started = SystemInstant::now();
    let _held = in_kernel.hold();
    in_kernel.settle();
    let mut control = shared.control();
    control.sweep(shard);
    in_kernel.take_counts(&mut control, records);
    let now = shared.now();
    let mut adoption = adoption.of_a_clock_ahead(in_kernel.clock_ahead(now));
    while control.adopt(shard, &mut adoption, now, usize::MAX) {}
    in_kernel.set_clock(shared.now());
    in_kernel.has_taken_over();
    info!(
        connections = shard.len(),
        "took over what another engine has left, in {:?}",
        started.elapsed()
    );
}
