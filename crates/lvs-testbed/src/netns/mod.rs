//! Namespaces as hosts, their links and their programs.
//!
//! Each host is a `sleep` process in its own network and mount namespace. Other programs enter
//! these with `nsenter`, so that this crate needs no unsafe code, and works in multi-threaded
//! programs. Without root, an outer `sleep` owns a user namespace for all hosts.

mod holder;
mod host;
mod process;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use self::holder::{enter, holder_command, owner_mark, sweep_leftovers, wait_ready};
pub use self::host::Host;
pub use self::process::{Proc, run_with_input, soon, wait_until};

/// The method of making namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Root creates the namespaces directly.
    Root,
    /// A user namespace contains the other namespaces; no privileges are needed.
    Rootless,
}

impl Mode {
    /// Chooses a mode that works on this machine, or the one in `LVS_TESTBED_MODE` (`root` or
    /// `rootless`).
    ///
    /// # Errors
    ///
    /// `LVS_TESTBED_MODE` has another value, or no mode works; the message contains the fix.
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

/// Script that waits until its standard input closes, because the process of the testbed has
/// exited. It then kills the processes in the namespaces that the input names, and removes
/// directories and names.
///
/// The script keeps each namespace open until the script exits. Otherwise the kernel could reuse
/// the inode number for the namespace of another test.
const JANITOR_SCRIPT: &str = r#"
trap "" INT TERM HUP QUIT PIPE
ns= dirs= names=
while read -r kind value; do
    case $kind in
        ns) if { exec {namespace}<"/proc/$value/ns/net"; } 2>/dev/null; then
                ns="$ns $(readlink "/proc/self/fd/$namespace")"
            fi ;;
        dir) dirs="$dirs $value" ;;
        name) names="$names $value" ;;
    esac
done
for round in $(seq 500); do
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

/// A set of hosts. When dropped, it kills all of their processes, and removes the hosts.
#[derive(Debug)]
pub struct Testbed {
    label: String,
    dir: PathBuf,
    mode: Mode,
    base: Option<Child>,
    switch: Option<Host>,
    holders: Vec<Child>,
    /// Network namespaces of the hosts. They stay open until the testbed is dropped, even if a host
    /// exits earlier.
    namespaces: Vec<File>,
    janitor: Child,
    janitor_pipe: Option<ChildStdin>,
    cables: AtomicU32,
}

impl Testbed {
    /// Creates an empty testbed. `label` is part of the names of its namespaces. The first call in
    /// a process removes what killed runs have left.
    ///
    /// # Errors
    ///
    /// Namespaces are not permitted, or a program is missing.
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
        let mut janitor = Command::new("bash")
            .args(["-c", JANITOR_SCRIPT, "lvs-testbed-janitor"])
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start bash")?;
        let janitor_pipe = janitor.stdin.take();
        let mut testbed = Self {
            label: label.to_owned(),
            dir,
            mode,
            base: None,
            switch: None,
            holders: Vec::new(),
            namespaces: Vec::new(),
            janitor,
            janitor_pipe,
            cables: AtomicU32::new(0),
        };
        let dir = testbed.dir.clone();
        testbed.send_to_janitor("dir", &dir.display().to_string())?;
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        if mode == Mode::Rootless {
            let mut base =
                holder_command(&dir, "base", &["unshare", "-U", "-r", "-n", "-m"], None)?;
            wait_ready(&mut base, "base")?;
            testbed.base = Some(base);
        }
        Ok(testbed)
    }

    /// Directory of the testbed, with logs and files of the servers. It is removed with the
    /// testbed.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Adds hosts, which start in parallel.
    ///
    /// # Errors
    ///
    /// A namespace cannot be created.
    pub fn hosts<const N: usize>(&mut self, names: [&str; N]) -> Result<[Host; N]> {
        let hosts = self.hosts_named(&names.map(str::to_owned))?;
        hosts
            .try_into()
            .map_err(|_| anyhow::anyhow!("the numbers of hosts and names differ"))
    }

    /// As [`Testbed::hosts`], for a number of hosts that is known only at run time.
    ///
    /// # Errors
    ///
    /// A namespace cannot be created.
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
            let namespace = File::open(format!("/proc/{pid}/ns/net"))
                .with_context(|| format!("host {name}: its namespace cannot be opened"))?;
            self.namespaces.push(namespace);
            self.send_to_janitor("ns", &pid.to_string())?;
            hosts.push(Host::new(name, pid, base, &self.dir));
        }
        Ok(hosts)
    }

    /// Creates links between hosts, with one call of `ip`.
    ///
    /// # Errors
    ///
    /// `ip` refuses a link.
    pub fn connect(&mut self, links: &[Link<'_>]) -> Result<()> {
        let needs_switch = links.iter().any(|link| matches!(link, Link::Lan { .. }));
        if needs_switch && self.switch.is_none() {
            let [switch] = self.hosts(["switch"])?;
            // If the module br_netfilter is loaded, iptables would filter the frames: this is a
            // switch, not a firewall.
            switch.sh(
                "for file in /proc/sys/net/bridge/bridge-nf-call-*; do [ ! -w $file ] || echo 0 > $file; done",
            )?;
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
                    let switch = self.switch.as_ref().context("the testbed has no switch")?;
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
        run_with_input(ip.args(["-batch", "-"]), &cables)
            .context("cannot create the veth pairs")?;
        if let Some(switch) = &self.switch
            && !bridges.is_empty()
        {
            run_with_input(switch.command("ip").args(["-batch", "-"]), &bridges)
                .context("cannot make the bridges")?;
        }
        Ok(())
    }

    /// Connects a host to an existing LAN with a new device.
    ///
    /// # Errors
    /// The LAN does not exist, or the host already has the device.
    pub fn plug(&self, lan: &str, host: &Host, device: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("the testbed has no LAN")?;
        let port = format!("p{}", self.cables.fetch_add(1, Ordering::Relaxed));
        switch.sh(&format!(
            "ip link add {port} type veth peer name {device} netns {}\nip link set {port} master {lan} up",
            host.pid()
        ))?;
        Ok(())
    }

    /// Enables NAPI on the switch's ports, so that the switch accepts frames without a socket
    /// buffer (XDP).
    ///
    /// # Errors
    ///
    /// The testbed has no LAN.
    pub fn take_frames(&self) -> Result<()> {
        self.set_ports("gro on")
    }

    /// Reverts [`take_frames`](Self::take_frames). This is the default.
    ///
    /// # Errors
    ///
    /// The testbed has no LAN.
    pub fn take_no_frames(&self) -> Result<()> {
        self.set_ports("gro off")
    }

    /// Makes the switch complete the checksums of frames that it sends.
    ///
    /// # Errors
    ///
    /// The testbed has no LAN.
    pub fn finish_checksums(&self) -> Result<()> {
        self.set_ports("tx off")
    }

    fn set_ports(&self, how: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("the testbed has no LAN")?;
        switch.sh(&format!(
            "for p in /sys/class/net/p*; do ethtool -K ${{p##*/}} {how} > /dev/null; done"
        ))?;
        Ok(())
    }

    /// Enables IPv6 multicast snooping on a LAN: the switch queries for listeners, and sends frames
    /// for a group only to them.
    ///
    /// # Errors
    ///
    /// The LAN does not exist, or the kernel does not support snooping.
    pub fn snoop(&self, lan: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("the testbed has no LAN")?;
        switch.sh(&format!(
            "ip link set {lan} type bridge mcast_snooping 1 mcast_querier 1 mcast_startup_query_interval 50 \
             mcast_query_response_interval 50 mcast_mld_version 2"
        ))?;
        Ok(())
    }

    /// Returns the multicast groups that the switch has learned, from `bridge mdb`.
    ///
    /// # Errors
    ///
    /// The testbed has no LAN.
    pub fn groups(&self) -> Result<String> {
        self.switch
            .as_ref()
            .context("the testbed has no LAN")?
            .sh("bridge mdb show")
    }

    /// Returns the line of `bridge fdb` with the switch's port at which it has learned a MAC
    /// address.
    ///
    /// # Errors
    ///
    /// The testbed has no LAN, or the switch has not learned the address.
    pub fn port_of(&self, mac: &str) -> Result<String> {
        let switch = self.switch.as_ref().context("the testbed has no LAN")?;
        let learned = switch.sh("bridge fdb show dynamic")?;
        let entry = learned.lines().find(|line| line.starts_with(mac));
        entry
            .map(str::to_owned)
            .with_context(|| format!("the switch has not learned {mac}, only: {learned}"))
    }

    /// Removes the carrier of `device` on `host`, and restores it when the host has detected the
    /// loss. `mac` is the MAC address of `device`.
    ///
    /// # Errors
    ///
    /// The testbed has no LAN, the switch has not learned the address, or the host does not detect
    /// the loss.
    pub fn pull_cable(&self, host: &Host, device: &str, mac: &str) -> Result<()> {
        let switch = self.switch.as_ref().context("the testbed has no LAN")?;
        let entry = self.port_of(mac)?;
        let port = entry
            .split_whitespace()
            .nth(2)
            .context("the line of `bridge fdb` has no port")?;
        switch.sh(&format!("ip link set {port} down"))?;
        // The kernel does not report a carrier that returns soon.
        let state = format!("cat /sys/class/net/{device}/operstate");
        wait_until(
            "the interface to lose its carrier",
            Duration::from_secs(30),
            || host.sh(&state).is_ok_and(|state| state.trim() != "up"),
        )?;
        switch.sh(&format!("ip link set {port} up"))?;
        Ok(())
    }

    /// Runs a shell script on each host, in parallel.
    ///
    /// # Errors
    /// The output of the first script that fails.
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

    /// Names the hosts for `ip netns exec`, and returns the command prefix of each host. Without
    /// root, the prefix uses `nsenter`.
    ///
    /// # Errors
    ///
    /// `ip netns attach` fails.
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
            self.send_to_janitor("name", &name)?;
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
        }
        Ok(prefixes)
    }

    fn send_to_janitor(&mut self, kind: &str, value: &str) -> Result<()> {
        let pipe = self
            .janitor_pipe
            .as_mut()
            .context("the pipe to the janitor is closed")?;
        writeln!(pipe, "{kind} {value}")
            .and_then(|()| pipe.flush())
            .context("the janitor process has exited")
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // When the pipe closes, the janitor cleans up, as after a kill.
        drop(self.janitor_pipe.take());
        let _ = self.janitor.wait();
        for holder in self.holders.iter_mut().chain(self.base.as_mut()) {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// A link that [`Testbed::connect`] creates.
#[derive(Debug)]
pub enum Link<'a> {
    /// A veth pair between two hosts, each with the name of its device.
    Cable {
        /// The first host, and its device.
        a: (&'a Host, &'a str),
        /// The second host, and its device.
        b: (&'a Host, &'a str),
        /// MTU of both devices.
        mtu: u32,
    },
    /// A bridge, with a veth pair to each host.
    Lan {
        /// The bridge's name, unique in the testbed.
        name: &'a str,
        /// The connected hosts, each with the name of its device.
        ports: Vec<(&'a Host, &'a str)>,
        /// MTU of bridge and ports.
        mtu: u32,
    },
}
