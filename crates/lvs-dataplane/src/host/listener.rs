//! The times of answers to multicast listener queries. An answer is sent after a random part of the
//! response time in the query, so that the listeners of a link do not all answer at once (RFC 3810
//! section 6.2, RFC 2710 section 4). The same query is answered at most once a second, regardless
//! of its sender.

use std::collections::HashMap;
use std::time::Duration;

use lvs_core::Instant;

use lvs_packet::mld::Query;
use lvs_packet::net::PortId;

/// Shortest interval between two answers to the same query.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest delay of an answer. A query may permit up to 140 minutes.
const LATEST: Duration = Duration::from_secs(10);

/// The port that received a query, and the query without its response time.
type Question = (PortId, Query);

/// Queries with answers that are due later, and recently answered ones. The caller passes only
/// queries for all groups and for groups of the dataplane's own addresses, which bounds their
/// number.
#[derive(Debug, Default)]
pub(super) struct Answers {
    due: HashMap<Question, Instant>,
    given: HashMap<Question, Instant>,
}

impl Answers {
    /// Records a query. `random` selects the moment of the answer within the query's response time.
    pub(super) fn ask(&mut self, port: PortId, query: Query, now: Instant, random: u64) {
        let within = Duration::from_millis(query.within_ms.into()).min(LATEST);
        let nanos = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
        let delay = Duration::from_nanos(random % nanos.saturating_add(1));
        let question = (port, query.without_time());
        self.given.retain(|_, given| now < *given + AGAIN);
        let not_before = self.given.get(&question).map(|&given| given + AGAIN);
        let at = (now + delay).max(not_before.unwrap_or(now));
        let due = self.due.entry(question).or_insert(at);
        *due = at.min(*due);
    }

    /// Removes and returns the queries whose answers are due.
    pub(super) fn take(&mut self, now: Instant) -> Vec<Question> {
        let due = self.due.iter().filter(|&(_, &at)| at <= now);
        let due: Vec<Question> = due.map(|(&question, _)| question).collect();
        for question in &due {
            self.due.remove(question);
            self.given.insert(*question, now);
        }
        due
    }

    /// The time of the next answer; `None` if no query waits for an answer.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.values().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: PortId = PortId(1);

    fn query(within_ms: u32) -> Query {
        Query {
            group: None,
            v1: false,
            within_ms,
        }
    }

    #[test]
    fn mld_answer_is_delayed_within_the_response_time() {
        let mut answers = Answers::default();
        let now = Instant::from_secs(10);
        answers.ask(PORT, query(1000), now, 700_000_000);
        assert_eq!(answers.take(now), []);
        let at = now + Duration::from_millis(700);
        assert_eq!(answers.next(), Some(at));
        assert_eq!(answers.take(at).len(), 1);
        assert_eq!((answers.take(at).len(), answers.next()), (0, None));
    }

    #[test]
    fn flood_of_mld_queries_is_answered_once_a_second() {
        let mut answers = Answers::default();
        let (mut now, mut given) = (Instant::from_secs(10), 0);
        for n in 0..10_000 {
            answers.ask(PORT, query(0), now, n);
            given += answers.take(now).len();
            now = now + Duration::from_millis(1);
        }
        assert_eq!(given, 10);
        assert!(answers.due.len() <= 1 && answers.given.len() <= 1);
    }
}
