//! The unchecked file: one struct for each table; values have their positions in the text.
//!
//! No key is required here and, except for durations, no value is interpreted, so that one pass
//! finds every misspelt key and every value of a wrong type. [`super`] converts the structs into
//! the checked [`Config`](super::Config).

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::de::{self, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::text::Value;

/// A whole file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawConfig {
    pub(super) lvsd: RawDaemon,
    pub(super) api: RawApi,
    pub(super) dataplane: RawDataplane,
    /// Replication of connections between directors.
    pub(super) sync: RawSync,
    /// keepalived moves the virtual addresses between directors by VRRP.
    pub(super) vrrp: Option<Spanned<RawVrrp>>,
    /// Look-ups of server names in DNS.
    pub(super) dns: Option<Spanned<RawDns>>,
    /// The services and servers that directors share in etcd.
    pub(super) cluster: Option<Spanned<RawCluster>>,
    /// The Services of Kubernetes that directors serve.
    pub(super) kubernetes: Option<Spanned<RawKubernetes>>,
    /// Announcement of addresses of services with `vip = "announce"` by routes.
    pub(super) announce: Option<Spanned<RawAnnounce>>,
    /// Sysctls under the kernel's names (`/proc/sys/net/ipv4/vs/`).
    pub(super) sysctl: BTreeMap<Spanned<String>, Spanned<Scalar>>,
    pub(super) service: Vec<Spanned<RawService>>,
    /// Default keys of services; merged into each service as a table.
    pub(super) defaults: RawDefaults,
    /// The `[defaults]` table as text, for services of etcd and Kubernetes.
    #[serde(skip)]
    pub(super) defaults_text: String,
    pub(super) mark: Vec<Spanned<RawMark>>,
    /// Filter of all services.
    pub(super) filter: Option<Spanned<RawFilter>>,
}

/// `[lvsd]`: settings of the daemon.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDaemon {
    /// Manage services that were added with `lvsadm`, too: change the services that are in the
    /// file, delete the others. Default: false.
    pub(super) manage_all_services: Option<bool>,
    /// Whether the daemon is sandboxed by seccomp: `off` or `auto`. Default: `auto`.
    pub(super) confine: Option<Spanned<String>>,
    /// The filter of the log, as in `RUST_LOG` (`info`, `debug`, `lvsd=debug`). Default: `info`.
    pub(super) log: Option<Spanned<String>>,
    /// Percentage of all servers that a reload may remove unless it is forced; it may always remove
    /// 10 servers. Default: 50.
    pub(super) max_removed_percent: Option<Spanned<Whole>>,
    /// Manual changes to services of lvsd are undone or only reported: `revert` or `report`.
    /// Default: `revert`.
    pub(super) manual_changes: Option<Spanned<String>>,
    /// Program that receives events, and its arguments. Default: none.
    pub(super) notify: Option<Spanned<OneOrMore>>,
    /// User that runs the notify command. Default: `nobody`.
    pub(super) notify_user: Option<Spanned<String>>,
    /// Time after which the notify command is killed. Default: 10s.
    pub(super) notify_timeout: Option<Spanned<RawDuration>>,
}

/// `[api]`: metrics, JSON over HTTP, and the dashboard.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawApi {
    /// Addresses with ports to answer HTTP at: `127.0.0.1:9560`, or an array. Default: none.
    pub(super) listen: Option<Spanned<OneOrMore>>,
    /// Names that clients may use in `Host`, besides addresses, `localhost` and this host's name: a
    /// name, or an array. Default: none.
    pub(super) allowed_hosts: Option<Spanned<OneOrMore>>,
    /// Tokens of clients over TCP, which may permit changes. Default: none, so TCP only reads.
    pub(super) token: Vec<Spanned<RawApiToken>>,
    /// Whether `listen` serves the dashboard. Default: true.
    pub(super) dashboard: Option<bool>,
}

/// `[[api.token]]`: a token of a client over TCP.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawApiToken {
    /// Name of the client, for events, the log and the status. Required.
    pub(super) name: Option<Spanned<String>>,
    /// File with the token: one line of 16 to 256 characters, mode 600. Required.
    pub(super) file: Option<Spanned<String>>,
    /// Rights of the client: `read`, `drain` or `admin`. Required.
    pub(super) role: Option<Spanned<String>>,
}

// `CommandLine::of` writes an option for each key, except for keys that are not serialized.
/// `[dataplane]`: options of a dataplane that the daemon starts. A dataplane that is already
/// running keeps the options with which it was started.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDataplane {
    /// Interfaces to use. Default: every Ethernet interface that is up and has no master.
    pub(super) interface: Option<Spanned<OneOrMore>>,
    /// `auto`, `af_packet` or `tun`. Default: `auto`.
    pub(super) backend: Option<Spanned<String>>,
    /// Packet workers: a number, or `auto`. Default: 1.
    pub(super) workers: Option<Spanned<Scalar>>,
    /// Control socket: `@name` (abstract, one for each network namespace) or a path. Default: the
    /// usual path in `/run/lvs`.
    #[serde(skip_serializing)]
    pub(super) socket: Option<Spanned<String>>,
    /// Group, by name or number, whose members have write access to the control socket. Default:
    /// none.
    pub(super) group: Option<Spanned<String>>,
    /// Group whose members have read access; other users need write access. Default: all users.
    pub(super) readers: Option<Spanned<String>>,
    /// Time without an answer after which the dataplane is killed and replaced. Default: 10s.
    #[serde(skip_serializing)]
    pub(super) hang_limit: Option<Spanned<RawDuration>>,
    /// Initial timeouts of connections: those of the kernel's IPVS (`kernel`) or of RFC 5382
    /// (`modern`). Default: `kernel`.
    pub(super) profile: Option<Spanned<String>>,
    /// The dataplane owns the address of every service, including manually added services. Default:
    /// false.
    pub(super) own_vips: Option<bool>,
    /// Local addresses towards servers with `forward = "fullnat"`: the host's, or addresses that
    /// the dataplane answers for. Default: the dataplane's.
    #[serde(rename(serialize = "local_address"))]
    pub(super) local_addresses: Option<Spanned<OneOrMore>>,
    /// Translate the source address, too, if replies would otherwise bypass the director. Default:
    /// false.
    pub(super) hairpin: Option<Spanned<bool>>,
    /// Application helpers: `ftp`, or `ftp=PORT,...`. Default: none.
    pub(super) helper: Option<Spanned<OneOrMore>>,
    /// Echo requests to addresses that the dataplane owns: `answer` (1000 per second), `drop`, or
    /// the number of answers per second. Default: `answer`.
    pub(super) echo: Option<Spanned<Scalar>>,
    /// Reverse-path check of requests to services: `off`, `loose` or `strict`. Default: `off`.
    pub(super) reverse_path: Option<Spanned<String>>,
    /// Whether the kernel fast path forwards established connections: `off`, `auto` or `on`.
    /// Default: `auto`, without a warning if the host does not support it.
    pub(super) fast_path: Option<Spanned<String>>,
    /// Whether a small process stores connections until the next dataplane starts, if the dataplane
    /// is killed: `off`, `auto` or `on`. Default: `off`.
    pub(super) warm_restart: Option<Spanned<String>>,
    /// Interfaces with XDP, where forwarding begins before the kernel allocates a socket buffer;
    /// `auto`: the interfaces whose driver has native XDP and that lose nothing by it. Default:
    /// none.
    pub(super) xdp: Option<Spanned<OneOrMore>>,
    /// Whether the dataplane is sandboxed by seccomp and Landlock: `off` or `auto`. Default:
    /// `auto`.
    pub(super) confine: Option<Spanned<String>>,
    /// Maximum segment size of new TCP connections: `auto` or bytes. Default: untouched.
    pub(super) clamp_mss: Option<Spanned<Scalar>>,
    /// Maximum number of ICMP errors per second to all receivers together; 0 for no limit. Default:
    /// the dataplane's.
    pub(super) icmp_limit: Option<Spanned<Whole>>,
    /// Maximum number of connections in the connection table. Default: the dataplane's.
    pub(super) max_connections: Option<Spanned<Whole>>,
    /// Maximum number of IPv6 connections among those of `max_connections`, with the kernel fast
    /// path. Default: the dataplane's.
    pub(super) max_ipv6: Option<Spanned<Whole>>,
    /// The action of a full table on a new connection: `drop` or `evict`. Default: `drop`.
    pub(super) when_full: Option<Spanned<String>>,
    /// Path of the dataplane's program. Default: `lvs-dataplane` in the directory of `lvsd`, else
    /// in `PATH`.
    #[serde(skip_serializing)]
    pub(super) program: Option<Spanned<String>>,
}

/// `[sync]`: synchronisation with other directors.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSync {
    /// Synchronisation by multicast, in the protocol of the kernel's IPVS. Default: none.
    pub(super) ipvs: Option<Spanned<RawSyncIpvs>>,
    /// Replication of every connection with other directors that run lvsd, from the start of the
    /// connection on. Default: none.
    pub(super) peers: Option<Spanned<RawSyncPeers>>,
}

/// `[sync.ipvs]`: synchronisation in the protocol of the kernel's IPVS.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSyncIpvs {
    /// `master` sends connections, `backup` receives them, `both` does both. Default: `both`.
    pub(super) role: Option<Spanned<String>>,
    /// Interface of the multicast group. Required.
    pub(super) interface: Option<Spanned<String>>,
    /// Identity in messages, 0 to 255; a backup with 0 accepts all. Default: 0.
    pub(super) syncid: Option<Spanned<Whole>>,
    /// Multicast group, of IPv4 or IPv6. Default: 224.0.0.81.
    pub(super) group: Option<Spanned<String>>,
    /// First UDP port. Default: 8848.
    pub(super) port: Option<Spanned<Whole>>,
    /// Time to live of messages. Default: 1.
    pub(super) ttl: Option<Spanned<Whole>>,
    /// Longest message in bytes. Default: as the kernel's daemons choose it.
    pub(super) maxlen: Option<Spanned<Whole>>,
}

/// `[sync.peers]`: directors that replicate every connection to each other.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawSyncPeers {
    /// Addresses of the other directors: `192.0.2.2`, `192.0.2.2:8848`, or an array. Required.
    pub(super) addresses: Option<Spanned<OneOrMore>>,
    /// File with the key for the replication. All directors have the same key. Required.
    pub(super) key_file: Option<Spanned<String>>,
    /// Address and port that peers connect to. Default: port 8848 of all addresses.
    pub(super) listen: Option<Spanned<String>>,
    /// Time that a starting dataplane waits for peers that it cannot reach. Default: 10s.
    pub(super) connect_timeout: Option<Spanned<RawDuration>>,
    /// Time for which the services of a peer may differ from those of this director without an
    /// alarm. Default: 30s.
    pub(super) mismatch_alarm_after: Option<Spanned<RawDuration>>,
}

/// `[vrrp]`: keepalived moves the virtual addresses between directors by VRRP.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawVrrp {
    /// Interface of the directors' advertisements. Required.
    pub(super) interface: Option<Spanned<String>>,
    /// Virtual router number, the same on all directors of a cluster, 1 to 255. Required.
    pub(super) router_id: Option<Spanned<Whole>>,
    /// Priority of this director, 1 to 254. Use the same on all directors, so that addresses are
    /// not moved without need. Default: 200.
    pub(super) priority: Option<Spanned<Whole>>,
    /// Time between two advertisements; a director from which three are missing counts as failed.
    /// Default: 300ms.
    pub(super) advert: Option<Spanned<RawDuration>>,
    /// Addresses of the other directors, for networks without multicast. Default: none.
    pub(super) peers: Option<Spanned<OneOrMore>>,
    /// Addresses that the host has while this director is active, such as the gateway of the
    /// servers: `10.0.0.254/24 dev eth1`. Default: none.
    pub(super) host_addresses: Option<Spanned<OneOrMore>>,
    /// File from which keepalived reads the readiness of this director. Default:
    /// /run/lvs/vrrp.track.
    pub(super) track_file: Option<Spanned<String>>,
    /// FIFO into which keepalived writes its state. Default: /run/lvs/vrrp.fifo.
    pub(super) fifo: Option<Spanned<String>>,
}

/// `[dns]`: how names of servers are looked up.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDns {
    /// Name servers, by address: `192.0.2.53`, `192.0.2.53:5353`, or an array. Default: the name
    /// servers in /etc/resolv.conf.
    pub(super) name_servers: Option<Spanned<OneOrMore>>,
    /// Time after which a name server counts as silent, and lvsd tries the next one. Default: 2s.
    pub(super) timeout: Option<Spanned<RawDuration>>,
    /// Shortest interval between two successful look-ups of a name, even if its TTL is shorter.
    /// Default: 5s.
    pub(super) min_ttl: Option<Spanned<RawDuration>>,
    /// Longest interval between two successful look-ups of a name, even if its TTL is longer.
    /// Default: 5m.
    pub(super) max_ttl: Option<Spanned<RawDuration>>,
}

/// `[cluster]`: services and servers in etcd, which several directors share.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawCluster {
    /// Members of etcd: `https://10.0.0.5:2379`, or an array. Required.
    pub(super) etcd: Option<Spanned<OneOrMore>>,
    /// The prefix of all keys. Default: `/lvs/`.
    pub(super) prefix: Option<Spanned<String>>,
    /// File with the certificates of the authorities that sign the members' certificates. Required
    /// with `https`.
    pub(super) ca: Option<Spanned<String>>,
    /// File with the certificate that lvsd presents. Default: none.
    pub(super) cert: Option<Spanned<String>>,
    /// File with the private key of the certificate `cert`. Required with `cert`.
    pub(super) key: Option<Spanned<String>>,
    /// User name for etcd. Default: none.
    pub(super) user: Option<Spanned<String>>,
    /// File with the password of `user`. Required with `user`.
    pub(super) password_file: Option<Spanned<String>>,
    /// Name of this director, unique in the cluster. Default: the name of the host.
    pub(super) director: Option<Spanned<String>>,
    /// Time without a renewal after which etcd removes a director, in whole seconds. Default: 10s.
    pub(super) lease: Option<Spanned<RawDuration>>,
    /// Time after which a member counts as unreachable, and lvsd tries the next one. Default: 3s.
    pub(super) timeout: Option<Spanned<RawDuration>>,
}

/// `[kubernetes]`: Services of type `LoadBalancer`, which directors outside the cluster serve.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawKubernetes {
    /// kubeconfig file with the API server and the credentials, instead of `server` and its keys.
    /// Default: none.
    pub(super) kubeconfig: Option<Spanned<String>>,
    /// Context in the kubeconfig file. Default: its current context.
    pub(super) context: Option<Spanned<String>>,
    /// API server: `https://10.0.0.5:6443`. Required, except with `kubeconfig` and inside a pod.
    pub(super) server: Option<Spanned<String>>,
    /// File with the certificates of the authorities that sign the API server's certificate.
    /// Required with `https`.
    pub(super) ca: Option<Spanned<String>>,
    /// File with the token of a ServiceAccount, read again for each request. Default: none.
    pub(super) token_file: Option<Spanned<String>>,
    /// File with the certificate that lvsd presents. Default: none.
    pub(super) cert: Option<Spanned<String>>,
    /// File with the private key of the certificate `cert`. Required with `cert`.
    pub(super) key: Option<Spanned<String>>,
    /// Namespace of the Services. Default: all namespaces.
    pub(super) namespace: Option<Spanned<String>>,
    /// `spec.loadBalancerClass` of the Services. Default: `lvsd`.
    pub(super) class: Option<Spanned<String>>,
    /// Serve Services without a class, too. Default: false.
    pub(super) default_class: Option<bool>,
    /// Namespace and name of the Lease of the director that writes addresses. Default: `lvsd/lvsd`.
    pub(super) lease: Option<Spanned<String>>,
    /// Name of this director, unique in the cluster. Default: the name of the host.
    pub(super) director: Option<Spanned<String>>,
    /// Time without an answer after which a request fails, and lvsd connects again. Default: 5s.
    pub(super) timeout: Option<Spanned<RawDuration>>,
    /// Pools from which Services are assigned addresses.
    pub(super) pool: Vec<Spanned<RawPool>>,
}

/// `[[kubernetes.pool]]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPool {
    /// Name of the pool, for the annotation of Services. Required.
    pub(super) name: Option<Spanned<String>>,
    /// Networks, ranges (`198.51.100.10-198.51.100.20`) and addresses. Required.
    pub(super) addresses: Option<Spanned<OneOrMore>>,
    /// Assign addresses of this pool to Services that name no pool. Default: true.
    pub(super) auto_assign: Option<bool>,
}

/// `discover = { ... }`: the source of further servers of a service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawDiscover {
    /// Name in DNS: of SRV records if it begins with an underscore (`_http._tcp.example.org`), else
    /// of A and AAAA records.
    pub(super) dns: Option<Spanned<String>>,
    /// Pool of servers that have registered themselves in etcd.
    pub(super) etcd: Option<Spanned<String>>,
    /// Port of servers for which the source has none. Default: the port of the service.
    pub(super) port: Option<Spanned<Whole>>,
    /// Weight of servers for which the source has none. Default: 1.
    pub(super) weight: Option<Spanned<Whole>>,
}

/// `[announce]`: virtual addresses that several directors have at the same time; routing daemons on
/// the directors announce them to routers.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawAnnounce {
    /// Time in maintenance for which routers prefer other directors, before the addresses are
    /// withdrawn. Default: 5s.
    pub(super) withdraw_delay: Option<Spanned<RawDuration>>,
    /// Time for which the dataplane announces addresses without lvsd; after ten seconds, routers
    /// prefer other directors. Default: 10m.
    pub(super) hold_without_lvsd: Option<Spanned<RawDuration>>,
}

/// `[[service]]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawService {
    /// Name in logs, metrics and the status. Default: protocol and address, or the mark.
    pub(super) name: Option<Spanned<String>>,
    /// Virtual address and port, or ports: `192.0.2.10:80`, `192.0.2.10:80,8000-8999`,
    /// `192.0.2.10:*`; or an array of them. This or `fwmark` is required.
    #[serde(rename = "address")]
    pub(super) addresses: Option<Spanned<Addresses>>,
    /// One address: a service with several addresses appears once for each.
    #[serde(skip)]
    pub(super) address: Option<Spanned<String>>,
    /// `tcp`, `udp` or `sctp`. Default: `tcp`.
    pub(super) protocol: Option<Spanned<String>>,
    /// Firewall mark, 1 to 4294967295, instead of an address.
    pub(super) fwmark: Option<Spanned<Whole>>,
    /// Address family of the packets with the mark `fwmark`: `ipv4` or `ipv6`. Default: `ipv4`.
    pub(super) family: Option<Spanned<String>>,
    /// Scheduler by ipvsadm's name. Default: `wlc`.
    pub(super) scheduler: Option<Spanned<String>>,
    /// `sh-fallback`, `sh-port`, `mh-fallback`, `mh-port`, `flag-1`, `flag-2`, `flag-3`. Default:
    /// none.
    pub(super) scheduler_flags: Option<Vec<Spanned<String>>>,
    /// Schedule each UDP datagram separately. Default: false.
    pub(super) one_packet: Option<Spanned<bool>>,
    /// Send all connections of a client to the same server. Default: off.
    pub(super) persistence: Option<Spanned<RawPersistence>>,
    /// `nat`, `dr`, `tun`, `fullnat` or `proxy`. Required here or at every server.
    pub(super) forward: Option<Spanned<String>>,
    /// Settings of a proxied service. Default: no header of the PROXY protocol.
    pub(super) proxy: Option<Spanned<RawProxy>>,
    /// Owner of the VIP: `own`, `host`, `announce` or `auto`. Default: `auto`.
    pub(super) vip: Option<Spanned<String>>,
    /// Health check of every server: a table, or `"none"`. Default: none, with a warning.
    pub(super) check: Option<Spanned<RawCheck>>,
    /// The encapsulation of packets to servers with `forward = "tun"`. Default: IPIP.
    pub(super) tunnel: Option<Spanned<RawTunnel>>,
    /// The action if the check of a server fails: `quiesce` or `remove`. Default: `quiesce`.
    pub(super) on_check_failure: Option<Spanned<String>>,
    /// The action on the connections of a server that is removed: `kernel`, `reset`,
    /// `reschedule` or `drop`. Default: `kernel`.
    pub(super) on_server_down: Option<Spanned<String>>,
    /// Time for which the connections of a server that was removed from the file continue. Default:
    /// 30s.
    pub(super) drain: Option<Spanned<RawDuration>>,
    /// Usable servers that the service needs: a number, or a table. Default: 1.
    pub(super) quorum: Option<Spanned<RawQuorum>>,
    /// Action on the VIP while the service is below its quorum: `keep`, or `give-up`, which
    /// releases it. Default: `keep`.
    pub(super) below_quorum: Option<Spanned<String>>,
    /// Servers are down until a check has passed, also servers that are in use when lvsd starts.
    /// Default: false.
    pub(super) start_down: Option<Spanned<bool>>,
    /// Remove the service when lvsd exits, and report that its quorum is lost. Default: false.
    pub(super) remove_on_exit: Option<Spanned<bool>>,
    /// Percentage of the service's servers: if fewer are up, all count as up. Default: 0.
    pub(super) panic_below: Option<Spanned<Whole>>,
    /// Server that replaces the others below the quorum: an address, or a table. Default: none.
    pub(super) sorry: Option<Spanned<RawTarget>>,
    /// Time in which a server that joins the running service increases from few connections to its
    /// full share, in whole seconds. Default: none.
    pub(super) slow_start: Option<Spanned<RawDuration>>,
    /// The limits of the service. Default: no limits.
    pub(super) limits: Option<RawLimits>,
    /// Sources of accepted new connections. Default: all sources.
    pub(super) filter: Option<Spanned<RawFilter>>,
    /// Source of further servers: `{ dns = "_http._tcp.example.org" }`, `{ etcd = "web" }`.
    /// Default: none.
    pub(super) discover: Option<Spanned<RawDiscover>>,
    /// Real servers of the service: `["10.0.0.11:80", { address = "10.0.0.12:80", weight = 2 }]`.
    pub(super) servers: Vec<Spanned<RawTarget>>,
    /// More servers, each as a separate table.
    pub(super) server: Vec<Spanned<RawServer>>,
}

/// `[defaults]`: keys of services, as a table that is merged into each.
pub(super) type RawDefaults = RawService;

/// The keys of a service that `[defaults]` may have.
pub(crate) const DEFAULTS: [&str; 18] = [
    "scheduler",
    "scheduler_flags",
    "persistence",
    "forward",
    "vip",
    "check",
    "tunnel",
    "on_check_failure",
    "on_server_down",
    "drain",
    "quorum",
    "below_quorum",
    "start_down",
    "remove_on_exit",
    "panic_below",
    "sorry",
    "slow_start",
    "limits",
];

/// One address, or several.
#[derive(Clone, Debug)]
pub(super) enum Addresses {
    /// `"192.0.2.10:80"`
    One(String),
    /// `["192.0.2.10:80", "[2001:db8::10]:80"]`
    Several(Vec<Spanned<String>>),
}

/// `proxy = { ... }`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawProxy {
    /// Version of the PROXY protocol header with the client's address, which servers receive: `v1`
    /// or `v2`. Default: none.
    pub(super) send: Option<Spanned<String>>,
    /// Clients send a header of the PROXY protocol first. Default: false.
    pub(super) accept: Option<Spanned<bool>>,
    /// Longest time of a connection attempt to a server. Default: 5s.
    pub(super) connect_timeout: Option<Spanned<RawDuration>>,
    /// Longest time without data. Default: 15m, of datagrams 5m.
    pub(super) idle_timeout: Option<Spanned<RawDuration>>,
}

/// `filter = { ... }`, and `[filter]` for all services.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawFilter {
    /// Networks whose connections are accepted. If any are set, connections from all other networks
    /// are refused. Default: none.
    pub(super) allow: Option<Spanned<OneOrMore>>,
    /// Networks whose connections are refused. Default: none.
    pub(super) deny: Option<Spanned<OneOrMore>>,
    /// Files with further accepted networks. Default: none.
    pub(super) allow_file: Option<Spanned<OneOrMore>>,
    /// Files with further refused networks. Default: none.
    pub(super) deny_file: Option<Spanned<OneOrMore>>,
}

/// `limits = { ... }`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLimits {
    /// Maximum number of simultaneous connections. Default: no limit.
    pub(super) connections: Option<Spanned<Whole>>,
    /// Maximum number of new connections per second. Default: no limit.
    pub(super) rate: Option<Spanned<Whole>>,
    /// Maximum number of new connections per second from one source. Default: no limit.
    pub(super) source_rate: Option<Spanned<Whole>>,
    /// Bits of an IPv4 address that identify a source. Default: 32.
    pub(super) source_bits_v4: Option<Spanned<Whole>>,
    /// Bits of an IPv6 address that identify a source. Default: 64.
    pub(super) source_bits_v6: Option<Spanned<Whole>>,
}

/// `passive = true`, or `passive = 5`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawPassive {
    /// Whether a suspicious server counts as down.
    TakesOut(bool),
    /// Number of consecutive unanswered connection attempts of clients after which the server is
    /// checked at once.
    Number(Whole),
}

/// `quorum = 2`, or `quorum = { up = 3, down = 2 }`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawQuorum {
    /// The same number for `up` and `down`.
    Number(Whole),
    /// Numbers for `up` and `down`.
    Table(RawQuorumTable),
}

/// The table of a quorum.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawQuorumTable {
    /// Number of usable servers at which the service gains its quorum. Required.
    pub(super) up: Option<Spanned<Whole>>,
    /// Number of usable servers below which the service loses its quorum. Default: `up`.
    pub(super) down: Option<Spanned<Whole>>,
}

/// A server as a string, `"10.0.0.99:80"`, or as a table.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawTarget {
    /// The address of the server.
    Address(String),
    /// A table with the keys of a server.
    Table(Box<RawServer>),
}

impl RawTarget {
    /// Converts the value to a server at the value's position.
    pub(super) fn server(target: &Spanned<Self>) -> Spanned<RawServer> {
        let server = match target.get_ref() {
            Self::Address(address) => RawServer {
                address: Some(Spanned::new(target.span(), address.clone())),
                ..RawServer::default()
            },
            Self::Table(server) => RawServer::clone(server),
        };
        Spanned::new(target.span(), server)
    }
}

/// `persistence = { ... }`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPersistence {
    /// Time that a client is remembered after its last new connection. Default: `6m`, as with
    /// ipvsadm.
    pub(super) timeout: Option<Spanned<RawDuration>>,
    /// Netmask of the clients that count as one: a dotted mask (IPv4) or a prefix length. Default:
    /// each address counts separately.
    pub(super) netmask: Option<Spanned<Scalar>>,
    /// Persistence engine: `sip`. Default: none.
    pub(super) engine: Option<Spanned<String>>,
}

/// `[[service.server]]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawServer {
    /// Address and port. Default of the port: the port of the service; with several ports, the
    /// destination port of the client's packet. The address is required.
    pub(super) address: Option<Spanned<String>>,
    /// Weight, 0 to 2147483647; a server with weight 0 gets no new connections. Default: 1.
    pub(super) weight: Option<Spanned<Whole>>,
    /// Overrides the forwarding method of the service.
    pub(super) forward: Option<Spanned<String>>,
    /// Replaces the service's tunnel settings as a whole.
    pub(super) tunnel: Option<Spanned<RawTunnel>>,
    /// Number of connections at which the server gets no new ones; 0 means no limit. Default: 0.
    pub(super) max_connections: Option<Spanned<Whole>>,
    /// Number of connections below which the server gets new ones again; 0 means three quarters of
    /// `max_connections`. Default: 0.
    pub(super) resume_below: Option<Spanned<Whole>>,
    /// Overrides the service's check; `"none"` disables it.
    pub(super) check: Option<Spanned<RawCheck>>,
}

/// `tunnel = { ... }`, or `tunnel = "gre"` for `tunnel = { type = "gre" }`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawTunnel {
    /// The type as a string.
    Word(String),
    /// The type with options, as a table.
    Table(RawTunnelTable),
}

/// The table of a tunnel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawTunnelTable {
    /// `ipip`, `gre` or `gue`. Required.
    #[serde(rename = "type")]
    pub(super) kind: Option<Spanned<String>>,
    /// Destination port of GUE's UDP packets. Required for GUE.
    pub(super) port: Option<Spanned<Whole>>,
    /// Checksum of GRE and GUE: `none`, `full` or, GUE only, `remote`. Default: `none`.
    pub(super) checksum: Option<Spanned<String>>,
}

/// `check = { ... }` or `check = "none"`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawCheck {
    /// Any string.
    Word(String),
    /// The table.
    Table(Box<RawCheckTable>),
}

/// The table of a check: the common keys, and the keys that [`Probe`](crate::health::Probe) reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RawCheckTable {
    /// The type of the check. Required.
    pub(super) kind: Option<Spanned<String>>,
    /// Interval between the starts of two checks. Default: `5s`.
    pub(super) interval: Option<Spanned<RawDuration>>,
    /// Time after which a check has failed. Default: `2s`.
    pub(super) timeout: Option<Spanned<RawDuration>>,
    /// Number of consecutive successful checks after which a server is up again. Default: 2; 1 for
    /// the types `agent` and `file`.
    pub(super) rise: Option<Spanned<Whole>>,
    /// Number of consecutive failed checks after which the server is down. Default: 3; 1 for the
    /// types `agent` and `file`.
    pub(super) fall: Option<Spanned<Whole>>,
    /// Interval of checks while their results contradict the present state. Default: a fifth of
    /// `interval`.
    pub(super) fast_interval: Option<Spanned<RawDuration>>,
    /// Percentage by which each interval varies. Default: 5.
    pub(super) jitter: Option<Spanned<Whole>>,
    /// Path of the check: `server`, or `service` through the VIP. Default: through the VIP if the
    /// dataplane can forward the check to the server.
    pub(super) via: Option<Spanned<String>>,
    /// Whether a suspicious server counts as down; or the number of consecutive unanswered
    /// connection attempts of clients after which the server is checked at once. Default: `false`.
    pub(super) passive: Option<Spanned<RawPassive>>,
    /// Keys of this kind of check.
    pub(super) own: Vec<(Spanned<String>, Spanned<Value>)>,
}

impl RawCheckTable {
    /// The keys that a check of any kind can have.
    pub(super) const KEYS: [&'static str; 9] = [
        "fall",
        "fast_interval",
        "interval",
        "jitter",
        "passive",
        "rise",
        "timeout",
        "type",
        "via",
    ];
}

/// `[[mark]]`: a rule that sets a firewall mark on packets, drops them, or passes them to the host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawMark {
    /// Interface on which the packets arrive. Default: any.
    pub(super) interface: Option<Spanned<String>>,
    /// Source address or network. Default: any.
    pub(super) source: Option<Spanned<String>>,
    /// Destination address or network of the packets; required with `mark`. Default with `source`
    /// and `drop` or `host`: any service.
    pub(super) destination: Option<Spanned<String>>,
    /// `tcp`, `udp` or `sctp`. Default: all three.
    pub(super) protocol: Option<Spanned<String>>,
    /// Destination ports and ranges: `"80,443,8000-8010"`. Default: all.
    pub(super) ports: Option<Spanned<Scalar>>,
    /// Mark of the matching packets, 1 to 4294967295; this, `drop` or `host` is required.
    pub(super) mark: Option<Spanned<Whole>>,
    /// Whether matching packets are dropped.
    pub(super) drop: Option<Spanned<bool>>,
    /// Whether matching packets are passed to the host.
    pub(super) host: Option<Spanned<bool>>,
}

/// `"5s"`, `"500ms"`, `"2m30s"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RawDuration(pub(super) Duration);

/// A whole number. A number outside the range of the type becomes its lowest or highest value,
/// which every key refuses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Whole(pub(super) i64);

/// A string or a whole number, as text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Scalar(pub(super) String);

/// A string or an array of strings.
#[derive(Clone, Debug, Serialize)]
pub(super) struct OneOrMore(pub(super) Vec<String>);

/// The forms that a value may have in the file. Other forms are refused with `EXPECTED`.
trait Shape<'de>: Sized {
    /// The text that follows "expected" in an error message.
    const EXPECTED: &'static str;

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Err(E::invalid_type(Unexpected::Str(text), &Self::EXPECTED))
    }

    fn boolean<E: de::Error>(value: bool) -> Result<Self, E> {
        Err(E::invalid_type(Unexpected::Bool(value), &Self::EXPECTED))
    }

    fn whole<E: de::Error>(number: i128) -> Result<Self, E> {
        let shown = i64::try_from(number).map_or(Unexpected::Other("integer"), Unexpected::Signed);
        Err(E::invalid_type(shown, &Self::EXPECTED))
    }

    fn array<A: SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(de::Error::invalid_type(Unexpected::Seq, &Self::EXPECTED))
    }

    fn table<A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(de::Error::invalid_type(Unexpected::Map, &Self::EXPECTED))
    }
}

struct ShapeOf<T>(PhantomData<T>);

impl<'de, T: Shape<'de>> Visitor<'de> for ShapeOf<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<T, E> {
        T::string(v)
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<T, E> {
        T::boolean(v)
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<T, E> {
        T::whole(v.into())
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<T, E> {
        T::whole(v.into())
    }

    fn visit_i128<E: de::Error>(self, v: i128) -> Result<T, E> {
        T::whole(v)
    }

    fn visit_u128<E: de::Error>(self, v: u128) -> Result<T, E> {
        T::whole(i128::try_from(v).unwrap_or(i128::MAX))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<T, A::Error> {
        T::array(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::table(map)
    }
}

macro_rules! deserialize_by_shape {
    ($($name:ty),+ $(,)?) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(ShapeOf(PhantomData))
            }
        }
    )+};
}

deserialize_by_shape!(
    RawDuration,
    Whole,
    Scalar,
    Addresses,
    OneOrMore,
    RawQuorum,
    RawPassive,
    RawTarget,
    RawTunnel,
    RawCheck,
);

/// Reads a table whose keys are the fields of `T`.
fn keys_of<'de, T: Deserialize<'de>, A: MapAccess<'de>>(map: A) -> Result<T, A::Error> {
    T::deserialize(de::value::MapAccessDeserializer::new(map))
}

fn all<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(mut seq: A) -> Result<Vec<T>, A::Error> {
    let mut all = Vec::new();
    while let Some(one) = seq.next_element()? {
        all.push(one);
    }
    Ok(all)
}

impl Shape<'_> for RawDuration {
    const EXPECTED: &'static str = "a duration as a string, such as \"5s\"";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        lvs_api::words::parse_duration(text)
            .map(Self)
            .map_err(E::custom)
    }

    fn whole<E: de::Error>(v: i128) -> Result<Self, E> {
        Err(E::custom(format!(
            "a duration needs its unit; write \"{v}s\" for {v} seconds or \"{v}ms\" for milliseconds"
        )))
    }
}

impl Shape<'_> for Whole {
    const EXPECTED: &'static str = "a whole number";

    fn whole<E: de::Error>(number: i128) -> Result<Self, E> {
        let nearest = if number < 0 { i64::MIN } else { i64::MAX };
        Ok(Self(i64::try_from(number).unwrap_or(nearest)))
    }
}

impl Shape<'_> for Scalar {
    const EXPECTED: &'static str = "a whole number or a string";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self(text.to_owned()))
    }

    fn whole<E: de::Error>(number: i128) -> Result<Self, E> {
        Ok(Self(number.to_string()))
    }
}

impl<'de> Shape<'de> for Addresses {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self::One(text.to_owned()))
    }

    fn array<A: SeqAccess<'de>>(seq: A) -> Result<Self, A::Error> {
        all(seq).map(Self::Several)
    }
}

impl<'de> Shape<'de> for OneOrMore {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self(vec![text.to_owned()]))
    }

    fn array<A: SeqAccess<'de>>(seq: A) -> Result<Self, A::Error> {
        all(seq).map(Self)
    }
}

impl Shape<'_> for RawPassive {
    const EXPECTED: &'static str = "true, false, or a whole number";

    fn boolean<E: de::Error>(value: bool) -> Result<Self, E> {
        Ok(Self::TakesOut(value))
    }

    fn whole<E: de::Error>(number: i128) -> Result<Self, E> {
        Whole::whole(number).map(Self::Number)
    }
}

impl<'de> Shape<'de> for RawQuorum {
    const EXPECTED: &'static str = "a whole number, or a table such as { up = 3, down = 2 }";

    fn whole<E: de::Error>(number: i128) -> Result<Self, E> {
        Whole::whole(number).map(Self::Number)
    }

    fn table<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        keys_of(map).map(Self::Table)
    }
}

impl<'de> Shape<'de> for RawTarget {
    const EXPECTED: &'static str =
        "an address as a string, or a table such as { address = \"10.0.0.99:80\" }";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self::Address(text.to_owned()))
    }

    fn table<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        keys_of(map).map(Box::new).map(Self::Table)
    }
}

impl<'de> Shape<'de> for RawTunnel {
    const EXPECTED: &'static str =
        "a table such as { type = \"gue\", port = 6080 }, or \"ipip\" or \"gre\"";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self::Word(text.to_owned()))
    }

    fn table<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        keys_of(map).map(Self::Table)
    }
}

impl<'de> Shape<'de> for RawCheck {
    const EXPECTED: &'static str =
        "a table such as { type = \"tcp\", interval = \"5s\" }, or \"none\"";

    fn string<E: de::Error>(text: &str) -> Result<Self, E> {
        Ok(Self::Word(text.to_owned()))
    }

    fn table<A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        let mut table = RawCheckTable::default();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            match key.get_ref().as_str() {
                "type" => table.kind = Some(map.next_value()?),
                "interval" => table.interval = Some(map.next_value()?),
                "timeout" => table.timeout = Some(map.next_value()?),
                "rise" => table.rise = Some(map.next_value()?),
                "fall" => table.fall = Some(map.next_value()?),
                "fast_interval" => table.fast_interval = Some(map.next_value()?),
                "jitter" => table.jitter = Some(map.next_value()?),
                "via" => table.via = Some(map.next_value()?),
                "passive" => table.passive = Some(map.next_value()?),
                _ => table.own.push((key, map.next_value()?)),
            }
        }
        Ok(Self::Table(Box::new(table)))
    }
}
