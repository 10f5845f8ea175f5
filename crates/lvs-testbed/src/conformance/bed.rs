//! The recordings' test bed in memory: the complete dataplane between a client link and a server
//! link, a fake clock, and a simulated host.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::Context;
use lvs_core::api::{ConnInfo, ServerInfo, ServiceInfo};
use lvs_core::mark::{MarkAction, MarkRule};
use lvs_core::{
    ConnId, Control, Director, Hook, Instant, Options, PacketMeta, ServerConfig, ServiceConfig,
    ServiceKey,
};
use lvs_dataplane::io::PacketIo;
use lvs_dataplane::io::memory::MemoryIo;
use lvs_packet::drop::FrameDrop;
use lvs_packet::frame::Frame;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::{Net, PortId, PortInfo};
use lvs_packet::parse::{self, Icmp};
use lvs_packet::pipeline::{Env, Output, Pipeline, Request};
use lvs_packet::settings::Settings;
use lvs_packet::testing::{Edited, Prefix, Route, Table, contains, made_up_mac};
use lvs_packet::wire::{ETHERNET_LEN, Mac};
use serde_json::Value;

use super::case::{
    self, Json, Replayed, configure, configure_server, hex, mark_rule, place, service_key,
    sysctl_text,
};
use super::frames::ethernet;
use super::host::Host;
use super::report::{Log, SharedSeen, Through};
use crate::kernel_path::{Noting, Programs, listing, without_id};

pub(super) const CLIENTS: PortId = PortId(0);
pub(super) const SERVERS: PortId = PortId(1);
/// The port through which the dataplane passes packets to the host's network stack.
pub(super) const HOST: PortId = PortId(2);

pub(super) const CLIENT_SIDE: Mac = Mac([2, 0, 0, 0, 0, 0xc1]);
pub(super) const GATEWAY: Mac = Mac([2, 0, 0, 0, 0, 0xc2]);
pub(super) const SERVER_SIDE: Mac = Mac([2, 0, 0, 0, 0, 0x51]);

const CLIENT_SIDE_ADDR: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);
const GATEWAY_ADDR: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 2);
const SERVER_SIDE_ADDR: Ipv4Addr = Ipv4Addr::new(10, 1, 255, 254);
const CLIENT_SIDE_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xff, 0, 0, 0, 0, 0, 1);
const GATEWAY_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xff, 0, 0, 0, 0, 0, 2);
const SERVER_SIDE_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0xffff);

/// Size of the kernel's connection table, which the first line of a listing shows.
pub(super) const KERNEL_TABLE_SIZE: u32 = 4096;

/// Maximum number of times that a frame, or a packet that the host sends in response, passes the
/// packet path. Further packets are dropped: they loop.
const ROUNDS: usize = 8;

pub(super) const fn port_name(port: PortId) -> &'static str {
    match port {
        CLIENTS => "cl",
        SERVERS => "sv",
        _ => "host",
    }
}

pub(super) fn port_named(name: &str) -> Option<PortId> {
    match name {
        "cl" => Some(CLIENTS),
        "sv" => Some(SERVERS),
        _ => None,
    }
}

fn table() -> Table {
    let port = |mac, mtu, ethernet| PortInfo {
        mac,
        mtu,
        ethernet,
        offload: false,
        gives_back: false,
    };
    Table {
        ports: vec![
            port(CLIENT_SIDE, 1500, true),
            port(SERVER_SIDE, 1500, true),
            port(Mac::default(), 65_535, false),
        ],
        host_port: Some(HOST),
        local: [
            CLIENT_SIDE_ADDR.into(),
            SERVER_SIDE_ADDR.into(),
            Ipv4Addr::LOCALHOST.into(),
            CLIENT_SIDE_ADDR6.into(),
            SERVER_SIDE_ADDR6.into(),
            Ipv6Addr::LOCALHOST.into(),
        ]
        .into(),
        routes: vec![
            Route::new("10.1.0.0/16", SERVERS, None, "10.1.255.254"),
            Route::new("10.255.0.0/24", CLIENTS, None, "10.255.0.1"),
            Route::unreachable("224.0.0.0/3"),
            Route::new("0.0.0.0/0", CLIENTS, Some("10.255.0.2"), "10.255.0.1"),
            Route::new("fd00:1::/64", SERVERS, None, "fd00:1::ffff"),
            Route::new("fd00:ff::/64", CLIENTS, None, "fd00:ff::1"),
            Route::unreachable("ff00::/8"),
            Route::new("::/0", CLIENTS, Some("fd00:ff::2"), "fd00:ff::1"),
        ],
        neighbours: [
            ((CLIENTS, GATEWAY_ADDR.into()), GATEWAY),
            ((CLIENTS, GATEWAY_ADDR6.into()), GATEWAY),
        ]
        .into(),
        forges_vips: true,
        ..Table::default()
    }
}

/// The mark that the recorder's nftables rules set on a packet; 0 if no rule matches.
fn mark(marks: &[MarkRule], tuple: &lvs_core::Tuple) -> u32 {
    let rule = marks.iter().find(|rule| rule.matches("", tuple, || false));
    match rule.map(|rule| rule.action) {
        Some(MarkAction::Mark(mark)) => mark,
        _ => 0,
    }
}

#[derive(Clone, Debug)]
pub(super) struct Emitted {
    pub(super) port: PortId,
    pub(super) frame: Vec<u8>,
}

impl Emitted {
    /// Returns the IP packet in the frame.
    pub(super) fn packet(&self) -> &[u8] {
        self.frame.get(ETHERNET_LEN..).unwrap_or_default()
    }
}

thread_local! {
    /// Loaded BPF programs that no case of this thread uses, by the size of their connection table.
    static IDLE: RefCell<HashMap<usize, Programs>> = RefCell::default();
}

#[derive(Debug)]
pub(super) struct Bed {
    pub(super) director: Director,
    pub(super) now: Instant,
    pub(super) net: Table,
    /// Prefixes that are routed to the host, which does not own their addresses.
    routed: Vec<Prefix>,
    pipeline: Pipeline,
    intercept: Intercept,
    marks: Vec<MarkRule>,
    ports: [MemoryIo; 3],
    batch: Vec<Frame>,
    output: Output,
    host: Host,
    emitted: Vec<Emitted>,
    /// The BPF programs of the kernel fast path, which receive each frame first; `None` without the
    /// fast path.
    programs: Option<Programs>,
    /// The size of the connection table.
    connections: usize,
    seen: SharedSeen,
}

impl Drop for Bed {
    fn drop(&mut self) {
        // The director releases the programs' memory before the programs are used again.
        self.director = Director::new(Options {
            max_connections: 1,
            ..Options::default()
        });
        if let Some(programs) = self.programs.take() {
            IDLE.with_borrow_mut(|idle| idle.insert(self.connections, programs));
        }
    }
}

impl Bed {
    /// Creates a test bed without services, with at most `connections` connections, for the case of
    /// `log`.
    pub(super) fn new(connections: usize, log: &Log) -> Replayed<Self> {
        let options = Options {
            max_connections: connections,
            ..Options::default()
        };
        Self::of(options, log)
    }

    /// As [`new`](Self::new), for a director with these options.
    pub(super) fn of(options: Options, log: &Log) -> Replayed<Self> {
        let connections = options.max_connections;
        let programs = match log.through {
            Through::Userspace => None,
            Through::FastPath => Some(Self::programs(&options)?),
        };
        let mut director = match &programs {
            None => Director::new(options),
            Some(programs) => Director::new_in(options, |_| programs.memory()),
        };
        let now = Instant::ZERO;
        director.advance(now);
        let ports = [MemoryIo::new(), MemoryIo::new(), MemoryIo::new()];
        Ok(Self {
            director,
            now,
            net: table(),
            routed: Vec::new(),
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            intercept: Intercept::default(),
            marks: Vec::new(),
            ports,
            batch: vec![Frame::new()],
            output: Output::new(),
            host: Host::default(),
            emitted: Vec::new(),
            programs,
            connections,
            seen: log.seen.clone(),
        })
    }

    /// The BPF programs of the previous case with a table of this size, or new ones.
    fn programs(options: &Options) -> Replayed<Programs> {
        let idle = IDLE.with_borrow_mut(|idle| idle.remove(&options.max_connections));
        if let Some(idle) = idle {
            return Ok(idle.again());
        }
        let layout = Control::new(options.clone()).layout();
        let programs = Programs::new(layout, [CLIENT_SIDE, SERVER_SIDE]);
        Ok(programs.context("cannot load the programs of the kernel fast path")?)
    }

    /// The director and the network, for changes. Discards the state of the BPF programs.
    pub(super) fn change(&mut self) -> (&mut Control, &mut Table) {
        if let Some(programs) = &self.programs {
            programs.changed();
        }
        (&mut self.director.control, &mut self.net)
    }

    fn control(&mut self) -> &mut Control {
        self.change().0
    }

    /// Applies a case or its `config`: sysctls, timeouts, marks, local prefixes, neighbours, MTUs,
    /// and whether the host supports SCTP and accepts packets from its own addresses.
    pub(super) fn set_up(&mut self, config: &Value) -> Replayed<()> {
        for (name, value) in config.fields("sysctl").into_iter().flatten() {
            self.control().set_sysctl(name, &sysctl_text(value))?;
        }
        if let Some(timeouts) = config.get("timeouts") {
            self.set_timeouts(timeouts)?;
        }
        self.change().1.accept_local = config
            .items("hostsysctl")
            .iter()
            .filter_map(Value::as_str)
            .any(|setting| setting.ends_with("accept_local=1"));
        for mark in config.items("marks") {
            self.marks.push(mark_rule(mark)?);
        }
        for local in config.items("local") {
            let text = local.as_str().unwrap_or_default();
            self.change().1.local_prefixes.push(case::prefix(text)?);
        }
        self.host.sctp = config.items("host").iter().any(|what| what == "sctp");
        for addr in config.items("neigh") {
            let addr = addr.as_str().and_then(|addr| addr.parse().ok());
            let addr: IpAddr = addr.context("a neighbour is not an address")?;
            self.make_neighbour(addr);
        }
        if let Some(mtu) = config.get("mtu") {
            for (port, name) in [(CLIENTS, "cl"), (SERVERS, "sv")] {
                if let Some(mtu) = mtu.maybe_number(name) {
                    self.change().1.port_mut(port).mtu = u32::try_from(mtu).unwrap_or(u32::MAX);
                }
            }
        }
        Ok(())
    }

    /// Sets the timeouts, as `ipvsadm --set` does.
    pub(super) fn set_timeouts(&mut self, value: &Value) -> Replayed<()> {
        let seconds = |key| u32::try_from(value.maybe_number(key).unwrap_or(0)).unwrap_or(u32::MAX);
        let (tcp, fin, udp) = (seconds("tcp"), seconds("tcpfin"), seconds("udp"));
        Ok(self.control().set_timeouts(tcp, fin, udp)?)
    }

    /// Adds a service with its servers, in order, and the service's address to the host.
    pub(super) fn add_service(
        &mut self,
        value: &Value,
        proto: Option<&str>,
    ) -> Replayed<ServiceKey> {
        let key = service_key(value, proto)?;
        if let ServiceKey::Address { addr, .. } = key {
            self.change().1.local.insert(addr.ip());
        }
        let mut config = ServiceConfig::new(key.family(), "rr");
        configure(&mut config, key.family(), value)?;
        self.control().add_service(key, config, None)?;
        for server in value.items("destinations") {
            self.add_server(&key, server)?;
        }
        self.follow();
        Ok(key)
    }

    /// Adds a real server, and makes it a neighbour.
    pub(super) fn add_server(&mut self, key: &ServiceKey, value: &Value) -> Replayed<()> {
        let addr = place(value)?;
        let mut config = ServerConfig::new(1, lvs_core::Forwarding::Nat);
        configure_server(&mut config, value)?;
        self.make_neighbour(addr.ip());
        let now = self.now;
        self.control().add_server(key, addr, &config, now)?;
        self.follow();
        Ok(())
    }

    /// Makes `addr` a neighbour on both links, with a link-layer address that is derived from it.
    pub(super) fn make_neighbour(&mut self, addr: IpAddr) {
        for port in [CLIENTS, SERVERS] {
            let (_, net) = self.change();
            net.neighbours.insert((port, addr), made_up_mac(addr));
        }
    }

    pub(super) fn route_to_host(&mut self, prefix: Prefix) {
        self.routed.push(prefix);
    }

    /// Edits a real server. Fields that the step does not contain keep their values.
    pub(super) fn edit_server(&mut self, key: &ServiceKey, step: &Value) -> Replayed<()> {
        let addr = place(step)?;
        let known = self.director.control.service(key).and_then(|service| {
            let servers = service.servers().iter();
            servers.clone().find(|server| server.addr() == addr)
        });
        let mut config = known.ok_or(lvs_core::Error::NoServer)?.config();
        configure_server(&mut config, step)?;
        self.control().edit_server(key, addr, &config)?;
        self.follow();
        Ok(())
    }

    pub(super) fn delete_server(&mut self, key: &ServiceKey, step: &Value) -> Replayed<()> {
        let (addr, now) = (place(step)?, self.now);
        self.control().delete_server(key, addr, now)?;
        self.follow();
        Ok(())
    }

    /// Edits a service. Fields that the step does not contain keep their values.
    pub(super) fn edit_service(&mut self, key: &ServiceKey, step: &Value) -> Replayed<()> {
        let known = self.director.control.service(key);
        let mut config = known.ok_or(lvs_core::Error::NoService)?.config().clone();
        configure(&mut config, key.family(), step)?;
        self.control().edit_service(key, config, None)?;
        self.follow();
        Ok(())
    }

    /// Applies the director's services and addresses to the packet path, as the dataplane does
    /// after each call.
    pub(super) fn follow(&mut self) {
        self.director.control.sweep(&mut self.director.shard);
        let local = self.net.local_addresses();
        self.director.control.set_local_addresses(local);
        self.intercept = Intercept::of(&self.director.control, &self.intercept);
        self.net.vips = self.intercept.vips();
    }

    /// All services as in a listing, or only the service `only`.
    pub(super) fn services(&self, only: Option<ServiceKey>) -> Vec<ServiceInfo> {
        let (control, now) = (&self.director.control, self.now);
        let wanted = control.services();
        let wanted = wanted.filter(|service| only.is_none_or(|key| key == service.key()));
        let infos = wanted.map(|service| {
            let servers = service.servers().iter();
            let servers = servers.map(|server| ServerInfo::of(control, service, server, now));
            ServiceInfo {
                servers: servers.collect(),
                ..ServiceInfo::of(service, now)
            }
        });
        infos.collect()
    }

    pub(super) fn connections(&self) -> Vec<ConnInfo> {
        let (director, now) = (&self.director, self.now);
        let connections = director.shard.connections_from(0, now);
        let templates = director.control.templates_from(0, now);
        let connections = connections.map(|connection| ConnInfo::of(&connection));
        let templates =
            templates.map(|template| ConnInfo::of_template(&director.control, &template));
        connections.chain(templates).collect()
    }

    /// Advances the clock by `duration`, and runs each due timer on the way.
    pub(super) fn wait(&mut self, duration: Duration) {
        let end = self.now + duration;
        loop {
            let events = [
                self.director.control.next_wakeup(),
                self.director.shard.next_wakeup(),
            ];
            match events.into_iter().flatten().min() {
                Some(next) if next < end => {
                    // The clock advances even if an event remains due.
                    self.now = next.max(self.now + Duration::from_millis(1)).min(end);
                    self.director.advance(self.now);
                }
                _ => break,
            }
            if self.now >= end {
                break;
            }
        }
        self.now = end;
        self.director.advance(end);
        self.pipeline.expire(end);
        self.follow();
        self.trace(&[]);
    }

    /// Injects a frame on a link. Returns all frames that are sent in response.
    pub(super) fn inject(&mut self, port: PortId, frame: &[u8]) -> Vec<Emitted> {
        self.arrive(port, frame, ROUNDS);
        let emitted = std::mem::take(&mut self.emitted);
        self.trace(&emitted);
        emitted
    }

    /// If the case is traced, records the sent frames and the present listing. With more than 64
    /// connections, records a listing only after every 64th frame or wait.
    fn trace(&self, emitted: &[Emitted]) {
        const MANY: usize = 64;
        let mut seen = self.seen.lock();
        if !seen.traced {
            return;
        }
        let many = self.director.shard.len() > MANY;
        let listed = !many || seen.trace.len().is_multiple_of(MANY);
        let sent = emitted.iter().map(|Emitted { port, frame }| {
            format!("{} {}", port_name(*port), hex(&without_id(frame)))
        });
        let listing = listed.then(|| listing(&self.director, self.now));
        let all = sent.chain(listing.into_iter().flatten()).collect();
        seen.trace.push(all);
    }

    /// Runs the BPF programs, if any, on a frame. Returns whether they have forwarded it.
    fn is_forwarded(&mut self, port: PortId, frame: &[u8]) -> bool {
        let Some(programs) = self.programs.as_mut().filter(|_| port != HOST) else {
            return false;
        };
        let (frame, now) = (Frame::from_bytes(frame), self.now);
        let tunnels = self.pipeline.common().tunnels();
        let Some((to, frame)) = programs.pass(port, &frame, &self.director.control, tunnels, now)
        else {
            return false;
        };
        programs.fold(&mut self.director.control);
        self.seen.lock().forwarded = programs.forwarded;
        // Walk over the connections after each packet, so that the master sends each message that
        // the kernel sends.
        if self.director.shard.has_master() {
            let _ = (self.director.shard).sync_offloaded_piece(0, usize::MAX, self.now);
        }
        let frame = frame.bytes().to_vec();
        self.emitted.push(Emitted { port: to, frame });
        true
    }

    /// With the kernel fast path, offloads a connection if it is offloadable and the case has no
    /// marks.
    fn publish(&mut self, conn: Option<ConnId>) {
        if let (Some(programs), Some(conn), true) =
            (&mut self.programs, conn, self.marks.is_empty())
        {
            let tunnels = self.pipeline.common().tunnels();
            programs.publish(conn, &mut self.director, &self.net, tunnels, self.now);
        }
    }

    /// Passes a frame through the packet path, and reinjected packets to the host. The host's own
    /// packets then pass in the same way, in at most `rounds` rounds including this one.
    fn arrive(&mut self, port: PortId, frame: &[u8], rounds: usize) {
        if rounds == 0 {
            return;
        }
        if self.is_forwarded(port, frame) {
            return;
        }
        let mut published = None;
        let left = self.pipeline.counters.left;
        let strays = self.pipeline.counters.dropped_for(FrameDrop::HostStray);
        self.ports[port.index()]
            .input
            .push_back(Frame::from_bytes(frame));
        while matches!(self.ports[port.index()].recv(&mut self.batch), Ok(1..)) {
            let env = Env {
                net: &self.net,
                intercept: &self.intercept,
                pmtu_disc: self.director.control.sysctls().pmtu_disc,
            };
            let (marks, routed) = (&self.marks, &self.routed);
            let mut noting = Noting::new(&mut self.director);
            let mut decide = Edited {
                decide: &mut noting,
                edit: |meta: &mut PacketMeta<'_>| {
                    meta.mark = mark(marks, &meta.tuple);
                    let dst = meta.tuple.dst.ip();
                    if routed.iter().any(|&net| contains(net, dst)) {
                        meta.hook = Hook::Local;
                    }
                },
            };
            self.pipeline.process(
                port,
                &mut self.batch,
                &env,
                &mut decide,
                self.now,
                &mut self.output,
            );
            published = noting.forwarded.or(published);
        }
        self.publish(published);
        self.intercept_local_clients();
        let mut given = Vec::new();
        for (to, frames) in self.output.queues() {
            self.ports[to.index()].send(frames);
            for frame in self.ports[to.index()].take() {
                let frame = frame.bytes().to_vec();
                if to == HOST {
                    given.push(frame);
                } else {
                    self.emitted.push(Emitted { port: to, frame });
                }
            }
        }
        self.output.recycle();
        if port == HOST {
            // The packet was for a host, not for a service.
            let stray = self.pipeline.counters.dropped_for(FrameDrop::HostStray) != strays;
            if stray || self.pipeline.counters.left != left {
                self.transmit(frame);
            }
        } else {
            let ip = frame.get(ETHERNET_LEN..).unwrap_or_default();
            if self.pipeline.counters.left != left || !self.is_intercepted(ip) {
                self.host_receives(ip, rounds);
            }
        }
        for packet in given {
            self.host_receives(&packet, rounds);
        }
    }

    /// Grants the pipeline's requests to intercept replies to clients on the host itself.
    fn intercept_local_clients(&mut self) {
        for request in std::mem::take(&mut self.output.requests) {
            if let Request::InterceptLocalClient(client) = request {
                self.intercept.local_clients.insert(client);
            }
        }
        let env = Env {
            net: &self.net,
            intercept: &self.intercept,
            pmtu_disc: self.director.control.sysctls().pmtu_disc,
        };
        self.pipeline
            .local_clients_intercepted(&env, self.now, &mut self.output);
    }

    /// Whether the dataplane hides a packet from the host; true for an invalid packet.
    fn is_intercepted(&self, ip: &[u8]) -> bool {
        let Ok(packet) = parse::ip(ip, false) else {
            return true;
        };
        // Packets with a mark are intercepted by the rules that mark them.
        let tuple = packet.meta(ip, Hook::Local, 0).tuple;
        if self
            .marks
            .iter()
            .any(|rule| rule.matches("", &tuple, || false))
        {
            return true;
        }
        let icmp = packet.is_icmp().then(|| packet.icmp(ip, Hook::Local));
        let inner = match icmp {
            // A fragment does not contain the quoted packet of an error.
            Some(Icmp::Error(error)) if packet.fragment.is_none() => {
                Some((error.inner.protocol, error.inner.dst))
            }
            _ => None,
        };
        let to_host = self.net.is_local(packet.dst);
        self.intercept.covers(&packet, inner, to_host)
    }

    fn host_receives(&mut self, ip: &[u8], rounds: usize) {
        let Some(done) = self.host.receive(ip, &self.net, self.now) else {
            return;
        };
        for packet in done.sent {
            // The host's own packets pass the director, too.
            self.arrive(HOST, &packet, rounds - 1);
        }
        for packet in done.forwarded {
            self.transmit(&packet);
        }
    }

    fn transmit(&mut self, ip: &[u8]) {
        let Ok(packet) = parse::ip(ip, false) else {
            return;
        };
        if self.net.is_local(packet.dst) {
            return;
        }
        let Some(hop) = self.net.route(packet.dst) else {
            return;
        };
        let (Some(info), Some(mac)) = (
            self.net.port(hop.port),
            self.net.neighbour(hop.port, hop.addr),
        ) else {
            return;
        };
        self.emitted.push(Emitted {
            port: hop.port,
            frame: ethernet(mac, info.mac, ip),
        });
    }
}
