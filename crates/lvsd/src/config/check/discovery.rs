//! Checks the sources of further servers: `discover` of a service, and `[dns]`.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_core::api::ServiceId;
use lvs_core::{Forwarding, ServerConfig, ServiceKey};
use toml::Spanned;

use super::cluster::TIMEOUT;
use super::server::ServerDefaults;
use super::{Checker, WEIGHT_MAX, port};
use crate::config::Discovery;
use crate::config::raw::{RawConfig, RawDiscover, RawDns, RawService};
use crate::sources::dns::{NAMES_MAX, is_srv, name_of};
use crate::sources::{Lookups, Source};
use crate::text::Diagnostic;

/// Maximum number of configured name servers.
const NAME_SERVERS_MAX: usize = 8;
/// The port of a name server.
const DNS_PORT: u16 = 53;

impl Checker<'_> {
    /// Reads `[dns]`, and reports errors in it. Without this table, returns the defaults.
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
                            .help("write the addresses of name servers, without names: name_servers = [\"192.0.2.53\", \"192.0.2.54:5353\"]"),
                    ),
                }
            }
            if words.get_ref().0.is_empty() || name_servers.len() > NAME_SERVERS_MAX {
                self.report(
                    Diagnostic::error(
                        words.span(),
                        format!("{} name servers are configured", words.get_ref().0.len()),
                    )
                    .help(format!("configure 1 to {NAME_SERVERS_MAX} name servers, or remove the key to use those of /etc/resolv.conf")),
                );
            }
        }
        let second = Duration::from_secs(1);
        let mut time = |value: &Option<_>, key, range, usual| {
            self.source_time(value.as_ref(), key, &range, usual)
        };
        let timeout = time(&raw.timeout, "timeout", TIMEOUT, usual.timeout);
        let min = time(&raw.min_ttl, "min_ttl", second..=second * 3600, usual.min);
        let longest = second..=second * 86_400;
        let max = time(&raw.max_ttl, "max_ttl", longest, usual.max.max(min));
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

    /// Reads the table `discover` of a service: the source of its discovered servers, and the
    /// settings of these servers. `None` without this table, or if it is invalid, which is
    /// reported.
    pub(super) fn discovery(
        &mut self,
        service: &RawService,
        id: Option<ServiceId>,
        defaults: &ServerDefaults,
    ) -> Option<Discovery> {
        let spanned = service.discover.as_ref()?;
        let raw = spanned.get_ref();
        let own_port = self.number(raw.port.as_ref(), "port", 1..=65_535);
        let weight = self.number(raw.weight.as_ref(), "weight", 0..=WEIGHT_MAX);
        let source = self.source(spanned);
        if let (Some(Source::Dns(name)), Some(port)) = (&source, &raw.port)
            && is_srv(name)
        {
            self.report(
                Diagnostic::error(port.span(), "SRV records contain the port")
                    .help("remove `port`, or use a name with A and AAAA records, which has no underscore at its beginning"),
            );
        }
        let (id, source) = (id?, source?);
        let Some(forward) = &service.forward else {
            self.missing(
                &spanned.span(),
                "`forward` of the service",
                "discovered servers use the forwarding method of the service: add forward = \"nat\", \"dr\", \"tun\", \"fullnat\" or \"proxy\" to the service",
            );
            return None;
        };
        let (method, place) = (defaults.forward?, forward.span());
        self.sees_answers(service, method, &place)?;
        let family = ServiceKey::from(id).family();
        self.fits_full_nat(&place, family, service, method)?;
        let mut config = ServerConfig::new(1, method);
        config.weight = i32::try_from(weight.unwrap_or(1)).unwrap_or(1);
        if method == Forwarding::Tunnel {
            config.tunnel = defaults.tunnel.unwrap_or_default();
        }
        let plan = defaults.check.as_ref();
        let check = plan.and_then(|plan| self.check(plan, &id, method, service));
        let own_port = own_port.and_then(|port| u16::try_from(port).ok());
        Some(Discovery {
            source,
            line: self.line(&spanned.span()),
            port: own_port.unwrap_or_else(|| port(&id)),
            config,
            check,
        })
    }

    fn source(&mut self, spanned: &Spanned<RawDiscover>) -> Option<Source> {
        let raw = spanned.get_ref();
        let text = match (&raw.dns, &raw.etcd) {
            (Some(text), None) => text,
            (None, Some(pool)) => return self.pool(pool).map(Source::Etcd),
            (Some(_), Some(pool)) => {
                self.report(
                    Diagnostic::error(pool.span(), "`discover` names DNS and etcd")
                        .help("remove one of the two"),
                );
                return None;
            }
            (None, None) => {
                self.report(
                    Diagnostic::error(spanned.span(), "`discover` names no source")
                        .help("write discover = { dns = \"_http._tcp.example.org\" } or { etcd = \"web\" }; addresses belong to `servers`"),
                );
                return None;
            }
        };
        let name = name_of(text.get_ref());
        if name.is_none() {
            let title = format!("{:?} is not a name", text.get_ref());
            self.report(Diagnostic::error(text.span(), title).help(
                "write the whole name, labels of 1 to 63 letters, digits, `-` and `_` with dots between them: \"_http._tcp.example.org\"",
            ));
        }
        name.map(Source::Dns)
    }

    /// Checks that the number of names is within the limit of the resolver.
    pub(super) fn few_names(&mut self, raw: &RawConfig) {
        let mut names = HashSet::new();
        let mut last = None;
        for service in &raw.service {
            let discover = service.get_ref().discover.as_ref();
            if let Some(dns) = discover.and_then(|discover| discover.get_ref().dns.as_ref())
                && names.insert(name_of(dns.get_ref()))
                && names.len() > NAMES_MAX
            {
                last = Some(dns.span());
            }
        }
        if let Some(place) = last {
            let title = format!("the services have {} names in DNS", names.len());
            self.report(Diagnostic::error(place, title).help(format!(
                "at most {NAMES_MAX} are resolved; use the same name in several services"
            )));
        }
    }
}
