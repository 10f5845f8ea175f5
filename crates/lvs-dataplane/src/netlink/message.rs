//! Builds and reads netlink messages: headers and attributes.
//!
//! Unknown attributes are ignored, so that messages of a newer kernel can be read. An attribute
//! that does not parse counts as absent.

/// Length of `nlmsghdr` in bytes.
pub(crate) const HEADER: usize = 16;

/// Builds messages, one after the other, in one buffer.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    buf: Vec<u8>,
    message: usize,
    /// Sequence number of the last message.
    pub(crate) seq: u32,
}

impl Builder {
    pub(crate) fn new(first_seq: u32) -> Self {
        Self {
            buf: Vec::with_capacity(512),
            message: 0,
            seq: first_seq.wrapping_sub(1),
        }
    }

    /// Begins a message: writes its netlink header, and then `header`, the fixed header of its
    /// type, such as `ifinfomsg`.
    pub(crate) fn begin(&mut self, kind: u16, flags: u16, header: &[u8]) {
        self.seq = self.seq.wrapping_add(1);
        self.message = self.buf.len();
        self.buf.extend_from_slice(&[0; 4]);
        self.buf.extend_from_slice(&kind.to_ne_bytes());
        self.buf.extend_from_slice(&flags.to_ne_bytes());
        self.buf.extend_from_slice(&self.seq.to_ne_bytes());
        self.buf.extend_from_slice(&[0; 4]);
        self.buf.extend_from_slice(header);
        self.pad();
    }

    /// Completes the current message.
    pub(crate) fn end(&mut self) {
        let len = u32::try_from(self.buf.len() - self.message).unwrap_or(u32::MAX);
        self.buf[self.message..self.message + 4].copy_from_slice(&len.to_ne_bytes());
    }

    /// Adds flags to the last message.
    pub(crate) fn add_flags(&mut self, flags: u16) {
        let at = self.message + 6;
        let old = u16::from_ne_bytes([self.buf[at], self.buf[at + 1]]);
        self.buf[at..at + 2].copy_from_slice(&(old | flags).to_ne_bytes());
    }

    pub(crate) fn attr(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(4 + value.len()).expect("single attributes are short");
        self.buf.extend_from_slice(&len.to_ne_bytes());
        self.buf.extend_from_slice(&kind.to_ne_bytes());
        self.buf.extend_from_slice(value);
        self.pad();
    }

    /// Appends an attribute with a NUL-terminated string.
    pub(crate) fn attr_str(&mut self, kind: u16, value: &str) {
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
        self.attr(kind, &bytes);
    }

    /// Appends an attribute with a number in network byte order, as in nfnetlink.
    pub(crate) fn attr_be32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_be_bytes());
    }

    /// Adds an attribute that contains attributes, which `fill` adds.
    pub(crate) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        const NLA_F_NESTED: u16 = 0x8000;
        let start = self.buf.len();
        self.buf.extend_from_slice(&[0; 2]);
        self.buf
            .extend_from_slice(&(kind | NLA_F_NESTED).to_ne_bytes());
        fill(self);
        let len = u16::try_from(self.buf.len() - start).expect("callers split long lists");
        self.buf[start..start + 2].copy_from_slice(&len.to_ne_bytes());
    }

    fn pad(&mut self) {
        while !self.buf.len().is_multiple_of(4) {
            self.buf.push(0);
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buf
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) seq: u32,
    pub(crate) payload: &'a [u8],
}

impl Message<'_> {
    /// Reads an `NLMSG_ERROR`: a positive errno, or 0 for an acknowledgement; and the kernel's
    /// text, if any. `None` for messages of other types, and for one that is too short.
    pub(crate) fn error(&self) -> Option<(i32, Option<String>)> {
        const NLMSG_ERROR: u16 = 2;
        const NLM_F_CAPPED: u16 = 0x100;
        const NLM_F_ACK_TLVS: u16 = 0x200;
        const NLMSGERR_ATTR_MSG: u16 = 1;
        if self.kind != NLMSG_ERROR {
            return None;
        }
        let errno = i32::from_ne_bytes(*self.payload.first_chunk()?).saturating_neg();
        let mut words = None;
        if self.flags & NLM_F_ACK_TLVS != 0 {
            let original = u32_at(self.payload, 4).and_then(|len| usize::try_from(len).ok());
            let skip = if self.flags & NLM_F_CAPPED != 0 {
                HEADER
            } else {
                original.unwrap_or(HEADER).max(HEADER).next_multiple_of(4)
            };
            let rest = self.payload.get(4 + skip..).unwrap_or(&[]);
            words = attributes(rest)
                .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
                .map(|(_, value)| text(value));
        }
        Some((errno, words))
    }
}

pub(crate) fn messages(mut buf: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32_at(buf, 0)?).ok()?;
        let whole = buf.get(..len)?;
        let payload = whole.get(HEADER..)?;
        let message = Message {
            kind: u16_at(whole, 4)?,
            flags: u16_at(whole, 6)?,
            seq: u32_at(whole, 8)?,
            payload,
        };
        buf = buf.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some(message)
    })
}

/// Returns the attributes in a buffer: kinds without flags, and values.
pub(crate) fn attributes(mut buf: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    const NLA_TYPE_MASK: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(buf, 0)?);
        let kind = u16_at(buf, 2)? & NLA_TYPE_MASK;
        let value = buf.get(4..len)?;
        buf = buf.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// Reads a 16-bit number in the host's byte order; `None` if `buf` is too short.
pub(crate) fn u16_at(buf: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*buf.get(at..)?.first_chunk()?))
}

/// Reads a 32-bit number in the host's byte order; `None` if `buf` is too short.
pub(crate) fn u32_at(buf: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*buf.get(at..)?.first_chunk()?))
}

/// Converts a NUL-terminated string, and replaces invalid UTF-8.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn built_netlink_message_parses_to_its_original_values() {
        let mut builder = Builder::new(7);
        builder.begin(24, 5, &[1; 12]);
        builder.attr_str(1, "eth0");
        builder.nest(2, |b| b.attr_be32(3, 0x0102_0304));
        builder.end();
        builder.begin(25, 0, &[2; 8]);
        builder.end();
        let all: Vec<_> = messages(builder.bytes()).collect();
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].kind, all[0].flags, all[0].seq), (24, 5, 7));
        assert_eq!((all[1].kind, all[1].seq), (25, 8));
        let attrs: Vec<_> = attributes(&all[0].payload[12..]).collect();
        assert_eq!(attrs[0], (1, &b"eth0\0"[..]));
        assert_eq!(attrs[1].0, 2);
        let inner: Vec<_> = attributes(attrs[1].1).collect();
        assert_eq!(inner, [(3, &[1, 2, 3, 4][..])]);
        assert_eq!(text(attrs[0].1), "eth0");
    }

    proptest! {
        #[test]
        fn netlink_message_of_any_bytes_does_not_panic(bytes: Vec<u8>) {
            for message in messages(&bytes) {
                let _ = message.error();
                let _ = attributes(message.payload).count();
            }
            let _ = attributes(&bytes).count();
        }
    }
}
