//! Decides whether this director, one of several, owns the virtual addresses or announces them, and
//! stores whether it is in maintenance.
//!
//! ```text
//!  dataplane: ready? ──┐                        ┌──▶ track file ──▶ keepalived ──▶ VRRP
//!  quorum ─────────────┼──▶ track::Fitness ─────┘                       │
//!  maintenance ────────┘                                                │
//!  the dataplane has the virtual addresses ◀── fifo ◀────── notify FIFO ┘
//!
//!  the same, for each address ──▶ announce ──▶ routes of the dataplane ──▶ BIRD, FRR, ExaBGP
//! ```
//!
//! The messages of keepalived and the state of the dataplane arrive on channels that contain only
//! the latest value, so this module never waits for either of them.

mod announce;
mod fifo;
pub mod keepalived;
mod maintenance;
mod readiness;
mod track;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lvs_api::Address;
use lvs_api::daemon::{DirectorStatus, MaintenanceSpec, VrrpStatus};
use lvs_core::api::{self, AnnouncedVip};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior};

use crate::clock::{Moment, Now};
use crate::config::{Announce, Vrrp};
use crate::replace::replace;
use crate::watchdog::Pulse;
pub(crate) use announce::{Ability, Unapplied, standing};
use announce::{Announcer, Began, WantedAnnouncements};
use fifo::{Messages, State};
pub use maintenance::path as maintenance_path;
use readiness::Readiness;
use track::Fitness;

/// Interval between two checks of the track file.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The name of the VRRP instance in keepalived's configuration and messages.
pub const INSTANCE: &str = "lvs";

/// Values outside the configuration that VRRP, announcements and maintenance need.
#[derive(Clone, Debug)]
pub struct ClusterPaths {
    /// Address of the dataplane.
    pub dataplane: Address,
    /// Path of the file that records maintenance of the director.
    pub maintenance: PathBuf,
    /// Heartbeat of the daemon's loop.
    pub turns: Pulse,
}

/// A change that lvsd reports as an event.
#[derive(Debug)]
pub(crate) struct News {
    /// The kind of the event.
    pub(crate) event: &'static str,
    /// Code of the fault; empty without a fault.
    pub(crate) code: &'static str,
    /// The change as text.
    pub(crate) words: String,
}

/// State of this director: VRRP, announcements and maintenance.
#[derive(Debug)]
pub(crate) struct Cluster {
    places: Option<ClusterPaths>,
    maintenance: Option<maintenance::Kept>,
    quorum: bool,
    /// Configured peers that the running dataplane lacks; `None` until they are known.
    lacks: Option<Vec<SocketAddr>>,
    running: Option<Running>,
    /// The announcements of addresses that the dataplane should make.
    announces: WantedAnnouncements,
    announcer: Option<Announcer>,
    /// The announcements that events have reported.
    reported: Vec<AnnouncedVip>,
}

/// All values of [`VrrpStatus::state`].
pub(crate) fn vrrp_states() -> impl Iterator<Item = &'static str> {
    State::ALL.into_iter().map(State::word)
}

/// The state of a director with `[vrrp]`.
#[derive(Debug)]
struct Running {
    settings: Vrrp,
    messages: watch::Receiver<Messages>,
    readiness: watch::Receiver<Option<Readiness>>,
    listener: tokio::task::JoinHandle<()>,
    /// The state that keepalived reported last, to this daemon or an earlier one.
    state: State,
    written: Option<i16>,
    /// The error of the last write of the track file; `None` if it succeeded.
    trouble: Option<String>,
    /// When to check the track file.
    checks: Interval,
    /// Whether the last check of the track file found that another process had removed or changed
    /// the file.
    meddled: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Cluster {
    /// Creates the state of this director, with the maintenance that was stored.
    pub(crate) fn recall(places: Option<ClusterPaths>) -> Self {
        let kept = places.as_ref().map(|places| places.maintenance.as_path());
        Self {
            maintenance: kept.and_then(maintenance::recall),
            places,
            quorum: true,
            lacks: None,
            running: None,
            announces: WantedAnnouncements::default(),
            announcer: None,
            reported: Vec::new(),
        }
    }

    /// Applies `[vrrp]` of a loaded file. Marks this director as unfit in a track file that is no
    /// longer used.
    pub(crate) fn set(&mut self, vrrp: Option<&Vrrp>) {
        if self.running.as_ref().map(|running| &running.settings) == vrrp {
            return;
        }
        if let Some(before) = self.running.take()
            && vrrp.is_none_or(|vrrp| vrrp.track_file != before.settings.track_file)
        {
            before.put(track::UNFIT);
        }
        self.running = match (vrrp, &self.places) {
            (Some(vrrp), Some(places)) => Some(Running::start(vrrp, places)),
            _ => None,
        };
        self.follow();
    }

    /// Sets the announcements of addresses. `None` leaves an address unchanged, unless this director
    /// must withdraw all addresses.
    pub(crate) fn announce(
        &mut self,
        addresses: BTreeMap<IpAddr, Option<api::Standing>>,
        settings: Announce,
    ) {
        self.announces.addresses = addresses;
        self.announces.settings = settings;
        self.follow_announces();
    }

    fn follow_announces(&mut self) {
        self.announces.lacks_peers = !self.has_peers();
        self.announces.maintenance = self.maintenance.as_ref().map(|kept| {
            let began = kept.began.as_ref().and_then(Moment::of_this_boot);
            began.map_or(Began::Earlier, Began::At)
        });
        match (&self.announcer, &self.places) {
            // Even an empty list is sent, so that the dataplane withdraws all addresses.
            (Some(announcer), _) => announcer.wish(self.announces.clone()),
            // Until lvsd knows whether the dataplane lacks peers, the previous announcements stay.
            (None, Some(places))
                if self.lacks.is_some() && !self.announces.addresses.is_empty() =>
            {
                let wish = self.announces.clone();
                let turns = places.turns.clone();
                self.announcer = Some(Announcer::start(places.dataplane.clone(), turns, wish));
            }
            _ => {}
        }
    }

    /// Texts about changes of announced addresses since the last call; none while the announcements
    /// cannot be sent to the dataplane.
    fn take_announced(&mut self) -> Vec<String> {
        let Some(announcer) = &mut self.announcer else {
            return Vec::new();
        };
        let announced = announcer.announced.borrow_and_update().clone();
        if announced.trouble.is_some() {
            // The event about the lost dataplane suffices.
            return Vec::new();
        }
        let before = std::mem::replace(&mut self.reported, announced.vips);
        let mut news = Vec::new();
        for vip in &self.reported {
            let was = before.iter().find(|was| was.address == vip.address);
            if was.map_or(api::Standing::Withdrawn, |was| was.standing) != vip.standing {
                news.push(match vip.standing {
                    api::Standing::Announced => format!("{} is announced", vip.address),
                    api::Standing::Leaving => format!(
                        "{} is announced so that routers prefer other directors",
                        vip.address
                    ),
                    api::Standing::Withdrawn => format!("{} is withdrawn", vip.address),
                });
            }
            if !vip.trouble.is_empty() && was.is_none_or(|was| was.trouble != vip.trouble) {
                news.push(format!("{}: {}", vip.address, vip.trouble));
            }
        }
        news
    }

    /// Waits for a change, or for the next check of the track file. Pends forever if the file has
    /// neither `[vrrp]` nor announced addresses.
    pub(crate) async fn changed(&mut self) {
        let announced = async {
            match &mut self.announcer {
                Some(announcer) => announcer.announced.changed().await.is_err(),
                None => std::future::pending().await,
            }
        };
        let vrrp = async {
            match &mut self.running {
                Some(running) => tokio::select! {
                    messages = running.messages.changed() => messages.is_err(),
                    ready = running.readiness.changed() => ready.is_err(),
                    _ = running.checks.tick() => {
                        running.look();
                        false
                    }
                },
                None => std::future::pending().await,
            }
        };
        let gone = tokio::select! {
            gone = announced => gone,
            gone = vrrp => gone,
        };
        if gone {
            // The thread has ended, because the daemon is stopping.
            std::future::pending::<()>().await;
        }
    }

    /// Returns the changes of VRRP and of announcements since the last call, to be reported as
    /// events.
    pub(crate) fn take(&mut self) -> Vec<News> {
        let vrrp = self.take_vrrp().map(|(code, words)| News {
            event: "vrrp",
            code,
            words: words.to_owned(),
        });
        let announced = self.take_announced().into_iter();
        let announced = announced.map(|words| News {
            event: "announce",
            code: "",
            words,
        });
        vrrp.into_iter().chain(announced).collect()
    }

    /// Code of the fault and text of a newly reported VRRP state; `None` if the state is unchanged.
    fn take_vrrp(&mut self) -> Option<(&'static str, &'static str)> {
        let running = self.running.as_mut()?;
        let now = running.messages.borrow_and_update().state;
        running.readiness.mark_unchanged();
        let news = now.filter(|now| *now != running.state).map(|now| {
            running.state = now;
            running.keep();
            match now {
                State::Master => ("", "keepalived: this director is active"),
                State::Backup => ("", "keepalived: this director is standby"),
                State::Fault => ("vrrp_fault", "keepalived: this director cannot be active"),
                State::Stopped | State::Unknown => (
                    "vrrp_silent",
                    "keepalived has stopped: this director is not active",
                ),
            }
        });
        self.follow();
        news
    }

    /// Whether the dataplane may own virtual addresses; always true without `[vrrp]`.
    pub(crate) fn may_own(&self) -> bool {
        self.running.as_ref().is_none_or(Running::may_own)
    }

    /// Sets whether all services have their quorum.
    pub(crate) fn take_quorum(&mut self, quorum: bool) {
        self.quorum = quorum;
        self.follow();
    }

    /// Sets the configured peers that the running dataplane lacks.
    pub(crate) fn take_lacking(&mut self, peers: Vec<SocketAddr>) {
        if self.lacks.as_ref() != Some(&peers) {
            self.lacks = Some(peers);
            self.follow();
            self.follow_announces();
        }
    }

    /// Whether the dataplane has all configured peers; true until this is known.
    pub(crate) fn has_peers(&self) -> bool {
        self.missing_peers().is_empty()
    }

    fn missing_peers(&self) -> &[SocketAddr] {
        self.lacks.as_deref().unwrap_or_default()
    }

    /// If the dataplane lacks configured peers, a text that requests a restart of the dataplane.
    fn lacking(&self) -> Option<String> {
        let peers: Vec<String> = self
            .missing_peers()
            .iter()
            .map(|peer| peer.ip().to_string())
            .collect();
        (!peers.is_empty()).then(|| {
            format!(
                "a restart of the dataplane, which was started without the peers {}",
                peers.join(", ")
            )
        })
    }

    /// Starts or ends maintenance, and stores it. A repeated start keeps the start time and, if it
    /// has no reason, the previous operator and reason. Returns whether the director has entered or
    /// left maintenance.
    ///
    /// keepalived and the dataplane are informed first, because a busy disk may take seconds.
    ///
    /// # Errors
    /// The name or the reason is too long or not a single line, or the change cannot be stored and
    /// is reverted.
    pub(crate) fn wish(&mut self, spec: MaintenanceSpec, now: Now) -> Result<bool, String> {
        let on = spec.on;
        let before = self.maintenance.clone();
        let wish = match (on, &before) {
            (false, _) => None,
            (true, Some(before)) if spec.why.is_none() => Some(before.clone()),
            (true, before) => {
                let mut kept = maintenance::Kept::begin(spec.who, spec.why, now);
                if let Some(before) = before {
                    kept.wish.since = before.wish.since;
                    kept.began.clone_from(&before.began);
                }
                Some(kept)
            }
        };
        maintenance::check(wish.as_ref().map(|kept| &kept.wish))?;
        self.follow_wish(wish);
        if let Some(places) = &self.places
            && let Err(why) = maintenance::keep(&places.maintenance, self.maintenance.as_ref())
        {
            self.follow_wish(before);
            return Err(why);
        }
        Ok(before.is_some() != on)
    }

    fn follow_wish(&mut self, wish: Option<maintenance::Kept>) {
        self.maintenance = wish;
        self.follow();
        self.follow_announces();
    }

    /// Marks this director as unfit in the track file, because the dataplane will exit with the
    /// daemon.
    pub(crate) fn leave(&self) {
        if let Some(running) = &self.running {
            running.put(track::UNFIT);
        }
    }

    /// Writes the track file if the fitness has changed. The file stays unchanged until the
    /// readiness of the dataplane and, if it is ready, its missing peers are known.
    fn follow(&mut self) {
        let (quorum, maintenance) = (self.quorum, self.maintenance.is_some());
        let lacks_peers = !self.has_peers();
        let Some(running) = &mut self.running else {
            return;
        };
        let Some(readiness) = running.readiness.borrow().clone() else {
            // Until the readiness is known, the track file of the previous daemon stays.
            return;
        };
        if self.lacks.is_none() && readiness.ready {
            // lvsd does not know yet whether the dataplane lacks peers.
            return;
        }
        let value = Fitness {
            ready: readiness.ready,
            quorum,
            maintenance,
            lacks_peers,
        }
        .value();
        if running.written == Some(value) {
            return;
        }
        running.written = Some(value);
        let before = running.trouble.take();
        running.trouble = running.put(value);
        if let Some(trouble) = &running.trouble
            && before.is_none()
        {
            tracing::error!("{trouble}");
        }
        if running.trouble.is_some() {
            running.written = None;
        }
    }

    /// Returns a handle with which a client waits until the dataplane has applied the latest
    /// announcements; `None` if lvsd has not begun to announce addresses.
    pub(crate) fn unapplied(&self) -> Option<Unapplied> {
        self.announcer.as_ref().map(Announcer::unapplied)
    }

    pub(crate) const fn is_in_maintenance(&self) -> bool {
        self.maintenance.is_some()
    }

    /// The state of this director in its cluster, as `lvsd status` shows it.
    pub(crate) fn status(&self, now: Now) -> DirectorStatus {
        let vrrp = self.running.as_ref().map(|running| {
            let messages = running.messages.borrow();
            let readiness = running.readiness.borrow().clone();
            let mut readiness = readiness.unwrap_or_else(Readiness::unknown);
            if let Some(lacking) = self.lacking().filter(|_| readiness.ready) {
                readiness.ready = false;
                readiness.waits_for = lacking;
            }
            VrrpStatus {
                state: running.state.word().to_owned(),
                active: running.may_own(),
                ready: readiness.ready,
                waits_for: readiness.waits_for,
                track: running.written.unwrap_or(track::UNFIT),
                trouble: messages
                    .trouble
                    .iter()
                    .chain(&running.trouble)
                    .cloned()
                    .collect(),
                changes: messages.changes,
                ignored: messages.ignored,
            }
        });
        let announce = self.announcer.as_ref().map(|announcer| {
            let mut announce = announcer.announced.borrow().status();
            if let Some(lacking) = self.lacking().filter(|_| announce.ready) {
                announce.ready = false;
                announce.waits_for = lacking;
            }
            announce
        });
        let mut warnings = Vec::new();
        if self.maintenance.is_some() && vrrp.is_none() && announce.is_none() {
            warnings.push(
                "the maintenance has no effect on addresses: the file has neither [vrrp] nor services with vip = \"announce\"; the program that moves the addresses must query `lvsd maintenance status`"
                    .to_owned(),
            );
        }
        DirectorStatus {
            maintenance: self.maintenance.as_ref().map(|kept| kept.shown(now)),
            vrrp,
            announce,
            missing_peers: self.missing_peers().to_vec(),
            warnings,
        }
    }
}

impl Running {
    fn start(settings: &Vrrp, places: &ClusterPaths) -> Self {
        let (messages, listener) = fifo::listen(settings.fifo.clone());
        let state = std::fs::read_to_string(state_path(&settings.fifo));
        let mut checks = tokio::time::interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            settings: settings.clone(),
            messages,
            readiness: readiness::watch(places.dataplane.clone()),
            listener,
            state: state.map_or(State::Unknown, |word| State::of_word(word.trim())),
            written: None,
            trouble: None,
            checks,
            meddled: false,
        }
    }

    /// Whether this director may own the VIPs. Until the first query of the dataplane has ended, an
    /// active director stays active.
    fn may_own(&self) -> bool {
        let readiness = self.readiness.borrow();
        self.state == State::Master && readiness.as_ref().is_none_or(|dataplane| dataplane.ready)
    }

    /// Stores keepalived's last state for the next daemon, because keepalived does not repeat it.
    fn keep(&self) {
        let path = state_path(&self.settings.fifo);
        make_directory_of(&path);
        if let Err(error) = replace(&path, self.state.word().as_bytes(), 0o600) {
            tracing::warn!(
                "cannot store keepalived's report in {}: {error}; a restarted lvsd releases the addresses until keepalived reports again",
                path.display()
            );
        }
    }

    /// Checks whether the track file still contains the number that lvsd has written; if not, lvsd
    /// writes it again. If keepalived starts without the file, it creates one with a number that
    /// prevents this director from becoming active (`init_file`).
    fn look(&mut self) {
        let Some(value) = self.written else { return };
        let path = &self.settings.track_file;
        let meddled = !track::says(path, value);
        if meddled {
            self.written = None;
        }
        if meddled && !self.meddled {
            tracing::warn!(
                "another process has removed or changed the track file {}; {value} is written again",
                path.display()
            );
        }
        self.meddled = meddled;
    }

    /// Writes a number to the track file. Returns the error as text, or `None` without an error.
    fn put(&self, value: i16) -> Option<String> {
        let path = &self.settings.track_file;
        make_directory_of(path);
        let error = replace(path, format!("{value}\n").as_bytes(), 0o644).err()?;
        Some(format!(
            "cannot write the track file {}: {error}; keepalived continues with the last number",
            path.display()
        ))
    }
}

fn state_path(fifo: &Path) -> PathBuf {
    let mut name = fifo.as_os_str().to_owned();
    name.push(".state");
    name.into()
}

/// Creates the directory of a file. A failure is reported when the file is written.
fn make_directory_of(path: &Path) {
    if let Some(directory) = path.parent() {
        let _ = std::fs::create_dir_all(directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(on: bool) -> MaintenanceSpec {
        MaintenanceSpec {
            on,
            ..MaintenanceSpec::default()
        }
    }

    #[test]
    fn maintenance_survives_restart_and_is_refused_if_not_stored() {
        let directory = tempfile::tempdir().unwrap();
        let places = ClusterPaths {
            dataplane: Address::new("@nobody"),
            maintenance: directory.path().join("x.maintenance.json"),
            turns: Pulse::default(),
        };
        let mut cluster = Cluster::recall(Some(places.clone()));
        assert!(cluster.wish(spec(true), Now::at(7)).unwrap());
        assert!(
            !cluster.wish(spec(true), Now::at(9)).unwrap(),
            "maintenance of a director in maintenance counts as a change"
        );
        let mut again = Cluster::recall(Some(places.clone()));
        again.follow_announces();
        assert_eq!(again.announces.maintenance, Some(Began::At(7)));
        assert_eq!(again.status(Now::at(9)).maintenance.unwrap().since, 7);
        // The clock was set an hour ahead, or an hour back.
        for unix in [3_609, 3_600_009] {
            let status = again.status(Now { unix, boot: 9 });
            assert_eq!(status.maintenance.unwrap().since, unix - 2);
        }
        assert_eq!(
            again.status(Now::at(9)).warnings.len(),
            1,
            "no warning says that maintenance has no effect"
        );
        assert!(cluster.wish(spec(false), Now::at(9)).unwrap());
        assert!(
            Cluster::recall(Some(places.clone()))
                .status(Now::at(9))
                .maintenance
                .is_none()
        );
        let why = Some("x\ny".to_owned());
        assert!(
            cluster
                .wish(MaintenanceSpec { why, ..spec(true) }, Now::at(9))
                .is_err()
        );
        std::fs::create_dir(&places.maintenance).unwrap();
        assert!(cluster.wish(spec(true), Now::at(9)).is_err());
        assert!(cluster.status(Now::at(9)).maintenance.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn maintenance_is_unapplied_while_no_dataplane_answers() {
        let directory = tempfile::tempdir().unwrap();
        let places = ClusterPaths {
            dataplane: Address::new("@nobody"),
            maintenance: directory.path().join("x.maintenance.json"),
            turns: Pulse::default(),
        };
        let mut cluster = Cluster::recall(Some(places));
        assert!(
            cluster.unapplied().is_none(),
            "clients wait although no address is announced"
        );
        let address = [(
            "192.0.2.10".parse().unwrap(),
            Some(api::Standing::Announced),
        )];
        cluster.announce(address.into(), Announce::default());
        assert!(
            cluster.unapplied().is_none(),
            "clients wait before missing peers are known"
        );
        cluster.take_lacking(Vec::new());
        assert!(cluster.wish(spec(true), Now::at(7)).unwrap());
        let unapplied = cluster.unapplied().expect("an address is announced");
        let (applied, status) = unapplied.wait(Duration::from_secs(20)).await;
        assert!(!applied && !status.ready, "{status:?}");
    }

    #[test]
    fn peers_that_the_dataplane_lacks_require_its_restart() {
        let mut cluster = Cluster::recall(None);
        assert!(cluster.has_peers() && cluster.lacking().is_none());
        cluster.take_lacking(vec![SocketAddr::from(([192, 0, 2, 2], 8848))]);
        assert!(!cluster.has_peers());
        let why = cluster.lacking().unwrap();
        assert!(
            why.contains(
                "a restart of the dataplane, which was started without the peers 192.0.2.2"
            ),
            "no `a restart of the dataplane, which was started without the peers 192.0.2.2` in {why}"
        );
        cluster.take_lacking(Vec::new());
        assert!(cluster.has_peers());
    }

    #[test]
    fn missing_directory_of_track_file_or_maintenance_file_is_created() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lvs/track");
        make_directory_of(&path);
        replace(&path, b"0\n", 0o644).unwrap();
        let path = directory.path().join("kept/x.maintenance.json");
        maintenance::keep(&path, Some(&maintenance::Kept::default())).unwrap();
        assert!(maintenance::recall(&path).is_some());
    }

    #[test]
    fn dataplane_may_own_addresses_without_vrrp() {
        assert!(Cluster::recall(None).may_own());
    }

    #[tokio::test]
    async fn removed_or_changed_track_file_is_written_again() {
        let directory = tempfile::tempdir().unwrap();
        let places = ClusterPaths {
            dataplane: Address::new("@nobody"),
            maintenance: directory.path().join("x.maintenance.json"),
            turns: Pulse::default(),
        };
        let text = format!(
            "[vrrp]\ninterface = \"eth0\"\nrouter_id = 51\ntrack_file = \"{0}/track\"\nfifo = \"{0}/fifo\"\n",
            directory.path().display()
        );
        let (config, _) = crate::config::Config::from_toml("x", &text).expect("the file is valid");
        let mut cluster = Cluster::recall(Some(places));
        cluster.set(config.vrrp.as_ref());
        let path = directory.path().join("track");
        let spoil: [&dyn Fn(); 3] = [&|| {}, &|| std::fs::remove_file(&path).unwrap(), &|| {
            std::fs::write(&path, "0\n").unwrap();
        }];
        for spoil in spoil {
            spoil();
            while !track::says(&path, track::UNFIT) {
                cluster.changed().await;
                cluster.take();
            }
            let status = cluster
                .status(Now::at(9))
                .vrrp
                .expect("the file has [vrrp]");
            assert_eq!(status.track, track::UNFIT);
            assert!(status.trouble.is_empty(), "{status:?}");
        }
    }
}
