//! Reads lines from a server that may send them byte by byte, or never end.

use tokio::io::{AsyncRead, AsyncReadExt};

use super::eager::hangs_up;

/// The result of reading a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// A complete line, without its line break.
    Whole(Vec<u8>),
    /// The end of the stream, and the bytes after the last line break.
    End(Vec<u8>),
    /// The line is longer than the limit.
    TooLong,
}

#[derive(Debug)]
pub(super) struct Lines<R> {
    stream: R,
    buffer: Vec<u8>,
    /// Number of bytes that were searched for the end of a line.
    seen: usize,
    longest: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// Creates a reader that refuses lines of more than `longest` bytes. A line that exceeds this
    /// by less than 1 KiB may still be returned.
    pub(super) const fn new(stream: R, longest: usize) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            seen: 0,
            longest,
        }
    }

    pub(super) fn stream(&mut self) -> &mut R {
        &mut self.stream
    }

    /// Reads the next line; `\n` and `\r\n` end it.
    pub(super) async fn next(&mut self) -> std::io::Result<Line> {
        loop {
            if let Some(at) = self.buffer[self.seen..].iter().position(|b| *b == b'\n') {
                let rest = self.buffer.split_off(self.seen + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                self.seen = 0;
                line.pop();
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(Line::Whole(line));
            }
            self.seen = self.buffer.len();
            if self.buffer.len() > self.longest {
                return Ok(Line::TooLong);
            }
            let mut piece = [0; 1024];
            let read = match self.stream.read(&mut piece).await {
                // The server has answered, but has not read the whole request.
                Err(error) if hangs_up(&error) && !self.buffer.is_empty() => 0,
                read => read?,
            };
            if read == 0 {
                self.seen = 0;
                return Ok(Line::End(std::mem::take(&mut self.buffer)));
            }
            self.buffer.extend_from_slice(&piece[..read]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn line_reader_splits_at_newlines_and_reports_line_above_limit() {
        let text: &[u8] = b"one\r\ntwo\n\nrest";
        let mut lines = Lines::new(text, 10);
        for line in ["one", "two", ""] {
            assert_eq!(lines.next().await.unwrap(), Line::Whole(line.into()));
        }
        assert_eq!(lines.next().await.unwrap(), Line::End(b"rest".to_vec()));
        let long = [b'a'; 5000];
        assert_eq!(
            Lines::new(&long[..], 100).next().await.unwrap(),
            Line::TooLong
        );
    }
}
