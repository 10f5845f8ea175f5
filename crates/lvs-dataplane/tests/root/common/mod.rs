//! Network namespaces for tests. Each represents a host, and ends with its last descriptor. Needs
//! root.
#![allow(dead_code, reason = "each test program uses a part of this module")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace without a name.
pub(crate) struct Host(OwnedFd);

impl Host {
    /// Creates a namespace whose loopback is up.
    pub(crate) fn new() -> Self {
        let fd = thread::spawn(|| {
            lvs_sys::unshare_network().expect("this test makes network namespaces: run it as root");
            sh("ip link set lo up; sysctl -qw net.ipv6.conf.default.accept_dad=0");
            let file = std::fs::File::open("/proc/thread-self/ns/net");
            file.expect("/proc is mounted").into()
        })
        .join()
        .expect("a namespace can be made");
        Self(fd)
    }

    /// Runs a function in the namespace, on a separate thread.
    pub(crate) fn run<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(f)
            .join()
            .expect("the thread in the namespace does not panic")
    }

    /// As [`Self::run`], but returns at once; the handle returns the result.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let fd = self.0.try_clone().expect("descriptors are available");
        thread::spawn(move || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(fd.as_fd(), network).expect("this test runs as root");
            f()
        })
    }

    pub(crate) fn ip(&self, args: &str) {
        let args = args.to_owned();
        self.run(move || ip(&args));
    }

    /// Runs any command in the namespace; returns its output.
    pub(crate) fn sh(&self, command: &str) -> String {
        let command = command.to_owned();
        self.run(move || sh(&command))
    }

    /// Creates a veth pair between two hosts, and sets both ends up.
    pub(crate) fn veth(&self, name: &str, other: &Self, other_name: &str) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), other.0.as_raw_fd());
        self.ip(&format!(
            "link add {name} type veth peer name {other_name} netns {path}"
        ));
        self.ip(&format!("link set {name} up"));
        other.ip(&format!("link set {other_name} up"));
        // The kernel detects the carrier with a delay, which is longer on a busy machine.
        self.sh(&running(name));
        other.sh(&running(other_name));
    }
}

/// Returns a shell command that waits up to two minutes until a link is up and has a carrier.
fn running(link: &str) -> String {
    format!(
        "for n in $(seq 1200); do ip -br link show dev {link} | grep -qw UP && exit; sleep 0.1; done; \
         echo {link} does not come up; exit 1"
    )
}

impl AsFd for Host {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Runs `ip` in this thread's namespace.
pub(crate) fn ip(args: &str) {
    sh(&format!("ip {args}"));
}

/// Runs a shell command in this thread's namespace; returns its output.
pub(crate) fn sh(command: &str) -> String {
    let output = Command::new("sh")
        .args(["-ec", command])
        .output()
        .expect("a shell is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command}: {}{text}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Runs a command as [`sh`], and returns whether it succeeded.
pub(crate) fn try_sh(command: &str) -> bool {
    Command::new("sh")
        .args(["-ec", command])
        .output()
        .expect("a shell is installed")
        .status
        .success()
}
