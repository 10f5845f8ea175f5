//! Servers that sources name: `servers` of a service, and `[dns]`.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_core::api::ServiceId;
use lvs_core::{Family, Forwarding, ServiceKey};
use toml::Spanned;

use super::sense::is_it;
use super::server::ServerDefaults;
use super::{Checker, WEIGHT_MAX, label, port};
use crate::config::diagnostic::{Diagnostic, Severity};
use crate::config::raw::{
    RawConfig, RawDns, RawDuration, RawServer, RawServers, RawService, Whole,
};
use crate::config::{From, Lookups, Server, Service};
use crate::sources::Record;
use crate::sources::dns::{NAMES_MAX, is_srv, name_of};

/// Name servers that are asked.
const NAME_SERVERS_MAX: usize = 8;
/// The port of a name server.
const DNS_PORT: u16 = 53;

impl Checker<'_> {
    /// `[dns]`.
    pub(super) fn lookups(&mut self, raw: Option<&Spanned<RawDns>>) -> Lookups {
        let usual = Lookups::default();
        let Some(spanned) = raw else {
            return usual;
        };
        let raw = spanned.get_ref();
        let mut name_servers = Vec::new();
        if let Some(words) = &raw.name_servers {
            for word in &words.get_ref().0 {
                let with_port = word.parse::<SocketAddr>().ok();
                let bare = word.trim_start_matches('[').trim_end_matches(']');
                let alone = bare.parse::<IpAddr>().ok();
                match with_port.or_else(|| Some(SocketAddr::new(alone?, DNS_PORT))) {
                    Some(address) if address.port() != 0 => name_servers.push(address),
                    _ => self.report(
                        Diagnostic::error(words.span(), format!("`{word}` is not an address"))
                            .help("name servers are given by address: name_servers = [\"192.0.2.53\", \"192.0.2.54:5353\"]"),
                    ),
                }
            }
            if words.get_ref().0.is_empty() || name_servers.len() > NAME_SERVERS_MAX {
                self.report(
                    Diagnostic::error(
                        words.span(),
                        format!("there are {} name servers", words.get_ref().0.len()),
                    )
                    .help(format!("name 1 to {NAME_SERVERS_MAX}, or leave the key out for those of /etc/resolv.conf")),
                );
            }
        }
        let mut time = |value: Option<&Spanned<RawDuration>>, key: &str, first, last, usual| {
            let Some(value) = value else { return usual };
            let time = value.get_ref().0;
            if !(first..=last).contains(&time) {
                self.report(
                    Diagnostic::error(value.span(), format!("`{key}` is out of range"))
                        .help(format!("give \"{first:?}\" to \"{last:?}\"")),
                );
            }
            time
        };
        let second = Duration::from_secs(1);
        let timeout = time(
            raw.timeout.as_ref(),
            "timeout",
            Duration::from_millis(100),
            second * 30,
            usual.timeout,
        );
        let min = time(
            raw.min_ttl.as_ref(),
            "min_ttl",
            second,
            second * 3600,
            usual.min,
        );
        let max = time(
            raw.max_ttl.as_ref(),
            "max_ttl",
            second,
            second * 86_400,
            usual.max.max(min),
        );
        if max < min {
            self.report(
                Diagnostic::error(spanned.span(), "`max_ttl` is below `min_ttl`")
                    .help("raise `max_ttl`, or lower `min_ttl`"),
            );
        }
        Lookups {
            name_servers,
            timeout,
            min,
            max,
        }
    }

    /// Where further servers of a service come from, and those that are known of them: they come
    /// behind the file's. One that cannot serve is left out; what a stranger writes into a zone
    /// does not make the file wrong.
    pub(super) fn found_servers(
        &mut self,
        service: &RawService,
        id: Option<ServiceId>,
        defaults: &ServerDefaults,
        servers: &mut Vec<Server>,
    ) -> From {
        let Some(spanned) = &service.servers else {
            return From::default();
        };
        let raw = spanned.get_ref();
        let own_port = self.number(raw.port.as_ref(), "port", 1..=65_535);
        self.number(raw.weight.as_ref(), "weight", 0..=WEIGHT_MAX);
        let from = self.from(spanned);
        if let (Some(name), Some(port)) = (&from.dns, &raw.port)
            && is_srv(name)
        {
            self.report(
                Diagnostic::error(port.span(), "SRV records name the port themselves")
                    .help("remove `port`, or give a name of A and AAAA records, which has no underscore at its beginning"),
            );
        }
        let Some(id) = id else {
            return from;
        };
        if let Some(no_method) = service.forward.is_none().then(|| spanned.span()) {
            self.missing(
                &no_method,
                "`forward` of the service",
                "servers that are found have no method of their own: add forward = \"nat\", \"dr\", \"tun\", \"fullnat\" or \"proxy\" to the service",
            );
            return from;
        }
        let gathered = self.gathered;
        let by_dns = from.dns.as_ref().and_then(|name| gathered.dns.get(name));
        let by_etcd = from.etcd.as_ref().and_then(|pool| {
            let etcd = gathered.etcd.as_ref()?;
            Some(etcd.pools.get(pool)?.values().copied().collect())
        });
        let records: Option<Vec<Record>> = by_dns.cloned().or(by_etcd);
        let mut there: HashSet<SocketAddr> = servers.iter().map(|one| one.address).collect();
        let usual = own_port.and_then(|port| u16::try_from(port).ok());
        let usual = usual.unwrap_or_else(|| port(&id));
        let records = records.as_deref();
        for record in records.into_iter().flatten() {
            let address = SocketAddr::new(record.ip, record.port.unwrap_or(usual));
            // Of two families, each service takes its own.
            let family = Family::of(&record.ip) == ServiceKey::from(id).family();
            let fits = family || defaults.forward == Some(Forwarding::Tunnel);
            if fits && there.insert(address) {
                servers.extend(self.found_server(spanned, record, address, service, &id, defaults));
            }
        }
        let incomplete = (from.dns.is_some() || from.etcd.is_some()) && records.is_none();
        // A pool that nobody is in is known to be empty.
        let heard = from.etcd.is_some() && gathered.etcd.is_some();
        From {
            incomplete,
            unheard: incomplete && !heard,
            ..from
        }
    }

    fn from(&mut self, spanned: &Spanned<RawServers>) -> From {
        let raw = spanned.get_ref();
        let text = match (&raw.dns, &raw.etcd) {
            (Some(text), None) => text,
            (None, Some(pool)) => return self.pool(pool),
            (Some(_), Some(pool)) => {
                self.report(
                    Diagnostic::error(pool.span(), "`servers` come from DNS and from etcd")
                        .help("remove one of the two"),
                );
                return From::default();
            }
            (None, None) => {
                self.report(
                    Diagnostic::error(spanned.span(), "`servers` does not say where they come from")
                        .help("write servers = { dns = \"_http._tcp.example.org\" } or { etcd = \"web\" }; servers with addresses are [[service.server]] tables"),
                );
                return From::default();
            }
        };
        let name = name_of(text.get_ref());
        if name.is_none() {
            let title = format!("{:?} is not a name", text.get_ref());
            self.report(Diagnostic::error(text.span(), title).help(
                "write the whole name, labels of 1 to 63 letters, digits, `-` and `_` with dots between them: \"_http._tcp.example.org\"",
            ));
        }
        From {
            dns: name,
            ..From::default()
        }
    }

    /// A server as the file would have it, unless that would be wrong.
    fn found_server(
        &mut self,
        place: &Spanned<RawServers>,
        record: &Record,
        address: SocketAddr,
        service: &RawService,
        id: &ServiceId,
        defaults: &ServerDefaults,
    ) -> Option<Server> {
        let span = place.span();
        let weight = record.weight.map(|weight| Whole(weight.into()));
        let own = place
            .get_ref()
            .weight
            .as_ref()
            .map(|weight| *weight.get_ref());
        let raw = RawServer {
            address: Some(Spanned::new(span.clone(), address.to_string())),
            weight: weight
                .or(own)
                .map(|weight| Spanned::new(span.clone(), weight)),
            ..RawServer::default()
        };
        let before = std::mem::take(self.findings);
        let raw = Spanned::new(span, raw);
        let server = self.server(&raw, service, id, defaults);
        let own = std::mem::replace(self.findings, before);
        let wrong = own.into_iter().find(|d| d.severity == Severity::Error);
        if let Some(wrong) = wrong {
            self.leave_out(id, address, &wrong.title);
            return None;
        }
        server
    }

    fn leave_out(&mut self, id: &ServiceId, address: SocketAddr, why: &str) {
        self.left_out
            .push(format!("server {address} of {}: {why}", label(id)));
    }

    /// No more names are asked for than are looked up.
    pub(super) fn few_names(&mut self, raw: &RawConfig) {
        let mut names = HashSet::new();
        let mut last = None;
        for service in &raw.service {
            let servers = service.get_ref().servers.as_ref();
            if let Some(dns) = servers.and_then(|servers| servers.get_ref().dns.as_ref())
                && names.insert(name_of(dns.get_ref()))
                && names.len() > NAMES_MAX
            {
                last = Some(dns.span());
            }
        }
        if let Some(place) = last {
            let title = format!("the services have {} names in DNS", names.len());
            self.report(Diagnostic::error(place, title).help(format!(
                "{NAMES_MAX} at most are looked up; let services share names"
            )));
        }
    }

    /// Takes out servers of sources that are services themselves.
    pub(super) fn found_loops(&mut self, services: &mut [Service]) {
        if services
            .iter()
            .all(|service| service.from == From::default())
        {
            return;
        }
        let of_file: HashSet<(ServiceId, SocketAddr)> = self
            .servers
            .iter()
            .map(|server| (server.service, server.address))
            .collect();
        let all: Vec<Service> = services
            .iter()
            .map(|service| Service {
                servers: Vec::new(),
                ..service.clone()
            })
            .collect();
        for service in services {
            let id = service.id;
            let mut loops = Vec::new();
            service.servers.retain(|server| {
                let mut others = all.iter().filter(|other| other.id != id);
                let other = others.find(|other| {
                    other.virtual_ip() == Some(server.address.ip()) && is_it(server.address, other)
                });
                match other {
                    Some(other) if !of_file.contains(&(id, server.address)) => {
                        let why = format!("it is the service {}", label(&other.id));
                        loops.push((server.address, why));
                        false
                    }
                    _ => true,
                }
            });
            for (address, why) in loops {
                self.leave_out(&id, address, &why);
            }
        }
    }
}
