//! Warm restart: storing services, servers, settings and counters in the [warm
//! state](super::warm_state), and taking them over as a successor.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant as SystemInstant;

use lvs_core::api::{
    CHANGES_MAX, Call, FilterSpec, Host, LocalPool, ServerSpec, ServiceId, ServiceSpec, Sysctl,
    Timeouts,
};
use lvs_core::memory::{Adoption, Memory};
use lvs_core::settings::Sysctls;
use lvs_core::sync::SyncDaemon;
use lvs_core::{Control, Instant, Shard};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::{debug, info, warn};

use super::context::Context;
use super::warm_state::WarmState;
use crate::fast_path::HeldServices;
use crate::warm_restart::Record;
use lvs_packet::steer::Steering;
use lvs_sys::lock;

/// With fewer services and servers than this, each change is stored at once. With more, changes are
/// stored later, usually within a second.
const FEW: usize = 256;

#[derive(Debug)]
pub(super) struct Keeping {
    state: Option<Arc<dyn WarmState>>,
    /// Whether a change is not stored yet, so that a successor would not find it.
    unkept: AtomicBool,
    /// Locked while state is stored.
    storing: Mutex<()>,
    /// Time before which [`keep`](Self::keep) does not store again.
    rests_until: Mutex<Option<SystemInstant>>,
}

impl Keeping {
    pub(super) fn new(state: Option<Arc<dyn WarmState>>) -> Self {
        Self {
            state,
            unkept: AtomicBool::new(true),
            storing: Mutex::default(),
            rests_until: Mutex::default(),
        }
    }

    /// Where this dataplane stores its state for a successor; `None` if it stores none.
    pub(super) const fn state(&self) -> Option<&Arc<dyn WarmState>> {
        self.state.as_ref()
    }

    /// Whether this dataplane continues with the state of a killed predecessor.
    pub(super) fn is_successor(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.is_found())
    }

    /// Stores a change at once if there are few services and servers; otherwise
    /// [`keep`](Self::keep) stores it later.
    pub(super) fn has_changed(&self, context: &Context) {
        let Some(state) = &self.state else { return };
        if !is_small(&context.control()) {
            self.unkept.store(true, Ordering::Release);
            return;
        }
        self.store(&**state, context);
    }

    /// Stores counters, and changes that are not stored yet. Does nothing for some time after a
    /// call that took long, so that storing takes at most a fifth of the caller's time.
    pub(super) fn keep(&self, context: &Context) {
        let Some(state) = &self.state else { return };
        let began = SystemInstant::now();
        let mut rests = lock(&self.rests_until);
        if rests.is_some_and(|until| began < until) {
            return;
        }
        state.keep_counts(context);
        if self.unkept.load(Ordering::Acquire) {
            self.store(&**state, context);
        }
        // Storing takes at most a fifth of the caller's time, however many servers exist.
        *rests = Some(SystemInstant::now() + began.elapsed() * 4);
    }

    /// Stores a snapshot. Snapshots are stored in the order in which they are taken.
    fn store(&self, state: &dyn WarmState, context: &Context) {
        let _turn = lock(&self.storing);
        self.unkept.store(false, Ordering::Release);
        let snapshot = snapshot(&context.control());
        snapshot.store(state);
    }
}

/// The stored services and settings. `C` is a call, or JSON of another version that may have other
/// calls.
#[derive(Debug, Deserialize, Serialize)]
struct Kept<C> {
    /// The calls that create the stored services, servers and settings.
    calls: Vec<C>,
    /// For each server of a service, the number of the record that stores its counters.
    #[serde(default)]
    records: Vec<(ServiceId, SocketAddr, u32)>,
    /// The synchronisation daemons that were running.
    #[serde(default)]
    daemons: Vec<SyncDaemon>,
}

/// State that is restored later in the start, after services and settings.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// The records that store the counters of the servers.
    pub(super) records: Vec<Record>,
    /// Synchronisation daemons, which start after the threads.
    pub(super) daemons: Vec<SyncDaemon>,
}

/// The present state, which is stored after the control half is unlocked.
#[derive(Debug)]
struct Snapshot {
    kept: Kept<Call>,
    held: HeldServices,
}

fn snapshot(control: &Control) -> Snapshot {
    let mut kept = Kept {
        calls: Vec::new(),
        records: Vec::new(),
        daemons: Vec::new(),
    };
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
    // Without local addresses, full NAT servers are refused.
    let (pool, hairpin) = control.local_pool();
    if !pool.is_empty() {
        let addresses = pool.iter().map(|local| local.addr).collect();
        kept.calls
            .push(Call::LocalSet(LocalPool { addresses, hairpin }));
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
    kept.daemons = control.daemons().to_vec();
    let held = HeldServices::of(control);
    Snapshot { kept, held }
}

impl Snapshot {
    fn store(&self, state: &dyn WarmState) {
        state.set_services(&self.held);
        let text = serde_json::to_vec(&self.kept).map_err(io::Error::from);
        if let Err(error) = text.and_then(|text| state.save(&text)) {
            warn!(
                code = "warm_restart_incomplete",
                "cannot store services and servers for a warm restart: {error}; if this dataplane is killed, its connections end"
            );
            return;
        }
        let servers = self.kept.records.len();
        debug!(servers, "stored services and servers for a warm restart");
    }
}

/// Whether there are so few services and servers that each change is stored at once.
fn is_small(control: &Control) -> bool {
    control.endpoint_places() < FEW && control.services().take(FEW).count() < FEW
}

/// Decodes a stored call; `None` if this version does not have it.
fn known(call: Value) -> Option<Call> {
    let known = serde_json::from_value(call);
    known
        .inspect_err(|error| {
            warn!(
                "a part of the state of the previous dataplane is unknown to this version, and is not restored: {error}"
            );
        })
        .ok()
}

/// Restores the services, servers and settings of a predecessor. Logs the parts that cannot be
/// restored. Returns the rest of its state.
pub(super) fn restore(
    control: &mut Control,
    host: &dyn Host,
    state: &dyn WarmState,
    now: Instant,
) -> Left {
    let kept: Kept<Value> = match state.saved().map(|text| serde_json::from_slice(&text)) {
        Some(Ok(kept)) => kept,
        Some(Err(error)) => {
            warn!("cannot read the state of the previous dataplane: {error}");
            return Left::default();
        }
        None => return Left::default(),
    };
    let calls = kept.calls.into_iter().filter_map(known);
    let calls: Vec<Call> = calls.collect();
    // As many calls as one request may contain.
    for calls in calls.chunks(CHANGES_MAX) {
        if control.apply(calls, host, now).is_ok() {
            continue;
        }
        // Apply them one by one, in order to skip only the refused ones.
        for call in calls {
            if let Err(refused) = control.apply(std::slice::from_ref(call), host, now) {
                warn!(
                    "a part of the state of the previous dataplane was not restored: {}",
                    refused.failure.message
                );
            }
        }
    }
    info!(
        services = control.services().count(),
        "this dataplane continues with the state of a killed dataplane"
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

/// Connections of a predecessor.
#[derive(Debug)]
pub(super) enum Inheritance {
    /// The shards use the predecessor's memory.
    InPlace(Vec<Adoption>),
    /// The connections are in these tables, and must be copied.
    Elsewhere(Vec<Memory>),
}

/// Shards, and the connections that they have to take over.
pub(super) type Shards = (Vec<Shard>, Option<Inheritance>);

/// Creates the shards of a dataplane with tables in `memories`. `left` contains the tables of a
/// predecessor, if they are in other memory.
pub(super) fn shards(
    control: &Control,
    state: &dyn WarmState,
    memories: Vec<Memory>,
    left: Option<Vec<Memory>>,
) -> Shards {
    let in_place = state.is_found() && left.is_none();
    let mut inheritance = left.map(Inheritance::Elsewhere);
    let (mut shards, mut adoptions) = (Vec::new(), Vec::new());
    for (number, memory) in memories.into_iter().enumerate() {
        if in_place {
            let found = control.shard_found(number, memory);
            shards.extend(found.map(|(shard, adoption)| {
                adoptions.push(adoption);
                shard
            }));
        } else {
            shards.extend(control.shard_in(number, memory));
        }
    }
    if in_place {
        inheritance = Some(Inheritance::InPlace(adoptions));
    }
    (shards, inheritance)
}

/// Takes over the connections of a predecessor, and the counters of `records`. The kernel fast path
/// is suspended until this function returns. `steering` determines the worker of each connection.
pub(super) fn take_over(
    context: &Context,
    shards: &mut [Shard],
    state: &Arc<dyn WarmState>,
    inheritance: Inheritance,
    records: &[Record],
    steering: Option<&Steering>,
) {
    // Reading takes some time, during which the kernel continues to forward connections.
    let locals = state.locals_left();
    let started = SystemInstant::now();
    let _held = state.clone().hold();
    let mut control = context.control();
    for shard in &mut *shards {
        control.sweep(shard);
    }
    state.take_counts(&mut control, records);
    let now = context.now();
    let ahead = state.clock_ahead(now);
    match inheritance {
        Inheritance::InPlace(adoptions) => {
            for (number, (shard, adoption)) in shards.iter_mut().zip(adoptions).enumerate() {
                let mut adoption = adoption.of_a_clock_ahead(ahead);
                let local =
                    |slot, protocol, server| locals.as_ref()?.take(number, slot, protocol, server);
                while control.adopt(shard, &mut adoption, now, usize::MAX, local) {}
            }
            if let Some(locals) = locals {
                locals.end();
            }
        }
        Inheritance::Elsewhere(memories) => {
            let home = |client: SocketAddr| {
                steering.map_or(0, |steering| steering.of_client(client.ip(), client.port()))
            };
            let mut no_room = 0;
            for memory in memories {
                no_room += control.move_in(shards, memory, home, ahead, now);
            }
            if no_room > 0 {
                warn!(
                    "{no_room} connections of the previous dataplane were dropped: the connection table is full; start the dataplane with a larger --max-connections"
                );
            }
        }
    }
    state.set_clock(context.now());
    state.has_taken_over();
    info!(
        connections = shards.iter().map(Shard::len).sum::<usize>(),
        "this dataplane took over the state of a killed dataplane, in {:?}",
        started.elapsed()
    );
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use lvs_core::memory::Layout;
    use lvs_core::{Family, Forwarding, Options, ServerConfig, ServiceConfig};

    use super::*;
    use crate::fast_path::{FastPath, FastPathError};
    use crate::host::view::View;

    #[test]
    #[ignore = "long"]
    fn successor_restores_1_000_services_and_100_000_servers() {
        const SERVICES: u16 = 1000;
        const SERVERS: u16 = 100;
        let fast_path = match FastPath::open(Layout::new(1000, 7), Instant::ZERO) {
            Ok(fast_path) => Arc::new(fast_path),
            // Without permission for BPF, the test ends.
            Err(FastPathError::Permission(_)) => return,
            Err(error) => panic!("{error}"),
        };
        let state: Arc<dyn WarmState> = fast_path;
        assert!(state.saved().is_none());
        let id = |n: u16| ServiceId::Tcp {
            address: SocketAddr::from((Ipv4Addr::from(0xc000_0000 + u32::from(n)), 80)),
        };
        let mut calls = Vec::new();
        for n in 0..SERVICES {
            calls.push(Call::ServiceAdd(ServiceSpec {
                service: id(n),
                config: ServiceConfig::new(Family::V4, "rr"),
                owner: None,
            }));
            for server in 0..SERVERS {
                let ip = Ipv4Addr::from(0x0a00_0000 + u32::from(n) * 256 + u32::from(server));
                calls.push(Call::ServerAdd(ServerSpec {
                    service: id(n),
                    server: SocketAddr::from((ip, 80)),
                    config: ServerConfig::new(1, Forwarding::Nat),
                }));
            }
        }
        let host = View::default();
        let mut before = Control::new(Options::default());
        for calls in calls.chunks(CHANGES_MAX) {
            let done = before.apply(calls, &host, Instant::ZERO);
            done.expect("the stored calls are valid");
        }
        snapshot(&before).store(&*state);
        let mut after = Control::new(Options::default());
        let left = restore(&mut after, &host, &*state, Instant::ZERO);
        assert_eq!(after.services().count(), usize::from(SERVICES));
        let servers = usize::from(SERVICES) * usize::from(SERVERS);
        assert_eq!(after.endpoints().count(), servers);
        assert_eq!(left.records.len(), servers);
    }

    /// A successor skips only the calls that its version does not have.
    #[test]
    fn stored_calls_unknown_to_successor_are_skipped() -> serde_json::Result<()> {
        let text = r#"{"calls": [
            {"method": "timeouts.set", "params": {"tcp": 900, "tcp_fin": 120, "udp": 300}},
            {"method": "comes.later", "params": {}}
        ], "comes": "later"}"#;
        let kept: Kept<Value> = serde_json::from_str(text)?;
        let calls: Vec<Call> = kept.calls.into_iter().filter_map(known).collect();
        assert!(matches!(calls[..], [Call::TimeoutsSet(_)]), "{calls:?}");
        Ok(())
    }
}
