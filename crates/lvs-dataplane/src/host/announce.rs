//! Virtual addresses that are announced by routes. While an address is announced, the dataplane's
//! device has a route to it, which a routing daemon of the host announces. The kernel removes the
//! routes with the device, even if the dataplane is killed.
//!
//! The controller (lvsd) sets the addresses repeatedly. Without updates, the dataplane keeps the
//! routes at first, because perhaps only the controller has failed. But without the controller, no
//! health check runs: after [`PATIENCE`], routers prefer the peers of this director, and after a
//! time that the controller has set, the dataplane withdraws the routes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::api::{AnnounceSpec, AnnouncedVip, Standing};
use tracing::{error, info, warn};

use crate::netlink::{NetState, Netlink};

/// Time without an update after which routers prefer the peers of this director.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest time until the kernel reports a new route.
const SETTLES: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Announced {
    all: BTreeMap<IpAddr, Vip>,
    /// The time of the last [`set`](Self::set).
    heard: Instant,
    /// Time without an update after which all routes are withdrawn.
    hold: Duration,
    /// The limit of the routes' preference that was last logged.
    limit: Option<Standing>,
}

#[derive(Debug, Default)]
struct Vip {
    wanted: Standing,
    /// The route that the dataplane has set.
    route: Standing,
    /// The time at which the route was set.
    since: Instant,
    trouble: String,
}

/// Access to the routes of the dataplane's device.
pub(super) struct Routes<'a> {
    pub(super) device: u32,
    pub(super) now: Instant,
    pub(super) state: &'a NetState,
    pub(super) netlink: &'a mut Netlink,
}

impl Routes<'_> {
    /// Whether the kernel's route to `addr` uses the device. Also true if the host itself has the
    /// address: the look-up then finds the route in the local table instead.
    fn has(&self, addr: IpAddr) -> bool {
        let hit = self.state.lookup(addr);
        self.state.is_local(addr) || hit.is_some_and(|hit| hit.oif == self.device)
    }

    fn set(&mut self, addr: IpAddr, vip: &mut Vip, standing: Standing) {
        // The kernel may not have reported the last change yet.
        let fresh = self.now.saturating_since(vip.since) < SETTLES;
        let there = vip.route != Standing::Withdrawn && (fresh || self.has(addr));
        if there && vip.route == standing {
            return;
        }
        let done = match standing.protocol() {
            Some(protocol) => self
                .netlink
                .announce_route(addr, self.device, protocol, there),
            None if vip.route == Standing::Withdrawn => Ok(()),
            None => self.netlink.delete_host_route(addr, self.device),
        };
        match done {
            Ok(()) => {
                if vip.route != standing {
                    info!(
                        "the announcement of {addr} has the new state {}",
                        standing.name()
                    );
                }
                (vip.route, vip.since) = (standing, self.now);
                vip.trouble.clear();
            }
            Err(error) => {
                if !there {
                    vip.route = Standing::Withdrawn;
                }
                let text = error.to_string();
                if vip.trouble != text {
                    error!(
                        "the announcement of {addr} cannot change to the state {}: {text}",
                        standing.name()
                    );
                    vip.trouble = text;
                }
            }
        }
    }
}

impl Announced {
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.all.keys().copied()
    }

    pub(super) fn has(&self, addr: IpAddr) -> bool {
        self.all.contains_key(&addr)
    }

    /// Returns the highest permitted preference of a route if the last update is `ago` old.
    fn limit(&self, ago: Duration) -> Standing {
        match ago {
            _ if ago >= self.hold => Standing::Withdrawn,
            _ if ago >= PATIENCE => Standing::Leaving,
            _ => Standing::Announced,
        }
    }

    /// Replaces the list of addresses, and withdraws the routes of removed addresses. Returns true
    /// if an address was added or removed. The caller then calls [`follow`](Self::follow).
    pub(super) fn set(&mut self, spec: &AnnounceSpec, routes: &mut Routes<'_>) -> bool {
        let mut before = std::mem::take(&mut self.all);
        let mut others = false;
        for vip in &spec.addresses {
            let mut known = before.remove(&vip.address).unwrap_or_else(|| {
                others = true;
                Vip::default()
            });
            if let Some(standing) = vip.standing {
                known.wanted = standing;
            }
            self.all.insert(vip.address, known);
        }
        for (addr, mut gone) in before {
            others = true;
            routes.set(addr, &mut gone, Standing::Withdrawn);
        }
        self.heard = routes.now;
        self.hold = Duration::from_secs(spec.hold.into());
        others
    }

    /// Sets the routes according to the addresses and the time since the last update.
    pub(super) fn follow(&mut self, routes: &mut Routes<'_>) {
        if self.all.is_empty() {
            return;
        }
        let ago = routes.now.saturating_since(self.heard);
        let limit = self.limit(ago);
        self.complain(limit, ago);
        for (&addr, vip) in &mut self.all {
            let standing = vip.wanted.min(limit);
            routes.set(addr, vip, standing);
        }
    }

    /// Logs each change of the limit, because updates are missing or arrive again.
    fn complain(&mut self, limit: Standing, ago: Duration) {
        let previous = self.limit.replace(limit);
        if previous.unwrap_or(Standing::Announced) == limit {
            return;
        }
        let ago = ago.as_secs();
        match limit {
            Standing::Announced => info!("lvsd again renews the list of addresses to announce"),
            Standing::Leaving => warn!(
                "the list of addresses to announce was not renewed for {ago} s (is lvsd running?): other directors are preferred now; {} s after the last renewal, no address is announced",
                self.hold.as_secs()
            ),
            Standing::Withdrawn => error!(
                "the list of addresses to announce was not renewed for {ago} s (is lvsd running?): no address is announced now"
            ),
        }
    }

    pub(super) fn withdraw_all(&mut self, routes: &mut Routes<'_>) {
        for (addr, mut vip) in std::mem::take(&mut self.all) {
            routes.set(addr, &mut vip, Standing::Withdrawn);
        }
    }

    /// The announced addresses and their routes, and the seconds since the last update; `None` for
    /// the seconds if no address is announced.
    pub(super) fn report(&self, now: Instant) -> (Vec<AnnouncedVip>, Option<u64>) {
        let all = self.all.iter().map(|(&address, vip)| AnnouncedVip {
            address,
            standing: vip.route,
            trouble: vip.trouble.clone(),
        });
        let ago = now.saturating_since(self.heard);
        (
            all.collect(),
            (!self.all.is_empty()).then_some(ago.as_secs()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_route_without_renewal_is_deprioritised_then_withdrawn() {
        let announced = Announced {
            hold: Duration::from_secs(600),
            ..Announced::default()
        };
        let limit = |seconds| announced.limit(Duration::from_secs(seconds));
        assert_eq!(limit(9), Standing::Announced);
        assert_eq!(limit(10), Standing::Leaving);
        assert_eq!(limit(599), Standing::Leaving);
        assert_eq!(limit(600), Standing::Withdrawn);
        let short = Announced {
            hold: Duration::from_secs(5),
            ..Announced::default()
        };
        assert_eq!(short.limit(Duration::from_secs(5)), Standing::Withdrawn);
    }
}
