//! Assigns addresses from pools to Services (pure functions).
//!
//! `status.loadBalancer.ingress` is the only record. A Service keeps a usable address there until
//! it is deleted, or requests another address or pool. A Service without an address gets one that
//! it may share, or the first free address of a pool.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::str::FromStr;

use lvs_core::{Family, Prefix};

use super::Settings;
use super::model::{ANNOTATIONS_MAX, Model, PORTS_MAX, PREFIX};
use super::objects::Service;

/// Annotation with a key. Services of a namespace with equal keys may share an address if they have
/// no port in common.
const SHARE: &str = "lvsd/share";
/// Maximum number of Services that share an address.
const SHARERS_MAX: usize = 64;

/// A range of addresses of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    family: Family,
    first: u128,
    last: u128,
}

fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

impl Range {
    pub(crate) fn contains(&self, ip: IpAddr) -> bool {
        Family::of(&ip) == self.family && (self.first..=self.last).contains(&number(ip))
    }

    /// Whether two ranges have an address in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.family == other.family && self.first <= other.last && other.first <= self.last
    }

    /// The first address of the range that is not in `taken`; `None` if all are.
    fn free(&self, taken: &Taken<'_>) -> Option<IpAddr> {
        let address = |number: u128| match self.family {
            Family::V4 => u32::try_from(number)
                .ok()
                .map(|bits| IpAddr::V4(bits.into())),
            Family::V6 => Some(IpAddr::V6(number.into())),
        };
        let mut next = self.first;
        // Each iteration skips a used address.
        while next <= self.last {
            let ip = address(next)?;
            if !taken.owners.contains_key(&ip) {
                return Some(ip);
            }
            next = next.checked_add(1)?;
        }
        None
    }
}

impl FromStr for Range {
    type Err = String;

    /// Parses `192.0.2.0/24`, `192.0.2.10-192.0.2.20` or one address.
    fn from_str(text: &str) -> Result<Self, String> {
        let address = |text: &str| {
            let text = text.trim();
            text.parse::<IpAddr>()
                .map_err(|_| format!("`{text}` is not an address"))
        };
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (address(first)?, address(last)?),
            None if text.contains('/') => {
                let prefix: Prefix = text.trim().parse()?;
                let first = prefix.addr();
                let host = Family::of(&first).bits() - prefix.bits();
                let rest = u128::MAX.checked_shr(128 - u32::from(host)).unwrap_or(0);
                return Ok(Self {
                    family: prefix.family(),
                    first: number(first),
                    last: number(first) | rest,
                });
            }
            None => (address(text)?, address(text)?),
        };
        let family = Family::of(&first);
        if family != Family::of(&last) || number(first) > number(last) {
            return Err(format!(
                "`{text}` does not go from a lower to a higher address of the same family"
            ));
        }
        Ok(Self {
            family,
            first: number(first),
            last: number(last),
        })
    }
}

/// `[[kubernetes.pool]]`: addresses for Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// Address ranges of the pool.
    pub ranges: Vec<Range>,
    /// Whether Services that request no pool get addresses of this pool.
    pub auto_assign: bool,
}

impl Pool {
    fn contains(&self, ip: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(ip))
    }
}

/// Services that may share an address: namespace, and value of the annotation.
type Group<'a> = (&'a str, &'a str);

/// The group of a Service; `None` if the annotation [`SHARE`] is missing or empty, or if lvsd does
/// not serve the class of the Service.
fn group<'a>(service: &'a Service, settings: &Settings) -> Option<Group<'a>> {
    let meta = &service.metadata;
    let key = meta.annotations.get(SHARE).filter(|key| !key.is_empty());
    let key = key.filter(|_| settings.has_class(service))?;
    Some((meta.namespace.as_str(), key.as_str()))
}

/// Protocols and ports of a Service.
fn ports(service: &Service) -> impl Iterator<Item = (&str, u16)> {
    let ports = service.spec.ports.iter();
    ports.map(|port| (port.protocol.as_deref().unwrap_or("TCP"), port.port))
}

/// Addresses in use, with the Services that use them.
#[derive(Default)]
struct Taken<'a> {
    owners: BTreeMap<IpAddr, BTreeMap<&'a str, &'a Service>>,
    /// Addresses of the Services of each group.
    shared: BTreeMap<Group<'a>, BTreeSet<IpAddr>>,
}

impl<'a> Taken<'a> {
    /// Returns the key of a Service that uses `ip` and cannot share it with `service`; `None` if
    /// there is none, or if `service` already uses `ip`.
    fn other(
        &self,
        ip: IpAddr,
        (key, service): (&str, &Service),
        settings: &Settings,
    ) -> Option<&'a str> {
        let owners = self.owners.get(&ip)?;
        if owners.contains_key(key) {
            return None;
        }
        let own = group(service, settings);
        let full = owners.len() >= SHARERS_MAX;
        let mut owners = owners.iter();
        let other = owners.find(|(_, other)| {
            let together = own.is_some() && group(other, settings) == own;
            full || !together || ports(other).any(|port| ports(service).any(|own| own == port))
        });
        other.map(|(key, _)| *key)
    }

    fn take(&mut self, ip: IpAddr, (key, service): (&'a str, &'a Service), settings: &Settings) {
        self.owners.entry(ip).or_default().insert(key, service);
        if let Some(group) = group(service, settings) {
            self.shared.entry(group).or_default().insert(ip);
        }
    }
}

/// Addresses of all Services that lvsd serves.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Assigned {
    /// Addresses in the status that a Service may use.
    pub(super) given: BTreeMap<String, Vec<IpAddr>>,
    /// Addresses that a Service should have in its status instead of the present ones.
    pub(super) wanted: BTreeMap<String, Vec<IpAddr>>,
    /// The reasons why Services are refused, or do not get the requested addresses.
    pub(super) refused: BTreeMap<String, String>,
    /// Services that stay unchanged, because their status contains an address outside of the pools,
    /// or they have too many ports or too long annotations.
    pub(super) held: BTreeSet<String>,
}

/// Address families that a Service requests; IPv4 if it requests none.
pub(super) fn families(service: &Service) -> Vec<Family> {
    let families = service.spec.ip_families.iter();
    let families: Vec<Family> = families
        .filter_map(|family| match family.as_str() {
            "IPv4" => Some(Family::V4),
            "IPv6" => Some(Family::V6),
            _ => None,
        })
        .collect();
    match families.is_empty() {
        true => vec![Family::V4],
        false => families,
    }
}

/// Assigns addresses. Older Services have precedence.
pub(super) fn assign(model: &Model, settings: &Settings) -> Assigned {
    let mut by_age: Vec<(&String, &Service)> = model.services.iter().collect();
    by_age.sort_by_key(|(key, service)| (&service.metadata.creation_timestamp, *key));
    // Addresses of other classes and of Services that are being deleted are in use, too.
    let mut taken = Taken::default();
    for (key, service) in &by_age {
        for ip in Model::ingress(service) {
            if taken.other(ip, (key, service), settings).is_none() {
                taken.take(ip, (key, service), settings);
            }
        }
    }
    let mut assigned = Assigned::default();
    for (key, service) in by_age {
        if settings.is_ours(service) {
            assigned.one(key, service, settings, &mut taken);
        }
    }
    assigned
}

impl Assigned {
    fn one<'a>(
        &mut self,
        key: &'a str,
        service: &'a Service,
        settings: &Settings,
        taken: &mut Taken<'a>,
    ) {
        let too_large = if service.spec.ports.len() > PORTS_MAX {
            Some(format!(
                "the Service has more than {PORTS_MAX} ports; divide it into several Services"
            ))
        } else if service.annotation_bytes > ANNOTATIONS_MAX {
            Some(format!(
                "the annotations {PREFIX}... have {} bytes, and the maximum is {ANNOTATIONS_MAX}",
                service.annotation_bytes
            ))
        } else {
            None
        };
        if let Some(why) = too_large {
            self.refused.insert(key.to_owned(), why);
            self.held.insert(key.to_owned());
            return;
        }
        let mut refused: Option<String> = None;
        let mut refuse = |why: String| {
            refused.get_or_insert(why);
        };
        let in_status: Vec<IpAddr> = Model::ingress(service).collect();
        let families = families(service);
        let mut given: Vec<IpAddr> = Vec::new();
        let mut foreign = false;
        for &ip in &in_status {
            if let Some(other) = taken.other(ip, (key, service), settings) {
                refuse(format!(
                    "its status contains {ip}, which is in use by {other}: the Service needs another address"
                ));
            } else if !settings.pools.iter().any(|pool| pool.contains(ip)) {
                foreign = true;
                self.held.insert(key.to_owned());
                refuse(format!(
                    "its status contains {ip}, which is in no [[kubernetes.pool]]: add the address to a pool, or clear the status"
                ));
            } else if !given.contains(&ip) && families.contains(&Family::of(&ip)) {
                given.push(ip);
            }
        }
        let request = Request::of(service, settings).map_err(&mut refuse).ok();
        let mut target = Vec::new();
        for &family in &families {
            // A Service with an unreadable request keeps its addresses.
            let Some(request) = &request else { break };
            let have = given.iter().copied().find(|ip| Family::of(ip) == family);
            let asked = request
                .addresses
                .iter()
                .copied()
                .find(|ip| Family::of(ip) == family);
            let fits = |ip: &IpAddr| request.pool.is_none_or(|pool| pool.contains(*ip));
            let found = match (asked, have) {
                (Some(ip), _) => match taken.other(ip, (key, service), settings) {
                    Some(other) => {
                        refuse(format!(
                            "the requested address {ip} is in use by {other}: request another one"
                        ));
                        have
                    }
                    None => Some(ip),
                },
                (None, Some(ip)) if fits(&ip) => Some(ip),
                (None, _) => {
                    let shared = request.shared(family, (key, service), settings, taken);
                    let free = shared.or_else(|| request.free(family, settings, taken));
                    if free.is_none() && settings.has(family) {
                        refuse(request.exhausted(family));
                    }
                    free.or(have)
                }
            };
            if let Some(ip) = found {
                taken.take(ip, (key, service), settings);
                target.push(ip);
            }
        }
        if target.is_empty() && refused.is_none() {
            refused =
                Some("no [[kubernetes.pool]] has addresses of the Service's family".to_owned());
        }
        // A status with an address outside of the pools belongs to another controller.
        let changed = target != in_status || !has_present_ports(service);
        if !foreign && !target.is_empty() && changed {
            self.wanted.insert(key.to_owned(), target);
        }
        if !given.is_empty() {
            self.given.insert(key.to_owned(), given);
        }
        if let Some(why) = refused {
            self.refused.insert(key.to_owned(), why);
        }
    }
}

/// The addresses and pool that a Service requests.
#[derive(Default)]
struct Request<'a> {
    addresses: BTreeSet<IpAddr>,
    pool: Option<&'a Pool>,
}

impl<'a> Request<'a> {
    /// Reads the request of a Service.
    ///
    /// # Errors
    /// The requested pool or address is invalid; the text is the reason.
    fn of(service: &Service, settings: &'a Settings) -> Result<Self, String> {
        let annotation = |name: &str| {
            let name = format!("{PREFIX}{name}");
            service.metadata.annotations.get(&name).map(String::as_str)
        };
        let mut request = Self::default();
        if let Some(name) = annotation("pool") {
            let pool = settings.pools.iter().find(|pool| pool.name == name);
            request.pool =
                Some(pool.ok_or_else(|| {
                    format!("annotation {PREFIX}pool: there is no pool `{name}`")
                })?);
        }
        let field = service.spec.load_balancer_ip.as_deref();
        let field = field.filter(|ip| !ip.is_empty());
        let asked = annotation("address").map(|text| ("annotation lvsd/address", text));
        let Some((place, text)) = asked.or(field.map(|text| ("spec.loadBalancerIP", text))) else {
            return Ok(request);
        };
        for word in text.split(',').map(str::trim) {
            let Ok(ip) = word.parse::<IpAddr>() else {
                return Err(format!("{place}: `{word}` is not an address"));
            };
            let mut pools = settings.pools.iter();
            if !pools.any(|pool| pool.contains(ip)) {
                return Err(format!("{place}: {ip} is in no [[kubernetes.pool]]"));
            }
            if !families(service).contains(&Family::of(&ip)) {
                return Err(format!(
                    "{place}: {ip} is not of a family in spec.ipFamilies"
                ));
            }
            request.addresses.insert(ip);
        }
        Ok(request)
    }

    /// Pools from which the Service may get an address.
    fn pools(&self, settings: &'a Settings) -> impl Iterator<Item = &'a Pool> {
        settings.pools.iter().filter(|pool| match self.pool {
            Some(own) => own.name == pool.name,
            None => pool.auto_assign,
        })
    }

    /// An address of other Services in the group that this Service can share, if there is one.
    fn shared(
        &self,
        family: Family,
        (key, service): (&str, &Service),
        settings: &'a Settings,
        taken: &Taken<'_>,
    ) -> Option<IpAddr> {
        let addresses = taken.shared.get(&group(service, settings)?)?;
        let mut fitting = addresses.iter().copied().filter(|ip| {
            Family::of(ip) == family && self.pools(settings).any(|pool| pool.contains(*ip))
        });
        fitting.find(|ip| taken.other(*ip, (key, service), settings).is_none())
    }

    fn free(&self, family: Family, settings: &'a Settings, taken: &Taken<'_>) -> Option<IpAddr> {
        let mut ranges = self
            .pools(settings)
            .flat_map(|pool| &pool.ranges)
            .filter(|range| range.family == family);
        ranges.find_map(|range| range.free(taken))
    }

    fn exhausted(&self, family: Family) -> String {
        let family = match family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        match self.pool {
            Some(pool) => format!(
                "the pool `{}` has no free {family} address: add a range",
                pool.name
            ),
            None => format!(
                "no [[kubernetes.pool]] with auto_assign has a free {family} address: add a range"
            ),
        }
    }
}

/// Whether the status contains the present ports, or none.
fn has_present_ports(service: &Service) -> bool {
    let ingress = service.status.load_balancer.ingress.iter();
    let mut reported = ingress.filter(|one| !one.ports.is_empty());
    reported.all(|one| {
        let reported = one.ports.iter();
        reported
            .map(|port| (port.protocol.as_str(), port.port))
            .eq(ports(service))
    })
}

impl Settings {
    fn has(&self, family: Family) -> bool {
        let mut ranges = self.pools.iter().flat_map(|pool| &pool.ranges);
        ranges.any(|range| range.family == family)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{model, settings};
    use super::*;
    use crate::cases::cases;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// A Service of the configured class with addresses in its status, and further JSON fields.
    fn service(name: &str, created: u32, status: &[&str], more: &str) -> String {
        let ingress: Vec<String> = status
            .iter()
            .map(|ip| format!(r#"{{"ip":"{ip}"}}"#))
            .collect();
        format!(
            r#"{{"metadata":{{"namespace":"shop","name":"{name}","creationTimestamp":"2026-01-{created:02}T00:00:00Z"{more}}},
            "spec":{{"type":"LoadBalancer","loadBalancerClass":"lvsd"}},
            "status":{{"loadBalancer":{{"ingress":[{}]}}}}}}"#,
            ingress.join(",")
        )
    }

    fn assigned(services: &[String]) -> Assigned {
        assign(
            &model(services, &[], &[]),
            &settings("192.0.2.10-192.0.2.12"),
        )
    }

    fn annotation(name: &str, value: &str) -> String {
        format!(r#","annotations":{{"lvsd/{name}":"{value}"}}"#)
    }

    #[test]
    fn address_range_is_parsed_from_network_range_or_address_and_invalid_text_refused() {
        for [text, first, last, outside] in cases(
            r#"
                192.0.2.0/24 | 192.0.2.0 | 192.0.2.255 | 192.0.3.0
                192.0.2.9-192.0.2.11 | 192.0.2.9 | 192.0.2.11 | 192.0.2.12
                192.0.2.9 | 192.0.2.9 | 192.0.2.9 | 192.0.2.8
                2001:db8::/64 | 2001:db8:: | 2001:db8::ffff:ffff:ffff:ffff | 2001:db8:0:1::
                0.0.0.0/0 | 0.0.0.0 | 255.255.255.255 | ::
                ::/0 | :: | ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff | 1.1.1.1
            "#,
        ) {
            let range: Range = text.parse().expect(text);
            for ip in ips(&[first, last]) {
                assert!(range.contains(ip), "{text}: {ip}");
            }
            assert!(!range.contains(ips(&[outside])[0]), "{text}: {outside}");
        }
        for wrong in [
            "",
            "x",
            "192.0.2.9-192.0.2.8",
            "192.0.2.1-::1",
            "192.0.2.0/33",
            "1-2-3",
        ] {
            assert!(wrong.parse::<Range>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn new_kubernetes_services_get_free_addresses_oldest_first() {
        let all = [
            service("b", 1, &[], ""),
            service("a", 2, &[], ""),
            service("c", 3, &["192.0.2.10"], ""),
        ];
        let assigned = assigned(&all);
        assert_eq!(
            assigned.given,
            [("shop/c".to_owned(), ips(&["192.0.2.10"]))].into()
        );
        let wanted = [("shop/b", "192.0.2.11"), ("shop/a", "192.0.2.12")];
        let wanted = wanted.map(|(key, ip)| (key.to_owned(), ips(&[ip])));
        assert_eq!(assigned.wanted, wanted.into());
        assert!(assigned.refused.is_empty());
    }

    #[test]
    fn exhausted_address_pool_refuses_youngest_kubernetes_service() {
        let all: Vec<String> = (1..=4)
            .map(|n| service(&format!("s{n}"), n, &[], ""))
            .collect();
        let assigned = assigned(&all);
        assert_eq!(assigned.wanted.len(), 3);
        let why = &assigned.refused["shop/s4"];
        assert_eq!(
            why,
            "no [[kubernetes.pool]] with auto_assign has a free IPv4 address: add a range"
        );
    }

    #[test]
    fn address_in_two_kubernetes_statuses_stays_with_older_service() {
        let all = [
            service("old", 1, &["192.0.2.11"], ""),
            service("new", 2, &["192.0.2.11"], ""),
        ];
        let assigned = assigned(&all);
        assert_eq!(assigned.given.keys().collect::<Vec<_>>(), ["shop/old"]);
        assert_eq!(assigned.wanted["shop/new"], ips(&["192.0.2.10"]));
        assert_eq!(
            assigned.refused["shop/new"],
            "its status contains 192.0.2.11, which is in use by shop/old: the Service needs another address"
        );
    }

    #[test]
    fn requested_address_is_assigned_if_free_and_in_a_pool() {
        let all = [
            service("first", 1, &["192.0.2.10"], ""),
            service(
                "right",
                2,
                &["192.0.2.11"],
                &annotation("address", "192.0.2.12"),
            ),
            service("taken", 3, &[], &annotation("address", "192.0.2.10")),
            service("outside", 4, &[], &annotation("address", "203.0.113.1")),
            service("nonsense", 5, &[], &annotation("address", "x")),
        ];
        let assigned = assigned(&all);
        // The Service keeps its addresses until the status is written.
        assert_eq!(assigned.given["shop/right"], ips(&["192.0.2.11"]));
        assert_eq!(assigned.wanted["shop/right"], ips(&["192.0.2.12"]));
        assert_eq!(
            assigned.refused["shop/taken"],
            "the requested address 192.0.2.10 is in use by shop/first: request another one"
        );
        assert!(assigned.refused["shop/outside"].contains("203.0.113.1 is in no"));
        assert!(assigned.refused["shop/nonsense"].contains("`x` is not an address"));
    }

    #[test]
    fn kubernetes_status_address_outside_pools_is_refused_and_not_replaced() {
        let assigned = assigned(&[service("web", 1, &["203.0.113.1"], "")]);
        assert!(assigned.given.is_empty() && assigned.wanted.is_empty());
        assert!(assigned.refused["shop/web"].contains("in no [[kubernetes.pool]]"));
        assert!(assigned.held.contains("shop/web"));
    }

    #[test]
    fn service_of_both_families_gets_an_address_of_each_family() {
        let dual = service("web", 1, &[], "")
            .replace(r#""type":"#, r#""ipFamilies":["IPv6","IPv4"],"type":"#);
        let mut settings = settings("192.0.2.10");
        let range = "2001:db8::10-2001:db8::20".parse().unwrap();
        settings.pools[0].ranges.push(range);
        let assigned = assign(&model(&[dual], &[], &[]), &settings);
        assert_eq!(
            assigned.wanted["shop/web"],
            ips(&["2001:db8::10", "192.0.2.10"])
        );
    }

    #[test]
    fn service_with_pool_annotation_gets_an_address_of_that_pool_only() {
        let mut settings = settings("192.0.2.10");
        settings.pools.push(Pool {
            name: "special".to_owned(),
            ranges: vec!["192.0.2.99".parse().unwrap()],
            auto_assign: false,
        });
        let all = [
            service("a", 1, &[], ""),
            service("b", 2, &[], ""),
            service("c", 3, &[], &annotation("pool", "special")),
            service("d", 4, &[], &annotation("pool", "special")),
            service("e", 5, &[], &annotation("pool", "none")),
        ];
        let assigned = assign(&model(&all, &[], &[]), &settings);
        assert_eq!(assigned.wanted["shop/c"], ips(&["192.0.2.99"]));
        assert!(!assigned.wanted.contains_key("shop/b"));
        assert_eq!(
            assigned.refused["shop/d"],
            "the pool `special` has no free IPv4 address: add a range"
        );
        assert!(assigned.refused["shop/e"].contains("no pool `none`"));
    }

    /// A Service with the port `port` whose annotation permits it to share its address with others.
    fn sharer(name: &str, created: u32, status: &[&str], port: &str) -> String {
        let more = annotation("share", "web");
        let port = format!(r#""ports":[{port}],"type":"#);
        service(name, created, status, &more).replace(r#""type":"#, &port)
    }

    const HTTP: &str = r#"{"port":80}"#;
    const DNS: &str = r#"{"port":53,"protocol":"UDP"}"#;

    #[test]
    fn services_of_a_namespace_with_one_sharing_key_and_different_ports_share_an_address() {
        let all = [
            sharer("a", 1, &[], HTTP),
            sharer("b", 2, &[], DNS),
            sharer("c", 3, &[], HTTP),
            sharer("d", 4, &[], r#"{"port":53,"protocol":"TCP"}"#),
        ];
        let other = sharer("e", 5, &[], r#"{"port":443}"#).replace("shop", "bank");
        let assigned = assigned(&[&all[..], &[other][..]].concat());
        for (key, ip) in [
            ("shop/a", "192.0.2.10"),
            ("shop/b", "192.0.2.10"),
            ("shop/c", "192.0.2.11"),
            ("shop/d", "192.0.2.10"),
            // Another namespace.
            ("bank/e", "192.0.2.12"),
        ] {
            assert_eq!(assigned.wanted[key], ips(&[ip]), "{key}");
        }
        assert!(assigned.refused.is_empty());
    }

    #[test]
    fn address_in_several_statuses_stays_shared_only_with_same_key_and_other_ports() {
        let asks = |name, created, key: &str| {
            sharer(name, created, &[], r#"{"port":25}"#).replace(
                r#""lvsd/share":"web""#,
                &format!(r#""lvsd/address":"192.0.2.11","lvsd/share":"{key}""#),
            )
        };
        let all = [
            sharer("a", 1, &["192.0.2.11"], HTTP),
            sharer("b", 2, &["192.0.2.11"], DNS),
            sharer("same", 3, &["192.0.2.11"], HTTP),
            asks("mail", 4, "web"),
            asks("other", 5, "other"),
        ];
        let assigned = assigned(&all);
        assert_eq!(
            assigned.given.keys().collect::<Vec<_>>(),
            ["shop/a", "shop/b"]
        );
        assert_eq!(assigned.wanted["shop/mail"], ips(&["192.0.2.11"]));
        assert_eq!(assigned.wanted["shop/same"], ips(&["192.0.2.10"]));
        for (key, why) in [
            (
                "shop/same",
                "its status contains 192.0.2.11, which is in use by shop/a: the Service needs another address",
            ),
            (
                "shop/other",
                "the requested address 192.0.2.11 is in use by shop/a: request another one",
            ),
        ] {
            assert_eq!(assigned.refused[key], why, "{key}");
        }
    }

    #[test]
    fn service_above_64_sharers_of_an_address_gets_another_address() {
        let all: Vec<String> = (0..=SHARERS_MAX)
            .map(|n| {
                sharer(
                    &format!("s{n:02}"),
                    1,
                    &[],
                    &format!(r#"{{"port":{}}}"#, n + 1),
                )
            })
            .collect();
        let assigned = assigned(&all);
        let first = assigned
            .wanted
            .values()
            .filter(|ips| ips[0].to_string() == "192.0.2.10");
        assert_eq!(first.count(), SHARERS_MAX);
        assert_eq!(assigned.wanted["shop/s64"], ips(&["192.0.2.11"]));
    }

    #[test]
    fn kubernetes_status_with_other_ports_than_service_is_written_again() {
        let reported = |port: u16| {
            let ingress =
                format!(r#"{{"ip":"192.0.2.10","ports":[{{"port":{port},"protocol":"TCP"}}]}}"#);
            sharer("web", 1, &["192.0.2.10"], HTTP).replace(r#"{"ip":"192.0.2.10"}"#, &ingress)
        };
        assert!(assigned(&[reported(80)]).wanted.is_empty());
        let wanted = [("shop/web".to_owned(), ips(&["192.0.2.10"]))];
        assert_eq!(assigned(&[reported(81)]).wanted, wanted.into());
    }

    #[test]
    fn service_with_too_long_annotations_is_refused_and_keeps_its_address() {
        let text = "x".repeat(ANNOTATIONS_MAX);
        let assigned = assigned(&[
            service("long", 1, &["192.0.2.10"], &annotation("weights", &text)),
            service("web", 2, &[], ""),
        ]);
        assert!(
            assigned.refused["shop/long"].contains("the maximum is 16384"),
            "{:?}",
            assigned.refused
        );
        assert!(assigned.held.contains("shop/long"));
        let wanted = [("shop/web".to_owned(), ips(&["192.0.2.11"]))];
        assert_eq!(assigned.wanted, wanted.into());
    }

    #[test]
    fn service_with_too_many_ports_is_refused_and_keeps_its_address() {
        let ports = |count: usize| {
            let port = |n: usize| format!(r#"{{"port":{}}}"#, n + 1);
            (0..count).map(port).collect::<Vec<_>>().join(",")
        };
        let assigned = assigned(&[
            sharer("many", 1, &["192.0.2.10"], &ports(PORTS_MAX + 1)),
            sharer("web", 2, &[], &ports(PORTS_MAX)),
        ]);
        assert!(assigned.given.is_empty() && assigned.held.contains("shop/many"));
        assert!(assigned.refused["shop/many"].contains("more than 256 ports"));
        // The address remains in use.
        let wanted = [("shop/web".to_owned(), ips(&["192.0.2.11"]))];
        assert_eq!(assigned.wanted, wanted.into());
    }
}
