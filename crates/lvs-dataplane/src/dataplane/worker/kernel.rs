//! A packet worker's part of the kernel fast path, such as the offloading of connections.

use std::sync::Arc;
use std::time::Duration;

use lvs_core::offload::{LocalChange, Offer, OffloadState};
use lvs_core::{ConnId, Instant};
use tracing::warn;

use super::Worker;
use crate::dataplane::kernel_path::WithDataplane;
use crate::fast_path::{FastPath, LocalsAre, WayOut};
use lvs_packet::net::Way;
use lvs_packet::ways::Ways;

/// Time after which a worker offloads connections even if it always has received packets to
/// process.
const BUSY: Duration = Duration::from_millis(50);
/// Maximum number of queued changes of local ports for the BPF programs.
const LOCALS_WAITING: usize = 1 << 16;
/// Number of local ports that are written at once: each takes two system calls.
const LOCALS_AT_ONCE: usize = 512;
/// Number of slots in one portion of the walk for the synchronisation master.
const SYNC_BUDGET: usize = 1 << 16;
const SYNC_PAUSE: Duration = Duration::from_millis(1);
/// Number of slots whose connections are evicted from the kernel fast path in one round of
/// housekeeping.
const WITHDRAW_BUDGET: usize = 1 << 20;

#[derive(Default)]
pub(super) struct KernelSide {
    pub(super) path: Option<Arc<FastPath>>,
    /// Last time at which the worker had sent all packets that it had received.
    pub(super) quiet: Instant,
    /// Next slot of the walk for the synchronisation master, and the time of the next portion.
    pub(super) synced: Option<(usize, Instant)>,
    /// Next slot of the walk that evicts all connections from the kernel fast path; `None` without
    /// such a walk.
    pub(super) withdrawn: Option<usize>,
    /// Number of learned path MTUs of tunnels that are already applied.
    pub(super) lessons: u64,
}

impl Worker {
    /// Offloads connections from now on, after `after` packets from the client, if there is a
    /// kernel fast path.
    pub(in crate::dataplane) fn use_fast_path(&mut self, after: u32) {
        if let Some(fast_path) = self.context.fast_path() {
            self.kernel.path = Some(fast_path.clone());
            self.decider.shard.follow_local_ends();
            self.decider.offload_after = after;
        }
    }

    /// Offloads connections that are due. `quiet`: the worker has sent all packets that it has
    /// received, so no packet is overtaken. A worker that is not `quiet` for [`BUSY`] is
    /// overloaded, and offloads nevertheless.
    pub(super) fn offload_due(&mut self, quiet: bool) {
        let now = self.context.now();
        if quiet {
            self.kernel.quiet = now;
        } else if now.saturating_since(self.kernel.quiet) < BUSY {
            return;
        }
        let due = std::mem::take(&mut self.decider.due);
        if let Some(kernel) = self.kernel.path.clone() {
            let _ = self.write_local_ports();
            // Read the epoch first: a change after this invalidates the offload.
            let epoch = kernel.epoch();
            self.take_view();
            if self.decider.shard.is_behind() {
                self.decider.sweep();
            }
            if self.publishes_none(epoch).is_none() {
                for &conn in &due {
                    if self
                        .decider
                        .shard
                        .is_offload_due(conn, self.decider.offload_after, epoch)
                        && self.publish(conn, epoch, &kernel, now).is_none()
                    {
                        // Otherwise, a connection that was offloaded in an earlier epoch would be
                        // checked at every packet.
                        self.decider.shard.withdraw(conn);
                    }
                }
            }
        }
        self.decider.due = due;
        self.decider.due.clear();
    }

    /// Begins an epoch if a path MTU of a tunnel was learned, so that offloaded connections use it.
    pub(super) fn heed_lessons(&mut self) {
        if let Some(kernel) = &self.kernel.path {
            let lessons = self.pipeline.common().tunnels().lessons();
            if lessons != self.kernel.lessons {
                self.kernel.lessons = lessons;
                kernel.changed();
            }
        }
    }

    /// Returns the reason why no connection at all can be offloaded in this epoch; `None` if
    /// connections can be.
    fn publishes_none(&self, epoch: u16) -> Option<WithDataplane> {
        if epoch == 0 {
            return Some(WithDataplane::Change);
        }
        // With `ignore_tunneled`, packets that the host has decapsulated are not for the dataplane,
        // and the BPF programs cannot recognise them.
        let judges = self.network.view().ignore_tunneled;
        judges.then_some(WithDataplane::IgnoreTunneled)
    }

    /// Returns the offload plan and next hops of a connection, or the reason why it cannot be
    /// offloaded.
    fn what_to_publish(
        &self,
        conn: ConnId,
        kernel: &FastPath,
        now: Instant,
    ) -> Result<(Offer, Ways), WithDataplane> {
        let offer = self.decider.shard.offer(conn)?;
        let directions = self.decider.directions(conn, &offer);
        if self.decider.may_be_taken(&directions) {
            return Err(WithDataplane::Marks);
        }
        if self
            .captures
            .iter()
            .any(|one| one.shows_forwarded(&directions))
        {
            return Err(WithDataplane::Captured);
        }
        if !kernel.has_room_for(offer.record) {
            return Err(WithDataplane::Number);
        }
        if offer.local.is_some() && !kernel.has_locals() {
            return Err(WithDataplane::Locals);
        }
        let tunnels = self.pipeline.common().tunnels();
        let pmtu_disc = self.network.view().pmtu_disc;
        let ways = Ways::of(&offer, &self.network, tunnels, pmtu_disc, now)?;
        Ok((offer, ways))
    }

    /// Returns the reason why the kernel fast path does not forward the packets of a connection. If
    /// `conn` is `None`, the reason why it would not forward the packets of a new connection.
    pub(super) fn fast_path(&self, conn: Option<ConnId>) -> Result<(), WithDataplane> {
        let kernel = self.kernel.path.as_ref().ok_or(WithDataplane::NotUsed)?;
        let epoch = kernel.epoch();
        if let Some(why) = self.publishes_none(epoch) {
            return Err(why);
        }
        let (decider, of) = (&self.decider, self.decider.offload_after);
        let Some(conn) = conn else {
            return Err(WithDataplane::New { of });
        };
        // An offloaded connection may be closing, which begins no epoch.
        self.what_to_publish(conn, kernel, self.context.now())?;
        Err(match decider.shard.offload_state(conn, of, epoch) {
            OffloadState::Published => return Ok(()),
            OffloadState::Stale => WithDataplane::Stale,
            OffloadState::Early => WithDataplane::Early {
                sent: decider.shard.packets_of(conn),
                of,
            },
            _ => WithDataplane::Later { of },
        })
    }

    /// Offloads a connection. Returns `None` if this is not possible, or a BPF map has no room.
    fn publish(
        &mut self,
        conn: ConnId,
        epoch: u16,
        kernel: &Arc<FastPath>,
        now: Instant,
    ) -> Option<()> {
        let (offer, ways) = self.what_to_publish(conn, kernel, now).ok()?;
        let view = self.network.view();
        let tables = &view.tables;
        let hop = |way: Way| {
            let out = WayOut {
                ifindex: tables.port(way.port)?.ifindex,
                mtu: way.mtu,
                to: way.to,
                from: way.from,
            };
            kernel.hop(out, now)
        };
        let to_server = hop(ways.server)?;
        let to_client = match ways.client {
            Some(way) => Some(hop(way)?),
            None => None,
        };
        let is_set = match &ways.outer {
            Some(outer) => kernel.set_tunnel(offer.record, to_server, epoch, outer),
            None => kernel.set_server(offer.record, to_server, epoch),
        };
        if !is_set {
            return None;
        }
        if let Some(local) = &offer.local
            && !kernel.set_local(self.number, local)
        {
            return None;
        }
        let published = self.decider.shard.publish(conn, epoch, to_client);
        published.then_some(())
    }

    /// Writes the local ports of connections for the BPF programs and for a successor. Returns true
    /// if more are queued. If the map of local ports does not exist, requests it from the keeper
    /// once, and leaves the ports in the queue. Discards the ports if too many are queued, or if
    /// the map cannot be created.
    pub(super) fn write_local_ports(&mut self) -> bool {
        let shard = &mut self.decider.shard;
        let waiting = shard.local_changes_len();
        if waiting == 0 {
            return false;
        }
        let Some(kernel) = &self.kernel.path else {
            return false;
        };
        match kernel.locals() {
            LocalsAre::Ready => {
                kernel.follow_locals(self.number, shard.local_changes().take(LOCALS_AT_ONCE));
                return waiting > LOCALS_AT_ONCE;
            }
            LocalsAre::Wanted => {
                // This system call takes long, so the keeper makes it.
                let kernel = kernel.clone();
                self.threads.post_keeper(move |_| kernel.make_locals());
            }
            LocalsAre::Coming if waiting < LOCALS_WAITING => {}
            LocalsAre::Coming => {
                let opened = |change: &LocalChange| matches!(change, LocalChange::Bound(_));
                let forgotten = shard.local_changes().filter(opened).count();
                warn!(
                    "{forgotten} connections of full NAT were opened before memory for their local ports was available: they end if this dataplane is killed"
                );
            }
            LocalsAre::Impossible => _ = shard.local_changes().count(),
        }
        false
    }

    /// Creates synchronisation messages for the next portion of the table: for offloaded
    /// connections whose clients have sent packets.
    pub(super) fn sync_offloaded(&mut self, now: Instant) {
        if let Some((from, at)) = self.kernel.synced
            && at <= now
        {
            let shard = &mut self.decider.shard;
            let next = shard.sync_offloaded_piece(from, SYNC_BUDGET, now);
            self.kernel.synced = next.map(|next| (next, now + SYNC_PAUSE));
        }
    }

    /// Permits a successor to take over for the next minutes, selects the slots that the BPF
    /// programs examine first, begins the next walk for the synchronisation master, and evicts all
    /// connections from the kernel fast path when all epoch numbers are used.
    pub(super) fn keep_kernel(&mut self, now: Instant) {
        let Some(kernel) = &self.kernel.path else {
            return;
        };
        kernel.is_alive(now);
        if self.kernel.synced.is_none() && self.decider.shard.has_master() {
            self.kernel.synced = Some((0, now));
        }
        // Worker 0 reports for all workers: their tables are about equally full.
        if self.number == 0 {
            kernel.try_homes(self.decider.shard.tries_homes());
        }
        if kernel.must_withdraw(self.number) || self.kernel.withdrawn.is_some() {
            let from = self.kernel.withdrawn.unwrap_or(0);
            self.kernel.withdrawn = self.decider.shard.withdraw_piece(from, WITHDRAW_BUDGET);
            if self.kernel.withdrawn.is_none() {
                kernel.has_withdrawn(self.number);
            }
        }
    }
}
