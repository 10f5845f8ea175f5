//! A naive model of the director: vectors that are searched linearly, without cached values.
//! Property tests and the fuzz target `operations` compare it with the director after every
//! operation.

use std::net::SocketAddr;

use lvs_core::{
    Director, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceFlags, ServiceKey, TcpFlags, Verdict,
};

const VIP: &str = "198.51.100.1:80";
/// Names of the TCP states, in the order of their numbers.
const STATES: [&str; 11] = [
    "NONE",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "SYNACK",
];
const TIMEOUTS: [u64; 11] = [2, 900, 120, 60, 120, 120, 10, 60, 30, 120, 120];
/// TCP state tables of the kernel's IPVS. Rows: syn, fin, ack, rst. Columns: NO ES SS SR FW TW CL
/// CW LA LI SA. Tables: packets from the client, from the server, and from the client if the
/// director sees no packets of the server.
const TABLES: [[&str; 4]; 3] = [
    [
        "SR ES ES SR SR SR SR SR SR SR SR",
        "CL CW SS TW TW TW CL CW LA LI TW",
        "ES ES SS ES FW TW CL CW CL LI ES",
        "CL CL CL SR CL CL CL CL LA LI SR",
    ],
    [
        "SS ES SS SR SS SS SS SS SS LI SR",
        "TW FW SS TW FW TW CL TW LA LI TW",
        "ES ES SS ES FW TW CL CW LA ES ES",
        "CL CL SS CL CL TW CL CL CL CL CL",
    ],
    [
        "SR ES ES SR SR SR SR SR SR SR SR",
        "CL FW SS TW FW TW CL CW LA LI TW",
        "ES ES SS ES FW TW CL CW CL LI ES",
        "CL CL CL SR CL CL CL CL LA LI CL",
    ],
];

fn next_state(table: usize, flags: u8, state: usize) -> usize {
    let row = match flags {
        _ if flags & TcpFlags::RST != 0 => 3,
        _ if flags & TcpFlags::SYN != 0 => 0,
        _ if flags & TcpFlags::FIN != 0 => 1,
        _ if flags & TcpFlags::ACK != 0 => 2,
        _ => return 6,
    };
    let cell = TABLES[table][row].split(' ').nth(state).unwrap();
    [
        "NO", "ES", "SS", "SR", "FW", "TW", "CL", "CW", "LA", "LI", "SA",
    ]
    .iter()
    .position(|name| *name == cell)
    .unwrap()
}

#[derive(Clone, Debug)]
struct Record {
    addr: SocketAddr,
    weight: i32,
    upper: u32,
    lower: u32,
    overloaded: bool,
    available: bool,
    nat: bool,
    /// `Some` if the server is removed. The inner value is the second since which the record has no
    /// references; `None` while it has references.
    trashed: Option<Option<u64>>,
    gone: bool,
}

#[derive(Clone, Debug)]
struct Conn {
    client: SocketAddr,
    record: usize,
    nat: bool,
    state: usize,
    active: bool,
    /// Whether replies bypass the director (direct routing).
    silent: bool,
    timeout: u64,
    expires: u64,
    template: Option<usize>,
    dead: bool,
}

#[derive(Clone, Debug)]
struct Template {
    network: u32,
    record: usize,
    timeout: u64,
    expires: u64,
    assured: bool,
    valid: bool,
    dead: bool,
}

#[derive(Debug)]
struct Model {
    scheduler: &'static str,
    persistent: bool,
    records: Vec<Record>,
    /// Indices in `records` of the service's servers, the newest first.
    list: Vec<usize>,
    conns: Vec<Conn>,
    templates: Vec<Template>,
    /// Index in `records` of the server after which round robin continues; `None` if it starts at
    /// the head of `list`.
    last: Option<usize>,
    now: u64,
    trash_at: Option<u64>,
    flush: bool,
    nodest: bool,
    quiescent: bool,
    reuse: i32,
}

const PERSISTENCE: u64 = 50;

impl Model {
    fn live(&self, record: usize) -> impl Iterator<Item = &Conn> {
        let mine = move |conn: &&Conn| conn.record == record && !conn.dead;
        self.conns.iter().filter(mine)
    }

    fn total(&self, record: usize) -> u32 {
        u32::try_from(self.live(record).count()).unwrap()
    }

    fn active(&self, record: usize) -> u32 {
        u32::try_from(self.live(record).filter(|conn| conn.active).count()).unwrap()
    }

    fn controlled(&self, template: usize) -> bool {
        let mine = |conn: &Conn| conn.template == Some(template) && !conn.dead;
        self.conns.iter().any(mine)
    }

    fn threshold(&self, record: usize) -> u32 {
        let Record { upper, lower, .. } = self.records[record];
        if lower == 0 { upper - upper / 4 } else { lower }
    }

    fn end(&mut self, conn: usize) {
        let record = self.conns[conn].record;
        if self.records[record].upper != 0 && self.total(record) == self.threshold(record) {
            self.records[record].overloaded = false;
        }
        self.conns[conn].dead = true;
    }

    fn advance(&mut self, to: u64) {
        self.flush_removed();
        loop {
            let conn = (0..self.conns.len())
                .filter(|&n| !self.conns[n].dead)
                .min_by_key(|&n| self.conns[n].expires);
            let template = (0..self.templates.len())
                .filter(|&n| !self.templates[n].dead)
                .min_by_key(|&n| self.templates[n].expires);
            let at = [
                conn.map(|n| self.conns[n].expires),
                template.map(|n| self.templates[n].expires),
                self.trash_at,
            ];
            let Some(first) = at.into_iter().flatten().min().filter(|&at| at <= to) else {
                break;
            };
            if at[0] == Some(first) {
                self.end(conn.unwrap());
            } else if at[1] == Some(first) {
                let n = template.unwrap();
                if self.controlled(n) {
                    self.templates[n].timeout = 60;
                    self.templates[n].expires = first + 60;
                } else {
                    self.templates[n].dead = true;
                }
            } else {
                self.empty_trash(first);
            }
        }
        self.now = to;
    }

    fn referenced(&self, record: usize) -> bool {
        self.live(record).next().is_some()
            || self
                .templates
                .iter()
                .any(|template| template.record == record && !template.dead)
    }

    fn empty_trash(&mut self, now: u64) {
        let mut left = false;
        for n in 0..self.records.len() {
            let referenced = self.referenced(n);
            let record = &mut self.records[n];
            match record.trashed {
                None => continue,
                _ if referenced => {}
                Some(None) => record.trashed = Some(Some(now)),
                Some(Some(since)) if now < since + 120 => {}
                Some(Some(_)) => {
                    record.trashed = None;
                    record.gone = true;
                    continue;
                }
            }
            left = true;
        }
        self.trash_at = left.then_some(now + 60);
    }

    fn flush_removed(&mut self) {
        if !std::mem::take(&mut self.flush) {
            return;
        }
        for n in 0..self.conns.len() {
            if !self.conns[n].dead && !self.records[self.conns[n].record].available {
                self.end(n);
            }
        }
        for n in 0..self.templates.len() {
            if !self.records[self.templates[n].record].available && !self.controlled(n) {
                self.templates[n].dead = true;
            }
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let usable = |&n: &usize| !self.records[n].overloaded && self.records[n].weight > 0;
        if self.scheduler == "rr" {
            let start = self.last.map_or(0, |last| {
                self.list.iter().position(|&n| n == last).unwrap() + 1
            });
            let order = self.list[start..].iter().chain(&self.list[..start]);
            let chosen = order.copied().find(usable)?;
            self.last = Some(chosen);
            return Some(chosen);
        }
        let cost = |n: usize| {
            let load = if self.scheduler == "sed" {
                u64::from(self.active(n)) + 1
            } else {
                u64::from(self.active(n)) * 256 + u64::from(self.total(n))
            };
            let weight = u64::try_from(self.records[n].weight).unwrap();
            // 840 is divisible by every weight up to 8, so that all quotients are whole numbers.
            load * 840 / weight
        };
        self.list
            .iter()
            .copied()
            .filter(usable)
            .min_by_key(|&n| cost(n))
    }

    /// Handles a client's segment. Returns the chosen server, or the verdict if none is chosen.
    fn client_sends(&mut self, client: SocketAddr, flags: u8) -> Result<SocketAddr, &'static str> {
        let found = (0..self.conns.len())
            .rev()
            .find(|&n| self.conns[n].client == client && !self.conns[n].dead);
        let mut replaced = None;
        if let Some(n) = found {
            let conn = &self.conns[n];
            let record = &self.records[conn.record];
            let again = flags & TcpFlags::SYN != 0
                && (self.nodest && record.weight == 0
                    || self.reuse != 0
                        && conn.template.is_none()
                        && (conn.state == 5
                            || conn.state == 6
                            || self.reuse & 2 != 0 && conn.state == 4 && conn.silent));
            if again {
                replaced = found;
            } else if !record.available {
                if !self.nodest {
                    return Err("drop");
                }
                replaced = found;
            } else {
                return Ok(self.forward(n, flags));
            }
        }
        let result = if flags & TcpFlags::RST != 0 || flags & TcpFlags::SYN == 0 {
            Err("accept")
        } else {
            self.open(client).map(|n| self.forward(n, flags))
        };
        if let Some(n) = replaced {
            self.end(n);
        }
        result
    }

    fn open(&mut self, client: SocketAddr) -> Result<usize, &'static str> {
        let mut template = None;
        let record;
        if self.persistent {
            let SocketAddr::V4(v4) = client else {
                unreachable!()
            };
            let network = v4.ip().to_bits() & 0xffff_ff00;
            let found = (0..self.templates.len()).rev().find(|&n| {
                let template = &self.templates[n];
                !template.dead && template.valid && template.network == network
            });
            let valid = found.filter(|&n| {
                let server = &self.records[self.templates[n].record];
                server.available && !(self.quiescent && server.weight == 0)
            });
            if let (Some(n), None) = (found, valid) {
                self.templates[n].valid = false;
            }
            let n = match valid {
                Some(n) => n,
                None => {
                    let record = self.pick().ok_or("unreachable")?;
                    self.templates.push(Template {
                        network,
                        record,
                        timeout: PERSISTENCE,
                        expires: 0,
                        assured: false,
                        valid: true,
                        dead: false,
                    });
                    self.templates.len() - 1
                }
            };
            self.templates[n].expires = self.now + self.templates[n].timeout;
            record = self.templates[n].record;
            template = Some(n);
        } else {
            record = self.pick().ok_or("unreachable")?;
        }
        let nat = self.records[record].nat;
        self.conns.push(Conn {
            client,
            record,
            nat,
            state: 0,
            active: false,
            silent: !nat,
            timeout: 3,
            expires: self.now + 3,
            template,
            dead: false,
        });
        let upper = self.records[record].upper;
        if upper != 0 && self.total(record) == upper {
            self.records[record].overloaded = true;
        }
        Ok(self.conns.len() - 1)
    }

    fn forward(&mut self, n: usize, flags: u8) -> SocketAddr {
        let table = if self.conns[n].silent { 2 } else { 0 };
        self.transition(n, table, flags);
        self.records[self.conns[n].record].addr
    }

    fn server_sends(&mut self, server: SocketAddr, client: SocketAddr, flags: u8) -> bool {
        let found = (0..self.conns.len()).rev().find(|&n| {
            let conn = &self.conns[n];
            conn.client == client
                && !conn.dead
                && conn.nat
                && self.records[conn.record].addr == server
        });
        let Some(n) = found else { return false };
        self.conns[n].silent = false;
        self.transition(n, 1, flags);
        true
    }

    fn transition(&mut self, n: usize, table: usize, flags: u8) {
        let conn = &mut self.conns[n];
        let next = next_state(table, flags, conn.state);
        if next != conn.state {
            conn.active = matches!(next, 1 | 2 | 3 | 10);
            if let (1, Some(template)) = (next, conn.template) {
                self.templates[template].assured = true;
            }
        }
        conn.state = next;
        conn.timeout = TIMEOUTS[next];
        conn.expires = self.now + conn.timeout;
    }

    fn configure(&mut self, n: usize, weight: i32, upper: u32, lower: u32) {
        let changed = (self.records[n].upper, self.records[n].lower) != (upper, lower);
        self.records[n].weight = weight;
        self.records[n].upper = upper;
        self.records[n].lower = lower;
        if changed {
            let total = self.total(n);
            if upper == 0 || total < self.threshold(n) {
                self.records[n].overloaded = false;
            } else if total >= upper {
                self.records[n].overloaded = true;
            }
        }
    }

    fn add(&mut self, addr: SocketAddr, config: &ServerConfig) -> bool {
        if self.list.iter().any(|&n| self.records[n].addr == addr) {
            return false;
        }
        let trashed = self
            .records
            .iter()
            .position(|record| record.addr == addr && record.trashed.is_some());
        let n = trashed.unwrap_or_else(|| {
            self.records.push(Record {
                addr,
                weight: 0,
                upper: 0,
                lower: 0,
                overloaded: false,
                available: true,
                nat: true,
                trashed: None,
                gone: false,
            });
            self.records.len() - 1
        });
        self.configure(n, config.weight, config.upper, config.lower);
        let record = &mut self.records[n];
        record.available = true;
        record.trashed = None;
        record.nat = config.forwarding == Forwarding::Nat;
        self.list.insert(0, n);
        true
    }

    fn delete(&mut self, addr: SocketAddr) -> bool {
        let Some(at) = self.list.iter().position(|&n| self.records[n].addr == addr) else {
            return false;
        };
        let n = self.list[at];
        if self.last == Some(n) {
            self.last = at.checked_sub(1).map(|at| self.list[at]);
        }
        self.list.remove(at);
        self.records[n].available = false;
        self.records[n].trashed = Some(None);
        self.trash_at.get_or_insert(self.now + 60);
        self.flush |= self.nodest;
        true
    }

    fn listing(&self) -> Vec<String> {
        let left = |expires: u64| expires - self.now;
        let conns = self.conns.iter().filter(|conn| !conn.dead).map(|conn| {
            let server = self.records[conn.record].addr;
            format!(
                "{} {server} {} {}",
                conn.client,
                STATES[conn.state],
                left(conn.expires)
            )
        });
        let templates = self.templates.iter().filter(|template| !template.dead);
        let templates = templates.map(|template| {
            let client = std::net::Ipv4Addr::from_bits(template.network);
            let mut server = self.records[template.record].addr;
            if !template.valid {
                server.set_port(65535);
            }
            let state = if template.assured { "ASSURED" } else { "NONE" };
            format!("{client}:0 {server} {state} {}", left(template.expires))
        });
        let mut lines: Vec<String> = conns.chain(templates).collect();
        lines.sort();
        lines
    }
}

/// An operation that is applied to the director and to its model.
#[derive(Clone, Debug)]
pub enum Op {
    /// A segment of a client to the service: number of the client, and TCP flags.
    FromClient(u8, u8),
    /// A segment of a server to a client: number of the server, number of the client, and TCP
    /// flags.
    FromServer(u8, u8, u8),
    /// Adds a server: number, weight, upper threshold, lower threshold; NAT if true, otherwise
    /// direct routing.
    Add(u8, i32, u32, u32, bool),
    /// Edits a server: number, weight, upper threshold, lower threshold.
    Edit(u8, i32, u32, u32),
    /// Deletes the server with this number.
    Delete(u8),
    /// Advances the clock by this number of seconds.
    Wait(u64),
    /// Sets a sysctl.
    Sysctl(&'static str, i32),
}

fn client(n: u8) -> SocketAddr {
    // The clients are in four networks of three addresses.
    SocketAddr::from(([203, 0, 113 + n % 4, 1 + n], 40_000 + u16::from(n)))
}

fn server(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1 + n], 8080))
}

/// A director and its model.
#[derive(Debug)]
pub struct Pair {
    director: Director,
    model: Model,
    service: ServiceKey,
}

impl Pair {
    /// Creates director and model with a service and three servers.
    pub fn new(scheduler: &'static str, persistent: bool) -> Self {
        let mut director = Director::new(Options {
            max_connections: 256,
            ..Options::default()
        });
        director.advance(Instant::ZERO);
        let service = ServiceKey::tcp(VIP.parse().unwrap());
        let mut config = ServiceConfig::new(service.family(), scheduler);
        if persistent {
            config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
            config.timeout = u32::try_from(PERSISTENCE).unwrap();
            config.netmask = 0xffff_ff00;
        }
        director.control.add_service(service, config, None).unwrap();
        let model = Model {
            scheduler,
            persistent,
            records: Vec::new(),
            list: Vec::new(),
            conns: Vec::new(),
            templates: Vec::new(),
            last: None,
            now: 0,
            trash_at: None,
            flush: false,
            nodest: false,
            quiescent: false,
            reuse: 1,
        };
        let mut pair = Self {
            director,
            model,
            service,
        };
        for n in 0..3 {
            pair.apply(&Op::Add(n, 1 + i32::from(n), 0, 0, n != 1));
        }
        pair
    }

    /// Waits until all connections expire, and checks that none remains.
    pub fn finish(mut self) {
        self.apply(&Op::Wait(10_000));
        assert!(self.director.shard.is_empty());
        for server in self
            .director
            .control
            .service(&self.service)
            .unwrap()
            .servers()
        {
            let left = (server.total(), server.active(), server.templates());
            assert_eq!(left, (0, 0, 0));
        }
    }

    fn packet(&mut self, hook: Hook, src: SocketAddr, dst: SocketAddr, flags: u8) -> Verdict {
        let meta = PacketMeta::tcp(hook, src, dst, flags);
        let now = Instant::from_secs(self.model.now);
        self.director.handle_packet(&meta, now)
    }

    /// Applies an operation to director and model, and compares them.
    pub fn apply(&mut self, op: &Op) {
        let now = Instant::from_secs(self.model.now);
        match *op {
            Op::FromClient(n, flags) => {
                self.model.advance(self.model.now);
                let expected = self.model.client_sends(client(n), flags);
                let verdict = self.packet(Hook::Local, client(n), VIP.parse().unwrap(), flags);
                let got = match verdict {
                    Verdict::Forward(forward) => Ok(forward.target),
                    Verdict::Accept(_) => Err("accept"),
                    Verdict::Unreachable(_) => Err("unreachable"),
                    Verdict::Drop(_) => Err("drop"),
                    Verdict::Reset(_) => Err("reset"),
                    Verdict::Reply(_) => Err("reply"),
                };
                assert_eq!(got, expected);
                // The director removes a connection that has ended only at its next advance.
                self.director.advance(now);
            }
            Op::FromServer(s, c, flags) => {
                self.model.advance(self.model.now);
                let expected = self.model.server_sends(server(s), client(c), flags);
                let verdict = self.packet(Hook::Transit, server(s), client(c), flags);
                assert_eq!(matches!(verdict, Verdict::Reply(_)), expected);
            }
            Op::Add(n, weight, upper, lower, nat) => {
                let method = if nat {
                    Forwarding::Nat
                } else {
                    Forwarding::Route
                };
                let config = ServerConfig {
                    upper,
                    lower,
                    ..ServerConfig::new(weight, method)
                };
                let expected = self.model.add(server(n), &config);
                let control = &mut self.director.control;
                let done = control.add_server(&self.service, server(n), &config, now);
                assert_eq!(done.is_ok(), expected);
            }
            Op::Edit(n, weight, upper, lower) => {
                let control = &mut self.director.control;
                let service = control.service(&self.service).unwrap();
                let found = service
                    .servers()
                    .iter()
                    .find(|entry| entry.addr() == server(n));
                let Some(config) = found.map(|server| server.config()) else {
                    return;
                };
                let config = ServerConfig {
                    weight,
                    upper,
                    lower,
                    ..config
                };
                control
                    .edit_server(&self.service, server(n), &config)
                    .unwrap();
                let records = &self.model.records;
                let mut list = self.model.list.iter().copied();
                let at = list
                    .find(|&record| records[record].addr == server(n))
                    .unwrap();
                self.model.configure(at, weight, upper, lower);
            }
            Op::Delete(n) => {
                let expected = self.model.delete(server(n));
                let control = &mut self.director.control;
                let done = control.delete_server(&self.service, server(n), now);
                assert_eq!(done.is_ok(), expected);
            }
            Op::Wait(seconds) => {
                let to = self.model.now + seconds;
                self.model.advance(to);
                self.director.advance(Instant::from_secs(to));
            }
            Op::Sysctl(name, value) => {
                let control = &mut self.director.control;
                control.set_sysctl(name, &value.to_string()).unwrap();
                match name {
                    "expire_nodest_conn" => self.model.nodest = value != 0,
                    "expire_quiescent_template" => self.model.quiescent = value != 0,
                    _ => self.model.reuse = value,
                }
            }
        }
        self.compare();
    }

    fn compare(&mut self) {
        let service = self.director.control.service(&self.service).unwrap();
        let ours: Vec<_> = service
            .servers()
            .iter()
            .map(|server| {
                let counts = (server.active(), server.inactive());
                (
                    server.addr(),
                    counts,
                    server.is_overloaded(),
                    server.weight(),
                )
            })
            .collect();
        let model = &self.model;
        let naive: Vec<_> = model
            .list
            .iter()
            .map(|&n| {
                let record = &model.records[n];
                let active = model.active(n);
                let counts = (active, model.total(n) - active);
                (record.addr, counts, record.overloaded, record.weight)
            })
            .collect();
        assert_eq!(ours, naive);
        if model.flush {
            // Connections of removed servers end with the next packet.
            return;
        }
        let now = Instant::from_secs(model.now);
        let connections = self.director.shard.connections_from(0, now);
        let mut ours: Vec<String> = connections
            .chain(self.director.control.templates_from(0, now))
            .map(|conn| {
                let left = conn.expires.as_secs();
                format!("{} {} {} {left}", conn.client, conn.server, conn.state)
            })
            .collect();
        ours.sort();
        assert_eq!(ours, model.listing());
    }
}
