//! Never queue (`ip_vs_nq`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::About;
use super::least::{ByQuotient, Following, Quotient};
use super::wlc::{least_by, of_usable};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "nq",
    summary: "an idle server, else the shortest expected delay",
    make: || Box::new(Following::new(NeverQueue)),
    ..About::USUAL
};

/// Chooses the first [usable](Server::is_usable) server that has no active connections; if there is
/// none, the usable server with the shortest expected delay.
#[derive(Clone, Copy, Debug, Default)]
pub struct NeverQueue;

impl Scheduler for NeverQueue {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        servers
            .iter()
            .position(|server| server.is_usable() && server.active() == 0)
            .or_else(|| least_by(servers, |server| i64::from(server.active()) + 1))
    }
}

impl ByQuotient for NeverQueue {
    fn quotient(server: &Server) -> Quotient {
        match server.active() {
            // A server without active connections precedes all others, whatever its weight.
            0 => of_usable(server, 0),
            active => of_usable(server, i64::from(active) + 1),
        }
    }
}
