//! Forwards datagrams between clients and their servers.
//!
//! For each client, the proxy has a socket towards the server, which shows to which client an
//! answer belongs. The proxy closes the socket after some time without datagrams, if the server
//! answers "port unreachable", if the server is removed, or if another client needs the slot
//! (`clients`).

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use lvs_core::Protocol;
use lvs_core::api::ServiceId;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

use super::balancer::{Balancer, Entry, Way};
use super::clients::Slot;
use super::close_signal::CloseSignal;

const DATAGRAM_MAX: usize = 65_535;

/// A client's session with its server.
struct Session {
    socket: UdpSocket,
    entry: Entry,
    slot: Slot,
}

/// Receives datagrams at the address of a service, and forwards them, until `close_signal` is set.
pub(super) async fn serve(
    balancer: Arc<Balancer>,
    service: ServiceId,
    virt: SocketAddr,
    socket: UdpSocket,
    close_signal: Arc<CloseSignal>,
) {
    let socket = Rc::new(socket);
    let mut sessions: HashMap<SocketAddr, Rc<Session>> = HashMap::new();
    let (over, mut ended) = mpsc::unbounded_channel::<SocketAddr>();
    let mut buffer = vec![0; DATAGRAM_MAX];
    let mut closed = std::pin::pin!(close_signal.closed());
    loop {
        let (length, client) = tokio::select! {
            biased;
            () = &mut closed => return,
            Some(client) = ended.recv() => {
                sessions.remove(&client);
                continue;
            }
            received = socket.recv_from(&mut buffer) => match received {
                Ok(received) => received,
                // The socket reports an ICMP error about an earlier answer.
                Err(_) => continue,
            },
        };
        let session = match sessions.get(&client) {
            Some(session) => Rc::clone(session),
            None => {
                let Some(session) = begin(&balancer, service, virt, client, length).await else {
                    continue;
                };
                let session = Rc::new(session);
                sessions.insert(client, Rc::clone(&session));
                let answers = answers(Rc::clone(&session), Rc::clone(&socket), client);
                let limit = balancer.options(&service).idle_timeout;
                let (over, served) = (over.clone(), Rc::clone(&session));
                tokio::task::spawn_local(async move {
                    tokio::select! {
                        _ = answers => {}
                        () = served.entry.close_signal.closed() => {}
                        () = served.entry.idle(|| served.slot.patience(limit)) => {}
                        () = served.slot.taken() => {}
                    }
                    // The service is closed if the receiver no longer exists.
                    let _ = over.send(client);
                });
                session
            }
        };
        // If the server's socket is full, datagrams are lost, as on any path.
        if session.socket.try_send(&buffer[..length]).is_ok() {
            session.entry.moved(Way::In, length);
            session.slot.sent(balancer.clock());
        }
    }
}

async fn begin(
    balancer: &Arc<Balancer>,
    service: ServiceId,
    virt: SocketAddr,
    client: SocketAddr,
    length: usize,
) -> Option<Session> {
    // A client that is refused by limits or filters does not evict another client.
    let entry = balancer.open(service, Protocol::UDP, client, virt, length)?;
    let slot = balancer.slot(service, client)?;
    let any: SocketAddr = match entry.server {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).await.ok()?;
    socket.connect(entry.server).await.ok()?;
    Some(Session {
        socket,
        entry,
        slot,
    })
}

/// Sends the server's answers to the client until the socket towards the server reports an error.
async fn answers(
    session: Rc<Session>,
    socket: Rc<UdpSocket>,
    client: SocketAddr,
) -> io::Result<()> {
    thread_local! {
        static BUFFER: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![0; DATAGRAM_MAX]);
    }
    for number in 1_u32.. {
        session.socket.readable().await?;
        // A server that sends without a pause must not occupy the thread.
        if number.is_multiple_of(16) {
            tokio::task::yield_now().await;
        }
        let answered = BUFFER.with_borrow_mut(|buffer| {
            let length = session.socket.try_recv(buffer)?;
            // If the socket is full, the answer is lost, as on any path.
            let _ = socket.try_send_to(&buffer[..length], client);
            io::Result::Ok(length)
        });
        match answered {
            Ok(length) => {
                session.slot.answered();
                session.entry.moved(Way::Out, length);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
