//! Tests of the proxy with real sockets on this host.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use lvs_core::api::{Call, ServerSpec, ServiceId, ServiceSpec};
use lvs_core::settings::OnServerDown;
use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::header::Version;
use super::{Options, Proxy};

/// A loopback address and port that no other test uses, in any process.
fn free() -> SocketAddr {
    static TAKEN: AtomicU16 = AtomicU16::new(7_000);
    // Process ids have at most 22 bits.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let port = TAKEN.fetch_add(1, Ordering::Relaxed);
    SocketAddr::from(([127, 128 | a, b, c], port))
}

struct Bench {
    proxy: Proxy,
    address: SocketAddr,
    service: ServiceId,
}

impl Bench {
    fn new(options: Options, servers: &[SocketAddr]) -> Self {
        let address = free();
        Self::at(ServiceId::Tcp { address }, options, servers)
    }

    fn at(service: ServiceId, options: Options, servers: &[SocketAddr]) -> Self {
        let (ServiceId::Tcp { address } | ServiceId::Udp { address }) = service else {
            panic!("the service is not a TCP or UDP service");
        };
        let proxy = Proxy::start().unwrap();
        proxy.set_options([(service, options)].into());
        let mut config = ServiceConfig::new(Family::V4, "rr");
        config.extras.on_server_down = OnServerDown::Reset;
        let mut changes = vec![Call::ServiceAdd(ServiceSpec {
            service,
            config,
            owner: Some("lvsd".to_owned()),
        })];
        changes.extend(servers.iter().map(|&server| {
            Call::ServerAdd(ServerSpec {
                service,
                server,
                config: ServerConfig::new(1, Forwarding::Nat),
            })
        }));
        proxy.apply(&changes).unwrap();
        Self {
            proxy,
            address,
            service,
        }
    }

    async fn client(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    fn active(&mut self) -> u32 {
        let services = self.proxy.services();
        services[0].servers.iter().map(|server| server.active).sum()
    }

    /// Waits until `count` connections are active.
    async fn until_active(&mut self, count: u32) {
        while self.active() != count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn server() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn pattern(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}

#[tokio::test]
async fn relay_copies_bytes_and_closes_each_direction_independently() {
    let (listener, address) = server().await;
    let mut bench = Bench::new(Options::default(), &[address]);
    let (sent, answer) = (pattern(3_000_000), pattern(5_000_000));
    let expected = (sent.clone(), answer.clone());
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut got = Vec::new();
        // The stream ends, although the other direction is open.
        stream.read_to_end(&mut got).await.unwrap();
        stream.write_all(&answer).await.unwrap();
        got
    });
    let mut client = bench.client().await;
    bench.until_active(1).await;
    client.write_all(&sent).await.unwrap();
    client.shutdown().await.unwrap();
    let mut got = Vec::new();
    client.read_to_end(&mut got).await.unwrap();
    assert!(
        got == expected.1,
        "the client received other data: {} bytes",
        got.len()
    );
    assert!(served.await.unwrap() == expected.0);
    bench.until_active(0).await;
    while bench.proxy.connections() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let stats = bench.proxy.services()[0].stats.live;
    assert_eq!(stats.conns, 1);
    assert!(
        stats.in_bytes >= 3_000_000 && stats.out_bytes >= 5_000_000,
        "{stats:?}"
    );
}

#[tokio::test]
async fn relay_forwards_reset_of_either_side() {
    for (half_closed, from_client) in [(false, true), (true, true), (false, false)] {
        let (listener, address) = server().await;
        let bench = Bench::new(Options::default(), &[address]);
        let mut client = bench.client().await;
        client.write_all(b"x").await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0]).await.unwrap();
        if half_closed {
            client.shutdown().await.unwrap();
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        }
        let (end, mut other) = match from_client {
            true => (client, stream),
            false => (stream, client),
        };
        socket2::SockRef::from(&end)
            .set_linger(Some(Duration::ZERO))
            .unwrap();
        drop(end);
        let error = loop {
            // After a half close, nothing can be read; only a write reports the reset.
            if half_closed {
                tokio::time::sleep(Duration::from_millis(20)).await;
                if let Err(error) = other.write_all(b"x").await {
                    break error;
                }
            } else {
                break other.read(&mut [0]).await.unwrap_err();
            }
        };
        let kind = error.kind();
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
        assert!(
            matches!(kind, ConnectionReset | BrokenPipe),
            "half-closed: {half_closed}, reset by client: {from_client}: {error}"
        );
    }
}

#[tokio::test]
async fn connection_refused_by_server_is_retried_at_another_server() {
    let (one, first) = server().await;
    let (two, second) = server().await;
    let dead = free();
    let mut bench = Bench::new(Options::default(), &[first, second, dead]);
    let mut kept = Vec::new();
    for _ in 0..12 {
        kept.push(bench.client().await);
    }
    bench.until_active(12).await;
    let mut counts = (0, 0);
    for _ in 0..12 {
        tokio::select! {
            accepted = one.accept() => {
                kept.push(accepted.unwrap().0);
                counts.0 += 1;
            }
            accepted = two.accept() => {
                kept.push(accepted.unwrap().0);
                counts.1 += 1;
            }
        }
    }
    assert!(counts.0 >= 4 && counts.1 >= 4, "{counts:?}");
}

/// Connections of several clients at the same time, whose turns in the scheduler interleave.
#[tokio::test]
async fn simultaneous_proxy_clients_are_all_served_if_one_of_two_servers_is_up() {
    let (one, alive) = server().await;
    let bench = Bench::new(Options::default(), &[alive, free()]);
    let accepts = tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = one.accept().await {
            stream.write_all(b"x").await.unwrap();
            kept.push(stream);
        }
    });
    let address = bench.address;
    let clients: Vec<_> = (0..200)
        .map(|_| {
            tokio::spawn(async move {
                let mut client = TcpStream::connect(address).await?;
                client.read_u8().await
            })
        })
        .collect();
    for client in clients {
        assert_eq!(client.await.unwrap().unwrap(), b'x');
    }
    accepts.abort();
}

#[tokio::test]
async fn proxy_resets_client_of_service_without_servers() {
    let bench = Bench::new(Options::default(), &[]);
    // The reset may come before the client has seen that it was accepted.
    if let Ok(mut client) = TcpStream::connect(bench.address).await {
        assert!(client.read(&mut [0]).await.is_err());
    }
}

/// TCP connections can use all slots except a sixteenth.
#[tokio::test]
async fn proxy_connection_over_limit_is_reset_and_counted_until_another_has_ended() {
    const MOST: usize = 32;
    let (listener, address) = server().await;
    tokio::spawn(async move {
        // Each server task ends with its client.
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move { stream.read_to_end(&mut Vec::new()).await });
        }
    });
    let mut bench = Bench::new(Options::default(), &[address]);
    bench.proxy.serve_at_most(MOST);
    let mut held = Vec::new();
    for _ in 0..MOST - MOST / 16 {
        held.push(bench.client().await);
    }
    bench.until_active(u32::try_from(held.len()).unwrap()).await;
    assert_eq!(bench.proxy.counts().full, 0);
    // The reset may come before the client has seen that it was accepted.
    if let Ok(mut one) = TcpStream::connect(bench.address).await {
        assert!(one.read(&mut [0]).await.is_err());
    }
    let counts = bench.proxy.counts();
    assert_eq!((counts.full, counts.connections), (1, held.len()));
    held.pop();
    bench.until_active(u32::try_from(held.len()).unwrap()).await;
    while bench.proxy.counts().connections > held.len() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    held.push(bench.client().await);
    bench.until_active(u32::try_from(held.len()).unwrap()).await;
    assert_eq!(bench.proxy.counts().full, 1);
}

#[tokio::test]
async fn client_with_incomplete_proxy_header_is_disconnected_within_30_seconds() {
    let (_listener, address) = server().await;
    let options = Options {
        accept: true,
        ..Options::default()
    };
    let bench = Bench::new(options, &[address]);
    let mut silent = bench.client().await;
    silent.write_all(b"PROXY TCP4 192.0").await.unwrap();
    let mut nothing = [0];
    let given_up = tokio::time::timeout(Duration::from_secs(30), silent.read(&mut nothing));
    assert!(
        given_up
            .await
            .expect("the client is disconnected within half a minute")
            .is_err()
    );
}

#[tokio::test]
async fn server_receives_proxy_header_of_client_and_client_without_header_is_closed() {
    for version in [Version::V1, Version::V2] {
        let (listener, address) = server().await;
        let options = Options {
            send: Some(version),
            accept: true,
            ..Options::default()
        };
        let bench = Bench::new(options, &[address]);
        let mut client = bench.client().await;
        let announced = "192.0.2.77:1234".parse().unwrap();
        let header = super::header::write(Version::V2, announced, bench.address);
        // The header is sent in two pieces, the second with the first bytes of the stream.
        client.write_all(&header[..7]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        client
            .write_all(&[&header[7..], b"hello"].concat())
            .await
            .unwrap();
        client.shutdown().await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        let mut expected = super::header::write(version, announced, bench.address);
        expected.extend(b"hello");
        assert_eq!(got, expected, "{version:?}");
    }
    let (_listener, address) = server().await;
    let options = Options {
        accept: true,
        ..Options::default()
    };
    let bench = Bench::new(options, &[address]);
    let mut client = bench.client().await;
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    assert!(
        client.read(&mut [0]).await.is_err(),
        "a connection without a header was not closed"
    );
}

#[tokio::test]
async fn removed_server_closes_its_connections_and_removed_service_its_listener() {
    let (listener, address) = server().await;
    let mut bench = Bench::new(Options::default(), &[address]);
    let mut client = bench.client().await;
    let (_stream, _) = listener.accept().await.unwrap();
    bench.until_active(1).await;
    let delete = Call::ServerDelete {
        service: bench.service,
        server: address,
    };
    bench.proxy.apply(&[delete]).unwrap();
    assert!(client.read(&mut [0]).await.is_err());
    let delete = Call::ServiceDelete {
        service: bench.service,
    };
    bench.proxy.apply(&[delete]).unwrap();
    // The workers have to close the listeners.
    while TcpStream::connect(bench.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn relay_is_closed_after_idle_timeout() {
    let (listener, address) = server().await;
    let options = Options {
        idle_timeout: Duration::from_millis(200),
        ..Options::default()
    };
    let bench = Bench::new(options, &[address]);
    let mut client = bench.client().await;
    let (_stream, _) = listener.accept().await.unwrap();
    assert!(client.read(&mut [0]).await.is_err());
}

/// While a client does not read, the proxy stores only a limited amount of data: the content of a
/// pipe or of a copy buffer, and the buffers of the sockets.
#[tokio::test]
async fn client_that_does_not_read_stops_reads_from_server_without_loss() {
    let (listener, address) = server().await;
    let bench = Bench::new(Options::default(), &[address]);
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut client = socket.connect(bench.address).await.unwrap();
    client.write_all(b"x").await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.read_exact(&mut [0]).await.unwrap();
    let chunk = pattern(64 << 10);
    let mut sent = 0;
    while let Ok(written) =
        tokio::time::timeout(Duration::from_millis(500), stream.write(&chunk)).await
    {
        sent += written.unwrap();
        assert!(
            sent < 64 << 20,
            "the server could send without limit to a client that does not read"
        );
    }
    // The bytes that the client has not read yet are not lost.
    drop(stream);
    let mut got = Vec::new();
    client.read_to_end(&mut got).await.unwrap();
    assert_eq!(got.len(), sent);
}

#[tokio::test]
async fn service_at_occupied_address_is_refused_with_fix() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let service = ServiceId::Tcp {
        address: taken.local_addr().unwrap(),
    };
    let proxy = Proxy::start().unwrap();
    let add = Call::ServiceAdd(ServiceSpec {
        service,
        config: ServiceConfig::new(Family::V4, "rr"),
        owner: None,
    });
    let refused = proxy.apply(&[add]).unwrap_err();
    assert!(refused.message.contains("ss -lntup"), "{}", refused.message);
    assert!(proxy.services().is_empty());
}

#[tokio::test]
async fn proxied_udp_client_keeps_server_until_server_is_removed() {
    let servers = [
        UdpSocket::bind("127.0.0.1:0").await.unwrap(),
        UdpSocket::bind("127.0.0.1:0").await.unwrap(),
    ];
    let addresses: Vec<SocketAddr> = servers.iter().map(|s| s.local_addr().unwrap()).collect();
    let address = free();
    for socket in servers {
        tokio::spawn(async move {
            let own = socket.local_addr().unwrap().port();
            let mut buffer = [0; 2000];
            while let Ok((_, client)) = socket.recv_from(&mut buffer).await {
                let _ = socket.send_to(own.to_string().as_bytes(), client).await;
            }
        });
    }
    let options = Options {
        idle_timeout: Options::IDLE_UDP,
        ..Options::default()
    };
    let bench = Bench::at(ServiceId::Udp { address }, options, &addresses);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(address).await.unwrap();
    let ask = || async {
        let mut buffer = [0; 2000];
        loop {
            client.send(b"?").await.unwrap();
            let answer = tokio::time::timeout(Duration::from_millis(200), client.recv(&mut buffer));
            if let Ok(Ok(length)) = answer.await {
                return String::from_utf8_lossy(&buffer[..length]).into_owned();
            }
        }
    };
    let first = ask().await;
    assert_eq!((ask().await, ask().await), (first.clone(), first.clone()));
    let port: u16 = first.parse().unwrap();
    let delete = Call::ServerDelete {
        service: bench.service,
        server: ([127, 0, 0, 1], port).into(),
    };
    bench.proxy.apply(&[delete]).unwrap();
    // Answers of the first server may still arrive.
    while ask().await == first {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A sender with forged addresses causes no established client to be evicted, and no new client to
/// be refused.
#[tokio::test]
async fn datagram_flood_evicts_no_established_client_and_new_client_is_served() {
    const MOST: usize = 64;
    let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let there = server.local_addr().unwrap();
    // The server answers every client with the port of the proxy's socket for this client.
    tokio::spawn(async move {
        let mut buffer = [0; 2000];
        while let Ok((_, client)) = server.recv_from(&mut buffer).await {
            let port = client.port().to_string();
            let _ = server.send_to(port.as_bytes(), client).await;
        }
    });
    let address = free();
    let bench = Bench::at(ServiceId::Udp { address }, Options::default(), &[there]);
    bench.proxy.serve_at_most(MOST);
    // The kernel drops datagrams if a buffer or queue is full.
    let asked = async |client: &UdpSocket| {
        let mut buffer = [0; 100];
        for _ in 0..500 {
            client.send(b"?").await.unwrap();
            let answer = client.recv(&mut buffer);
            let answer = tokio::time::timeout(Duration::from_millis(200), answer).await;
            if let Ok(Ok(length)) = answer {
                return buffer[..length].to_vec();
            }
        }
        panic!("the client received no answer to 500 datagrams");
    };
    let ask = async |from: String| {
        let client = UdpSocket::bind(from).await.unwrap();
        client.connect(address).await.unwrap();
        let port = asked(&client).await;
        assert_eq!(asked(&client).await, port);
        (client, port)
    };
    let (talking, port) = ask("127.0.0.1:0".to_owned()).await;
    for n in 0..1000_u16 {
        let [high, low] = n.to_be_bytes();
        let one = UdpSocket::bind(format!("127.1.{high}.{low}:0"))
            .await
            .unwrap();
        one.send_to(b"x", address).await.unwrap();
        if n % 16 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let _newcomer = ask("127.2.0.1:0".to_owned()).await;
    let again = asked(&talking).await;
    assert_eq!(again, port, "the established client was evicted");
    let counts = bench.proxy.counts();
    assert!(counts.evicted > 0, "{counts:?}");
    assert_eq!(counts.most, MOST);
    assert!(counts.connections <= MOST / 2 + 1024, "{counts:?}");
}
