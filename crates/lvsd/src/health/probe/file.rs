//! `type = "file"`: a file contains the state of the server, in the words of HAProxy's agents.

use std::collections::HashSet;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use lvs_api::files::open_without_waiting;
use lvs_sys::lock;
use tokio::sync::Notify;

use super::words::{self, LINE_MAX};
use super::{Advice, Asked, Misfit, ProbeError, ProbeKind};
use crate::text::{Diagnostic, Keys};

/// Maximum number of files that are read at the same time: each has a thread, which is blocked if
/// the disk does not answer.
const READS_MAX: usize = 64;
/// Maximum number of concurrent reads in one directory, because it is on one disk.
const DIRECTORY_MAX: usize = 8;

/// A check that reads the first line of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct File {
    path: String,
    /// Whether a missing file means that the server is up.
    missing_ok: bool,
}

impl ProbeKind for File {
    const NAME: &'static str = "file";
    const KEYS: &'static [&'static str] = &["path", "missing"];
    const RISE: u32 = 1;
    const FALL: u32 = 1;

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let Some(path) = keys.string("path")?.filter(|path| path.starts_with('/')) else {
            let at = keys.place("path");
            keys.report(
                Diagnostic::error(at, "`path` of the check is not the complete path of a file").help(
                    "write path = \"/run/health/{address}\"; {address} and {port} are those of the server",
                ),
            );
            return None;
        };
        let missing = keys.word("missing", &[("down", false), ("up", true)])?;
        Some(Self {
            path,
            missing_ok: missing.unwrap_or(false),
        })
    }

    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
        let path = self.path.replace("{address}", &server.ip().to_string());
        let path = path.replace("{port}", &server.port().to_string());
        Ok(Self {
            path,
            ..self.clone()
        })
    }

    fn target(&self, _: SocketAddr) -> String {
        self.path.clone()
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        static READS: LazyLock<Reads> = LazyLock::new(Reads::default);
        // Shorter than the timeout of the check: a disk that does not answer is not a failure of
        // the server.
        let limit = asked.timeout.mul_f32(0.9);
        let read = READS.read(Path::new(&self.path), limit, first_line).await;
        let wrong = |why: String| ProbeError::server(format!("{}: {why}", self.path));
        let line = match read {
            Ok(line) => line,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match self.missing_ok {
                    true => Ok(Advice::NONE),
                    false => Err(wrong("there is no such file".to_owned())),
                };
            }
            Err(error) => return Err(ProbeError::Local(format!("{}: {error}", self.path))),
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(Advice::NONE);
        }
        let parsed = words::parse(&line).map_err(wrong)?;
        match parsed.down {
            None => Ok(parsed.advice),
            Some(why) => Err(wrong(why)),
        }
    }
}

/// The files that are being read. A file whose read hangs is not read again until that read
/// returns.
#[derive(Debug, Default)]
struct Reads {
    paths: Mutex<HashSet<PathBuf>>,
    /// Notification that a read has ended.
    back: Notify,
}

/// A file that is being read, until this is dropped.
#[derive(Debug)]
struct Reading {
    reads: &'static Reads,
    path: PathBuf,
}

impl Reads {
    fn all(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        lock(&self.paths)
    }

    /// Reads a file with `read`, in a separate thread, as soon as [`begin`](Self::begin) permits
    /// it. Returns an error after `limit`.
    async fn read<R>(&'static self, path: &Path, limit: Duration, read: R) -> io::Result<Vec<u8>>
    where
        R: FnOnce(&Path) -> io::Result<Vec<u8>> + Send + 'static,
    {
        let work = async {
            let reading = loop {
                let back = self.back.notified();
                match self.begin(path) {
                    Some(reading) => break reading,
                    None => back.await,
                }
            };
            let read = move || {
                let result = read(&reading.path);
                drop(reading);
                result
            };
            let done = tokio::task::spawn_blocking(read).await;
            done.map_err(io::Error::other)?
        };
        match tokio::time::timeout(limit, work).await {
            Ok(read) => read,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the disk has not answered within the time limit",
            )),
        }
    }

    /// The permission to read a file; `None` while the file is already being read, or the limit of
    /// its directory or of all files is reached.
    fn begin(&'static self, path: &Path) -> Option<Reading> {
        let mut all = self.all();
        let beside = all.iter().filter(|other| other.parent() == path.parent());
        if all.contains(path) || all.len() >= READS_MAX || beside.count() >= DIRECTORY_MAX {
            return None;
        }
        all.insert(path.to_owned());
        Some(Reading {
            reads: self,
            path: path.to_owned(),
        })
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.reads.all().remove(&self.path);
        self.reads.back.notify_waiters();
    }
}

fn first_line(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_without_waiting(path)?;
    let mut text = Vec::new();
    file.take(LINE_MAX as u64).read_to_end(&mut text)?;
    if let Some(end) = text.iter().position(|b| *b == b'\n') {
        text.truncate(end);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Weight;
    use crate::health::probe::hostile::probe;

    #[tokio::test]
    async fn file_probe_result_follows_content_and_presence_of_file() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let server: SocketAddr = "127.0.0.1:81".parse().unwrap();
        let path = directory.path().join("127.0.0.1-81");
        let pattern = directory.path().join("{address}-{port}");
        let check = format!("{{ type = \"file\", path = \"{}\" }}", pattern.display());
        let lenient = check.replace(" }", ", missing = \"up\" }");
        assert!(matches!(
            probe(&check, server).await,
            Err(ProbeError::Server(why)) if why.text.contains("no such file")
        ));
        assert_eq!(probe(&lenient, server).await, Ok(Advice::NONE));
        for (text, good) in [("", true), ("up\n", true), ("down\n", false), ("?", false)] {
            std::fs::write(&path, text).expect("the file can be written");
            assert_eq!(probe(&check, server).await.is_ok(), good, "{text}");
        }
        std::fs::write(&path, "30%\nmore").expect("the file can be written");
        let advice = Advice::weight(Weight::Percent(30));
        assert_eq!(probe(&check, server).await, Ok(advice));
        std::fs::write(&path, vec![b'x'; 1 << 20]).expect("the file can be written");
        assert!(probe(&check, server).await.is_err());
        std::fs::remove_file(&path).expect("the file can be removed");
        std::fs::create_dir(&path).expect("the directory can be created");
        assert!(matches!(
            probe(&check, server).await,
            Err(ProbeError::Local(_))
        ));
    }
    /// Reads from a disk that does not answer occupy a limited number of threads, and do not delay
    /// reads of other disks.
    #[tokio::test]
    async fn file_reads_from_hung_disk_are_bounded_and_do_not_delay_other_disks() {
        static READS: LazyLock<Reads> = LazyLock::new(Reads::default);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = std::sync::Arc::new(Mutex::new(held));
        let limit = Duration::from_millis(60);
        let hang = |path: String| {
            let held = std::sync::Arc::clone(&held);
            async move {
                let read = move |_: &Path| {
                    let _ = held.lock().unwrap().recv();
                    Ok(Vec::new())
                };
                READS.read(Path::new(&path), limit, read).await
            }
        };
        for n in 0..20 {
            // The same file again and again, and other files as well.
            for path in ["/nfs/same".to_owned(), format!("/nfs/{n}")] {
                let error = hang(path).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            }
        }
        assert_eq!(READS.all().len(), DIRECTORY_MAX);
        let good = |_: &Path| Ok(b"up".to_vec());
        let elsewhere = READS.read(Path::new("/run/x"), Duration::from_secs(30), good);
        assert_eq!(elsewhere.await.unwrap(), b"up");
        // All directories together may have 64 reads.
        let others: Vec<Reading> = (0..200)
            .filter_map(|n| READS.begin(Path::new(&format!("/nfs{}/{n}", n / DIRECTORY_MAX))))
            .collect();
        assert_eq!(others.len(), READS_MAX - DIRECTORY_MAX);
        assert_eq!(READS.all().len(), 64);
        drop(others);
        // When the disk answers again, its files can be read again.
        drop(release);
        let back = READS.read(Path::new("/nfs/same"), Duration::from_secs(30), good);
        assert_eq!(back.await.unwrap(), b"up");
    }
}
