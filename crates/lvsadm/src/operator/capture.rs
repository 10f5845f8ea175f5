//! `lvsadm capture`: packets with the director's verdict, as pcapng.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;

use lvs_api::Error;
use lvs_core::api::{Call, CaptureFilter, CapturedPacket};

use super::pcapng::{ETHERNET, RAW, Writer};
use super::{Outcome, Trouble, Words, connect, protocol};
use crate::invocation::Invocation;

fn filter(words: &[String]) -> Result<CaptureFilter, Trouble> {
    let mut filter = CaptureFilter::default();
    let mut words = words
        .iter()
        .flat_map(|word| word.split_whitespace())
        .filter(|word| *word != "and");
    while let Some(word) = words.next() {
        let mut argument = || {
            words
                .next()
                .ok_or_else(|| Trouble::Usage(format!("{word}: missing argument")))
        };
        match word {
            "dropped" => filter.dropped = true,
            "host" => {
                let text = argument()?;
                let host: IpAddr = text
                    .parse()
                    .map_err(|_| Trouble::Usage(format!("host {text}: not an IP address")))?;
                filter.hosts.push(host);
            }
            "port" => {
                let text = argument()?;
                let port = text
                    .parse()
                    .map_err(|_| Trouble::Usage(format!("port {text}: not a port number")))?;
                filter.ports.push(port);
            }
            "icmp6" => filter.protocol = Some(58),
            other => match protocol(other) {
                Some(protocol) => filter.protocol = Some(protocol.0),
                None => {
                    return Err(Trouble::Usage(format!(
                        "{other}: not a filter; filters are tcp, udp, sctp, icmp, icmp6, host ADDRESS, port N and dropped"
                    )));
                }
            },
        }
    }
    Ok(filter)
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    text.as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            [high, low] => u8::try_from(digit(*high)? << 4 | digit(*low)?).ok(),
            _ => None,
        })
        .collect()
}

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let filter = filter(&words.free)?;
    let name = words
        .value("-w")
        .ok_or_else(|| Trouble::Usage("missing -w FILE, where - is standard output".into()))?;
    let most: u64 = words.number("-c")?.unwrap_or(u64::MAX);
    let mut client = connect(run)?;
    let out: Box<dyn Write> = if name == "-" {
        Box::new(io::stdout())
    } else {
        let file = File::create(name)
            .map_err(|error| Trouble::Dataplane(format!("cannot write {name}: {error}")))?;
        Box::new(file)
    };
    let mut writer = Writer::new(BufWriter::new(out))?;
    let (mut count, mut lost) = (0, 0);
    let mut written: io::Result<()> = Ok(());
    let end = client.list_while(&Call::Capture(filter), |packet: CapturedPacket| {
        lost = lost.max(packet.lost);
        let Some(frame) = unhex(&packet.frame).filter(|frame| !frame.is_empty()) else {
            return true;
        };
        let link = if packet.ethernet { ETHERNET } else { RAW };
        written = writer.packet(
            &packet.interface,
            link,
            packet.time_us,
            &frame,
            &packet.verdict,
        );
        count += 1;
        written.is_ok() && count < most
    });
    written?;
    match end {
        Ok(_) | Err(Error::Stopped) => {}
        Err(error) => return Err(error.into()),
    }
    let losses = if lost > 0 {
        format!("; {lost} packets lost because the output was too slow")
    } else {
        String::new()
    };
    writeln!(run.errors, "{count} packets captured{losses}")?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn lvsadm_capture_parses_filters_and_hex_bytes_and_refuses_invalid_text() {
        let taken = filter(&words("tcp and host 192.0.2.1 and port 80 dropped"))
            .expect("the filter is valid");
        assert_eq!(taken.protocol, Some(6));
        assert_eq!(taken.ports, [80]);
        assert_eq!(taken.hosts.len(), 1);
        assert!(taken.dropped);
        for bad in ["host", "host x", "port 65536", "vlan 3"] {
            assert!(filter(&words(bad)).is_err(), "{bad}");
        }
        assert_eq!(unhex("01ab"), Some(vec![1, 0xab]));
        assert_eq!(unhex("01a"), None);
    }
}
