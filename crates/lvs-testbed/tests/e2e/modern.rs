//! Features that the kernel's IPVS lacks: resets of connections and rescheduling of datagrams after
//! a server went down, slow start, and the profile `modern`.

use crate::fast_path;

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, programs, servers, soon, waiters};
use nix::sys::signal::Signal;

/// Settings of a service that resets the connections of a server that is removed.
const RESET: &str = "on_server_down = \"reset\"\non_check_failure = \"remove\"\ndrain = \"0s\"";

/// An `lvsd` and its dataplane.
struct Daemon<'a> {
    site: &'a Site,
    virt: SocketAddr,
    protocol: &'a str,
    /// Lines of the service in the configuration file.
    settings: &'a str,
    fast_path: &'a str,
    program: Option<Proc>,
}

impl<'a> Daemon<'a> {
    fn new(site: &'a Site, settings: &'a str) -> Self {
        Self {
            site,
            virt: site.service(80),
            protocol: "tcp",
            settings,
            fast_path: "auto",
            program: None,
        }
    }

    fn configure(&self, servers: &[usize]) -> Result<PathBuf> {
        let site = self.site;
        let interfaces = match site.options.forward {
            Forward::Nat => r#"["eth0", "eth1"]"#,
            _ => r#"["eth0"]"#,
        };
        let mut text = format!(
            "[dataplane]\ninterface = {interfaces}\nfast_path = \"{}\"\n\n[[service]]\naddress = \"{}\"\nprotocol = \"{}\"\n\
             scheduler = \"rr\"\nforward = \"{}\"\n{}\n",
            self.fast_path,
            self.virt,
            self.protocol,
            site.options.forward.word(),
            self.settings,
        );
        for &index in servers {
            let addr: IpAddr = if self.virt.is_ipv6() {
                site.real_address6(index).into()
            } else {
                site.real_address(index).into()
            };
            let server = SocketAddr::new(addr, self.virt.port());
            write!(text, "\n[[service.server]]\naddress = \"{server}\"\n")?;
        }
        let path = site.testbed.dir().join("lvsd.toml");
        fs::write(&path, text)?;
        Ok(path)
    }

    fn start(&mut self, servers: &[usize]) -> Result<()> {
        let path = self.configure(servers)?.display().to_string();
        let director = &self.site.director;
        self.program = Some(director.spawn(programs::find("lvsd")?, &["--config", &path])?);
        self.has(servers.len())
    }

    fn reload(&mut self, servers: &[usize]) -> Result<()> {
        self.configure(servers)?;
        self.running()?.signal(Signal::SIGHUP)?;
        self.has(servers.len())
    }

    fn running(&self) -> Result<&Proc> {
        self.program.as_ref().context("lvsd was not started")
    }

    /// Waits until the service has `servers` servers.
    fn has(&self, servers: usize) -> Result<()> {
        let listed = || self.site.lvsadm("-L -n").unwrap_or_default();
        let count = || rows(&listed()).iter().filter(|row| row.is_server()).count();
        soon(&format!("the service to have {servers} servers"), || {
            count() == servers
        })
        .with_context(|| self.running().map(Proc::log).unwrap_or_default())
    }
}

/// Starts a client that connects, sends half a request, and waits.
fn idle(client: &Host, virt: SocketAddr) -> Result<Proc> {
    let script = format!(
        "exec 3<>/dev/tcp/{}/{}; printf 'GET / HTTP/1.1\\r\\nHost: x\\r\\n' >&3; echo waiting; cat <&3",
        virt.ip(),
        virt.port()
    );
    let client = client.spawn("bash", &["-c", &script])?;
    soon("the client to have a connection", || {
        client.log().contains("waiting")
    })?;
    Ok(client)
}

/// Starts a large download at a low rate.
fn download(client: &Host, virt: SocketAddr) -> Result<Proc> {
    let url = format!("http://{virt}/large?rate=50k");
    client.spawn("curl", &["-sS", "-g", "-o", "/dev/null", &url])
}

/// Number of established connections of the client at a server, without those of health checks.
fn established(server: &Host) -> usize {
    let listed = listed(server, "sport = :80");
    let is_clients = |line: &&str| line.contains(".100:") || line.contains("::100]:");
    listed.lines().filter(is_clients).count()
}

fn open(client: &Host) -> usize {
    listed(client, "dport = :80").lines().count()
}

fn listed(host: &Host, filter: &str) -> String {
    host.sh(&format!("ss -Htn state established {filter}"))
        .unwrap_or_default()
}

fn has_ended_by_reset(client: &mut Proc) -> bool {
    !client.is_running() && client.log().contains("reset by peer")
}

/// Removes one of two servers from the configuration file while waiting clients and downloads have
/// connections to both servers. Checks that the connections of the removed server are reset.
fn remove_one_server(forward: Forward, six: bool) -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("down", forward, 2))?;
    site.serve("large", 16 << 20)?;
    let virt = if six {
        SocketAddr::from((site.vip6, 80))
    } else {
        site.service(80)
    };
    let mut daemon = Daemon {
        virt,
        ..Daemon::new(&site, RESET)
    };
    daemon.start(&[0, 1])?;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(idle(&site.client, virt)?);
    }
    for _ in 0..2 {
        clients.push(download(&site.client, virt)?);
    }
    for server in &site.servers {
        soon("the server to have three connections", || {
            established(server) == 3
        })?;
    }
    daemon.reload(&[0])?;
    // The director resets both ends: the server, which still runs, and its three clients. A slow
    // download first reads the buffered bytes.
    let (idle, slow) = clients.split_at_mut(4);
    let output = soon("the idle clients to be reset", || {
        let ended = idle
            .iter_mut()
            .filter_map(|c| has_ended_by_reset(c).then_some(()));
        ended.count() == 2 && open(&site.client) == 3 && established(&site.servers[1]) == 0
    });
    ensure!(
        slow.iter_mut().any(Proc::is_running),
        "all downloads have ended"
    );
    let logs: Vec<String> = clients.iter().map(Proc::log).collect();
    let lvsd = daemon.running()?.log();
    output.with_context(|| format!("{forward:?}, IPv6: {six}: {logs:?}\n{lvsd}"))?;
    let running = clients[..4]
        .iter_mut()
        .filter_map(|c| c.is_running().then_some(()));
    ensure!(
        running.count() == 2,
        "an idle client of the other server was disconnected: {logs:?}"
    );
    ensure!(established(&site.servers[0]) == 3);
    // lvsd logs the resets after both ends may have received them.
    soon("the log to report 6 TCP resets", || {
        let lvsd = daemon.running().map(Proc::log).unwrap_or_default();
        lvsd.contains("6 TCP resets were sent")
    })
    .with_context(|| daemon.running().map(Proc::log).unwrap_or_default())
}

#[test]
fn nat_connections_of_removed_server_are_reset_at_both_ends() -> Result<()> {
    remove_one_server(Forward::Nat, false)?;
    remove_one_server(Forward::Nat, true)
}

#[test]
fn direct_routing_connections_of_removed_server_are_reset_at_both_ends() -> Result<()> {
    remove_one_server(Forward::Dr, false)?;
    remove_one_server(Forward::Dr, true)
}

#[test]
fn tunnel_connections_of_removed_server_are_reset_at_both_ends() -> Result<()> {
    remove_one_server(Forward::Tun, false)
}

/// The dataplane does not know the sequence numbers of the connection, because the kernel forwarded
/// its last packets. Therefore it sends a probe to the client.
#[test]
fn silent_client_of_offloaded_connection_is_reset_when_its_server_is_removed() -> Result<()> {
    fast_path::require_permission()?;
    for forward in [Forward::Nat, Forward::Dr] {
        let site = Site::new(SiteOptions::with_servers("asked", forward, 2))?;
        let virt = site.service(80);
        let mut daemon = Daemon {
            fast_path: "on",
            ..Daemon::new(&site, RESET)
        };
        daemon.start(&[0, 1])?;
        let falls_silent = site.testbed.dir().join("silent");
        let script = format!(
            "exec 3<>/dev/tcp/{}/{}; while [ ! -e {} ]; do printf 'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3; sleep 0.02; done; \
             echo waiting; cat <&3",
            virt.ip(),
            virt.port(),
            falls_silent.display(),
        );
        let mut client = site.client.spawn("bash", &["-c", &script])?;
        soon("the kernel fast path to forward packets", || {
            fast_path::shares(&site).is_ok_and(|now| now.0 > 50)
        })
        .with_context(|| client.log())?;
        fs::write(&falls_silent, "")?;
        soon("the client to be silent", || {
            client.log().contains("waiting")
        })?;
        let used = usize::from(established(&site.servers[1]) == 1);
        let server = &site.servers[used];
        daemon.reload(&[1 - used])?;
        soon("the clients to receive resets", || {
            has_ended_by_reset(&mut client) && established(server) == 0
        })
        .with_context(|| format!("{forward:?}: {} {}", client.log(), established(server)))?;
    }
    Ok(())
}

#[test]
fn clients_of_dead_server_are_reset_and_of_drained_server_kept() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("died", Forward::Nat, 2))?;
    let virt = site.service(80);
    let mut daemon = Daemon::new(
        &site,
        "on_server_down = \"reset\"\non_check_failure = \"remove\"\ndrain = \"0s\"\n\
                   check = { type = \"tcp\", interval = \"300ms\", timeout = \"5s\", fall = 2 }",
    );
    daemon.start(&[0, 1])?;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(idle(&site.client, virt)?);
    }
    // The server is disconnected suddenly, and cannot close its connections.
    site.servers[1].sh("ip link set eth0 down")?;
    daemon.has(1)?;
    let output = soon("the clients to receive resets", || {
        let ended = clients
            .iter_mut()
            .filter_map(|c| has_ended_by_reset(c).then_some(()));
        ended.count() == 2
    });
    output.with_context(|| daemon.running().map(Proc::log).unwrap_or_default())?;
    soon("the log to report the reset connections", || {
        let answer = daemon.running().map(Proc::log).unwrap_or_default();
        answer.contains("it is removed, and its connections are reset")
    })
    .with_context(|| daemon.running().map(Proc::log).unwrap_or_default())?;

    let server = SocketAddr::from((site.real_address(0), 80));
    site.lvsadm(&format!("-e -t {virt} -r {server} -m -w 0"))?;
    std::thread::sleep(Duration::from_millis(500));
    let running = clients
        .iter_mut()
        .filter_map(|c| c.is_running().then_some(()));
    ensure!(
        running.count() == 2,
        "a client of the drained server was disconnected"
    );
    Ok(())
}

/// A server stops answering; its clients receive resets after the checks fail. `--nocapture` shows
/// the times.
#[test]
fn clients_of_silent_server_are_reset_after_failed_checks() -> Result<()> {
    const CLIENTS: usize = 200;
    let site = Site::new(SiteOptions::with_servers("silent", Forward::Nat, 2))?;
    let virt = site.service(80);
    let mut daemon = Daemon::new(
        &site,
        "on_server_down = \"reset\"\non_check_failure = \"remove\"\ndrain = \"0s\"\n\
                   check = { type = \"tcp\", interval = \"1s\", timeout = \"5s\", fall = 2 }",
    );
    daemon.start(&[0, 1])?;
    let words = [
        "wait",
        &virt.to_string(),
        &format!("--connections={CLIENTS}"),
    ]
    .map(str::to_owned);
    let clients = site.client.spawn(programs::own()?, &words)?;
    soon("all clients to wait", || clients.log().contains("waiting"))?;
    let mut events = site.director.spawn(
        programs::find("lvsd")?,
        &[
            "--config",
            &daemon.configure(&[0, 1])?.display().to_string(),
            "events",
            "--json",
        ],
    )?;
    // The stream is open when it reports an event: an unchanged file was loaded.
    soon("the event stream to report a loaded file", || {
        let loads = || daemon.running()?.signal(Signal::SIGHUP);
        let asked = loads().is_ok();
        std::thread::sleep(Duration::from_millis(100));
        asked && events.log().contains("reloaded")
    })
    .with_context(|| events.log())?;
    site.servers[1].sh("ip link set eth0 down")?;
    let silent = waiters::now_us() / 1000;
    let ends = || -> Vec<u128> {
        let log = clients.log();
        let reset = log.lines().filter_map(|line| line.strip_suffix(" reset"));
        reset.filter_map(|us| us.parse().ok()).collect()
    };
    soon("the clients to receive resets", || {
        ends().len() >= CLIENTS / 2
    })
    .with_context(|| daemon.running().map(Proc::log).unwrap_or_default())?;
    let mut ends = ends();
    ensure!(
        ends.len() == CLIENTS / 2,
        "the number of reset clients is not half of all clients: {}",
        ends.len()
    );
    ends.sort_unstable();
    let down = || events.log().contains("server_down");
    soon("the event server_down to arrive", down).with_context(|| events.log())?;
    let output = events.log();
    let down = output.lines().find(|line| line.contains("server_down"));
    let down = down.and_then(|line| line.split("\"time_ms\":").nth(1)?.split(',').next());
    let down: u128 = down
        .context("the log contains no event server_down")?
        .parse()?;
    let after =
        |us: u128| i128::try_from(us / 1000).unwrap_or(0) - i128::try_from(down).unwrap_or(0);
    println!(
        "lvsd detects the silent server after {} ms; clients are reset {} ms (median), {} ms (p99), {} ms (last) after that",
        down.saturating_sub(silent),
        after(ends[ends.len() / 2]),
        after(ends[ends.len() * 99 / 100]),
        after(ends[ends.len() - 1]),
    );
    events.kill();
    Ok(())
}

#[test]
fn datagrams_after_removal_of_server_use_another_server() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("moved", Forward::Nat, 2))?;
    let _names = [
        servers::dnsmasq(&site.servers[0])?,
        servers::dnsmasq(&site.servers[1])?,
    ];
    let mut daemon = Daemon {
        virt: site.service(53),
        protocol: "udp",
        ..Daemon::new(
            &site,
            "on_server_down = \"reschedule\"\non_check_failure = \"remove\"\ndrain = \"0s\"",
        )
    };
    daemon.start(&[0, 1])?;
    // All requests use one client port, and so one connection.
    let ask = || {
        let query = format!(
            "dig -b 0.0.0.0#5300 +short +tries=6 +time=5 @{} id.test txt",
            site.vip
        );
        site.client.sh(&query)
    };
    let first = ask()?;
    for _ in 0..3 {
        ensure!(ask()? == first, "the connection moved to another server");
    }
    let gone = usize::from(first.contains("rs2"));
    daemon.reload(&[1 - gone])?;
    soon("the other server to answer", || {
        ask().is_ok_and(|other| other.contains("rs") && other != first)
    })
}

#[test]
fn server_added_after_established_server_is_listed_with_slow_start_share() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("slow", Forward::Nat, 2))?;
    let mut daemon = Daemon::new(&site, "slow_start = \"1h\"");
    daemon.start(&[0])?;
    let listed = || site.lvsadm("--json -L -n");
    ensure!(
        listed()?.contains("\"slow_start\":3600"),
        "the listing lacks the slow start: {}",
        listed()?
    );
    // Slow start applies only to servers that join an established server; the first server is not
    // yet established.
    daemon.reload(&[0, 1])?;
    ensure!(
        !listed()?.contains("\"slow_start\":10"),
        "a server has a slow start, although no established server existed before: {}",
        listed()?
    );
    // When the setting is added, existing servers count as established.
    let is_set = |present: bool| {
        soon(
            &format!("the listing to show the slow start: {present}"),
            || listed().is_ok_and(|text| text.contains("\"slow_start\":3600") == present),
        )
        .with_context(|| format!("{:?}", listed()))
    };
    daemon.settings = "";
    daemon.reload(&[0, 1])?;
    is_set(false)?;
    daemon.settings = "scheduler_flags = []\nslow_start = \"1h\"";
    daemon.reload(&[0, 1])?;
    is_set(true)?;
    daemon.reload(&[0])?;
    daemon.reload(&[0, 1])?;
    let text = listed()?;
    ensure!(
        text.contains("\"slow_start\":10"),
        "no `\"slow_start\":10` in {text}"
    );
    ensure!(
        text.matches("\"weight\":1,").count() == 2,
        "not both servers have the configured weight 1: {text}"
    );
    Ok(())
}

#[test]
fn modern_profile_sets_timeouts() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("modern", Forward::Nat, 1))?;
    site.start_dataplane(&["--profile", "modern"])?;
    let timeouts = site.lvsadm("-L --timeout")?;
    ensure!(
        timeouts.trim() == "Timeout (tcp tcpfin udp): 7440 240 300",
        "the timeouts are not `Timeout (tcp tcpfin udp): 7440 240 300`: {timeouts}"
    );
    Ok(())
}
