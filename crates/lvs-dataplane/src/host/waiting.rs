//! Configured interfaces that the host does not have yet, or that cannot be used: the keeper waits
//! for them and uses them as soon as it can.

use std::collections::BTreeMap;

use lvs_core::api::Waiting;
use tracing::warn;

use super::keeper::Keeper;

/// Interfaces that the keeper waits for.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Interfaces that are there and could not be opened, and the error.
    failed: BTreeMap<String, String>,
    /// The conditions that were logged, by interface.
    known: BTreeMap<String, Waiting>,
}

impl Waits {
    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Waiting> {
        self.known.values()
    }

    /// An interface could not be opened; it is tried again.
    pub(super) fn has_failed(&mut self, name: &str, error: String) {
        self.failed.insert(name.to_owned(), error);
    }

    /// An interface was opened.
    pub(super) fn was_opened(&mut self, name: &str) {
        self.failed.remove(name);
    }

    /// Replaces the conditions, and logs those that are new.
    fn take(&mut self, now: BTreeMap<String, Waiting>) {
        for (name, waiting) in &now {
            if self.known.get(name) != Some(waiting) {
                let Waiting { code, what, fix } = waiting;
                warn!(code, "{what}. To do: {fix}");
            }
        }
        self.known = now;
    }
}

fn waiting(code: &str, what: String, fix: impl Into<String>) -> Waiting {
    Waiting {
        code: code.to_owned(),
        what,
        fix: fix.into(),
    }
}

impl Keeper {
    /// Compares the configured interfaces with those that are in use.
    pub(super) fn follow_waiting(&mut self) {
        let state = &self.tables.state;
        self.waits
            .failed
            .retain(|name, _| state.link_by_name(name).is_some());
        let mut now = BTreeMap::new();
        for name in self.setup.interfaces.iter().chain(&self.setup.xdp) {
            let found = self.why_unused(name);
            now.extend(found.map(|why| (name.clone(), why)));
        }
        if self.setup.interfaces.is_empty() {
            let failed = self.waits.failed.iter();
            now.extend(failed.map(|(name, error)| (name.clone(), unusable(name, error))));
        }
        self.waits.take(now);
    }

    /// Why a configured interface is not in use; `None` if it is.
    fn why_unused(&self, name: &str) -> Option<Waiting> {
        let link = self.tables.state.link_by_name(name);
        if self.interception.is_routed() {
            return match link {
                Some(link) if link.up => None,
                Some(_) => Some(waiting(
                    "interface_down",
                    format!("the configured interface {name} is down"),
                    format!("ip link set {name} up"),
                )),
                None => Some(missing(name)),
            };
        }
        let mut used = self.tables.interfaces();
        if used.any(|(_, known)| *known.name == *name) {
            return None;
        }
        let Some(link) = link else {
            return Some(missing(name));
        };
        if !link.is_arp_capable() {
            return Some(waiting(
                "interface_not_ethernet",
                format!("the configured interface {name} is not an Ethernet interface"),
                format!("leave {name} out of the configured interfaces"),
            ));
        }
        let error = self.waits.failed.get(name);
        Some(match error {
            Some(error) => unusable(name, error),
            None => waiting(
                "interface_unused",
                format!("the configured interface {name} is not in use"),
                format!("ip link set {name} up"),
            ),
        })
    }
}

fn missing(name: &str) -> Waiting {
    waiting(
        "interface_missing",
        format!("waiting for the configured interface {name}, which this host does not have"),
        format!(
            "`ip -br link` lists the interfaces of this host; create {name}, or correct the name (--interface, --xdp; \
             [dataplane] in lvsd's file) and restart the dataplane"
        ),
    )
}

fn unusable(name: &str, error: &str) -> Waiting {
    waiting(
        "interface_unusable",
        format!("the interface {name} cannot be used: {error}"),
        "the dataplane tries it again every second; end what the error names",
    )
}
