//! A whole LVS installation: client, router, director, real servers; and the commands to control
//! it.
//!
//! ```text
//!             client            router                  director              servers
//!  two-arm    192.0.2.100 ─ front LAN ───────────────── .1 eth0/eth1 10.0.0.1 ─ back LAN ─ 10.0.0.11, .12 ...
//!  one-arm    198.51.100.100 ─ .1  .254 ─ LAN 192.0.2.0/24: director .1, servers .11, .12 ...
//!  routed     198.51.100.100 ─ .1  .254 ─ front 192.0.2.0/24: director .1
//!                                  .254 ─ back LAN 10.0.0.0/24: servers .11, .12 ...
//! ```
//!
//! All hosts have IPv6 addresses, too, which correspond to the IPv4 addresses: fd00:192::1 for
//! 192.0.2.1, fd00:198:: for 198.51.100.0/24, fd00:10:: for 10.0.0.0/24, fd00:203::10 for
//! 203.0.113.10.

mod addresses;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use self::addresses::{links, six};
use crate::netns::{Host, Proc, Testbed, run_with_input, wait_until};
use crate::servers::NginxOptions;
use crate::{content, decap, load::LoadOptions, programs, servers};

/// Default size of the connection table. A small table makes the start fast: the kernel fast path
/// clears the memory for all connections.
const MAX_CONNECTIONS: &str = "65536";

/// The forwarding method between the director and the real servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// Network address translation, both directions through the director.
    Nat,
    /// Direct routing: the director changes the MAC address only.
    Dr,
    /// IPIP tunnel.
    Tun,
    /// Full NAT: servers receive packets from the director's local address.
    FullNat,
}

impl Forward {
    /// Returns ipvsadm's option for this method.
    #[must_use]
    pub fn flag(self) -> &'static str {
        match self {
            Self::Nat => "-m",
            Self::Dr => "-g",
            Self::Tun => "-i",
            Self::FullNat => "--fullnat",
        }
    }

    /// Returns the value of `forward` in lvsd's configuration file.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Nat => "nat",
            Self::Dr => "dr",
            Self::Tun => "tun",
            Self::FullNat => "fullnat",
        }
    }

    /// Whether servers own the VIP.
    fn shares_vip(self) -> bool {
        matches!(self, Self::Dr | Self::Tun)
    }
}

/// Networks between the hosts; see the [module documentation](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Director and servers are on one LAN; the client is behind a router.
    OneArm,
    /// The director is between the clients' and the servers' LAN.
    TwoArm,
    /// A router connects client, director and servers.
    Routed,
}

/// The owner of the VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vip {
    /// The director's `eth0`; the host answers ARP.
    Host,
    /// The dataplane (`--own-vips`), which answers ARP; no interface has the VIP.
    Dataplane,
    /// The VIP is in no network of the site: the router has a route to it through the director.
    Routed,
    /// The VIP is in no network of the site: the director announces it to the router.
    Announced,
}

/// Options of a [`Site`].
#[derive(Clone, Debug)]
pub struct SiteOptions {
    /// Name of the site, which is part of the names of its network namespaces.
    pub label: String,
    /// The networks between the hosts.
    pub topology: Topology,
    /// The forwarding method for which servers are configured: gateway, VIP on `lo`, decapsulator.
    pub forward: Forward,
    /// The owner of the VIP.
    pub vip: Vip,
    /// Number of real servers.
    pub servers: usize,
    /// MTU of all links.
    pub mtu: u32,
    /// Whether all links have checksum and segmentation offloads.
    pub offloads: bool,
    /// Value of the director's sysctl `ip_forward`.
    pub ip_forward: bool,
    /// Settings of the servers' nginx.
    pub nginx: NginxOptions,
    /// Replaces nginx by a [server with an even rate](crate::paced), of this number of bytes a
    /// second for each download.
    pub paced: Option<u64>,
    /// Whether the server with an even rate has a real-time priority.
    pub real_time: bool,
    /// Whether the site has a standby director on the same networks.
    pub standby: bool,
    /// Number of further directors on the networks of the first one. Their `eth1` are in an
    /// additional network for synchronisation.
    pub others: usize,
}

impl SiteOptions {
    /// As [`new`](Self::new), with this number of real servers.
    #[must_use]
    pub fn with_servers(label: &str, forward: Forward, servers: usize) -> Self {
        Self {
            servers,
            ..Self::new(label, forward)
        }
    }

    /// Options for a forwarding method: its usual topology, four servers, the VIP on the host.
    #[must_use]
    pub fn new(label: &str, forward: Forward) -> Self {
        Self {
            label: label.to_owned(),
            topology: match forward {
                Forward::Nat => Topology::TwoArm,
                Forward::Dr => Topology::OneArm,
                Forward::Tun | Forward::FullNat => Topology::Routed,
            },
            forward,
            vip: Vip::Host,
            servers: 4,
            mtu: 1500,
            offloads: true,
            ip_forward: false,
            nginx: NginxOptions::default(),
            paced: None,
            real_time: false,
            standby: false,
            others: 0,
        }
    }
}

/// A running LVS installation.
#[derive(Debug)]
pub struct Site {
    /// The dataplane, after its start.
    pub dataplane: Option<Proc>,
    /// The web servers and decapsulators.
    pub programs: Vec<Proc>,
    /// The host that sends requests.
    pub client: Host,
    /// The router, if the topology has one.
    pub router: Option<Host>,
    /// The host of the dataplane.
    pub director: Host,
    /// The second director, if the site has one.
    pub standby: Option<Host>,
    /// Further directors ([`SiteOptions::others`]).
    pub others: Vec<Host>,
    /// The real servers.
    pub servers: Vec<Host>,
    /// The virtual IPv4 address.
    pub vip: Ipv4Addr,
    /// The virtual IPv6 address.
    pub vip6: Ipv6Addr,
    /// The options with which the site was created.
    pub options: SiteOptions,
    /// The testbed of all hosts, which is dropped last.
    pub testbed: Testbed,
}

impl Site {
    /// Creates hosts and links, and starts the web servers and decapsulators, but no dataplane.
    ///
    /// # Errors
    ///
    /// A step fails; the error names the host and contains its output.
    pub fn new(options: SiteOptions) -> Result<Self> {
        let mut testbed = Testbed::new(&options.label)?;
        let with_router = options.topology != Topology::TwoArm;
        let mut names: Vec<String> = ["client", "director", "router"].map(str::to_owned).to_vec();
        names.truncate(if with_router { 3 } else { 2 });
        if options.standby {
            names.push("standby".to_owned());
        }
        names.extend((2..).take(options.others).map(|n| format!("director{n}")));
        names.extend((1..=options.servers).map(|number| format!("rs{number}")));
        let mut hosts = testbed.hosts_named(&names)?.into_iter();
        let mut host = || hosts.next().context("a name has no host");
        let (client, director) = (host()?, host()?);
        let router = if with_router { Some(host()?) } else { None };
        let standby = if options.standby { Some(host()?) } else { None };
        let others: Vec<Host> = hosts.by_ref().take(options.others).collect();
        let servers: Vec<Host> = hosts.collect();

        let directors: Vec<&Host> = [&director]
            .into_iter()
            .chain(&standby)
            .chain(&others)
            .collect();
        let router_of = router.as_ref();
        testbed.connect(&links(&options, &client, &directors, router_of, &servers))?;
        let vip = match options.vip {
            Vip::Host | Vip::Dataplane => Ipv4Addr::new(192, 0, 2, 10),
            Vip::Routed | Vip::Announced => Ipv4Addr::new(203, 0, 113, 10),
        };
        let vip6 = Ipv6Addr::new(
            0xfd00,
            if matches!(options.vip, Vip::Routed | Vip::Announced) {
                0x203
            } else {
                0x192
            },
            0,
            0,
            0,
            0,
            0,
            0x10,
        );
        let mut site = Self {
            dataplane: None,
            programs: Vec::new(),
            client,
            router,
            director,
            standby,
            others,
            servers,
            vip,
            vip6,
            options,
            testbed,
        };
        site.configure()?;
        site.start_servers()?;
        let directors = [&site.director].into_iter();
        for director in directors.chain(&site.standby).chain(&site.others) {
            site.leave_unfinished(director, false)?;
        }
        Ok(site)
    }

    fn configure(&self) -> Result<()> {
        let mut scripts = vec![
            (&self.client, self.client_script()?),
            (&self.director, self.director_script()?),
        ];
        if let Some(standby) = &self.standby {
            scripts.push((standby, self.standby_script()?));
        }
        for (number, other) in (2..).zip(&self.others) {
            scripts.push((other, self.other_script(number)?));
        }
        if let Some(router) = &self.router {
            scripts.push((router, self.router_script()?));
        }
        for (index, server) in self.servers.iter().enumerate() {
            scripts.push((server, self.server_script(index)?));
        }
        self.testbed.configure(&scripts)
    }

    fn start_servers(&mut self) -> Result<()> {
        let www = self.testbed.dir().join("www");
        fs::create_dir_all(www.join("s"))?;
        for size in content::SIZES {
            content::write_file(&www.join(format!("s/{size}")), *size)?;
        }
        let options = &self.options;
        let started: Vec<Result<Vec<Proc>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .servers
                .iter()
                .map(|host| {
                    scope.spawn(move || {
                        let mut programs = vec![match options.paced {
                            Some(rate) => servers::paced(host, rate, options.real_time)?,
                            None => servers::nginx(host, &options.nginx)?,
                        }];
                        if options.forward == Forward::Tun {
                            programs.push(decap::start(host)?);
                        }
                        Ok(programs)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| anyhow::bail!("a thread that starts servers panicked"))
                })
                .collect()
        });
        for programs in started {
            self.programs.extend(programs?);
        }
        Ok(())
    }

    /// The address of the real server number `index`, counted from 0.
    #[must_use]
    pub fn real_address(&self, index: usize) -> Ipv4Addr {
        let host = 11 + u8::try_from(index).expect("the number of servers is small");
        match self.options.topology {
            Topology::OneArm => Ipv4Addr::new(192, 0, 2, host),
            Topology::TwoArm | Topology::Routed => Ipv4Addr::new(10, 0, 0, host),
        }
    }

    /// The IPv6 address of the real server number `index`, counted from 0.
    #[must_use]
    pub fn real_address6(&self, index: usize) -> Ipv6Addr {
        six(&self.real_address(index).to_string())
            .parse()
            .expect("the address is valid")
    }

    /// The virtual address with a port.
    #[must_use]
    pub fn service(&self, port: u16) -> SocketAddr {
        (self.vip, port).into()
    }

    /// Adds a file to all web servers: the first `size` bytes of [`content`].
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn serve(&self, path: &str, size: u64) -> Result<PathBuf> {
        let file = self.testbed.dir().join("www").join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        content::write_file(&file, size)
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }

    /// Sets whether a director may send super-packets and partial checksums into tunnels. The
    /// servers' decapsulators, unlike a kernel's tunnel device, need complete packets: without
    /// permission, the dataplane and the kernel fast path segment and complete them.
    fn leave_unfinished(&self, director: &Host, may: bool) -> Result<()> {
        if self.options.forward != Forward::Tun || !self.options.offloads {
            return Ok(());
        }
        let tx = if may { "on" } else { "off" };
        director.sh(&format!(
            "for i in eth0 eth1; do \
                 [ ! -e /sys/class/net/$i ] || ethtool -K $i tx {tx} > /dev/null; done"
        ))?;
        Ok(())
    }

    /// Returns the dataplane's options for this site, such as the interfaces, and whether the
    /// dataplane owns the VIP.
    #[must_use]
    pub fn dataplane_arguments(&self) -> Vec<&'static str> {
        let mut arguments = vec!["--interface", "eth0"];
        if self.options.topology == Topology::TwoArm {
            arguments.extend(["--interface", "eth1"]);
        }
        if self.options.vip == Vip::Dataplane {
            arguments.push("--own-vips");
        }
        if self.options.forward == Forward::FullNat {
            let local = if self.options.topology == Topology::TwoArm {
                ["10.0.0.50", "fd00:10::50"]
            } else {
                ["192.0.2.50", "fd00:192::50"]
            };
            arguments.extend(local.iter().flat_map(|local| ["--local-address", local]));
        }
        arguments
    }

    /// Stops a running dataplane of the director, starts a new one, and waits until it answers. If
    /// `extra` does not contain `--fast-path`, the environment variable `LVS_FAST_PATH` selects the
    /// kernel fast path.
    ///
    /// # Errors
    ///
    /// The program is not built, or exits; the error contains its output.
    pub fn start_dataplane(&mut self, extra: &[&str]) -> Result<()> {
        self.start_dataplane_by(&[], extra)
    }

    /// As [`Self::start_dataplane`], independent of environment variables.
    ///
    /// # Errors
    ///
    /// As [`Self::start_dataplane`].
    pub fn start_dataplane_without_environment(&mut self, extra: &[&str]) -> Result<()> {
        self.stop_dataplane()?;
        self.dataplane = Some(self.start(&self.director, &[], extra)?);
        self.lvsadm("-L -n").map(drop)
    }

    /// As [`Self::start_dataplane`], with `launcher` before the dataplane's name in the command
    /// line.
    ///
    /// # Errors
    ///
    /// As [`Self::start_dataplane`].
    pub fn start_dataplane_by(&mut self, launcher: &[&str], extra: &[&str]) -> Result<()> {
        self.stop_dataplane()?;
        let dataplane = self.start_dataplane_on(&self.director, launcher, extra)?;
        self.dataplane = Some(dataplane);
        self.lvsadm("-L -n").map(drop)
    }

    /// Stops a running dataplane with SIGTERM, so that the next dataplane takes over no state.
    fn stop_dataplane(&mut self) -> Result<()> {
        if let Some(mut dataplane) = self.dataplane.take()
            && dataplane.is_running()
        {
            dataplane.stop(Signal::SIGTERM)?;
        }
        Ok(())
    }

    /// Starts a dataplane on one of the directors, and waits until it answers. `launcher` is placed
    /// before the dataplane's name in the command line. The kernel fast path is selected as by
    /// [`Self::start_dataplane`].
    ///
    /// # Errors
    ///
    /// As [`Self::start_dataplane`].
    pub fn start_dataplane_on(
        &self,
        director: &Host,
        launcher: &[&str],
        extra: &[&str],
    ) -> Result<Proc> {
        let fast_path = env::var("LVS_FAST_PATH").unwrap_or_default();
        if fast_path.is_empty() || extra.contains(&"--fast-path") {
            return self.start(director, launcher, extra);
        }
        let arguments = [extra, &["--fast-path", &fast_path]].concat();
        self.start(director, launcher, &arguments)
    }

    fn start(&self, director: &Host, launcher: &[&str], extra: &[&str]) -> Result<Proc> {
        let program = programs::find("lvs-dataplane")?.display().to_string();
        let mut words = launcher.to_vec();
        words.push(&program);
        words.extend(self.dataplane_arguments());
        if !extra.contains(&"--max-connections") {
            words.extend(["--max-connections", MAX_CONNECTIONS]);
        }
        words.extend_from_slice(extra);
        let off = extra.windows(2).any(|two| two == ["--fast-path", "off"]);
        self.leave_unfinished(director, off)?;
        let mut dataplane = director.spawn(words[0], &words[1..])?;
        let mut ended = false;
        wait_until(
            "the dataplane to answer on its control socket",
            Duration::from_secs(30),
            || {
                ended = !dataplane.is_running();
                ended || director.has_dataplane()
            },
        )
        .with_context(|| dataplane.log())?;
        anyhow::ensure!(
            !ended,
            "the dataplane exited at once; it printed:\n{}",
            dataplane.log()
        );
        Ok(dataplane)
    }

    /// Returns the second director.
    ///
    /// # Errors
    ///
    /// The site has only one director.
    pub fn standby(&self) -> Result<&Host> {
        self.standby
            .as_ref()
            .context("the site has no standby director")
    }

    /// Sets the links of the first director down. Otherwise the director's host would answer
    /// packets to the director's addresses with resets after the dataplane has exited.
    ///
    /// # Errors
    ///
    /// `ip` refuses.
    pub fn unplug(&self) -> Result<()> {
        let script =
            "for i in eth0 eth1; do [ ! -e /sys/class/net/$i ] || ip link set $i down; done";
        self.director.sh(script).map(drop)
    }

    /// Disconnects the first director, and moves the VIP and the address of the servers' gateway to
    /// the second director, as VRRP does.
    ///
    /// # Errors
    ///
    /// The site has only one director, or a command fails.
    pub fn fail_over(&self) -> Result<()> {
        let (vip, vip6) = (self.vip, self.vip6);
        self.unplug()?;
        let mut script = format!(
            "ip addr add {vip}/32 dev eth0
ip addr add {vip6}/128 dev eth0 nodad
"
        );
        if self.options.topology == Topology::TwoArm {
            script.push_str(
                "ip addr add 10.0.0.1/24 dev eth1
ip addr add fd00:10::1/64 dev eth1 nodad
",
            );
        }
        self.standby()?.sh(&script)?;
        let neighbours = self
            .servers
            .iter()
            .chain([&self.client])
            .chain(&self.router);
        for host in neighbours {
            host.sh("ip neigh flush all; ip -6 neigh flush all")?;
        }
        Ok(())
    }

    /// Runs `lvsadm` on the director; the arguments are separated by whitespace.
    ///
    /// # Errors
    ///
    /// When its exit status is not 0.
    pub fn lvsadm(&self, arguments: &str) -> Result<String> {
        self.lvsadm_on(&self.director, arguments)
    }

    /// Runs `lvsadm` on one of the directors.
    ///
    /// # Errors
    ///
    /// When its exit status is not 0.
    pub fn lvsadm_on(&self, director: &Host, arguments: &str) -> Result<String> {
        let words: Vec<&str> = arguments.split_ascii_whitespace().collect();
        director
            .run(programs::find("lvsadm")?, &words)
            .with_context(|| format!("lvsadm {arguments}"))
    }

    /// Passes `rules` to `lvsadm -R`.
    ///
    /// # Errors
    /// If it exits with another status than 0.
    pub fn lvsadm_restore(&self, rules: &str) -> Result<String> {
        run_with_input(
            self.director.command(programs::find("lvsadm")?).arg("-R"),
            rules,
        )
    }

    /// Adds a TCP service at the VIP with all real servers, the site's forwarding method, and
    /// weight 1.
    ///
    /// # Errors
    ///
    /// `lvsadm` refuses.
    pub fn add_service(&self, port: u16, scheduler: &str) -> Result<()> {
        self.add_service_weighted("-t", port, scheduler, &vec![1; self.servers.len()])
    }

    /// Adds a service (`-t` or `-u`) with one server for each weight.
    ///
    /// # Errors
    ///
    /// `lvsadm` refuses the service or a server.
    pub fn add_service_weighted(
        &self,
        protocol: &str,
        port: u16,
        scheduler: &str,
        weights: &[u32],
    ) -> Result<()> {
        let service = self.service(port);
        self.lvsadm(&format!("-A {protocol} {service} -s {scheduler}"))?;
        for (index, weight) in weights.iter().enumerate() {
            let server = SocketAddr::from((self.real_address(index), port));
            self.lvsadm(&format!(
                "-a {protocol} {service} -r {server} {} -w {weight}",
                self.options.forward.flag()
            ))?;
        }
        Ok(())
    }

    /// Stops the director's dataplane with a signal.
    ///
    /// # Errors
    ///
    /// No dataplane runs, or it does not exit within the time limit.
    pub fn end_dataplane(&mut self, signal: Signal) -> Result<()> {
        let mut dataplane = self.dataplane.take().context("no dataplane was started")?;
        dataplane.stop(signal).map(drop)
    }

    /// Options of requests to port 80 of the VIP.
    #[must_use]
    pub fn load(&self) -> LoadOptions {
        LoadOptions::new(self.service(80))
    }

    /// Options of `requests` requests to port 80 of the VIP.
    #[must_use]
    pub fn load_of(&self, requests: u64) -> LoadOptions {
        LoadOptions {
            requests,
            ..self.load()
        }
    }
}
