//! A TCP connection between a client and the server that was chosen for it.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lvs_core::Protocol;
use lvs_core::api::ServiceId;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::Options;
use super::balancer::{Balancer, Entry, Place, Way};
use super::close_signal::CloseSignal;
use super::header::{self, Read};
use super::pipe::pump;

/// Time limit for a client to send its PROXY protocol header.
const HEADER_LIMIT: Duration = Duration::from_secs(3);
/// Maximum number of attempts to connect a client to a server.
const TRIES: usize = 3;
/// Maximum number of choices before each attempt to connect: the balancer chooses again if it has
/// chosen a server that has already refused this connection.
const DRAWS: usize = 8;

/// Accepts connections of a listener until `close_signal` is set.
pub(super) async fn serve(
    balancer: Arc<Balancer>,
    service: ServiceId,
    virt: SocketAddr,
    listener: TcpListener,
    close_signal: Arc<CloseSignal>,
) {
    let mut closed = pin!(close_signal.closed());
    let mut complained = false;
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut closed => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((client, peer)) => {
                let Some(place) = balancer.place() else {
                    reset(&client);
                    continue;
                };
                let balancer = Arc::clone(&balancer);
                tokio::spawn(relay(balancer, service, virt, client, peer, place));
            }
            // The client has closed its connection while it waited.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if !complained {
                    complained = true;
                    tracing::error!(
                        "cannot accept connections at {virt}: {error}; lvsd tries again"
                    );
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Makes the kernel reset a connection when its socket is closed.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

async fn relay(
    balancer: Arc<Balancer>,
    service: ServiceId,
    virt: SocketAddr,
    mut client: TcpStream,
    peer: SocketAddr,
    _place: Place,
) {
    let _ = client.set_nodelay(true);
    let options = balancer.options(&service);
    let (mut source, mut early) = (peer, Vec::new());
    if options.accept {
        match tokio::time::timeout(HEADER_LIMIT, read_header(&mut client)).await {
            Ok(Ok((read_header, rest))) => {
                // Both addresses of a connection in the director's table must have the same IP
                // version.
                source = read_header
                    .filter(|read_header| read_header.is_ipv4() == peer.is_ipv4())
                    .unwrap_or(peer);
                early = rest;
            }
            _ => {
                reset(&client);
                return;
            }
        }
    }
    let Some((mut server, entry)) = connect(&balancer, service, virt, source, &options).await
    else {
        reset(&client);
        return;
    };
    let first = match (options.send, client.local_addr()) {
        (Some(version), Ok(local)) => [header::write(version, source, local), early].concat(),
        _ => early,
    };
    let both = async {
        if !first.is_empty() {
            server.write_all(&first).await?;
            entry.moved(Way::In, first.len());
        }
        both(&client, &server, &entry).await
    };
    let done = tokio::select! {
        done = both => done.is_ok(),
        () = entry.close_signal.closed() => false,
        () = entry.idle(|| options.idle_timeout) => false,
    };
    if !done {
        reset(&client);
        reset(&server);
    }
}

/// Reads the client's PROXY protocol header. Returns the original client, and the bytes after the
/// header.
async fn read_header(client: &mut TcpStream) -> io::Result<(Option<SocketAddr>, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        let room = header::LENGTH_MAX.saturating_sub(bytes.len()) as u64;
        if (&mut *client).take(room).read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match header::read(&bytes) {
            Read::Partial => {}
            Read::Header(length, source) => return Ok((source, bytes.split_off(length))),
            Read::Nonsense => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Connects to a server. If it refuses the connection, or is removed, the balancer chooses again,
/// for at most [`TRIES`] attempts within `connect_timeout`. `None` if no connection is made.
async fn connect(
    balancer: &Arc<Balancer>,
    service: ServiceId,
    virt: SocketAddr,
    client: SocketAddr,
    options: &Options,
) -> Option<(TcpStream, Entry)> {
    let begun = tokio::time::Instant::now();
    let mut refused = Vec::new();
    for _ in 0..TRIES {
        let mut entry = balancer.open(service, Protocol::TCP, client, virt, 0)?;
        for _ in 1..DRAWS {
            if !refused.contains(&entry.server) {
                break;
            }
            // Until the entry is dropped, the client keeps its server.
            drop(entry);
            entry = balancer.open(service, Protocol::TCP, client, virt, 0)?;
        }
        let left = options.connect_timeout.checked_sub(begun.elapsed())?;
        let connected = tokio::time::timeout(left, connected(entry.server));
        let connected = tokio::select! {
            connected = connected => connected,
            () = entry.close_signal.closed() => continue,
        };
        match connected {
            Ok(Ok(server)) => {
                entry.established();
                return Some((server, entry));
            }
            Ok(Err(error)) => {
                tracing::debug!(server = %entry.server, "cannot connect to the server: {error}");
                refused.push(entry.server);
            }
            Err(_) => return None,
        }
    }
    None
}

async fn connected(server: SocketAddr) -> io::Result<TcpStream> {
    let socket = match server {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    let _ = socket.set_nodelay(true);
    socket.connect(server).await
}

/// Forwards data in both directions until both sides have closed the connection. Fails if one of
/// the sockets has an error, such as a reset.
async fn both(client: &TcpStream, server: &TcpStream, entry: &Entry) -> io::Result<()> {
    let mut inward = pin!(pump(client, server, Way::In, entry));
    let mut outward = pin!(pump(server, client, Way::Out, entry));
    let (mut client_ended, mut server_ended) = (false, false);
    while !(client_ended && server_ended) {
        tokio::select! {
            done = &mut inward, if !client_ended => {
                done?;
                client_ended = true;
            }
            done = &mut outward, if !server_ended => {
                done?;
                server_ended = true;
            }
            // No task reads from the client any more, so no task would notice a reset.
            lost = client.ready(Interest::ERROR), if client_ended => {
                lost?;
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            lost = server.ready(Interest::ERROR), if server_ended => {
                lost?;
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
    }
    Ok(())
}
