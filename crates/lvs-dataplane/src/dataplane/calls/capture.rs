//! Captures of packets.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use lvs_core::api::{CaptureFilter, CapturedPacket, Failure, FailureCode};
use serde_json::Value;

use crate::dataplane::capture::{Capture, QUEUE, READERS_MAX, Reader};
use crate::dataplane::handle::Handle;
use lvs_process::server::Sink;

/// Time without packets after which the dataplane sends an empty item to the client of a capture.
const IDLE: Duration = Duration::from_secs(1);

impl Handle {
    /// Sends the packets that match `filter` until the client closes the connection, or the
    /// dataplane stops. Packets for which the queue has no room are lost.
    ///
    /// # Errors
    /// [`READERS_MAX`] captures are running already, a packet worker does not answer, the client
    /// has closed the connection, or the dataplane is stopping.
    pub(super) fn capture(
        &self,
        filter: CaptureFilter,
        out: &mut Sink<'_>,
    ) -> Result<Value, Failure> {
        let _place = self.captures.take().ok_or_else(|| {
            Failure::new(
                FailureCode::Full,
                format!("the maximum of {READERS_MAX} captures is reached: stop one"),
            )
        })?;
        let (sender, packets) = mpsc::sync_channel(QUEUE);
        let reader = Arc::<Reader>::default();
        let weak = Arc::downgrade(&reader);
        self.threads.ask(move |worker| {
            worker.capture(Capture::new(filter.clone(), sender.clone(), weak.clone()));
        })?;
        while !self.context.is_stopping() {
            match packets.recv_timeout(IDLE) {
                Ok(packet) => {
                    reader.took(&packet);
                    out.item(&packet)?;
                    for packet in packets.try_iter().take(QUEUE) {
                        reader.took(&packet);
                        out.item(&packet)?;
                    }
                }
                // Detects that the client has closed the connection.
                Err(mpsc::RecvTimeoutError::Timeout) => out.item(&CapturedPacket::default())?,
                // The workers have ended: the dataplane is stopping.
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            out.flush()?;
        }
        Err(Failure::new(
            FailureCode::Internal,
            "the dataplane is stopping, and captures no more packets",
        ))
    }
}
