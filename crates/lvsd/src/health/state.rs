//! Counting good and failed checks: pure, reports only a change.

/// What a row of checks says about a server.
#[derive(Clone, Copy, Debug)]
pub struct State {
    rise: u32,
    fall: u32,
    /// `None` until the first result.
    up: Option<bool>,
    /// Results in a row that speak against `up`.
    against: u32,
}

impl State {
    /// Nothing known, or `up` as known from before.
    pub fn new(rise: u32, fall: u32, up: Option<bool>) -> Self {
        Self {
            rise,
            fall,
            up,
            against: 0,
        }
    }

    /// What is known.
    pub const fn up(&self) -> Option<bool> {
        self.up
    }

    /// Takes a result; gives the new state if it has changed.
    ///
    /// The first result decides at once: a daemon that has just started must not send connections
    /// to a dead server for `fall` intervals, nor keep a good one waiting for `rise` of them.
    pub fn observe(&mut self, good: bool) -> Option<bool> {
        let Some(up) = self.up else {
            self.up = Some(good);
            return self.up;
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
        self.against = 0;
        self.up = Some(good);
        self.up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flips(state: &mut State, results: &str) -> String {
        results
            .chars()
            .map(|c| match state.observe(c == '+') {
                None => '.',
                Some(true) => 'U',
                Some(false) => 'D',
            })
            .collect()
    }

    #[test]
    fn rise_and_fall() {
        let mut state = State::new(2, 3, None);
        assert_eq!(flips(&mut state, "+++--+---+-++-"), "U.......D...U.");
        assert_eq!(flips(&mut State::new(2, 3, None), "-++"), "D.U");
        assert_eq!(flips(&mut State::new(1, 1, Some(true)), "+-+-"), ".DUD");
        assert_eq!(flips(&mut State::new(2, 2, Some(true)), "-+-+--"), ".....D");
    }
}
