//! Checks of a service: its address, its servers and its keys, such as the filter of new
//! connections, the quorum, panic mode and the sorry server.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;

use lvs_core::api::ServiceId;
use lvs_core::filter::{FilterLists, SourceFilter, parse_prefixes};
use lvs_core::{Family, Forwarding, Prefix};
use toml::Spanned;

use super::proxy::is_proxied;
use super::scheduling::quiesces_at_zero;
use super::sense::ServerPlace;
use super::server::{ServerDefaults, no_address};
use super::{Checker, WEIGHT_MAX};
use crate::config::clash::{Taken, label};
use crate::config::files::read_bounded;
use crate::config::ports::{self, ManyPorts};
use crate::config::raw::{OneOrMore, RawFilter, RawQuorum, RawService, RawTarget};
use crate::config::{BelowQuorum, Quorum, Server, Service, VipMode};
use crate::health::Passive;
use crate::text::Diagnostic;

/// Maximum quorum: no service has more servers.
const QUORUM_MAX: i64 = 65_536;

impl Checker<'_> {
    pub(super) fn services(
        &mut self,
        raw: &[Spanned<RawService>],
        templates_stay: bool,
    ) -> Vec<Service> {
        let (mut taken, mut names) = (Taken::default(), HashMap::new());
        let mut all = Vec::new();
        for service in raw {
            if self.findings.is_full() {
                break;
            }
            let span = service.span();
            let service = service.get_ref();
            self.unique_name(service, &mut names);
            let Some(checked) = self.service(service, &span, templates_stay) else {
                continue;
            };
            let address = service.address.as_ref().map(Spanned::span);
            let mark = service.fwmark.as_ref().map(Spanned::span);
            let place = address.or(mark).unwrap_or(span);
            let vip = service.vip.as_ref().map_or(place.clone(), Spanned::span);
            for clash in taken.clashes(&checked) {
                let at = if clash.about_vip { &vip } else { &place };
                let (first, words) = clash.first;
                self.report(
                    Diagnostic::error(at.clone(), clash.title)
                        .context(first, words)
                        .help(clash.help),
                );
            }
            taken.take(&checked, place, vip);
            all.push(checked);
        }
        all
    }

    fn unique_name(&mut self, raw: &RawService, names: &mut HashMap<String, Range<usize>>) {
        let Some(name) = &raw.name else {
            return;
        };
        self.printable(name, "the name");
        // A service with several addresses has one name.
        if let Some(first) = names.insert(name.get_ref().clone(), name.span())
            && first != name.span()
        {
            let title = format!("two services are called `{}`", name.get_ref());
            self.report(
                Diagnostic::error(name.span(), title)
                    .context(first, "the first one")
                    .help("use a different name for each service: the log identifies services by their names"),
            );
        }
    }

    fn service(
        &mut self,
        raw: &RawService,
        span: &Range<usize>,
        templates_stay: bool,
    ) -> Option<Service> {
        let identity = self.identity(raw, span);
        let id = identity.map(|(id, _)| id);
        let mut config = self.service_config(raw, span, identity);
        let ports = ManyPorts::of(raw).and_then(Result::ok);
        let proxy = self.proxy(raw, id.as_ref());
        let vip = self.vip(raw, id, ports.is_some());
        let quiesces_at_zero = quiesces_at_zero(&config, templates_stay);
        let drain = self.drain(raw, &config);
        let defaults = ServerDefaults {
            forward: self.forward(raw.forward.as_ref()),
            tunnel: raw.tunnel.as_ref().and_then(|tunnel| self.tunnel(tunnel)),
            check: raw
                .check
                .as_ref()
                .and_then(|check| self.check_plan(check, id.as_ref())),
        };
        let servers = self.servers(raw, id, &defaults);
        self.used_tunnel(raw, &defaults, &servers);
        let discovery = self.discovery(raw, id, &defaults);
        let discovered = discovery.as_ref().and_then(|one| one.check.as_ref());
        let checked = discovered.is_some() || servers.iter().any(|server| server.check.is_some());
        let on_check_failure = self.on_check_failure(raw, &config, templates_stay, checked);
        self.unchecked(raw, span);
        let checks = servers.iter().filter_map(|server| server.check.as_ref());
        let mut checks = checks.chain(discovered);
        config.extras.count_unanswered =
            checks.any(|check| matches!(check.passive, Some(Passive::Asks(_))));
        let quorum = self.quorum(raw);
        let below_quorum = self.below_quorum(raw, id);
        let min_share = self.min_share(raw);
        let checks = servers.iter().filter_map(|server| server.check.as_ref());
        let mut checks = checks.chain(discovered);
        if below_quorum == BelowQuorum::GiveUp && checks.any(|check| check.via.is_some()) {
            let at = raw
                .below_quorum
                .as_ref()
                .map_or(span.clone(), Spanned::span);
            self.report(
                Diagnostic::error(at, "the VIP would stay released, because the through-VIP check needs it")
                    .help("remove `below_quorum`, or `via = \"service\"` of the check, which needs the VIP"),
            );
        }
        let sorry = self.sorry(raw, id, &defaults, &servers);
        if raw.server.is_empty() && raw.discover.is_none() && self.complete {
            let span = self.first_line(span);
            self.report(
                Diagnostic::warning(
                    span,
                    "the service has no server and refuses every connection",
                )
                .help("add servers = [\"10.0.0.11:80\"], with the address of each server"),
            );
        }
        let id = id?;
        let name = raw.name.as_ref().map(|name| name.get_ref().clone());
        Some(Service {
            line: self.line(span),
            name: name
                .or_else(|| ports.as_ref().map(ToString::to_string))
                .unwrap_or_else(|| label(&id)),
            id,
            config,
            ports,
            vip,
            proxy,
            filter: raw
                .filter
                .as_ref()
                .map_or_else(SourceFilter::default, |filter| self.filter(filter)),
            on_check_failure,
            quiesces_at_zero,
            drain,
            quorum,
            below_quorum,
            alpha: raw
                .start_down
                .as_ref()
                .is_some_and(|alpha| *alpha.get_ref()),
            omega: raw
                .remove_on_exit
                .as_ref()
                .is_some_and(|omega| *omega.get_ref()),
            min_share,
            sorry,
            discovery,
            incomplete: false,
            unheard: false,
            servers,
        })
    }

    /// Warns about servers without a health check, unless the file sets `check = "none"`.
    fn unchecked(&mut self, raw: &RawService, span: &Range<usize>) {
        let mut servers = raw.server.iter();
        let any = servers.any(|server| server.get_ref().check.is_none()) || raw.discover.is_some();
        if raw.check.is_none() && any && self.complete {
            let span = self.first_line(span);
            self.once(
                Diagnostic::warning(
                    span,
                    "servers have no health check: a failed one still receives connections",
                )
                .help("add check = { type = \"tcp\" } to the service, or check = \"none\""),
            );
        }
    }

    /// Reads the owner of the VIP, and reports an owner that is impossible.
    fn vip(&mut self, raw: &RawService, id: Option<ServiceId>, many_ports: bool) -> VipMode {
        let words = [
            ("auto", VipMode::Auto),
            ("own", VipMode::Own),
            ("host", VipMode::Host),
            ("announce", VipMode::Announce),
        ];
        let vip = self.word(raw.vip.as_ref(), &words).unwrap_or_default();
        let Some(place) = &raw.vip else {
            return vip;
        };
        if let (VipMode::Host, Some(backend)) = (vip, self.routed.clone()) {
            self.report(
                Diagnostic::error(
                    place.span(),
                    "packets to the host itself are not routed to a dataplane with the backend `tun`",
                )
                .context(backend, "the backend")
                .help("remove the address from the host, and remove `vip`: the dataplane owns the address then"),
            );
        }
        if matches!(id, Some(ServiceId::Fwmark { .. })) && !many_ports {
            self.report(
                Diagnostic::error(place.span(), "a service with a mark does not have a VIP").help(
                    "remove `vip`; add the addresses to the host, or route them to this host",
                ),
            );
        }
        vip
    }

    fn servers(
        &mut self,
        raw: &RawService,
        id: Option<ServiceId>,
        defaults: &ServerDefaults,
    ) -> Vec<Server> {
        let mut servers: Vec<Server> = Vec::new();
        let mut seen: HashMap<SocketAddr, Range<usize>> = HashMap::new();
        for server in &raw.server {
            let Some(id) = &id else {
                // Without the service's address, no other check of its servers is possible.
                let server = server.get_ref();
                self.number(server.weight.as_ref(), "weight", 0..=WEIGHT_MAX);
                if let Some(check) = &server.check {
                    self.check_plan(check, None);
                }
                continue;
            };
            let place = server.get_ref().address.as_ref().map(Spanned::span);
            let Some(checked) = self.server(server, raw, id, defaults) else {
                continue;
            };
            if let Some(place) = place
                && let Some(first) = seen.insert(checked.address, place.clone())
            {
                self.report(
                    Diagnostic::error(place, format!("server {} exists twice", checked.address))
                        .context(first, "the first one")
                        .help(
                            "remove one of the two entries; to send more connections to the server, raise its weight",
                        ),
                );
            }
            if let Some(place) = server.get_ref().address.as_ref().map(Spanned::span) {
                self.servers.push(ServerPlace {
                    service: *id,
                    address: checked.address,
                    place,
                });
            }
            servers.push(checked);
        }
        servers
    }

    /// Checks that at least one server uses the service's tunnel settings.
    fn used_tunnel(&mut self, raw: &RawService, defaults: &ServerDefaults, servers: &[Server]) {
        let Some(tunnel) = &raw.tunnel else {
            return;
        };
        let default = defaults.forward == Some(Forwarding::Tunnel);
        let one = |server: &Server| server.config.forwarding == Forwarding::Tunnel;
        // Other errors of a server were reported already.
        let all_read = servers.len() == raw.server.len() && self.complete;
        if !default && all_read && !servers.iter().any(one) {
            self.tunnel_without_tun(tunnel, raw.forward.as_ref());
        }
    }

    /// Returns the id and the address family of a service. Reports errors in the keys that
    /// determine them, and returns `None` if the id is not valid.
    fn identity(&mut self, raw: &RawService, span: &Range<usize>) -> Option<(ServiceId, Family)> {
        let protocol = self.word(
            raw.protocol.as_ref(),
            &[("tcp", 0u8), ("udp", 1), ("sctp", 2)],
        );
        let family = self.word(
            raw.family.as_ref(),
            &[("ipv4", Family::V4), ("ipv6", Family::V6)],
        );
        match (&raw.address, &raw.fwmark) {
            (Some(address), Some(mark)) => {
                self.report(
                    Diagnostic::error(mark.span(), "a service has an address or a mark, not both")
                        .context(address.span(), "the address")
                        .help("remove `address` or `fwmark`"),
                );
                None
            }
            (None, None) => {
                self.missing(
                    span,
                    "`address` of the service",
                    "add its virtual address and port: address = \"192.0.2.10:80\"",
                );
                None
            }
            (None, Some(_)) => {
                let mark = self.number(raw.fwmark.as_ref(), "mark", 1..=i64::from(u32::MAX))?;
                if let Some(protocol) = &raw.protocol {
                    self.report(
                        Diagnostic::error(protocol.span(), "a mark covers every protocol")
                            .help("remove `protocol`"),
                    );
                }
                let family = family.unwrap_or(Family::V4);
                let mark = u32::try_from(mark).ok()?;
                if ports::MARKS.contains(&mark)
                    && let Some(place) = &raw.fwmark
                {
                    self.reserved_mark(place.span());
                }
                Some((ServiceId::Fwmark { mark, family }, family))
            }
            (Some(text), None) => {
                if let Some(family) = &raw.family {
                    self.report(
                        Diagnostic::error(
                            family.span(),
                            "`family` is for a service with a mark only",
                        )
                        .help("remove `family`; the address determines the family"),
                    );
                }
                if raw.protocol.is_some() && protocol.is_none() {
                    return None;
                }
                if let Some(many) = ManyPorts::of(raw) {
                    return self.many_ports(text, many);
                }
                let address = self.socket_address(text, None)?;
                if !is_proxied(raw) {
                    self.usable(text.span(), address.ip(), "VIP")?;
                }
                let id = match protocol.unwrap_or(0) {
                    0 => ServiceId::Tcp { address },
                    1 => ServiceId::Udp { address },
                    _ => ServiceId::Sctp { address },
                };
                Some((id, Family::of(&address.ip())))
            }
        }
    }

    pub(super) fn many_ports(
        &mut self,
        text: &Spanned<String>,
        many: Result<ManyPorts, String>,
    ) -> Option<(ServiceId, Family)> {
        let many = match many {
            Ok(many) => many,
            Err(_) if is_one_number(text.get_ref()) => {
                let (title, help) = no_address(text.get_ref().trim());
                self.report(Diagnostic::error(text.span(), title).help(help));
                return None;
            }
            Err(reason) => {
                self.report(
                    Diagnostic::error(text.span(), format!("invalid ports of a service: {reason}"))
                        .help("write \"192.0.2.10:80\", \"192.0.2.10:80,8000-8999\" or \"192.0.2.10:*\""),
                );
                return None;
            }
        };
        self.usable(text.span(), many.ip, "VIP")?;
        let (mark, family) = (many.mark(), many.family());
        Some((ServiceId::Fwmark { mark, family }, family))
    }

    fn quorum(&mut self, raw: &RawService) -> Quorum {
        let Some(quorum) = &raw.quorum else {
            return Quorum::default();
        };
        let servers = raw.server.len();
        let bound = 1..=QUORUM_MAX;
        let quorum_of = |up: i64, down: i64| Quorum {
            up: u32::try_from(up).unwrap_or(1),
            down: u32::try_from(down).unwrap_or(1),
        };
        let read = match quorum.get_ref() {
            RawQuorum::Number(number) => {
                let spanned = Spanned::new(quorum.span(), *number);
                let up = self.number(Some(&spanned), "quorum", bound).unwrap_or(1);
                quorum_of(up, up)
            }
            RawQuorum::Table(table) => {
                let Some(up) = &table.up else {
                    self.report(
                        Diagnostic::error(quorum.span(), "`up` of the quorum is missing")
                            .help("write { up = 3, down = 2 }, or a number for both"),
                    );
                    return Quorum::default();
                };
                let most = self.number(Some(up), "`up`", bound.clone()).unwrap_or(1);
                let least = self.number(table.down.as_ref(), "`down`", bound);
                let least = least.unwrap_or(most);
                if let Some(down) = &table.down
                    && least > most
                {
                    self.report(
                        Diagnostic::error(
                            down.span(),
                            format!("`down` ({least}) is above `up` ({most})"),
                        )
                        .context(up.span(), "the quorum is reached at this number")
                        .help("the quorum is lost below `down` servers, which is at most `up`"),
                    );
                }
                quorum_of(most, least)
            }
        };
        if self.complete
            && servers > 0
            && raw.discover.is_none()
            && usize::try_from(read.up).is_ok_and(|up| up > servers)
        {
            self.report(
                Diagnostic::warning(
                    quorum.span(),
                    format!(
                        "the quorum is {}, and the service has {}",
                        read.up,
                        lvs_api::words::counted(servers, "server")
                    ),
                )
                .label("the quorum is never reached")
                .help("use at most the number of servers"),
            );
        }
        read
    }

    fn below_quorum(&mut self, raw: &RawService, id: Option<ServiceId>) -> BelowQuorum {
        let words = [
            ("keep", BelowQuorum::Keep),
            ("give-up", BelowQuorum::GiveUp),
        ];
        let below = self
            .word(raw.below_quorum.as_ref(), &words)
            .unwrap_or_default();
        if let (Some(at), BelowQuorum::GiveUp) = (&raw.below_quorum, below) {
            let host = raw.vip.as_ref().is_some_and(|vip| vip.get_ref() == "host");
            let mark = matches!(id, Some(ServiceId::Fwmark { .. })) && raw.address.is_none();
            if host || mark {
                self.report(
                    Diagnostic::error(
                        at.span(),
                        "the dataplane cannot release an address that it does not own",
                    )
                    .help("remove this line; `notify` can inform the owner of the address"),
                );
            }
        }
        below
    }

    fn min_share(&mut self, raw: &RawService) -> u8 {
        let percent = self.number(raw.panic_below.as_ref(), "`panic_below`", 0..=100);
        percent
            .and_then(|percent| u8::try_from(percent).ok())
            .unwrap_or(0)
    }

    /// Returns the sorry server, an ordinary server with weight 1 by default. `None` without one,
    /// or if it is invalid, which is reported.
    fn sorry(
        &mut self,
        raw: &RawService,
        id: Option<ServiceId>,
        defaults: &ServerDefaults,
        servers: &[Server],
    ) -> Option<Server> {
        let sorry = raw.sorry.as_ref()?;
        let id = id?;
        let server = RawTarget::server(sorry);
        let address = server.get_ref().address.as_ref();
        let place = address.map_or(sorry.span(), Spanned::span);
        // The sorry server has no check, because no other server could replace it.
        let defaults = ServerDefaults {
            forward: defaults.forward,
            tunnel: defaults.tunnel,
            check: None,
        };
        let mut checked = self.server(&server, raw, &id, &defaults)?;
        if servers
            .iter()
            .any(|server| server.address == checked.address)
        {
            self.report(
                Diagnostic::error(place, "the sorry server is a server of the service")
                    .help("use another address; this server is used only while too few of the other servers are usable"),
            );
            return None;
        }
        self.servers.push(ServerPlace {
            service: id,
            address: checked.address,
            place,
        });
        checked.check = None;
        Some(checked)
    }

    pub(super) fn filter(&mut self, raw: &Spanned<RawFilter>) -> SourceFilter {
        let (span, raw) = (raw.span(), raw.get_ref());
        let mut lists = FilterLists::default();
        for (list, words, files) in [
            (&mut lists.allow, &raw.allow, &raw.allow_file),
            (&mut lists.deny, &raw.deny, &raw.deny_file),
        ] {
            for (word, place) in each(words.as_ref()) {
                match word.parse::<Prefix>() {
                    Ok(prefix) => list.push(prefix),
                    Err(reason) => self.report(Diagnostic::error(place, reason)),
                }
            }
            for (path, place) in each(files.as_ref()) {
                match read_prefixes(path) {
                    Ok(more) => list.extend(more),
                    Err(reason) => self.report(Diagnostic::error(place, reason).help(
                        "name a file of networks, separated by whitespace or line breaks; # begins a comment",
                    )),
                }
            }
        }
        SourceFilter::new(lists).unwrap_or_else(|reason| {
            self.report(Diagnostic::error(self.first_line(&span), reason));
            SourceFilter::default()
        })
    }
}

/// Whether the port part of the text is one number.
fn is_one_number(address: &str) -> bool {
    let port = address.trim().rsplit_once(':').map_or("", |(_, port)| port);
    !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())
}

/// The words of a key, each with the place of the key's value.
fn each(value: Option<&Spanned<OneOrMore>>) -> impl Iterator<Item = (&str, Range<usize>)> {
    value.into_iter().flat_map(|value| {
        let all = value.get_ref().0.iter();
        all.map(|word| (word.as_str(), value.span()))
    })
}

fn read_prefixes(path: &str) -> Result<Vec<Prefix>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot read {path}: {error}");
    let bytes = read_bounded(Path::new(path)).map_err(|error| failed(&error))?;
    let text = String::from_utf8(bytes).map_err(|error| failed(&error))?;
    parse_prefixes(&text).map_err(|(line, reason)| format!("{path}, line {line}: {reason}"))
}
