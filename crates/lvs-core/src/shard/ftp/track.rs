//! The tracked TCP state of an FTP control connection, like that of netfilter's connection tracking
//! for `ip_vs_ftp`: the sent and acknowledged numbers of each side, and the segments that it
//! ignores.

use super::Tcp;
use crate::TcpFlags;
use crate::verdict::is_after;

/// How far a stream may be ahead of what has been acknowledged of it: the largest window there is
/// (RFC 7323 section 2.3).
const WINDOW_MAX: u32 = 1 << 30;

/// The largest window scale (RFC 7323 section 2.3).
const SCALE_MAX: u8 = 14;

/// A side of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Client,
    Server,
}

/// The flag of a segment that counts for the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Syn,
    SynAck,
    Fin,
    Ack,
    Reset,
    None,
}

impl Kind {
    const fn of(flags: TcpFlags) -> Self {
        if flags.has(TcpFlags::RST) {
            Self::Reset
        } else if flags.has(TcpFlags::SYN) {
            if flags.has(TcpFlags::ACK) {
                Self::SynAck
            } else {
                Self::Syn
            }
        } else if flags.has(TcpFlags::FIN) {
            Self::Fin
        } else if flags.has(TcpFlags::ACK) {
            Self::Ack
        } else {
            Self::None
        }
    }
}

/// The states of connection tracking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// No segment has been seen.
    #[default]
    New,
    SynSent,
    SynReceived,
    Established,
    FinWait,
    CloseWait,
    LastAck,
    TimeWait,
    Close,
}

/// The effect of a segment on the state.
enum Step {
    To(State),
    /// The segment passes and is not followed.
    Ignore,
    /// Connection tracking does not know such a segment.
    Invalid,
}

impl State {
    fn step(self, from: From, kind: Kind) -> Step {
        use State::{
            Close, CloseWait, Established, FinWait, LastAck, New, SynReceived, SynSent, TimeWait,
        };
        let next = match (kind, self) {
            (Kind::Reset, _) => Close,
            (Kind::None, New) => Established,
            (Kind::None, _) => return Step::Invalid,
            (Kind::Syn, New | SynSent | TimeWait | Close) if from == From::Client => SynSent,
            (Kind::Syn, _) if from == From::Client => return Step::Ignore,
            (Kind::Syn, _) => return Step::Invalid,
            (Kind::SynAck, New | SynSent) if from == From::Server => SynReceived,
            (Kind::SynAck, _) if from == From::Server => return Step::Ignore,
            (Kind::SynAck, SynReceived) => SynReceived,
            (Kind::SynAck, _) => return Step::Invalid,
            (Kind::Ack, SynSent) if from == From::Server => return Step::Ignore,
            (Kind::Ack, SynReceived) if from == From::Server => SynReceived,
            (Kind::Fin | Kind::Ack, SynSent) => return Step::Invalid,
            (Kind::Fin, New | SynReceived | Established) => FinWait,
            (Kind::Fin, FinWait | CloseWait | LastAck) => LastAck,
            (Kind::Ack, New | SynReceived | Established) => Established,
            (Kind::Ack, FinWait | CloseWait) => CloseWait,
            (Kind::Ack, LastAck | TimeWait) | (Kind::Fin, TimeWait) => TimeWait,
            (Kind::Fin | Kind::Ack, Close) => Close,
        };
        Step::To(next)
    }
}

/// One side's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stream {
    /// Past the last byte that was sent, once something was sent.
    end: Option<u32>,
    /// The other side has acknowledged the stream up to here.
    acknowledged: Option<u32>,
    /// How far the other side's window reaches, once its SYN has been seen.
    limit: Option<u32>,
    /// The window scale that its SYN offers.
    scale: Option<u8>,
}

impl Stream {
    /// The stream that a SYN with this end and this offer begins.
    const fn begin(end: u32, scale: Option<u8>) -> Self {
        Self {
            end: Some(end),
            acknowledged: None,
            limit: Some(end),
            scale,
        }
    }

    /// The other side acknowledges this much, and has room for `window` bytes more.
    fn acknowledge(&mut self, to: u32, window: u32) {
        extend(&mut self.acknowledged, to, None);
        if self.limit.is_some() {
            extend(&mut self.limit, to.wrapping_add(window), None);
        }
    }
}

/// The last segment that passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Last {
    from: From,
    kind: Kind,
    end: u32,
    scale: Option<u8>,
}

/// The tracked state of a control connection, in the server's own numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Track {
    state: State,
    client: Stream,
    server: Stream,
    last: Option<Last>,
    /// A FIN has begun its end.
    fin: bool,
}

impl Track {
    /// Whether a client's segment begins a new connection on the addresses and ports of one that has
    /// ended.
    pub(super) fn begins_again(&self, tcp: &Tcp<'_>) -> bool {
        let reset = |last: Last| last.from == From::Client && last.kind == Kind::Reset;
        Kind::of(tcp.flags) == Kind::Syn
            && match self.state {
                State::New => true,
                State::TimeWait | State::Close => self.fin || self.last.is_some_and(reset),
                _ => false,
            }
    }

    /// Follows a segment that acknowledges `acknowledged`, if it acknowledges. `true` if it belongs
    /// to the connection.
    pub(super) fn follow(&mut self, from: From, tcp: &Tcp<'_>, acknowledged: Option<u32>) -> bool {
        let kind = Kind::of(tcp.flags);
        let (last, end) = (self.last, tcp.end());
        let here = Last {
            from,
            kind,
            end,
            scale: tcp.scale,
        };
        let mut step = self.state.step(from, kind);
        if let Step::To(State::SynSent) = step
            && matches!(self.state, State::TimeWait | State::Close)
        {
            step = Step::Ignore;
        }
        let next = match step {
            Step::To(next) => next,
            Step::Ignore => {
                self.last = Some(here);
                // Client and server agree on a connection that begins again: so does the director.
                if kind == Kind::SynAck
                    && let Some(last) = last
                    && (last.from, last.kind) == (From::Client, Kind::Syn)
                    && acknowledged == Some(last.end)
                {
                    self.state = State::SynReceived;
                    self.client = Stream::begin(last.end, last.scale);
                    self.server = Stream::begin(end, tcp.scale);
                    self.client.acknowledge(last.end, tcp.window.into());
                }
                return true;
            }
            Step::Invalid => self.state,
        };
        let (sent, received) = match from {
            From::Client => (&mut self.client, &mut self.server),
            From::Server => (&mut self.server, &mut self.client),
        };
        let known = match (acknowledged, received.end) {
            (None, _) => true,
            (Some(acknowledged), Some(end)) => !is_after(acknowledged, end),
            (Some(_), None) => from == From::Server || self.state != State::SynSent,
        };
        let begins = matches!(kind, Kind::Syn | Kind::SynAck);
        let fits = |limit| begins || !is_after(tcp.sequence, limit);
        let possible = known && sent.limit.is_none_or(fits);
        if !possible || matches!(step, Step::Invalid) {
            return possible;
        }
        if kind == Kind::Reset {
            let train = last.is_some_and(|last| {
                (last.from, last.kind, last.end) == (from, Kind::Ack, tcp.sequence)
            });
            match sent.acknowledged {
                Some(_) if tcp.sequence == 0 && self.state != State::Established => {}
                Some(acknowledged) if is_after(acknowledged, tcp.sequence) => return true,
                Some(acknowledged)
                    if self.state == State::Established
                        && tcp.sequence != acknowledged
                        && !train =>
                {
                    self.last = Some(here);
                    return true;
                }
                _ => {}
            }
        }
        let grows = sent.end.is_none_or(|known| is_after(end, known));
        if begins && grows {
            *sent = Stream::begin(end, tcp.scale);
        }
        extend(&mut sent.end, end, sent.acknowledged);
        if let Some(acknowledged) = acknowledged {
            let scale = match (sent.scale, received.scale) {
                (Some(scale), Some(_)) if !begins => scale.min(SCALE_MAX),
                _ => 0,
            };
            received.acknowledge(acknowledged, u32::from(tcp.window) << scale);
        }
        self.fin |= next == State::FinWait;
        self.state = next;
        self.last = Some(here);
        true
    }
}

/// Moves a mark forward, but no further ahead of what is `acknowledged` than a window reaches: else
/// a few forged segments would carry it around the circle of numbers.
fn extend(end: &mut Option<u32>, to: u32, acknowledged: Option<u32>) {
    let reaches = acknowledged.is_none_or(|from| to.wrapping_sub(from) <= WINDOW_MAX);
    if reaches && end.is_none_or(|end| is_after(to, end)) {
        *end = Some(to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(flags: u8, sequence: u32, acknowledgement: u32) -> Tcp<'static> {
        Tcp {
            sequence,
            acknowledgement,
            flags: TcpFlags(flags),
            window: 8192,
            scale: None,
            payload: &[],
        }
    }

    fn follow(track: &mut Track, from: From, flags: u8, sequence: u32, ack: u32) -> bool {
        let tcp = tcp(flags, sequence, ack);
        let acknowledged = tcp.acknowledges().then_some(ack);
        track.follow(from, &tcp, acknowledged)
    }

    const SYN: u8 = TcpFlags::SYN;
    const ACK: u8 = TcpFlags::ACK;

    fn opened() -> Track {
        let mut track = Track::default();
        assert!(follow(&mut track, From::Client, SYN, 1000, 0));
        assert!(follow(&mut track, From::Server, SYN | ACK, 5000, 1001));
        assert!(follow(&mut track, From::Client, ACK, 1001, 5001));
        track
    }

    #[test]
    fn track_forged_segments_do_not_carry_a_stream_around_the_circle() {
        let mut track = Track::default();
        assert!(follow(&mut track, From::Client, ACK, 1001, 5001));
        assert!(follow(&mut track, From::Server, ACK, 5001, 1001));
        for jump in 1..=4u32 {
            let far = 1001u32.wrapping_add(jump.wrapping_mul(0x3fff_ffff));
            follow(&mut track, From::Client, ACK, far, 5001);
        }
        assert!(
            follow(&mut track, From::Server, ACK, 5001, 1011),
            "the server's own go on"
        );
        let ahead = track.client.end.map(|end| end.wrapping_sub(1001));
        assert!(ahead.is_some_and(|ahead| ahead <= WINDOW_MAX), "{ahead:?}");
    }

    #[test]
    fn track_numbers_beyond_the_window_are_impossible() {
        for (offers, window) in [([None, None], 8192), ([Some(2), Some(3)], 8192 << 3)] {
            let mut track = Track::default();
            let mut send = |from, flags, sequence, ack: u32, scale| {
                let mut tcp = tcp(flags, sequence, ack);
                tcp.scale = scale;
                track.follow(from, &tcp, (ack != 0).then_some(ack))
            };
            assert!(send(From::Client, SYN, 1000, 0, offers[0]));
            assert!(send(From::Server, SYN | ACK, 5000, 1001, offers[1]));
            assert!(send(From::Client, ACK, 1001, 5001, None));
            assert!(send(From::Server, ACK, 5001, 1001, None));
            assert!(!send(From::Client, ACK, 1002 + window, 5001, None));
            assert!(send(From::Client, ACK, 1001 + window, 5001, None));
        }
    }

    #[test]
    fn track_syn_on_open_connection_sets_numbers_when_acknowledged() {
        let mut track = opened();
        let before = track;
        assert!(follow(&mut track, From::Client, SYN, 900_000, 0));
        assert_eq!((track.client, track.server), (before.client, before.server));
        assert!(follow(&mut track, From::Server, SYN | ACK, 70_000, 900_001));
        assert!(follow(&mut track, From::Client, ACK, 900_001, 70_001));
        assert!(!follow(&mut track, From::Client, ACK, 900_001, 70_002));
    }

    #[test]
    fn track_syn_ack_of_another_syn_sets_nothing() {
        for between in [false, true] {
            let mut track = opened();
            assert!(follow(&mut track, From::Client, SYN, 900_000, 0));
            if between {
                // A challenge: the server has the old connection.
                assert!(follow(&mut track, From::Server, ACK, 5001, 1001));
            }
            let ack = 900_001 + u32::from(!between);
            assert!(follow(&mut track, From::Server, SYN | ACK, 70_000, ack));
            assert!(!follow(&mut track, From::Client, ACK, 900_001, 70_001));
            assert!(follow(&mut track, From::Client, ACK, 1001, 5001));
        }
    }
}
