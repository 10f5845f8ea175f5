//! `type = "dns"`: a name server answers a question.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

use lvs_core::Protocol;

use super::{Advice, Asked, Port, ProbeError, ProbeKind};
use crate::text::{Diagnostic, Keys};

/// Maximum number of bytes of an answer that are read.
const ANSWER_MAX: usize = 1232;
/// Number of datagrams with answers to other queries after which the check has failed.
const STRANGE_MAX: usize = 16;

/// Kinds of records of a query.
const RECORDS: &[(&str, u16)] = &[
    ("A", 1),
    ("NS", 2),
    ("CNAME", 5),
    ("SOA", 6),
    ("PTR", 12),
    ("MX", 15),
    ("TXT", 16),
    ("AAAA", 28),
    ("SRV", 33),
    ("ANY", 255),
];

const CODES: &[&str] = &[
    "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED",
];

/// A check that sends a question to a name server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Dns {
    port: Port,
    name: String,
    record: u16,
    /// Accepted response codes.
    codes: Vec<u8>,
    /// Minimum number of records in the answer.
    answers: u16,
    /// An address that the answer must contain; `None` for any addresses.
    address: Option<IpAddr>,
}

impl ProbeKind for Dns {
    const NAME: &'static str = "dns";
    const KEYS: &'static [&'static str] = &["port", "name", "record", "rcode", "answers", "answer"];
    const VIA: Option<Protocol> = Some(Protocol::UDP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        // The query of keepalived: every name server can answer it.
        let name = keys.string("name")?.unwrap_or_else(|| ".".to_owned());
        if question(0, &name, 1).is_none() {
            let at = keys.place("name");
            keys.report(
                Diagnostic::error(at, format!("{name:?} is not a domain name"))
                    .help("write labels of 1 to 63 letters, digits, `-` and `_` with dots between them: name = \"www.example.org\""),
            );
            return None;
        }
        let address = keys.string("answer")?;
        let address =
            match address.map(|text| text.parse::<IpAddr>()) {
                None => None,
                Some(Ok(address)) => Some(address),
                Some(Err(_)) => {
                    let at = keys.place("answer");
                    keys.report(Diagnostic::error(at, "`answer` is not an address").help(
                        "name an address that the answer must contain: answer = \"192.0.2.1\"",
                    ));
                    return None;
                }
            };
        let usual = match address {
            Some(IpAddr::V4(_)) => 1,
            Some(IpAddr::V6(_)) => 28,
            None => 6,
        };
        let record = keys.word("record", RECORDS)?.unwrap_or(usual);
        let codes: Vec<(&str, u8)> = CODES.iter().copied().zip(0..).collect();
        let code = keys.word("rcode", &codes)?.unwrap_or(0);
        let answers = keys.number("answers", 0..=1000)?.unwrap_or(0);
        Some(Self {
            port,
            name,
            record,
            codes: vec![code],
            answers: u16::try_from(answers).unwrap_or(0),
            address,
        })
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("dns at {}", self.port.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let target = self.port.address(asked.server);
        let failed = asked.failing(target);
        let socket = asked.datagrams(target).await?;
        let id = fresh_id();
        let question = question(id, &self.name, self.record).unwrap_or_default();
        socket.send(&question).await.map_err(failed)?;
        let mut bytes = [0; ANSWER_MAX];
        let mut why = "only to other queries".to_owned();
        for _ in 0..STRANGE_MAX {
            let n = socket.recv(&mut bytes).await.map_err(failed)?;
            why = match read(&bytes[..n], &question) {
                Ok(Some(answer)) => match self.judge(&answer) {
                    Ok(()) => return Ok(Advice::NONE),
                    Err(why) => why,
                },
                // An answer to an earlier query, or to none.
                Ok(None) => continue,
                Err(why) => why.to_owned(),
            };
            break;
        }
        Err(ProbeError::server(format!(
            "{} answers {why}",
            self.target(asked.server)
        )))
    }
}

impl Dns {
    fn judge(&self, answer: &Answer) -> Result<(), String> {
        if !self.codes.contains(&answer.code) {
            let code = CODES.get(usize::from(answer.code));
            let unknown = || format!("with code {}", answer.code);
            return Err(code.map_or_else(unknown, |c| format!("with code {c}")));
        }
        if answer.records < self.answers {
            let (count, least) = (answer.records, self.answers);
            return Err(format!("with {count} records, fewer than {least}"));
        }
        match self.address {
            Some(address) if !answer.addresses.contains(&address) => {
                Err(format!("without {address}"))
            }
            _ => Ok(()),
        }
    }
}

/// A query identifier. It can be predictable: the socket accepts only datagrams of the server, and
/// the kernel chooses the local port.
fn fresh_id() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let step = NEXT.fetch_add(1, Ordering::Relaxed);
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), step).to_le_bytes()[0..2]
        .try_into()
        .map_or(step, u16::from_le_bytes)
}

/// A recursive DNS query (RFC 1035); `None` if the name is invalid.
pub(super) fn question(id: u16, name: &str, record: u16) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.extend(id.to_be_bytes());
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    let name = name.strip_suffix('.').unwrap_or(name);
    for label in name.split('.').filter(|_| !name.is_empty()) {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if !label.bytes().all(plain) || !(1..=63).contains(&label.len()) {
            return None;
        }
        bytes.push(u8::try_from(label.len()).ok()?);
        bytes.extend(label.bytes());
    }
    bytes.push(0);
    bytes.extend(record.to_be_bytes());
    bytes.extend([0, 1]);
    // An encoded name has at most 255 bytes.
    (bytes.len() <= 12 + 255 + 4).then_some(bytes)
}

/// The content of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    code: u8,
    /// Number of records that the answer announces.
    records: u16,
    /// The addresses in the answer.
    addresses: Vec<IpAddr>,
}

/// Parses an answer to `question`; `None` if the datagram is not an answer to it.
pub(super) fn read(bytes: &[u8], question: &[u8]) -> Result<Option<Answer>, &'static str> {
    let (Some(head), Some(asked)) = (bytes.get(..12), question.get(12..)) else {
        return Err("with an incomplete header");
    };
    if question.get(..2) != Some(&head[..2]) || head[2] & 0x80 == 0 {
        return Ok(None);
    }
    let code = head[3] & 15;
    let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    if word(4) == 0 && code != 0 {
        // A server that cannot parse the question omits it from the answer.
        return Ok(Some(Answer {
            code,
            ..Answer::default()
        }));
    }
    let there = bytes.get(12..12 + asked.len());
    if word(4) != 1 || !there.is_some_and(|there| there.eq_ignore_ascii_case(asked)) {
        return Ok(None);
    }
    let mut rest = &bytes[12 + asked.len()..];
    let mut answer = Answer {
        code,
        records: word(6),
        addresses: Vec::new(),
    };
    for _ in 0..answer.records {
        let Some((kind, data, after)) = record(rest) else {
            // The answer is truncated: its complete records count.
            break;
        };
        match (kind, data.len()) {
            (1, 4) => {
                let octets: [u8; 4] = data.try_into().unwrap_or_default();
                answer.addresses.push(IpAddr::from(octets));
            }
            (28, 16) => {
                let octets: [u8; 16] = data.try_into().unwrap_or_default();
                answer.addresses.push(IpAddr::from(octets));
            }
            _ => {}
        }
        rest = after;
    }
    Ok(Some(answer))
}

/// Splits off a record: its type, its data, and the bytes after it. `None` if the record is
/// incomplete or invalid.
fn record(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let mut rest = bytes;
    // Skip the name: only its end matters here.
    loop {
        let (length, after) = rest.split_first()?;
        match length & 0xc0 {
            0xc0 => {
                rest = after.get(1..)?;
                break;
            }
            0 if *length == 0 => {
                rest = after;
                break;
            }
            0 => rest = after.get(usize::from(*length)..)?,
            _ => return None,
        }
    }
    let head = rest.get(..10)?;
    let kind = u16::from_be_bytes([head[0], head[1]]);
    let length = usize::from(u16::from_be_bytes([head[8], head[9]]));
    let data = rest.get(10..10 + length)?;
    Some((kind, data, &rest[10 + length..]))
}

#[cfg(test)]
mod tests {
    use tokio::net::UdpSocket;

    use super::*;
    use crate::health::probe::hostile::{answered, probe};

    /// An answer to `question` with these addresses.
    fn answer(question: &[u8], code: u8, addresses: &[[u8; 4]]) -> Vec<u8> {
        let mut bytes = question.to_vec();
        bytes[2] |= 0x80;
        bytes[3] = code;
        bytes[7] = u8::try_from(addresses.len()).unwrap();
        for address in addresses {
            bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            bytes.extend(address);
        }
        bytes
    }

    #[test]
    fn dns_probe_encodes_valid_names_only_and_parses_only_answer_to_its_query() {
        let asked = question(7, "www.example.org.", 1).expect("the name is valid");
        assert_eq!(&asked[12..], b"\x03www\x07example\x03org\0\0\x01\0\x01");
        assert_eq!(
            question(7, ".", 6).expect("the name is valid").len(),
            12 + 5
        );
        for wrong in ["a..b", " ", "ä", "-.", &"a.".repeat(130), &"a".repeat(64)] {
            let given = question(0, wrong, 1);
            assert!(given.is_none() || wrong == "-.", "{wrong}");
        }
        let good = answer(&asked, 0, &[[10, 0, 0, 1], [10, 0, 0, 2]]);
        let reported = read(&good, &asked)
            .expect("the answer is valid")
            .expect("the answer is to the question");
        assert_eq!((reported.code, reported.records), (0, 2));
        assert_eq!(reported.addresses[1], IpAddr::from([10, 0, 0, 2]));
        let mut other = good.clone();
        other[1] ^= 1;
        assert_eq!(read(&other, &asked), Ok(None));
        assert_eq!(
            read(&asked, &asked),
            Ok(None),
            "the query was accepted as its own answer"
        );
        for n in 0..good.len() {
            let _ = read(&good[..n], &asked);
        }
    }

    #[tokio::test]
    async fn dns_probe_succeeds_only_if_rcode_answer_count_and_address_match() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr().unwrap();
        tokio::spawn(async move {
            let mut bytes = [0; 512];
            while let Ok((n, from)) = server.recv_from(&mut bytes).await {
                let asked = &bytes[..n];
                let reply = match asked[13] {
                    b'o' => answer(asked, 0, &[[10, 0, 0, 1]]),
                    b'n' => answer(asked, 3, &[]),
                    b'h' => asked[..7].to_vec(),
                    b's' => continue,
                    b'l' => {
                        let mut older = answer(asked, 0, &[]);
                        older[0] ^= 1;
                        let _ = server.send_to(&older, from).await;
                        answer(asked, 0, &[])
                    }
                    // Wrong counts of records.
                    _ => {
                        let mut lie = answer(asked, 0, &[[10, 0, 0, 9]]);
                        lie[6..8].copy_from_slice(&[0xff, 0xff]);
                        lie
                    }
                };
                let _ = server.send_to(&reply, from).await;
            }
        });
        for (more, good) in [
            ("name = \"ok\"", true),
            ("name = \"ok\", answer = \"10.0.0.1\"", true),
            ("name = \"ok\", answer = \"10.0.0.2\"", false),
            ("name = \"ok\", answers = 2", false),
            ("name = \"no\"", false),
            ("name = \"no\", rcode = \"NXDOMAIN\"", true),
            ("name = \"half\"", false),
            ("name = \"silent\"", false),
            ("name = \"late\"", true),
            ("name = \"much\", answer = \"10.0.0.9\"", true),
        ] {
            // A failing check may use all of its time.
            let limit = if good { "10s" } else { "300ms" };
            let check =
                format!("{{ type = \"dns\", timeout = \"{limit}\", interval = \"1s\", {more} }}");
            let result = if good {
                answered(&check, address).await
            } else {
                probe(&check, address).await
            };
            assert_eq!(result.is_ok(), good, "{more}: {result:?}");
        }
    }
}
