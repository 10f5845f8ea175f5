//! A health check: its probe, its server and its timing.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::probe::{Misfit, Probe, Via};

/// A health check of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Check {
    /// The probe that the check runs.
    pub probe: Probe,
    /// The checked server.
    pub server: SocketAddr,
    /// The path through a service; `None` for the host's own routes.
    pub via: Option<Via>,
    /// Interval between the starts of two checks.
    pub interval: Duration,
    /// The interval while the server's state is undecided, or the last results contradict it. Also
    /// the minimum interval of checks that unanswered clients cause.
    pub fast_interval: Duration,
    /// Percentage by which each interval varies at random.
    pub jitter: u8,
    /// Time after which a check has failed.
    pub timeout: Duration,
    /// Number of consecutive successful checks after which a server that is down is up again.
    pub rise: u32,
    /// Number of consecutive failed checks after which a server that is up is down.
    pub fall: u32,
    /// The effect of clients that get no answer from the server; `None` for no effect.
    pub passive: Option<Passive>,
}

/// The effect of clients that get no answer from a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Passive {
    /// Starts a check at once after this number of consecutive unanswered connection attempts.
    Asks(u32),
    /// A suspicious server counts as down, unless too many servers of its service are suspicious.
    TakesOut,
}

impl Check {
    /// The placeholder for the server in a check that has no server yet.
    pub(crate) const NO_SERVER: SocketAddr =
        SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);

    /// Returns the same check for the server at `server`.
    ///
    /// # Errors
    /// The check cannot be used for this server.
    pub(crate) fn of(mut self, server: SocketAddr) -> Result<Self, Misfit> {
        self.probe = self.probe.bind(server)?;
        self.server = server;
        Ok(self)
    }

    /// Maximum number of descriptors that the check has open at the same time.
    pub(super) const fn descriptors(&self) -> u32 {
        let each = self.probe.descriptors();
        match self.via {
            // The server's own address is probed at the same time.
            Some(_) => 2 * each,
            None => each,
        }
    }

    /// Whether the file demands that the check goes through a service.
    pub fn needs_vip(&self) -> bool {
        self.via.is_some_and(|via| !via.by_default)
    }

    /// The same check of the server's own address.
    pub(super) fn of_own_address(&self) -> Self {
        Self {
            via: None,
            ..self.clone()
        }
    }

    /// Returns the probe, the server and the path. A check keeps the state of an earlier check with
    /// an equal identity.
    pub fn identity(&self) -> (Probe, SocketAddr, Option<Via>) {
        (self.probe.clone(), self.server, self.via)
    }
}
