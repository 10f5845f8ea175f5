//! Peak-EWMA: the server with the shortest expected answer time. IPVS in the kernel does not have
//! this scheduler.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::time::Duration;

use super::About;
use super::wlc::least_by;
use crate::{Instant, Request, Scheduler, Server, ServerId};

/// Minimum interval between two connections to a server whose latency was never measured, while
/// another usable server has a measured latency.
const TRY_AGAIN: Duration = Duration::from_secs(1);

pub(super) const ABOUT: About = About {
    name: "ewma",
    summary: "the shortest measured response time (NAT only)",
    needs_replies: true,
    in_ipvs: false,
    make: || Box::<PeakEwma>::default(),
    ..About::USUAL
};

/// Chooses the server with the shortest expected wait: [response time](Server::latency) × (active
/// connections + 1) / weight, after Finagle's `PeakEwma`.
///
/// The response time is the time from the packet that opens a connection to the server's first
/// answer: for TCP, from SYN to SYN-ACK. If a server does not answer, the time until the client
/// repeats its SYN counts instead. A server that was never measured receives one connection a
/// second until it is measured. While no usable server is measured, the server with the smallest
/// (active connections + 1) / weight receives each further connection. The director must see the
/// answers, so servers must use NAT or full NAT.
#[derive(Clone, Debug, Default)]
pub struct PeakEwma {
    /// For each server: the time of the last connection that was assigned to it to measure it.
    tried: BTreeMap<ServerId, Instant>,
}

impl Scheduler for PeakEwma {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(self.clone()))
    }

    fn pick(&mut self, servers: &[Arc<Server>], request: &Request) -> Option<usize> {
        let now = request.now;
        let mut least: Option<(usize, Wait)> = None;
        for (index, server) in servers.iter().enumerate().filter(|(_, s)| s.is_usable()) {
            let Some(average) = server.latency().average(now) else {
                let tried = self.tried.get(&server.id());
                if tried.is_none_or(|&tried| tried + TRY_AGAIN <= now) {
                    self.tried.insert(server.id(), now);
                    return Some(index);
                }
                continue;
            };
            let wait = Wait::new(average, server);
            if least.as_ref().is_none_or(|(_, best)| wait.is_less(best)) {
                least = Some((index, wait));
            }
        }
        match least {
            Some((index, _)) => Some(index),
            // No server was measured, and each has a new connection already: compare the numbers of
            // active connections.
            None => least_by(servers, |server| i64::from(server.active()) + 1),
        }
    }

    fn start(&mut self, _: &[Arc<Server>]) {
        self.tried.clear();
    }

    fn server_removed(&mut self, servers: &[Arc<Server>], _: usize) {
        self.tried
            .retain(|&id, _| servers.iter().any(|server| server.id() == id));
    }

    fn needs_replies(&self) -> bool {
        true
    }
}

/// Expected delay of a new connection, as a fraction, so that nothing is rounded.
struct Wait {
    cost: u128,
    weight: u128,
}

impl Wait {
    fn new(average: Duration, server: &Server) -> Self {
        Self {
            cost: average.as_nanos() * (u128::from(server.active()) + 1),
            weight: server.weight().unsigned_abs().into(),
        }
    }

    fn is_less(&self, other: &Self) -> bool {
        // 2^64 ns × 2^31 connections × a weight of 2^31 is below 2^128.
        self.cost * other.weight < other.cost * self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::tests::{clients, letters, pool};
    use crate::{Pool, Preview, ServiceFlags};

    const MS: Duration = Duration::from_millis(1);

    fn request(now: Instant) -> Request {
        Request {
            now,
            ..clients(ServiceFlags::default())[0]
        }
    }

    fn choose(pool: &mut Pool, now: Instant) -> char {
        letters(pool, alloc::vec![request(now)]).remove(0)
    }

    fn server(pool: &Pool, name: char) -> &Arc<Server> {
        let last = pool.servers().len() - 1;
        &pool.servers()[last - (name as usize - 'A' as usize)]
    }

    #[test]
    fn ewma_tries_each_server_and_prefers_fastest() {
        let mut pool = pool("ewma", &[1, 1, 1]);
        let now = Instant::from_secs(1);
        let first: alloc::string::String = (0..3).map(|_| choose(&mut pool, now)).collect();
        assert_eq!(first, "CBA");
        assert_eq!(
            choose(&mut pool, now),
            'C',
            "the chosen server has more connections than another unmeasured server"
        );
        for (name, took) in [('A', 5), ('B', 1), ('C', 20)] {
            server(&pool, name).latency().observe(MS * took, now);
        }
        assert_eq!(choose(&mut pool, now), 'B');
        let open: std::vec::Vec<_> = (0..5).map(|_| server(&pool, 'B').open()).collect();
        assert_eq!(
            choose(&mut pool, now),
            'A',
            "6 × 1 ms did not count as more than 5 ms"
        );
        drop(open);
        server(&pool, 'B').latency().observe(MS * 300, now);
        assert_eq!(choose(&mut pool, now), 'A', "a peak did not count at once");
        let later = Instant::from_secs(600);
        server(&pool, 'A').latency().observe(MS * 5, later);
        assert_ne!(choose(&mut pool, later), 'A', "an old peak has not faded");
    }

    #[test]
    fn ewma_divides_by_weight_and_skips_weight_0() {
        let mut pool = pool("ewma", &[4, 1, 0]);
        let now = Instant::from_secs(1);
        for (name, took) in [('A', 30), ('B', 10), ('C', 1)] {
            server(&pool, name).latency().observe(MS * took, now);
        }
        assert_eq!(
            choose(&mut pool, now),
            'A',
            "30 / 4 did not count as less than 10"
        );
    }

    #[test]
    fn ewma_retries_server_without_sample_each_second() {
        let mut pool = pool("ewma", &[1, 1]);
        let now = Instant::from_secs(1);
        server(&pool, 'A').latency().observe(MS, now);
        let mut tries = 0;
        for tenth in 0..30 {
            let at = now + Duration::from_millis(tenth * 100);
            server(&pool, 'A').latency().observe(MS, at);
            tries += u32::from(choose(&mut pool, at) == 'B');
        }
        assert_eq!(tries, 3);
    }

    #[test]
    fn ewma_preview_changes_no_state() {
        let mut pool = pool("ewma", &[1, 1]);
        let request = request(Instant::from_secs(1));
        for _ in 0..3 {
            let Preview::Server(seen) = pool.preview(&request) else {
                panic!("the preview has no server");
            };
            assert_eq!(seen.id(), pool.servers()[0].id());
        }
        assert_eq!(letters(&mut pool, alloc::vec![request; 2]), "BA");
    }
}
