//! The format of log lines: time (for the journal, a priority instead), level, program and text; or
//! a JSON object.

use std::fmt;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{self, FormatEvent, FormatFields};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::registry::LookupSpan;

use super::journal::{Fields, priority};
use super::json;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Form {
    /// Whether the journal reads standard error: lines then begin with a priority, and have no
    /// time, because the journal adds the time.
    pub(super) journal: bool,
    /// Whether the journal receives fields of events in addition to the text.
    pub(super) fields: bool,
    pub(super) ansi: bool,
    /// A mark in front of this program's lines, if other programs write to the same standard error.
    pub(super) mark: Option<&'static str>,
    /// The name of this program, if each line is a JSON object that contains it.
    pub(super) json: Option<&'static str>,
}

impl Form {
    pub(super) fn lines(&self, level: Level, text: &str, out: &mut Vec<u8>) {
        for line in text.split('\n') {
            if self.journal {
                // A line feed ends a record of the journal, so each line has its own priority.
                let _ = write!(out, "<{}>", priority(level));
            }
            out.extend_from_slice(line.as_bytes());
            out.push(b'\n');
        }
    }

    /// Formats a line of the log module itself.
    pub(super) fn own_line(&self, level: Level, text: &str) -> String {
        if let Some(program) = self.json {
            return json::line(program, level, text, &[]);
        }
        let mut line = String::new();
        let mut writer = format::Writer::new(&mut line);
        // Writing to a string cannot fail.
        let _ = self.head(level, self.ansi, &mut writer);
        line.push_str(text);
        line
    }

    fn head(&self, level: Level, ansi: bool, writer: &mut format::Writer<'_>) -> fmt::Result {
        if !self.journal {
            if ansi {
                writer.write_str("\x1b[2m")?;
            }
            // If the clock cannot be read, the line is still written.
            if SystemTime.format_time(writer).is_err() {
                writer.write_str("<no time>")?;
            }
            if ansi {
                writer.write_str("\x1b[0m")?;
            }
            writer.write_char(' ')?;
        }
        if ansi {
            write!(writer, "\x1b[{}m{level:>5}\x1b[0m ", colour(level))?;
        } else {
            write!(writer, "{level:>5} ")?;
        }
        match self.mark {
            Some(mark) => write!(writer, "{mark}: "),
            None => Ok(()),
        }
    }
}

impl<S, N> FormatEvent<S, N> for Form
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: format::Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if let Some(program) = self.json {
            let mut fields = json::Fields::default();
            event.record(&mut fields);
            let level = *event.metadata().level();
            return writeln!(writer, "{}", fields.line(program, level));
        }
        if self.fields {
            let mut fields = Fields::default();
            event.record(&mut fields);
            writer.write_str(&fields.front())?;
        }
        let ansi = writer.has_ansi_escapes();
        self.head(*event.metadata().level(), ansi, &mut writer)?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

const fn colour(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    }
}

/// Whether the journal reads `stream`: `variable`, the value of `JOURNAL_STREAM`, has the device
/// and inode of the journal's stream (systemd.exec(5)). A program whose standard error was
/// redirected also inherits this variable.
pub(super) fn is_journal(stream: &impl AsFd, variable: Option<&str>) -> bool {
    let stat = || -> io::Result<(u64, u64)> {
        let file = std::fs::File::from(stream.as_fd().try_clone_to_owned()?);
        let meta = file.metadata()?;
        Ok((meta.dev(), meta.ino()))
    };
    let named = variable
        .and_then(|text| text.split_once(':'))
        .and_then(|(dev, ino)| Some((dev.parse().ok()?, ino.parse().ok()?)));
    named.is_some_and(|named: (u64, u64)| stat().is_ok_and(|own| own == named))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn log_lines_have_priority_for_journal_and_time_for_other_outputs() {
        let mut form = Form {
            journal: true,
            fields: false,
            ansi: false,
            mark: Some("dataplane"),
            json: None,
        };
        let mut out = Vec::new();
        form.lines(Level::ERROR, "one\ntwo", &mut out);
        assert_eq!(out, b"<3>one\n<3>two\n");
        assert_eq!(form.own_line(Level::WARN, "x"), " WARN dataplane: x");
        form.journal = false;
        out.clear();
        form.lines(Level::ERROR, "one", &mut out);
        assert_eq!(out, b"one\n");
        assert!(
            form.own_line(Level::INFO, "x")
                .ends_with("Z  INFO dataplane: x")
        );
    }

    #[test]
    fn stream_is_journal_only_if_device_and_inode_match() {
        let (stream, _other) = UnixStream::pair().expect("the sockets can be opened");
        let meta = std::fs::File::from(
            stream
                .as_fd()
                .try_clone_to_owned()
                .expect("the copy can be made"),
        )
        .metadata()
        .expect("the stream has metadata");
        let name = format!("{}:{}", meta.dev(), meta.ino());
        assert!(is_journal(&stream, Some(&name)));
        assert!(!is_journal(&stream, Some(&format!("{}:1", meta.dev()))));
        for other in [None, Some(""), Some(":"), Some("1"), Some("a:b")] {
            assert!(!is_journal(&stream, other), "{other:?}");
        }
    }
}
