//! Weighted least connections (`ip_vs_wlc`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{About, AtZero, Request, Scheduler, Weights};
use crate::Server;

/// What there is to know of it.
pub(super) const ABOUT: About = About {
    name: "wlc",
    summary: "fewest connections in proportion to the weight; the default",
    weights: Weights::Share,
    at_zero: AtZero::Avoids,
    needs_replies: false,
    in_kernel: true,
    flags: &[],
    draws_lots: false,
    make: || Box::new(WeightedLeastConnections),
};

/// The server with the smallest [overhead](Server::overhead) divided by weight.
#[derive(Clone, Copy, Debug, Default)]
pub struct WeightedLeastConnections;

impl Scheduler for WeightedLeastConnections {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        least_by(servers, |server| i64::from(server.overhead()))
    }
}

/// The usable server with the smallest `cost` divided by weight; the first of equals.
///
/// Quotients are compared crosswise: `a / wa > b / wb` as `a * wb > b * wa`.
pub(super) fn least_by(servers: &[Arc<Server>], cost: impl Fn(&Server) -> i64) -> Option<usize> {
    let mut least = servers.iter().position(|server| server.is_usable())?;
    for index in least + 1..servers.len() {
        let (best, other) = (&servers[least], &servers[index]);
        if !other.is_overloaded()
            && cost(best) * i64::from(other.weight()) > cost(other) * i64::from(best.weight())
        {
            least = index;
        }
    }
    Some(least)
}
