//! Medians and their ranges.

use std::fmt;

use serde::Serialize;

/// A number of rounds; it reads "1 round" or "5 rounds".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Rounds(pub usize);

impl fmt::Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0 == 1 { "" } else { "s" };
        write!(f, "{} round{plural}", self.0)
    }
}

/// The median, the minimum and the maximum of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The median; of an even number, the mean of the middle two.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
    /// Number of values, one for each round.
    pub rounds: Rounds,
}

impl Spread {
    /// Computes the median and the range; `None` without values.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(*values.get(middle.checked_sub(1)?)?, values[middle])
        };
        Some(Self {
            median,
            min: *values.first()?,
            max: *values.last()?,
            rounds: Rounds(values.len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Rounds, Spread};

    #[test]
    fn number_of_rounds_is_printed_in_singular_or_plural() {
        assert_eq!(
            [1, 2].map(|n| Rounds(n).to_string()),
            ["1 round", "2 rounds"]
        );
    }

    #[test]
    fn spread_of_unsorted_values_has_median_and_range_and_is_none_without_values() {
        assert_eq!(Spread::of([]), None);
        let three = Spread::of([3.0, 1.0, 2.0]).expect("the values have a median");
        assert_eq!(
            (three.median, three.min, three.max, three.rounds),
            (2.0, 1.0, 3.0, Rounds(3))
        );
        let two = Spread::of([4.0, 1.0]).expect("the values have a median");
        assert!((two.median - 2.5).abs() < f64::EPSILON);
    }
}
