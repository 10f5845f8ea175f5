//! Other programs' files as lvsd's: keepalived's virtual servers, ldirectord's, and those of the
//! configure script of the LVS HOWTO.
//!
//! What has no counterpart stands as a comment beside what it was said of, and is counted.

mod checks;
mod keepalived;
mod ldirectord;
mod lvs_conf;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use lvs_core::sched::BUILT_IN;

use crate::config::Config;

/// What came of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// The file for `lvsd`.
    pub toml: String,
    /// What has no counterpart, in words; each is in the file, too.
    pub lost: Vec<String>,
    /// Of keepalived's file, what is not about virtual servers.
    pub rest: String,
}

/// A kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `keepalived.conf`.
    Keepalived,
    /// `ldirectord.cf`.
    Ldirectord,
    /// `lvs.conf`.
    LvsConf,
}

/// What kind of file it is, by its name and then by its text.
pub fn kind(name: &str, text: &str) -> Option<Kind> {
    let base = Path::new(name)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    if base.contains("keepalived") {
        return Some(Kind::Keepalived);
    }
    if base.contains("ldirectord") {
        return Some(Kind::Ldirectord);
    }
    let has = |word: &str| text.lines().any(|line| line.trim_start().starts_with(word));
    if has("virtual_server") || has("vrrp_") || has("global_defs") {
        Some(Kind::Keepalived)
    } else if has("LVS_TYPE") || has("SERVICE=") {
        Some(Kind::LvsConf)
    } else if has("virtual") {
        Some(Kind::Ldirectord)
    } else {
        None
    }
}

/// The longest file: what is longer is none of these.
pub const LENGTH_MAX: u64 = 16 << 20;
/// Files that may be included, and how deep.
const INCLUDES_MAX: usize = 256;
/// Addresses that ranges and groups may stand for.
const ADDRESSES_MAX: usize = 65_536;

/// Converts the text of the file `name`; `include` gives the files that a pattern stands for.
///
/// # Errors
/// It is not such a file, in words.
pub fn convert(
    kind: Kind,
    name: &str,
    text: &str,
    include: &dyn Fn(&str) -> Vec<(String, String)>,
) -> Result<Converted, String> {
    let (mut services, mut lost, rest) = match kind {
        Kind::Keepalived => keepalived::read(name, text, include)?,
        Kind::Ldirectord => ldirectord::read(text),
        Kind::LvsConf => lvs_conf::read(text),
    };
    without_twins(&mut services, &mut lost);
    for service in &mut services {
        service.keep_ports();
        service.without_twins();
    }
    without_loops(&mut services);
    without_refused(name, &mut services, &mut lost);
    if services.is_empty() {
        return Err(nothing(name, &lost));
    }
    let toml = written(name, &services, &lost);
    for service in &services {
        lost.extend(service.all_lost());
    }
    Ok(Converted { toml, lost, rest })
}

/// The file for `lvsd`.
fn written(name: &str, services: &[Service], lost: &[String]) -> String {
    let mut toml = format!(
        "# From {}, by `lvsd convert`. Check it with `lvsd --check-config`.\n",
        printable(name)
    );
    for line in lost {
        let _ = writeln!(toml, "# NOT CONVERTED: {}", printable(line));
    }
    for service in services {
        service.write(&mut toml);
    }
    toml
}

/// Why nothing came of a file, of which this was lost.
fn nothing(name: &str, lost: &[String]) -> String {
    /// What is told of it.
    const TOLD: usize = 3;
    let none = format!("there is no virtual server in {name}");
    let told: Vec<String> = lost.iter().take(TOLD).map(|what| printable(what)).collect();
    match lost.len() {
        0 => none,
        1..=TOLD => format!("{none} that can be converted: {}", told.join("; ")),
        all => format!(
            "{none} that can be converted: {}; and {} more",
            told.join("; "),
            all - TOLD
        ),
    }
}

/// Leaves each address and mark to the first service that has it.
fn without_twins(services: &mut Vec<Service>, lost: &mut Vec<String>) {
    let mut seen = HashSet::new();
    services.retain_mut(|service| {
        let protocol = service.keys.get("protocol").cloned().unwrap_or_default();
        let before = service.addresses.len();
        service.addresses.retain(|address| {
            let first = seen.insert((address.clone(), protocol.clone()));
            if !first {
                lost.push(format!(
                    "{address}: there is a virtual server with this address above it"
                ));
            }
            first
        });
        let mark = service
            .fwmark
            .map(|(mark, six)| (format!("mark {mark} {six}"), String::new()));
        if let Some(mark) = mark
            && !seen.insert(mark.clone())
        {
            lost.push(format!(
                "{}: there is a virtual server with this mark above it",
                mark.0
            ));
            return false;
        }
        before == 0 || !service.addresses.is_empty()
    });
}

/// Takes out servers that are virtual servers: their packets would go round.
fn without_loops(services: &mut [Service]) {
    let mut all: HashMap<IpAddr, HashSet<u16>> = HashMap::new();
    for at in services.iter().flat_map(Service::endpoints) {
        all.entry(at.ip()).or_default().insert(at.port());
    }
    for service in services {
        let ports: HashSet<u16> = service.endpoints().map(|at| at.port()).collect();
        let lost = &mut service.lost;
        service.servers.retain(|server| {
            let (ip, own) = server.place();
            let Some(theirs) = ip.and_then(|ip| all.get(&ip)) else {
                return true;
            };
            // 0 stands for every port.
            let is_theirs = |port: u16| port == 0 || theirs.contains(&0) || theirs.contains(&port);
            let is_one = match own {
                Some(port) => is_theirs(port),
                None => ports.is_empty() || ports.iter().any(|port| is_theirs(*port)),
            };
            if is_one {
                lost.push(format!("server {}: it is a virtual server", server.address));
            }
            !is_one
        });
    }
}

/// Services that are tried one after the other when `lvsd` refuses a file: each costs a look at all
/// before it.
const TRIED_MAX: usize = 256;

/// A last resort: leaves out what is refused for a reason that nobody has thought of here.
fn without_refused(name: &str, services: &mut Vec<Service>, lost: &mut Vec<String>) {
    if refused(&written(name, services, &[])).is_none() {
        return;
    }
    let together = services.len() <= TRIED_MAX;
    let mut before = String::new();
    services.retain(|service| {
        let end = before.len();
        service.write(&mut before);
        let why = refused(&before);
        if why.is_some() || !together {
            before.truncate(end);
        }
        if let Some(why) = &why {
            lost.push(format!("{}: lvsd refuses it: {why}", service.name()));
        }
        why.is_none()
    });
}

/// What `lvsd` has against a file, in a line.
fn refused(toml: &str) -> Option<String> {
    let report = Config::from_toml("", toml).err()?.to_string();
    let mut lines = report.lines();
    let error = lines.find_map(|line| line.strip_prefix("error: "));
    Some(error.unwrap_or(&report).to_owned())
}

/// A service.
#[derive(Clone, Debug, Default)]
struct Service {
    addresses: Vec<String>,
    fwmark: Option<(u32, bool)>,
    /// Its keys and their values, in TOML.
    keys: BTreeMap<&'static str, String>,
    check: BTreeMap<&'static str, String>,
    servers: Vec<Server>,
    lost: Vec<String>,
}

/// A server.
#[derive(Clone, Debug, Default)]
struct Server {
    address: String,
    keys: BTreeMap<&'static str, String>,
    /// Its own check; empty for the service's.
    check: BTreeMap<&'static str, String>,
    lost: Vec<String>,
}

impl Service {
    fn string(&mut self, key: &'static str, value: &str) {
        self.keys.insert(key, quote(value));
    }

    fn lose(&mut self, what: impl Into<String>) {
        self.lost.push(what.into());
    }

    fn name(&self) -> String {
        let address = self.addresses.first().cloned();
        address.unwrap_or_else(|| format!("mark {}", self.fwmark.unwrap_or_default().0))
    }

    /// Takes from servers the ports that only NAT could translate to: the other methods hand on
    /// packets as they are, and all three programs put the service's port in the place.
    fn keep_ports(&mut self) {
        let ports: HashSet<u16> = self.endpoints().map(|at| at.port()).collect();
        for server in &mut self.servers {
            let own = server.keys.get("forward").or(self.keys.get("forward"));
            let port = server.endpoint().map(|at| at.port());
            if own.is_some_and(|word| word != "\"nat\"")
                && let Some(port) = port
                && ports.iter().any(|other| *other != port)
            {
                // The service's check would ask the service's port.
                let asks = asks_a_port(&self.check) && !self.check.contains_key("port");
                if server.check.is_empty() && asks {
                    server.check.clone_from(&self.check);
                }
                server.take_port();
            }
        }
    }

    /// Leaves of servers with one address the first.
    fn without_twins(&mut self) {
        let ports: HashSet<u16> = self.endpoints().map(|at| at.port()).collect();
        let only = ports.iter().next().copied().filter(|_| ports.len() == 1);
        let mut seen = HashSet::new();
        let lost = &mut self.lost;
        self.servers.retain(|server| {
            let (ip, own) = server.place();
            let first = seen.insert((ip, own.or(only)));
            if !first {
                lost.push(format!("server {}: it is there already", server.address));
            }
            first
        });
    }

    fn endpoints(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().filter_map(|text| text.parse().ok())
    }

    fn all_lost(&self) -> Vec<String> {
        let name = self.name();
        let own = self.lost.iter().map(|lost| format!("{name}: {lost}"));
        let of_servers = self.servers.iter().flat_map(|server| {
            let name = &name;
            server
                .lost
                .iter()
                .map(move |lost| format!("{name}, {}: {lost}", server.address))
        });
        own.chain(of_servers).collect()
    }

    fn write(&self, text: &mut String) {
        text.push_str("\n[[service]]\n");
        for lost in &self.lost {
            let _ = writeln!(text, "# NOT CONVERTED: {}", printable(lost));
        }
        match (self.addresses.as_slice(), self.fwmark) {
            ([one], _) => {
                let _ = writeln!(text, "address = {}", quote(one));
            }
            ([], Some((mark, six))) => {
                let _ = writeln!(text, "fwmark = {mark}");
                if six {
                    text.push_str("family = \"ipv6\"\n");
                }
            }
            (many, _) => {
                let all: Vec<String> = many.iter().map(|one| quote(one)).collect();
                let _ = writeln!(text, "address = [{}]", all.join(", "));
            }
        }
        for (key, value) in &self.keys {
            let _ = writeln!(text, "{key} = {value}");
        }
        if !self.check.is_empty() {
            let _ = writeln!(text, "check = {}", table(&self.check));
        }
        for server in &self.servers {
            text.push_str("[[service.server]]\n");
            for lost in &server.lost {
                let _ = writeln!(text, "# NOT CONVERTED: {}", printable(lost));
            }
            let _ = writeln!(text, "address = {}", quote(&server.address));
            for (key, value) in &server.keys {
                let _ = writeln!(text, "{key} = {value}");
            }
            if !server.check.is_empty() {
                let _ = writeln!(text, "check = {}", table(&server.check));
            }
        }
    }
}

impl Server {
    /// Address and port, if it has one.
    fn endpoint(&self) -> Option<SocketAddr> {
        self.address.parse().ok()
    }

    /// Its address, and its port if it has one.
    fn place(&self) -> (Option<IpAddr>, Option<u16>) {
        match self.endpoint() {
            Some(at) => (Some(at.ip()), Some(at.port())),
            None => (self.address.trim_matches(['[', ']']).parse().ok(), None),
        }
    }

    /// Takes its port, which its own check goes on to ask.
    fn take_port(&mut self) {
        let Some(at) = self.endpoint() else {
            return;
        };
        self.address = bare(at.ip());
        if asks_a_port(&self.check) {
            let port = || at.port().to_string();
            self.check.entry("port").or_insert_with(port);
        }
    }
}

/// Whether it is a check that asks a port.
fn asks_a_port(check: &BTreeMap<&'static str, String>) -> bool {
    let kind = check.get("type").map(String::as_str);
    kind.is_some_and(|kind| kind != "\"ping\"" && kind != "\"exec\"")
}

fn table(keys: &BTreeMap<&'static str, String>) -> String {
    let type_first = keys.iter().filter(|(key, _)| **key == "type");
    let rest = keys.iter().filter(|(key, _)| **key != "type");
    let all: Vec<String> = type_first
        .chain(rest)
        .map(|(key, value)| format!("{key} = {value}"))
        .collect();
    match keys.get("none") {
        Some(_) => "\"none\"".to_owned(),
        None => format!("{{ {} }}", all.join(", ")),
    }
}

/// A basic string of TOML.
fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(c);
            }
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// For a comment or a terminal: one line without control characters, tabs excepted.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| match c.is_control() && c != '\t' {
            true => ' ',
            false => c,
        })
        .collect()
}

fn duration(seconds: f64) -> String {
    let milliseconds = (seconds.clamp(0.0, 86_400.0 * 31.0) * 1000.0).round();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "within a month"
    )]
    let milliseconds = milliseconds as u64;
    match milliseconds % 1000 {
        0 => quote(&format!("{}s", milliseconds / 1000)),
        _ => quote(&format!("{milliseconds}ms")),
    }
}

/// A scheduler of ours, or what to say.
fn scheduler(word: &str) -> Result<&'static str, String> {
    let about = BUILT_IN.iter().find(|about| about.name == word);
    about
        .map(|about| about.name)
        .ok_or_else(|| format!("scheduler {word}: there is none of this name; wlc is used"))
}

/// A port by number, or by one of the names that such files have.
fn port(word: &str) -> Option<u16> {
    if let Ok(port) = word.parse() {
        return Some(port);
    }
    let known = [
        ("http", 80),
        ("https", 443),
        ("www", 80),
        ("ftp", 21),
        ("ssh", 22),
        ("telnet", 23),
        ("smtp", 25),
        ("domain", 53),
        ("pop3", 110),
        ("imap", 143),
        ("imap2", 143),
        ("ldap", 389),
        ("imaps", 993),
        ("pop3s", 995),
        ("mysql", 3306),
        ("postgresql", 5432),
        ("sip", 5060),
        ("squid", 3128),
    ];
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, port)| *port).or_else(|| {
        let services = std::fs::read_to_string("/etc/services").ok()?;
        services.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let (name, port) = (words.next()?, words.next()?);
            (name == word).then(|| port.split('/').next()?.parse().ok())?
        })
    })
}

/// An address and a port in TOML's words.
fn endpoint(ip: IpAddr, port: u16) -> String {
    SocketAddr::new(ip, port).to_string()
}

/// An address without a port.
fn bare(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::api::ServiceId;
    use proptest::prelude::*;

    use super::*;

    fn none(_: &str) -> Vec<(String, String)> {
        Vec::new()
    }

    fn converted(kind: Kind, text: &str) -> (Converted, Config) {
        let converted =
            convert(kind, "some.conf", text, &none).unwrap_or_else(|why| panic!("{why}"));
        let config = Config::from_toml("converted.toml", &converted.toml);
        let (config, _) = config.unwrap_or_else(|report| panic!("{}\n{report}", converted.toml));
        (converted, config)
    }

    const KEEPALIVED: &str = r#"
! Configuration File
global_defs { router_id LVS_DEVEL }
vrrp_instance VI_1 {
    interface eth0
    virtual_ipaddress {
        192.0.2.10/24
    }
}
virtual_server_group web {
    192.0.2.10 80
    192.0.2.20-22 443
}
virtual_server group web {
    delay_loop 6
    lvs_sched rr
    lvs_method NAT
    persistence_timeout 50
    protocol TCP
    sorry_server 10.0.0.200 80
    quorum 2
    real_server 10.0.0.11 80 {
        weight 3
        inhibit_on_failure
        HTTP_GET {
            url { path / 
                  digest 640205b7b0fc66c1ea91c463fac6334d }
            connect_timeout 3
            retry 2
        }
    }
    real_server 10.0.0.12 80 { TCP_CHECK { connect_port 8080 connect_timeout 2 } }
}
virtual_server fwmark 7
{
    lb_algo wlc
    lb_kind DR
    real_server 10.0.0.11 0 { weight 1 }
}
"#;

    /// ldirectord checks the port that it does not forward to.
    #[test]
    fn a_port_that_direct_routing_ignores_is_still_checked() {
        let text = "virtual=192.0.2.1:80\n\treal=10.0.0.2:8080 gate\n\treal=10.0.0.3:80 gate\n\tservice=http\n";
        let done = convert(Kind::Ldirectord, "x", text, &|_| Vec::new()).unwrap();
        let (config, _) = Config::from_toml("x", &done.toml).unwrap();
        let servers = &config.services[0].servers;
        assert_eq!(servers[0].address.to_string(), "10.0.0.2:80");
        let (first, second) = done.toml.split_once("10.0.0.3").unwrap();
        assert!(first.contains("port = 8080") && !second.contains("port"));
        assert_eq!(done.toml.matches("port = 8080").count(), 1);
    }

    #[test]
    fn macros_stand_for_their_values_whatever_the_order() {
        // Often enough that no order of a map is right by chance.
        for _ in 0..32 {
            let (_, config) = converted(
                Kind::Keepalived,
                "$VIP=192.0.2.1\n$VIP2=10.9.9.9\n$VIP22=$VIP2\n$NET=10.0.0.\n$LATE=${NET}1\n\
                 virtual_server $VIP2 80 {\n real_server ${NET}1 80 {\n }\n}\n\
                 virtual_server $VIP 80 {\n real_server $LATE 80 {\n }\n}\n\
                 virtual_server $VIP22 81 {\n real_server $LATE 80 {\n }\n}\n",
            );
            let all: Vec<String> = config
                .services
                .iter()
                .map(|service| service.address().unwrap().to_string())
                .collect();
            assert_eq!(all, ["10.9.9.9:80", "192.0.2.1:80", "10.9.9.9:81"]);
            for service in &config.services {
                assert_eq!(service.servers[0].address.to_string(), "10.0.0.1:80");
            }
        }
    }

    #[test]
    fn macros_may_stand_for_several_words_and_blocks() {
        let (done, config) = converted(
            Kind::Keepalived,
            "$VS=192.0.2.1 80\n$CHECK=TCP_CHECK { connect_timeout 3 }\n$SERVER=10.0.0.1 8080\n\
             virtual_server $VS {\n delay_loop 5\n real_server $SERVER { weight 2 $CHECK }\n protocol TCP\n}\n",
        );
        assert_eq!(done.lost, [""; 0]);
        let service = &config.services[0];
        assert_eq!(service.address().unwrap().to_string(), "192.0.2.1:80");
        let server = &service.servers[0];
        assert_eq!(server.address.to_string(), "10.0.0.1:8080");
        assert_eq!(server.config.weight, 2);
        let check = server.check.as_ref().expect("a check");
        assert_eq!(check.timeout, std::time::Duration::from_secs(3));
    }

    #[test]
    fn the_groups_of_a_file_have_a_bound_together() {
        let group = "virtual_server_group g {\n 2001:db8::1-ffff 80\n fwmark 7\n}\n";
        let server = "virtual_server group g {\n protocol TCP\n real_server 2001:db8:1::1 80 {\n }\n}\n\
                      virtual_server group g {\n protocol UDP\n real_server 2001:db8:1::1 80 {\n }\n}\n";
        let text = format!("{group}{server}");
        let converted = convert(Kind::Keepalived, "x", &text, &none).unwrap();
        let bound = |lost: &&String| lost.contains("at most 65536 addresses");
        assert_eq!(converted.lost.iter().filter(bound).count(), 2);
        // A mark that each server is written for again.
        let marks: String = (1..=1000).map(|n| format!(" fwmark {n}\n")).collect();
        let servers: String = (1..=200)
            .map(|n| format!(" real_server 10.0.0.{n} 80 {{\n }}\n"))
            .collect();
        let text = format!(
            "virtual_server_group g {{\n{marks}}}\nvirtual_server group g {{\n{servers}}}\n"
        );
        let converted = convert(Kind::Keepalived, "x", &text, &none).unwrap();
        assert_eq!(converted.toml.matches("[[service]]").count(), 65_536 / 201);
    }

    #[test]
    fn macros_have_bounds() {
        let server = "virtual_server 192.0.2.1 80 {\n real_server 10.0.0.1 80 {\n }\n}\n";
        let rest = |macros: &str| {
            convert(Kind::Keepalived, "x", &format!("{macros}\n{server}"), &none).unwrap()
        };
        // A limit within a character, macros without an end, and those that make nothing of much.
        let umlauts = "ä".repeat(3000);
        for text in [
            format!("$A=x\nnotify $A{umlauts}"),
            format!("$A={umlauts}\nnotify x$A$A$A$A"),
            "$A=$A\nnotify $A".to_owned(),
            "$A=$B$B$B$B\n$B=$A$A$A$A\nnotify $A".to_owned(),
            format!("$A=\n$B={}\nnotify {}", "$A".repeat(900), "$B".repeat(900)),
        ] {
            let converted = rest(&text);
            assert!(converted.rest.len() < 4200, "{}", converted.rest.len());
            assert!(
                converted.lost[0].contains("cut off"),
                "{:?}",
                converted.lost
            );
        }
        let many = format!("$A={}\n{}", "x".repeat(4000), "notify $A\n".repeat(5000));
        let refused = convert(Kind::Keepalived, "x", &many, &none).unwrap_err();
        assert!(refused.contains("16 MiB"), "{refused}");
    }

    #[test]
    fn the_ranges_of_a_file_have_a_bound_together() {
        let service = |n: u32| {
            format!(
                "virtual=192.0.2.{n}:80\n real=10.{n}.0.0->10.{n}.127.255:80 gate\n real=10.{n}.200.1:80 gate\n"
            )
        };
        let text: String = (1..=4).map(service).collect();
        let converted = convert(Kind::Ldirectord, "x", &text, &none).unwrap();
        assert_eq!(
            converted.toml.matches("[[service.server]]").count(),
            65_536 + 4
        );
        let bound = |lost: &&String| lost.contains("at most 65536 addresses");
        assert_eq!(converted.lost.iter().filter(bound).count(), 2);
    }

    #[test]
    fn keepalived() {
        let (done, config) = converted(Kind::Keepalived, KEEPALIVED);
        assert_eq!(config.services.len(), 4 + 1);
        let web = &config.services[0];
        assert_eq!(web.servers.len(), 2);
        assert_eq!((web.quorum.up, web.config.timeout), (2, 50));
        assert!(web.sorry.is_some());
        assert_eq!(web.vip, crate::config::VipMode::Host, "VRRP has it");
        assert!(
            done.lost.iter().any(|lost| lost.contains("HTTP_GET")),
            "{:?}",
            done.lost
        );
        assert!(
            done.rest.contains("vrrp_instance VI_1") && !done.rest.contains("real_server"),
            "{}",
            done.rest
        );
    }

    /// The kind and the target of each server's check.
    fn checks(config: &Config) -> Vec<String> {
        let servers = config.services.iter().flat_map(|one| &one.servers);
        let told = |server: &crate::config::Server| match &server.check {
            Some(check) => {
                let target = check.probe.target(server.address);
                format!("{} {target}", check.probe.name())
            }
            None => "none".to_owned(),
        };
        servers.map(told).collect()
    }

    #[test]
    fn each_kind_of_keepalived_has_its_counterpart() {
        let server = |n: u8, check: &str| format!("real_server 10.0.0.{n} 80 {{ {check} }}\n");
        let all = [
            ("TCP_CHECK { connect_port 81 }", "tcp 10.0.0.1:81", ""),
            (
                "HTTP_GET { url { path /a\n status_code 200 301-302 }\n url { path /b\n virtualhost x.example }\n }",
                "http http://10.0.0.2:80",
                "",
            ),
            (
                "SSL_GET { enable_sni\n virtualhost x.example\n url { path /a\n regex \"o+k\" } }",
                "https https://10.0.0.3:80",
                "",
            ),
            (
                "SMTP_CHECK { helo_name me.example\n host { connect_port 25 } }",
                "smtp smtp at 10.0.0.4:25",
                "",
            ),
            (
                "DNS_CHECK { type soa\n name example.org\n }",
                "dns dns at 10.0.0.5:80",
                "",
            ),
            (
                "UDP_CHECK { payload \"00 ff\"\n require_reply\n }",
                "udp udp 10.0.0.6:80",
                "",
            ),
            ("PING_CHECK { retry 2 }", "ping ping 10.0.0.7", ""),
            (
                "MISC_CHECK { misc_path \"/bin/check 'a b' c\"\n misc_dynamic\n misc_timeout 3 }",
                "exec /bin/check about 10.0.0.8:80",
                "",
            ),
            (
                "MISC_CHECK { misc_path check\n }",
                "none",
                "MISC_CHECK: the server is not checked",
            ),
            (
                "BFD_CHECK { name x }",
                "none",
                "BFD_CHECK: the server is not checked",
            ),
            (
                "HTTP_GET { url { path no-slash }\n }",
                "tcp 10.0.0.11:80",
                "HTTP_GET: a TCP connection is tried in its place",
            ),
            (
                "HTTP_GET { url { path /\n digest 00 }\n bindto 10.9.9.9\n }",
                "http http://10.0.0.12:80",
                "not compared",
            ),
        ];
        let servers: String = (1..)
            .zip(all)
            .map(|(n, (check, ..))| server(n, check))
            .collect();
        let text = format!(
            "virtual_server 192.0.2.1 80 {{\n delay_loop 10\n lb_kind NAT\n protocol TCP\n{servers}}}\n"
        );
        let (done, config) = converted(Kind::Keepalived, &text);
        let expected: Vec<&str> = all.iter().map(|(_, told, _)| *told).collect();
        assert_eq!(checks(&config), expected, "{}", done.toml);
        for (_, _, words) in all.iter().filter(|(_, _, words)| !words.is_empty()) {
            assert!(done.toml.contains(words), "{words}: {}", done.toml);
        }
        assert_eq!(done.lost.len(), 5, "{:?}", done.lost);
        for words in [
            "urls = [{ path = \"/a\", status = \"200,301-302\" }, { path = \"/b\" }]",
            "command = [\"/bin/check\", \"a b\", \"c\"]",
            "dynamic = true",
            "record = \"SOA\"",
            "payload_hex = \"00 ff\"",
        ] {
            assert!(done.toml.contains(words), "{words}: {}", done.toml);
        }
    }

    #[test]
    fn each_check_of_ldirectord_has_its_counterpart() {
        let service = |n: usize, lines: &str| {
            format!("virtual=192.0.2.{n}:80\n\treal=10.0.0.{n}:80 masq\n\t{lines}\n")
        };
        let all = [
            ("checktype=connect", "tcp 10.0.0.1:80"),
            ("checktype=ping", "ping ping 10.0.0.2"),
            (
                "request=\"a?b\"\n\treceive=\"ok$\"\n\tvirtualhost=x.example",
                "http http://10.0.0.3:80",
            ),
            (
                "service=https\n\tcheckport=443",
                "https https://10.0.0.4:443",
            ),
            ("service=smtp\n\tcheckport=25", "smtp smtp at 10.0.0.5:25"),
            (
                "protocol=udp\n\tservice=dns\n\trequest=\"x.example\"\n\treceive=\"10.1.1.1\"",
                "dns dns at 10.0.0.6:80",
            ),
            (
                "checktype=external\n\tcheckcommand=\"/bin/check\"",
                "exec /bin/check about 10.0.0.7:80",
            ),
            ("checktype=3\n\tservice=http", "http http://10.0.0.8:80"),
            ("service=mysql\n\tlogin=\"x\"", "tcp 10.0.0.9:80"),
            (
                "checktype=external-perl\n\tcheckcommand=\"/bin/check\"",
                "none",
            ),
            ("checktype=off", "none"),
        ];
        let text: String = (1..)
            .zip(all)
            .map(|(n, (lines, _))| service(n, lines))
            .collect();
        let (done, config) = converted(Kind::Ldirectord, &text);
        let expected: Vec<&str> = all.iter().map(|(_, told)| *told).collect();
        assert_eq!(checks(&config), expected, "{}", done.toml);
        // The third attempt, mysql, perl, and servers that ldirectord would never use.
        assert_eq!(done.lost.len(), 4, "{:?}", done.lost);
        for words in [
            "command = [\"/bin/check\", \"192.0.2.7\", \"80\", \"{address}\", \"{port}\"]",
            "path = \"/a?b\", regex = \"ok$\"",
            "answer = \"10.1.1.1\"",
        ] {
            assert!(done.toml.contains(words), "{words}: {}", done.toml);
        }
    }

    #[test]
    fn ldirectord() {
        let text = "checktimeout=3\ncheckinterval=1\nquiescent=yes\nlogfile=\"local0\"\n\
             virtual=192.0.2.10:http\n\
             \treal=10.0.0.11:80 gate 5\n\treal=10.0.0.12->10.0.0.14:80 gate\n\
             \tfallback=127.0.0.1:80 gate\n\tservice=http\n\tscheduler=wrr\n\tprotocol=tcp\n\tchecktype=negotiate\n\
             \trequest=\"index.html\"\n\tpersistent=600\n\
             virtual=3\n\treal=10.0.0.11 masq\n\tprotocol=fwm\n\tchecktype=off\n";
        let (done, config) = converted(Kind::Ldirectord, text);
        assert_eq!(config.services.len(), 2);
        assert_eq!(config.services[0].servers.len(), 4);
        assert_eq!(config.services[0].servers[0].config.weight, 5);
        assert!(
            !done.lost.iter().any(|lost| lost.contains("negotiate")),
            "{:?}",
            done.lost
        );
        assert_eq!(checks(&config)[0], "http http://10.0.0.11:80");
        assert!(
            done.toml.contains("path = \"/index.html\""),
            "{}",
            done.toml
        );
        assert!(config.services[1].servers[0].check.is_none());
    }

    #[test]
    fn lvs_conf() {
        let text = "#lvs_nat.conf\nLVS_TYPE=VS_NAT\nINITIAL_STATE=on\nVIP=eth0:110 192.168.1.110 255.255.255.255 192.168.1.110\n\
             DIP=eth0 192.168.1.9 192.168.1.0 255.255.255.0 192.168.1.255\n\
             SERVICE=t telnet rr 10.1.1.2:telnet 10.1.1.3\nSERVICE=u 53 wlc 10.1.1.2:53,3\n";
        let (done, config) = converted(Kind::LvsConf, text);
        assert_eq!(config.services.len(), 2);
        assert_eq!(config.services[1].servers[0].config.weight, 3);
        assert!(
            done.lost.iter().any(|lost| lost.contains("DIP")),
            "{:?}",
            done.lost
        );
    }

    #[test]
    fn twins_and_loops_are_left_out() {
        let text = "virtual_server 192.0.2.1 80 { protocol TCP\n real_server 192.0.2.1 80 { weight 1 }\nreal_server 10.0.0.1 80 { weight 1 }\n}\n";
        let (done, config) = converted(Kind::Keepalived, &text.repeat(2));
        assert_eq!(
            (config.services.len(), config.services[0].servers.len()),
            (1, 1)
        );
        assert_eq!(done.lost.len(), 2, "{:?}", done.lost);
    }

    /// `keepalived -t` of keepalived 2.2.7 says the same of each.
    #[test]
    fn what_keepalived_takes_for_granted() {
        let servers = |config: &Config| -> Vec<String> {
            let all = config.services.iter().flat_map(|one| &one.servers);
            all.map(|server| server.address.to_string()).collect()
        };
        // Without a protocol it is UDP, but for marks.
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 53 {\n lb_kind DR\n real_server 10.0.0.1 53 {\n DNS_CHECK {\n}\n }\n}\n",
        );
        assert!(matches!(config.services[0].id, ServiceId::Udp { .. }));
        assert!(done.lost[0].contains("no `protocol`"), "{:?}", done.lost);
        let check = config.services[0].servers[0].check.as_ref().unwrap();
        assert_eq!(check.fall, 4, "a name server is asked again three times");
        // Only NAT changes ports; a check goes on to ask the one that was written.
        let (_, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 21 {\n lb_kind DR\n protocol TCP\n sorry_server 10.0.0.9 8080\n \
             real_server 10.0.0.1 80 {\n TCP_CHECK {\n }\n }\n \
             real_server 10.0.0.2 80 {\n lvs_method NAT\n TCP_CHECK {\n }\n }\n}\n",
        );
        assert_eq!(servers(&config), ["10.0.0.1:21", "10.0.0.2:80"]);
        assert_eq!(checks(&config), ["tcp 10.0.0.1:80", "tcp 10.0.0.2:80"]);
        // With a mark the port stays, also through NAT.
        let (_, config) = converted(
            Kind::Keepalived,
            "virtual_server fwmark 3 {\n lb_kind NAT\n real_server 10.0.0.1 80 {\n TCP_CHECK {\n }\n }\n}\n",
        );
        assert_eq!(servers(&config), ["10.0.0.1:0"]);
        assert_eq!(checks(&config), ["tcp 10.0.0.1:80"]);
        // All ports are persistent.
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 {\n lb_kind DR\n protocol TCP\n real_server 10.0.0.1 {\n }\n}\n",
        );
        assert_eq!(config.services[0].config.timeout, 360, "{}", done.toml);
        // Which servers it has twice.
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n lb_kind DR\n protocol TCP\n real_server 10.0.0.1 80 {\n weight 5\n }\n \
             real_server 10.0.0.1 {\n weight 2\n }\n}\n",
        );
        assert_eq!(config.services[0].servers.len(), 1);
        assert_eq!(config.services[0].servers[0].config.weight, 5);
        assert_eq!(
            done.lost,
            ["192.0.2.1:80: server 10.0.0.1: it is there already"]
        );
    }

    #[test]
    fn quotes_within_quotes_are_the_commands() {
        let (done, _) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n MISC_CHECK {\n \
             misc_path \"/bin/x \\\"a b\\\" c\\d\"\n }\n }\n}\n",
        );
        let command = "command = [\"/bin/x\", \"a b\", ";
        assert!(done.toml.contains(command), "{}", done.toml);
    }

    #[test]
    fn settings_of_outer_blocks_are_the_defaults_of_checks() {
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n delay_loop 20\n protocol TCP\n retry 3\n connect_timeout 9\n \
             delay_before_retry 2\n virtualhost outer.example\n \
             real_server 10.0.0.1 80 {\n HTTP_GET {\n url {\n path /\n }\n }\n }\n \
             real_server 10.0.0.2 80 {\n connect_timeout 4\n delay_loop 10\n virtualhost inner.example\n \
             HTTP_GET {\n url {\n path /\n }\n nb_get_retry 0\n }\n }\n}\n",
        );
        assert_eq!(done.lost, [""; 0]);
        let rhythm = |n: usize| {
            let check = config.services[0].servers[n].check.as_ref().unwrap();
            (
                check.interval.as_secs(),
                check.timeout.as_secs(),
                check.fall,
                check.fast_interval.as_secs(),
            )
        };
        assert_eq!(rhythm(0), (20, 9, 4, 2));
        assert_eq!(rhythm(1), (10, 4, 1, 2));
        for host in ["outer.example", "inner.example"] {
            assert_eq!(done.toml.matches(host).count(), 1, "{}", done.toml);
        }
    }

    #[test]
    fn of_several_checks_the_one_that_tells_most_is_left() {
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n PING_CHECK {\n }\n \
             HTTP_GET {\n url {\n path /\n }\n }\n TCP_CHECK {\n }\n BFD_CHECK {\n }\n }\n}\n",
        );
        assert_eq!(checks(&config), ["http http://10.0.0.1:80"]);
        let expected = [
            "a second check, ping: a server has one check here",
            "a second check, tcp: a server has one check here",
            "BFD_CHECK: the server is checked without it",
        ];
        let expected = expected.map(|what| format!("192.0.2.1:80, 10.0.0.1:80: {what}"));
        assert_eq!(done.lost, expected);
    }

    #[test]
    fn timeouts_that_are_cut_are_told() {
        let (done, _) = converted(
            Kind::Ldirectord,
            "checktimeout=3\ncheckinterval=1\nvirtual=192.0.2.1:80\n real=10.0.0.1:80 gate\n",
        );
        assert!(done.lost[0].contains("timeout of 3 s"), "{:?}", done.lost);
        let (done, _) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n delay_loop 2\n real_server 10.0.0.1 80 {\n \
             TCP_CHECK {\n connect_timeout 3\n }\n }\n}\n",
        );
        assert!(done.lost[0].contains("timeout of 3 s"), "{:?}", done.lost);
    }

    #[test]
    fn groups_have_ranges_and_networks() {
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server_group g {\n 192.0.2.8/30 80\n 192.0.3.254-192.0.4.1 80\n 192.0.5.1-2 80\n \
             192.0.6.1/32 80\n 192.0.7.1/24 80\n 192.0.8.2-192.0.8.1 80\n}\n\
             virtual_server group g {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n",
        );
        let all: Vec<String> = config
            .services
            .iter()
            .map(|service| service.address().unwrap().ip().to_string())
            .collect();
        assert_eq!(
            all,
            [
                "192.0.2.8",
                "192.0.2.9",
                "192.0.2.10",
                "192.0.2.11",
                "192.0.3.254",
                "192.0.3.255",
                "192.0.4.0",
                "192.0.4.1",
                "192.0.5.1",
                "192.0.5.2",
                "192.0.6.1"
            ]
        );
        assert_eq!(done.lost.len(), 2, "{:?}", done.lost);
        // No more than there is room for.
        let wide = "virtual_server_group g {\n ::/1 80\n 10.0.0.0/8 80\n 2001:db8::-2001:db8:ffff:: 80\n 192.0.2.1 80\n}\n\
                    virtual_server group g {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n";
        let (done, config) = converted(Kind::Keepalived, wide);
        assert_eq!(config.services.len(), 1);
        assert_eq!(done.lost.len(), 3, "{:?}", done.lost);
    }

    #[test]
    fn what_ldirectord_takes_for_granted() {
        let (done, config) = converted(
            Kind::Ldirectord,
            "virtual=192.0.2.1:53\n real=10.0.0.1:5353 gate\n real=10.0.0.1:53 gate\n real=10.0.0.2:5353 masq\n \
             request=\"www.example.org\"\nvirtual=192.0.2.1:80\n real=10.0.0.1:80 gate\n checktype=off\n",
        );
        let service = &config.services[0];
        assert!(matches!(service.id, ServiceId::Udp { .. }));
        assert_eq!(service.config.scheduler, "wrr");
        let all: Vec<String> = service
            .servers
            .iter()
            .map(|server| server.address.to_string())
            .collect();
        assert_eq!(all, ["10.0.0.1:53", "10.0.0.2:5353"]);
        // As long as from check to check: its own 30 seconds are longer.
        assert_eq!(
            service.servers[0].check.as_ref().unwrap().timeout.as_secs(),
            10
        );
        assert_eq!(done.lost.len(), 2, "{:?}", done.lost);
        assert!(
            done.lost[1].contains("ldirectord uses none"),
            "{:?}",
            done.lost
        );
    }

    /// A server of a mark has no port, so that it is whatever listens at its address.
    #[test]
    fn loops_by_way_of_a_mark_are_left_out() {
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n\
             virtual_server fwmark 1 {\n real_server 192.0.2.1 8080 {\n }\n real_server 10.0.0.1 8080 {\n }\n}\n",
        );
        assert_eq!(config.services[1].servers.len(), 1);
        assert_eq!(
            done.lost,
            ["mark 1: server 192.0.2.1: it is a virtual server"]
        );
    }

    #[test]
    fn what_leaves_nothing_says_why() {
        let refused = |text: &str| convert(Kind::Keepalived, "x", text, &none).unwrap_err();
        assert_eq!(
            refused("vrrp_instance a {\n}\n"),
            "there is no virtual server in x"
        );
        assert_eq!(
            refused("virtual_server x.x.x.44 443 {\n}\n"),
            "there is no virtual server in x that can be converted: \
             virtual_server x.x.x.44 443: x.x.x.44 is not an address"
        );
        let many = refused(&"virtual_server www.example.org 443 {\n}\n".repeat(5));
        assert!(many.ends_with("; and 2 more"), "{many}");
    }

    #[test]
    fn what_lvsd_refuses_for_another_reason_is_left_out_and_told() {
        let (done, config) = converted(
            Kind::Keepalived,
            "virtual_server 192.0.2.1 80 {\n protocol TCP\n persistence_timeout 5\n persistence_granularity 255.0.255.0\n \
             real_server 10.0.0.1 80 {\n }\n}\n\
             virtual_server 192.0.2.2 80 {\n protocol TCP\n real_server 10.0.0.1 80 {\n }\n}\n",
        );
        assert_eq!(config.services.len(), 1);
        assert!(
            done.lost[0].starts_with("192.0.2.1:80: lvsd refuses it: "),
            "{:?}",
            done.lost
        );
        assert!(done.toml.contains("# NOT CONVERTED: 192.0.2.1:80: lvsd"));
        // Each by itself would be taken.
        let twice = |n: u8| {
            format!(
                "virtual=192.0.2.{n}:80\n name=\"web\"\n real=10.0.0.1:80 gate\n checktype=on\n"
            )
        };
        let (done, config) = converted(Kind::Ldirectord, &(twice(1) + &twice(2)));
        assert_eq!(config.services.len(), 1, "{:?}", done.lost);
    }

    #[test]
    fn kinds_are_told_apart() {
        assert_eq!(
            kind("/etc/keepalived/keepalived.conf", ""),
            Some(Kind::Keepalived)
        );
        assert_eq!(kind("x", "LVS_TYPE=VS_DR\n"), Some(Kind::LvsConf));
        assert_eq!(kind("x", "virtual = 1.2.3.4:80\n"), Some(Kind::Ldirectord));
        assert_eq!(kind("x", "hello"), None);
    }

    proptest! {
        /// Nothing panics, and what comes out is TOML that `lvsd` reads as far as words go.
        #[test]
        fn anything_goes(
            words in proptest::collection::vec(
                prop_oneof![
                    "[a-z0-9.:{}=,!#\"\n\\-> \t]{0,12}",
                    Just("virtual_server 192.0.2.1 80 {\n".to_owned()),
                    Just("real_server 10.0.0.1 80 {\n".to_owned()),
                    Just("TCP_CHECK {\n".to_owned()),
                    Just("HTTP_GET {\nurl {\npath /\n".to_owned()),
                    Just("MISC_CHECK {\nmisc_path \"".to_owned()),
                    Just("UDP_CHECK {\npayload ".to_owned()),
                    Just("\n\tservice=http\n\trequest=".to_owned()),
                    Just("}\n".to_owned()),
                    Just("\nvirtual=192.0.2.1:80\n".to_owned()),
                    Just("\n\treal=10.0.0.1:80 masq\n".to_owned()),
                    Just("\nSERVICE=t 80 rr 10.0.0.1\n".to_owned()),
                    Just("\nVIP=eth0:1 192.0.2.1\n".to_owned()),
                    Just("quorum 5\n".to_owned()),
                    Just("lb_kind DR\nreal_server 10.0.0.1 81 {\n}\n".to_owned()),
                    Just("persistence_timeout 5\npersistence_granularity 24\n".to_owned()),
                    Just("sorry_server 10.0.0.1 80\n".to_owned()),
                    Just("virtual_server fwmark 1 {\n".to_owned()),
                    Just("real_server 2001:db8::1 80 {\n".to_owned()),
                    Just("\n\treal=10.0.0.1:81 gate 70000\n\treal=10.0.0.1 ipip\n".to_owned()),
                    Just("\n\tfallback=192.0.2.1:80 gate\n\tpersistent=1\n\tnetmask=24\n".to_owned()),
                    Just("\nvirtual=1\n".to_owned()),
                ],
                0..40,
            ),
        ) {
            let text = words.concat();
            for kind in [Kind::Keepalived, Kind::Ldirectord, Kind::LvsConf] {
                if let Ok(done) = convert(kind, "x", &text, &none) {
                    let parsed: Result<toml::Table, _> = toml::from_str(&done.toml);
                    prop_assert!(parsed.is_ok(), "{}", done.toml);
                    let read = Config::from_toml("x", &done.toml);
                    prop_assert!(read.is_ok(), "{}\n{}", done.toml, read.unwrap_err());
                }
            }
        }
    }
}
