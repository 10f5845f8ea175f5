//! The format of synchronisation messages: version 1, and version 0, which old kernels use.
//!
//! ```text
//! version 1   0 | syncid | size     | count | 1 | 0 0 | connections, each at a multiple of 4
//! version 0   count | syncid | size | connections of 24 bytes, or 48 with sequence numbers
//! ```

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::Protocol;
use crate::conn::{Key, flag};

/// Maximum length of the name of a persistence engine, in bytes.
const NAME_MAX: usize = 16;
const OPTION_SEQ: u8 = 1;
const OPTION_DATA: u8 = 2;
const OPTION_NAME: u8 = 3;
/// Bit of options that a receiver may skip if it does not support them.
const OPTION_SKIPPABLE: u8 = 0x40;
const SEQ_LEN: usize = 24;
/// Flags of entries that contain sequence numbers.
const SEQ_MASK: u32 = flag::IN_SEQ | flag::OUT_SEQ;

/// Adjustment of sequence numbers in both directions: `init_seq`, `delta`, `previous_delta` of
/// packets from the client, then of packets from the server.
pub type Sequences = [u32; 6];

/// A connection or a template in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The protocol; 0 for a template of a firewall mark.
    pub protocol: Protocol,
    /// Client; port 0 for a template.
    pub client: SocketAddr,
    /// Virtual address and port; for the template of a firewall mark, the mark.
    pub virt: SocketAddr,
    /// Real server's address and port.
    pub server: SocketAddr,
    /// Flags, by the kernel's numbers.
    pub flags: u32,
    /// State, by the kernel's numbers.
    pub state: u16,
    /// Firewall mark; version 1 only.
    pub mark: u32,
    /// Timeout in seconds, only in version 1; 0 means that the message contains none.
    pub timeout: u32,
    /// Adjustment of sequence numbers.
    pub sequences: Option<Sequences>,
    /// Name of a persistence engine.
    pub engine: Option<Vec<u8>>,
    /// Data of the persistence engine.
    pub data: Option<Vec<u8>>,
}

impl Entry {
    pub(crate) const fn key(&self) -> Key {
        Key {
            protocol: self.protocol,
            client: self.client,
            virt: self.virt,
        }
    }

    /// Length in bytes in a message of `version`, without padding; `None` if the format of this
    /// version cannot represent the entry.
    pub(crate) fn len(&self, version: u32) -> Option<usize> {
        let sequences = self.flags & SEQ_MASK != 0;
        if version == 0 {
            return self
                .client
                .is_ipv4()
                .then_some(if sequences { 48 } else { 24 });
        }
        let option = |len: usize| if len == 0 { 0 } else { len + 2 };
        let data = self.data.as_ref().map_or(0, Vec::len);
        let name = self.engine.as_ref().map_or(0, Vec::len);
        Some(
            if self.client.is_ipv4() { 36 } else { 72 }
                + option(if sequences { SEQ_LEN } else { 0 })
                + option(data)
                + if data > 0 { option(name) } else { 0 },
        )
    }

    /// Appends the entry to a message of `version`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "version 0 has room for 16 flags, and lengths are below 4096"
    )]
    pub(crate) fn write(&self, version: u32, out: &mut Vec<u8>) {
        let ports = [self.client, self.virt, self.server].map(|addr| addr.port().to_be_bytes());
        if version == 0 {
            out.extend([0, self.protocol.0]);
            out.extend(ports.concat());
            for addr in [self.client, self.virt, self.server] {
                write_addr(addr.ip(), out);
            }
            out.extend((self.flags as u16).to_be_bytes());
            out.extend(self.state.to_be_bytes());
            if self.flags & SEQ_MASK != 0 {
                // In the byte order of the sender: little endian on all supported machines.
                for number in self.sequences.unwrap_or_default() {
                    out.extend(number.to_le_bytes());
                }
            }
            return;
        }
        let len = self.len(version).unwrap_or(0) as u16;
        out.extend([u8::from(self.client.is_ipv6()), self.protocol.0]);
        out.extend(len.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.state.to_be_bytes());
        out.extend(ports.concat());
        out.extend(self.mark.to_be_bytes());
        out.extend(self.timeout.to_be_bytes());
        for addr in [self.client, self.virt, self.server] {
            write_addr(addr.ip(), out);
        }
        if self.flags & SEQ_MASK != 0 {
            out.extend([OPTION_SEQ, SEQ_LEN as u8]);
            for number in self.sequences.unwrap_or_default() {
                out.extend(number.to_be_bytes());
            }
        }
        if let Some(data) = self.data.as_ref().filter(|data| !data.is_empty()) {
            out.extend([OPTION_DATA, data.len() as u8]);
            out.extend(data);
            if let Some(name) = &self.engine {
                out.extend([OPTION_NAME, name.len() as u8]);
                out.extend(name);
            }
        }
    }
}

fn write_addr(addr: IpAddr, out: &mut Vec<u8>) {
    match addr {
        IpAddr::V4(addr) => out.extend(addr.octets()),
        IpAddr::V6(addr) => out.extend(addr.octets()),
    }
}

/// Writes the header of an empty message of `version`.
pub(crate) fn start(version: u32, syncid: u8, out: &mut Vec<u8>) {
    if version == 0 {
        out.extend([0, syncid, 0, 0]);
    } else {
        out.extend([0, syncid, 0, 0, 0, 1, 0, 0]);
    }
}

/// Writes length and count into the header of a complete message.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the kernel counts modulo 256, and lengths are below 65536"
)]
pub(crate) fn finish(version: u32, count: u32, message: &mut [u8]) {
    let size = (message.len() as u16).to_be_bytes();
    message[2..4].copy_from_slice(&size);
    message[if version == 0 { 0 } else { 4 }] = count as u8;
}

/// The valid entries of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entries {
    /// The connections and templates in the message.
    pub entries: Vec<Entry>,
    /// Whether the rest of the message, or a connection in it, could not be parsed.
    pub damaged: bool,
}

/// The reason why a backup ignores a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The message is too short for a header, or its length field is wrong.
    Malformed,
    /// The master has another syncid than the backup.
    OtherId,
}

/// The entries of a message, up to the first invalid one. Entries with an unknown mandatory option
/// are omitted.
///
/// # Errors
/// [`Unread::Malformed`] if the message is shorter than four bytes, or the length in it is wrong;
/// [`Unread::OtherId`] if `syncid` is not 0, and the message has another one
/// (`ip_vs_process_message`).
pub fn parse(message: &[u8], syncid: u8) -> Result<Entries, Unread> {
    let [first, id, high, low, rest @ ..] = message else {
        return Err(Unread::Malformed);
    };
    if usize::from(u16::from_be_bytes([*high, *low])) != message.len() {
        return Err(Unread::Malformed);
    }
    if syncid != 0 && *id != syncid {
        return Err(Unread::OtherId);
    }
    Ok(match (first, rest) {
        (0, [count, 1, 0, 0, ..]) => parse_v1(message, *count),
        _ => parse_v0(rest, *first),
    })
}

fn parse_v1(message: &[u8], count: u8) -> Entries {
    let mut all = Entries::default();
    let mut at = 8;
    for _ in 0..count {
        let rest = message.get(at..).filter(|rest| rest.len() >= 36);
        let entry = rest.ok_or(()).and_then(|rest| {
            let size = u16::from_be_bytes([rest[2], rest[3]]);
            let (version, size) = (size >> 12, usize::from(size & 0xfff));
            if version != 0 || size > rest.len() {
                return Err(());
            }
            at += (size + 3) & !3;
            parse_entry(rest, size)
        });
        match entry {
            Ok(Some(entry)) => all.entries.push(entry),
            Ok(None) => all.damaged = true,
            Err(()) => {
                all.damaged = true;
                break;
            }
        }
    }
    all
}

/// Parses an entry of version 1. `Ok(None)` means that only this entry must be ignored; an error,
/// that the rest of the message must be ignored.
pub(super) fn parse_entry(bytes: &[u8], size: usize) -> Result<Option<Entry>, ()> {
    let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let long = |at: usize| u32::from(word(at)) << 16 | u32::from(word(at + 2));
    let v6 = bytes[0] & 1 != 0;
    if !v6 && bytes[0] != 0 {
        return Err(());
    }
    let fixed = if v6 { 72 } else { 36 };
    if size < fixed || bytes.len() < fixed {
        return Err(());
    }
    let addr = |n: usize| -> IpAddr {
        if v6 {
            let octets: [u8; 16] = core::array::from_fn(|i| bytes[24 + n * 16 + i]);
            Ipv6Addr::from(octets).into()
        } else {
            Ipv4Addr::from_bits(long(24 + n * 4)).into()
        }
    };
    let mut entry = Entry {
        protocol: Protocol(bytes[1]),
        client: SocketAddr::new(addr(0), word(10)),
        virt: SocketAddr::new(addr(1), word(12)),
        server: SocketAddr::new(addr(2), word(14)),
        flags: long(4),
        state: word(8),
        mark: long(16),
        timeout: long(20),
        sequences: None,
        engine: None,
        data: None,
    };
    let mut options = &bytes[fixed..size];
    while !options.is_empty() {
        let [kind, len, rest @ ..] = options else {
            return Err(());
        };
        let len = usize::from(*len);
        if len == 0 || len > rest.len() {
            return Err(());
        }
        let (value, rest) = rest.split_at(len);
        let again = match kind & !OPTION_SKIPPABLE {
            OPTION_SEQ => {
                if len != SEQ_LEN {
                    return Err(());
                }
                let mut numbers = [0; 6];
                for (number, bytes) in numbers.iter_mut().zip(value.chunks_exact(4)) {
                    *number = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
                entry.sequences.replace(numbers).is_some()
            }
            OPTION_DATA => entry.data.replace(value.into()).is_some(),
            OPTION_NAME => {
                if len > NAME_MAX {
                    return Err(());
                }
                entry.engine.replace(value.into()).is_some()
            }
            _ if kind & OPTION_SKIPPABLE == 0 => return Ok(None),
            _ => false,
        };
        if again {
            return Err(());
        }
        options = rest;
    }
    Ok(Some(entry))
}

fn parse_v0(mut rest: &[u8], count: u8) -> Entries {
    let mut all = Entries::default();
    for _ in 0..count {
        let Some((bytes, after)) = rest.split_at_checked(24) else {
            all.damaged = true;
            break;
        };
        rest = after;
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let addr = |at: usize| {
            let bits = u32::from(word(at)) << 16 | u32::from(word(at + 2));
            IpAddr::V4(Ipv4Addr::from_bits(bits))
        };
        let flags = u32::from(word(20));
        let mut sequences = None;
        if flags & SEQ_MASK != 0 {
            let Some((bytes, after)) = rest.split_at_checked(SEQ_LEN) else {
                all.damaged = true;
                break;
            };
            rest = after;
            let mut numbers = [0; 6];
            for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(4)) {
                *number = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
            sequences = Some(numbers);
        }
        all.entries.push(Entry {
            protocol: Protocol(bytes[1]),
            client: SocketAddr::new(addr(8), word(2)),
            virt: SocketAddr::new(addr(12), word(4)),
            server: SocketAddr::new(addr(16), word(6)),
            flags,
            state: word(22),
            mark: 0,
            timeout: 0,
            sequences,
            engine: None,
            data: None,
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn sync_message_of_any_bytes_does_not_panic(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), fix: bool) {
            if fix && bytes.len() >= 8 {
                let size = u16::try_from(bytes.len()).unwrap().to_be_bytes();
                bytes[2..4].copy_from_slice(&size);
                bytes[0] = 0;
                bytes[5..8].copy_from_slice(&[1, 0, 0]);
            }
            let _ = parse(&bytes, 0);
        }
    }
}
