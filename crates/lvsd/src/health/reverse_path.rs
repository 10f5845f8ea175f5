//! Packets that the reverse path filter of this host (`rp_filter`) drops: replies to checks through
//! a service may be among them.

use std::fs;

/// Returns the number of IPv4 packets that the filter has dropped since the start of the network
/// namespace; 0 if the kernel does not report it.
pub(super) fn dropped() -> u64 {
    let text = fs::read_to_string("/proc/net/netstat").unwrap_or_default();
    counter(&text, "TcpExt:").unwrap_or(0)
}

/// The value of the counter `IPReversePathFilter` of `group` in the form of `/proc/net/netstat`: a
/// line of names, then a line of values. `None` if the text does not contain it.
fn counter(text: &str, group: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (names, values) = (lines.next()?, lines.next()?);
    let place = names
        .split(' ')
        .position(|one| one == "IPReversePathFilter")?;
    values.split(' ').nth(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_path_counter_is_found_by_its_name() {
        let text = "TcpExt: SyncookiesSent IPReversePathFilter Other\nTcpExt: 1 22 3\nIpExt: InNoRoutes\nIpExt: 4\n";
        assert_eq!(counter(text, "TcpExt:"), Some(22));
        assert_eq!(counter(text, "IpExt:"), None);
        assert_eq!(counter("TcpExt: IPReversePathFilter", "TcpExt:"), None);
        assert!(dropped() < u64::MAX);
    }
}
