//! Weighted round robin (`ip_vs_wrr`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{About, Request, Scheduler, Weights};
use crate::Server;

/// What there is to know of it.
pub(super) const ABOUT: About = About {
    name: "wrr",
    summary: "round robin by weight",
    weights: Weights::Share,
    needs_replies: false,
    in_kernel: true,
    make: || Box::<WeightedRoundRobin>::default(),
};

/// Interleaved weighted round robin: passes over the list with a falling threshold, each taking the servers whose
/// weight reaches it.
#[derive(Clone, Copy, Debug)]
pub struct WeightedRoundRobin {
    /// The server chosen last; `None` is the head of the list.
    last: Option<usize>,
    /// Threshold of the present pass.
    current: i32,
    /// Threshold of the first pass of a round.
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

    fn changed(&mut self, servers: &[Arc<Server>]) {
        self.measure(servers);
        if self.current > self.max || self.current == 0 {
            self.current = self.max;
        } else if self.step > 1 {
            // Keeps the threshold congruent to 1, so that the last pass is at 1 and weight 0 is never reached.
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

pub(super) fn gcd(mut a: i32, mut b: i32) -> i32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
