//! Connections that the director's own host has made to services.
//!
//! The keeper hides their servers' answers from the host; the worker whose they are says when they
//! have ended.

use std::collections::{HashSet, VecDeque};

use lvs_core::Shard;

use crate::packet::intercept::LocalClient;

/// How many are looked at in one go.
const PIECE: usize = 4096;

/// Those that one worker has asked to be hidden.
#[derive(Debug, Default)]
pub(super) struct LocalClients {
    known: HashSet<LocalClient>,
    order: VecDeque<LocalClient>,
}

impl LocalClients {
    /// One has been asked for.
    pub(super) fn add(&mut self, client: LocalClient) {
        if self.known.insert(client) {
            self.order.push_back(client);
        }
    }

    /// Takes out those whose connections `shard` has no longer, looking at a bounded number.
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
