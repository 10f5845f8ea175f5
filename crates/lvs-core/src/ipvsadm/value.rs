//! Values on the command line: numbers as `strtol` parses them, addresses as `inet_aton` and
//! `inet_pton` do.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::resolve::Resolve;
use crate::Protocol;

/// White space, as `isspace` defines it in the C locale.
const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

/// A number from `min` to `max`, as `strtol` with base 10 reads it: after optional white space and
/// an optional sign, and up to the end of the word. `None` for any other word.
pub(super) fn number(word: &[u8], min: i64, max: i64) -> Option<i64> {
    let (value, rest) = leading_number(word)?;
    (rest.is_empty() && (min..=max).contains(&value)).then_some(value)
}

/// The number at the start of a word, and the text after it. `None` if there is no digit or the
/// number is too large.
fn leading_number(word: &[u8]) -> Option<(i64, &[u8])> {
    let start = word.iter().position(|&b| !is_space(b))?;
    let (negative, digits) = match &word[start..] {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    let len = digits.iter().take_while(|b| b.is_ascii_digit()).count();
    if len == 0 {
        return None;
    }
    let mut value = 0i64;
    for &digit in &digits[..len] {
        value = value
            .checked_mul(10)?
            .checked_add(i64::from(digit - b'0'))?;
    }
    Some((if negative { -value } else { value }, &digits[len..]))
}

/// An IPv6 prefix length: the number at the start of the word, as `atoi` reads it; `None` if it is
/// not 1 to 128.
pub(super) fn prefix(word: &[u8]) -> Option<u32> {
    let (value, _) = leading_number(word)?;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "atoi keeps the low 32 bits"
    )]
    let value = value as i32;
    u32::try_from(value)
        .ok()
        .filter(|len| (1..=128).contains(len))
}

/// An IPv4 address in any form that `inet_aton` accepts: one to four parts, each decimal, octal or
/// hexadecimal, of which the last one represents all remaining bytes. After whitespace, any text
/// may follow.
pub(super) fn inet_aton(word: &[u8]) -> Option<Ipv4Addr> {
    let mut rest = word;
    let mut value = 0u32;
    for part in 0..4u32 {
        let (number, after) = c_number(rest)?;
        match after {
            [b'.', next @ ..] if part < 3 => {
                value |= u32::from(u8::try_from(number).ok()?) << (24 - 8 * part);
                rest = next;
            }
            [] => return last_part(value, number, part),
            [byte, ..] if is_space(*byte) => return last_part(value, number, part),
            _ => return None,
        }
    }
    None
}

fn last_part(value: u32, number: u32, part: u32) -> Option<Ipv4Addr> {
    let room = u32::MAX >> (8 * part);
    (number <= room).then(|| Ipv4Addr::from(value | number))
}

/// An unsigned number in C's notation (`0x1f`, `017`, `15`), and the rest.
fn c_number(word: &[u8]) -> Option<(u32, &[u8])> {
    if !word.first()?.is_ascii_digit() {
        return None;
    }
    let (base, digits) = match word {
        [b'0', b'x' | b'X', rest @ ..] if rest.first().is_some_and(u8::is_ascii_hexdigit) => {
            (16, rest)
        }
        [b'0', ..] => (8, word),
        _ => (10, word),
    };
    let mut value = 0u32;
    let mut len = 0;
    while let Some(digit) = digits
        .get(len)
        .and_then(|&byte| char::from(byte).to_digit(base))
    {
        value = value.checked_mul(base)?.checked_add(digit)?;
        len += 1;
    }
    Some((value, &digits[len..]))
}

pub(super) fn inet6(word: &[u8]) -> Option<Ipv6Addr> {
    core::str::from_utf8(word).ok()?.parse().ok()
}

/// An IPv4 literal of four decimal parts.
pub(super) fn inet4(word: &[u8]) -> Option<Ipv4Addr> {
    core::str::from_utf8(word).ok()?.parse().ok()
}

/// An IPv4 address in digits or by name.
pub(super) fn host(word: &[u8], names: &dyn Resolve) -> Option<Ipv4Addr> {
    inet_aton(word).or_else(|| {
        let name = core::str::from_utf8(word).ok()?;
        if name.is_empty() {
            return None;
        }
        names.host(name)
    })
}

/// Parses `host[:port]`; `None` if this is not possible, or if the word consists only of digits.
/// `protocol` selects the service names for ports; without it only numbers are ports.
pub(super) fn endpoint(
    word: &[u8],
    protocol: Option<Protocol>,
    names: &dyn Resolve,
) -> Option<(IpAddr, Option<u16>)> {
    if word.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let (host_part, mut port_part) = match word {
        [b'[', rest @ ..] => {
            let end = rest.iter().position(|&b| b == b']')?;
            let port = rest[end + 1..].strip_prefix(b":")?;
            (&rest[..end], Some(port))
        }
        _ => (word, None),
    };
    let address = if let Some(v6) = inet6(host_part) {
        IpAddr::V6(v6)
    } else {
        // If brackets do not enclose an IPv6 address, only a colon within them begins a port:
        // `[192.0.2.1]:80` has no port.
        let (name, port) = match host_part.iter().rposition(|&b| b == b':') {
            Some(at) => (&host_part[..at], Some(&host_part[at + 1..])),
            None => (host_part, None),
        };
        port_part = port;
        IpAddr::V4(host(name, names)?)
    };
    let port = match port_part {
        Some(word) => Some(port(word, protocol, names)?),
        None => None,
    };
    Some((address, port))
}

fn port(word: &[u8], protocol: Option<Protocol>, names: &dyn Resolve) -> Option<u16> {
    if let Some(value) = number(word, 0, 65_535) {
        return u16::try_from(value).ok();
    }
    let name = core::str::from_utf8(word).ok()?;
    names.port(name, protocol?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvsadm_numbers_are_read_like_strtol() {
        assert_eq!(number(b" 5", 0, 10), Some(5));
        assert_eq!(number(b"+5", 0, 10), Some(5));
        assert_eq!(number(b"010", 0, 10), Some(10));
        for bad in [&b"5 "[..], b"0x10", b"", b"1.5", b"-", b"+", b" ", b"11"] {
            assert_eq!(number(bad, 0, 10), None, "{bad:?}");
        }
        assert_eq!(number(b"99999999999999999999", 0, i64::MAX), None);
    }

    #[test]
    fn ipvsadm_addresses_are_read_like_inet_aton() {
        let good: [(&[u8], [u8; 4]); 7] = [
            (b"10.0.0.1", [10, 0, 0, 1]),
            (b"10.1", [10, 0, 0, 1]),
            (b"0x7f000001", [127, 0, 0, 1]),
            (b"24", [0, 0, 0, 24]),
            (b"010.0.0.1", [8, 0, 0, 1]),
            (b"1.2.3.4 x", [1, 2, 3, 4]),
            (b"1.2.65535", [1, 2, 255, 255]),
        ];
        for (word, octets) in good {
            assert_eq!(inet_aton(word), Some(Ipv4Addr::from(octets)));
        }
        for bad in [
            &b""[..],
            b"256.1.1.1",
            b"1.2.3.4.5",
            b"08.1.1.1",
            b"1.2.65536",
            b"4294967296",
            b"1.2.3.",
            b"a",
        ] {
            assert_eq!(inet_aton(bad), None, "{bad:?}");
        }
    }
}
