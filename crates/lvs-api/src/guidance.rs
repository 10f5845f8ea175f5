//! Fixes that `lvsd` and `lvsadm` both print. lvsd reverts changes that are made with `lvsadm`, so
//! the fixes for its services change lvsd's file.

use std::net::{IpAddr, SocketAddr};

use lvs_core::Forwarding;
use lvs_core::api::{Conflict, PeerStanding, ReasonCount, ServiceInfo};

use crate::words::shell_word;

/// The owner of the services of `lvsd`, as recorded in the dataplane.
pub const OWNER: &str = "lvsd";

/// Commands of `lvsadm` that `lvsd` does not have.
pub const LVSADM_COMMANDS: [&str; 14] = [
    "watch",
    "explain",
    "realserver-setup",
    "drops",
    "workers",
    "sysctl",
    "mark",
    "local",
    "sync",
    "diff",
    "limit",
    "filter",
    "capture",
    "doctor",
];

/// Commands of `lvsd` that `lvsadm` does not have.
pub const LVSD_COMMANDS: [&str; 13] = [
    "stop",
    "reload",
    "check",
    "init",
    "plan",
    "status",
    "check-health",
    "events",
    "convert",
    "register",
    "keepalived-config",
    "schema",
    "dataplane",
];

/// How to restart a dataplane that systemd or lvsd has started.
pub const RESTART_DATAPLANE: &str = "systemctl restart lvs-dataplane, or, if lvsd has started the dataplane, kill its process (lvsd then starts another one); both end all connections";

const PEER_BEHIND: &str = "run lvsadm sync on both directors; check that the other one is up, that each can connect to the other (TCP, the port of --sync-listen), and that both have the same key";

/// Options of `lvs-dataplane` in fixes that are also keys of `[dataplane]`.
const OPTIONS: [&str; 11] = [
    "--clamp-mss",
    "--echo",
    "--helper",
    "--icmp-limit",
    "--fast-path",
    "--interface",
    "--max-connections",
    "--own-vips",
    "--reverse-path",
    "--when-full",
    "--workers",
];

/// Beginning of the sentence that names the keys of lvsd's file.
const WITH_LVSD: &str = "With lvsd:";

/// Whether `lvsd` manages one of these services.
pub fn manages_any(services: &[ServiceInfo]) -> bool {
    services.iter().any(is_managed)
}

/// Whether `lvsd` manages a service.
pub fn is_managed(service: &ServiceInfo) -> bool {
    service.owner.as_deref() == Some(OWNER)
}

/// The fix for a server that does not answer clients. `vip`: the address to which clients send, if
/// the service has one.
pub fn for_unanswered(server: SocketAddr, forwarding: Forwarding, vip: Option<IpAddr>) -> String {
    let (ip, port) = (server.ip(), server.port());
    let setup = |method: &str| {
        let vip = vip.map_or_else(|| "VIP".to_owned(), |vip| vip.to_string());
        format!("lvsadm realserver-setup --method {method} {vip} prints the commands")
    };
    match forwarding {
        Forwarding::Nat => format!(
            "on {ip}: is something listening on port {port}, is this director its default gateway (ip route; {}), and \
             does a filter drop the packets of clients (nft list ruleset)? Replies that take another path reach the \
             client from the wrong address",
            setup("nat --gateway ADDRESS")
        ),
        Forwarding::FullNat => format!(
            "on {ip}: is something listening on port {port}, does it have a route to the local addresses (lvsadm \
             local), and does a filter drop packets from them (nft list ruleset)?"
        ),
        Forwarding::Tunnel => format!(
            "on {ip}: is the tunnel up (modprobe ipip; ip link set tunl0 up), is the virtual address on lo, are \
             net.ipv4.conf.tunl0.rp_filter and net.ipv4.conf.all.rp_filter 0 ({}), and does a filter drop the packets (nft list ruleset)?",
            setup("tun")
        ),
        _ => format!(
            "on {ip}: is the virtual address on lo ({}), is something listening on it, and does a \
            filter drop the packets (nft list ruleset)? If clients are behind another interface, \
            does rp_filter drop their packets (sysctl net.ipv4.conf)?",
            setup("dr")
        ),
    }
}

/// The fix for a peer whose connections are not replicated.
pub fn for_peer(peer: &PeerStanding) -> String {
    match peer.state.as_str() {
        PeerStanding::ABSENT => format!("restart the dataplane: {RESTART_DATAPLANE}"),
        _ => PEER_BEHIND.to_owned(),
    }
}

/// A command that tests a source of servers or services. `kind`: `dns`, `etcd` or `kubernetes`.
pub fn test_of_source(kind: &str, name: &str) -> String {
    match kind {
        "dns" => {
            let records = if name.starts_with('_') { "SRV" } else { "A" };
            let name = shell_word(name);
            format!(
                "dig {records} {name} @SERVER, for the name servers of [dns] or /etc/resolv.conf"
            )
        }
        "etcd" => "etcdctl --endpoints=URL endpoint health, for each URL of [cluster]".to_owned(),
        _ => "kubectl get --raw /readyz, as the user of lvsd's kubeconfig".to_owned(),
    }
}

/// Whether more than nine tenths of a connection table are in use.
pub const fn is_nearly_full(connections: u64, capacity: u64) -> bool {
    connections.saturating_mul(10) > capacity.saturating_mul(9)
}

/// The fix for a connection table that is nearly full, on a host with `lvsd`.
pub const NEARLY_FULL: &str = "raise `max_connections` in [dataplane] and restart lvs-dataplane, or shorten the timeouts (lvsadm --set); under a flood, set `when_full = \"evict\"` in [dataplane], and `limits` of the service";

/// The fix for an interface that is down.
pub fn for_interface_down(name: &str) -> String {
    format!(
        "ip link set {name} up; if it stays down, check its cable and the device at the other end"
    )
}

/// The fix for a next hop that does not answer ARP or neighbour discovery.
pub fn for_silent_hop(hop: IpAddr) -> String {
    format!(
        "check that the next hop is up and connected (ip neigh show {hop}), and that the route to it is right (ip route)"
    )
}

/// The fix for an address that another host has, too.
pub fn for_conflict(conflict: &Conflict) -> String {
    let Conflict { address, mac, .. } = conflict;
    let host = match conflict.host {
        Some(host) => format!("{host}, {mac}"),
        None => mac.clone(),
    };
    if !conflict.is_vip() {
        let (interface, own) = (&conflict.interface, &conflict.own_mac);
        return format!(
            "give the other host ({host}) or this one another address: packets to {address} reach the other one at times. On this host, {interface} ({own}) has the address"
        );
    }
    let quiet = match address {
        IpAddr::V4(_) => " with net.ipv4.conf.all.arp_ignore=1 and arp_announce=2",
        IpAddr::V6(_) => "",
    };
    format!(
        "on the other host ({host}): remove {address}; if it is a real server that needs the address (direct routing, tunnels), have it on lo{quiet} (lvsadm realserver-setup --method dr {address} prints the commands)"
    )
}

/// Replaces the fixes of reasons by fixes for a host whose services `lvsd` manages.
pub fn for_lvsd(reasons: &mut [ReasonCount]) {
    for reason in reasons {
        reason.fix = match by_reason(&reason.reason) {
            Some(fix) => fix.to_owned(),
            None => with_keys(&reason.fix),
        };
    }
}

fn by_reason(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "no_server" => {
            "lvsd status shows which servers are down, drained or in maintenance, and why. Repair a server whose check \
             fails, end a drain (lvsadm undrain), or add servers to the file of lvsd and run lvsd reload. A server at its \
             upper threshold accepts no new connections either: raise `max_connections` there."
        }
        "service_full" | "service_rate" => {
            "The service has reached one of its limits: raise the limit in `limits` in the file of lvsd and run lvsd reload, or see which clients open so many connections (lvsadm -Lnc)."
        }
        "source_rate" => {
            "One source opens more connections than the limit of the service for one source allows. Clients behind one NAT router count as one source: if these are legitimate clients, raise `source_rate` in `limits` in the file of lvsd and run lvsd reload."
        }
        "table_full" | "evicted_half_open" | "evicted_ended" | "evicted_unused"
        | "evicted_idle" | "evicted_template" => {
            "Raise `max_connections` in [dataplane] in the file of lvsd and restart lvs-dataplane, or shorten the timeouts \
             (lvsadm --set). Under a flood, set `when_full = \"evict\"` in [dataplane], and `limits` of the service."
        }
        "drop_packet" => {
            "This host was short of memory, or drop_packet is 3. Add memory, or set drop_packet = 0 or a lower amemthresh in [sysctl] in the file of lvsd."
        }
        "backup_only" => {
            "A backup daemon is running, and backup_only is 1. If this director must forward: set role = \"master\" in [sync.ipvs] in the file of lvsd, or backup_only = 0 in [sysctl] there."
        }
        "tunneled" => {
            "ignore_tunneled is 1. To balance packets that arrive through a tunnel as well, set ignore_tunneled = 0 in [sysctl] in the file of lvsd."
        }
        "own_address" => {
            "A client tries ports of a virtual address that no service has: this is normal, or a service is missing in the file of lvsd."
        }
        "no_local_port" => {
            "Add addresses for full NAT (`local_addresses` in [dataplane] in the file of lvsd), or shorten the timeouts \
             (lvsadm --set)."
        }
        "server_removed" => {
            "Connections to a deleted server stall until the clients close them. Drain the server first (lvsadm drain, or the service's `drain` in the file of lvsd), or make such connections end at once: expire_nodest_conn = 1 in [sysctl] there."
        }
        _ => return None,
    })
}

/// If `fix` names options of `lvs-dataplane`, appends a sentence with the keys of lvsd's file for
/// these options. A fix that begins with `Nothing:`, or already has this sentence, is returned
/// unchanged.
pub fn with_keys(fix: &str) -> String {
    if fix.starts_with("Nothing:") {
        return fix.to_owned();
    }
    let word = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let mut keys: Vec<String> = fix
        .split(|c| !word(c))
        .filter(|word| OPTIONS.contains(word))
        .map(|option| format!("`{}`", option[2..].replace('-', "_")))
        .collect();
    keys.sort_unstable();
    keys.dedup();
    if keys.is_empty() || fix.contains(WITH_LVSD) {
        return fix.to_owned();
    }
    let end = if fix.ends_with('.') { "" } else { "." };
    format!(
        "{fix}{end} {WITH_LVSD} {} in [dataplane] of lvsd's file; then restart lvs-dataplane.",
        keys.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use lvs_core::recent::RecentCount;

    use super::*;

    #[test]
    fn table_above_nine_tenths_is_nearly_full() {
        for (connections, capacity, expected) in [
            (0, 0, false),
            (0, 1, false),
            (1, 1, true),
            (9, 10, false),
            (17, 19, false),
            (18, 19, true),
        ] {
            let found = is_nearly_full(connections, capacity);
            assert_eq!(found, expected, "{connections} of {capacity}");
        }
    }

    #[test]
    fn fix_that_requires_no_change_gets_no_lvsd_keys() {
        let nothing = "Nothing: this is what --fast-path is for.";
        assert_eq!(with_keys(nothing), nothing);
    }

    fn fix(reason: &str, fix: &str) -> String {
        let mut reasons = [ReasonCount {
            action: "drop".to_owned(),
            reason: reason.to_owned(),
            packets: RecentCount::default(),
            help: String::new(),
            fix: fix.to_owned(),
        }];
        for_lvsd(&mut reasons);
        let [ReasonCount { fix, .. }] = reasons;
        fix
    }

    #[test]
    fn service_without_servers_gets_fix_for_lvsd() {
        let reported = fix("no_server", "Add one (-a).");
        assert!(
            reported.contains("lvsd status") && !reported.contains("-a)"),
            "{reported}"
        );
    }

    #[test]
    fn lvsd_keys_are_added_once_to_fix_and_only_for_dataplane_options() {
        let reported = fix("x", "Start with --max-connections, --when-full evict");
        assert!(
            reported.contains("With lvsd: `max_connections`, `when_full` in [dataplane]"),
            "no \"With lvsd: `max_connections`, `when_full` in [dataplane]\" in {reported}"
        );
        assert_eq!(fix("x", &reported), reported);
        // `--set` is an option of lvsadm.
        assert_eq!(fix("x", "lvsadm --set 1 2 3."), "lvsadm --set 1 2 3.");
    }
}
