//! Logs of the programs: best effort, so that no packet, call or health check ever waits for the
//! reader of a log.
//!
//! Lines go into a bounded queue, and one thread sends them to the journal or writes them to
//! standard error. If the reader is slow, is stopped or has exited, or the disk is full, lines are
//! lost, without any other effect. The number of lost lines is logged as soon as writing works
//! again. Messages of panics use the same queue: the default hook would wait for standard error, so
//! that a panicking program could hang.

mod form;
mod journal;
mod json;
mod message_ids;
mod queue;

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing::field::Field;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::{MakeWriter, format as fmt_format};

use self::form::Form;
use self::journal::Journal;
pub use self::message_ids::MESSAGE_IDS;
use self::queue::Queue;

/// Maximum time for which the end of a program waits until the last log lines are written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

#[derive(Debug)]
struct Log {
    queue: Arc<Queue>,
    form: Form,
}

/// Writes the last lines when it is dropped; this lasts at most a second.
#[derive(Debug)]
#[must_use = "the last lines are written when it is dropped"]
pub struct Guard(());

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(log) = LOG.get() {
            log.queue.flush(FLUSH_LIMIT);
        }
    }
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Text for operators and the journal.
    #[default]
    Text,
    /// A JSON object in each line, without journal fields: for collectors of containers' logs.
    Json,
}

impl Format {
    /// The environment variable that sets the format.
    pub const VARIABLE: &'static str = "LVS_LOG_FORMAT";

    /// The format that the environment sets; text if it sets none.
    ///
    /// # Errors
    /// The value of the variable is not a format.
    pub fn from_env() -> Result<Self, String> {
        match std::env::var(Self::VARIABLE).as_deref() {
            Err(_) => Ok(Self::default()),
            Ok(text) => text
                .parse()
                .map_err(|fix| format!("{}={text}: {fix}", Self::VARIABLE)),
        }
    }
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // An empty environment variable sets nothing.
            "text" | "" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("write `text` or `json`".to_owned()),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// Writes the events of `tracing` that pass `filter`, messages of panics, and the messages of
/// [`say`] to standard error, or to the journal if it reads standard error. `mark` distinguishes
/// this program's lines from those of other programs with the same standard error; lines in JSON
/// have the name `program` instead.
///
/// # Errors
/// Standard error cannot be duplicated, no thread can be started, or the log is already set up.
pub fn start(
    filter: EnvFilter,
    mark: Option<&'static str>,
    format: Format,
    program: &'static str,
) -> io::Result<Guard> {
    let stderr = io::stderr();
    let variable = std::env::var("JOURNAL_STREAM").ok();
    let json = (format == Format::Json).then_some(program);
    let journal = json.is_none() && form::is_journal(&stderr, variable.as_deref());
    // Without this socket, the journal receives the same lines through standard error.
    let native = journal.then(|| Journal::at(Path::new(journal::SOCKET), identifier()));
    let native = native.and_then(Result::ok);
    let form = Form {
        journal,
        fields: native.is_some(),
        ansi: json.is_none() && stderr.is_terminal(),
        mark,
        json,
    };
    // A separate descriptor: a write that hangs would otherwise hold the lock of `io::stderr`.
    let out = File::from(stderr.as_fd().try_clone_to_owned()?);
    let queue = Arc::new(Queue::start(out, form, native)?);
    let log = Log {
        queue: Arc::clone(&queue),
        form,
    };
    LOG.set(log)
        .map_err(|_| io::Error::other("the log of this process is already set up"))?;
    std::panic::set_hook(Box::new(panicked));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(form.ansi)
        .event_format(form)
        .fmt_fields(fmt_format::debug_fn(plain))
        .with_writer(Lines(queue))
        .try_init()
        .map_err(io::Error::other)?;
    Ok(Guard(()))
}

/// Formats a field of an event: the message without name and quotes, other fields with their names.
/// Fields that only the journal receives are omitted.
fn plain(out: &mut fmt_format::Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    match field.name() {
        journal::EVENT => Ok(()),
        "message" => write!(out, "{value:?}"),
        name => write!(out, " {name}={value:?}"),
    }
}

/// The format of this process's log; `None` if the log is not set up yet.
pub fn format() -> Option<Format> {
    LOG.get().map(|log| match log.form.json {
        Some(_) => Format::Json,
        None => Format::Text,
    })
}

/// Prints a message for the user who started the program: through the log if it is set up, and
/// directly to standard error before. A message that cannot be written is lost. Except in JSON, the
/// message is printed unchanged, and only the journal receives `level`.
pub fn say(level: Level, text: fmt::Arguments<'_>) {
    match LOG.get() {
        Some(log) => match log.form.json {
            Some(_) => {
                let line = log.form.own_line(level, text.to_string().trim_end());
                log.queue.push(level, &line);
            }
            None => log.queue.push(level, &text.to_string()),
        },
        None => {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }
}

/// This program's name in the journal: the name by which it was started.
fn identifier() -> String {
    let name = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&name).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn panicked(info: &std::panic::PanicHookInfo<'_>) {
    let Some(log) = LOG.get() else { return };
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let mut text = format!("internal error of this program, in the thread {name}: {info}");
    let trace = std::backtrace::Backtrace::capture();
    if trace.status() == std::backtrace::BacktraceStatus::Captured {
        text.push_str(&format!("\n{trace}"));
    }
    let text = log.form.own_line(Level::ERROR, &text);
    log.queue.push(Level::ERROR, &text);
    log.queue.flush(FLUSH_LIMIT);
}

/// Makes the queue a writer for `tracing`.
struct Lines(Arc<Queue>);

struct Line<'a> {
    queue: &'a Queue,
    level: Level,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Line {
            queue: &self.0,
            level: Level::INFO,
        }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        Line {
            queue: &self.0,
            level: *meta.level(),
        }
    }
}

impl Write for Line<'_> {
    /// Queues an event; `tracing` writes each event in one call.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.queue.push(self.level, &String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn lines(mut from: io::PipeReader) -> Vec<String> {
        let mut text = String::new();
        from.read_to_string(&mut text)
            .expect("the text can be read");
        text.lines().map(ToOwned::to_owned).collect()
    }

    #[test]
    fn log_lines_arrive_in_order_and_long_lines_are_cut_off() {
        let (from, to) = io::pipe().expect("the pipe can be created");
        let queue = Queue::start(to, Form::default(), None).expect("the thread can be started");
        for n in 0..100 {
            queue.push(Level::INFO, &format!("line {n}\n"));
        }
        queue.push(Level::INFO, &"ä".repeat(40_000));
        queue.flush(Duration::from_secs(60));
        drop(queue);
        let lines = lines(from);
        assert_eq!(lines.len(), 101);
        assert!(
            lines[..100]
                .iter()
                .enumerate()
                .all(|(n, line)| *line == format!("line {n}"))
        );
        assert!(lines[100].ends_with("ä [...]") && lines[100].len() <= 16 << 10);
    }

    #[test]
    fn log_lines_beyond_full_queue_are_lost_and_counted_if_reader_stops() {
        // The queue contains at most a mebibyte or 4,096 lines, and the pipe has a buffer, too.
        reader_stops(1000, (1000, 1200));
        reader_stops(100, (4096, 5000));
    }

    fn reader_stops(length: usize, (least, most): (usize, usize)) {
        let (from, to) = io::pipe().expect("the pipe can be created");
        let queue = Queue::start(to, Form::default(), None).expect("the thread can be started");
        let line = "x".repeat(length);
        for _ in 0..100_000 {
            queue.push(Level::INFO, &line);
        }
        // The flush times out, because nothing reads yet.
        queue.flush(Duration::from_millis(10));
        let reader = std::thread::spawn(move || lines(from));
        // The loss is reported even if no other line follows.
        queue.flush(Duration::from_secs(60));
        drop(queue);
        let lines = reader.join().expect("the thread ends without a panic");
        let (stated, whole): (Vec<_>, Vec<_>) =
            lines.iter().partition(|line| line.contains(" lost"));
        assert!(whole.iter().all(|one| **one == line));
        let lost: usize = stated
            .iter()
            .filter_map(|line| {
                line.split("WARN ")
                    .nth(1)?
                    .split(' ')
                    .next()?
                    .parse::<usize>()
                    .ok()
            })
            .sum();
        assert!(!stated.is_empty());
        assert_eq!(lost + whole.len(), 100_000);
        assert!((least..most).contains(&whole.len()), "{}", whole.len());
    }

    /// A writer that refuses the given number of writes before it accepts any.
    struct Full(usize, io::PipeWriter);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.checked_sub(1) {
                Some(left) => {
                    self.0 = left;
                    Err(io::ErrorKind::StorageFull.into())
                }
                None => self.1.write(&bytes[..bytes.len().min(7)]),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_refused_by_full_disk_are_counted_and_reported_later() {
        let (from, to) = io::pipe().expect("the pipe can be created");
        let queue =
            Queue::start(Full(5, to), Form::default(), None).expect("the thread can be started");
        for n in 0..4 {
            queue.push(Level::INFO, &format!("line {n}"));
        }
        queue.flush(Duration::from_secs(60));
        drop(queue);
        let lines = lines(from);
        // Five refusals: line 0, the loss, line 1, the loss, line 2.
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("WARN 3 log lines were lost"), "{lines:?}");
        assert_eq!(lines[1], "line 3");
    }
}
