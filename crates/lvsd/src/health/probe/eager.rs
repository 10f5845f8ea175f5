//! Connections to servers that answer before they receive a request, and that close connections in
//! unusual ways.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection from which nothing can be read before something was written.
///
/// Some servers answer as soon as a client connects (a program of xinetd, socat), and an HTTP
/// client refuses bytes that arrive before its request. This type delays the answer until the
/// request has been written. If the request cannot be written any more, that is not an error: the
/// answer may have arrived before. A reset after an answer counts as the end of the connection.
#[derive(Debug)]
pub(super) struct Eager<S> {
    stream: S,
    asked: bool,
    answered: bool,
    /// The reader that waits until the request is written.
    reader: Option<Waker>,
}

impl<S> Eager<S> {
    pub(super) const fn new(stream: S) -> Self {
        Self {
            stream,
            asked: false,
            answered: false,
            reader: None,
        }
    }
}

/// Whether a read error means that the server closed the connection.
pub(super) fn hangs_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            // A TLS connection that was closed without close_notify.
            | io::ErrorKind::UnexpectedEof
    )
}

impl<S: AsyncRead + Unpin> AsyncRead for Eager<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.asked {
            self.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        match read {
            Err(error) if self.answered && hangs_up(&error) => Poll::Ready(Ok(())),
            read => {
                self.answered |= buffer.filled().len() > before;
                Poll::Ready(read)
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Eager<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.asked = true;
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(written.unwrap_or(bytes.len())))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let _ = ready!(Pin::new(&mut self.stream).poll_flush(context));
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let _ = ready!(Pin::new(&mut self.stream).poll_shutdown(context));
        Poll::Ready(Ok(()))
    }
}
