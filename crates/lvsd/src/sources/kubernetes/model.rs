//! The objects that an API server has, as far as directors need them (pure).

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::objects::{Endpoint, EndpointPort, EndpointSlice, Meta, Node, Service};

/// Services of type `LoadBalancer`.
const SERVICES_MAX: usize = 4096;
/// EndpointSlices.
const SLICES_MAX: usize = 20_000;
/// Endpoints in all EndpointSlices.
const ENDPOINTS_MAX: usize = 200_000;
/// Nodes.
const NODES_MAX: usize = 5000;
/// Bytes of a name; Kubernetes permits as many.
const NAME_MAX: usize = 253;
/// Bytes of the annotations of a Service that are kept.
const ANNOTATIONS_MAX: usize = 16 << 10;
/// Characters of the reason why an object cannot be read.
const WHY_MAX: usize = 200;
/// Objects that cannot be read and are named.
const REFUSED_MAX: usize = 64;

/// The prefix of all annotations that directors read.
pub(super) const PREFIX: &str = "lvsd/";
/// The label that names the Service of an EndpointSlice.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label of a Node that names its zone.
pub(super) const ZONE: &str = "topology.kubernetes.io/zone";
/// The label of a Node that external load balancers leave out.
pub(super) const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Service,
    EndpointSlice,
    Node,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Service, Self::EndpointSlice, Self::Node];

    /// The path of its objects, in one namespace or in all.
    pub(super) fn path(self, namespace: Option<&str>) -> String {
        let (api, plural) = match self {
            Self::Service => ("/api/v1", "services"),
            Self::EndpointSlice => ("/apis/discovery.k8s.io/v1", "endpointslices"),
            // Nodes are in no namespace.
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
    /// The Service, `NAMESPACE/NAME`.
    pub(super) service: String,
    pub(super) ipv6: bool,
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) ports: Vec<EndpointPort>,
}

/// All objects, by `NAMESPACE/NAME`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Model {
    /// Services of type `LoadBalancer`, of any class: addresses of others are taken, too.
    pub(super) services: BTreeMap<String, Service>,
    /// EndpointSlices by their Service, and then by their own name.
    pub(super) slices: BTreeMap<String, BTreeMap<String, Slice>>,
    pub(super) nodes: BTreeMap<String, Node>,
    /// Objects that cannot be read, and why. What they were before stays.
    pub(super) refused: BTreeMap<String, String>,
}

/// `NAMESPACE/NAME`, or the name of what is in no namespace.
pub(super) fn key(meta: &Meta) -> String {
    match meta.namespace.is_empty() {
        true => meta.name.clone(),
        false => format!("{}/{}", meta.namespace, meta.name),
    }
}

/// Whether it is a name in Kubernetes.
pub(crate) fn is_name(name: &str) -> bool {
    let right = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(right)
}

impl Model {
    /// Takes an object that is new or has changed. One that cannot be read is refused alone.
    ///
    /// # Errors
    /// There are too many objects.
    pub(super) fn put(&mut self, kind: Kind, object: Value) -> Result<(), String> {
        let meta = meta(&object);
        if let Err(why) = self.understand(kind, &meta, object) {
            self.refuse(kind, &meta, &why);
        } else {
            self.refused
                .remove(&format!("{} {}", kind.name(), key(&meta)));
        }
        self.bounded()
    }

    fn understand(&mut self, kind: Kind, meta: &Meta, object: Value) -> Result<(), String> {
        let namespaced = kind != Kind::Node;
        if !is_name(&meta.name) || namespaced && !is_name(&meta.namespace) {
            return Err("its name is not a name in Kubernetes".to_owned());
        }
        let key = key(meta);
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
                let bytes: usize = bytes.sum();
                if bytes > ANNOTATIONS_MAX {
                    return Err(format!(
                        "its annotations {PREFIX}... have {bytes} bytes, and {ANNOTATIONS_MAX} at most are read"
                    ));
                }
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
                    // Names, which directors do not resolve.
                    _ => None,
                };
                self.forget_slice(&key);
                if let (Some(service), Some(ipv6)) = (service, family) {
                    let service = format!("{}/{service}", meta.namespace);
                    let slices = self.slices.entry(service.clone()).or_default();
                    slices.insert(
                        key,
                        Slice {
                            service,
                            ipv6,
                            endpoints: slice.endpoints,
                            ports: slice.ports,
                        },
                    );
                }
            }
            Kind::Node => {
                let mut node: Node = read(object)?;
                let meta = &mut node.metadata;
                meta.annotations.clear();
                meta.labels
                    .retain(|name, _| name == EXCLUDED || name == ZONE);
                // Everything else changes every few seconds.
                meta.resource_version.clear();
                node.status
                    .conditions
                    .retain(|condition| condition.kind == "Ready");
                self.nodes.insert(key, node);
            }
        }
        Ok(())
    }

    /// Removes an object.
    pub(super) fn delete(&mut self, kind: Kind, object: &Value) {
        let key = key(&meta(object));
        self.refused.remove(&format!("{} {key}", kind.name()));
        match kind {
            Kind::Service => drop(self.services.remove(&key)),
            Kind::EndpointSlice => self.forget_slice(&key),
            Kind::Node => drop(self.nodes.remove(&key)),
        }
    }

    /// Takes what a list has of a kind. An object that cannot be read stays as it was before.
    ///
    /// # Errors
    /// There are too many objects.
    pub(super) fn replace(&mut self, kind: Kind, objects: Vec<Value>) -> Result<(), String> {
        let of_kind = format!("{} ", kind.name());
        self.refused.retain(|name, _| !name.starts_with(&of_kind));
        let mut before = Self::default();
        match kind {
            Kind::Service => std::mem::swap(&mut before.services, &mut self.services),
            Kind::EndpointSlice => std::mem::swap(&mut before.slices, &mut self.slices),
            Kind::Node => std::mem::swap(&mut before.nodes, &mut self.nodes),
        }
        for object in objects {
            let meta = meta(&object);
            let key = key(&meta);
            let Err(why) = self.understand(kind, &meta, object) else {
                continue;
            };
            self.refuse(kind, &meta, &why);
            if let Some(service) = before.services.remove(&key) {
                self.services.insert(key, service);
            } else if let Some(node) = before.nodes.remove(&key) {
                self.nodes.insert(key, node);
            } else if let Some(slice) = before.slices.values_mut().find_map(|all| all.remove(&key))
            {
                let slices = self.slices.entry(slice.service.clone()).or_default();
                slices.insert(key, slice);
            }
        }
        self.bounded()
    }

    fn forget_slice(&mut self, key: &str) {
        self.slices.retain(|_, slices| {
            slices.remove(key);
            !slices.is_empty()
        });
    }

    fn refuse(&mut self, kind: Kind, meta: &Meta, why: &str) {
        let name: String = key(meta)
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
            self.refused.insert(format!("{} {name}", kind.name()), why);
        }
    }

    /// # Errors
    /// There are too many objects.
    fn bounded(&self) -> Result<(), String> {
        let slices = self.slices.values().map(BTreeMap::len).sum();
        let endpoints = self.slices.values().flat_map(BTreeMap::values);
        let endpoints = endpoints.map(|slice| slice.endpoints.len()).sum();
        for (count, most, what) in [
            (
                self.services.len(),
                SERVICES_MAX,
                "Services of type LoadBalancer",
            ),
            (slices, SLICES_MAX, "EndpointSlices"),
            (endpoints, ENDPOINTS_MAX, "endpoints"),
            (self.nodes.len(), NODES_MAX, "Nodes"),
        ] {
            if count > most {
                return Err(format!("has more than {most} {what}"));
            }
        }
        Ok(())
    }

    /// The addresses in the status of a Service.
    pub(super) fn ingress(service: &Service) -> impl Iterator<Item = IpAddr> {
        let ingress = service.status.load_balancer.ingress.iter();
        ingress.filter_map(|one| one.ip.as_deref()?.parse().ok())
    }
}

/// Whether `known` is a later version of the same Service. A watch may tell of an older version than
/// the answer to a write of this director.
fn is_newer(known: &Service, told: &Service) -> bool {
    let version = |service: &Service| service.metadata.resource_version.parse::<u64>().ok();
    known.metadata.uid == told.metadata.uid
        && matches!((version(known), version(told)), (Some(known), Some(told)) if known > told)
}

/// The metadata of an object, as far as it can be read.
fn meta(object: &Value) -> Meta {
    let text = |name: &str| {
        let text = object["metadata"][name].as_str();
        text.unwrap_or_default().to_owned()
    };
    Meta {
        name: text("name"),
        namespace: text("namespace"),
        ..Meta::default()
    }
}

fn read<T: DeserializeOwned>(object: Value) -> Result<T, String> {
    serde_json::from_value(object).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn service(name: &str, spec: &Value) -> Value {
        json!({ "metadata": { "namespace": "shop", "name": name }, "spec": spec })
    }

    #[test]
    fn model_other_kind_of_service_is_not_kept() {
        let mut model = Model::default();
        let lb = json!({ "type": "LoadBalancer" });
        model.put(Kind::Service, service("web", &lb)).unwrap();
        assert!(model.services.contains_key("shop/web"));
        let plain = json!({ "type": "ClusterIP" });
        model.put(Kind::Service, service("web", &plain)).unwrap();
        assert!(model.services.is_empty());
    }

    #[test]
    fn model_unreadable_object_keeps_its_last_state() {
        let mut model = Model::default();
        let lb = json!({ "type": "LoadBalancer", "ports": [{ "port": 80 }] });
        let broken = json!({ "type": "LoadBalancer", "ports": [{ "port": 80_000 }] });
        model.put(Kind::Service, service("web", &lb)).unwrap();
        model.put(Kind::Service, service("web", &broken)).unwrap();
        assert_eq!(model.services["shop/web"].spec.ports[0].port, 80);
        assert!(model.refused["Service shop/web"].contains("80000"));
        // The same in a list, where another object has gone.
        model.put(Kind::Service, service("mail", &lb)).unwrap();
        let list = vec![service("web", &broken)];
        model.replace(Kind::Service, list).unwrap();
        assert_eq!(model.services.keys().collect::<Vec<_>>(), ["shop/web"]);
        assert_eq!(model.refused.len(), 1);
        model.put(Kind::Service, service("web", &lb)).unwrap();
        assert!(model.refused.is_empty());
    }

    #[test]
    fn model_older_version_of_a_service_is_passed_over() {
        let mut model = Model::default();
        let mut put = |version: &str, uid: &str, port: u16| {
            let mut service = service(
                "web",
                &json!({ "type": "LoadBalancer", "ports": [{ "port": port }] }),
            );
            service["metadata"]["resourceVersion"] = version.into();
            service["metadata"]["uid"] = uid.into();
            model.put(Kind::Service, service).unwrap();
            model.services["shop/web"].spec.ports[0].port
        };
        assert_eq!(put("9", "a", 1), 1);
        assert_eq!(put("8", "a", 2), 1);
        assert_eq!(put("10", "a", 3), 3);
        // Another one of the same name.
        assert_eq!(put("4", "b", 4), 4);
    }

    #[test]
    fn model_hostile_name_is_refused() {
        let mut model = Model::default();
        for name in ["", "a/b", "a\"b", "A", "a\nb", &"a".repeat(300)] {
            let lb = json!({ "type": "LoadBalancer" });
            model.put(Kind::Service, service(name, &lb)).unwrap();
            assert!(model.services.is_empty(), "{name}");
        }
        assert_eq!(model.refused.len(), 6);
    }

    #[test]
    fn model_too_many_objects_are_refused_as_a_whole() {
        let mut model = Model::default();
        let nodes = |count: usize| {
            let node = |n| json!({ "metadata": { "name": format!("n{n}") } });
            (0..count).map(node).collect()
        };
        model.replace(Kind::Node, nodes(NODES_MAX)).unwrap();
        let why = model.replace(Kind::Node, nodes(NODES_MAX + 1)).unwrap_err();
        assert_eq!(why, "has more than 5000 Nodes");
        let endpoints = vec![json!({}); ENDPOINTS_MAX + 1];
        let slice = json!({
            "metadata": { "namespace": "shop", "name": "x", "labels": { SERVICE_NAME: "web" } },
            "addressType": "IPv4", "endpoints": endpoints,
        });
        let mut model = Model::default();
        let why = model.put(Kind::EndpointSlice, slice).unwrap_err();
        assert_eq!(why, "has more than 200000 endpoints");
        let long = json!({
            "metadata": {
                "namespace": "shop", "name": "web",
                "annotations": { "lvsd/x": "x".repeat(ANNOTATIONS_MAX), "other": "y".repeat(1 << 20) },
            },
            "spec": { "type": "LoadBalancer" },
        });
        let mut model = Model::default();
        model.put(Kind::Service, long).unwrap();
        assert!(model.services.is_empty() && model.refused.len() == 1);
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
        fn model_takes_anything_without_panic(objects in proptest::collection::vec(anything(), 0..8)) {
            let mut model = Model::default();
            for kind in Kind::ALL {
                for object in &objects {
                    model.put(kind, object.clone()).unwrap();
                }
                model.replace(kind, objects.clone()).unwrap();
                objects.iter().for_each(|object| model.delete(kind, object));
            }
        }
    }
}
