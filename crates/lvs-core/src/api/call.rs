//! Calls of the control protocol, and the access right that each call requires.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::types::{
    AnnounceSpec, CaptureFilter, FilterSpec, LocalPool, ServerSpec, ServiceId, ServiceSpec, Sysctl,
    Timeouts,
};
use crate::sync::{SyncDaemon, SyncRole};

/// A call and its number; the dataplane repeats the number in each line of its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberedCall {
    /// Number that the client has chosen for the request.
    pub id: u64,
    /// The call and its parameters.
    #[serde(flatten)]
    pub call: Call,
}

/// Generates three things from one list: the calls, their names in the protocol, and their access
/// rights.
///
/// Each client that can connect may make the calls under `reads`. The calls under `writes` and
/// `changes` need write access; the calls under `changes` can also be part of an `apply`.
macro_rules! calls {
    (
        reads { $($(#[$read_doc:meta])* $read_name:literal $read:ident $read_body:tt,)* }
        writes { $($(#[$write_doc:meta])* $write_name:literal $write:ident $write_body:tt,)* }
        changes { $($(#[$change_doc:meta])* $change_name:literal $change:ident $change_body:tt,)* }
    ) => {
        /// A call of the control protocol.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "method", content = "params")]
        pub enum Call {
            $($(#[$read_doc])* #[serde(rename = $read_name)] $read $read_body,)*
            $($(#[$write_doc])* #[serde(rename = $write_name)] $write $write_body,)*
            $($(#[$change_doc])* #[serde(rename = $change_name)] $change $change_body,)*
        }

        impl Call {
            /// The names of all calls, and the access right for each.
            pub const METHODS: &[(&str, Access)] = &[
                $(($read_name, Access::Read),)*
                $(($write_name, Access::Write),)*
                $(($change_name, Access::Write),)*
            ];

            /// The access right that a client needs for this call.
            pub const fn access(&self) -> Access {
                match self {
                    $(Self::$read { .. })|* => Access::Read,
                    $(Self::$write { .. })|* | $(Self::$change { .. })|* => Access::Write,
                }
            }
        }

        /// Pattern that matches every call that changes the configuration. A `match` with this
        /// pattern and `no_change` has an arm for every call, without a wildcard.
        #[doc(hidden)]
        #[macro_export]
        macro_rules! any_change {
            () => { $($crate::api::Call::$change { .. })|* };
        }

        /// Pattern that matches every call that does not change the configuration.
        #[doc(hidden)]
        #[macro_export]
        macro_rules! no_change {
            () => { $($crate::api::Call::$read { .. })|* | $($crate::api::Call::$write { .. })|* };
        }
    };
}

calls! {
    reads {
        /// Must be the first call. Answer: [`Hello`](super::Hello).
        "hello" Hello {
            /// Version of the protocol that the client uses ([`VERSION`](super::VERSION)).
            version: u32,
        },
        /// Report the state of the dataplane. Answer: [`Info`](super::Info).
        "info" Info {},
        /// List services with their real servers. Answer: items
        /// [`ServiceInfo`](super::ServiceInfo), then [`ListEnd`](super::ListEnd).
        "service.list" ServiceList {
            /// Only this service; an unknown service is the error `no_service`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            service: Option<ServiceId>,
        },
        /// List connections and persistence templates. Answer: items [`ConnInfo`](super::ConnInfo),
        /// then [`ListEnd`](super::ListEnd).
        "conn.list" ConnList {},
        /// Report the timeouts that `ipvsadm --set` sets. Answer: [`Timeouts`].
        "timeouts.get" TimeoutsGet {},
        /// Read one sysctl, or all. Answer: items [`Sysctl`], then [`ListEnd`](super::ListEnd).
        "sysctl.get" SysctlGet {
            /// The kernel's name without a prefix, such as `conn_reuse_mode`.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            name: Option<String>,
        },
        /// List the running synchronisation daemons. Answer: items [`SyncDaemon`], then
        /// [`ListEnd`](super::ListEnd).
        "daemon.list" DaemonList {},
        /// Report the peers, and the state of the replication between this director and each of
        /// them. Answer: [`SyncState`](super::SyncState).
        "sync.get" SyncGet {},
        /// List counts by reason: of packets that were dropped or passed to the host, of evicted
        /// connections, of lost synchronisation messages, and of packets that the kernel fast path
        /// handled. Answer: items [`ReasonCount`](super::ReasonCount), then
        /// [`ListEnd`](super::ListEnd).
        "drops" Drops {},
        /// Shows what the dataplane would do with a packet that may open a connection, and why,
        /// without any change. Answer: [`Explanation`](crate::control::Explanation).
        "explain" Explain {
            /// IP protocol number of the packet.
            protocol: u8,
            /// Source address and port of the packet.
            client: SocketAddr,
            /// Destination address and port of the packet.
            #[serde(rename = "virtual")]
            virt: SocketAddr,
            /// The packet's firewall mark; without it, the dataplane's rules for marks decide.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            mark: Option<u32>,
            /// The interface on which the packet arrives, for rules that depend on it.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            interface: Option<String>,
        },
        /// List the rules that set firewall marks on packets, in their order. Answer: items
        /// [`MarkText`](super::MarkText), then [`ListEnd`](super::ListEnd).
        "mark.list" MarkList {},
        /// List the source filters that are in use. Answer: items
        /// [`FilterItem`](super::FilterItem), the director's filter first, with several items for a
        /// long filter; then [`ListEnd`](super::ListEnd).
        "filter.list" FilterList {},
        /// Report the local addresses of full NAT. Answer: [`LocalInfo`](super::LocalInfo).
        "local.get" LocalGet {},
        /// Report the host that forwarded a server's reply to a through-VIP check, although the
        /// server should have sent the reply directly to the director. Only the latest forwarded
        /// reply is reported, even if later replies arrived directly. Answer:
        /// [`ReturnPath`](super::ReturnPath).
        "server.return_path" ServerReturnPath {
            /// IP address of the server.
            server: core::net::IpAddr,
        },
    }

    writes {
        /// The next connection of `client` to the service within 11 minutes uses this server, regardless
        /// of scheduler, weight, filters and limits: for through-VIP checks. Answer:
        /// [`Done`](super::Done).
        "server.pin" ServerPin {
            /// The service; the service of a firewall mark is refused.
            service: ServiceId,
            /// Address and port of the server.
            server: SocketAddr,
            /// Address and port of the client.
            client: SocketAddr,
        },
        /// Ends the effect of `server.pin` for `client`. Answer: [`Unpinned`](super::Unpinned).
        "server.unpin" ServerUnpin {
            /// The service that was given to `server.pin`.
            service: ServiceId,
            /// Address and port of the client.
            client: SocketAddr,
        },
        /// Reports packets as they arrive, each with the dataplane's decision, until the client
        /// closes the connection. Answer: items [`CapturedPacket`](super::CapturedPacket), and an
        /// item without a frame after each second without packets.
        ///
        /// Nothing is changed, but write access is needed: the client sees the traffic of other
        /// hosts, as through a packet socket, for which a user needs similar rights.
        "capture" Capture(CaptureFilter),
        /// Apply all of these changes, or none: all are checked before the first is applied, each
        /// against the state after its predecessors. A long list does not delay packets that open
        /// connections; the decisions about these packets may use a part of the changes. A list of
        /// up to 16 changes without a flush takes effect at once. Answer: [`Done`](super::Done). A
        /// refusal names the first change that is impossible
        /// ([`Failure::change`](super::Failure::change)).
        "apply" Apply {
            /// Calls that change the configuration, in their order, at most
            /// [`CHANGES_MAX`](super::CHANGES_MAX).
            changes: Vec<Self>,
        },
        /// Sets the virtual addresses for which the dataplane adds routes on its device, so that
        /// routing daemons announce them. The dataplane accepts packets to these addresses, but
        /// does not answer ARP for them. Each call replaces the previous one, and expires unless
        /// the client repeats it ([`AnnounceSpec`]). Answer:
        /// [`Announcements`](super::Announcements).
        "vips.announce" VipsAnnounce(AnnounceSpec),
        /// Stop the dataplane. Answer: `{}`, then the dataplane exits.
        "stop" Stop {},
    }

    changes {
        /// Add a service. Answer: [`Done`](super::Done).
        "service.add" ServiceAdd(ServiceSpec),
        /// Replace the settings of a service. Answer: [`Done`](super::Done).
        "service.edit" ServiceEdit(ServiceSpec),
        /// Delete a service. The service's setting `on_server_down` decides what happens to the
        /// connections. Answer: [`Done`](super::Done).
        "service.delete" ServiceDelete {
            /// The service to delete.
            service: ServiceId,
        },
        /// Delete every service. Answer: [`Done`](super::Done).
        "service.flush" ServiceFlush {},
        /// Zero the counters of one service and its servers, or all counters. Answer:
        /// [`Done`](super::Done).
        "service.zero" ServiceZero {
            /// The service; its counters and the counters of its servers are zeroed. Absent for all
            /// counters.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            service: Option<ServiceId>,
        },
        /// Add a real server to a service. Answer: [`Done`](super::Done).
        "server.add" ServerAdd(ServerSpec),
        /// Replace the settings of a real server. Answer: [`Done`](super::Done).
        "server.edit" ServerEdit(ServerSpec),
        /// Delete a real server. The service's setting `on_server_down` decides what happens to the
        /// server's connections. Answer: [`Done`](super::Done).
        "server.delete" ServerDelete {
            /// The service to which the server belongs.
            service: ServiceId,
            /// Address and port of the server.
            server: SocketAddr,
        },
        /// Orders the servers of a service: the first server of the list gets the position of the
        /// most recently added server, which schedulers examine first. Servers that are not in the
        /// list follow, in their present order; addresses that the service does not have are
        /// ignored. If the order changes, the scheduler restarts. Answer: [`Done`](super::Done).
        "server.arrange" ServerArrange {
            /// The service whose servers are ordered.
            service: ServiceId,
            /// Addresses and ports of servers.
            servers: Vec<SocketAddr>,
        },
        /// Set the timeouts of `ipvsadm --set`; 0 leaves a timeout unchanged. Answer:
        /// [`Done`](super::Done).
        "timeouts.set" TimeoutsSet(Timeouts),
        /// Write a sysctl. Answer: [`Done`](super::Done).
        "sysctl.set" SysctlSet(Sysctl),
        /// Start a synchronisation daemon. Answer: [`Done`](super::Done).
        "daemon.start" DaemonStart(SyncDaemon),
        /// Stop a synchronisation daemon. Answer: [`Done`](super::Done).
        "daemon.stop" DaemonStop {
            /// The role of the daemon: master or backup.
            role: SyncRole,
            /// The daemon's sync ID; ignored, as by the kernel.
            #[serde(default)]
            syncid: u8,
        },
        /// Add a rule that sets a firewall mark on packets. Answer: [`Done`](super::Done).
        "mark.add" MarkAdd {
            /// The rule, in the syntax of [`MarkRule::parse`](crate::mark::MarkRule::parse).
            rule: String,
            /// Position in the list, from 1; at the end if absent.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            position: Option<usize>,
        },
        /// Delete a rule that sets a firewall mark. Answer: [`Done`](super::Done).
        "mark.delete" MarkDelete {
            /// Position of the rule in the list, from 1.
            position: usize,
        },
        /// Replace all rules that set firewall marks. Answer: [`Done`](super::Done).
        "mark.set" MarkSet {
            /// The rules in their order.
            rules: Vec<String>,
        },
        /// Replace the source filter of a service, or of the director. Open connections continue.
        /// Answer: [`Done`](super::Done).
        "filter.set" FilterSet(FilterSpec),
        /// Set the virtual addresses that the dataplane owns: it answers ARP for them and announces
        /// them. Replaces the previous set. Answer: [`Done`](super::Done).
        "vips.own" VipsOwn {
            /// All virtual addresses that the dataplane owns from now on.
            addresses: Vec<core::net::IpAddr>,
        },
        /// Replace the local addresses of full NAT. Existing connections continue to use their
        /// addresses. Answer: [`Done`](super::Done).
        "local.set" LocalSet(LocalPool),
    }
}

/// Access right that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Any client that can connect may make the call.
    Read,
    /// Only clients that may change the configuration may make the call.
    Write,
}

impl Access {
    /// Access right for the method of this name, before its parameters are parsed;
    /// [`Access::Write`] for an unknown method.
    pub fn of_method(name: &str) -> Self {
        let known = Call::METHODS.iter().find(|(method, _)| *method == name);
        known.map_or(Self::Write, |(_, access)| *access)
    }
}
