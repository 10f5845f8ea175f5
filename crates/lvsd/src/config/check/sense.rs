//! Checks across tables, such as for a server that is another service, weights without an effect,
//! or a mark that no rule sets.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use lvs_core::Forwarding;
use lvs_core::api::ServiceId;
use lvs_core::mark::{MarkAction, MarkRule};
use lvs_core::sched::{self, BUILT_IN, Weights};
use toml::Spanned;

use super::Checker;
use crate::config::Server;
use crate::config::Service;
use crate::config::clash::{is_it, label, listens_at, listens_everywhere};
use crate::config::raw::{RawConfig, RawService};
use crate::text::Diagnostic;

/// A server, and the position of its address.
pub(super) struct ServerPlace {
    pub(super) service: ServiceId,
    pub(super) address: SocketAddr,
    pub(super) place: Range<usize>,
}

impl Checker<'_> {
    /// Checks servers against the addresses of all services, marks against the rules that set them,
    /// and weights against the scheduler.
    pub(super) fn sense(&mut self, raw: &RawConfig, services: &[Service], marks: &[String]) {
        self.servers_that_are_services(services);
        if !self.complete {
            return;
        }
        self.marks_without_rules(raw, marks);
        for service in &raw.service {
            self.weights(service);
        }
    }

    /// Reports servers whose address belongs to a service: their packets would loop in the
    /// director. Also reports loopback addresses that the dataplane cannot reach.
    pub(super) fn servers_that_are_services(&mut self, services: &[Service]) {
        let mut vips: HashMap<IpAddr, Vec<&Service>> = HashMap::new();
        for service in services {
            if let Some(ip) = service.virtual_ip() {
                vips.entry(ip).or_default().push(service);
            }
        }
        // There are few or no listeners, but possibly many servers.
        let listeners: Vec<&Service> = services
            .iter()
            .filter(|one| listens_everywhere(one))
            .collect();
        let facts = self.facts;
        let has = |ip| facts.is_some_and(|facts| facts.addresses.has(ip));
        // With direct routing, the host itself serves connections to its own address.
        let translates = |server: &Server| server.config.forwarding != Forwarding::Route;
        let loopback: HashSet<(ServiceId, SocketAddr)> = services
            .iter()
            .filter(|service| service.proxy.is_none())
            .flat_map(|service| {
                let servers = service.servers.iter().chain(&service.sorry);
                let servers = servers.filter(|server| server.address.ip().is_loopback());
                let servers = servers.filter(|server| translates(server));
                servers.map(|server| (service.id, server.address))
            })
            .collect();
        for server in std::mem::take(&mut self.servers) {
            if loopback.contains(&(server.service, server.address)) {
                let title = format!("the dataplane cannot reach the server {}", server.address);
                self.report(
                    Diagnostic::warning(server.place, title)
                        .label("a loopback address")
                        .help("use another address of this host, or set forward = \"dr\" or \"proxy\""),
                );
                continue;
            }
            let mut listeners = listeners.iter();
            let listener =
                listeners.find(|one| listens_at(one, &server.service, server.address, has));
            if let Some(listener) = listener {
                let title = format!(
                    "the address of the server {} belongs to the service {}, which listens on it",
                    server.address,
                    label(&listener.id)
                );
                self.report(Diagnostic::error(server.place, title).help(
                    "each connection would return to the proxy until its maximum number of connections is reached: use the address and port of a real server",
                ));
                continue;
            }
            let beside = vips.get(&server.address.ip()).into_iter().flatten();
            // The service itself was already compared.
            let mut others = beside.filter(|service| service.id != server.service);
            let Some(other) = others.find(|other| is_it(server.address, other)) else {
                continue;
            };
            let title = format!(
                "the address of the server {} belongs to the service {}",
                server.address,
                label(&other.id)
            );
            let finding = Diagnostic::error(server.place, title)
                .help("use the address of a real server; a VIP cannot be a server");
            self.report(finding);
        }
    }

    /// Warns about services with a mark that no rule of the file sets: they receive no packets.
    fn marks_without_rules(&mut self, raw: &RawConfig, marks: &[String]) {
        let set: HashSet<u32> = marks
            .iter()
            .filter_map(|rule| {
                let words: Vec<&str> = rule.split_whitespace().collect();
                match MarkRule::parse(&words).ok()?.action {
                    MarkAction::Mark(mark) => Some(mark),
                    _ => None,
                }
            })
            .collect();
        for service in &raw.service {
            let Some(mark) = &service.get_ref().fwmark else {
                continue;
            };
            if u32::try_from(mark.get_ref().0).is_ok_and(|mark| !set.contains(&mark)) {
                let n = mark.get_ref().0;
                self.report(
                    Diagnostic::warning(mark.span(), format!("no [[mark]] sets the mark {n}"))
                        .label("the service receives no packets")
                        .help(format!(
                            "add a [[mark]] with destination and mark = {n}, unless `lvsadm mark` sets it"
                        )),
                );
            }
        }
    }

    /// Warns about weights that have no effect or an unwanted effect.
    fn weights(&mut self, service: &Spanned<RawService>) {
        let raw = service.get_ref();
        let weights = || {
            raw.server
                .iter()
                .filter_map(|server| server.get_ref().weight.as_ref())
        };
        let zero = weights().filter(|weight| weight.get_ref().0 == 0).count();
        if zero > 0 && zero == raw.server.len() {
            let at = weights().next().map_or(0..0, Spanned::span);
            self.report(
                Diagnostic::warning(at, "all servers of the service have the weight 0")
                    .label("the service refuses every new connection")
                    .help("set another weight for one of them, unless the service must not accept connections"),
            );
        }
        let name = raw
            .scheduler
            .as_ref()
            .map_or(sched::DEFAULT, |name| name.get_ref());
        let about = BUILT_IN.iter().find(|about| about.name == name);
        let ignored = about.is_some_and(|about| about.weights == Weights::Ignored);
        if let Some(weight) = weights().find(|weight| weight.get_ref().0 > 1)
            && ignored
        {
            self.report(
                Diagnostic::warning(
                    weight.span(),
                    format!("the scheduler {name} does not use weights"),
                )
                .help(format!(
                    "remove the weight{}; 0 still takes a server out of service",
                    match name {
                        "rr" => ", or set scheduler = \"wrr\"",
                        "lc" => ", or set scheduler = \"wlc\"",
                        "dh" => ", or set scheduler = \"sh\" or \"mh\"",
                        _ => "",
                    }
                )),
            );
        }
    }
}
