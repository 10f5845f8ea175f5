//! Tests that a dataplane cannot regain the privileges that it has dropped.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{TcpListener, UdpSocket};
use std::os::unix::net::UnixListener;
use std::process::Command;

use lvs_process::confine::{Places, dataplane};

#[test]
fn sandboxed_dataplane_cannot_write_elsewhere_listen_on_tcp_or_start_programs() {
    if crate::ran_alone(
        "confine::sandboxed_dataplane_cannot_write_elsewhere_listen_on_tcp_or_start_programs",
    ) {
        return;
    }
    let own = tempfile::tempdir().expect("the temporary directory can be created");
    let other = tempfile::tempdir().expect("the temporary directory can be created");
    let read = other.path().join("read");
    fs::write(&read, "read").expect("the file can be written");
    let done = dataplane(&Places {
        socket: Some(own.path().join("x.sock")),
        tcp: false,
    });
    let refused = [ErrorKind::PermissionDenied];
    let kind = |result: std::io::Result<()>| result.map_err(|error| error.kind());
    if done.by.contains(&"landlock".to_owned()) {
        // The restriction also applies to threads that start later.
        let write = fs::write(other.path().join("written"), "");
        assert!(kind(write).is_err_and(|k| refused.contains(&k)));
        let read = read.clone();
        let later = std::thread::spawn(move || kind(fs::remove_file(read))).join();
        assert!(
            later
                .expect("the thread ends without a panic")
                .is_err_and(|k| refused.contains(&k))
        );
        let bound = TcpListener::bind("127.0.0.1:0").map(drop);
        assert!(kind(bound).is_err_and(|k| refused.contains(&k)));
    }
    if done.by.contains(&"seccomp".to_owned()) {
        let started = Command::new("/bin/true").status().map(drop);
        assert!(kind(started).is_err_and(|k| refused.contains(&k)));
        let status = fs::read_to_string("/proc/thread-self/status")
            .expect("the status file of this thread is readable");
        assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"));
    }
    assert_eq!(done.by.len() + done.not_by.len(), 2, "{done}");
    // System calls that a dataplane still needs.
    assert_eq!(
        fs::read_to_string(&read).expect("the file can be read"),
        "read"
    );
    fs::write(own.path().join("lock"), "").expect("the file can be written");
    UnixListener::bind(own.path().join("x.sock")).expect("the socket can be opened");
    File::options()
        .write(true)
        .open("/dev/null")
        .expect("the device can be opened");
    UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
}
