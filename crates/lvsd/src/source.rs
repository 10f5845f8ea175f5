//! Whom an address counts as, where places are shared out.

use std::net::IpAddr;

use lvs_core::Prefix;

/// Bits of an IPv6 address that its host does not choose.
const PREFIX: u8 = 64;

/// The source that `ip` belongs to: itself, or of IPv6 its /64, in which one host has as many
/// addresses as it likes.
pub(crate) fn source(ip: IpAddr) -> IpAddr {
    let ip = ip.to_canonical();
    let whole = Prefix::new(ip, PREFIX).filter(|_| ip.is_ipv6());
    whole.map_or(ip, |whole| whole.addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_source_whatever_addresses_it_takes() {
        for (ip, whole) in [
            ("192.0.2.1", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("2001:db8:0:1::1", "2001:db8:0:1::"),
            ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::"),
            ("2001:db8:0:2::1", "2001:db8:0:2::"),
        ] {
            let ip: IpAddr = ip.parse().expect("an address");
            assert_eq!(source(ip).to_string(), whole, "{ip}");
        }
    }
}
