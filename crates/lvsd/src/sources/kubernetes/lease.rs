//! The Lease that permits one director at a time to write addresses (pure functions).
//!
//! Because clocks of directors may differ, a director takes over the Lease only after it has not
//! seen a change for the Lease's duration by its own clock.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use super::objects::{Lease, LeaseSpec};

/// Time without a renewal after which another director may take over.
pub(super) const LASTS: Duration = Duration::from_secs(15);
/// Interval at which the Lease is checked.
pub(super) const PERIOD: Duration = Duration::from_secs(4);
/// Time after a renewal for which this director may write, shorter than [`LASTS`].
const WRITES: Duration = Duration::from_secs(10);
/// Maximum accepted duration of a Lease in seconds.
const LONGEST: u32 = 300;

/// This director's view of the Lease.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// Latest version that this director has read, and when it read that version first.
    seen: Option<(String, Instant)>,
    /// Latest version that this director wrote.
    written: Option<String>,
    /// Time until which this director may write.
    until: Option<Instant>,
    /// Director that holds the Lease, if it is known.
    pub(super) holder: Option<String>,
    /// Whether another director has the same name as this one.
    pub(super) twin: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Another director holds the Lease.
    Wait,
    /// Create the Lease, or write it over the version that was read.
    Write(Value),
}

impl Claim {
    /// Decides whether this director writes the Lease, which is `None` if it does not exist. `unix`
    /// is the time since 1970.
    pub(super) fn step(
        &mut self,
        lease: Option<&Lease>,
        (namespace, name): (&str, &str),
        me: &str,
        (now, unix): (Instant, Duration),
    ) -> Step {
        let spec = lease.map(|lease| lease.spec.clone()).unwrap_or_default();
        let version = lease.map(|lease| lease.metadata.resource_version.clone());
        let holder = spec
            .holder_identity
            .clone()
            .filter(|holder| !holder.is_empty());
        let version = version.unwrap_or_default();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => now,
        };
        self.seen = Some((version.clone(), since));
        let own = holder.as_deref() == Some(me);
        self.twin = own
            && self
                .written
                .as_ref()
                .is_some_and(|written| *written != version);
        let lasts = spec.lease_duration_seconds.unwrap_or(0).min(LONGEST);
        let ended = now.duration_since(since) >= Duration::from_secs(lasts.into());
        if holder.is_some() && !own && !ended {
            self.holder = holder;
            self.until = None;
            self.written = None;
            return Step::Wait;
        }
        Step::Write(body(namespace, name, me, (&spec, own), &version, unix))
    }

    /// Records that a request sent at `sent` has written the Lease.
    pub(super) fn won(&mut self, version: &str, me: &str, sent: Instant) {
        self.written = Some(version.to_owned());
        self.holder = Some(me.to_owned());
        self.until = Some(sent + WRITES);
    }

    /// Records that this director could not write the Lease, for example because another director
    /// wrote it first.
    pub(super) fn lost(&mut self) {
        self.until = None;
        self.written = None;
    }

    /// Whether this director may write addresses.
    pub(super) fn may_write(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

fn body(
    namespace: &str,
    name: &str,
    me: &str,
    (before, own): (&LeaseSpec, bool),
    version: &str,
    unix: Duration,
) -> Value {
    let now = micro_time(unix);
    let (acquired, transitions) = match own {
        true => (before.acquire_time.clone(), before.lease_transitions),
        false => {
            let changes = before.lease_transitions.unwrap_or(0).saturating_add(1);
            let first = before.renew_time.is_none();
            (None, Some(if first { 0 } else { changes }))
        }
    };
    let mut metadata = json!({ "namespace": namespace, "name": name });
    if !version.is_empty() {
        metadata["resourceVersion"] = version.into();
    }
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": LASTS.as_secs(),
            "acquireTime": acquired.unwrap_or_else(|| now.clone()),
            "renewTime": now,
            "leaseTransitions": transitions.unwrap_or(0),
        },
    })
}

/// Formats a time since 1970 as `2026-01-31T12:00:00`.
fn date_time(unix: Duration) -> String {
    let seconds = unix.as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // The computation uses years that begin in March, so that the leap day is the last day.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

/// Formats a time since 1970 as Kubernetes' `MicroTime`.
fn micro_time(unix: Duration) -> String {
    format!("{}.{:06}Z", date_time(unix), unix.subsec_micros())
}

/// Formats a time since 1970 as Kubernetes' `Time`.
pub(super) fn time(unix: Duration) -> String {
    format!("{}Z", date_time(unix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIX: Duration = Duration::from_secs(1_769_860_800);

    fn lease(holder: &str, version: &str) -> Lease {
        let mut lease = Lease::default();
        lease.metadata.resource_version = version.to_owned();
        lease.spec.holder_identity = Some(holder.to_owned());
        lease.spec.lease_duration_seconds = Some(15);
        lease.spec.renew_time = Some("2026-01-31T12:00:00.000000Z".to_owned());
        lease
    }

    fn step(claim: &mut Claim, lease: Option<&Lease>, now: Instant) -> Option<Value> {
        match claim.step(lease, ("lvsd", "lvsd"), "d1", (now, UNIX)) {
            Step::Wait => None,
            Step::Write(body) => Some(body),
        }
    }

    #[test]
    fn lease_times_have_the_format_of_kubernetes() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_769_860_800, "2026-01-31T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(time(Duration::from_secs(seconds)), text);
        }
        let micro = micro_time(Duration::new(1_769_860_800, 12_345_678));
        assert_eq!(micro, "2026-01-31T12:00:00.012345Z");
    }

    #[test]
    fn missing_lease_is_created() {
        let mut claim = Claim::default();
        let body = step(&mut claim, None, Instant::now()).unwrap();
        assert!(body["metadata"]["resourceVersion"].is_null());
        assert_eq!(body["spec"]["holderIdentity"], "d1");
        assert_eq!(body["spec"]["leaseTransitions"], 0);
    }

    #[test]
    fn lease_of_another_director_is_acquired_after_15_seconds_without_change() {
        let mut claim = Claim::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(step(&mut claim, Some(&lease("d2", "1")), begin), None);
        assert_eq!(claim.holder.as_deref(), Some("d2"));
        assert_eq!(step(&mut claim, Some(&lease("d2", "2")), at(14)), None);
        assert_eq!(step(&mut claim, Some(&lease("d2", "2")), at(28)), None);
        let body = step(&mut claim, Some(&lease("d2", "2")), at(29)).unwrap();
        assert_eq!(body["metadata"]["resourceVersion"], "2");
        assert_eq!(body["spec"]["leaseTransitions"], 1);
        // Another director has written the Lease first.
        claim.lost();
        assert_eq!(step(&mut claim, Some(&lease("d3", "3")), at(30)), None);
        assert!(!claim.may_write(at(30)));
    }

    #[test]
    fn permission_to_write_ends_before_another_director_can_acquire_the_lease() {
        let mut claim = Claim::default();
        let sent = Instant::now();
        claim.won("7", "d1", sent);
        assert!(claim.may_write(sent + Duration::from_secs(9)));
        assert!(!claim.may_write(sent + WRITES) && WRITES < LASTS);
    }

    #[test]
    fn lease_with_own_name_and_unexpected_version_reports_duplicate_name() {
        let mut claim = Claim::default();
        let now = Instant::now();
        // After a restart, this director's own name in the Lease does not count as a duplicate.
        assert!(step(&mut claim, Some(&lease("d1", "5")), now).is_some() && !claim.twin);
        claim.won("6", "d1", now);
        assert!(step(&mut claim, Some(&lease("d1", "6")), now).is_some() && !claim.twin);
        assert!(step(&mut claim, Some(&lease("d1", "8")), now).is_some() && claim.twin);
    }
}
