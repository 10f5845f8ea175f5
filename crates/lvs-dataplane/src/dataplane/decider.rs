//! Decides about the packets of one worker, with the director's tables.

use std::net::SocketAddrV4;
use std::sync::Arc;

use lvs_core::explain::Explanation;
use lvs_core::fast_path::{Ahead, Passed, Plain};
use lvs_core::mark::{MarkAction, MarkRule};
use lvs_core::offload::Offer;
use lvs_core::replication::{ItemResults, TakenOver};
use lvs_core::sync::bulk::Item;
use lvs_core::sync::wire::Entry;
use lvs_core::{
    AcceptReason, ConnId, Connection, DropReason, Forward, IcmpError, Instant, PacketMeta,
    Protocol, Shard, Tuple, Verdict,
};

use super::context::Context;
use super::hook::{HookAction, PacketHook};
use super::kernel_path::WithDataplane;
use crate::fast_path::OFFLOAD_AFTER;
use lvs_packet::intercept::Intercept;
use lvs_packet::pipeline::Decide;
use lvs_sys::prefetch;

/// Maximum number of connections that wait to be offloaded. A connection above this limit is queued
/// at a later packet.
const OFFLOADS_MAX: usize = 4096;

/// A packet about which a client of the control socket asks (`lvsadm explain`).
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) tuple: Tuple,
    /// The packet's firewall mark; `None` if the rules for marks decide.
    pub(super) mark: Option<u32>,
    pub(super) interface: Option<String>,
}

/// The tables by which one packet worker decides: its shard of the connections, and the control
/// half for packets that the shard cannot decide.
pub(super) struct Decider {
    context: Arc<Context>,
    pub(super) shard: Shard,
    pub(super) hook: Option<Box<dyn PacketHook>>,
    marks: Arc<[MarkRule]>,
    /// Number of packets that each rule for marks has matched.
    pub(super) marked: Vec<u64>,
    /// The intercepted traffic: a rule for marks without a destination applies only to packets of
    /// services.
    intercept: Arc<Intercept>,
    /// Name of the interface on which the present batch arrived.
    pub(super) interface: Arc<str>,
    pub(super) drops: [u64; DropReason::ALL.len()],
    pub(super) accepts: [u64; AcceptReason::ALL.len()],
    /// Whether packets of the present batch are ignored: the host decapsulated them, and
    /// `ignore_tunneled` is set.
    pub(super) ignores: bool,
    /// Whether the last decision is kept for a capture.
    pub(super) keeps_decisions: bool,
    decision: Option<(Tuple, Verdict)>,
    /// The epoch of the kernel fast path, read before the worker switched to its snapshot; 0 if no
    /// connection may be offloaded: without the kernel fast path, while it is suspended, and for
    /// packets from other workers.
    pub(super) epoch: u16,
    /// Number of packets from the client after which a connection is offloaded.
    pub(super) offload_after: u32,
    /// Connections that wait to be offloaded.
    pub(super) due: Vec<ConnId>,
}

impl Decider {
    pub(super) fn new(
        context: Arc<Context>,
        shard: Shard,
        hook: Option<Box<dyn PacketHook>>,
    ) -> Self {
        let (drops, accepts) = ([0; DropReason::ALL.len()], [0; AcceptReason::ALL.len()]);
        Self {
            marks: Arc::from([]),
            marked: Vec::new(),
            intercept: Arc::default(),
            interface: Arc::from(""),
            ignores: false,
            context,
            shard,
            hook,
            drops,
            accepts,
            keeps_decisions: false,
            decision: None,
            epoch: 0,
            offload_after: OFFLOAD_AFTER.get(),
            due: Vec::new(),
        }
    }

    /// Number of packets dropped because they would have opened a connection in a full table.
    pub(super) const fn refused_for_room(&self) -> u64 {
        self.drops[DropReason::TableFull.index()]
    }

    /// Replaces the rules for marks and resets their counters, if the rules have changed.
    pub(super) fn take_marks(&mut self, marks: &Arc<[MarkRule]>) {
        if !Arc::ptr_eq(&self.marks, marks) {
            self.marks = marks.clone();
            self.marked = vec![0; self.marks.len()];
        }
    }

    pub(super) fn take_intercept(&mut self, intercept: &Arc<Intercept>) {
        if !Arc::ptr_eq(&self.intercept, intercept) {
            self.intercept = intercept.clone();
        }
    }

    /// Applies changed settings to the shard, and removes the connections that these changes end.
    pub(super) fn sweep(&mut self) {
        self.context.control_for_packet().sweep(&mut self.shard);
    }

    /// Takes over connections that the synchronisation backup has received.
    pub(super) fn take_over(&mut self, entries: Vec<Entry>, now: Instant) -> TakenOver {
        self.context
            .control_for_packet()
            .take_over(&mut self.shard, entries, now)
    }

    /// Applies a peer's updates of connections and templates. Returns the number of updates with
    /// each result.
    pub(super) fn apply_items(
        &mut self,
        peer: usize,
        keeps_ties: bool,
        items: Vec<Item>,
    ) -> ItemResults {
        let now = self.context.now();
        // Prefetch the table's cache lines of all connections before the control half is locked.
        let mut aheads: Vec<Ahead> = items
            .iter()
            .map(|item| {
                let tuple = Tuple::new(item.entry.protocol, item.entry.client, item.entry.virt);
                self.shard.ahead(&tuple, prefetch)
            })
            .collect();
        for ahead in &mut aheads {
            self.shard.aim(ahead, prefetch);
        }
        self.context
            .control_for_packet()
            .apply_items(&mut self.shard, peer, keeps_ties, items, now)
    }

    /// Source and destination of a connection's packets as they arrive: first from the client, then
    /// from the server.
    pub(super) fn directions(&self, conn: ConnId, offer: &Offer) -> [Tuple; 2] {
        let to = self.shard.local_address_of(conn).unwrap_or(offer.client);
        [
            Tuple::new(offer.protocol, offer.client, offer.virt),
            Tuple::new(offer.protocol, offer.server, to),
        ]
    }

    /// Whether a rule for marks could drop packets of a connection or pass them to the host, in
    /// either [direction](Self::directions). Rules that set a mark affect only the packets that
    /// open connections.
    pub(super) fn may_be_taken(&self, directions: &[Tuple]) -> bool {
        directions.iter().any(|tuple| takes(&self.marks, tuple))
    }

    /// Returns the action of the first rule for marks that matches a packet, and counts the packet
    /// for that rule.
    fn mark(&mut self, tuple: &Tuple) -> Option<MarkAction> {
        let to_service = || self.intercept.is_to_service(tuple);
        let taken = self
            .marks
            .iter()
            .position(|rule| rule.matches(&self.interface, tuple, to_service))?;
        if let Some(count) = self.marked.get_mut(taken) {
            *count += 1;
        }
        Some(self.marks[taken].action)
    }

    /// Lists connections of this worker's shard. `starts` contains the first slot for each shard,
    /// or `None` if the shard is complete; a shard without an entry begins at slot 0. `budget`
    /// limits the number of slots. Returns the number of the shard, the connections, and the slot
    /// at which the next call continues (`None` at the end of the table).
    pub(super) fn connections(
        &self,
        starts: &[Option<usize>],
        budget: usize,
    ) -> (usize, Vec<Connection>, Option<usize>) {
        let number = self.shard.number();
        let Some(start) = starts.get(number).copied().unwrap_or(Some(0)) else {
            return (number, Vec::new(), None);
        };
        let now = self.context.now();
        let (piece, next) = self.shard.connections_piece(start, budget, now);
        (number, piece, next)
    }

    /// Explains the fate of a packet, without side effects. `fast_path` returns the reason why a
    /// connection is not offloaded, or with `None`, why a new connection is not offloaded at once.
    pub(super) fn explain(
        &self,
        question: &Question,
        fast_path: impl FnOnce(Option<ConnId>) -> Result<(), WithDataplane>,
    ) -> Explanation {
        let Question {
            tuple,
            mark,
            interface,
        } = question;
        let (action, why) = match mark {
            Some(0) => (None, String::new()),
            Some(mark) => (
                Some(MarkAction::Mark(*mark)),
                "set in the request".to_owned(),
            ),
            None => {
                let to_service = self.intercept.is_to_service(tuple);
                marked_by(&self.marks, tuple, interface.as_deref(), to_service)
            }
        };
        let refused = |verdict: String| Explanation {
            verdict,
            reason: DropReason::MarkRule.name().to_owned(),
            ..Explanation::default()
        };
        let mut explanation = match action {
            Some(MarkAction::Drop) => refused(format!("dropped by {why}")),
            Some(MarkAction::Host) => refused(format!("passed to this host by {why}")),
            Some(MarkAction::Mark(mark)) => self.ask(*tuple, mark),
            None => self.ask(*tuple, 0),
        };
        explanation.mark_why = why;
        if explanation.has_connection() {
            let why = self.with_dataplane(tuple, fast_path);
            explanation.fast_path = Some(why.is_none());
            explanation.fast_path_why = why.unwrap_or_default();
        }
        explanation
    }

    /// Returns the reason why the connection of a packet is not offloaded; `None` if it is
    /// offloaded.
    fn with_dataplane(
        &self,
        tuple: &Tuple,
        fast_path: impl FnOnce(Option<ConnId>) -> Result<(), WithDataplane>,
    ) -> Option<String> {
        let info = self.context.fast_path_info();
        if !info.active {
            let mut why = WithDataplane::NotUsed.to_string();
            if !info.reason.is_empty() {
                why.push_str(": ");
                why.push_str(&info.reason);
            }
            return Some(why);
        }
        let &Tuple { protocol, src, dst } = tuple;
        let known = self.shard.lookup(protocol, src, dst, self.context.now());
        fast_path(known.map(|known| known.id))
            .err()
            .map(|why| why.to_string())
    }

    fn ask(&self, tuple: Tuple, mark: u32) -> Explanation {
        let now = self.context.now();
        self.context
            .control()
            .explain(&self.shard, tuple, mark, now)
    }

    /// Removes and returns the last decision, if [`keeps_decisions`](Self::keeps_decisions) is set.
    pub(super) fn take_decision(&mut self) -> Option<(Tuple, Verdict)> {
        self.decision.take()
    }

    fn count(&mut self, tuple: Tuple, verdict: Verdict) -> Verdict {
        if self.keeps_decisions {
            self.decision = Some((tuple, verdict));
        }
        match verdict {
            Verdict::Drop(reason) | Verdict::Unreachable(reason) | Verdict::Reset(reason) => {
                self.drops[reason.index()] += 1;
            }
            Verdict::Accept(reason) => self.accepts[reason.index()] += 1,
            Verdict::Forward(Forward {
                conn: Some(conn), ..
            }) => self.note_if_offload_is_due(conn),
            Verdict::Forward(_) | Verdict::Reply(_) => {}
        }
        verdict
    }
}

impl Decider {
    /// Queues a connection for offloading if it is due, and if fewer than [`OFFLOADS_MAX`]
    /// connections wait.
    #[inline]
    fn note_if_offload_is_due(&mut self, conn: ConnId) {
        let (after, epoch) = (self.offload_after, self.epoch);
        if epoch != 0
            && self.due.len() < OFFLOADS_MAX
            && self.shard.is_offload_due(conn, after, epoch)
        {
            self.due.push(conn);
        }
    }
}

impl Decide for Decider {
    #[inline]
    fn ahead(&self, protocol: Protocol, src: SocketAddrV4, dst: SocketAddrV4) -> Option<Ahead> {
        Some(self.shard.ahead_v4(protocol, src, dst, prefetch))
    }

    #[inline]
    fn aim(&self, ahead: &mut Ahead) {
        self.shard.aim(ahead, prefetch);
    }

    fn knows(&self, tuple: &Tuple) -> bool {
        self.shard.knows(tuple)
    }

    fn packets_of(&self, conn: ConnId) -> u32 {
        self.shard.packets_of(conn)
    }

    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        self.decide(meta, None, now)
    }

    fn packet_ahead(&mut self, meta: &PacketMeta<'_>, ahead: &Ahead, now: Instant) -> Verdict {
        self.decide(meta, Some(ahead), now)
    }

    #[inline]
    fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        // The userspace fast path skips hooks, rules for marks and captures.
        if self.ignores || self.hook.is_some() || !self.marks.is_empty() || self.keeps_decisions {
            return None;
        }
        let passed = self.shard.pass(packet, ahead, now)?;
        if !passed.reply {
            self.note_if_offload_is_due(passed.conn);
        }
        Some(passed)
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        if self.ignores {
            return self.count(error.inner, Verdict::Accept(AcceptReason::Tunneled));
        }
        let verdict = match self.shard.handle_icmp_error(error, now) {
            Ok(verdict) => verdict,
            Err(pending) => self.context.control_for_packet().admit_icmp_error(
                &mut self.shard,
                error,
                pending,
                now,
            ),
        };
        self.count(error.inner, verdict)
    }
}

impl Decider {
    fn decide(&mut self, meta: &PacketMeta<'_>, ahead: Option<&Ahead>, now: Instant) -> Verdict {
        if self.ignores {
            return self.count(meta.tuple, Verdict::Accept(AcceptReason::Tunneled));
        }
        if let Some(hook) = &mut self.hook {
            match hook.packet(meta) {
                HookAction::Continue => {}
                HookAction::Host => {
                    return self.count(meta.tuple, Verdict::Accept(AcceptReason::Hook));
                }
                HookAction::Drop => return self.count(meta.tuple, Verdict::Drop(DropReason::Hook)),
            }
        }
        let marked;
        let meta = match self.mark(&meta.tuple) {
            None => meta,
            Some(MarkAction::Mark(mark)) => {
                marked = PacketMeta { mark, ..*meta };
                &marked
            }
            Some(MarkAction::Drop) => {
                return self.count(meta.tuple, Verdict::Drop(DropReason::MarkRule));
            }
            Some(MarkAction::Host) => {
                return self.count(meta.tuple, Verdict::Accept(AcceptReason::MarkRule));
            }
        };
        let decided = match ahead {
            Some(ahead) => self.shard.handle_packet_ahead(meta, ahead, now),
            None => self.shard.handle_packet(meta, now),
        };
        let verdict = match decided {
            Ok(verdict) => verdict,
            Err(pending) => {
                self.context
                    .control_for_packet()
                    .admit(&mut self.shard, meta, pending, now)
            }
        };
        if verdict == Verdict::Drop(DropReason::Unbound) {
            // After a start, replicated connections may arrive before the services are added.
            self.context
                .control_for_packet()
                .bind_unbound(&mut self.shard, &meta.tuple);
        }
        self.count(meta.tuple, verdict)
    }
}

/// Whether the rules for marks could drop a packet or pass it to the host, for any interface.
fn takes(rules: &[MarkRule], tuple: &Tuple) -> bool {
    for rule in rules {
        let interface = rule.interface.as_deref().unwrap_or_default();
        if !rule.matches(interface, tuple, || true) {
            continue;
        }
        match rule.action {
            MarkAction::Drop | MarkAction::Host => return true,
            // A marked packet matches no later rule.
            MarkAction::Mark(_) if rule.interface.is_none() => return false,
            MarkAction::Mark(_) => {}
        }
    }
    false
}

/// Returns the action of the first matching rule for marks, and a text that names the rule. Without
/// `interface`, rules for an interface do not match; the text names the rules that would match on
/// their interface.
fn marked_by(
    rules: &[MarkRule],
    tuple: &Tuple,
    interface: Option<&str>,
    to_service: bool,
) -> (Option<MarkAction>, String) {
    let mut passed = String::new();
    for (number, rule) in (1..).zip(rules) {
        if rule.matches(interface.unwrap_or_default(), tuple, || to_service) {
            return (Some(rule.action), format!("rule {number} ({rule}){passed}"));
        }
        if interface.is_none()
            && let Some(name) = &rule.interface
            && rule.matches(name, tuple, || to_service)
        {
            passed.push_str(&format!("; rule {number} if the packet arrives on {name}"));
        }
    }
    (None, passed.trim_start_matches("; ").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_rule_prevents_offload_only_if_it_drops_packets_or_passes_them_to_host() {
        let tuple = Tuple::tcp(
            ([192, 0, 2, 7], 1000).into(),
            ([198, 51, 100, 1], 80).into(),
        );
        let marks = "--destination 198.51.100.1 --mark 7";
        let drops = "--source 192.0.2.0/24 --drop";
        let host = "--destination 198.51.100.1 --protocol tcp --ports 80 --host";
        let elsewhere = "--interface eth9 --source 192.0.2.0/24 --drop";
        let marks_elsewhere = "--interface eth9 --destination 198.51.100.1 --mark 7";
        let others = "--destination 198.51.100.1 --protocol tcp --ports 81-90 --drop\n\
                      --destination 198.51.100.1 --protocol udp --drop\n\
                      --destination 198.51.100.2 --drop\n\
                      --source 192.0.2.8 --drop";
        for (rules, taken) in [
            (vec![], false),
            (vec![marks], false),
            (vec![drops], true),
            (vec![host], true),
            (vec![others], false),
            (vec![marks, drops], false),
            (vec![drops, marks], true),
            // Packets of this connection can arrive on any interface.
            (vec![elsewhere], true),
            (vec![elsewhere, marks], true),
            (vec![marks_elsewhere], false),
            (vec![marks_elsewhere, drops], true),
        ] {
            let rules =
                lvs_core::mark::parse_rules(&rules.join("\n")).expect("the rules are valid");
            assert_eq!(takes(&rules, &tuple), taken, "{rules:?}");
        }
    }
}
