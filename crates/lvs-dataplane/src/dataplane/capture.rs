//! Packet capture: clients of the control socket receive packets, each with the decision of the
//! dataplane.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use lvs_core::api::{CaptureFilter, CapturedPacket};
use lvs_core::{Forwarding, Tuple, Verdict};

/// Maximum number of simultaneous captures.
pub(super) const READERS_MAX: usize = 8;
/// Maximum number of queued bytes for one reader, as hexadecimal text: two for each byte of a
/// frame. Packets above this limit are lost.
const BYTES_MAX: usize = 4 << 20;
/// Maximum number of queued packets for one reader. Packets above this limit are lost.
pub(super) const QUEUE: usize = 4096;

/// The number of readers, limited to [`READERS_MAX`].
#[derive(Clone, Debug, Default)]
pub(super) struct Readers(Arc<AtomicUsize>);

impl Readers {
    /// Reserves a slot for another reader; `None` if there are [`READERS_MAX`]. Dropping the slot
    /// frees it.
    pub(super) fn take(&self) -> Option<ReaderPlace> {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count < READERS_MAX).then_some(count + 1)
            })
            .is_ok()
            .then(|| ReaderPlace(self.clone()))
    }
}

#[derive(Debug)]
pub(super) struct ReaderPlace(Readers);

impl Drop for ReaderPlace {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The packet worker's side of a capture.
#[derive(Debug)]
pub(super) struct Capture {
    filter: CaptureFilter,
    out: SyncSender<CapturedPacket>,
    reader: Weak<Reader>,
    lost: u64,
}

/// The receiving end of a capture. Dropping it ends the capture, even if no packet matches the
/// filter.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Number of queued bytes for the reader, as hexadecimal text.
    waiting: AtomicUsize,
}

impl Reader {
    /// Subtracts the bytes of a packet that the reader has received.
    pub(super) fn took(&self, packet: &CapturedPacket) {
        self.waiting.fetch_sub(packet.frame.len(), Ordering::AcqRel);
    }
}

impl Capture {
    pub(super) const fn new(
        filter: CaptureFilter,
        out: SyncSender<CapturedPacket>,
        reader: Weak<Reader>,
    ) -> Self {
        Self {
            filter,
            out,
            reader,
            lost: 0,
        }
    }

    /// Whether the filter accepts a forwarded packet with one of these addresses and ports; `false`
    /// if the reader has ended.
    pub(super) fn shows_forwarded(&self, tuples: &[Tuple]) -> bool {
        self.reader.strong_count() > 0
            && tuples
                .iter()
                .any(|tuple| takes(&self.filter, Some(*tuple), false))
    }

    /// Queues a packet for the reader if the filter matches; `false` if the reader has ended. If
    /// the queue has no room, counts the packet as lost.
    pub(super) fn show(&mut self, tuple: Option<Tuple>, packet: &Shown<'_>) -> bool {
        let Some(reader) = self.reader.upgrade() else {
            return false;
        };
        if !takes(&self.filter, tuple, packet.dropped) {
            return true;
        }
        // The control socket sends frames in hexadecimal.
        let length = packet.frame.len() * 2;
        if reader.waiting.load(Ordering::Acquire) + length > BYTES_MAX {
            self.lost += 1;
            return true;
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let packet = CapturedPacket {
            time_us: time.map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(0)),
            interface: packet.interface.to_owned(),
            ethernet: packet.ethernet,
            frame: hex(packet.frame),
            verdict: packet.verdict.to_owned(),
            lost: self.lost,
        };
        reader.waiting.fetch_add(length, Ordering::AcqRel);
        match self.out.try_send(packet) {
            Ok(()) => true,
            Err(TrySendError::Full(packet)) => {
                reader.took(&packet);
                self.lost += 1;
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Shown<'a> {
    pub(super) interface: &'a str,
    pub(super) ethernet: bool,
    pub(super) frame: &'a [u8],
    pub(super) verdict: &'a str,
    pub(super) dropped: bool,
}

fn takes(filter: &CaptureFilter, tuple: Option<Tuple>, dropped: bool) -> bool {
    if filter.dropped && !dropped {
        return false;
    }
    if filter.protocol.is_none() && filter.hosts.is_empty() && filter.ports.is_empty() {
        return true;
    }
    let Some(Tuple { protocol, src, dst }) = tuple else {
        return false;
    };
    filter.protocol.is_none_or(|number| number == protocol.0)
        && filter
            .hosts
            .iter()
            .all(|host| src.ip() == *host || dst.ip() == *host)
        && filter
            .ports
            .iter()
            .all(|port| src.port() == *port || dst.port() == *port)
}

/// Describes the decision on a packet, and returns whether the packet was dropped, with or without
/// an answer to its sender.
pub(super) fn describe(verdict: &Verdict) -> (String, bool) {
    match verdict {
        Verdict::Forward(forward) => {
            let way = match forward.method {
                Forwarding::Nat => "NAT",
                Forwarding::FullNat => "full NAT",
                Forwarding::Route => "direct routing",
                Forwarding::Tunnel => "a tunnel",
                Forwarding::Local => "local delivery",
                Forwarding::Bypass => "bypass",
            };
            let new = if forward.new { ", new connection" } else { "" };
            let source = forward
                .source
                .map_or_else(String::new, |source| format!(" from {source}"));
            (
                format!("forwarded to {}{source} by {way}{new}", forward.target),
                false,
            )
        }
        Verdict::Reply(reply) => {
            let source = reply
                .source
                .map_or_else(String::new, |source| format!(" from {source}"));
            (format!("answer, sent to the client{source}"), false)
        }
        Verdict::Accept(reason) => (
            format!(
                "passed to this host ({}): {}",
                reason.name(),
                reason.describe()
            ),
            false,
        ),
        Verdict::Drop(reason) => (
            format!("dropped ({}): {}", reason.name(), reason.describe()),
            true,
        ),
        Verdict::Reset(reason) => (
            format!(
                "answered with a reset ({}): {}",
                reason.name(),
                reason.describe()
            ),
            true,
        ),
        Verdict::Unreachable(reason) => (
            format!("refused ({}): {}", reason.name(), reason.describe()),
            true,
        ),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use lvs_core::Protocol;

    use super::*;

    #[test]
    fn filtered_capture_contains_matches_and_counts_losses_of_slow_reader() {
        let tuple = Tuple {
            protocol: Protocol::TCP,
            src: ([192, 0, 2, 1], 4000).into(),
            dst: ([198, 51, 100, 1], 80).into(),
        };
        let filter =
            |text: &str| serde_json::from_str::<CaptureFilter>(text).expect("the filter is valid");
        for (text, taken) in [
            ("{}", true),
            (
                r#"{"protocol": 6, "hosts": ["192.0.2.1"], "ports": [80]}"#,
                true,
            ),
            (r#"{"ports": [80, 4000]}"#, true),
            (r#"{"ports": [80, 81]}"#, false),
            (r#"{"protocol": 17}"#, false),
            (r#"{"dropped": true}"#, false),
        ] {
            assert_eq!(takes(&filter(text), Some(tuple), false), taken, "{text}");
        }
        assert!(!takes(&filter(r#"{"ports": [80]}"#), None, false));
        for (text, shown) in [("{}", true), (r#"{"dropped": true}"#, false)] {
            let (out, _packets) = sync_channel(1);
            let reader = Arc::<Reader>::default();
            let capture = Capture::new(filter(text), out, Arc::downgrade(&reader));
            assert_eq!(capture.shows_forwarded(&[tuple]), shown, "{text}");
            drop(reader);
            assert!(!capture.shows_forwarded(&[tuple]), "{text}");
        }
        let (out, packets) = sync_channel(1);
        let reader = Arc::<Reader>::default();
        let mut capture = Capture::new(CaptureFilter::default(), out, Arc::downgrade(&reader));
        let packet = Shown {
            interface: "eth0",
            ethernet: true,
            frame: &[1, 0xab],
            verdict: "dropped",
            dropped: true,
        };
        assert!(capture.show(None, &packet) && capture.show(None, &packet));
        let first = packets.recv().expect("the first packet is copied");
        assert_eq!((first.frame.as_str(), first.lost), ("01ab", 0));
        assert!(capture.show(None, &packet));
        assert_eq!(packets.recv().expect("the third packet is copied").lost, 1);
        drop(packets);
        assert!(!capture.show(None, &packet));
    }

    #[test]
    fn capture_bounds_readers_and_waiting_packets_and_ends_without_reader() {
        let (out, packets) = sync_channel(QUEUE);
        let reader = Arc::<Reader>::default();
        let filter = CaptureFilter {
            ports: vec![9],
            ..CaptureFilter::default()
        };
        let mut picky = Capture::new(filter, out.clone(), Arc::downgrade(&reader));
        let mut greedy = Capture::new(CaptureFilter::default(), out, Arc::downgrade(&reader));
        let packet = Shown {
            interface: "eth0",
            ethernet: true,
            frame: &[0; 65_000],
            verdict: "passed to this host",
            dropped: false,
        };
        for _ in 0..1000 {
            assert!(picky.show(None, &packet) && greedy.show(None, &packet));
        }
        let waiting: Vec<_> = packets.try_iter().inspect(|one| reader.took(one)).collect();
        let bytes: usize = waiting.iter().map(|one| one.frame.len()).sum();
        assert!((1..=BYTES_MAX).contains(&bytes), "{bytes}");
        assert!(greedy.show(None, &packet));
        let next = packets.recv().expect("the queue has room again");
        assert_eq!(next.lost, 1000 - waiting.len() as u64);
        // Short packets reach the limit of packets, not the limit of bytes.
        let short = Shown {
            frame: &[0; 60],
            ..packet
        };
        for _ in 0..QUEUE + 5 {
            assert!(greedy.show(None, &short));
        }
        assert_eq!(
            packets.try_iter().inspect(|one| reader.took(one)).count(),
            QUEUE
        );
        let lost = next.lost + 5;
        assert!(greedy.show(None, &short));
        assert_eq!(packets.recv().expect("the queue has room again").lost, lost);
        // Dropping the reader ends both captures, also the one that has queued no packet.
        drop(reader);
        let readers = Readers::default();
        let all: Vec<_> = std::iter::from_fn(|| readers.take()).collect();
        assert_eq!(all.len(), READERS_MAX);
        drop(all);
        assert!(readers.take().is_some());
        assert!(!picky.show(None, &packet) && !greedy.show(None, &packet));
    }
}
