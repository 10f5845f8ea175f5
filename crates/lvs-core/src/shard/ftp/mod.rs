//! The helper for FTP: data connections follow the control connection that announces them
//! (`ip_vs_ftp`).
//!
//! It inspects control connections to servers behind NAT. If a client announces an address (PORT,
//! EPRT), the helper creates a connection that the server may open. If a server announces an
//! address (in answer to PASV, EPSV), the helper creates a connection that the client may open, and
//! replaces the server's address by the virtual one. This can change the length of the text, and
//! then all later sequence numbers of the stream: see [`Shift`].
//!
//! In the kernel, connection tracking adjusts the sequence numbers, and only in segments that
//! belong to a tracked connection. [`track`] imitates this.

mod announce;
mod track;

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::ops::Range;

use self::announce::FtpCommand;
use self::track::{From, Kind, Offer, Relation, Track};
use super::{Shard, tcp};
use crate::conn::{Draft, Key, State, flag};
use crate::verdict::{Edit, Replacement, Shift, is_after};
use crate::{
    DropReason, Error, Family, Forwarding, Instant, PacketMeta, Protocol, TcpFlags, Transport,
};

/// Maximum number of ports of the helper (`IP_VS_APP_MAX_PORTS`).
pub const FTP_PORTS_MAX: usize = 8;

/// Default port of control connections.
const FTP_PORT: u16 = 21;

/// Parses the name of a helper as in options: `ftp` (port 21), or `ftp=PORT,...`. Returns the
/// ports.
///
/// # Errors
/// [`Error::UnknownHelper`], [`Error::HelperPorts`].
pub fn helper_ports(text: &str) -> Result<Vec<u16>, Error> {
    let (name, ports) = match text.split_once('=') {
        Some((name, ports)) => (name, Some(ports)),
        None => (text, None),
    };
    if name != "ftp" {
        return Err(Error::UnknownHelper);
    }
    let ports = match ports {
        Some(ports) => ports
            .split(',')
            .map(|port| port.parse().map_err(|_| Error::HelperPorts))
            .collect::<Result<Vec<u16>, Error>>()?,
        None => alloc::vec![FTP_PORT],
    };
    check_ports(&ports)?;
    Ok(ports)
}

pub(crate) fn check_ports(ports: &[u16]) -> Result<(), Error> {
    let twice = |(at, port): (usize, &u16)| ports[..at].contains(port);
    if ports.iter().enumerate().any(twice) || ports.contains(&0) || ports.len() > FTP_PORTS_MAX {
        return Err(Error::HelperPorts);
    }
    Ok(())
}

impl Replacement {
    /// The text of a reply to PASV or EPSV (`mode`) that announces `listens`; it replaces the bytes
    /// `place` of the server's reply. After EPSV, a client connects to the address of its control
    /// connection, so the text contains only the port. `None` if `place` is beyond the maximum
    /// length of a segment, or after PASV with an IPv6 address.
    fn new(place: &Range<usize>, mode: Mode, listens: SocketAddr) -> Option<Self> {
        let mut new = Self::of(place)?;
        match (mode, listens.ip()) {
            (Mode::Passive, IpAddr::V4(addr)) => {
                let [high, low] = listens.port().to_be_bytes();
                for number in addr.octets().into_iter().chain([high]) {
                    new.push_number(number.into());
                    new.push(b',');
                }
                new.push_number(low.into());
            }
            (Mode::ExtendedPassive, _) => {
                (0..3).for_each(|_| new.push(b'|'));
                new.push_number(listens.port());
                new.push(b'|');
            }
            _ => return None,
        }
        Some(new)
    }
}

/// The kind of announcement that the helper expects in the server's replies, according to the
/// client's commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mode {
    /// Neither PASV nor EPSV since the last announcement of an address: the helper does not search
    /// the replies for an address.
    #[default]
    Active,
    Passive,
    ExtendedPassive,
}

/// State of a control connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Session {
    mode: Mode,
    /// Change of the sequence numbers of the server's stream. The client's stream is never changed.
    shift: Shift,
    /// The sequence number and the mode of the last reply that was rewritten; the server may repeat
    /// it.
    changed: Option<(u32, Mode)>,
    track: Option<Track>,
}

impl Session {
    fn follow(&mut self, from: From, tcp: &Tcp<'_>) -> Relation {
        let relation = track::follow(&mut self.track, from, tcp, self.shift);
        if relation == Relation::New {
            (self.shift, self.changed) = (Shift::default(), None);
        }
        relation
    }
}

struct Tcp<'a> {
    sequence: u32,
    acknowledgement: u32,
    flags: TcpFlags,
    window: u16,
    /// The options of a SYN; `None` for a SYN without options, and for other segments.
    offer: Option<Offer>,
    options: &'a [u8],
    payload: &'a [u8],
    /// Whether the segment contains its complete header.
    whole: bool,
}

impl<'a> Tcp<'a> {
    fn read(meta: &PacketMeta<'a>) -> Option<Self> {
        let bytes = meta.segment.bytes;
        let (header, _) = bytes.split_first_chunk::<{ tcp::HEADER_LEN }>()?;
        let Transport::Tcp(flags) = meta.transport else {
            return None;
        };
        let len = tcp::data_offset(header)?;
        let options = bytes.get(tcp::HEADER_LEN..len);
        let offers = flags.has(TcpFlags::SYN) && options.is_some_and(|options| !options.is_empty());
        let options = options.unwrap_or_default();
        Some(Self {
            sequence: tcp::number(header, tcp::SEQUENCE)?,
            acknowledgement: tcp::number(header, tcp::ACKNOWLEDGEMENT)?,
            flags,
            window: u16::from_be_bytes([header[tcp::WINDOW.start], header[tcp::WINDOW.start + 1]]),
            offer: offers.then(|| Offer::read(options)),
            options,
            // If the header's length field is below the minimum, the segment has no payload.
            payload: bytes
                .get(len..)
                .filter(|_| len >= tcp::HEADER_LEN)
                .unwrap_or_default(),
            whole: (tcp::HEADER_LEN..=bytes.len()).contains(&len),
        })
    }

    fn end(&self) -> u32 {
        let controls = [TcpFlags::SYN, TcpFlags::FIN];
        let controls = controls.map(|bit| usize::from(self.flags.has(bit)));
        let len = self.payload.len() + controls[0] + controls[1];
        self.sequence
            .wrapping_add(u32::try_from(len).unwrap_or(u32::MAX))
    }

    /// The highest sequence number in the segment's selective acknowledgements (RFC 2018 section
    /// 3), or `acknowledged` if that is later.
    fn highest_sack(&self, acknowledged: u32) -> u32 {
        const SACK: u8 = 5;
        const BLOCK: usize = 8;
        let blocks = tcp::options(self.options)
            .find(|(kind, data)| *kind == SACK && !data.is_empty() && data.len() % BLOCK == 0)
            .map_or(&[][..], |(_, data)| data);
        blocks
            .chunks_exact(BLOCK)
            .filter_map(|block| tcp::number(block, BLOCK / 2..BLOCK))
            .fold(acknowledged, |highest, edge| {
                if is_after(edge, highest) {
                    edge
                } else {
                    highest
                }
            })
    }
}

impl Shard {
    /// Whether a client's SYN belongs to control connection `index` as it is tracked; otherwise it
    /// opens a new connection with the same addresses and ports.
    pub(super) fn is_same_control(&self, index: u32, meta: &PacketMeta<'_>) -> bool {
        let mut session = self.session(index);
        meta.segment.is_intact(&meta.tuple)
            && Tcp::read(meta)
                .is_some_and(|tcp| session.follow(From::Client, &tcp) == Relation::Known)
    }

    /// Inspects a segment from the client of control connection `index`, after the segment changed
    /// the connection's state (`ip_vs_ftp_in`). Creates the data connection that a PORT or EPRT
    /// command announces. Returns the shift by which the client's acknowledgements of the server's
    /// stream must be changed; `None` if they stay unchanged.
    ///
    /// # Errors
    /// The reason why the segment is dropped.
    pub(crate) fn help_request(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Option<Shift>, DropReason> {
        let Some(tcp) = Tcp::read(meta) else {
            return Ok(None);
        };
        if !meta.segment.is_intact(&meta.tuple) {
            return Err(DropReason::HelperChecksum);
        }
        let mut session = self.session(index);
        let slot = self.table.get(index);
        let virt = slot.virt();
        let mut expected = None;
        if slot.state() == State::TCP_ESTABLISHED {
            match announce::command(tcp.payload, Family::of(&virt.ip())) {
                Some(FtpCommand::Passive(mode)) => session.mode = mode,
                Some(FtpCommand::Active(client)) => {
                    session.mode = Mode::Active;
                    // The data port is the port before the control port (RFC 959 section 3.2).
                    expected = Some((client, before(virt), before(slot.server_addr())));
                }
                None => {}
            }
        }
        let relation = session.follow(From::Client, &tcp);
        let shift = session.shift;
        self.sessions.insert(index, session);
        if let Some((client, virt, server)) = expected {
            let protocol = Protocol::TCP;
            let key = Key {
                protocol,
                client,
                virt,
            };
            let known = self.table.find_in(&key);
            self.expect(index, known, &key, server, 0, meta.mark, now)?;
        }
        match relation {
            Relation::Known | Relation::New => Ok((!shift.is_none()).then_some(shift)),
            // For the kernel, this segment would be the first one of another connection, from the
            // client to the server, whose entry would collide with the tracked one.
            Relation::Foreign if Kind::of(&tcp) == Some(Kind::Ack) => {
                Err(DropReason::HelperSequence)
            }
            Relation::Foreign => Ok(None),
        }
    }

    /// Inspects a segment from the server of control connection `index`, before the segment changes
    /// the connection's state (`ip_vs_ftp_out`). Returns the change of the segment; `None` if it is
    /// forwarded unchanged.
    ///
    /// # Errors
    /// The reason why the segment is dropped.
    pub(crate) fn help_reply(
        &mut self,
        index: u32,
        meta: &PacketMeta<'_>,
        now: Instant,
    ) -> Result<Option<Edit>, DropReason> {
        let Some(tcp) = Tcp::read(meta) else {
            return Ok(None);
        };
        if !meta.segment.is_intact(&meta.tuple) {
            return Err(DropReason::HelperChecksum);
        }
        let mut session = self.session(index);
        let mut replacement = None;
        if self.table.get(index).state() == State::TCP_ESTABLISHED {
            replacement = self.announced(index, &mut session, &tcp, meta.mark, now)?;
        }
        let relation = session.follow(From::Server, &tcp);
        if let Some(replacement) = replacement
            && relation == Relation::Known
        {
            session.shift.replaced(tcp.sequence, replacement.growth());
        }
        let replacement = replacement.or_else(|| self.announced_again(index, &session, &tcp));
        let shift = session.shift;
        self.sessions.insert(index, session);
        match (relation, replacement) {
            // The kernel cannot change segments that its connection tracking does not recognise.
            (Relation::Foreign, Some(_)) => Err(DropReason::HelperSequence),
            (Relation::Foreign, None) => Ok(None),
            (_, None) if shift.is_none() => Ok(None),
            (_, replacement) => Ok(Some(Edit { shift, replacement })),
        }
    }

    /// Creates the data connection that a reply announces, and returns the text that replaces the
    /// server's address; `None` if the segment announces none.
    fn announced(
        &mut self,
        index: u32,
        session: &mut Session,
        tcp: &Tcp<'_>,
        mark: u32,
        now: Instant,
    ) -> Result<Option<Replacement>, DropReason> {
        let slot = self.table.get(index);
        let (client, virt, server) = (slot.client(), slot.virt(), slot.server_addr());
        let Some((listens, place)) = announce::reply(tcp.payload, session.mode, server.ip()) else {
            return Ok(None);
        };
        // The client's port is unknown until its first packet arrives.
        let client = SocketAddr::new(client.ip(), 0);
        let key = Key {
            protocol: Protocol::TCP,
            client,
            virt: SocketAddr::new(virt.ip(), listens.port()),
        };
        let known = self.table.find_out(Protocol::TCP, listens, client);
        let data = self.expect(index, known, &key, listens, flag::NO_CPORT, mark, now)?;
        let virt = self.table.get(data).virt();
        session.changed = Some((tcp.sequence, session.mode));
        let replacement = Replacement::new(&place, session.mode, virt);
        session.mode = Mode::Active;
        Ok(replacement)
    }

    /// Replacement text for a reply that the server retransmits because it was lost between
    /// director and client. The kernel forwards it unchanged: with the wrong address, and with a
    /// wrong sequence number if the length had changed.
    fn announced_again(&self, index: u32, session: &Session, tcp: &Tcp<'_>) -> Option<Replacement> {
        let (sequence, mode) = session.changed?;
        let at = usize::try_from(sequence.wrapping_sub(tcp.sequence)).ok()?;
        let slot = self.table.get(index);
        let server = slot.server_addr().ip();
        let (listens, place) = announce::reply(tcp.payload.get(at..)?, mode, server)?;
        let virt = SocketAddr::new(slot.virt().ip(), listens.port());
        Replacement::new(&place, mode, virt)?.moved(at)
    }

    /// Creates the data connection with `key` to `server`, or uses the existing connection `known`.
    /// The connection waits for its first packet (`ip_vs_tcp_conn_listen`). Returns its index.
    #[expect(clippy::too_many_arguments, reason = "the parts of a connection")]
    fn expect(
        &mut self,
        control: u32,
        known: Option<u32>,
        key: &Key,
        server: SocketAddr,
        flags: u32,
        mark: u32,
        now: Instant,
    ) -> Result<u32, DropReason> {
        let index = match known {
            Some(index) => index,
            None => {
                let record = self.table.get(control).server();
                let conntrack = self.settings.sysctls.conntrack;
                let mut flags = flags | flag::NFCT;
                if let Some(link) = self.link(control) {
                    flags |= link.server.connection_flags(conntrack);
                    // Response times are not measured, because either side may send the first data,
                    // at any time.
                    flags |= link.server.watches(key.protocol) & flag::TRACKED;
                    // The server's method was changed from NAT to full NAT, which the helper does
                    // not support.
                    if link.server.forwarding() == Forwarding::FullNat {
                        flags = flags & !flag::METHOD | Forwarding::Nat as u32;
                    }
                }
                flags |= self.settings.helper_flags(key.protocol, key.virt, flags);
                let mut slot = Draft::new(key, server, flags);
                slot.server = record;
                slot.mark = mark;
                slot.control = control;
                let index = self.open(slot, None, now).ok_or(DropReason::TableFull)?;
                self.table.add_controlled(control);
                if let Some(link) = self.link(index) {
                    link.server.bind(flags);
                }
                index
            }
        };
        let timeout = self.settings.timeouts.of(Protocol::TCP, State::TCP_LISTEN);
        let slot = self.table.get(index);
        slot.set_state(State::TCP_LISTEN);
        slot.set_timeout(timeout);
        self.table.restart(index, now);
        Ok(index)
    }

    /// Shift of the sequence numbers of the server of connection `index`; zero if the helper did
    /// not change them.
    pub(crate) fn shift(&self, index: u32) -> Shift {
        self.session(index).shift
    }

    fn session(&self, index: u32) -> Session {
        self.sessions.get(&index).copied().unwrap_or_default()
    }
}

/// The same address with the next lower port.
const fn before(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip(), addr.port().wrapping_sub(1))
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;
    use crate::{
        Director, Hook, Options, Segment, ServerConfig, ServiceConfig, ServiceKey, Tuple, Verdict,
    };

    const NOW: Instant = Instant::ZERO;
    const CLIENT: ([u8; 4], u16) = ([198, 51, 100, 7], 4001);
    const VIP: ([u8; 4], u16) = ([192, 0, 2, 10], 21);

    /// A control connection to one of two servers. With the argument `data` of `new`, the server
    /// has announced a data connection over it.
    struct Control {
        director: Director,
        key: ServiceKey,
        server: SocketAddr,
    }

    fn addr(at: ([u8; 4], u16)) -> SocketAddr {
        at.into()
    }

    impl Control {
        fn new(sysctl: &str, data: bool) -> Self {
            let mut director = Director::new(Options::default());
            let control = &mut director.control;
            control.set_ftp_ports([21].into()).unwrap();
            control.set_sysctl(sysctl, &1.to_string()).unwrap();
            let key = ServiceKey::tcp(addr(VIP));
            let config = ServiceConfig::new(Family::V4, "rr");
            control.add_service(key, config, None).unwrap();
            for last in [1, 2] {
                let config = ServerConfig::new(1, Forwarding::Nat);
                let server = addr(([10, 0, 0, last], 21));
                control.add_server(&key, server, &config, NOW).unwrap();
            }
            let server = addr(VIP);
            let mut all = Self {
                director,
                key,
                server,
            };
            all.server = all
                .request(TcpFlags::SYN, 1000, 0, b"")
                .expect("the connection opens");
            all.reply(TcpFlags::SYN | TcpFlags::ACK, 5000, 1001, b"");
            all.request(TcpFlags::ACK, 1001, 5001, b"");
            if data {
                all.request(TcpFlags::ACK, 1001, 5001, b"EPSV\r\n");
                all.reply(TcpFlags::ACK, 5001, 1007, b"229 (|||40000|)\r\n");
                assert_eq!(
                    all.director.shard.len(),
                    2,
                    "not only the control connection and its data connection exist"
                );
            }
            all
        }

        fn send(
            &mut self,
            ends: [SocketAddr; 2],
            flags: u8,
            numbers: [u32; 2],
            data: &[u8],
        ) -> Verdict {
            let [src, dst] = ends;
            let mut bytes = Vec::new();
            bytes.extend(src.port().to_be_bytes());
            bytes.extend(dst.port().to_be_bytes());
            bytes.extend(numbers.map(u32::to_be_bytes).as_flattened());
            bytes.extend([0x50, flags, 0x20, 0, 0, 0, 0, 0]);
            bytes.extend(data);
            let meta = PacketMeta {
                tuple: Tuple::tcp(src, dst),
                transport: Transport::Tcp(TcpFlags(flags)),
                segment: Segment {
                    bytes: &bytes,
                    trusted: true,
                },
                len: 20,
                mark: 0,
                hook: if dst == addr(VIP) {
                    Hook::Local
                } else {
                    Hook::Transit
                },
            };
            self.director.handle_packet(&meta, NOW)
        }

        /// Sends a segment of the client; returns the server to which it is forwarded.
        fn request(
            &mut self,
            flags: u8,
            sequence: u32,
            ack: u32,
            data: &[u8],
        ) -> Option<SocketAddr> {
            match self.send([addr(CLIENT), addr(VIP)], flags, [sequence, ack], data) {
                Verdict::Forward(forward) => Some(forward.target),
                _ => None,
            }
        }

        fn reply(&mut self, flags: u8, sequence: u32, ack: u32, data: &[u8]) {
            let ends = [self.server, addr(CLIENT)];
            let verdict = self.send(ends, flags, [sequence, ack], data);
            assert!(matches!(verdict, Verdict::Reply(_)), "{verdict:?}");
        }
    }

    #[test]
    fn ftp_control_entry_with_data_connection_is_reused_after_reset() {
        for data in [false, true] {
            let mut control = Control::new("conn_reuse_mode", data);
            let (seq, ack) = if data { (5018, 1007) } else { (5001, 1001) };
            control.reply(TcpFlags::RST | TcpFlags::ACK, seq, ack, b"");
            let before = control.director.shard.len();
            let server = control.request(TcpFlags::SYN, 900_000, 0, b"");
            assert_eq!(
                server == Some(control.server),
                data,
                "forwarded to {server:?} (data connection: {data})"
            );
            assert!(server.is_some(), "the SYN was dropped");
            assert_eq!(control.director.shard.len(), before);
        }
    }

    #[test]
    fn ftp_control_entry_of_server_with_weight_0_is_replaced() {
        for data in [false, true] {
            let mut control = Control::new("expire_nodest_conn", data);
            let (key, server) = (control.key, control.server);
            let config = ServerConfig::new(0, Forwarding::Nat);
            let edited = control.director.control.edit_server(&key, server, &config);
            edited.unwrap();
            let other = control.request(TcpFlags::SYN, 900_000, 0, b"");
            assert!(
                other.is_some_and(|other| other != server),
                "forwarded to {other:?} (data connection: {data})"
            );
        }
    }
}
