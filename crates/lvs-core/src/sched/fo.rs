//! Weighted failover (`ip_vs_fo`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{About, Weights};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "fo",
    summary: "the available server with the highest weight",
    weights: Weights::Priority,
    goes_by_order: true,
    make: || Box::new(Failover),
    ..About::USUAL
};

/// Chooses the usable server with the highest weight; the others are standby.
#[derive(Clone, Copy, Debug, Default)]
pub struct Failover;

impl Scheduler for Failover {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        heaviest(servers, Server::is_usable)
    }
}

/// Returns the index of the server with the highest weight among the servers for which `fits` is
/// true; the first one, if several have this weight.
pub(super) fn heaviest(servers: &[Arc<Server>], fits: impl Fn(&Server) -> bool) -> Option<usize> {
    (0..servers.len())
        .rev()
        .filter(|&index| fits(&servers[index]))
        // Of equal servers, `max_by_key` returns the last, which is the first in the list before it
        // is reversed.
        .max_by_key(|&index| servers[index].weight())
}
