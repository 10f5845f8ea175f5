//! HTTP as strangers may speak it: one request a connection, within bounds.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

use super::{Api, routes};
use crate::source::source;

/// Connections over TCP at a time.
const CONNECTIONS_MAX: usize = 128;
/// Connections at a time from one source: an IPv4 address, or an IPv6 /64.
pub(super) const SOURCE_MAX: usize = 32;
/// Bytes of a request's line and headers.
const HEAD_MAX: usize = 16 << 10;
/// Headers of a request.
const HEADERS_MAX: usize = 64;
/// How long the line and the headers may take.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// How long a request may take with everything, until the last byte of the answer is read.
const LIMIT: Duration = Duration::from_secs(30);

/// Who asks.
#[derive(Clone, Debug)]
pub enum Peer {
    /// Over TCP.
    Tcp(SocketAddr),
    /// Over the daemon's own socket.
    Local {
        /// In a word.
        who: String,
        /// Why it may not change things.
        denied: Option<String>,
    },
}

/// The connections over TCP that there are.
#[derive(Clone, Debug, Default)]
pub struct Places(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One of them, given back when it is dropped.
#[derive(Debug)]
struct Place(Places, IpAddr);

impl Places {
    /// Nothing if all are taken, or those of this address's source.
    fn take(&self, address: IpAddr) -> Option<Place> {
        let source = source(address);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = all.get(&source).copied().unwrap_or(0);
        if own >= SOURCE_MAX || all.values().sum::<usize>() >= CONNECTIONS_MAX {
            return None;
        }
        all.insert(source, own + 1);
        Some(Place(self.clone(), source))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = all.get_mut(&self.1) {
            *own -= 1;
            if *own == 0 {
                all.remove(&self.1);
            }
        }
    }
}

/// Listens; a daemon that is started again may, too.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    use tokio::net::TcpSocket;
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(128)
}

/// Serves whoever connects.
pub(super) async fn accept(listener: TcpListener, api: &Arc<Api>, places: &Places) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // No descriptors; some will be given back.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some(place) = places.take(peer.ip()) else {
            api.tally.no_place();
            refuse(&stream);
            continue;
        };
        let api = Arc::clone(api);
        tokio::spawn(async move {
            // An error here is that the client went away.
            let _ = serve(stream, api, Peer::Tcp(peer)).await;
            drop(place);
        });
    }
}

/// Says that there is no place, if that can be said at once.
fn refuse(stream: &TcpStream) {
    const BODY: &str = "{\"error\":{\"message\":\"lvsd serves as many connections as it may already: close some, or ask again later\"}}\n";
    let text = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         retry-after: 5\r\nconnection: close\r\n\r\n{BODY}",
        BODY.len()
    );
    let _ = stream.try_write(text.as_bytes());
}

/// Serves one connection, which is one request.
///
/// # Errors
/// The client went away, or took too long.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    api: Arc<Api>,
    peer: Peer,
) -> io::Result<()> {
    let answer = service_fn(move |request: Request<Incoming>| {
        let (api, peer) = (Arc::clone(&api), peer.clone());
        async move {
            let response: Response<Full<Bytes>> = routes::answer(&api, request, &peer).await;
            api.tally.http(response.status().as_u16());
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(HEAD_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer);
    tokio::time::timeout(LIMIT, connection)
        .await
        .map_err(io::Error::other)?
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_does_not_take_all_places() {
        let places = Places::default();
        let source = |n: u8| IpAddr::from([192, 0, 2, n]);
        let mut held: Vec<Place> = (0..SOURCE_MAX)
            .map(|_| places.take(source(1)).expect("a place"))
            .collect();
        assert!(places.take(source(1)).is_none());
        // The same in other words.
        assert!(
            places
                .take("::ffff:192.0.2.1".parse().expect("an address"))
                .is_none()
        );
        // Of IPv6 a host has as many addresses as it likes.
        let own = |n: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, n]);
        for n in 0..SOURCE_MAX {
            let n = u16::try_from(n).expect("a few");
            held.push(places.take(own(n)).expect("a place"));
        }
        assert!(places.take(own(999)).is_none());
        assert!(
            places
                .take([0x2001, 0xdb8, 0, 2, 0, 0, 0, 1].into())
                .is_some()
        );
        for n in 0..CONNECTIONS_MAX - 2 * SOURCE_MAX {
            let n = u8::try_from(2 + n / 8).expect("a few");
            held.push(places.take(source(n)).expect("a place"));
        }
        assert!(places.take(source(200)).is_none());
        drop(held);
        assert!(places.0.lock().expect("not poisoned").is_empty());
    }
}
