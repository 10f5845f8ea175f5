//! Synchronisation with other directors.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use lvs_core::api::{SyncDaemon, SyncRole};
use lvs_core::sync::bulk::PEERS_MAX;
use lvs_core::{Family, ServiceKey};
use toml::Spanned;

use super::Checker;
use super::engine::is_interface;
use crate::config::diagnostic::Diagnostic;
use crate::config::raw::RawSync;
use crate::config::{Peers, Service};

/// The longest payload of a datagram that ipvsadm takes.
const MAXLEN_MAX: i64 = 65_507;

/// The longest time that an engine waits for other directors.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// How long their services and servers may differ.
const ALARM: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(86_400);

/// An address with or without a port.
fn place(text: &str) -> Option<SocketAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let ip = bare.unwrap_or(text).parse::<IpAddr>();
    ip.map_or_else(|_| text.parse().ok(), |ip| Some((ip, 0).into()))
}

impl Checker<'_> {
    /// The daemons that speak IPVS's protocol; `None` if there is nothing about them.
    pub(super) fn sync(&mut self, spanned: &Spanned<RawSync>) -> Option<Vec<SyncDaemon>> {
        let raw = spanned.get_ref();
        if raw.peers.is_some() && raw.interface.is_none() {
            let alone = [
                ("role", raw.role.as_ref().map(Spanned::span)),
                ("group", raw.group.as_ref().map(Spanned::span)),
            ];
            for (key, span) in alone {
                if let Some(span) = span {
                    let title = format!("`{key}` is about multicast, and there is no interface");
                    self.report(
                        Diagnostic::error(span, title).help(
                            "add interface = \"...\", or leave it out: `peers` needs neither",
                        ),
                    );
                }
            }
            return None;
        }
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
        Some(roles.iter().map(daemon).collect())
    }

    /// Directors of this kind, as the engine's options name them.
    pub(super) fn peers(&mut self, spanned: &Spanned<RawSync>) -> Option<Peers> {
        let raw = spanned.get_ref();
        let Some(peers) = &raw.peers else {
            for (key, span) in [
                ("key_file", raw.key_file.as_ref().map(Spanned::span)),
                ("listen", raw.listen.as_ref().map(Spanned::span)),
                ("wait", raw.wait.as_ref().map(Spanned::span)),
                ("alarm", raw.alarm.as_ref().map(Spanned::span)),
                ("tell", raw.tell.as_ref().map(Spanned::span)),
            ] {
                if let Some(span) = span {
                    let title = format!("`{key}` says nothing without peers");
                    self.report(
                        Diagnostic::error(span, title)
                            .help("add peers = [\"...\"], or leave it out"),
                    );
                }
            }
            return None;
        };
        let mut seen = HashSet::new();
        for text in &peers.get_ref().0 {
            match place(text) {
                Some(addr) if seen.insert(addr.ip()) => {}
                Some(addr) => self.report(
                    Diagnostic::error(peers.span(), format!("{} is named twice", addr.ip()))
                        .help("name each of the other directors once"),
                ),
                None => self.report(
                    Diagnostic::error(peers.span(), format!("`{text}` is not an address"))
                        .help("write 192.0.2.2, 192.0.2.2:8848 or [2001:db8::2]:8848"),
                ),
            }
        }
        if seen.is_empty() || seen.len() > PEERS_MAX {
            self.report(
                Diagnostic::error(peers.span(), format!("there are {} peers", seen.len()))
                    .help(format!("name 1 to {PEERS_MAX} directors")),
            );
        }
        if let Some(listen) = raw
            .listen
            .as_ref()
            .filter(|text| place(text.get_ref()).is_none())
        {
            let title = format!("`{}` is not an address", listen.get_ref());
            self.report(
                Diagnostic::error(listen.span(), title)
                    .help("write an address of this host: 192.0.2.1 or 192.0.2.1:8848"),
            );
        }
        if let Some(wait) = raw.wait.as_ref().filter(|wait| wait.get_ref().0 > WAIT_MAX) {
            self.report(
                Diagnostic::error(wait.span(), "`wait` is out of range")
                    .help("give at most \"1h\"; \"0s\" waits for nobody"),
            );
        }
        if let Some(alarm) = raw
            .alarm
            .as_ref()
            .filter(|alarm| !ALARM.contains(&alarm.get_ref().0))
        {
            self.report(
                Diagnostic::error(alarm.span(), "`alarm` is out of range")
                    .help("give \"1s\" to \"1d\""),
            );
        }
        let tell = self.one_of(raw.tell.as_ref(), &["all", "exceptions"]);
        let Some(key_file) = &raw.key_file else {
            self.report(
                Diagnostic::error(spanned.span(), "[sync] has peers and no key_file").help(
                    "add key_file = \"/etc/lvs/sync.key\", the same file on all directors: openssl rand -hex 32",
                ),
            );
            return None;
        };
        Some(Peers {
            addresses: peers.get_ref().0.clone(),
            key_file: key_file.get_ref().clone(),
            listen: raw.listen.as_ref().map(|text| text.get_ref().clone()),
            wait: raw.wait.as_ref().map(|wait| wait.get_ref().0),
            alarm: raw.alarm.as_ref().map(|alarm| alarm.get_ref().0),
            tell,
        })
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
