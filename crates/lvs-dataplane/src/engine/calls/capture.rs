//! Packets shown to whoever asks.

use std::sync::mpsc;
use std::time::Duration;

use lvs_core::api::{CaptureFilter, CapturedPacket, Failure, FailureCode};
use serde_json::Value;

use super::end;
use crate::control::server::Sink;
use crate::engine::capture::{Capture, QUEUE};
use crate::engine::shared::Shared;

/// How long a capture without packets is silent.
const IDLE: Duration = Duration::from_secs(1);

impl Shared {
    /// Hands out packets until the client is gone.
    pub(super) fn capture(
        &self,
        filter: CaptureFilter,
        out: &mut Sink<'_>,
    ) -> Result<Value, Failure> {
        let (sender, packets) = mpsc::sync_channel(QUEUE);
        self.ask(move |packets| packets.capture(Capture::new(filter.clone(), sender.clone())))?;
        while !self.is_stopping() {
            match packets.recv_timeout(IDLE) {
                Ok(packet) => {
                    out.item(&packet)?;
                    for packet in packets.try_iter().take(QUEUE) {
                        out.item(&packet)?;
                    }
                }
                // Shows whether the client is still there.
                Err(mpsc::RecvTimeoutError::Timeout) => out.item(&CapturedPacket::default())?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new(
                        FailureCode::Unsupported,
                        "no packet ever comes: the engine has no interfaces or ends",
                    ));
                }
            }
            out.flush()?;
        }
        end(out)
    }
}
