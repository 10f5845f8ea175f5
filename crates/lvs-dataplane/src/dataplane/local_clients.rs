//! Connections from the director's own host to services.
//!
//! The keeper hides the servers' answers to these connections from the host. The packet worker that
//! owns such a connection reports its end to the keeper.

use std::collections::{HashSet, VecDeque};

use lvs_core::Shard;

use lvs_packet::intercept::LocalClient;

/// Number of connections that one call of [`LocalClients::take_ended`] examines.
const PIECE: usize = 4096;
/// Maximum number of recorded connections of one worker: programs can open and close connections
/// faster than the worker finds the closed ones.
const CLIENTS_MAX: usize = 1 << 16;

/// Connections of this host that one worker handles, and whose answers the keeper hides.
#[derive(Debug, Default)]
pub(super) struct LocalClients {
    known: HashSet<LocalClient>,
    order: VecDeque<LocalClient>,
}

impl LocalClients {
    /// Records a connection; `false` if it is new and the limit is reached.
    pub(super) fn add(&mut self, client: LocalClient) -> bool {
        if self.known.len() >= CLIENTS_MAX && !self.known.contains(&client) {
            return false;
        }
        if self.known.insert(client) {
            self.order.push_back(client);
        }
        true
    }

    /// Removes and returns connections that `shard` no longer contains. Each call examines only a
    /// part.
    pub(super) fn take_ended(&mut self, shard: &Shard) -> Vec<LocalClient> {
        let mut ended = Vec::new();
        for _ in 0..self.order.len().min(PIECE) {
            let Some(client) = self.order.pop_front() else {
                break;
            };
            if shard.contains_reply(client.protocol, client.server, client.local) {
                self.order.push_back(client);
            } else {
                self.known.remove(&client);
                ended.push(client);
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use lvs_core::{Control, Options, Protocol};

    use super::*;

    fn client(n: usize) -> LocalClient {
        let [.., net, high, low] = n.to_be_bytes();
        LocalClient {
            protocol: Protocol::TCP,
            server: SocketAddr::from(([10, 0, 0, net], 80)),
            local: SocketAddr::new(
                IpAddr::from([192, 0, 2, 1]),
                u16::from_be_bytes([high, low]),
            ),
        }
    }

    #[test]
    fn hidden_local_clients_are_bounded_and_ended_clients_free_their_slots() {
        let mut clients = LocalClients::default();
        for n in 0..CLIENTS_MAX {
            assert!(clients.add(client(n)));
        }
        assert!(!clients.add(client(CLIENTS_MAX)));
        assert!(clients.add(client(7)), "the connection is already hidden");
        assert_eq!(
            (clients.known.len(), clients.order.len()),
            (CLIENTS_MAX, CLIENTS_MAX)
        );
        let control = Control::new(Options::default());
        let shard = control.shard(0).expect("the first shard is free");
        assert_eq!(clients.take_ended(&shard).len(), PIECE);
        assert!(clients.add(client(CLIENTS_MAX)));
        while !clients.take_ended(&shard).is_empty() {}
        assert!(clients.known.is_empty() && clients.order.is_empty());
    }
}
