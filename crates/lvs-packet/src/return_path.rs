//! Hosts that forwarded replies to through-VIP health checks, although a server with NAT should
//! send its replies directly to the director.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};

use lvs_core::Instant;
use lvs_sys::lock;

use crate::net::PortId;
use crate::wire::Mac;

/// Maximum number of servers for which the forwarding host is stored.
const SERVERS_MAX: usize = 4096;

/// For each server, the latest reply to a through-VIP health check that another host forwarded.
#[derive(Debug, Default)]
pub struct ReturnPaths(Mutex<HashMap<IpAddr, Forwarded>>);

/// A reply that another host forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forwarded {
    /// The port on which the reply arrived.
    pub port: PortId,
    /// The link-layer address of the host that forwarded it.
    pub sender: Mac,
    /// The time at which the reply arrived.
    pub at: Instant,
}

impl ReturnPaths {
    /// Stores the host that forwarded a reply of `server`. If [`SERVERS_MAX`] servers are already
    /// stored, stores nothing for a further server.
    pub(crate) fn learn(&self, server: IpAddr, port: PortId, sender: Mac, at: Instant) {
        let mut all = self.all();
        if all.len() < SERVERS_MAX || all.contains_key(&server) {
            all.insert(server, Forwarded { port, sender, at });
        }
    }

    /// The latest forwarded reply of `server`. `None` if no reply of the server is stored.
    pub fn find(&self, server: IpAddr) -> Option<Forwarded> {
        self.all().get(&server).copied()
    }

    fn all(&self) -> MutexGuard<'_, HashMap<IpAddr, Forwarded>> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn return_paths_are_stored_for_limited_number_of_servers_and_updated() {
        let paths = ReturnPaths::default();
        let server = |n: usize| IpAddr::from(Ipv4Addr::from(u32::try_from(n).unwrap()));
        for n in 0..=SERVERS_MAX {
            paths.learn(server(n), PortId(1), Mac([2; 6]), Instant::ZERO);
        }
        assert!(paths.find(server(SERVERS_MAX)).is_none());
        let moved = Mac([4; 6]);
        paths.learn(server(0), PortId(1), moved, Instant::ZERO);
        assert_eq!(paths.find(server(0)).map(|last| last.sender), Some(moved));
    }
}
