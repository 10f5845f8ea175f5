//! When queries of multicast listener discovery are answered: after a random part of the time that
//! they give, so that the listeners of a link do not answer all at once (RFC 3810 section 6.2, RFC
//! 2710 section 4), and never the same twice within a second, whoever asks how often.

use std::collections::HashMap;
use std::time::Duration;

use lvs_core::Instant;

use lvs_packet::mld::Query;
use lvs_packet::net::PortId;

/// How soon the same question is answered again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long an answer may be put off at most; queries may give up to 140 minutes.
const LATEST: Duration = Duration::from_secs(10);

/// What was asked, whoever asked how urgently.
type Question = (PortId, Query);

/// Answers that are due, and those that were given of late. As many at most as there are groups of
/// own addresses on each interface, twice, and two for all groups: who asks for others is not
/// heard.
#[derive(Debug, Default)]
pub(super) struct Answers {
    due: HashMap<Question, Instant>,
    given: HashMap<Question, Instant>,
}

impl Answers {
    /// Notes a query, which is to be answered within its time. `random` chooses the moment.
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

    /// The queries that are to be answered now.
    pub(super) fn take(&mut self, now: Instant) -> Vec<Question> {
        let due = self.due.iter().filter(|&(_, &at)| at <= now);
        let due: Vec<Question> = due.map(|(&question, _)| question).collect();
        for question in &due {
            self.due.remove(question);
            self.given.insert(*question, now);
        }
        due
    }

    /// When the next answer is due.
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
    fn an_answer_is_given_within_the_time_and_not_at_once() {
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
    fn a_flood_of_queries_is_answered_once_a_second() {
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
