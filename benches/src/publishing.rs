//! Measures the cost of offloading a connection to the kernel fast path: plain stores into memory
//! that the kernel reads. For comparison, it measures `bpf_map_update_elem`, which a table that
//! only the kernel writes would need.

use anyhow::Result;
use lvs_core::memory::Memory;
use lvs_core::{
    ConnId, Director, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig,
    ServiceConfig, ServiceKey, Transport, Tuple, Verdict,
};
use lvs_dataplane::fast_path::FastPath;
use lvs_sys::SharedMap;

use crate::memory::{Clients, vip};

/// Number of connections, and of keys in the hash map.
const CONNECTIONS: u32 = 100_000;

/// Connections in memory that the kernel reads, and a BPF hash map with as many keys, which are as
/// long as the connections' tuples.
#[derive(Debug)]
pub struct Publishing {
    director: Director,
    _kernel: FastPath,
    connections: Vec<ConnId>,
    map: SharedMap<3, 1>,
    epoch: u16,
}

impl Publishing {
    /// Opens the connections, and fills the map.
    ///
    /// # Errors
    /// If BPF is not permitted.
    pub fn new() -> Result<Self> {
        let options = Options {
            max_connections: 1 << 20,
            ..Options::default()
        };
        let mut opened = None;
        let mut director = Director::new_in(options, |layout| {
            let kernel = FastPath::open(layout, Instant::ZERO);
            let both = kernel.and_then(|kernel| Ok((kernel.memory(0)?, kernel)));
            let (memory, kernel) = match both {
                Ok((memory, kernel)) => (memory, Ok(kernel)),
                Err(error) => (Memory::heap(layout), Err(error)),
            };
            opened = Some(kernel);
            memory
        });
        let kernel = opened.expect("the director requests its memory")?;
        let service = ServiceKey::udp(vip());
        let server = ServerConfig::new(1, Forwarding::Nat);
        let config = ServiceConfig::new(Family::V4, "rr");
        let control = &mut director.control;
        control.add_service(service, config, None)?;
        control.add_server(&service, "10.1.0.1:80".parse()?, &server, Instant::ZERO)?;
        let map = SharedMap::new("lvs_bench", CONNECTIONS)?;
        let mut connections = Vec::new();
        for n in 0..CONNECTIONS {
            let client = Clients { bits: 10 }.of(n);
            let meta = PacketMeta::new(
                Hook::Local,
                Tuple::udp(client.into(), vip()),
                Transport::Udp(&[]),
                28,
            );
            if let Verdict::Forward(forward) = director.handle_packet(&meta, Instant::ZERO) {
                connections.extend(forward.conn);
            }
            map.insert(&key(n), &[1])?;
        }
        Ok(Self {
            director,
            _kernel: kernel,
            connections,
            map,
            epoch: 0,
        })
    }

    /// Measures the mean time to offload a connection, over 100,000 connections, in nanoseconds.
    pub fn publish(&mut self) -> f64 {
        self.epoch = self.epoch % 1000 + 1;
        let start = std::time::Instant::now();
        for &conn in &self.connections {
            assert!(self.director.shard.publish(conn, self.epoch, Some(1)));
        }
        nanoseconds(start)
    }

    /// Measures the mean time of a `bpf_map_update_elem` call, over 100,000 calls, in nanoseconds.
    ///
    /// # Errors
    /// If the kernel refuses an entry.
    pub fn update(&mut self) -> Result<f64> {
        let start = std::time::Instant::now();
        for n in 0..CONNECTIONS {
            self.map.insert(&key(n), &[1])?;
        }
        Ok(nanoseconds(start))
    }
}

fn key(n: u32) -> [u64; 3] {
    [
        u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        n.into(),
        17,
    ]
}

fn nanoseconds(start: std::time::Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CONNECTIONS)
}
