//! The compared programs, and the processors on which they run.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub(crate) enum Method {
    /// NAT: addresses are translated in both directions.
    Nat,
    /// Direct routing: only the link-layer addresses of a frame are changed.
    Dr,
    /// IPIP tunnelling.
    Tunnel,
}

impl Method {
    /// The option of `lvsadm -a` for this forwarding method.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Nat => "-m",
            Self::Dr => "-g",
            Self::Tunnel => "-i",
        }
    }
}

/// A compared program, or a forwarding function of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub(crate) enum Contender {
    /// This project's dataplane with packet sockets.
    AfPacket(Method),
    /// This project's dataplane with the kernel fast path.
    FastPath(Method),
    /// NAT by XDP, before the kernel allocates a socket buffer.
    Xdp,
    /// Another build of this project's dataplane, with packet sockets and NAT.
    Other,
    /// This project's dataplane, on a TUN device, NAT.
    Tun,
    /// This project's lvsd as a proxy (`forward = "proxy"`).
    Proxy,
    /// A forwarder without decisions: it receives from a `TPACKET_V2` ring, as the dataplane does,
    /// and sends by `sendmmsg`.
    NullV2Send,
    /// A forwarder without decisions: it receives from a `TPACKET_V3` ring, and sends by
    /// `sendmmsg`.
    NullV3Send,
    /// A forwarder without decisions: it receives from a `TPACKET_V3` ring, and sends through a
    /// `TPACKET_V2` ring.
    NullV3Ring,
    /// A forwarder without decisions: it receives by `recvmmsg`, and sends by `sendmmsg`.
    NullMmsg,
    /// A forwarder without decisions, on a TUN device.
    NullTun,
    /// DPDK's `testpmd`, with its driver for packet sockets.
    Testpmd,
    /// The kernel's forwarding to the real server's own address.
    Route,
    /// The kernel's IPVS, if the kernel has it.
    Ipvs(Method),
    /// The kernel's DNAT.
    Nftables,
    /// `HAProxy`, TCP, with splice.
    Haproxy,
    /// nginx with its stream module.
    Nginx,
    /// No director: client and server are on one link.
    Direct,
}

impl Contender {
    /// The name in tables and JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AfPacket(Method::Nat) => "ours",
            Self::AfPacket(Method::Dr) => "ours-dr",
            Self::AfPacket(Method::Tunnel) => "ours-tunnel",
            Self::FastPath(Method::Nat) => "ours-fast-path",
            Self::FastPath(Method::Dr) => "ours-fast-path-dr",
            Self::FastPath(Method::Tunnel) => "ours-fast-path-tunnel",
            Self::Xdp => "ours-xdp",
            Self::Other => "other",
            Self::Tun => "ours-tun",
            Self::Proxy => "ours-proxy",
            Self::NullV2Send => "null-v2-sendmmsg",
            Self::NullV3Send => "null-v3-sendmmsg",
            Self::NullV3Ring => "null-v3-ring",
            Self::NullMmsg => "null-recvmmsg",
            Self::NullTun => "null-tun",
            Self::Testpmd => "testpmd",
            Self::Route => "routing",
            Self::Ipvs(Method::Nat) => "ip_vs",
            Self::Ipvs(Method::Dr) => "ip_vs-dr",
            Self::Ipvs(Method::Tunnel) => "ip_vs-tunnel",
            Self::Nftables => "nftables",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Direct => "direct",
        }
    }

    /// Whether the contender is this project's dataplane.
    pub(crate) fn is_ours(self) -> bool {
        matches!(
            self,
            Self::AfPacket(_) | Self::FastPath(_) | Self::Xdp | Self::Other | Self::Tun
        )
    }

    /// The forwarding method of this project's dataplane and of the kernel's IPVS; `None` for other
    /// contenders.
    pub(crate) fn method(self) -> Option<Method> {
        match self {
            Self::AfPacket(method) | Self::FastPath(method) | Self::Ipvs(method) => Some(method),
            Self::Xdp | Self::Other | Self::Tun => Some(Method::Nat),
            _ => None,
        }
    }

    /// Whether `ipvsadm` commands configure the contender.
    pub(crate) fn takes_rules(self) -> bool {
        self.is_ours() || matches!(self, Self::Ipvs(_))
    }

    /// Whether the contender is this project's dataplane with the kernel fast path.
    pub(crate) fn is_fast_path(self) -> bool {
        matches!(self, Self::FastPath(_) | Self::Xdp)
    }

    /// Whether the contender tracks connections, which must be opened before established ones are
    /// measured.
    pub(crate) fn has_connections(self) -> bool {
        self.takes_rules() || self == Self::Nftables
    }

    /// Whether a process on a separate CPU does the work; otherwise the kernel does.
    pub(crate) fn is_process(self) -> bool {
        !matches!(
            self,
            Self::Route
                | Self::Ipvs(_)
                | Self::Nftables
                | Self::Direct
                | Self::FastPath(_)
                | Self::Xdp
        )
    }

    /// Whether the contender is a forwarder without decisions on packet sockets, or `testpmd`. The
    /// host's network stack receives the same packets, and must drop them.
    pub(crate) fn is_null_packet(self) -> bool {
        matches!(
            self,
            Self::NullV2Send | Self::NullV3Send | Self::NullV3Ring | Self::NullMmsg | Self::Testpmd
        )
    }

    /// Whether the contender polls continuously, and must be paused while another contender is
    /// measured.
    pub(crate) fn spins(self) -> bool {
        self == Self::Testpmd
    }

    pub(crate) fn forwards_by_host(self) -> bool {
        matches!(
            self,
            Self::Route | Self::Ipvs(_) | Self::Nftables | Self::Tun | Self::NullTun
        )
    }

    /// The program that must be installed for this contender; `None` if there is none.
    pub(crate) fn program(self) -> Option<&'static str> {
        match self {
            Self::Testpmd => Some("dpdk-testpmd"),
            Self::Haproxy => Some("haproxy"),
            Self::Nginx => Some("nginx"),
            Self::Nftables => Some("nft"),
            Self::Ipvs(_) => Some("ipvsadm"),
            _ => None,
        }
    }
}

/// The CPU of a contender's work. The generator, or both endpoints of TCP, are on CPU 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub(crate) enum Place {
    /// The defaults of veth: CPU 0, which sends, also runs the soft interrupt that receives. The
    /// director is a process on CPU 1 (`split`), or the kernel forwards on CPU 0 (`inline`).
    Usual,
    /// All of the director's work on CPU 1, with the soft interrupt for receiving in a thread there
    /// (`1c`).
    OneCore,
}

impl Place {
    /// The name in tables and JSON.
    pub(crate) fn name(self, of: Contender) -> &'static str {
        match self {
            Self::OneCore => "1c",
            Self::Usual if of.is_process() => "split",
            Self::Usual => "inline",
        }
    }
}
