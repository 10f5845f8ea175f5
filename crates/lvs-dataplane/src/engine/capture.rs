//! Packets shown to whoever asks, each with what was decided about it.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{SystemTime, UNIX_EPOCH};

use lvs_core::api::{CaptureFilter, CapturedPacket};
use lvs_core::{Forwarding, Tuple, Verdict};

use super::virtual_::hex;

/// Packets that may wait for a reader; the next ones are lost to it.
pub(super) const QUEUE: usize = 4096;

/// One reader.
#[derive(Debug)]
pub(super) struct Capture {
    filter: CaptureFilter,
    out: SyncSender<CapturedPacket>,
    lost: u64,
}

impl Capture {
    pub(super) fn new(filter: CaptureFilter, out: SyncSender<CapturedPacket>) -> Self {
        Self {
            filter,
            out,
            lost: 0,
        }
    }

    /// Shows a packet if the filter takes it. `false`: the reader is gone.
    pub(super) fn show(&mut self, tuple: Option<Tuple>, packet: &Shown<'_>) -> bool {
        if !takes(&self.filter, tuple, packet.dropped) {
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
        match self.out.try_send(packet) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.lost += 1;
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// A packet to show.
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

/// What was decided, in words, and whether the packet was dropped.
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
                "left to this host ({}): {}",
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
                reason.describe().trim()
            ),
            true,
        ),
        Verdict::Unreachable(reason) => (
            format!("refused ({}): {}", reason.name(), reason.describe()),
            true,
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use lvs_core::Protocol;

    use super::*;

    #[test]
    fn a_filter_takes_what_it_names_and_a_slow_reader_is_told_of_its_losses() {
        let tuple = Tuple {
            protocol: Protocol::TCP,
            src: ([192, 0, 2, 1], 4000).into(),
            dst: ([198, 51, 100, 1], 80).into(),
        };
        let filter = |text: &str| serde_json::from_str::<CaptureFilter>(text).expect("a filter");
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
        let (out, packets) = sync_channel(1);
        let mut capture = Capture::new(CaptureFilter::default(), out);
        let packet = Shown {
            interface: "eth0",
            ethernet: true,
            frame: &[1, 0xab],
            verdict: "dropped",
            dropped: true,
        };
        assert!(capture.show(None, &packet) && capture.show(None, &packet));
        let first = packets.recv().expect("the first");
        assert_eq!((first.frame.as_str(), first.lost), ("01ab", 0));
        assert!(capture.show(None, &packet));
        assert_eq!(packets.recv().expect("the third").lost, 1);
        drop(packets);
        assert!(!capture.show(None, &packet));
    }
}
