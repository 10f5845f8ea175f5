//! Weighted round robin (`ip_vs_wrr`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::About;
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "wrr",
    summary: "round robin by weight",
    make: || Box::<WeightedRoundRobin>::default(),
    ..About::USUAL
};

/// Interleaved weighted round robin: passes over the list with a falling threshold, and chooses in
/// each pass the servers whose weight reaches it.
#[derive(Clone, Copy, Debug)]
pub struct WeightedRoundRobin {
    /// The server chosen last; `None`: the next choice starts at the head of the list.
    last: Option<usize>,
    /// The weight that a server must have to be chosen in the present pass.
    current: i32,
    /// The threshold of the first pass in a round: the greatest weight, lowered by `step` - 1.
    max: i32,
    /// Step between passes: the greatest common divisor of the weights.
    step: i32,
}

impl Default for WeightedRoundRobin {
    fn default() -> Self {
        Self {
            last: None,
            current: 0,
            max: 0,
            step: 1,
        }
    }
}

impl WeightedRoundRobin {
    fn measure(&mut self, servers: &[Arc<Server>]) {
        let weights = || servers.iter().map(|server| server.weight());
        self.step = weights()
            .filter(|&weight| weight > 0)
            .reduce(gcd)
            .unwrap_or(1);
        self.max = weights().fold(0, i32::max) - (self.step - 1);
        self.last = None;
    }

    /// Skips passes in which no server can be chosen, except the last pass of the round. If every
    /// server is at its upper threshold and weights are a million, there are a million such passes.
    /// `heaviest` is the greatest weight of a server that can be chosen.
    fn skip_passes(&mut self, heaviest: i32) {
        let floor = heaviest.max(self.step);
        if self.current > floor {
            // The number of passes to the first threshold that is not above the floor, rounded up.
            let passes = (self.current - floor - 1) / self.step + 1;
            self.current -= passes * self.step;
        }
    }

    fn changed(&mut self, servers: &[Arc<Server>]) {
        self.measure(servers);
        if self.current > self.max || self.current == 0 {
            self.current = self.max;
        } else if self.step > 1 {
            // The threshold stays congruent to 1 modulo the step, so that the last pass is at 1,
            // and weight 0 is never reached.
            self.current = self.current / self.step * self.step + 1;
        }
    }
}

impl Scheduler for WeightedRoundRobin {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        if self.max == 0 {
            return None;
        }
        let came_from = self.last;
        let mut stop = None;
        let (mut last_pass, mut restarted) = (false, false);
        let mut start = came_from.map_or(0, |last| last + 1);
        let mut floor = None;
        loop {
            for (index, server) in servers.iter().enumerate().skip(start) {
                if !server.is_overloaded() && server.weight() >= self.current {
                    self.last = Some(index);
                    return Some(index);
                }
                if stop == Some(index) {
                    self.last = Some(index);
                    return None;
                }
            }
            start = 0;
            self.current -= self.step;
            if self.current <= 0 {
                self.current = self.max;
                if last_pass || came_from.is_none() {
                    self.last = None;
                    return None;
                }
                restarted = true;
            }
            if stop.is_none() {
                self.skip_passes(*floor.get_or_insert_with(|| heaviest(servers)));
            }
            last_pass = self.current <= self.step;
            if last_pass && restarted {
                stop = came_from;
            }
        }
    }

    fn start(&mut self, servers: &[Arc<Server>]) {
        self.measure(servers);
        self.current = self.max;
    }

    fn server_added(&mut self, servers: &[Arc<Server>]) {
        self.changed(servers);
    }

    fn server_removed(&mut self, servers: &[Arc<Server>], _: usize) {
        self.changed(servers);
    }

    fn server_edited(&mut self, servers: &[Arc<Server>], _: usize) {
        self.changed(servers);
    }
}

fn heaviest(servers: &[Arc<Server>]) -> i32 {
    let free = servers.iter().filter(|server| !server.is_overloaded());
    free.map(|server| server.weight()).fold(0, i32::max)
}

pub(super) fn gcd(mut a: i32, mut b: i32) -> i32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::sched::tests::{clients, server};
    use crate::{Forwarding, ServerConfig, ServerId};

    /// Chooses a server as `ip_vs_wrr_schedule` does, pass by pass.
    fn pass_by_pass(wrr: &mut WeightedRoundRobin, servers: &[Arc<Server>]) -> Option<usize> {
        if wrr.max == 0 {
            return None;
        }
        let came_from = wrr.last;
        let (mut stop, mut last_pass, mut restarted) = (None, false, false);
        let mut start = came_from.map_or(0, |last| last + 1);
        loop {
            for (index, server) in servers.iter().enumerate().skip(start) {
                if !server.is_overloaded() && server.weight() >= wrr.current {
                    wrr.last = Some(index);
                    return Some(index);
                }
                if stop == Some(index) {
                    wrr.last = Some(index);
                    return None;
                }
            }
            start = 0;
            wrr.current -= wrr.step;
            if wrr.current <= 0 {
                wrr.current = wrr.max;
                if last_pass || came_from.is_none() {
                    wrr.last = None;
                    return None;
                }
                restarted = true;
            }
            last_pass = wrr.current <= wrr.step;
            if last_pass && restarted {
                stop = came_from;
            }
        }
    }

    fn servers(of: &[(i32, bool)]) -> Vec<Arc<Server>> {
        let servers = (1..).zip(of).map(|(n, &(weight, full))| {
            let config = ServerConfig::new(weight, Forwarding::Nat);
            let server = Server::new(ServerId(n.into()), server(n), &config).unwrap();
            if full {
                server.overload_for_test();
            }
            Arc::new(server)
        });
        servers.collect()
    }

    #[test]
    fn wrr_skips_passes_without_usable_server() {
        let servers = servers(&[(1_000_000, true), (999_999, true), (1, false)]);
        let mut wrr = WeightedRoundRobin::default();
        wrr.start(&servers);
        let request = clients(crate::ServiceFlags::default())[0];
        // If each pass were a step, these choices would take 10^10 steps.
        for _ in 0..10_000 {
            assert_eq!(wrr.pick(&servers, &request), Some(2));
        }
        servers[2].overload_for_test();
        for _ in 0..10_000 {
            assert_eq!(wrr.pick(&servers, &request), None);
        }
    }

    proptest::proptest! {
        #[test]
        fn wrr_skipped_passes_do_not_change_choice(
            steps in proptest::collection::vec(
                (proptest::collection::vec((0i32..40, proptest::prelude::any::<bool>()), 1..6), 1i32..5, 1usize..8),
                1..8,
            )
        ) {
            let mut wrr = WeightedRoundRobin::default();
            let request = clients(crate::ServiceFlags::default())[0];
            for (servers_of, scale, picks) in steps {
                let scaled: Vec<_> = servers_of.iter().map(|&(weight, full)| (weight * scale, full)).collect();
                let servers = servers(&scaled);
                wrr.changed(&servers);
                let mut twin = wrr;
                for _ in 0..picks {
                    let chosen = wrr.pick(&servers, &request);
                    proptest::prop_assert_eq!(chosen, pass_by_pass(&mut twin, &servers));
                    proptest::prop_assert_eq!(
                        (wrr.last, wrr.current), (twin.last, twin.current)
                    );
                }
            }
        }
    }
}
