//! What would become of a packet, and why, without any of it happening.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;

use super::Control;
use super::admit::template_key;
use super::service::ServiceKeyOrd;
use crate::HashSlot;
use crate::sched::{About, Request};
use crate::shard::Shard;
use crate::{Instant, Protocol, Server, Service, ServiceFlags, ServiceKey, Tuple};

/// Why a packet that may open a connection would go where it would go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct Explanation {
    /// The packet's mark; 0 for none.
    pub mark: u32,
    /// Where the mark comes from; empty without one.
    pub mark_why: String,
    /// The service that takes it: `TCP 192.0.2.1:80`.
    pub service: Option<String>,
    /// How that service was found, or why none.
    pub service_why: String,
    /// The connection that it belongs to.
    pub connection: Option<String>,
    /// The persistence template that would decide.
    pub template: Option<String>,
    /// Why no template decides.
    pub template_why: String,
    /// The service's scheduler.
    pub scheduler: String,
    /// The slot of the scheduler's hash table that it falls into.
    pub slot: Option<HashSlot>,
    /// The servers in the kernel's order.
    pub candidates: Vec<Candidate>,
    /// Where it would go.
    pub server: Option<SocketAddr>,
    /// What would become of it, in a sentence.
    pub verdict: String,
    /// Whether its connection's packets are forwarded in the kernel, if it belongs to one or would
    /// open one. Whoever forwards packets knows that, not the core.
    pub in_kernel: Option<bool>,
    /// Why they are not; empty if they are.
    pub in_kernel_why: String,
}

impl Explanation {
    /// It belongs to a connection, or would open one, as far as that can be told.
    pub const fn has_connection(&self) -> bool {
        self.connection.is_some() || self.server.is_some()
    }
}

/// A server of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
pub struct Candidate {
    /// Its address.
    pub server: SocketAddr,
    /// Its weight.
    pub weight: i32,
    /// Connections in active states.
    pub active: u32,
    /// Other connections.
    pub inactive: u32,
    /// It may be chosen.
    pub eligible: bool,
    /// Why, or why not.
    pub why: String,
}

impl Control {
    /// Tells what would become of the packet `tuple` with the mark `mark`, if it may open a
    /// connection (a SYN, a datagram). Nothing changes: schedulers choose on a copy.
    pub fn explain(&self, shard: &Shard, tuple: Tuple, mark: u32, now: Instant) -> Explanation {
        let Tuple { protocol, src, dst } = tuple;
        let mut told = Explanation {
            mark,
            ..Explanation::default()
        };
        let mut lost = None;
        if let Some(known) = shard.lookup(protocol, src, dst, now) {
            lost = shard.lost(known.id.0);
            told.connection = Some(format!(
                "{:?} to {}, {}, {} s left",
                known.method,
                known.server,
                known.state,
                known.expires.as_secs()
            ));
            told.server = Some(known.server);
        }
        let Some(service) = self
            .find_service(mark, protocol, dst)
            .and_then(|number| self.services.get(&number))
        else {
            told.service_why = no_service(protocol, dst, mark);
            told.verdict = match told.server {
                Some(_) if lost.is_some() => lost.unwrap_or_default().to_string(),
                Some(server) => belongs_to_a_connection(server),
                None => "left to this host: it belongs to no service and no connection".to_string(),
            };
            return told;
        };
        told.service = Some(service.key.to_string());
        told.service_why = why_service(service.key, dst);
        told.scheduler.clone_from(&service.config().scheduler);
        told.candidates = service.servers().iter().map(candidate).collect();
        if let Some(lost) = lost {
            told.server = None;
            told.verdict = lost.to_string();
        } else if let Some(server) = told.server {
            told.verdict = belongs_to_a_connection(server);
        } else {
            told.verdict = self.explain_new(&mut told, service, tuple, now);
        }
        told
    }

    /// What becomes of a packet of no connection: filter, template, scheduler, in the order in
    /// which they are asked.
    fn explain_new(
        &self,
        told: &mut Explanation,
        service: &Service,
        tuple: Tuple,
        now: Instant,
    ) -> String {
        let Tuple { src, dst, .. } = tuple;
        let number = self.index.get(&ServiceKeyOrd::from(&service.key));
        let decided = number.and_then(|&number| self.filters.decide(number, src.ip()));
        if let Some(decided) = decided.filter(|decided| !decided.taken()) {
            return format!("dropped: {}", decided.describe(src.ip()));
        }
        if src.port() == crate::control::FTP_DATA {
            return "left to this host: new connections from port 20 are not balanced".to_string();
        }
        let config = service.config();
        if config.flags.has(ServiceFlags::PERSISTENT) {
            if let Some(verdict) = self.explain_template(told, service, tuple, now) {
                return verdict;
            }
        } else {
            told.template_why = "the service is not persistent".to_string();
            let by_mark = matches!(service.key, ServiceKey::Mark { .. });
            if !by_mark && dst.port() != service.key.port() {
                return "refused: only a persistent service takes other ports than its own"
                    .to_string();
            }
        }
        explain_choice(told, service, tuple, now)
    }

    /// Where a client's template leads, or why it leads nowhere.
    fn explain_template(
        &self,
        told: &mut Explanation,
        service: &Service,
        tuple: Tuple,
        now: Instant,
    ) -> Option<String> {
        let config = service.config();
        if config.engine.is_some() {
            told.template_why =
                "the persistence engine goes by the packet's payload, which is not known here"
                    .to_string();
            return Some("depends on the payload".to_string());
        }
        let Tuple { protocol, src, dst } = tuple;
        let (key, _) = template_key(service.key, config.netmask, protocol, src, dst);
        let Some(index) = self.templates.find(&key, None) else {
            told.template_why = format!("{} has none yet", key.client.ip());
            return None;
        };
        let quiescent = self.settings.sysctls.expire_quiescent_template;
        let template = self.templates.get(index);
        let entry = self
            .records
            .get(template.server.load(Relaxed) as usize)
            .filter(|entry| {
                entry.server.is_available() && !(quiescent && entry.server.weight() == 0)
            });
        let Some(entry) = entry else {
            told.template_why = format!(
                "that of {} leads to a server that is gone{}",
                key.client.ip(),
                if quiescent { " or has weight 0" } else { "" }
            );
            return None;
        };
        let server = entry.server.addr();
        let expires = self.templates.table.get(index).expires();
        told.template = Some(format!(
            "{} to {server}, {} s left, controls {}",
            key.client.ip(),
            expires.saturating_since(now).as_secs(),
            template.controlled.load(Relaxed)
        ));
        told.server = Some(server);
        Some(format!("goes to {server}: its template says so"))
    }
}

/// What the scheduler would choose.
fn explain_choice(told: &mut Explanation, service: &Service, tuple: Tuple, now: Instant) -> String {
    let config = service.config();
    let request = Request {
        client: tuple.src,
        virt: tuple.dst,
        protocol: tuple.protocol,
        flags: config.flags,
        now,
    };
    told.slot = service.pool.slot(&request);
    let scheduler = &config.scheduler;
    match service.pool.preview(&request) {
        None => format!("{scheduler} chooses; it cannot tell beforehand"),
        Some(None) => "refused (port unreachable): no server can take it".to_string(),
        Some(Some(server)) => {
            told.server = Some(server.addr());
            let lots = if About::of(scheduler).is_some_and(|about| about.draws_lots) {
                ", drawing lots"
            } else {
                ""
            };
            format!("goes to {}: {scheduler} chooses it{lots}", server.addr())
        }
    }
}

fn belongs_to_a_connection(server: SocketAddr) -> String {
    format!("goes to {server}: it belongs to a connection")
}

fn no_service(protocol: Protocol, dst: SocketAddr, mark: u32) -> String {
    match mark {
        0 => format!("no service takes {protocol} {dst}"),
        mark => format!("no service takes {protocol} {dst} or the mark {mark}"),
    }
}

/// Why a service takes a packet to `dst`.
fn why_service(key: ServiceKey, dst: SocketAddr) -> String {
    match key {
        ServiceKey::Mark { mark, .. } => format!("it has the mark {mark}"),
        ServiceKey::Address { addr, .. } if addr.port() == dst.port() => {
            "its address, port and protocol".to_string()
        }
        ServiceKey::Address { addr, .. } if addr.port() == 0 => {
            "no service has the port, and this one takes every port of the address".to_string()
        }
        ServiceKey::Address { .. } => {
            "no service has the port, and a data connection of FTP may use it".to_string()
        }
    }
}

fn candidate(server: &Arc<Server>) -> Candidate {
    let (eligible, why) = if server.weight() == 0 {
        (false, "weight 0: old connections only".to_string())
    } else if server.is_overloaded() {
        (false, "it has reached its upper threshold".to_string())
    } else if let Some(percent) = server.slow_start() {
        (
            true,
            format!("starts slowly, with {percent} % of its weight"),
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
    use super::*;
    use crate::{
        Director, Forwarding, Hook, Options, PacketMeta, Protocol, Segment, ServerConfig,
        ServiceConfig, TcpFlags, Transport,
    };

    fn tuple(client: &str) -> Tuple {
        Tuple {
            protocol: Protocol::TCP,
            src: client.parse().unwrap(),
            dst: "192.0.2.1:80".parse().unwrap(),
        }
    }

    fn director(scheduler: &str) -> Director {
        let mut director = Director::new(Options::default());
        let key = ServiceKey::Address {
            protocol: Protocol::TCP,
            addr: "192.0.2.1:80".parse().unwrap(),
        };
        let mut config = ServiceConfig::new(crate::Family::V4, scheduler);
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
    fn what_is_told_is_what_happens_and_nothing_changes() {
        for scheduler in [
            "rr", "wrr", "wlc", "lc", "sh", "dh", "mh", "sed", "nq", "fo", "ovf", "lblc", "lblcr",
        ] {
            let mut director = director(scheduler);
            for n in 1..=20 {
                let tuple = tuple(&format!("198.51.100.{n}:4000"));
                let told = |director: &Director| {
                    director
                        .control
                        .explain(&director.shard, tuple, 0, Instant::ZERO)
                };
                let first = told(&director);
                assert_eq!(
                    first,
                    told(&director),
                    "{scheduler}: asking changes nothing"
                );
                assert!(first.template.is_none() && first.connection.is_none());
                let meta = PacketMeta {
                    tuple,
                    transport: Transport::Tcp(TcpFlags(TcpFlags::SYN)),
                    segment: Segment::NONE,
                    len: 40,
                    mark: 0,
                    hook: Hook::Local,
                };
                let verdict = director.handle_packet(&meta, Instant::ZERO);
                let target = match verdict {
                    crate::Verdict::Forward(forward) => Some(forward.target),
                    // `ovf` fills each server up to its weight.
                    _ => None,
                };
                assert_eq!(first.server, target, "{scheduler}");
                assert_eq!(told(&director).connection.is_some(), target.is_some());
            }
            let tuple = tuple("198.51.100.1:4001");
            let told = director
                .control
                .explain(&director.shard, tuple, 0, Instant::ZERO);
            assert!(told.template.is_some(), "{told:?}");
        }
    }

    #[test]
    fn nobody_takes_it() {
        let director = director("rr");
        let mut tuple = tuple("198.51.100.1:4000");
        tuple.dst.set_port(81);
        let told = director
            .control
            .explain(&director.shard, tuple, 7, Instant::ZERO);
        assert_eq!(told.service, None);
        assert!(
            told.verdict.starts_with("left to this host"),
            "{}",
            told.verdict
        );
    }
}
