//! Suggestions for mistyped words, and texts of durations and times.

use std::time::Duration;

/// The word of `known` that `word` was probably meant to be; `None` if no word is similar. Up to a
/// third of its letters, but at least one, may be wrong, missing, additional or swapped.
pub fn meant<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let letters = word.chars().count();
    let limit = (letters / 3).max(1);
    known
        .into_iter()
        // The difference of the lengths is a lower bound of the distance, and quick to compute.
        .filter(|one| one.chars().count().abs_diff(letters) <= limit)
        .map(|one| (strsim::osa_distance(word, one), one))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, one)| one)
}

/// Reads a duration: whole numbers, each with one of `ms`, `s`, `m`, `h`, `d`; at most a year.
///
/// # Errors
///
/// The reason as text.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || {
        format!(
            "`{text}` is not a duration; write a whole number and its unit: \"500ms\", \"5s\", \"2m\", \"1h\""
        )
    };
    let mut rest = text.trim();
    let mut total = 0u64;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let letters = rest
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(rest.len());
        let unit_ms = match &rest[..letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        rest = &rest[letters..];
        total = number
            .checked_mul(unit_ms)
            .and_then(|ms| ms.checked_add(total))
            .filter(|ms| *ms <= 365 * 86_400_000)
            .ok_or_else(|| format!("`{text}` is longer than a year"))?;
    }
    Ok(Duration::from_millis(total))
}

/// Returns the text of a duration in at most two units, such as `2h05m`.
pub fn lasted(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{minutes:02}m"),
        (days, hours, _) => format!("{days}d{hours:02}h"),
    }
}

/// Formats the number of packets in the last minute, and the ages in seconds of the first and the
/// last packet. Omits each part that is `None`.
pub fn times(last_minute: Option<u64>, since: Option<u64>, ago: Option<u64>) -> String {
    let parts = [
        last_minute.map(|packets| format!("{packets} in the last minute")),
        since.map(|since| format!("first {} ago", lasted(since))),
        ago.map(|ago| format!("last {} ago", lasted(ago))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Puts a text in brackets after a space; empty if the text is empty.
pub fn in_brackets(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(" ({text})"),
    }
}

/// Returns a text as one word for a shell, in quotes if it is empty or contains other characters
/// than those of names and addresses.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/@%+=,".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Formats a number of things: `1 error`, `2 errors`, `0 addresses`.
pub fn counted(n: usize, thing: &str) -> String {
    let end = match thing {
        _ if n == 1 => "",
        _ if thing.ends_with('s') => "es",
        _ => "s",
    };
    format!("{n} {thing}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_without_a_value_are_omitted() {
        assert_eq!(
            times(Some(2), Some(3725), Some(4)),
            "2 in the last minute, first 1h02m ago, last 4s ago"
        );
        assert_eq!(times(None, None, Some(90)), "last 1m30s ago");
        assert_eq!(
            in_brackets(&times(None, None, Some(90))),
            " (last 1m30s ago)"
        );
        assert_eq!(in_brackets(&times(None, None, None)), "");
    }

    #[test]
    fn shell_word_with_special_characters_is_quoted() {
        for (text, word) in [
            ("web-1.example:80", "web-1.example:80"),
            ("", "''"),
            ("tcp 192.0.2.1:80", "'tcp 192.0.2.1:80'"),
            ("a;b", "'a;b'"),
            ("it's", r"'it'\''s'"),
        ] {
            assert_eq!(shell_word(text), word);
        }
    }

    #[test]
    fn misspelt_word_gets_suggestion_and_unlike_word_none() {
        let keys = ["address", "weight", "forward", "upper"];
        assert_eq!(meant("adress", keys), Some("address"));
        assert_eq!(meant("wieght", keys), Some("weight"));
        assert_eq!(meant("lower", keys), None);
        assert_eq!(meant("x", keys), None);
        assert_eq!(meant(&"x".repeat(10_000_000), keys), None);
    }

    #[test]
    fn duration_with_unit_is_parsed_and_invalid_or_too_long_duration_is_refused() {
        for (text, ms) in [
            ("500ms", 500),
            ("5s", 5_000),
            ("2m30s", 150_000),
            ("1h", 3_600_000),
            ("0s", 0),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(ms)),
                "{text}"
            );
        }
        for text in [
            "",
            "5",
            "s",
            "5 s",
            "-1s",
            "1.5s",
            "5x",
            "99999999999999999999s",
            "400d",
            "18446744073709551615h",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn noun_is_plural_unless_the_number_is_one() {
        assert_eq!(counted(0, "server"), "0 servers");
        assert_eq!(counted(1, "server"), "1 server");
        assert_eq!(counted(2, "local address"), "2 local addresses");
        assert_eq!(counted(1, "local address"), "1 local address");
    }
}
