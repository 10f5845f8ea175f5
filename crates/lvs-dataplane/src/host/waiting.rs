//! Configured interfaces that do not exist yet or cannot be used. The keeper uses them as soon as
//! it can.

use std::collections::BTreeMap;

use lvs_core::Instant;
use lvs_core::api::Waiting;
use tracing::warn;

use super::setup::Setup;
use super::view::Tables;

#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Existing interfaces that could not be opened, and the errors.
    failed: BTreeMap<String, String>,
    /// The logged condition of each interface, and the time at which it was found.
    known: BTreeMap<String, (Instant, Waiting)>,
}

impl Waits {
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The interfaces that the keeper waits for, each with the reason and the fix.
    pub(super) fn all(&self, now: Instant) -> impl Iterator<Item = Waiting> {
        self.known.values().map(move |(since, waiting)| Waiting {
            since: Some(now.saturating_since(*since).as_secs()),
            ..waiting.clone()
        })
    }

    /// Records that an interface could not be opened. The keeper tries again.
    pub(super) fn has_failed(&mut self, name: &str, error: String) {
        self.failed.insert(name.to_owned(), error);
    }

    /// Records that an interface was opened.
    pub(super) fn was_opened(&mut self, name: &str) {
        self.failed.remove(name);
    }

    /// Updates the list of interfaces that the keeper waits for, and logs the new ones.
    pub(super) fn follow(&mut self, setup: &Setup, tables: &Tables, routed: bool, time: Instant) {
        let state = &tables.state;
        self.failed
            .retain(|name, _| state.link_by_name(name).is_some());
        let mut now = BTreeMap::new();
        for name in setup.interfaces.iter().chain(&setup.xdp) {
            let found = self.why_unused(name, tables, routed);
            now.extend(found.map(|why| (name.clone(), why)));
        }
        if setup.interfaces.is_empty() {
            let failed = self.failed.iter();
            now.extend(failed.map(|(name, error)| (name.clone(), unusable(name, error))));
        }
        self.take(now, time);
    }

    /// Returns why a configured interface is not in use; `None` if it is in use.
    fn why_unused(&self, name: &str, tables: &Tables, routed: bool) -> Option<Waiting> {
        let link = tables.state.link_by_name(name);
        if routed {
            return match link {
                Some(link) if link.up => None,
                Some(_) => Some(waiting(
                    Waiting::DOWN,
                    format!("the configured interface {name} is down"),
                    format!("ip link set {name} up"),
                )),
                None => Some(missing(name)),
            };
        }
        let mut used = tables.interfaces();
        if used.any(|(_, known)| *known.name == *name) {
            return None;
        }
        let Some(link) = link else {
            return Some(missing(name));
        };
        if !link.is_arp_capable() {
            return Some(waiting(
                Waiting::NOT_ETHERNET,
                format!("the configured interface {name} is not an Ethernet interface"),
                format!("remove {name} from the configured interfaces"),
            ));
        }
        let error = self.failed.get(name);
        Some(match error {
            Some(error) => unusable(name, error),
            None => waiting(
                Waiting::UNUSED,
                format!("the configured interface {name} may be down"),
                format!("ip link set {name} up"),
            ),
        })
    }

    /// Replaces the list of interfaces that the keeper waits for, and logs the new ones.
    fn take(&mut self, now: BTreeMap<String, Waiting>, time: Instant) {
        let before = std::mem::take(&mut self.known);
        for (name, waiting) in now {
            let known = before.get(&name).filter(|(_, known)| *known == waiting);
            let since = known.map_or(time, |(since, _)| *since);
            if known.is_none() {
                let Waiting {
                    code, what, fix, ..
                } = &waiting;
                warn!(code, "{what}. To do: {fix}");
            }
            self.known.insert(name, (since, waiting));
        }
    }
}

fn waiting(code: &str, what: String, fix: impl Into<String>) -> Waiting {
    Waiting {
        code: code.to_owned(),
        what,
        fix: fix.into(),
        since: None,
    }
}

fn missing(name: &str) -> Waiting {
    waiting(
        Waiting::MISSING,
        format!("this host does not have the configured interface {name}"),
        format!(
            "`ip -br link` lists the interfaces of this host; create {name}, or correct the name (--interface, --xdp; \
             [dataplane] in lvsd's file) and restart the dataplane"
        ),
    )
}

fn unusable(name: &str, error: &str) -> Waiting {
    waiting(
        Waiting::UNUSABLE,
        format!("the interface {name} cannot be used: {error}"),
        "the dataplane tries again every second; correct the problem that the error names",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_condition_reports_seconds_since_it_was_found() {
        let mut waits = Waits::default();
        let down = |name: &str| {
            let what = format!("the configured interface {name} is down");
            (name.to_owned(), waiting(Waiting::DOWN, what, ""))
        };
        let ages = |waits: &Waits, now| {
            let all = waits.all(Instant::from_secs(now));
            all.map(|waiting| waiting.since).collect::<Vec<_>>()
        };
        waits.take([down("eth0")].into(), Instant::from_secs(10));
        waits.take([down("eth0"), down("eth1")].into(), Instant::from_secs(13));
        assert_eq!(ages(&waits, 15), [Some(5), Some(2)]);
        // The interface was removed in the meantime, and is down again.
        let other = ("eth0".to_owned(), missing("eth0"));
        waits.take([other].into(), Instant::from_secs(16));
        waits.take([down("eth0")].into(), Instant::from_secs(20));
        assert_eq!(ages(&waits, 21), [Some(1)]);
    }
}
