//! Sends DNS queries over UDP, each from a new socket, and over TCP if an answer is truncated. Each
//! name server is tried up to twice.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::message::{self, Answer, Came, DATAGRAM_MAX, Data, RecordKind};
use crate::sources::Lookups;
use crate::sources::Record;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Maximum number of name servers that are read from `resolv.conf`, as in the C library.
const NAME_SERVERS_MAX: usize = 3;
/// Number of attempts for each name server.
const ROUNDS: usize = 2;
/// Number of unrelated datagrams after which a query has failed.
const STRANGE_MAX: usize = 64;
/// Maximum number of used SRV records of a name: those that have its lowest priority number.
const TARGETS_MAX: usize = 256;
/// Maximum number of servers of a name.
pub(crate) const RECORDS_MAX: usize = 1024;

/// Resolves a name to a sorted list of servers, and a TTL in seconds.
///
/// # Errors
/// No name server sends a valid answer, or the name has no records or more than the maximum; the
/// text is the reason. A name without records is an error, because a zone that was emptied by
/// mistake would otherwise empty a service.
pub(super) async fn look_up(name: &str, lookups: &Lookups) -> Result<(Vec<Record>, u32), String> {
    let servers = match lookups.name_servers.is_empty() {
        false => lookups.name_servers.clone(),
        true => system(),
    };
    let asker = Asker {
        servers,
        limit: lookups.timeout,
    };
    let (mut records, ttl) = match super::is_srv(name) {
        true => asker.services(name).await?,
        false => asker.hosts(name, None, None).await?,
    };
    if records.is_empty() {
        return Err("the name has no records".to_owned());
    }
    records.sort_unstable();
    records.dedup_by_key(|record| (record.ip, record.port));
    if records.len() > RECORDS_MAX {
        return Err(format!(
            "the name has {} servers, more than {RECORDS_MAX}",
            records.len()
        ));
    }
    Ok((records, ttl))
}

struct Asker {
    servers: Vec<SocketAddr>,
    limit: Duration,
}

impl Asker {
    /// Resolves an SRV name to the servers with the lowest priority number.
    async fn services(&self, name: &str) -> Result<(Vec<Record>, u32), String> {
        let answer = self.ask(name, RecordKind::Srv).await?;
        let mut ttl = answer.ttl;
        let mut services: Vec<(u16, u16, u16, String)> = Vec::new();
        for record in answer.records {
            if let Data::Service {
                priority,
                weight,
                port,
                target,
            } = record
                && !target.is_empty()
                && port != 0
            {
                services.push((priority, weight, port, target));
            }
        }
        let first = services.iter().map(|service| service.0).min();
        services.retain(|service| Some(service.0) == first);
        if services.len() > TARGETS_MAX {
            return Err(format!(
                "the name refers to {} hosts, more than {TARGETS_MAX}",
                services.len()
            ));
        }
        let mut records = Vec::new();
        for (_, weight, port, target) in services {
            // All hosts must be resolved, because a partial answer would remove servers.
            let (hosts, holds) = self
                .hosts(&target, Some(port), Some(weight.max(1)))
                .await
                .map_err(|why| format!("{target}: {why}"))?;
            ttl = ttl.min(holds);
            records.extend(hosts);
        }
        Ok((records, ttl))
    }

    async fn hosts(
        &self,
        name: &str,
        port: Option<u16>,
        weight: Option<u16>,
    ) -> Result<(Vec<Record>, u32), String> {
        let mut records = Vec::new();
        let mut ttl = u32::MAX;
        for kind in [RecordKind::A, RecordKind::Aaaa] {
            let answer = self.ask(name, kind).await?;
            // An answer without addresses of this family does not limit the TTL.
            if !answer.records.is_empty() {
                ttl = ttl.min(answer.ttl);
            }
            for record in answer.records {
                if let Data::Address(ip) = record {
                    records.push(Record { ip, port, weight });
                }
            }
        }
        Ok((records, ttl))
    }

    async fn ask(&self, name: &str, kind: RecordKind) -> Result<Answer, String> {
        let mut why =
            "no name server is configured; add one to [dns] or to /etc/resolv.conf".to_owned();
        for _ in 0..ROUNDS {
            for server in &self.servers {
                match self.ask_one(*server, name, kind).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) => why = format!("{server}: {error}"),
                }
            }
        }
        Err(why)
    }

    async fn ask_one(
        &self,
        server: SocketAddr,
        name: &str,
        kind: RecordKind,
    ) -> Result<Answer, String> {
        let silent = |_| format!("no answer within {:?}", self.limit);
        match timeout(self.limit, datagram(server, name, kind))
            .await
            .map_err(silent)??
        {
            Came::Answer(answer) => return Ok(answer),
            Came::Refused(why) => return Err(format!("the name server answers {why}")),
            Came::Cut | Came::Strange => {}
        }
        match timeout(self.limit, stream(server, name, kind))
            .await
            .map_err(silent)??
        {
            Came::Answer(answer) => Ok(answer),
            Came::Refused(why) => Err(format!("the name server answers {why} over TCP")),
            Came::Cut | Came::Strange => {
                Err("the answer over TCP is truncated, or does not match the question".to_owned())
            }
        }
    }
}

/// Returns a random query id.
fn fresh_id() -> Result<u16, String> {
    let bytes = lvs_sys::random()
        .map_err(|error| format!("the kernel provides no random numbers: {error}"))?;
    Ok(u16::from_ne_bytes(bytes))
}

async fn datagram(server: SocketAddr, name: &str, kind: RecordKind) -> Result<Came, String> {
    let words = |error: std::io::Error| error.to_string();
    let id = fresh_id()?;
    let question = message::question(id, name, kind)?;
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await.map_err(words)?;
    // A connected socket receives only datagrams from this name server.
    socket.connect(server).await.map_err(words)?;
    socket.send(&question).await.map_err(words)?;
    let mut bytes = vec![0; usize::from(DATAGRAM_MAX)];
    for _ in 0..STRANGE_MAX {
        let n = socket.recv(&mut bytes).await.map_err(words)?;
        match message::read(&bytes[..n], id, name, kind) {
            Came::Strange => {}
            came => return Ok(came),
        }
    }
    Err("the answers do not match the question".to_owned())
}

async fn stream(server: SocketAddr, name: &str, kind: RecordKind) -> Result<Came, String> {
    let words = |error: std::io::Error| format!("TCP: {error}");
    let id = fresh_id()?;
    let question = message::question(id, name, kind)?;
    let length = u16::try_from(question.len()).map_err(|error| error.to_string())?;
    let mut stream = TcpStream::connect(server).await.map_err(words)?;
    let whole = [&length.to_be_bytes()[..], &question].concat();
    stream.write_all(&whole).await.map_err(words)?;
    let length = stream.read_u16().await.map_err(words)?;
    let mut bytes = vec![0; usize::from(length)];
    stream.read_exact(&mut bytes).await.map_err(words)?;
    Ok(message::read(&bytes, id, name, kind))
}

/// The name servers in `resolv.conf`; if it contains none, the name server of this host.
fn system() -> Vec<SocketAddr> {
    let text = std::fs::read(RESOLV_CONF).unwrap_or_default();
    let mut all = name_servers(&String::from_utf8_lossy(&text));
    if all.is_empty() {
        all.push((Ipv4Addr::LOCALHOST, 53).into());
    }
    all
}

fn name_servers(text: &str) -> Vec<SocketAddr> {
    let words = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().filter(|word| *word == "nameserver");
        first.and_then(|_| words.next()?.parse::<IpAddr>().ok())
    });
    words
        .take(NAME_SERVERS_MAX)
        .map(|ip| SocketAddr::new(ip, 53))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use simple_dns::rdata::{A, RData, SRV};
    use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, ResourceRecord, TYPE};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn name_servers_are_read_from_resolv_conf() {
        let text = "# x\nsearch example.org\nnameserver 192.0.2.1\n nameserver\t2001:db8::1 # y\nnameserver nonsense\n";
        let all: Vec<String> = name_servers(text).iter().map(ToString::to_string).collect();
        assert_eq!(all, ["192.0.2.1:53", "[2001:db8::1]:53"]);
    }

    fn lookups(servers: &[SocketAddr]) -> Lookups {
        Lookups {
            name_servers: servers.to_vec(),
            timeout: Duration::from_secs(3),
            ..Lookups::default()
        }
    }

    /// Answers a query: the SRV records name `a`, `b` and, with a lower priority, `c`, each with
    /// one address. With `cut`, the answer is truncated and empty.
    fn answer(question: &[u8], cut: bool) -> Vec<u8> {
        let asked = Packet::parse(question).unwrap();
        let first = asked.questions[0].clone();
        let name = first.qname.to_string();
        let record = |data| ResourceRecord::new(first.qname.clone(), CLASS::IN, 60, data);
        let mut reply = asked.clone().into_reply();
        *reply.opt_mut() = None;
        if cut {
            reply.set_flags(PacketFlag::TRUNCATION);
            return reply.build_bytes_vec().unwrap();
        }
        match first.qtype {
            QTYPE::TYPE(TYPE::SRV) => {
                for (priority, weight, port, target) in [
                    (1, 5, 81, "a.example.org"),
                    (1, 0, 82, "b.example.org"),
                    (2, 9, 83, "c.example.org"),
                ] {
                    reply.answers.push(record(RData::SRV(SRV {
                        priority,
                        weight,
                        port,
                        target: Name::new(target).unwrap(),
                    })));
                }
            }
            QTYPE::TYPE(TYPE::A) => {
                let last = name.bytes().next().unwrap_or(0);
                let address = u32::from_be_bytes([10, 0, 0, last]);
                reply.answers.push(record(RData::A(A { address })));
            }
            _ => {}
        }
        reply.build_bytes_vec().unwrap()
    }

    /// Opens a UDP and a TCP socket on the same port.
    async fn one_port() -> (UdpSocket, TcpListener) {
        for _ in 0..100 {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            match TcpListener::bind(udp.local_addr().unwrap()).await {
                Ok(tcp) => return (udp, tcp),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse),
            }
        }
        panic!("no port is free for UDP and TCP");
    }

    /// Starts a name server, which sends a forged answer before each answer over UDP. With `cut`,
    /// it truncates its own answers over UDP.
    async fn name_server(cut: bool) -> SocketAddr {
        let (udp, tcp) = one_port().await;
        let at = udp.local_addr().unwrap();
        tokio::spawn(async move {
            let mut bytes = [0; 2048];
            while let Ok((n, from)) = udp.recv_from(&mut bytes).await {
                // A forged answer arrives first.
                let mut forged = answer(&bytes[..n], false);
                forged[0] ^= 1;
                let _ = udp.send_to(&forged, from).await;
                let _ = udp.send_to(&answer(&bytes[..n], cut), from).await;
            }
        });
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = tcp.accept().await {
                let length = stream.read_u16().await.unwrap();
                let mut bytes = vec![0; usize::from(length)];
                stream.read_exact(&mut bytes).await.unwrap();
                let reply = answer(&bytes, false);
                let length = u16::try_from(reply.len()).unwrap();
                stream.write_all(&length.to_be_bytes()).await.unwrap();
                stream.write_all(&reply).await.unwrap();
            }
        });
        at
    }

    #[tokio::test]
    async fn dns_lookup_ignores_datagrams_with_other_id_up_to_limit_and_then_fails() {
        for (strange, answered) in [(STRANGE_MAX - 1, true), (STRANGE_MAX, false)] {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let at = udp.local_addr().unwrap();
            let asked = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&asked);
            tokio::spawn(async move {
                let mut bytes = [0; 2048];
                while let Ok((n, from)) = udp.recv_from(&mut bytes).await {
                    count.fetch_add(1, Ordering::Relaxed);
                    let mut forged = answer(&bytes[..n], false);
                    forged[0] ^= 1;
                    for _ in 0..strange {
                        let _ = udp.send_to(&forged, from).await;
                    }
                    let _ = udp.send_to(&answer(&bytes[..n], false), from).await;
                }
            });
            let found = look_up("a", &lookups(&[at])).await;
            assert_eq!(found.is_ok(), answered, "{strange}: {found:?}");
            if let Err(why) = found {
                assert!(
                    why.contains("do not match the question"),
                    "no `do not match the question` in {why}"
                );
                assert_eq!(asked.load(Ordering::Relaxed), ROUNDS);
            }
        }
    }

    #[tokio::test]
    async fn srv_records_are_resolved_over_udp_and_tcp() {
        let wanted = [(b'a', 81, 5), (b'b', 82, 1)].map(|(last, port, weight)| Record {
            ip: [10, 0, 0, last].into(),
            port: Some(port),
            weight: Some(weight),
        });
        for cut in [false, true] {
            let server = name_server(cut).await;
            let found = look_up("_http._tcp.example.org", &lookups(&[server])).await;
            assert_eq!(
                found,
                Ok((wanted.to_vec(), 60)),
                "the servers are wrong (answer over UDP truncated: {cut})"
            );
        }
    }

    #[tokio::test]
    async fn dns_lookup_skips_silent_name_server_and_fails_if_no_name_server_answers() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let servers = [silent.local_addr().unwrap(), name_server(false).await];
        let (found, _) = look_up("www.example.org", &lookups(&servers))
            .await
            .unwrap();
        assert_eq!(found.len(), 1);
        let alone = look_up("www.example.org", &lookups(&servers[..1])).await;
        assert!(alone.unwrap_err().contains("no answer within"));
        let none = look_up(
            "_x.example.org",
            &lookups(&["127.0.0.1:1".parse().unwrap()]),
        )
        .await;
        assert!(none.is_err());
    }

    /// Starts a name server that sends `records` over TCP.
    async fn says(records: Vec<RData<'static>>) -> SocketAddr {
        let (udp, tcp) = one_port().await;
        let at = udp.local_addr().unwrap();
        tokio::spawn(async move {
            let mut bytes = [0; 2048];
            while let Ok((n, from)) = udp.recv_from(&mut bytes).await {
                let _ = udp.send_to(&answer(&bytes[..n], true), from).await;
            }
        });
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = tcp.accept().await {
                let length = stream.read_u16().await.unwrap();
                let mut bytes = vec![0; usize::from(length)];
                stream.read_exact(&mut bytes).await.unwrap();
                let asked = Packet::parse(&bytes).unwrap();
                let name = asked.questions[0].qname.clone();
                let mut reply = asked.into_reply();
                *reply.opt_mut() = None;
                for data in &records {
                    let record = ResourceRecord::new(name.clone(), CLASS::IN, 60, data.clone());
                    reply.answers.push(record);
                }
                let reply = reply.build_bytes_vec_compressed().unwrap();
                let length = u16::try_from(reply.len()).unwrap();
                stream.write_all(&length.to_be_bytes()).await.unwrap();
                stream.write_all(&reply).await.unwrap();
            }
        });
        at
    }

    #[tokio::test]
    async fn empty_or_too_large_dns_answer_is_refused() {
        let hosts = |n: u32| {
            (0..n).map(|n| {
                RData::A(A {
                    address: 0x0a00_0001 + n,
                })
            })
        };
        let services = |n: u16| {
            (0..n).map(|port| {
                RData::SRV(SRV {
                    priority: 0,
                    weight: 0,
                    port: port + 1,
                    target: Name::new("a.example.org").unwrap(),
                })
            })
        };
        for (name, records, words) in [
            (
                "a.example.org",
                hosts(1025).collect(),
                "1025 servers, more than 1024",
            ),
            (
                "_a.example.org",
                services(257).collect(),
                "257 hosts, more than 256",
            ),
            ("a.example.org", Vec::new(), "no records"),
            ("_a.example.org", Vec::new(), "no records"),
        ] {
            let server = says(records).await;
            let why = look_up(name, &lookups(&[server])).await.expect_err(words);
            assert!(why.contains(words), "no {words:?} in {why}");
        }
        let server = says(hosts(1024).collect()).await;
        let all = look_up("a.example.org", &lookups(&[server])).await;
        assert_eq!(all.map(|(all, _)| all.len()), Ok(1024));
    }
}
