//! Computes the number for the track file, which keepalived adds to the director's priority, and
//! checks the file.

use std::io::Read;
use std::path::Path;

use lvs_api::files::open_without_waiting;

use crate::config::Vrrp;

const MAINTENANCE: i16 = Vrrp::MAINTENANCE;
const BELOW_QUORUM: i16 = Vrrp::BELOW_QUORUM;

/// Number that prevents the director from being active: for keepalived, -254 or less is a fault.
pub(super) const UNFIT: i16 = -254;

/// The fitness of a director to be active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fitness {
    /// Whether the dataplane answers and has received the connections of its peers.
    pub(super) ready: bool,
    /// Whether all services of this director have their quorum.
    pub(super) quorum: bool,
    pub(super) maintenance: bool,
    /// Whether the dataplane lacks configured peers.
    pub(super) lacks_peers: bool,
}

impl Fitness {
    /// The number for the track file. A director that would break connections gets a number that
    /// excludes it. A director in maintenance, or with missing servers or peers, is active only if
    /// no better director exists.
    pub(super) fn value(self) -> i16 {
        match (
            self.ready,
            self.maintenance || self.lacks_peers,
            self.quorum,
        ) {
            (false, _, _) => UNFIT,
            (true, true, true) => MAINTENANCE,
            (true, true, false) => MAINTENANCE + BELOW_QUORUM,
            (true, false, false) => BELOW_QUORUM,
            (true, false, true) => 0,
        }
    }
}

/// Whether the file at `path` contains the number `value`.
pub(super) fn says(path: &Path, value: i16) -> bool {
    let mut text = String::new();
    let read = open_without_waiting(path).and_then(|file| file.take(16).read_to_string(&mut text));
    read.is_ok() && text.trim().parse() == Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn track_file_matches_only_its_exact_number() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("track");
        assert!(!says(&path, 0));
        std::fs::write(&path, "-50\n").unwrap();
        assert!(says(&path, -50) && !says(&path, 0));
        std::fs::write(&path, "9".repeat(100)).unwrap();
        assert!(!says(&path, 0));
        std::fs::write(&path, "\u{1}").unwrap();
        assert!(!says(&path, 0));
        std::fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        assert!(!says(&path, 0), "a number was read from a FIFO");
    }

    #[test]
    fn track_number_is_lower_if_director_lacks_quorum_or_peers_is_in_maintenance_or_is_unready() {
        let standing = |ready, quorum, maintenance| {
            Fitness {
                ready,
                quorum,
                maintenance,
                lacks_peers: false,
            }
            .value()
        };
        let lacks_peers = |ready, quorum, maintenance| {
            Fitness {
                ready,
                quorum,
                maintenance,
                lacks_peers: true,
            }
            .value()
        };
        assert_eq!(standing(true, true, false), 0);
        assert!(standing(true, false, false) < 0);
        assert!(standing(true, true, true) < standing(true, false, false));
        assert!(
            standing(true, false, true) > -254,
            "the director cannot serve if no other can"
        );
        for (quorum, maintenance) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(standing(false, quorum, maintenance), UNFIT);
            assert_eq!(lacks_peers(false, quorum, maintenance), UNFIT);
            assert_eq!(
                lacks_peers(true, quorum, maintenance),
                standing(true, quorum, true),
                "the director cannot serve if no other can"
            );
        }
    }
}
