//! Connections and persistence templates, listed.

use std::ops::Range;

use lvs_core::Connection;
use lvs_core::api::{ConnInfo, Failure};
use serde_json::Value;

use super::end;
use crate::control::server::Sink;
use crate::engine::shared::Shared;

/// Slots of the table that are looked at in one go, so that a listing never holds up packets for long.
const PIECE: usize = 512;

impl Shared {
    pub(super) fn list_connections(&self, out: &mut Sink<'_>) -> Result<Value, Failure> {
        let mut start = 0;
        loop {
            let slots = start..start + PIECE;
            let pieces = self.ask(move |packets| packets.decider().connections(slots.clone()))?;
            let all = pieces.iter().map(|(_, all)| *all).max().unwrap_or(0);
            for connection in pieces.iter().flat_map(|(piece, _)| piece) {
                out.item(&conn_info(connection))?;
            }
            if start == 0 {
                // A listing begins at once.
                out.flush()?;
            }
            start += PIECE;
            if start >= all {
                break;
            }
        }
        start = 0;
        loop {
            let (piece, all) = self.templates(start..start + PIECE);
            for template in &piece {
                out.item(template)?;
            }
            start += PIECE;
            if start >= all {
                return end(out);
            }
        }
    }

    /// The persistence templates in some slots, and the number of slots.
    fn templates(&self, slots: Range<usize>) -> (Vec<ConnInfo>, usize) {
        let now = self.now();
        let control = self.control();
        let templates = control.templates_in(slots, now).map(|template| {
            let engine = control.template_engine(template.id);
            ConnInfo {
                engine: engine.map(|(name, data)| (name.to_owned(), data.to_vec())),
                ..conn_info(&template)
            }
        });
        (templates.collect(), control.template_slots())
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
