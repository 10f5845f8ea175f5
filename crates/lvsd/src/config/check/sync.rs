//! Synchronisation with other directors.

use std::net::IpAddr;

use lvs_core::api::{SyncDaemon, SyncRole};
use toml::Spanned;

use super::Checker;
use super::engine::is_interface;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::RawSync;

/// The longest payload of a datagram that ipvsadm takes.
const MAXLEN_MAX: i64 = 65_507;

impl Checker<'_> {
    pub(super) fn sync(&mut self, spanned: &Spanned<RawSync>) -> Vec<SyncDaemon> {
        let raw = spanned.get_ref();
        let role = self.one_of(raw.role.as_ref(), &["master", "backup", "both"]);
        let roles: &[SyncRole] = match role.as_deref() {
            Some("master") => &[SyncRole::Master],
            Some("backup") => &[SyncRole::Backup],
            _ => &[SyncRole::Master, SyncRole::Backup],
        };
        let interface = match &raw.interface {
            Some(name) if is_interface(name.get_ref()) => name.get_ref().clone(),
            Some(name) => {
                let title = format!("`{}` is not the name of an interface", name.get_ref());
                self.report(
                    Diagnostic::error(name.span(), title)
                        .help("`ip link` lists them; an address is not one"),
                );
                String::new()
            }
            None => {
                self.report(
                    Diagnostic::error(spanned.span(), "[sync] has no interface")
                        .help("add interface = \"...\": the one that leads to the other directors"),
                );
                String::new()
            }
        };
        let group = raw.group.as_ref().and_then(|group| {
            let text = group.get_ref();
            let parsed = text.parse::<IpAddr>().ok().filter(IpAddr::is_multicast);
            if parsed.is_none() {
                let title = format!("`{text}` is not a multicast group");
                self.report(
                    Diagnostic::error(group.span(), title)
                        .help("give one like 224.0.0.81 or ff02::81, or leave it out"),
                );
            }
            parsed
        });
        let syncid = self.number(raw.syncid.as_ref(), "syncid", 0..=255);
        let port = self.number(raw.port.as_ref(), "port", 1..=65_535);
        let ttl = self.number(raw.ttl.as_ref(), "time to live", 1..=255);
        let maxlen = self.number(raw.maxlen.as_ref(), "length of messages", 1..=MAXLEN_MAX);
        let daemon = |&role: &SyncRole| SyncDaemon {
            role,
            interface: interface.clone(),
            syncid: syncid.and_then(|n| u8::try_from(n).ok()).unwrap_or(0),
            maxlen: maxlen.and_then(|n| u16::try_from(n).ok()),
            group,
            port: port.and_then(|n| u16::try_from(n).ok()),
            ttl: ttl.and_then(|n| u8::try_from(n).ok()),
        };
        roles.iter().map(daemon).collect()
    }
}
