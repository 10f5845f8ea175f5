//! Stores the objects of an API server that directors need (pure functions).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::Deserialize;

use super::objects::{Endpoint, EndpointPort, EndpointSlice, Named, Node, Service};

/// Maximum number of Services of type `LoadBalancer`.
const SERVICES_MAX: usize = 4096;
/// Maximum number of EndpointSlices.
const SLICES_MAX: usize = 20_000;
/// Maximum number of endpoints in all EndpointSlices.
const ENDPOINTS_MAX: usize = 200_000;
/// Maximum number of nodes.
const NODES_MAX: usize = 5000;
/// Maximum length of a name in bytes, as in Kubernetes.
const NAME_MAX: usize = 253;
/// Maximum size of a Service's stored annotations in bytes.
pub(super) const ANNOTATIONS_MAX: usize = 16 << 10;
/// Maximum number of ports of a Service. A Service with more is refused.
pub(super) const PORTS_MAX: usize = 256;
/// Maximum number of addresses read from a Service's status.
const INGRESS_MAX: usize = 64;
/// Maximum length of the reason for refusing an object, in characters.
const WHY_MAX: usize = 200;
/// Maximum number of refused objects that are reported.
const REFUSED_MAX: usize = 64;

/// Prefix of lvsd's annotations.
pub(super) const PREFIX: &str = "lvsd/";
/// Label with the name of an EndpointSlice's Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label with a Node's zone.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
/// Label of a Node that external load balancers must not use.
pub(super) const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Service,
    EndpointSlice,
    Node,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Service, Self::EndpointSlice, Self::Node];

    /// API path of all objects of this kind, in one namespace or in all.
    pub(super) fn path(self, namespace: Option<&str>) -> String {
        let (api, plural) = match self {
            Self::Service => ("/api/v1", "services"),
            Self::EndpointSlice => ("/apis/discovery.k8s.io/v1", "endpointslices"),
            // Nodes do not belong to a namespace.
            Self::Node => return "/api/v1/nodes".to_owned(),
        };
        match namespace {
            Some(namespace) => format!("{api}/namespaces/{namespace}/{plural}"),
            None => format!("{api}/{plural}"),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
        }
    }
}

/// An EndpointSlice of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Slice {
    /// The Service as `NAMESPACE/NAME`.
    service: String,
    pub(super) ipv6: bool,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) ports: Vec<EndpointPort>,
}

/// EndpointSlices by `NAMESPACE/NAME`.
#[derive(Debug, Default)]
struct Slices {
    all: BTreeMap<String, Slice>,
    /// Keys of each Service's EndpointSlices.
    of: BTreeMap<String, BTreeSet<String>>,
    /// Number of endpoints in all EndpointSlices.
    endpoints: usize,
}

impl Slices {
    fn insert(&mut self, key: String, slice: Slice) {
        self.remove(&key);
        self.endpoints += slice.endpoints.len();
        let of = self.of.entry(slice.service.clone()).or_default();
        of.insert(key.clone());
        self.all.insert(key, slice);
    }

    fn remove(&mut self, key: &str) {
        let Some(slice) = self.all.remove(key) else {
            return;
        };
        self.endpoints -= slice.endpoints.len();
        if let Some(keys) = self.of.get_mut(&slice.service) {
            keys.remove(key);
            if keys.is_empty() {
                self.of.remove(&slice.service);
            }
        }
    }
}

/// All objects by `NAMESPACE/NAME`, and Nodes by `NAME`.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// Services of type `LoadBalancer`. Services of other classes are included, because their
    /// addresses are in use.
    pub(super) services: BTreeMap<String, Service>,
    slices: Slices,
    pub(super) nodes: BTreeMap<String, Node>,
    /// Invalid objects with reasons, up to [`REFUSED_MAX`]. Their previous state applies.
    pub(super) refused: BTreeMap<String, String>,
}

/// Key of an object: `NAMESPACE/NAME`, or `NAME` if the object has no namespace.
fn key(named: &Named) -> String {
    match named.namespace.is_empty() {
        true => named.name.clone(),
        false => format!("{}/{}", named.namespace, named.name),
    }
}

/// Whether `name` has a length and characters that Kubernetes permits in names: 1 to 253 lower-case
/// letters, digits, `-` and `.`.
pub(crate) fn is_name(name: &str) -> bool {
    let right = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(right)
}

impl Model {
    /// Applies an object in JSON: stores it, or removes it if directors do not need it. If it is
    /// invalid, it is refused, and its previous state stays.
    ///
    /// # Errors
    /// There are too many objects.
    pub(super) fn put(&mut self, kind: Kind, object: &str) -> Result<(), String> {
        let named = Named::of(object);
        if let Err(why) = self.understand(kind, &named, object) {
            self.refuse(kind, &named, &why);
        } else if !self.refused.is_empty() {
            self.refused.remove(&full_name(kind, &key(&named)));
        }
        self.bounded()
    }

    /// Stores an object of a list if directors need it. If it is invalid, it is refused, and its
    /// state in `before` is used.
    ///
    /// # Errors
    /// There are too many objects.
    pub(super) fn put_listed(
        &mut self,
        kind: Kind,
        object: &str,
        before: &Self,
    ) -> Result<(), String> {
        let named = Named::of(object);
        if let Err(why) = self.understand(kind, &named, object) {
            self.refuse(kind, &named, &why);
            let key = key(&named);
            if kind == Kind::Service
                && let Some(service) = before.services.get(&key)
            {
                self.services.insert(key, service.clone());
            } else if kind == Kind::EndpointSlice
                && let Some(slice) = before.slices.all.get(&key)
            {
                self.slices.insert(key, slice.clone());
            } else if kind == Kind::Node
                && let Some(node) = before.nodes.get(&key)
            {
                self.nodes.insert(key, node.clone());
            }
        }
        self.bounded()
    }

    /// Replaces all objects of a kind by the objects of a complete list.
    pub(super) fn replace(&mut self, kind: Kind, listed: Self) {
        let of_kind = full_name(kind, "");
        self.refused.retain(|name, _| !name.starts_with(&of_kind));
        self.refused.extend(listed.refused);
        match kind {
            Kind::Service => self.services = listed.services,
            Kind::EndpointSlice => self.slices = listed.slices,
            Kind::Node => self.nodes = listed.nodes,
        }
    }

    fn understand(&mut self, kind: Kind, named: &Named, object: &str) -> Result<(), String> {
        let namespaced = kind != Kind::Node;
        if !is_name(&named.name) || namespaced && !is_name(&named.namespace) {
            return Err("its name or namespace is not valid in Kubernetes".to_owned());
        }
        let key = key(named);
        match kind {
            Kind::Service => {
                let mut service: Service = read(object)?;
                if service.spec.kind != "LoadBalancer" {
                    self.services.remove(&key);
                    return Ok(());
                }
                let meta = &mut service.metadata;
                meta.annotations.retain(|name, _| name.starts_with(PREFIX));
                meta.labels.clear();
                let bytes = meta
                    .annotations
                    .iter()
                    .map(|(name, text)| name.len() + text.len());
                service.annotation_bytes = bytes.sum();
                if service.annotation_bytes > ANNOTATIONS_MAX {
                    meta.annotations.clear();
                }
                // One port above the limit is kept, to show that there are too many.
                service.spec.ports.truncate(PORTS_MAX + 1);
                service.status.load_balancer.ingress.truncate(INGRESS_MAX);
                if self
                    .services
                    .get(&key)
                    .is_none_or(|known| !is_newer(known, &service))
                {
                    self.services.insert(key, service);
                }
            }
            Kind::EndpointSlice => {
                let slice: EndpointSlice = read(object)?;
                let service = slice.metadata.labels.get(SERVICE_NAME);
                let family = match slice.address_type.as_str() {
                    "IPv4" => Some(false),
                    "IPv6" => Some(true),
                    // Directors do not resolve host names.
                    _ => None,
                };
                if let (Some(service), Some(ipv6)) = (service, family) {
                    let slice = Slice {
                        service: format!("{}/{service}", named.namespace),
                        ipv6,
                        endpoints: slice.endpoints,
                        ports: slice.ports,
                    };
                    self.slices.insert(key, slice);
                } else {
                    self.slices.remove(&key);
                }
            }
            Kind::Node => {
                let mut node: Node = read(object)?;
                let meta = &mut node.metadata;
                meta.annotations.clear();
                meta.labels
                    .retain(|name, _| name == EXCLUDED || name == ZONE);
                // Only the remaining fields are compared, because others change every few seconds.
                meta.resource_version.clear();
                node.status
                    .conditions
                    .retain(|condition| condition.kind == "Ready");
                self.nodes.insert(key, node);
            }
        }
        Ok(())
    }

    pub(super) fn delete(&mut self, kind: Kind, object: &str) {
        let key = key(&Named::of(object));
        self.refused.remove(&full_name(kind, &key));
        match kind {
            Kind::Service => drop(self.services.remove(&key)),
            Kind::EndpointSlice => self.slices.remove(&key),
            Kind::Node => drop(self.nodes.remove(&key)),
        }
    }

    /// The EndpointSlices of a Service.
    pub(super) fn slices(&self, service: &str) -> impl Iterator<Item = &Slice> {
        let keys = self.slices.of.get(service).into_iter().flatten();
        keys.filter_map(|key| self.slices.all.get(key))
    }

    fn refuse(&mut self, kind: Kind, named: &Named, why: &str) {
        let name: String = key(named)
            .chars()
            .filter(|c| !c.is_control())
            .take(2 * NAME_MAX)
            .collect();
        let why: String = why
            .chars()
            .filter(|c| !c.is_control())
            .take(WHY_MAX)
            .collect();
        if self.refused.len() < REFUSED_MAX {
            self.refused.insert(full_name(kind, &name), why);
        }
    }

    /// Checks the limits on the numbers of objects.
    ///
    /// # Errors
    /// There are too many objects of a kind.
    fn bounded(&self) -> Result<(), String> {
        for (count, most, what) in [
            (
                self.services.len(),
                SERVICES_MAX,
                "Services of type LoadBalancer",
            ),
            (self.slices.all.len(), SLICES_MAX, "EndpointSlices"),
            (self.slices.endpoints, ENDPOINTS_MAX, "endpoints"),
            (self.nodes.len(), NODES_MAX, "Nodes"),
        ] {
            if count > most {
                return Err(format!("the API server has more than {most} {what}"));
            }
        }
        Ok(())
    }

    /// Addresses in the status of a Service.
    pub(super) fn ingress(service: &Service) -> impl Iterator<Item = IpAddr> {
        let ingress = service.status.load_balancer.ingress.iter();
        ingress.filter_map(|one| one.ip.as_deref()?.parse().ok())
    }
}

/// Whether `known` is a later version of the same Service. A watch may still report an older
/// version than the answer to this director's own write.
fn is_newer(known: &Service, reported: &Service) -> bool {
    let version = |service: &Service| service.metadata.resource_version.parse::<u64>().ok();
    known.metadata.uid == reported.metadata.uid
        && matches!((version(known), version(reported)), (Some(known), Some(reported)) if known > reported)
}

/// Formats kind and key for messages: `Service shop/web`.
fn full_name(kind: Kind, key: &str) -> String {
    format!("{} {key}", kind.name())
}

/// Parses an object. The error text omits line and column, which would change with every version.
fn read<'a, T: Deserialize<'a>>(object: &'a str) -> Result<T, String> {
    serde_json::from_str(object).map_err(|error| {
        let why = error.to_string();
        why.split(" at line ").next().unwrap_or_default().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn service(name: &str, spec: &Value) -> String {
        json!({ "metadata": { "namespace": "shop", "name": name }, "spec": spec }).to_string()
    }

    fn put(model: &mut Model, name: &str, spec: &Value) {
        model.put(Kind::Service, &service(name, spec)).unwrap();
    }

    /// Applies a list of all objects of a kind.
    fn list(model: &mut Model, kind: Kind, objects: &[String]) -> Result<(), String> {
        let mut listed = Model::default();
        for object in objects {
            listed.put_listed(kind, object, model)?;
        }
        model.replace(kind, listed);
        Ok(())
    }

    #[test]
    fn service_that_is_no_load_balancer_is_not_stored() {
        let mut model = Model::default();
        let lb = json!({ "type": "LoadBalancer" });
        put(&mut model, "web", &lb);
        assert!(model.services.contains_key("shop/web"));
        let plain = json!({ "type": "ClusterIP" });
        put(&mut model, "web", &plain);
        assert!(model.services.is_empty());
    }

    #[test]
    fn unreadable_kubernetes_object_keeps_its_last_state() {
        let mut model = Model::default();
        let lb = json!({ "type": "LoadBalancer", "ports": [{ "port": 80 }] });
        let broken = json!({ "type": "LoadBalancer", "ports": [{ "port": 80_000 }] });
        put(&mut model, "web", &lb);
        put(&mut model, "web", &broken);
        assert_eq!(model.services["shop/web"].spec.ports[0].port, 80);
        assert!(model.refused["Service shop/web"].contains("80000"));
        // The same with a list that lacks another object.
        put(&mut model, "mail", &lb);
        list(&mut model, Kind::Service, &[service("web", &broken)]).unwrap();
        assert_eq!(model.services.keys().collect::<Vec<_>>(), ["shop/web"]);
        assert_eq!(model.refused.len(), 1);
        put(&mut model, "web", &lb);
        assert!(model.refused.is_empty());
    }

    #[test]
    fn older_version_of_a_kubernetes_service_is_ignored_unless_its_uid_differs() {
        let mut model = Model::default();
        let mut put = |version: &str, uid: &str, port: u16| {
            let service = json!({
                "metadata": {
                    "namespace": "shop", "name": "web", "resourceVersion": version, "uid": uid,
                },
                "spec": { "type": "LoadBalancer", "ports": [{ "port": port }] },
            });
            model.put(Kind::Service, &service.to_string()).unwrap();
            model.services["shop/web"].spec.ports[0].port
        };
        assert_eq!(put("9", "a", 1), 1);
        assert_eq!(put("8", "a", 2), 1);
        assert_eq!(put("10", "a", 3), 3);
        // Another object of the same name.
        assert_eq!(put("4", "b", 4), 4);
    }

    #[test]
    fn kubernetes_object_with_hostile_name_is_refused() {
        let mut model = Model::default();
        for name in ["", "a/b", "a\"b", "A", "a\nb", &"a".repeat(300)] {
            let lb = json!({ "type": "LoadBalancer" });
            put(&mut model, name, &lb);
            assert!(model.services.is_empty(), "{name}");
        }
        assert_eq!(model.refused.len(), 6);
    }

    #[test]
    fn kubernetes_nodes_and_endpoints_above_limits_are_refused_and_long_annotations_dropped() {
        let mut model = Model::default();
        let nodes = |count: usize| {
            let node = |n| json!({ "metadata": { "name": format!("n{n}") } }).to_string();
            (0..count).map(node).collect::<Vec<_>>()
        };
        list(&mut model, Kind::Node, &nodes(NODES_MAX)).unwrap();
        let why = list(&mut model, Kind::Node, &nodes(NODES_MAX + 1)).unwrap_err();
        assert_eq!(model.nodes.len(), NODES_MAX);
        assert_eq!(why, "the API server has more than 5000 Nodes");
        let endpoints = vec![json!({}); ENDPOINTS_MAX + 1];
        let slice = json!({
            "metadata": { "namespace": "shop", "name": "x", "labels": { SERVICE_NAME: "web" } },
            "addressType": "IPv4", "endpoints": endpoints,
        });
        let mut model = Model::default();
        let why = model
            .put(Kind::EndpointSlice, &slice.to_string())
            .unwrap_err();
        assert_eq!(why, "the API server has more than 200000 endpoints");
        let long = json!({
            "metadata": {
                "namespace": "shop", "name": "web",
                "annotations": { "lvsd/x": "x".repeat(ANNOTATIONS_MAX), "other": "y".repeat(1 << 20) },
            },
            "spec": { "type": "LoadBalancer" },
        });
        let mut model = Model::default();
        model.put(Kind::Service, &long.to_string()).unwrap();
        let web = &model.services["shop/web"];
        assert!(web.annotation_bytes > ANNOTATIONS_MAX && web.metadata.annotations.is_empty());
        assert!(model.refused.is_empty());
    }

    #[test]
    fn endpoint_slices_move_between_services_and_are_counted() {
        let slice = |name: &str, service: &str, count: usize| {
            json!({
                "metadata": {
                    "namespace": "shop", "name": name, "labels": { SERVICE_NAME: service },
                },
                "addressType": "IPv4", "endpoints": vec![json!({}); count],
            })
            .to_string()
        };
        let mut model = Model::default();
        let of = |model: &Model, service: &str| -> Vec<usize> {
            let slices = model.slices(service);
            slices.map(|slice| slice.endpoints.len()).collect()
        };
        for (name, service, count) in [("a", "web", 3), ("b", "web", 2), ("a", "mail", 4)] {
            let slice = slice(name, service, count);
            model.put(Kind::EndpointSlice, &slice).unwrap();
        }
        assert_eq!(
            (of(&model, "shop/web"), of(&model, "shop/mail")),
            (vec![2], vec![4])
        );
        assert_eq!(model.slices.endpoints, 6);
        model.delete(Kind::EndpointSlice, &slice("a", "mail", 0));
        // An object that became unreadable stays; one that is missing from the list does not.
        let wrong = slice("b", "web", 1).replace("[{}]", "1");
        list(&mut model, Kind::EndpointSlice, &[wrong]).unwrap();
        assert_eq!(of(&model, "shop/web"), [2]);
        assert_eq!((model.slices.endpoints, model.refused.len()), (2, 1));
        list(&mut model, Kind::EndpointSlice, &[]).unwrap();
        assert!(model.slices.of.is_empty() && model.slices.endpoints == 0);
        assert!(model.refused.is_empty());
    }

    #[test]
    fn service_with_100000_ports_is_truncated_and_reason_of_refusal_omits_position_in_json() {
        let mut model = Model::default();
        let ports = vec![json!({ "port": 1 }); 100_000];
        put(
            &mut model,
            "web",
            &json!({ "type": "LoadBalancer", "ports": ports }),
        );
        assert_eq!(model.services["shop/web"].spec.ports.len(), PORTS_MAX + 1);
        let mut whys = BTreeSet::new();
        for filling in ["", "x", "xx"] {
            put(&mut model, "mail", &json!({ "a": filling, "type": 3 }));
            whys.insert(model.refused["Service shop/mail"].clone());
        }
        assert_eq!(whys.len(), 1, "{whys:?}");
    }

    #[test]
    fn kubernetes_model_reports_a_bounded_number_of_invalid_objects() {
        let mut model = Model::default();
        for n in 0..1000 {
            put(&mut model, &format!("s{n}\u{1}"), &Value::Null);
        }
        assert_eq!(model.refused.len(), REFUSED_MAX);
        assert!(model.refused.keys().all(|name| !name.contains('\u{1}')));
    }

    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-zA-Z0-9./:]{0,8}".prop_map(Value::from),
        ];
        let key = prop_oneof![
            Just("metadata"),
            Just("name"),
            Just("namespace"),
            Just("spec"),
            Just("status"),
            Just("ports"),
            Just("port"),
            Just("type"),
            Just("endpoints"),
            Just("labels"),
        ];
        leaf.prop_recursive(4, 32, 6, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(key.clone(), inner, 0..6)
                    .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn kubernetes_parser_does_not_panic_on_any_json(objects in proptest::collection::vec(anything(), 0..8)) {
            let mut model = Model::default();
            let objects: Vec<String> = objects.iter().map(Value::to_string).collect();
            for kind in Kind::ALL {
                for object in &objects {
                    model.put(kind, object).unwrap();
                }
                list(&mut model, kind, &objects).unwrap();
                objects.iter().for_each(|object| model.delete(kind, object));
                model.put(kind, "{\"metadata\":").unwrap();
            }
        }
    }
}
