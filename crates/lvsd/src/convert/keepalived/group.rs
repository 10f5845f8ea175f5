//! Reads groups of virtual addresses and marks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::convert::ADDRESSES_MAX;
use crate::convert::item::Item;
use crate::convert::service::port;

#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) addresses: Vec<(IpAddr, u16)>,
    /// Marks; the flag is true for IPv6, and `None` if the group sets no address family.
    pub(super) marks: Vec<(u32, Option<bool>)>,
    pub(super) lost: Vec<String>,
}

/// The address family that a keyword sets: true for IPv6, `None` for other keywords.
pub(super) fn family(word: &str) -> Option<bool> {
    match word {
        "inet" => Some(false),
        "inet6" => Some(true),
        _ => None,
    }
}

/// Reads the addresses and marks of a group, up to `room` of them, and subtracts their number from
/// `room`. Each mark counts with all of its `servers`, because it becomes a service with a copy of
/// them.
pub(super) fn group(item: &Item, servers: usize, room: &mut usize) -> Group {
    let mut group = Group::default();
    let full = format!(
        "the groups of a file can contain at most {ADDRESSES_MAX} addresses, including the servers of each mark"
    );
    for item in item.items() {
        if item.name() == "fwmark" {
            let left = room.checked_sub(1 + servers);
            match (item.word(1).parse(), left) {
                (Ok(mark), Some(left)) if mark > 0 => {
                    group.marks.push((mark, family(item.word(2))));
                    *room = left;
                }
                (Ok(mark), None) if mark > 0 => group.lost.push(item.lost(&full)),
                _ => group.lost.push(item.lost("the value is not a mark")),
            }
            continue;
        }
        let port = if item.word(1).is_empty() {
            Some(0)
        } else {
            port(item.word(1))
        };
        let (Some((first, count)), Some(port)) = (range(item.name()), port) else {
            group
                .lost
                .push(item.lost("the line does not contain addresses and a port"));
            continue;
        };
        match room.checked_sub(count) {
            Some(left) => {
                group
                    .addresses
                    .extend(following(first, count).map(|ip| (ip, port)));
                *room = left;
            }
            None => group.lost.push(item.lost(&full)),
        }
    }
    group
}

/// Parses a range of addresses: `192.0.2.1`, `192.0.2.1-10`, `192.0.2.1-192.0.3.9`, `192.0.2.8/29`,
/// and the same for IPv6 (`2001:db8::1-a`). Returns the first address and the number of addresses.
pub(in crate::convert) fn range(text: &str) -> Option<(IpAddr, usize)> {
    if let Some((first, length)) = text.split_once('/') {
        let (first, length): (IpAddr, u32) = (first.parse().ok()?, length.parse().ok()?);
        let (number, bits) = match first {
            IpAddr::V4(ip) => (u32::from(ip).into(), 32_u32),
            IpAddr::V6(ip) => (u128::from(ip), 128),
        };
        let count = 1_u128.checked_shl(bits.checked_sub(length)?)?;
        // keepalived also refuses a network address with host bits.
        return (number & (count - 1) == 0).then_some((first, amount(count)));
    }
    let Some((first, last)) = text.split_once('-') else {
        return Some((text.parse().ok()?, 1));
    };
    let first: IpAddr = first.parse().ok()?;
    let more = match (first, last.parse::<IpAddr>().ok()) {
        (IpAddr::V4(first), Some(IpAddr::V4(last))) => {
            u32::from(last).checked_sub(first.into())?.into()
        }
        (IpAddr::V6(first), Some(IpAddr::V6(last))) => {
            u128::from(last).checked_sub(first.into())?
        }
        (_, Some(_)) => return None,
        (IpAddr::V4(ip), None) => last.parse::<u8>().ok()?.checked_sub(ip.octets()[3])?.into(),
        (IpAddr::V6(ip), None) => u16::from_str_radix(last, 16)
            .ok()?
            .checked_sub(ip.segments()[7])?
            .into(),
    };
    Some((first, amount(more.checked_add(1)?)))
}

/// Converts a number of addresses, limited to the maximum of the type.
fn amount(count: u128) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The `count` addresses from `first` on. The caller has checked that they exist.
pub(in crate::convert) fn following(first: IpAddr, count: usize) -> impl Iterator<Item = IpAddr> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    (0..count).map(move |n| match first {
        IpAddr::V4(ip) => Ipv4Addr::from(u32::from(ip).wrapping_add(n)).into(),
        IpAddr::V6(ip) => Ipv6Addr::from(u128::from(ip).wrapping_add(n.into())).into(),
    })
}
