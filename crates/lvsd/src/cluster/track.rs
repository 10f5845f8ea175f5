//! The number that keepalived adds to a director's priority.

use std::io::Read;
use std::path::Path;

use lvs_api::files::open_without_waiting;

use crate::config::Vrrp;

const MAINTENANCE: i16 = Vrrp::MAINTENANCE;
const BELOW_QUORUM: i16 = Vrrp::BELOW_QUORUM;

/// Not to be active at all: keepalived takes a number of -254 or less for a fault.
pub(super) const UNFIT: i16 = -254;

/// How able a director is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// It knows the connections of the others.
    pub(super) ready: bool,
    /// All its services have their quorum.
    pub(super) quorum: bool,
    /// Somebody works on it.
    pub(super) maintenance: bool,
}

impl Standing {
    /// Only a director that would break connections is kept out at any price. Maintenance and
    /// servers that are missing give way to a better one: where there is none, somebody serves.
    pub(super) fn value(self) -> i16 {
        match (self.ready, self.maintenance, self.quorum) {
            (false, _, _) => UNFIT,
            (true, true, true) => MAINTENANCE,
            (true, true, false) => MAINTENANCE + BELOW_QUORUM,
            (true, false, false) => BELOW_QUORUM,
            (true, false, true) => 0,
        }
    }
}

/// Whether a file says this number, whatever somebody has put in its place.
pub(super) fn says(path: &Path, value: i16) -> bool {
    let mut text = String::new();
    let read = open_without_waiting(path).and_then(|file| file.take(16).read_to_string(&mut text));
    read.is_ok() && text.trim().parse() == Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_its_number_or_another_or_nothing() {
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
        assert!(!says(&path, 0), "nobody waits for it");
    }

    #[test]
    fn who_is_better_has_more() {
        let standing = |ready, quorum, maintenance| {
            Standing {
                ready,
                quorum,
                maintenance,
            }
            .value()
        };
        assert_eq!(standing(true, true, false), 0);
        assert!(standing(true, false, false) < 0);
        assert!(standing(true, true, true) < standing(true, false, false));
        assert!(
            standing(true, false, true) > -254,
            "it serves if nobody else can"
        );
        for (quorum, maintenance) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(standing(false, quorum, maintenance), UNFIT);
        }
    }
}
