//! Connections whose server is the one that their service's scheduler chooses, where that is a
//! function of what other directors know, too ([`Scheduler::is_function`]): they need not be told,
//! for another director that gets a packet of one chooses the same server.
//!
//! When what the function goes by changes, the shard walks over its table once, a bounded number of
//! entries at a time, and those that the function would now put elsewhere are regular no more.
//!
//! [`Scheduler::is_function`]: crate::Scheduler::is_function

use alloc::vec::Vec;

use super::Shard;
use crate::Instant;
use crate::conn::flag;
use crate::sync::bulk::Kind;

/// A walk over the table.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// The slot to go on at.
    at: Option<usize>,
    /// Something has changed again since it began.
    again: bool,
}

impl Shard {
    /// Whether [`Control::review`](crate::Control::review) has something to do.
    pub const fn has_review(&self) -> bool {
        self.review.at.is_some()
    }

    /// The table is to be walked over.
    pub(crate) fn begin_review(&mut self) {
        match self.review.at {
            None => self.review.at = Some(0),
            Some(_) => self.review.again = true,
        }
    }

    /// The next regular connections of the walk, looking at no more than `budget` slots as
    /// [`connections_piece`](Self::connections_piece).
    pub(crate) fn next_reviewed(&mut self, budget: usize) -> Vec<u32> {
        let Some(from) = self.review.at else {
            return Vec::new();
        };
        let (mut piece, next) = self.table.piece(from, budget.max(1));
        self.review.at = match next {
            None => core::mem::take(&mut self.review.again).then_some(0),
            next => next,
        };
        piece.retain(|&index| self.table.get(index).has(flag::REGULAR));
        piece
    }

    /// Connection `index` has been put where its service's scheduler says.
    pub(crate) fn set_regular(&self, index: u32) {
        self.table.get(index).set(flag::REGULAR);
    }

    /// Connection `index` is not where other directors would look for it: they are told.
    pub(crate) fn except(&mut self, index: u32, now: Instant) {
        let slot = self.table.get(index);
        slot.clear(flag::REGULAR);
        if self.ledger.is_some() && !slot.has(flag::TOLD | flag::LENT) && self.is_worth(slot) {
            self.tell(index, Kind::Lives, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use proptest::prelude::*;

    use super::super::ledger::tests::{PEER, Side, at};
    use crate::sync::bulk::{self, Pass};
    use crate::*;

    const SYN: u8 = 0x02;
    const RST: u8 = 0x04;
    const ACK: u8 = 0x10;
    const FIN: u8 = 0x11;

    fn vip() -> ServiceKey {
        ServiceKey::tcp("198.51.100.1:80".parse().unwrap())
    }

    fn client(n: u32) -> SocketAddr {
        SocketAddr::from(((0x0a40_0000 + n).to_be_bytes(), 40_000))
    }

    fn server(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, n], 80))
    }

    fn mh() -> ServiceConfig {
        let mut config = ServiceConfig::new(Family::V4, "mh");
        config.flags = ServiceFlags(ServiceFlags::SCHED1);
        config
    }

    fn set(side: &mut Side, n: u8, weight: i32, method: Forwarding) {
        let config = ServerConfig::new(weight, method);
        let edited = side.control.edit_server(&vip(), server(n), &config);
        if edited.is_err() {
            let added = side.control.add_server(&vip(), server(n), &config, at(0));
            added.unwrap();
        }
    }

    /// Two directors that tell each other exceptions only, with this service and so many servers.
    fn sides(config: &ServiceConfig, servers: u8, method: Forwarding) -> [Side; 2] {
        let mut all = [([1, 2], true), ([3, 4], false)].map(|(keys, ties)| {
            let mut side = Side::of(config.clone(), keys, ties);
            side.control.set_decides(true);
            side.shard.set_spares(true);
            for n in 1..=servers {
                set(&mut side, n, 1, method);
            }
            side
        });
        all[0].shard.listen_to(PEER, [3, 4]);
        all[1].shard.listen_to(PEER, [1, 2]);
        all
    }

    fn open(side: &mut Side, n: u32, now: Instant) {
        let _ = side.packet_of(client(n), SYN, now);
        let _ = side.packet_of(client(n), ACK, now);
    }

    fn target(verdict: Verdict) -> Option<SocketAddr> {
        match verdict {
            Verdict::Forward(forward) => Some(forward.target),
            _ => None,
        }
    }

    /// The walk, in portions of so many slots, between which what has changed is told.
    fn review(side: &mut Side, other: &mut Side, budget: usize, now: Instant) {
        side.control.sweep(&mut side.shard);
        while side.shard.has_review() {
            side.control.review(&mut side.shard, budget, now);
            side.tell(other, now);
        }
    }

    fn settle(sides: &mut [Side; 2], now: Instant) {
        let [one, two] = sides;
        for _ in 0..2 {
            review(one, two, 500, now);
            review(two, one, 500, now);
            one.tell(two, now);
            two.tell(one, now);
        }
    }

    #[test]
    fn what_others_would_choose_is_not_told_and_goes_on_there() {
        let [mut one, mut two] = sides(&mh(), 4, Forwarding::Route);
        for n in 0..400 {
            open(&mut one, n, at(1));
        }
        assert!(!one.shard.has_changes() && one.pass(&Pass::All, at(1)).is_empty());
        // A server is drained: its connections are exceptions, and nobody else's.
        let servers = |side: &Side| -> alloc::vec::Vec<(SocketAddr, SocketAddr)> {
            let all = side.shard.connections_from(0, at(2));
            all.map(|it| (it.client, it.server)).collect()
        };
        let before = servers(&one);
        let of_first = before.iter().filter(|(_, at)| *at == server(1)).count();
        assert!((50..150).contains(&of_first), "{of_first}");
        for side in [&mut one, &mut two] {
            set(side, 1, 0, Forwarding::Route);
        }
        review(&mut one, &mut two, 300, at(2));
        let known = servers(&two);
        assert_eq!(known.len(), of_first);
        assert!(known.iter().all(|(_, at)| *at == server(1)));
        assert_eq!(one.shard.told().count(), of_first as u64);
        assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
        // All of them go on where they were, whichever director gets their packets.
        for &(client, at_server) in &before {
            let verdict = two.packet_of(client, ACK, at(3));
            assert_eq!(target(verdict), Some(at_server), "{client}");
        }
        assert_eq!(two.control.decided(), 400 - of_first as u64);
        // What has been told stays so until it ends, also when the server is back.
        for side in [&mut one, &mut two] {
            set(side, 1, 1, Forwarding::Route);
        }
        two.tell(&mut one, at(3));
        review(&mut one, &mut two, 300, at(4));
        review(&mut two, &mut one, 300, at(4));
        assert_eq!((one.missing(&two), two.missing(&one)), (0, 0));
        assert_eq!(two.shard.told().count(), of_first as u64);
        two.shard.advance(at(5000), usize::MAX);
        two.tell(&mut one, at(5000));
        assert_eq!((two.shard.told().count(), one.shard.lent(PEER)), (0, 0));
    }

    #[test]
    fn the_last_packets_of_unknown_connections_are_passed_on_without_a_trace() {
        let [mut one, mut two] = sides(&mh(), 4, Forwarding::Tunnel);
        for n in 0..50 {
            open(&mut one, n, at(1));
            let there = target(one.packet_of(client(n), ACK, at(1)));
            assert_eq!(target(two.packet_of(client(n), RST, at(1))), there);
            let error = IcmpError {
                hook: Hook::Local,
                src: "192.0.2.9".parse().unwrap(),
                dst: "198.51.100.1".parse().unwrap(),
                inner: Tuple {
                    protocol: Protocol::TCP,
                    src: "198.51.100.1:80".parse().unwrap(),
                    dst: client(n),
                },
                inner_ports: true,
                mark: 0,
                len: 68,
                checksum_ok: true,
            };
            assert_eq!(two.shard.len(), 0);
            let Err(pending) = two.shard.handle_icmp_error(&error, at(1)) else {
                panic!("it is of no connection here");
            };
            let verdict = two
                .control
                .admit_icmp_error(&mut two.shard, &error, pending, at(1));
            assert_eq!(target(verdict), there);
            two.shard.advance(at(10), usize::MAX);
        }
        assert_eq!(two.shard.len(), 0, "what the errors have opened");
        let there = target(one.packet_of(client(0), ACK, at(10)));
        assert_eq!(target(two.packet_of(client(0), FIN, at(10))), there);
        assert_eq!(two.control.decided(), 101);
    }

    /// Nothing of this where a director could do nothing with such a packet, or would choose by
    /// what others do not know: all are told, and no packet of an unknown connection is taken.
    #[test]
    fn services_that_others_cannot_decide_about_are_told_whole() {
        let mut persistent = mh();
        persistent.flags = ServiceFlags(ServiceFlags::PERSISTENT);
        persistent.timeout = 300;
        let mut limited = mh();
        limited.extras.limits.connections = 10_000;
        let route = Forwarding::Route;
        for (config, method, upper) in [
            (mh(), Forwarding::Nat, 0),
            (mh(), route, 1000),
            (ServiceConfig::new(Family::V4, "wlc"), route, 0),
            (persistent, route, 0),
            (limited, route, 0),
        ] {
            let [mut one, mut two] = sides(&config, 3, method);
            let limit = ServerConfig {
                upper,
                ..ServerConfig::new(1, method)
            };
            for side in [&mut one, &mut two] {
                let edited = side.control.edit_server(&vip(), server(2), &limit);
                edited.unwrap();
            }
            for n in 0..30 {
                open(&mut one, n, at(1));
            }
            for flags in [ACK, RST, FIN] {
                let verdict = two.packet_of(client(7), flags, at(1));
                let not_new = Verdict::Accept(AcceptReason::NotNew);
                assert_eq!(verdict, not_new, "{config:?} {method:?}");
            }
            one.tell(&mut two, at(1));
            assert_eq!(one.shard.told().count(), 30, "{config:?} {method:?}");
            assert_eq!(two.missing(&one), 0);
        }
    }

    #[test]
    fn filters_and_thresholds_that_come_later_make_exceptions() {
        let [mut one, mut two] = sides(&mh(), 3, Forwarding::Route);
        for n in 0..30 {
            open(&mut one, n, at(1));
        }
        let deny: Prefix = "10.64.0.16/28".parse().unwrap();
        let lists = FilterLists {
            deny: alloc::vec![deny],
            ..FilterLists::default()
        };
        let filter = SourceFilter::try_from(lists).unwrap();
        one.control.set_filter(None, filter).unwrap();
        review(&mut one, &mut two, 100, at(2));
        assert_eq!(one.shard.told().count(), 14, "10.64.0.16 to 29");
        let limit = ServerConfig {
            upper: 1000,
            ..ServerConfig::new(1, Forwarding::Route)
        };
        one.control.edit_server(&vip(), server(1), &limit).unwrap();
        review(&mut one, &mut two, 100, at(2));
        assert_eq!((one.shard.told().count(), two.missing(&one)), (30, 0));
    }

    /// A listener that does not decide alike is told everything by the walk that it begins with.
    #[test]
    fn who_does_not_decide_is_told_everything() {
        let [mut one, mut two] = sides(&mh(), 3, Forwarding::Route);
        two.control.set_decides(false);
        for n in 0..100 {
            open(&mut one, n, at(1));
        }
        let not_new = Verdict::Accept(AcceptReason::NotNew);
        assert_eq!(two.packet_of(client(0), ACK, at(1)), not_new);
        one.shard.set_spares(false);
        let all = one.pass(&Pass::All, at(2));
        assert_eq!(bulk::count(&all), 100);
        two.hear(&all, at(2));
        one.shard.take_changes();
        assert_eq!((two.shard.len(), two.missing(&one)), (100, 0));
        // When it has gone, new ones are not told, and those that were stay told.
        one.shard.set_spares(true);
        open(&mut one, 100, at(3));
        assert!(!one.shard.has_changes());
        assert_eq!(one.shard.told().count(), 100);
    }

    /// 100,000 connections, and one of ten servers is drained.
    #[test]
    fn a_drained_server_is_what_is_told() {
        const ALL: u32 = 100_000;
        let [mut one, mut two] = sides(&mh(), 10, Forwarding::Route);
        let told = |one: &mut Side, two: &mut Side, now: Instant| {
            let mut count = 0;
            let mut bytes = alloc::vec::Vec::new();
            one.control.sweep(&mut one.shard);
            while one.shard.has_review() || one.shard.has_changes() {
                one.control.review(&mut one.shard, 4096, now);
                let (said, lost) = one.shard.take_changes();
                assert!(!lost && said.len() < 20 << 10, "in portions");
                count += bulk::count(&said);
                bytes.extend(said);
            }
            two.hear(&bytes, now);
            count
        };
        for n in 0..ALL {
            open(&mut one, n, at(1));
        }
        assert_eq!(told(&mut one, &mut two, at(1)), 0);
        for side in [&mut one, &mut two] {
            set(side, 1, 0, Forwarding::Route);
        }
        let exceptions = told(&mut one, &mut two, at(2));
        assert!((9_000..11_000).contains(&exceptions), "{exceptions}");
        assert_eq!((two.shard.len() as u64, two.missing(&one)), (exceptions, 0));
        std::println!("{exceptions} of {ALL} are told");
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Open(u32),
        Packet(u32),
        Reset(u32),
        Weight(u8, i32),
        Review(usize),
        Tell,
        Pass,
    }

    fn event() -> impl Strategy<Value = (usize, Event)> {
        let any = prop_oneof![
            6 => (0..60u32).prop_map(Event::Open),
            6 => (0..60u32).prop_map(Event::Packet),
            1 => (0..60u32).prop_map(Event::Reset),
            2 => (1..=4u8, 0..3).prop_map(|(n, weight)| Event::Weight(n, weight)),
            2 => (1..3000usize).prop_map(Event::Review),
            2 => Just(Event::Tell),
            1 => Just(Event::Pass),
        ];
        (0..2usize, any)
    }

    proptest! {
        /// Whatever happens in whatever order: once all is told, a connection of either director
        /// goes on at the other one at the server where it is, and what is told is what is known.
        #[test]
        fn no_connection_moves_to_another_server(events in proptest::collection::vec(event(), 1..150)) {
            let mut sides = sides(&mh(), 4, Forwarding::Route);
            let mut now = at(1);
            // Of each client, where its connection is.
            let mut homes: [Option<SocketAddr>; 60] = [None; 60];
            for (place, event) in events {
                now = now + core::time::Duration::from_millis(100);
                match event {
                    Event::Open(n) => {
                        // Another one of the same ports comes when the last one is forgotten.
                        if homes[n as usize].is_none() {
                            homes[n as usize] = target(sides[place].packet_of(client(n), SYN, now));
                            let _ = sides[place].packet_of(client(n), ACK, now);
                        }
                    }
                    Event::Packet(n) => {
                        if let Some(home) = homes[n as usize] {
                            settle(&mut sides, now);
                            let verdict = sides[place].packet_of(client(n), ACK, now);
                            prop_assert_eq!(target(verdict), Some(home), "client {}", n);
                        }
                    }
                    Event::Reset(n) => {
                        if let Some(home) = homes[n as usize] {
                            settle(&mut sides, now);
                            let verdict = sides[place].packet_of(client(n), RST, now);
                            prop_assert_eq!(target(verdict), Some(home), "client {}", n);
                            // Both forget it, and say so.
                            settle(&mut sides, now);
                            now = now + core::time::Duration::from_secs(3600);
                            for side in &mut sides {
                                side.shard.advance(now, usize::MAX);
                            }
                            homes = [None; 60];
                        }
                    }
                    Event::Weight(n, weight) => {
                        for side in &mut sides {
                            set(side, n, weight, Forwarding::Route);
                        }
                    }
                    Event::Review(budget) => {
                        let side = &mut sides[place];
                        side.control.sweep(&mut side.shard);
                        side.control.review(&mut side.shard, budget, now);
                    }
                    Event::Tell => settle(&mut sides, now),
                    Event::Pass => {
                        let [one, two] = &mut sides;
                        let all = one.pass(&Pass::All, now);
                        one.tell(two, now);
                        two.hear(&all, now);
                    }
                }
            }
            settle(&mut sides, now);
            let [one, two] = &mut sides;
            prop_assert_eq!((one.missing(two), two.missing(one)), (0, 0));
            for n in 0..60 {
                let Some(home) = homes[n as usize] else { continue };
                for side in [&mut *one, &mut *two] {
                    let verdict = side.packet_of(client(n), ACK, now);
                    prop_assert_eq!(target(verdict), Some(home), "client {} in the end", n);
                }
                one.tell(two, now);
                two.tell(one, now);
            }
        }
    }
}
