//! The reverse path filter of this host (`rp_filter`), which can drop the replies to checks through a service.

use std::fs;
use std::path::Path;

/// IPv4 packets that the filter has dropped since the start of the network namespace.
pub(super) fn dropped() -> u64 {
    let text = fs::read_to_string("/proc/net/netstat").unwrap_or_default();
    counter(&text, "TcpExt:", "IPReversePathFilter").unwrap_or(0)
}

/// The value of a counter in the form of `/proc/net/netstat`: a line of names, then a line of values.
fn counter(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (names, values) = (lines.next()?, lines.next()?);
    let place = names.split(' ').position(|one| one == name)?;
    values.split(' ').nth(place)?.parse().ok()
}

/// The interfaces whose filter is strict, in order.
pub(super) fn strict_interfaces() -> Vec<String> {
    strict_in(Path::new("/proc/sys/net/ipv4/conf"))
}

/// The greater of the values for all interfaces and for one counts; 1 is strict, and 2 is loose.
fn strict_in(conf: &Path) -> Vec<String> {
    let value = |name: &str| -> u8 {
        let text = fs::read_to_string(conf.join(name).join("rp_filter"));
        text.map_or(0, |text| text.trim().parse().unwrap_or(0))
    };
    let all = value("all");
    let entries = fs::read_dir(conf).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !["all", "default", "lo"].contains(&name.as_str()))
        .filter(|name| value(name).max(all) == 1)
        .collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_path_counter_is_found_by_its_name() {
        let text = "TcpExt: SyncookiesSent IPReversePathFilter Other\nTcpExt: 1 22 3\nIpExt: InNoRoutes\nIpExt: 4\n";
        assert_eq!(counter(text, "TcpExt:", "IPReversePathFilter"), Some(22));
        assert_eq!(counter(text, "IpExt:", "IPReversePathFilter"), None);
        assert_eq!(
            counter(
                "TcpExt: IPReversePathFilter",
                "TcpExt:",
                "IPReversePathFilter"
            ),
            None
        );
        assert!(dropped() < u64::MAX);
    }

    #[test]
    fn strict_filter_counts_by_the_greater_value() {
        let dir = tempfile::tempdir().expect("a directory");
        let set = |name: &str, value: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).expect("a directory");
            fs::write(path.join("rp_filter"), value).expect("a file");
        };
        for (name, value) in [
            ("all", "0"),
            ("default", "1"),
            ("lo", "1"),
            ("eth0", "1"),
            ("eth1", "2"),
            ("eth2", "0"),
        ] {
            set(name, value);
        }
        assert_eq!(strict_in(dir.path()), ["eth0"]);
        set("all", "1\n");
        assert_eq!(strict_in(dir.path()), ["eth0", "eth2"]);
        set("all", "2");
        assert!(strict_in(dir.path()).is_empty());
    }
}
