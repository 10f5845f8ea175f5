//! Parses addresses of data connections in commands and replies of FTP (RFC 959, RFC 2428) as
//! `ip_vs_ftp_in` and `ip_vs_ftp_out` do: within one segment, which may contain other text.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::ops::Range;

use super::Mode;
use crate::Family;

/// A command of an FTP client that concerns a data connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FtpCommand {
    /// PASV or EPSV: the client requests that the server announce an address.
    Passive(Mode),
    /// PORT or EPRT: the client listens at this address.
    Active(SocketAddr),
}

/// The FTP command in a client's segment; `None` if there is none for this address family. PASV and
/// EPSV are recognised anywhere in the segment, PORT and EPRT only at its start.
pub(super) fn command(text: &[u8], family: Family) -> Option<FtpCommand> {
    let digit = family_digit(family);
    // Nothing shorter than "PASV" and a line break counts.
    for line in (0..text.len().saturating_sub(5)).map(|at| &text[at..]) {
        if family == Family::V4 && after_word(line, b"PASV\r\n").is_some() {
            return Some(FtpCommand::Passive(Mode::Passive));
        }
        match after_word(line, b"EPSV") {
            Some([b'\r', ..]) => return Some(FtpCommand::Passive(Mode::ExtendedPassive)),
            Some(&[b' ', of, b'\r', ..]) if of == digit => {
                return Some(FtpCommand::Passive(Mode::ExtendedPassive));
            }
            // An EPSV argument of another family, or "ALL".
            Some([b' ', ..]) => return None,
            _ => {}
        }
    }
    let port = || {
        let rest = after_word(text, b"PORT").filter(|_| family == Family::V4)?;
        let (listens, _) = six_numbers(&rest[past(rest, b' ', true)?..])?;
        Some(listens)
    };
    let extended_port = || {
        let rest = after_word(text, b"EPRT")?;
        let (address, port, _) = extended(&rest[past(rest, b' ', false)?..], family)?;
        Some(SocketAddr::new(address?, port))
    };
    port().or_else(extended_port).map(FtpCommand::Active)
}

/// The address that a server's reply announces, and the bytes of the segment that contain it;
/// `None` if the segment announces no address in this mode. A reply to EPSV without an address
/// announces the address of `server`.
pub(super) fn reply(text: &[u8], mode: Mode, server: IpAddr) -> Option<(SocketAddr, Range<usize>)> {
    let code: &[u8] = match mode {
        Mode::Active => return None,
        Mode::Passive => b"227 ",
        Mode::ExtendedPassive => b"229 ",
    };
    let rest = after_word(text, code)?;
    let start = past(rest, b'(', mode == Mode::Passive)?;
    let (listens, len) = match mode {
        Mode::Passive => six_numbers(&rest[start..])?,
        _ => {
            let (address, port, len) = extended(&rest[start..], Family::of(&server))?;
            (SocketAddr::new(address.unwrap_or(server), port), len)
        }
    };
    let start = code.len() + start;
    Some((listens, start..start + len))
}

/// The text after `word`, if `text` begins with this word in upper or lower case.
fn after_word<'a>(text: &'a [u8], word: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = text.split_at_checked(word.len())?;
    start.eq_ignore_ascii_case(word).then_some(rest)
}

/// The position after the first run of `mark` bytes. With `or_digit`: the position of the first
/// digit, if that is earlier.
fn past(text: &[u8], mark: u8, or_digit: bool) -> Option<usize> {
    let found = |&byte: &u8| byte == mark || (or_digit && byte.is_ascii_digit());
    let start = text.iter().position(found)?;
    let run = text[start..].iter().position(|&byte| byte != mark)?;
    Some(start + run)
}

/// Parses `h1,h2,h3,h4,p1,p2`, which another byte must follow. Also returns the length without that
/// byte. An empty number counts as 0.
fn six_numbers(text: &[u8]) -> Option<(SocketAddr, usize)> {
    let mut numbers = [0u8; 6];
    let mut at = 0;
    for (len, &byte) in text.iter().enumerate() {
        match byte {
            b'0'..=b'9' => {
                numbers[at] = numbers[at].checked_mul(10)?.checked_add(byte - b'0')?;
            }
            b',' if at < 5 => at += 1,
            _ if at < 5 => return None,
            _ => {
                let [a, b, c, d, high, low] = numbers;
                let port = u16::from_be_bytes([high, low]);
                return Some((SocketAddr::new(Ipv4Addr::new(a, b, c, d).into(), port), len));
            }
        }
    }
    None
}

/// Parses `|family|address|port|` with any delimiter, or `|||port|`. Returns the address (`None` in
/// the second form), the port and the length.
fn extended(text: &[u8], family: Family) -> Option<(Option<IpAddr>, u16, usize)> {
    let (&delimiter, rest) = text.split_first()?;
    if !delimiter.is_ascii_graphic() || delimiter.is_ascii_digit() {
        return None;
    }
    let mut fields = rest.split(|&byte| byte == delimiter);
    let (of, address, port) = (fields.next()?, fields.next()?, fields.next()?);
    // A fourth field means that the third one has ended.
    fields.next()?;
    let len = 1 + of.len() + 1 + address.len() + 1 + port.len() + 1;
    let address = match of {
        [] if address.is_empty() => None,
        [of] if *of == family_digit(family) => Some(parse_address(address, family)?),
        _ => return None,
    };
    let port = decimal(port, u16::MAX.into())?;
    let port = u16::try_from(port).ok().filter(|&port| port != 0)?;
    Some((address, port, len))
}

const fn family_digit(family: Family) -> u8 {
    match family {
        Family::V4 => b'1',
        Family::V6 => b'2',
    }
}

fn parse_address(text: &[u8], family: Family) -> Option<IpAddr> {
    match family {
        Family::V4 => {
            let mut bytes = [0; 4];
            let mut parts = text.split(|&byte| byte == b'.');
            for byte in &mut bytes {
                *byte = u8::try_from(decimal(parts.next()?, 255)?).ok()?;
            }
            parts.next().is_none().then(|| IpAddr::from(bytes))
        }
        Family::V6 => {
            let address: Ipv6Addr = core::str::from_utf8(text).ok()?.parse().ok()?;
            Some(address.into())
        }
    }
}

/// A decimal number up to `max`, with any number of leading zeros.
fn decimal(text: &[u8], max: u32) -> Option<u32> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0, |number: u32, &byte| {
        let digit = char::from(byte).to_digit(10)?;
        Some(number * 10 + digit).filter(|&number| number <= max)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;
    use std::borrow::ToOwned;

    const PASSIVE: Option<FtpCommand> = Some(FtpCommand::Passive(Mode::Passive));
    const EXTENDED: Option<FtpCommand> = Some(FtpCommand::Passive(Mode::ExtendedPassive));

    fn active(addr: &str) -> Option<FtpCommand> {
        Some(FtpCommand::Active(addr.parse().unwrap()))
    }

    #[test]
    fn ftp_passive_commands_are_found_anywhere_in_a_segment() {
        let four = |text: &str| command(text.as_bytes(), Family::V4);
        let six = |text: &str| command(text.as_bytes(), Family::V6);
        assert_eq!(four("PASV\r\n"), PASSIVE);
        assert_eq!(four("pAsV\r\nLIST\r\n"), PASSIVE);
        assert_eq!(four("TYPE I\r\nPASV\r\n"), PASSIVE);
        assert_eq!(four("PASV \r\n"), None);
        assert_eq!(four("PASV\n"), None);
        assert_eq!(four("PASV\r"), None);
        assert_eq!(
            six("PASV\r\n"),
            None,
            "PASV, which is for IPv4 only, was accepted over IPv6"
        );
        assert_eq!(four("EPSV\r\n"), EXTENDED);
        assert_eq!(six("epsv\r\n"), EXTENDED);
        assert_eq!(four("EPSV 1\r\n"), EXTENDED);
        assert_eq!(six("EPSV 2\r\n"), EXTENDED);
        assert_eq!(four("EPSV 2\r\n"), None);
        assert_eq!(four("EPSV ALL\r\n"), None);
        assert_eq!(four("EPSV  1\r\n"), None);
        assert_eq!(four("EPSV"), None);
        assert_eq!(four("EPSV 1"), None);
        // An EPSV argument that the parser does not support ends the search; text that is not a
        // command does not.
        assert_eq!(four("EPSV ALL\r\nPASV\r\n"), None);
        assert_eq!(four("EPSVX\r\nPASV\r\n"), PASSIVE);
    }

    #[test]
    fn ftp_active_commands_are_found_only_at_segment_start() {
        let four = |text: &str| command(text.as_bytes(), Family::V4);
        let six = |text: &str| command(text.as_bytes(), Family::V6);
        assert_eq!(four("PORT 192,0,2,7,156,65\r\n"), active("192.0.2.7:40001"));
        assert_eq!(four("port   192,0,2,7,0,20\r\n"), active("192.0.2.7:20"));
        assert_eq!(four("PORT192,0,2,7,0,20\r\n"), active("192.0.2.7:20"));
        assert_eq!(four("PORT 192,0,2,7,,20,\r\n"), active("192.0.2.7:20"));
        assert_eq!(
            four("PORT 192,0,2,7,0,20"),
            None,
            "an incomplete line was parsed"
        );
        assert_eq!(four("PORT 192,0,2,7,0,256\r\n"), None);
        assert_eq!(four("PORT 192,0,2,7,0\r\n"), None);
        assert_eq!(four("PORT -192,0,2,7,0,20\r\n"), None);
        assert_eq!(four("NOOP\r\nPORT 192,0,2,7,0,20\r\n"), None);
        assert_eq!(six("PORT 192,0,2,7,0,20\r\n"), None);
        assert_eq!(
            four("EPRT |1|192.0.2.7|40001|\r\n"),
            active("192.0.2.7:40001")
        );
        assert_eq!(
            four("eprt !1!192.0.2.7!0040001!"),
            active("192.0.2.7:40001")
        );
        assert_eq!(
            six("EPRT |2|2001:db8::7|40001|\r\n"),
            active("[2001:db8::7]:40001")
        );
        for wrong in [
            "EPRT |2|2001:db8::7|40001|\r\n",
            "EPRT |1|2001:db8::7|40001|\r\n",
            "EPRT |1|192.0.2|40001|\r\n",
            "EPRT |1|192.0.2.7.8|40001|\r\n",
            "EPRT |1|192.0.2.256|40001|\r\n",
            "EPRT |1|192.0.2.7|0|\r\n",
            "EPRT |1|192.0.2.7|65536|\r\n",
            "EPRT |1|192.0.2.7||\r\n",
            "EPRT |1|192.0.2.7|40001\r\n",
            "EPRT |||40001|\r\n",
            "EPRT 1119211\r\n",
            "EPRT \x7f1\x7f192.0.2.7\x7f40001\x7f\r\n",
            "EPRT ",
            "EPRT",
        ] {
            assert_eq!(four(wrong), None, "{wrong:?}");
        }
        let huge = alloc::format!("EPRT |1|192.0.2.7|{}|\r\n", "9".repeat(60_000));
        assert_eq!(four(&huge), None);
    }

    #[test]
    fn ftp_address_is_found_only_in_passive_reply_of_expected_mode() {
        let server: IpAddr = "10.0.0.1".parse().unwrap();
        let read = |text: &str, mode| {
            let (listens, place) = reply(text.as_bytes(), mode, server)?;
            Some((alloc::format!("{listens}"), text[place].to_owned()))
        };
        let pair = |listens: &str, text: &str| Some((listens.to_owned(), text.to_owned()));
        assert_eq!(
            read(
                "227 Entering Passive Mode (10,0,0,1,156,65).\r\n",
                Mode::Passive
            ),
            pair("10.0.0.1:40001", "10,0,0,1,156,65")
        );
        assert_eq!(
            read("227 =10,0,0,1,20,21\r\n", Mode::Passive),
            pair("10.0.0.1:5141", "10,0,0,1,20,21")
        );
        assert_eq!(
            read("227 ((10,0,0,2,20,21)\r\n", Mode::Passive),
            pair("10.0.0.2:5141", "10,0,0,2,20,21")
        );
        assert_eq!(read("227 10,0,0,1,20,21", Mode::Passive), None);
        assert_eq!(read("227-10,0,0,1,20,21\r\n", Mode::Passive), None);
        assert_eq!(read("200 10,0,0,1,20,21\r\n", Mode::Passive), None);
        assert_eq!(read("227 2 (10,0,0,1,20,21)\r\n", Mode::Passive), None);
        assert_eq!(
            read("227 (10,0,0,1,20,21)\r\n", Mode::ExtendedPassive),
            None
        );
        assert_eq!(read("227 (10,0,0,1,20,21)\r\n", Mode::Active), None);
        assert_eq!(
            read(
                "229 Entering Extended Passive Mode (|||40001|)\r\n",
                Mode::ExtendedPassive
            ),
            pair("10.0.0.1:40001", "|||40001|")
        );
        assert_eq!(
            read("229 (!1!10.0.0.9!40001!)", Mode::ExtendedPassive),
            pair("10.0.0.9:40001", "!1!10.0.0.9!40001!")
        );
        assert_eq!(read("229 |||40001|\r\n", Mode::ExtendedPassive), None);
        assert_eq!(read("229 (||1|40001|)\r\n", Mode::ExtendedPassive), None);
    }

    proptest! {
        #[test]
        fn ftp_parser_does_not_panic_on_any_bytes(text: Vec<u8>, six: bool, server: [u8; 4]) {
            let family = if six { Family::V6 } else { Family::V4 };
            let _ = command(&text, family);
            let server = IpAddr::from(server);
            for (code, mode) in [("227 ", Mode::Passive), ("229 (", Mode::ExtendedPassive)] {
                let text = [code.as_bytes(), &text].concat();
                if let Some((_, place)) = reply(&text, mode, server) {
                    prop_assert!(place.start >= 4 && place.start < place.end && place.end <= text.len());
                }
            }
        }

        #[test]
        fn ftp_port_announcement_round_trips(server: [u8; 4], port: u16) {
            let [a, b, c, d] = server;
            let [high, low] = port.to_be_bytes();
            let addr = SocketAddr::new(server.into(), port);
            let text = alloc::format!("227 Entering Passive Mode ({a},{b},{c},{d},{high},{low}).\r\n");
            let read = reply(text.as_bytes(), Mode::Passive, server.into());
            prop_assert_eq!(read.map(|(addr, _)| addr), Some(addr));
            let text = alloc::format!("EPRT |1|{}|{port}|\r\n", addr.ip());
            let read = command(text.as_bytes(), Family::V4);
            prop_assert_eq!(read, (port != 0).then_some(FtpCommand::Active(addr)));
        }
    }
}
