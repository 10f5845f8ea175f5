//! Which addresses are this host's own, from `/proc/net`.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The host's addresses and the IPv4 networks that it takes as its own (`ip route add local`).
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    v4: HashSet<(u32, u8)>,
    v6: HashSet<Ipv6Addr>,
}

impl Addresses {
    /// As they are now in this network namespace.
    pub fn read() -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self {
            v4: parse_fib_trie(&text("/proc/net/fib_trie")),
            v6: parse_if_inet6(&text("/proc/net/if_inet6")),
        }
    }

    /// Whether the host has `ip`.
    pub fn has(&self, ip: IpAddr) -> bool {
        match ip {
            IpAddr::V4(ip) => self.v4.iter().any(|(network, prefix)| {
                let shift = 32 - u32::from(*prefix);
                shift == 32 || u32::from(ip) >> shift == network >> shift
            }),
            IpAddr::V6(ip) => self.v6.contains(&ip),
        }
    }
}

/// Every `LOCAL` route:
///
/// ```text
///        |-- 192.0.2.10
///           /32 host LOCAL
/// ```
fn parse_fib_trie(text: &str) -> HashSet<(u32, u8)> {
    let mut all = HashSet::new();
    let mut last = None;
    for line in text.lines() {
        let line = line.trim_start();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.trim().parse::<Ipv4Addr>().ok();
        } else if line.ends_with(" LOCAL")
            && let Some(prefix) = line
                .strip_prefix('/')
                .and_then(|l| l.split(' ').next())
                .and_then(|p| p.parse::<u8>().ok())
                .filter(|p| *p <= 32)
            && let Some(address) = last
        {
            all.insert((u32::from(address), prefix));
        }
    }
    all
}

/// Lines such as `fe800000000000000000000000000001 02 40 20 80 eth0`.
fn parse_if_inet6(text: &str) -> HashSet<Ipv6Addr> {
    text.lines()
        .filter_map(|line| u128::from_str_radix(line.split(' ').next()?, 16).ok())
        .map(Ipv6Addr::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 192.0.2.10\n        /32 host LOCAL\n     |-- 192.0.2.255\n        /32 link BROADCAST\n     |-- 203.0.113.0\n        /24 host LOCAL\nLocal:\n";
        let inet6 = "20010db8000000000000000000000001 02 40 00 80     eth0\ngarbage\n";
        let addresses = Addresses {
            v4: parse_fib_trie(trie),
            v6: parse_if_inet6(inet6),
        };
        for (ip, has) in [
            ("192.0.2.10", true),
            ("192.0.2.11", false),
            ("192.0.2.255", false),
            ("203.0.113.77", true),
            ("203.0.114.1", false),
            ("2001:db8::1", true),
            ("2001:db8::2", false),
        ] {
            assert_eq!(addresses.has(ip.parse().unwrap()), has, "{ip}");
        }
    }

    #[test]
    fn loopback_is_local() {
        assert!(Addresses::read().has(IpAddr::from([127, 0, 0, 1])));
    }
}
