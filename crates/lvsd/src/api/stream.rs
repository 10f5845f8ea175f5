//! Streams events to clients as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use lvs_api::daemon::Event;
use tokio::sync::{broadcast, mpsc};

use super::peer::Deadline;
use super::places::ConnectionSlot;

/// Interval of the empty comments that keep a stream without events alive.
const BEAT: Duration = Duration::from_secs(10);

/// The body of an answer: events from now on.
#[derive(Debug)]
pub(super) struct Stream(mpsc::Receiver<Bytes>);

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.0.poll_recv(context);
        next.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// Returns a stream that sends `events` as long as the client reads. The end of the stream releases
/// the slot `place`.
pub(super) fn stream_events(
    events: broadcast::Receiver<Arc<Event>>,
    deadline: Deadline,
    place: Option<ConnectionSlot>,
) -> Stream {
    let (sender, stream) = mpsc::channel(1);
    tokio::spawn(async move {
        feed(events, &sender, &deadline).await;
        drop(place);
    });
    Stream(stream)
}

async fn feed(
    mut events: broadcast::Receiver<Arc<Event>>,
    sender: &mpsc::Sender<Bytes>,
    deadline: &Deadline,
) {
    loop {
        let text = tokio::select! {
            () = sender.closed() => return,
            event = events.recv() => match event {
                Ok(event) => text(&event),
                // The numbers of the events show the gap.
                Err(broadcast::error::RecvError::Lagged(_)) => continue,
                Err(broadcast::error::RecvError::Closed) => return,
            },
            () = tokio::time::sleep(BEAT) => Bytes::from_static(b":\n\n"),
        };
        // Sending waits while the client does not read, and the deadline does not move.
        if sender.send(text).await.is_err() {
            return;
        }
        deadline.prolong();
    }
}

fn text(event: &Event) -> Bytes {
    let json = serde_json::to_string(event).unwrap_or_default();
    Bytes::from(format!("data: {json}\n\n"))
}
