//! Netlink messages and attributes, as bytes.
//!
//! Reading never panics: bytes after a malformed length are ignored, as in the kernel.

pub(super) const ERROR: u16 = 2;
pub(super) const DONE: u16 = 3;
/// Lowest message type that is not a control message.
const MIN_TYPE: u16 = 0x10;

pub(super) const REQUEST: u16 = 0x1;
pub(super) const MULTI: u16 = 0x2;
pub(super) const ACK: u16 = 0x4;
pub(super) const DUMP: u16 = 0x300;
const CAPPED: u16 = 0x100;

/// Length of `struct nlmsghdr` in bytes.
pub(super) const HEADER: usize = 16;
/// Length of `struct genlmsghdr` in bytes.
const GENERIC_HEADER: usize = 4;
/// Length of `struct nlattr` in bytes.
const ATTRIBUTE_HEADER: usize = 4;
/// Mask of the number in an attribute's type.
const NUMBER: u16 = 0x3fff;

const fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn u16_at(from: &[u8], at: usize) -> Option<u16> {
    bytes(from, at).map(u16::from_ne_bytes)
}

pub(super) fn u32_at(from: &[u8], at: usize) -> Option<u32> {
    bytes(from, at).map(u32::from_ne_bytes)
}

pub(super) fn u64_at(from: &[u8], at: usize) -> Option<u64> {
    bytes(from, at).map(u64::from_ne_bytes)
}

/// A netlink message in a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) sequence: u32,
    /// The message with its header.
    pub(super) whole: &'a [u8],
    /// The message without its header.
    pub(super) body: &'a [u8],
}

impl<'a> Message<'a> {
    /// The command of a generic netlink message, and its attributes; `None` if the message is too
    /// short.
    pub(super) fn command(&self) -> Option<(u8, Attributes<'a>)> {
        let command = *self.body.first()?;
        Some((command, Attributes(self.body.get(GENERIC_HEADER..)?)))
    }

    pub(super) const fn is_dump(&self) -> bool {
        self.flags & DUMP == DUMP
    }

    /// Whether the kernel would process the message.
    pub(super) const fn is_request(&self) -> bool {
        self.flags & REQUEST != 0 && self.kind >= MIN_TYPE
    }
}

/// The messages of a datagram.
pub(super) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(datagram, 0)?).ok()?;
        let whole = datagram.get(..length).filter(|_| length >= HEADER)?;
        datagram = datagram.get(aligned(length)..).unwrap_or_default();
        Some(Message {
            kind: u16_at(whole, 4)?,
            flags: u16_at(whole, 6)?,
            sequence: u32_at(whole, 8)?,
            whole,
            body: whole.get(HEADER..)?,
        })
    })
}

/// The bytes of an attribute list. If several attributes have the same number, the last one
/// applies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes<'a>(pub(super) &'a [u8]);

impl<'a> Attributes<'a> {
    fn iter(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let length = usize::from(u16_at(rest, 0)?);
            let number = u16_at(rest, 2)? & NUMBER;
            let value = rest.get(ATTRIBUTE_HEADER..length)?;
            rest = rest.get(aligned(length)..).unwrap_or_default();
            Some((number, value))
        })
    }

    pub(super) fn get(self, number: u16) -> Option<&'a [u8]> {
        let of_number = self.iter().filter(|(found, _)| *found == number);
        of_number.last().map(|(_, value)| value)
    }

    pub(super) fn nested(self, number: u16) -> Option<Self> {
        self.get(number).map(Attributes)
    }

    pub(super) fn u8(self, number: u16) -> Option<u8> {
        self.get(number)?.first().copied()
    }

    pub(super) fn u16(self, number: u16) -> Option<u16> {
        u16_at(self.get(number)?, 0)
    }

    /// Reads an attribute as a number in network byte order; `None` if it is missing or too short.
    pub(super) fn be16(self, number: u16) -> Option<u16> {
        self.u16(number).map(u16::from_be)
    }

    pub(super) fn u32(self, number: u16) -> Option<u32> {
        u32_at(self.get(number)?, 0)
    }

    /// Reads an attribute as text, which may end with a NUL; `None` if it is missing.
    pub(super) fn text(self, number: u16) -> Option<String> {
        self.get(number).map(text)
    }
}

/// The text before the first NUL.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = &bytes[..end.unwrap_or(bytes.len())];
    String::from_utf8_lossy(text).into_owned()
}

/// A message that is being written.
#[derive(Debug)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// Begins a message of type `kind` that answers `request`, for the socket `port`.
    pub(super) fn new(kind: u16, flags: u16, request: &Message<'_>, port: u32) -> Self {
        let mut all = vec![0; 4];
        all.extend(kind.to_ne_bytes());
        all.extend(flags.to_ne_bytes());
        all.extend(request.sequence.to_ne_bytes());
        all.extend(port.to_ne_bytes());
        Self(all)
    }

    /// As [`new`](Self::new), for generic netlink.
    pub(super) fn generic(
        kind: u16,
        flags: u16,
        request: &Message<'_>,
        port: u32,
        (command, version): (u8, u8),
    ) -> Self {
        let mut message = Self::new(kind, flags, request, port);
        message.0.extend([command, version, 0, 0]);
        message
    }

    /// Writes an attribute. Omits a value that is too long for an attribute.
    pub(super) fn put(&mut self, number: u16, value: &[u8]) {
        if let Ok(length) = u16::try_from(value.len() + ATTRIBUTE_HEADER) {
            self.0.extend(length.to_ne_bytes());
            self.0.extend(number.to_ne_bytes());
            self.0.extend(value);
            self.0.resize(aligned(self.0.len()), 0);
        }
    }

    pub(super) fn u8(&mut self, number: u16, value: u8) {
        self.put(number, &[value]);
    }

    pub(super) fn u16(&mut self, number: u16, value: u16) {
        self.put(number, &value.to_ne_bytes());
    }

    pub(super) fn be16(&mut self, number: u16, value: u16) {
        self.put(number, &value.to_be_bytes());
    }

    pub(super) fn u32(&mut self, number: u16, value: u32) {
        self.put(number, &value.to_ne_bytes());
    }

    pub(super) fn u64(&mut self, number: u16, value: u64) {
        self.put(number, &value.to_ne_bytes());
    }

    pub(super) fn text(&mut self, number: u16, text: &str) {
        self.put(number, &[text.as_bytes(), &[0]].concat());
    }

    /// Writes an attribute that contains others. Omits it if it becomes too long.
    pub(super) fn nest(&mut self, number: u16, write: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.0.extend([0; 2]);
        self.0.extend(number.to_ne_bytes());
        write(self);
        match u16::try_from(self.0.len() - start) {
            Ok(length) => self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes()),
            Err(_) => self.0.truncate(start),
        }
    }

    /// Writes the length, and returns the message.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(aligned(self.0.len()), 0);
        self.0
    }
}

/// Returns the message by which the kernel acknowledges (`errno` 0) or refuses `request`.
pub(super) fn error(request: &Message<'_>, port: u32, errno: i32) -> Vec<u8> {
    let (flags, echo) = match errno {
        0 => (CAPPED, &request.whole[..HEADER]),
        _ => (0, request.whole),
    };
    let mut message = Writer::new(ERROR, flags, request, port);
    message.0.extend((-errno).to_ne_bytes());
    message.0.extend(echo);
    message.finish()
}

/// The last message of a dump.
pub(super) fn done(request: &Message<'_>, port: u32) -> Vec<u8> {
    let mut message = Writer::new(DONE, MULTI, request, port);
    message.0.extend([0; 4]);
    message.finish()
}
