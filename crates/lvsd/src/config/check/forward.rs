//! Checks the forwarding method, and the headers of tunnels.

use std::ops::Range;

use lvs_core::Forwarding;
use lvs_core::sched::BUILT_IN;
use lvs_core::tunnel::{Tunnel, TunnelChecksum, TunnelType};
use toml::Spanned;

use super::Checker;
use crate::config::raw::{RawService, RawTunnel, RawTunnelTable};
use crate::text::Diagnostic;

/// Tunnel types as text for a fix: `"gre" or "gue"`.
fn names(types: impl Iterator<Item = &'static TunnelType>) -> String {
    let names: Vec<String> = types.map(|kind| format!("\"{}\"", kind.name)).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => {
            format!("{} or {last}", others.join(", "))
        }
        _ => names.concat(),
    }
}

/// The title of a tunnel type with its article: `a GUE`, `an IPIP`.
fn a(kind: &TunnelType) -> String {
    let article = if kind.title.starts_with(['A', 'E', 'I', 'O', 'U']) {
        "an"
    } else {
        "a"
    };
    format!("{article} {}", kind.title)
}

/// The tunnel types for which `what` returns true, as text: `a GUE`.
fn only(what: impl Fn(&TunnelType) -> bool) -> String {
    let types = TunnelType::ALL.iter().filter(|kind| what(kind));
    types.map(|kind| a(kind)).collect::<Vec<_>>().join(" or ")
}

fn types() -> impl Iterator<Item = &'static TunnelType> {
    TunnelType::ALL.iter().copied()
}

impl Checker<'_> {
    pub(super) fn forward(&mut self, raw: Option<&Spanned<String>>) -> Option<Forwarding> {
        // Recognise the words of ipvsadm and keepalived, so that the message can name the exact
        // word of lvsd.
        if let Some(value) = raw {
            let known = match value.get_ref().to_ascii_lowercase().as_str() {
                "masq" | "masquerading" | "-m" => Some("nat"),
                "route" | "gate" | "gatewaying" | "direct" | "-g" => Some("dr"),
                "tunnel" | "ipip" | "-i" => Some("tun"),
                "full-nat" | "full_nat" | "fnat" | "--fullnat" => Some("fullnat"),
                _ => None,
            };
            if let Some(word) = known {
                self.report(
                    Diagnostic::error(
                        value.span(),
                        format!("unknown forwarding method `{}`", value.get_ref()),
                    )
                    .help(format!("write \"{word}\"")),
                );
                return None;
            }
        }
        let method = self.word(
            raw,
            &[
                ("nat", Forwarding::Nat),
                ("dr", Forwarding::Route),
                ("tun", Forwarding::Tunnel),
                ("fullnat", Forwarding::FullNat),
                // With the proxy, both connections are connections of this host, and replies return
                // to it as with NAT.
                ("proxy", Forwarding::Nat),
            ],
        );
        if let (Some(Forwarding::Route), Some(value), Some(backend)) = (method, raw, &self.routed) {
            let finding = Diagnostic::error(
                value.span(),
                "direct routing needs frames, and the backend `tun` has only packets",
            )
            .context(backend.clone(), "the backend")
            .help("set forward = \"nat\" or \"tun\", or remove `backend`");
            self.report(finding);
        }
        method
    }

    /// Checks that replies pass through the director if the scheduler uses their latency. Otherwise
    /// reports this once, and returns `None`.
    pub(super) fn sees_answers(
        &mut self,
        service: &RawService,
        method: Forwarding,
        at: &Range<usize>,
    ) -> Option<()> {
        let Some(scheduler) = &service.scheduler else {
            return Some(());
        };
        let name = scheduler.get_ref();
        let about = BUILT_IN.iter().find(|about| about.name == name);
        if method.translates() || !about.is_some_and(|about| about.needs_replies) {
            return Some(());
        }
        self.once(
            Diagnostic::error(
                at.clone(),
                format!("the scheduler {name} needs servers that are reached by NAT"),
            )
            .label("replies of these servers bypass the director, which therefore cannot measure their response time")
            .context(scheduler.span(), "the scheduler")
            .help("set forward = \"nat\", or another scheduler, such as \"wlc\""),
        );
        None
    }

    /// Reads the encapsulation of packets to servers with `forward = "tun"`. Returns `None` if it
    /// is invalid or incomplete, which is reported.
    pub(super) fn tunnel(&mut self, raw: &Spanned<RawTunnel>) -> Option<Tunnel> {
        let nothing = RawTunnelTable::default();
        let (table, word) = match raw.get_ref() {
            RawTunnel::Word(word) => (&nothing, Some(Spanned::new(raw.span(), word.clone()))),
            RawTunnel::Table(table) => (table, table.kind.clone()),
        };
        if word.is_none() && self.complete {
            self.report(
                Diagnostic::error(raw.span(), "`type` of the tunnel is missing")
                    .help(format!("add type = {}", names(types()))),
            );
        }
        let port = self.number(table.port.as_ref(), "port", 1..=i64::from(u16::MAX));
        let checksum = self.tunnel_checksum(table.checksum.as_ref());
        let known: Vec<_> = types().map(|kind| (kind.name, kind)).collect();
        let kind = self.word(word.as_ref(), &known)?;
        self.tunnel_port(table, kind, raw.span())?;
        self.tunnel_checksum_fits(table, kind, checksum)?;
        let port = match kind.has_port {
            true => u16::try_from(port?).ok()?,
            false => 0,
        };
        Some((kind.tunnel)(port, checksum?))
    }

    /// Reads the checksum by its name in the configuration. `None` if the name is invalid, which is
    /// reported; no checksum without a name.
    fn tunnel_checksum(&mut self, raw: Option<&Spanned<String>>) -> Option<TunnelChecksum> {
        let Some(value) = raw else {
            return Some(TunnelChecksum::None);
        };
        let option = value.get_ref().trim_start_matches("--tun-");
        let all = TunnelChecksum::ALL;
        if let Some(known) = all.iter().find(|checksum| checksum.option() == option) {
            let title = format!("unknown tunnel checksum `{}`", value.get_ref());
            self.report(
                Diagnostic::error(value.span(), title).help(format!("write \"{}\"", known.name())),
            );
            return None;
        }
        let known: Vec<_> = all.iter().map(|&sum| (sum.name(), sum)).collect();
        self.word(raw, &known)
    }

    /// Checks that a tunnel type with a port has one, and that other types have none. Otherwise
    /// reports the error, and returns `None`.
    fn tunnel_port(
        &mut self,
        table: &RawTunnelTable,
        kind: &TunnelType,
        span: Range<usize>,
    ) -> Option<()> {
        match (&table.port, kind.has_port) {
            (None, true) => {
                if self.complete {
                    let TunnelType { name, title, .. } = kind;
                    self.report(
                        Diagnostic::error(span, format!("`port` of the {title} tunnel is missing"))
                            .help(format!(
                                "write {{ type = \"{name}\", port = 6080 }} with the port of `ip fou add port 6080 {name}` on \
                                 the real server"
                            )),
                    );
                }
                None
            }
            (Some(port), false) => {
                let with_port = |kind: &TunnelType| kind.has_port;
                let title = format!("only {} tunnel has a port", only(with_port));
                let types = names(types().filter(|kind| with_port(kind)));
                self.report(
                    Diagnostic::error(port.span(), title)
                        .help(format!("remove `port`, or set type = {types}")),
                );
                None
            }
            _ => Some(()),
        }
    }

    /// Checks that the tunnel type supports this checksum: some types support none, or not all of
    /// them. Otherwise reports the error, and returns `None`.
    fn tunnel_checksum_fits(
        &mut self,
        table: &RawTunnelTable,
        kind: &TunnelType,
        checksum: Option<TunnelChecksum>,
    ) -> Option<()> {
        let Some(at) = table.checksum.as_ref().map(Spanned::span) else {
            return Some(());
        };
        // An invalid checksum was reported already.
        let fits = checksum.is_none_or(|checksum| kind.checksums.contains(&checksum));
        let (title, help) = if kind.checksums.is_empty() {
            let types = names(types().filter(|kind| !kind.checksums.is_empty()));
            (
                format!("{} tunnel has no checksum", a(kind)),
                format!("remove `checksum`, or set type = {types}"),
            )
        } else if !fits {
            let has = |kind: &TunnelType| kind.checksums.contains(&TunnelChecksum::Remote);
            let types = names(types().filter(|kind| has(kind)));
            (
                format!("only {} tunnel has remote checksum offload", only(has)),
                format!("write checksum = \"full\", or set type = {types}"),
            )
        } else {
            return Some(());
        };
        self.report(Diagnostic::error(at, title).help(help));
        None
    }

    /// Reports `tunnel` of a server or service whose forwarding method is not `tun`.
    pub(super) fn tunnel_without_tun(
        &mut self,
        tunnel: &Spanned<RawTunnel>,
        forward: Option<&Spanned<String>>,
    ) {
        let mut finding = Diagnostic::error(
            tunnel.span(),
            "`tunnel` is for servers with forward = \"tun\"",
        )
        .help("set forward = \"tun\", or remove `tunnel`");
        if let Some(forward) = forward {
            finding = finding.context(forward.span(), "the forwarding method");
        }
        self.report(finding);
    }
}
