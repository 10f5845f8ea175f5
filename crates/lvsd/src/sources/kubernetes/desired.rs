//! Translates Kubernetes objects to services (pure functions). Each port of a Service at each of
//! its addresses becomes the TOML of a `[[service]]`, as in etcd. The daemon checks each of these
//! texts separately.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use lvs_core::{Family, Prefix, sched::BUILT_IN};

use super::Settings;
use super::addresses::Assigned;
use super::model::{EXCLUDED, Model, PREFIX, ZONE};
use super::objects::{Node, Service, ServicePort, Use};

/// Maximum number of services from all Services together.
const TEXTS_MAX: usize = 4096;
/// Maximum number of servers of a service.
const SERVERS_MAX: usize = 1024;
/// Maximum number of servers of all services.
const ALL_SERVERS_MAX: usize = 65_536;
/// Maximum number of networks in `spec.loadBalancerSourceRanges`.
const RANGES_MAX: usize = 1024;
/// Supported annotations, without their prefix.
const ANNOTATIONS: [&str; 10] = [
    "address",
    "check",
    "forward",
    "limits",
    "pool",
    "scheduler",
    "servers",
    "share",
    "weights",
    "zones",
];
/// Limits that the annotation `limits` can set: keys of `limits` in the file.
const LIMITS: [&str; 5] = [
    "connections",
    "rate",
    "source_rate",
    "source_bits_v4",
    "source_bits_v6",
];
/// Maximum weight of a node or zone in an annotation.
const WEIGHT_MAX: u32 = 1000;
/// Maximum length of a check's path in bytes.
const PATH_MAX: usize = 1024;
/// Kubernetes' default timeout of `sessionAffinity: ClientIP` in seconds.
const AFFINITY: u32 = 10_800;

/// The translated Services.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Desired {
    /// TOML of each service, by `NAMESPACE/NAME/PROTOCOL/PORT` and, for IPv6, `/ipv6`.
    pub(super) texts: BTreeMap<String, String>,
    /// Services that cannot be translated, with reasons.
    pub(super) refused: BTreeMap<String, String>,
}

/// The servers of a Service: nodes or endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Servers {
    Nodes,
    Endpoints,
}

/// Checked annotations of a Service, except for those that concern its addresses.
struct Options<'a> {
    scheduler: Option<&'a str>,
    forward: Option<&'a str>,
    check: Option<&'a str>,
    servers: Servers,
    limits: Vec<(&'a str, u32)>,
    /// Weights of nodes; the default is 1.
    weights: BTreeMap<&'a str, u32>,
    /// Weights of zones; the default is 0, or 1 if the map is empty.
    zones: BTreeMap<&'a str, u32>,
}

/// Parses an annotation: `NAME=NUMBER,...`, with numbers up to `most`.
fn numbers<'a>(annotation: &str, value: &'a str, most: u32) -> Result<Vec<(&'a str, u32)>, String> {
    let mut all: Vec<(&str, u32)> = Vec::new();
    for word in value.split(',').map(str::trim) {
        let parts = word.split_once('=');
        let parts = parts.map(|(name, number)| (name.trim(), number.trim().parse::<u32>()));
        let Some((name, Ok(number))) = parts.filter(|(name, _)| !name.is_empty()) else {
            return Err(format!(
                "annotation {annotation}: `{word}` is not NAME=NUMBER"
            ));
        };
        if number > most {
            return Err(format!(
                "annotation {annotation}: {number} is more than {most}"
            ));
        }
        all.push((name, number));
    }
    all.sort_unstable();
    if let Some(pair) = all.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!(
            "annotation {annotation}: it contains `{}` twice",
            pair[0].0
        ));
    }
    Ok(all)
}

/// Path of the HTTP check that an annotation requests; `None` if it requests another check, or if
/// the path is invalid.
fn http_path(check: &str) -> Option<&str> {
    let path = check.strip_prefix("http:")?;
    let right = |b: u8| b.is_ascii_graphic() && b != b'"' && b != b'\\';
    let right = path.starts_with('/') && path.len() <= PATH_MAX && path.bytes().all(right);
    right.then_some(path)
}

impl<'a> Options<'a> {
    /// Checks the annotations of a Service.
    ///
    /// # Errors
    /// An annotation is unknown or invalid, or two annotations cannot be combined.
    fn of(service: &'a Service) -> Result<Self, String> {
        let mut options = Self {
            scheduler: None,
            forward: None,
            check: None,
            servers: Servers::Nodes,
            limits: Vec::new(),
            weights: BTreeMap::new(),
            zones: BTreeMap::new(),
        };
        for (name, value) in &service.metadata.annotations {
            let Some(key) = name.strip_prefix(PREFIX) else {
                continue;
            };
            let value = value.as_str();
            let one_of = |all: &[&str]| match all.contains(&value) {
                true => Ok(Some(value)),
                false => Err(format!(
                    "annotation {name}: `{value}` is none of {}",
                    all.join(", ")
                )),
            };
            match key {
                "scheduler" => {
                    let mut names: Vec<&str> = BUILT_IN.iter().map(|one| one.name).collect();
                    names.sort_unstable();
                    options.scheduler = one_of(&names)?;
                }
                "forward" => options.forward = one_of(&["nat", "fullnat", "proxy", "tun"])?,
                "check" if http_path(value).is_some() => options.check = Some(value),
                "check" => {
                    options.check = one_of(&["none", "tcp", "healthz"])
                        .map_err(|why| format!("{why}, http:/PATH"))?;
                }
                "limits" => {
                    let limits = numbers(name, value, u32::MAX)?;
                    if let Some((limit, _)) =
                        limits.iter().find(|(limit, _)| !LIMITS.contains(limit))
                    {
                        return Err(format!(
                            "annotation {name}: `{limit}` is none of {}",
                            LIMITS.join(", ")
                        ));
                    }
                    options.limits = limits;
                }
                "weights" => {
                    options.weights = numbers(name, value, WEIGHT_MAX)?.into_iter().collect();
                }
                "zones" => options.zones = numbers(name, value, WEIGHT_MAX)?.into_iter().collect(),
                "servers" if one_of(&["nodes", "endpoints"])? == Some("endpoints") => {
                    options.servers = Servers::Endpoints;
                }
                known if ANNOTATIONS.contains(&known) => {}
                _ => {
                    let all = ANNOTATIONS.map(|key| format!("{PREFIX}{key}")).join(", ");
                    return Err(format!(
                        "annotation {name} is unknown; the known annotations are {all}"
                    ));
                }
            }
        }
        if options.forward == Some("tun") && options.servers == Servers::Nodes {
            return Err(format!(
                "annotation {PREFIX}forward: `tun` does not reach node ports; set annotation {PREFIX}servers to `endpoints`"
            ));
        }
        Ok(options)
    }

    /// Multiplies weights by those of nodes and zones. If no server in a zone with a weight above 0
    /// accepts new connections, the weights of zones have no effect.
    fn weigh(
        &self,
        model: &Model,
        servers: BTreeMap<SocketAddr, Server<'_>>,
    ) -> BTreeMap<SocketAddr, u16> {
        let by_node = |server: &Server<'_>| {
            let factor = server.node.and_then(|node| self.weights.get(node));
            u32::from(server.weight) * factor.unwrap_or(&1)
        };
        let by_zone = |server: &Server<'_>| {
            let node = server.node.and_then(|node| model.nodes.get(node));
            let zone = node.and_then(|node| node.metadata.labels.get(ZONE));
            let factor = zone.and_then(|zone| self.zones.get(zone.as_str()));
            by_node(server).saturating_mul(*factor.unwrap_or(&0))
        };
        let zones = !self.zones.is_empty() && servers.values().any(|one| by_zone(one) > 0);
        let weight = |server: &Server<'_>| match zones {
            true => by_zone(server),
            false => by_node(server),
        };
        let most = |weight: u32| u16::try_from(weight).unwrap_or(u16::MAX);
        let servers = servers.iter();
        servers
            .map(|(address, server)| (*address, most(weight(server))))
            .collect()
    }
}

/// A server, before annotations change its weight.
#[derive(Clone, Copy, Default)]
struct Server<'a> {
    weight: u16,
    /// Node of the server, if it is known.
    node: Option<&'a str>,
}

/// Translates into TOML all Services that lvsd serves and that have addresses. A Service that
/// cannot be translated is not an error: [`Desired::refused`] gets the reason.
///
/// # Errors
/// There are too many ports, counted at each address, or too many servers.
pub(super) fn desired(
    model: &Model,
    assigned: &Assigned,
    settings: &Settings,
) -> Result<Desired, String> {
    let mut desired = Desired::default();
    let nodes = Nodes::of(model);
    let mut servers = 0;
    for (key, service) in &model.services {
        let Some(addresses) = assigned
            .given
            .get(key)
            .filter(|_| settings.is_ours(service))
        else {
            continue;
        };
        match texts(model, &nodes, key, service, addresses) {
            Ok((texts, count)) => {
                servers += count;
                desired.texts.extend(texts);
            }
            Err(why) => drop(desired.refused.insert(key.clone(), why)),
        }
        if desired.texts.len() > TEXTS_MAX {
            return Err(format!(
                "the Services have more than {TEXTS_MAX} ports in all, counted at each address"
            ));
        }
        if servers > ALL_SERVERS_MAX {
            return Err(format!(
                "the Services have more than {ALL_SERVERS_MAX} servers in all"
            ));
        }
    }
    Ok(desired)
}

/// TOML of all services of a Service, and their number of servers.
///
/// # Errors
/// The Service cannot be translated; the text is the reason.
fn texts(
    model: &Model,
    nodes: &Nodes<'_>,
    key: &str,
    service: &Service,
    addresses: &[IpAddr],
) -> Result<(Vec<(String, String)>, usize), String> {
    let options = Options::of(service)?;
    let mut all = Vec::new();
    let mut count = 0;
    for &ip in addresses {
        for port in &service.spec.ports {
            let protocol = port
                .protocol
                .as_deref()
                .unwrap_or("TCP")
                .to_ascii_lowercase();
            if !matches!(protocol.as_str(), "tcp" | "udp" | "sctp") {
                return Err(format!(
                    "port {}: the protocol {protocol} is unknown",
                    port.port
                ));
            }
            let servers = match options.servers {
                Servers::Nodes => nodes.servers(model, key, service, port, Family::of(&ip))?,
                Servers::Endpoints => endpoints(model, key, port, Family::of(&ip)),
            };
            let servers = options.weigh(model, servers);
            if servers.len() > SERVERS_MAX {
                return Err(format!(
                    "port {} has {} servers, and the maximum is {SERVERS_MAX}",
                    port.port,
                    servers.len()
                ));
            }
            count += servers.len();
            let family = if ip.is_ipv6() { "/ipv6" } else { "" };
            let name = format!("{key}/{protocol}/{}{family}", port.port);
            let address = SocketAddr::new(ip, port.port);
            let text = text(&name, service, &options, (&protocol, address), &servers)?;
            all.push((name, text));
        }
    }
    Ok((all, count))
}

/// TOML of one service. All values are checked, so that they need no escaping.
///
/// # Errors
/// The check or a network in `spec.loadBalancerSourceRanges` is invalid; the text is the reason.
fn text(
    name: &str,
    service: &Service,
    options: &Options<'_>,
    (protocol, address): (&str, SocketAddr),
    servers: &BTreeMap<SocketAddr, u16>,
) -> Result<String, String> {
    let mut text = format!(
        "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n"
    );
    for (key, value) in [
        ("scheduler", options.scheduler),
        ("forward", options.forward),
    ] {
        if let Some(value) = value {
            let _ = writeln!(text, "{key} = \"{value}\"");
        }
    }
    if let Some(check) = check(service, options, protocol)? {
        let _ = writeln!(text, "check = {check}");
    }
    let spec = &service.spec;
    if spec.session_affinity.as_deref() == Some("ClientIP") {
        let config = spec.session_affinity_config.as_ref();
        let client = config.and_then(|config| config.client_ip.as_ref());
        let seconds = client
            .and_then(|client| client.timeout_seconds)
            .unwrap_or(AFFINITY);
        let _ = writeln!(text, "persistence = {{ timeout = \"{seconds}s\" }}");
    }
    if !spec.load_balancer_source_ranges.is_empty() {
        let mut networks = Vec::new();
        let count = spec.load_balancer_source_ranges.len();
        if count > RANGES_MAX {
            return Err(format!(
                "spec.loadBalancerSourceRanges has {count} networks, and the maximum is {RANGES_MAX}"
            ));
        }
        for range in &spec.load_balancer_source_ranges {
            let network: Prefix = range.trim().parse().map_err(|_| {
                format!("spec.loadBalancerSourceRanges: `{range}` is not a network")
            })?;
            networks.push(format!("\"{network}\""));
        }
        let _ = writeln!(text, "filter = {{ allow = [{}] }}", networks.join(", "));
    }
    if !options.limits.is_empty() {
        let limits = options.limits.iter();
        let limits: Vec<String> = limits
            .map(|(name, number)| format!("{name} = {number}"))
            .collect();
        let _ = writeln!(text, "limits = {{ {} }}", limits.join(", "));
    }
    text.push_str("servers = [\n");
    for (server, weight) in servers {
        let _ = writeln!(text, "  {{ address = \"{server}\", weight = {weight} }},");
    }
    text.push_str("]\n");
    Ok(text)
}

/// TOML of the check; `None` for the check in `[defaults]`.
fn check(
    service: &Service,
    options: &Options<'_>,
    protocol: &str,
) -> Result<Option<String>, String> {
    let healthz = || {
        let port = service
            .spec
            .health_check_node_port
            .filter(|port| *port != 0);
        let port = port.filter(|_| options.servers == Servers::Nodes && is_local(service));
        port.map(|port| format!("{{ type = \"http\", port = {port}, path = \"/healthz\" }}"))
    };
    match options.check {
        Some("none") => Ok(Some("\"none\"".to_owned())),
        Some("healthz") => healthz().map(Some).ok_or_else(|| {
            format!(
                "annotation {PREFIX}check: `healthz` needs nodes as servers, and externalTrafficPolicy: Local"
            )
        }),
        Some(check) if protocol != "tcp" => Err(format!(
            "annotation {PREFIX}check: `{check}` checks TCP ports, and this port uses {protocol}"
        )),
        Some(check) => Ok(Some(match http_path(check) {
            Some(path) => format!("{{ type = \"http\", path = \"{path}\" }}"),
            None => "{ type = \"tcp\" }".to_owned(),
        })),
        _ if protocol == "tcp" => Ok(None),
        // No generic check exists for UDP and SCTP servers.
        _ => Ok(Some(healthz().unwrap_or_else(|| "\"none\"".to_owned()))),
    }
}

fn is_local(service: &Service) -> bool {
    service.spec.external_traffic_policy.as_deref() == Some("Local")
}

/// Nodes that can be servers.
struct Nodes<'a> {
    /// Name, node, and whether it accepts new connections.
    all: Vec<(&'a str, &'a Node, bool)>,
}

impl<'a> Nodes<'a> {
    fn of(model: &'a Model) -> Self {
        let is_ready = |node: &Node| {
            let mut conditions = node.status.conditions.iter();
            conditions.any(|condition| condition.kind == "Ready" && condition.status == "True")
        };
        // If no node is ready, the API server is probably at fault, and all nodes are used.
        let believed = model.nodes.values().any(is_ready);
        let all = model.nodes.iter();
        let all = all.filter(|(_, node)| !node.metadata.labels.contains_key(EXCLUDED));
        Self {
            all: all
                .map(|(name, node)| {
                    let stays = !node.spec.unschedulable
                        && node.metadata.deletion_timestamp.is_none()
                        && (is_ready(node) || !believed);
                    (name.as_str(), node, stays)
                })
                .collect(),
        }
    }

    /// The servers of a Service's port: nodes with an address of `family`, at the node port, with
    /// their weights. With `externalTrafficPolicy: Local`, only nodes with endpoints of the Service.
    ///
    /// # Errors
    /// The port has no `nodePort`.
    fn servers(
        &self,
        model: &'a Model,
        key: &str,
        service: &Service,
        port: &ServicePort,
        family: Family,
    ) -> Result<BTreeMap<SocketAddr, Server<'a>>, String> {
        let Some(node_port) = port.node_port.filter(|port| *port != 0) else {
            return Err(format!(
                "port {} has no nodePort: set allocateLoadBalancerNodePorts, or annotation {PREFIX}servers to `endpoints`",
                port.port
            ));
        };
        let local = is_local(service).then(|| by_node(model, key, family));
        let mut servers = BTreeMap::new();
        for (name, node, stays) in &self.all {
            let mut addresses = node.status.addresses.iter();
            let address = addresses.find_map(|one| {
                let ip = one.address.parse::<IpAddr>().ok()?;
                (one.kind == "InternalIP" && Family::of(&ip) == family).then_some(ip)
            });
            let weight = match &local {
                None => Some(1),
                Some(local) => local.get(name).copied(),
            };
            if let (Some(ip), Some(weight)) = (address, weight) {
                let server = Server {
                    weight: if *stays { weight } else { 0 },
                    node: Some(*name),
                };
                servers.insert(SocketAddr::new(ip, node_port), server);
            }
        }
        Ok(servers)
    }
}

/// Number of a Service's ready endpoints on each node; 0 if the node has only endpoints that accept
/// no new connections.
fn by_node<'a>(model: &'a Model, key: &str, family: Family) -> BTreeMap<&'a str, u16> {
    let mut nodes: BTreeMap<&str, u16> = BTreeMap::new();
    // An endpoint that moves between slices may be in both.
    let mut seen = BTreeSet::new();
    let slices = model.slices(key);
    for slice in slices.filter(|slice| slice.ipv6 == (family == Family::V6)) {
        for endpoint in &slice.endpoints {
            let Some(node) = endpoint.node_name.as_deref() else {
                continue;
            };
            let usage = endpoint.conditions.usage();
            if usage == Use::Gone {
                continue;
            }
            let ready = nodes.entry(node).or_default();
            let address = endpoint.addresses.first();
            if usage == Use::Ready && seen.insert(address) {
                *ready = ready.saturating_add(1);
            }
        }
    }
    nodes
}

/// The servers of a Service's port: its endpoints, with weight 0 if they accept no new connections.
fn endpoints<'a>(
    model: &'a Model,
    key: &str,
    port: &ServicePort,
    family: Family,
) -> BTreeMap<SocketAddr, Server<'a>> {
    let mut servers: BTreeMap<SocketAddr, Server<'_>> = BTreeMap::new();
    let slices = model.slices(key);
    for slice in slices.filter(|slice| slice.ipv6 == (family == Family::V6)) {
        let same = |one: Option<&str>, other: Option<&str>, usual: &str| {
            one.unwrap_or(usual) == other.unwrap_or(usual)
        };
        let mut ports = slice.ports.iter();
        let target = ports.find(|one| {
            same(one.name.as_deref(), port.name.as_deref(), "")
                && same(one.protocol.as_deref(), port.protocol.as_deref(), "TCP")
        });
        let Some(target) = target.and_then(|one| one.port) else {
            continue;
        };
        for endpoint in &slice.endpoints {
            let weight = match endpoint.conditions.usage() {
                Use::Gone => continue,
                Use::Drain => 0,
                Use::Ready => 1,
            };
            // All addresses of an endpoint belong to the same pod.
            let Some(ip) = endpoint.addresses.first().and_then(|ip| ip.parse().ok()) else {
                continue;
            };
            let known = servers.entry(SocketAddr::new(ip, target)).or_default();
            known.weight = weight.max(known.weight);
            known.node = endpoint.node_name.as_deref();
        }
    }
    servers
}

#[cfg(test)]
mod tests {
    use super::super::addresses::assign;
    use super::super::tests::{model, node, settings, slice};
    use super::*;
    use crate::cases::cases;
    use crate::config::Config;

    const WEB: &str = r#"{"metadata":{"namespace":"shop","name":"web"},
        "spec":{"type":"LoadBalancer","loadBalancerClass":"lvsd","ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080}]},
        "status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.10"}]}}}"#;

    fn annotated(name: &str, value: &str) -> String {
        let with = format!(r#""name":"web","annotations":{{"lvsd/{name}":"{value}"}}"#);
        WEB.replacen(r#""name":"web""#, &with, 1)
    }

    fn with_spec(more: &str) -> String {
        WEB.replace(r#""type":"#, &format!("{more},\"type\":"))
    }

    fn of(service: &str, slices: &[String], nodes: &[String]) -> Desired {
        let settings = settings("192.0.2.0/24");
        let model = model(&[service.to_owned()], slices, nodes);
        desired(&model, &assign(&model, &settings), &settings).unwrap()
    }

    fn text(service: &str) -> String {
        let desired = of(service, &[], &[node("n1", "10.0.0.1", "")]);
        let texts: Vec<String> = desired.texts.into_values().collect();
        assert_eq!(texts.len(), 1, "{:?}", desired.refused);
        let file = format!(
            "[dataplane]\nlocal_addresses = \"10.0.0.200\"\n[defaults]\nforward = \"nat\"\n{}",
            texts[0]
        );
        Config::from_toml("x", &file).unwrap_or_else(|report| panic!("{report}"));
        texts.concat()
    }

    /// A Service with a tunnel to its pods.
    fn tunnelled() -> String {
        annotated("servers", r#"endpoints","lvsd/forward":"tun"#)
    }

    #[test]
    fn tunnel_service_with_other_target_port_is_refused() {
        let slices = slice("web-1", &[("10.1.0.1", "n1", "ready")]);
        let read = |slice: String| {
            let desired = of(&tunnelled(), &[slice], &[]);
            Config::from_toml("x", &desired.texts["shop/web/tcp/80"])
        };
        let refused = read(slices.clone()).unwrap_err().to_string();
        assert!(
            refused.contains("tunnelling cannot change the port 80 to 8080"),
            "no `tunnelling cannot change the port 80 to 8080` in {refused}"
        );
        read(slices.replace("8080", "80")).unwrap_or_else(|report| panic!("{report}"));
    }

    fn refusal(service: &str) -> String {
        let mut desired = of(service, &[], &[]);
        assert!(desired.texts.is_empty(), "{desired:?}");
        desired
            .refused
            .remove("shop/web")
            .expect("the Service is refused")
    }

    /// The servers of the only service.
    fn servers(desired: &Desired) -> Vec<(String, u16)> {
        let text = desired
            .texts
            .values()
            .next()
            .expect("the Service is translated");
        let lines = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("{ address = \""));
        lines
            .map(|line| {
                let (address, rest) = line.split_once("\", weight = ").unwrap();
                let weight = rest.trim_end_matches(" },").parse().unwrap();
                (address.to_owned(), weight)
            })
            .collect()
    }

    fn weights(desired: &Desired) -> Vec<(String, u16)> {
        let all = servers(desired).into_iter();
        all.map(|(address, weight)| (address.split(':').next().unwrap().to_owned(), weight))
            .collect()
    }

    fn named<const N: usize>(all: [(&str, u16); N]) -> Vec<(String, u16)> {
        all.map(|(name, weight)| (name.to_owned(), weight)).into()
    }

    #[test]
    fn service_without_annotations_uses_all_nodes() {
        let nodes = [node("n1", "10.0.0.1", ""), node("n2", "10.0.0.2", "")];
        let desired = of(WEB, &[], &nodes);
        assert_eq!(
            desired.texts["shop/web/tcp/80"],
            "[[service]]\nname = \"shop/web/tcp/80\"\naddress = \"192.0.2.10:80\"\nprotocol = \"tcp\"\nservers = [\n  \
             { address = \"10.0.0.1:30080\", weight = 1 },\n  { address = \"10.0.0.2:30080\", weight = 1 },\n]\n"
        );
    }

    #[test]
    fn service_of_other_class_is_ignored_and_service_without_class_is_served_by_default_class_only()
    {
        for (class, ours) in [(r#""other""#, false), ("null", false), (r#""lvsd""#, true)] {
            let service = WEB.replace(r#""lvsd""#, class);
            assert_eq!(!of(&service, &[], &[]).texts.is_empty(), ours, "{class}");
        }
        let mut settings = settings("192.0.2.0/24");
        settings.default_class = true;
        let model = model(&[WEB.replace(r#""lvsd""#, "null")], &[], &[]);
        let desired = desired(&model, &assign(&model, &settings), &settings).unwrap();
        assert_eq!(desired.texts.len(), 1);
    }

    #[test]
    fn kubernetes_service_being_deleted_is_omitted() {
        let deleted = WEB.replacen(
            r#""name":"web""#,
            r#""name":"web","deletionTimestamp":"2026-01-01T00:00:00Z""#,
            1,
        );
        assert!(of(&deleted, &[], &[]).texts.is_empty());
    }

    #[test]
    fn cordoned_unready_or_deleted_node_is_drained_and_excluded_node_is_omitted() {
        let nodes = [
            node("n1", "10.0.0.1", ""),
            node("n2", "10.0.0.2", "cordoned"),
            node("n3", "10.0.0.3", "not ready"),
            node("n4", "10.0.0.4", "deleted"),
            node("n5", "10.0.0.5", "excluded"),
        ];
        let wanted = [
            ("10.0.0.1", 1),
            ("10.0.0.2", 0),
            ("10.0.0.3", 0),
            ("10.0.0.4", 0),
        ];
        assert_eq!(weights(&of(WEB, &[], &nodes)), named(wanted));
    }

    #[test]
    fn service_without_ready_node_uses_all_nodes() {
        let nodes = [
            node("n1", "10.0.0.1", "not ready"),
            node("n2", "10.0.0.2", "not ready"),
        ];
        let wanted = [("10.0.0.1", 1), ("10.0.0.2", 1)];
        assert_eq!(weights(&of(WEB, &[], &nodes)), named(wanted));
    }

    #[test]
    fn service_with_local_policy_uses_nodes_with_endpoints() {
        let local = with_spec(r#""externalTrafficPolicy":"Local","healthCheckNodePort":31000"#);
        let nodes =
            ["1", "2", "3", "4"].map(|n| node(&format!("n{n}"), &format!("10.0.0.{n}"), ""));
        let slices = [slice(
            "web-1",
            &[
                ("10.1.0.1", "n1", "ready"),
                ("10.1.0.2", "n1", "ready"),
                ("10.1.0.3", "n2", "draining"),
                ("10.1.0.4", "n3", "gone"),
            ],
        )];
        let desired = of(&local, &slices, &nodes);
        assert_eq!(weights(&desired), named([("10.0.0.1", 2), ("10.0.0.2", 0)]));
        assert!(!desired.texts["shop/web/tcp/80"].contains("check"));
    }

    /// Three nodes, in the zones `east`, `west` and `west`.
    fn zones(second: &str) -> [String; 3] {
        let zones = [
            ("n1", "east", ""),
            ("n2", "west", second),
            ("n3", "west", second),
        ];
        let mut last = 0;
        zones.map(|(name, zone, state)| {
            last += 1;
            let label = format!(r#""labels":{{"{ZONE}":"{zone}"}}"#);
            node(name, &format!("10.0.0.{last}"), state).replace(r#""labels":{}"#, &label)
        })
    }

    #[test]
    fn node_weight_multiplies_weights_of_servers_on_node() {
        let service = annotated("weights", "n1=3, n3=0, other=9");
        let wanted = [("10.0.0.1", 3), ("10.0.0.2", 1), ("10.0.0.3", 0)];
        assert_eq!(weights(&of(&service, &[], &zones(""))), named(wanted));
        let local = service.replace(r#""type":"#, r#""externalTrafficPolicy":"Local","type":"#);
        let slices = [slice(
            "web-1",
            &[("10.1.0.1", "n1", "ready"), ("10.1.0.2", "n1", "ready")],
        )];
        let wanted = [("10.0.0.1", 6)];
        assert_eq!(weights(&of(&local, &slices, &zones(""))), named(wanted));
        let all = service.replace(
            r#""lvsd/weights""#,
            r#""lvsd/servers":"endpoints","lvsd/weights""#,
        );
        let wanted = [("10.1.0.1", 3), ("10.1.0.2", 3)];
        assert_eq!(weights(&of(&all, &slices, &zones(""))), named(wanted));
    }

    #[test]
    fn zone_weights_apply_while_a_weighted_zone_has_servers() {
        let service = annotated("zones", "west=2");
        let wanted = [("10.0.0.1", 0), ("10.0.0.2", 2), ("10.0.0.3", 2)];
        assert_eq!(weights(&of(&service, &[], &zones(""))), named(wanted));
        // If all nodes of the zone drain, nodes of other zones are used.
        let wanted = [("10.0.0.1", 1), ("10.0.0.2", 0), ("10.0.0.3", 0)];
        assert_eq!(
            weights(&of(&service, &[], &zones("cordoned"))),
            named(wanted)
        );
        // Nodes without a zone.
        let nodes = [node("n1", "10.0.0.1", "")];
        assert_eq!(
            weights(&of(&service, &[], &nodes)),
            named([("10.0.0.1", 1)])
        );
    }

    #[test]
    fn endpoint_weight_is_1_if_ready_and_0_if_draining_or_unready() {
        let service = annotated("servers", "endpoints");
        let slices = [
            slice(
                "web-1",
                &[
                    ("10.1.0.1", "n1", "ready"),
                    ("10.1.0.2", "n1", "draining"),
                    ("10.1.0.3", "n1", "not ready"),
                    ("10.1.0.4", "n1", "gone"),
                    ("10.1.0.5", "n1", "not ready"),
                ],
            ),
            // The endpoint moves from one slice to the other.
            slice(
                "web-2",
                &[("10.1.0.5", "n1", "ready"), ("10.1.0.6", "n1", "unknown")],
            ),
        ];
        let wanted = [
            ("10.1.0.1:8080", 1),
            ("10.1.0.2:8080", 0),
            ("10.1.0.3:8080", 0),
            ("10.1.0.5:8080", 1),
            ("10.1.0.6:8080", 1),
        ];
        assert_eq!(servers(&of(&service, &slices, &[])), named(wanted));
        // A port with another name has no endpoints.
        let other = service.replace(r#""name":"http""#, r#""name":"x""#);
        assert_eq!(servers(&of(&other, &slices, &[])), []);
    }

    #[test]
    fn service_fields_and_annotations_become_toml_keys() {
        let has = |service: &str, line: &str| {
            let text = text(service);
            assert!(text.lines().any(|one| one == line), "{line}: {text}");
        };
        for [name, value, line] in cases(
            r#"
                scheduler | mh | scheduler = "mh"
                forward | fullnat | forward = "fullnat"
                check | none | check = "none"
                check | tcp | check = { type = "tcp" }
                check | http:/ready?full=1 | check = { type = "http", path = "/ready?full=1" }
                limits | rate=100, connections = 5 | limits = { connections = 5, rate = 100 }
            "#,
        ) {
            has(&annotated(name, value), line);
        }
        for [spec, line] in cases(
            r#"
                "sessionAffinity":"ClientIP" | persistence = { timeout = "10800s" }
                "sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":60}} | persistence = { timeout = "60s" }
                "loadBalancerSourceRanges":["198.51.100.0/24"," 2001:db8::/32"] | filter = { allow = ["198.51.100.0/24", "2001:db8::/32"] }
            "#,
        ) {
            has(&with_spec(spec), line);
        }
        has(&tunnelled(), "forward = \"tun\"");
        has(&WEB.replace("\"TCP\"", "\"UDP\""), "check = \"none\"");
        has(&WEB.replace("\"TCP\"", "\"SCTP\""), "protocol = \"sctp\"");
        let local = with_spec(r#""externalTrafficPolicy":"Local","healthCheckNodePort":31000"#);
        has(
            &local.replace("\"TCP\"", "\"UDP\""),
            "check = { type = \"http\", port = 31000, path = \"/healthz\" }",
        );
    }

    #[test]
    fn invalid_kubernetes_service_is_refused_with_reason() {
        let refused = |service: &str, words: &str| {
            let why = refusal(service);
            assert!(why.contains(words), "no {words:?} in {why}");
        };
        for [name, value, words] in cases(
            r#"
                scheduler | nonsense | `nonsense` is none of
                forward | dr | `dr` is none of nat, fullnat, proxy, tun
                forward | tun | `tun` does not reach node ports; set annotation lvsd/servers to `endpoints`
                servers | pods | `pods` is none of nodes, endpoints
                chek | tcp | lvsd/chek is unknown; the known annotations are lvsd/address,
                check | healthz | needs nodes as servers
                check | http:ready | `http:ready` is none of none, tcp, healthz, http:/PATH
                check | http:/a b | `http:/a b` is none of
                limits | connection=5 | lvsd/limits: `connection` is none of connections, rate,
                limits | rate=fast | `rate=fast` is not NAME=NUMBER
                weights | n1=1001 | lvsd/weights: 1001 is more than 1000
                weights | n1=1,n1=2 | it contains `n1` twice
                zones | east | lvsd/zones: `east` is not
                zones | | lvsd/zones: `` is not NAME=NUMBER
            "#,
        ) {
            refused(&annotated(name, value), words);
        }
        for check in ["http:/", "tcp"] {
            let udp = annotated("check", check).replace("\"TCP\"", "\"UDP\"");
            refused(&udp, "checks TCP ports");
        }
        let ranges = |ranges: &str| with_spec(&format!(r#""loadBalancerSourceRanges":[{ranges}]"#));
        refused(&ranges(r#""x\n""#), "is not a network");
        refused(
            &ranges(&vec![r#""10.0.0.0/8""#; RANGES_MAX + 1].join(",")),
            "has 1025 networks, and the maximum is 1024",
        );
        refused(
            &WEB.replace("\"TCP\"", "\"QUIC\""),
            "protocol quic is unknown",
        );
        refused(
            &WEB.replace(",\"nodePort\":30080", ""),
            "port 80 has no nodePort",
        );
    }

    #[test]
    fn service_with_ipv6_address_uses_ipv6_servers() {
        let service = with_spec(r#""ipFamilies":["IPv4","IPv6"]"#).replace(
            r#"{"ip":"192.0.2.10"}"#,
            r#"{"ip":"192.0.2.10"},{"ip":"2001:db8::10"}"#,
        );
        let mut settings = settings("192.0.2.0/24");
        settings.pools[0]
            .ranges
            .push("2001:db8::/64".parse().unwrap());
        let nodes = [node("n1", "10.0.0.1", ""), node("n2", "fd00::2", "")];
        let model = model(&[service], &[], &nodes);
        let desired = desired(&model, &assign(&model, &settings), &settings).unwrap();
        let text = &desired.texts["shop/web/tcp/80/ipv6"];
        assert!(text.contains("\"[2001:db8::10]:80\"") && text.contains("\"[fd00::2]:30080\""));
        assert!(!text.contains("10.0.0.1"));
    }

    #[test]
    fn service_without_endpoints_is_translated_to_valid_toml() {
        let desired = of(&annotated("servers", "endpoints"), &[], &[]);
        let text = &desired.texts["shop/web/tcp/80"];
        let file = format!("[defaults]\nforward = \"nat\"\n{text}");
        Config::from_toml("x", &file).unwrap_or_else(|report| panic!("{report}"));
    }

    #[test]
    fn service_with_too_many_servers_is_refused() {
        let count = SERVERS_MAX + 1;
        let nodes: Vec<String> = (0..count)
            .map(|n| {
                node(
                    &format!("n{n}"),
                    &format!("10.0.{}.{}", n / 256, n % 256),
                    "",
                )
            })
            .collect();
        let desired = of(WEB, &[], &nodes);
        assert!(desired.refused["shop/web"].contains("1025 servers"));
    }
}
