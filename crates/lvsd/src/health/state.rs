//! Counts successful and failed checks, and reports only changes of state (pure: no I/O).

/// The health of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The server is up according to its checks, or has no check.
    Up,
    /// The server is down: its checks fail, or its clients get no answer (`passive = true`).
    Down,
    /// The checks have not yet decided whether the server is up: its state in the dataplane stays
    /// unchanged, unless the service has `start_down`.
    Unknown,
}

/// The state of a server according to its checks, and the results that contradict this state.
#[derive(Clone, Copy, Debug)]
pub struct State {
    rise: u32,
    fall: u32,
    /// Whether the server is up; `None` before the first decision.
    up: Option<bool>,
    /// Number of consecutive results that contradict `up`; before the first decision, the number of
    /// consecutive failed checks.
    against: u32,
}

impl State {
    /// Creates a state: unknown, or `up` from an earlier check.
    pub fn new(rise: u32, fall: u32, up: Option<bool>) -> Self {
        Self {
            rise,
            fall,
            up,
            against: 0,
        }
    }

    /// Whether the server is up; `None` if unknown.
    pub const fn up(&self) -> Option<bool> {
        self.up
    }

    /// Whether the last results contradict the state, or there is no state yet: the next check is
    /// due soon.
    pub const fn is_uncertain(&self) -> bool {
        self.up.is_none() || self.against > 0
    }

    /// Processes a result; returns the new state if it has changed.
    ///
    /// The first result takes effect at once: a daemon that has just started must not send
    /// connections to a dead server for `fall` intervals, and must not delay a good server for
    /// `rise` intervals. If the dataplane already sends connections to the server (`serves`),
    /// `fall` failed checks are needed.
    pub fn observe(&mut self, good: bool, serves: bool) -> Option<bool> {
        let Some(up) = self.up else {
            self.against += 1;
            if !good && serves && self.against < self.fall {
                return None;
            }
            return self.settle(good);
        };
        if good == up {
            self.against = 0;
            return None;
        }
        self.against += 1;
        let needed = if good { self.rise } else { self.fall };
        if self.against < needed {
            return None;
        }
        self.settle(good)
    }

    /// Marks the server as down at once, as after `fall` failed checks, because its clients got no
    /// answer. Returns the new state if it has changed.
    pub fn condemn(&mut self) -> Option<bool> {
        if self.up == Some(false) {
            self.against = 0;
            return None;
        }
        self.settle(false)
    }

    fn settle(&mut self, up: bool) -> Option<bool> {
        self.against = 0;
        self.up = Some(up);
        self.up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flips(state: &mut State, results: &str, serves: bool) -> String {
        results
            .chars()
            .map(|c| match state.observe(c == '+', serves) {
                None => '.',
                Some(true) => 'U',
                Some(false) => 'D',
            })
            .collect()
    }

    #[test]
    fn check_state_changes_after_rise_successes_or_fall_failures() {
        let mut state = State::new(2, 3, None);
        assert_eq!(flips(&mut state, "+++--+---+-++-", false), "U.......D...U.");
        assert_eq!(flips(&mut State::new(2, 3, None), "-++", false), "D.U");
        assert_eq!(
            flips(&mut State::new(1, 1, Some(true)), "+-+-", false),
            ".DUD"
        );
        assert_eq!(
            flips(&mut State::new(2, 2, Some(true)), "-+-+--", false),
            ".....D"
        );
    }

    #[test]
    fn unchecked_serving_server_is_down_only_after_fall_failures() {
        assert_eq!(flips(&mut State::new(2, 3, None), "-+", true), ".U");
        assert_eq!(flips(&mut State::new(2, 3, None), "---++", true), "..D.U");
    }

    #[test]
    fn health_state_is_uncertain_without_result_or_while_results_contradict_it() {
        let mut state = State::new(2, 2, None);
        let mut reported = Vec::new();
        for good in [true, false, true, false, false, true, true] {
            state.observe(good, false);
            reported.push(state.is_uncertain());
        }
        assert_eq!(reported, [false, true, false, true, false, true, false]);
        assert!(State::new(2, 2, None).is_uncertain());
        assert_eq!(state.condemn(), Some(false));
        assert_eq!(state.condemn(), None);
    }
}
