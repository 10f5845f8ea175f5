//! Least connections (`ip_vs_lc`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::least::{ByQuotient, Following, Quotient};
use super::{About, Weights};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "lc",
    summary: "fewest connections",
    weights: Weights::Ignored,
    make: || Box::new(Following::new(LeastConnections)),
    ..About::USUAL
};

/// Chooses the server with the smallest [overhead](Server::overhead). Overloaded servers and servers
/// with weight 0 are not chosen; the weight has no other effect.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastConnections;

impl Scheduler for LeastConnections {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        (0..servers.len())
            .filter(|&index| !servers[index].is_overloaded() && servers[index].weight() != 0)
            // Unsigned comparison, as in the kernel; `min_by_key` returns the first of equal
            // servers.
            .min_by_key(|&index| servers[index].overhead().cast_unsigned())
    }
}

impl ByQuotient for LeastConnections {
    fn quotient(server: &Server) -> Quotient {
        if server.is_overloaded() || server.weight() == 0 {
            return Quotient::NEVER;
        }
        Quotient {
            load: server.overhead().cast_unsigned().into(),
            weight: 1,
        }
    }
}
