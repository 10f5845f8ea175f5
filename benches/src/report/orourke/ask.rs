//! Sends the requests of clients, and measures the CPU time of the director and of the servers.

use anyhow::{Context, Result, bail};
use lvs_testbed::Proc;
use nix::sys::signal::Signal;

use super::super::peers::{director_devices, used_since};
use super::super::{Turn, data::CpuSeconds, web};
use crate::cluster::{self, Cluster, Figures, Load};
use crate::compare::bed::{Bed, VIP, server_address};
use crate::compare::contender::{Contender, Method};
use crate::machine::Snapshot;

/// Number of hosts that send requests.
pub(super) const CLIENTS: usize = 4;
/// Number of hosts that answer requests.
pub(super) const SERVERS: usize = 4;
/// Requests per second that one server can answer.
pub(super) const CAPACITY: u32 = 500;
/// Seconds after which a request has failed.
const TIMEOUT: u32 = 1;

/// Clients and servers that are ready.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) bed: &'a mut Bed,
    cluster: Cluster,
    servers: Vec<Proc>,
    /// Seconds for which a rate is offered.
    seconds: f64,
    first: Snapshot,
    /// The directory with the servers' files.
    _directory: tempfile::TempDir,
}

/// The result of an offered rate.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) figures: Figures,
    /// CPU seconds per second of the director, including the kernel threads that receive packets
    /// for it.
    pub(super) director: f64,
    /// CPU seconds per second of all servers, including the kernel threads that receive packets for
    /// them.
    pub(super) servers: f64,
    /// CPU microseconds of the director for each connection.
    pub(super) cost: f64,
}

impl<'a> Asked<'a> {
    pub(super) fn new(turn: &Turn<'_>, bed: &'a mut Bed) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let serve = |host| web::serve(host, directory.path(), Some(CAPACITY));
        let servers = bed.servers.iter().map(serve).collect::<Result<_>>()?;
        let shells = bed.clients.iter().map(|host| {
            let mut shell = host.command("taskset");
            shell.args(["-c", "0"]).args(cluster::shell("httperf"));
            (host.name().to_owned(), shell)
        });
        let cluster = Cluster::start(shells.collect(), turn.stop)?;
        Ok(Self {
            bed,
            cluster,
            servers,
            seconds: if turn.quick { 0.4 } else { 1.0 },
            first: Snapshot::take(),
            _directory: directory,
        })
    }

    /// Sends the requests of all clients to this number of servers.
    pub(super) fn ask(&mut self, uri: &str, servers: usize, rate: u32) -> Result<Seen> {
        let by_address = matches!(self.bed.who, Contender::Direct | Contender::Route);
        let load = Load {
            servers: match by_address {
                true => (0..servers).map(server_address).collect(),
                false => vec![VIP.to_owned()],
            },
            port: 80,
            uri: uri.to_owned(),
            timeout: TIMEOUT,
            grace: 10,
        };
        let before = Snapshot::take();
        let step = self.cluster.step(&load, rate.into(), self.seconds)?;
        let after = Snapshot::take();
        if let Some(failed) = self.cluster.failed().first() {
            bail!("host {} failed: {}", failed.host, failed.why);
        }
        let devices = director_devices(self.bed);
        let used = after.since(&before, self.bed.pid(), &devices);
        let director = used.process + used.softirq;
        let receive = after.since(&before, None, &[&self.bed.devices[3]]).softirq;
        let roots: Vec<u32> = self.servers.iter().map(Proc::pid).collect();
        let servers = after.used_by(&before, &roots) + receive;
        #[expect(clippy::cast_precision_loss, reason = "some thousands")]
        let connections = step.all.connections.max(1) as f64;
        Ok(Seen {
            figures: step.all,
            // This CPU time includes that after the last request, which the requests have caused.
            director: director / self.seconds,
            servers: servers / self.seconds,
            cost: director / connections * 1e6,
        })
    }

    /// Stops clients and servers. Returns the CPU time of all nodes, and why it is unreliable;
    /// `None` if it is reliable.
    pub(super) fn end(self) -> Result<(CpuSeconds, Option<String>)> {
        let used = used_since(self.bed, &self.first)?;
        for mut server in self.servers {
            server.stop(Signal::SIGTERM)?;
        }
        Ok(used)
    }
}

/// Whether a peer is also measured with fewer servers.
pub(super) fn has_fewer(who: Contender) -> bool {
    who.takes_rules() || matches!(who, Contender::Direct | Contender::Route)
}

/// Removes all servers except `count` from a director.
pub(super) fn take_away(bed: &Bed, count: usize) -> Result<()> {
    change(bed, count, |server| {
        format!("-d -t {VIP}:80 -r {server}:80")
    })
}

pub(super) fn give_back(bed: &Bed, count: usize) -> Result<()> {
    let flag = bed.who.method().unwrap_or(Method::Nat).flag();
    change(bed, count, |server| {
        format!("-a -t {VIP}:80 -r {server}:80 {flag} -w 1")
    })
}

fn change(bed: &Bed, count: usize, words: impl Fn(&str) -> String) -> Result<()> {
    if !bed.who.takes_rules() {
        return Ok(());
    }
    let ipvsadm = bed.ipvsadm()?;
    for server in count..SERVERS {
        let words = words(&server_address(server));
        let words: Vec<&str> = words.split(' ').collect();
        let done = bed.director.run(&ipvsadm, &words);
        done.with_context(|| format!("cannot change the servers after the first {count}"))?;
    }
    Ok(())
}
