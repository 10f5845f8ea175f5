//! Tests of `lvs-run`: compares the answers of the netlink family with recorded answers of a
//! kernel, and tests the socket options, malformed requests and the command line.

use std::ffi::OsString;

use lvs_core::api::{Call, ServerInfo, ServiceId, ServiceInfo, Timeouts};
use lvs_core::stats::Stats;
use lvs_core::sync::SyncDaemon;
use nix::errno::Errno;

use super::family::{self, Dataplane, FAMILY};
use super::wire::{self, Attributes};
use super::{Invocation, options};

const RECORDED: &str = include_str!("kernel.txt");
/// The program's netlink port in the recordings.
const PORT: u32 = 4242;

/// A dataplane that stores the services that are sent to it, in order.
#[derive(Default)]
struct Kept(Vec<ServiceInfo>);

impl Kept {
    fn find(&mut self, id: ServiceId) -> Result<&mut ServiceInfo, Errno> {
        let found = self.0.iter_mut().find(|info| info.service == id);
        found.ok_or(Errno::ESRCH)
    }
}

impl Dataplane for Kept {
    fn change(&mut self, call: Call) -> Result<(), Errno> {
        match call {
            Call::ServiceAdd(spec) => {
                if self.find(spec.service).is_ok() {
                    return Err(Errno::EEXIST);
                }
                self.0.push(ServiceInfo {
                    service: spec.service,
                    config: spec.config,
                    owner: None,
                    stats: Stats::default(),
                    refused: 0,
                    refusals: Vec::new(),
                    drops: Vec::new(),
                    servers: Vec::new(),
                });
            }
            Call::ServerAdd(spec) => self
                .find(spec.service)?
                .servers
                .push(ServerInfo::new(spec.server, spec.config)),
            Call::ServiceDelete { service }
            | Call::ServerDelete { service, .. }
            | Call::ServiceZero {
                service: Some(service),
            } => {
                self.find(service)?;
            }
            Call::ServiceEdit(spec) => self.find(spec.service)?.config = spec.config,
            _ => {}
        }
        Ok(())
    }

    fn services(&mut self, one: Option<ServiceId>) -> Result<Vec<ServiceInfo>, Errno> {
        match one {
            Some(id) => self.find(id).map(|info| vec![info.clone()]),
            None => Ok(self.0.clone()),
        }
    }

    fn daemons(&mut self) -> Result<Vec<SyncDaemon>, Errno> {
        Ok(Vec::new())
    }

    fn timeouts(&mut self) -> Result<Timeouts, Errno> {
        Ok(Timeouts {
            tcp: 1000,
            tcp_fin: 200,
            udp: 100,
        })
    }

    fn table_size(&mut self) -> Result<u32, Errno> {
        Ok(4096)
    }
}

/// The recorded messages, with their titles.
fn recorded() -> Vec<(&'static str, Vec<u8>)> {
    let lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (title, words) = line.split_once(':').expect("the line has a title");
            let digits: String = words.split_whitespace().collect();
            let bytes = (0..digits.len() / 2).map(|at| {
                u8::from_str_radix(&digits[2 * at..2 * at + 2], 16)
                    .expect("the digits are hexadecimal")
            });
            (title, bytes.collect())
        })
        .collect()
}

fn attribute(number: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).expect("the number fits into 16 bits");
    let mut all = [length.to_ne_bytes(), number.to_ne_bytes()].concat();
    all.extend(value);
    all.resize(all.len().next_multiple_of(4), 0);
    all
}

/// A request as the recording program sent it.
fn request(kind: u16, flags: u16, sequence: u32, command: u8, attributes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(20 + attributes.len()).expect("the number fits into 32 bits");
    let mut all = length.to_ne_bytes().to_vec();
    all.extend(kind.to_ne_bytes());
    all.extend((wire::REQUEST | flags).to_ne_bytes());
    all.extend(sequence.to_ne_bytes());
    all.extend(PORT.to_ne_bytes());
    all.extend([command, 1, 0, 0]);
    all.extend(attributes);
    all
}

fn ask(request: &[u8], dataplane: &mut Kept) -> Vec<u8> {
    let message = wire::messages(request)
        .next()
        .expect("the request contains a message");
    assert!(family::is_ours(&message));
    family::answer(&message, PORT, dataplane).concat()
}

/// Formats attributes as text; `None` if the bytes are no attributes. Omits the padding before
/// counters of 64 bits that some architectures have.
fn show(attributes: &[u8], path: &[u16]) -> Option<String> {
    let mut rest = attributes;
    let mut text = String::new();
    while !rest.is_empty() {
        let length = usize::from(wire::u16_at(rest, 0)?);
        let number = wire::u16_at(rest, 2)?;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        let inner = [path, &[number]].concat();
        let nested = match inner[..] {
            [1 | 2, 10 | 12, 11] => continue,
            [1..=3] | [1 | 2, 10 | 12] => show(value, &inner),
            _ => None,
        };
        text += &format!("{number}={} ", nested.unwrap_or_else(|| hex(value)));
    }
    Some(text)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Formats messages as text, without the number of the family.
fn shown(messages: &[u8]) -> Vec<String> {
    let each = wire::messages(messages).map(|message| {
        let mut whole = message.whole.to_vec();
        let is_family = [FAMILY, u16::MAX].contains(&message.kind);
        match message.kind {
            _ if is_family => {
                let shown = show(&whole[20..], &[]).expect("the attributes are valid");
                return format!("{} {shown}", hex(&whole[6..20]));
            }
            wire::ERROR => whole[24..26].fill(0xff),
            // Name and number are the first attributes of a family.
            0x10 => whole[36..38].fill(0xff),
            _ => {}
        }
        hex(&whole)
    });
    each.collect()
}

#[test]
fn netlink_answers_equal_kernel_answers() {
    let recorded = recorded();
    let of = |title: &str| -> Vec<&Vec<u8>> {
        let with_title = recorded.iter().filter(|(of, _)| *of == title);
        with_title.map(|(_, message)| message).collect()
    };
    // The kernel had these services and servers; the recorded attributes add them here.
    let mut dataplane = Kept::default();
    let services: Vec<Vec<u8>> = of("services")
        .into_iter()
        .filter(|message| wire::u16_at(message, 4) == Some(u16::MAX))
        .map(|message| message[20..].to_vec())
        .collect();
    assert_eq!(services.len(), 8);
    let mut dumps = recorded.iter().filter(|(title, _)| *title == "dests");
    let is_error = |answer: &[u8]| wire::u32_at(answer, 16).is_some_and(|errno| errno != 0);
    for service in &services {
        let answer = ask(&request(FAMILY, 4, 1, 1, service), &mut dataplane);
        assert!(!is_error(&answer), "{}: {}", hex(service), hex(&answer));
        for (_, message) in dumps.by_ref() {
            if wire::u16_at(message, 4) != Some(u16::MAX) {
                break;
            }
            let attributes = [&service[..], &message[20..]].concat();
            let answer = ask(&request(FAMILY, 4, 1, 5, &attributes), &mut dataplane);
            assert!(!is_error(&answer), "{}: {}", hex(&attributes), hex(&answer));
        }
    }

    let name = attribute(2, b"IPVS\0");
    let of_family = |family: u8| attribute(1, &attribute(1, &[family, 0]));
    let mark = [attribute(1, &[2, 0]), attribute(5, &[77, 0, 0, 0])].concat();
    let mark = attribute(1, &mark);
    let ping = [
        attribute(1, &[2, 0]),
        attribute(2, &[1, 0]),
        attribute(3, &[1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        attribute(4, &[0, 80]),
    ];
    let ping = attribute(1, &ping.concat());
    let dump = wire::DUMP | 4;
    let mut asked: Vec<(&str, Vec<u8>)> = vec![
        ("family", request(0x10, 0, 101, 3, &name)),
        ("info", request(FAMILY, 4, 102, 15, &[])),
        ("config", request(FAMILY, 4, 103, 13, &[])),
        ("services", request(FAMILY, dump, 104, 4, &[])),
    ];
    for service in &services {
        asked.extend([
            ("get", request(FAMILY, 4, 1001, 4, service)),
            ("dests", request(FAMILY, dump, 1002, 8, service)),
            ("new again", request(FAMILY, 4, 1003, 1, service)),
            ("zero", request(FAMILY, 4, 1004, 16, service)),
        ]);
    }
    asked.extend([
        ("daemons", request(FAMILY, dump, 2001, 11, &[])),
        ("get nothing", request(FAMILY, 4, 2002, 4, &[])),
        ("no such cmd", request(FAMILY, 4, 2003, 99, &[])),
        ("dump of new", request(FAMILY, dump, 2004, 1, &[])),
        ("del nothing", request(FAMILY, 4, 2005, 3, &[])),
        ("dests of nothing", request(FAMILY, dump, 2006, 8, &[])),
        ("new dest nothing", request(FAMILY, 4, 2007, 5, &[])),
        ("new daemon nothing", request(FAMILY, 4, 2008, 9, &[])),
        ("set_info", request(FAMILY, 4, 2009, 14, &[])),
        ("get dest no dump", request(FAMILY, 4, 2010, 8, &[])),
        ("only family", request(FAMILY, 4, 2011, 3, &of_family(2))),
        ("bad family", request(FAMILY, 4, 2012, 3, &of_family(7))),
        ("no such fwmark", request(FAMILY, 4, 2013, 3, &mark)),
        ("new without scheduler", request(FAMILY, 4, 2014, 1, &mark)),
        ("dest without dest", request(FAMILY, 4, 2015, 5, &mark)),
        ("get no such", request(FAMILY, 4, 2016, 4, &mark)),
        ("dests of no such", request(FAMILY, dump, 2017, 8, &mark)),
        ("protocol 1", request(FAMILY, 4, 2018, 3, &ping)),
    ]);
    let mut expected = recorded.iter();
    for (title, request) in asked {
        let answers = shown(&ask(&request, &mut dataplane));
        for answer in answers {
            let (of, message) = expected.next().expect("the recording has an answer");
            assert_eq!(*of, title);
            assert_eq!(vec![answer], shown(message), "{title}");
        }
    }
    assert_eq!(expected.next(), None);
}

#[test]
fn netlink_service_edit_keeps_flags_outside_mask_and_extra_settings() {
    let address = attribute(3, &[192, 0, 2, 1]);
    let service = |flags: u32, mask: u32| {
        let flags = [flags.to_ne_bytes(), mask.to_ne_bytes()].concat();
        let all = [
            attribute(1, &[2, 0]),
            attribute(2, &[6, 0]),
            address.clone(),
            attribute(4, &[0, 80]),
            attribute(6, b"rr\0"),
            attribute(7, &flags),
            attribute(8, &[0; 4]),
            attribute(9, &[255; 4]),
        ];
        attribute(1, &all.concat())
    };
    let mut dataplane = Kept::default();
    ask(
        &request(FAMILY, 4, 1, 1, &service(9, u32::MAX)),
        &mut dataplane,
    );
    dataplane.0[0].config.extras.count_unanswered = true;
    ask(&request(FAMILY, 4, 1, 2, &service(4, 5)), &mut dataplane);
    let config = &dataplane.0[0].config;
    assert_eq!(config.flags.0, 12);
    assert!(config.extras.count_unanswered);
}

#[test]
fn netlink_message_without_request_flag_or_with_invalid_length_is_not_answered() {
    let mut message = request(FAMILY, 0, 1, 17, &[]);
    message[6] = 0;
    assert!(ask(&message, &mut Kept::default()).is_empty());
    assert_eq!(wire::messages(&[]).count(), 0);
    // Lengths that are too short, and lengths that are too long.
    for length in [0_u32, 15, 21, u32::MAX] {
        let mut message = message.clone();
        message[..4].copy_from_slice(&length.to_ne_bytes());
        assert_eq!(wire::messages(&message).count(), 0, "{length}");
    }
}

/// Numbers of a linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(self.0 >> 33).expect("the number fits into a `usize`") % limit
    }
}

#[test]
fn malformed_netlink_and_sockopt_requests_do_not_panic() {
    let seeds: Vec<Vec<u8>> = recorded().into_iter().map(|(_, message)| message).collect();
    let mut random = Random(1);
    for _ in 0..20_000 {
        let mut message = seeds[random.below(seeds.len())].clone();
        // Usually a request to the family.
        if random.below(8) != 0 {
            message[4..6].copy_from_slice(&FAMILY.to_ne_bytes());
            message[6] |= 1;
            message[16] = u8::try_from(random.below(20)).expect("the number fits into 8 bits");
        }
        for _ in 0..random.below(6) {
            let at = random.below(message.len());
            message[at] = u8::try_from(random.below(256)).expect("the number fits into 8 bits");
        }
        message.truncate(message.len() - random.below(message.len()) * random.below(2));
        let mut dataplane = Kept::default();
        for message in wire::messages(&message).filter(family::is_ours) {
            for datagram in family::answer(&message, PORT, &mut dataplane) {
                assert!(wire::messages(&datagram).next().is_some());
            }
        }
        let bytes = &message[..random.below(message.len() + 1)];
        let option = 1152 + u32::try_from(random.below(16)).expect("the number fits into 32 bits");
        let _ = options::set(option, bytes, &mut dataplane);
        let _ = options::get(option, bytes, random.below(4096), &mut dataplane);
        let _ = Attributes(bytes).nested(1).map(|inner| inner.text(6));
    }
}

#[test]
fn sockopt_interface_adds_and_lists_services_and_refuses_wrong_lengths() {
    let mut dataplane = Kept::default();
    let mut service = vec![0; 44];
    service[0] = 6;
    service[4..8].copy_from_slice(&[192, 0, 2, 1]);
    service[8..10].copy_from_slice(&[0, 80]);
    service[16..18].copy_from_slice(b"rr");
    service[40..44].fill(255);
    assert_eq!(options::set(1154, &service, &mut dataplane), Ok(()));
    assert_eq!(
        options::set(1154, &service, &mut dataplane),
        Err(Errno::EEXIST)
    );
    assert_eq!(
        options::set(1154, &service[1..], &mut dataplane),
        Err(Errno::EINVAL)
    );
    let mut server = service.clone();
    server.resize(68, 0);
    server[44..48].copy_from_slice(&[10, 0, 0, 1]);
    server[48..50].copy_from_slice(&[31, 144]);
    server[52] = 3;
    server[56] = 5;
    assert_eq!(options::set(1159, &server, &mut dataplane), Ok(()));

    assert_eq!(
        options::get(1152, &[], 63, &mut dataplane),
        Err(Errno::EINVAL)
    );
    let version = options::get(1152, &[], 64, &mut dataplane).expect("the version is returned");
    assert!(version.starts_with(b"IP Virtual Server version 1.2.1 "));
    let info = options::get(1153, &[], 12, &mut dataplane).expect("the information is returned");
    assert_eq!(info[8..], 1_u32.to_ne_bytes());
    let one = 1_u32.to_ne_bytes();
    let head = [one, [0; 4]].concat();
    let listed = options::get(1154, &head, 112, &mut dataplane).expect("the services are listed");
    // The table contains the service, which has one server.
    service[32] = 2;
    service.extend(one);
    service.resize(104, 0);
    assert_eq!(listed[8..], service);
    assert_eq!(
        options::get(1154, &head, 111, &mut dataplane),
        Err(Errno::EINVAL)
    );
    let mut head = service[..16].to_vec();
    head.extend(one);
    head.extend([0; 4]);
    let listed = options::get(1156, &head, 120, &mut dataplane).expect("the servers are listed");
    assert_eq!(listed[24..40], server[44..60]);
    let request = [&service[..16], &[0; 88]].concat();
    let found = options::get(1155, &request, 104, &mut dataplane).expect("the service exists");
    assert_eq!(found, service);
}

#[test]
fn lvs_run_parses_valid_and_refuses_invalid_command_lines() {
    let parse = |words: &[&str]| Invocation::parse(words.iter().map(OsString::from));
    let run = |socket: Option<&str>, command: &[&str]| Invocation::Run {
        socket: socket.map(OsString::from),
        full_nat: false,
        command: command.iter().map(OsString::from).collect(),
    };
    assert_eq!(parse(&["--help"]), Ok(Invocation::Help));
    assert_eq!(
        parse(&["ipvsadm", "-Ln"]),
        Ok(run(None, &["ipvsadm", "-Ln"]))
    );
    assert_eq!(
        parse(&["--socket", "@x", "--", "ipvsadm", "--help"]),
        Ok(run(Some("@x"), &["ipvsadm", "--help"]))
    );
    assert_eq!(parse(&["--socket=/s", "a"]), Ok(run(Some("/s"), &["a"])));
    let Ok(Invocation::Run { full_nat: true, .. }) = parse(&["--fullnat", "a", "--socket"]) else {
        panic!("--fullnat before the command is not accepted");
    };
    for wrong in [&[][..], &["--"], &["--socket"], &["--sockets", "a"]] {
        assert!(parse(wrong).is_err(), "{wrong:?}");
    }
}
