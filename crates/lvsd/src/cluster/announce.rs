//! Announces virtual addresses by routes: a thread sends addresses and their preference to the
//! dataplane, the dataplane sets routes, and a routing daemon announces them.
//!
//! The thread queries the readiness of the dataplane ten times a second. If the daemon's loop
//! hangs, the thread stops sending, and the dataplane withdraws the addresses after some time.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lvs_api::daemon::AnnounceStatus;
use lvs_api::{Address, Client};
use lvs_core::api::{AnnounceSpec, AnnounceVip, AnnouncedVip, Announcements, Call, Standing};
use lvs_sys::lock;
use tokio::sync::{oneshot, watch};

use super::readiness::{self, Readiness};
use crate::clock::Now;
use crate::config::Announce;
use crate::watchdog::{Pulse, TURN_LIMIT};

/// Interval between two readiness queries.
const PERIOD: Duration = Duration::from_millis(100);
/// Interval at which an unchanged announcement is sent to the dataplane again.
const AGAIN: Duration = Duration::from_secs(1);

/// Whether a service can serve at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ability {
    /// The service's state is not yet known.
    Unknown,
    /// The service has its quorum.
    Quorum,
    /// The service lacks its quorum, and the sorry server serves.
    Sorry,
    /// The service lacks its quorum, and no sorry server serves.
    None,
}

/// The announcement of an address from the states of its services; `None` if a state is unknown, so
/// that the announcement stays unchanged. The address is announced if all services have their
/// quorum, and withdrawn if none can serve. Otherwise it stays announced, and routers prefer other
/// directors.
pub(crate) fn standing(services: &[Ability]) -> Option<Standing> {
    let all = |ability| services.iter().all(|one| *one == ability);
    if services.contains(&Ability::Unknown) {
        None
    } else if all(Ability::Quorum) {
        Some(Standing::Announced)
    } else if all(Ability::None) {
        Some(Standing::Withdrawn)
    } else {
        Some(Standing::Leaving)
    }
}

/// The start time of a maintenance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Began {
    /// At this time, in seconds since boot.
    At(u64),
    /// Before this boot, or at an unknown time.
    Earlier,
}

/// Announcements that the dataplane should make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WantedAnnouncements {
    pub(super) addresses: BTreeMap<IpAddr, Option<Standing>>,
    /// The start of the maintenance; `None` if the director is not in maintenance.
    pub(super) maintenance: Option<Began>,
    /// Whether the running dataplane lacks configured peers.
    pub(super) lacks_peers: bool,
    pub(super) settings: Announce,
}

impl WantedAnnouncements {
    /// The message to the dataplane at the time `now`, in seconds after boot.
    fn at(&self, now: u64, ready: bool) -> AnnounceSpec {
        let limit = match self.maintenance {
            _ if !ready => Standing::Withdrawn,
            Some(Began::At(since)) if now < since.saturating_add(self.settings.drain.as_secs()) => {
                Standing::Leaving
            }
            Some(_) => Standing::Withdrawn,
            None if self.lacks_peers => Standing::Leaving,
            None => Standing::Announced,
        };
        let vip = |(&address, &standing): (&IpAddr, &Option<Standing>)| AnnounceVip {
            address,
            standing: match (standing, limit) {
                (Some(standing), _) => Some(standing.min(limit)),
                (None, Standing::Withdrawn) => Some(limit),
                (None, _) => None,
            },
        };
        AnnounceSpec {
            addresses: self.addresses.iter().map(vip).collect(),
            hold: u32::try_from(self.settings.hold.as_secs()).unwrap_or(u32::MAX),
        }
    }
}

/// The state of the announcements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Announced {
    /// The readiness of the dataplane; `None` until the first query has ended.
    pub(super) readiness: Option<Readiness>,
    pub(super) vips: Vec<AnnouncedVip>,
    /// The reason why the addresses could not be sent to the dataplane; `None` if they were sent.
    pub(super) trouble: Option<String>,
}

impl Announced {
    /// The state of the announcements, as `lvsd status` shows it.
    pub(super) fn status(&self) -> AnnounceStatus {
        let readiness = self.readiness.clone().unwrap_or_else(Readiness::unknown);
        AnnounceStatus {
            ready: readiness.ready,
            waits_for: readiness.waits_for,
            addresses: self.vips.clone(),
            trouble: self.trouble.clone().unwrap_or_default(),
        }
    }
}

/// A change of the announcements that the dataplane has not confirmed yet.
#[derive(Debug)]
pub(crate) struct Unapplied {
    confirmed: oneshot::Receiver<()>,
    announced: watch::Receiver<Announced>,
}

impl Unapplied {
    /// Waits until the dataplane has applied the change, but at most for `limit`. Returns whether
    /// it has, and the present announcements.
    pub(crate) async fn wait(self, limit: Duration) -> (bool, AnnounceStatus) {
        let confirmed = tokio::time::timeout(limit, self.confirmed).await;
        let announced = self.announced.borrow().status();
        (matches!(confirmed, Ok(Ok(()))), announced)
    }
}

/// Input of the thread: new announcements, and the clients that wait for their confirmation.
#[derive(Debug, Default)]
struct Wish {
    /// The addresses to announce; `None` stops the thread.
    wanted: Option<WantedAnnouncements>,
    /// Notified when the dataplane has applied `wanted`.
    confirm: Vec<oneshot::Sender<()>>,
}

#[derive(Debug, Default)]
struct Door {
    wish: Mutex<Wish>,
    changed: Condvar,
}

impl Door {
    fn wish(&self) -> MutexGuard<'_, Wish> {
        lock(&self.wish)
    }
}

/// The thread that sends the announcements to the dataplane.
#[derive(Debug)]
pub(super) struct Announcer {
    door: Arc<Door>,
    pub(super) announced: watch::Receiver<Announced>,
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.door.wish().wanted = None;
        self.door.changed.notify_all();
    }
}

impl Announcer {
    /// Starts the thread that sends announcements to the dataplane at `address`, first those of
    /// `wish`. The thread sends none while `turns`, the heartbeat of the daemon's loop, is late. If
    /// the thread cannot be started, the error is logged and is part of the status.
    pub(super) fn start(address: Address, turns: Pulse, wish: WantedAnnouncements) -> Self {
        let (sender, announced) = watch::channel(Announced::default());
        let door = Arc::new(Door::default());
        door.wish().wanted = Some(wish);
        let thread = std::thread::Builder::new().name("lvsd-announce".to_owned());
        let failed = sender.clone();
        let its_door = door.clone();
        if let Err(error) = thread.spawn(move || run(&address, &turns, &its_door, &sender)) {
            let trouble = format!(
                "cannot start the thread lvsd-announce: {error}; no address is announced until lvsd is restarted"
            );
            tracing::error!("{trouble}");
            failed.send_modify(|announced| announced.trouble = Some(trouble));
        }
        Self { door, announced }
    }

    pub(super) fn wish(&self, wish: WantedAnnouncements) {
        let mut known = self.door.wish();
        if known.wanted.as_ref() != Some(&wish) {
            known.wanted = Some(wish);
            self.door.changed.notify_all();
        }
    }

    /// Returns a handle with which a client waits until the dataplane has applied the latest
    /// announcements.
    pub(super) fn unapplied(&self) -> Unapplied {
        let (sender, confirmed) = oneshot::channel();
        self.door.wish().confirm.push(sender);
        self.door.changed.notify_all();
        let announced = self.announced.clone();
        Unapplied {
            confirmed,
            announced,
        }
    }
}

fn run(address: &Address, turns: &Pulse, door: &Door, sender: &watch::Sender<Announced>) {
    let (mut asks, mut sender_client): (Option<Client>, Option<Client>) = (None, None);
    let mut reported: Option<(AnnounceSpec, Instant)> = None;
    let mut wish = door.wish().wanted.clone();
    let mut confirm: Vec<oneshot::Sender<()>> = Vec::new();
    let mut found = Announced::default();
    while let Some(wanted) = wish {
        let readiness = readiness::ask(address, &mut asks);
        let spec = wanted.at(Now::read().boot, readiness.ready);
        // A restarted dataplane has no announcements.
        let lost = found.readiness.as_ref() != Some(&readiness);
        let again = reported
            .as_ref()
            .is_none_or(|(before, at)| lost || *before != spec || at.elapsed() >= AGAIN);
        let mut applied = !again;
        if again && turns.age() < TURN_LIMIT && asks.is_some() {
            match say(address, &mut sender_client, &spec) {
                Ok(vips) => (found.vips, found.trouble) = (vips, None),
                Err(why) => (found.vips, found.trouble) = (Vec::new(), Some(why)),
            }
            applied = found.trouble.is_none();
            reported = found.trouble.is_none().then(|| (spec, Instant::now()));
        } else if asks.is_none() {
            found.vips.clear();
            found.trouble = Some("the dataplane does not answer".to_owned());
            (sender_client, reported) = (None, None);
        }
        found.readiness = Some(readiness);
        sender.send_if_modified(|known| {
            let new = *known != found;
            known.clone_from(&found);
            new
        });
        if applied {
            for sender in confirm.drain(..) {
                // The client may have closed its connection.
                let _ = sender.send(());
            }
        }
        let known = door.wish();
        let same =
            |known: &mut Wish| known.wanted.as_ref() == Some(&wanted) && known.confirm.is_empty();
        let waited = door.changed.wait_timeout_while(known, PERIOD, same);
        let mut known = waited.unwrap_or_else(PoisonError::into_inner).0;
        confirm.append(&mut known.confirm);
        // Clients that have closed their connections no longer wait.
        confirm.retain(|sender| !sender.is_closed());
        wish = known.wanted.clone();
    }
}

fn say(
    address: &Address,
    client: &mut Option<Client>,
    spec: &AnnounceSpec,
) -> Result<Vec<AnnouncedVip>, String> {
    if client.is_none() {
        let new = Client::connect_patiently(address, readiness::PATIENCE);
        *client = Some(new.map_err(|error| error.to_string())?);
    }
    let Some(connection) = client else {
        return Ok(Vec::new());
    };
    let answer = connection.call::<Announcements>(&Call::VipsAnnounce(spec.clone()));
    match answer {
        Ok(answer) => Ok(answer.announced),
        Err(error) => {
            *client = None;
            Err(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_announced_deprioritised_or_withdrawn_by_states_of_all_its_services() {
        use Ability::{None as Nobody, Quorum, Sorry, Unknown};
        for (services, expected) in [
            (vec![Quorum], Some(Standing::Announced)),
            (vec![Quorum, Quorum], Some(Standing::Announced)),
            (vec![Nobody], Some(Standing::Withdrawn)),
            (vec![Nobody, Nobody], Some(Standing::Withdrawn)),
            (vec![Quorum, Nobody], Some(Standing::Leaving)),
            (vec![Sorry], Some(Standing::Leaving)),
            (vec![Sorry, Nobody], Some(Standing::Leaving)),
            (vec![Quorum, Unknown], None),
        ] {
            assert_eq!(standing(&services), expected, "{services:?}");
        }
    }

    #[test]
    fn vips_are_deprioritised_or_withdrawn_if_director_is_in_maintenance_is_unready_or_lacks_peers()
    {
        let address: IpAddr = "192.0.2.10".parse().unwrap();
        let other: IpAddr = "192.0.2.11".parse().unwrap();
        let mut wish = WantedAnnouncements {
            addresses: [(address, Some(Standing::Announced)), (other, None)].into(),
            maintenance: None,
            lacks_peers: false,
            settings: Announce {
                drain: Duration::from_secs(5),
                hold: Duration::from_secs(600),
            },
        };
        let at = |wish: &WantedAnnouncements, now, ready| -> Vec<Option<Standing>> {
            let spec = wish.at(now, ready);
            assert_eq!(spec.hold, 600);
            spec.addresses.iter().map(|vip| vip.standing).collect()
        };
        assert_eq!(at(&wish, 100, true), [Some(Standing::Announced), None]);
        assert_eq!(at(&wish, 100, false), [Some(Standing::Withdrawn); 2]);
        wish.lacks_peers = true;
        assert_eq!(at(&wish, 100, true), [Some(Standing::Leaving), None]);
        assert_eq!(at(&wish, 100, false), [Some(Standing::Withdrawn); 2]);
        wish.maintenance = Some(Began::At(100));
        assert_eq!(at(&wish, 104, true), [Some(Standing::Leaving), None]);
        assert_eq!(at(&wish, 105, true), [Some(Standing::Withdrawn); 2]);
        wish.maintenance = Some(Began::Earlier);
        assert_eq!(at(&wish, 0, true), [Some(Standing::Withdrawn); 2]);
        wish.maintenance = Some(Began::At(100));
        wish.settings.drain = Duration::ZERO;
        assert_eq!(at(&wish, 100, true), [Some(Standing::Withdrawn); 2]);
    }
}
