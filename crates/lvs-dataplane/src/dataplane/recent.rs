//! Numbers of packets in the last five minutes by reason, and the times of the first and the last
//! packet.
//!
//! A thread samples the counters every ten seconds. The memory for samples depends only on the
//! number of reasons.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{io, thread};

use lvs_core::Instant;
use lvs_core::api::ReasonCount;
use lvs_core::recent::{RecentCount, RecentCounter};

/// Interval between two samples.
const PERIOD: Duration = Duration::from_secs(10);

type Name = (String, String);

/// The recent counts of each reason, up to the last sample.
#[derive(Debug, Default)]
pub(super) struct Recent(BTreeMap<Name, RecentCounter>);

impl Recent {
    pub(super) fn sample(&mut self, reasons: &[ReasonCount], now: Instant) {
        for reason in reasons.iter().filter(|reason| reason.packets.count > 0) {
            let counter = self.0.entry(name(reason)).or_default();
            counter.add(reason.packets.count.saturating_sub(counter.count()), now);
        }
    }

    /// Sets the recent counts of each reason, which include packets since the last sample.
    pub(super) fn apply(&self, reasons: &mut [ReasonCount], now: Instant) {
        for reason in reasons {
            let mut counter = self.0.get(&name(reason)).cloned().unwrap_or_default();
            let count = reason.packets.count;
            counter.add(count.saturating_sub(counter.count()), now);
            reason.packets = RecentCount {
                count,
                ..counter.at(now)
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
            packets: RecentCount {
                count,
                ..RecentCount::default()
            },
            help: String::new(),
            fix: String::new(),
        }
    }

    #[test]
    fn packets_older_than_five_minutes_are_not_recent() {
        let at = Instant::from_secs;
        let mut recent = Recent::default();
        let shown = |recent: &Recent, count, seconds| {
            let mut reasons = [reason(count)];
            recent.apply(&mut reasons, at(seconds));
            (reasons[0].packets.recent, reasons[0].packets.ago)
        };
        assert_eq!(shown(&recent, 0, 0), (0, None));
        assert_eq!(shown(&recent, 7, 1), (7, Some(0)));
        for sample in 1..100 {
            recent.sample(&[reason(7)], at(10 * sample));
        }
        assert_eq!(recent.0.len(), 1);
        assert_eq!(shown(&recent, 7, 995), (0, Some(985)));
        assert_eq!(shown(&recent, 9, 995), (2, Some(0)));
        recent.sample(&[reason(9)], at(1000));
        assert_eq!(shown(&recent, 9, 1009), (2, Some(9)));
    }

    #[test]
    fn packets_of_the_first_minutes_after_start_are_recent() {
        let at = Instant::from_secs;
        let mut recent = Recent::default();
        recent.sample(&[reason(3)], at(10));
        let mut reasons = [reason(5)];
        recent.apply(&mut reasons, at(200));
        let packets = reasons[0].packets;
        assert_eq!((packets.recent, packets.last_minute), (5, 2));
        assert_eq!((packets.since, packets.ago), (Some(190), Some(0)));
    }
}
