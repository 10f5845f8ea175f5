//! Measures the packet path in memory: makes directors with connections, and measures the time for
//! their packets, for new connections, and for a new Maglev table.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant as Clock};

use anyhow::{Result, ensure};
use lvs_core::sched::MaglevHashing;
use lvs_core::{
    Control, Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, Pool, Protocol,
    Request, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey, TcpFlags, Verdict,
};
use lvs_dataplane::dataplane::rig::{Rig, RigWorker};
use lvs_dataplane::netlink::NetState;
use lvs_packet::frame::Frame;
use lvs_packet::net::PortInfo;
use lvs_packet::wire::Mac;

use crate::machine;

/// Number of frames in a batch, as the dataplane receives them.
pub const BATCH: usize = 64;
/// Number of packets in one measurement.
const PACKETS: u32 = 1 << 20;
/// The virtual service.
const VIP: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 254);
const PORT: u16 = 80;
const OWN_MAC: Mac = Mac([2, 0, 0, 0, 13, 0]);
const SERVER_MAC: Mac = Mac([2, 0, 0, 0, 5, 0]);
const GATEWAY_MAC: Mac = Mac([2, 0, 0, 0, 12, 0]);

/// The clients of a director's connections: connection number `n` belongs to client address number
/// `n mod 2^bits`.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Binary logarithm of the number of addresses.
    pub bits: u32,
}

impl Clients {
    /// Returns the client address and port of a connection.
    #[must_use]
    pub fn of(self, connection: u32) -> (Ipv4Addr, u16) {
        let addr = 0x0a80_0000 | (connection & ((1 << self.bits) - 1));
        let port = 1024 + (connection >> self.bits);
        (
            Ipv4Addr::from_bits(addr),
            u16::try_from(port).unwrap_or(u16::MAX),
        )
    }
}

/// The virtual service of every benchmark.
#[must_use]
pub fn vip() -> SocketAddr {
    (VIP, PORT).into()
}

/// A segment from `client` to `dst`.
#[must_use]
pub fn segment(client: impl Into<SocketAddr>, dst: SocketAddr, flags: u8) -> PacketMeta<'static> {
    PacketMeta::tcp(Hook::Local, client.into(), dst, flags)
}

/// Services, servers and limits of a director.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The scheduler of all services.
    pub scheduler: &'static str,
    /// Number of services; the first is [`vip`].
    pub services: u32,
    /// Number of servers of the first service; each other service has one server.
    pub servers: u32,
    /// Maximum number of connections.
    pub room: usize,
    /// Number of workers.
    pub shards: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            scheduler: "wlc",
            services: 1,
            servers: 8,
            room: 1 << 21,
            shards: 1,
        }
    }
}

impl Setup {
    fn options(&self) -> Options {
        Options {
            max_connections: self.room,
            shards: self.shards,
            ..Options::default()
        }
    }

    /// Adds the services and their servers.
    ///
    /// # Panics
    /// If a service or server is refused: the benchmark would measure nothing.
    fn fill(&self, control: &mut Control) {
        for number in 0..self.services {
            let addr = SocketAddr::from((Ipv4Addr::from_bits(VIP.to_bits() + number), PORT));
            let service = ServiceKey::tcp(addr);
            let config = ServiceConfig::new(Family::V4, self.scheduler);
            control
                .add_service(service, config, None)
                .expect("the address is not in use");
            let servers = if number == 0 { self.servers } else { 1 };
            for server in 0..servers {
                let addr = SocketAddr::from((Ipv4Addr::from_bits(SERVER.to_bits() + server), PORT));
                let weight = i32::try_from(server % 4).unwrap_or(0) + 1;
                let config = ServerConfig::new(weight, Forwarding::Nat);
                control
                    .add_server(&service, addr, &config, Instant::ZERO)
                    .expect("the address is not in use");
            }
        }
    }

    /// A director without connections.
    #[must_use]
    pub fn director(&self) -> Director {
        let mut director = Director::new(self.options());
        self.fill(&mut director.control);
        director
    }

    /// A director with established connections.
    ///
    /// # Panics
    /// If a connection is refused.
    #[must_use]
    pub fn director_with(&self, connections: u32, clients: Clients) -> Director {
        let mut director = self.director();
        for n in 0..connections {
            for flags in [TcpFlags::SYN, TcpFlags::ACK] {
                let meta = segment(clients.of(n), vip(), flags);
                let verdict = director.handle_packet(&meta, Instant::ZERO);
                assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
            }
        }
        director
    }

    /// The workers of a director and a simulated network: one server, and clients behind a gateway,
    /// all on one link.
    ///
    /// # Errors
    /// If no file descriptors are available.
    pub fn rig(&self) -> Result<Rig> {
        let mut control = Control::new(self.options());
        self.fill(&mut control);
        let network = NetState::of_link(1, (SERVER.into(), 24), (SERVER.into(), SERVER_MAC.0));
        let network = network.with_gateway(
            1,
            (Ipv4Addr::new(10, 128, 0, 0).into(), 9),
            (GATEWAY.into(), GATEWAY_MAC.0),
        );
        let port = PortInfo {
            mac: OWN_MAC,
            mtu: 1500,
            ethernet: true,
            offload: true,
            gives_back: true,
        };
        let vips: Vec<IpAddr> = vec![VIP.into()];
        Rig::new(control, network, port, &vips)
    }
}

/// A worker of a director, with established connections to one server.
#[derive(Debug)]
pub struct Pipeline {
    worker: RigWorker,
    frames: Vec<Frame>,
    /// Connections in the random order of their packets.
    order: Vec<u32>,
    clients: Clients,
    /// Whether the packets are replies of servers, instead of requests of clients.
    pub replies: bool,
    forward: [u8; 64],
    reply: [u8; 64],
}

impl Pipeline {
    /// Opens the connections.
    ///
    /// # Errors
    /// If no file descriptors are available, or a packet is not forwarded.
    pub fn new(connections: u32, clients: Clients) -> Result<Self> {
        let setup = Setup {
            servers: 1,
            room: (connections as usize).next_power_of_two().max(1 << 16),
            ..Setup::default()
        };
        let mut rig = setup.rig()?;
        let worker = rig.workers.pop().expect("the rig has a worker");
        Self::of(worker, 0..connections, clients)
    }

    fn of(worker: RigWorker, connections: std::ops::Range<u32>, clients: Clients) -> Result<Self> {
        let mut pipeline = Self {
            worker,
            frames: (0..BATCH).map(|_| Frame::new()).collect(),
            order: Vec::new(),
            clients,
            replies: false,
            forward: template(VIP, false),
            reply: template(SERVER, true),
        };
        for flags in [TcpFlags::SYN, TcpFlags::ACK] {
            pipeline.forward[47] = flags;
            let mut first = connections.start;
            while first < connections.end {
                let count = BATCH.min((connections.end - first) as usize);
                let batch: Vec<u32> = (first..).take(count).collect();
                pipeline.send(&batch)?;
                first += u32::try_from(count)?;
            }
        }
        pipeline.worker.enlarge_pages();
        let mut random = 0x1234_5678_9abc_def1_u64;
        let span = u64::from(connections.end - connections.start);
        pipeline.order = (0..PACKETS)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                connections.start + u32::try_from(random % span).unwrap_or(0)
            })
            .collect();
        Ok(pipeline)
    }

    /// Processes a packet of each of these connections. Returns the duration.
    fn send(&mut self, connections: &[u32]) -> Result<Duration> {
        let template = if self.replies {
            &self.reply
        } else {
            &self.forward
        };
        let frames = &mut self.frames[..connections.len()];
        write(frames, connections, template, self.clients, self.replies);
        let start = Clock::now();
        let sent = self.worker.process(frames);
        let took = start.elapsed();
        ensure!(
            sent == connections.len(),
            "{sent} of {} packets were forwarded",
            connections.len()
        );
        Ok(took)
    }

    /// Mean nanoseconds for a packet, over a million packets of random connections. Includes the
    /// time to read the clock for each batch, but not the time to write the packets, which is the
    /// work of a sender.
    ///
    /// # Errors
    /// If a packet is not forwarded.
    pub fn measure(&mut self) -> Result<f64> {
        let order = std::mem::take(&mut self.order);
        let mut time = Duration::ZERO;
        for batch in order.chunks(BATCH) {
            time += self.send(batch)?;
        }
        self.worker.timers();
        self.order = order;
        Ok(time.as_secs_f64() * 1e9 / f64::from(PACKETS))
    }
}

/// Two workers of one director, each with separate connections.
#[derive(Debug)]
pub struct Pair {
    workers: Vec<Pipeline>,
}

impl Pair {
    /// Opens `connections` connections for each worker.
    ///
    /// # Errors
    /// As [`Pipeline::new`].
    pub fn new(connections: u32, clients: Clients) -> Result<Self> {
        let setup = Setup {
            servers: 1,
            room: (connections as usize).next_power_of_two().max(1 << 16),
            shards: 2,
            ..Setup::default()
        };
        let workers = setup.rig()?.workers.into_iter();
        let workers = (0..).zip(workers).map(|(number, worker)| {
            let first = number * connections;
            Pipeline::of(worker, first..first + connections, clients)
        });
        Ok(Self {
            workers: workers.collect::<Result<_>>()?,
        })
    }

    /// Packets a second of the first `count` workers together, each on a core of its own.
    ///
    /// # Errors
    /// As [`Pipeline::measure`].
    pub fn measure(&mut self, count: usize) -> Result<f64> {
        let workers = (0..).zip(self.workers.iter_mut().take(count));
        let results: Vec<Result<f64>> = thread::scope(|scope| {
            let threads: Vec<_> = workers
                .map(|(number, worker)| {
                    scope.spawn(move || {
                        machine::pin(1 - number)?;
                        worker.measure()
                    })
                })
                .collect();
            let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
            ended
                .map(|result| {
                    result.unwrap_or_else(|_| anyhow::bail!("a thread of a worker panicked"))
                })
                .collect()
        });
        let mut rate = 0.0;
        for result in results {
            rate += 1e9 / result?;
        }
        Ok(rate)
    }
}

/// Writes a frame of each connection.
fn write(
    frames: &mut [Frame],
    connections: &[u32],
    template: &[u8; 64],
    clients: Clients,
    replies: bool,
) {
    for (frame, connection) in frames.iter_mut().zip(connections) {
        let (addr, port) = clients.of(*connection);
        frame.clear();
        let whole = frame.extend(template);
        debug_assert!(whole, "a frame has no room for 64 bytes");
        write_client(frame.bytes_mut(), template, (addr, port), replies);
    }
}

/// Copies the client's address and port into `bytes`, a copy of `template`: as the source or, with
/// `reply`, as the destination. Sets the checksums.
fn write_client(bytes: &mut [u8], template: &[u8; 64], client: (Ipv4Addr, u16), reply: bool) {
    let (addr, port) = client;
    let (addr_at, port_at) = if reply { (30, 36) } else { (26, 34) };
    bytes[addr_at..addr_at + 4].copy_from_slice(&addr.octets());
    bytes[port_at..port_at + 2].copy_from_slice(&port.to_be_bytes());
    let [a, b, c, d] = addr.octets();
    let sum = u32::from(u16::from_be_bytes([a, b])) + u32::from(u16::from_be_bytes([c, d]));
    let ip_sum = u32::from(u16::from_be_bytes([template[24], template[25]]));
    bytes[24..26].copy_from_slice(&(!fold(ip_sum + sum)).to_be_bytes());
    let tcp_sum = u32::from(u16::from_be_bytes([template[50], template[51]]));
    bytes[50..52].copy_from_slice(&(!fold(tcp_sum + sum + u32::from(port))).to_be_bytes());
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

/// Returns an Ethernet frame of 64 bytes with a TCP segment. The checksum fields contain the sums
/// of all fields except the client's address and port.
fn template(other: Ipv4Addr, reply: bool) -> [u8; 64] {
    let mut frame = [0; 64];
    frame[..6].copy_from_slice(&OWN_MAC.0);
    frame[6..12].copy_from_slice(if reply { &SERVER_MAC.0 } else { &GATEWAY_MAC.0 });
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[17] = 50;
    frame[20] = 0x40;
    frame[22..24].copy_from_slice(&[64, 6]);
    let (addr_at, port_at) = if reply { (26, 34) } else { (30, 36) };
    frame[addr_at..addr_at + 4].copy_from_slice(&other.octets());
    frame[port_at..port_at + 2].copy_from_slice(&PORT.to_be_bytes());
    frame[46] = 5 << 4;
    frame[47] = TcpFlags::ACK;
    let sum = |bytes: &[u8]| {
        let words = bytes.chunks_exact(2);
        words
            .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
            .sum::<u32>()
    };
    let ip = fold(sum(&frame[14..34]));
    // Addresses, protocol, length of the segment, and the segment.
    let tcp = fold(sum(&frame[26..34]) + 6 + 30 + sum(&frame[34..64]));
    frame[24..26].copy_from_slice(&ip.to_be_bytes());
    frame[50..52].copy_from_slice(&tcp.to_be_bytes());
    frame
}

/// A complete Ethernet frame with a segment to the service: 64 bytes.
#[must_use]
pub fn example() -> Vec<u8> {
    let template = template(VIP, false);
    let mut frame = template;
    let client = (Ipv4Addr::new(10, 128, 0, 1), 40_000);
    write_client(&mut frame, &template, client, false);
    frame.to_vec()
}

/// Nanoseconds for a new connection: the mean of 50,000 in a director without connections.
///
/// # Panics
/// If a connection is refused.
#[must_use]
pub fn new_connection(setup: &Setup, dst: SocketAddr) -> f64 {
    const CONNECTIONS: u32 = 50_000;
    let clients = Clients { bits: 16 };
    let mut director = setup.director();
    // The first choice is not counted, because the scheduler builds its structures at it.
    let first = segment((Ipv4Addr::new(10, 200, 0, 1), 1), dst, TcpFlags::SYN);
    let _ = director.handle_packet(&first, Instant::ZERO);
    let start = Clock::now();
    for n in 0..CONNECTIONS {
        let meta = segment(clients.of(n), dst, TcpFlags::SYN);
        let verdict = director.handle_packet(&meta, Instant::ZERO);
        assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CONNECTIONS)
}

/// A director in which as many connections expire as are opened. Each new connection advances its
/// simulated clock.
#[derive(Debug)]
pub struct Churn {
    director: Director,
    next: u32,
    now: Instant,
}

/// New connections per second of simulated time. Each stays 60 s in `SYN_RECV`, so the table has 60
/// times as many connections.
const CHURN_PER_SECOND: u32 = 16_000;

impl Churn {
    /// Opens connections until as many expire as are opened.
    ///
    /// # Panics
    /// If a connection is refused.
    #[must_use]
    pub fn new() -> Self {
        let mut churn = Self {
            director: Setup::default().director(),
            next: 0,
            now: Instant::ZERO,
        };
        churn.open(CHURN_PER_SECOND * 64);
        churn
    }

    fn open(&mut self, count: u32) {
        let clients = Clients { bits: 20 };
        for _ in 0..count {
            let meta = segment(clients.of(self.next), vip(), TcpFlags::SYN);
            let verdict = self.director.handle_packet(&meta, self.now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{verdict:?}");
            self.next = (self.next + 1) % (50_000 << 10);
            if self.next.is_multiple_of(64) {
                self.now =
                    self.now + Duration::from_nanos(64_000_000_000 / u64::from(CHURN_PER_SECOND));
                self.director.advance(self.now);
            }
        }
    }

    /// Connections a second, by the wall clock; for each new connection, an earlier one ends.
    ///
    /// # Errors
    /// If fewer connections end than are opened.
    pub fn measure(&mut self) -> Result<f64> {
        const CONNECTIONS: u32 = 500_000;
        let start = Clock::now();
        self.open(CONNECTIONS);
        let time = start.elapsed();
        let left = self.director.shard.len();
        let most = CHURN_PER_SECOND as usize * 64;
        ensure!(
            left <= most,
            "{left} connections are left, but at most {most} can be unexpired"
        );
        Ok(f64::from(CONNECTIONS) / time.as_secs_f64())
    }
}

impl Default for Churn {
    fn default() -> Self {
        Self::new()
    }
}

/// Milliseconds in which Maglev hashing of `servers` servers recomputes its table after a change.
///
/// # Panics
/// If a change is refused.
#[must_use]
pub fn maglev(servers: u32) -> f64 {
    let scheduler = MaglevHashing::with_table_index(16).expect("the index is valid");
    let mut pool = Pool::new(Box::new(scheduler));
    let config = ServerConfig::new(1, Forwarding::Nat);
    let server = |n: u32| SocketAddr::from((Ipv4Addr::from_bits(0x0a01_0000 + n), PORT));
    for n in 0..servers {
        pool.insert(server(n), &config)
            .expect("the address is not in use");
    }
    let request = Request {
        client: server(servers),
        virt: vip(),
        protocol: Protocol::TCP,
        flags: ServiceFlags::default(),
        now: Instant::ZERO,
    };
    assert!(pool.pick(&request).is_some());
    pool.insert(server(servers), &config)
        .expect("the address is not in use");
    let start = Clock::now();
    assert!(pool.pick(&request).is_some());
    start.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use lvs_packet::parse;

    use super::*;

    #[test]
    fn example_packet_of_memory_benchmark_is_valid() {
        let bytes = example();
        let packet = parse::ipv4(&bytes[14..], false).expect("the packet is parsed");
        assert_eq!(packet.src, Ipv4Addr::new(10, 128, 0, 1));
    }

    #[test]
    fn measured_pipeline_forwards_requests_and_replies() {
        let mut pipeline =
            Pipeline::new(1000, Clients { bits: 10 }).expect("all packets are forwarded");
        assert!(pipeline.measure().expect("all requests are forwarded") > 0.0);
        pipeline.replies = true;
        assert!(pipeline.measure().expect("all replies are forwarded") > 0.0);
    }
}
