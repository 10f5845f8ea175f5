//! A TCP balancer on `lvs-core` alone: the kernel's schedulers, without packets and without
//! privileges.
//!
//! ```text
//! embed 127.0.0.1:8080 wlc 127.0.0.1:9001 127.0.0.1:9002=3
//! ```
//!
//! This command listens on the first address, and relays each connection to the server that the
//! scheduler `wlc` chooses; `=3` is a weight.

use std::env;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail};
use lvs_core::{
    Forwarding, Instant, Pool, Protocol, Registry, Request, ServerConfig, ServiceFlags,
};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [listen, scheduler, servers @ ..] = args.as_slice() else {
        bail!("usage: embed LISTEN:PORT SCHEDULER SERVER:PORT[=WEIGHT]...");
    };
    let scheduler = Registry::new()
        .create(scheduler)
        .with_context(|| format!("there is no scheduler {scheduler}"))?;
    let mut pool = Pool::new(scheduler);
    for server in servers {
        let (addr, weight) = server.split_once('=').unwrap_or((server, "1"));
        let addr = addr
            .parse()
            .with_context(|| format!("{server} is not an address with a port"))?;
        let weight = weight
            .parse()
            .with_context(|| format!("{server} has no valid weight"))?;
        pool.insert(addr, &ServerConfig::new(weight, Forwarding::Nat))
            .with_context(|| server.clone())?;
    }
    let pool = Arc::new(Mutex::new(pool));
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| listen.clone())?;
    println!("listening on {}", listener.local_addr()?);
    let start = std::time::Instant::now();
    loop {
        let (client, peer) = listener.accept().await?;
        let now = Instant::ZERO + start.elapsed();
        tokio::spawn(relay(client, peer, pool.clone(), now));
    }
}

/// Relays one connection. The scheduler counts the connection for its server until it ends.
async fn relay(mut client: TcpStream, peer: SocketAddr, pool: Arc<Mutex<Pool>>, now: Instant) {
    let Ok(virt) = client.local_addr() else {
        return;
    };
    let flags = ServiceFlags::default();
    let request = Request {
        client: peer,
        virt,
        protocol: Protocol::TCP,
        flags,
        now,
    };
    let picked = pool
        .lock()
        .expect("no thread panics")
        .pick(&request)
        .map(lvs_core::Server::open);
    let Some(connection) = picked else {
        return eprintln!("{peer}: no server accepts the connection");
    };
    match TcpStream::connect(connection.server().addr()).await {
        Ok(mut server) => {
            let _ = copy_bidirectional(&mut client, &mut server).await;
        }
        Err(error) => eprintln!("{}: {error}", connection.server().addr()),
    }
}
