//! IPVS's files in `/proc`, for the program and all processes that it starts: a file system that
//! the supervisor serves. A file contains the state of the dataplane at the time when the file was
//! opened.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use lvs_api::{Client, Error, starting};
use lvs_core::api::{Call, ConnInfo, Info, ServiceInfo, Sysctl};
use lvs_core::proc;
use lvs_core::settings::Sysctls;
use lvs_sys::lock;
use nix::errno::Errno;

use super::caller::Caller;
use super::family::Dataplane;
use super::fuse::{self, Request};
use super::log;
use super::space::{Space, errno_of};
use super::supervisor::{Supervisor, Worker};

/// Name of the hidden directory that contains the real `/proc` and the replacement of `/proc/net`.
pub(super) const INSIDE: &str = ".lvs-run";
/// Name of the mount point of the real `/proc` in [`INSIDE`].
pub(super) const PROC: &str = "proc";
/// Name of the link in [`INSIDE`] that replaces `/proc/net`.
pub(super) const LINK: &str = "link";
/// Name of the directory in [`INSIDE`] to which `/proc/net` links.
const NET: &str = "net";
/// Name of the directory in `/proc/sys/net` that contains [`VS`].
const IPV4: &str = "ipv4";
/// Name of the directory of IPVS's sysctls.
const VS: &str = "vs";

/// IPVS's files in `/proc/net`.
const FILES: [&str; 6] = [
    "ip_vs",
    "ip_vs_app",
    "ip_vs_conn",
    "ip_vs_conn_sync",
    "ip_vs_stats",
    "ip_vs_stats_percpu",
];

/// Maximum number of open files.
const OPEN_MAX: usize = 256;
/// Maximum number of bytes of all open files.
const BYTES_MAX: usize = 256 << 20;
/// Unit in bytes in which the size of an open file is counted, rounded up.
const BYTES_STEP: usize = 1 << 20;
/// Maximum number of threads that wait for a dataplane.
const THREADS_MAX: usize = 16;
/// Maximum number of remembered names of files that do not belong to IPVS.
const LINKS_MAX: usize = 4096;

/// Inode number of the first file. Smaller numbers belong to directories and to [`LINK`].
const FIRST_FILE: u64 = 16;
/// Inode number of the first sysctl.
const FIRST_SYSCTL: u64 = 64;
/// Inode number of the first link to a file that does not belong to IPVS.
const FIRST_LINK: u64 = 4096;

const DIRECTORY_MODE: u32 = 0o040_555;
const LINK_MODE: u32 = 0o120_777;
const FILE_MODE: u32 = 0o100_444;
const SYSCTL_MODE: u32 = 0o100_644;

/// A directory in which all names except those of IPVS are links to the real files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Overlay {
    /// `/proc/sys/net`, the mount point of the file system. A mount point below it would be missing
    /// in other network namespaces.
    Sys,
    /// `/proc/sys/net/ipv4`.
    Ipv4,
    /// `/proc/net`.
    Net,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Overlay(Overlay),
    Sysctls,
    Inside,
    /// The mount point of the real `/proc`.
    Proc,
    /// The link that replaces `/proc/net`.
    Link,
    File(&'static str),
    Sysctl(&'static str),
    Other(Overlay, String),
}

impl Node {
    const fn mode(&self) -> u32 {
        match self {
            Self::Overlay(_) | Self::Sysctls | Self::Inside | Self::Proc => DIRECTORY_MODE,
            Self::Link | Self::Other(..) => LINK_MODE,
            Self::File(_) => FILE_MODE,
            Self::Sysctl(_) => SYSCTL_MODE,
        }
    }

    /// The target of a link, relative to the directory that contains the link; `None` if this is
    /// not a link.
    fn target(&self) -> Option<String> {
        match self {
            Self::Link => Some(format!("sys/net/{INSIDE}/{NET}")),
            Self::Other(Overlay::Sys, name) => Some(format!("{INSIDE}/{PROC}/sys/net/{name}")),
            Self::Other(Overlay::Ipv4, name) => {
                Some(format!("../{INSIDE}/{PROC}/sys/net/{IPV4}/{name}"))
            }
            Self::Other(Overlay::Net, name) => Some(format!("../{PROC}/self/net/{name}")),
            _ => None,
        }
    }

    fn length(&self) -> usize {
        self.target().map_or(0, |target| target.len())
    }
}

/// The links to the kernel's own files, by inode number.
#[derive(Debug, Default)]
struct Links {
    all: Vec<(Overlay, String)>,
    numbers: HashMap<(Overlay, String), u64>,
}

impl Links {
    /// Returns the inode number of a link. Fails if there are too many links.
    fn number(&mut self, key: (Overlay, String)) -> Result<u64, Errno> {
        if let Some(known) = self.numbers.get(&key) {
            return Ok(*known);
        }
        if self.all.len() >= LINKS_MAX {
            return Err(Errno::ENOMEM);
        }
        let number = FIRST_LINK + self.all.len() as u64;
        self.all.push(key.clone());
        self.numbers.insert(key, number);
        Ok(number)
    }
}

/// The content of an open file, which counts towards [`BYTES_MAX`].
#[derive(Debug)]
struct Content {
    text: String,
    /// Number of bytes of all open files.
    all: Arc<AtomicUsize>,
    taken: usize,
}

impl Content {
    /// Counts the bytes of the text. Fails if all open files together exceed [`BYTES_MAX`].
    fn fit(&mut self) -> Result<(), Errno> {
        while self.taken < self.text.len() {
            self.taken += BYTES_STEP;
            if self.all.fetch_add(BYTES_STEP, Ordering::Relaxed) >= BYTES_MAX {
                return Err(Errno::ENOMEM);
            }
        }
        Ok(())
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        self.all.fetch_sub(self.taken, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(super) struct Files {
    own: Arc<Supervisor>,
    device: File,
    links: Mutex<Links>,
    open: Mutex<HashMap<u64, Arc<Content>>>,
    bytes: Arc<AtomicUsize>,
    threads: AtomicUsize,
}

/// Starts the thread that serves the file system until the mount namespace of the program has
/// ended. Logs a failure.
pub(super) fn start(own: Arc<Supervisor>, device: OwnedFd) {
    let files = Arc::new(Files {
        own,
        device: device.into(),
        links: Mutex::default(),
        open: Mutex::default(),
        bytes: Arc::default(),
        threads: AtomicUsize::new(0),
    });
    let name = "lvs-run-files".to_owned();
    let started = std::thread::Builder::new()
        .name(name)
        .spawn(move || files.serve());
    if let Err(error) = started {
        log(&format!(
            "IPVS's files in /proc are not available: cannot start a thread: {error}"
        ));
    }
}

/// A file or directory and its inode number, or the error of the look-up.
type Found = Result<(u64, Node), Errno>;

impl Files {
    fn serve(self: Arc<Self>) {
        let mut worker = Worker::default();
        let mut bytes = vec![0; fuse::REQUEST_MAX];
        loop {
            let length = match (&self.device).read(&mut bytes) {
                Ok(length) => length,
                Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => return,
                // The request was interrupted, or a signal has arrived.
                Err(_) => {
                    std::thread::yield_now();
                    continue;
                }
            };
            let Some(request) = Request::of(&bytes[..length]) else {
                continue;
            };
            if request.is_notice() {
                continue;
            }
            // The dataplane may read files of this file system, and must not wait for this thread
            // then.
            let asks_dataplane = matches!(request.operation, fuse::OPEN | fuse::WRITE);
            if !asks_dataplane {
                self.reply(request.unique, self.answer(&request, &mut worker));
            } else if let Err(errno) = self.clone().answer_later(&bytes[..length]) {
                self.reply(request.unique, Err(errno));
            }
        }
    }

    fn reply(&self, unique: u64, result: Result<Vec<u8>, Errno>) {
        if (&self.device).write(&fuse::answer(unique, result)).is_err() {
            // The caller has exited, and will not close the file that this request has opened.
            lock(&self.open).remove(&unique);
        }
    }

    /// Answers a request on another thread. Fails if too many requests are being answered so, or if
    /// no thread can be started.
    fn answer_later(self: Arc<Self>, bytes: &[u8]) -> Result<(), Errno> {
        if self.threads.fetch_add(1, Ordering::Relaxed) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            return Err(Errno::EBUSY);
        }
        let bytes = bytes.to_vec();
        let own = self.clone();
        let name = "lvs-run-file".to_owned();
        let started = std::thread::Builder::new().name(name).spawn(move || {
            if let Some(request) = Request::of(&bytes) {
                let answer = own.answer(&request, &mut Worker::default());
                own.reply(request.unique, answer);
            }
            own.threads.fetch_sub(1, Ordering::Relaxed);
        });
        started.map(|_| ()).map_err(|_| {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            Errno::ENOMEM
        })
    }

    fn answer(&self, request: &Request<'_>, worker: &mut Worker) -> Result<Vec<u8>, Errno> {
        let node = || self.node(request.node);
        match request.operation {
            fuse::INIT => fuse::init(request.body),
            fuse::LOOKUP => {
                let name = request.name().ok_or(Errno::ENOENT)?;
                let (number, node) = self.find(&node()?, name, request.thread, worker)?;
                Ok(fuse::entry(number, node.mode(), node.length()))
            }
            fuse::GETATTR | fuse::SETATTR => {
                let node = node()?;
                Ok(fuse::attribute(request.node, node.mode(), node.length()))
            }
            fuse::READLINK => {
                let target = node()?.target().ok_or(Errno::EINVAL)?;
                Ok(target.into_bytes())
            }
            fuse::OPEN => self.open(&node()?, request, worker),
            fuse::READ => {
                let (at, length) = request.extent()?;
                let content = lock(&self.open).get(&request.file()?).cloned();
                let content = content.ok_or(Errno::EBADF)?;
                let rest = content.text.as_bytes().get(at..).unwrap_or_default();
                Ok(rest[..rest.len().min(length)].to_vec())
            }
            fuse::WRITE => self.write(&node()?, request, worker),
            fuse::RELEASE => {
                lock(&self.open).remove(&request.file()?);
                Ok(Vec::new())
            }
            fuse::OPENDIR => Ok(fuse::opened(0)),
            fuse::READDIR => {
                let (at, length) = request.extent()?;
                let all = self.list(&node()?, request.thread, worker);
                Ok(fuse::entries(&all, at, length))
            }
            fuse::FLUSH | fuse::RELEASEDIR => Ok(Vec::new()),
            fuse::STATFS => Ok(fuse::empty()),
            // The kernel does not require the other operations.
            _ => Err(Errno::ENOSYS),
        }
    }

    fn node(&self, number: u64) -> Result<Node, Errno> {
        let nth = |first: u64| usize::try_from(number - first).ok();
        let found = match number {
            1 => Some(Node::Overlay(Overlay::Sys)),
            2 => Some(Node::Overlay(Overlay::Net)),
            3 => Some(Node::Sysctls),
            4 => Some(Node::Inside),
            5 => Some(Node::Proc),
            6 => Some(Node::Link),
            7 => Some(Node::Overlay(Overlay::Ipv4)),
            FIRST_LINK.. => {
                let links = lock(&self.links);
                let found = nth(FIRST_LINK).and_then(|index| links.all.get(index).cloned());
                found.map(|(overlay, name)| Node::Other(overlay, name))
            }
            FIRST_SYSCTL.. => {
                let name = nth(FIRST_SYSCTL).and_then(|index| Sysctls::NAMES.get(index));
                name.map(|name| Node::Sysctl(name))
            }
            FIRST_FILE.. => {
                let name = nth(FIRST_FILE).and_then(|index| FILES.get(index));
                name.map(|name| Node::File(name))
            }
            _ => None,
        };
        found.ok_or(Errno::ESTALE)
    }

    /// Looks up a name in a directory.
    fn find(&self, directory: &Node, name: &str, thread: u32, worker: &mut Worker) -> Found {
        let number = match (directory, name) {
            (Node::Overlay(Overlay::Ipv4), VS) => 3,
            (Node::Overlay(Overlay::Sys), IPV4) => 7,
            (Node::Overlay(Overlay::Sys), INSIDE) => 4,
            (Node::Inside, NET) => 2,
            (Node::Inside, PROC) => 5,
            (Node::Inside, LINK) => 6,
            (Node::Sysctls, _) => number(FIRST_SYSCTL, Sysctls::NAMES, name)?,
            (Node::Overlay(overlay), _) => match number(FIRST_FILE, &FILES, name) {
                Ok(number) if *overlay == Overlay::Net => number,
                _ => {
                    // The kernel must not cache names that do not exist: their number is unlimited.
                    let real = self.real(*overlay, thread, worker)?;
                    fs::symlink_metadata(format!("{real}/{name}")).map_err(|_| Errno::ENOENT)?;
                    lock(&self.links).number((*overlay, name.to_owned()))?
                }
            },
            _ => return Err(Errno::ENOENT),
        };
        Ok((number, self.node(number)?))
    }

    /// Returns the path of the real directory that an overlay replaces, for `thread`. For a
    /// directory of sysctls, the worker enters the network namespace of the thread.
    fn real(&self, overlay: Overlay, thread: u32, worker: &mut Worker) -> Result<String, Errno> {
        match overlay {
            Overlay::Net => Ok(format!("/proc/{thread}/net")),
            Overlay::Sys | Overlay::Ipv4 => {
                let caller = Caller::of(thread, None).ok_or(Errno::ENOENT)?;
                worker.follow(&caller).ok_or(Errno::ENOENT)?;
                Ok(match overlay {
                    Overlay::Ipv4 => "/proc/sys/net/ipv4".to_owned(),
                    _ => "/proc/sys/net".to_owned(),
                })
            }
        }
    }

    /// Returns types and names of the entries that the listing of a directory contains.
    fn list(&self, directory: &Node, thread: u32, worker: &mut Worker) -> Vec<(u32, String)> {
        let own = |mode: u32, names: &[&str]| -> Vec<(u32, String)> {
            let names = names.iter().map(|name| (mode, (*name).to_owned()));
            names.collect()
        };
        let (overlay, mut all) = match directory {
            Node::Overlay(Overlay::Sys) => (Overlay::Sys, own(DIRECTORY_MODE, &[IPV4])),
            Node::Overlay(Overlay::Ipv4) => (Overlay::Ipv4, own(DIRECTORY_MODE, &[VS])),
            Node::Overlay(Overlay::Net) => (Overlay::Net, own(FILE_MODE, &FILES)),
            Node::Sysctls => return own(SYSCTL_MODE, Sysctls::NAMES),
            _ => return Vec::new(),
        };
        let entries = self
            .real(overlay, thread, worker)
            .ok()
            .and_then(|real| fs::read_dir(real).ok());
        let names: BTreeSet<String> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| !all.iter().any(|(_, own)| own == name))
            .collect();
        all.extend(names.into_iter().map(|name| (LINK_MODE, name)));
        all
    }

    /// Returns the network namespace of the thread that makes the request, after `worker` has
    /// entered it. Fails if the thread may not read the namespace's files, or, with `changes`, may
    /// not administer the namespace.
    fn space(
        &self,
        request: &Request<'_>,
        changes: bool,
        worker: &mut Worker,
    ) -> Result<Arc<Space>, Errno> {
        let caller = Caller::of(request.thread, None);
        caller
            .and_then(|caller| self.own.of_file(&caller, changes, worker))
            .ok_or(if changes { Errno::EPERM } else { Errno::ENOENT })
    }

    fn open(
        &self,
        node: &Node,
        request: &Request<'_>,
        worker: &mut Worker,
    ) -> Result<Vec<u8>, Errno> {
        if lock(&self.open).len() >= OPEN_MAX {
            return Err(Errno::ENFILE);
        }
        let space = self.space(request, false, worker)?;
        let mut client = starting::connect(&space.address).map_err(|error| errno_of(&error))?;
        let mut content = Content {
            text: String::new(),
            all: self.bytes.clone(),
            taken: 0,
        };
        match node {
            Node::File(name) => write_file(name, &mut client, &mut content)?,
            Node::Sysctl(name) => {
                let name = Some((*name).to_owned());
                let all: Vec<Sysctl> = client
                    .collect(&Call::SysctlGet { name })
                    .map_err(|error| errno_of(&error))?;
                for sysctl in all {
                    // The kernel writes tabs between numbers.
                    content.text = format!("{}\n", sysctl.value.replace(' ', "\t"));
                }
            }
            _ => return Err(Errno::EISDIR),
        }
        content.fit()?;
        // An open file has the number of its request, which no other waiting request has.
        lock(&self.open).insert(request.unique, Arc::new(content));
        Ok(fuse::opened(request.unique))
    }

    fn write(
        &self,
        node: &Node,
        request: &Request<'_>,
        worker: &mut Worker,
    ) -> Result<Vec<u8>, Errno> {
        let Node::Sysctl(name) = node else {
            return Err(Errno::EPERM);
        };
        let data = request.data()?;
        let text = std::str::from_utf8(data).map_err(|_| Errno::EINVAL)?;
        let value = text.trim_end_matches('\0').split_whitespace();
        let value = value.collect::<Vec<_>>().join(" ");
        let space = self.space(request, true, worker)?;
        let name = (*name).to_owned();
        space
            .dataplane(request.thread)
            .change(Call::SysctlSet(Sysctl { name, value }))?;
        Ok(fuse::written(data.len()))
    }
}

/// Returns the inode number of `name`. The first of `names` has the inode number `first`.
fn number(first: u64, names: &[&str], name: &str) -> Result<u64, Errno> {
    let index = names.iter().position(|known| *known == name);
    index.map(|index| first + index as u64).ok_or(Errno::ENOENT)
}

/// Writes the text of one of [`FILES`] into `content`.
fn write_file(name: &str, client: &mut Client, content: &mut Content) -> Result<(), Errno> {
    let errno = |error: Error| errno_of(&error);
    // Writing to a string cannot fail.
    let text = &mut content.text;
    match name {
        "ip_vs" => {
            let services: Vec<ServiceInfo> = client
                .collect(&Call::ServiceList { service: None })
                .map_err(errno)?;
            let _ = proc::services(text, &services, client.hello().table_size);
        }
        "ip_vs_conn" | "ip_vs_conn_sync" => {
            let is_sync = name == "ip_vs_conn_sync";
            text.push_str(match is_sync {
                true => proc::CONN_SYNC_HEADER,
                false => proc::CONN_HEADER,
            });
            let mut fits = Ok(());
            let mut other = String::new();
            let listed = client.list_while(&Call::ConnList {}, |info: ConnInfo| {
                other.clear();
                let _ = match is_sync {
                    true => proc::connection(&mut other, &mut content.text, &info),
                    false => proc::connection(&mut content.text, &mut other, &info),
                };
                fits = content.fit();
                fits.is_ok()
            });
            fits?;
            listed.map_err(errno)?;
        }
        _ => {
            let info: Info = client.call(&Call::Info {}).map_err(errno)?;
            let _ = proc::of_info(text, name, &info);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use lvs_sys::notify::{Listener, Places};

    use super::*;

    fn null() -> OwnedFd {
        File::open("/dev/null")
            .expect("the device can be opened")
            .into()
    }

    /// The file system, without a program that uses it.
    fn files() -> Arc<Files> {
        let places = Places::below(1024).expect("the limit of descriptors is high enough");
        let own =
            Supervisor::new(Listener::from(null()), places, None, false).expect("/proc is mounted");
        Arc::new(Files {
            own: Arc::new(own),
            device: null().into(),
            links: Mutex::default(),
            open: Mutex::default(),
            bytes: Arc::default(),
            threads: AtomicUsize::new(0),
        })
    }

    fn own_thread() -> u32 {
        u32::try_from(rustix::thread::gettid().as_raw_pid()).expect("the number fits into 32 bits")
    }

    #[test]
    fn proc_name_of_kernel_is_a_link_and_name_of_ipvs_is_a_file() {
        let files = files();
        let mut worker = Worker::default();
        let mut find = |directory: &Node, name: &str| {
            let found = files.find(directory, name, own_thread(), &mut worker);
            found.map(|(_, node)| node)
        };
        let (net, ipv4) = (Node::Overlay(Overlay::Net), Node::Overlay(Overlay::Ipv4));
        assert_eq!(find(&net, "ip_vs_conn"), Ok(Node::File("ip_vs_conn")));
        assert_eq!(find(&net, "no_such_file"), Err(Errno::ENOENT));
        assert_eq!(find(&net, VS), Err(Errno::ENOENT));
        let real = find(&net, "protocols").expect("every kernel has this file");
        assert_eq!(real.target().as_deref(), Some("../proc/self/net/protocols"));
        assert_eq!(find(&ipv4, VS), Ok(Node::Sysctls));
        let sys = Node::Overlay(Overlay::Sys);
        assert_eq!(find(&sys, IPV4), Ok(Node::Overlay(Overlay::Ipv4)));
        assert_eq!(find(&sys, VS), Err(Errno::ENOENT));
        assert_eq!(find(&ipv4, "ip_vs_conn"), Err(Errno::ENOENT));
        let conntrack = find(&Node::Sysctls, "conntrack");
        assert_eq!(conntrack, Ok(Node::Sysctl("conntrack")));
        assert_eq!(find(&Node::Sysctls, "no_such_sysctl"), Err(Errno::ENOENT));
        assert_eq!(find(&Node::Inside, LINK), Ok(Node::Link));
        let listed = files.list(&net, own_thread(), &mut Worker::default());
        for name in FILES {
            let all = listed.iter().filter(|(_, listed)| listed == name);
            assert_eq!(all.count(), 1, "{name}");
        }
        assert!(files.node(0).is_err() && files.node(8).is_err() && files.node(63).is_err());
        assert!(files.node(FIRST_LINK + 1).is_err() && files.node(u64::MAX).is_err());
    }

    #[test]
    fn proc_link_above_limit_is_refused() {
        let mut links = Links::default();
        for number in 0..LINKS_MAX {
            let name = (Overlay::Net, number.to_string());
            assert!(links.number(name).is_ok());
        }
        let more = (Overlay::Net, "more".to_owned());
        assert_eq!(links.number(more), Err(Errno::ENOMEM));
        let known = (Overlay::Net, "3".to_owned());
        assert_eq!(links.number(known), Ok(FIRST_LINK + 3));
    }

    #[test]
    fn proc_file_above_limit_of_files_or_bytes_is_refused() {
        let files = files();
        let content = || Content {
            text: "text".to_owned(),
            all: files.bytes.clone(),
            taken: 0,
        };
        files.bytes.store(BYTES_MAX - 1, Ordering::Relaxed);
        let mut last = content();
        assert_eq!(last.fit(), Ok(()));
        assert_eq!(content().fit(), Err(Errno::ENOMEM));
        drop(last);
        assert_eq!(files.bytes.load(Ordering::Relaxed), BYTES_MAX - 1);
        assert_eq!(content().fit(), Ok(()));

        for number in 0..OPEN_MAX as u64 {
            lock(&files.open).insert(number, Arc::new(content()));
        }
        let bytes = [0; 64];
        let request = Request::of(&bytes).expect("the request is long enough");
        let opened = files.open(&Node::File("ip_vs"), &request, &mut Worker::default());
        assert_eq!(opened, Err(Errno::ENFILE));
    }

    #[test]
    fn proc_request_above_limit_of_threads_is_refused() {
        let files = files();
        files.threads.store(THREADS_MAX, Ordering::Relaxed);
        assert_eq!(files.clone().answer_later(&[0; 64]), Err(Errno::EBUSY));
        assert_eq!(files.threads.load(Ordering::Relaxed), THREADS_MAX);
    }
}
