//! Virtual addresses that are announced by routes: each has one on the engine's device exactly
//! while it is to be announced, and a routing daemon of the host passes that on. The kernel removes
//! the routes with the device, however the engine ends.
//!
//! What is wanted is said again and again. An engine that is not told any more goes on, because
//! nothing may be wrong but the program that tells it; but nobody looks any more whether its
//! servers live. So others are preferred soon, and nothing is announced after a time that whoever
//! tells it has chosen.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use lvs_core::Instant;
use lvs_core::api::{AnnounceSpec, AnnouncedVip, Standing};
use tracing::{error, info, warn};

use super::keeper::Keeper;

/// How long nobody may have said what is wanted before others are preferred.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take the kernel to tell of a route.
const SETTLES: Duration = Duration::from_secs(1);

/// Virtual addresses that are announced by routes.
#[derive(Debug, Default)]
pub(super) struct Announced {
    all: BTreeMap<IpAddr, Vip>,
    heard: Instant,
    hold: Duration,
    /// It was said in the log that nobody says what is wanted, and what follows from that.
    limit: Option<Standing>,
}

#[derive(Debug, Default)]
struct Vip {
    wanted: Standing,
    /// The route that there is, and when it was made so.
    route: Standing,
    since: Instant,
    trouble: String,
}

impl Announced {
    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.all.keys().copied()
    }

    pub(super) fn has(&self, addr: IpAddr) -> bool {
        self.all.contains_key(&addr)
    }

    /// The most that may be announced, `ago` after somebody has said what is wanted.
    fn limit(&self, ago: Duration) -> Standing {
        match ago {
            _ if ago >= self.hold => Standing::Withdrawn,
            _ if ago >= PATIENCE => Standing::Leaving,
            _ => Standing::Announced,
        }
    }
}

impl Keeper {
    /// Takes what is wanted.
    pub(crate) fn announce(&mut self, spec: &AnnounceSpec) {
        let mut before = std::mem::take(&mut self.announced.all);
        let mut others = false;
        for vip in &spec.addresses {
            let mut known = before.remove(&vip.address).unwrap_or_else(|| {
                others = true;
                Vip::default()
            });
            if let Some(standing) = vip.standing {
                known.wanted = standing;
            }
            self.announced.all.insert(vip.address, known);
        }
        for (addr, mut gone) in before {
            others = true;
            self.set_route(addr, &mut gone, Standing::Withdrawn);
        }
        self.announced.heard = self.engine.now();
        self.announced.hold = Duration::from_secs(spec.hold.into());
        if others {
            // First: nothing may come for which nobody is there.
            self.update_or_warn();
        }
        self.follow_announced();
    }

    /// Brings the routes in line with what is wanted, and with how long ago that was said.
    pub(super) fn follow_announced(&mut self) {
        if self.announced.all.is_empty() {
            return;
        }
        let ago = self.engine.now().saturating_since(self.announced.heard);
        let limit = self.announced.limit(ago);
        self.complain(limit, ago);
        let mut all = std::mem::take(&mut self.announced.all);
        for (&addr, vip) in &mut all {
            let standing = vip.wanted.min(limit);
            self.set_route(addr, vip, standing);
        }
        self.announced.all = all;
    }

    /// Says once that nobody says what is wanted.
    fn complain(&mut self, limit: Standing, ago: Duration) {
        let said = self.announced.limit.replace(limit);
        if said.unwrap_or(Standing::Announced) == limit {
            return;
        }
        let ago = ago.as_secs();
        match limit {
            Standing::Announced => info!("somebody says again which addresses are to be announced"),
            Standing::Leaving => warn!(
                "nobody has said for {ago} s which addresses are to be announced (is lvsd gone?): other directors are to be \
                 preferred; {} s after it was last said, none is announced any more",
                self.announced.hold.as_secs()
            ),
            Standing::Withdrawn => error!(
                "nobody has said for {ago} s which addresses are to be announced: no longer announcing any"
            ),
        }
    }

    fn set_route(&mut self, addr: IpAddr, vip: &mut Vip, standing: Standing) {
        let device = self.device();
        let now = self.engine.now();
        // The kernel may not have told yet of what was just done.
        let fresh = now.saturating_since(vip.since) < SETTLES;
        let there = vip.route != Standing::Withdrawn && (fresh || self.has_route(addr, device));
        if there && vip.route == standing {
            return;
        }
        let done = match standing.protocol() {
            Some(protocol) => self.netlink.announce_route(addr, device, protocol, there),
            None if vip.route == Standing::Withdrawn => Ok(()),
            None => self.netlink.delete_host_route(addr, device),
        };
        match done {
            Ok(()) => {
                if vip.route != standing {
                    info!("{addr} is {}", standing.name());
                }
                (vip.route, vip.since) = (standing, now);
                vip.trouble.clear();
            }
            Err(error) => {
                if !there {
                    vip.route = Standing::Withdrawn;
                }
                let text = error.to_string();
                if vip.trouble != text {
                    error!("{addr} is not {}: {text}", standing.name());
                    vip.trouble = text;
                }
            }
        }
    }

    /// Whether the way to `addr` leads over the device, as far as that is known: where the host has
    /// the address itself, its own table says another one.
    fn has_route(&self, addr: IpAddr, device: u32) -> bool {
        let state = &self.tables.state;
        state.is_local(addr) || state.lookup(addr).is_none_or(|hit| hit.oif == device)
    }

    /// The engine ends.
    pub(super) fn withdraw_all(&mut self) {
        for (addr, mut vip) in std::mem::take(&mut self.announced.all) {
            self.set_route(addr, &mut vip, Standing::Withdrawn);
        }
    }

    /// The routes that there are, and how many seconds ago somebody said which there should be.
    pub(crate) fn announcements(&self) -> (Vec<AnnouncedVip>, Option<u64>) {
        let all = self
            .announced
            .all
            .iter()
            .map(|(&address, vip)| AnnouncedVip {
                address,
                standing: vip.route,
                trouble: vip.trouble.clone(),
            });
        let ago = self.engine.now().saturating_since(self.announced.heard);
        let any = !self.announced.all.is_empty();
        (all.collect(), any.then_some(ago.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_watches_is_left_to_others_and_then_withdrawn() {
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
