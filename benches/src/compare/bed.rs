//! Client, director, server: three hosts (network namespaces) for each contender, so that all
//! contenders are ready and are measured in turn.
//!
//! ```text
//! client c… ──── d… director e… ──── s… server
//!  10.71.0.2    10.71.0.1   10.72.0.1   10.72.0.11-14
//!  10.128.0.0/9, the flows' clients     10.73.0.1, the virtual service
//! ```

mod crowd;
mod ipvs;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::programs;
use lvs_testbed::{Host, Proc, Testbed, wait_until};
use nix::sys::signal::Signal;

pub(crate) use self::crowd::server_address;
pub(crate) use self::ipvs::{ipvs, lacks};
use super::contender::{Contender, Method, Place};
use super::programs as peers;
use crate::yardsticks::Yardsticks;

/// Number of beds that this process has made.
static BEDS: AtomicUsize = AtomicUsize::new(0);

pub(crate) const CLIENT_MAC: &str = "02:00:00:00:0c:00";
pub(crate) const FRONT_MAC: &str = "02:00:00:00:0d:00";
pub(crate) const BACK_MAC: &str = "02:00:00:00:0d:01";
pub(crate) const SERVER_MAC: &str = "02:00:00:00:05:00";
pub(crate) const VIP: &str = "10.73.0.1";
pub(crate) const VIP6: &str = "fd00:73::1";
pub(crate) const SERVER: &str = "10.72.0.11";
pub(crate) const SERVER6: &str = "fd00:72::11";
/// Connection limit of the dataplane, sufficient for the largest measured case.
const CONNECTIONS: u32 = 10_100_000;
/// Expected number of TCP connections of a dataplane with the kernel fast path: lower than
/// [`CONNECTIONS`], because memory for all connections is allocated at the start. The connection
/// limit is 1.2 times the expected number, which for a flood is its number of connections.
pub(crate) const FAST_PATH: u32 = 1_000_000;
/// Arguments of `ipvsadm` that keep connections from ending during a measurement.
const TIMEOUTS: [&str; 4] = ["--set", "7200", "120", "7200"];
/// The CPU on which clients and servers run.
const ENDPOINTS: usize = 0;
/// The CPU on which the director runs.
const DIRECTOR: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// Floods of small packets, which are dropped at the far interface.
    Flood,
    /// TCP connections to servers that run during all measurements. With direct routing and
    /// tunnels, servers send replies over a separate link.
    Tcp,
    /// As [`Tcp`](Purpose::Tcp), but the servers are started for each measurement.
    Transfer,
    /// Round trips of single packets, without other load and during a paced flood.
    Ping,
}

impl Purpose {
    fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::Transfer)
    }
}

/// Three hosts, with a contender on the middle one.
#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) who: Contender,
    pub(crate) place: Place,
    pub(crate) client: Host,
    pub(crate) server: Host,
    pub(crate) director: Host,
    /// The client hosts after [`spread`](Bed::spread); empty before.
    pub(crate) clients: Vec<Host>,
    /// The server hosts after [`spread`](Bed::spread); empty before.
    pub(crate) servers: Vec<Host>,
    /// Interfaces: the client's, the director's two (to the client, to the server), the server's.
    pub(crate) devices: [String; 4],
    purpose: Purpose,
    connections: u32,
    process: Option<Proc>,
    endpoints: Vec<Proc>,
    testbed: Testbed,
}

impl Bed {
    pub(crate) fn new(
        who: Contender,
        place: Place,
        purpose: Purpose,
        connections: u32,
        yardsticks: &Yardsticks,
    ) -> Result<Self> {
        if let Some(lack) = lacks(who) {
            bail!(lack);
        }
        let mut testbed = Testbed::new("bench")?;
        let [client, director, server] = testbed.hosts(["client", "director", "server"])?;
        let number = BEDS.fetch_add(1, Ordering::Relaxed);
        // Interface names must be unique on the machine, because they identify receiving threads:
        // other beds, even of other processes, may exist. A name has at most 15 characters.
        let name = format!("{}-{number}", std::process::id());
        let devices = ["c", "d", "e", "s"].map(|letter| format!("{letter}{name}"));
        let mut bed = Self {
            who,
            place,
            client,
            server,
            director,
            clients: Vec::new(),
            servers: Vec::new(),
            devices,
            purpose,
            connections,
            process: None,
            endpoints: Vec::new(),
            testbed,
        };
        bed.lay_cables()?;
        bed.configure()?;
        bed.start(yardsticks)
            .with_context(|| format!("cannot start {}", who.name()))?;
        if bed.is_threaded() {
            bed.thread_receivers()?;
        }
        if purpose == Purpose::Tcp {
            bed.start_servers(yardsticks)?;
        }
        if purpose == Purpose::Transfer || purpose == Purpose::Tcp {
            bed.answer_directly(&name)?;
        }
        if who.spins() {
            bed.pause()?;
        }
        Ok(bed)
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Id of the contender's process; `None` if the contender has no process.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Proc::pid)
    }

    /// Replaces the process that forwards by another one, which `start` starts on the given host
    /// and CPU.
    pub(crate) fn run_instead(
        &mut self,
        start: impl FnOnce(&Host, &str) -> Result<Proc>,
    ) -> Result<()> {
        if let Some(mut old) = self.process.take() {
            old.stop(Signal::SIGTERM)?;
        }
        self.process = Some(start(&self.director, &DIRECTOR.to_string())?);
        Ok(())
    }

    /// The address to which clients connect.
    pub(crate) fn target(&self, v6: bool) -> &'static str {
        let by_address = matches!(self.who, Contender::Route | Contender::Direct)
            || (self.purpose != Purpose::Flood && self.who.is_null_packet());
        match (by_address, v6) {
            (true, true) => SERVER6,
            (true, false) => SERVER,
            (false, true) => VIP6,
            (false, false) => VIP,
        }
    }

    /// Resumes a contender that polls continuously.
    pub(crate) fn resume(&self) -> Result<()> {
        self.signal_spinner(Signal::SIGCONT)
    }

    /// Pauses a contender that polls continuously.
    pub(crate) fn pause(&self) -> Result<()> {
        self.signal_spinner(Signal::SIGSTOP)
    }

    fn signal_spinner(&self, signal: Signal) -> Result<()> {
        match &self.process {
            Some(process) if self.who.spins() => process.signal(signal),
            _ => Ok(()),
        }
    }

    /// Fails if the contender has exited.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        if let Some(process) = &mut self.process
            && !process.is_running()
        {
            bail!(
                "{} has ended; it printed:\n{}",
                self.who.name(),
                process.log()
            );
        }
        Ok(())
    }

    /// Number of packets that the kernel fast path has forwarded.
    pub(crate) fn fast_path(&self) -> Result<u64> {
        #[derive(serde::Deserialize)]
        struct Reason {
            reason: String,
            count: u64,
        }
        let lvsadm = programs::find("lvsadm")?;
        let text = self.director.run(lvsadm, &["drops", "--json", "--all"])?;
        let all: Vec<Reason> = serde_json::from_str(&text)?;
        let ours = |reason: &&Reason| {
            ["kernel_requests", "kernel_replies", "kernel_xdp"].contains(&&*reason.reason)
        };
        Ok(all.iter().filter(ours).map(|reason| reason.count).sum())
    }

    /// Number of packets that an interface has received.
    pub(crate) fn received(host: &Host, device: &str) -> Result<u64> {
        let table = fs::read_to_string(format!("/proc/{}/net/dev", host.pid()))?;
        let line = table
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
        let packets = line.and_then(|line| line.split_ascii_whitespace().nth(1));
        packets
            .and_then(|word| word.parse().ok())
            .with_context(|| format!("host {}: no counters of {device}", host.name()))
    }

    fn is_threaded(&self) -> bool {
        self.place == Place::OneCore || self.purpose.is_tcp()
    }

    fn lay_cables(&self) -> Result<()> {
        let [c, d, e, s] = &self.devices;
        let (client, director, server) =
            (self.client.pid(), self.director.pid(), self.server.pid());
        let queues = "numtxqueues 1 numrxqueues 1";
        let cable = |a: &str, a_mac: &str, a_host: u32, b: &str, b_mac: &str, b_host: u32| {
            format!(
                "link add {a} address {a_mac} netns {a_host} {queues} type veth \
                 peer name {b} address {b_mac} netns {b_host} {queues}\n"
            )
        };
        let cables = if self.who == Contender::Direct {
            cable(c, CLIENT_MAC, client, s, SERVER_MAC, server)
        } else {
            cable(c, CLIENT_MAC, client, d, FRONT_MAC, director)
                + &cable(e, BACK_MAC, director, s, SERVER_MAC, server)
        };
        run_with_input(Command::new("ip").args(["-batch", "-"]), &cables)
            .context("cannot create the veth pairs")
            .map(drop)
    }

    fn configure(&self) -> Result<()> {
        let direct = self.who == Contender::Direct;
        let mut scripts = vec![
            (&self.client, self.end_script(&self.devices[0], true)),
            (&self.server, self.end_script(&self.devices[3], false)),
        ];
        if !direct {
            scripts.push((&self.director, self.director_script()?));
        }
        self.testbed.configure(&scripts)
    }

    /// The commands that configure the interface of the client or of the server. Neighbour entries
    /// are static, so that a flood never waits for address resolution.
    fn end_script(&self, device: &str, client: bool) -> String {
        let (own, own6, gateway, gateway6, mac) = if client {
            (
                "10.71.0.2/24",
                "fd00:71::2/64",
                "10.71.0.1",
                "fd00:71::1",
                FRONT_MAC,
            )
        } else {
            (
                "10.72.0.11/24",
                "fd00:72::11/64",
                "10.72.0.1",
                "fd00:72::1",
                BACK_MAC,
            )
        };
        let mut script = format!(
            "sysctl -qw net.ipv4.ip_local_port_range='1024 65535' net.ipv4.tcp_tw_reuse=1 net.core.somaxconn=8192 \
             net.ipv4.tcp_max_syn_backlog=8192 net.ipv6.conf.all.accept_dad=0\n\
             ip addr add {own} dev {device}\nip addr add {own6} dev {device} nodad\nip link set {device} up\n"
        );
        if self.who == Contender::Direct {
            script += &if client {
                format!("ip route add 10.72.0.0/24 dev {device}\n")
            } else {
                format!("ip route add 10.71.0.0/24 dev {device}\n")
            };
        } else {
            script += &format!(
                "ip neigh replace {gateway} lladdr {mac} dev {device} nud permanent\n\
                 ip neigh replace {gateway6} lladdr {mac} dev {device} nud permanent\n\
                 ip route add default via {gateway}\nip -6 route add default via {gateway6}\n"
            );
        }
        if !client {
            for host in 12..=14 {
                script += &format!("ip addr add 10.72.0.{host}/24 dev {device}\n");
            }
            if self.who != Contender::Direct {
                script += &format!("ip addr add {VIP}/32 dev lo\n");
            }
        }
        match self.purpose {
            Purpose::Flood => script += &drop_all(device),
            Purpose::Ping => script += &drop_udp(device),
            Purpose::Tcp | Purpose::Transfer => script += &format!("ethtool -K {device} gro on\n"),
        }
        script
    }

    fn director_script(&self) -> Result<String> {
        let [_, d, e, _] = &self.devices;
        let forwarding = u8::from(self.who.forwards_by_host());
        let mut script = format!(
            "sysctl -qw net.ipv4.ip_forward={forwarding} net.ipv6.conf.all.forwarding={forwarding} \
             net.ipv4.ip_local_port_range='1024 65535' net.ipv4.tcp_tw_reuse=1 net.core.somaxconn=8192 \
             net.ipv4.tcp_max_syn_backlog=8192\n\
             ip addr add 10.71.0.1/24 dev {d}\nip addr add fd00:71::1/64 dev {d} nodad\nip link set {d} up\n\
             ip addr add 10.72.0.1/24 dev {e}\nip addr add fd00:72::1/64 dev {e} nodad\nip link set {e} up\n\
             ip neigh replace 10.71.0.2 lladdr {CLIENT_MAC} dev {d} nud permanent\n\
             ip neigh replace fd00:71::2 lladdr {CLIENT_MAC} dev {d} nud permanent\n\
             ip neigh replace {SERVER6} lladdr {SERVER_MAC} dev {e} nud permanent\n\
             ip route add 10.128.0.0/9 via 10.71.0.2\nip -6 route add fd00:128::/32 via fd00:71::2\n"
        );
        for host in 11..=14 {
            writeln!(
                script,
                "ip neigh replace 10.72.0.{host} lladdr {SERVER_MAC} dev {e} nud permanent"
            )?;
        }
        // The generator's frames have no socket buffers: a veth device receives them only with
        // NAPI, which it uses with GRO.
        if self.purpose != Purpose::Ping {
            writeln!(script, "ethtool -K {d} gro on\nethtool -K {e} gro on")?;
        } else {
            writeln!(script, "ethtool -K {d} gro on")?;
        }
        if self.who.is_null_packet() {
            script += &drop_all(d);
            script += &drop_all(e);
        }
        let on_host = matches!(
            self.who,
            Contender::AfPacket(_)
                | Contender::FastPath(_)
                | Contender::Xdp
                | Contender::Other
                | Contender::Ipvs(_)
                | Contender::Proxy
                | Contender::Haproxy
                | Contender::Nginx
        );
        if on_host {
            writeln!(
                script,
                "ip addr add {VIP}/32 dev lo\nip addr add {VIP6}/128 dev lo"
            )?;
        }
        Ok(script)
    }

    fn start(&mut self, yardsticks: &Yardsticks) -> Result<()> {
        let [_, d, e, _] = self.devices.clone();
        match self.who {
            Contender::Direct | Contender::Route => Ok(()),
            Contender::Ipvs(method) => self.start_ipvs(method),
            Contender::Nftables => peers::nftables(&self.director),
            Contender::AfPacket(method) => self.start_dataplane("af_packet", method, None),
            Contender::FastPath(method) => self.start_dataplane("af_packet", method, None),
            Contender::Xdp => self.start_dataplane("af_packet", Method::Nat, None),
            Contender::Other => {
                let dir = yardsticks.other.as_deref().context("--other is missing")?;
                self.start_dataplane("af_packet", Method::Nat, Some(dir))
            }
            Contender::Tun => self.start_dataplane("tun", Method::Nat, None),
            Contender::NullV2Send => self.start_null(yardsticks, "v2", "mmsg"),
            Contender::NullV3Send => self.start_null(yardsticks, "v3", "mmsg"),
            Contender::NullV3Ring => self.start_null(yardsticks, "v3", "ring"),
            Contender::NullMmsg => self.start_null(yardsticks, "mmsg", "mmsg"),
            Contender::NullTun => self.start_null_tun(yardsticks),
            Contender::Testpmd => {
                self.process = Some(peers::testpmd(
                    &self.director,
                    [&d, &e],
                    [CLIENT_MAC, SERVER_MAC],
                )?);
                Ok(())
            }
            Contender::Proxy => {
                self.process = Some(peers::proxy(&self.director, yardsticks.dir())?);
                self.director.wait_for_port("tcp", 80)
            }
            Contender::Haproxy => {
                self.process = Some(peers::haproxy(&self.director, yardsticks.dir())?);
                self.director.wait_for_port("tcp", 80)
            }
            Contender::Nginx => {
                self.process = Some(peers::nginx_stream(&self.director, yardsticks.dir())?);
                self.director.wait_for_port("tcp", 80)
            }
        }
    }

    /// Starts the dataplane with this backend, and adds the rules and timeouts by `lvsadm`. Uses
    /// the programs in `dir`, or else those that `programs::find` finds.
    fn start_dataplane(&mut self, backend: &str, method: Method, dir: Option<&Path>) -> Result<()> {
        let program =
            |name: &str| dir.map_or_else(|| programs::find(name), |dir| Ok(dir.join(name)));
        let [_, d, e, _] = &self.devices;
        let dataplane = program("lvs-dataplane")?.display().to_string();
        let fast_path = self.who.is_fast_path();
        let connections = if fast_path {
            self.connections + self.connections / 5
        } else {
            CONNECTIONS
        };
        let (cpu, connections) = (DIRECTOR.to_string(), connections.to_string());
        let mut words = vec!["-c", &cpu, &dataplane, "--backend", backend];
        words.extend([
            "--interface",
            d,
            "--interface",
            e,
            "--max-connections",
            &connections,
        ]);
        words.extend(["--fast-path", if fast_path { "on" } else { "off" }]);
        if fast_path {
            if self.who == Contender::Xdp {
                words.extend(["--xdp", d, "--xdp", e]);
                // With generic receive offload, NAPI receives redirected frames.
                for (host, device) in [(&self.client, 0), (&self.server, 3)] {
                    let device = &self.devices[device];
                    host.sh(&format!("ethtool -K {device} gro on"))?;
                }
            }
            // Millions of connections are opened with as few packets as possible. TCP connections
            // use the usual number.
            if self.purpose == Purpose::Flood {
                words.extend(["--fast-path-after", "1"]);
            }
        }
        if backend == "tun" {
            words.push("--own-vips");
        }
        let mut process = self.director.spawn("taskset", &words)?;
        let director = &self.director;
        wait_until(
            "the dataplane to answer on its control socket",
            Duration::from_secs(10),
            || director.has_dataplane() || !process.is_running(),
        )
        .with_context(|| process.log())?;
        ensure!(
            process.is_running(),
            "the program ended; it printed:\n{}",
            process.log()
        );
        let rules = self.rules(method)?;
        let lvsadm = program("lvsadm")?;
        run_with_input(self.director.command(&lvsadm).arg("-R"), &rules)?;
        self.director.run(&lvsadm, &TIMEOUTS)?;
        self.process = Some(process);
        Ok(())
    }

    /// Returns rules for ipvsadm: a UDP service with one server, because all replies of a flood
    /// come from one server (with NAT, also for IPv6); with NAT or for TCP, also TCP services with
    /// four servers.
    pub(crate) fn rules(&self, method: Method) -> Result<String> {
        let flag = method.flag();
        let mut rules = String::new();
        let mut add = |protocol: &str, vip: &str, port: u16, servers: &[String]| -> Result<()> {
            writeln!(rules, "-A {protocol} {vip}:{port} -s rr")?;
            for server in servers {
                writeln!(
                    rules,
                    "-a {protocol} {vip}:{port} -r {server}:{port} {flag} -w 1"
                )?;
            }
            Ok(())
        };
        let one = [SERVER.to_owned()];
        add("-u", VIP, 80, &one)?;
        if method == Method::Nat {
            add("-u", &format!("[{VIP6}]"), 80, &[format!("[{SERVER6}]")])?;
        }
        if method == Method::Nat || self.purpose.is_tcp() {
            let four: Vec<String> = (11..=14).map(|host| format!("10.72.0.{host}")).collect();
            for port in [80, peers::BULK_PORT, peers::PING_PORT] {
                add("-t", VIP, port, &four)?;
            }
        }
        Ok(rules)
    }

    fn start_null(&mut self, yardsticks: &Yardsticks, receive: &str, send: &str) -> Result<()> {
        let [_, d, e, _] = &self.devices;
        let cpu = DIRECTOR.to_string();
        let words = [
            "-a", d, "-b", e, "-r", receive, "-x", send, "-A", FRONT_MAC, "-B", BACK_MAC, "-P",
            CLIENT_MAC, "-Q", SERVER_MAC, "-c", &cpu,
        ];
        let process = self
            .director
            .spawn(yardsticks.path("null_packet"), &words)?;
        self.process = Some(ready(process)?);
        Ok(())
    }

    fn start_null_tun(&mut self, yardsticks: &Yardsticks) -> Result<()> {
        let cpu = DIRECTOR.to_string();
        let words = ["-i", "tunp", "-v", VIP, "-s", SERVER, "-c", &cpu];
        let process = self.director.spawn(yardsticks.path("null_tun"), &words)?;
        self.process = Some(ready(process)?);
        let script = format!(
            "ip link set tunp up txqueuelen 5000\nip route add {VIP}/32 dev tunp\n\
             ip rule add iif {} from {SERVER} lookup 100\nip route add default dev tunp table 100\n",
            self.devices[2]
        );
        self.director.sh(&script).map(drop)
    }

    /// Makes kernel threads receive from the director's interfaces on the director's CPU. For TCP,
    /// also from the interfaces of client and server, on the CPU of the endpoints.
    fn thread_receivers(&self) -> Result<()> {
        let [c, d, e, s] = &self.devices;
        let mut of_director = Vec::new();
        if self.who != Contender::Direct {
            of_director.extend([(&self.director, d, DIRECTOR), (&self.director, e, DIRECTOR)]);
        }
        if self.purpose.is_tcp() {
            of_director.extend([(&self.client, c, ENDPOINTS), (&self.server, s, ENDPOINTS)]);
        }
        for (host, device, cpu) in of_director {
            thread_receiver(host, device, cpu)?;
        }
        Ok(())
    }

    /// Moves the kernel threads that receive for the director to a CPU. By default they are on the
    /// director's CPU.
    pub(crate) fn receive_on(&self, cpu: usize) -> Result<()> {
        ensure!(self.is_threaded(), "the director has no receiving threads");
        let [_, d, e, _] = &self.devices;
        pin_receiver(d, cpu).and_then(|()| pin_receiver(e, cpu))
    }

    pub(crate) fn add_host(&mut self, name: &str) -> Result<Host> {
        let [host] = self.testbed.hosts([name])?;
        Ok(host)
    }

    /// Makes a kernel thread receive from a new interface of a client or server, on the CPU of the
    /// endpoints.
    pub(crate) fn receive_in_thread(&self, host: &Host, device: &str) -> Result<()> {
        thread_receiver(host, device, ENDPOINTS)
    }

    pub(crate) fn keep(&mut self, program: Proc) {
        self.endpoints.push(program);
    }

    /// With direct routing and tunnels, adds a link over which the server sends replies to the
    /// client past the director. With tunnels, also makes the server accept tunnel packets.
    fn answer_directly(&mut self, name: &str) -> Result<()> {
        if !self.answers_directly() {
            return Ok(());
        }
        let (near, far) = (format!("x{name}"), format!("y{name}"));
        let cable = format!(
            "link add {near} netns {} numtxqueues 1 numrxqueues 1 type veth \
             peer name {far} netns {} numtxqueues 1 numrxqueues 1\n",
            self.client.pid(),
            self.server.pid()
        );
        run_with_input(Command::new("ip").args(["-batch", "-"]), &cable)?;
        self.client.sh(&format!(
            "sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{near}.rp_filter=0\n\
             ip addr add 10.74.0.2/24 dev {near}\nip link set {near} up\nethtool -K {near} gro on\n"
        ))?;
        let script = format!(
            "ip addr add 10.74.0.1/24 dev {far}\nip link set {far} up\n\
             ip route replace 10.71.0.0/24 via 10.74.0.2 dev {far}\n"
        );
        self.server.sh(&script)?;
        if self.is_tunnel() {
            self.endpoints
                .extend(crowd::unpack(&self.server, &self.devices[3])?);
        }
        Ok(())
    }

    fn start_servers(&mut self, yardsticks: &Yardsticks) -> Result<()> {
        let dir = yardsticks.dir();
        self.endpoints.push(peers::web_server(&self.server, dir)?);
        let bulk = [
            "-c",
            "0",
            "iperf3",
            "-s",
            "-p",
            &peers::BULK_PORT.to_string(),
        ];
        self.endpoints.push(self.server.spawn("taskset", &bulk)?);
        self.serve_pings()?;
        self.server.wait_for_port("tcp", 80)?;
        self.server.wait_for_port("tcp", peers::BULK_PORT)
    }

    /// Starts the server that answers round trips and sends checked downloads.
    pub(crate) fn serve_pings(&mut self) -> Result<()> {
        let program = std::env::current_exe()?.display().to_string();
        let port = peers::PING_PORT.to_string();
        let words = ["-c", "0", &program, "endpoint", "serve", &port];
        self.endpoints.push(self.server.spawn("taskset", &words)?);
        self.server.wait_for_port("tcp", peers::PING_PORT)
    }
}

/// Makes a kernel thread receive from an interface, on this CPU.
fn thread_receiver(host: &Host, device: &str, cpu: usize) -> Result<()> {
    host.sh(&format!("echo 1 > /sys/class/net/{device}/threaded"))?;
    pin_receiver(device, cpu)
}

/// Waits until the process prints `ready`.
pub(crate) fn ready(mut process: Proc) -> Result<Proc> {
    wait_until(
        "the process to print `ready`, or to exit",
        Duration::from_secs(10),
        || process.log().starts_with("ready") || !process.is_running(),
    )?;
    ensure!(
        process.is_running(),
        "the program ended; it printed:\n{}",
        process.log()
    );
    Ok(process)
}

fn pin_receiver(device: &str, cpu: usize) -> Result<()> {
    let (cpu, thread) = (cpu.to_string(), receiver(device)?.to_string());
    run_with_input(Command::new("taskset").args(["-pc", &cpu, &thread]), "").map(drop)
}

/// Process id of the thread that receives from an interface.
fn receiver(device: &str) -> Result<u32> {
    let name = format!("napi/{device}-");
    let mut thread = None;
    wait_until(
        "the kernel's receiving thread to exist",
        Duration::from_secs(2),
        || {
            thread = kernel_thread(&name);
            thread.is_some()
        },
    )?;
    thread.context("no receiving thread was found")
}

fn kernel_thread(prefix: &str) -> Option<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with(prefix))
    })
}

/// Returns a command that drops all packets of a device after its packet sockets have received
/// them. Classic BPF needs no compiler; 2 is `TC_ACT_SHOT`.
fn drop_all(device: &str) -> String {
    format!(
        "tc qdisc add dev {device} clsact\ntc filter add dev {device} ingress bpf da bytecode '1,6 0 0 2,'\n"
    )
}

fn drop_udp(device: &str) -> String {
    format!(
        "tc qdisc add dev {device} clsact\n\
         tc filter add dev {device} ingress bpf da bytecode '4,48 0 0 23,21 0 1 17,6 0 0 2,6 0 0 4294967295,'\n"
    )
}

pub(crate) fn has_program(name: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut directories = path.split(':').chain(["/usr/sbin", "/sbin"]);
    directories.any(|dir| Path::new(dir).join(name).is_file())
}

/// Waits, so that programs that were started or stopped no longer disturb a measurement.
pub(crate) fn settle(time: Duration) {
    thread::sleep(time);
}
