//! Shortest expected delay (`ip_vs_sed`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::About;
use super::least::{ByQuotient, Following, Quotient};
use super::wlc::{least_by, of_usable};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "sed",
    summary: "shortest expected delay",
    make: || Box::new(Following::new(ShortestExpectedDelay)),
    ..About::USUAL
};

/// Chooses the [usable](Server::is_usable) server with the smallest (active + 1) divided by weight:
/// the expected delay of the new connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct ShortestExpectedDelay;

impl Scheduler for ShortestExpectedDelay {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        least_by(servers, |server| i64::from(server.active()) + 1)
    }
}

impl ByQuotient for ShortestExpectedDelay {
    fn quotient(server: &Server) -> Quotient {
        of_usable(server, i64::from(server.active()) + 1)
    }
}
