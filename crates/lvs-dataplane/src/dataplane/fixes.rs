//! For operators: the fixes for the reasons why packets were not forwarded, and for similar
//! counters.

use lvs_core::{AcceptReason, DropReason};

use crate::host::view::Tables;
use lvs_packet::drop::FrameDrop;

/// The fix for malformed packets: their senders or the network are the cause, not the director.
const MALFORMED: &str = "A few are normal on every network. If there are many: lvsadm capture dropped -w FILE shows their senders; check that host, \
                         its driver and the offloads of the network cards in between (ethtool -K IF tx off).";
const ORDINARY: &str = "Nothing: this is the expected behaviour.";

pub(super) const fn of_drop(reason: DropReason) -> &'static str {
    match reason {
        DropReason::ServerRemoved => {
            "Connections to a deleted server stall until the clients close them. Set its weight to 0 first (lvsadm drain), or make such connections end at once: lvsadm sysctl expire_nodest_conn=1."
        }
        DropReason::NoServer => {
            "lvsadm -Ln: is there a server with a weight above 0 that has not reached its upper threshold? Add one (-a), or \
             raise weight or threshold (-e ... -w, -x)."
        }
        DropReason::TableFull => {
            "Start lvs-dataplane with a larger --max-connections, or shorten the timeouts (lvsadm --set); under a flood, start \
             it with --when-full evict, and limit the service (lvsadm limit)."
        }
        DropReason::ServiceFull | DropReason::ServiceRate => {
            "The service has reached one of its limits (limits in its TOML, lvsadm limit): raise the limit, or see which clients open so many connections (lvsadm -Lnc)."
        }
        DropReason::SourceRate => {
            "One source opens more connections than the service's limit for one source allows (limits in its TOML, lvsadm limit). Clients behind one NAT router count as one source: if these are legitimate clients, raise the limit."
        }
        DropReason::Filtered => {
            "lvsadm filter list shows the filters; lvsadm explain SOURCE VIP:PORT names the filter of a source."
        }
        DropReason::ShortHeader | DropReason::IcmpChecksum => MALFORMED,
        DropReason::DropPacket => {
            "This host was short of memory, or drop_packet is 3. Add memory, or use lvsadm sysctl drop_packet=0 amemthresh=N."
        }
        DropReason::PersistenceEngine => {
            "The engine sip accepts only SIP over UDP with a Call-ID. Use another service for other traffic."
        }
        DropReason::StrayReply => {
            "A server sends packets of a connection that has ended on the director: use longer timeouts (lvsadm --set), or find out whether the clients' packets bypass this director."
        }
        DropReason::Unbound => {
            "Configure the same services and servers here as on the director that sends its connections."
        }
        DropReason::NoLocalPort => {
            "Add addresses for full NAT (lvsadm local --help), or shorten the timeouts (lvsadm --set)."
        }
        DropReason::HelperChecksum => MALFORMED,
        DropReason::HelperSequence => {
            "The connections were open before the dataplane started, or an attacker guesses sequence numbers. Clients that log in again succeed."
        }
        DropReason::ServerDown => {
            "A server went down, and its connections end according to on_server_down of the service. The clients connect again."
        }
        DropReason::ForeignShard => {
            "The program that embeds the dataplane uses a shard of another director: correct the program."
        }
        DropReason::MarkRule => {
            "lvsadm mark list shows the rule and its number of packets. Correct the rule if these packets are for a service."
        }
        DropReason::Hook => "See the documentation of the program that embeds the dataplane.",
        _ => MALFORMED,
    }
}

pub(super) const fn of_accept(reason: AcceptReason) -> &'static str {
    match reason {
        AcceptReason::NoService => {
            "This is normal for the host's own traffic. If a service should have accepted the packet, lvsadm explain tcp SRC:PORT VIP:PORT shows the reason."
        }
        AcceptReason::NotNew => {
            "This is normal for the host's own connections, such as health checks. The host resets connections of clients after a restart of the dataplane, and those that were idle for longer than their timeout: for these, use longer timeouts (lvsadm --set)."
        }
        AcceptReason::Protocol => {
            "TCP, UDP, SCTP, AH and ESP are balanced; the host processes other protocols."
        }
        AcceptReason::SourcePort20 => {
            "New connections from port 20 count as data connections of active FTP. Use passive mode, or make the clients use another source port."
        }
        AcceptReason::FtpData => {
            "Passive FTP needs a persistent service at port 21 (-p), or a service of a mark with both ports."
        }
        AcceptReason::NoConnection => {
            "This is normal for connections that servers open themselves. If clients see replies from a server's own address, the dataplane has restarted, or their requests bypass the director."
        }
        AcceptReason::BackupOnly => {
            "The sysctl backup_only is set. To let this director forward: lvsadm --stop-daemon backup, or sysctl backup_only=0."
        }
        AcceptReason::Tunneled => {
            "The sysctl ignore_tunneled is set: lvsadm sysctl ignore_tunneled=0 balances tunnelled packets, too."
        }
        AcceptReason::MarkRule => {
            "lvsadm mark list shows the rule and its number of packets. Correct the rule if these packets are for a service."
        }
        AcceptReason::Hook => "See the documentation of the program that embeds the dataplane.",
        AcceptReason::UnrelatedIcmp | AcceptReason::LocalReply => ORDINARY,
        _ => ORDINARY,
    }
}

pub(super) const fn of_frame(reason: FrameDrop) -> &'static str {
    match reason {
        FrameDrop::Truncated
        | FrameDrop::IpVersion
        | FrameDrop::IpHeaderLength
        | FrameDrop::IpChecksum
        | FrameDrop::IpLength
        | FrameDrop::BadOffload
        | FrameDrop::IcmpShort
        | FrameDrop::BadFragment
        | FrameDrop::TinyFragment
        | FrameDrop::ShortHeader
        | FrameDrop::BadAggregate => MALFORMED,
        FrameDrop::TinySegments => {
            "A virtual machine on a virtual link sends super-packets that no TCP sends: find it (lvsadm capture dropped -w FILE), and disable the segmentation offload of its device (ethtool -K IF tso off gso off)."
        }
        FrameDrop::WorkerBusy => {
            "One packet worker receives more packets than it can process: lvsadm workers shows which. More workers do not help if the packets belong to one client's connections."
        }
        FrameDrop::ReversePath => {
            "A sender forges sources, or routes are asymmetric: compare ip route get SOURCE with the interface (lvsadm capture dropped -w FILE). If the routes are asymmetric, start the dataplane with --reverse-path loose."
        }
        FrameDrop::CheckPath => {
            "Make this director the default gateway of the server that lvsd status names, or use full NAT for it."
        }
        FrameDrop::SynFlood => {
            "A flood of SYNs arrives, and new clients may have to repeat theirs (docs/security.md): lvsadm capture dropped -w FILE shows the sources; filter them in front of the director (lvsadm filter, XDP)."
        }
        FrameDrop::NestedTags => {
            "A sender tries to evade filters with VLAN tags, or a switch adds a tag of VLAN 0 to frames that have one: find it \
             (lvsadm capture dropped -w FILE)."
        }
        FrameDrop::NoPort | FrameDrop::Verdict | FrameDrop::Rejected => ORDINARY,
        FrameDrop::FragmentMemory => {
            "A flood of fragments arrives, or packets are lost before the director. Let clients send smaller datagrams."
        }
        FrameDrop::TtlExceeded => {
            "A traceroute, or a loop: look for a router that sends packets to the virtual address, or the servers' replies, back to this director."
        }
        FrameDrop::TooBig => {
            "The sender of the packet received an ICMP error (fragmentation needed); if connections hang, a filter discards it. Raise the MTU \
             towards the servers, or let them announce a smaller MSS: ip route change ... advmss N. lvsadm doctor names the path."
        }
        FrameDrop::MtuTooSmall => {
            "Raise the MTU of the interface towards the server: a tunnel needs 68 bytes (IPv6: 1280) in addition to its headers."
        }
        FrameDrop::NoRoute => {
            "Add the missing route on this host: ip route get ADDRESS shows whether the client or server has one."
        }
        FrameDrop::NoLinkLayer => {
            "`ip route get ADDRESS` of the client or server shows the device. Packet sockets cannot send over it: start \
             lvs-dataplane with --backend tun (backend = \"tun\" in [dataplane]), or route that address over an Ethernet \
             interface."
        }
        FrameDrop::UnusedInterface => {
            "`ip route get ADDRESS` of the client or server shows the interface: add it with --interface (interface in \
             [dataplane])."
        }
        FrameDrop::RouteRefuses => {
            "`ip route get ADDRESS` of the client or server shows the route: delete it."
        }
        FrameDrop::NoSource => {
            "Give the interface towards the server an address of the server's IP version."
        }
        FrameDrop::Unsupported => {
            "Use another method or tunnel for that server (lvsadm -Ln --tun-info). The backend tun supports neither direct routing nor this host's own connections to servers behind NAT."
        }
        FrameDrop::NoRoom => "This is an error of the dataplane; please report it with its log.",
        FrameDrop::Martian => {
            "A sender forges addresses, or two hosts have the same one: lvsadm capture dropped -w FILE shows the MAC. A real \
             server or virtual address of 127.0.0.0/8 works on this host only."
        }
        FrameDrop::IpOptions | FrameDrop::SourceRoute => MALFORMED,
        FrameDrop::EchoOff | FrameDrop::EchoLimit => {
            "The option --echo of lvs-dataplane limits how often hosts may ping its virtual addresses. To answer more echo requests, set a larger number."
        }
        FrameDrop::Loop => {
            "A server has an address that this host routes to the dataplane: correct the server's address, or the route."
        }
        FrameDrop::NoHostPort => {
            "The dataplane could not make its device lvs-host0: see its log for the reason (/dev/net/tun, CAP_NET_ADMIN)."
        }
        FrameDrop::HostStray => {
            "Remove the routes over the device lvs-host0 that do not lead to virtual addresses (ip route show dev lvs-host0)."
        }
        FrameDrop::OwnAddress => {
            "A client tries ports of a virtual address without a service: this is normal, or a service is missing (lvsadm -A)."
        }
    }
}

/// Returns the fix for packets whose route leads over a device that the dataplane does not use,
/// with the names of these devices; `None` for other reasons, or if no such device is known.
pub(super) fn of_route(reason: &str, tables: &Tables) -> Option<String> {
    let no_link_layer = reason == FrameDrop::NoLinkLayer.name();
    if !no_link_layer && reason != FrameDrop::UnusedInterface.name() {
        return None;
    }
    // As many names as fit on one line.
    const SHOWN: usize = 8;
    let devices = tables.unused_devices(!no_link_layer);
    let names = devices.iter().take(SHOWN).copied().collect::<Vec<_>>();
    let names = match names.is_empty() {
        true => return None,
        false => names.join(", "),
    };
    Some(match no_link_layer {
        true => format!(
            "Routes lead over {names}, without a link layer: packet sockets cannot send there. Start lvs-dataplane with \
             --backend tun (backend = \"tun\" in [dataplane]), or route these addresses over an Ethernet interface."
        ),
        false => format!(
            "Routes lead over {names}, which the dataplane does not use: add --interface (interface in [dataplane])."
        ),
    })
}

/// Name, meaning and fix of the counter of frames that were not sent.
pub(super) const NOT_SENT: [&str; 3] = [
    "not_sent",
    "The interface refused the frame: its queue is full, it is down, or the frame is too long for it.",
    "Find the interface that drops (ip -s link). Lengthen its queue (ip link set IF txqueuelen 10000), use a faster link, or \
     set the same MTU on both sides.",
];
pub(super) const NOT_RECEIVED: [&str; 3] = [
    "not_received",
    "The dataplane was too slow, and the queue of the packet socket was full.",
    "Provide more CPU for lvs-dataplane (no other program on its core, CPUQuota of its unit), and longer queues: sysctl -w net.core.rmem_max=67108864 before it starts.",
];
pub(super) const ICMP_LIMITED: [&str; 3] = [
    "icmp_limited",
    "ICMP errors that the director did not send because of its rate limit.",
    "A sender's packets are refused: lvsadm drops lists the reasons. To send more errors, raise --icmp-limit.",
];
pub(super) const INCOMPLETE: [&str; 3] = [
    "incomplete",
    "Fragments whose datagram was not complete within 30 seconds, or was inconsistent.",
    "Packets are lost before the director, or one of several links delivers only some fragments: make clients send smaller datagrams.",
];
pub(super) const VLAN: [&str; 3] = [
    "vlan",
    "Frames of a VLAN without an interface on this host.",
    "If services use this VLAN, create its interface: ip link add link NAME name NAME.VLAN type vlan id VLAN.",
];
const EVICTED: &str = "A flood, or a table that is too small for its clients: start lvs-dataplane with a larger --max-connections, \
                       and limit the service that is flooded (lvsadm limit).";
pub(super) const EVICTED_HALF_OPEN: [&str; 3] = [
    "evicted_half_open",
    "Half-open connections, and connections of a single datagram, that were evicted for new ones when the table was full.",
    EVICTED,
];
pub(super) const EVICTED_ENDED: [&str; 3] = [
    "evicted_ended",
    "Connections in TIME_WAIT or CLOSE that were evicted for new ones when the table was full.",
    EVICTED,
];
pub(super) const EVICTED_UNUSED: [&str; 3] = [
    "evicted_unused",
    "Connections that were evicted for new ones when the table was full, because only their handshake had passed.",
    EVICTED,
];
pub(super) const EVICTED_IDLE: [&str; 3] = [
    "evicted_idle",
    "Connections that were evicted for new ones when the table was full, because they had been idle for a minute.",
    EVICTED,
];
pub(super) const EVICTED_TEMPLATE: [&str; 3] = [
    "evicted_template",
    "Persistence templates without a connection that were evicted for new ones when the maximum number was reached: their clients may be sent to another server.",
    EVICTED,
];
pub(super) const NO_NEIGHBOUR: [&str; 3] = [
    lvs_packet::held::NO_NEIGHBOUR,
    "The next hop of the packet did not answer ARP or neighbour discovery, or too many packets waited for it.",
    "ip neigh shows which neighbour is FAILED or INCOMPLETE: is that host up, on that link, and in that network?",
];
pub(super) const KEEPER_BUSY: [&str; 3] = [
    "keeper_busy",
    "Requests of packet workers (neighbours to be resolved, connections of this host) that were dropped because the queue of the keeper, or the list of this host's connections, was full.",
    "A host scans addresses, or announces them, faster than the dataplane can query the kernel: lvsadm capture dropped -w FILE. The request is repeated with the next packet.",
];

/// Losses and refusals of synchronisation, in the order of
/// [`SyncCounts::losses`](lvs_core::api::SyncCounts::losses).
pub(super) const SYNC: [[&str; 2]; 8] = [
    [
        "Synchronisation messages that were not sent, because the queue was full.",
        "The interface of the synchronisation master is too slow or down: check it with ip -s link. Otherwise raise the sysctls sync_qlen_max and sync_sock_size, or send less (sync_refresh_period).",
    ],
    [
        "Synchronisation messages that the interface refused.",
        "Check that the interface is up and has an address: ip addr show dev NAME, with the NAME from lvsadm -L --daemon.",
    ],
    [
        "Synchronisation messages that arrived faster than the packet workers took over their connections.",
        "Raise the sysctl sync_sock_size, which applies from the next start of the backup, or have the master send less (sync_refresh_period).",
    ],
    [
        "Synchronisation messages that are longer than the maximum of this backup.",
        "Start the backup with the --sync-maxlen of the master: lvsadm -L --daemon shows the value on each director.",
    ],
    [
        "Synchronisation messages that are damaged, or that no IPVS sends.",
        "Find the senders to the group: tcpdump -ni NAME udp port 8848. Permit only directors: docs/synchronisation.md.",
    ],
    [
        "Synchronisation messages of a master with another syncid.",
        "No action is required if there are two clusters on this network. Otherwise configure the same --syncid on both.",
    ],
    [
        "Invalid connections in messages: with an unknown protocol, state or persistence engine.",
        "Find the senders to the group: tcpdump -ni NAME udp port 8848. Permit only directors: docs/synchronisation.md.",
    ],
    [
        "Synchronised connections for which the table had no room.",
        "Start lvs-dataplane with the same --max-connections as the other director.",
    ],
];

/// The fates of frames in the kernel fast path.
pub(super) const KERNEL: [(&str, [&str; 3]); 9] = [
    (
        "kernel",
        [
            "kernel_requests",
            "Packets from clients that were forwarded by the kernel fast path.",
            "Nothing: this is what --fast-path is for.",
        ],
    ),
    (
        "kernel",
        [
            "kernel_replies",
            "Packets from servers that were forwarded by the kernel fast path.",
            "Nothing: this is what --fast-path is for.",
        ],
    ),
    (
        "kernel",
        [
            "kernel_xdp",
            "Packets that were forwarded by the kernel fast path before they had a socket buffer.",
            "Nothing: this is what --xdp is for.",
        ],
    ),
    (
        "up",
        [
            "up_unknown",
            "Packets without a connection that the programs can find: new connections, the host's own packets, connections with the same addresses and ports as others.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "up",
        [
            "up_unpublished",
            "Packets of a connection that is too new, not offloadable, or not offloaded again since the last change.",
            "If this is most of the traffic: connections are short, or the configuration changes all the time (ip monitor shows changes of the host's configuration).",
        ],
    ),
    (
        "up",
        [
            "up_unfit",
            "Packets of an offloaded connection that only the dataplane can forward, for example because they change its state (SYN, FIN, RST) or exceed the MTU of their path.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "up",
        [
            "up_other",
            "Packets that are neither TCP nor UDP, have IP options, are fragments, have a TTL that expires here, belong to a VLAN without an interface on this host, are damaged, or are for other hosts.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "drop",
        [
            "kernel_waiting",
            "Packets of known connections, and packets to services, that were dropped while no dataplane ran, because only a dataplane can decide on them.",
            "Their senders repeat them. See the service manager's log for the reason why the dataplane exited.",
        ],
    ),
    (
        "drop",
        [
            "kernel_lost",
            "Packets that the kernel fast path lost: the kernel had no memory to change them, or lvs_ingress did not run for them.",
            "Check the free memory (free -m, dmesg): stop programs or add memory. If the log reports a frame that was lost before lvs_ingress, bpftool net lists the other BPF programs.",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use lvs_core::api::ReasonCount;
    use lvs_core::recent::RecentCount;

    use super::*;
    use lvs_api::guidance::for_lvsd;

    #[test]
    fn fix_for_lvsd_changes_no_services_and_names_documented_keys() {
        let drops = DropReason::ALL
            .iter()
            .map(|&reason| (reason.name(), of_drop(reason)));
        let frames = FrameDrop::ALL
            .iter()
            .map(|&reason| (reason.name(), of_frame(reason)));
        let evicted = [
            EVICTED_HALF_OPEN,
            EVICTED_ENDED,
            EVICTED_UNUSED,
            EVICTED_IDLE,
            EVICTED_TEMPLATE,
        ];
        let evicted = evicted.map(|[name, _, fix]| (name, fix));
        let accepts = AcceptReason::ALL
            .iter()
            .map(|&reason| (reason.name(), of_accept(reason)));
        let page = include_str!("../../../../docs/configuration.md");
        for (name, fix) in drops.chain(frames).chain(evicted).chain(accepts) {
            let mut reasons = [ReasonCount {
                action: "drop".to_owned(),
                reason: name.to_owned(),
                packets: RecentCount::default(),
                help: String::new(),
                fix: fix.to_owned(),
            }];
            for_lvsd(&mut reasons);
            let reported = &reasons[0].fix;
            for change in ["lvsadm -", "(-a)", "(-e", "lvsadm limit", "lvsadm sysctl"] {
                let reported = reported
                    .replace("lvsadm --set", "")
                    .replace("lvsadm -L", "");
                assert!(
                    !reported.contains(change),
                    "the fix of {name} contains {change:?} for lvsd: {reported}"
                );
            }
            // Keys are in backticks, alone or with a value; commands have several words.
            for key in reported.split('`').skip(1).step_by(2) {
                let key = key.split(" = ").next().unwrap_or_default();
                let is_key = !key.contains(char::is_whitespace);
                assert!(
                    !is_key || page.contains(&format!("`{key}`")),
                    "docs/configuration.md has no key {key}, which the fix of {name} names"
                );
            }
        }
    }

    /// Each name is a separate series in `/metrics`.
    #[test]
    fn reasons_of_one_action_have_different_names() {
        let drops = DropReason::ALL.iter().map(|reason| reason.name());
        let frames = FrameDrop::ALL.iter().map(|reason| reason.name());
        let accepts = AcceptReason::ALL.iter().map(|reason| reason.name());
        let others = [
            NOT_SENT,
            NOT_RECEIVED,
            ICMP_LIMITED,
            INCOMPLETE,
            NO_NEIGHBOUR,
            KEEPER_BUSY,
            EVICTED_HALF_OPEN,
            EVICTED_ENDED,
            EVICTED_UNUSED,
            EVICTED_IDLE,
            EVICTED_TEMPLATE,
        ];
        let all = drops
            .chain(frames)
            .chain(others.map(|[name, ..]| name))
            .map(|name| ("drop", name))
            .chain(accepts.chain([VLAN[0]]).map(|name| ("host", name)))
            .chain(KERNEL.map(|(action, [name, ..])| (action, name)));
        let mut seen = std::collections::HashSet::new();
        for (action, name) in all {
            assert!(
                seen.insert((action, name)),
                "the reason {name} occurs twice in {action}"
            );
        }
    }

    #[test]
    fn every_drop_and_accept_reason_has_description_and_own_fix() {
        let drops = DropReason::ALL
            .iter()
            .map(|&reason| (reason.name(), reason.describe(), of_drop(reason)));
        let accepts = AcceptReason::ALL
            .iter()
            .map(|&reason| (reason.name(), reason.describe(), of_accept(reason)));
        let frames = FrameDrop::ALL
            .iter()
            .map(|&reason| (reason.name(), reason.describe(), of_frame(reason)));
        for (name, meaning, fix) in drops.chain(accepts).chain(frames) {
            assert!(meaning.len() > 10, "the help text of {name} is too short");
            assert!(
                fix.len() > 20 && fix.ends_with('.'),
                "the fix of {name} is too short, or has no full stop"
            );
        }
        // A new reason of lvs-core has this default until it gets its own fix.
        let malformed = [
            DropReason::ShortHeader,
            DropReason::IcmpChecksum,
            DropReason::HelperChecksum,
        ];
        for &reason in DropReason::ALL {
            assert!(
                of_drop(reason) != MALFORMED || malformed.contains(&reason),
                "{reason} has only the general fix"
            );
        }
        let ordinary = [AcceptReason::UnrelatedIcmp, AcceptReason::LocalReply];
        for &reason in AcceptReason::ALL {
            assert!(
                of_accept(reason) != ORDINARY || ordinary.contains(&reason),
                "{reason} has only the general fix"
            );
        }
    }
}
