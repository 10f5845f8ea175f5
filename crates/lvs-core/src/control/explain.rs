//! Explains what the director would decide about a packet, and why, without side effects.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;

use super::Control;
use super::admit::{Ask, By, Packets, Refused, State, classify, may_lead_to};
use crate::conn::{Key, Template};
use crate::sched::{About, HashSlot};
use crate::service::ServiceKeyOrd;
use crate::shard::Shard;
use crate::{
    AcceptReason, DropReason, Forwarding, Hook, Instant, Protocol, Request, Server, Service,
    ServiceFlags, ServiceKey, Tuple, pool,
};

/// The decision about a packet that may open a connection, and the reasons for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Explanation {
    /// The packet's mark; 0 for none.
    pub mark: u32,
    /// The reason for the mark, as text: the rule that sets the mark, drops the packet or passes
    /// the packet to the host, or the statement that the request contains the mark. If the request
    /// names no interface, the text also names the earlier rules that would apply on their
    /// interface. Empty if no rule is named.
    pub mark_why: String,
    /// The service that the packet matches, such as `TCP 192.0.2.1:80`.
    pub service: Option<String>,
    /// The reason why the service matches, or why none does.
    pub service_why: String,
    /// The connection to which the packet belongs, as text.
    pub connection: Option<String>,
    /// The persistence template that would choose the server, as text.
    pub template: Option<String>,
    /// The reason why no template chooses the server; empty if one does, or if an earlier step
    /// decides.
    pub template_why: String,
    /// Name of the service's scheduler.
    pub scheduler: String,
    /// The slot of the scheduler's hash table that the packet selects. `None` without such a table,
    /// without a service, or if the packet belongs to a connection.
    pub slot: Option<HashSlot>,
    /// The service's servers, in the kernel's order.
    pub candidates: Vec<Candidate>,
    /// The server of the packet's connection, or of the connection that the packet would open.
    pub server: Option<SocketAddr>,
    /// The decision, in a sentence.
    pub verdict: String,
    /// The reason why the packet opens no connection: the name of a [`DropReason`] or an
    /// [`AcceptReason`]. Empty if the packet opens one or belongs to one, or if the result cannot
    /// be predicted.
    pub reason: String,
    /// Whether the kernel fast path forwards the packet's connection, or the connection that it
    /// would open. The dataplane sets this field, not the core.
    pub fast_path: Option<bool>,
    /// The reason why the connection is not offloaded; empty if it is offloaded, or if there is no
    /// connection.
    pub fast_path_why: String,
}

impl Explanation {
    /// Whether the packet belongs to a connection, or would open one, as far as a preview can
    /// determine.
    pub const fn has_connection(&self) -> bool {
        self.connection.is_some() || self.server.is_some()
    }
}

/// A server of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Candidate {
    /// Address and port of the server.
    pub server: SocketAddr,
    /// Configured weight of the server.
    pub weight: i32,
    /// Number of connections in active states.
    pub active: u32,
    /// Number of connections in inactive states.
    pub inactive: u32,
    /// Whether the scheduler may choose the server.
    pub eligible: bool,
    /// The reason why the server may or may not be chosen.
    pub why: String,
}

impl Control {
    /// Explains the decision about a packet with these addresses and this mark, which may open a
    /// connection (a SYN, a datagram). Nothing changes: a scheduler chooses on a copy of its state.
    pub fn explain(&self, shard: &Shard, tuple: Tuple, mark: u32, now: Instant) -> Explanation {
        let Tuple { protocol, src, dst } = tuple;
        let mut explanation = Explanation {
            mark,
            ..Explanation::default()
        };
        let mut lost = None;
        if let Some(known) = shard.lookup(protocol, src, dst, now) {
            lost = shard.lost(known.id.0);
            explanation.connection = Some(format!(
                "{:?} to {}, {}, {} s left",
                known.method,
                known.server,
                known.state,
                known.expires.as_secs()
            ));
            explanation.server = Some(known.server);
        }
        let Some(service) = self
            .find_service(mark, protocol, dst)
            .and_then(|number| self.services.get(&number))
        else {
            explanation.service_why = no_service(protocol, dst, mark);
            explanation.verdict = match explanation.server {
                Some(_) if lost.is_some() => lost.unwrap_or_default().to_string(),
                Some(server) => belongs_to_a_connection(server),
                None => {
                    explanation.reason = AcceptReason::NoService.name().to_string();
                    "passed to this host: the packet belongs to no service and no connection"
                        .to_string()
                }
            };
            return explanation;
        };
        explanation.service = Some(service.key.to_string());
        explanation.service_why = why_service(service.key, dst);
        explanation
            .scheduler
            .clone_from(&service.config().scheduler);
        explanation.candidates = service.servers().iter().map(candidate).collect();
        if let Some(lost) = lost {
            explanation.server = None;
            explanation.verdict = lost.to_string();
        } else if let Some(server) = explanation.server {
            explanation.verdict = belongs_to_a_connection(server);
        } else {
            // Packets of the host itself pass the director on their way out.
            let hook = if self.is_local(src.ip()) {
                Hook::Output
            } else {
                Hook::Local
            };
            let ask = Ask::new(tuple, mark, hook);
            let (verdict, reason) = self.explain_new(shard, &mut explanation, service, &ask, now);
            explanation.verdict = verdict;
            explanation.reason = reason.to_string();
        }
        explanation
    }

    /// The verdict about a packet that belongs to no connection, and its reason.
    fn explain_new(
        &self,
        shard: &Shard,
        explanation: &mut Explanation,
        service: &Service,
        ask: &Ask<'_>,
        now: Instant,
    ) -> (String, &'static str) {
        let request = ask.request(service.config().flags, now);
        if !service.config().flags.has(ServiceFlags::PERSISTENT) {
            explanation.template_why = "the service is not persistent".to_string();
        }
        explanation.slot = service.pool.slot(&request);
        let mut preview = Preview {
            control: self,
            shard,
            explanation,
        };
        let refused = match classify(&mut preview, ask, now) {
            Ok(forecast) => return (self.describe_forecast(explanation, service, &forecast), ""),
            Err(refused) => refused,
        };
        match refused {
            Refused::Accept(reason) => {
                let why = self.describe_accept(reason, service);
                (format!("passed to this host: {why}"), reason.name())
            }
            Refused::Drop(reason) => {
                let why = self.describe_drop(reason, service, ask);
                (format!("dropped: {why}"), reason.name())
            }
            Refused::Unreachable(reason) => {
                let by_mark = matches!(service.key, ServiceKey::Mark { .. });
                let persistent = service.config().flags.has(ServiceFlags::PERSISTENT);
                let why = if by_mark || persistent || ask.virt.port() == service.key.port() {
                    "no server accepts the connection"
                } else {
                    "only a persistent service accepts ports other than its own"
                };
                (format!("refused (port unreachable): {why}"), reason.name())
            }
            Refused::Unknown(Unknown::Payload) => (
                "cannot be predicted: the decision depends on the packet's payload".to_string(),
                "",
            ),
            Refused::Unknown(Unknown::Scheduler) => {
                let scheduler = &service.config().scheduler;
                (
                    format!(
                        "cannot be predicted: the scheduler {scheduler} does not support predictions"
                    ),
                    "",
                )
            }
        }
    }

    fn describe_forecast(
        &self,
        explanation: &mut Explanation,
        service: &Service,
        forecast: &Forecast,
    ) -> String {
        let Some(server) = forecast.server else {
            return "sent to its own destination: no server accepts the connection, and cache_bypass is set"
                .to_string();
        };
        explanation.server = Some(server);
        let scheduler = &service.config().scheduler;
        let lots = if About::of(scheduler).is_some_and(|about| about.draws_lots) {
            " at random"
        } else {
            ""
        };
        match forecast.by {
            By::Pin => format!(
                "goes to {server}: a health check through the virtual address expects this server"
            ),
            By::Template(true) => {
                format!(
                    "goes to {server}: the persistence template of the client refers to this server"
                )
            }
            By::Template(false) | By::Scheduler => {
                format!("goes to {server}: {scheduler} chooses it{lots}")
            }
            By::NextServer => format!(
                "goes to {server}: full NAT has no free local port towards the server that {scheduler} chooses"
            ),
        }
    }

    fn describe_accept(&self, reason: AcceptReason, service: &Service) -> String {
        match reason {
            AcceptReason::SourcePort20 => {
                "new connections from port 20 are not balanced".to_string()
            }
            AcceptReason::FtpData if service.config().flags.has(ServiceFlags::PERSISTENT) => {
                "no server accepts the FTP data connection".to_string()
            }
            AcceptReason::FtpData => {
                "only a persistent FTP service accepts ports other than its own".to_string()
            }
            AcceptReason::LocalReply => {
                "the packet belongs to a connection between its destination and this host"
                    .to_string()
            }
            reason => reason.describe().to_string(),
        }
    }

    fn describe_drop(&self, reason: DropReason, service: &Service, ask: &Ask<'_>) -> String {
        let limits = &service.config().extras.limits;
        match reason {
            DropReason::Filtered => {
                let number = self.index.get(&ServiceKeyOrd::from(&service.key));
                let client = ask.client.ip();
                let decided = number.and_then(|&number| self.filters.decide(number, client));
                decided.map_or_else(
                    || reason.describe().to_string(),
                    |decided| decided.describe(client),
                )
            }
            DropReason::DropPacket => format!(
                "the defence drop_packet drops one new connection in {}",
                self.defense.rate()
            ),
            DropReason::ServiceFull => format!(
                "the service has reached its limit of {} connections",
                limits.connections
            ),
            DropReason::ServiceRate => format!(
                "the service has reached its limit of {} new connections a second",
                limits.rate
            ),
            DropReason::SourceRate => format!(
                "{} has reached the limit of {} new connections a second for one source",
                ask.client.ip(),
                limits.source_rate
            ),
            DropReason::TableFull => {
                let max = self.options.max_connections;
                format!("the table of connections or templates is full ({max} connections)")
            }
            reason => reason.describe().to_string(),
        }
    }
}

/// The connection that the packet would open.
struct Forecast {
    /// The chosen server; `None` if the packet would be sent to its own destination.
    server: Option<SocketAddr>,
    /// The step that chooses the server; [`By::Template`] contains whether the template already
    /// exists.
    by: By<bool>,
}

/// Reasons why the server cannot be predicted.
enum Unknown {
    /// The choice of the persistence engine depends on the packet's payload.
    Payload,
    /// The scheduler cannot predict its next choice.
    Scheduler,
}

struct Preview<'a> {
    control: &'a Control,
    shard: &'a Shard,
    explanation: &'a mut Explanation,
}

impl State for Preview<'_> {
    type Opened = Forecast;
    type Template = bool;
    type Unknown = Unknown;

    fn control(&self) -> &Control {
        self.control
    }

    fn shard(&self) -> &Shard {
        self.shard
    }

    fn drops_packet(&mut self) -> bool {
        self.control.defense.drops_next()
    }

    fn remove_pin(&mut self, _: &Ask<'_>, _: u32) {}

    fn refresh(&mut self) {}

    fn check_limits(
        &mut self,
        service: u32,
        client: IpAddr,
        now: Instant,
    ) -> Result<(), DropReason> {
        let service = &self.control.services[&service];
        let (limits, seed) = (service.config.extras.limits, self.control.options.seed);
        let servers = service.pool.servers().iter().map(|server| &**server);
        let mut limiter = service.limiter.preview(&limits, client, seed);
        limiter.check(&limits, client, servers, seed, now)
    }

    fn engine_data<'a>(&mut self, ask: &Ask<'a>) -> Result<Option<&'a [u8]>, Unknown> {
        if ask.protocol != Protocol::UDP {
            return Ok(None);
        }
        self.explanation.template_why =
            "the persistence engine uses the packet's payload, which explain does not have"
                .to_string();
        Err(Unknown::Payload)
    }

    fn find_template(
        &mut self,
        key: &Key,
        data: Option<&[u8]>,
        now: Instant,
    ) -> Option<(bool, Arc<Server>)> {
        let (control, client) = (self.control, key.client.ip());
        let Some(index) = control.templates.find(key, data) else {
            self.explanation.template_why = format!("{client} has no template yet");
            return None;
        };
        let quiescent = control.settings.sysctls.expire_quiescent_template;
        let template = control.templates.get(index);
        let entry = control.records.get(template.server.load(Relaxed) as usize);
        let Some(entry) = entry.filter(|entry| may_lead_to(&entry.server, quiescent)) else {
            self.explanation.template_why = format!(
                "the template of {client} refers to a server that was removed{}",
                if quiescent { " or has weight 0" } else { "" }
            );
            return None;
        };
        let expires = control.templates.table.get(index).expires();
        self.explanation.template = Some(format!(
            "{client} to {}, {} s remaining, controls {} connections",
            entry.server.addr(),
            expires.saturating_since(now).as_secs(),
            template.controlled.load(Relaxed)
        ));
        Some((true, entry.server.clone()))
    }

    fn make_template(&mut self, _: Template, _: &Server, _: Instant) -> Option<bool> {
        self.control.has_template_room().then_some(false)
    }

    fn restart_template(&mut self, _: bool, _: Instant) {}

    fn pick(&mut self, service: u32, request: &Request) -> Result<Option<Arc<Server>>, Unknown> {
        let service = &self.control.services[&service];
        match service.pool.preview(request) {
            pool::Preview::Unknown => Err(Unknown::Scheduler),
            pool::Preview::NoServer => Ok(None),
            pool::Preview::Server(server) => Ok(Some(server.clone())),
        }
    }

    fn bind(
        &mut self,
        server: &Arc<Server>,
        port: u16,
        ask: &Ask<'_>,
        packets: Packets,
        by: By<bool>,
        now: Instant,
    ) -> Result<Forecast, DropReason> {
        let slot = self.control.draft(server, port, ask, packets);
        let pool = &self.control.full_nat.pool;
        if packets == Packets::Any && slot.method() == Forwarding::FullNat {
            let has_port = self.shard.has_local_port(&slot, pool, now);
            has_port.then_some(()).ok_or(DropReason::NoLocalPort)?;
        }
        self.enter(packets, now)?;
        let server = Some(server.addr());
        Ok(Forecast { server, by })
    }

    fn bypass(
        &mut self,
        _: &Ask<'_>,
        packets: Packets,
        now: Instant,
    ) -> Result<Forecast, DropReason> {
        self.enter(packets, now)?;
        Ok(Forecast {
            server: None,
            by: By::Scheduler,
        })
    }
}

impl Preview<'_> {
    /// Checks that the table has room for a connection; a one-packet connection needs none.
    fn enter(&self, packets: Packets, now: Instant) -> Result<(), DropReason> {
        let evicts = self.control.settings.evicts;
        let fits = packets == Packets::One || self.shard.has_room(evicts, now);
        fits.then_some(()).ok_or(DropReason::TableFull)
    }
}

fn belongs_to_a_connection(server: SocketAddr) -> String {
    format!("goes to {server}: the packet belongs to a connection")
}

fn no_service(protocol: Protocol, dst: SocketAddr, mark: u32) -> String {
    match mark {
        0 => format!("no service for {protocol} {dst}"),
        mark => format!("no service for {protocol} {dst} or the mark {mark}"),
    }
}

/// The reason why the service with this key accepts a packet to `dst`, as text.
fn why_service(key: ServiceKey, dst: SocketAddr) -> String {
    match key {
        ServiceKey::Mark { mark, .. } => format!("the packet has the mark {mark}"),
        ServiceKey::Address { addr, .. } if addr.port() == dst.port() => {
            "the service has the packet's destination address, port and protocol".to_string()
        }
        ServiceKey::Address { addr, .. } if addr.port() == 0 => {
            "no service has the port, and this service accepts every port of the address"
                .to_string()
        }
        ServiceKey::Address { .. } => {
            "no service has the port, and an FTP data connection may use it".to_string()
        }
    }
}

fn candidate(server: &Arc<Server>) -> Candidate {
    let (eligible, why) = if server.weight() == 0 {
        (false, "weight 0: no new connections".to_string())
    } else if server.is_overloaded() {
        (false, "has reached its upper threshold".to_string())
    } else if let Some(percent) = server.slow_start() {
        (
            true,
            format!("is in a slow start, with {percent} % of its weight"),
        )
    } else {
        (true, "may be chosen".to_string())
    };
    Candidate {
        server: server.addr(),
        weight: server.config().weight,
        active: server.active(),
        inactive: server.inactive(),
        eligible,
        why,
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;
    use core::time::Duration;

    use super::*;
    use crate::filter::{FilterLists, SourceFilter};
    use crate::full_nat::LocalAddress;
    use crate::random::SplitMix64;
    use crate::settings::{Limits, WhenFull};
    use crate::{
        Director, Family, Options, PacketMeta, ServerConfig, ServiceConfig, TcpFlags, Verdict,
    };

    fn tuple(client: &str) -> Tuple {
        Tuple::tcp(client.parse().unwrap(), "192.0.2.1:80".parse().unwrap())
    }

    fn director(scheduler: &str) -> Director {
        let mut director = Director::new(Options::default());
        let key = ServiceKey::Address {
            protocol: Protocol::TCP,
            addr: "192.0.2.1:80".parse().unwrap(),
        };
        let mut config = ServiceConfig::new(Family::V4, scheduler);
        config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
        config.timeout = 300;
        let control = &mut director.control;
        control.add_service(key, config, None).unwrap();
        for server in ["10.0.0.1:80", "10.0.0.2:80"] {
            let config = ServerConfig::new(1, Forwarding::Nat);
            control
                .add_server(&key, server.parse().unwrap(), &config, Instant::ZERO)
                .unwrap();
        }
        director
    }

    #[test]
    fn explain_agrees_with_admit_and_changes_nothing() {
        for scheduler in [
            "rr", "wrr", "wlc", "lc", "sh", "dh", "mh", "sed", "nq", "fo", "ovf", "lblc", "lblcr",
        ] {
            let mut director = director(scheduler);
            for n in 1..=20 {
                let tuple = tuple(&format!("198.51.100.{n}:4000"));
                let explanation = |director: &Director| {
                    director
                        .control
                        .explain(&director.shard, tuple, 0, Instant::ZERO)
                };
                let first = explanation(&director);
                assert_eq!(
                    first,
                    explanation(&director),
                    "{scheduler}: explain has changed the state"
                );
                assert!(first.template.is_none() && first.connection.is_none());
                let meta = PacketMeta::tcp(Hook::Local, tuple.src, tuple.dst, TcpFlags::SYN);
                let verdict = director.handle_packet(&meta, Instant::ZERO);
                let target = match verdict {
                    Verdict::Forward(forward) => Some(forward.target),
                    // `ovf` refuses connections when each server has more than its weight.
                    _ => None,
                };
                assert_eq!(first.server, target, "{scheduler}, client {n}");
                assert_eq!(
                    explanation(&director).connection.is_some(),
                    target.is_some()
                );
            }
            let tuple = tuple("198.51.100.1:4001");
            let explanation = director
                .control
                .explain(&director.shard, tuple, 0, Instant::ZERO);
            assert!(explanation.template.is_some(), "{explanation:?}");
        }
    }

    #[test]
    fn explain_without_service_reports_that_host_gets_packet() {
        let director = director("rr");
        let mut tuple = tuple("198.51.100.1:4000");
        tuple.dst.set_port(81);
        let explanation = director
            .control
            .explain(&director.shard, tuple, 7, Instant::ZERO);
        assert_eq!(explanation.service, None);
        assert!(
            explanation.verdict.starts_with("passed to this host"),
            "{}",
            explanation.verdict
        );
    }

    /// A director with small tables, and services with limits and rules that refuse connections.
    struct Crowd {
        director: Director,
        random: SplitMix64,
        now: Instant,
        port: u16,
        seen: BTreeSet<&'static str>,
    }

    const VIP: [u8; 4] = [192, 0, 2, 1];
    const MARKED: u32 = 7;

    fn at(ip: [u8; 4], port: u16) -> SocketAddr {
        SocketAddr::from((ip, port))
    }

    fn pick<T>(all: &[T], number: u64) -> &T {
        let at = usize::try_from(number % all.len() as u64).unwrap_or(0);
        &all[at]
    }

    impl Crowd {
        fn new(seed: u64) -> Self {
            let mut random = SplitMix64::new(seed);
            let options = Options {
                max_connections: *pick(&[6, 64, 4096], seed),
                when_full: *pick(&[WhenFull::Drop, WhenFull::Evict], seed / 3),
                ..Options::default()
            };
            let mut director = Director::new(options);
            let control = &mut director.control;
            let pool = LocalAddress {
                addr: IpAddr::from([10, 0, 0, 2]),
                first: 1024,
                last: 1025,
            };
            control.set_local_pool(alloc::vec![pool], false).unwrap();
            control.set_ftp_ports(alloc::vec![21]).unwrap();
            let local = [(IpAddr::from(VIP), 32), (IpAddr::from([192, 0, 2, 9]), 32)];
            control.set_local_addresses(local.to_vec());
            let scheduler = pick(&["rr", "wlc", "sh", "ovf"], random.draw());
            let mut services = Vec::new();
            let mut add = |key: ServiceKey, forwarding, change: &dyn Fn(&mut ServiceConfig)| {
                let mut config = ServiceConfig::new(Family::V4, scheduler);
                change(&mut config);
                control.add_service(key, config, None).unwrap();
                for n in 1..=3 {
                    let server = at([10, 0, 0, 10 + n], 8000 + key.port());
                    let config = ServerConfig::new(2, forwarding);
                    let _ = control.add_server(&key, server, &config, Instant::ZERO);
                }
                services.push(key);
            };
            let persistent = |config: &mut ServiceConfig| {
                config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
                config.timeout = 300;
            };
            let limits =
                |limits: Limits| move |config: &mut ServiceConfig| config.extras.limits = limits;
            let tcp = |port| ServiceKey::tcp(at(VIP, port));
            add(tcp(80), Forwarding::Nat, &|_| {});
            add(tcp(81), Forwarding::Nat, &persistent);
            add(tcp(82), Forwarding::FullNat, &|_| {});
            let connections = 3;
            let limit = limits(Limits {
                connections,
                ..Limits::default()
            });
            add(tcp(83), Forwarding::Nat, &limit);
            let limit = limits(Limits {
                rate: 4,
                ..Limits::default()
            });
            add(tcp(84), Forwarding::Nat, &limit);
            let limit = limits(Limits {
                source_rate: 2,
                ..Limits::default()
            });
            add(tcp(85), Forwarding::Nat, &limit);
            add(tcp(21), Forwarding::Nat, &|config| {
                if seed.is_multiple_of(2) {
                    persistent(config);
                }
            });
            let mark = ServiceKey::Mark {
                family: Family::V4,
                mark: MARKED,
            };
            add(mark, Forwarding::Route, &|_| {});
            let lists = FilterLists {
                deny: alloc::vec!["198.51.100.3/32".parse().unwrap()],
                ..FilterLists::default()
            };
            let filter = SourceFilter::new(lists).unwrap();
            control.set_filter(None, filter).unwrap();
            for (name, value) in [("am_droprate", 5), ("drop_packet", 3 * (seed % 4 / 3))] {
                control.set_sysctl(name, &value.to_string()).unwrap();
            }
            let cache_bypass = u8::from(seed.is_multiple_of(5));
            control
                .set_sysctl("cache_bypass", &cache_bypass.to_string())
                .unwrap();
            let now = Instant::from_secs(10);
            director.advance(now);
            Self {
                director,
                random,
                now,
                port: 2000,
                seen: BTreeSet::new(),
            }
        }

        fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
            *pick(all, self.random.draw())
        }

        /// Advances the time, changes a weight, sets a pin, or does nothing, at random.
        fn change(&mut self) {
            let key = ServiceKey::tcp(at(VIP, self.one_of(&[80, 81, 82, 21])));
            let last = self.one_of(&[11, 12, 13]);
            let server = at([10, 0, 0, last], 8000 + key.port());
            let control = &mut self.director.control;
            match self.random.draw_below(6) {
                0 => {
                    let step = *pick(&[1, 300, 2000], self.random.draw());
                    self.now = self.now + Duration::from_millis(step);
                    self.director.advance(self.now);
                }
                1 | 2 => {
                    let weight = *pick(&[0, 1], self.random.draw());
                    let forwarding = match key.port() {
                        82 => Forwarding::FullNat,
                        _ => Forwarding::Nat,
                    };
                    let config = ServerConfig::new(weight, forwarding);
                    control.edit_server(&key, server, &config).unwrap();
                }
                3 => {
                    let client = at([198, 51, 100, 3], self.port + 1);
                    control.pin(&key, server, client, self.now).unwrap();
                }
                _ => {}
            }
        }

        /// Opens a connection of a client, and checks that `explain` has predicted the verdict.
        fn open(&mut self) {
            self.port += 1;
            let last = self.one_of(&[1, 2, 3, 4]);
            let mut src = at([198, 51, 100, last], self.port);
            let mut dst = at(VIP, self.one_of(&[80, 81, 82, 83, 84, 85, 21, 5000, 20]));
            let mut mark = 0;
            match self.random.draw_below(16) {
                0 => src.set_port(20),
                1 => src.set_ip(IpAddr::from([192, 0, 2, 9])),
                2 => (mark, dst) = (MARKED, at([203, 0, 113, 5], 443)),
                3 => dst.set_ip(IpAddr::from([203, 0, 113, 5])),
                _ => {}
            }
            self.ask(src, dst, mark);
            if self.random.draw_below(8) == 0 {
                // A packet of this host to itself, and the answer.
                self.ask(at(VIP, 80), at(VIP, 81), 0);
                self.ask(at(VIP, 81), at(VIP, 80), 0);
            }
        }

        fn ask(&mut self, src: SocketAddr, dst: SocketAddr, mark: u32) {
            let tuple = Tuple::tcp(src, dst);
            let director = &mut self.director;
            if director.shard.knows(&tuple) {
                return;
            }
            let explanation = director
                .control
                .explain(&director.shard, tuple, mark, self.now);
            let own = director.control.is_local(src.ip());
            let hook = if own { Hook::Output } else { Hook::Local };
            let meta = PacketMeta {
                mark,
                ..PacketMeta::tcp(hook, src, dst, TcpFlags::SYN)
            };
            let verdict = director.handle_packet(&meta, self.now);
            let (reason, server) = match &verdict {
                Verdict::Forward(forward) if forward.method == Forwarding::Bypass => ("", None),
                Verdict::Forward(forward) => ("", Some(forward.target)),
                Verdict::Drop(reason) | Verdict::Unreachable(reason) => (reason.name(), None),
                Verdict::Accept(reason) => (reason.name(), None),
                Verdict::Reply(_) => return,
                Verdict::Reset(_) => unreachable!(
                    "a packet was answered with a reset, although no server was removed"
                ),
            };
            assert_eq!(
                explanation.reason, reason,
                "{tuple:?} {explanation:?} {verdict:?}"
            );
            // A service with many ports keeps the destination port of the client.
            let server = server.map(|server| server.ip());
            assert_eq!(
                explanation.server.map(|server| server.ip()),
                server,
                "{explanation:?} {verdict:?}"
            );
            self.seen.insert(reason);
        }
    }

    #[test]
    fn explain_gives_every_reason_that_admit_gives_for_the_same_state() {
        let mut seen = BTreeSet::new();
        for seed in 0..120 {
            let mut crowd = Crowd::new(seed);
            for _ in 0..60 {
                crowd.change();
                crowd.open();
            }
            seen.append(&mut crowd.seen);
        }
        let refusals = DropReason::REFUSALS.into_iter();
        // No service of this test has a persistence engine.
        for reason in refusals.filter(|reason| *reason != DropReason::PersistenceEngine) {
            assert!(
                seen.contains(reason.name()),
                "{reason} did not occur: {seen:?}"
            );
        }
        for reason in [
            AcceptReason::NoService,
            AcceptReason::SourcePort20,
            AcceptReason::FtpData,
            AcceptReason::LocalReply,
        ] {
            assert!(
                seen.contains(reason.name()),
                "{reason} did not occur: {seen:?}"
            );
        }
    }
}
