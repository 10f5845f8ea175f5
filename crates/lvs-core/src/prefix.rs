//! Prefixes: addresses that begin with the same bits.

use alloc::string::String;
use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

use crate::Family;

/// Addresses that begin with the same bits, such as `192.0.2.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    addr: IpAddr,
    len: u8,
}

/// Prefix length of the network that counts as one IPv6 source, because the client can choose the
/// remaining bits.
const SOURCE_LEN: u8 = 64;

impl Prefix {
    /// The first `len` bits of `addr`; `None` if the family has fewer. The other bits are cleared.
    pub fn new(addr: IpAddr, len: u8) -> Option<Self> {
        let host = Family::of(&addr).bits().checked_sub(len)?;
        let addr = match addr {
            IpAddr::V4(addr) => {
                let kept = u32::MAX.checked_shl(host.into()).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(addr.to_bits() & kept))
            }
            IpAddr::V6(addr) => {
                let kept = u128::MAX.checked_shl(host.into()).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(addr.to_bits() & kept))
            }
        };
        Some(Self { addr, len })
    }

    /// The source to which limits for each client apply: the address itself, or for IPv6 its /64,
    /// because a client can choose any address in it.
    pub fn source(ip: IpAddr) -> IpAddr {
        let ip = ip.to_canonical();
        let network = Self::new(ip, SOURCE_LEN).filter(|_| ip.is_ipv6());
        network.map_or(ip, |network| network.addr())
    }

    /// The first address of the network.
    pub const fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Length of the prefix in bits.
    pub const fn bits(&self) -> u8 {
        self.len
    }

    /// Returns the address family of the prefix.
    pub const fn family(&self) -> Family {
        Family::of(&self.addr)
    }

    /// Whether the network contains `addr`.
    pub fn contains(&self, addr: IpAddr) -> bool {
        match (self.addr, addr) {
            (IpAddr::V4(own), IpAddr::V4(addr)) => {
                let host = u32::from(32 - self.len);
                (own.to_bits() ^ addr.to_bits())
                    .checked_shr(host)
                    .unwrap_or(0)
                    == 0
            }
            (IpAddr::V6(own), IpAddr::V6(addr)) => {
                let host = u32::from(128 - self.len);
                (own.to_bits() ^ addr.to_bits())
                    .checked_shr(host)
                    .unwrap_or(0)
                    == 0
            }
            _ => false,
        }
    }

    /// All addresses of the network; `None` if it has more than 2^16.
    pub fn addresses(&self) -> Option<impl Iterator<Item = IpAddr> + use<>> {
        let host = self.family().bits() - self.len;
        let first = self.addr;
        (host <= 16).then(|| {
            (0..1u32 << host).map(move |n| match first {
                IpAddr::V4(first) => IpAddr::V4(Ipv4Addr::from_bits(first.to_bits() | n)),
                IpAddr::V6(first) => {
                    IpAddr::V6(Ipv6Addr::from_bits(first.to_bits() | u128::from(n)))
                }
            })
        })
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            || alloc::format!("{text}: expected an address, or a network such as 192.0.2.0/24");
        let (addr, len) = match text.split_once('/') {
            Some((addr, len)) => (addr, Some(len.parse().map_err(|_| bad())?)),
            None => (text, None),
        };
        let addr: IpAddr = addr.parse().map_err(|_| bad())?;
        Self::new(addr, len.unwrap_or_else(|| Family::of(&addr).bits())).ok_or_else(bad)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.addr.fmt(f)?;
        if self.len != self.family().bits() {
            write!(f, "/{}", self.len)?;
        }
        Ok(())
    }
}

/// Converts networks to prefixes, and omits invalid ones.
pub(crate) fn prefixes(networks: alloc::vec::Vec<(IpAddr, u8)>) -> alloc::vec::Vec<Prefix> {
    let networks = networks.into_iter();
    networks
        .filter_map(|(addr, bits)| Prefix::new(addr, bits))
        .collect()
}

#[cfg(feature = "api")]
impl serde::Serialize for Prefix {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "api")]
impl<'de> serde::Deserialize<'de> for Prefix {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = alloc::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn prefix_contains_addresses_with_equal_bits() {
        for (network, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("192.0.2.128/25", "192.0.2.128", "192.0.2.127"),
            ("0.0.0.0/0", "203.0.113.1", "::1"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"),
            ("2001:db8::1", "2001:db8::1", "2001:db8::2"),
            ("::/0", "2001:db8::1", "192.0.2.1"),
        ] {
            let network = prefix(network);
            assert!(network.contains(inside.parse().unwrap()), "{network}");
            assert!(!network.contains(outside.parse().unwrap()), "{network}");
        }
    }

    #[test]
    fn prefix_new_clears_host_bits_and_refuses_excessive_length() {
        for (addr, len, first) in [
            ("255.255.255.255", 0, "0.0.0.0"),
            ("255.255.255.255", 1, "128.0.0.0"),
            ("255.255.255.255", 32, "255.255.255.255"),
            ("ffff::1", 0, "::"),
            ("ffff::1", 16, "ffff::"),
            ("ffff::1", 128, "ffff::1"),
        ] {
            let prefix = Prefix::new(addr.parse().unwrap(), len).unwrap();
            assert_eq!(prefix.addr(), first.parse::<IpAddr>().unwrap());
            assert_eq!(prefix.bits(), len);
        }
        assert_eq!(Prefix::new("192.0.2.1".parse().unwrap(), 33), None);
        assert_eq!(Prefix::new("::1".parse().unwrap(), 129), None);
    }

    #[test]
    fn prefix_round_trips_as_text_and_invalid_text_is_refused() {
        for text in [
            "192.0.2.0/24",
            "192.0.2.7",
            "0.0.0.0/0",
            "2001:db8::/32",
            "::1",
        ] {
            assert_eq!(prefix(text).to_string(), text);
        }
        assert_eq!(prefix("192.0.2.77/24").to_string(), "192.0.2.0/24");
        assert_eq!(prefix("2001:db8::77/64").to_string(), "2001:db8::/64");
        assert_eq!(prefix("192.0.2.7/32").to_string(), "192.0.2.7");
        for bad in [
            "",
            "192.0.2.0/33",
            "::/129",
            "192.0.2.0/",
            "192.0.2.0/-1",
            "x/8",
        ] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
        assert_eq!(Prefix::new([192, 0, 2, 1].into(), 33), None);
    }

    #[test]
    fn source_prefix_is_ipv4_address_or_ipv6_64_bit_network() {
        for (ip, whole) in [
            ("192.0.2.1", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("2001:db8:0:1::1", "2001:db8:0:1::"),
            ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::"),
            ("2001:db8:0:2::1", "2001:db8:0:2::"),
        ] {
            let ip: IpAddr = ip.parse().expect("the address is valid");
            assert_eq!(Prefix::source(ip).to_string(), whole, "{ip}");
        }
    }
}
