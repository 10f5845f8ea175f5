//! Shows the progress on standard error: a bar on a terminal, otherwise a line for each group.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::Instant;

/// Progress of the work, in seconds of the expected duration.
#[derive(Debug)]
pub(crate) struct Progress {
    start: Instant,
    total: f64,
    done: f64,
    terminal: bool,
}

impl Progress {
    pub(crate) fn new(total: f64) -> Self {
        Self {
            start: Instant::now(),
            total,
            done: 0.0,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Adds seconds of finished work.
    pub(crate) fn add(&mut self, seconds: f64) {
        self.done = (self.done + seconds).min(self.total);
    }

    /// On a terminal, shows the present step `what`, the share of the work that is done, and the
    /// remaining time.
    pub(crate) fn show(&self, what: &str) {
        if !self.terminal {
            return;
        }
        let share = self.done / self.total.max(1e-9);
        let filled = (0..24)
            .take_while(|place| f64::from(*place) < share * 24.0)
            .count();
        let mut line = format!(
            "\r[{}{}] {:3.0} %, {} left: {what}",
            "#".repeat(filled),
            "-".repeat(24 - filled),
            share * 100.0,
            self.left()
        );
        line.truncate(110);
        let _ = write!(line, "\x1b[K");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    /// Prints that a group begins.
    pub(crate) fn begin(&self, group: &str) {
        if self.terminal {
            self.show(group);
        } else {
            eprintln!("{group}: {} left", self.left());
        }
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        if self.terminal {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }

    fn left(&self) -> String {
        // Elapsed time divided by the expected time of the finished steps.
        let elapsed = self.start.elapsed().as_secs_f64();
        let factor = if self.done > 5.0 {
            elapsed / self.done
        } else {
            1.0
        };
        let seconds = (self.total - self.done) * factor;
        if seconds < 90.0 {
            format!("{seconds:.0} s")
        } else {
            format!("{:.0} min", seconds / 60.0)
        }
    }
}
