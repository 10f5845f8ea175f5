//! Regions of addresses with the same route.
//!
//! The route of an address applies to all addresses between the two nearest boundaries of prefixes.
//! So one search finds the route of a whole region, and there are few regions even with many
//! clients.

use std::net::IpAddr;

use lvs_core::Prefix;

use crate::netlink::NetState;

/// Maximum number of prefixes of an address family with regions. Above it, workers look up each
/// address.
const PREFIXES: usize = 4096;

/// The first address of each region, in ascending order from 0, for each address family.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    v4: Option<Box<[u32]>>,
    v6: Option<Box<[u128]>>,
}

impl Regions {
    pub(crate) fn of(state: &NetState) -> Self {
        Self {
            v4: starts(state.prefixes(true), 32).map(|starts| {
                let starts = starts.into_iter().map(u32::try_from);
                starts.map_while(Result::ok).collect()
            }),
            v6: starts(state.prefixes(false), 128).map(Vec::into_boxed_slice),
        }
    }

    pub(crate) fn len(&self) -> usize {
        let v4 = self.v4.as_deref().map_or(0, <[u32]>::len);
        v4 + self.v6.as_deref().map_or(0, <[u128]>::len)
    }

    /// Returns the index of an address's region; `None` if the address family has no regions.
    #[inline]
    pub(crate) fn find(&self, addr: IpAddr) -> Option<usize> {
        match addr {
            IpAddr::V4(addr) => {
                let starts = self.v4.as_deref()?;
                Some(starts.partition_point(|&start| start <= addr.to_bits()) - 1)
            }
            IpAddr::V6(addr) => {
                let before = self.v4.as_deref().map_or(0, <[u32]>::len);
                let starts = self.v6.as_deref()?;
                Some(before + starts.partition_point(|&start| start <= addr.to_bits()) - 1)
            }
        }
    }
}

/// Returns the first address of each region, for addresses of `width` bits. `None` if there are too
/// many prefixes.
fn starts(prefixes: impl Iterator<Item = Prefix>, width: u8) -> Option<Vec<u128>> {
    let mut starts = vec![0];
    for (number, prefix) in prefixes.enumerate() {
        if number >= PREFIXES {
            return None;
        }
        let (value, len) = (number_of(prefix.addr()), prefix.bits());
        let last = u128::MAX
            .checked_shr(u32::from(128 - width + len))
            .unwrap_or(0);
        starts.push(value);
        // No address follows the last one.
        let behind = (value | last).checked_add(1);
        starts.extend(behind.filter(|&behind| width == 128 || behind >> width == 0));
    }
    starts.sort_unstable();
    starts.dedup();
    Some(starts)
}

fn number_of(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(addr) => addr.to_bits().into(),
        IpAddr::V6(addr) => addr.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes(all: &[&str]) -> impl Iterator<Item = Prefix> {
        all.iter()
            .map(|text| text.parse().expect("the prefix is valid"))
    }

    #[test]
    fn prefixes_divide_addresses_into_regions_and_more_than_4096_prefixes_return_none() {
        let some = [
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.1.0.0/16",
            "255.255.255.255/32",
        ];
        let found = starts(prefixes(&some), 32).expect("there are at most 32 regions");
        assert_eq!(
            found,
            [
                0,
                0x0a00_0000,
                0x0a01_0000,
                0x0a02_0000,
                0x0b00_0000,
                0xffff_ffff
            ]
        );
        assert_eq!(starts(prefixes(&["::/0"]), 128), Some(vec![0]));
        let all = ["ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128", "8000::/1"];
        assert_eq!(
            starts(prefixes(&all), 128),
            Some(vec![0, 1 << 127, u128::MAX])
        );
        let host = |n: u32| Prefix::new(IpAddr::from(n.to_be_bytes()), 32);
        assert_eq!(starts((0..4097).filter_map(host), 32), None);
        let most =
            starts((0..4096).filter_map(host), 32).expect("the number of regions is the maximum");
        assert_eq!(most.len(), 4097);
    }
}
