//! The functions of the fuzz targets below `fuzz/`. A test also calls them with random bytes. Each
//! panics on a fault.

pub mod naive;
mod rules;

use std::sync::Arc;

use lvs_core::sync::bulk;
use lvs_core::sync::services::{SERVICE_LEN, ServiceDigests};
use lvs_core::{
    Director, Forwarding, Instant, Options, Server, ServerConfig, Service, ServiceConfig,
    ServiceFlags, ServiceKey, TcpFlags, sync,
};

pub use self::rules::rules;
use crate::hostile::{Entropy, squall};
use naive::{Op, Pair};

/// Name of a fuzz target, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All fuzz targets.
pub const TARGETS: [Target; 6] = [
    ("pipeline", pipeline),
    ("operations", operations),
    ("rules", rules),
    ("sync_decode", sync_decode),
    ("peer_decode", peer_decode),
    ("replies", replies),
];

/// Passes a configuration and frames through a dataplane in memory. Each frame must have one fate,
/// each sent frame must be correct, and all memory must be free at the end.
pub fn pipeline(bytes: &[u8]) {
    squall(bytes);
}

/// Passes the bytes to every parser of a health check's answer, and to the parser of DNS answers.
pub fn replies(bytes: &[u8]) {
    lvsd::health::probe::fuzz::reply(bytes);
    lvsd::sources::fuzz_dns(bytes);
}

/// Applies operations to a director and to a naive model of it, and compares both after each.
pub fn operations(bytes: &[u8]) {
    let mut entropy = Entropy::from_bytes(bytes);
    let scheduler = entropy.pick(&["rr", "wlc", "sed"]);
    let persistent = entropy.one_in(2);
    let mut pair = Pair::new(scheduler, persistent);
    while !entropy.is_empty() {
        pair.apply(&operation(&mut entropy));
    }
    pair.finish();
}

fn operation(entropy: &mut Entropy<'_>) -> Op {
    fn number(entropy: &mut Entropy<'_>, limit: u8) -> u8 {
        entropy.u8() % limit
    }
    fn flags(entropy: &mut Entropy<'_>) -> u8 {
        const ACK: u8 = TcpFlags::ACK;
        const SYN: u8 = TcpFlags::SYN;
        entropy.pick(&[SYN, ACK, SYN | ACK, TcpFlags::FIN | ACK, TcpFlags::RST, 0])
    }
    fn weight(entropy: &mut Entropy<'_>) -> i32 {
        i32::from(number(entropy, 8))
    }
    fn thresholds(entropy: &mut Entropy<'_>) -> (u32, u32) {
        let (a, b) = (number(entropy, 5), number(entropy, 5));
        (a.max(b).into(), a.min(b).into())
    }
    match entropy.below(27) {
        0..=11 => Op::FromClient(number(entropy, 12), flags(entropy)),
        12..=17 => Op::FromServer(number(entropy, 4), number(entropy, 12), flags(entropy)),
        18 | 19 => {
            let (server, weight) = (number(entropy, 4), weight(entropy));
            let (upper, lower) = thresholds(entropy);
            Op::Add(server, weight, upper, lower, entropy.one_in(2))
        }
        20 | 21 => {
            let (server, weight) = (number(entropy, 4), weight(entropy));
            let (upper, lower) = thresholds(entropy);
            Op::Edit(server, weight, upper, lower)
        }
        22 => Op::Delete(number(entropy, 4)),
        23..=25 => {
            let factor = entropy.pick(&[1, 1, 10]);
            Op::Wait(u64::from(entropy.u8()) * factor)
        }
        _ => {
            let names = [
                "expire_nodest_conn",
                "expire_quiescent_template",
                "conn_reuse_mode",
            ];
            Op::Sysctl(entropy.pick(&names), i32::from(number(entropy, 4)))
        }
    }
}

/// Parses messages of a peer, and applies them twice. For any content, each connection must be
/// either owned or borrowed, and the digests of both kinds must contain no removed connections.
pub fn peer_decode(bytes: &[u8]) {
    const PEER: usize = 7;
    let (&choice, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let mut sent = rest.to_vec();
    // Corrects the lengths of the first items: most random lengths would stop the parser.
    let mut at = 0;
    while choice & 1 == 0 && at + 44 <= sent.len() {
        let v6 = sent[at + 8] & 1 == 1;
        let len: u16 = if v6 { 72 } else { 36 };
        sent[at] = 1 + sent[at] % 3;
        sent[at + 1] = 0;
        sent[at + 2..at + 4].copy_from_slice(&len.to_be_bytes());
        sent[at + 8] = u8::from(v6);
        if let Some(field) = sent.get_mut(at + 10..at + 12) {
            field.copy_from_slice(&len.to_be_bytes());
        }
        at += 8 + usize::from(len);
    }
    if choice & 1 == 0 {
        sent.truncate(at);
    }
    if let Ok(digest) = bulk::Digest::parse(&sent) {
        assert_eq!(digest, digest.clone());
    }
    peer_services(rest);
    let Ok(items) = bulk::parse(&sent) else {
        return;
    };
    assert_eq!(bulk::count(&sent), items.len() as u64);
    let mut director = Director::new(Options {
        max_connections: 64,
        ..Options::default()
    });
    let key = ServiceKey::tcp("198.51.100.1:80".parse().expect("the address is valid"));
    let config = ServiceConfig::new(key.family(), "wlc");
    let server = "10.0.0.1:80".parse().expect("the address is valid");
    let control = &mut director.control;
    control
        .add_service(key, config, None)
        .expect("the service is valid");
    let config = ServerConfig::new(1, Forwarding::Nat);
    control
        .add_server(&key, server, &config, Instant::ZERO)
        .expect("the server is valid");
    let mut shard = control.shard(0).expect("the only shard is free");
    shard.keep_replicas([1, 2]);
    shard.listen_to(PEER, [3, 4]);
    shard.set_has_receiver(true);
    for second in 0..2 {
        // Applies the message a second time, when its connections exist, and this director owns
        // some of them.
        let now = Instant::from_secs(second);
        let ties = choice & 2 != 0;
        control.apply_items(&mut shard, PEER, ties, items.iter().cloned(), now);
        if choice & 4 != 0 {
            shard.adopt_borrowed(PEER, None, 0, 64, now);
        }
    }
    let all = shard.replicated().count() + shard.borrowed(PEER).count();
    assert_eq!(all, shard.len() as u64);
    let (changes, _) = shard.take_changes();
    assert!(bulk::parse(&changes).is_ok());
    while shard.advance(Instant::from_nanos(u64::MAX), usize::MAX) {}
    assert_eq!(
        shard.replicated().count() + shard.borrowed(PEER).count(),
        shard.len() as u64
    );
}

/// Decodes digests of a peer's services. Encoding and decoding the digests again must return equal
/// digests, and comparing them with themselves must find no difference.
fn peer_services(bytes: &[u8]) {
    // Keys with a valid kind and protocol, and zeros in unused bytes.
    let mut sent = bytes.to_vec();
    let (services, _) = sent.as_chunks_mut::<SERVICE_LEN>();
    let count = services.len();
    for service in services {
        service[0] %= 4;
        service[1] = 0;
        if service[0] < 2 {
            service[1] = [6, 17, 132][usize::from(service[2] % 3)];
        } else {
            service[2..4].fill(0);
        }
        if service[0] != 1 {
            service[8..20].fill(0);
        }
    }
    sent.truncate(count * SERVICE_LEN);
    let _ = ServiceDigests::parse(bytes);
    let heard = ServiceDigests::parse(&sent).expect("the items are in order");
    let mut again = Vec::new();
    heard.write(&mut again);
    assert_eq!(ServiceDigests::parse(&again).as_ref(), Ok(&heard));
    assert_eq!(heard.compare(&heard).count(), 0);
}

/// Passes any bytes to a backup as synchronisation messages. In the end, when all services are
/// deleted, servers must have no references.
pub fn sync_decode(bytes: &[u8]) {
    let (&choice, rest) = bytes.split_first().unwrap_or((&0, &[]));
    // Corrects some lengths: most random lengths would stop the parser.
    let mut message = rest.to_vec();
    if choice & 1 == 0
        && let (Ok(len), Some(field)) = (u16::try_from(message.len()), message.get_mut(2..4))
    {
        field.copy_from_slice(&len.to_be_bytes());
    }
    let mut director = Director::new(Options {
        max_connections: 64,
        ..Options::default()
    });
    let mut now = Instant::ZERO;
    director.advance(now);
    let control = &mut director.control;
    for vip in ["198.51.100.1:80", "[2001:db8::1]:80"] {
        let key = ServiceKey::tcp(vip.parse().expect("the address is valid"));
        let mut config = ServiceConfig::new(key.family(), "wlc");
        if choice & 2 != 0 {
            config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
            config.timeout = 60;
        }
        let server = if vip.starts_with('[') {
            "[2001:db8::11]:80"
        } else {
            "10.0.0.1:80"
        };
        let server = server.parse().expect("the address is valid");
        control
            .add_service(key, config, None)
            .expect("the service is valid");
        control
            .add_server(&key, server, &ServerConfig::new(1, Forwarding::Nat), now)
            .expect("the server is valid");
    }
    let backup = sync::Backup::new(choice >> 4, None, 1500, false);
    control.start_backup(backup).expect("no other backup runs");
    for part in 0..2 {
        // Applies the message a second time, when its connections exist.
        now = Instant::from_secs(part);
        director.handle_sync(&message, now);
    }
    // Timeouts in messages may have any number of seconds in 32 bits. Connections that last longer
    // than an hour are removed with their server; connections without a timeout belong to no
    // server.
    director.advance(Instant::from_secs(3600));
    let bound: u32 = servers(&director).map(|server| server.total()).sum();
    assert!(usize::try_from(bound).is_ok_and(|bound| bound <= director.shard.len()));
    let keys: Vec<ServiceKey> = director.control.services().map(Service::key).collect();
    let gone: Vec<_> = servers(&director).cloned().collect();
    director
        .control
        .set_sysctl("expire_nodest_conn", "1")
        .expect("the sysctl exists");
    for key in keys {
        director
            .control
            .delete_service(&key, Instant::from_secs(3600))
            .expect("the service exists");
    }
    director.advance(Instant::from_secs(7200));
    for server in gone {
        assert_eq!((server.total(), server.active()), (0, 0));
    }
}

fn servers(director: &Director) -> impl Iterator<Item = &Arc<Server>> {
    director.control.services().flat_map(Service::servers)
}
