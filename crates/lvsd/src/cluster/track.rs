//! What keepalived adds to a director's priority.

/// Not to be active at all: keepalived takes a number of -254 or less for a fault.
pub(super) const UNFIT: i16 = -254;
/// Rather not: another one takes over that is able to.
const MAINTENANCE: i16 = -100;
/// Less so than one that has all its services.
const BELOW_QUORUM: i16 = -50;

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

#[cfg(test)]
mod tests {
    use super::*;

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
