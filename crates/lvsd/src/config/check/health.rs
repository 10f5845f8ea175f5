//! Checks of real servers.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use lvs_core::api::ServiceId;
use toml::Spanned;

use super::Checker;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::{RawCheck, RawCheckTable, Whole};
use crate::config::{Check, CheckKind};

impl Checker<'_> {
    /// The check of one server; `None` if there is none or it is wrong. `at` is where a missing port is shown.
    pub(super) fn check(
        &mut self,
        raw: &Spanned<RawCheck>,
        id: &ServiceId,
        server: SocketAddr,
        at: &Range<usize>,
    ) -> Option<Check> {
        let before = self.findings.len();
        let table = match raw.get_ref() {
            RawCheck::Word(word) if word == "none" => return None,
            RawCheck::Word(word) => {
                self.once(
                    Diagnostic::error(raw.span(), format!("unknown check `{word}`")).help(
                        "write \"none\", or a table: check = { type = \"tcp\", interval = \"5s\" }",
                    ),
                );
                return None;
            }
            RawCheck::Table(table) => table,
        };
        self.check_table(table, raw, id);
        let port_given = table
            .port
            .as_ref()
            .and_then(|p| u16::try_from(p.get_ref().0).ok());
        let target = SocketAddr::new(server.ip(), port_given.unwrap_or(server.port()));
        if target.port() == 0 {
            self.once(
                Diagnostic::error(at.clone(), "the check has no port to connect to")
                    .help("the server has no port of its own; add `port` to the check"),
            );
        }
        if self.findings[before..]
            .iter()
            .any(|d| d.severity == crate::config::Severity::Error)
        {
            return None;
        }
        let or = |v: &Option<Spanned<crate::config::raw::RawDuration>>, default: u64| {
            v.as_ref()
                .map_or(Duration::from_secs(default), |d| d.get_ref().0)
        };
        let count = |v: &Option<Spanned<Whole>>, default: u32| {
            v.as_ref()
                .and_then(|n| u32::try_from(n.get_ref().0).ok())
                .unwrap_or(default)
        };
        Some(Check {
            kind: CheckKind::Tcp,
            target,
            interval: or(&table.interval, 5),
            timeout: or(&table.timeout, 2),
            rise: count(&table.rise, 2),
            fall: count(&table.fall, 3),
        })
    }

    fn check_table(&mut self, table: &RawCheckTable, raw: &Spanned<RawCheck>, id: &ServiceId) {
        match &table.kind {
            Some(kind) if kind.get_ref() == "tcp" => {}
            Some(kind) => self.once(
                Diagnostic::error(
                    kind.span(),
                    format!("unknown type of check `{}`", kind.get_ref()),
                )
                .help("this version knows: tcp"),
            ),
            None if self.complete => self.once(
                Diagnostic::error(raw.span(), "`type` of the check is missing")
                    .help("add type = \"tcp\""),
            ),
            None => {}
        }
        for (what, value) in [("interval", &table.interval), ("timeout", &table.timeout)] {
            if let Some(value) = value
                && value.get_ref().0.is_zero()
            {
                self.once(
                    Diagnostic::error(value.span(), format!("`{what}` of a check cannot be 0"))
                        .help("give some time, such as \"2s\""),
                );
            }
        }
        for (what, value) in [("rise", &table.rise), ("fall", &table.fall)] {
            if let Some(value) = value
                && !(1..=1000).contains(&value.get_ref().0)
            {
                self.once(
                    Diagnostic::error(value.span(), format!("`{what}` is out of range"))
                        .help("give a number of checks, 1 to 1000"),
                );
            }
        }
        if let Some(port) = &table.port {
            if !(1..=65_535).contains(&port.get_ref().0) {
                self.once(
                    Diagnostic::error(port.span(), "the port is out of range")
                        .help("give a port, 1 to 65535"),
                );
            }
        } else if matches!(id, ServiceId::Udp { .. } | ServiceId::Sctp { .. }) {
            self.once(
                Diagnostic::warning(raw.span(), "a TCP check of a service that is not TCP")
                    .help("give the check a `port` on which the servers take TCP connections, if it is meant"),
            );
        }
        let interval = table
            .interval
            .as_ref()
            .map_or(Duration::from_secs(5), |d| d.get_ref().0);
        let timeout = table
            .timeout
            .as_ref()
            .map_or(Duration::from_secs(2), |d| d.get_ref().0);
        if interval < timeout && !interval.is_zero() {
            let at = table
                .timeout
                .as_ref()
                .or(table.interval.as_ref())
                .map_or(raw.span(), Spanned::span);
            self.once(
                Diagnostic::warning(at, "a check may take longer than the interval between two")
                    .help("the next one then waits; make `timeout` at most `interval`"),
            );
        }
    }
}
