//! Checks `[sync]`: synchronisation with other directors.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use lvs_api::directors;
use lvs_core::sync::bulk::PEERS_MAX;
use lvs_core::sync::{SyncDaemon, SyncRole};
use lvs_core::{Family, ServiceKey};
use toml::Spanned;

use super::Checker;
use super::dataplane::CommandLine;
use super::dataplane::is_interface;
use crate::config::raw::{RawSyncIpvs, RawSyncPeers};
use crate::config::{Peers, Service};
use crate::text::Diagnostic;

/// Maximum length in bytes of the payload of a datagram, as in ipvsadm.
const MAXLEN_MAX: i64 = 65_507;

/// The longest time that a dataplane may wait for other directors.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// Limits of the time for which services and servers of two directors may differ without an alarm.
const ALARM: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(86_400);

impl Checker<'_> {
    /// Reads `[sync.ipvs]`: the settings of the synchronisation daemons that use IPVS's protocol.
    pub(super) fn sync(&mut self, spanned: &Spanned<RawSyncIpvs>) -> Vec<SyncDaemon> {
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
                        .help("`ip link` lists the interfaces; an address is not one"),
                );
                String::new()
            }
            None => {
                self.report(
                    Diagnostic::error(spanned.span(), "[sync.ipvs] has no interface").help(
                        "add interface = \"...\": the interface on the network of the other directors",
                    ),
                );
                String::new()
            }
        };
        let group = raw.group.as_ref().and_then(|group| {
            let text = group.get_ref();
            let parsed = text.parse::<IpAddr>().ok().filter(IpAddr::is_multicast);
            if parsed.is_none() {
                let title = format!("`{text}` is not a multicast group");
                self.report(Diagnostic::error(group.span(), title).help(
                    "use a multicast address such as 224.0.0.81 or ff02::81, or remove this key",
                ));
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

    /// Returns the peers in the form of the dataplane's options, and reports errors in them. `None`
    /// without `addresses` or `key_file`.
    pub(super) fn peers(&mut self, spanned: &Spanned<RawSyncPeers>) -> Option<Peers> {
        let raw = spanned.get_ref();
        let Some(peers) = &raw.addresses else {
            self.missing(
                &spanned.span(),
                "`addresses` of [sync.peers]",
                "name the other directors: addresses = [\"192.0.2.2\"]",
            );
            return None;
        };
        let listen = raw.listen.as_ref().and_then(|text| {
            let read = directors::address(text.get_ref());
            if let Err(why) = read.clone() {
                let title = format!("`{}` is not a usable address", text.get_ref());
                self.report(
                    Diagnostic::error(text.span(), title)
                        .label(why)
                        .help("write an address of this host: 192.0.2.1 or 192.0.2.1:8848"),
                );
            }
            read.ok()
        });
        let mut seen = HashSet::new();
        let mut addresses = Vec::new();
        for text in &peers.get_ref().0 {
            let finding = match directors::peer(text) {
                Err(why) => {
                    let title = format!("`{text}` is not an address of another director");
                    Diagnostic::error(peers.span(), title)
                        .label(why)
                        .help("write 192.0.2.2, 192.0.2.2:8848 or [2001:db8::2]:8848")
                }
                Ok(addr) if !seen.insert(addr.ip()) => {
                    Diagnostic::error(peers.span(), format!("{} is named twice", addr.ip()))
                        .help("name each peer once")
                }
                Ok(addr) if self.is_own(addr, listen) => {
                    let title = format!("{} is this director's own address", addr.ip());
                    Diagnostic::error(peers.span(), title).help("name only the other directors")
                }
                Ok(addr) => {
                    addresses.push(addr);
                    continue;
                }
            };
            self.report(finding);
        }
        let count = peers.get_ref().0.len();
        if !(1..=PEERS_MAX).contains(&count) {
            self.report(
                Diagnostic::error(peers.span(), format!("{count} peers are configured"))
                    .help(format!("name 1 to {PEERS_MAX} directors")),
            );
        }
        let wait = raw.connect_timeout.as_ref();
        if let Some(wait) = wait.filter(|wait| wait.get_ref().0 > WAIT_MAX) {
            self.report(
                Diagnostic::error(wait.span(), "`connect_timeout` is out of range")
                    .help("use at most \"1h\"; with \"0s\" the dataplane does not wait"),
            );
        }
        let alarm = raw.mismatch_alarm_after.as_ref();
        if let Some(alarm) = alarm.filter(|alarm| !ALARM.contains(&alarm.get_ref().0)) {
            self.report(
                Diagnostic::error(alarm.span(), "`mismatch_alarm_after` is out of range")
                    .help("use a time from \"1s\" to \"1d\""),
            );
        }
        let Some(key_file) = &raw.key_file else {
            self.report(
                Diagnostic::error(spanned.span(), "[sync.peers] has no key_file").help(
                    "add key_file = \"/etc/lvs/sync.key\", the same file on all directors: openssl rand -hex 32",
                ),
            );
            return None;
        };
        let mut options = CommandLine::default();
        options.add("--sync-peer", peers.get_ref().0.iter().cloned());
        options.add("--sync-key", [key_file.get_ref().clone()]);
        let listen = raw.listen.as_ref();
        options.add("--sync-listen", listen.map(|text| text.get_ref().clone()));
        for (name, time) in [("--sync-wait", wait), ("--sync-alarm", alarm)] {
            options.add(
                name,
                time.map(|time| time.get_ref().0.as_secs().to_string()),
            );
        }
        let all = Peers {
            addresses,
            options: options.0,
            key_file: key_file.get_ref().clone(),
        };
        if self.facts.is_some()
            && let Some(why) = all.unusable_key()
        {
            self.report(
                Diagnostic::error(key_file.span(), why)
                    .label("the dataplane does not start without a usable key")
                    .help("all directors need the same key: openssl rand -hex 32, once"),
            );
        }
        Some(all)
    }

    /// Whether an address is this director's own. A loopback address with another port is not,
    /// because it may be the end of a tunnel to another director.
    fn is_own(&self, peer: SocketAddr, listen: Option<SocketAddr>) -> bool {
        let ip = peer.ip();
        if ip.is_loopback() {
            let listen = listen.unwrap_or_else(|| (ip, 0).into());
            return directors::with_port(peer).port() == directors::with_port(listen).port();
        }
        let here = self.facts.is_some_and(|facts| facts.addresses.has(ip));
        here || listen.is_some_and(|listen| listen.ip() == ip)
    }

    /// Checks that the servers of services without a proxy have the family of their service: a
    /// synchronisation message can contain only one family, so a synchronising dataplane refuses
    /// others.
    pub(super) fn families_beside_sync(&mut self, sync: &Range<usize>, services: &[Service]) {
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
        let at = self.first_line(sync);
        self.report(
            Diagnostic::error(
                place,
                format!("the address family of the server {address} differs from its service's, which synchronisation does not support"),
            )
            .context(at, "the dataplane accepts either this synchronisation or servers of another family")
            .help("use a server address of the same family as the virtual address, or remove [sync.ipvs]"),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use crate::cases::cases;
    use crate::config::Config;
    use crate::facts::Facts;

    /// Checks a configuration on a host that has 192.0.2.1.
    fn here(keys: &str) -> Result<(), String> {
        let text = format!("[sync.peers]\n{keys}\n");
        let facts = Facts::with_address([192, 0, 2, 1].into());
        let path = "lvsd.toml";
        let read = Config::read(path, &text, path.into(), Some(&facts));
        read.map(drop).map_err(|report| report.to_string())
    }

    #[test]
    fn invalid_own_or_repeated_address_of_sync_peer_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("the temporary file can be created");
        std::fs::write(&file, "0123456789abcdef0123456789abcdef\n")
            .expect("the file can be written");
        let key = format!("key_file = {:?}", file.path());
        for peer in [
            "192.0.2.2",
            "192.0.2.2:9",
            "2001:db8::2",
            "[fe80::2%2]:8848",
            "127.0.0.1:9",
        ] {
            here(&format!("addresses = {peer:?}\n{key}")).expect(peer);
        }
        for [peers, listen, words] in cases(
            r#"
                "0.0.0.0" |  | 0.0.0.0 is not the address of a host
                "::" |  | :: is not the address of a host
                "224.0.0.1" |  | a unicast address
                "ff02::1" |  | a unicast address
                "255.255.255.255" |  | a unicast address
                "192.0.2.2:0" |  | port 0 is not valid
                "fe80::2" |  | [fe80::2%2]:8848
                "192.0.2.1" |  | this director's own
                "127.0.0.1" |  | this director's own
                "::1" | listen = "[::]:8848" | this director's own
                "192.0.2.7" | listen = "192.0.2.7:9" | this director's own
                "192.0.2.2" | listen = "224.0.0.1" | a unicast address
                ["192.0.2.2", "::ffff:192.0.2.2"] |  | 192.0.2.2 is named twice
            "#,
        ) {
            let message = here(&format!("addresses = {peers}\n{listen}\n{key}")).expect_err(peers);
            assert!(
                message.contains(words),
                "{peers}: no {words:?} in {message}"
            );
        }
    }

    /// A dataplane would refuse to start with such a key.
    #[test]
    fn sync_key_unusable_by_dataplane_is_refused_unless_file_is_for_another_host() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let with = |name: &str| {
            let path = directory.path().join(name);
            here(&format!("addresses = \"192.0.2.2\"\nkey_file = {path:?}"))
        };
        let write = |name: &str, text: &str, mode: u32| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).expect("the file can be written");
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("the mode is set");
        };
        let long = "0123456789abcdef0123456789abcdef\n";
        write("good", long, 0o600);
        write("open", long, 0o644);
        write("short", "secret\n", 0o600);
        let empty = directory.path().join("directory");
        std::fs::create_dir(&empty).expect("the directory can be created");
        std::fs::set_permissions(&empty, Permissions::from_mode(0o700)).expect("the mode is set");
        write("zeros", &"\0".repeat(64), 0o600);
        with("good").expect("the key is valid");
        for (name, words) in [
            ("open", "chmod 600"),
            ("short", "has 6 characters"),
            ("zeros", "is damaged"),
            ("absent", "cannot read the key"),
            ("directory", "cannot read the key"),
        ] {
            let message = with(name).expect_err(name);
            assert!(
                message.contains(words) && message.contains("does not start"),
                "{name}: no {words:?} or no `does not start` in {message}"
            );
        }
        if rustix::process::geteuid().is_root() {
            let good = directory.path().join("good");
            std::os::unix::fs::chown(&good, Some(65_534), None).expect("root can change the owner");
            let message = with("good").expect_err("the key of another user is accepted");
            assert!(
                message.contains("chown root"),
                "no `chown root` in {message}"
            );
        }
        // If the file is for another host, its key does not have to exist here.
        let text = "[sync.peers]\naddresses = \"192.0.2.2\"\nkey_file = \"/nowhere\"\n";
        Config::from_toml("lvsd.toml", text).expect("the file is valid for another host");
    }

    #[test]
    fn server_of_other_address_family_than_service_is_refused_with_sync_ipvs() {
        let file = |sync: &str, server: &str| {
            let text = format!(
                "{sync}[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"tun\"\n\
                 [[service.server]]\naddress = \"{server}\"\n"
            );
            Config::from_toml("lvsd.toml", &text).map(|_| ())
        };
        let sync = "[sync.ipvs]\ninterface = \"eth1\"\n";
        file("", "[2001:db8::7]:80")
            .expect("a tunnel of the other family is accepted without [sync.ipvs]");
        file(sync, "10.0.0.7:80").expect("a server of the same family is accepted");
        let report =
            file(sync, "[2001:db8::7]:80").expect_err("a server of the other family was accepted");
        let message = report.to_string();
        assert_eq!(report.errors(), 1, "{message}");
        assert!(
            message.contains("of the server [2001:db8::7]:80 differs from its service's"),
            "no `of the server [2001:db8::7]:80 differs from its service's` in {message}"
        );
        assert!(
            message.contains("remove [sync.ipvs]"),
            "no `remove [sync.ipvs]` in {message}"
        );
    }
}
