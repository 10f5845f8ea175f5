//! Tests of the program's log: the format of its lines, and a standard error that no process reads
//! or that is full. The program then continues to run, and can be stopped.
//!
//! `lvs-testbed/tests/e2e/doors.rs` tests that packets are forwarded meanwhile.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use lvs_api::{Address, Client};
use lvs_core::api::{Call, Info};
use serde::de::IgnoredAny;

/// Time limit that suffices on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

struct Dataplane {
    process: Child,
    dir: PathBuf,
}

impl Dataplane {
    fn start(name: &str, stderr: impl Into<Stdio>, environment: &[(&str, &str)]) -> Self {
        let dir = std::env::temp_dir().join(format!("lvs-log-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("the directory can be created");
        let process = crate::dataplane()
            .arg("--socket")
            .arg(dir.join("socket"))
            .env_remove("JOURNAL_STREAM")
            .env_remove("LVS_STARTED_BY")
            .env("LVS_LOG", "trace")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("the dataplane can be started");
        Self { process, dir }
    }

    fn client(&mut self) -> Client {
        let address = Address::new(self.dir.join("socket"));
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Client::connect(&address) {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            let ended = self
                .process
                .try_wait()
                .expect("the process is a child of this test");
            assert!(ended.is_none(), "{ended:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends some requests, and then the call `stop`. Fails unless the program ends normally.
    fn answers_and_ends(mut self) {
        let mut client = self.client();
        for _ in 0..100 {
            client
                .call::<Info>(&Call::Info {})
                .expect("the dataplane answers");
        }
        client
            .call::<IgnoredAny>(&Call::Stop {})
            .expect("the dataplane stops");
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self
                .process
                .try_wait()
                .expect("the process is a child of this test")
            {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "the dataplane did not stop in time"
            );
            thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
    }
}

impl Drop for Dataplane {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn dataplane_with_full_log_disk_answers_and_exits() {
    let full = OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full can be opened");
    Dataplane::start("full", full, &[]).answers_and_ends();
}

#[test]
fn dataplane_answers_after_log_reader_has_exited() {
    let mut dataplane = Dataplane::start("head", Stdio::piped(), &[]);
    let mut reader = BufReader::new(
        dataplane
            .process
            .stderr
            .take()
            .expect("standard error is piped"),
    );
    let mut line = String::new();
    reader.read_line(&mut line).expect("the line can be read");
    assert!(line.contains("INFO"), "{line}");
    drop(reader);
    dataplane.answers_and_ends();
}

#[test]
fn dataplane_answers_while_log_reader_never_reads() {
    let (from, to) = std::io::pipe().expect("the pipe can be created");
    let mut filler = to.try_clone().expect("the descriptor can be copied");
    rustix::io::ioctl_fionbio(&filler, true).expect("the pipe can be non-blocking");
    while std::io::Write::write(&mut filler, &[b'\n'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&filler, false).expect("the pipe can be blocking");
    drop(filler);
    Dataplane::start("pipe", to, &[]).answers_and_ends();
    drop(from);
}

#[test]
fn dataplane_started_by_lvsd_marks_its_log_lines() {
    let (mut from, to) = std::io::pipe().expect("the pipe can be created");
    Dataplane::start("end", to, &[("LVS_STARTED_BY", "lvsd")]).answers_and_ends();
    let mut text = String::new();
    from.read_to_string(&mut text)
        .expect("the text can be read");
    assert!(text.contains("  INFO dataplane: ready at "), "{text}");
}

#[test]
fn log_lines_have_journal_priority_only_if_environment_names_log_file() {
    use std::os::unix::fs::MetadataExt;
    let path = std::env::temp_dir().join(format!("lvs-journal-{}", std::process::id()));
    for (inode, prefix) in [(0, "2"), (1, "<6> INFO ready at ")] {
        let file = File::create(&path).expect("the file can be created");
        let meta = file.metadata().expect("the file has an inode");
        let stream = format!("{}:{}", meta.dev(), meta.ino() * inode);
        Dataplane::start(
            "file",
            file,
            &[("JOURNAL_STREAM", &stream), ("LVS_LOG", "info")],
        )
        .answers_and_ends();
        let text = fs::read_to_string(&path).expect("the text can be read");
        let ready = text.lines().find(|line| line.contains(" ready at "));
        assert!(
            ready.is_some_and(|line| line.starts_with(prefix)),
            "no line `ready at` begins with {prefix:?}: {text}"
        );
    }
    fs::remove_file(&path).expect("the file can be removed");
}
