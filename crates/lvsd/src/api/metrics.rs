//! `/metrics` in the format of Prometheus.
//!
//! The configuration bounds the labels: names and addresses of services and servers, and fixed
//! words of lvsd and the dataplane.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;

use lvs_api::daemon::{AdminState, ServerStatus, ServiceStatus};
use lvs_core::api::{
    InterfaceInfo, ReasonCount, Refusals, ServerInfo, ServiceId, ServiceInfo, WorkerInfo,
};
use lvs_core::stats::Counts;
use lvs_core::{DropReason, Family};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, MetricEncoder,
    NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::processes;
use crate::channels::Snapshot;
use crate::clock::unix_time;
use crate::counters::{self, BOUNDS, Times};

/// Writes metrics. Each line contains the kind, the name, the value or the samples, and the
/// description of one metric.
macro_rules! metrics {
    ($out:expr; $($kind:ident $name:literal $value:expr, $help:literal;)+) => {
        $($out.$kind($name, $help, $value)?;)+
    };
}

mod directors;

/// The names of the two processes, as values of the label `process`.
const LVSD: &str = "lvsd";
const DATAPLANE: &str = "lvs-dataplane";

/// Maximum number of servers up to which each server has metrics of its own. With more servers,
/// none has.
const SERVERS_MAX: usize = 5000;
/// Maximum number of services up to which each service has a series for every reason to refuse a
/// connection. With more services, a series begins with the first packet refused for its reason.
const ZEROS_MAX: usize = 500;

/// The names and values of a metric's labels.
type Labels<'a, const N: usize> = [(&'static str, &'a str); N];
/// The labels of a service, and the label `reason`.
type ReasonLabels<'a> = (Labels<'a, 3>, Labels<'a, 1>);

/// All metrics in the text format of OpenMetrics 1.0.0.
pub fn open_metrics(snapshot: Arc<Snapshot>, counts: counters::Counts) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(View { snapshot, counts }));
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = text::encode(&mut out, &registry);
    out
}

/// Converts OpenMetrics to the Prometheus text format 0.0.4: the description of a counter also uses
/// the name with the suffix `_total`, and the end marker is missing.
pub fn plain(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.split_inclusive('\n') {
        if !line.starts_with('#') {
            out.push_str(line);
        } else if line.starts_with("# HELP ") {
            help = Some(line);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.trim_end().split_once(' ').unwrap_or((rest, "untyped"));
            let suffix = if kind == "counter" { "_total" } else { "" };
            let about = help.take().and_then(|line| line.get(7 + name.len()..));
            if let Some(about) = about {
                let _ = write!(out, "# HELP {name}{suffix}{about}");
            }
            let _ = writeln!(out, "# TYPE {name}{suffix} {kind}");
        }
    }
    out
}

/// The states and counters from which the metrics are written.
#[derive(Debug)]
struct View {
    snapshot: Arc<Snapshot>,
    counts: counters::Counts,
}

/// The state of a service in the daemon and the dataplane.
struct Service<'a> {
    status: &'a ServiceStatus,
    dataplane: Option<&'a ServiceInfo>,
    protocol: &'static str,
    address: String,
}

impl<'a> Service<'a> {
    fn labels(&self) -> Labels<'_, 3> {
        [
            ("service", &self.status.name),
            ("protocol", self.protocol),
            ("address", &self.address),
        ]
    }

    /// The dataplane's counters. `None` until the dataplane has reported: Prometheus would
    /// interpret a 0 as a reset of the counter.
    fn live(&self) -> Option<Counts> {
        self.dataplane.map(|info| info.stats.live)
    }

    /// The packets of the service's counter `of`, by reason, and 0 for the reasons of `zeros` that
    /// have not occurred. No items until the dataplane has reported.
    fn packets(
        &self,
        of: Losses,
        zeros: &'static [DropReason],
    ) -> impl Iterator<Item = (ReasonLabels<'_>, u64)> {
        self.dataplane.into_iter().flat_map(move |info| {
            let counted = of(info);
            let zeros = zeros.iter().map(|reason| reason.name());
            let zeros = zeros.filter(move |name| counted.iter().all(|one| one.reason != *name));
            let counts = counted.iter();
            let counts = counts.map(|one| (one.reason.as_str(), one.packets.count));
            let all = counts.chain(zeros.map(|name| (name, 0)));
            all.map(move |(reason, count)| ((self.labels(), [("reason", reason)]), count))
        })
    }

    /// Whether the number of the service's connections is known: lvsd proxies the service, or the
    /// dataplane answers.
    const fn is_known(&self, connected: bool) -> bool {
        connected || self.status.proxied
    }

    fn servers(&self) -> Vec<Server<'a>> {
        let dataplane = self.dataplane.iter().flat_map(|info| &info.servers);
        let dataplane: HashMap<SocketAddr, &ServerInfo> =
            dataplane.map(|server| (server.server, server)).collect();
        let all = self.status.servers.iter();
        all.map(|status| Server {
            status,
            dataplane: dataplane.get(&status.server).copied(),
            address: status.server.to_string(),
        })
        .collect()
    }
}

/// The state of a server in the daemon and the dataplane.
struct Server<'a> {
    status: &'a ServerStatus,
    dataplane: Option<&'a ServerInfo>,
    address: String,
}

/// Writes descriptions and values, one metric after the other.
struct Out<'e>(DescriptorEncoder<'e>);

impl Out<'_> {
    fn family<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        self.family(name, help, MetricType::Gauge)?
            .encode_gauge(&value)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut encoder = self.family(name, help, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, _, f64>(&value, None)
    }

    fn histogram(&mut self, name: &str, help: &str, times: &Times) -> fmt::Result {
        let (sum, count, classes) = classes(times);
        let mut encoder = self.family(name, help, MetricType::Histogram)?;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &classes, None)
    }

    fn gauges<L: EncodeLabelSet, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut encoder = self.family(name, help, MetricType::Gauge)?;
        values
            .into_iter()
            .try_for_each(|(labels, value)| encoder.encode_family(&labels)?.encode_gauge(&value))
    }

    fn counters<L: EncodeLabelSet, V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) -> fmt::Result {
        let mut encoder = self.family(name, help, MetricType::Counter)?;
        values.into_iter().try_for_each(|(labels, value)| {
            let mut encoder = encoder.encode_family(&labels)?;
            encoder.encode_counter::<NoLabelSet, _, f64>(&value, None)
        })
    }

    fn histograms<'t, L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, &'t Times)>,
    ) -> fmt::Result {
        let mut encoder = self.family(name, help, MetricType::Histogram)?;
        values.into_iter().try_for_each(|(labels, times)| {
            let (sum, count, classes) = classes(times);
            let mut encoder = encoder.encode_family(&labels)?;
            encoder.encode_histogram::<NoLabelSet>(sum, count, &classes, None)
        })
    }
}

/// The sum of the times in seconds, the number of times, and the buckets of the histogram.
fn classes(times: &Times) -> (f64, u64, Vec<(f64, u64)>) {
    let bounds = BOUNDS.iter().copied().chain([f64::INFINITY]);
    let classes = bounds.zip(times.classes.iter().copied()).collect();
    #[expect(clippy::cast_precision_loss, reason = "53 bits are 285 years")]
    let sum = times.sum_us as f64 / 1e6;
    (sum, times.classes.iter().sum(), classes)
}

impl Collector for View {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        self.daemon(&mut out)?;
        self.checks(&mut out)?;
        self.dataplane(&mut out)?;
        directors::sources(&mut out, &self.snapshot.status)?;
        directors::alone_or_not(&mut out, &self.snapshot.status.director)?;
        let dataplane = self.snapshot.services();
        let dataplane: HashMap<ServiceId, &ServiceInfo> =
            dataplane.map(|info| (info.service, info)).collect();
        let services: Vec<Service<'_>> = self
            .snapshot
            .status
            .services
            .iter()
            .map(|status| {
                let (protocol, address) = place(&status.service);
                Service {
                    status,
                    dataplane: dataplane.get(&status.service).copied(),
                    protocol,
                    address,
                }
            })
            .collect();
        services_out(
            &mut out,
            &services,
            self.snapshot.status.dataplane.connected,
        )?;
        self.servers(&mut out, &services)
    }
}

/// Protocol and address of a service as labels.
fn place(id: &ServiceId) -> (&'static str, String) {
    match id {
        ServiceId::Tcp { address } => ("tcp", address.to_string()),
        ServiceId::Udp { address } => ("udp", address.to_string()),
        ServiceId::Sctp { address } => ("sctp", address.to_string()),
        ServiceId::Fwmark { mark, family } => match family {
            Family::V4 => ("fwmark", mark.to_string()),
            Family::V6 => ("fwmark6", mark.to_string()),
        },
    }
}

impl View {
    fn daemon(&self, out: &mut Out<'_>) -> fmt::Result {
        let status = &self.snapshot.status;
        let counts = &self.counts;
        let loaded = &status.loaded;
        metrics! { out;
            gauges "lvs_build_info" [([("version", status.version.as_str())], 1u32)],
                "Version of lvsd; always 1";
            gauge "lvs_start_time_seconds" unix_time().saturating_sub(status.uptime),
                "When lvsd was started, in seconds since 1970";
            gauge "lvs_config_last_reload_successful" u32::from(loaded.ok),
                "Whether the last read of the configuration file has succeeded";
            gauge "lvs_config_last_reload_timestamp_seconds" loaded.time,
                "When the configuration file was last read, in seconds since 1970";
            counters "lvs_config_reloads" [
                    ([("result", "taken")], counts.reloads),
                    ([("result", "refused")], counts.reloads_refused),
                ],
                "Number of times that lvsd has read the configuration file since the start of lvsd, by result";
            gauge "lvs_drift" status.drift.len(),
                "Manual changes that lvsd does not revert";
            counter "lvs_drift_changes" counts.drift,
                "Manual changes that lvsd has found";
            gauge "lvs_refused_changes" status.refused.len(),
                "Changes that the dataplane refuses";
        }
        if let Some(proxy) = &status.proxy {
            metrics! { out;
                gauge "lvs_proxy_connections" proxy.connections,
                    "Connections, and clients of datagrams, that lvsd relays";
                gauge "lvs_proxy_connections_max" proxy.most,
                    "Maximum number of simultaneously relayed connections and clients";
                counter "lvs_proxy_full" proxy.full,
                    "Connections and datagrams that were refused because the maximum was reached";
                counter "lvs_proxy_evicted" proxy.evicted,
                    "Datagram clients that were evicted for other clients";
                counter "lvs_proxy_refused" proxy.refused,
                    "Connections and datagrams that were refused: no server available, a limit, or a filter";
            }
        }
        let overrides = [AdminState::Drain, AdminState::Maintenance].map(|state| {
            let of = status.admin.iter().filter(|e| e.spec.state == state);
            ([("state", state.name())], of.count())
        });
        let answers = counts.http.iter();
        let answers = answers.map(|(code, number)| ([("code", code.to_string())], *number));
        metrics! { out;
            gauges "lvs_admin_entries" overrides,
                "Active operator overrides of servers";
            counters "lvs_http_requests" answers,
                "Answers of lvsd over HTTP, by status code";
            counter "lvs_http_refused_connections" counts.http_no_place,
                "HTTP connections and streams that were refused because the maximum was reached";
        }
        Ok(())
    }

    fn checks(&self, out: &mut Out<'_>) -> fmt::Result {
        let counts = &self.counts;
        let kinds = || counts.checks.iter().map(|(kind, of)| (kind.as_str(), of));
        let results = kinds().flat_map(|(kind, of)| {
            [
                ("good", of.good),
                ("failed", of.failed),
                ("not_made", of.not_made),
            ]
            .map(|(result, count)| ([("kind", kind), ("result", result)], count))
        });
        metrics! { out;
            histograms "lvs_check_duration_seconds"
                kinds().map(|(kind, of)| ([("kind", kind)], &of.times)),
                "Durations of health checks by kind, in seconds";
            counters "lvs_checks" results,
                "Health checks by result";
            counter "lvs_checks_prompted" counts.prompted,
                "Health checks that ran at once because clients got no answer (`passive`)";
            histogram "lvs_check_lag_seconds" &counts.lag,
                "Delays of health checks after their due time, in seconds";
            counters "lvs_health_transitions"
                [([("to", "up")], counts.ups), ([("to", "down")], counts.downs)],
                "Number of times that servers went up or down";
        }
        Ok(())
    }

    fn dataplane(&self, out: &mut Out<'_>) -> fmt::Result {
        let dataplane = &self.snapshot.status.dataplane;
        let seen = &self.snapshot.found.seen;
        if !dataplane.idle || dataplane.connected {
            metrics! { out;
                gauge "lvs_dataplane_up" u32::from(dataplane.connected),
                    "Whether the dataplane answers lvsd; absent if all services are proxied";
            }
        }
        metrics! { out;
            counter "lvs_dataplane_restarts" self.counts.dataplane_restarts,
                "Number of times that lvsd found another dataplane instead of the previous one";
        }
        self.processes(out)?;
        let (Some(info), Some(age)) = (self.snapshot.dataplane(), dataplane.seen_ms) else {
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "a rough time")]
        let age = age as f64 / 1e3;
        metrics! { out;
            gauge "lvs_dataplane_seen_age_seconds" age,
                "Seconds since the last answer of the dataplane";
        }
        // The other values are unknown while the dataplane does not answer.
        if !dataplane.connected {
            return Ok(());
        }
        metrics! { out;
            gauge "lvs_dataplane_start_time_seconds" unix_time().saturating_sub(info.uptime),
                "When the dataplane was started, in seconds since 1970";
            gauge "lvs_table_connections" info.connections,
                "Connections in the dataplane's table";
            gauge "lvs_table_capacity" info.capacity,
                "Maximum number of connections in the dataplane's table";
            gauge "lvs_own_vips" info.own_vips.len(),
                "Virtual addresses that the dataplane owns";
        }
        directors::dataplane(out, info)?;
        let vips = info.conflicts.iter().filter(|one| one.is_vip()).count();
        metrics! { out;
            gauge "lvs_vip_conflicts" vips,
                "Virtual addresses for which another host answers, too";
            gauge "lvs_address_conflicts" info.conflicts.len() - vips,
                "Addresses of this host, other than VIPs, for which another host answers, too";
            gauge "lvs_silent_next_hops" dataplane.silent_hops.len(),
                "Next hops that do not answer, without those of servers or interfaces that are down";
        }
        Self::interfaces(out, &info.interfaces)?;
        Self::workers(out, &info.workers)?;
        Self::reasons(out, &seen.reasons)?;
        if let Some(sync) = &dataplane.sync {
            directors::synchronisation(out, sync)?;
        }
        Self::totals(out, &info.total.live)
    }

    /// Processor time and memory of lvsd, and of the dataplane while it answers. Also the processor
    /// time of each packet worker.
    fn processes(&self, out: &mut Out<'_>) -> fmt::Result {
        let status = &self.snapshot.status;
        let dataplane = status.dataplane.pid.filter(|_| status.dataplane.connected);
        let own = (LVSD, Some(status.pid));
        let all = [own, (DATAPLANE, dataplane)].map(|(name, pid)| {
            let usage = pid.and_then(|pid| processes::usage(pid, name));
            ([("process", name)], usage)
        });
        let known = || {
            all.iter()
                .filter_map(|(label, usage)| Some((*label, usage.as_ref()?)))
        };
        metrics! { out;
            counters "lvs_process_cpu_seconds"
                known().map(|(label, usage)| (label, usage.cpu_seconds)),
                "Processor time of a process since its start, in seconds";
            gauges "lvs_process_resident_memory_bytes"
                known().map(|(label, usage)| (label, usage.resident_bytes)),
                "Memory that a process uses, in bytes";
        }
        // The process id of a dataplane in another PID namespace belongs to another process here.
        let [_, (_, usage)] = &all;
        let seen = dataplane.filter(|_| usage.is_some());
        let workers = seen.map(processes::workers).unwrap_or_default();
        let workers = workers.iter();
        let workers = workers.map(|(worker, seconds)| ([("worker", worker.to_string())], *seconds));
        metrics! { out;
            counters "lvs_worker_cpu_seconds" workers,
                "Processor time of a packet worker since its start, in seconds";
        }
        Ok(())
    }

    fn interfaces(out: &mut Out<'_>, interfaces: &[InterfaceInfo]) -> fmt::Result {
        let each = |value: fn(&InterfaceInfo) -> u64| {
            let all = interfaces.iter();
            all.map(move |one| ([("interface", one.name.as_str())], value(one)))
        };
        metrics! { out;
            gauges "lvs_interface_up" each(|interface| interface.up.into()),
                "Whether an interface that the dataplane uses is up";
            counters "lvs_interface_lost_frames" each(|interface| interface.lost),
                "Frames that were lost, because they arrived faster than the dataplane read them";
        }
        Ok(())
    }

    fn workers(out: &mut Out<'_>, workers: &[WorkerInfo]) -> fmt::Result {
        let each = |value: fn(&WorkerInfo) -> u64| {
            let all = workers.iter();
            all.map(move |worker| ([("worker", worker.number.to_string())], value(worker)))
        };
        metrics! { out;
            gauges "lvs_worker_connections" each(|worker| worker.connections),
                "Connections of a packet worker";
            counters "lvs_worker_packets" each(|worker| worker.packets),
                "Frames that a packet worker has received";
            counters "lvs_worker_lost_frames" each(|worker| worker.lost),
                "Frames that were lost, because they arrived faster than a packet worker read them";
            counters "lvs_worker_handed_over" each(|worker| worker.handed_over),
                "Frames that a packet worker has passed to the worker to which they belong";
            counters "lvs_worker_taken" each(|worker| worker.taken),
                "Frames that a packet worker has received from other workers";
            counters "lvs_worker_busy" each(|worker| worker.busy),
                "Frames that a packet worker dropped because the queue of the other worker was full";
            counters "lvs_worker_demoted" each(|worker| worker.demoted),
                "Number of times that a packet worker used more than half of a processor and lost real-time scheduling";
        }
        Ok(())
    }

    fn reasons(out: &mut Out<'_>, reasons: &[ReasonCount]) -> fmt::Result {
        for (action, name, help) in [
            ("drop", "lvs_drops", "Dropped packets by reason"),
            (
                "host",
                "lvs_left_to_host",
                "Packets passed to the host's network stack, or reinjected into it, by reason",
            ),
            (
                "kernel",
                "lvs_fast_path_packets",
                "Packets forwarded by the kernel fast path",
            ),
            (
                "up",
                "lvs_fast_path_handed_up_packets",
                "Packets that the kernel fast path passed to the dataplane, by reason",
            ),
        ] {
            let of = reasons.iter().filter(|reason| reason.action == action);
            let mut of = of
                .map(|one| ([("reason", one.reason.as_str())], one.packets.count))
                .peekable();
            if of.peek().is_some() {
                out.counters(name, help, of)?;
            }
        }
        Ok(())
    }

    fn totals(out: &mut Out<'_>, total: &Counts) -> fmt::Result {
        let directions = |counts: [u64; 2]| DIRECTIONS.into_iter().zip(counts);
        metrics! { out;
            counter "lvs_connections" total.conns,
                "Connections of all services, including removed services";
            counters "lvs_packets" directions([total.in_packets, total.out_packets]),
                "Packets of all services";
            counters "lvs_bytes" directions([total.in_bytes, total.out_bytes]),
                "Bytes of all services";
        }
        Ok(())
    }

    fn servers(&self, out: &mut Out<'_>, services: &[Service<'_>]) -> fmt::Result {
        let count: usize = services.iter().map(|s| s.status.servers.len()).sum();
        let shown = count <= SERVERS_MAX;
        metrics! { out;
            gauge "lvs_servers_without_series" if shown { 0 } else { count },
                "Servers without separate metrics, because there are more than 5000";
        }
        if !shown {
            return Ok(());
        }
        let all: Vec<(&Service<'_>, Server<'_>)> = services
            .iter()
            .flat_map(|service| service.servers().into_iter().map(move |s| (service, s)))
            .collect();
        let each = |value: fn(&Server<'_>) -> Option<u64>| {
            let values = all.iter();
            values.filter_map(move |(service, server)| {
                Some((labels_of(service, server), value(server)?))
            })
        };
        metrics! { out;
            gauges "lvs_server_up" each(|server| match server.status.health.as_str() {
                    "up" | "suspicious" => Some(1),
                    "down" => Some(0),
                    _ => None,
                }),
                "Whether a server is up according to its checks; absent without a check, and before the first result";
            gauges "lvs_server_suspicious"
                each(|server| Some((server.status.health == "suspicious").into())),
                "Whether clients cannot use a server that is up";
            counters "lvs_server_attempts"
                each(|server| Some(server.dataplane?.attempts.total.opened)),
                "Connections that clients opened to a server";
            counters "lvs_server_unanswered"
                each(|server| Some(server.dataplane?.attempts.total.unanswered)),
                "Connections of clients that a server did not answer";
        }
        if !self.snapshot.check_times.is_empty() {
            let times = all.iter().filter_map(|(service, server)| {
                let key = (service.status.service, server.status.server);
                let times = self.snapshot.check_times.get(&key)?;
                Some((labels_of(service, server), times))
            });
            metrics! { out;
                histograms "lvs_server_check_duration_seconds" times,
                    "Duration of the health checks of a server, in seconds; absent if more than 500 servers are checked";
            }
        }
        // The other values of a service are unknown while its dataplane does not answer.
        let connected = self.snapshot.status.dataplane.connected;
        let known = |value: fn(&ServerStatus) -> Option<i64>| {
            let known = all.iter();
            let known = known.filter(move |(service, _)| service.is_known(connected));
            known.filter_map(move |(service, server)| {
                Some((labels_of(service, server), value(server.status)?))
            })
        };
        metrics! { out;
            counters "lvs_server_falls" each(|server| Some(server.status.checks.as_ref()?.falls)),
                "Number of times that a server went down";
            counters "lvs_server_down_seconds"
                each(|server| Some(server.status.checks.as_ref()?.down_seconds)),
                "Total time for which a server was down, in seconds";
            gauges "lvs_server_weight" known(|status| status.weight.map(i64::from)),
                "Weight of a server in the dataplane; absent if the dataplane does not have the server";
            gauges "lvs_server_out_of_service"
                each(|server| Some((server.status.admin != AdminState::Ready).into())),
                "Whether an operator has taken a server out of service, so that it receives no new connections";
            gauges "lvs_server_active_connections" known(|status| Some(status.active.into())),
                "Connections of a server in active states";
            gauges "lvs_server_inactive_connections" known(|status| Some(status.inactive.into())),
                "Inactive connections of a server";
        }
        let live = all.iter().filter_map(|(service, server)| {
            Some((labels_of(service, server), server.dataplane?.stats.live))
        });
        traffic(
            out,
            [
                ("lvs_server_connections", "Connections of a server"),
                ("lvs_server_packets", "Packets of a server"),
                ("lvs_server_bytes", "Bytes of a server"),
            ],
            live,
        )
    }
}

fn labels_of<'a>(service: &'a Service<'_>, server: &'a Server<'_>) -> Labels<'a, 4> {
    let [name, protocol, address] = service.labels();
    [name, protocol, address, ("server", &server.address)]
}

fn services_out(out: &mut Out<'_>, services: &[Service<'_>], connected: bool) -> fmt::Result {
    let each = |value: fn(&ServiceStatus) -> u64| {
        let all = services.iter();
        all.map(move |service| (service.labels(), value(service.status)))
    };
    let known = |value: fn(&ServerStatus) -> u32| {
        let known = services.iter().filter(move |one| one.is_known(connected));
        known.map(move |service| {
            let values = service.status.servers.iter().map(value);
            (service.labels(), values.map(u64::from).sum::<u64>())
        })
    };
    let by_health = services.iter().flat_map(|service| {
        let [name, protocol, address] = service.labels();
        ["up", "suspicious", "down", "unknown", "unchecked"].map(|health| {
            let of = service.status.servers.iter();
            let of = of.filter(|s| s.configured.is_some() && s.health == health);
            ([name, protocol, address, ("health", health)], of.count())
        })
    });
    metrics! { out;
        gauges "lvs_service_checks_not_made" each(|status| {
                let of = status.servers.iter();
                of.filter(|server| server.check_not_made.is_some()).count() as u64
            }),
            "Servers whose last three or more checks this host could not run";
        gauges "lvs_service_servers" by_health,
            "Servers of a service in the file, by the result of their checks";
        gauges "lvs_service_usable_servers" each(|status| status.usable as u64),
            "Servers of a service that receive new connections";
        gauges "lvs_service_quorum" each(|status| status.quorum.into()),
            "Whether a service has enough usable servers";
        gauges "lvs_service_panic" each(|status| status.panic.into()),
            "Whether all servers of a service count as up, because too few are up";
        gauges "lvs_service_sorry" each(|status| status.sorry.is_some().into()),
            "Whether the sorry server of a service serves";
        gauges "lvs_service_vip_withdrawn" each(|status| status.withdrawn.into()),
            "Whether the VIP of a service is released";
        gauges "lvs_service_conflict" each(|status| status.conflict.into()),
            "Whether a service of another program uses the address of a service";
        gauges "lvs_service_active_connections" known(|server| server.active),
            "Connections of a service in active states";
        gauges "lvs_service_inactive_connections" known(|server| server.inactive),
            "Inactive connections of a service";
    }
    for (name, help, of, zeros) in LOSSES {
        let zeros = if services.len() <= ZEROS_MAX {
            zeros
        } else {
            &[]
        };
        let all = services.iter().flat_map(|one| one.packets(of, zeros));
        out.counters(name, help, all)?;
    }
    traffic(
        out,
        [
            ("lvs_service_connections", "Connections of a service"),
            ("lvs_service_packets", "Packets of a service"),
            ("lvs_service_bytes", "Bytes of a service"),
        ],
        services
            .iter()
            .filter_map(|s| Some((s.labels(), s.live()?))),
    )
}

/// Function that returns how many packets of a service were not forwarded, by reason.
type Losses = fn(&ServiceInfo) -> &[Refusals];

/// The metrics of packets that were not forwarded, by service and reason: name, description, value,
/// and the reasons whose series exist before the first packet. Only a few of the many reasons for
/// dropped packets can occur for a service, so their series begin with the first packet.
const LOSSES: [(&str, &str, Losses, &[DropReason]); 2] = [
    (
        "lvs_service_refused",
        "Packets that would have opened a connection, and were dropped or refused, by reason",
        |info| &info.refusals,
        &DropReason::REFUSALS,
    ),
    (
        "lvs_service_dropped",
        "Dropped or refused packets of existing connections, by reason",
        |info| &info.drops,
        &[],
    ),
];

const DIRECTIONS: [Labels<'static, 1>; 2] = [[("direction", "in")], [("direction", "out")]];

/// Writes connections, packets and bytes, with one sample for each set of labels.
fn traffic<'a, const N: usize>(
    out: &mut Out<'_>,
    [connections, packets, bytes]: [(&str, &str); 3],
    all: impl Iterator<Item = (Labels<'a, N>, Counts)> + Clone,
) -> fmt::Result {
    let conns = all.clone().map(|(labels, counts)| (labels, counts.conns));
    out.counters(connections.0, connections.1, conns)?;
    for ((name, help), counts) in [
        (
            packets,
            (|c| [c.in_packets, c.out_packets]) as fn(Counts) -> [u64; 2],
        ),
        (bytes, |c| [c.in_bytes, c.out_bytes]),
    ] {
        let both = all.clone().flat_map(|(labels, all)| {
            let counts = DIRECTIONS.into_iter().zip(counts(all));
            counts.map(move |(direction, count)| ((labels, direction), count))
        });
        out.counters(name, help, both)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lvs_api::daemon::{ProxyStatus, SourceStatus, VrrpStatus};
    use lvs_core::api::{PeerStanding, SilentHop, TablesInfo, TablesState};
    use lvs_core::recent::RecentCount;

    use super::*;
    use crate::api::overview::tests::snapshot;

    fn text(name: &str) -> String {
        let counters = counters::Counters::default();
        counters.check(
            "tcp",
            std::time::Duration::from_millis(3),
            counters::CheckOutcome::Good,
        );
        counters.http(200);
        open_metrics(Arc::new(snapshot(name)), counters.get())
    }

    #[test]
    fn metrics_contain_series_of_service_server_check_and_dataplane() {
        let text = text("web");
        for line in [
            r#"lvs_service_usable_servers{service="web",protocol="tcp",address="192.0.2.10:80"} 1"#,
            r#"lvs_service_servers{service="web",protocol="tcp",address="192.0.2.10:80",health="down"} 1"#,
            r#"lvs_service_bytes_total{service="web",protocol="tcp",address="192.0.2.10:80",direction="out"} 5000"#,
            r#"lvs_server_up{service="web",protocol="tcp",address="192.0.2.10:80",server="10.0.0.2:80"} 0"#,
            r#"lvs_check_duration_seconds_bucket{le="0.005",kind="tcp"} 1"#,
            r#"lvs_drops_total{reason="no_server"} 7"#,
            "lvs_table_connections 3",
            "lvs_dataplane_up 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn metrics_of_service_unknown_to_dataplane_have_no_packet_counters() {
        let mut snapshot = snapshot("web");
        let found = Arc::make_mut(&mut snapshot.found);
        Arc::make_mut(&mut found.seen).services.clear();
        let text = open_metrics(Arc::new(snapshot), counters::Counts::default());
        assert!(text.contains("lvs_service_usable_servers{"));
        assert!(!text.contains("lvs_service_packets_total{"), "{text}");
    }

    /// The names of all series, as Prometheus stores them.
    fn series(open_metrics: &str) -> BTreeSet<String> {
        let types = open_metrics
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "));
        types
            .filter_map(|line| line.split_once(' '))
            .flat_map(|(name, kind)| {
                let suffixes: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_sum", "_count"],
                    _ => &[""],
                };
                suffixes.iter().map(move |suffix| format!("{name}{suffix}"))
            })
            .collect()
    }

    /// The names of metrics in a query.
    fn names(query: &str) -> impl Iterator<Item = &str> {
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
        let words = query.split(move |char| !is_name(char));
        words.filter(|word| word.starts_with("lvs_"))
    }

    #[test]
    fn metrics_in_alerts_and_grafana_dashboard_exist() {
        let mut snapshot = snapshot("web");
        let status = &mut snapshot.status;
        status.director.vrrp = Some(VrrpStatus::default());
        status.sources = vec![SourceStatus::default()];
        let key = (
            status.services[0].service,
            status.services[0].servers[0].server,
        );
        snapshot.check_times.insert(key, Times::default());
        let found = Arc::make_mut(&mut snapshot.found);
        let info = &mut Arc::make_mut(&mut found.seen).info;
        info.peers = vec![PeerStanding {
            peer: ([192, 0, 2, 2], 9000).into(),
            state: "in step".to_owned(),
            seconds: 0,
            missing: 0,
            trouble: String::new(),
        }];
        info.tables = vec![TablesInfo {
            peer: ([192, 0, 2, 2], 9000).into(),
            state: TablesState::Alike,
            differ: 0,
            seconds: 0,
        }];
        let known = series(&open_metrics(
            Arc::new(snapshot),
            counters::Counts::default(),
        ));
        let alerts = include_str!("../../../../examples/prometheus-alerts.yml");
        let mut queries: Vec<String> = alerts
            .lines()
            .filter_map(|line| line.trim().strip_prefix("expr: "))
            .map(str::to_owned)
            .collect();
        assert!(queries.len() > 20, "{queries:?}");
        let dashboard = include_str!("../../../../contrib/grafana/lvsd.json");
        let dashboard: serde_json::Value =
            serde_json::from_str(dashboard).expect("the JSON is valid");
        let of = |value: &serde_json::Value, list: &str| -> Vec<serde_json::Value> {
            value[list].as_array().expect(list).clone()
        };
        let before = queries.len();
        for panel in of(&dashboard, "panels") {
            for target in of(&panel, "targets") {
                queries.push(
                    target["expr"]
                        .as_str()
                        .expect("`expr` is a text")
                        .to_owned(),
                );
            }
        }
        for variable in of(&dashboard["templating"], "list") {
            queries.extend(variable["definition"].as_str().map(str::to_owned));
        }
        assert!(queries.len() > before + 20, "{queries:?}");
        for query in &queries {
            for name in names(query) {
                assert!(known.contains(name), "there is no {name}: {query}");
            }
        }
    }

    #[test]
    fn metrics_omit_dataplane_values_while_dataplane_is_disconnected() {
        let mut snapshot = snapshot("web");
        let text = |snapshot: &Snapshot| {
            open_metrics(Arc::new(snapshot.clone()), counters::Counts::default())
        };
        let values = [
            "lvs_table_connections ",
            "lvs_drops_total{",
            "lvs_server_weight{",
            "lvs_server_active_connections{",
            "lvs_service_active_connections{",
        ];
        let connected = text(&snapshot);
        for value in values {
            assert!(connected.contains(value), "{value}");
        }
        snapshot.status.dataplane.connected = false;
        let lost = text(&snapshot);
        for value in values {
            assert!(!lost.contains(value), "unexpected {value:?} in {lost}");
        }
        assert!(lost.contains("lvs_dataplane_up 0\n"));
        assert!(lost.contains("lvs_dataplane_seen_age_seconds "));
        assert!(lost.contains("lvs_server_up{"));
    }

    #[test]
    fn silent_next_hop_metric_counts_only_hops_listed_in_status() {
        let mut snapshot = snapshot("web");
        let hop = SilentHop {
            address: [10, 0, 0, 1].into(),
            interface: "eth1".to_owned(),
            since: 7,
        };
        let found = Arc::make_mut(&mut snapshot.found);
        let seen = Arc::make_mut(&mut found.seen);
        seen.info.silent_hops = vec![hop.clone()];
        let text = |snapshot: &Snapshot| {
            open_metrics(Arc::new(snapshot.clone()), counters::Counts::default())
        };
        assert!(text(&snapshot).contains("lvs_silent_next_hops 0\n"));
        snapshot.status.dataplane.silent_hops = vec![hop];
        assert!(text(&snapshot).contains("lvs_silent_next_hops 1\n"));
    }

    #[test]
    fn metrics_count_refused_and_dropped_packets_of_service_by_reason() {
        let mut snapshot = snapshot("web");
        let found = Arc::make_mut(&mut snapshot.found);
        let seen = Arc::make_mut(&mut found.seen);
        let reason = |reason: &str, count| Refusals {
            reason: reason.to_owned(),
            packets: RecentCount {
                count,
                ..RecentCount::default()
            },
        };
        seen.services[0].refusals = vec![reason("no_server", 7), reason("filtered", 2)];
        seen.services[0].drops = vec![reason("too_big", 3)];
        let text = open_metrics(Arc::new(snapshot), counters::Counts::default());
        for (sample, value) in [
            ("refused_total", ("no_server", 7)),
            ("refused_total", ("filtered", 2)),
            // The series exists before the first packet.
            ("refused_total", ("table_full", 0)),
            ("dropped_total", ("too_big", 3)),
        ] {
            let (reason, count) = value;
            let (begin, end) = (
                format!("lvs_service_{sample}{{service=\"web\",protocol=\"tcp\","),
                format!(",reason=\"{reason}\"}} {count}"),
            );
            assert!(
                text.lines()
                    .any(|line| line.starts_with(&begin) && line.ends_with(&end)),
                "{begin} {end}\n{text}"
            );
        }
    }

    #[test]
    fn drop_reasons_have_zero_series_and_service_refusals_only_up_to_limit_of_services() {
        let mut snapshot = snapshot("web");
        let found = Arc::make_mut(&mut snapshot.found);
        let seen = Arc::make_mut(&mut found.seen);
        seen.reasons[0].packets = RecentCount::default();
        let name = seen.reasons[0].reason.clone();
        let services = seen.services.len();
        let text = |snapshot: &Snapshot| {
            open_metrics(Arc::new(snapshot.clone()), counters::Counts::default())
        };
        let all = text(&snapshot);
        assert!(
            all.contains(&format!("lvs_drops_total{{reason=\"{name}\"}} 0\n")),
            "{all}"
        );
        let refused = |text: &str| {
            let lines = text.lines();
            lines
                .filter(|line| {
                    line.starts_with("lvs_service_refused_total{") && line.ends_with(" 0")
                })
                .count()
        };
        assert_eq!(refused(&all), services * DropReason::REFUSALS.len());
        assert!(!all.contains("lvs_service_dropped_total{"));
        let one = snapshot.status.services[0].clone();
        snapshot.status.services.resize(ZEROS_MAX + 1, one);
        assert_eq!(refused(&text(&snapshot)), 0);
    }

    #[test]
    fn metrics_contain_all_proxy_counters_only_if_proxy_has_status() {
        let mut snapshot = snapshot("web");
        let text = |snapshot| open_metrics(Arc::new(snapshot), counters::Counts::default());
        assert!(!text(snapshot.clone()).contains("lvs_proxy"));
        snapshot.status.proxy = Some(ProxyStatus {
            connections: 1,
            most: 2,
            full: 3,
            evicted: 4,
            refused: 5,
        });
        let text = text(snapshot);
        for line in [
            "lvs_proxy_connections 1",
            "lvs_proxy_connections_max 2",
            "lvs_proxy_full_total 3",
            "lvs_proxy_evicted_total 4",
            "lvs_proxy_refused_total 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }

    #[test]
    fn metrics_with_more_servers_than_limit_have_no_series_of_servers() {
        let mut snapshot = snapshot("web");
        let servers = &mut snapshot.status.services[0].servers;
        servers.resize(SERVERS_MAX, servers[0].clone());
        let text = |snapshot: &Snapshot| {
            open_metrics(Arc::new(snapshot.clone()), counters::Counts::default())
        };
        assert!(text(&snapshot).contains("lvs_server_up"));
        let servers = &mut snapshot.status.services[0].servers;
        servers.push(servers[0].clone());
        let text = text(&snapshot);
        assert!(
            !text.contains("lvs_server_up"),
            "unexpected `lvs_server_up` in {text}"
        );
        assert!(text.contains("lvs_servers_without_series 5001\n"));
        assert!(text.contains("lvs_service_usable_servers{"));
    }

    #[test]
    fn label_value_with_quotes_and_backslash_is_escaped_in_metrics() {
        let text = text("a\"} 1\\{b=\"");
        assert!(
            text.contains(r#"lvs_service_quorum{service="a\"} 1\\{b=\"",protocol="tcp","#),
            "{text}"
        );
    }

    #[test]
    fn older_metrics_format_has_total_suffix_in_counter_descriptions_and_no_end_marker() {
        let plain = plain(&text("web"));
        assert!(plain.contains("# HELP lvs_drops_total Dropped packets by reason\n# TYPE lvs_drops_total counter\nlvs_drops_total{"), "{plain}");
        assert!(plain.contains("# TYPE lvs_dataplane_up gauge\nlvs_dataplane_up 1\n"));
        assert!(plain.contains("# TYPE lvs_check_duration_seconds histogram\n"));
        assert!(!plain.contains("# EOF"));
    }
}
