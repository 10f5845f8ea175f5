//! Checks `[vrrp]`: active and standby directors with keepalived.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use toml::Spanned;

use super::Checker;
use super::dataplane::is_interface;
use crate::config::clash::label;
use crate::config::raw::{OneOrMore, RawConfig, RawVrrp};
use crate::config::{HostAddress, Service, VipMode, Vrrp};
use crate::text::Diagnostic;

/// Limits of the interval of advertisements: VRRP counts centiseconds, in twelve bits.
const ADVERT: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_millis(40_950);
/// Maximum number of addresses in a VRRP message.
const ADDRESSES_MAX: usize = 20;
/// Maximum number of other directors.
const PEERS_MAX: usize = 8;

/// Parses an address such as `10.0.0.254/24 dev eth1`, optionally without prefix length or device.
/// `None` if the text is invalid.
fn host_address(text: &str) -> Option<HostAddress> {
    let mut words = text.split_ascii_whitespace();
    let address = words.next()?;
    let (ip, len) = match address.split_once('/') {
        Some((ip, len)) => (ip, Some(len.parse::<u8>().ok()?)),
        None => (address, None),
    };
    let ip: IpAddr = ip.parse().ok()?;
    let whole = if ip.is_ipv4() { 32 } else { 128 };
    let len = len.unwrap_or(whole);
    let device = match (words.next(), words.next()) {
        (None, _) => None,
        (Some("dev"), Some(name)) if is_interface(name) && is_word(name) => Some(name.to_owned()),
        _ => return None,
    };
    (len <= whole && words.next().is_none()).then_some(HostAddress { ip, len, device })
}

/// Whether an address can belong to a host on a network.
fn is_hosts(ip: IpAddr) -> bool {
    let nobodys = ip.is_unspecified() || ip.is_loopback();
    !nobodys && !ip.is_multicast() && ip != IpAddr::from([255; 4])
}

/// Whether keepalived parses the name as one word.
fn is_word(name: &str) -> bool {
    !name.contains(|c: char| c.is_whitespace() || c.is_control() || "\"'{}#!\\$@~".contains(c))
}

impl Checker<'_> {
    pub(super) fn vrrp(
        &mut self,
        spanned: &Spanned<RawVrrp>,
        all: &RawConfig,
        services: &[Service],
    ) -> Option<Vrrp> {
        let raw = spanned.get_ref();
        let interface = raw.interface.as_ref().map(|name| {
            if !is_interface(name.get_ref()) || !is_word(name.get_ref()) {
                let title = format!("`{}` is not the name of an interface", name.get_ref());
                self.report(
                    Diagnostic::error(name.span(), title)
                        .help("`ip link` lists the interfaces; an address is not one"),
                );
            }
            name.get_ref().clone()
        });
        if interface.is_none() {
            self.report(
                Diagnostic::error(spanned.span(), "[vrrp] has no interface").help(
                    "add interface = \"...\": the interface on which the directors receive each other's advertisements",
                ),
            );
        }
        if raw.router_id.is_none() {
            self.report(
                Diagnostic::error(spanned.span(), "[vrrp] has no router_id").help(
                    "add router_id = 51, or another number up to 255: the same on all directors of one cluster, and unused by others on that network",
                ),
            );
        }
        let router_id = self.number(raw.router_id.as_ref(), "`router_id`", 1..=255);
        let priority = self.number(raw.priority.as_ref(), "`priority`", 1..=254);
        if let (Some(written), Some(number)) = (&raw.priority, priority)
            && number < Vrrp::PRIORITY_ENOUGH
        {
            self.report(
                Diagnostic::warning(
                    written.span(),
                    "`priority` is too low for the numbers that are subtracted from it: keepalived uses at least 1",
                )
                .help(format!(
                    "use {} or more, on all directors: maintenance subtracts 100, a service below its quorum 50; directors that reach 1 cannot be distinguished",
                    Vrrp::PRIORITY_ENOUGH
                )),
            );
        }
        if let Some(time) = &raw.advert
            && !ADVERT.contains(&time.get_ref().0)
        {
            self.report(
                Diagnostic::error(time.span(), "`advert` is out of range")
                    .help("use a time from \"10ms\" to \"40s\""),
            );
        } else if let Some(time) = &raw.advert
            && time.get_ref().0.subsec_millis() % 10 != 0
        {
            self.report(
                Diagnostic::error(time.span(), "`advert` is not a multiple of 10 ms")
                    .help("write \"300ms\" or \"310ms\": VRRP counts in hundredths of a second"),
            );
        }
        if all.dataplane.own_vips == Some(true) {
            self.report(
                Diagnostic::error(spanned.span(), "[vrrp] moves virtual addresses, and `own_vips` binds them to this director")
                    .help("remove own_vips from [dataplane]: the dataplane owns the addresses of services automatically"),
            );
        }
        if all.sync.ipvs.is_none() && all.sync.peers.is_none() {
            self.report(
                Diagnostic::warning(
                    spanned.span(),
                    "the directors share no connections: all connections break when the addresses move",
                )
                .help("add [sync.peers] with addresses and key_file"),
            );
        }
        if let Some(backend) = self.routed.clone() {
            self.report(
                Diagnostic::warning(
                    spanned.span(),
                    "the backend `tun` does not announce a moved address: neighbours continue to use the other director until their entry expires",
                )
                .context(backend, "the backend")
                .help("make routers route the virtual addresses to one of the `host_addresses` of [vrrp], which keepalived announces; or remove `backend`"),
            );
        }
        let announced = |service: &Service| service.vip == VipMode::Announce;
        if self.complete
            && raw.host_addresses.is_none()
            && !services.is_empty()
            && services.iter().all(announced)
        {
            self.report(
                Diagnostic::warning(
                    spanned.span(),
                    "keepalived moves no addresses: the addresses of all services are announced to routers",
                )
                .help("remove [vrrp], or remove vip = \"announce\" from services whose addresses only one director at a time should have"),
            );
        }
        let peers = self.vrrp_peers(raw.peers.as_ref());
        let addresses = self.vrrp_addresses(raw.host_addresses.as_ref(), services);
        let track_file = self.vrrp_path(raw.track_file.as_ref(), "track_file", Vrrp::TRACK_FILE);
        let fifo = self.vrrp_path(raw.fifo.as_ref(), "fifo", Vrrp::FIFO);
        if track_file == fifo {
            self.report(
                Diagnostic::error(spanned.span(), "`track_file` and `fifo` are the same file")
                    .help("use a different path for each, or leave both out"),
            );
        }
        Some(Vrrp {
            interface: interface?,
            router_id: u8::try_from(router_id?).ok()?,
            priority: priority
                .and_then(|n| u8::try_from(n).ok())
                .unwrap_or(Vrrp::PRIORITY),
            advert: raw
                .advert
                .as_ref()
                .map_or(Vrrp::ADVERT, |time| time.get_ref().0),
            peers,
            addresses,
            track_file,
            fifo,
        })
    }

    fn vrrp_path(
        &mut self,
        written: Option<&Spanned<String>>,
        key: &str,
        default: &str,
    ) -> PathBuf {
        if let Some(path) = written
            && !(path.get_ref().starts_with('/') && is_word(path.get_ref()))
        {
            let title = format!("`{key}` is not a path that keepalived accepts");
            self.report(Diagnostic::error(path.span(), title).help(format!(
                "write a path that begins with `/`, without whitespace: {default}"
            )));
        }
        written.map_or(default, |path| path.get_ref()).into()
    }

    fn vrrp_peers(&mut self, written: Option<&Spanned<OneOrMore>>) -> Vec<IpAddr> {
        let Some(written) = written else {
            return Vec::new();
        };
        let mut seen = HashSet::new();
        let mut peers: Vec<IpAddr> = Vec::new();
        for text in &written.get_ref().0 {
            match text.parse::<IpAddr>() {
                Ok(ip) if !is_hosts(ip) => self.report(
                    Diagnostic::error(
                        written.span(),
                        format!("{ip} is not the address of another host"),
                    )
                    .help("name each of the other directors by the address from which it sends"),
                ),
                Ok(ip) if seen.insert(ip) => peers.push(ip),
                Ok(ip) => self.report(
                    Diagnostic::error(written.span(), format!("{ip} is named twice"))
                        .help("name each of the other directors once"),
                ),
                Err(_) => self.report(
                    Diagnostic::error(written.span(), format!("`{text}` is not an address"))
                        .help("write 192.0.2.2 or 2001:db8::2; VRRP has no ports"),
                ),
            }
        }
        let mixed = peers.iter().any(IpAddr::is_ipv4) && peers.iter().any(IpAddr::is_ipv6);
        if peers.len() > PEERS_MAX || mixed {
            self.report(
                Diagnostic::error(
                    written.span(),
                    "these `peers` are not a valid group of directors",
                )
                .help(format!(
                    "write at most {PEERS_MAX} peers, all of one address family"
                )),
            );
        }
        peers
    }

    fn vrrp_addresses(
        &mut self,
        written: Option<&Spanned<OneOrMore>>,
        services: &[Service],
    ) -> Vec<HostAddress> {
        let Some(written) = written else {
            return Vec::new();
        };
        let mut all: Vec<HostAddress> = Vec::new();
        for text in &written.get_ref().0 {
            match host_address(text) {
                Some(address) if all.iter().any(|other| other.ip == address.ip) => {
                    self.report(
                        Diagnostic::error(written.span(), format!("{} is named twice", address.ip))
                            .help("name each address once"),
                    );
                }
                Some(address) if !is_hosts(address.ip) => self.report(
                    Diagnostic::error(
                        written.span(),
                        format!("{} cannot be moved from host to host", address.ip),
                    )
                    .help("write \"10.0.0.254/24 dev eth1\""),
                ),
                Some(address) => {
                    if let Some(service) = services.iter().find(|service| {
                        service.virtual_ip() == Some(address.ip) && service.vip != VipMode::Host
                    }) {
                        let title = format!(
                            "{} is the address of the service {}, which the dataplane answers for",
                            address.ip,
                            label(&service.id)
                        );
                        self.report(Diagnostic::warning(written.span(), title).help(
                            "leave the address out here; or set vip = \"host\" for the service",
                        ));
                    }
                    all.push(address);
                }
                None => self.report(
                    Diagnostic::error(
                        written.span(),
                        format!("`{text}` is not an address of a host"),
                    )
                    .help("write \"10.0.0.254/24 dev eth1\""),
                ),
            }
        }
        if all.len() > ADDRESSES_MAX {
            self.report(
                Diagnostic::error(
                    written.span(),
                    format!("{} addresses are configured", all.len()),
                )
                .help(format!(
                    "write at most {ADDRESSES_MAX} addresses; the addresses of services are added automatically"
                )),
            );
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use crate::cases::cases;
    use crate::config::{Config, Vrrp};

    const SERVICE: &str = "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\n\
                           [[service.server]]\naddress = \"10.0.0.11:80\"\n";

    #[test]
    fn vrrp_defaults_fill_omitted_keys() {
        let text = format!(
            "[vrrp]\ninterface = \"eth0\"\nrouter_id = 51\nhost_addresses = \"10.0.0.254/24 dev eth1\"\n{SERVICE}"
        );
        let (config, report) = Config::from_toml("x", &text).expect("the file is valid");
        let vrrp = config.vrrp.expect("the file has [vrrp]");
        assert_eq!(vrrp.track_file.to_str(), Some(Vrrp::TRACK_FILE));
        assert_eq!((vrrp.priority, vrrp.advert), (200, Vrrp::ADVERT));
        assert_eq!(vrrp.addresses[0].device.as_deref(), Some("eth1"));
        assert!(report.to_string().contains("share no connections"));
    }

    #[test]
    fn vip_of_dataplane_among_host_addresses_of_vrrp_causes_warning() {
        for (vip, warned) in [("own", true), ("auto", true), ("host", false)] {
            let service = SERVICE.replace("forward", &format!("vip = \"{vip}\"\nforward"));
            let text = format!(
                "[vrrp]\ninterface = \"eth0\"\nrouter_id = 51\nhost_addresses = \"192.0.2.10\"\n{service}"
            );
            let (_, report) = Config::from_toml("x", &text).expect("the file is valid");
            let is_reported = report
                .to_string()
                .contains("which the dataplane answers for");
            assert_eq!(is_reported, warned, "{vip}: {report}");
        }
    }

    #[test]
    fn vrrp_with_low_priority_or_tun_backend_or_without_moved_address_causes_warning() {
        let is_reported = |keys: &str, service: &str, words: &str| {
            let text = format!("[vrrp]\ninterface = \"eth0\"\nrouter_id = 51\n{keys}\n{service}");
            let (_, report) = Config::from_toml("x", &text).expect("the file is valid");
            report.to_string().contains(words)
        };
        let room = "too low for the numbers that are subtracted";
        assert!(is_reported("priority = 150", SERVICE, room));
        assert!(!is_reported("priority = 151", SERVICE, room) && !is_reported("", SERVICE, room));
        let moves = "keepalived moves no addresses";
        let announced = SERVICE.replace("forward", "vip = \"announce\"\nforward");
        let another = SERVICE.replace("192.0.2.10", "192.0.2.11");
        assert!(is_reported("", &announced, moves));
        assert!(!is_reported("", &format!("{announced}{another}"), moves));
        assert!(!is_reported(
            "host_addresses = \"10.0.0.254\"",
            &announced,
            moves
        ));
        let silent = "does not announce a moved address";
        let tun = format!("[dataplane]\nbackend = \"tun\"\n{SERVICE}");
        assert!(is_reported("", &tun, silent) && !is_reported("", SERVICE, silent));
    }

    #[test]
    fn invalid_or_contradictory_vrrp_settings_are_refused() {
        for [keys, words] in cases(
            r#"
                router_id = 1 | has no interface
                interface = "eth0" | has no router_id
                interface = "eth0" ; router_id = 256 | out of range
                interface = "eth0 }" ; router_id = 1 | not the name of an interface
                interface = "a{b" ; router_id = 1 | not the name of an interface
                interface = "eth0" ; router_id = 1 ; advert = "1ms" | `advert` is out of range
                interface = "eth0" ; router_id = 1 ; advert = "305ms" | hundredths of a second
                interface = "eth0" ; router_id = 1 ; peers = ["0.0.0.0"] | of another host
                interface = "eth0" ; router_id = 1 ; host_addresses = "10.0.0.1 dev a{" | not an address of a host
                interface = "eth0" ; router_id = 1 ; host_addresses = "224.0.0.1" | cannot be moved
                interface = "eth0" ; router_id = 1 ; priority = 255 | out of range
                interface = "eth0" ; router_id = 1 ; fifo = "x" | not a path
                interface = "eth0" ; router_id = 1 ; fifo = "/x\n}" | not a path
                interface = "eth0" ; router_id = 1 ; fifo = "/x" ; track_file = "/x" | the same file
                interface = "eth0" ; router_id = 1 ; host_addresses = "10.0.0.1/33" | not an address of a host
                interface = "eth0" ; router_id = 1 ; host_addresses = "10.0.0.1 dev a b" | not an address of a host
                interface = "eth0" ; router_id = 1 ; peers = ["10.0.0.1", "fd00::1"] | not a valid group
                interface = "eth0" ; router_id = 1 ; peers = ["10.0.0.1", "10.0.0.1"] | named twice
                interface = "eth0" ; router_id = 1 ; [dataplane] ; own_vips = true | binds them to this director
            "#,
        ) {
            let text = format!("[vrrp]\n{keys}\n{SERVICE}");
            let report = Config::from_toml("x", &text).expect_err(keys).to_string();
            assert!(report.contains(words), "{keys}: no {words:?} in {report}");
        }
    }
}
