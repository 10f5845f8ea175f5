//! The worker side of the kernel fast path: offloading connections, and its clock.

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

/// Time after which connections are offloaded even if received packets are always waiting.
const BUSY: Duration = Duration::from_millis(50);
/// Maximum number of local ports that wait to be written for the BPF programs.
const LOCALS_WAITING: usize = 1 << 16;
/// Number of local ports that are written at a time: each needs two system calls.
const LOCALS_AT_ONCE: usize = 512;
/// Number of slots in one portion of the walk for the synchronisation master, and the pause after
/// each portion.
const SYNC_BUDGET: usize = 1 << 16;
const SYNC_PAUSE: Duration = Duration::from_millis(1);
/// Number of slots whose connections are evicted from the kernel fast path in one round of
/// housekeeping, if all connections must be evicted.
const WITHDRAW_BUDGET: usize = 1 << 20;

/// The state of a worker for the kernel fast path.
#[derive(Default)]
pub(super) struct KernelSide {
    /// The kernel fast path, if it is used.
    pub(super) path: Option<Arc<FastPath>>,
    /// Last time at which all packets that the worker had received were sent.
    pub(super) quiet: Instant,
    /// Next slot of the walk for the synchronisation master, and the time of the next step.
    pub(super) synced: Option<(usize, Instant)>,
    /// Next slot of the walk that evicts all connections from the kernel fast path.
    pub(super) withdrawn: Option<usize>,
    /// Number of updates of tunnel path MTUs so far.
    pub(super) lessons: u64,
}

impl Worker {
    /// Offloads connections from now on, each after the configured number of packets, if there is a
    /// kernel fast path.
    pub(in crate::dataplane) fn use_fast_path(&mut self, after: u32) {
        if let Some(fast_path) = self.context.fast_path() {
            self.kernel.path = Some(fast_path.clone());
            self.decider.shard.follow_local_ends();
            self.decider.offload_after = after;
        }
    }

    /// Offloads the offloadable connections, if all packets received before have been sent
    /// (`quiet`), so that no later packet overtakes them. A dataplane that is not `quiet` for a
    /// long time is overloaded and loses packets; it then offloads without waiting.
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
            // Read the epoch first: the data read after it belong to this epoch or a later one.
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
                        // A connection that was offloaded before the last change must not be
                        // checked at every packet.
                        self.decider.shard.withdraw(conn);
                    }
                }
            }
        }
        self.decider.due = due;
        self.decider.due.clear();
    }

    /// Applies a path MTU that was learned for a tunnel to offloaded connections, too.
    pub(super) fn heed_lessons(&mut self) {
        if let Some(kernel) = &self.kernel.path {
            let lessons = self.pipeline.common().tunnels().lessons();
            if lessons != self.kernel.lessons {
                self.kernel.lessons = lessons;
                kernel.changed();
            }
        }
    }

    /// The reason why no connection is offloaded in this epoch.
    fn publishes_none(&self, epoch: u16) -> Option<WithDataplane> {
        if epoch == 0 {
            return Some(WithDataplane::Change);
        }
        // With `ignore_tunneled`, packets that the host has decapsulated are not for the director,
        // and the BPF programs do not know which ones these are.
        let judges = self.network.view().ignore_tunneled;
        judges.then_some(WithDataplane::IgnoreTunneled)
    }

    /// Returns the offload plan and the next hops of an offloadable connection; otherwise the
    /// reason why it is not offloadable.
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

    /// Whether the kernel fast path forwards packets of a connection, or of a new one (`None`);
    /// otherwise the reason.
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
        // Check an offloaded connection too: it may be closing, which starts no epoch.
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

    /// Offloads a connection; `None` if it is not offloadable, or the maps of the programs have no
    /// room for it.
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

    /// Writes the local ports of connections for the BPF programs and for a successor; true if more
    /// are waiting.
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
                // This system call takes long, so the keeper executes it.
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

    /// Creates synchronisation messages about the offloaded connections in the next portion of the
    /// table whose clients have sent packets.
    pub(super) fn sync_offloaded(&mut self, now: Instant) {
        if let Some((from, at)) = self.kernel.synced
            && at <= now
        {
            let shard = &mut self.decider.shard;
            let next = shard.sync_offloaded_piece(from, SYNC_BUDGET, now);
            self.kernel.synced = next.map(|next| (next, now + SYNC_PAUSE));
        }
    }

    /// Reports to the kernel fast path that the dataplane runs, begins the next walk for the
    /// synchronisation master, and evicts all connections from the kernel fast path when all epoch
    /// numbers are used.
    pub(super) fn keep_kernel(&mut self, now: Instant) {
        let Some(kernel) = &self.kernel.path else {
            return;
        };
        kernel.is_alive(now);
        if self.kernel.synced.is_none() && self.decider.shard.has_master() {
            self.kernel.synced = Some((0, now));
        }
        // The tables of all workers are about equally full, so one worker reports for all.
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
