//! Advice in the answer of a server to a successful check: the weight that the server requests, and
//! whether it refuses new connections.

/// A weight that a server requests for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// A weight in percent of the configured weight.
    Percent(u16),
    /// A weight that replaces the configured weight, unless that is 0.
    Exactly(i32),
}

/// The advice in a server's answer to a check. If a value is missing, the previous one still
/// applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// The requested weight; `None` without a request.
    pub weight: Option<Weight>,
    /// Whether the server refuses new connections; `None` if the answer does not contain this.
    pub drains: Option<bool>,
}

impl Advice {
    /// No advice.
    pub const NONE: Self = Self {
        weight: None,
        drains: None,
    };

    /// Advice that contains only a weight.
    pub(crate) const fn weight(weight: Weight) -> Self {
        Self {
            weight: Some(weight),
            drains: None,
        }
    }

    /// Merges new advice; true if this changes the advice.
    pub fn take(&mut self, new: Self) -> bool {
        let before = *self;
        self.weight = new.weight.or(self.weight);
        self.drains = new.drains.or(self.drains);
        *self != before
    }

    /// Returns the weight in the dataplane of a server with the weight `configured` in the file.
    pub fn apply(&self, configured: i32) -> i32 {
        if self.drains == Some(true) {
            return 0;
        }
        match self.weight {
            None => configured,
            // Weight 0 in the file applies whatever the server advises.
            Some(_) if configured == 0 => 0,
            Some(Weight::Exactly(weight)) => weight,
            Some(Weight::Percent(percent)) => {
                let exact = i64::from(configured) * i64::from(percent);
                // A small share of a small weight must not become 0.
                let share = (exact + 99) / 100;
                i32::try_from(share).unwrap_or(i32::MAX)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_advice_scales_replaces_or_zeroes_configured_weight_of_server() {
        let percent = |n| Advice::weight(Weight::Percent(n));
        for (advice, configured, wanted) in [
            (Advice::NONE, 7, 7),
            (percent(50), 10, 5),
            (percent(1), 10, 1),
            (percent(0), 10, 0),
            (percent(200), 10, 20),
            (percent(256), i32::MAX, i32::MAX),
            (percent(50), 0, 0),
            (Advice::weight(Weight::Exactly(253)), 1, 253),
        ] {
            assert_eq!(
                advice.apply(configured),
                wanted,
                "{advice:?} of {configured}"
            );
        }
        let mut state = percent(50);
        let drain = |drains| Advice {
            drains: Some(drains),
            weight: None,
        };
        assert!(state.take(drain(true)));
        assert_eq!(state.apply(10), 0);
        assert!(
            !state.take(Advice::NONE),
            "advice without a value changed a draining server"
        );
        assert!(state.take(drain(false)));
        assert_eq!(
            state.apply(10),
            5,
            "the server did not get its previous share again"
        );
    }
}
