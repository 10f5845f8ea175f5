//! Whether every director chooses alike: the digests of the services' tables, and how those of a
//! peer compare with them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lvs_core::TablesWalk;
use lvs_core::api::{TableDifference, TablesInfo, TablesState};
use lvs_core::sync::bulk::Malformed;
use lvs_core::sync::tables::{ASKED_MAX, Table, TableDigest, TableKey, Tables};

use crate::engine::shared::Shared;

/// Servers that are looked at while packets wait.
const PIECE: usize = 256;
/// Between two looks at what changes all the time.
const PERIOD: Duration = Duration::from_secs(1);

/// This director's.
#[derive(Debug, Default)]
pub(super) struct Own {
    tables: Arc<Tables>,
    beyond: usize,
    /// The generation of what they were made from.
    made: Option<(u32, Instant)>,
}

impl Own {
    /// Makes them anew if services or servers have changed.
    pub(super) fn follow(&mut self, shared: &Shared) {
        let generation = shared.control().generation();
        if let Some((made, at)) = self.made
            && (made == generation || at.elapsed() < PERIOD)
        {
            return;
        }
        let mut all = Vec::new();
        let mut next = Some(TablesWalk::default());
        while let Some(walk) = next {
            next = shared.control().tables_piece(walk, PIECE, &mut all);
        }
        // What changes all the time is as it was when it did not.
        let known = all.into_iter().filter_map(|(key, digest)| match digest {
            TableDigest::GONE => Some((key, self.tables.get(&key)?)),
            _ => Some((key, digest)),
        });
        let (tables, beyond) = Tables::new(known);
        self.beyond = beyond;
        self.made = Some((generation, Instant::now()));
        if tables != *self.tables {
            self.tables = Arc::new(tables);
        }
    }

    pub(super) fn tables(&self) -> Arc<Tables> {
        self.tables.clone()
    }

    /// Services that are not compared.
    pub(super) const fn beyond(&self) -> u64 {
        self.beyond as u64
    }
}

/// A service's table, and whether the order of its servers matters.
pub(super) fn read(shared: &Shared, key: &TableKey) -> Option<(Table, bool)> {
    let key = key.service();
    let (mut table, ordered, mut more) = shared.control().table_piece(&key, 0, PIECE)?;
    while more {
        let from = table.servers.len();
        let (piece, _, rest) = shared.control().table_piece(&key, from, PIECE)?;
        // It may have got shorter meanwhile.
        more = rest && !piece.servers.is_empty();
        table.servers.extend(piece.servers);
        table.count = piece.count;
    }
    Some((table, ordered))
}

/// What is to be said of a comparison.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// They have differed for too long.
    Differ(String),
    /// They do not any more, or that is to be seen.
    Alike(String),
}

/// A peer's tables, and how they compare with ours.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    identity: Option<[u8; 16]>,
    /// There is a connection, over which they are not told.
    older: bool,
    theirs: Tables,
    /// They were told, and compared.
    compared: bool,
    differ: BTreeMap<TableKey, Difference>,
    alarm: bool,
}

#[derive(Debug)]
struct Difference {
    since: Instant,
    here: TableDigest,
    there: TableDigest,
    /// What differs was asked for.
    asked: bool,
    what: Box<[String]>,
}

impl Difference {
    /// There is none, or it is another than it was.
    fn new(since: Instant, here: TableDigest, there: TableDigest) -> Self {
        let only = match (here, there) {
            (TableDigest::GONE, _) => Some("the service is there only"),
            (_, TableDigest::GONE) => Some("the service is here only"),
            _ => None,
        };
        Self {
            since,
            here,
            there,
            asked: only.is_some(),
            what: only.into_iter().map(str::to_owned).collect(),
        }
    }
}

impl Comparison {
    /// There is a connection; `told`: over which they are told. Gives what is to be said.
    pub(super) fn begin(&mut self, identity: [u8; 16], told: bool) -> Option<Said> {
        let mut said = None;
        // One that was started anew has nothing at first.
        if self.identity != Some(identity) {
            let anew = "was started anew, and is compared anew".to_owned();
            said = self.alarm.then_some(Said::Alike(anew));
            *self = Self::default();
        }
        self.identity = Some(identity);
        self.older = !told;
        said
    }

    /// The connection is over. What differed before, and still does when there is another one, has
    /// differed all the time.
    pub(super) fn end(&mut self) {
        (self.older, self.compared) = (false, false);
        self.theirs = Tables::default();
    }

    /// Takes what the peer tells; `true` if that is all for now.
    pub(super) fn hear(&mut self, told: &[u8]) -> Result<bool, Malformed> {
        let all = self.theirs.hear(told)?;
        self.compared |= all;
        Ok(all)
    }

    /// Compares them with `ours`; gives the services to ask about, and what is to be said.
    pub(super) fn compare(
        &mut self,
        ours: &Tables,
        alarm: Duration,
        now: Instant,
    ) -> (Vec<TableKey>, Option<Said>) {
        if !self.compared {
            return (Vec::new(), None);
        }
        let mut before = std::mem::take(&mut self.differ);
        for (key, here, there) in ours.compare(&self.theirs) {
            let difference = match before.remove(&key) {
                Some(known) if known.here == here && known.there == there => known,
                Some(known) => Difference::new(known.since, here, there),
                None => Difference::new(now, here, there),
            };
            self.differ.insert(key, difference);
        }
        let mut ask = Vec::new();
        for (key, difference) in self.differ.iter_mut().take(ASKED_MAX) {
            if !std::mem::replace(&mut difference.asked, true) {
                ask.push(*key);
            }
        }
        let mut lasting = self
            .differ
            .iter()
            .filter(|(_, difference)| now.saturating_duration_since(difference.since) >= alarm);
        let said = match (lasting.next(), self.alarm) {
            (Some((key, difference)), false) => {
                let what = match difference.what.first() {
                    Some(what) => format!(": {what}"),
                    None => String::new(),
                };
                let more = match lasting.count() {
                    0 => String::new(),
                    more => format!(", and {more} more services"),
                };
                Some(Said::Differ(format!(
                    "has not chosen as this director does for {} s: {}{what}{more}; lvsadm sync shows what differs",
                    alarm.as_secs(),
                    key.service()
                )))
            }
            (None, true) => Some(Said::Alike(match self.differ.len() {
                0 => "chooses as this director does again".to_owned(),
                n => format!(
                    "chooses as this director does again, but for {n} services that have just changed"
                ),
            })),
            _ => None,
        };
        match said {
            Some(Said::Differ(_)) => self.alarm = true,
            Some(Said::Alike(_)) => self.alarm = false,
            None => {}
        }
        (ask, said)
    }

    /// Takes what a table that was asked for says, beside ours.
    pub(super) fn see(&mut self, theirs: &Table, ours: Option<&(Table, bool)>) {
        if let (Some(difference), Some((ours, ordered))) = (self.differ.get_mut(&theirs.key), ours)
        {
            let what = ours.differences(theirs, *ordered);
            // Nothing: it has changed since.
            difference.asked = !what.is_empty();
            difference.what = what.into();
        }
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

    /// How they compare.
    pub(super) fn info(&self, peer: SocketAddr, now: Instant) -> TablesInfo {
        let differ = self.differ.values().filter(|_| self.compared);
        let first = differ.clone().map(|difference| difference.since).min();
        TablesInfo {
            peer,
            state: self.state(),
            differ: differ.count() as u64,
            seconds: first.map_or(0, |at| now.saturating_duration_since(at).as_secs()),
        }
    }

    /// What differs.
    pub(super) fn differences(&self, now: Instant) -> Vec<TableDifference> {
        let differ = self.differ.iter().filter(|_| self.compared);
        let shown = differ.take(ASKED_MAX);
        shown
            .map(|(key, difference)| TableDifference {
                service: key.service().into(),
                seconds: now.saturating_duration_since(difference.since).as_secs(),
                what: difference.what.to_vec(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::{Control, Family, Forwarding, Options, ServerConfig, ServiceConfig, ServiceKey};

    use super::*;

    const ALARM: Duration = Duration::from_secs(30);

    /// A director with a service and a server of this weight.
    fn director(weight: i32) -> Control {
        let mut control = Control::new(Options::default());
        let key = ServiceKey::tcp(([198, 51, 100, 1], 80).into());
        let config = ServiceConfig::new(Family::V4, "mh");
        control.add_service(key, config, None).expect("a good one");
        let server = ServerConfig::new(weight, Forwarding::Nat);
        let (address, now) = (([10, 0, 0, 1], 80).into(), lvs_core::Instant::ZERO);
        let added = control.add_server(&key, address, &server, now);
        added.expect("a good one");
        control
    }

    fn tables(control: &Control) -> Tables {
        let mut all = Vec::new();
        control.tables_piece(TablesWalk::default(), PIECE, &mut all);
        Tables::new(all).0
    }

    /// What a peer of this weight tells.
    fn hear(comparison: &mut Comparison, known: &mut Tables, weight: i32) {
        let now = tables(&director(weight));
        for told in now.told_since(known, 1000) {
            comparison.hear(&told).expect("it is in order");
        }
        *known = now;
    }

    fn state(comparison: &Comparison, now: Instant) -> (TablesState, u64, u64) {
        let info = comparison.info(([192, 0, 2, 2], 1).into(), now);
        (info.state, info.differ, info.seconds)
    }

    #[test]
    fn a_difference_that_lasts_is_an_alarm_once() {
        let (ours, mut known) = (director(1), Tables::default());
        let own = tables(&ours);
        let begun = Instant::now();
        let at = |second| begun + Duration::from_secs(second);
        let mut it = Comparison::default();
        assert_eq!(it.begin([1; 16], true), None);
        assert_eq!(state(&it, at(0)).0, TablesState::Unknown);
        assert_eq!(it.compare(&own, ALARM, at(0)), (Vec::new(), None));
        hear(&mut it, &mut known, 1);
        assert_eq!(it.compare(&own, ALARM, at(0)), (Vec::new(), None));
        assert_eq!(state(&it, at(0)), (TablesState::Alike, 0, 0));

        // What differs shortly, and again, is no alarm.
        for second in [10, 30, 50] {
            hear(&mut it, &mut known, 2);
            assert_eq!(it.compare(&own, ALARM, at(second)).1, None);
            assert_eq!(it.compare(&own, ALARM, at(second + 15)).1, None);
            assert_eq!(state(&it, at(second + 15)), (TablesState::Differ, 1, 15));
            hear(&mut it, &mut known, 1);
            assert_eq!(it.compare(&own, ALARM, at(second + 16)).1, None);
        }
        // It is asked about once, and again when it is another difference, as old as it is.
        hear(&mut it, &mut known, 2);
        let (ask, _) = it.compare(&own, ALARM, at(100));
        assert_eq!(ask.len(), 1);
        assert!(it.compare(&own, ALARM, at(102)).0.is_empty());
        hear(&mut it, &mut known, 3);
        let (ask, _) = it.compare(&own, ALARM, at(104));
        let of = |control: &Control| {
            control
                .table_piece(&ask[0].service(), 0, PIECE)
                .expect("it")
        };
        let ((theirs, ..), (here, ordered, _)) = (of(&director(3)), of(&ours));
        it.see(&theirs, Some(&(here, ordered)));
        let shown = it.differences(at(110));
        assert_eq!(shown[0].what, ["10.0.0.1:80: weight: 1 here, 3 there"]);
        assert_eq!(shown[0].seconds, 10);
        assert_eq!(it.compare(&own, ALARM, at(129)).1, None);
        let Some(Said::Differ(text)) = it.compare(&own, ALARM, at(130)).1 else {
            panic!("it has lasted")
        };
        assert!(
            text.contains("for 30 s: TCP 198.51.100.1:80: 10.0.0.1:80: weight: 1 here, 3 there;"),
            "{text}"
        );
        assert_eq!(it.compare(&own, ALARM, at(132)).1, None, "it was said");
        assert_eq!(state(&it, at(132)), (TablesState::Alarm, 1, 32));

        // While nothing is told, nothing is known; what still differs then has differed all along.
        it.end();
        assert_eq!(state(&it, at(133)), (TablesState::Unknown, 0, 0));
        assert!(it.differences(at(133)).is_empty());
        assert_eq!(it.begin([1; 16], true), None);
        known = Tables::default();
        hear(&mut it, &mut known, 3);
        assert_eq!(it.compare(&own, ALARM, at(140)).1, None);
        assert_eq!(state(&it, at(140)), (TablesState::Alarm, 1, 40));
        hear(&mut it, &mut known, 1);
        let said = it.compare(&own, ALARM, at(142)).1;
        assert!(matches!(said, Some(Said::Alike(_))), "{said:?}");
        assert_eq!(state(&it, at(142)), (TablesState::Alike, 0, 0));
    }

    #[test]
    fn who_is_started_anew_or_is_older_is_compared_anew_or_not_at_all() {
        let own = tables(&director(1));
        let now = Instant::now();
        let mut it = Comparison::default();
        assert_eq!(it.begin([1; 16], true), None);
        // It has nothing, and says so.
        assert_eq!(it.hear(&[0]), Ok(true));
        it.compare(&own, ALARM, now);
        let later = now + ALARM;
        assert!(it.compare(&own, ALARM, later).1.is_some());
        assert_eq!(it.differences(later)[0].what, ["the service is here only"]);
        it.end();
        let said = it.begin([2; 16], true);
        assert!(matches!(said, Some(Said::Alike(_))), "{said:?}");
        assert_eq!(it.hear(&[0]), Ok(true));
        assert_eq!(it.compare(&own, ALARM, later).1, None);
        assert_eq!(state(&it, later), (TablesState::Differ, 1, 0));
        it.end();
        assert_eq!(it.begin([3; 16], false), None, "there was no alarm");
        assert_eq!(state(&it, later).0, TablesState::Older);
        it.end();
        assert_eq!(state(&it, later).0, TablesState::Unknown);
    }
}
