//! Converts files of other programs: keepalived's virtual servers, ldirectord, and the configure
//! script of the LVS HOWTO.
//!
//! Statements without an equivalent are reported, and become comments with their line and the
//! reason.

pub mod ask;
mod checks;
pub mod compare;
mod dump;
pub mod files;
mod item;
mod keepalived;
mod ldirectord;
mod lvs_conf;
mod negotiation;
mod pcre;
mod service;
#[cfg(test)]
mod tests;
mod words;

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::net::IpAddr;
use std::path::Path;

pub(crate) use self::service::printable;
use self::service::{Service, quote};
use crate::config::Config;

/// Result of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// TOML for `lvsd`.
    pub toml: String,
    /// Messages about statements that are not converted, or only in part, with their lines and the
    /// reasons; `toml` contains them, too.
    pub lost: Vec<String>,
    /// The lines that keepalived continues to use; empty for other formats.
    pub rest: String,
    /// Whether keepalived's services are in another network namespace, at least on some hosts.
    pub elsewhere: bool,
}

/// Format of the source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    /// keepalived's `keepalived.conf`.
    Keepalived,
    /// ldirectord's `ldirectord.cf`.
    Ldirectord,
    /// `lvs.conf` of the LVS HOWTO's configure script.
    LvsConf,
}

/// Detects the format of a file by its name, then by its text; `None` if neither shows it.
pub fn kind(name: &str, text: &str) -> Option<SourceFormat> {
    let text = without_mark(text);
    let base = Path::new(name)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    if base.contains("keepalived") {
        return Some(SourceFormat::Keepalived);
    }
    if base.contains("ldirectord") {
        return Some(SourceFormat::Ldirectord);
    }
    let has = |word: &str| text.lines().any(|line| line.trim_start().starts_with(word));
    if has("virtual_server") || has("vrrp_") || has("global_defs") {
        Some(SourceFormat::Keepalived)
    } else if has("LVS_TYPE") || has("SERVICE=") {
        Some(SourceFormat::LvsConf)
    } else if has("virtual") {
        Some(SourceFormat::Ldirectord)
    } else {
        None
    }
}

/// Maximum size in bytes of a file, and of keepalived's file with its includes, macros and
/// sequences expanded.
pub const LENGTH_MAX: u64 = 16 << 20;
const INCLUDES_MAX: usize = 256;
/// Maximum number of addresses in all ranges and groups.
const ADDRESSES_MAX: usize = 65_536;

/// Function that returns the names and texts of the files that an `include` statement names. Its
/// arguments are the directory of the including file and the pattern.
pub type Include<'a> = &'a dyn Fn(&Path, &str) -> Result<Vec<(String, String)>, String>;

/// Settings of the conversion.
pub struct Options<'a> {
    /// Reads the files that a file of keepalived includes.
    pub include: Include<'a>,
    /// Argument of `keepalived --config-id`, which selects the `@ID` lines.
    pub config_id: Option<&'a str>,
}

impl fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("config_id", &self.config_id)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Read {
    services: Vec<Service>,
    lost: Vec<String>,
    rest: String,
    /// Local addresses of full NAT.
    local_addresses: Vec<IpAddr>,
    elsewhere: bool,
}

/// Converts the text of the file `name`.
///
/// # Errors
/// The file cannot be interpreted, or nothing in it can be converted; the error text is the reason.
pub fn convert(
    kind: SourceFormat,
    name: &str,
    text: &str,
    options: &Options<'_>,
) -> Result<Converted, String> {
    let text = without_mark(text);
    let Read {
        mut services,
        mut lost,
        rest,
        local_addresses,
        elsewhere,
    } = match kind {
        SourceFormat::Keepalived => keepalived::read(name, text, options)?,
        SourceFormat::Ldirectord => ldirectord::read(text),
        SourceFormat::LvsConf => lvs_conf::read(text),
    };
    if kind == SourceFormat::Keepalived {
        join_twins(&mut services);
    }
    without_twins(&mut services, &mut lost);
    for service in &mut services {
        service.keep_ports();
        service.without_twins();
    }
    without_loops(&mut services);
    unique_names(&mut services);
    for service in &mut services {
        service.settle();
    }
    for service in &mut services {
        service.lost.iter_mut().for_each(shorten);
        for server in &mut service.servers {
            server.lost.iter_mut().for_each(shorten);
        }
    }
    let begin = begin(name, &local_addresses);
    without_refused(&begin, &mut services, &mut lost);
    lost.iter_mut().for_each(shorten);
    if services.is_empty() {
        return Err(nothing(name, &lost));
    }
    let mut toml = begin;
    for line in &lost {
        let _ = writeln!(toml, "# NOT CONVERTED: {}", printable(line));
    }
    for service in &services {
        service.write(&mut toml);
    }
    for service in &services {
        lost.extend(service.all_lost());
    }
    Ok(Converted {
        toml,
        lost,
        rest,
        elsewhere,
    })
}

/// Truncates a message that is too long for a terminal.
fn shorten(message: &mut String) {
    /// Maximum length of a message in bytes.
    const MOST: usize = 600;
    if message.len() > MOST {
        let end = (0..=MOST).rev().find(|end| message.is_char_boundary(*end));
        message.truncate(end.unwrap_or(0));
        message.push_str("...");
    }
}

/// Removes the byte order mark that some editors write.
fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{FEFF}').unwrap_or(text)
}

/// The beginning of lvsd's file, before the services.
fn begin(name: &str, local_addresses: &[IpAddr]) -> String {
    let mut toml = format!(
        "# From {}, by `lvsd convert`. Check it with `lvsd check`.\n",
        printable(name)
    );
    if !local_addresses.is_empty() {
        let all: Vec<String> = local_addresses
            .iter()
            .map(|ip| quote(&ip.to_string()))
            .collect();
        let _ = writeln!(
            toml,
            "\n[dataplane]\nlocal_addresses = [{}]\n",
            all.join(", ")
        );
    }
    toml
}

/// Error text for a conversion without a result, with the first statements that were not converted.
fn nothing(name: &str, lost: &[String]) -> String {
    /// Maximum number of listed statements.
    const TOLD: usize = 3;
    let none = format!("there is no virtual server in {name}");
    let reported: Vec<String> = lost.iter().take(TOLD).map(|what| printable(what)).collect();
    match lost.len() {
        0 => none,
        1..=TOLD => format!("{none} that can be converted: {}", reported.join("; ")),
        all => format!(
            "{none} that can be converted: {}; and {} more",
            reported.join("; "),
            all - TOLD
        ),
    }
}

/// Joins virtual servers with the same addresses or mark and the same protocol, as keepalived does.
fn join_twins(services: &mut Vec<Service>) {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut joined: Vec<Service> = Vec::new();
    for service in services.drain(..) {
        let protocol = service.keys.get("protocol");
        let key = format!("{:?} {:?} {protocol:?}", service.addresses, service.fwmark);
        match places.get(&key).and_then(|place| joined.get_mut(*place)) {
            Some(first) => first.join(service),
            None => {
                places.insert(key, joined.len());
                joined.push(service);
            }
        }
    }
    *services = joined;
}

/// Removes addresses (with the same protocol) and marks that an earlier service has, and services
/// that then have neither. Reports each removal in `lost`.
fn without_twins(services: &mut Vec<Service>, lost: &mut Vec<String>) {
    let mut seen: HashMap<(String, String), String> = HashMap::new();
    services.retain_mut(|service| {
        let protocol = service.keys.get("protocol").cloned().unwrap_or_default();
        let servers: Vec<&str> = service
            .servers
            .iter()
            .map(|server| server.address.as_str())
            .collect();
        let servers = match servers.is_empty() {
            true => String::new(),
            false => format!(
                "; these servers are not added to it: {}",
                servers.join(", ")
            ),
        };
        let at = service.at.clone();
        let mut first = |what: String, protocol: String| {
            let place = seen.entry((what.clone(), protocol)).or_insert(at.clone());
            let is_first = *place == at;
            if !is_first {
                lost.push(format!(
                    "{at}: {what}: it belongs to the virtual server at {place} already{servers}"
                ));
            }
            is_first
        };
        let before = service.addresses.len();
        service
            .addresses
            .retain(|address| first(address.clone(), protocol.clone()));
        if let Some((mark, six)) = service.fwmark {
            let six = if six { " of IPv6" } else { "" };
            return first(format!("mark {mark}{six}"), String::new());
        }
        before == 0 || !service.addresses.is_empty()
    });
}

/// Removes the name of each service whose name an earlier service has, and reports it.
fn unique_names(services: &mut [Service]) {
    let mut seen = HashSet::new();
    for service in services {
        if let Some(name) = service.keys.get("name").cloned()
            && !seen.insert(name.clone())
        {
            service.keys.remove("name");
            let at = &service.at;
            service
                .lost
                .push(format!("{at}: name {name}: another service has this name"));
        }
    }
}

/// Removes and reports servers with the address and port of a virtual server: their packets would
/// loop.
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
            // Port 0 means every port.
            let is_theirs = |port: u16| port == 0 || theirs.contains(&0) || theirs.contains(&port);
            let is_one = match own {
                Some(port) => is_theirs(port),
                None => ports.is_empty() || ports.iter().any(|port| is_theirs(*port)),
            };
            if is_one {
                lost.push(server.lost_whole("it is a virtual server"));
            }
            !is_one
        });
    }
}

/// Maximum number of services that are checked cumulatively: each together with the accepted
/// services before it. If a file has more services, each is checked alone, so that the time stays
/// proportional to their number.
const TRIED_MAX: usize = 256;

/// Removes services that lvsd refuses in spite of the previous steps, and adds the reasons to
/// `lost`.
fn without_refused(begin: &str, services: &mut Vec<Service>, lost: &mut Vec<String>) {
    let mut all = begin.to_owned();
    for service in services.iter() {
        service.write(&mut all);
    }
    if refused(&all).is_none() {
        return;
    }
    let together = services.len() <= TRIED_MAX;
    let mut before = begin.to_owned();
    services.retain(|service| {
        let end = before.len();
        service.write(&mut before);
        let why = refused(&before);
        if why.is_some() || !together {
            before.truncate(end);
        }
        if let Some(why) = &why {
            lost.push(format!(
                "{}: {}: lvsd refuses it: {why}",
                service.at,
                service.name()
            ));
        }
        why.is_none()
    });
}

/// lvsd's first error about a file; `None` if the file is valid.
fn refused(toml: &str) -> Option<String> {
    let report = Config::from_toml("", toml).err()?.to_string();
    let mut lines = report.lines();
    let error = lines.find_map(|line| line.strip_prefix("error: "));
    Some(error.unwrap_or(&report).to_owned())
}
