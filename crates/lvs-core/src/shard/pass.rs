//! The userspace fast path, for IPv4 packets that change only the counters and the deadline of
//! their connection, as most packets do. It decides about them as the [slow path](super::decide)
//! would. All other packets take the slow path.

use core::net::{SocketAddr, SocketAddrV4};

use super::Shard;
use super::publish::is_still;
use crate::conn::{Ahead, flag};
use crate::fast_path::Plain;
use crate::tunnel::Tunnel;
use crate::{ConnId, Forward, Forwarding, Instant, Reply, ServerId, Verdict};

/// A packet that the userspace fast path has accepted and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the packet is lost unless the caller sends it"]
#[non_exhaustive]
pub struct Passed {
    /// The connection to which the packet belongs.
    pub conn: ConnId,
    /// The real server of the connection.
    pub server: ServerId,
    /// Whether the packet is from the server to the client; otherwise it is from the client to the
    /// server.
    pub reply: bool,
    /// NAT, direct routing or tunnel; for a reply, NAT.
    pub method: Forwarding,
    /// Address and port of the real server.
    pub target: SocketAddrV4,
    /// The virtual address and port.
    pub virt: SocketAddrV4,
    /// Encapsulation, if `method` is [`Forwarding::Tunnel`].
    pub tunnel: Tunnel,
    /// Number of the client's packets in this connection.
    pub packets: u32,
}

impl Passed {
    /// The verdict of the slow path for the same packet.
    pub const fn verdict(&self) -> Verdict {
        if self.reply {
            Verdict::Reply(Reply {
                conn: self.conn,
                server: Some(self.server),
                source: Some(SocketAddr::V4(self.virt)),
                destination: None,
                edit: None,
                probe: false,
            })
        } else {
            Verdict::Forward(self.forward())
        }
    }

    /// Returns how a request is sent: the same as in the verdict of the slow path.
    pub const fn forward(&self) -> Forward {
        Forward {
            conn: Some(self.conn),
            server: Some(self.server),
            method: self.method,
            target: SocketAddr::V4(self.target),
            source: None,
            virt: SocketAddr::V4(self.virt),
            tunnel: self.tunnel,
            new: false,
            shift: None,
        }
    }
}

impl Shard {
    /// Decides on a packet by the userspace fast path, if the packet cannot change the state of its
    /// connection. A reply is accepted only if the host would forward it (`transit`). `None` if the
    /// packet must take the slow path: nothing has changed, and the caller calls
    /// [`handle_packet_ahead`](Self::handle_packet_ahead).
    #[inline]
    pub fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        let Plain {
            protocol,
            transit,
            len,
            ..
        } = *packet;
        if !self.lets_pass() {
            return None;
        }
        let (index, reply) = self.table.find_plain(packet, ahead)?;
        // The packet may be one that a server sends outside of any connection.
        if !reply
            && self.settings.heeds_servers()
            && self.links.is_masqueraded(protocol, packet.src.into())
        {
            return None;
        }
        let entry = self.table.narrow(index);
        let (flags, method) = (entry.flags(), entry.method());
        // The first answer must take the slow path, which records that the server has answered.
        let passes = match (reply, method) {
            (true, Forwarding::Nat) => transit && flags & flag::NO_OUTPUT == 0,
            (false, Forwarding::Nat | Forwarding::Route | Forwarding::Tunnel) => true,
            _ => false,
        };
        let record = entry.server();
        let link = self.links.get(record)?;
        if !passes
            || flags & flag::SLOW_PATH != 0
            || entry.is_live()
            || !is_still(entry)
            || !link.server.is_available()
        {
            return None;
        }
        let state = entry.state();
        entry.set_timeout(self.settings.timeouts.of(protocol, state));
        if reply {
            self.count_for(link, |counters| counters.count_out(len));
            self.table.note_stranger(ahead);
        } else {
            self.count_for(link, |counters| counters.count_in(len));
            entry.count_packet();
        }
        let passed = Passed {
            conn: ConnId(index),
            server: ServerId(record),
            reply,
            method,
            target: entry.narrow_server(),
            virt: entry.narrow_virt(),
            tunnel: link.server.tunnel(),
            packets: entry.in_packets(),
        };
        self.table.restart_narrow(index, now);
        Some(passed)
    }

    /// Whether the fast path is permitted: the shard's copies are up to date, an IPv4 service
    /// exists, no connection uses full NAT, none has ended and waits for its removal, and there is
    /// neither replication to peers nor a synchronisation master nor `backup_only`.
    #[inline]
    fn lets_pass(&self) -> bool {
        let settings = &self.settings;
        !self.is_stale()
            && settings.ipv4
            && self.local_ports.is_empty()
            && self.dying.is_empty()
            && self.replicas.is_none()
            && settings.master.is_none()
            && !settings.backup_only
    }
}
