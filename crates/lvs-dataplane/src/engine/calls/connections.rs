//! Connections and persistence templates, listed.

use lvs_core::Connection;
use lvs_core::api::{ConnInfo, Failure};
use serde_json::Value;

use super::end;
use crate::control::server::Sink;
use crate::engine::shared::Shared;

/// What is looked at in one go, in free slots of the table, so that a listing never holds up
/// packets for long: 512 connections.
const PIECE: usize = 8192;

impl Shared {
    pub(super) fn list_connections(&self, out: &mut Sink<'_>) -> Result<Value, Failure> {
        // Where each shard goes on; what is not in it begins at the first slot.
        let mut starts: Vec<Option<usize>> = Vec::new();
        loop {
            let first = starts.is_empty();
            let from = starts.clone();
            let pieces = self.ask(move |packets| packets.decider().connections(&from, PIECE))?;
            for (number, piece, next) in pieces {
                for connection in &piece {
                    out.item(&conn_info(connection))?;
                }
                if starts.len() <= number {
                    starts.resize(number + 1, Some(0));
                }
                starts[number] = next;
            }
            if first {
                // A listing begins at once.
                out.flush()?;
            }
            if starts.iter().all(Option::is_none) {
                break;
            }
        }
        let mut start = Some(0);
        while let Some(from) = start {
            let (piece, next) = self.templates(from);
            for template in &piece {
                out.item(template)?;
            }
            start = next;
        }
        end(out)
    }

    /// The persistence templates from a slot on, and where to go on.
    fn templates(&self, from: usize) -> (Vec<ConnInfo>, Option<usize>) {
        let now = self.now();
        let control = self.control();
        let (templates, next) = control.templates_piece(from, PIECE, now);
        let templates = templates.into_iter().map(|template| {
            let engine = control.template_engine(template.id);
            ConnInfo {
                engine: engine.map(|(name, data)| (name.to_owned(), data.to_vec())),
                ..conn_info(&template)
            }
        });
        (templates.collect(), next)
    }
}

fn conn_info(connection: &Connection) -> ConnInfo {
    ConnInfo {
        protocol: connection.protocol.0,
        client: connection.client,
        virt: connection.virt,
        server: connection.server,
        state: connection.state.to_owned(),
        expires_ms: u64::try_from(connection.expires.as_millis()).unwrap_or(u64::MAX),
        forwarding: connection.method,
        template: connection.template,
        synced: connection.synced,
        engine: None,
    }
}
