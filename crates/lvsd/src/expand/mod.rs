//! Adds the servers and services of DNS, etcd and Kubernetes to those of the checked file:
//! [`expand`], a pure function.
//!
//! ```text
//! Config ────┐
//!            ├──▶ expand ──▶ Expanded ──┬── services: 1. of the file, 2. of etcd, 3. of Kubernetes
//! Gathered ──┘                          └── left_out: unusable answers, with the reasons
//! ```
//!
//! In each service, the servers of DNS and etcd follow those that the service itself names.
//! The file has precedence. Each key of etcd and each Service of Kubernetes is checked separately,
//! and an invalid text is replaced by the last valid one, if that can still be used.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use lvs_core::api::ServiceId;
use lvs_core::{Family, Forwarding, Protocol, ServiceKey};

use crate::config::clash::{Taken, is_it, listens_at, listens_everywhere, misfit, unusable};
use crate::config::{
    Config, Discovery, Files, SERVICES_MAX, Server, Service, VipMode, bounded, label,
};
use crate::sources::dns::NAMES_MAX;
use crate::sources::etcd::{Etcd, Text};
use crate::sources::{Gathered, Made, Record, Source};
use lvs_proxy as proxy;

/// The services of the file and of all sources.
#[derive(Clone, Debug, Default)]
pub struct Expanded {
    /// All services: those of the file in its order, then those of etcd, and then those of
    /// Kubernetes.
    pub services: Vec<Service>,
    /// Rules that set the marks of services with many ports, in the syntax of the dataplane.
    pub port_marks: Vec<String>,
    /// The files and keys that contain the services, for messages.
    pub files: Files,
    /// The unusable answers of DNS, etcd and Kubernetes, as text. The number of lines is limited.
    pub left_out: Vec<String>,
    /// Keys of etcd whose services are used, with their texts.
    pub in_force: Vec<(String, String)>,
    /// State of etcd from which the services were read.
    pub revision: Revision,
    /// The services of Kubernetes that are used, and the refused ones.
    pub kubernetes: Made,
    /// Number of services from Kubernetes, which are the last ones.
    of_kubernetes: usize,
    /// Whether etcd or Kubernetes has not answered yet, so that the list of services may be
    /// incomplete.
    pub awaits_services: bool,
}

/// A state of etcd: revision and content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revision {
    /// The revision of the last change of services or servers.
    pub number: i64,
    /// Digest of the content; equal contents have equal digests.
    pub digest: u32,
}

/// Returns the services of `config` and of DNS, etcd and Kubernetes.
pub fn expand(config: &Config, gathered: &Gathered) -> Expanded {
    let cluster = config.cluster.as_ref();
    let etcd = gathered.etcd.as_ref();
    // Keys under another prefix belong to another cluster.
    let etcd = etcd.filter(|etcd| cluster.is_some_and(|cluster| cluster.prefix == etcd.prefix));
    let kubernetes = gathered.kubernetes.as_ref().filter(|known| {
        let settings = config.kubernetes.as_ref();
        settings.is_some_and(|settings| settings.name() == known.name)
    });
    let mut expanded = Expanded {
        services: config.services.clone(),
        files: config.files.clone(),
        awaits_services: cluster.is_some() && etcd.is_none()
            || config.kubernetes.is_some() && kubernetes.is_none(),
        ..Expanded::default()
    };
    let mut services = expanded.services.iter();
    if etcd.is_some() || kubernetes.is_some() || services.any(|service| service.discovery.is_some())
    {
        let mut present = Present::default();
        expanded.services.iter().for_each(|one| present.add(one));
        if let Some(etcd) = etcd {
            expanded.revision = Revision {
                number: etcd.revision,
                digest: etcd.digest(),
            };
            let before = format!("{}services/", etcd.prefix);
            let origin = |name: &str| {
                (
                    format!("etcd key {before}{name}"),
                    format!("etcd:{before}{name}"),
                )
            };
            let made = expanded.take_services(config, &etcd.services, &origin, &mut present);
            expanded.in_force = made.in_force;
        }
        if let Some(kubernetes) = kubernetes {
            let origin = |name: &str| {
                (
                    format!("Kubernetes Service {name}"),
                    format!("kubernetes:{name}"),
                )
            };
            let before = expanded.services.len();
            expanded.kubernetes =
                expanded.take_services(config, &kubernetes.services, &origin, &mut present);
            expanded.of_kubernetes = expanded.services.len() - before;
        }
        expanded.take_servers(gathered, etcd, &present);
    }
    expanded.left_out = bounded(std::mem::take(&mut expanded.left_out));
    expanded.port_marks = port_marks(&expanded.services);
    expanded
}

impl Expanded {
    /// The DNS names from which servers are taken.
    pub(crate) fn dns_names(&self) -> BTreeSet<&String> {
        self.services.iter().filter_map(dns_name).collect()
    }

    /// Adds the services in the values of `keys`, and returns which keys are used and which are
    /// refused. `origin` returns the name of a key in messages, and the name of its text in the
    /// list of files.
    fn take_services(
        &mut self,
        config: &Config,
        keys: &BTreeMap<String, Text>,
        origin: &dyn Fn(&str) -> (String, String),
        present: &mut Present,
    ) -> Made {
        let mut made = Made::default();
        for (name, key) in keys {
            let (place, file) = origin(name);
            let (used, why) = choose(config, present, key);
            if let Some(why) = why {
                let instead = match used {
                    Some(_) => "; its previous state stays",
                    None => "",
                };
                self.left_out.push(format!("{place}: {why}{instead}"));
                made.refused.insert(name.clone(), why);
            }
            let Some((services, text)) = used else {
                continue;
            };
            let before = self.files.push(file, text);
            for mut service in services {
                service.move_lines(before);
                present.add(&service);
                self.services.push(service);
            }
            made.in_force.push((name.clone(), text.to_owned()));
        }
        made
    }

    /// Adds the servers from DNS and etcd to the services, and lists unusable servers in
    /// `left_out`. Omits servers that a service already has, and servers of another address family
    /// that the service cannot use.
    fn take_servers(&mut self, gathered: &Gathered, etcd: Option<&Etcd>, present: &Present) {
        for service in &mut self.services {
            let Some(discovery) = service.discovery.clone() else {
                continue;
            };
            let records: Option<Vec<Record>> = match &discovery.source {
                Source::Dns(name) => gathered.dns.get(name).cloned(),
                Source::Etcd(pool) => {
                    let pool = etcd.and_then(|etcd| etcd.pools.get(pool));
                    pool.map(|servers| servers.values().copied().collect())
                }
            };
            service.incomplete = records.is_none();
            // After an answer of etcd, a pool without servers is really empty.
            let heard = matches!(discovery.source, Source::Etcd(_)) && etcd.is_some();
            service.unheard = service.incomplete && !heard;
            let servers = service.servers.iter().map(|server| server.address);
            let mut there: HashSet<SocketAddr> = servers.collect();
            for record in records.unwrap_or_default() {
                let address = SocketAddr::new(record.ip, record.port.unwrap_or(discovery.port));
                // Only servers behind a tunnel may have another address family than the service.
                let family = Family::of(&record.ip) == ServiceKey::from(service.id).family();
                let fits = family || discovery.config.forwarding == Forwarding::Tunnel;
                if !fits || !there.insert(address) {
                    continue;
                }
                match server(service, &discovery, address, record.weight, present) {
                    Ok(server) => service.servers.push(server),
                    Err(why) => {
                        let line = format!("server {address} of {}: {why}", label(&service.id));
                        self.left_out.push(line);
                    }
                }
            }
        }
    }

    /// Whether `other` is equal, regardless of the revision of etcd.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.services == other.services
            && self.files == other.files
            && self.left_out == other.left_out
            && self.in_force == other.in_force
            && self.kubernetes == other.kubernetes
            && self.awaits_services == other.awaits_services
    }

    /// Number of servers of all services.
    pub fn servers(&self) -> usize {
        self.services.iter().map(|s| s.servers.len()).sum()
    }

    /// The services of the file and of etcd, and the services of Kubernetes.
    pub(crate) fn by_origin(&self) -> (&[Service], &[Service]) {
        self.services
            .split_at(self.services.len() - self.of_kubernetes)
    }

    /// Whether the dataplane's service `id`, or some of its servers, must stay because their source
    /// has not answered yet.
    pub fn awaits(&self, id: ServiceId) -> bool {
        let mut services = self.services.iter();
        match services.find(|service| service.id == id) {
            Some(service) => service.unheard,
            None => self.awaits_services,
        }
    }

    /// The services that lvsd proxies itself, with the options of the proxy.
    pub fn proxied(&self) -> HashMap<ServiceId, proxy::Options> {
        let services = self.services.iter();
        services
            .filter_map(|service| Some((service.id, service.proxy?)))
            .collect()
    }

    /// Whether a dataplane is needed: a service uses it, or there is no service.
    pub fn needs_dataplane(&self) -> bool {
        self.services.is_empty() || self.services.iter().any(|service| service.proxy.is_none())
    }

    /// VIPs that the dataplane should own; `on_host` returns whether the host has an address.
    pub fn own_vips(&self, on_host: impl Fn(IpAddr) -> bool) -> Vec<IpAddr> {
        let declared_on_host = |ip| {
            self.services
                .iter()
                .filter(|s| matches!(s.vip, VipMode::Host | VipMode::Announce))
                .any(|s| s.virtual_ip() == Some(ip))
        };
        let mut all: Vec<IpAddr> = self
            .services
            .iter()
            .filter(|s| s.proxy.is_none())
            .filter_map(|s| Some((s.vip, s.virtual_ip()?)))
            .filter(|(mode, ip)| match mode {
                VipMode::Own => true,
                VipMode::Host | VipMode::Announce => false,
                VipMode::Auto => !on_host(*ip) && !declared_on_host(*ip),
            })
            .map(|(_, ip)| ip)
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Returns the services of a key and their text, and the reason if the present text of the key is
/// refused. The last valid text then replaces it, unless that text is now invalid, too, or
/// conflicts with the services in `present`.
fn choose<'a>(
    config: &Config,
    present: &Present,
    key: &'a Text,
) -> (Option<(Vec<Service>, &'a str)>, Option<String>) {
    let read = |text: &'a str| {
        let services = config.remote_services(text)?;
        match present.clash(&services) {
            None => Ok((services, text)),
            Some(why) => Err(why),
        }
    };
    match read(&key.text) {
        Ok(used) => (Some(used), None),
        Err(why) => {
            let good = key.good.as_deref().filter(|good| *good != key.text);
            (good.and_then(|good| read(good).ok()), Some(why))
        }
    }
}

/// The server at `address`, or the reason why the service cannot use it.
fn server(
    service: &Service,
    discovery: &Discovery,
    address: SocketAddr,
    weight: Option<u16>,
    present: &Present,
) -> Result<Server, String> {
    if let Some((why, _)) = unusable(address.ip(), "server") {
        return Err(why);
    }
    let (id, method) = (service.id, discovery.config.forwarding);
    if let Some(misfit) = misfit(&id, service.ports.is_some(), address, method) {
        return Err(misfit.title);
    }
    let sorry = service.sorry.as_ref();
    if sorry.is_some_and(|sorry| sorry.address == address) {
        return Err("it is the sorry server of the service".to_owned());
    }
    if let Some(other) = present.service_at(&id, address) {
        return Err(format!(
            "its address and port belong to the service {}",
            label(&other.id)
        ));
    }
    let check = discovery.check.clone().map(|check| check.of(address));
    let mut config = discovery.config;
    config.weight = weight.map_or(config.weight, i32::from);
    Ok(Server {
        line: discovery.line,
        address,
        config,
        check: check.transpose().map_err(|wrong| wrong.title.to_owned())?,
    })
}

/// The services that were accepted so far, with indexes to find conflicts.
#[derive(Default)]
struct Present {
    count: usize,
    taken: Taken<()>,
    names: HashSet<String>,
    /// The DNS names from which servers are taken.
    dns: HashSet<String>,
    /// Services by virtual address, without their servers.
    services: HashMap<IpAddr, Vec<Service>>,
    /// The servers in files and in keys of etcd and Kubernetes, by address.
    servers: HashMap<IpAddr, Vec<(ServiceId, SocketAddr)>>,
}

fn own_servers(service: &Service) -> impl Iterator<Item = SocketAddr> {
    let servers = service.servers.iter().chain(&service.sorry);
    servers.map(|server| server.address)
}

/// DNS name that supplies the service's servers, if there is one.
fn dns_name(service: &Service) -> Option<&String> {
    match &service.discovery.as_ref()?.source {
        Source::Dns(name) => Some(name),
        Source::Etcd(_) => None,
    }
}

impl Present {
    fn add(&mut self, service: &Service) {
        self.count += 1;
        self.taken.take(service, (), ());
        self.names.insert(service.name.clone());
        self.dns.extend(dns_name(service).cloned());
        for server in own_servers(service) {
            let beside = self.servers.entry(server.ip()).or_default();
            beside.push((service.id, server));
        }
        if let Some(ip) = service.virtual_ip() {
            let alone = Service {
                servers: Vec::new(),
                ..service.clone()
            };
            self.services.entry(ip).or_default().push(alone);
        }
    }

    /// Returns the reason why the services of a key cannot be added to the present ones, if any.
    fn clash(&self, services: &[Service]) -> Option<String> {
        if self.count + services.len() > SERVICES_MAX {
            return Some(format!("there are more than {SERVICES_MAX} services"));
        }
        let dns: HashSet<_> = services.iter().filter_map(dns_name).collect();
        let names = self.dns.len() + dns.iter().filter(|name| !self.dns.contains(**name)).count();
        if names > NAMES_MAX {
            return Some(format!(
                "the services have {names} names in DNS, and at most {NAMES_MAX} are resolved"
            ));
        }
        services.iter().find_map(|service| self.clash_of(service))
    }

    fn clash_of(&self, service: &Service) -> Option<String> {
        if let Some(clash) = self.taken.clashes(service).into_iter().next() {
            return Some(clash.title);
        }
        if self.names.contains(&service.name) {
            return Some(format!("two services are called `{}`", service.name));
        }
        let reported = |server: SocketAddr, other: &Service| {
            format!(
                "the address of the server {server} belongs to the service {}",
                label(&other.id)
            )
        };
        let mut own = own_servers(service);
        let theirs =
            own.find_map(|server| Some(reported(server, self.service_at(&service.id, server)?)));
        theirs.or_else(|| Some(reported(self.server_of(service)?, service)))
    }

    /// Returns another service that would receive the packets to a server of the service `of`, if
    /// there is one.
    fn service_at(&self, of: &ServiceId, server: SocketAddr) -> Option<&Service> {
        let at = |ip: IpAddr| self.services.get(&ip).into_iter().flatten();
        let mut beside = at(server.ip()).filter(|other| other.id != *of);
        let any = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let mut everywhere = any
            .into_iter()
            .flat_map(at)
            .filter(|one| listens_everywhere(one));
        beside
            .find(|other| is_it(server, other))
            .or_else(|| everywhere.find(|other| listens_at(other, of, server, |_| false)))
    }

    /// A server of another service whose packets `service` would receive, if there is one.
    fn server_of(&self, service: &Service) -> Option<SocketAddr> {
        if listens_everywhere(service) {
            let mut all = self.servers.values().flatten();
            let found = all.find(|(of, server)| listens_at(service, of, *server, |_| false));
            return found.map(|(_, server)| *server);
        }
        let mut there = self.servers.get(&service.virtual_ip()?)?.iter();
        let found = there.find(|(of, server)| *of != service.id && is_it(*server, service));
        found.map(|(_, server)| *server)
    }
}

/// Mark rules for services with many ports.
fn port_marks(services: &[Service]) -> Vec<String> {
    let mut single: HashMap<(Protocol, IpAddr), Vec<u16>> = HashMap::new();
    for (protocol, addr) in services.iter().filter_map(|service| service.id.endpoint()) {
        let ports = single.entry((protocol, addr.ip())).or_default();
        ports.push(addr.port());
    }
    let many = services.iter().filter_map(|service| service.ports.as_ref());
    many.filter_map(|many| {
        let apart = single.get(&(many.protocol, many.ip));
        many.rule(apart.map_or(&[][..], Vec::as_slice))
    })
    .map(|rule| rule.to_string())
    .collect()
}

#[cfg(test)]
mod tests;
