//! The tracked TCP state of an FTP control connection, like netfilter's connection tracking for
//! `ip_vs_ftp`.
//!
//! The state determines which segments belong to the connection. The kernel changes the sequence
//! numbers only in these segments, and drops a client's other acknowledgements.

use super::super::tcp;
use super::Tcp;
use crate::TcpFlags;
use crate::verdict::{Shift, is_after};

/// An acknowledgement is still valid if it is at most this number of bytes behind the data that
/// the other side has sent. If the window of the acknowledging side is larger, the window counts
/// instead.
const LATE_MIN: u32 = 66_000;

/// The largest window scale (RFC 7323 section 2.3).
const SCALE_MAX: u8 = 14;

/// The side that sent a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Client,
    Server,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    /// The segment belongs to the tracked connection.
    Known,
    /// The segment is the first of a tracked connection.
    New,
    /// The segment does not belong to the tracked connection.
    Foreign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Syn,
    SynAck,
    Fin,
    Ack,
    Reset,
}

impl Kind {
    /// The kind of a segment; `None` if its flags or its header are impossible.
    pub(super) const fn of(tcp: &Tcp<'_>) -> Option<Self> {
        const SYN: u8 = TcpFlags::SYN;
        const ACK: u8 = TcpFlags::ACK;
        const FIN: u8 = TcpFlags::FIN;
        const RST: u8 = TcpFlags::RST;
        const URG: u8 = TcpFlags::URG;
        const FIN_ACK: u8 = FIN | ACK;
        const SYN_ACK: u8 = SYN | ACK;
        const RST_ACK: u8 = RST | ACK;
        if !tcp.whole {
            return None;
        }
        match tcp.flags.0 & (SYN | ACK | FIN | RST | URG) {
            flags if flags == SYN || flags == SYN | URG => Some(Self::Syn),
            SYN_ACK => Some(Self::SynAck),
            flags if flags == FIN_ACK || flags == FIN_ACK | URG => Some(Self::Fin),
            flags if flags == ACK || flags == ACK | URG => Some(Self::Ack),
            RST | RST_ACK => Some(Self::Reset),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    SynSent,
    SynSentByBoth,
    SynReceived,
    Established,
    FinWait,
    CloseWait,
    LastAck,
    TimeWait,
    Close,
}

/// The effect of a segment on the tracked state.
enum Step {
    To(State),
    /// The segment is valid, and does not change the state.
    Ignore,
    /// The segment is invalid in this state.
    Invalid,
}

impl State {
    /// Returns the effect of a segment of this kind on the state. `reply`: the segment is from the
    /// side that did not open the connection.
    const fn step(self, reply: bool, kind: Kind) -> Step {
        use State::{
            Close, CloseWait, Established, FinWait, LastAck, SynReceived, SynSent, SynSentByBoth,
            TimeWait,
        };
        let next = match (kind, self) {
            (Kind::Reset, _) | (Kind::Fin | Kind::Ack, Close) => Close,
            (Kind::Syn, SynSentByBoth) => SynSentByBoth,
            (Kind::Syn, SynSent) if reply => SynSentByBoth,
            (Kind::Syn, SynSent | TimeWait) => SynSent,
            (Kind::Syn, _) if reply => return Step::Invalid,
            (Kind::Syn, Close) => SynSent,
            (Kind::Syn, _) => return Step::Ignore,
            (Kind::SynAck, SynSentByBoth) => SynReceived,
            (Kind::SynAck, SynSent) if reply => SynReceived,
            (Kind::SynAck, _) if reply => return Step::Ignore,
            (Kind::SynAck, SynReceived) => SynReceived,
            (Kind::SynAck, _) | (Kind::Fin, SynSent | SynSentByBoth) => return Step::Invalid,
            (Kind::Ack, SynSent | SynSentByBoth) if reply => return Step::Ignore,
            (Kind::Ack, SynSent | SynSentByBoth) => return Step::Invalid,
            (Kind::Fin, SynReceived | Established) => FinWait,
            (Kind::Fin, FinWait | CloseWait | LastAck) => LastAck,
            (Kind::Ack, SynReceived) if reply => SynReceived,
            (Kind::Ack, SynReceived | Established) => Established,
            (Kind::Ack, FinWait | CloseWait) => CloseWait,
            (Kind::Ack, LastAck | TimeWait) | (Kind::Fin, TimeWait) => TimeWait,
        };
        Step::To(next)
    }

    /// Whether the connection is ending, so that a reset with any sequence number is valid.
    const fn is_ending(self) -> bool {
        matches!(
            self,
            Self::FinWait | Self::CloseWait | Self::LastAck | Self::TimeWait | Self::Close
        )
    }
}

/// The options of a SYN that tracking uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) scale: Option<u8>,
    pub(super) sack: bool,
}

impl Offer {
    /// Reads the options of a SYN (RFC 7323 section 2.2, RFC 2018 section 2).
    pub(super) fn read(options: &[u8]) -> Self {
        const WINDOW_SCALE: u8 = 3;
        const SACK_PERMITTED: u8 = 4;
        let mut offer = Self::default();
        for option in tcp::options(options) {
            match option {
                (WINDOW_SCALE, &[scale]) => offer.scale = Some(scale),
                (SACK_PERMITTED, &[]) => offer.sack = true,
                _ => {}
            }
        }
        offer
    }
}

/// The sequence numbers of one direction of the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stream {
    /// The sequence number after the last byte that this side has sent.
    end: u32,
    /// The sequence number at which the receiver's window ends.
    limit: u32,
    /// The largest window that the side has announced; 0 before its first segment.
    window: u32,
    scale: u8,
    /// The highest acknowledgement number that this side has sent.
    acknowledged: Option<u32>,
    offer: Offer,
    /// Whether this side has sent a FIN.
    closes: bool,
    /// Whether tracking began in the middle of the connection, so that sequence numbers outside of
    /// the window are valid as well.
    liberal: bool,
}

impl Stream {
    /// Initialises the stream with the sequence numbers of its first segment, or of a later SYN.
    fn begin(&mut self, end: u32, window: u16, offer: Option<Offer>) {
        (self.end, self.limit) = (end, end);
        self.window = u32::from(window).max(1);
        // A SYN without options does not change those of an earlier SYN.
        if let Some(offer) = offer {
            self.acknowledged = None;
            self.closes = false;
            self.offer = offer;
            self.scale = offer.scale.unwrap_or(0).min(SCALE_MAX);
        }
    }
}

/// Properties of the last segment. Some segments do not set all fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Last {
    from: From,
    /// Kind of the last segment; `None` while the first segment is examined.
    kind: Option<Kind>,
    end: u32,
    acknowledged: u32,
    window: u16,
    /// The options of an ignored SYN.
    offer: Offer,
    /// Whether the receiver may answer an ignored SYN with a challenge acknowledgement (RFC 5961).
    challenge: bool,
    /// Whether the connection was opened by SYNs of both sides.
    both: bool,
}

impl Last {
    fn is(&self, from: From, kind: Kind) -> bool {
        (self.from, self.kind) == (from, Some(kind))
    }
}

/// Whether the sequence numbers of a segment are possible.
enum Fit {
    Accept,
    Ignore,
    Invalid,
}

/// The tracked state of a control connection. Sequence numbers of the server's stream are stored as
/// the server uses them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Track {
    state: State,
    /// The side that opened the connection: it sent the first segment.
    opener: From,
    client: Stream,
    server: Stream,
    last: Last,
    /// Whether the side that did not open the connection has sent a segment.
    replied: bool,
    /// Whether the connection was established, and both sides have sent segments.
    assured: bool,
}

/// Tracks a segment, and returns its relation to the connection. `shift` is the shift of the
/// server's stream.
pub(super) fn follow(
    track: &mut Option<Track>,
    from: From,
    tcp: &Tcp<'_>,
    shift: Shift,
) -> Relation {
    let Some(kind) = Kind::of(tcp) else {
        return Relation::Foreign;
    };
    if track.is_some_and(|track| track.ends_before(from, kind)) {
        *track = None;
    }
    let Some(known) = track else {
        *track = Track::begin(from, kind, tcp);
        return match track {
            Some(_) => Relation::New,
            None => Relation::Foreign,
        };
    };
    let mut goes_on = true;
    let belongs = known.follow(from, kind, tcp, shift, &mut goes_on);
    known.replied |= belongs && from != known.opener;
    if !goes_on {
        *track = None;
    }
    if belongs {
        Relation::Known
    } else {
        Relation::Foreign
    }
}

impl Track {
    /// The state after the first segment; `None` if tracking cannot begin with this segment.
    fn begin(from: From, kind: Kind, tcp: &Tcp<'_>) -> Option<Self> {
        let mut track = Self {
            state: State::SynSent,
            opener: from,
            client: Stream::default(),
            server: Stream::default(),
            last: Last {
                from,
                kind: None,
                end: 0,
                acknowledged: 0,
                window: 0,
                offer: Offer::default(),
                challenge: false,
                both: false,
            },
            replied: false,
            assured: false,
        };
        let (sent, received) = track.streams(from);
        sent.begin(tcp.end(), tcp.window, tcp.offer);
        match kind {
            Kind::Syn => {}
            Kind::Ack => {
                sent.limit = sent.end.wrapping_add(sent.window);
                for stream in [sent, received] {
                    stream.liberal = true;
                    stream.offer.sack = true;
                }
                track.state = State::Established;
            }
            _ => return None,
        }
        track.fit(from, kind, tcp, Shift::default(), None);
        track.last.kind = Some(kind);
        Some(track)
    }

    /// Whether a SYN opens a new connection with the same addresses and ports, because this
    /// connection has ended.
    fn ends_before(&self, from: From, kind: Kind) -> bool {
        let ended = match self.state {
            State::TimeWait => true,
            State::Close => from == self.opener,
            _ => false,
        };
        kind == Kind::Syn
            && ended
            && (self.client.closes || self.server.closes || self.last.is(from, Kind::Reset))
    }

    const fn streams(&mut self, from: From) -> (&mut Stream, &mut Stream) {
        match from {
            From::Client => (&mut self.client, &mut self.server),
            From::Server => (&mut self.server, &mut self.client),
        }
    }

    /// Tracks a segment; `true` if it belongs to the connection. Sets `goes_on` to `false` if
    /// tracking ends with this segment.
    fn follow(
        &mut self,
        from: From,
        kind: Kind,
        tcp: &Tcp<'_>,
        shift: Shift,
        goes_on: &mut bool,
    ) -> bool {
        let reply = from != self.opener;
        let mut old = self.state;
        let mut step = old.step(reply, kind);
        if matches!(step, Step::To(State::SynSent)) && matches!(old, State::TimeWait | State::Close)
        {
            step = Step::Ignore;
        }
        let mut fits = None;
        let next = match step {
            Step::Invalid => return false,
            Step::Ignore if self.is_answer(from, kind, tcp) => {
                self.begin_again(from);
                old = State::SynSent;
                State::SynReceived
            }
            Step::Ignore => {
                self.ignore(from, kind, tcp);
                return true;
            }
            Step::To(State::TimeWait)
                if old == State::LastAck
                    && kind == Kind::Ack
                    && self.last.challenge
                    && self.last.is(other(from), Kind::Syn) =>
            {
                self.last.challenge = false;
                return true;
            }
            Step::To(State::SynSentByBoth) => {
                self.last.both = true;
                State::SynSentByBoth
            }
            Step::To(State::SynReceived) if reply && kind == Kind::Ack && self.last.both => {
                State::Established
            }
            Step::To(State::Close) if kind == Kind::Reset => match self.reset(from, tcp) {
                Reset::Foreign => return false,
                Reset::Ends => {
                    fits = Some(Fit::Accept);
                    State::Close
                }
                Reset::IfItFits => State::Close,
                Reset::Challenged => old,
            },
            Step::To(next) => next,
        };
        match fits.unwrap_or_else(|| self.fit(from, kind, tcp, shift, Some(self.state))) {
            Fit::Accept => {}
            Fit::Ignore => return true,
            Fit::Invalid => {
                let ends = |kind| matches!(kind, Some(Kind::Reset | Kind::Fin));
                let answers = self.last.from != from && ends(self.last.kind);
                if self.assured && ends(Some(kind)) && !answers {
                    (self.last.from, self.last.kind) = (from, Some(kind));
                }
                return false;
            }
        }
        (self.last.from, self.last.kind) = (from, Some(kind));
        self.state = next;
        if next == State::FinWait && old != next {
            self.streams(from).0.closes = true;
        }
        if !self.replied {
            *goes_on = kind != Kind::Reset;
        } else if next == State::Established
            && matches!(old, State::SynReceived | State::Established)
        {
            self.assured = true;
        }
        true
    }

    /// Whether a SYN+ACK acknowledges a SYN that was ignored, so that client and server have begun
    /// a new connection.
    fn is_answer(&self, from: From, kind: Kind, tcp: &Tcp<'_>) -> bool {
        kind == Kind::SynAck
            && self.last.is(other(from), Kind::Syn)
            && tcp.acknowledgement == self.last.end
    }

    /// Restarts the tracking for a new connection: the SYN that was ignored before (`last`) has
    /// begun it, and `from` has answered this SYN with a SYN+ACK. The stream of `from` is empty
    /// until its SYN+ACK is examined.
    fn begin_again(&mut self, from: From) {
        self.last.challenge = false;
        let last = self.last;
        let (sent, received) = self.streams(from);
        *received = Stream {
            end: last.end,
            limit: last.end,
            window: u32::from(last.window).max(1),
            scale: last.offer.scale.unwrap_or(0).min(SCALE_MAX),
            acknowledged: None,
            offer: last.offer,
            closes: false,
            liberal: false,
        };
        *sent = Stream {
            liberal: sent.liberal,
            ..Stream::default()
        };
    }

    /// Stores the properties of a segment that is valid and does not change the state.
    fn ignore(&mut self, from: From, kind: Kind, tcp: &Tcp<'_>) {
        let last = &mut self.last;
        (last.from, last.kind) = (from, Some(kind));
        last.end = tcp.end();
        last.window = tcp.window;
        if kind == Kind::Syn && from == self.opener {
            last.offer = tcp.offer.unwrap_or_default();
            last.both = false;
            last.challenge = self.state == State::LastAck;
        }
        if kind == Kind::Ack && from != self.opener && self.state == State::SynSent {
            last.acknowledged = tcp.acknowledgement;
        }
    }

    fn reset(&self, from: From, tcp: &Tcp<'_>) -> Reset {
        if self.state.is_ending() {
            return Reset::Ends;
        }
        let other_side = match from {
            From::Client => &self.server,
            From::Server => &self.client,
        };
        let last = self.last.kind;
        if let Some(acknowledged) = other_side.acknowledged
            && last != Some(Kind::Syn)
        {
            let established = self.state == State::Established && self.assured;
            if tcp.sequence == 0 && !established {
                return Reset::IfItFits;
            }
            if is_after(acknowledged, tcp.sequence) {
                return Reset::Foreign;
            }
            let train = self.last.is(from, Kind::Ack) && tcp.sequence == self.last.end;
            if !established || tcp.sequence == acknowledged || train {
                return Reset::IfItFits;
            }
            return Reset::Challenged;
        }
        // The segment answers a SYN or an acknowledgement that was ignored.
        let of_ignored = (self.replied && self.last.is(other(from), Kind::Syn)
            || !self.assured && last == Some(Kind::Ack))
            && tcp.acknowledgement == self.last.end;
        let of_challenge = self.state == State::SynSent
            && self.last.is(other(self.opener), Kind::Ack)
            && tcp.sequence == self.last.acknowledged;
        if of_ignored || of_challenge {
            Reset::Ends
        } else {
            Reset::IfItFits
        }
    }

    /// Checks that the sequence numbers of a segment are within the windows, and updates the
    /// windows. `state` is the state before the segment; `None` for the first segment.
    fn fit(
        &mut self,
        from: From,
        kind: Kind,
        tcp: &Tcp<'_>,
        shift: Shift,
        state: Option<State>,
    ) -> Fit {
        let reply = from != self.opener;
        let syn = tcp.flags.has(TcpFlags::SYN);
        let acknowledges = tcp.flags.has(TcpFlags::ACK);
        let (mut sequence, mut end) = (tcp.sequence, tcp.end());
        let mut window = u32::from(tcp.window);
        let (sent, received) = self.streams(from);
        let (mut number, mut highest) = (tcp.acknowledgement, tcp.acknowledgement);
        if received.offer.sack {
            highest = tcp.highest_sack(highest);
        }
        if from == From::Client {
            let offset = shift.offset(number.wrapping_sub(1)).cast_unsigned();
            number = number.wrapping_sub(offset);
            highest = highest.wrapping_sub(offset);
        }
        let again = syn
            && is_after(end, sent.end)
            && matches!(state, Some(State::SynSent | State::SynReceived));
        if sent.window == 0 && !syn {
            // The director did not receive the beginning of the stream.
            sent.end = end;
            sent.window = (window << sent.scale).max(1);
            sent.limit = end.wrapping_add(sent.window);
            if received.window == 0 {
                (received.end, received.limit) = (highest, highest);
            } else if highest == received.end.wrapping_add(1) {
                received.end = highest;
            }
        } else if sent.window == 0 || again {
            let first = sent.window == 0;
            sent.begin(end, tcp.window, tcp.offer);
            if reply && !(sent.offer.scale.is_some() && received.offer.scale.is_some()) {
                (sent.scale, received.scale) = (0, 0);
            }
            if !acknowledges && (first || reply) {
                return Fit::Accept;
            }
        }
        if !acknowledges || kind == Kind::Reset && number == 0 {
            (number, highest) = (received.end, received.end);
        }
        if kind == Kind::Reset && sequence == 0 && state == Some(State::SynSent) {
            (sequence, end) = (sent.end, sent.end);
        }
        let liberal = sent.liberal;
        let otherwise = |fit| if liberal { Fit::Accept } else { fit };
        let late = received
            .end
            .wrapping_sub(sent.window.max(LATE_MIN))
            .wrapping_sub(1);
        let behind = sent.end.wrapping_sub(received.window).wrapping_sub(1);
        let (timely, recent) = (is_after(highest, late), is_after(end, behind));
        let sent_before = !is_after(highest, received.end);
        if is_after(sequence, sent.limit) {
            let beyond = end.wrapping_sub(sent.limit).wrapping_add(1);
            if received.window != 0 && recent && timely && beyond <= received.window && sent_before
            {
                let fit = otherwise(Fit::Ignore);
                sent.end = end;
                return fit;
            }
            return otherwise(Fit::Invalid);
        }
        if !sent_before {
            return otherwise(Fit::Invalid);
        }
        if received.window != 0 && !recent || !timely {
            return otherwise(Fit::Ignore);
        }
        if !syn {
            window <<= sent.scale;
        }
        let reach = highest.wrapping_sub(number).wrapping_add(window);
        sent.window = sent.window.max(reach);
        if is_after(end, sent.end) {
            sent.end = end;
        }
        if acknowledges
            && sent
                .acknowledged
                .is_none_or(|before| is_after(number, before))
        {
            sent.acknowledged = Some(number);
        }
        if received.window != 0 && is_after(end, sent.limit) {
            received.window = received.window.wrapping_add(end.wrapping_sub(sent.limit));
        }
        let limit = highest.wrapping_add(window);
        if is_after(limit, received.limit.wrapping_sub(1)) {
            received.limit = limit.wrapping_add(u32::from(window == 0));
        }
        if kind == Kind::Ack {
            let last = &mut self.last;
            last.from = from;
            last.end = end;
            last.acknowledged = number;
            last.window = tcp.window;
        }
        Fit::Accept
    }
}

enum Reset {
    /// The segment does not belong to the connection: it is older than the acknowledged data.
    Foreign,
    /// The connection ends, whatever the sequence number.
    Ends,
    /// The connection ends if the sequence number is possible.
    IfItFits,
    /// The connection continues, because the receiver will answer the reset with a challenge
    /// acknowledgement (RFC 5961).
    Challenged,
}

const fn other(from: From) -> From {
    match from {
        From::Client => From::Server,
        From::Server => From::Client,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(flags: u8, sequence: u32, acknowledgement: u32) -> Tcp<'static> {
        Tcp {
            sequence,
            acknowledgement,
            flags: TcpFlags(flags),
            window: 8192,
            offer: None,
            options: &[],
            payload: &[],
            whole: true,
        }
    }

    /// Tracks a segment; returns whether it belongs to the connection.
    fn send(track: &mut Option<Track>, from: From, tcp: &Tcp<'_>) -> bool {
        follow(track, from, tcp, Shift::default()) != Relation::Foreign
    }

    fn bare(track: &mut Option<Track>, from: From, flags: u8, sequence: u32, ack: u32) -> bool {
        send(track, from, &segment(flags, sequence, ack))
    }

    const SYN: u8 = TcpFlags::SYN;
    const ACK: u8 = TcpFlags::ACK;
    const RST: u8 = TcpFlags::RST;
    const FIN: u8 = TcpFlags::FIN;

    fn opened() -> Option<Track> {
        let mut track = None;
        assert!(bare(&mut track, From::Client, SYN, 1000, 0));
        assert!(bare(&mut track, From::Server, SYN | ACK, 5000, 1001));
        assert!(bare(&mut track, From::Client, ACK, 1001, 5001));
        track
    }

    fn state(track: Option<Track>) -> Option<State> {
        track.map(|track| track.state)
    }

    #[test]
    fn forged_segments_do_not_wrap_tracked_sequence_numbers() {
        const WINDOW_MAX: u32 = 1 << 30;
        let mut track = None;
        assert!(bare(&mut track, From::Client, ACK, 1001, 5001));
        assert!(bare(&mut track, From::Server, ACK, 5001, 1001));
        for jump in 1..=4u32 {
            let far = 1001u32.wrapping_add(jump.wrapping_mul(0x3fff_ffff));
            bare(&mut track, From::Client, ACK, far, 5001);
        }
        assert!(
            bare(&mut track, From::Server, ACK, 5001, 1011),
            "a correct segment of the server no longer belongs to the connection"
        );
        let ahead = track.map(|track| track.client.end.wrapping_sub(1001));
        assert!(ahead.is_some_and(|ahead| ahead <= WINDOW_MAX), "{ahead:?}");
    }

    #[test]
    fn segment_far_beyond_window_belongs_to_no_connection() {
        for (offers, window) in [([None, None], 8192), ([Some(2), Some(3)], 8192 << 3)] {
            let mut track = None;
            let mut send = |from, flags, sequence, ack: u32, scale| {
                let offer = Some(Offer { scale, sack: false });
                let offer = offer.filter(|_| flags & SYN != 0);
                let tcp = Tcp {
                    offer,
                    ..segment(flags, sequence, ack)
                };
                follow(&mut track, from, &tcp, Shift::default())
            };
            send(From::Client, SYN, 1000, 0, offers[0]);
            send(From::Server, SYN | ACK, 5000, 1001, offers[1]);
            send(From::Client, ACK, 1001, 5001, None);
            send(From::Server, ACK, 5001, 1001, None);
            let far = send(From::Client, ACK, 1002 + 2 * window, 5001, None);
            assert_eq!(far, Relation::Foreign);
            let edge = send(From::Client, ACK, 1001 + window, 5001, None);
            assert_eq!(edge, Relation::Known);
        }
    }

    #[test]
    fn ftp_segment_less_than_one_window_beyond_receive_window_belongs_to_connection() {
        let mut track = opened();
        assert!(bare(&mut track, From::Server, ACK, 5001, 1001));
        assert!(bare(
            &mut track,
            From::Client,
            ACK,
            1001 + 8192 + 8191,
            5001
        ));
        let acknowledged = 1001 + 8192 + 8191;
        assert!(bare(&mut track, From::Server, ACK, 5001, acknowledged));
    }

    #[test]
    fn syn_on_tracked_connection_sets_sequence_numbers_when_acknowledged() {
        let mut track = opened();
        let before = track.expect("the connection is tracked");
        assert!(bare(&mut track, From::Client, SYN, 900_000, 0));
        let now = track.expect("the connection is tracked");
        assert_eq!((now.client, now.server), (before.client, before.server));
        assert!(bare(&mut track, From::Server, SYN | ACK, 70_000, 900_001));
        assert!(bare(&mut track, From::Client, ACK, 900_001, 70_001));
        assert!(!bare(&mut track, From::Client, ACK, 900_001, 70_002));
    }

    #[test]
    fn syn_ack_of_another_syn_does_not_change_tracked_sequence_numbers() {
        for between in [false, true] {
            let mut track = opened();
            assert!(bare(&mut track, From::Client, SYN, 900_000, 0));
            if between {
                // The server answers the SYN with a challenge acknowledgement, because it still has
                // the old connection.
                assert!(bare(&mut track, From::Server, ACK, 5001, 1001));
            }
            let ack = 900_001 + u32::from(!between);
            assert!(bare(&mut track, From::Server, SYN | ACK, 70_000, ack));
            assert!(!bare(&mut track, From::Client, ACK, 900_001, 70_001));
            assert!(bare(&mut track, From::Client, ACK, 1001, 5001));
        }
    }

    #[test]
    fn reset_closes_tracked_connection_only_with_expected_sequence_number() {
        let mut track = opened();
        assert!(bare(&mut track, From::Server, ACK, 5001, 1001));
        assert!(bare(&mut track, From::Server, RST, 5011, 0));
        assert_eq!(state(track), Some(State::Established));
        assert!(!bare(&mut track, From::Server, RST, 4000, 0));
        assert!(bare(&mut track, From::Server, RST, 5001, 0));
        assert_eq!(state(track), Some(State::Close));
    }

    #[test]
    fn reset_before_any_answer_ends_tracking() {
        let mut track = None;
        assert!(bare(&mut track, From::Client, SYN, 1000, 0));
        assert!(bare(&mut track, From::Server, RST | ACK, 0, 1001));
        assert_eq!(track, None);
    }

    #[test]
    fn syn_after_end_begins_new_tracked_connection() {
        let mut track = opened();
        assert!(bare(&mut track, From::Client, FIN | ACK, 1001, 5001));
        assert!(bare(&mut track, From::Server, FIN | ACK, 5001, 1002));
        assert!(bare(&mut track, From::Client, ACK, 1002, 5002));
        assert_eq!(state(track), Some(State::TimeWait));
        let again = follow(
            &mut track,
            From::Client,
            &segment(SYN, 70, 0),
            Shift::default(),
        );
        assert_eq!(again, Relation::New);
    }

    #[test]
    fn segment_with_impossible_flags_belongs_to_no_connection() {
        let mut track = opened();
        for flags in [0, FIN, SYN | FIN, SYN | RST, TcpFlags::URG, SYN | ACK | FIN] {
            assert!(!bare(&mut track, From::Client, flags, 1001, 5001));
        }
        assert!(bare(
            &mut track,
            From::Client,
            ACK | TcpFlags::URG,
            1001,
            5001
        ));
    }
}
