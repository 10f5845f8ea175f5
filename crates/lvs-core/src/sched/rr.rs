//! Round robin (`ip_vs_rr`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::{About, Weights};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "rr",
    summary: "round robin",
    weights: Weights::Ignored,
    make: || Box::<RoundRobin>::default(),
    ..About::USUAL
};

/// Chooses the [usable](Server::is_usable) servers in turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin {
    /// The server chosen last; `None`: the next choice starts at the head of the list.
    last: Option<usize>,
}

impl Scheduler for RoundRobin {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        // Search once around the list: from the server after the last choice, so that the last
        // choice itself comes last.
        let start = self.last.map_or(0, |last| last + 1);
        let chosen = (start..servers.len())
            .chain(0..start.min(servers.len()))
            .find(|&index| servers[index].is_usable())?;
        self.last = Some(chosen);
        Some(chosen)
    }

    fn start(&mut self, _: &[Arc<Server>]) {
        self.last = None;
    }

    fn server_added(&mut self, _: &[Arc<Server>]) {
        self.last = self.last.map(|last| last + 1);
    }

    /// If the last chosen server is removed, its predecessor replaces it, so that no server is
    /// skipped.
    fn server_removed(&mut self, _: &[Arc<Server>], index: usize) {
        self.last = match self.last {
            Some(last) if last >= index => last.checked_sub(1),
            last => last,
        };
    }
}
