//! The queue of lines for the journal or standard error, and the thread that writes them.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use tracing::Level;

use super::form::Form;
use super::journal::{Journal, parts};

const LINES_MAX: usize = 4096;
const BYTES_MAX: usize = 1 << 20;
/// Maximum length in bytes of a queued text; the rest of a longer text is cut off.
const LINE_MAX: usize = 16 << 10;
const CUT: &str = " [...]";
/// Interval between two attempts to log the number of lost lines.
const RETRY: Duration = Duration::from_secs(1);
/// Pause before the next attempt to write to a non-blocking descriptor.
const POLL: Duration = Duration::from_millis(10);

enum Message {
    Line {
        level: Level,
        text: Box<str>,
        /// Number of lines that were lost before this line.
        lost: u64,
    },
    /// Requests a notification when all earlier messages are written.
    Flush(SyncSender<()>),
}

/// A queue of lines. A push never blocks; lines that do not fit are lost and counted.
#[derive(Debug)]
pub(super) struct Queue {
    sender: SyncSender<Message>,
    shared: Arc<Shared>,
    writer: ThreadId,
}

#[derive(Debug, Default)]
struct Shared {
    bytes: AtomicUsize,
    lost: AtomicU64,
}

impl Queue {
    /// Starts the thread that sends lines to `journal`. Without a journal, all lines are written to
    /// `out`; otherwise, only those that the journal does not accept.
    pub(super) fn start(
        out: impl Write + Send + 'static,
        form: Form,
        journal: Option<Journal>,
    ) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(LINES_MAX);
        let shared = Arc::<Shared>::default();
        let writer = Writer {
            out,
            form,
            journal,
            lost: 0,
            torn: false,
            shared: Arc::clone(&shared),
        };
        let thread = thread::Builder::new()
            .name("lvs-log".into())
            .spawn(move || writer.run(&receiver))?;
        Ok(Self {
            sender,
            shared,
            writer: thread.thread().id(),
        })
    }

    /// Queues a text of one or more lines. The end of a long text is cut off. If the queue is full,
    /// the text is lost.
    pub(super) fn push(&self, level: Level, text: &str) {
        let text = text.strip_suffix('\n').unwrap_or(text);
        let text = match text.len() {
            0..=LINE_MAX => Box::from(text),
            _ => {
                let whole = |&end: &usize| text.is_char_boundary(end);
                let end = (0..=LINE_MAX - CUT.len()).rev().find(whole).unwrap_or(0);
                [&text[..end], CUT].concat().into_boxed_str()
            }
        };
        let len = text.len();
        let before = self.shared.bytes.fetch_add(len, Ordering::AcqRel);
        // This never waits: it tries once, and the only system call under the channel's lock is a
        // wake-up.
        let lost = self.shared.lost.swap(0, Ordering::AcqRel);
        let sent = before.saturating_add(len) <= BYTES_MAX
            && self
                .sender
                .try_send(Message::Line { level, text, lost })
                .is_ok();
        if !sent {
            self.shared.bytes.fetch_sub(len, Ordering::AcqRel);
            self.shared.lost.fetch_add(lost + 1, Ordering::AcqRel);
        }
    }

    /// Waits until the queued lines are written, at most `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        // The writing thread itself cannot wait: it would wait for itself.
        if thread::current().id() == self.writer {
            return;
        }
        let deadline = Instant::now() + limit;
        let (done, wait) = sync_channel(1);
        let mut message = Message::Flush(done);
        loop {
            match self.sender.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Full(back)) if Instant::now() < deadline => {
                    message = back;
                    thread::sleep(POLL);
                }
                Err(_) => return,
            }
        }
        let _ = wait.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

struct Writer<W> {
    out: W,
    form: Form,
    journal: Option<Journal>,
    /// Number of lost lines that were not reported yet.
    lost: u64,
    /// Whether the last write ended in the middle of a line.
    torn: bool,
    shared: Arc<Shared>,
}

impl<W: Write> Writer<W> {
    fn run(mut self, messages: &Receiver<Message>) {
        loop {
            let message = if self.lost > 0 || self.shared.lost.load(Ordering::Acquire) > 0 {
                match messages.recv_timeout(RETRY) {
                    Err(RecvTimeoutError::Timeout) => {
                        self.lost += self.shared.lost.swap(0, Ordering::AcqRel);
                        self.log_losses();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                    Ok(message) => message,
                }
            } else {
                match messages.recv() {
                    Err(_) => return,
                    Ok(message) => message,
                }
            };
            match message {
                Message::Line { level, text, lost } => {
                    self.lost += lost;
                    self.log_losses();
                    if !self.write(level, &text) {
                        self.lost += 1;
                    }
                    self.shared.bytes.fetch_sub(text.len(), Ordering::AcqRel);
                }
                Message::Flush(done) => {
                    self.lost += self.shared.lost.swap(0, Ordering::AcqRel);
                    self.log_losses();
                    let _ = done.try_send(());
                }
            }
        }
    }

    fn log_losses(&mut self) {
        let count = self.lost;
        if count == 0 {
            return;
        }
        let lines = if count == 1 { "line was" } else { "lines were" };
        let text = format!(
            "{count} log {lines} lost: standard error was blocked, or refused them (a slow reader, a full disk)"
        );
        let text = self.form.own_line(Level::WARN, &text);
        if self.write(Level::WARN, &text) {
            self.lost -= count;
        }
    }

    /// Writes a text, and returns whether all of it was written.
    fn write(&mut self, level: Level, text: &str) -> bool {
        let sent = self.journal.as_ref();
        if sent.is_some_and(|journal| journal.send(level, text)) {
            return true;
        }
        let (_, text) = parts(text);
        let mut bytes = Vec::with_capacity(text.len() + 8);
        if self.torn {
            bytes.push(b'\n');
        }
        self.form.lines(level, text, &mut bytes);
        self.write_all(&bytes)
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            match self.out.write(bytes) {
                Ok(0) => return false,
                Ok(count) => {
                    self.torn = bytes[count - 1] != b'\n';
                    bytes = &bytes[count..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Another process has made the shared file description non-blocking. Only this
                // thread may wait.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(POLL),
                Err(_) => return false,
            }
        }
        true
    }
}
