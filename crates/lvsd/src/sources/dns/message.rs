//! Builds DNS queries, and selects the records that answer them (with simple-dns).

use std::collections::HashSet;
use std::net::IpAddr;

use simple_dns::rdata::{OPT, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, TYPE};

use super::name_of;

/// Maximum length of an answer over UDP in bytes, which fits into the minimum MTU of IPv6 (1280).
pub(super) const DATAGRAM_MAX: u16 = 1232;
/// Maximum number of records of an answer that are read.
const RECORDS_MAX: usize = 4096;
/// Maximum number of CNAME records between the queried name and its records.
const CHAIN_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordKind {
    A,
    Aaaa,
    Srv,
}

impl RecordKind {
    const fn record(self) -> TYPE {
        match self {
            Self::A => TYPE::A,
            Self::Aaaa => TYPE::AAAA,
            Self::Srv => TYPE::SRV,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Data {
    Address(IpAddr),
    Service {
        priority: u16,
        weight: u16,
        port: u16,
        /// Target in lower case without a final dot. An empty target (the root) means that the
        /// service is not available.
        target: String,
    },
}

/// Relevant content of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) records: Vec<Data>,
    /// Minimum TTL in seconds of the records and of the CNAME records before them. Not to be used
    /// without records.
    pub(super) ttl: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// A valid answer; without records if the name has none.
    Answer(Answer),
    /// A truncated answer: repeat the query over TCP.
    Cut,
    /// A message that does not answer the query.
    Strange,
    /// The name server refuses the query, has failed, or sent an invalid message; with the reason.
    Refused(&'static str),
}

/// Builds a query with recursion desired.
pub(super) fn question(id: u16, name: &str, kind: RecordKind) -> Result<Vec<u8>, String> {
    let wrong = |error: simple_dns::SimpleDnsError| error.to_string();
    let mut packet = Packet::new_query(id);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    let name = Name::new(name).map_err(wrong)?;
    let record = QTYPE::TYPE(kind.record());
    packet
        .questions
        .push(Question::new(name, record, QCLASS::CLASS(CLASS::IN), false));
    *packet.opt_mut() = Some(OPT {
        opt_codes: Vec::new(),
        udp_packet_size: DATAGRAM_MAX,
        version: 0,
    });
    packet.build_bytes_vec().map_err(wrong)
}

/// Parses an answer to the query with this `id`, `name` and `kind`.
pub(super) fn read(bytes: &[u8], id: u16, name: &str, kind: RecordKind) -> Came {
    // A truncated answer may end anywhere: its header has the TC flag.
    let cut = bytes.get(2).is_some_and(|flags| flags & 0x02 != 0);
    if bytes.get(..2) != Some(&id.to_be_bytes()[..]) {
        return Came::Strange;
    }
    let packet = match Packet::parse(bytes) {
        Ok(packet) => packet,
        Err(_) if cut && bytes.len() >= 12 => return Came::Cut,
        Err(_) => return Came::Refused("with an invalid message"),
    };
    if !packet.has_flags(PacketFlag::RESPONSE) {
        return Came::Strange;
    }
    let asked = |question: &Question<'_>| {
        plain(&question.qname).as_deref() == Some(name)
            && question.qtype == QTYPE::TYPE(kind.record())
            && question.qclass == QCLASS::CLASS(CLASS::IN)
    };
    match packet.questions.as_slice() {
        [question] if asked(question) => {}
        // Some name servers omit the question in a refusal.
        [] if packet.rcode() != RCODE::NoError => {}
        _ => return Came::Strange,
    }
    if packet.has_flags(PacketFlag::TRUNCATION) {
        return Came::Cut;
    }
    match packet.rcode() {
        RCODE::NoError => Came::Answer(answer(&packet, name, kind)),
        RCODE::NameError => Came::Answer(Answer::default()),
        RCODE::ServerFailure => Came::Refused("with code SERVFAIL"),
        RCODE::Refused => Came::Refused("with code REFUSED"),
        RCODE::FormatError => Came::Refused("with code FORMERR"),
        RCODE::NotImplemented => Came::Refused("with code NOTIMP"),
        _ => Came::Refused("with an error code"),
    }
}

/// Selects the records of `name`, or of its canonical name.
fn answer(packet: &Packet<'_>, name: &str, kind: RecordKind) -> Answer {
    let mut answer = Answer {
        records: Vec::new(),
        ttl: u32::MAX,
    };
    let all: Vec<_> = packet
        .answers
        .iter()
        .take(RECORDS_MAX)
        .filter(|record| record.class == CLASS::IN)
        .filter_map(|record| Some((plain(&record.name)?, record)))
        .collect();
    let mut owner = name.to_owned();
    let mut been = HashSet::from([owner.clone()]);
    for _ in 0..CHAIN_MAX {
        let next = all.iter().find_map(|(of, record)| match &record.rdata {
            RData::CNAME(to) if *of == owner => Some((plain(&to.0)?, record.ttl)),
            _ => None,
        });
        let Some((next, ttl)) = next else { break };
        if !been.insert(next.clone()) {
            break;
        }
        answer.ttl = answer.ttl.min(ttl);
        owner = next;
    }
    for (_, record) in all.iter().filter(|(of, _)| *of == owner) {
        let data = match (&record.rdata, kind) {
            (RData::A(a), RecordKind::A) => Data::Address(IpAddr::V4(a.address.into())),
            (RData::AAAA(a), RecordKind::Aaaa) => Data::Address(IpAddr::V6(a.address.into())),
            (RData::SRV(srv), RecordKind::Srv) => Data::Service {
                priority: srv.priority,
                weight: srv.weight,
                port: srv.port,
                target: match plain(&srv.target) {
                    Some(target) => target,
                    None => continue,
                },
            },
            _ => continue,
        };
        answer.ttl = answer.ttl.min(record.ttl);
        answer.records.push(data);
    }
    answer
}

/// A name in lower case without a final dot; `None` if [`name_of`] refuses it. The root name is
/// empty.
fn plain(name: &Name<'_>) -> Option<String> {
    let text = name.to_string();
    match text.as_str() {
        "" | "." => Some(String::new()),
        text => name_of(text),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use simple_dns::ResourceRecord;
    use simple_dns::rdata::{A, CNAME, SRV};

    use super::*;

    /// An answer to the query with id 7.
    fn reply(records: &[(&str, u32, RData<'static>)]) -> Vec<u8> {
        let asked = question(7, "www.example.org", RecordKind::A).unwrap();
        let mut packet = Packet::parse(&asked).unwrap().into_reply();
        *packet.opt_mut() = None;
        for (name, ttl, data) in records {
            let name = Name::new(name).unwrap().into_owned();
            packet
                .answers
                .push(ResourceRecord::new(name, CLASS::IN, *ttl, data.clone()));
        }
        packet.build_bytes_vec().unwrap()
    }

    fn a(n: u8) -> RData<'static> {
        RData::A(A {
            address: u32::from_be_bytes([10, 0, 0, n]),
        })
    }

    fn www(bytes: &[u8]) -> Came {
        read(bytes, 7, "www.example.org", RecordKind::A)
    }

    fn address(n: u8) -> Data {
        Data::Address([10, 0, 0, n].into())
    }

    #[test]
    fn dns_answer_contains_only_records_of_canonical_name() {
        let cname = RData::CNAME(CNAME(Name::new("WWW2.example.org").unwrap().into_owned()));
        let bytes = reply(&[
            ("WWW.Example.org", 30, cname),
            ("www2.example.org", 60, a(1)),
            ("other.example.org", 1, a(9)),
        ]);
        let records = vec![address(1)];
        assert_eq!(www(&bytes), Came::Answer(Answer { records, ttl: 30 }));
    }

    #[test]
    fn unrelated_truncated_and_failed_dns_answers_are_distinguished() {
        let good = reply(&[("www.example.org", 60, a(1))]);
        assert!(matches!(www(&good), Came::Answer(_)));
        assert_eq!(
            read(&good, 8, "www.example.org", RecordKind::A),
            Came::Strange
        );
        assert_eq!(
            read(&good, 7, "ftp.example.org", RecordKind::A),
            Came::Strange
        );
        assert_eq!(
            read(&good, 7, "www.example.org", RecordKind::Srv),
            Came::Strange
        );
        let asked = question(7, "www.example.org", RecordKind::A).unwrap();
        assert_eq!(
            www(&asked),
            Came::Strange,
            "a query is accepted as an answer"
        );
        let mut cut = good.clone();
        cut[2] |= 2;
        assert_eq!(www(&cut), Came::Cut);
        assert_eq!(www(&cut[..40]), Came::Cut);
        assert_eq!(www(&good[..40]), Came::Refused("with an invalid message"));
        let mut failed = good;
        failed[3] = (failed[3] & 0xf0) | 2;
        assert_eq!(www(&failed), Came::Refused("with code SERVFAIL"));
    }

    #[test]
    fn circular_dns_aliases_yield_no_records() {
        let to = |name: &'static str| RData::CNAME(CNAME(Name::new(name).unwrap()));
        let bytes = reply(&[
            ("www.example.org", 5, to("a.example.org")),
            ("a.example.org", 5, to("www.example.org")),
        ]);
        let Came::Answer(answer) = www(&bytes) else {
            panic!("the message was not read as an answer")
        };
        assert!(answer.records.is_empty());
    }

    proptest! {
        #[test]
        fn dns_parser_does_not_panic_on_any_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), at in any::<bool>()) {
            if at && bytes.len() > 2 {
                bytes[..2].copy_from_slice(&7u16.to_be_bytes());
            }
            let _ = www(&bytes);
        }

        #[test]
        fn damaged_dns_answer_has_no_more_records_than_bytes(changes in proptest::collection::vec((2usize..200, any::<u8>()), 0..8), end in 0usize..200) {
            let srv = RData::SRV(SRV { priority: 1, weight: 2, port: 3, target: Name::new("a.example.org").unwrap() });
            let mut bytes = reply(&[("www.example.org", 60, a(1)), ("www.example.org", 60, srv), ("www.example.org", 60, a(2))]);
            for (at, byte) in changes {
                if let Some(place) = bytes.get_mut(at) { *place = byte; }
            }
            bytes.truncate(end.max(2));
            for kind in [RecordKind::A, RecordKind::Aaaa, RecordKind::Srv] {
                if let Came::Answer(answer) = read(&bytes, 7, "www.example.org", kind) {
                    prop_assert!(answer.records.len() <= bytes.len());
                }
            }
        }
    }
}
