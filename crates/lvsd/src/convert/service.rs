//! Converted services and servers, and their TOML.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use lvs_core::sched::BUILT_IN;

use super::item::Item;

/// Keys and their TOML values.
pub(super) type Keys = BTreeMap<&'static str, String>;

#[derive(Clone, Debug, Default)]
pub(super) struct Service {
    /// File and line of the block.
    pub(super) at: String,
    pub(super) addresses: Vec<String>,
    pub(super) fwmark: Option<(u32, bool)>,
    pub(super) keys: Keys,
    pub(super) check: Keys,
    pub(super) servers: Vec<Server>,
    pub(super) quorum: Option<Quorum>,
    pub(super) sorry: Option<Sorry>,
    /// Group with the local addresses of full NAT.
    pub(super) local_group: Option<String>,
    pub(super) lost: Vec<String>,
}

/// A quorum as a sum of weights.
#[derive(Clone, Debug)]
pub(super) struct Quorum {
    /// File and line of the setting.
    pub(super) at: String,
    pub(super) quorum: u64,
    pub(super) hysteresis: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Sorry {
    /// File, line and keyword of the sorry server.
    pub(super) origin: String,
    pub(super) ip: IpAddr,
    pub(super) port: Option<u16>,
    pub(super) keys: Keys,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Server {
    /// File and line of the block.
    pub(super) at: String,
    pub(super) address: String,
    pub(super) keys: Keys,
    /// Check of the server; empty for the service's check.
    pub(super) check: Keys,
    /// Position of the server's own `inhibit_on_failure`; empty if the virtual server contains it,
    /// and `None` if it is off.
    pub(super) inhibit: Option<String>,
    pub(super) lost: Vec<String>,
}

/// Whether lvsd accepts a persistence netmask.
pub(super) fn is_mask(text: &str, six: bool) -> bool {
    match (text.parse::<u32>(), text.parse::<std::net::Ipv4Addr>()) {
        (Ok(prefix), _) => (1..=if six { 128 } else { 32 }).contains(&prefix),
        (_, Ok(mask)) if !six => {
            let mask = u32::from(mask);
            mask != 0 && mask.leading_ones() == mask.count_ones()
        }
        _ => false,
    }
}

/// The reason why a loopback address cannot be a server, except with direct routing.
const LOOPBACK: &str = "a loopback address: the dataplane cannot translate to it; use another address of this host, or direct routing";

impl Service {
    pub(super) fn string(&mut self, key: &'static str, value: &str) {
        self.keys.insert(key, quote(value));
    }

    pub(super) fn lose(&mut self, what: impl Into<String>) {
        self.lost.push(what.into());
    }

    pub(super) fn name(&self) -> String {
        let address = self.addresses.first().cloned();
        address.unwrap_or_else(|| format!("mark {}", self.fwmark.unwrap_or_default().0))
    }

    /// Returns the quorum of the service. Without one, adds a quorum with the position of `item`.
    pub(super) fn quorum_of(&mut self, item: &Item) -> &mut Quorum {
        self.quorum.get_or_insert(Quorum {
            at: item.at().to_string(),
            quorum: 1,
            hysteresis: 0,
        })
    }

    /// Removes the port of a server with direct routing or a tunnel if it differs from a port of
    /// the service. The server's check still uses the port. These methods do not translate ports,
    /// and keepalived, ldirectord and the configure script use the service's port.
    pub(super) fn keep_ports(&mut self) {
        let ports: HashSet<u16> = self.endpoints().map(|at| at.port()).collect();
        for server in &mut self.servers {
            let own = server.keys.get("forward").or(self.keys.get("forward"));
            let port = server.endpoint().map(|at| at.port());
            if own.is_some_and(|word| word != "\"nat\"" && word != "\"fullnat\"")
                && let Some(port) = port
                && ports.iter().any(|other| *other != port)
            {
                // A check without a port would use the service's port.
                let asks = asks_a_port(&self.check) && !self.check.contains_key("port");
                let asks = asks || names_port(&self.check);
                if server.check.is_empty() && asks {
                    server.check.clone_from(&self.check);
                }
                server.take_port();
            }
        }
    }

    /// Removes servers with the address and port of an earlier server, and reports them.
    pub(super) fn without_twins(&mut self) {
        let ports: HashSet<u16> = self.endpoints().map(|at| at.port()).collect();
        let only = ports.iter().next().copied().filter(|_| ports.len() == 1);
        let mut seen = HashSet::new();
        let lost = &mut self.lost;
        self.servers.retain(|server| {
            let (ip, own) = server.place();
            let first = seen.insert((ip, own.or(only)));
            if !first {
                lost.push(server.lost_whole("it already exists"));
            }
            first
        });
    }

    pub(super) fn endpoints(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().filter_map(|text| text.parse().ok())
    }

    /// Adds the servers of another service at the same addresses.
    pub(super) fn join(&mut self, other: Self) {
        self.lost.push(format!(
            "{}: a virtual server with these addresses exists ({}): the servers are added to it, as with keepalived, and the other settings are not used",
            other.at, self.at
        ));
        let defaults = [("forward", quote("nat")), ("tunnel", quote("ipip"))];
        for mut server in other.servers {
            for (key, default) in &defaults {
                let theirs = other.keys.get(key).unwrap_or(default);
                if theirs != self.keys.get(key).unwrap_or(default) {
                    server.keys.entry(key).or_insert_with(|| theirs.clone());
                }
            }
            self.servers.push(server);
        }
        self.lost.extend(other.lost);
    }

    /// The port of all addresses; `None` if their ports differ or are 0, or if there is no address.
    fn only_port(&self) -> Option<u16> {
        let ports: HashSet<u16> = self.endpoints().map(|at| at.port()).collect();
        let only = ports.iter().next().copied();
        only.filter(|port| ports.len() == 1 && *port != 0)
    }

    /// Reports loopback servers that the dataplane cannot reach, and sets quorum and sorry server.
    pub(super) fn settle(&mut self) {
        let default = self.keys.get("forward").cloned();
        for server in &mut self.servers {
            let forward = server.keys.get("forward").or(default.as_ref());
            let direct = forward.is_none_or(|word| word == "\"dr\"");
            if !direct && server.place().0.is_some_and(|ip| ip.is_loopback()) {
                server.lose(LOOPBACK.to_owned());
            }
        }
        if let Some(quorum) = self.quorum.take() {
            self.settle_quorum(&quorum);
        }
        if let Some(sorry) = self.sorry.take() {
            self.settle_sorry(sorry);
        }
    }

    /// Converts the quorum: keepalived adds the weights of the usable servers; lvsd counts the
    /// servers.
    fn settle_quorum(&mut self, origin: &Quorum) {
        let weight = |server: &Server| {
            let weight = server.keys.get("weight").map_or(Ok(1), |word| word.parse());
            weight.unwrap_or(1)
        };
        let weights: Vec<u64> = self.servers.iter().map(weight).collect();
        let Needed {
            up,
            down,
            exact,
            within,
        } = servers_of_quorum(&weights, origin.quorum, origin.hysteresis);
        if !within {
            self.lose(format!(
                "{}: quorum {} with hysteresis {}: the sum of all weights does not reach it, as with keepalived; lvsd requires all servers",
                origin.at, origin.quorum, origin.hysteresis
            ));
        } else if !exact {
            self.lose(format!(
                "{}: quorum {}: lvsd counts servers instead of weights: {up} of {}",
                origin.at,
                origin.quorum,
                weights.iter().filter(|weight| **weight > 0).count()
            ));
        }
        let value = match up == down {
            true => up.to_string(),
            false => format!("{{ up = {up}, down = {down} }}"),
        };
        self.keys.insert("quorum", value);
    }

    fn settle_sorry(&mut self, sorry: Sorry) {
        let own = sorry.keys.get("forward").or(self.keys.get("forward"));
        let nat = own.is_some_and(|word| word == "\"nat\"" || word == "\"fullnat\"");
        // Only NAT translates ports.
        let port = sorry.port.filter(|_| nat && self.fwmark.is_none());
        let port = port.or(self.only_port());
        // With direct routing, the host itself serves connections to its own address.
        if sorry.ip.is_loopback() && own.is_some_and(|word| word != "\"dr\"") {
            self.lose(format!("{}: {LOOPBACK}", sorry.origin));
            return;
        }
        let is_server = |server: &Server| {
            let (ip, own) = server.place();
            let own = own.or(self.only_port());
            ip == Some(sorry.ip) && (own == port || self.fwmark.is_some())
        };
        if self.servers.iter().any(is_server) {
            self.lose(format!("{}: it is a server of the service", sorry.origin));
            return;
        }
        let address = quote(&match port {
            Some(port) => endpoint(sorry.ip, port),
            None => bare(sorry.ip),
        });
        let value = match sorry.keys.is_empty() {
            true => address,
            false => {
                let keys: Vec<String> = sorry
                    .keys
                    .iter()
                    .map(|(key, value)| format!("{key} = {value}"))
                    .collect();
                format!("{{ address = {address}, {} }}", keys.join(", "))
            }
        };
        self.keys.insert("sorry", value);
    }

    pub(super) fn all_lost(&self) -> Vec<String> {
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

    pub(super) fn write(&self, text: &mut String) {
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
    pub(super) fn lose(&mut self, what: impl Into<String>) {
        self.lost.push(what.into());
    }

    /// Message about a server that is not converted.
    pub(super) fn lost_whole(&self, why: &str) -> String {
        format!("{}: server {}: {why}", self.at, self.address)
    }

    /// Address and port, if both are set.
    pub(super) fn endpoint(&self) -> Option<SocketAddr> {
        self.address.parse().ok()
    }

    /// Address and port, each if set.
    pub(super) fn place(&self) -> (Option<IpAddr>, Option<u16>) {
        match self.endpoint() {
            Some(at) => (Some(at.ip()), Some(at.port())),
            None => (self.address.trim_matches(['[', ']']).parse().ok(), None),
        }
    }

    /// Removes the server's port, and uses it in the server's check.
    pub(super) fn take_port(&mut self) {
        let Some(at) = self.endpoint() else {
            return;
        };
        self.address = bare(at.ip());
        if asks_a_port(&self.check) {
            let port = || at.port().to_string();
            self.check.entry("port").or_insert_with(port);
        }
        fix_port(&mut self.check, at.port());
    }
}

/// A quorum of keepalived, which counts weights, as numbers of usable servers: lvsd gains its
/// quorum at `up`, and loses it below `down`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needed {
    pub(super) up: usize,
    pub(super) down: usize,
    /// Whether `up` and `down` are exact for every set of usable servers.
    pub(super) exact: bool,
    /// Whether the total weight reaches the quorum.
    pub(super) within: bool,
}

/// The numbers of servers with these weights at which a quorum is reached and lost. If a number
/// depends on which servers are usable, it is the smallest.
pub(super) fn servers_of_quorum(weights: &[u64], quorum: u64, hysteresis: u64) -> Needed {
    let mut weights: Vec<u64> = weights
        .iter()
        .copied()
        .filter(|weight| *weight > 0)
        .collect();
    weights.sort_unstable();
    let total: u64 = weights.iter().sum();
    // keepalived applies these limits.
    let quorum = quorum.clamp(1, total.max(1));
    let hysteresis = hysteresis.min(quorum - 1);
    let least = |count: usize| -> u64 { weights.iter().take(count).sum() };
    let most = |count: usize| -> u64 { weights.iter().rev().take(count).sum() };
    let servers = |needed: u64| {
        let count = (1..weights.len()).find(|count| most(*count) >= needed);
        count.unwrap_or(weights.len().max(1))
    };
    let (high, low) = (quorum + hysteresis, quorum - hysteresis);
    let (up, down) = (servers(high), servers(low));
    Needed {
        up,
        down,
        exact: least(up) >= high.min(total) && least(down) >= low.min(total),
        within: high <= total.max(1),
    }
}

/// Whether the check connects to a port.
pub(super) fn asks_a_port(check: &BTreeMap<&'static str, String>) -> bool {
    let kind = check.get("type").map(String::as_str);
    kind.is_some_and(|kind| kind != "\"ping\"" && kind != "\"exec\"")
}

/// Placeholder for the server's port in a check command.
const PORT: &str = "\"{port}\"";

/// Whether the check passes the server's port to a program.
fn names_port(check: &Keys) -> bool {
    check
        .get("command")
        .is_some_and(|command| command.contains(PORT))
}

/// Replaces the placeholder in a check command by this port.
pub(super) fn fix_port(check: &mut Keys, port: u16) {
    if let Some(command) = check.get_mut("command") {
        *command = command.replace(PORT, &quote(&port.to_string()));
    }
}

/// A check in TOML. A check of a port gets `via = "server"`, because keepalived and ldirectord
/// check the server's own address.
pub(super) fn table(keys: &BTreeMap<&'static str, String>) -> String {
    let type_first = keys.iter().filter(|(key, _)| **key == "type");
    let rest = keys.iter().filter(|(key, _)| **key != "type");
    let via = asks_a_port(keys).then(|| "via = \"server\"".to_owned());
    let all: Vec<String> = type_first
        .chain(rest)
        .map(|(key, value)| format!("{key} = {value}"))
        .chain(via)
        .collect();
    match keys.get("none") {
        Some(_) => "\"none\"".to_owned(),
        None => format!("{{ {} }}", all.join(", ")),
    }
}

/// Formats a TOML basic string.
pub(super) fn quote(text: &str) -> String {
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

/// Converts a text to one line without control characters except tabs.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| match c.is_control() && c != '\t' {
            true => ' ',
            false => c,
        })
        .collect()
}

pub(super) fn duration(seconds: f64) -> String {
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

/// Parses a scheduler name; `Err` is a message.
pub(super) fn scheduler(word: &str) -> Result<&'static str, String> {
    let about = BUILT_IN.iter().find(|about| about.name == word);
    about
        .map(|about| about.name)
        .ok_or_else(|| format!("scheduler {word}: unknown scheduler; wlc is used"))
}

/// Parses a port number, a service name that is common in such files, or a name in `/etc/services`.
/// `None` for other texts.
pub(super) fn port(word: &str) -> Option<u16> {
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

/// Formats address and port for TOML.
pub(super) fn endpoint(ip: IpAddr, port: u16) -> String {
    SocketAddr::new(ip, port).to_string()
}

/// Formats an address without a port for TOML.
pub(super) fn bare(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}
