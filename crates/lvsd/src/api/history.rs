//! Records health and traffic of the last hour in memory.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use lvs_core::stats::Counts;
use serde::Serialize;

use crate::channels::Snapshot;
use crate::clock::Now;

/// Interval between two points of the history.
pub const STEP: Duration = Duration::from_secs(15);
/// Maximum number of stored points: the points of one hour.
const POINTS_MAX: usize = 240;
/// Maximum number of services with a history: the first ones. The addresses of one service share
/// its history. Each point of a service needs 24 bytes.
const SERVICES_MAX: usize = 4096;

/// Health and traffic of the last hour: of single services, and of all services together.
#[derive(Debug, Default)]
pub struct History {
    /// Times of the samples, in seconds since boot.
    times: VecDeque<u64>,
    total: Series,
    services: HashMap<String, Series>,
}

#[derive(Debug, Default)]
struct Series {
    /// The counters at the last point; `None` before the first point.
    last: Option<Counts>,
    /// The points in order of time.
    points: VecDeque<Point>,
}

/// Rates per second over the last interval, and the health at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Point {
    usable: u32,
    servers: u32,
    connections: f32,
    packets: f32,
    in_bytes: f32,
    out_bytes: f32,
}

/// A history in the API: columns of equal length.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(serde::Deserialize))]
pub struct Curves {
    /// Seconds between two points.
    pub step: u64,
    /// Times of the points, in seconds since 1970.
    pub time: Vec<u64>,
    /// Numbers of servers that received new connections.
    pub usable: Vec<u32>,
    /// Numbers of servers in the configuration.
    pub servers: Vec<u32>,
    /// New connections per second.
    pub connections: Vec<f32>,
    /// Packets per second in both directions.
    pub packets: Vec<f32>,
    /// Bytes per second from clients.
    pub in_bytes: Vec<f32>,
    /// Bytes per second to clients; 0 with direct routing and tunnels, whose replies bypass the
    /// director.
    pub out_bytes: Vec<f32>,
}

impl Series {
    fn take(&mut self, counts: Counts, usable: usize, servers: usize) {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        #[expect(
            clippy::cast_precision_loss,
            reason = "a picture needs no more precision"
        )]
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f32 / STEP.as_secs_f32();
        // Values before the first point are unknown.
        let last = self.last.unwrap_or(counts);
        self.last = Some(counts);
        self.points.push_back(Point {
            usable: small(usable),
            servers: small(servers),
            connections: rate(counts.conns, last.conns),
            packets: rate(counts.in_packets, last.in_packets)
                + rate(counts.out_packets, last.out_packets),
            in_bytes: rate(counts.in_bytes, last.in_bytes),
            out_bytes: rate(counts.out_bytes, last.out_bytes),
        });
        if self.points.len() > POINTS_MAX {
            self.points.pop_front();
        }
    }

    fn curves(&self, times: &VecDeque<u64>, now: Now) -> Curves {
        let skip = times.len() - self.points.len().min(times.len());
        let mut curves = Curves {
            step: STEP.as_secs(),
            time: times.iter().skip(skip).map(|&at| now.unix_of(at)).collect(),
            ..Curves::default()
        };
        for point in &self.points {
            curves.usable.push(point.usable);
            curves.servers.push(point.servers);
            curves.connections.push(point.connections);
            curves.packets.push(point.packets);
            curves.in_bytes.push(point.in_bytes);
            curves.out_bytes.push(point.out_bytes);
        }
        curves
    }
}

impl History {
    /// Records a point for all services together, and for each service that has a history. Returns
    /// `false`, without a change, if neither the dataplane nor the proxy has reported yet. `now`:
    /// seconds since boot.
    pub fn take(&mut self, snapshot: &Snapshot, now: u64) -> bool {
        if snapshot.dataplane().is_none() && snapshot.services().next().is_none() {
            return false;
        }
        if self.times.len() >= POINTS_MAX {
            self.times.pop_front();
        }
        self.times.push_back(now);
        let counts: HashMap<_, Counts> = snapshot
            .services()
            .map(|info| (info.service, info.stats.live))
            .collect();
        let (mut usable, mut servers) = (0, 0);
        let mut there = HashSet::new();
        // The addresses of one service share its name and one history.
        let mut all: HashMap<&str, (Counts, usize, usize)> = HashMap::new();
        for service in &snapshot.status.services {
            let in_file = service.servers.iter().filter(|s| s.configured.is_some());
            let in_file = in_file.count();
            usable += service.usable;
            servers += in_file;
            if all.len() < SERVICES_MAX || all.contains_key(service.name.as_str()) {
                let own = counts.get(&service.service).copied().unwrap_or_default();
                let entry = all.entry(&service.name).or_default();
                entry.0 = entry.0 + own;
                entry.1 += service.usable;
                entry.2 += in_file;
            }
        }
        for (name, (counts, usable, servers)) in all {
            let series = match self.services.get_mut(name) {
                Some(series) => series,
                None => self.services.entry(name.to_owned()).or_default(),
            };
            series.take(counts, usable, servers);
            there.insert(name);
        }
        self.services
            .retain(|name, _| there.contains(name.as_str()));
        self.total.take(snapshot.total().live, usable, servers);
        true
    }

    /// The history of a service, or without a name the sums of all services, with times by the
    /// present wall clock; `None` for a service without a history.
    pub fn curves(&self, service: Option<&str>, now: Now) -> Option<Curves> {
        let series = match service {
            Some(name) => self.services.get(name)?,
            None => &self.total,
        };
        Some(series.curves(&self.times, now))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::api::overview::tests::snapshot;

    const NOW: Now = Now::at(20_000);

    #[test]
    fn history_times_follow_a_changed_wall_clock() {
        let mut history = History::default();
        for n in 0..3 {
            assert!(history.take(&snapshot("web"), 1000 + n * 15));
        }
        for unix in [500_000, 503_600, 496_400] {
            let curves = history.curves(None, Now { unix, boot: 1040 });
            let times = [unix - 40, unix - 25, unix - 10];
            assert_eq!(
                curves.expect("the history contains all services").time,
                times
            );
        }
    }

    #[test]
    fn history_with_services_above_limit_contains_only_the_first_services() {
        let mut snapshot = snapshot("web");
        let one = snapshot.status.services[0].clone();
        snapshot.status.services = (0..SERVICES_MAX + 10)
            .map(|n| {
                let mut service = one.clone();
                service.name = format!("{n}");
                service
            })
            .collect();
        let mut history = History::default();
        for time in 0..3 {
            assert!(history.take(&snapshot, time));
        }
        assert_eq!(history.services.len(), SERVICES_MAX);
        let last = (SERVICES_MAX - 1).to_string();
        assert!(history.curves(Some(&last), NOW).is_some());
        assert!(
            history
                .curves(Some(&SERVICES_MAX.to_string()), NOW)
                .is_none()
        );
    }

    #[test]
    fn history_covers_an_hour_and_omits_removed_services() {
        let mut history = History::default();
        for n in 0..300 {
            let mut snapshot = snapshot("web");
            let found = Arc::make_mut(&mut snapshot.found);
            Arc::make_mut(&mut found.seen).services[0].stats.live.conns = n * 30;
            assert!(history.take(&snapshot, 1000 + n * 15));
        }
        let curves = history.curves(Some("web"), NOW).expect("the entry exists");
        assert_eq!(curves.time.len(), POINTS_MAX);
        assert_eq!(curves.time.last(), Some(&(1000 + 299 * 15)));
        assert!(
            curves
                .connections
                .iter()
                .all(|rate| (*rate - 2.0).abs() < 1e-6)
        );
        assert_eq!((curves.usable[0], curves.servers[0]), (1, 2));

        // Another service replaces it, without a history.
        assert!(!history.take(&Snapshot::default(), 8000));
        assert!(history.take(&snapshot("mail"), 9000));
        assert_eq!(history.curves(Some("web"), NOW), None);
        let curves = history.curves(Some("mail"), NOW).expect("the entry exists");
        assert_eq!((curves.time, curves.connections), (vec![9000], vec![0.0]));
        assert_eq!(
            history
                .curves(None, NOW)
                .expect("the history contains all services")
                .time
                .len(),
            POINTS_MAX
        );
    }
}
