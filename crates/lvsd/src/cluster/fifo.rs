//! Reads the messages of keepalived from its `vrrp_notify_fifo`: lines like `INSTANCE "lvs" MASTER
//! 200`.
//!
//! While lvsd does not run, messages remain in the FIFO as long as keepalived has it open.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::INSTANCE;

/// Maximum length of a line in bytes.
const LINE_MAX: usize = 512;
/// Interval of attempts to open the FIFO, and of checks whether its path still exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The VRRP state of the instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Unknown,
    Backup,
    Master,
    Fault,
    Stopped,
}

impl State {
    pub(super) const ALL: [Self; 5] = [
        Self::Unknown,
        Self::Backup,
        Self::Master,
        Self::Fault,
        Self::Stopped,
    ];

    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Backup => "backup",
            Self::Master => "master",
            Self::Fault => "fault",
            Self::Stopped => "stopped",
        }
    }

    pub(super) fn of_word(word: &str) -> Self {
        let found = Self::ALL.into_iter().find(|state| state.word() == word);
        found.unwrap_or_default()
    }
}

/// State of the FIFO and of the VRRP instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Messages {
    /// The state that keepalived reported last; `None` before its first report.
    pub(super) state: Option<State>,
    /// Number of reported states.
    pub(super) changes: u64,
    /// Number of lines that were invalid or too long.
    pub(super) ignored: u64,
    /// A fault of the FIFO, for example that it cannot be opened; `None` without a fault.
    pub(super) trouble: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum Message {
    State(State),
    /// A message about another instance, or of a type that lvsd ignores.
    Other,
    Invalid,
}

fn parse(line: &[u8]) -> Message {
    let Ok(line) = std::str::from_utf8(line) else {
        return Message::Invalid;
    };
    let mut words = line.split_ascii_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some("INSTANCE"), Some(name), Some(state)) if name.trim_matches('"') == INSTANCE => {
            match state {
                "MASTER" => Message::State(State::Master),
                "BACKUP" => Message::State(State::Backup),
                "FAULT" => Message::State(State::Fault),
                "STOP" | "DELETED" => Message::State(State::Stopped),
                // For example `MASTER_PRIORITY`.
                _ => Message::Other,
            }
        }
        (Some("INSTANCE" | "GROUP"), Some(_), Some(_)) => Message::Other,
        _ => Message::Invalid,
    }
}

/// Collects bytes into lines and parses each line. A line above [`LINE_MAX`] is skipped, and counts
/// as an invalid message.
#[derive(Debug, Default)]
struct Lines {
    line: Vec<u8>,
    /// Whether the rest of a line above [`LINE_MAX`] is being skipped.
    skips: bool,
}

impl Lines {
    fn feed(&mut self, bytes: &[u8], messages: &mut Messages) {
        for &byte in bytes {
            if byte != b'\n' {
                self.skips |= self.line.len() == LINE_MAX;
                if !self.skips {
                    self.line.push(byte);
                }
                continue;
            }
            let message = match std::mem::take(&mut self.skips) {
                true => Message::Invalid,
                false => parse(&self.line),
            };
            self.line.clear();
            match message {
                Message::State(state) => {
                    messages.state = Some(state);
                    messages.changes += 1;
                }
                Message::Other => {}
                Message::Invalid => messages.ignored += 1,
            }
        }
    }
}

/// Starts a task that reads the messages of keepalived until it is aborted.
pub(super) fn listen(path: PathBuf) -> (watch::Receiver<Messages>, JoinHandle<()>) {
    let (sender, receiver) = watch::channel(Messages::default());
    (receiver, tokio::spawn(read_messages(path, sender)))
}

async fn read_messages(path: PathBuf, sender: watch::Sender<Messages>) {
    let mut named: Option<Fifo> = None;
    // The previous FIFO, if its path was removed or replaced. keepalived may still write to it.
    let mut lost: Option<Source> = None;
    loop {
        let gone = lost.is_some().then(|| {
            format!(
                "the FIFO {} was removed or replaced, and keepalived continues to write to the previous one: restart keepalived; do not restart lvsd before that, because only the running lvsd receives the messages of keepalived",
                path.display()
            )
        });
        let mut trouble = None;
        if !named.as_ref().is_some_and(|fifo| fifo.has_name(&path)) {
            if let Some(before) = named.take()
                && lost.is_none()
            {
                lost = Some(before.source);
            }
            match open(&path) {
                Ok(fifo) => named = Some(fifo),
                Err(why) => trouble = Some(why),
            }
        }
        set_trouble(&sender, trouble.or(gone));
        let next_check = tokio::time::Instant::now() + CHECK_INTERVAL;
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(next_check) => break,
                ended = next(lost.as_mut(), &sender) => if ended {
                    lost = None;
                },
                ended = next(named.as_mut().map(|fifo| &mut fifo.source), &sender) => if ended {
                    named = None;
                },
            }
        }
    }
}

fn set_trouble(sender: &watch::Sender<Messages>, trouble: Option<String>) {
    sender.send_if_modified(|messages| {
        let new = messages.trouble != trouble;
        if let (true, Some(why)) = (new, &trouble) {
            tracing::error!("{why}");
        }
        messages.trouble = trouble;
        new
    });
}

/// An open FIFO, and the beginning of a line whose end has not arrived yet.
#[derive(Debug)]
struct Source {
    receiver: Receiver,
    lines: Lines,
}

/// Reads the next messages. Returns whether the FIFO has reached its end or cannot be read. Pends
/// forever without a FIFO.
async fn next(source: Option<&mut Source>, sender: &watch::Sender<Messages>) -> bool {
    let Some(source) = source else {
        return std::future::pending().await;
    };
    if source.receiver.readable().await.is_err() {
        return true;
    }
    let mut bytes = [0; 4096];
    match source.receiver.try_read(&mut bytes) {
        Ok(0) => return true,
        Ok(length) => sender.send_if_modified(|messages| {
            let before = messages.clone();
            source.lines.feed(&bytes[..length], messages);
            *messages != before
        }),
        Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
    };
    // Lets other tasks run during a flood of messages.
    tokio::task::yield_now().await;
    false
}

/// The FIFO at its path, open for reading.
#[derive(Debug)]
struct Fifo {
    source: Source,
    /// Keeps the FIFO from reaching its end when all other writers close it.
    _writer: File,
    number: (u64, u64),
}

impl Fifo {
    fn has_name(&self, path: &Path) -> bool {
        let there = std::fs::symlink_metadata(path);
        there.is_ok_and(|there| (there.dev(), there.ino()) == self.number)
    }
}

/// Opens the FIFO, which is created if it is missing. Only root and the user of lvsd may write to
/// it, because its writers control the VIPs.
fn open(path: &Path) -> Result<Fifo, String> {
    let shown = path.display();
    let failed = |error: io::Error| {
        format!(
            "cannot listen to keepalived at {shown}: {error}; lvsd receives no changes of the VRRP state: permit lvsd to create this FIFO, or set another path (`fifo` in [vrrp])"
        )
    };
    if let Some(directory) = path.parent() {
        let _ = std::fs::create_dir_all(directory);
    }
    match mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(failed(error.into())),
    }
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY).bits();
    let flags = i32::try_from(flags).unwrap_or_default();
    let mut options = File::options();
    options.read(true).custom_flags(flags);
    let writer = options.clone().write(true).open(path).map_err(failed)?;
    let is = writer.metadata().map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if !is.file_type().is_fifo() {
        return Err(format!(
            "{shown} is not a FIFO; remove it, or set another path (`fifo` in [vrrp])"
        ));
    }
    if is.mode() & 0o022 != 0 || (is.uid() != own && is.uid() != 0) {
        return Err(format!(
            "users other than root may write to {shown} (mode {:o}, uid {}), and so can forge the state of keepalived; remove it and restart keepalived",
            is.mode() & 0o777,
            is.uid()
        ));
    }
    let number = (is.dev(), is.ino());
    let file = options.open(path).map_err(failed)?;
    let read = file.metadata().map_err(failed)?;
    if (read.dev(), read.ino()) != number {
        return Err(format!(
            "{shown} was replaced while lvsd opened it; lvsd opens it again"
        ));
    }
    let receiver = Receiver::from_file_unchecked(file).map_err(failed)?;
    let source = Source {
        receiver,
        lines: Lines::default(),
    };
    Ok(Fifo {
        source,
        _writer: writer,
        number,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifo_parser_returns_state_only_for_lines_of_own_instance() {
        for (line, message) in [
            ("INSTANCE \"lvs\" MASTER 200", Message::State(State::Master)),
            ("INSTANCE \"lvs\" BACKUP 200", Message::State(State::Backup)),
            ("INSTANCE \"lvs\" FAULT 0", Message::State(State::Fault)),
            ("INSTANCE \"lvs\" STOP 200", Message::State(State::Stopped)),
            ("INSTANCE \"lvs\" MASTER_PRIORITY 200", Message::Other),
            ("INSTANCE \"other\" MASTER 200", Message::Other),
            ("GROUP \"lvs\" MASTER 0", Message::Other),
            ("MASTER", Message::Invalid),
            ("", Message::Invalid),
        ] {
            assert_eq!(parse(line.as_bytes()), message, "{line}");
        }
        assert_eq!(parse(b"INSTANCE \xff x"), Message::Invalid);
        for state in [State::Backup, State::Master, State::Fault, State::Stopped] {
            assert_eq!(State::of_word(state.word()), state);
        }
    }

    #[test]
    fn fifo_line_above_length_limit_is_ignored_and_counted() {
        let (mut lines, mut messages) = (Lines::default(), Messages::default());
        for _ in 0..1000 {
            lines.feed(&[b'x'; 4096], &mut messages);
            assert!(lines.line.len() <= LINE_MAX);
        }
        lines.feed(b"\nINSTANCE \"lvs\" MAS", &mut messages);
        assert_eq!((messages.ignored, messages.changes), (1, 0));
        lines.feed(b"TER 200\n", &mut messages);
        assert_eq!(messages.state, Some(State::Master));
        assert_eq!((messages.ignored, messages.changes), (1, 1));
    }

    #[tokio::test]
    async fn fifo_writable_by_other_users_or_file_of_other_type_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/fifo");
        open(&path).expect("the FIFO is created");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert!(open(&path).unwrap_err().contains("other than root"));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(open(&path).unwrap_err().contains("is not a FIFO"));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(directory.path().join("x"), &path).unwrap();
        assert!(open(&path).is_err());
    }

    #[tokio::test]
    async fn removed_fifo_is_created_again_and_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let (mut messages, task) = listen(path.clone());
        let say = |text: &str| {
            let (path, text) = (path.clone(), text.to_owned());
            tokio::task::spawn_blocking(move || std::fs::write(path, text).unwrap())
        };
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        say("INSTANCE \"lvs\" MASTER 200\n").await.unwrap();
        messages
            .wait_for(|messages| messages.state == Some(State::Master))
            .await
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        say("INSTANCE \"lvs\" BACKUP 200\n").await.unwrap();
        messages
            .wait_for(|messages| messages.state == Some(State::Backup))
            .await
            .unwrap();
        task.abort();
    }

    #[tokio::test]
    async fn removed_fifo_is_reported_and_read_until_its_writers_close() {
        use std::io::Write;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        let (mut messages, task) = listen(path.clone());
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        let mut keepalived = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        messages
            .wait_for(|messages| {
                let trouble = messages.trouble.as_deref();
                trouble.is_some_and(|why| why.contains("restart keepalived"))
            })
            .await
            .unwrap();
        keepalived
            .write_all(b"INSTANCE \"lvs\" BACKUP 200\n")
            .unwrap();
        messages
            .wait_for(|messages| messages.state == Some(State::Backup))
            .await
            .unwrap();
        // Repeats the test with the FIFO that lvsd has created and that has no other writer.
        std::fs::remove_file(&path).unwrap();
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        keepalived
            .write_all(b"INSTANCE \"lvs\" STOP 200\n")
            .unwrap();
        messages
            .wait_for(|messages| messages.state == Some(State::Stopped))
            .await
            .unwrap();
        drop(keepalived);
        messages
            .wait_for(|messages| messages.trouble.is_none())
            .await
            .unwrap();
        let mut keepalived = File::options().read(true).write(true).open(&path).unwrap();
        keepalived
            .write_all(b"INSTANCE \"lvs\" MASTER 200\n")
            .unwrap();
        messages
            .wait_for(|messages| messages.state == Some(State::Master))
            .await
            .unwrap();
        task.abort();
    }
}
