//! Checks of a service that lvsd proxies itself.

use std::net::IpAddr;
use std::time::Duration;

use lvs_core::api::ServiceId;
use toml::Spanned;

use super::Checker;
use crate::config::raw::{RawDuration, RawProxy, RawService};
use crate::text::Diagnostic;
use lvs_proxy::Options;
use lvs_proxy::header::Version;

/// The shortest and the longest time that a proxy waits for a connection or for data.
const TIMES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(31 * 86_400);

/// Whether `forward` is `proxy`.
pub(super) fn is_word(forward: &Spanned<String>) -> bool {
    forward.get_ref() == "proxy"
}

/// Whether lvsd proxies the service itself.
pub(super) fn is_proxied(raw: &RawService) -> bool {
    raw.forward.as_ref().is_some_and(is_word)
}

impl Checker<'_> {
    /// Reads the proxy settings of a service, and reports settings that a proxy excludes. Returns
    /// `None` if the service is not proxied.
    pub(super) fn proxy(&mut self, raw: &RawService, id: Option<&ServiceId>) -> Option<Options> {
        let Some(forward) = raw.forward.as_ref().filter(|forward| is_word(forward)) else {
            if let Some(proxy) = &raw.proxy {
                self.report(
                    Diagnostic::error(
                        proxy.span(),
                        "`proxy` is for services with forward = \"proxy\"",
                    )
                    .help("set forward = \"proxy\", or remove `proxy`"),
                );
            }
            return None;
        };
        let at = forward.span();
        let mut impossible = |span: std::ops::Range<usize>, title: &str, help: &str| {
            let finding =
                Diagnostic::error(span, title).context(at.clone(), "the service is proxied");
            self.report(finding.help(help));
        };
        if let Some(vip) = &raw.vip {
            impossible(
                vip.span(),
                "the address of a proxied service must be an address of this host",
                "remove `vip`; listen on an address of this host, on 0.0.0.0 or on [::]",
            );
        }
        if let Some(one) = raw.one_packet.as_ref().filter(|one| *one.get_ref()) {
            impossible(
                one.span(),
                "a proxy assigns clients to servers for some time, which excludes one-packet scheduling",
                "remove `one_packet`",
            );
        }
        let place = raw.address.as_ref().map(Spanned::span);
        let mark = raw.fwmark.as_ref().map(Spanned::span);
        let place = place.or(mark).unwrap_or_else(|| at.clone());
        match id {
            Some(ServiceId::Fwmark { .. }) => impossible(
                place,
                "a proxy listens on one port, and has no marks",
                "write a [[service]] for each address and port",
            ),
            Some(ServiceId::Sctp { .. }) => impossible(
                place,
                "a proxy relays TCP and UDP, and not SCTP",
                "set forward = \"nat\", or another protocol",
            ),
            Some(id) => {
                let ip = id.address();
                let any = ip.is_some_and(|address| address.ip().is_unspecified());
                let datagrams = matches!(id, ServiceId::Udp { .. });
                if ip.is_some_and(|address| address.port() == 0) {
                    impossible(
                        place,
                        "a proxy needs a port to listen at",
                        "write the port after the address",
                    );
                } else if any && datagrams {
                    impossible(
                        place,
                        "replies to datagrams must have the source address to which the request was sent",
                        "write a [[service]] for each address of this host",
                    );
                } else if ip.is_some_and(|address| never(address.ip())) {
                    impossible(
                        place,
                        "no program can listen on this address",
                        "use an address of this host",
                    );
                }
            }
            None => {}
        }
        let datagrams = matches!(id, Some(ServiceId::Udp { .. }));
        Some(self.proxy_options(raw.proxy.as_ref(), datagrams))
    }

    fn proxy_options(&mut self, raw: Option<&Spanned<RawProxy>>, datagrams: bool) -> Options {
        let mut options = Options::default();
        if datagrams {
            options.idle_timeout = Options::IDLE_UDP;
        }
        let Some(raw) = raw.map(Spanned::get_ref) else {
            return options;
        };
        options.send = self.word(
            raw.send.as_ref(),
            &[("v1", Version::V1), ("v2", Version::V2)],
        );
        options.accept = raw.accept.as_ref().is_some_and(|accept| *accept.get_ref());
        let send = raw.send.as_ref().map(Spanned::span);
        let accept = raw.accept.as_ref().map(Spanned::span);
        if let (true, Some(place)) = (datagrams, send.or(accept)) {
            self.report(
                Diagnostic::error(place, "the PROXY protocol is for TCP only")
                    .help("remove `send` and `accept`"),
            );
        }
        let mut time = |value: Option<&Spanned<RawDuration>>, or: Duration| {
            let Some(value) = value else {
                return or;
            };
            let time = value.get_ref().0;
            if !TIMES.contains(&time) {
                self.report(
                    Diagnostic::error(value.span(), "this time of the proxy is out of range")
                        .help("use a time from \"100ms\" to \"31d\""),
                );
            }
            time
        };
        options.connect_timeout = time(raw.connect_timeout.as_ref(), options.connect_timeout);
        options.idle_timeout = time(raw.idle_timeout.as_ref(), options.idle_timeout);
        options
    }

    /// Reports a proxied server of a service that is not proxied, or the reverse.
    pub(super) fn mixed(&mut self, own: &Spanned<String>, service: Option<&Spanned<String>>) {
        let mut finding = Diagnostic::error(
            own.span(),
            "a service is proxied for all of its servers or for none",
        )
        .help("set forward = \"proxy\" for the service, and for none of its servers");
        if let Some(service) = service {
            finding = finding.context(service.span(), "the service's forwarding method");
        }
        self.report(finding);
    }
}

/// Whether no program can listen on the address.
fn never(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_multicast() || ip.to_ipv4_mapped().is_some(),
    }
}
