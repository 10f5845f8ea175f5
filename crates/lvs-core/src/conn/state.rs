//! State machines: TCP, UDP and SCTP.
//!
//! The tables for TCP are those of `ip_vs_proto_tcp`: one for packets from the client, one for
//! packets from the server, and one for packets from the client of connections whose replies do not
//! pass through the director. Each also has a second form for `secure_tcp`. For SCTP they are the
//! three tables of `ip_vs_proto_sctp`.

use crate::{Protocol, SctpChunk, TcpFlags};

/// A state of a connection, numbered as in the synchronisation protocol. The meaning depends on the
/// transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(pub(crate) u8);

impl State {
    /// State before the first transition; the only state of UDP.
    pub(crate) const NONE: Self = Self(0);
    pub(crate) const TCP_ESTABLISHED: Self = Self(1);
    pub(crate) const TCP_SYN_SENT: Self = Self(2);
    pub(crate) const TCP_SYN_RECV: Self = Self(3);
    pub(crate) const TCP_FIN_WAIT: Self = Self(4);
    pub(crate) const TCP_TIME_WAIT: Self = Self(5);
    pub(crate) const TCP_CLOSE: Self = Self(6);
    pub(crate) const TCP_LISTEN: Self = Self(9);
    pub(crate) const TCP_SYNACK: Self = Self(10);
    pub(crate) const SCTP_INIT1: Self = Self(1);
    pub(crate) const SCTP_INIT: Self = Self(2);
    pub(crate) const SCTP_ESTABLISHED: Self = Self(8);
    pub(crate) const SCTP_CLOSED: Self = Self(13);

    /// The kernel's name of the state in listings.
    pub(crate) fn name(self, protocol: Protocol) -> &'static str {
        match protocol {
            Protocol::TCP => TCP_NAMES
                .get(usize::from(self.0))
                .copied()
                .unwrap_or("ERR!"),
            Protocol::UDP if self.0 == 0 => "UDP",
            Protocol::SCTP => SCTP_NAMES
                .get(usize::from(self.0))
                .copied()
                .unwrap_or("ERR!"),
            _ => "ERR!",
        }
    }

    /// Whether a connection in this state counts as active (`tcp_state_active_table`).
    pub(crate) fn is_active(self, protocol: Protocol) -> bool {
        match protocol {
            // ESTABLISHED, SYN_SENT, SYN_RECV, SYNACK.
            Protocol::TCP => matches!(self.0, 1 | 2 | 3 | 10),
            Protocol::SCTP => self == Self::SCTP_ESTABLISHED,
            _ => false,
        }
    }

    /// Number of states of a protocol; `None` for a protocol without connections.
    pub(crate) const fn count(protocol: Protocol) -> Option<u16> {
        match protocol {
            Protocol::TCP => Some(11),
            Protocol::SCTP => Some(14),
            Protocol::UDP | Protocol::AH | Protocol::ESP => Some(1),
            _ => None,
        }
    }

    /// Whether a connection that enters this state marks its template as assured
    /// (`ip_vs_control_assure_ct`).
    pub(crate) fn assures(self, protocol: Protocol) -> bool {
        match protocol {
            Protocol::TCP => self == Self::TCP_ESTABLISHED,
            Protocol::SCTP => self == Self::SCTP_ESTABLISHED,
            _ => false,
        }
    }
}

const TCP_NAMES: [&str; 11] = [
    "NONE",
    "ESTABLISHED",
    "SYN_SENT",
    "SYN_RECV",
    "FIN_WAIT",
    "TIME_WAIT",
    "CLOSE",
    "CLOSE_WAIT",
    "LAST_ACK",
    "LISTEN",
    "SYNACK",
];

const SCTP_NAMES: [&str; 14] = [
    "NONE",
    "INIT1",
    "INIT",
    "C-SENT",
    "C-REPLIED",
    "C-WAIT",
    "COOKIE",
    "C-ECHOED",
    "ESTABLISHED",
    "S-SENT",
    "S-RECEIVED",
    "S-ACK-SENT",
    "REJECTED",
    "CLOSED",
];

/// Direction of a packet in the state tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Input,
    Output,
    /// From the client, on a connection with `flag::NO_OUTPUT`.
    InputOnly,
}

/// The timeout of each state in seconds. [`set`](Self::set) changes TCP ESTABLISHED, TCP FIN_WAIT
/// and UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    tcp: [u32; 11],
    udp: u32,
    sctp: [u32; 14],
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            tcp: [2, 900, 120, 60, 120, 120, 10, 60, 30, 120, 120],
            udp: 300,
            sctp: [2, 4, 61, 61, 61, 61, 61, 61, 900, 61, 61, 61, 4, 61],
        }
    }
}

impl Timeouts {
    /// The minimum timeouts of RFC 5382 (REQ-5): two hours and four minutes for established
    /// connections, four minutes for half-open and half-closed ones. An established SCTP
    /// association gets the timeout of an established TCP connection. The kernel's timeout for UDP
    /// is already the five minutes of RFC 4787 (REQ-5).
    pub(crate) fn modern() -> Self {
        const ESTABLISHED: u32 = 7440;
        const TRANSITORY: u32 = 240;
        let kernel = Self::default();
        let (mut tcp, mut sctp) = (kernel.tcp, kernel.sctp);
        tcp[usize::from(ES)] = ESTABLISHED;
        for state in [SS, SR, FW, CW, LA, SA] {
            tcp[usize::from(state)] = TRANSITORY;
        }
        sctp[usize::from(State::SCTP_ESTABLISHED.0)] = ESTABLISHED;
        Self {
            tcp,
            sctp,
            ..kernel
        }
    }

    pub(crate) fn of(&self, protocol: Protocol, state: State) -> u32 {
        match protocol {
            Protocol::TCP => self.tcp.get(usize::from(state.0)).copied().unwrap_or(2),
            Protocol::SCTP => self.sctp.get(usize::from(state.0)).copied().unwrap_or(2),
            _ => self.udp,
        }
    }

    /// The timeouts of TCP ESTABLISHED, TCP FIN_WAIT and UDP in seconds, which `ipvsadm --set`
    /// sets.
    pub(crate) const fn settable(&self) -> (u32, u32, u32) {
        (self.tcp[1], self.tcp[4], self.udp)
    }

    /// Sets the timeouts of TCP ESTABLISHED, TCP FIN_WAIT and UDP in seconds, as `ipvsadm --set`; 0
    /// leaves a timeout unchanged.
    pub(crate) const fn set(&mut self, tcp: u32, tcp_fin: u32, udp: u32) {
        if tcp != 0 {
            self.tcp[1] = tcp;
        }
        if tcp_fin != 0 {
            self.tcp[4] = tcp_fin;
        }
        if udp != 0 {
            self.udp = udp;
        }
    }
}

/// The next state of a TCP connection (`set_tcp_state`).
pub(crate) fn tcp_next(secure: bool, direction: Direction, flags: TcpFlags, state: State) -> State {
    let event = if flags.has(TcpFlags::RST) {
        3
    } else if flags.has(TcpFlags::SYN) {
        0
    } else if flags.has(TcpFlags::FIN) {
        1
    } else if flags.has(TcpFlags::ACK) {
        2
    } else {
        return State::TCP_CLOSE;
    };
    let table = match (secure, direction) {
        (false, Direction::Input) => &NORMAL_INPUT,
        (false, Direction::Output) => &NORMAL_OUTPUT,
        (false, Direction::InputOnly) => &NORMAL_INPUT_ONLY,
        (true, Direction::Input) => &SECURE_INPUT,
        (true, Direction::Output) => &SECURE_OUTPUT,
        (true, Direction::InputOnly) => &SECURE_INPUT_ONLY,
    };
    State(
        table[event]
            .get(usize::from(state.0))
            .copied()
            .unwrap_or(State::TCP_CLOSE.0),
    )
}

/// Rows: SYN, FIN, ACK, RST. Columns: the present state. Cells: the next one.
type Table = [[u8; 11]; 4];

const ES: u8 = 1;
const SS: u8 = 2;
const SR: u8 = 3;
const FW: u8 = 4;
const TW: u8 = 5;
const CL: u8 = 6;
const CW: u8 = 7;
const LA: u8 = 8;
const LI: u8 = 9;
const SA: u8 = 10;

#[rustfmt::skip]
const NORMAL_INPUT: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SR, ES, ES, SR, SR, SR, SR, SR, SR, SR, SR],
    [CL, CW, SS, TW, TW, TW, CL, CW, LA, LI, TW],
    [ES, ES, SS, ES, FW, TW, CL, CW, CL, LI, ES],
    [CL, CL, CL, SR, CL, CL, CL, CL, LA, LI, SR],
];

#[rustfmt::skip]
const NORMAL_OUTPUT: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SS, ES, SS, SR, SS, SS, SS, SS, SS, LI, SR],
    [TW, FW, SS, TW, FW, TW, CL, TW, LA, LI, TW],
    [ES, ES, SS, ES, FW, TW, CL, CW, LA, ES, ES],
    [CL, CL, SS, CL, CL, TW, CL, CL, CL, CL, CL],
];

#[rustfmt::skip]
const NORMAL_INPUT_ONLY: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SR, ES, ES, SR, SR, SR, SR, SR, SR, SR, SR],
    [CL, FW, SS, TW, FW, TW, CL, CW, LA, LI, TW],
    [ES, ES, SS, ES, FW, TW, CL, CW, CL, LI, ES],
    [CL, CL, CL, SR, CL, CL, CL, CL, LA, LI, CL],
];

#[rustfmt::skip]
const SECURE_INPUT: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SR, ES, ES, SR, SR, SR, SR, SR, SR, SR, SA],
    [CL, CW, SS, TW, TW, TW, CL, CW, LA, LI, SA],
    [ES, ES, SS, SR, FW, TW, CL, CW, CL, LI, SA],
    [CL, CL, CL, SR, CL, CL, CL, CL, LA, LI, CL],
];

#[rustfmt::skip]
const SECURE_OUTPUT: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SS, ES, SS, SA, SS, SS, SS, SS, SS, LI, SA],
    [TW, FW, SS, TW, FW, TW, CL, TW, LA, LI, TW],
    [ES, ES, SS, ES, FW, TW, CL, CW, LA, ES, ES],
    [CL, CL, SS, CL, CL, TW, CL, CL, CL, CL, CL],
];

#[rustfmt::skip]
const SECURE_INPUT_ONLY: Table = [
    // NO, ES, SS, SR, FW, TW, CL, CW, LA, LI, SA
    [SA, ES, ES, SR, SA, SA, SA, SA, SA, SA, SA],
    [CL, FW, SS, TW, FW, TW, CL, CW, LA, LI, TW],
    [ES, ES, SS, ES, FW, TW, CL, CW, CL, LI, ES],
    [CL, CL, CL, SR, CL, CL, CL, CL, LA, LI, CL],
];

/// The SCTP event of a chunk, as the number of its row in the tables of states (`sctp_events`).
fn sctp_event(chunk: SctpChunk) -> usize {
    if chunk.abort_follows {
        return 9;
    }
    match chunk.first {
        1 => 1,  // INIT
        2 => 2,  // INIT ACK
        10 => 3, // COOKIE ECHO
        11 => 4, // COOKIE ACK
        7 => 5,  // SHUTDOWN
        8 => 6,  // SHUTDOWN ACK
        14 => 7, // SHUTDOWN COMPLETE
        9 => 8,  // ERROR
        6 => 9,  // ABORT
        _ => 0,  // DATA, SACK, HEARTBEAT and unknown chunks
    }
}

/// The next state of an SCTP association (`set_sctp_state`).
pub(crate) fn sctp_next(direction: Direction, chunk: SctpChunk, state: State) -> State {
    let table = match direction {
        Direction::Input => &sctp::INPUT,
        Direction::Output => &sctp::OUTPUT,
        Direction::InputOnly => &sctp::INPUT_ONLY,
    };
    let row = &table[sctp_event(chunk)];
    State(row.get(usize::from(state.0)).copied().unwrap_or(sctp::CL))
}

/// The tables of `ip_vs_proto_sctp`. Rows: DATA, INIT, INIT ACK, COOKIE ECHO, COOKIE ACK, SHUTDOWN,
/// SHUTDOWN ACK, SHUTDOWN COMPLETE, ERROR, ABORT. Columns: the present state. Cells: the next one.
mod sctp {
    type Table = [[u8; 14]; 10];

    const I1: u8 = 1;
    const IN: u8 = 2;
    const CS: u8 = 3;
    const CR: u8 = 4;
    const CW: u8 = 5;
    const CO: u8 = 6;
    const CE: u8 = 7;
    const ES: u8 = 8;
    const SS: u8 = 9;
    const SR: u8 = 10;
    const SA: u8 = 11;
    const RJ: u8 = 12;
    pub(super) const CL: u8 = 13;

    #[rustfmt::skip]
    pub(super) const INPUT: Table = [
        // NO, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL
        [ES, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [I1, IN, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, IN, IN],
        [CW, CW, CW, CS, CR, CO, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CR, IN, IN, CR, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [ES, I1, IN, CS, CR, CW, CO, ES, ES, SS, SR, SA, RJ, CL],
        [SR, I1, IN, CS, CR, CW, CO, CE, SR, SS, SR, SA, RJ, CL],
        [CL, IN, IN, CS, CR, CW, CO, CE, ES, CL, SR, CL, RJ, CL],
        [CL, CL, CL, CS, CR, CW, CO, CE, ES, SS, SR, CL, RJ, CL],
        [CL, I1, IN, CS, CR, CW, CO, CL, ES, SS, SR, SA, RJ, CL],
        [CL, CL, CL, CL, CL, RJ, CL, CL, CL, CL, CL, CL, CL, CL],
    ];

    #[rustfmt::skip]
    pub(super) const OUTPUT: Table = [
        // NO, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL
        [ES, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CW, CW, CW, CW, CW, CW, CW, CW, ES, CW, CW, CW, CW, CW],
        [CS, CS, CS, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CE, CE, CE, CE, CE, CE, CE, CE, ES, SS, SR, SA, RJ, CL],
        [ES, ES, ES, ES, ES, ES, ES, ES, ES, SS, SR, SA, RJ, CL],
        [SS, SS, SS, SS, SS, SS, SS, SS, SS, SS, SR, SA, RJ, CL],
        [SA, SA, SA, SA, SA, CW, CO, CE, ES, SA, SA, SA, RJ, CL],
        [CL, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CL, CL, CL, CL, CL, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CL, RJ, CL, CL, CL, CL, CL, CL, CL, CL, CL, CL, CL, CL],
    ];

    #[rustfmt::skip]
    pub(super) const INPUT_ONLY: Table = [
        // NO, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL
        [ES, I1, IN, CS, CR, ES, CO, CE, ES, SS, SR, SA, RJ, CL],
        [I1, IN, IN, IN, IN, IN, CO, CE, ES, SS, SR, SA, IN, IN],
        [CE, CE, CE, CE, CE, CE, CO, CE, ES, SS, SR, SA, RJ, CL],
        [ES, ES, ES, ES, ES, ES, CO, CE, ES, SS, SR, SA, RJ, CL],
        [ES, I1, IN, ES, ES, CW, ES, ES, ES, SS, SR, SA, RJ, CL],
        [SR, I1, IN, CS, CR, CW, CO, CE, SR, SS, SR, SA, RJ, CL],
        [CL, IN, IN, CS, CR, CW, CO, CE, CL, CL, SR, CL, RJ, CL],
        [CL, CL, CL, CL, CL, CW, CO, CE, ES, SS, CL, CL, RJ, CL],
        [CL, I1, IN, CS, CR, CW, CO, CE, ES, SS, SR, SA, RJ, CL],
        [CL, CL, CL, CL, CL, RJ, CL, CL, CL, CL, CL, CL, CL, CL],
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYN: TcpFlags = TcpFlags(TcpFlags::SYN);
    const SYN_ACK: TcpFlags = TcpFlags(TcpFlags::SYN | TcpFlags::ACK);
    const ACK: TcpFlags = TcpFlags(TcpFlags::ACK);
    const FIN: TcpFlags = TcpFlags(TcpFlags::FIN | TcpFlags::ACK);
    const RST: TcpFlags = TcpFlags(TcpFlags::RST);

    fn walk(steps: &[(Direction, TcpFlags)]) -> &'static str {
        let end = steps
            .iter()
            .fold(State::NONE, |state, &(direction, flags)| {
                tcp_next(false, direction, flags, state)
            });
        end.name(Protocol::TCP)
    }

    #[test]
    fn nat_tcp_state_follows_segments_of_client_and_server() {
        use Direction::{Input, Output};
        let open = [(Input, SYN), (Output, SYN_ACK), (Input, ACK)];
        assert_eq!(walk(&open[..1]), "SYN_RECV");
        assert_eq!(walk(&open), "ESTABLISHED");
        assert_eq!(walk(&[&open[..], &[(Input, FIN)]].concat()), "CLOSE_WAIT");
        assert_eq!(
            walk(&[&open[..], &[(Input, FIN), (Output, FIN)]].concat()),
            "TIME_WAIT"
        );
        assert_eq!(walk(&[&open[..], &[(Output, FIN)]].concat()), "FIN_WAIT");
        assert_eq!(walk(&[&open[..], &[(Input, RST)]].concat()), "CLOSE");
    }

    #[test]
    fn direct_routing_tcp_state_follows_client_segments() {
        use Direction::InputOnly;
        let open = [(InputOnly, SYN), (InputOnly, ACK)];
        assert_eq!(walk(&open), "ESTABLISHED");
        assert_eq!(
            walk(&[&open[..], &[(InputOnly, FIN), (InputOnly, ACK)]].concat()),
            "FIN_WAIT"
        );
        assert_eq!(walk(&[(InputOnly, SYN), (InputOnly, RST)]), "SYN_RECV");
    }

    #[test]
    fn segment_without_syn_fin_ack_and_rst_closes_connection() {
        assert_eq!(
            walk(&[(Direction::Input, SYN), (Direction::Input, TcpFlags(0x08))]),
            "CLOSE"
        );
    }
}
