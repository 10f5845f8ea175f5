//! The PROXY protocol (HAProxy's proxy-protocol.txt): a header at the beginning of a connection
//! that contains the client's original address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Version of the PROXY protocol header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version 1: the header is a line of text.
    V1,
    /// Version 2: the header is binary.
    V2,
}

/// The first bytes of version 2.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Maximum length of a line of version 1 in bytes, including its line break.
const LINE_MAX: usize = 107;
/// Maximum length of a version 2 header in bytes after its first 16 bytes: the addresses, and
/// extensions, which are ignored. A longer header is refused.
const REST_MAX: usize = 2048;
/// Maximum length of an accepted header in bytes.
pub const LENGTH_MAX: usize = 16 + REST_MAX;

/// The header by which the proxy reports to a server that `client` has connected to `local`. If the
/// two have different IP versions, the header contains no addresses.
pub fn write(version: Version, client: SocketAddr, local: SocketAddr) -> Vec<u8> {
    match version {
        Version::V1 => {
            let family = match (client.ip(), local.ip()) {
                (IpAddr::V4(_), IpAddr::V4(_)) => "TCP4",
                (IpAddr::V6(_), IpAddr::V6(_)) => "TCP6",
                _ => return b"PROXY UNKNOWN\r\n".to_vec(),
            };
            let (ip, port) = (client.ip(), client.port());
            let (to, to_port) = (local.ip(), local.port());
            format!("PROXY {family} {ip} {to} {port} {to_port}\r\n").into_bytes()
        }
        Version::V2 => {
            let mut bytes = SIGNATURE.to_vec();
            // Version 2, command PROXY.
            bytes.push(0x21);
            match (client.ip(), local.ip()) {
                (IpAddr::V4(from), IpAddr::V4(to)) => {
                    bytes.extend([0x11, 0, 12]);
                    bytes.extend(from.octets());
                    bytes.extend(to.octets());
                }
                (IpAddr::V6(from), IpAddr::V6(to)) => {
                    bytes.extend([0x21, 0, 36]);
                    bytes.extend(from.octets());
                    bytes.extend(to.octets());
                }
                _ => {
                    bytes.extend([0, 0, 0]);
                    return bytes;
                }
            }
            bytes.extend(client.port().to_be_bytes());
            bytes.extend(local.port().to_be_bytes());
            bytes
        }
    }
}

/// Result of parsing a client's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// More bytes are needed.
    Partial,
    /// A header of this length in bytes, and the original client; `None` if the header does not
    /// name it, so that the sender counts as the client.
    Header(usize, Option<SocketAddr>),
    /// The bytes are not a valid header.
    Nonsense,
}

/// Reads a header at the beginning of `bytes`.
pub fn read(bytes: &[u8]) -> Read {
    let begins = |with: &[u8]| {
        let length = bytes.len().min(with.len());
        bytes[..length] == with[..length]
    };
    if begins(&SIGNATURE) {
        binary(bytes)
    } else if begins(b"PROXY ") {
        line(bytes)
    } else {
        Read::Nonsense
    }
}

fn line(bytes: &[u8]) -> Read {
    let start = &bytes[..bytes.len().min(LINE_MAX)];
    let Some(end) = start.windows(2).position(|two| two == b"\r\n") else {
        return match bytes.len() < LINE_MAX {
            true => Read::Partial,
            false => Read::Nonsense,
        };
    };
    let Ok(text) = std::str::from_utf8(&start[..end]) else {
        return Read::Nonsense;
    };
    let words: Vec<&str> = text.split(' ').collect();
    let source = match words.as_slice() {
        ["PROXY", "UNKNOWN", ..] => Some(None),
        ["PROXY", "TCP4", from, to, port, to_port] => {
            source::<Ipv4Addr>(from, to, port, to_port).map(Some)
        }
        ["PROXY", "TCP6", from, to, port, to_port] => {
            source::<Ipv6Addr>(from, to, port, to_port).map(Some)
        }
        _ => None,
    };
    source.map_or(Read::Nonsense, |source| Read::Header(end + 2, source))
}

/// The source address in a version 1 header, if its addresses and ports are valid.
fn source<A: std::str::FromStr + Into<IpAddr>>(
    from: &str,
    to: &str,
    port: &str,
    to_port: &str,
) -> Option<SocketAddr> {
    let _: A = to.parse().ok()?;
    let _: u16 = to_port.parse().ok()?;
    let ip: A = from.parse().ok()?;
    Some(SocketAddr::new(ip.into(), port.parse().ok()?))
}

fn binary(bytes: &[u8]) -> Read {
    let Some((head, rest)) = bytes.split_at_checked(16) else {
        return Read::Partial;
    };
    let length = usize::from(u16::from_be_bytes([head[14], head[15]]));
    if length > REST_MAX || head[12] >> 4 != 2 {
        return Read::Nonsense;
    }
    let Some(rest) = rest.get(..length) else {
        return Read::Partial;
    };
    let port = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
    let source = match (head[12] & 0xf, head[13]) {
        // LOCAL: the sender itself is the client, for example for a health check.
        (0, _) => None,
        (1, 0x11) if length >= 12 => {
            let ip: [u8; 4] = rest[..4].try_into().unwrap_or_default();
            Some(SocketAddr::new(ip.into(), port(8)))
        }
        (1, 0x21) if length >= 36 => {
            let ip: [u8; 16] = rest[..16].try_into().unwrap_or_default();
            Some(SocketAddr::new(ip.into(), port(32)))
        }
        // An unknown address family.
        (1, 0) => None,
        _ => return Read::Nonsense,
    };
    Read::Header(16 + length, source)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn written_proxy_header_of_version_1_and_2_matches_specification() {
        let (client, local) = (address("192.0.2.1:56324"), address("198.51.100.9:443"));
        let line = b"PROXY TCP4 192.0.2.1 198.51.100.9 56324 443\r\n";
        assert_eq!(write(Version::V1, client, local), line);
        let binary = [
            &b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c"[..],
            &[192, 0, 2, 1, 198, 51, 100, 9, 0xdc, 0x04, 0x01, 0xbb],
        ]
        .concat();
        assert_eq!(write(Version::V2, client, local), binary);
        let mixed = write(Version::V1, client, address("[2001:db8::1]:80"));
        assert_eq!(mixed, b"PROXY UNKNOWN\r\n");
    }

    #[test]
    fn proxy_header_round_trips_and_incomplete_header_is_partial() {
        for version in [Version::V1, Version::V2] {
            for (client, local) in [
                ("192.0.2.1:1", "198.51.100.9:65535"),
                ("[2001:db8::1]:5000", "[2001:db8:ffff::2]:443"),
            ] {
                let client = address(client);
                let mut bytes = write(version, client, address(local));
                let length = bytes.len();
                for end in 0..length {
                    assert_eq!(
                        read(&bytes[..end]),
                        Read::Partial,
                        "{version:?}, {client}: {end} of {length}"
                    );
                }
                bytes.extend(b"GET /");
                assert_eq!(read(&bytes), Read::Header(length, Some(client)));
            }
        }
        let local = b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00";
        assert_eq!(read(local), Read::Header(16, None));
        assert_eq!(read(b"PROXY UNKNOWN\r\nx"), Read::Header(15, None));
    }

    #[test]
    fn invalid_proxy_header_is_refused() {
        for bytes in [
            &b"GET / HTTP/1.0"[..],
            b"PROXY TCP4 192.0.2.1 198.51.100.9 56324\r\n",
            b"PROXY TCP4 2001:db8::1 198.51.100.9 1 2\r\n",
            b"PROXY TCP6 2001:db8::1 2001:db8::2 1 66000\r\n",
            b"PROXY TCP4 192.0.2.1  198.51.100.9 1 2\r\n",
            b"\r\n\r\n\0\r\nQUIT\n\x11\x11\x00\x0c",
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff",
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x04abcd",
            &[b"PROXY TCP4 ".as_slice(), &[b'1'; 200]].concat(),
        ] {
            assert_eq!(read(bytes), Read::Nonsense, "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn proxy_header_is_accepted_up_to_length_limit_and_refused_beyond() {
        let binary = |length: usize| {
            let length_bytes = u16::try_from(length).unwrap().to_be_bytes();
            let head = [&SIGNATURE[..], &[0x21, 0x11], &length_bytes, &[10, 0, 0, 1]].concat();
            let mut bytes = head;
            bytes.resize(16 + length, 0);
            bytes
        };
        let longest = binary(REST_MAX);
        assert_eq!(longest.len(), 2064);
        let source = Some(address("10.0.0.1:0"));
        assert_eq!(read(&longest), Read::Header(LENGTH_MAX, source));
        assert_eq!(read(&longest[..LENGTH_MAX - 1]), Read::Partial);
        let longer = binary(REST_MAX + 1);
        assert_eq!(read(&longer), Read::Nonsense);
        // The first bytes already show that the header is too long.
        assert_eq!(read(&longer[..16]), Read::Nonsense);
        let line = |length: usize| {
            let words = format!("PROXY UNKNOWN {}", "x".repeat(length - 16));
            [words.as_bytes(), b"\r\n"].concat()
        };
        assert_eq!(read(&line(LINE_MAX)), Read::Header(LINE_MAX, None));
        assert_eq!(read(&line(LINE_MAX)[..LINE_MAX - 1]), Read::Partial);
        assert_eq!(read(&line(LINE_MAX + 1)), Read::Nonsense);
    }

    proptest! {
        #[test]
        fn proxy_header_parser_does_not_panic_on_any_bytes(
            start in prop_oneof![Just(&b""[..]), Just(&b"PROXY TCP4 "[..]), Just(&SIGNATURE[..])],
            rest in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let bytes = [start, &rest].concat();
            if let Read::Header(length, _) = read(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }
    }
}
