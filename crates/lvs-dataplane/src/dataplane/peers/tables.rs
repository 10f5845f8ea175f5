//! Compares the services of two directors by their digests: different services make their
//! schedulers choose different servers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lvs_core::ServiceKey;
use lvs_core::api::{TableDifference, TablesInfo, TablesState};
use lvs_core::replication::DigestWalk;
use lvs_core::sync::services::{Differs, ServiceDigests};

use crate::dataplane::context::Context;

/// Number of servers that are read while the control half is locked once.
const PIECE: usize = 256;
/// Shortest interval between two digests of services that change continuously.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of differing services that the state of a peer names.
const NAMED_MAX: usize = 16;

/// The digests of the services of this director.
#[derive(Debug, Default)]
pub(super) struct Own {
    digests: Arc<ServiceDigests>,
    beyond: usize,
    /// The generation of the services that `digests` describes, and the time at which they were
    /// computed.
    made: Option<(u32, Instant)>,
}

impl Own {
    /// Computes the digests again if services or servers have changed, at most once in [`PERIOD`].
    pub(super) fn follow(&mut self, context: &Context) {
        let generation = context.control().generation();
        if let Some((made, at)) = self.made
            && (made == generation || at.elapsed() < PERIOD)
        {
            return;
        }
        let mut all = Vec::new();
        let mut next = Some(DigestWalk::default());
        while let Some(walk) = next {
            next = context.control().digests_piece(walk, PIECE, &mut all);
        }
        let (digests, beyond) = ServiceDigests::new(all);
        (self.digests, self.beyond) = (Arc::new(digests), beyond);
        self.made = Some((generation, Instant::now()));
    }

    pub(super) fn digests(&self) -> Arc<ServiceDigests> {
        self.digests.clone()
    }

    /// Number of services that are not compared, because there are too many.
    pub(super) const fn beyond(&self) -> u64 {
        self.beyond as u64
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum LogLine {
    /// The services have differed for too long.
    Differ(String),
    /// The services are equal again, or the peer has restarted.
    Alike(String),
}

/// Comparison of a peer's services with the services of this director.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    identity: Option<[u8; 16]>,
    /// Whether the peer does not send digests of services, because its version is older.
    older: bool,
    /// Whether digests of services have arrived in this session.
    compared: bool,
    differ: Vec<Difference>,
    alarm: bool,
}

#[derive(Debug)]
struct Difference {
    since: Instant,
    differs: Differs,
}

impl Comparison {
    /// Begins a session with a peer. `compares`: the peer sends digests of its services. Returns a
    /// line to log if the peer has restarted after an alarm.
    pub(super) fn begin(&mut self, identity: [u8; 16], compares: bool) -> Option<LogLine> {
        let mut line = None;
        // A restarted peer has no services at first.
        if self.identity != Some(identity) {
            let again = "has restarted, and its services are compared again".to_owned();
            line = self.alarm.then_some(LogLine::Alike(again));
            *self = Self::default();
        }
        self.identity = Some(identity);
        self.older = !compares;
        line
    }

    /// Ends a session. A service that differs in the sessions before and after also counts as
    /// different in between.
    pub(super) fn end(&mut self) {
        (self.older, self.compared) = (false, false);
    }

    /// Compares the digests of a peer with `ours`. Returns a line to log when a service has
    /// differed for `alarm`, and when no service differs for so long any more.
    pub(super) fn compare(
        &mut self,
        ours: &ServiceDigests,
        theirs: &ServiceDigests,
        alarm: Duration,
        now: Instant,
    ) -> Option<LogLine> {
        self.compared = true;
        let before: HashMap<ServiceKey, Instant> = std::mem::take(&mut self.differ)
            .into_iter()
            .map(|known| (known.differs.service, known.since))
            .collect();
        let differ = ours.compare(theirs).map(|differs| Difference {
            since: before.get(&differs.service).copied().unwrap_or(now),
            differs,
        });
        self.differ = differ.collect();
        let mut lasting = self
            .differ
            .iter()
            .filter(|one| now.saturating_duration_since(one.since) >= alarm);
        let line = match (lasting.next(), self.alarm) {
            (Some(one), false) => {
                let more = match lasting.count() {
                    0 => String::new(),
                    1 => ", and 1 more service".to_owned(),
                    more => format!(", and {more} more services"),
                };
                Some(LogLine::Differ(format!(
                    "has not chosen the same servers as this director for {} s: {} differs{more}; lvsadm sync names the differing services, lvsadm diff the differences",
                    alarm.as_secs(),
                    one.differs.service
                )))
            }
            (None, true) => Some(LogLine::Alike(match self.differ.len() {
                0 => "chooses the same servers as this director again".to_owned(),
                n => format!(
                    "chooses the same servers as this director again, except for {n} services that have just changed"
                ),
            })),
            _ => None,
        };
        match line {
            Some(LogLine::Differ(_)) => self.alarm = true,
            Some(LogLine::Alike(_)) => self.alarm = false,
            None => {}
        }
        line
    }

    fn state(&self) -> TablesState {
        match (self.compared, self.differ.is_empty()) {
            (false, _) if self.older => TablesState::Older,
            (false, _) => TablesState::Unknown,
            (true, _) if self.alarm => TablesState::Alarm,
            (true, false) => TablesState::Differ,
            (true, true) => TablesState::Alike,
        }
    }

    pub(super) fn info(&self, peer: SocketAddr, now: Instant) -> TablesInfo {
        let differ = self.differ.iter().filter(|_| self.compared);
        let first = differ.clone().map(|one| one.since).min();
        TablesInfo {
            peer,
            state: self.state(),
            differ: differ.count() as u64,
            seconds: first.map_or(0, |at| now.saturating_duration_since(at).as_secs()),
        }
    }

    /// Up to [`NAMED_MAX`] services that differ; none before the first comparison of a session.
    pub(super) fn differences(&self, now: Instant) -> Vec<TableDifference> {
        let differ = self.differ.iter().filter(|_| self.compared);
        let named = differ.take(NAMED_MAX).map(|one| TableDifference {
            service: one.differs.service.into(),
            seconds: now.saturating_duration_since(one.since).as_secs(),
            here: one.differs.here,
            there: one.differs.there,
        });
        named.collect()
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::{Control, Family, Forwarding, Options, ServerConfig, ServiceConfig};

    use super::*;

    const ALARM: Duration = Duration::from_secs(30);

    /// The digests of a director whose only server has this weight.
    fn digests(weight: i32) -> ServiceDigests {
        let mut control = Control::new(Options::default());
        let key = ServiceKey::tcp(([198, 51, 100, 1], 80).into());
        let config = ServiceConfig::new(Family::V4, "mh");
        control
            .add_service(key, config, None)
            .expect("the service is new");
        let server = ServerConfig::new(weight, Forwarding::Nat);
        let (address, now) = (([10, 0, 0, 1], 80).into(), lvs_core::Instant::ZERO);
        let added = control.add_server(&key, address, &server, now);
        added.expect("the server is new");
        let mut all = Vec::new();
        control.digests_piece(DigestWalk::default(), PIECE, &mut all);
        ServiceDigests::new(all).0
    }

    fn state(comparison: &Comparison, now: Instant) -> (TablesState, u64, u64) {
        let info = comparison.info(([192, 0, 2, 2], 1).into(), now);
        (info.state, info.differ, info.seconds)
    }

    #[test]
    fn lasting_difference_of_services_raises_one_alarm_and_short_difference_none() {
        let ours = digests(1);
        let begun = Instant::now();
        let at = |second| begun + Duration::from_secs(second);
        let mut it = Comparison::default();
        assert_eq!(it.begin([1; 16], true), None);
        assert_eq!(state(&it, at(0)).0, TablesState::Unknown);
        // The peer's digests, with this weight of its server, are compared.
        let compare = |it: &mut Comparison, weight, second| {
            it.compare(&ours, &digests(weight), ALARM, at(second))
        };
        assert_eq!(compare(&mut it, 1, 0), None);
        assert_eq!(state(&it, at(0)), (TablesState::Alike, 0, 0));

        // Repeated short differences raise no alarm.
        for second in [10, 30, 50] {
            assert_eq!(compare(&mut it, 2, second), None);
            assert_eq!(compare(&mut it, 2, second + 15), None);
            assert_eq!(state(&it, at(second + 15)), (TablesState::Differ, 1, 15));
            assert_eq!(compare(&mut it, 1, second + 16), None);
        }
        // A difference that changes keeps its start time.
        assert_eq!(compare(&mut it, 2, 100), None);
        assert_eq!(compare(&mut it, 3, 104), None);
        let shown = it.differences(at(110));
        assert_eq!(
            (shown[0].seconds, shown[0].here, shown[0].there),
            (10, true, true)
        );
        assert_eq!(compare(&mut it, 3, 129), None);
        let Some(LogLine::Differ(text)) = compare(&mut it, 3, 130) else {
            panic!("a lasting difference has raised no alarm")
        };
        assert!(
            text.contains("for 30 s: TCP 198.51.100.1:80 differs;"),
            "{text}"
        );
        assert_eq!(compare(&mut it, 3, 132), None, "the alarm was logged twice");
        assert_eq!(state(&it, at(132)), (TablesState::Alarm, 1, 32));

        // While the peer sends nothing, the result is unknown. Services that still differ
        // afterwards count as different in between.
        it.end();
        assert_eq!(state(&it, at(133)), (TablesState::Unknown, 0, 0));
        assert!(it.differences(at(133)).is_empty());
        assert_eq!(it.begin([1; 16], true), None);
        assert_eq!(compare(&mut it, 3, 140), None);
        assert_eq!(state(&it, at(140)), (TablesState::Alarm, 1, 40));
        let line = compare(&mut it, 1, 142);
        assert!(matches!(line, Some(LogLine::Alike(_))), "{line:?}");
        assert_eq!(state(&it, at(142)), (TablesState::Alike, 0, 0));
    }

    #[test]
    fn service_comparison_starts_again_for_restarted_peer_and_skips_older_peer() {
        let (own, none) = (digests(1), ServiceDigests::default());
        let now = Instant::now();
        let mut it = Comparison::default();
        assert_eq!(it.begin([1; 16], true), None);
        assert_eq!(it.compare(&own, &none, ALARM, now), None);
        let later = now + ALARM;
        assert!(it.compare(&own, &none, ALARM, later).is_some());
        let shown = it.differences(later);
        assert_eq!((shown[0].here, shown[0].there), (true, false));
        it.end();
        let line = it.begin([2; 16], true);
        assert!(matches!(line, Some(LogLine::Alike(_))), "{line:?}");
        assert_eq!(it.compare(&own, &none, ALARM, later), None);
        assert_eq!(state(&it, later), (TablesState::Differ, 1, 0));
        it.end();
        assert_eq!(
            it.begin([3; 16], false),
            None,
            "a line was logged, although no alarm was raised before"
        );
        assert_eq!(state(&it, later).0, TablesState::Older);
        it.end();
        assert_eq!(state(&it, later).0, TablesState::Unknown);
    }
}
