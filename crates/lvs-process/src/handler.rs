//! The interface between the server of a control socket and the process whose socket it is.

use std::io::{self, Write};

use lvs_core::api::{Call, Failure, FailureCode};
use serde::Serialize;
use serde_json::Value;

/// Answers the requests of clients.
pub trait Handler: Send + Sync + 'static {
    /// Name and version of the process, for example `lvs-dataplane 0.1.0`.
    fn name(&self) -> String;

    /// Size of the connection table as listings print it.
    fn table_size(&self) -> u32;

    /// Executes `call` and returns the final result; the items of a list are sent to `out` before.
    /// The server itself answers `hello`, and refuses calls that make changes from clients without
    /// write access.
    ///
    /// Many threads call this function at the same time. [`Sink::item`] blocks while the client
    /// does not read, so an implementation must not hold a lock that packets need while it calls
    /// `item`: it copies a long list in pieces.
    ///
    /// # Errors
    /// A refusal; then nothing has changed.
    fn call(&self, call: Call, out: &mut Sink<'_>) -> Result<Value, Failure>;
}

/// Receives the items of a list, and sends them to the client.
pub struct Sink<'a> {
    id: u64,
    out: &'a mut dyn Write,
    count: u64,
}

impl std::fmt::Debug for Sink<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sink")
            .field("id", &self.id)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl<'a> Sink<'a> {
    /// Creates a sink that writes the items of the answer to request `id` as lines.
    pub fn new(id: u64, out: &'a mut dyn Write) -> Self {
        Self { id, out, count: 0 }
    }

    /// Sends one item.
    ///
    /// # Errors
    /// The client has disconnected, or does not read: the caller should stop.
    pub fn item(&mut self, item: &impl Serialize) -> Result<(), Failure> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            id: u64,
            item: &'a T,
        }
        write_line(&mut self.out, &Line { id: self.id, item }).map_err(|error| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot send the answer to the client: {error}"),
            )
        })?;
        self.count += 1;
        Ok(())
    }

    /// Sends the buffered items, for a list whose items follow slowly.
    ///
    /// # Errors
    /// The client has disconnected, or does not read: the caller should stop.
    pub fn flush(&mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|error| {
            Failure::new(
                FailureCode::Internal,
                format!("cannot send the answer to the client: {error}"),
            )
        })
    }

    /// Number of items sent.
    pub const fn count(&self) -> u64 {
        self.count
    }
}

pub(super) fn write_error(out: &mut impl Write, id: u64, error: &Failure) -> io::Result<()> {
    #[derive(Serialize)]
    struct Line<'a> {
        id: u64,
        error: &'a Failure,
    }
    write_line(out, &Line { id, error })
}

pub(super) fn write_line(
    mut out: &mut (impl Write + ?Sized),
    line: &impl Serialize,
) -> io::Result<()> {
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")
}
