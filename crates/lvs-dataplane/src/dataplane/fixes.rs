//! The fix for each reason why packets were not forwarded, for operators.

use lvs_core::{AcceptReason, DropReason};

use crate::host::view::Tables;
use lvs_packet::drop::FrameDrop;

/// The fix for malformed packets: the director is right, the sender perhaps not.
const MALFORMED: &str = "A few are noise of the network. Many: lvsadm capture dropped -w FILE shows their senders; check that host, \
                         its driver and the offloads of the network cards in between (ethtool -K IF tx off).";
const ORDINARY: &str = "Nothing: this is as it should be.";

pub(super) const fn of_drop(reason: DropReason) -> &'static str {
    match reason {
        DropReason::ServerRemoved => {
            "Clients of a server that was deleted hang until they give up. Set its weight to 0 first (lvsadm drain), or have \
             such connections end at once: lvsadm sysctl expire_nodest_conn=1."
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
            "A limit of the service (limits in its TOML, lvsadm limit): raise it, or see where so many connections come from \
             (lvsadm -Lnc)."
        }
        DropReason::SourceRate => {
            "One source opens more connections than the service's limit for one allows (limits in its TOML, lvsadm limit). \
             Behind an address translator many clients are one source: raise it if honest ones are meant."
        }
        DropReason::Filtered => {
            "lvsadm filter list shows the filters; lvsadm explain SOURCE VIP:PORT names the filter of a source."
        }
        DropReason::ShortHeader | DropReason::IcmpChecksum => MALFORMED,
        DropReason::DropPacket => {
            "This host was short of memory, or drop_packet is 3. More memory, or lvsadm sysctl drop_packet=0 amemthresh=N."
        }
        DropReason::PersistenceEngine => {
            "The engine sip takes SIP over UDP with a Call-ID, and nothing else. Take other traffic by another service."
        }
        DropReason::StrayReply => {
            "A server answers to a connection that ended here before it ended there: longer timeouts (lvsadm --set), or the \
             clients' packets take another way than through this director."
        }
        DropReason::Unbound => {
            "Configure the same services and servers here as on the director that sends its connections."
        }
        DropReason::NoLocalPort => {
            "More addresses for full NAT (lvsadm local --help), or shorter timeouts (lvsadm --set)."
        }
        DropReason::HelperChecksum => MALFORMED,
        DropReason::HelperSequence => {
            "Connections that were open before the dataplane started, or an attacker guesses numbers. Clients that log in again succeed."
        }
        DropReason::ServerDown => {
            "A server went down, and on_server_down of its service decides about its connections: its clients connect again."
        }
        DropReason::ForeignShard => {
            "An error of the program that embeds the dataplane: the shard is of another director."
        }
        DropReason::MarkRule => "lvsadm mark list shows the rule and how many packets it took.",
        DropReason::Hook => "Ask the program that embeds the dataplane.",
        _ => MALFORMED,
    }
}

pub(super) const fn of_accept(reason: AcceptReason) -> &'static str {
    match reason {
        AcceptReason::NoService => {
            "Ordinary for the host's own traffic. If a service should have taken it: lvsadm explain tcp SRC:PORT VIP:PORT."
        }
        AcceptReason::NotNew => {
            "After a restart of the dataplane, or when a connection was idle for longer than its timeout: the host resets it. \
             If it is often the latter, longer timeouts (lvsadm --set)."
        }
        AcceptReason::Protocol => {
            "TCP, UDP, SCTP, AH and ESP are balanced; the host answers the rest."
        }
        AcceptReason::SourcePort20 => {
            "Active FTP begins from port 20; have clients use passive mode, or another source port."
        }
        AcceptReason::FtpData => {
            "Passive FTP takes a persistent service at port 21 (-p), or a service of a mark with both ports."
        }
        AcceptReason::NoConnection => {
            "Ordinary for what servers begin by themselves. If clients see answers from a server's own address, the dataplane \
             has restarted, or their requests do not come through here."
        }
        AcceptReason::BackupOnly => {
            "The sysctl backup_only is set. To let this director forward: lvsadm --stop-daemon backup, or sysctl backup_only=0."
        }
        AcceptReason::Tunneled => {
            "The sysctl ignore_tunneled is set: lvsadm sysctl ignore_tunneled=0 balances tunnelled packets, too."
        }
        AcceptReason::MarkRule => "lvsadm mark list shows the rule and how many packets it took.",
        AcceptReason::Hook => "Ask the program that embeds the dataplane.",
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
            "A guest on a virtual link sends aggregates that no TCP makes: find it (lvsadm capture dropped -w FILE), and switch \
             the segmentation offload of its device off (ethtool -K IF tso off gso off)."
        }
        FrameDrop::WorkerBusy => {
            "One packet worker gets more than it can do: lvsadm workers shows which. More workers do not help where it is one \
             client's connections."
        }
        FrameDrop::ReversePath => {
            "A sender forges sources, or routes are asymmetric: compare ip route get SOURCE with the interface (lvsadm capture dropped \
             -w FILE); --reverse-path loose asks for less."
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
            "A traceroute, or a loop: look for a router that sends the virtual address, or the servers' answers, back here."
        }
        FrameDrop::TooBig => {
            "Its sender received an ICMP error (fragmentation needed); if connections hang, a filter discards it. Raise the MTU \
             towards the servers, or let them announce a smaller MSS: ip route change ... advmss N. lvsadm doctor names the path."
        }
        FrameDrop::MtuTooSmall => {
            "Raise the MTU of the interface towards the server: a tunnel needs 68 bytes (IPv6: 1280) beside its headers."
        }
        FrameDrop::NoRoute => {
            "ip route get ADDRESS of the client or server on this host; add the route."
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
            "lvsadm -Ln --tun-info: use another method or tunnel for that server. The backend tun supports neither direct routing nor this host's own connections to servers behind NAT."
        }
        FrameDrop::NoRoom => "This is an error of the dataplane; please report it with its log.",
        FrameDrop::Martian => {
            "A sender forges addresses, or two hosts have the same one: lvsadm capture dropped -w FILE shows the MAC. A real \
             server or virtual address of 127.0.0.0/8 works on this host only."
        }
        FrameDrop::IpOptions | FrameDrop::SourceRoute => MALFORMED,
        FrameDrop::EchoOff | FrameDrop::EchoLimit => {
            "Set by options of lvs-dataplane: --echo decides how often hosts may ping its virtual addresses."
        }
        FrameDrop::Loop => {
            "A server has an address that this host routes to the dataplane: correct the server's address, or the route."
        }
        FrameDrop::NoHostPort => {
            "The dataplane could not make its device lvs-host0: see its log for the reason (/dev/net/tun, CAP_NET_ADMIN)."
        }
        FrameDrop::HostStray => "ip route show dev lvs-host0: only virtual addresses belong there.",
        FrameDrop::OwnAddress => {
            "A client tries ports of a virtual address without a service: ordinary, or a service is missing (lvsadm -A)."
        }
    }
}

/// The fix for packets whose route leads over a device that the dataplane does not use, with the
/// names of these devices; `None` for other reasons.
pub(super) fn of_route(reason: &str, tables: &Tables) -> Option<String> {
    let no_link_layer = reason == FrameDrop::NoLinkLayer.name();
    if !no_link_layer && reason != FrameDrop::UnusedInterface.name() {
        return None;
    }
    // As many as a line takes.
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

/// Counters of frames that were not sent; each has a name, a meaning and a fix.
pub(super) const NOT_SENT: [&str; 3] = [
    "not_sent",
    "The interface refused it: its queue is full, it is down, or the frame is too long for it.",
    "ip -s link shows which interface drops; a longer queue (ip link set IF txqueuelen 10000), a faster link, or the same MTU \
     on both sides.",
];
pub(super) const NOT_RECEIVED: [&str; 3] = [
    "not_received",
    "The dataplane was too slow, and the kernel had no room left in the packet socket.",
    "More CPU for lvs-dataplane (nothing else on its core, CPUQuota of its unit), and room for bursts: sysctl -w \
     net.core.rmem_max=67108864 before it starts.",
];
pub(super) const ICMP_LIMITED: [&str; 3] = [
    "icmp_limited",
    "ICMP errors that the director owed and did not send.",
    "A sender's packets are refused: lvsadm drops lists the reasons. More errors: --icmp-limit.",
];
pub(super) const INCOMPLETE: [&str; 3] = [
    "incomplete",
    "Fragments whose datagram did not become whole within 30 seconds, or contradicted itself.",
    "Packets are lost on the way in, or one of several links brings only some fragments: have clients send smaller datagrams.",
];
pub(super) const VLAN: [&str; 3] = [
    "vlan",
    "Of a VLAN that has no device here.",
    "If services are in it: ip link add link NAME name NAME.VLAN type vlan id VLAN.",
];
const EVICTED: &str = "A flood, or a table that is too small for its clients: start lvs-dataplane with a larger --max-connections, \
                       and limit the service that is flooded (lvsadm limit).";
pub(super) const EVICTED_HALF_OPEN: [&str; 3] = [
    "evicted_half_open",
    "A half-open connection, or a single datagram's, that gave way to a new one when the table was full.",
    EVICTED,
];
pub(super) const EVICTED_ENDED: [&str; 3] = [
    "evicted_ended",
    "A connection in TIME_WAIT or CLOSE that gave way to a new one when the table was full.",
    EVICTED,
];
pub(super) const EVICTED_UNUSED: [&str; 3] = [
    "evicted_unused",
    "A connection that gave way to a new one when the table was full, because nothing had passed but its handshake.",
    EVICTED,
];
pub(super) const EVICTED_IDLE: [&str; 3] = [
    "evicted_idle",
    "A connection that gave way to a new one when the table was full, because it had been idle for a minute.",
    EVICTED,
];
pub(super) const EVICTED_TEMPLATE: [&str; 3] = [
    "evicted_template",
    "A persistence template without a connection that gave way to a new one when there were as many as may be: its clients may get another server.",
    EVICTED,
];
pub(super) const NO_NEIGHBOUR: [&str; 3] = [
    "no_neighbour",
    "Its next hop did not answer ARP or neighbour discovery, or too many packets waited for it.",
    "ip neigh shows which is FAILED or INCOMPLETE: is that server up, on that link, and in that network?",
];
pub(super) const KEEPER_BUSY: [&str; 3] = [
    "keeper_busy",
    "Requests of the packet path that the keeper of the host had no room for: neighbours to be resolved, connections of this host's own.",
    "A host scans, or announces addresses, faster than the dataplane asks the kernel: lvsadm capture dropped -w FILE. It is asked again with the next packet.",
];

/// Losses and refusals of synchronisation, in the order of
/// [`SyncCounts::losses`](lvs_core::api::SyncCounts::losses).
pub(super) const SYNC: [[&str; 2]; 8] = [
    [
        "Messages about connections that were not sent, because as many waited to be sent as may.",
        "The interface of the synchronisation master is too slow, or down: ip -s link. Else raise the sysctls sync_qlen_max and sync_sock_size, or send less (sync_refresh_period).",
    ],
    [
        "Messages about connections that the interface did not take.",
        "Is it up, and has it an address? ip addr show dev NAME, with the NAME from lvsadm -L --daemon.",
    ],
    [
        "Messages about connections that came faster than they were taken over.",
        "Raise the sysctl sync_sock_size, which counts from the next start of the backup, or have the master send less (sync_refresh_period).",
    ],
    [
        "Messages about connections that are longer than this backup takes.",
        "Give the backup the --sync-maxlen of its master: lvsadm -L --daemon on both.",
    ],
    [
        "Messages about connections that are damaged, or that no IPVS sends.",
        "See who sends to the group: tcpdump -ni NAME udp port 8848. Permit only directors: docs/synchronisation.md.",
    ],
    [
        "Messages about connections of a master with another syncid.",
        "None, if there are two clusters on this network. Else give both the same --syncid.",
    ],
    [
        "Invalid connections in messages: with an unknown protocol, state or persistence engine.",
        "See who sends to the group: tcpdump -ni NAME udp port 8848. Permit only directors: docs/synchronisation.md.",
    ],
    [
        "Connections in messages for which the table had no room.",
        "Start lvs-dataplane with the --max-connections of the other director.",
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
            "Of no connection that the programs find: new ones, the host's own packets, connections with the same addresses and ports as others.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "up",
        [
            "up_unpublished",
            "Of a connection that is too young, not one for the kernel, or not published again since the last change.",
            "Where this is most of the traffic: connections are short, or something changes all the time (ip monitor shows whether it is this host).",
        ],
    ),
    (
        "up",
        [
            "up_unfit",
            "Of a published connection, but it may change its state (SYN, FIN, RST), has no hop left, or does not fit the way out.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "up",
        [
            "up_other",
            "Neither TCP nor UDP, with options, in fragments, of a VLAN that has no interface here, damaged, or for other stations.",
            "Nothing: the dataplane decides on them.",
        ],
    ),
    (
        "drop",
        [
            "kernel_waiting",
            "Packets of offloaded connections that only a dataplane can decide on, while none was running.",
            "Their senders repeat them. See the service manager's log for the reason of the dataplane's end.",
        ],
    ),
    (
        "drop",
        [
            "kernel_lost",
            "Packets that were to be forwarded by the kernel fast path, which had no memory to change them.",
            "The host is out of memory: free -m, dmesg.",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use lvs_core::api::ReasonCount;

    use super::*;
    use lvs_api::guidance::for_lvsd;

    #[test]
    fn fix_for_lvsd_changes_no_service_by_hand() {
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
                count: 1,
                recent: None,
                ago: None,
                help: String::new(),
                fix: fix.to_owned(),
            }];
            for_lvsd(&mut reasons);
            let reported = &reasons[0].fix;
            for change in ["lvsadm -", "(-a)", "(-e", "lvsadm limit", "lvsadm sysctl"] {
                let reported = reported
                    .replace("lvsadm --set", "")
                    .replace("lvsadm -L", "");
                assert!(!reported.contains(change), "{name}: {reported}");
            }
            // Keys stand in backticks, alone or with a value; commands have other words.
            for key in reported.split('`').skip(1).step_by(2) {
                let key = key.split(" = ").next().unwrap_or_default();
                let is_key = !key.contains(char::is_whitespace);
                assert!(
                    !is_key || page.contains(&format!("`{key}`")),
                    "{name}: {key}"
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
            assert!(seen.insert((action, name)), "{action} {name}");
        }
    }

    #[test]
    fn every_reason_has_fix() {
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
            assert!(meaning.trim().len() > 10, "{name}");
            assert!(fix.len() > 20 && fix.ends_with('.'), "{name}");
        }
        // A new reason of lvs-core arrives here until it has its own fix.
        let malformed = [
            DropReason::ShortHeader,
            DropReason::IcmpChecksum,
            DropReason::HelperChecksum,
        ];
        for &reason in DropReason::ALL {
            assert!(
                of_drop(reason) != MALFORMED || malformed.contains(&reason),
                "{reason}"
            );
        }
        let ordinary = [AcceptReason::UnrelatedIcmp, AcceptReason::LocalReply];
        for &reason in AcceptReason::ALL {
            assert!(
                of_accept(reason) != ORDINARY || ordinary.contains(&reason),
                "{reason}"
            );
        }
    }
}
