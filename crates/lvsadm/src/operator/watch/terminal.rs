//! The terminal: keys without echo, the size of the window, and the original settings.

use std::io::IsTerminal;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};

use crate::invocation::Invocation;

/// The terminal's original settings, which are restored when this value is dropped.
pub(super) struct Terminal(Termios);

impl Terminal {
    /// Sets the terminal to unbuffered input without echo; a read waits for at most a tenth of a
    /// second. `None` without a terminal, on a dumb one, or if its settings cannot be changed.
    pub(super) fn take() -> Option<Self> {
        let stdin = std::io::stdin();
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        if dumb || !stdin.is_terminal() || !std::io::stdout().is_terminal() {
            return None;
        }
        let before = tcgetattr(&stdin).ok()?;
        let mut keys = before.clone();
        keys.local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        keys.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
        keys.control_chars[SpecialCharacterIndices::VTIME as usize] = 1;
        tcsetattr(&stdin, SetArg::TCSANOW, &keys).ok()?;
        Some(Self(before))
    }

    /// Present numbers of lines and columns of the window, whose size may change at any time.
    pub(super) fn size() -> (usize, usize) {
        let size = Command::new("stty")
            .arg("size")
            .stdin(Stdio::inherit())
            .stderr(Stdio::null())
            .output();
        let text = size.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        screen_size(&text.unwrap_or_default())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

/// Lines and columns from the output of `stty size`; 24 and 80 if the numbers are invalid or too
/// small.
fn screen_size(text: &str) -> (usize, usize) {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(lines)), Some(Ok(columns))) if lines > 2 && columns > 10 => (lines, columns),
        _ => (24, 80),
    }
}

/// The function of a key.
pub(super) enum Key {
    Quit,
    Sort,
}

/// Waits for `time`, and returns `None`. A key with a function ends the wait, and is returned. If
/// the terminal is closed, returns [`Key::Quit`].
pub(super) fn wait(
    run: &mut Invocation<'_>,
    terminal: Option<&Terminal>,
    time: Duration,
) -> Option<Key> {
    if terminal.is_none() {
        thread::sleep(time);
        return None;
    }
    let started = Instant::now();
    while started.elapsed() < time {
        let mut key = [0];
        match run.input.read(&mut key) {
            Ok(1) => match key[0] {
                // Ctrl-C, Ctrl-D, Escape.
                b'q' | b'Q' | 3 | 4 | 27 => return Some(Key::Quit),
                b's' => return Some(Key::Sort),
                _ => {}
            },
            Ok(_) => {}
            // The terminal was closed.
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                return Some(Key::Quit);
            }
            Err(_) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_terminal_size_is_replaced_by_default() {
        assert_eq!(screen_size("50 132\n"), (50, 132));
        assert_eq!(screen_size("0 0\n"), (24, 80));
        assert_eq!(screen_size(""), (24, 80));
    }
}
