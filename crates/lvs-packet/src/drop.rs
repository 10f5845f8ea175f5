//! Reasons for which the dataplane drops a frame.

use lvs_core::reasons;

reasons! {
    /// The reason for which the dataplane dropped a frame. For [`Self::Verdict`] and
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
        /// The checksum that a device has left to the receiver is outside of the frame.
        BadOffload => "bad_offload",
        /// The ICMP message is shorter than 8 bytes.
        IcmpShort => "icmp_short",
        /// The frame arrived on an unknown port.
        NoPort => "no_port",
        /// The fragment repeats or contradicts other fragments of its datagram, is empty or has an
        /// invalid length, reaches beyond 64 KiB, or is one fragment too many (more than 1024).
        BadFragment => "bad_fragment",
        /// The first fragment of an IPv6 datagram ends before the headers that the decision
        /// requires.
        TinyFragment => "tiny_fragment",
        /// There is no memory for the fragment, because too many datagrams wait for missing
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
        /// The route to the destination uses a device without a link layer (tun, WireGuard, PPP),
        /// on which packet sockets cannot send.
        NoLinkLayer => "no_link_layer",
        /// The route to the destination uses an Ethernet interface that the dataplane does not use.
        UnusedInterface => "unused_interface",
        /// The route to the destination refuses packets (blackhole, unreachable, prohibit).
        RouteRefuses => "route_refuses",
        /// The route to a server with a tunnel has no source address.
        NoSource => "no_source",
        /// The transport header is too short to be translated.
        ShortHeader => "untranslatable",
        /// The packet is a SYN in a flood: SYNs needed more than half of the worker's time, and the
        /// share of this kind of SYNs (known clients, repeated SYNs, others) was used up.
        SynFlood => "syn_flood",
        /// The dataplane cannot send this combination of address families and forwarding method.
        /// With the backend tun, this includes direct routing, and connections of this host itself
        /// to servers with NAT.
        Unsupported => "unsupported",
        /// The packet is a GSO super-packet that contradicts its own headers.
        BadAggregate => "bad_aggregate",
        /// The packet is a GSO super-packet whose segments are smaller or more numerous than those
        /// of any TCP implementation.
        TinySegments => "tiny_segments",
        /// The frame has a priority tag (VLAN 0) inside another priority tag, which no sender
        /// needs.
        NestedTags => "nested_tags",
        /// The packet with its new headers or its changed content does not fit into its buffer, or
        /// would be longer than 64 KiB.
        NoRoom => "no_room",
        /// The source is an address that no other host can have (for example one of this host, a
        /// loopback or a multicast address), or the destination or the translation is a loopback
        /// address.
        Martian => "martian",
        /// The source fails the reverse-path check (`--reverse-path`): there is no route to it or,
        /// if the check is strict, the route uses another interface than that on which the packet
        /// arrived.
        ReversePath => "reverse_path",
        /// The packet is a reply to a through-VIP check, and another host forwarded it: the
        /// server's route to clients does not use this director.
        CheckPath => "check_path",
        /// The packet belongs to another packet worker, whose queue was full.
        WorkerBusy => "worker_busy",
        /// The packet has an invalid IPv4 option; the sender receives an ICMP error (parameter
        /// problem).
        IpOptions => "ip_options",
        /// The sender specified the packet's route (IPv4 source routing), which the director
        /// refuses.
        SourceRoute => "source_route",
        /// The packet is an echo request to an address that the dataplane owns, and answers are
        /// disabled (`--echo drop`).
        EchoOff => "echo_off",
        /// The packet is an echo request to an address that the dataplane owns, above the limit of
        /// answers per second (`--echo N`).
        EchoLimit => "echo_limit",
        /// The host routes the packet's destination to the dataplane, so that the packet would
        /// return immediately.
        Loop => "loop",
        /// There is no device through which the packet can be reinjected into the host.
        NoHostPort => "no_host_port",
        /// The host sent the packet into the dataplane's device, but its destination is not a
        /// virtual address.
        HostStray => "host_stray",
        /// The destination is an address that the dataplane owns, and no service answers there.
        OwnAddress => "own_address",
    }
}
