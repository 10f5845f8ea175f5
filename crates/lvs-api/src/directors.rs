//! Parses the addresses of peers in options and files, and reads the key that all peers share.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use lvs_core::sync::PORT;

use crate::files::open_without_waiting;

/// Minimum length of a key, in characters.
const KEY_MIN: usize = 32;
const KEY_MAX: usize = 4096;

/// Parses the address of a director: `192.0.2.2`, `192.0.2.2:8848`, `2001:db8::2` or
/// `[2001:db8::2]:8848`. The port of the result is 0 if the text has none; [`with_port`] then sets
/// the usual one.
///
/// # Errors
///
/// A message: the text is not an address, or no peer can connect to the address.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let alone = bare.unwrap_or(text).parse::<IpAddr>();
    let whole = |_| text.parse::<SocketAddr>();
    let read = alone.clone().map(|ip| (ip, 0).into()).or_else(whole);
    let mut address = read.map_err(|_| {
        "expected 192.0.2.2, 192.0.2.2:8848, 2001:db8::2 or [2001:db8::2]:8848".to_owned()
    })?;
    if alone.is_err() && address.port() == 0 {
        return Err(format!("port 0 is not valid; the usual port is {PORT}"));
    }
    let canonical = address.ip().to_canonical();
    if canonical.is_ipv4() {
        address.set_ip(canonical);
    }
    if canonical.is_multicast() || canonical == IpAddr::from([255; 4]) {
        return Err(format!("{canonical} is not a unicast address"));
    }
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
            Err(format!(
                "{canonical} is a link-local address, which needs an interface: write [{canonical}%2]:{PORT}, with the number of the interface (ip link)"
            ))
        }
        address => Ok(address),
    }
}

/// Returns an address of a director with its port, or with the usual port [`PORT`] if it has none.
pub fn with_port(mut address: SocketAddr) -> SocketAddr {
    if address.port() == 0 {
        address.set_port(PORT);
    }
    address
}

/// Parses the address of a peer, as [`address`] does. The unspecified addresses `0.0.0.0` and `::`
/// are errors.
///
/// # Errors
///
/// A message with the reason.
pub fn peer(text: &str) -> Result<SocketAddr, String> {
    match address(text)? {
        address if address.ip().is_unspecified() => {
            Err(format!("{} is not the address of a host", address.ip()))
        }
        address => Ok(address),
    }
}

/// Reads a key from a file that root or this user owns, that its group may not write, and to which
/// other users have no access. Ignores whitespace at both ends.
///
/// # Errors
///
/// The fault of the file, and the fix.
pub fn read_key(path: &Path) -> Result<Vec<u8>, String> {
    let name = path.display();
    let failed = |error: io::Error| format!("cannot read the key {name}: {error}");
    let mut file = open_without_waiting(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let (mode, owner) = (meta.mode(), meta.uid());
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(format!(
            "user {owner}, who owns the key {name}, can change it: chown root {name}"
        ));
    }
    if mode & 0o027 != 0 {
        return Err(format!(
            "other users may read the key {name}, or its group may write it: chmod 600 {name}"
        ));
    }
    let mut text = Vec::new();
    let limit = u64::try_from(KEY_MAX + 1).unwrap_or(u64::MAX);
    file.by_ref()
        .take(limit)
        .read_to_end(&mut text)
        .map_err(failed)?;
    if text.len() > KEY_MAX {
        return Err(format!(
            "the file of the key {name} has more than {KEY_MAX} bytes: openssl rand -hex 32 > {name}"
        ));
    }
    let key = text.trim_ascii();
    if key.len() < KEY_MIN {
        return Err(format!(
            "the key {name} has {} characters, and {KEY_MIN} to {KEY_MAX} are required: openssl rand -hex 32 > {name}",
            key.len()
        ));
    }
    // A crash can leave a file of zeros.
    if key.contains(&0) {
        return Err(format!(
            "the key {name} is damaged (it contains zero bytes): copy it from another director"
        ));
    }
    Ok(key.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unicast_peer_address_is_parsed_and_unusable_address_is_refused() {
        for (text, read) in [
            ("192.0.2.2", "192.0.2.2:0"),
            ("192.0.2.2:9", "192.0.2.2:9"),
            ("2001:db8::2", "[2001:db8::2]:0"),
            ("[2001:db8::2]", "[2001:db8::2]:0"),
            ("[2001:db8::2]:9", "[2001:db8::2]:9"),
            ("::ffff:192.0.2.2", "192.0.2.2:0"),
            ("[fe80::2%3]:9", "[fe80::2%3]:9"),
            ("127.0.0.1:9", "127.0.0.1:9"),
        ] {
            let address = peer(text).expect(text);
            assert_eq!(address.to_string(), read, "{text}");
        }
        for text in [
            "",
            "director",
            "192.0.2.2:",
            "192.0.2.2:0",
            "[::1",
            "224.0.0.81",
            "ff02::81",
            "255.255.255.255",
            "fe80::2",
            "[fe80::2]:9",
        ] {
            address(text).expect_err(text);
        }
        address("0.0.0.0:9").expect("the address is valid");
        for text in ["0.0.0.0", "::", "[::]:9"] {
            peer(text).expect_err(text);
        }
    }
}
