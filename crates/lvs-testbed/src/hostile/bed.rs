//! Packet path and director in memory, with an independent check of sent packets.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddrV4};
use std::time::Duration;

use lvs_core::fast_path::{Ahead, Passed, Plain};
use lvs_core::full_nat::LocalAddress;
use lvs_core::tunnel::{Tunnel, TunnelChecksum};
use lvs_core::{
    ConnId, Control, Director, Forwarding, IcmpError, Instant, Options, PacketMeta, Protocol,
    Tuple, Verdict,
};
use lvs_dataplane::fast_path::FastPathError;
use lvs_packet::drop::FrameDrop;
use lvs_packet::fragment;
use lvs_packet::frame::{Frame, Offload};
use lvs_packet::held;
use lvs_packet::intercept::Intercept;
use lvs_packet::net::{Net, PortId, PortInfo};
use lvs_packet::pipeline::{Counters, Decide, Env, Output, Pipeline, Request};
use lvs_packet::settings::Settings;
use lvs_packet::testing::{Route, Table};
use lvs_packet::wire::Mac;

use super::entropy::Entropy;
use super::generator::{Act, MACS, PEER, Shot, Side};
use super::scene::Scene;
use crate::kernel_path::{Forwarded, Noting, Programs, listing};
use crate::oracle::{self, Health, Parts};
use crate::packet;

const CLIENTS: PortId = PortId(0);
const SERVERS: PortId = PortId(1);
const HOST: PortId = PortId(2);

/// Time between two frames.
const STEP: Duration = Duration::from_micros(50);

fn options(entropy: &mut Entropy<'_>) -> Options {
    Options {
        max_connections: entropy.pick(&[1024, 8192, 64]),
        seed: entropy.u64(),
        ..Options::default()
    }
}

/// Results of the fuzz frames.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Counters of the frames' fates.
    pub counters: Counters,
    /// Number of sent packets with a correct transport checksum.
    pub right: u64,
    /// Number of received packets with a correct transport checksum.
    pub came_right: u64,
    /// Number of packets that were forwarded from valid fragmented datagrams.
    pub trains: u64,
    /// Number of packets inside tunnel packets that were checked.
    pub tunnelled: u64,
    /// Maximum number of simultaneous connections.
    pub connections: usize,
    /// Maximum memory of fragments that waited for reassembly, in bytes.
    pub fragments: usize,
    /// Maximum number of frames that waited for a neighbour at the same time.
    pub waiting: usize,
}

impl Summary {
    /// Adds the results of other fuzz frames.
    pub fn add(&mut self, other: &Self) {
        self.counters += &other.counters;
        self.right += other.right;
        self.came_right += other.came_right;
        self.trains += other.trains;
        self.tunnelled += other.tunnelled;
        self.connections = self.connections.max(other.connections);
        self.fragments = self.fragments.max(other.fragments);
        self.waiting = self.waiting.max(other.waiting);
    }

    /// Returns the reasons for which frames were dropped, with the number of dropped frames.
    pub fn drops(&self) -> BTreeMap<&'static str, u64> {
        FrameDrop::ALL
            .iter()
            .map(|reason| (reason.name(), self.counters.dropped_for(*reason)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

/// Links, routes and neighbours: addresses outside the servers' link are behind a gateway.
fn table(scene: &Scene, entropy: &mut Entropy<'_>) -> Table {
    let six = scene.vips[0].is_ipv6() || scene.servers[0].is_ipv6();
    let small = if six { 1500 } else { 576 };
    let mtus = [1500, 1500, 1500, 1400, 9000, 1280, small];
    let mtu = [entropy.pick(&mtus), entropy.pick(&mtus), 65_535];
    let offload = [!entropy.one_in(3), !entropy.one_in(3), !entropy.one_in(3)];
    let host = !entropy.one_in(16);
    let port = |index: usize| PortInfo {
        mac: MACS.get(index).copied().map(Mac).unwrap_or_default(),
        mtu: mtu[index],
        ethernet: index != HOST.index(),
        offload: offload[index],
        gives_back: false,
    };
    let route = |to: &str, port: PortId, gateway| {
        let source = scene.director[port.index()].to_string();
        Route::new(to, port, gateway, &source)
    };
    Table {
        ports: (0..if host { 3 } else { 2 }).map(port).collect(),
        host_port: host.then_some(HOST),
        local: [scene.vips[0], scene.director[0], scene.director[1]].into(),
        own: match scene.method.forwarding {
            Forwarding::FullNat => [scene.vips[1], scene.locals[0]].into(),
            _ => [scene.vips[1]].into(),
        },
        routes: vec![
            Route::unreachable("240.0.0.0/4"),
            Route::unreachable("fdff::/16"),
            route("10.1.0.0/16", SERVERS, None),
            route("fd00:1::/32", SERVERS, None),
            route("0.0.0.0/0", CLIENTS, Some("10.255.0.2")),
            route("::/0", CLIENTS, Some("fd00:ff::2")),
        ],
        ..Table::default()
    }
}

#[derive(Clone, Debug)]
struct Came {
    protocol: Option<u8>,
    health: Health,
    /// Whether the packet is an ICMP error whose quoted packet may have a wrong header after
    /// forwarding: the quoted header was wrong on arrival, or is inside a tunnel packet.
    about_wrong: bool,
    /// The packet, if it is a first IPv6 fragment without a complete transport header. It is sent
    /// unchanged or not at all, and never reassembled.
    tiny: Option<Vec<u8>>,
}

impl Came {
    /// Whether a packet equals the received tiny fragment, except for its hop limit.
    fn is_tiny(&self, ip: &[u8]) -> bool {
        const HOPS: usize = 7;
        let but_hops = |ip: &[u8]| Some((ip.get(..HOPS)?.to_vec(), ip.get(HOPS + 1..)?.to_vec()));
        self.tiny
            .as_ref()
            .is_some_and(|tiny| but_hops(tiny) == but_hops(ip))
    }
}

/// Returns the packet if it is a first IPv6 fragment without a complete transport header, or with
/// further extension headers after the fragment header.
fn tiny(ip: &[u8], parts: &Parts) -> Option<Vec<u8>> {
    let ip = ip.get(..parts.len)?;
    if parts.src.is_ipv4() || !parts.fragment {
        return None;
    }
    let header = ip.get(parts.l4 - 8..parts.l4)?;
    let offset = u16::from_be_bytes([header[2], header[3]]) & 0xfff8;
    let enough = match header[0] {
        6 => 20,
        17 | 58 => 8,
        0 | 43 | 44 | 51 | 60 => usize::MAX,
        _ => 1,
    };
    (offset == 0 && ip.len() - parts.l4 < enough).then(|| ip.to_vec())
}

/// A dataplane in memory. Every method panics if an invariant does not hold.
#[derive(Debug)]
pub struct Bed {
    scene: Scene,
    net: Table,
    intercept: Intercept,
    director: Director,
    pipeline: Pipeline,
    output: Output,
    /// Buffer for each received packet, as large as that of a receive call.
    slot: Frame,
    now: Instant,
    asked: Vec<(PortId, IpAddr)>,
    present: Vec<bool>,
    last: Option<(PortId, Frame)>,
    /// The BPF programs of the kernel fast path, which receive each frame first.
    programs: Option<Programs>,
    /// Number of packets on the userspace fast path; `None` if all use the slow path.
    passed: Option<u64>,
    /// Sent frames, if the test compares them.
    left: Option<Vec<(PortId, Frame)>>,
    summary: Summary,
}

impl Bed {
    /// Creates a director for `scene`. `entropy` chooses all other settings.
    ///
    /// # Panics
    /// The director refuses the scene's services or servers.
    pub fn new(scene: &Scene, entropy: &mut Entropy<'_>) -> Self {
        Self::with(scene, entropy, None)
    }

    /// As [`new`](Self::new), with the kernel fast path.
    ///
    /// # Errors
    /// The kernel refuses the BPF programs.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn fast_path(scene: &Scene, entropy: &mut Entropy<'_>) -> Result<Self, FastPathError> {
        // The layout must be known before the table is created, but depends on later choices of the
        // same entropy: a copy makes them first.
        let mut before = entropy.clone();
        drop(table(scene, &mut before));
        let control = Control::new(options(&mut before));
        let programs = Programs::new(control.layout(), MACS.map(Mac))?;
        Ok(Self::with(scene, entropy, Some(programs)))
    }

    /// As [`new`](Self::new), without the userspace fast path.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn long(scene: &Scene, entropy: &mut Entropy<'_>) -> Self {
        Self {
            passed: None,
            ..Self::new(scene, entropy)
        }
    }

    fn with(scene: &Scene, entropy: &mut Entropy<'_>, programs: Option<Programs>) -> Self {
        let net = table(scene, entropy);
        let options = options(entropy);
        let mut director = match &programs {
            None => Director::new(options),
            Some(programs) => Director::new_in(options, |_| programs.memory()),
        };
        director.advance(Instant::ZERO);
        let control = &mut director.control;
        let local = scene
            .director
            .map(|addr| (addr, if addr.is_ipv4() { 32 } else { 128 }));
        control.set_local_addresses(local.into());
        if scene.method.forwarding == Forwarding::FullNat {
            let pool = scene.locals.map(LocalAddress::new).into();
            let set = control.set_local_pool(pool, false);
            set.expect("the local addresses are valid");
        }
        for (key, config) in scene.services() {
            control
                .add_service(key, config, None)
                .expect("the service is valid");
        }
        let settings = if entropy.one_in(2) {
            Settings::default()
        } else {
            Settings::UNLIMITED
        };
        let mut bed = Self {
            scene: scene.clone(),
            net,
            intercept: Intercept {
                local_addresses: scene.locals.into(),
                ..Intercept::default()
            },
            director,
            pipeline: Pipeline::alone(settings),
            output: Output::new(),
            slot: Frame::new(),
            now: Instant::ZERO,
            asked: Vec::new(),
            present: vec![false; scene.servers.len()],
            last: None,
            programs,
            passed: Some(0),
            left: None,
            summary: Summary::default(),
        };
        for number in 0..scene.servers.len() {
            bed.toggle(number);
        }
        bed
    }

    /// Number of received frames.
    pub const fn received(&self) -> u64 {
        self.pipeline.counters.received
    }

    /// Executes a step.
    ///
    /// # Panics
    /// An invariant does not hold.
    pub fn act(&mut self, act: Act) {
        let change = !matches!(act, Act::Send(_) | Act::Train { .. } | Act::Loop);
        if change && let Some(programs) = &self.programs {
            programs.fold(&mut self.director.control);
        }
        self.do_act(act);
        if change && let Some(programs) = &self.programs {
            programs.changed();
        }
    }

    /// As [`act`](Self::act), and returns the sent frames.
    ///
    /// # Panics
    /// As [`act`](Self::act).
    pub fn act_and_record(&mut self, act: Act) -> Vec<(PortId, Frame)> {
        self.left = Some(Vec::new());
        self.act(act);
        self.left.take().unwrap_or_default()
    }

    /// Number of packets that the kernel fast path has forwarded.
    pub fn forwarded(&self) -> Forwarded {
        let programs = self.programs.as_ref();
        programs.map_or_else(Forwarded::default, |programs| programs.forwarded)
    }

    /// Number of packets on the userspace fast path.
    pub fn passed(&self) -> u64 {
        self.passed.unwrap_or(0)
    }

    /// Counters of the frames' fates so far.
    pub const fn counters(&self) -> &Counters {
        &self.pipeline.counters
    }

    /// Lists the sorted connections, and the counters of director, services and servers.
    pub fn listing(&mut self) -> Vec<String> {
        if let Some(programs) = &self.programs {
            programs.fold(&mut self.director.control);
        }
        listing(&self.director, self.now)
    }

    fn do_act(&mut self, act: Act) {
        match act {
            Act::Send(shots) => {
                for shot in shots {
                    let came = self.judge_shot(&shot);
                    let sent = self.pass(shot.from, &shot.frame);
                    self.judge(&came, sent, &shot);
                }
            }
            Act::Train { shots, whole } => {
                let mut came = came(&whole, &Offload::default());
                came.tiny = shots.iter().find_map(|shot| self.judge_shot(shot).tiny);
                let before = self.pipeline.counters.sent;
                let mut sent = Vec::new();
                for shot in &shots {
                    sent.extend(self.pass(shot.from, &shot.frame));
                }
                self.summary.trains += self.pipeline.counters.sent - before;
                if let Some(shot) = shots.first() {
                    self.judge(&came, sent, shot);
                }
            }
            Act::Loop => self.send_last_again(),
            Act::Wait(time) => self.wait(time),
            Act::Neighbours(answer) => self.neighbours(answer),
            Act::Weight(number, weight) => self.weight(number % self.scene.servers.len(), weight),
            Act::Toggle(number) => {
                let missing = self.present.iter().position(|present| !present);
                self.toggle(missing.unwrap_or(number % self.scene.servers.len()));
            }
            Act::Sysctl(name, value) => {
                self.director
                    .control
                    .set_sysctl(name, value)
                    .unwrap_or_else(|error| panic!("cannot set {name}={value}: {error}"));
            }
        }
        self.bounds();
    }

    /// Waits until all timers have expired, and returns the summary.
    ///
    /// # Panics
    /// Connections or other state remain.
    pub fn finish(mut self) -> Summary {
        // Persistence lasts 60 s, an established connection a quarter of an hour, removed servers
        // two minutes more.
        self.wait(Duration::from_secs(2000));
        assert!(self.director.shard.is_empty(), "connections remain");
        for service in self.director.control.services() {
            for server in service.servers() {
                let left = (server.total(), server.active(), server.templates());
                assert_eq!(left, (0, 0, 0), "{} still has references", server.addr());
            }
        }
        assert_eq!(self.pipeline.common().reassembler.memory(), 0);
        assert_eq!(self.pipeline.held.len(), 0);
        self.summary.counters = self.pipeline.counters.clone();
        self.summary
    }

    // --- around the frames -----------------------------------------------------------------------

    fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.director.advance(self.now);
        self.pipeline.expire(self.now);
    }

    fn neighbours(&mut self, answer: bool) {
        let asked = std::mem::take(&mut self.asked);
        if !answer {
            self.net.neighbours.clear();
        }
        for (port, addr) in asked {
            if answer {
                self.net.neighbours.insert((port, addr), Mac(PEER));
                let env = Env::new(&self.net, &self.intercept);
                self.pipeline.neighbours_resolved(&env, &mut self.output);
            } else {
                let env = Env::new(&self.net, &self.intercept);
                let decide = &mut self.director;
                self.pipeline.neighbour_failed(
                    port,
                    addr,
                    &env,
                    decide,
                    self.now,
                    &mut self.output,
                );
            }
            for (port, frames) in self.output.queues() {
                for frame in frames {
                    // The frame that caused this one is not known here.
                    let link = if port == HOST { 0 } else { 14 };
                    let ip = &frame.bytes()[link..];
                    assert!(
                        oracle::parts(ip).is_some(),
                        "a released frame is not an IP packet: {}",
                        hex(ip)
                    );
                }
            }
            self.output.recycle();
        }
    }

    fn weight(&mut self, number: usize, weight: i32) {
        for vip in self.scene.vips {
            for offer in self.scene.offers {
                let (key, _) = self.scene.service(vip, &offer);
                let (addr, mut config) = self.scene.server(number, &offer);
                config.weight = weight;
                let done = self.director.control.edit_server(&key, addr, &config);
                assert_eq!(
                    done.is_ok(),
                    self.present[number],
                    "the edit of a server succeeded without the server, or failed with it: {done:?}"
                );
            }
        }
    }

    fn toggle(&mut self, number: usize) {
        let control = &mut self.director.control;
        for vip in self.scene.vips {
            for offer in self.scene.offers {
                let (key, _) = self.scene.service(vip, &offer);
                let (addr, config) = self.scene.server(number, &offer);
                let done = if self.present[number] {
                    control.delete_server(&key, addr, self.now)
                } else {
                    control.add_server(&key, addr, &config, self.now)
                };
                done.unwrap_or_else(|error| {
                    panic!("cannot add or delete server {addr} of {key}: {error}")
                });
            }
        }
        self.present[number] = !self.present[number];
        let own = std::mem::take(&mut self.intercept.own_vips);
        let clients = std::mem::take(&mut self.intercept.local_clients);
        self.intercept = Intercept::of(control, &self.intercept);
        self.net.vips = self.intercept.vips();
        self.intercept.own_vips = if own.is_empty() {
            self.net.own.clone()
        } else {
            own
        };
        self.intercept.local_clients = clients;
        self.intercept.local_addresses = self.scene.locals.into();
    }

    fn send_last_again(&mut self) {
        let Some((port, mut frame)) = self.last.take() else {
            return;
        };
        let from = match port {
            CLIENTS => Side::Clients,
            SERVERS => Side::Servers,
            _ => Side::Host,
        };
        if from != Side::Host {
            frame.bytes_mut()[..6].copy_from_slice(&MACS[port.index()]);
        }
        self.act(Act::Send(vec![Shot { from, frame }]));
    }

    fn bounds(&mut self) {
        let summary = &mut self.summary;
        let memory = self.pipeline.common().reassembler.memory();
        assert!(
            memory <= fragment::MEMORY_MAX,
            "{memory} bytes of fragments exceed the limit"
        );
        let waiting = self.pipeline.held.len();
        assert!(
            waiting <= held::TOTAL,
            "{waiting} waiting frames exceed the limit"
        );
        let connections = self.director.shard.len();
        assert!(connections <= self.director.shard.capacity());
        summary.fragments = summary.fragments.max(memory);
        summary.waiting = summary.waiting.max(waiting);
        summary.connections = summary.connections.max(connections);
        let local = &mut self.intercept.local_clients;
        if local.len() > 1000 {
            local.clear();
        }
    }

    // --- frames ----------------------------------------------------------------------------------

    /// Passes a frame through the packet path. Returns the sent frames by port.
    fn pass(&mut self, from: Side, frame: &Frame) -> Vec<(PortId, Frame)> {
        let port = match from {
            Side::Clients => CLIENTS,
            Side::Servers => SERVERS,
            Side::Host => HOST,
        };
        if let Some(programs) = &mut self.programs
            && from != Side::Host
        {
            let now = self.now + STEP;
            if self.director.next_wakeup().is_some_and(|at| at <= now) {
                self.director.advance(now);
            }
            let tunnels = self.pipeline.common().tunnels();
            if let Some(sent) = programs.pass(port, frame, &self.director.control, tunnels, now) {
                self.now = now;
                self.last = Some(sent.clone());
                self.left
                    .iter_mut()
                    .for_each(|left| left.push(sent.clone()));
                return vec![sent];
            }
        }
        // An earlier frame may have reduced the free space of the buffer.
        if self.slot.tailroom() + self.slot.len() < lvs_packet::frame::MAX_FRAME {
            self.slot = Frame::new();
        }
        self.slot.clear();
        assert!(
            self.slot.extend(frame.bytes()),
            "the buffer is too short for the frame"
        );
        self.slot.offload = frame.offload;
        let before = self.pipeline.counters.clone();
        let env = Env {
            net: &self.net,
            intercept: &self.intercept,
            pmtu_disc: self.director.control.sysctls().pmtu_disc,
        };
        // The clock advances with every frame.
        self.now = self.now + STEP;
        let slots = std::slice::from_mut(&mut self.slot);
        if let Some(programs) = &mut self.programs {
            let mut decide = Noting::new(&mut self.director);
            self.pipeline
                .process(port, slots, &env, &mut decide, self.now, &mut self.output);
            if let Some(conn) = decide.forwarded {
                let tunnels = self.pipeline.common().tunnels();
                programs.publish(conn, &mut self.director, &self.net, tunnels, self.now);
            }
        } else {
            let mut decide = Either {
                director: &mut self.director,
                passed: self.passed,
            };
            self.pipeline
                .process(port, slots, &env, &mut decide, self.now, &mut self.output);
            self.passed = decide.passed;
        }
        let after = &self.pipeline.counters;
        let whole = after.reassembled - before.reassembled;
        assert_eq!(after.received - before.received, 1);
        assert_eq!(
            after.accounted() - before.accounted(),
            1 + whole,
            "a frame does not have exactly one fate: {}",
            hex(frame.bytes())
        );
        assert!(whole <= 1);
        let requests = std::mem::take(&mut self.output.requests);
        assert!(
            requests.len() <= 64,
            "one frame causes too many requests: {requests:?}"
        );
        for request in requests {
            match request {
                Request::Resolve(port, addr) => self.asked.push((port, addr)),
                Request::InterceptLocalClient(client) => {
                    self.intercept.local_clients.insert(client);
                }
                Request::AddressConflict { .. }
                | Request::Confirm(..)
                | Request::ListenerQuery(..) => {}
            }
        }
        let env = Env {
            net: &self.net,
            intercept: &self.intercept,
            pmtu_disc: self.director.control.sysctls().pmtu_disc,
        };
        self.pipeline
            .local_clients_intercepted(&env, self.now, &mut self.output);
        let after = &self.pipeline.counters;
        let mut sent = Vec::new();
        for (port, frames) in self.output.queues() {
            sent.extend(frames.iter().map(|frame| (port, frame.clone())));
        }
        let emitted = after.emitted - before.emitted;
        assert_eq!(
            emitted,
            sent.len() as u64,
            "the counter of sent frames differs from the number of sent frames"
        );
        self.output.recycle();
        if let Some(last) = sent.last() {
            self.last = Some(last.clone());
        }
        self.left
            .iter_mut()
            .for_each(|left| left.extend_from_slice(&sent));
        sent
    }

    fn judge_shot(&mut self, shot: &Shot) -> Came {
        let bytes = shot.frame.bytes();
        let mut offload = shot.frame.offload;
        let ip = if shot.from == Side::Host {
            bytes
        } else {
            if let Some(partial) = &mut offload.checksum {
                match partial.start.checked_sub(14) {
                    Some(start) => partial.start = start,
                    // The frame ends within the link header.
                    None => offload = Offload::default(),
                }
            }
            bytes.get(14..).unwrap_or_default()
        };
        came(ip, &offload)
    }

    /// Checks all packets that were sent in response to a packet.
    fn judge(&mut self, came: &Came, sent: Vec<(PortId, Frame)>, shot: &Shot) {
        self.summary.came_right += u64::from(came.health == Health::Right);
        if let Err(error) = self.check_all(came, sent) {
            panic!(
                "{}: {error}\n{came:?}, from {:?}: {}\n{:?}",
                self.scene.method.name,
                shot.from,
                hex(shot.frame.bytes()),
                shot.frame.offload
            );
        }
    }

    fn check_all(&mut self, came: &Came, sent: Vec<(PortId, Frame)>) -> Result<(), String> {
        let mut fragments: BTreeMap<(PortId, Vec<u8>), Vec<Vec<u8>>> = BTreeMap::new();
        for (port, mut frame) in sent {
            if port != HOST {
                let kind = &frame.bytes()[12..14];
                if kind == [8, 6] {
                    continue;
                }
                let version = if kind == [8, 0] { 4 } else { 6 };
                if frame.bytes()[14] >> 4 != version {
                    return Err("the EtherType is not that of the packet".into());
                }
                if !frame.pull_front(14) {
                    return Err("a frame without a packet was sent".into());
                }
            }
            let ip = frame.bytes();
            let Some(parts) = oracle::parts(ip) else {
                return Err(format!("a wrong IP header was sent: {}", hex(ip)));
            };
            if parts.len != ip.len() {
                return Err(format!(
                    "a packet of {} bytes was sent with the length field {}",
                    ip.len(),
                    parts.len
                ));
            }
            if let Some(info) = self.net.port(port)
                && frame.offload.segments.is_none()
                && ip.len() > info.mtu as usize
            {
                return Err(format!(
                    "a packet of {} bytes was sent on a link with MTU {}",
                    ip.len(),
                    info.mtu
                ));
            }
            if let Some(info) = self.net.port(port)
                && !info.offload
                && (frame.offload.segments.is_some() || frame.offload.checksum.is_some())
                && port != HOST
            {
                return Err(
                    "a frame with an offload request was sent to a port without offloads".into(),
                );
            }
            if came.is_tiny(ip) {
                continue;
            }
            if !parts.fragment {
                self.check(came, port, ip, &parts, &frame.offload)?;
                continue;
            }
            let id = if parts.src.is_ipv4() {
                ip[4..6].to_vec()
            } else {
                ip[parts.l4 - 4..parts.l4].to_vec()
            };
            fragments.entry((port, id)).or_default().push(ip.to_vec());
        }
        for ((port, _), pieces) in fragments {
            let whole = packet::join(&pieces)?;
            let parts = oracle::parts(&whole).ok_or("the sent fragments do not make a packet")?;
            self.check(came, port, &whole, &parts, &Offload::default())?;
        }
        Ok(())
    }

    /// Checks a packet that was sent on `port` because of the received packet `came`: its offload
    /// request and checksums. Of a tunnel packet of the director, also checks the packet inside.
    fn check(
        &mut self,
        came: &Came,
        port: PortId,
        ip: &[u8],
        parts: &Parts,
        offload: &Offload,
    ) -> Result<(), String> {
        let mut ip = ip.to_vec();
        oracle::finish(&mut ip, parts, offload)?;
        let health = oracle::health(&ip, parts);
        self.summary.right += u64::from(health == Health::Right);
        let tunnelled = self.scene.method.forwarding == Forwarding::Tunnel
            && port == SERVERS
            && parts.src == self.scene.director[1]
            && self.scene.servers.contains(&parts.dst)
            && matches!(parts.protocol, 4 | 41 | 47 | 17);
        if tunnelled {
            let inner = self.inside(&ip, parts, health)?;
            self.summary.tunnelled += 1;
            let inner_parts = oracle::parts(inner)
                .ok_or("a tunnel packet was sent with an invalid inner header")?;
            if came.is_tiny(inner) {
                return Ok(());
            }
            if inner_parts.fragment {
                return Err("a fragment was sent inside a tunnel packet".into());
            }
            let health = oracle::health(inner, &inner_parts);
            return keeps(came, &inner_parts, health, inner);
        }
        keeps(came, parts, health, &ip)
    }

    /// The packet inside a tunnel packet, whose headers are checked.
    fn inside<'p>(&self, ip: &'p [u8], parts: &Parts, health: Health) -> Result<&'p [u8], String> {
        let l4 = &ip[parts.l4..];
        let inner = match (self.scene.method.tunnel, parts.protocol) {
            (Tunnel::Ipip, 4 | 41) => Some(l4),
            (Tunnel::Gre { .. }, 47) if l4.first() == Some(&0x80) => {
                if oracle::internet(l4) != 0 {
                    return Err("a GRE packet was sent with a wrong checksum".into());
                }
                l4.get(8..)
            }
            (Tunnel::Gre { .. }, 47) => l4.get(4..),
            (Tunnel::Gue { .. }, 17) => {
                // Over IPv6, only tunnels may omit the checksum (RFC 6935).
                let bare = self.scene.method.tunnel.checksum() == TunnelChecksum::None;
                let absent = bare && l4.get(6..8) == Some(&[0, 0]);
                if !absent && !matches!(health, Health::Right | Health::Absent) {
                    return Err("a GUE packet was sent with a wrong checksum".into());
                }
                l4.get(12..)
            }
            _ => None,
        };
        inner.ok_or_else(|| format!("not a packet of the scene's tunnel: {}", hex(ip)))
    }
}

/// A director that permits or forbids the userspace fast path.
struct Either<'a> {
    director: &'a mut Director,
    passed: Option<u64>,
}

impl Decide for Either<'_> {
    fn packet(&mut self, meta: &PacketMeta<'_>, now: Instant) -> Verdict {
        self.director.packet(meta, now)
    }

    fn icmp_error(&mut self, error: &IcmpError, now: Instant) -> Verdict {
        self.director.icmp_error(error, now)
    }

    fn knows(&self, tuple: &Tuple) -> bool {
        self.director.knows(tuple)
    }

    fn packets_of(&self, conn: ConnId) -> u32 {
        self.director.packets_of(conn)
    }

    fn ahead(&self, protocol: Protocol, src: SocketAddrV4, dst: SocketAddrV4) -> Option<Ahead> {
        self.passed?;
        Decide::ahead(self.director, protocol, src, dst)
    }

    fn aim(&self, ahead: &mut Ahead) {
        self.director.aim(ahead);
    }

    fn packet_ahead(&mut self, meta: &PacketMeta<'_>, ahead: &Ahead, now: Instant) -> Verdict {
        self.director.packet_ahead(meta, ahead, now)
    }

    fn pass(&mut self, packet: &Plain, ahead: &Ahead, now: Instant) -> Option<Passed> {
        let passed = self.director.pass(packet, ahead, now)?;
        self.passed = self.passed.map(|count| count + 1);
        Some(passed)
    }
}

fn came(ip: &[u8], offload: &Offload) -> Came {
    let mut ip = ip.to_vec();
    // A super-packet may have a length of 0 in its IP header.
    let at = if ip.first().is_some_and(|byte| byte >> 4 == 6) {
        4
    } else {
        2
    };
    if offload.segments.is_some() && ip.get(at..at + 2) == Some(&[0, 0]) {
        let right = oracle::header_is_right(&ip);
        packet::relength(&mut ip);
        if !right {
            // `relength` has repaired the header checksum, but a wrong one must stay wrong.
            ip.truncate(0);
        }
    }
    let Some(parts) = oracle::parts(&ip) else {
        return Came {
            protocol: None,
            health: Health::Unknown,
            about_wrong: true,
            tiny: None,
        };
    };
    let finished = oracle::finish(&mut ip, &parts, offload);
    Came {
        protocol: Some(parts.protocol),
        health: match finished {
            Ok(()) => oracle::health(&ip, &parts),
            Err(_) => Health::Wrong,
        },
        about_wrong: parts.protocol == 1
            && (!quotes_right(&ip, &parts) || quotes_tunnel(&ip, &parts)),
        tiny: tiny(&ip, &parts),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the IPv4 header that an ICMP error quotes is correct. True for other packets, and if no
/// complete IPv4 header is quoted.
fn quotes_right(ip: &[u8], parts: &Parts) -> bool {
    let quoted = ip.get(parts.l4 + 8..).unwrap_or_default();
    let len = usize::from(quoted.first().map_or(0, |byte| byte & 15)) * 4;
    let is_error = matches!(ip.get(parts.l4), Some(3 | 4 | 11));
    let whole = len >= 20 && quoted.len() >= len && quoted[0] >> 4 == 4;
    !(parts.protocol == 1 && is_error && whole) || oracle::internet(&quoted[..len]) == 0
}

fn quotes_tunnel(ip: &[u8], parts: &Parts) -> bool {
    matches!(ip.get(parts.l4 + 8 + 9), Some(4 | 17 | 41 | 47))
}

/// Checks that a sent packet has a correct checksum, unless it already arrived with a wrong or
/// unknown one. A checksum may also be absent. For an ICMP error, also checks the quoted header.
fn keeps(came: &Came, parts: &Parts, health: Health, ip: &[u8]) -> Result<(), String> {
    let made_here = came.protocol != Some(parts.protocol);
    let kept = match came.health {
        _ if made_here => matches!(health, Health::Right | Health::Unknown | Health::Absent),
        Health::Right => health == Health::Right,
        Health::Absent => matches!(health, Health::Absent | Health::Right),
        Health::Wrong | Health::Unknown => true,
    };
    if !kept {
        return Err(format!(
            "a packet was sent with a {health:?} checksum: {}",
            hex(ip)
        ));
    }
    if !came.about_wrong && came.protocol.is_some() && !quotes_right(ip, parts) {
        return Err(format!(
            "an ICMP error was sent that quotes a wrong header: {}",
            hex(ip)
        ));
    }
    Ok(())
}
