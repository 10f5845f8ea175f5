//! The table of the measured rows.

use super::contender::{Contender, Method, Place};
use super::flood::Flood;
use super::rows::Bound::{AtLeast, AtMost, Shown};
use super::rows::{Against, Bound, Group, Job, Memory, Row, Work};
use super::tcp::{Percentile, Tcp};

const NAT: Contender = Contender::AfPacket(Method::Nat);
const NULLS: [Contender; 4] = [
    Contender::NullV2Send,
    Contender::NullV3Send,
    Contender::NullV3Ring,
    Contender::NullMmsg,
];
const SHARED_CLIENTS: u32 = 10;
const OWN_CLIENTS: u32 = 24;
/// Binary logarithm of the number of client addresses in the route to the clients.
const ALL_CLIENTS: u32 = 23;

const fn forward(flows: u32, client_bits: u32) -> Flood {
    Flood {
        flows,
        client_bits,
        replies: false,
        v6: false,
    }
}

impl Group {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Adds a measurement, unless it exists. Returns its name: the group's name and `name`.
    fn job(&mut self, name: &str, work: Work) -> String {
        let name = format!("{}/{name}", self.name);
        if self.jobs.iter().all(|job| job.name != name) {
            self.jobs.push(Job {
                name: name.clone(),
                work,
            });
        }
        name
    }

    fn flood(&mut self, who: Contender, place: Place, case: &str, flood: Flood) -> String {
        let name = format!("{case}/{}", who.name());
        self.job(&name, Work::Flood(who, place, flood))
    }

    fn nulls(&mut self, place: Place, case: &str, flood: Flood) -> Against {
        let all = NULLS.map(|who| self.flood(who, place, case, flood));
        Against::Best(all.to_vec())
    }

    fn memory(&mut self, name: &str, memory: Memory) -> String {
        self.job(name, Work::Memory(memory))
    }

    fn row(
        &mut self,
        name: &str,
        what: &str,
        subject: &str,
        against: impl Into<Against>,
        bound: Bound,
    ) {
        self.rows.push(Row {
            name: name.to_owned(),
            what: what.to_owned(),
            subject: subject.to_owned(),
            against: against.into(),
            bound,
            but: None,
        });
    }
}

pub(super) fn all() -> Vec<Group> {
    vec![
        small(),
        million(),
        replies(),
        one_core(),
        tun(),
        six(),
        tcp(),
        proxy(),
        latency(),
        pipeline(),
        decisions(),
        large(),
        fast_path_few(),
        fast_path_many(),
        fast_path_most(),
        fast_path_ten_million(),
        fast_path_tcp(),
        fast_path_latency(),
        fast_path_cost(),
        other(),
    ]
}

const FAST_PATH: Contender = Contender::FastPath(Method::Nat);

impl Group {
    /// Compares NAT by the kernel fast path with routing, with nftables, and with the dataplane in
    /// userspace, and NAT by XDP with routing.
    fn nat_fast_path(&mut self, flows: u32, text: &str, short: &str, bounds: [f64; 3]) {
        let bits = if flows > 100_000 {
            OWN_CLIENTS
        } else {
            SHARED_CLIENTS
        };
        let flood = forward(flows, bits);
        let ours = self.flood(FAST_PATH, Place::Usual, "nat", flood);
        let [routing, nft, xdp] = bounds.map(AtLeast);
        for (suffix, against, who, bound) in [
            ("", "routing", Contender::Route, routing),
            ("-nft", "nftables DNAT", Contender::Nftables, nft),
            ("-off", "the userspace path", NAT, Shown),
        ] {
            let other = self.flood(who, Place::Usual, "nat", flood);
            self.row(
                &format!("fast-path-nat-{short}{suffix}"),
                &format!(
                    "NAT by the kernel fast path, 64 bytes, {text} flows, compared with {against}"
                ),
                &ours,
                other,
                bound,
            );
        }
        let ours = self.flood(Contender::Xdp, Place::Usual, "nat", flood);
        let routing = self.flood(Contender::Route, Place::Usual, "nat", flood);
        self.row(
            &format!("fast-path-nat-{short}-xdp"),
            &format!("NAT by XDP, 64 bytes, {text} flows, compared with routing"),
            &ours,
            routing,
            xdp,
        );
    }
}

fn fast_path_few() -> Group {
    let mut group = Group::new("fast-path-1k");
    group.nat_fast_path(1000, "1,000", "1k", [1.05, 1.6, 1.4]);
    group
}

fn fast_path_many() -> Group {
    let mut group = Group::new("fast-path-100k");
    group.nat_fast_path(100_000, "100,000", "100k", [0.75, 1.6, 0.95]);
    let flood = forward(100_000, SHARED_CLIENTS);
    let routing = group.flood(Contender::Route, Place::Usual, "nat", flood);
    for (method, short, name, least) in [
        (Method::Dr, "dr", "DR", 0.80),
        (Method::Tunnel, "tunnel", "IPIP", 0.65),
    ] {
        let ours = group.flood(Contender::FastPath(method), Place::Usual, short, flood);
        group.row(
            &format!("fast-path-{short}-100k"),
            &format!(
                "{name} by the kernel fast path, 64 bytes, 100,000 flows, compared with routing"
            ),
            &ours,
            routing.clone(),
            AtLeast(least),
        );
    }
    let six = Flood { v6: true, ..flood };
    let ours = group.flood(FAST_PATH, Place::Usual, "nat6", six);
    let routing = group.flood(Contender::Route, Place::Usual, "nat6", six);
    let what =
        "NAT of IPv6 by the kernel fast path, 64 bytes, 100,000 flows, compared with routing";
    group.row("fast-path-nat6-100k", what, &ours, routing, AtLeast(0.65));
    let ours = group.flood(FAST_PATH, Place::OneCore, "1c", flood);
    let routing = group.flood(Contender::Route, Place::OneCore, "1c", flood);
    let what =
        "NAT by the kernel fast path, 100,000 flows, all work on one core, compared with routing";
    group.row("fast-path-nat-100k-1c", what, &ours, routing, AtLeast(0.90));
    group
}

fn fast_path_most() -> Group {
    let mut group = Group::new("fast-path-1m");
    group.nat_fast_path(1_000_000, "1,000,000", "1m", [0.65, 1.5, 0.75]);
    group
}

fn fast_path_ten_million() -> Group {
    let mut group = Group::new("fast-path-10m");
    let [many, few] = [(10_000_000, "nat"), (1_000_000, "nat-1m")].map(|(flows, case)| {
        let flood = forward(flows, ALL_CLIENTS);
        group.flood(FAST_PATH, Place::Usual, case, flood)
    });
    let what = "NAT by the kernel fast path, 64 bytes, 10,000,000 flows, compared with 1,000,000";
    let bound = AtLeast(0.8);
    group.row("fast-path-nat-10m", what, &many, few, bound);
    group
}

fn fast_path_tcp() -> Group {
    let mut group = Group::new("fast-path-tcp");
    for (name, what, kind, who, bounds) in [
        (
            "bulk",
            "one TCP stream, NAT",
            Tcp::Bulk,
            FAST_PATH,
            [Some(0.95), None],
        ),
        (
            "bulk-dr",
            "one TCP stream, DR",
            Tcp::Bulk,
            Contender::FastPath(Method::Dr),
            [Some(0.95), None],
        ),
        (
            "bulk-tunnel",
            "one TCP stream, IPIP",
            Tcp::Bulk,
            Contender::FastPath(Method::Tunnel),
            [Some(0.80), None],
        ),
        (
            "http",
            "requests over persistent connections, NAT",
            Tcp::Requests,
            FAST_PATH,
            [Some(0.97), None],
        ),
        (
            "connections",
            "connections with one request each, NAT",
            Tcp::Connections,
            FAST_PATH,
            [None, Some(0.97)],
        ),
    ] {
        let mut job = |who: Contender| {
            group.job(
                &format!("{kind:?}/{}", who.name()).to_lowercase(),
                Work::Tcp(who, kind),
            )
        };
        let ours = job(who);
        let against = [
            ("", "routing", job(Contender::Route)),
            ("-off", "the userspace path", job(NAT)),
            ("-haproxy", "HAProxy", job(Contender::Haproxy)),
        ];
        let bounds = bounds.into_iter().chain([None]);
        for ((suffix, against, other), bound) in against.into_iter().zip(bounds) {
            group.row(
                &format!("fast-path-{name}{suffix}"),
                &format!("{what}, by the kernel fast path, compared with {against}"),
                &ours,
                other,
                bound.map_or(Shown, AtLeast),
            );
        }
    }
    group
}

fn fast_path_latency() -> Group {
    let mut group = Group::new("fast-path-latency");
    for (name, percentile) in [("p50", Percentile::P50), ("p99", Percentile::P99)] {
        let mut job = |who: Contender| {
            group.job(
                &format!("{name}/{}", who.name()),
                Work::Ping(who, false, percentile),
            )
        };
        let (ours, routing, cable) = (
            job(FAST_PATH),
            job(Contender::Route),
            job(Contender::Direct),
        );
        group.row(
            &format!("fast-path-latency-{name}"),
            &format!(
                "added latency, {name}, idle, NAT by the kernel fast path, compared with routing"
            ),
            &ours,
            Against::Added(routing, cable),
            AtMost(1.15),
        );
    }
    group
}

fn fast_path_cost() -> Group {
    let mut group = Group::new("fast-path-cost");
    let mut job = |who: Contender| {
        let name = format!("cpu/{}", who.name());
        group.job(&name, Work::Cost(who, Tcp::Bulk))
    };
    let (ours, haproxy) = (job(FAST_PATH), job(Contender::Haproxy));
    group.row(
        "fast-path-cpu",
        "CPU of the director for each byte of a TCP stream, NAT by the kernel fast path, compared with HAProxy",
        &ours,
        haproxy,
        AtMost(0.15),
    );
    let ours = group.memory("publish", Memory::Publish);
    let update = group.memory("update", Memory::MapUpdate);
    group.row(
        "fast-path-publish",
        "offloading a connection, ns, compared with bpf_map_update_elem",
        &ours,
        update,
        AtMost(0.3),
    );
    group
}

/// Rows that compare with another build of the dataplane (`--other`).
fn other() -> Group {
    let mut group = Group::new("other");
    for (name, what, work) in [
        (
            "other-nat-1k",
            "NAT, 64 bytes, 1,000 flows",
            (|who| Work::Flood(who, Place::Usual, forward(1000, SHARED_CLIENTS)))
                as fn(Contender) -> Work,
        ),
        (
            "other-nat-100k-1c",
            "NAT, 100,000 flows, receive work and dataplane on one core",
            |who| Work::Flood(who, Place::OneCore, forward(100_000, SHARED_CLIENTS)),
        ),
        ("other-bulk", "one TCP stream, NAT", |who| {
            Work::Tcp(who, Tcp::Bulk)
        }),
        (
            "other-http",
            "requests over persistent connections, NAT",
            |who| Work::Tcp(who, Tcp::Requests),
        ),
        (
            "other-connections",
            "connections with one request each, NAT",
            |who| Work::Tcp(who, Tcp::Connections),
        ),
    ] {
        let [ours, others] = [NAT, Contender::Other]
            .map(|who| group.job(&format!("{name}/{}", who.name()), work(who)));
        let what = format!("{what}, compared with the other build");
        group.row(name, &what, &ours, others, Shown);
    }
    group
}

fn small() -> Group {
    let mut group = Group::new("1k");
    let flood = forward(1000, SHARED_CLIENTS);
    let nulls = group.nulls(Place::Usual, "null", flood);
    for (name, what, who) in [
        ("nat-1k", "NAT, 64 bytes, 1,000 flows", NAT),
        (
            "dr-1k",
            "DR, 64 bytes, 1,000 flows",
            Contender::AfPacket(Method::Dr),
        ),
        (
            "tunnel-1k",
            "IPIP tunnel, 64 bytes, 1,000 flows",
            Contender::AfPacket(Method::Tunnel),
        ),
    ] {
        let ours = group.flood(who, Place::Usual, name, flood);
        group.row(name, what, &ours, nulls.clone(), AtLeast(0.90));
    }
    let ours = "1k/nat-1k/ours".to_owned();
    for (name, what, who) in [
        (
            "testpmd-1k",
            "NAT, 64 bytes, 1,000 flows, compared with DPDK testpmd",
            Contender::Testpmd,
        ),
        (
            "routing-1k",
            "NAT, 64 bytes, 1,000 flows, compared with routing",
            Contender::Route,
        ),
        (
            "nft-1k",
            "NAT, 64 bytes, 1,000 flows, compared with nftables DNAT",
            Contender::Nftables,
        ),
    ] {
        let other = group.flood(who, Place::Usual, "other", flood);
        group.row(name, what, &ours, other, Shown);
    }
    group
}

fn million() -> Group {
    let mut group = Group::new("1m");
    let flood = forward(1_000_000, OWN_CLIENTS);
    let ours = group.flood(NAT, Place::Usual, "nat-1m", flood);
    let nulls = group.nulls(Place::Usual, "null", flood);
    let what = "NAT, 1,000,000 distinct clients";
    group.row("nat-1m", what, &ours, nulls, AtLeast(0.80));
    group
}

fn replies() -> Group {
    let mut group = Group::new("replies");
    let reply = |flows, bits| Flood {
        replies: true,
        ..forward(flows, bits)
    };
    let few = group.flood(NAT, Place::Usual, "1k", reply(1000, SHARED_CLIENTS));
    let many = group.flood(NAT, Place::Usual, "1m", reply(1_000_000, OWN_CLIENTS));
    let nulls = group.nulls(Place::Usual, "null", reply(1000, SHARED_CLIENTS));
    let what = "replies to 1,000,000 clients, compared with replies to 1,000";
    group.row("replies-1m", what, &many, few.clone(), AtLeast(0.85));
    group.row("replies-1k", "replies to 1,000 clients", &few, nulls, Shown);
    group
}

fn one_core() -> Group {
    let mut group = Group::new("100k");
    let flood = forward(100_000, SHARED_CLIENTS);
    let ours = group.flood(NAT, Place::OneCore, "1c", flood);
    let nulls = group.nulls(Place::OneCore, "1c", flood);
    let routing = group.flood(Contender::Route, Place::OneCore, "1c", flood);
    let nft = group.flood(Contender::Nftables, Place::OneCore, "1c", flood);
    let split = group.flood(NAT, Place::Usual, "split", flood);
    let what = "NAT, 100,000 flows, receive work and dataplane on one core";
    group.row("nat-100k-1c", what, &ours, nulls, AtLeast(0.85));
    let what = "NAT, 100,000 flows, compared with routing, both with all work on one core";
    group.row("nat-100k-1c-routing", what, &ours, routing, AtLeast(0.30));
    let what = "NAT, 100,000 flows, compared with nftables DNAT with all its work on one core";
    group.row("nat-100k", what, &split, nft, AtLeast(1.3));
    group
}

fn tun() -> Group {
    let mut group = Group::new("tun");
    let flood = forward(1000, SHARED_CLIENTS);
    let ours = group.flood(Contender::Tun, Place::Usual, "1k", flood);
    let null = group.flood(Contender::NullTun, Place::Usual, "1k", flood);
    let what = "NAT through TUN, 1,000 flows";
    group.row("tun-1k", what, &ours, null, AtLeast(0.93));
    group
}

fn six() -> Group {
    let mut group = Group::new("ipv6");
    let flood = Flood {
        v6: true,
        ..forward(1000, SHARED_CLIENTS)
    };
    let ours = group.flood(NAT, Place::Usual, "1k", flood);
    let nulls = group.nulls(Place::Usual, "1k", flood);
    group.row("nat6-1k", "NAT of IPv6, 1,000 flows", &ours, nulls, Shown);
    group
}

fn proxy() -> Group {
    let mut group = Group::new("proxy");
    for (name, what, kind, bound) in [
        ("bulk", "one TCP stream, proxied", Tcp::Bulk, AtLeast(0.9)),
        (
            "http",
            "requests over persistent connections, proxied",
            Tcp::Requests,
            Shown,
        ),
        (
            "connections",
            "connections with one request each, proxied",
            Tcp::Connections,
            AtLeast(0.9),
        ),
    ] {
        let mut job =
            |who: Contender| group.job(&format!("{name}/{}", who.name()), Work::Tcp(who, kind));
        let ours = job(Contender::Proxy);
        let haproxy = job(Contender::Haproxy);
        group.row(&format!("proxy-{name}"), what, &ours, haproxy, bound);
    }
    group
}

fn tcp() -> Group {
    let mut group = Group::new("tcp");
    for (name, what, kind, bound) in [
        ("bulk", "one TCP stream, NAT", Tcp::Bulk, 1.7),
        (
            "http",
            "requests over persistent connections, NAT",
            Tcp::Requests,
            1.3,
        ),
        (
            "connections",
            "connections with one request each, NAT",
            Tcp::Connections,
            1.4,
        ),
    ] {
        let mut job =
            |who: Contender| group.job(&format!("{name}/{}", who.name()), Work::Tcp(who, kind));
        let ours = job(NAT);
        let peers = [
            Contender::Haproxy,
            Contender::Nginx,
            Contender::Route,
            Contender::Nftables,
        ]
        .map(job);
        let bounds = [AtLeast(bound), Shown, Shown, Shown];
        let suffixes = ["", "-nginx", "-routing", "-nft"];
        for ((peer, bound), suffix) in peers.into_iter().zip(bounds).zip(suffixes) {
            group.row(&format!("{name}{suffix}"), what, &ours, peer, bound);
        }
    }
    group
}

fn latency() -> Group {
    let mut group = Group::new("latency");
    for (load, loaded) in [("idle", false), ("half", true)] {
        for (name, percentile) in [("p50", Percentile::P50), ("p99", Percentile::P99)] {
            let mut job = |who: Contender, loaded: bool| {
                let load = if loaded { "half" } else { "idle" };
                let name = format!("{load}-{name}/{}", who.name());
                group.job(&name, Work::Ping(who, loaded, percentile))
            };
            let ours = job(NAT, loaded);
            let null = job(Contender::NullMmsg, loaded);
            let cable = job(Contender::Direct, loaded);
            let what = format!(
                "added latency, {name}, {load}{}",
                if loaded { " load" } else { "" }
            );
            let against = Against::Added(null, cable);
            group.row(
                &format!("latency-{load}-{name}"),
                &what,
                &ours,
                against,
                AtMost(1.1),
            );
        }
    }
    group
}

fn pipeline() -> Group {
    let mut group = Group::new("memory");
    for (name, connections) in [("1m", 1_000_000), ("10m", 10_000_000)] {
        let ours = group.memory(
            &format!("pipeline-{name}"),
            Memory::Pipeline(connections, SHARED_CLIENTS, false),
        );
        let table = group.memory(
            &format!("line-table-{name}"),
            Memory::LineTable(connections, SHARED_CLIENTS),
        );
        let what = format!(
            "pipeline in memory, ns a packet, {name} connections, compared with the line table"
        );
        group.row(
            &format!("pipeline-{name}"),
            &what,
            &ours,
            table,
            AtMost(2.2),
        );
    }
    for (name, replies) in [
        ("pipeline-clients", false),
        ("pipeline-clients-replies", true),
    ] {
        let few = group.memory(
            &format!("{name}-1k"),
            Memory::Pipeline(1_000_000, SHARED_CLIENTS, replies),
        );
        let many = group.memory(
            &format!("{name}-1m"),
            Memory::Pipeline(1_000_000, OWN_CLIENTS, replies),
        );
        let direction = if replies { "replies" } else { "requests" };
        let what =
            format!("pipeline in memory, {direction} of 1,000,000 clients, compared with 1,000");
        group.row(name, &what, &many, few, AtMost(1.15));
    }
    let one = group.memory("one-worker", Memory::Workers(1));
    let two = group.memory("two-workers", Memory::Workers(2));
    let what = "two workers in memory, compared with one";
    group.row("workers-2", what, &two, one, AtLeast(1.8));
    group
}

fn decisions() -> Group {
    let mut group = Group::new("decisions");
    let churn = group.memory("churn", Memory::Churn);
    let what = "new connections a second in memory, one core, expiry keeping up";
    let kernel = Against::Absolute(600_000.0, "kernel IPVS, 0.6 M/s");
    group.row("new", what, &churn, kernel, AtLeast(2.0));
    let few = group.memory("services-1", Memory::NewConnection("rr", 1, 4));
    let many = group.memory("services-10000", Memory::NewConnection("rr", 10_000, 4));
    let what = "cost of a new connection, services 1 to 10,000";
    group.row("new-services", what, &many, few, AtMost(1.3));
    for scheduler in ["rr", "sh", "mh", "wlc"] {
        let few = group.memory(
            &format!("{scheduler}-4"),
            Memory::NewConnection(scheduler, 1, 4),
        );
        let many = group.memory(
            &format!("{scheduler}-1000"),
            Memory::NewConnection(scheduler, 1, 1000),
        );
        let what = format!("cost of a new connection, {scheduler}, 1,000 servers, compared with 4");
        group.row(&format!("new-{scheduler}"), &what, &many, few, AtMost(1.3));
    }
    let maglev = group.memory("maglev", Memory::Maglev(1000));
    let paper = Against::Absolute(1.8, "the Maglev paper, 1.8 ms for 65,537 slots");
    group.row(
        "maglev",
        "a new Maglev table of 65,521 slots for 1,000 servers",
        &maglev,
        paper,
        AtMost(1.0),
    );
    group
}

fn large() -> Group {
    let mut group = Group::new("10m");
    let bytes = group.memory("footprint", Memory::Footprint(10_000_000));
    let idle = group.memory("idle", Memory::IdleCpu(10_000_000));
    let what = "bytes for each connection, NAT, IPv4, all tables, 10,000,000 connections";
    let kernel = Against::Absolute(96.0, "96 bytes (kernel IPVS 341)");
    group.row("bytes-10m", what, &bytes, kernel, AtMost(1.0));
    let what = "CPU when idle with 10,000,000 connections";
    let core = Against::Absolute(1.0, "one core");
    group.row("idle-10m", what, &idle, core, AtMost(0.01));
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_rows_have_unique_names_and_existing_jobs() {
        let groups = all();
        let mut names: Vec<_> = groups
            .iter()
            .flat_map(|group| &group.rows)
            .map(|row| &row.name)
            .collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        for group in &groups {
            for row in &group.rows {
                let needed = row.against.jobs().into_iter().chain([row.subject.as_str()]);
                for job in needed {
                    assert!(
                        group.jobs.iter().any(|known| known.name == job),
                        "{}: {job}",
                        row.name
                    );
                }
            }
        }
    }
}
