//! Namespaces as hosts, the links between them, and the programs that run inside.
//!
//! Each host is one `sleep` that holds a network and a mount namespace; everything else enters them with `nsenter`, so
//! that this crate needs no unsafe code and works from a program with many threads. Without root a first `sleep` holds
//! a user namespace in which all the others live.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// How namespaces are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By root, directly.
    Root,
    /// Inside a user namespace, by anybody whom the host allows one.
    Rootless,
}

impl Mode {
    /// Picks what works here. `LVS_TESTBED_MODE=root|rootless` decides instead.
    ///
    /// # Errors
    ///
    /// When neither works; the message says how to make one work.
    pub fn detect() -> Result<Self> {
        let works = |arguments: &[&str]| {
            Command::new("unshare")
                .args(arguments)
                .arg("true")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        };
        match std::env::var("LVS_TESTBED_MODE").as_deref() {
            Ok("root") => return Ok(Self::Root),
            Ok("rootless") => return Ok(Self::Rootless),
            Ok(other) => bail!("LVS_TESTBED_MODE is {other:?}; it can be root or rootless"),
            Err(_) => {}
        }
        if nix::unistd::geteuid().is_root() && works(&["-n", "-m"]) {
            return Ok(Self::Root);
        }
        if works(&["-U", "-r", "-n", "-m"]) {
            return Ok(Self::Rootless);
        }
        bail!(
            "this process may not make network namespaces, neither as root nor through a user namespace; run as root, \
             or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, \
             kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0)"
        )
    }
}

/// The variable that marks the processes which hold namespaces, so that a later run can find those of a dead one.
const HOLDER_MARK: &str = "LVS_TESTBED_HOLDER";

/// Mounts that each host has for itself: `/run` (locks and sockets of programs that expect to be alone on their host)
/// and a `/sys` that shows the host's own interfaces.
const HOLDER_SCRIPT: &str = r"
mount -t tmpfs -o mode=755 tmpfs /run || exit 1
mkdir -p /run/lock /run/netns
mount -t sysfs sysfs /sys 2>/dev/null
ip link set lo up || exit 1
cd /proc/sys/net
echo 0 > ipv4/conf/all/rp_filter; echo 0 > ipv4/conf/default/rp_filter
if [ -d ipv6 ]; then
    echo 0 > ipv6/conf/all/accept_dad; echo 0 > ipv6/conf/default/accept_dad; echo 0 > ipv6/conf/default/accept_ra
fi
cd /
echo ready
exec sleep infinity
";

/// Waits for the end of its input, which is the end of the testbed, then kills what lives in the namespaces it was told
/// of and removes directories and names.
const JANITOR_SCRIPT: &str = r#"
trap "" INT TERM HUP QUIT PIPE
ns= dirs= names=
while read -r kind value; do
    case $kind in
        ns) ns="$ns $value" ;;
        dir) dirs="$dirs $value" ;;
        name) names="$names $value" ;;
    esac
done
for round in 1 2 3 4 5; do
    pids=$(ls -l /proc/[0-9]*/ns/net 2>/dev/null | awk -v want="$ns" '
        BEGIN { n = split(want, w, " "); for (i = 1; i <= n; i++) wanted[w[i]] = 1 }
        ($NF in wanted) { split($(NF - 2), part, "/"); print part[3] }')
    [ -n "$pids" ] || break
    kill -9 $pids 2>/dev/null
    sleep 0.02
done
for name in $names; do ip netns del "$name" 2>/dev/null; done
[ -z "$dirs" ] || rm -rf $dirs
"#;

/// A set of hosts. Dropping it ends every process in them and removes them.
#[derive(Debug)]
pub struct Testbed {
    label: String,
    dir: PathBuf,
    mode: Mode,
    base: Option<Child>,
    switch: Option<Host>,
    holders: Vec<Child>,
    janitor: Child,
    janitor_pipe: Option<ChildStdin>,
    cables: AtomicU32,
}

impl Testbed {
    /// Makes an empty testbed. The label is for names that people see.
    ///
    /// # Errors
    ///
    /// Without the right to make namespaces, or when a program that it needs is missing.
    pub fn new(label: &str) -> Result<Self> {
        static SWEEP: Once = Once::new();
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let mode = Mode::detect()?;
        SWEEP.call_once(sweep_leftovers);

        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!(
            "lvs-testbed-{}-{number}",
            owner_mark(std::process::id())
        ));
        let mut janitor = Command::new("sh")
            .args(["-c", JANITOR_SCRIPT, "lvs-testbed-janitor"])
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start sh")?;
        let janitor_pipe = janitor.stdin.take();
        let mut testbed = Self {
            label: label.to_owned(),
            dir,
            mode,
            base: None,
            switch: None,
            holders: Vec::new(),
            janitor,
            janitor_pipe,
            cables: AtomicU32::new(0),
        };
        let dir = testbed.dir.clone();
        testbed.tell_janitor("dir", &dir.display().to_string())?;
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        if mode == Mode::Rootless {
            let mut base =
                holder_command(&dir, "base", &["unshare", "-U", "-r", "-n", "-m"], None)?;
            wait_ready(&mut base, "base")?;
            testbed.base = Some(base);
        }
        Ok(testbed)
    }

    /// The testbed's own directory: files of the servers, logs. Removed with the testbed.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How the namespaces were made.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Adds hosts, all at once because each takes some milliseconds to start.
    ///
    /// # Errors
    ///
    /// When a namespace cannot be made.
    pub fn hosts<const N: usize>(&mut self, names: [&str; N]) -> Result<[Host; N]> {
        let hosts = self.hosts_named(&names.map(str::to_owned))?;
        hosts
            .try_into()
            .map_err(|_| anyhow::anyhow!("as many hosts as names"))
    }

    /// Like [`Testbed::hosts`] for a number of hosts that is known at run time only.
    ///
    /// # Errors
    ///
    /// When a namespace cannot be made.
    pub fn hosts_named(&mut self, names: &[String]) -> Result<Vec<Host>> {
        let base = self.base.as_ref().map(Child::id);
        let mut started = Vec::with_capacity(names.len());
        for name in names {
            started.push(holder_command(
                &self.dir,
                name,
                &["unshare", "-n", "-m"],
                base,
            )?);
        }
        let mut hosts = Vec::with_capacity(names.len());
        for (mut holder, name) in started.into_iter().zip(names) {
            let ready = wait_ready(&mut holder, name);
            let pid = holder.id();
            self.holders.push(holder);
            ready?;
            let namespace = fs::read_link(format!("/proc/{pid}/ns/net"))
                .with_context(|| format!("host {name}: its namespace cannot be read"))?;
            self.tell_janitor("ns", &namespace.display().to_string())?;
            hosts.push(Host(Arc::new(HostInner {
                name: name.clone(),
                pid,
                user: base,
                dir: self.dir.clone(),
                spawned: AtomicU32::new(0),
                ports: AtomicU32::new(0),
                public: Mutex::new(None),
            })));
        }
        Ok(hosts)
    }

    /// Lays cables and LANs, in one go.
    ///
    /// # Errors
    ///
    /// When `ip` refuses one of them.
    pub fn connect(&mut self, links: &[Link<'_>]) -> Result<()> {
        let needs_switch = links.iter().any(|link| matches!(link, Link::Lan { .. }));
        if needs_switch && self.switch.is_none() {
            let [switch] = self.hosts(["switch"])?;
            self.switch = Some(switch);
        }
        let mut cables = String::new();
        let mut bridges = String::new();
        for link in links {
            match link {
                Link::Cable {
                    a: (host_a, device_a),
                    b: (host_b, device_b),
                    mtu,
                } => {
                    writeln!(
                        cables,
                        "link add {device_a} mtu {mtu} netns {} type veth peer name {device_b} mtu {mtu} netns {}",
                        host_a.pid(),
                        host_b.pid()
                    )?;
                }
                Link::Lan { name, ports, mtu } => {
                    let switch = self.switch.as_ref().context("made above")?;
                    writeln!(
                        bridges,
                        "link add {name} mtu {mtu} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
                    )?;
                    writeln!(bridges, "link set {name} up")?;
                    for (host, device) in ports {
                        let port = format!("p{}", self.cables.fetch_add(1, Ordering::Relaxed));
                        writeln!(
                            cables,
                            "link add {device} mtu {mtu} netns {} type veth peer name {port} mtu {mtu} netns {}",
                            host.pid(),
                            switch.pid()
                        )?;
                        writeln!(bridges, "link set {port} master {name} up")?;
                    }
                }
            }
        }
        let mut ip = match self.base.as_ref().map(Child::id) {
            Some(base) => enter(base, Some(base), "ip"),
            None => Command::new("ip"),
        };
        run_with_input(ip.args(["-batch", "-"]), &cables).context("cannot lay the cables")?;
        if let Some(switch) = &self.switch
            && !bridges.is_empty()
        {
            run_with_input(switch.command("ip").args(["-batch", "-"]), &bridges)
                .context("cannot make the bridges")?;
        }
        Ok(())
    }

    /// Plugs a host into a LAN that there is, with a new device.
    ///
    /// # Errors
    ///
    /// When there is no such LAN, or when the host has such a device.
    pub fn plug(&self, lan: &str, host: &Host, device: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("there is no LAN")?;
        let port = format!("p{}", self.cables.fetch_add(1, Ordering::Relaxed));
        switch.sh(&format!(
            "ip link add {port} type veth peer name {device} netns {}\nip link set {port} master {lan} up",
            host.pid()
        ))?;
        Ok(())
    }

    /// Has the switch watch who listens to which groups of IPv6 on a LAN, and ask for it, as switches do: frames for a group
    /// go to its listeners only.
    ///
    /// # Errors
    ///
    /// When there is no such LAN, or the kernel has no snooping.
    pub fn snoop(&self, lan: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("there is no LAN")?;
        switch.sh(&format!(
            "ip link set {lan} type bridge mcast_snooping 1 mcast_querier 1 mcast_startup_query_interval 50 \
             mcast_query_response_interval 50 mcast_mld_version 2"
        ))?;
        Ok(())
    }

    /// The multicast groups that the switch has heard of, as `bridge mdb` shows them.
    ///
    /// # Errors
    ///
    /// When there is no LAN.
    pub fn groups(&self) -> Result<String> {
        self.switch
            .as_ref()
            .context("there is no LAN")?
            .sh("bridge mdb show")
    }

    /// Runs a shell script on each host, all at the same time.
    ///
    /// # Errors
    ///
    /// The first script that fails, with what it printed.
    pub fn configure(&self, scripts: &[(&Host, String)]) -> Result<()> {
        std::thread::scope(|scope| {
            let running: Vec<_> = scripts
                .iter()
                .map(|(host, script)| scope.spawn(move || host.sh(script).map(drop)))
                .collect();
            running
                .into_iter()
                .try_for_each(|thread| match thread.join() {
                    Ok(result) => result,
                    Err(_) => bail!("a thread that configures a host panicked"),
                })
        })
    }

    /// Gives the hosts names that `ip netns exec` knows, for people who want to look around, and returns the words to
    /// type before a command for each. Without root there are no such names; `nsenter` is used instead.
    ///
    /// # Errors
    ///
    /// When `ip netns attach` fails.
    pub fn expose(&mut self, hosts: &[&Host]) -> Result<Vec<String>> {
        let mut prefixes = Vec::with_capacity(hosts.len());
        for host in hosts {
            if self.mode == Mode::Rootless {
                let prefix = format!("nsenter --preserve-credentials -U -n -m -t {}", host.pid());
                prefixes.push(prefix);
                continue;
            }
            let mut name = format!("lvs-{}-{}", self.label, host.name());
            if Path::new("/run/netns").join(&name).exists() {
                name = format!("{name}-{}", std::process::id());
            }
            self.tell_janitor("name", &name)?;
            run_with_input(
                Command::new("ip").args(["netns", "attach", &name, &host.pid().to_string()]),
                "",
            )?;
            prefixes.push(format!("ip netns exec {name}"));
            let mut names = File::options()
                .create(true)
                .append(true)
                .open(self.dir.join("names"))?;
            writeln!(names, "{name}")?;
            if let Ok(mut public) = host.0.public.lock() {
                *public = Some(name);
            }
        }
        Ok(prefixes)
    }

    fn tell_janitor(&mut self, kind: &str, value: &str) -> Result<()> {
        let pipe = self
            .janitor_pipe
            .as_mut()
            .context("the janitor is told before the drop")?;
        writeln!(pipe, "{kind} {value}")
            .and_then(|()| pipe.flush())
            .context("the janitor process is gone")
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // Closing the pipe is the janitor's sign; it does the same whether we leave in order or not.
        drop(self.janitor_pipe.take());
        let _ = self.janitor.wait();
        for holder in self.holders.iter_mut().chain(self.base.as_mut()) {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// A link to lay with [`Testbed::connect`].
#[derive(Debug)]
pub enum Link<'a> {
    /// A veth pair between two hosts, each end with its device name.
    Cable {
        /// One end.
        a: (&'a Host, &'a str),
        /// The other end.
        b: (&'a Host, &'a str),
        /// MTU of both ends.
        mtu: u32,
    },
    /// A bridge, with a veth pair to each host.
    Lan {
        /// The bridge's name, unique in the testbed.
        name: &'a str,
        /// Who is on it, each with its device name.
        ports: Vec<(&'a Host, &'a str)>,
        /// MTU of bridge and ports.
        mtu: u32,
    },
}

/// A host: a network namespace and a mount namespace. Cloning gives another handle to the same host.
#[derive(Clone, Debug)]
pub struct Host(Arc<HostInner>);

#[derive(Debug)]
struct HostInner {
    name: String,
    pid: u32,
    user: Option<u32>,
    dir: PathBuf,
    spawned: AtomicU32,
    ports: AtomicU32,
    public: Mutex<Option<String>>,
}

impl Host {
    /// The host's name within its testbed.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The process that holds the namespaces open: `nsenter -t PID -n -m` enters them.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid
    }

    /// The testbed's directory, which every host sees.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// The first of so many local ports, from below the range that the kernel takes its own from, that were not handed
    /// out before (until they are used up and start over).
    pub(crate) fn take_ports(&self, number: u64) -> u16 {
        const FIRST: u32 = 1024;
        const LAST: u32 = 32_767;
        let number = u32::try_from(number).unwrap_or(LAST).min(LAST - FIRST);
        let taken = self
            .0
            .ports
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                Some(if FIRST + next + number > LAST {
                    number
                } else {
                    next + number
                })
            })
            .unwrap_or(0);
        let first = if FIRST + taken + number > LAST {
            FIRST
        } else {
            FIRST + taken
        };
        u16::try_from(first).unwrap_or(0)
    }

    /// A command that will run on this host. Its working directory is `/`: give absolute paths.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        enter(self.0.pid, self.0.user, program)
    }

    /// Runs a shell script to its end and returns what it printed.
    ///
    /// # Errors
    ///
    /// When it exits other than with 0; the error holds all of its output.
    pub fn sh(&self, script: &str) -> Result<String> {
        run_with_input(self.command("sh").args(["-e", "-c", script]), "")
            .with_context(|| format!("on host {}: {script}", self.name()))
    }

    /// Runs a program to its end and returns what it printed.
    ///
    /// # Errors
    ///
    /// When it exits other than with 0; the error holds all of its output.
    pub fn run<A: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: &[A],
    ) -> Result<String> {
        let program = program.as_ref();
        run_with_input(self.command(program).args(arguments), "")
            .with_context(|| format!("on host {}: {}", self.name(), program.display()))
    }

    /// Starts a program in the background, its output going to a log that is shown if the test fails.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(
        &self,
        program: impl AsRef<OsStr>,
        arguments: &[A],
    ) -> Result<Proc> {
        let mut command = self.command(program.as_ref());
        command.args(arguments);
        self.spawn_command(&program.as_ref().to_string_lossy(), command)
    }

    /// Starts a command made by [`Host::command`] in the background, under a name of its own.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn spawn_command(&self, name: &str, mut command: Command) -> Result<Proc> {
        let short = name.rsplit('/').next().unwrap_or(name);
        let number = self.0.spawned.fetch_add(1, Ordering::Relaxed);
        let log = self
            .0
            .dir
            .join(format!("{}-{number}-{short}.log", self.name()));
        let output =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("on host {}: cannot start {name}", self.name()))?;
        Ok(Proc {
            name: format!("{}/{short}", self.name()),
            child,
            log,
        })
    }

    /// Waits until something on this host listens on the port (`tcp`, `udp`).
    ///
    /// # Errors
    ///
    /// When nothing does within ten seconds.
    pub fn wait_for_port(&self, protocol: &str, port: u16) -> Result<()> {
        wait_until(
            &format!("{protocol} port {port} on host {}", self.name()),
            Duration::from_secs(10),
            || self.listens(protocol, port),
        )
    }

    /// Whether something on this host listens on the port. Read from `/proc`, without entering the host.
    #[must_use]
    pub fn listens(&self, protocol: &str, port: u16) -> bool {
        // A listening TCP socket is in state 0A, an unconnected UDP socket in 07.
        let state = if protocol == "tcp" { "0A" } else { "07" };
        let wanted = format!(":{port:04X}");
        ["", "6"].iter().any(|family| {
            let table = fs::read_to_string(format!("/proc/{}/net/{protocol}{family}", self.pid()))
                .unwrap_or_default();
            table.lines().any(|line| {
                let mut words = line.split_ascii_whitespace().skip(1);
                let local = words.next().unwrap_or_default();
                local.ends_with(&wanted) && words.nth(1) == Some(state)
            })
        })
    }

    /// Whether an abstract Unix socket of this name (without the `@`) is bound on this host.
    #[must_use]
    pub fn has_abstract_socket(&self, name: &str) -> bool {
        let wanted = format!("@{name}");
        fs::read_to_string(format!("/proc/{}/net/unix", self.pid()))
            .unwrap_or_default()
            .lines()
            .any(|line| line.split_ascii_whitespace().nth(7) == Some(wanted.as_str()))
    }

    /// Sets a `net.` sysctl, given by its path below `/proc/sys/net`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses it.
    pub fn sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.sh(&format!("echo {value} > /proc/sys/net/{path}"))
            .map(drop)
    }

    /// A counter or rate of the kernel, as `nstat -az` shows it; 0 where there is none of that name.
    ///
    /// # Errors
    ///
    /// When `/proc/net` cannot be read.
    pub fn counter(&self, group: &str, name: &str) -> Result<u64> {
        for file in ["snmp", "netstat"] {
            let text = fs::read_to_string(format!("/proc/{}/net/{file}", self.pid()))?;
            let lines: Vec<&str> = text.lines().collect();
            for pair in lines.chunks_exact(2) {
                let (names, values) = (pair[0], pair[1]);
                if names.split(':').next() != Some(group) {
                    continue;
                }
                let found = names
                    .split_ascii_whitespace()
                    .zip(values.split_ascii_whitespace())
                    .find(|(n, _)| *n == name);
                if let Some((_, value)) = found {
                    return Ok(value.parse().unwrap_or(0));
                }
            }
        }
        Ok(0)
    }

    /// Puts an executable where every program of this host finds it, over `/usr/sbin/NAME`, without touching the disk:
    /// `/usr/sbin` becomes, for this host only, a directory of links to the real one, with this name added.
    ///
    /// # Errors
    ///
    /// When a mount fails.
    pub fn install(&self, executable: &Path, names: &[&str]) -> Result<()> {
        let farm = self.0.dir.join(format!("{}-sbin", self.name()));
        let mut script = format!("D={}\n", farm.display());
        script.push_str(
            "mkdir -p $D/orig $D/new\nmount --bind /usr/sbin $D/orig\n\
             for f in $D/orig/* ; do ln -s \"$f\" $D/new/; done\n",
        );
        for name in names {
            writeln!(script, "ln -sf {} $D/new/{name}", executable.display())?;
        }
        script
            .push_str("mount --bind $D/new /usr/sbin\n[ -L /sbin ] || mount --bind $D/new /sbin\n");
        self.sh(&script).map(drop)
    }

    /// Writes `/etc/hosts` for this host only.
    ///
    /// # Errors
    ///
    /// When the mount fails.
    pub fn etc_hosts(&self, entries: &[(IpAddr, &str)]) -> Result<()> {
        let file = self.0.dir.join(format!("{}-hosts", self.name()));
        let mut text = String::from("127.0.0.1 localhost\n");
        for (address, name) in entries {
            writeln!(text, "{address} {name}")?;
        }
        fs::write(&file, text)?;
        self.sh(&format!("mount --bind {} /etc/hosts", file.display()))
            .map(drop)
    }
}

/// A program that runs on a host. Dropping it kills it and everything in its process group.
#[derive(Debug)]
pub struct Proc {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Proc {
    /// Its process id, the same inside and outside of the host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its standard output and error go.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// What it has printed so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends it a signal (to the program itself, not to its children).
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.nix_pid(), signal).with_context(|| format!("{}: cannot send {signal}", self.name))
    }

    /// Ends its input, which some programs take as the sign to finish.
    pub fn close_stdin(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// When it still runs after the time limit.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!(
                    "{} still runs after {limit:?}; it printed:\n{}",
                    self.name,
                    self.log()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal and waits for the end.
    ///
    /// # Errors
    ///
    /// When it is gone already or does not end within ten seconds.
    pub fn stop(&mut self, signal: Signal) -> Result<ExitStatus> {
        self.signal(signal)?;
        self.wait(Duration::from_secs(10))
    }

    /// Ends it without mercy, as `kill -9` would.
    pub fn kill(&mut self) {
        let _ = killpg(self.nix_pid(), Signal::SIGKILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn nix_pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("Linux process ids fit in i32"))
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            let running = if self.is_running() {
                "still running"
            } else {
                "ended"
            };
            eprintln!("--- {} ({running}) printed:", self.name);
            for line in tail.iter().rev() {
                eprintln!("    {line}");
            }
        }
        self.kill();
    }
}

/// Polls until the condition holds.
///
/// # Errors
///
/// When it does not hold within the limit.
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !condition() {
        ensure!(
            Instant::now() < deadline,
            "waited {limit:?} in vain for {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Runs a command to its end with the given input; returns its standard output.
///
/// # Errors
///
/// When it cannot be started or exits other than with 0; the error holds all of its output.
pub fn run_with_input(command: &mut Command, input: &str) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends without reading all of its input says why with its exit code.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{}\n{stdout}{}{input}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(stdout)
}

fn enter(pid: u32, user: Option<u32>, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nsenter");
    if let Some(user) = user {
        command
            .arg(format!("--user=/proc/{user}/ns/user"))
            .arg("--preserve-credentials");
    }
    command
        .arg(format!("--net=/proc/{pid}/ns/net"))
        .arg(format!("--mount=/proc/{pid}/ns/mnt"))
        .arg("--")
        .arg(program);
    command
}

fn holder_command(dir: &Path, name: &str, unshare: &[&str], base: Option<u32>) -> Result<Child> {
    let mut command = match base {
        Some(base) => enter(base, Some(base), unshare[0]),
        None => Command::new(unshare[0]),
    };
    let log = File::create(dir.join(format!("{name}-holder.log")))?;
    command
        .args(&unshare[1..])
        .args(["--propagation", "private", "--", "sh", "-c", HOLDER_SCRIPT])
        .env(HOLDER_MARK, owner_mark(std::process::id()))
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("cannot start unshare (package util-linux)")
}

fn wait_ready(holder: &mut Child, name: &str) -> Result<()> {
    let mut line = String::new();
    let stdout = holder.stdout.take().context("piped above")?;
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(
        line == "ready\n",
        "host {name}: its namespaces could not be made (see {name}-holder.log; in a container without privileges, /proc/sys is read-only)"
    );
    Ok(())
}

/// What tells one run from all others, also when process ids come again: pid namespace, pid, start time.
fn owner_mark(pid: u32) -> String {
    let namespace = fs::read_link("/proc/self/ns/pid")
        .map(|link| link.display().to_string())
        .unwrap_or_default();
    let digits: String = namespace.chars().filter(char::is_ascii_digit).collect();
    format!("{digits}-{pid}-{}", start_time(pid).unwrap_or_default())
}

/// The 22nd field of `/proc/PID/stat`; the second one is in parentheses and may hold anything.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after = stat.rsplit_once(')')?.1;
    after.split_ascii_whitespace().nth(19).map(str::to_owned)
}

/// Whether the mark is that of a process in our pid namespace which no longer exists.
fn is_dead(mark: &str) -> bool {
    let mut parts = mark.split('-');
    let (Some(namespace), Some(pid), Some(start)) = (
        parts.next(),
        parts.next().and_then(|pid| pid.parse::<u32>().ok()),
        parts.next(),
    ) else {
        return false;
    };
    owner_mark(std::process::id()).split('-').next() == Some(namespace)
        && start_time(pid).as_deref() != Some(start)
}

/// Removes what a run left that was killed together with its janitor.
fn sweep_leftovers() {
    let own_network = fs::read_link("/proc/self/ns/net").ok();
    let mut networks = Vec::new();
    for pid in processes() {
        let mut environment = Vec::new();
        if File::open(format!("/proc/{pid}/environ"))
            .and_then(|mut file| file.read_to_end(&mut environment))
            .is_err()
        {
            continue;
        }
        let mark = environment
            .split(|byte| *byte == 0)
            .filter_map(|entry| std::str::from_utf8(entry).ok())
            .find_map(|entry| entry.strip_prefix(HOLDER_MARK)?.strip_prefix('='));
        if mark.is_some_and(is_dead)
            && let Ok(network) = fs::read_link(format!("/proc/{pid}/ns/net"))
            && Some(&network) != own_network.as_ref()
        {
            networks.push(network);
        }
    }
    if !networks.is_empty() {
        for pid in processes() {
            if fs::read_link(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|network| networks.contains(&network))
            {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let dead = name
            .to_str()
            .and_then(|name| name.strip_prefix("lvs-testbed-"))
            .is_some_and(is_dead);
        if dead {
            for name in fs::read_to_string(entry.path().join("names"))
                .unwrap_or_default()
                .lines()
            {
                let _ = Command::new("ip")
                    .args(["netns", "del", name])
                    .stderr(Stdio::null())
                    .status();
            }
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_tells_the_living_from_the_dead() {
        let own = owner_mark(std::process::id());
        assert!(!is_dead(&own), "{own} is this process");
        assert!(!is_dead(&format!("{own}-3")), "a directory of this process");
        let mut parts: Vec<&str> = own.split('-').collect();
        parts[2] = "1";
        assert!(
            is_dead(&parts.join("-")),
            "same pid, started at another time"
        );
        parts[0] = "7";
        assert!(
            !is_dead(&parts.join("-")),
            "another pid namespace is not ours to judge"
        );
        assert!(!is_dead("nonsense"));
        let mut child = Command::new("true").spawn().expect("true starts");
        let mark = owner_mark(child.id());
        child.wait().expect("true ends");
        assert!(is_dead(&mark), "{mark} has ended");
    }
}
