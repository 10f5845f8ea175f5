//! The files of a joined text, such as `lvsd.toml` and `conf.d`. Also reads files up to a maximum
//! size.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;

/// Paths and positions of the files in a joined text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    parts: Vec<Part>,
    /// Number of lines of all files.
    lines: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    path: String,
    /// Offset of the file's first byte in the joined text.
    start: usize,
    /// Number of lines before this file.
    lines: usize,
}

impl From<&str> for Files {
    fn from(path: &str) -> Self {
        Self {
            parts: vec![Part {
                path: path.to_owned(),
                start: 0,
                lines: 0,
            }],
            lines: 0,
        }
    }
}

impl Files {
    /// Returns `FILE:LINE` for a line of the joined text, or `line N` if no file contains it.
    pub fn place(&self, line: usize) -> String {
        let after = self.parts.partition_point(|part| part.lines < line);
        match after.checked_sub(1).and_then(|n| self.parts.get(n)) {
            Some(part) => format!("{}:{}", part.path, line - part.lines),
            None => format!("line {line}"),
        }
    }

    /// Returns `FILE:LINE:COLUMN` for a byte of the joined text.
    pub fn position(&self, text: &str, at: usize) -> String {
        let (path, part) = self.part(at, text.len()).unwrap_or(("", 0..text.len()));
        let before = text.get(part.start..at).unwrap_or_default();
        let line = before.rsplit('\n').next().unwrap_or_default();
        let column = 1 + line.chars().count();
        format!("{path}:{}:{column}", lines(before))
    }

    /// Sets the number of lines to that of the joined text `text`.
    pub(crate) fn of(mut self, text: &str) -> Self {
        self.lines = lines(text);
        self
    }

    /// Adds a file that begins at the end of `text`, the joined text so far.
    pub(crate) fn begin(&mut self, path: String, text: &str) {
        self.parts.push(Part {
            path,
            start: text.len(),
            lines: text.bytes().filter(|byte| *byte == b'\n').count(),
        });
    }

    /// Appends a file whose text is not in the joined text, so that only its lines have positions.
    /// Returns the number of lines before it.
    pub(crate) fn push(&mut self, path: String, text: &str) -> usize {
        let before = self.lines;
        self.parts.push(Part {
            path,
            start: usize::MAX,
            lines: before,
        });
        self.lines += lines(text);
        before
    }

    /// Path and byte range of the file that contains byte `at` of the joined text of `length`
    /// bytes; `None` if no file contains it.
    pub(crate) fn part(&self, at: usize, length: usize) -> Option<(&str, Range<usize>)> {
        let n = self
            .parts
            .partition_point(|part| part.start <= at)
            .checked_sub(1)?;
        let part = self.parts.get(n)?;
        let end = self.parts.get(n + 1).map_or(length, |next| next.start);
        Some((&part.path, part.start..end))
    }
}

/// Number of lines in a text. A text that ends with a line break has an empty last line.
fn lines(text: &str) -> usize {
    1 + text.bytes().filter(|byte| *byte == b'\n').count()
}

/// Reads a file of at most `max` bytes. A longer file is an error.
pub(crate) fn read_at_most(file: File, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let text = format!("it is longer than {} MiB", max >> 20);
        return Err(io::Error::new(ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}
