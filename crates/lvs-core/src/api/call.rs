//! What can be asked of an engine, and whose business each call is.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{
    CaptureFilter, FilterSpec, LocalPool, ServerSpec, ServiceId, ServiceSpec, SyncDaemon, SyncRole,
    Sysctl, Timeouts,
};

/// A call with the number that its answers carry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberedCall {
    /// Chosen by the client.
    pub id: u64,
    /// What is wanted.
    #[serde(flatten)]
    pub call: Call,
}

/// What can be asked of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "method", content = "params")]
pub enum Call {
    /// Must come first. Answer: [`Hello`](super::Hello).
    #[serde(rename = "hello")]
    Hello {
        /// [`VERSION`](super::VERSION).
        version: u32,
    },
    /// State of the engine. Answer: [`Info`](super::Info).
    #[serde(rename = "info")]
    Info {},

    /// Add a service. Answer: [`Done`](super::Done).
    #[serde(rename = "service.add")]
    ServiceAdd(ServiceSpec),
    /// Replace the settings of a service. Answer: [`Done`](super::Done).
    #[serde(rename = "service.edit")]
    ServiceEdit(ServiceSpec),
    /// Delete a service. Its connections stay until they end. Answer: [`Done`](super::Done).
    #[serde(rename = "service.delete")]
    ServiceDelete {
        /// Which one.
        service: ServiceId,
    },
    /// Delete every service. Answer: [`Done`](super::Done).
    #[serde(rename = "service.flush")]
    ServiceFlush {},
    /// List services with their real servers. Answer: items [`ServiceInfo`](super::ServiceInfo), then [`ListEnd`](super::ListEnd).
    #[serde(rename = "service.list")]
    ServiceList {
        /// Only this one; an unknown one is the error `no_service`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<ServiceId>,
    },
    /// Zero the counters of one service and its servers, or of everything. Answer: [`Done`](super::Done).
    #[serde(rename = "service.zero")]
    ServiceZero {
        /// Only this one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<ServiceId>,
    },

    /// Add a real server to a service. Answer: [`Done`](super::Done).
    #[serde(rename = "server.add")]
    ServerAdd(ServerSpec),
    /// Replace the settings of a real server. Answer: [`Done`](super::Done).
    #[serde(rename = "server.edit")]
    ServerEdit(ServerSpec),
    /// Delete a real server. Its connections stay until they end. Answer: [`Done`](super::Done).
    #[serde(rename = "server.delete")]
    ServerDelete {
        /// The service.
        service: ServiceId,
        /// Address and port of the server.
        server: SocketAddr,
    },

    /// The next connection that `client` opens to a service within 10 s goes to this server, whatever scheduler, weight,
    /// filters and limits say: for checks that go the way of a client's packets. Answer: [`Done`](super::Done).
    #[serde(rename = "server.pin")]
    ServerPin {
        /// The service, which has an address.
        service: ServiceId,
        /// Address and port of the server.
        server: SocketAddr,
        /// Address and port that the connection comes from.
        client: SocketAddr,
    },

    /// List connections and persistence templates. Answer: items [`ConnInfo`](super::ConnInfo), then [`ListEnd`](super::ListEnd).
    #[serde(rename = "conn.list")]
    ConnList {},
    /// Timeouts that `ipvsadm --set` sets. Answer: [`Timeouts`].
    #[serde(rename = "timeouts.get")]
    TimeoutsGet {},
    /// Set those timeouts; 0 leaves one unchanged. Answer: [`Done`](super::Done).
    #[serde(rename = "timeouts.set")]
    TimeoutsSet(Timeouts),
    /// Read one sysctl, or all. Answer: items [`Sysctl`], then [`ListEnd`](super::ListEnd).
    #[serde(rename = "sysctl.get")]
    SysctlGet {
        /// The kernel's name without a prefix: `conn_reuse_mode`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Write a sysctl. Answer: [`Done`](super::Done).
    #[serde(rename = "sysctl.set")]
    SysctlSet(Sysctl),
    /// Running synchronisation daemons. Answer: items [`SyncDaemon`], then [`ListEnd`](super::ListEnd).
    #[serde(rename = "daemon.list")]
    DaemonList {},
    /// Start a synchronisation daemon. Answer: [`Done`](super::Done).
    #[serde(rename = "daemon.start")]
    DaemonStart(SyncDaemon),
    /// Stop a synchronisation daemon. Answer: [`Done`](super::Done).
    #[serde(rename = "daemon.stop")]
    DaemonStop {
        /// Master or backup.
        role: SyncRole,
        /// Its identity; the kernel ignores it.
        #[serde(default)]
        syncid: u8,
    },
    /// Counted reasons of drops and of packets left to the host. Answer: items [`ReasonCount`](super::ReasonCount), then [`ListEnd`](super::ListEnd).
    #[serde(rename = "drops")]
    Drops {},
    /// What would become of a packet that may open a connection, and why; nothing changes. Answer: [`Explanation`](super::Explanation).
    #[serde(rename = "explain")]
    Explain {
        /// IP protocol number.
        protocol: u8,
        /// Source of the packet.
        client: SocketAddr,
        /// Destination of the packet.
        #[serde(rename = "virtual")]
        virt: SocketAddr,
        /// Its firewall mark; without it, the engine's rules for marks decide.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mark: Option<u32>,
        /// The interface that it comes in on, which those rules may ask for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        interface: Option<String>,
    },
    /// Packets as they arrive, each with what was decided about it, until the client closes the connection. Answer:
    /// items [`CapturedPacket`](super::CapturedPacket); one without a frame each second in which none came.
    #[serde(rename = "capture")]
    Capture(CaptureFilter),
    /// Rules that give packets firewall marks, in their order. Answer: items [`MarkText`](super::MarkText), then [`ListEnd`](super::ListEnd).
    #[serde(rename = "mark.list")]
    MarkList {},
    /// Add such a rule. Answer: [`Done`](super::Done).
    #[serde(rename = "mark.add")]
    MarkAdd {
        /// The rule, as [`MarkRule::parse`](crate::mark::MarkRule::parse) reads it.
        rule: String,
        /// Where to put it, from 1; at the end if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        position: Option<usize>,
    },
    /// Delete such a rule. Answer: [`Done`](super::Done).
    #[serde(rename = "mark.delete")]
    MarkDelete {
        /// Its place in the list, from 1.
        position: usize,
    },
    /// Replace all such rules. Answer: [`Done`](super::Done).
    #[serde(rename = "mark.set")]
    MarkSet {
        /// The rules in their order.
        rules: Vec<String>,
    },
    /// Filters by source that are not off. Answer: items [`FilterItem`](super::FilterItem), the director's first, a long one in
    /// several items; then [`ListEnd`](super::ListEnd).
    #[serde(rename = "filter.list")]
    FilterList {},
    /// Replace the filter of a service, or the director's. Connections that are open go on. Answer: [`Done`](super::Done).
    #[serde(rename = "filter.set")]
    FilterSet(FilterSpec),
    /// Virtual addresses that the engine owns: it answers ARP for them and announces them. Replaces the set that `owner` gave before. Answer: [`Done`](super::Done).
    #[serde(rename = "vips.own")]
    VipsOwn {
        /// The addresses.
        addresses: Vec<core::net::IpAddr>,
    },
    /// Replace the addresses that stand for clients towards servers of full NAT. Connections keep theirs. Answer: [`Done`](super::Done).
    #[serde(rename = "local.set")]
    LocalSet(LocalPool),
    /// Those addresses. Answer: [`LocalInfo`](super::LocalInfo).
    #[serde(rename = "local.get")]
    LocalGet {},
    /// Make all of these changes, or none: all are checked before the first is made, each against what those before it
    /// leave. Packets that open connections may meet a long list half made, since they do not wait for all of it; a
    /// list of up to 16 changes without a flush they do not. Answer: [`Done`](super::Done). A refusal names the first
    /// change that cannot be made ([`Failure::change`](super::Failure::change)).
    #[serde(rename = "apply")]
    Apply {
        /// Calls that change what an engine is to do, in their order, at most [`CHANGES_MAX`](super::CHANGES_MAX).
        changes: Vec<Self>,
    },
    /// Stop the engine. Answer: `{}`, then the engine ends.
    #[serde(rename = "stop")]
    Stop {},
}

/// What a client must be allowed for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Whoever can connect may ask it.
    Read,
    /// Only those may ask it who may change things.
    Write,
}

impl Access {
    /// What a client must be allowed for the method of this name, before its parameters are read; [`Access::Write`] for
    /// one that there is not.
    pub fn of_method(name: &str) -> Self {
        match name {
            "hello" | "info" | "service.list" | "conn.list" | "timeouts.get" | "sysctl.get"
            | "daemon.list" | "filter.list" | "drops" | "explain" | "mark.list" | "local.get" => {
                Self::Read
            }
            _ => Self::Write,
        }
    }
}

impl Call {
    /// What a client must be allowed for it.
    ///
    /// [`Call::Capture`] changes nothing and still asks for the rights of a writer: it shows what others say to each
    /// other, as a packet socket does, which the host grants to the same few.
    pub const fn access(&self) -> Access {
        match self {
            Self::Hello { .. }
            | Self::Info {}
            | Self::ServiceList { .. }
            | Self::ConnList {}
            | Self::TimeoutsGet {}
            | Self::SysctlGet { .. }
            | Self::DaemonList {}
            | Self::Drops {}
            | Self::Explain { .. }
            | Self::MarkList {}
            | Self::FilterList {}
            | Self::LocalGet {} => Access::Read,
            Self::Capture(_)
            | Self::ServiceAdd(_)
            | Self::ServiceEdit(_)
            | Self::ServiceDelete { .. }
            | Self::ServiceFlush {}
            | Self::ServiceZero { .. }
            | Self::ServerAdd(_)
            | Self::ServerEdit(_)
            | Self::ServerDelete { .. }
            | Self::ServerPin { .. }
            | Self::TimeoutsSet(_)
            | Self::SysctlSet(_)
            | Self::DaemonStart(_)
            | Self::DaemonStop { .. }
            | Self::MarkAdd { .. }
            | Self::MarkDelete { .. }
            | Self::MarkSet { .. }
            | Self::FilterSet(_)
            | Self::VipsOwn { .. }
            | Self::LocalSet(_)
            | Self::Apply { .. }
            | Self::Stop {} => Access::Write,
        }
    }
}
