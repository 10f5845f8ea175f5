//! An HTTP server for untrusted clients: one request for each connection, with limits for size and
//! time.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;

use super::peer::{Deadline, FULL, Peer};
use super::places::Holder;
use super::{Api, routes};

/// Maximum length of the request line and the headers together, in bytes.
const HEAD_MAX: usize = 16 << 10;
/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 64;
/// Longest time until the request line and the headers have arrived.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// Listens on an address. After this process has exited, another daemon can listen on the address
/// at once.
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

/// Accepts connections without end, and serves each in a task of its own. A client without a free
/// slot gets an error response.
pub(super) async fn accept(listener: TcpListener, api: &Arc<Api>) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // No descriptors are free; wait until other connections close.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some(place) = api.place(Holder::Tcp(peer.ip())) else {
            let text = refusal(StatusCode::SERVICE_UNAVAILABLE, FULL);
            let _ = stream.try_write(text.as_bytes());
            continue;
        };
        let api = Arc::clone(api);
        tokio::spawn(async move {
            // An error concerns only this client.
            let _ = serve(stream, api, Peer::Tcp(peer)).await;
            drop(place);
        });
    }
}

/// A complete error response, for a client whose request is not read.
pub(crate) fn refusal(code: StatusCode, why: &str) -> String {
    let body = serde_json::json!({ "error": { "message": why } });
    let body = format!("{body}\n");
    let later = match code {
        StatusCode::SERVICE_UNAVAILABLE => "retry-after: 5\r\n",
        _ => "",
    };
    format!(
        "HTTP/1.1 {code}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{later}connection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Serves one connection, on which one request is accepted.
///
/// # Errors
/// The client disconnected, sent an invalid request, or exceeded a time limit.
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    api: Arc<Api>,
    peer: Peer,
) -> io::Result<()> {
    let deadline = Deadline::new(&peer);
    let kept = deadline.clone();
    let answer = service_fn(move |mut request: Request<Incoming>| {
        let (api, peer) = (Arc::clone(&api), peer.clone());
        request.extensions_mut().insert(kept.clone());
        async move {
            let response = routes::answer(&api, request, &peer).await;
            api.counters.http(response.status().as_u16());
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
    let mut connection = pin!(connection);
    loop {
        let until = deadline.get();
        match tokio::time::timeout_at(until, &mut connection).await {
            Ok(done) => return done.map_err(io::Error::other),
            Err(_) if deadline.get() > until => {}
            Err(late) => return Err(io::Error::other(late)),
        }
    }
}
