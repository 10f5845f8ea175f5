//! Checks of a service's real servers: their addresses and settings, and whether they fit the
//! service.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use lvs_core::api::ServiceId;
use lvs_core::tunnel::Tunnel;
use lvs_core::{Family, Forwarding, ServerConfig};
use toml::Spanned;

use super::health::CheckPlan;
use super::proxy::{is_proxied, is_word};
use super::{Checker, WEIGHT_MAX, port};
use crate::config::ManyPorts;
use crate::config::Server;
use crate::config::clash::{misfit, unusable};
use crate::config::raw::{RawServer, RawService};
use crate::text::Diagnostic;

/// The settings of a service that its servers inherit.
pub(super) struct ServerDefaults {
    pub(super) forward: Option<Forwarding>,
    pub(super) tunnel: Option<Tunnel>,
    pub(super) check: Option<CheckPlan>,
}

impl Checker<'_> {
    pub(super) fn server(
        &mut self,
        server: &Spanned<RawServer>,
        service: &RawService,
        id: &ServiceId,
        defaults: &ServerDefaults,
    ) -> Option<Server> {
        let span = server.span();
        let raw = server.get_ref();
        let weight = self.number(raw.weight.as_ref(), "weight", 0..=WEIGHT_MAX);
        let (upper, lower) = self.thresholds(raw);
        let own_check = raw
            .check
            .as_ref()
            .map(|check| self.check_plan(check, Some(id)));
        let method = self.method(raw, service, &span, defaults);
        let Some(text) = &raw.address else {
            self.missing(
                &span,
                "`address` of the server",
                "add its address and port: address = \"10.0.0.11:80\"",
            );
            return None;
        };
        let address = self.socket_address(text, Some(port(id)))?;
        self.usable(text.span(), address.ip(), "server")?;
        let method = method?;
        let forward = raw.forward.as_ref().or(service.forward.as_ref());
        let place = forward.map_or_else(|| text.span(), Spanned::span);
        self.sees_answers(service, method, &place)?;
        self.fits(text, address, service, id, method)?;
        let family = Family::of(&address.ip());
        self.fits_full_nat(&text.span(), family, service, method)?;
        let (plan, at) = match (&raw.check, &own_check) {
            (Some(raw), Some(own)) => (own.as_ref(), raw.span()),
            _ => (defaults.check.as_ref(), text.span()),
        };
        let mut config = ServerConfig::new(1, method);
        config.weight = i32::try_from(weight.unwrap_or(1)).unwrap_or(1);
        config.upper = u32::try_from(upper.unwrap_or(0)).unwrap_or(0);
        config.lower = u32::try_from(lower.unwrap_or(0)).unwrap_or(0);
        config.tunnel = self.server_tunnel(raw, forward, method, defaults);
        Some(Server {
            line: self.line(&span),
            address,
            config,
            check: plan.and_then(|plan| {
                let check = self.check(plan, id, method, service)?;
                let bound = check.of(address);
                if let Err(misfit) = &bound {
                    self.report(Diagnostic::error(at, misfit.title).help(misfit.help));
                }
                bound.ok()
            }),
        })
    }

    /// Reads `max_connections` and `resume_below`. Reports a `resume_below` above
    /// `max_connections`.
    fn thresholds(&mut self, raw: &RawServer) -> (Option<i64>, Option<i64>) {
        let bound = 0..=i64::from(i32::MAX);
        let upper = self.number(
            raw.max_connections.as_ref(),
            "`max_connections`",
            bound.clone(),
        );
        let lower = self.number(raw.resume_below.as_ref(), "`resume_below`", bound);
        if let (Some(at), Some(lower)) = (&raw.resume_below, lower)
            && lower > upper.unwrap_or(0)
        {
            let title = format!(
                "`resume_below` ({lower}) is above `max_connections` ({})",
                upper.unwrap_or(0)
            );
            let finding = Diagnostic::error(at.span(), title);
            self.report(match &raw.max_connections {
                Some(upper) => finding.context(upper.span(), "the maximum number of connections").help(
                    "a server gets connections again below `resume_below`, which must be at most `max_connections`",
                ),
                None => {
                    finding.help("also set `max_connections`: the number of connections at which the server gets no new ones")
                }
            });
        }
        (upper, lower)
    }

    /// Returns the forwarding method: the server's own, or the service's. Returns `None` if it is
    /// missing or invalid, which is reported.
    fn method(
        &mut self,
        raw: &RawServer,
        service: &RawService,
        span: &Range<usize>,
        defaults: &ServerDefaults,
    ) -> Option<Forwarding> {
        if let Some(own) = &raw.forward {
            return match is_word(own) == is_proxied(service) {
                true => self.forward(raw.forward.as_ref()),
                false => {
                    self.mixed(own, service.forward.as_ref());
                    None
                }
            };
        }
        if service.forward.is_none() {
            self.missing(
                span,
                "`forward` of the server and of its service",
                "add forward = \"nat\", \"dr\", \"tun\", \"fullnat\" or \"proxy\" to the service",
            );
        }
        defaults.forward
    }

    /// Reads the encapsulation of packets to a server: the server's own tunnel, the service's or
    /// IPIP. Reports a server's tunnel if its forwarding method is not `tun`.
    fn server_tunnel(
        &mut self,
        raw: &RawServer,
        forward: Option<&Spanned<String>>,
        method: Forwarding,
        defaults: &ServerDefaults,
    ) -> Tunnel {
        let own = raw.tunnel.as_ref().and_then(|tunnel| self.tunnel(tunnel));
        if method != Forwarding::Tunnel {
            if let Some(tunnel) = &raw.tunnel {
                self.tunnel_without_tun(tunnel, forward);
            }
            return Tunnel::default();
        }
        own.or(defaults.tunnel).unwrap_or_default()
    }

    /// Returns `None` if `method` is full NAT and the servers of a service cannot use it, and reports
    /// the reason.
    pub(super) fn fits_full_nat(
        &mut self,
        at: &Range<usize>,
        family: Family,
        service: &RawService,
        method: Forwarding,
    ) -> Option<()> {
        if method != Forwarding::FullNat {
            return Some(());
        }
        let local = self.local.as_ref();
        if local.is_some_and(|local| !local.iter().any(|addr| Family::of(addr) == family))
            || local.is_none()
        {
            let kind = if family == Family::V4 { "IPv4" } else { "IPv6" };
            self.report(
                Diagnostic::error(at.clone(), format!("full NAT needs an {kind} local address")).help(
                    "add local_addresses = [\"...\"] to [dataplane]: addresses of this host, or free ones for which the dataplane will answer",
                ),
            );
            return None;
        }
        if let Some(one) = service.one_packet.as_ref().filter(|one| *one.get_ref()) {
            self.report(
                Diagnostic::error(
                    one.span(),
                    "full NAT tracks connections, which excludes one-packet scheduling",
                )
                .context(at.clone(), "a server with full NAT")
                .help("remove `one_packet`, or set forward = \"nat\""),
            );
            return None;
        }
        Some(())
    }

    /// Checks whether a service can use the server at `address` with `method`. Otherwise reports
    /// the reason, and returns `None`.
    fn fits(
        &mut self,
        text: &Spanned<String>,
        address: SocketAddr,
        service: &RawService,
        id: &ServiceId,
        method: Forwarding,
    ) -> Option<()> {
        let Some(misfit) = misfit(id, ManyPorts::of(service).is_some(), address, method) else {
            return Some(());
        };
        let mut finding = Diagnostic::error(text.span(), misfit.title)
            .label(misfit.label)
            .help(misfit.help);
        if let (Some(words), Some(vip)) = (misfit.vip, &service.address) {
            finding = finding.context(vip.span(), words);
        }
        self.report(finding);
        None
    }

    /// Reads an address with its port; `default_port` if the text has no port. Returns `None` for
    /// an invalid or ambiguous text, or without any port, which is reported.
    pub(super) fn socket_address(
        &mut self,
        text: &Spanned<String>,
        default_port: Option<u16>,
    ) -> Option<SocketAddr> {
        let word = text.get_ref().trim();
        if let Ok(address) = word.parse::<SocketAddr>() {
            return Some(address);
        }
        let bare = word.trim_start_matches('[').trim_end_matches(']');
        if let Ok(ip) = bare.parse::<IpAddr>() {
            // `2001:db8::1:443` is a valid address, but the operator almost certainly means an
            // address and a port.
            let last = bare.rsplit_once(':');
            if let (Some((before, port)), None) = (last, word.strip_prefix('['))
                && let (Ok(before), Ok(port)) = (before.parse::<Ipv6Addr>(), port.parse::<u16>())
                && port >= 10
            {
                self.report(
                    Diagnostic::error(text.span(), format!("`{word}` is ambiguous"))
                        .help(format!(
                            "write \"[{before}]:{port}\" for the port {port} of {before}, or \"[{ip}]\" for that address{}",
                            if default_port.is_some() { "" } else { " with its port after it" }
                        )),
                );
                return None;
            }
            if let Some(port) = default_port {
                return Some(SocketAddr::new(ip, port));
            }
            self.report(
                Diagnostic::error(text.span(), format!("`{word}` has no port")).help(format!(
                    "write it as \"{}\" (port 0 accepts every port and needs persistence)",
                    SocketAddr::new(ip, 80)
                )),
            );
            return None;
        }
        let (title, help) = no_address(word);
        self.report(Diagnostic::error(text.span(), title).help(help));
        None
    }

    /// Checks whether `ip` can be the address of a `what` (as in `ip_vs_new_dest`). Otherwise
    /// reports the reason, and returns `None`.
    pub(super) fn usable(&mut self, span: Range<usize>, ip: IpAddr, what: &str) -> Option<()> {
        if what == "VIP" && ip.is_loopback() {
            self.report(
                Diagnostic::error(span, format!("no client can reach the VIP {ip}")).help(
                    "packets to a loopback address do not leave their host; use another address",
                ),
            );
            return None;
        }
        if let Some((title, help)) = unusable(ip, what) {
            self.report(Diagnostic::error(span, title).help(help));
            return None;
        }
        // As in the kernel (`ip_vs_new_dest`), which accepts the first address of a network.
        if what != "VIP"
            && self
                .facts
                .is_some_and(|facts| facts.addresses.is_broadcast(ip))
        {
            self.report(
                Diagnostic::error(
                    span,
                    format!("{ip} is the broadcast address of a network of this host"),
                )
                .help("use a unicast address; the dataplane refuses this one"),
            );
            return None;
        }
        Some(())
    }
}

/// The reason why `word` is not an address with a port, and the fix.
pub(super) fn no_address(word: &str) -> (String, &'static str) {
    let general = || format!("`{word}` is not an address and a port");
    let (host, port) = match word.rsplit_once(':') {
        // Several colons without brackets belong to an IPv6 address.
        Some((host, port)) if !host.contains(':') || host.starts_with('[') => (host, Some(port)),
        _ => (word, None),
    };
    let octets: Vec<&str> = host.split('.').collect();
    if octets.len() == 4 && octets.iter().all(|octet| digits(octet)) {
        if let Some(octet) = octets.iter().find(|octet| octet.parse::<u8>().is_err()) {
            return (
                format!("{octet} in `{word}` is not a part of an IPv4 address"),
                "each of the four numbers is between 0 and 255",
            );
        }
        if octets
            .iter()
            .any(|octet| octet.len() > 1 && octet.starts_with('0'))
        {
            return (
                format!("`{word}` has a number with a leading zero"),
                "write it without the zero: some programs read such numbers as octal",
            );
        }
    }
    if let Some(port) = port
        && digits(port)
        && port.parse::<u16>().is_err()
    {
        return (
            format!("{port} in `{word}` is not a port"),
            "ports are between 1 and 65535",
        );
    }
    let named = host.chars().any(char::is_alphabetic) && !host.contains(':');
    let help = if named {
        "names are not resolved here, so that a file always has the same meaning; write the address: \"192.0.2.10:80\""
    } else {
        "write \"192.0.2.10:80\" or \"[2001:db8::1]:443\""
    };
    (general(), help)
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use crate::config::{Config, Files};
    use crate::facts::Facts;

    #[test]
    fn broadcast_address_of_network_of_this_host_is_refused_as_server() {
        let facts = Facts::with_broadcast(IpAddr::from([10, 0, 0, 255]));
        let check = |server: &str, facts: Option<&Facts>| {
            let text = format!(
                "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
                 [[service.server]]\naddress = \"{server}:80\"\n"
            );
            Config::read("lvsd.toml", &text, Files::from("lvsd.toml"), facts).map(|_| ())
        };
        check("10.0.0.0", Some(&facts)).expect("the first address of a network is accepted");
        check("10.0.0.255", None).expect("the address is accepted for another host");
        let message = check("10.0.0.255", Some(&facts))
            .expect_err("the broadcast address was accepted")
            .to_string();
        assert!(
            message.contains("10.0.0.255 is the broadcast address of a network of this host"),
            "no `10.0.0.255 is the broadcast address of a network of this host` in {message}"
        );
    }
}
