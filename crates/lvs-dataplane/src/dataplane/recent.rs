//! The recent part of the counters of packets by reason: five minutes, and the time of the last
//! change.
//!
//! A thread takes a sample every ten seconds. Its size depends on the number of reasons only.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, thread};

use lvs_core::api::ReasonCount;

/// Interval between two samples.
const PERIOD: Duration = Duration::from_secs(10);
/// Duration of the period whose counts are recent.
const WINDOW: Duration = Duration::from_secs(300);
/// Number of samples of the recent time, including one at its start.
const SAMPLES: usize = 31;

/// Action and name of a reason.
type Name = (String, String);

/// The samples of all counters.
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// The counts that were not 0, oldest first.
    samples: VecDeque<(Instant, BTreeMap<Name, u64>)>,
    /// The time of the last sample in which a counter differed from the previous sample.
    changed: BTreeMap<Name, Instant>,
}

impl Recent {
    /// Records a sample.
    pub(super) fn sample(&mut self, reasons: &[ReasonCount], now: Instant) {
        let counted = reasons.iter().filter(|reason| reason.count > 0);
        let counts: BTreeMap<Name, u64> = counted.map(|one| (name(one), one.count)).collect();
        let last = self.samples.back();
        for (name, count) in &counts {
            if last.and_then(|(_, counts)| counts.get(name)) != Some(count) {
                self.changed.insert(name.clone(), now);
            }
        }
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back((now, counts));
    }

    /// Sets the recent part of these counts. During the first five minutes, the whole count is
    /// recent.
    pub(super) fn apply(&self, reasons: &mut [ReasonCount], now: Instant) {
        let old = |(at, _): &&(Instant, _)| now.saturating_duration_since(*at) >= WINDOW;
        let before = self.samples.iter().rev().find(old);
        let last = self.samples.back();
        for reason in reasons {
            let name = name(reason);
            let of = |sample: Option<&(Instant, BTreeMap<Name, u64>)>| {
                sample.and_then(|(_, counts)| counts.get(&name).copied())
            };
            reason.recent = Some(reason.count.saturating_sub(of(before).unwrap_or(0)));
            let is_new = reason.count > of(last).unwrap_or(0);
            reason.ago = match self.changed.get(&name) {
                _ if is_new => Some(0),
                Some(&at) => Some(now.saturating_duration_since(at).as_secs()),
                None => None,
            };
        }
    }
}

fn name(reason: &ReasonCount) -> Name {
    (reason.action.clone(), reason.reason.clone())
}

/// Starts a thread that calls `sample` every ten seconds. The thread ends when the sender is
/// dropped.
pub(super) fn start(sample: impl Fn() + Send + 'static) -> io::Result<Sender<()>> {
    let (sender, receiver) = channel();
    let thread = thread::Builder::new().name("lvs-samples".to_owned());
    thread.spawn(move || run(sample, &receiver))?;
    Ok(sender)
}

fn run(sample: impl Fn(), sender: &Receiver<()>) {
    while sender.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        sample();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(count: u64) -> ReasonCount {
        ReasonCount {
            action: "drop".to_owned(),
            reason: "no_server".to_owned(),
            count,
            recent: None,
            ago: None,
            help: String::new(),
            fix: String::new(),
        }
    }

    #[test]
    fn packets_older_than_five_minutes_are_not_recent() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut recent = Recent::default();
        let shown = |recent: &Recent, count, seconds| {
            let mut reasons = [reason(count)];
            recent.apply(&mut reasons, at(seconds));
            (reasons[0].recent, reasons[0].ago)
        };
        assert_eq!(shown(&recent, 0, 0), (Some(0), None));
        assert_eq!(shown(&recent, 7, 1), (Some(7), Some(0)));
        for sample in 1..100 {
            recent.sample(&[reason(7)], at(10 * sample));
        }
        assert_eq!(recent.samples.len(), SAMPLES);
        assert_eq!(shown(&recent, 7, 995), (Some(0), Some(985)));
        assert_eq!(shown(&recent, 9, 995), (Some(2), Some(0)));
        recent.sample(&[reason(9)], at(1000));
        assert_eq!(shown(&recent, 9, 1009), (Some(2), Some(9)));
    }

    #[test]
    fn packets_of_the_first_minutes_are_recent() {
        let begun = Instant::now();
        let mut recent = Recent::default();
        recent.sample(&[reason(3)], begun + Duration::from_secs(10));
        let mut reasons = [reason(5)];
        recent.apply(&mut reasons, begun + Duration::from_secs(200));
        assert_eq!(reasons[0].recent, Some(5));
    }
}
