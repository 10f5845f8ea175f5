//! Weighted least connections (`ip_vs_wlc`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::About;
use super::least::{ByQuotient, Following, Quotient};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "wlc",
    summary: "fewest connections in proportion to the weight; the default",
    make: || Box::new(Following::new(WeightedLeastConnections)),
    ..About::USUAL
};

/// Chooses the [usable](Server::is_usable) server with the smallest [overhead](Server::overhead)
/// divided by weight.
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

impl ByQuotient for WeightedLeastConnections {
    fn quotient(server: &Server) -> Quotient {
        of_usable(server, server.overhead().into())
    }
}

/// `load` divided by the server's weight; the weight of an unusable server counts as 0.
pub(super) fn of_usable(server: &Server, load: i64) -> Quotient {
    // An unusable server has weight 0 here, but can still win with a negative load, as in the
    // kernel.
    let weight = if server.is_usable() {
        server.weight().into()
    } else {
        0
    };
    Quotient { load, weight }
}

/// The usable server with the smallest `cost` divided by weight; the first of equal servers.
///
/// `a / wa > b / wb` is computed as `a * wb > b * wa`.
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
