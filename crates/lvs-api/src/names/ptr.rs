//! Reverse look-ups in DNS (RFC 1035, RFC 3596): one query in one datagram.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

const TYPE_PTR: u16 = 12;
const CLASS_IN: u16 = 1;
/// Maximum number of pointers that are followed in a compressed name.
const JUMPS_MAX: usize = 16;

/// The first three name servers in the text of `/etc/resolv.conf`; this host if there are none.
pub(super) fn servers(text: &str) -> Vec<SocketAddr> {
    let mut servers: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            (words.next()? == "nameserver").then_some(())?;
            // A server with a scope (`fe80::1%eth0`) is skipped: scopes are not supported.
            Some(SocketAddr::new(words.next()?.parse().ok()?, 53))
        })
        .take(3)
        .collect();
    if servers.is_empty() {
        servers.push(SocketAddr::from((Ipv4Addr::LOCALHOST, 53)));
    }
    servers
}

/// Requests the name of `address` from `server`. `Ok(None)`: the address has no name, or none that
/// is valid.
pub(super) fn ask(
    server: SocketAddr,
    address: IpAddr,
    timeout: Duration,
) -> io::Result<Option<String>> {
    let deadline = Instant::now() + timeout;
    let socket = if server.is_ipv4() {
        UdpSocket::bind("0.0.0.0:0")?
    } else {
        UdpSocket::bind("[::]:0")?
    };
    socket.connect(server)?;
    // The random port makes forged answers unlikely; the id only distinguishes answers.
    let id = socket.local_addr()?.port().rotate_left(7);
    socket.send(&question(id, address))?;
    let mut buf = [0; 1500];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        let len = socket.recv(&mut buf)?;
        if let Some(answer) = read_answer(&buf[..len], id) {
            return answer.ok_or_else(|| io::Error::other("the name server failed"));
        }
    }
}

fn question(id: u16, address: IpAddr) -> Vec<u8> {
    let mut message = Vec::with_capacity(90);
    message.extend(id.to_be_bytes());
    // Recursion desired; one question.
    message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    let mut label = |text: &str| {
        // The labels have at most seven characters.
        message.push(u8::try_from(text.len()).unwrap_or(0));
        message.extend(text.bytes());
    };
    match address {
        IpAddr::V4(v4) => {
            for octet in v4.octets().iter().rev() {
                label(&octet.to_string());
            }
            label("in-addr");
        }
        IpAddr::V6(v6) => {
            for octet in v6.octets().iter().rev() {
                label(&format!("{:x}", octet & 15));
                label(&format!("{:x}", octet >> 4));
            }
            label("ip6");
        }
    }
    label("arpa");
    message.push(0);
    message.extend(TYPE_PTR.to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
    message
}

/// Parses an answer. `None`: not an answer to the query `id`. `Some(None)`: the server has failed.
/// Otherwise the name, if the address has one.
#[expect(clippy::option_option, reason = "the three outcomes are handled above")]
fn read_answer(message: &[u8], id: u16) -> Option<Option<Option<String>>> {
    if message.len() < 12 || word(message, 0)? != id || message[2] & 0x80 == 0 {
        return None;
    }
    match message[3] & 15 {
        0 => {}
        // NXDOMAIN
        3 => return Some(Some(None)),
        _ => return Some(None),
    }
    Some(Some(first_ptr(message)))
}

fn first_ptr(message: &[u8]) -> Option<String> {
    let (questions, answers) = (word(message, 4)?, word(message, 6)?);
    let mut at = 12;
    for _ in 0..questions {
        at = name(message, at)?.1 + 4;
    }
    for _ in 0..answers {
        let (_, after) = name(message, at)?;
        let len = usize::from(word(message, after + 8)?);
        if word(message, after)? == TYPE_PTR && word(message, after + 2)? == CLASS_IN {
            let (found, _) = name(message, after + 10)?;
            return (!found.is_empty()).then_some(found);
        }
        at = after + 10 + len;
    }
    None
}

/// Reads the name at offset `at`, and also returns the offset of the first byte after it. `None` if
/// the name is invalid, or contains a character that host names cannot contain.
fn name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut text = String::new();
    let mut behind = None;
    let mut jumps = 0;
    loop {
        let len = *message.get(at)?;
        match len {
            0 => return Some((text, behind.unwrap_or(at + 1))),
            1..=63 => {
                let label = message.get(at + 1..at + 1 + usize::from(len))?;
                // Only labels of valid host names may be printed to a terminal.
                if !label
                    .iter()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'/'))
                    || text.len() > 255
                {
                    return None;
                }
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(&String::from_utf8_lossy(label));
                at += 1 + usize::from(len);
            }
            0xc0.. => {
                behind.get_or_insert(at + 2);
                at = usize::from(word(message, at)? & 0x3fff);
                jumps += 1;
                if jumps > JUMPS_MAX {
                    return None;
                }
            }
            _ => return None,
        }
    }
}

fn word(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ptr_query_returns_name() {
        let server = UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        let at = server.local_addr().expect("the socket has an address");
        let thread = std::thread::spawn(move || {
            let mut buf = [0; 512];
            let (len, client) = server.recv_from(&mut buf).expect("the question arrives");
            let mut answer = buf[..len].to_vec();
            assert!(
                answer[12..]
                    .starts_with(b"\x011\x012\x010\x03192\x07in-addr\x04arpa\0\0\x0c\0\x01")
            );
            answer[2] |= 0x80;
            answer[7] = 1;
            answer.extend(b"\xc0\x0c\0\x0c\0\x01\0\0\0\x3c\0\x0d\x03web\x07example\0");
            server
                .send_to(&answer, client)
                .expect("the datagram can be sent");
        });
        let name = ask(at, IpAddr::from([192, 0, 2, 1]), Duration::from_secs(30));
        assert_eq!(
            name.expect("the name server answers").as_deref(),
            Some("web.example")
        );
        thread.join().expect("the thread ends without a panic");
    }

    proptest! {
        #[test]
        fn ptr_parser_does_not_panic_on_any_answer(message in prop::collection::vec(any::<u8>(), 0..200)) {
            let id = word(&message, 0).unwrap_or(0);
            let _ = read_answer(&message, id);
            let _ = first_ptr(&message);
        }
    }
}
