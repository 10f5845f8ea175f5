//! The fields of Kubernetes objects that lvsd uses.
//!
//! An API server may omit any field, or write `null`.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Deserializes a value; `null` becomes the default.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) resource_version: String,
    pub(super) creation_timestamp: Option<String>,
    pub(super) deletion_timestamp: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Service {
    pub(super) metadata: Meta,
    pub(super) spec: ServiceSpec,
    #[serde(deserialize_with = "or_default")]
    pub(super) status: ServiceStatus,
    /// Size of lvsd's annotations in bytes. Above the limit, they are not stored.
    #[serde(skip)]
    pub(super) annotation_bytes: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    pub(super) load_balancer_ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) load_balancer_source_ranges: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ip_families: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<ServicePort>,
    pub(super) external_traffic_policy: Option<String>,
    pub(super) health_check_node_port: Option<u16>,
    pub(super) session_affinity: Option<String>,
    pub(super) session_affinity_config: Option<AffinityConfig>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ServicePort {
    pub(super) name: Option<String>,
    pub(super) protocol: Option<String>,
    pub(super) port: u16,
    pub(super) node_port: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct AffinityConfig {
    #[serde(rename = "clientIP")]
    pub(super) client_ip: Option<ClientIp>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ClientIp {
    pub(super) timeout_seconds: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ServiceStatus {
    #[serde(deserialize_with = "or_default")]
    pub(super) load_balancer: LoadBalancer,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct LoadBalancer {
    #[serde(deserialize_with = "or_default")]
    pub(super) ingress: Vec<Ingress>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Ingress {
    pub(super) ip: Option<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<PortStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct PortStatus {
    pub(super) port: u16,
    pub(super) protocol: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    pub(super) metadata: Meta,
    pub(super) address_type: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) endpoints: Vec<Endpoint>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<EndpointPort>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Endpoint {
    #[serde(deserialize_with = "or_default")]
    pub(super) addresses: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) conditions: Conditions,
    pub(super) node_name: Option<String>,
}

/// Conditions of an endpoint. As Kubernetes defines, a missing `ready` means true, and a missing
/// `serving` means the value of `ready`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Conditions {
    pub(super) ready: Option<bool>,
    pub(super) serving: Option<bool>,
    pub(super) terminating: Option<bool>,
}

/// How an endpoint can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Use {
    /// The endpoint receives no packets, because it terminates and no longer serves.
    Gone,
    /// The endpoint keeps its connections, and accepts no new ones.
    Drain,
    /// The endpoint accepts new connections.
    Ready,
}

impl Conditions {
    pub(super) fn usage(self) -> Use {
        let ready = self.ready.unwrap_or(true);
        match (ready, self.terminating.unwrap_or(false)) {
            (true, _) => Use::Ready,
            (false, true) if !self.serving.unwrap_or(ready) => Use::Gone,
            (false, _) => Use::Drain,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct EndpointPort {
    pub(super) name: Option<String>,
    pub(super) protocol: Option<String>,
    pub(super) port: Option<u16>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    pub(super) metadata: Meta,
    #[serde(deserialize_with = "or_default")]
    pub(super) spec: NodeSpec,
    #[serde(deserialize_with = "or_default")]
    pub(super) status: NodeStatus,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct NodeSpec {
    #[serde(deserialize_with = "or_default")]
    pub(super) unschedulable: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct NodeStatus {
    #[serde(deserialize_with = "or_default")]
    pub(super) conditions: Vec<NodeCondition>,
    #[serde(deserialize_with = "or_default")]
    pub(super) addresses: Vec<NodeAddress>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct NodeCondition {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) status: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct NodeAddress {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) address: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Lease {
    pub(super) metadata: Meta,
    #[serde(deserialize_with = "or_default")]
    pub(super) spec: LeaseSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct LeaseSpec {
    pub(super) holder_identity: Option<String>,
    pub(super) lease_duration_seconds: Option<u32>,
    pub(super) acquire_time: Option<String>,
    pub(super) renew_time: Option<String>,
    pub(super) lease_transitions: Option<u32>,
}

/// Name, namespace and version of an object whose other fields may be invalid. A missing or invalid
/// value is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) resource_version: String,
}

impl Named {
    pub(super) fn of(object: &str) -> Self {
        /// An object of which only the metadata is parsed.
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Object<'a> {
            #[serde(borrow)]
            metadata: Option<&'a RawValue>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Any<'a> {
            #[serde(borrow)]
            name: Option<&'a RawValue>,
            #[serde(borrow)]
            namespace: Option<&'a RawValue>,
            #[serde(borrow)]
            resource_version: Option<&'a RawValue>,
        }
        fn text(raw: Option<&RawValue>) -> String {
            let text = raw.and_then(|raw| serde_json::from_str(raw.get()).ok());
            text.unwrap_or_default()
        }
        let object: Object<'_> = serde_json::from_str(object).unwrap_or_default();
        let any = object
            .metadata
            .and_then(|any| serde_json::from_str(any.get()).ok());
        let any: Any<'_> = any.unwrap_or_default();
        Self {
            name: text(any.name),
            namespace: text(any.namespace),
            resource_version: text(any.resource_version),
        }
    }
}

/// A page of a list. Each item is parsed separately, so that an invalid one does not affect others.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct List {
    pub(super) metadata: ListMeta,
    #[serde(deserialize_with = "or_default")]
    pub(super) items: Vec<Box<RawValue>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ListMeta {
    pub(super) resource_version: String,
    #[serde(rename = "continue")]
    pub(super) more: Option<String>,
}

/// A line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct WatchEvent {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) object: Box<RawValue>,
}

/// An error of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: u16,
    #[serde(deserialize_with = "or_default")]
    pub(super) message: String,
}
