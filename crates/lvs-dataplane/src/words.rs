//! Words that people mistype.

/// The one of `known` that `word` was probably meant to be: at most a third of its letters, and at
/// least one, may be wrong, missing, too many or swapped.
pub fn meant<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|one| (strsim::osa_distance(word, one), one))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions() {
        let keys = ["address", "weight", "forward", "upper"];
        assert_eq!(meant("adress", keys), Some("address"));
        assert_eq!(meant("wieght", keys), Some("weight"));
        assert_eq!(meant("lower", keys), None);
        assert_eq!(meant("x", keys), None);
    }
}
