//! Reasons for discarding a frame on the packet path.

use lvs_core::reasons;

reasons! {
    /// The reason why the packet path dropped a frame. For [`Self::Verdict`] and
    /// [`Self::Rejected`], `lvs_core` also counts the reason of the director's decision.
    FrameDrop {
        /// The frame or packet is shorter than its headers specify.
        Truncated => "truncated",
        /// The version in the IP header does not match the EtherType.
        IpVersion => "ip_version",
        /// The header length in the IP header is below 20 bytes.
        IpHeaderLength => "ip_header_length",
        /// The checksum of the IP header is wrong.
        IpChecksum => "ip_checksum",
        /// The total length in the IP header is shorter than the header.
        IpLength => "ip_length",
        /// The partial checksum that a device announced is outside the frame.
        BadOffload => "bad_offload",
        /// An ICMP message of less than 8 bytes.
        IcmpShort => "icmp_short",
        /// The frame arrived on an unknown port.
        NoPort => "no_port",
        /// The fragment contradicts the other fragments of its datagram, is empty, or reaches
        /// beyond 64 KiB.
        BadFragment => "bad_fragment",
        /// A first fragment of IPv6 that ends before the headers that the decision requires.
        TinyFragment => "tiny_fragment",
        /// There is no free memory for the fragment, because too many datagrams wait for missing
        /// fragments.
        FragmentMemory => "fragment_memory",
        /// The director decided to drop the packet.
        Verdict => "verdict",
        /// The director decided to answer with an ICMP unreachable error or a TCP reset.
        Rejected => "rejected",
        /// The TTL or hop limit of the packet reached zero at the director.
        TtlExceeded => "ttl_exceeded",
        /// The packet is longer than the MTU of its path, and must not be fragmented.
        TooBig => "too_big",
        /// The MTU of the path is too small for a tunnel.
        MtuTooSmall => "mtu_too_small",
        /// There is no route to the destination.
        NoRoute => "no_route",
        /// The route to its destination uses a device without a link layer (tun, WireGuard, PPP),
        /// on which packet sockets cannot send.
        NoLinkLayer => "no_link_layer",
        /// The route to the destination uses an Ethernet interface that the dataplane does not use.
        UnusedInterface => "unused_interface",
        /// The route to the destination refuses packets (blackhole, unreachable, prohibit).
        RouteRefuses => "route_refuses",
        /// The route has no source address.
        NoSource => "no_source",
        /// The transport header is too short to be translated.
        ShortHeader => "untranslatable",
        /// A SYN in a flood: SYNs needed more than half of the worker's time, and the share of this
        /// kind of SYNs (known clients, repeated SYNs, others) was used up.
        SynFlood => "syn_flood",
        /// A combination of address families or a method that this version cannot send; with the
        /// backend tun, this includes direct routing, and connections of this host itself to
        /// servers behind NAT.
        Unsupported => "unsupported",
        /// A GSO super-packet that contradicts its own headers.
        BadAggregate => "bad_aggregate",
        /// A GSO super-packet whose segments are smaller or more numerous than those of any TCP
        /// implementation.
        TinySegments => "tiny_segments",
        /// A priority tag (VLAN 0) inside another priority tag: no sender needs this.
        NestedTags => "nested_tags",
        /// The buffer has no room before the packet for another header.
        NoRoom => "no_room",
        /// The source is an address that no other host can have (one of this host, a loopback,
        /// multicast or unspecified address), or the translation is to a loopback address.
        Martian => "martian",
        /// The source fails the reverse-path check (`--reverse-path`): there is no route to it or,
        /// if the check is strict, the route uses another interface than that on which the packet
        /// arrived.
        ReversePath => "reverse_path",
        /// A reply to a through-VIP check that another host forwarded: the server's route to
        /// clients does not use this director.
        CheckPath => "check_path",
        /// The packet belongs to another packet worker, whose queue was full.
        WorkerBusy => "worker_busy",
        /// An invalid IPv4 option; the sender receives an ICMP error (parameter problem).
        IpOptions => "ip_options",
        /// The packet's sender specified the route (IPv4 source routing), which hosts refuse.
        SourceRoute => "source_route",
        /// An echo request to an address that the dataplane owns, while answers are disabled
        /// (`--echo drop`).
        EchoOff => "echo_off",
        /// An echo request to an address that the dataplane owns, above the limit of answers a
        /// second (`--echo N`).
        EchoLimit => "echo_limit",
        /// The packet would return immediately, because the host routes this address to the
        /// dataplane.
        Loop => "loop",
        /// There is no device to reinject the packet into the host.
        NoHostPort => "no_host_port",
        /// The host sent a packet into the dataplane's device that is not for a virtual address.
        HostStray => "host_stray",
        /// The destination is an address of the dataplane without an answering service.
        OwnAddress => "own_address",
    }
}
