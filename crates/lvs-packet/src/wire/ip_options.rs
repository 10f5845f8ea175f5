//! Options of an IPv4 header: the checks that a host makes before it processes a packet, and the
//! values that a router writes (`__ip_options_compile`, `ip_forward_options`).
//!
//! ```text
//!  record route   7 │ length │ pointer │ address, address, ...
//!  time stamp    68 │ length │ pointer │ overflow, flag │ time, ...   flag 0: times, 1: address and time, 3: where they match
//!  source route 131, 137: the sender chooses the way
//! ```

use std::net::Ipv4Addr;

use super::{be32, ipv4, put32};

const END: u8 = 0;
const NOP: u8 = 1;
const RECORD_ROUTE: u8 = 7;
const TIMESTAMP: u8 = 68;
const LOOSE_SOURCE_ROUTE: u8 = 131;
const STRICT_SOURCE_ROUTE: u8 = 137;
const ROUTER_ALERT: u8 = 148;
const SECURITY_LABEL: u8 = 134;

/// Maximum of the counter of routers for whose time stamp there was no space.
const OVERFLOW_MAX: u8 = 15;

/// The reason for which a host refuses a packet because of its IP options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The options are invalid; the value is the offset of the invalid byte in the IP header.
    Malformed(u8),
    /// The sender specified the route; hosts refuse this (`accept_source_route`).
    SourceRoute,
}

/// Fields in the options that a router must fill in, as offsets in the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WantedOptions {
    /// The record route option, and the offset for the next address.
    route: Option<(usize, usize)>,
    /// The time stamp option, and the offsets for the next address (if any) and time.
    stamp: Option<(usize, Option<usize>, usize)>,
    /// The offset of the overflow counter, if the time stamp option is full.
    overflow: Option<usize>,
}

/// Checks the options of the IPv4 packet at the start of `ip`, whose header is complete. `own`
/// returns whether an address belongs to this router: time stamp options can name addresses.
///
/// # Errors
/// See [`Refused`].
pub fn read(ip: &[u8], own: impl Fn(Ipv4Addr) -> bool) -> Result<WantedOptions, Refused> {
    let end = ipv4::header_len(ip).min(ip.len());
    let mut wanted = WantedOptions::default();
    let (mut routes, mut stamps, mut sources, mut labels) = (0, 0, 0, 0);
    let mut at = ipv4::HEADER_LEN;
    let bad = |at: usize| Refused::Malformed(u8::try_from(at).unwrap_or(u8::MAX));
    while at < end {
        match ip[at] {
            END => break,
            NOP => {
                at += 1;
                continue;
            }
            _ => {}
        }
        let len = ip[..end].get(at + 1).map_or(0, |&len| usize::from(len));
        if len < 2 || at + len > end {
            return Err(bad(at));
        }
        let option = &ip[at..at + len];
        // The pointer counts from 1.
        let pointer = option.get(2).map_or(0, |&pointer| usize::from(pointer));
        let fits = |need: usize| pointer - 1 + need <= len;
        let next = at + pointer.saturating_sub(1);
        match option[0] {
            LOOSE_SOURCE_ROUTE | STRICT_SOURCE_ROUTE => {
                sources += 1;
                match () {
                    () if len < 3 => return Err(bad(at + 1)),
                    () if pointer < 4 => return Err(bad(at + 2)),
                    () if sources > 1 => return Err(bad(at)),
                    () => {}
                }
            }
            RECORD_ROUTE => {
                routes += 1;
                match () {
                    () if routes > 1 => return Err(bad(at)),
                    () if len < 3 => return Err(bad(at + 1)),
                    () if pointer < 4 => return Err(bad(at + 2)),
                    () if pointer > len => {}
                    () if !fits(4) => return Err(bad(at + 2)),
                    () => wanted.route = Some((at, next)),
                }
            }
            TIMESTAMP => {
                stamps += 1;
                let flag = option.get(3).map_or(0, |flags| flags & 15);
                match () {
                    () if stamps > 1 => return Err(bad(at)),
                    () if len < 4 => return Err(bad(at + 1)),
                    () if pointer < 5 => return Err(bad(at + 2)),
                    () if pointer <= len => match flag {
                        0 if !fits(4) => return Err(bad(at + 2)),
                        0 => wanted.stamp = Some((at, None, next)),
                        1 | 3 if !fits(8) => return Err(bad(at + 2)),
                        1 => wanted.stamp = Some((at, Some(next), next + 4)),
                        3 if own(Ipv4Addr::from_bits(be32(ip, next))) => {
                            wanted.stamp = Some((at, None, next + 4));
                        }
                        _ => {}
                    },
                    () if flag == 3 => {}
                    () if option[3] >> 4 == OVERFLOW_MAX => return Err(bad(at + 3)),
                    () => wanted.overflow = Some(at),
                }
            }
            ROUTER_ALERT if len < 4 => return Err(bad(at + 1)),
            SECURITY_LABEL => {
                labels += 1;
                match security_label(option) {
                    _ if labels > 1 => return Err(bad(at)),
                    Some(fault) => return Err(bad(at + fault)),
                    None => {}
                }
            }
            _ => {}
        }
        at += len;
    }
    if sources > 0 {
        return Err(Refused::SourceRoute);
    }
    Ok(wanted)
}

/// The position of the first invalid byte of a CIPSO option (FIPS 188), if there is one: its tags
/// must fill the option (`cipso_v4_validate`).
fn security_label(option: &[u8]) -> Option<usize> {
    const HEADER_LEN: usize = 6;
    if option.len() < HEADER_LEN + 2 {
        return Some(1);
    }
    if be32(option, 2) == 0 {
        return Some(2);
    }
    let mut at = HEADER_LEN;
    while at < option.len() {
        let Some(&len) = option.get(at + 1) else {
            return Some(at);
        };
        if len == 0 || usize::from(len) > option.len() - at {
            return Some(at + 1);
        }
        at += usize::from(len);
    }
    None
}

impl WantedOptions {
    /// Whether no option requires a change.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Fills in these options of the packet at the start of `ip`: `route` in its recorded route,
    /// `stamp` and `time` (in milliseconds since midnight, UTC) in its time stamps.
    pub fn fill(&self, ip: &mut [u8], route: Ipv4Addr, stamp: Ipv4Addr, time: u32) {
        if self.is_nothing() {
            return;
        }
        let advance = |ip: &mut [u8], option: usize, by: u8| {
            if let Some(pointer) = ip.get_mut(option + 2) {
                *pointer = pointer.saturating_add(by);
            }
        };
        if let Some((option, at)) = self.route {
            put32(ip, at, route.to_bits());
            advance(ip, option, 4);
        }
        if let Some((option, address, at)) = self.stamp {
            if let Some(address) = address {
                put32(ip, address, stamp.to_bits());
            }
            put32(ip, at, time);
            // A time stamp entry with an address (recorded or prespecified) has 8 bytes.
            let pointer = ip
                .get(option + 2)
                .map_or(0, |&pointer| usize::from(pointer));
            let start = option + pointer.saturating_sub(1);
            advance(ip, option, if at > start { 8 } else { 4 });
        }
        if let Some(option) = self.overflow
            && let Some(flags) = ip.get_mut(option + 3)
        {
            *flags = flags.saturating_add(0x10);
        }
        ipv4::finish_header(ip);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 100);
    const NEAR: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 1);

    fn packet(options: &[u8]) -> Vec<u8> {
        let mut ip = vec![0; 20];
        ip.extend(options);
        ip.resize(ip.len().next_multiple_of(4), 0);
        ip[0] = 0x40 | u8::try_from(ip.len() / 4).expect("the packet is short");
        ip
    }

    fn filled(options: &[u8]) -> Vec<u8> {
        let mut ip = packet(options);
        let wanted =
            read(&ip, |addr| addr == OWN || addr == NEAR).expect("the options are well formed");
        wanted.fill(&mut ip, OWN, NEAR, 0x0102_0304);
        ip[20..20 + options.len()].to_vec()
    }

    /// The expected values were recorded from the kernel: requests and replies of a NAT service,
    /// each with one of these options.
    #[test]
    fn ip_options_are_filled_in_like_a_router() {
        for (before, after) in [
            (
                &[7, 11, 4, 0, 0, 0, 0, 0, 0, 0, 0][..],
                &[7, 11, 8, 10, 0, 0, 100, 0, 0, 0, 0][..],
            ),
            (&[7, 7, 8, 0, 0, 0, 0], &[7, 7, 8, 0, 0, 0, 0]),
            (&[68, 8, 5, 0, 0, 0, 0, 0], &[68, 8, 9, 0, 1, 2, 3, 4]),
            (
                &[68, 12, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0],
                &[68, 12, 13, 1, 10, 1, 0, 1, 1, 2, 3, 4],
            ),
            (
                &[68, 12, 5, 3, 10, 0, 0, 100, 0, 0, 0, 0],
                &[68, 12, 13, 3, 10, 0, 0, 100, 1, 2, 3, 4],
            ),
            (
                &[68, 12, 5, 3, 9, 9, 9, 9, 0, 0, 0, 0],
                &[68, 12, 5, 3, 9, 9, 9, 9, 0, 0, 0, 0],
            ),
            (&[68, 8, 9, 0, 0, 0, 0, 0], &[68, 8, 9, 0x10, 0, 0, 0, 0]),
            (&[1, 1, 1, 0], &[1, 1, 1, 0]),
            (&[148, 4, 0, 0], &[148, 4, 0, 0]),
            (&[30, 4, 1, 2], &[30, 4, 1, 2]),
        ] {
            assert_eq!(filled(before), after, "{before:?}");
        }
    }

    /// Recordings show that the kernel answers some of these options with "parameter problem", and
    /// drops the packet silently with the others.
    #[test]
    fn ip_options_read_refuses_malformed_options_and_source_routes() {
        for (options, octet) in [
            (&[7, 40, 4, 0][..], 20),
            (&[7, 1, 4, 0], 20),
            (&[7, 7, 3, 0, 0, 0, 0], 22),
            (&[7, 7, 6, 0, 0, 0, 0], 22),
            (&[68, 8, 4, 0, 0, 0, 0, 0], 22),
            (&[68, 12, 9, 3, 0, 0, 0, 0, 0, 0, 0, 0], 22),
            (&[68, 8, 9, 0xf0, 0, 0, 0, 0], 23),
            (&[7, 7, 4, 0, 0, 0, 0, 7, 7, 4, 0, 0, 0, 0], 27),
            (&[1, 1, 1, 7], 23),
        ] {
            assert_eq!(
                read(&packet(options), |_| false),
                Err(Refused::Malformed(octet)),
                "{options:?}"
            );
        }
        for kind in [LOOSE_SOURCE_ROUTE, STRICT_SOURCE_ROUTE] {
            for pointer in [4, 8] {
                let options = [kind, 7, pointer, 10, 1, 0, 11];
                assert_eq!(
                    read(&packet(&options), |_| false),
                    Err(Refused::SourceRoute),
                    "{options:?}"
                );
            }
        }
    }

    #[test]
    fn ip_options_parser_of_any_bytes_does_not_panic() {
        // Try every option with every length and pointer, including headers that end within the
        // option.
        for kind in [7, 68, 131, 148, 30] {
            for len in 0..=44 {
                for pointer in 0..=44 {
                    for flags in [0, 1, 3, 0xf1] {
                        let mut ip = packet(&[kind, len, pointer, flags, 0, 0, 0, 0, 0, 0, 0, 0]);
                        if let Ok(wanted) = read(&ip, |_| true) {
                            let before = ip.len();
                            wanted.fill(&mut ip, OWN, NEAR, u32::MAX);
                            assert_eq!(ip.len(), before);
                        }
                    }
                }
            }
        }
    }
}
