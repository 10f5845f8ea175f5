//! Synchronisation with other directors.

use std::net::IpAddr;

use lvs_core::api::{SyncDaemon, SyncRole};
use lvs_core::{Family, ServiceKey};
use toml::Spanned;

use super::Checker;
use super::engine::is_interface;
use crate::config::Service;
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

    /// A message has room for one family only, so that an engine refuses servers of another family
    /// than their service's while it synchronises, and the other way round.
    pub(super) fn families_beside_sync(&mut self, sync: &Spanned<RawSync>, services: &[Service]) {
        let other = self.servers.iter().find(|server| {
            let proxied = || {
                let mut all = services.iter();
                all.any(|one| one.id == server.service && one.proxy.is_some())
            };
            let family = ServiceKey::from(server.service).family();
            family != Family::of(&server.address.ip()) && !proxied()
        });
        let Some((address, place)) = other.map(|other| (other.address, other.place.clone())) else {
            return;
        };
        let at = self.first_line(&sync.span());
        self.report(
            Diagnostic::error(
                place,
                format!("the server {address} is not of its service's family, which synchronisation does not carry"),
            )
            .context(at, "the engine takes one of the two")
            .help("reach the server by an address of the family of the virtual one, or remove [sync]"),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn servers_of_another_family_are_refused_beside_synchronisation() {
        let file = |sync: &str, server: &str| {
            let text = format!(
                "{sync}[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"tun\"\n\
                 [[service.server]]\naddress = \"{server}\"\n"
            );
            Config::from_toml("lvsd.toml", &text).map(|_| ())
        };
        let sync = "[sync]\ninterface = \"eth1\"\n";
        file("", "[2001:db8::7]:80").expect("a tunnel of the other family");
        file(sync, "10.0.0.7:80").expect("of the same family");
        let report = file(sync, "[2001:db8::7]:80").expect_err("the engine would refuse it");
        let said = report.render(false);
        assert_eq!(report.errors(), 1, "{said}");
        assert!(
            said.contains("[2001:db8::7]:80 is not of its service's family"),
            "{said}"
        );
        assert!(said.contains("remove [sync]"), "{said}");
    }
}
