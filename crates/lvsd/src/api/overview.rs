//! The overview on the dashboard: faults, and a summary of the state.

use std::collections::HashMap;
use std::net::SocketAddr;

use lvs_api::daemon::{
    AdminEntry, AdminState, DataplaneStatus, DirectorStatus, LoadStatus, ServiceStatus,
    SourceStatus,
};
use lvs_core::api::{Conflict, InterfaceInfo, ReasonCount, ServiceId, ServiceInfo};
use lvs_core::stats::Counts;
use serde::Serialize;

use super::causes::{Cause, causes};
use super::host;
use crate::channels::Snapshot;
use crate::clock::unix_time;
use crate::config::label;
use crate::verdict::{self, ServiceState};

/// Maximum number of servers in [`Overview::broken`].
const BROKEN_MAX: usize = 200;
/// Maximum number of listed manual changes, of refused changes, and of overrides.
const LINES_MAX: usize = 100;

/// A summary of the status.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[cfg_attr(test, serde(deny_unknown_fields))]
pub struct Overview {
    /// Time of the overview, in seconds since 1970.
    pub now: u64,
    /// The name of the director's host.
    pub host: String,
    /// Version of lvsd.
    pub version: String,
    /// Path of the daemon's configuration file.
    pub config: String,
    /// Time since the start of lvsd, in seconds.
    pub uptime: u64,
    /// The result of the last read of the configuration file.
    pub loaded: LoadStatus,
    /// The state of the dataplane.
    pub dataplane: DataplaneStatus,
    /// Interfaces that the dataplane uses.
    pub interfaces: Vec<InterfaceInfo>,
    /// Addresses of services and of this host for which another host answers, too.
    pub conflicts: Vec<Conflict>,
    /// Faults of the director apart from its services, each with its fix, as text.
    pub faults: Vec<String>,
    /// The state of this director in its cluster.
    pub director: DirectorStatus,
    /// DNS names, etcd and Kubernetes as sources of servers and services.
    pub sources: Vec<SourceStatus>,
    /// Rates per second, summed over all services.
    pub rates: Counts,
    /// Longest recent delay of a check's start after its due time, in milliseconds.
    pub check_lag_ms: u64,
    /// The first manual changes, as text.
    pub drift: Vec<String>,
    /// The first changes that the dataplane has refused, as text.
    pub refused: Vec<String>,
    /// The first overrides of operators.
    pub admin: Vec<AdminEntry>,
    /// Number of manual changes, refused changes and overrides that are not listed.
    pub left_out: usize,
    /// Number of servers, without those that only the dataplane has.
    pub servers: usize,
    /// Number of servers that receive new connections.
    pub usable: usize,
    /// The total number of servers that are down.
    pub down: usize,
    /// The total number of suspicious servers.
    pub suspicious: usize,
    /// Broken servers: first those that are down, then suspicious ones. The length of the list is
    /// limited.
    pub broken: Vec<Broken>,
    /// The faults of servers, grouped by cause. Servers that are down come first, then suspicious,
    /// flapping and slow ones; in each group, the cause with most servers comes first. The length
    /// of the list is limited.
    pub causes: Vec<Cause>,
    /// The number of all causes, including those that are not listed.
    pub causes_in_all: usize,
    /// The services: first the broken ones, then the degraded, the suspicious and the OK ones;
    /// those of one state in the order of the file.
    pub services: Vec<Summary>,
    /// Numbers of dropped packets by reason, most packets first.
    pub drops: Vec<ReasonCount>,
}

/// A server that is down or suspicious.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[cfg_attr(test, serde(deny_unknown_fields))]
pub struct Broken {
    /// The name of the server's service.
    pub name: String,
    /// Protocol and address of the service, or its mark.
    pub service: ServiceId,
    /// Address and port of the server.
    pub server: SocketAddr,
    /// `down` or `suspicious`.
    pub health: String,
    /// Stable code of the fault, for programs.
    pub code: String,
    /// The reason why the server is down or suspicious.
    pub reason: String,
    /// The fix; absent if none is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(test, serde(default))]
    pub fix: String,
    /// Seconds since the server went down or became suspicious.
    pub since: Option<u64>,
    /// The server's administrative state.
    pub admin: AdminState,
    /// Number of active connections that the server still has.
    pub active: u32,
}

/// A service in brief.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[cfg_attr(test, serde(deny_unknown_fields))]
pub struct Summary {
    /// The service's name in the configuration.
    pub name: String,
    /// Protocol and address of the service, or its mark.
    pub service: ServiceId,
    /// The address as text: `tcp 192.0.2.10:80`.
    pub address: String,
    /// `ok`, `suspicious` (clients cannot use a server that is up), `degraded` (servers are down),
    /// or `broken` (clients are not served as configured, for example because no server is usable).
    pub state: String,
    /// The faults of the service, as text; empty without faults.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[cfg_attr(test, serde(default))]
    pub trouble: String,
    /// Number of servers, without those that only the dataplane has.
    pub servers: usize,
    /// Number of servers that receive new connections.
    pub usable: usize,
    /// Number of servers that are down.
    pub down: usize,
    /// Number of servers that are up, and that clients cannot use.
    pub suspicious: usize,
    /// Number of servers to which an operator permits no new connections.
    pub out_of_service: usize,
    /// Number of active connections.
    pub active: u64,
    /// Number of inactive connections.
    pub inactive: u64,
    /// Rates of the service's connections, packets and bytes, per second.
    pub rates: Counts,
}

/// A service in full: its state in `lvsd status`, and its state in the dataplane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
#[cfg_attr(test, serde(deny_unknown_fields))]
pub struct Detail {
    /// The address as text: `tcp 192.0.2.10:80`.
    pub address: String,
    /// The state as in `lvsd status`.
    pub status: ServiceStatus,
    /// The state in the dataplane; absent if the dataplane does not have the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, serde(default))]
    pub dataplane: Option<ServiceInfo>,
}

/// Summarises a snapshot for the dashboard.
pub fn overview(snapshot: &Snapshot) -> Overview {
    let status = &snapshot.status;
    let seen = &snapshot.found.seen;
    let dataplane: HashMap<ServiceId, &ServiceInfo> =
        snapshot.services().map(|i| (i.service, i)).collect();
    let mut by_state: Vec<&ServiceStatus> = status.services.iter().collect();
    by_state.sort_by_key(|service| ServiceState::of(service));
    let services: Vec<Summary> = by_state
        .iter()
        .map(|service| summary(service, dataplane.get(&service.service).copied()))
        .collect();
    let first = |lines: &[String]| lines.iter().take(LINES_MAX).cloned().collect();
    let lines = [status.drift.len(), status.refused.len(), status.admin.len()];
    let mut drops: Vec<ReasonCount> = seen
        .reasons
        .iter()
        .filter(|reason| reason.action == "drop" && reason.packets.count > 0)
        .cloned()
        .collect();
    drops.sort_by_key(|reason| std::cmp::Reverse(reason.packets.count));
    let (causes, causes_in_all) = causes(&status.services);
    Overview {
        now: unix_time(),
        host: host::own_name(),
        version: status.version.clone(),
        config: status.config.clone(),
        uptime: status.uptime,
        loaded: status.loaded.clone(),
        dataplane: status.dataplane.clone(),
        interfaces: seen.info.interfaces.clone(),
        conflicts: seen.info.conflicts.clone(),
        faults: verdict::faults(status),
        director: status.director.clone(),
        sources: status.sources.clone(),
        rates: snapshot.total().rates,
        check_lag_ms: status.check_lag_ms,
        drift: first(&status.drift),
        refused: first(&status.refused),
        admin: status.admin.iter().take(LINES_MAX).cloned().collect(),
        left_out: lines.iter().map(|n| n.saturating_sub(LINES_MAX)).sum(),
        servers: services.iter().map(|service| service.servers).sum(),
        usable: services.iter().map(|service| service.usable).sum(),
        down: services.iter().map(|service| service.down).sum(),
        suspicious: services.iter().map(|service| service.suspicious).sum(),
        broken: broken(&status.services),
        causes,
        causes_in_all,
        services,
        drops,
    }
}

/// The servers that are down, then the suspicious ones, at most [`BROKEN_MAX`]; in each group, the
/// most recent change is first.
fn broken(services: &[ServiceStatus]) -> Vec<Broken> {
    let mut all: Vec<Broken> = services
        .iter()
        .flat_map(|service| service.servers.iter().map(move |server| (service, server)))
        .filter(|(_, server)| matches!(server.health.as_str(), "down" | "suspicious"))
        .map(|(service, server)| Broken {
            name: service.name.clone(),
            service: service.service,
            server: server.server,
            health: server.health.clone(),
            code: server.code.clone(),
            reason: server.reason.clone(),
            fix: server.fix.clone(),
            since: server.since,
            admin: server.admin,
            active: server.active,
        })
        .collect();
    all.sort_by_key(|broken| (broken.health != "down", broken.since));
    all.truncate(BROKEN_MAX);
    all
}

fn summary(service: &ServiceStatus, dataplane: Option<&ServiceInfo>) -> Summary {
    let in_file = || verdict::in_file(service);
    Summary {
        name: service.name.clone(),
        service: service.service,
        address: label(&service.service),
        state: ServiceState::of(service).name().to_owned(),
        trouble: verdict::trouble(service).join("; "),
        servers: in_file().count(),
        usable: service.usable,
        down: verdict::count(service, "down"),
        suspicious: verdict::count(service, "suspicious"),
        out_of_service: in_file().filter(|s| s.admin != AdminState::Ready).count(),
        active: service.servers.iter().map(|s| u64::from(s.active)).sum(),
        inactive: service.servers.iter().map(|s| u64::from(s.inactive)).sum(),
        rates: dataplane.map(|info| info.stats.rates).unwrap_or_default(),
    }
}

/// The services named `name`: one for each of its addresses.
pub fn details(snapshot: &Snapshot, name: &str) -> Vec<Detail> {
    let named = snapshot.status.services.iter().filter(|s| s.name == name);
    named
        .map(|status| Detail {
            address: label(&status.service),
            status: status.clone(),
            dataplane: snapshot
                .services()
                .find(|info| info.service == status.service)
                .cloned(),
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use lvs_api::daemon::{ServerStatus, Status};
    use lvs_core::api::{Info, SyncCounts};
    use lvs_core::recent::RecentCount;
    use lvs_core::stats::Stats;
    use lvs_core::{Forwarding, ServerConfig, ServiceConfig};

    use super::*;
    use crate::dataplane::{DataplaneView, Found};

    /// A state with one service, which has a server that is up and a server that is down.
    pub(crate) fn snapshot(name: &str) -> Snapshot {
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 10], 80).into(),
        };
        let address = |n: u8| SocketAddr::from(([10, 0, 0, n], 80));
        let server = |n: u8, health: &str, reason: &str| ServerStatus {
            server: address(n),
            configured: Some(1),
            admin: AdminState::Ready,
            health: health.to_owned(),
            since: Some(60),
            code: match health {
                "down" => "refused".to_owned(),
                _ => String::new(),
            },
            reason: reason.to_owned(),
            fix: String::new(),
            attempts: Default::default(),
            latency_us: None,
            checks: None,
            check_not_made: None,
            weight: Some(i32::from(n == 1)),
            active: 2,
            inactive: 1,
        };
        let counts = Counts {
            conns: 9,
            in_packets: 40,
            out_packets: 50,
            in_bytes: 4000,
            out_bytes: 5000,
        };
        let stats = Stats {
            shown: counts,
            rates: Counts::default(),
            live: counts,
        };
        let info = |n: u8| lvs_core::api::ServerInfo {
            active: 2,
            inactive: 1,
            stats,
            ..lvs_core::api::ServerInfo::new(
                address(n),
                ServerConfig::new(i32::from(n == 1), Forwarding::Nat),
            )
        };
        Snapshot {
            status: Status {
                pid: 7,
                version: "0.1.0".to_owned(),
                config: "/etc/lvsd/lvsd.toml".to_owned(),
                uptime: 61,
                dataplane: DataplaneStatus {
                    connected: true,
                    idle: false,
                    pid: Some(8),
                    seen_ms: Some(100),
                    vips: vec![],
                    version: Some("0.1.0".to_owned()),
                    sync: Some(SyncCounts {
                        sent: 7,
                        lost: 2,
                        ..SyncCounts::default()
                    }),
                    peers: Vec::new(),
                    tables: Vec::new(),
                    waiting: Vec::new(),
                    ..DataplaneStatus::default()
                },
                services: vec![ServiceStatus {
                    name: name.to_owned(),
                    service,
                    proxied: false,
                    usable: 1,
                    quorum: true,
                    panic: false,
                    sorry: None,
                    sorry_server: None,
                    withdrawn: false,
                    conflict: false,
                    unheard: false,
                    refusals: Vec::new(),
                    drops: Vec::new(),
                    servers: vec![server(1, "up", ""), server(2, "down", "connection refused")],
                }],
                ..Status::default()
            },
            found: Arc::new(Found {
                seen: Arc::new(DataplaneView {
                    info: Info {
                        pid: 8,
                        connections: 3,
                        capacity: 1000,
                        total: stats,
                        ..Info::default()
                    },
                    services: vec![ServiceInfo {
                        service,
                        config: ServiceConfig::new(lvs_core::Family::V4, "wlc"),
                        owner: Some("lvsd".to_owned()),
                        stats,
                        refused: 0,
                        refusals: Vec::new(),
                        drops: Vec::new(),
                        servers: vec![info(2), info(1)],
                    }],
                    reasons: vec![ReasonCount {
                        action: "drop".to_owned(),
                        reason: "no_server".to_owned(),
                        packets: RecentCount {
                            count: 7,
                            ..RecentCount::default()
                        },
                        help: "no server".to_owned(),
                        fix: "add one".to_owned(),
                    }],
                    ..DataplaneView::default()
                }),
                ..Found::default()
            }),
            check_times: HashMap::new(),
        }
    }

    #[test]
    fn overview_lists_broken_services_first_with_totals_reasons_and_fixes() {
        let mut snapshot = snapshot("web");
        let mut second = snapshot.status.services[0].clone();
        second.name = "mail".to_owned();
        second.usable = 0;
        snapshot.status.services.push(second);
        let overview = overview(&snapshot);
        let services: Vec<_> = overview
            .services
            .iter()
            .map(|s| (s.name.as_str(), s.state.as_str(), s.trouble.as_str()))
            .collect();
        assert_eq!(
            services,
            [
                ("mail", "broken", "no server receives new connections"),
                ("web", "degraded", ""),
            ]
        );
        assert_eq!(
            (overview.servers, overview.usable, overview.down),
            (4, 1, 2)
        );
        assert_eq!(overview.broken[0].reason, "connection refused");
        assert_eq!(overview.drops[0].fix, "add one");
    }

    #[test]
    fn overview_lists_down_servers_and_their_services_before_suspicious_servers() {
        let mut snapshot = snapshot("web");
        let mut second = snapshot.status.services[0].clone();
        second.name = "mail".to_owned();
        second.servers[0].health = "suspicious".to_owned();
        second.servers[0].fix = "on 10.0.0.1: look".to_owned();
        second.servers[1].health = "up".to_owned();
        snapshot.status.services.insert(0, second);
        let overview = overview(&snapshot);
        let services = overview.services.iter();
        let states: Vec<_> = services.map(|one| one.state.as_str()).collect();
        assert_eq!(states, ["degraded", "suspicious"]);
        let broken = overview.broken.iter();
        let broken: Vec<_> = broken.map(|one| one.health.as_str()).collect();
        assert_eq!(broken, ["down", "suspicious"]);
        assert_eq!((overview.down, overview.suspicious), (1, 1));
        assert_eq!(overview.broken[1].fix, "on 10.0.0.1: look");
    }
}
