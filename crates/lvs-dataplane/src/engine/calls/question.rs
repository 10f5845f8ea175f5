//! What would become of a packet.

use lvs_core::Tuple;
use lvs_core::api::Failure;
use serde_json::Value;

use super::to_value;
use crate::engine::shared::Shared;

/// A packet that is asked about.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Question {
    pub(in crate::engine) tuple: Tuple,
    /// Its mark; the rules decide without it.
    pub(in crate::engine) mark: Option<u32>,
    /// Where it comes in.
    pub(in crate::engine) interface: Option<String>,
}

impl Shared {
    pub(super) fn explain(&self, question: Question) -> Result<Value, Failure> {
        let all = self.ask(move |worker| worker.explain(&question))?;
        // A packet that opens a connection is decided on in the same way by every worker; only one
        // of them knows a connection that is there.
        to_value(&all.into_iter().max_by_key(|one| one.connection.is_some()))
    }
}
