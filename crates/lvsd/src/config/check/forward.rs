//! How packets get to the real servers: the forwarding method, and what is wrapped around them.

use std::ops::Range;

use lvs_core::sched::BUILT_IN;
use lvs_core::{Forwarding, Tunnel, TunnelChecksum};
use toml::Spanned;

use super::Checker;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::{RawService, RawTunnel, RawTunnelTable};

/// A type of tunnel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Ipip,
    Gre,
    Gue,
}

impl Checker<'_> {
    pub(super) fn forward(&mut self, raw: Option<&Spanned<String>>) -> Option<Forwarding> {
        // The words of ipvsadm's and keepalived's users are known, so that the remedy is exact.
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
                    .help(format!("here it is called \"{word}\"")),
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
            ],
        );
        if let (Some(Forwarding::Route), Some(value), Some(backend)) = (method, raw, &self.routed) {
            let finding = Diagnostic::error(
                value.span(),
                "direct routing needs frames, and the backend `tun` has packets only",
            )
            .context(backend.clone(), "the backend")
            .help("set forward = \"nat\" or \"tun\", or remove `backend`");
            self.report(finding);
        }
        method
    }

    /// A scheduler that goes by the servers' answers needs them to pass through the director.
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
            .label(
                "their answers do not pass through the director, which measures how soon they come",
            )
            .context(scheduler.span(), "the scheduler")
            .help("set forward = \"nat\", or another scheduler, such as \"wlc\""),
        );
        None
    }

    /// What is wrapped around packets to servers that are reached by tunnels.
    pub(super) fn tunnel(&mut self, raw: &Spanned<RawTunnel>) -> Option<Tunnel> {
        let nothing = RawTunnelTable::default();
        let (table, word) = match raw.get_ref() {
            RawTunnel::Word(word) => (&nothing, Some(Spanned::new(raw.span(), word.clone()))),
            RawTunnel::Table(table) => (table, table.kind.clone()),
        };
        if word.is_none() && self.complete {
            self.report(
                Diagnostic::error(raw.span(), "`type` of the tunnel is missing")
                    .help("add type = \"ipip\", \"gre\" or \"gue\""),
            );
        }
        let port = self.number(table.port.as_ref(), "port", 1..=i64::from(u16::MAX));
        let checksum = self.tunnel_checksum(table.checksum.as_ref());
        let types = [("ipip", Type::Ipip), ("gre", Type::Gre), ("gue", Type::Gue)];
        let kind = self.word(word.as_ref(), &types)?;
        self.tunnel_port(table, kind, raw.span())?;
        self.tunnel_checksum_fits(table, kind, checksum)?;
        Some(match kind {
            Type::Ipip => Tunnel::Ipip,
            Type::Gre => Tunnel::Gre {
                checksum: checksum?,
            },
            Type::Gue => Tunnel::Gue {
                port: u16::try_from(port?).ok()?,
                checksum: checksum?,
            },
        })
    }

    /// The checksum in the words of the file; `None` if they are wrong.
    fn tunnel_checksum(&mut self, raw: Option<&Spanned<String>>) -> Option<TunnelChecksum> {
        let Some(value) = raw else {
            return Some(TunnelChecksum::None);
        };
        let known = match value.get_ref().trim_start_matches("--tun-") {
            "nocsum" => Some("none"),
            "csum" => Some("full"),
            "remcsum" => Some("remote"),
            _ => None,
        };
        if let Some(word) = known {
            let title = format!("unknown checksum of a tunnel `{}`", value.get_ref());
            self.report(
                Diagnostic::error(value.span(), title)
                    .help(format!("here it is called \"{word}\"")),
            );
            return None;
        }
        self.word(
            raw,
            &[
                ("none", TunnelChecksum::None),
                ("full", TunnelChecksum::Full),
                ("remote", TunnelChecksum::Remote),
            ],
        )
    }

    /// GUE needs a port, and no other type has one.
    fn tunnel_port(
        &mut self,
        table: &RawTunnelTable,
        kind: Type,
        span: Range<usize>,
    ) -> Option<()> {
        match (&table.port, kind) {
            (None, Type::Gue) => {
                if self.complete {
                    self.report(
                        Diagnostic::error(span, "`port` of the GUE tunnel is missing").help(
                            "write { type = \"gue\", port = 6080 } with the port of `ip fou add port 6080 gue` on the real server",
                        ),
                    );
                }
                None
            }
            (Some(port), Type::Ipip | Type::Gre) => {
                self.report(
                    Diagnostic::error(port.span(), "only a GUE tunnel has a port")
                        .help("remove `port`, or set type = \"gue\""),
                );
                None
            }
            _ => Some(()),
        }
    }

    /// IPIP has no header of its own for a checksum, GRE none for a remote one.
    fn tunnel_checksum_fits(
        &mut self,
        table: &RawTunnelTable,
        kind: Type,
        checksum: Option<TunnelChecksum>,
    ) -> Option<()> {
        let Some(at) = table.checksum.as_ref().map(Spanned::span) else {
            return Some(());
        };
        let (title, help) = match (kind, checksum) {
            (Type::Ipip, _) => (
                "an IPIP tunnel has no checksum of its own",
                "remove `checksum`, or set type = \"gre\" or \"gue\"",
            ),
            (Type::Gre, Some(TunnelChecksum::Remote)) => (
                "only a GUE tunnel has remote checksum offload",
                "write checksum = \"full\", or set type = \"gue\"",
            ),
            _ => return Some(()),
        };
        self.report(Diagnostic::error(at, title).help(help));
        None
    }

    /// Reports a tunnel of a server or a service that nothing goes through.
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
