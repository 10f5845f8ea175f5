//! Listing of connections and persistence templates.

use lvs_core::api::{ConnInfo, Failure};
use serde_json::Value;

use super::end;
use crate::dataplane::handle::Handle;
use lvs_process::server::Sink;

/// Budget of one job of a listing. A free slot costs 1 and a connection 16, so that a job examines
/// up to 8,192 slots and returns up to 512 connections. A listing therefore never delays packets
/// for long.
const PIECE: usize = 8192;

impl Handle {
    pub(super) fn list_connections(&self, out: &mut Sink<'_>) -> Result<Value, Failure> {
        // The next slot of each shard; a shard without an entry begins at the first slot.
        let mut starts: Vec<Option<usize>> = Vec::new();
        loop {
            let first = starts.is_empty();
            let from = starts.clone();
            let pieces = self
                .threads
                .ask(move |worker| worker.decider().connections(&from, PIECE))?;
            for (number, piece, next) in pieces {
                for connection in &piece {
                    out.item(&ConnInfo::of(connection))?;
                }
                if starts.len() <= number {
                    starts.resize(number + 1, Some(0));
                }
                starts[number] = next;
            }
            if first {
                // The client receives the first part of the listing at once.
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

    /// Returns the persistence templates in the slots from `from` on, and the slot at which the
    /// next call continues; `None` at the end of the table.
    fn templates(&self, from: usize) -> (Vec<ConnInfo>, Option<usize>) {
        let now = self.context.now();
        let control = self.context.control();
        let (templates, next) = control.templates_piece(from, PIECE, now);
        let templates = templates.iter();
        let templates = templates.map(|template| ConnInfo::of_template(&control, template));
        (templates.collect(), next)
    }
}
