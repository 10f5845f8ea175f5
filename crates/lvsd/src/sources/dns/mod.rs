//! Servers from DNS. lvsd resolves each name again after its TTL, within configured limits. Until a
//! new answer arrives, the last one applies.

mod message;
mod resolver;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::{Shared, retry};
use crate::sources::Lookups;

/// Maximum number of names that are looked up.
pub(crate) const NAMES_MAX: usize = 1024;

/// Converts a text to a name for queries: lower case, without a final dot; `None` if it is invalid.
pub(crate) fn name_of(text: &str) -> Option<String> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let label = |label: &str| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        label.bytes().all(plain) && (1..=63).contains(&label.len())
    };
    (name.len() <= 253 && name.split('.').all(label)).then_some(name)
}

/// Whether lvsd queries the SRV records of a name: its first label begins with an underscore.
pub(crate) fn is_srv(name: &str) -> bool {
    name.starts_with('_')
}

/// Looks up a name repeatedly until the task is aborted.
pub(super) fn follow(name: String, lookups: Lookups, shared: Arc<Shared>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut failures = 0;
        loop {
            let found = resolver::look_up(&name, &lookups).await;
            let pause = match &found {
                Ok((_, ttl)) => {
                    failures = 0;
                    Duration::from_secs((*ttl).into()).clamp(lookups.min, lookups.max)
                }
                Err(_) => {
                    failures += 1;
                    retry(failures, lookups.min)
                }
            };
            shared.take_dns(&name, found.map(|(records, _)| records));
            tokio::time::sleep(pause).await;
        }
    })
}

/// Parses any bytes as an answer, for fuzzing.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) {
    let id = bytes
        .get(..2)
        .map_or(0, |id| u16::from_be_bytes([id[0], id[1]]));
    for kind in [
        message::RecordKind::A,
        message::RecordKind::Aaaa,
        message::RecordKind::Srv,
    ] {
        for name in ["a", "_a._tcp.b", "www.example.org"] {
            let _ = message::read(bytes, id, name, kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_name_is_normalised_or_refused() {
        for (text, name) in [
            ("_http._tcp.Example.org.", "_http._tcp.example.org"),
            ("a", "a"),
        ] {
            assert_eq!(name_of(text).as_deref(), Some(name));
        }
        let long = ["a"; 128].join(".");
        for text in ["", ".", "a..b", "a b", "ä", &"a".repeat(64), &long] {
            assert_eq!(name_of(text), None, "{text}");
        }
        assert!(is_srv("_http._tcp.example.org") && !is_srv("www.example.org"));
    }
}
