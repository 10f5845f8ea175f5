//! Reads the settings of this host's reverse-path filter (`rp_filter`, IPv4), which drops packets
//! without informing any program.

use std::fs;
use std::path::Path;

/// The settings of all interfaces, each in a separate directory.
const SETTINGS: &str = "/proc/sys/net/ipv4/conf";

/// Whether the reverse-path filter of `interface` is strict.
pub fn is_strict(interface: &str) -> bool {
    is_strict_in(Path::new(SETTINGS), interface)
}

/// The interfaces, except `lo`, whose reverse-path filter is strict, in alphabetical order.
pub fn strict_interfaces() -> Vec<String> {
    strict_in(Path::new(SETTINGS))
}

/// Whether the filter of `interface` is strict. The greater of the values for all interfaces and
/// for this one applies: 1 is strict, 2 is loose.
fn is_strict_in(settings: &Path, interface: &str) -> bool {
    let value = |name: &str| -> u8 {
        let text = fs::read_to_string(settings.join(name).join("rp_filter"));
        text.map_or(0, |text| text.trim().parse().unwrap_or(0))
    };
    value(interface).max(value("all")) == 1
}

fn strict_in(settings: &Path) -> Vec<String> {
    let entries = fs::read_dir(settings).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !["all", "default", "lo"].contains(&name.as_str()))
        .filter(|name| is_strict_in(settings, name))
        .collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_path_filter_is_strict_if_maximum_of_all_and_interface_is_1() {
        let dir = tempfile::tempdir().expect("the temporary directory can be created");
        let set = |name: &str, value: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).expect("the directory can be created");
            fs::write(path.join("rp_filter"), value).expect("the file can be written");
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
        assert!(
            !is_strict_in(dir.path(), "eth1"),
            "a loose filter counts as strict"
        );
        set("all", "2");
        assert!(strict_in(dir.path()).is_empty());
    }
}
