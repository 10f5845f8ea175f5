//! Packets from servers to clients.

use super::Shard;
use crate::conn::{NO_SLOT, flag};
use crate::{
    ConnId, DropReason, Forwarding, Instant, PacketMeta, Reply, ServerId, Transport, Verdict,
};

impl Shard {
    /// A packet from the server of connection `index` (`handle_response`).
    pub(crate) fn reply(&mut self, index: u32, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        let nat = self.table.get(index).method().translates();
        if nat && matches!(meta.transport, Transport::Short { header: false, .. }) {
            return Verdict::Drop(DropReason::ShortHeader);
        }
        if self.table.get(index).has(flag::WATCHED)
            && let Some(verdict) = self.watch_reply(index, meta, now)
        {
            return verdict;
        }
        let mut edit = None;
        if self.table.get(index).has(flag::HELPED) {
            match self.help_reply(index, meta, now) {
                Ok(changes) => edit = changes,
                Err(reason) => {
                    self.table.restart(index, now);
                    return Verdict::Drop(reason);
                }
            }
        }
        self.count(index, |counters| counters.count_out(meta.len));
        self.transition(index, meta, false);
        if self.table.get(index).has(flag::DYING) {
            // A packet of a connection that is about to end gives it time again.
            self.table.get_mut(index).flags &= !flag::DYING;
            self.dying.retain(|&dying| dying != index);
        }
        self.table.restart(index, now);
        Verdict::Reply(Reply {
            edit,
            ..self.reply_of(index)
        })
    }

    pub(super) fn reply_of(&self, index: u32) -> Reply {
        let slot = self.table.get(index);
        Reply {
            conn: ConnId(index),
            server: (slot.server != NO_SLOT).then_some(ServerId(slot.server)),
            source: slot.method().translates().then(|| slot.virt()),
            destination: (slot.method() == Forwarding::FullNat).then(|| slot.client()),
            edit: None,
        }
    }
}
