//! Splits lines of keepalived's file: words, braces, comments and quotes.

/// Placeholders for `#` and `!` from `${_HASH}` and `${_BANG}`, which do not begin a comment.
pub(super) const HASH: char = '\u{F8F3}';
pub(super) const BANG: char = '\u{F8F1}';

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    /// The word without quotes.
    pub(super) text: String,
    /// The word as in keepalived's file, with its quotes.
    pub(super) raw: String,
    pub(super) quoted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Word(Word),
    Open,
    Close,
}

/// Removes the comment of a line.
pub(super) fn without_comment(line: &str) -> &str {
    let mut quoted = false;
    let mut escaped = false;
    for (at, c) in line.char_indices() {
        match c {
            '"' if !(quoted && escaped) => quoted = !quoted,
            '#' | '!' if !quoted => return &line[..at],
            _ => {}
        }
        escaped = c == '\\' && !escaped;
    }
    line
}

/// Splits a line into words and braces, without its comment. The second value is true if the last
/// quote is not closed. A quote begins and ends a word.
pub(super) fn pieces(line: &str) -> (Vec<Piece>, bool) {
    let mut all = Vec::new();
    let mut word = String::new();
    let finish = |word: &mut String, all: &mut Vec<Piece>| {
        if !word.is_empty() {
            let raw = std::mem::take(word);
            let text = raw.replace(HASH, "#").replace(BANG, "!");
            all.push(Piece::Word(Word {
                raw: text.clone(),
                text,
                quoted: false,
            }));
        }
    };
    let mut rest = without_comment(line);
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        match c {
            '"' => {
                finish(&mut word, &mut all);
                let end = closing(after);
                let inner = &after[..end.unwrap_or(after.len())];
                let text = inner.replace(HASH, "#").replace(BANG, "!");
                all.push(Piece::Word(Word {
                    raw: format!("\"{text}\""),
                    text,
                    quoted: true,
                }));
                let Some(end) = end else {
                    return (all, true);
                };
                rest = &after[end + 1..];
                continue;
            }
            '{' if word.ends_with('$') => word.push(c),
            '}' if word.contains("${") && !word.ends_with('}') => word.push(c),
            '{' => {
                finish(&mut word, &mut all);
                all.push(Piece::Open);
            }
            '}' => {
                finish(&mut word, &mut all);
                all.push(Piece::Close);
            }
            c if c.is_whitespace() => finish(&mut word, &mut all),
            c => word.push(c),
        }
        rest = after;
    }
    finish(&mut word, &mut all);
    (all, false)
}

/// Position of the closing quote, the first one that a backslash does not escape; `None` if the
/// quote is not closed.
fn closing(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        if c == '"' && !escaped {
            return Some(at);
        }
        escaped = c == '\\' && !escaped;
    }
    None
}

/// Splits a script or regular expression into words. `'` is also a quote, and a backslash begins an
/// escape sequence.
pub(super) fn escaped(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match (quote, c) {
            (_, '\\') => {
                let (c, after) = escape(rest);
                word.get_or_insert_default().extend(c);
                rest = after;
            }
            (Some(open), c) if c == open => {
                quote = None;
                words.extend(word.take());
            }
            (None, '"' | '\'') => {
                words.extend(word.take());
                quote = Some(c);
                word = Some(String::new());
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The character of an escape sequence after the backslash, and the rest. `None` if the sequence is
/// incomplete or its number is no character.
fn escape(text: &str) -> (Option<char>, &str) {
    let number = |digits: &str, radix: u32, most: usize| {
        let end = digits
            .find(|c: char| !c.is_digit(radix))
            .unwrap_or(digits.len())
            .min(most);
        let code = u32::from_str_radix(&digits[..end], radix).ok();
        (code.and_then(char::from_u32), end)
    };
    let Some(c) = text.chars().next() else {
        return (None, text);
    };
    let after = &text[c.len_utf8()..];
    let one = match c {
        'a' => '\u{7}',
        'b' => '\u{8}',
        'E' => '\u{1B}',
        'f' => '\u{C}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{B}',
        'x' if after.starts_with(|c: char| c.is_ascii_hexdigit()) => {
            let (code, end) = number(after, 16, 8);
            return (code, &after[end..]);
        }
        '0'..='7' => {
            let (code, end) = number(text, 8, 3);
            return (code, &text[end..]);
        }
        'c' => {
            let Some(control) = after.chars().next() else {
                return (Some(c), after);
            };
            let code = char::from_u32(u32::from(control.to_ascii_uppercase()) & 0x1F);
            return (code, &after[control.len_utf8()..]);
        }
        c => c,
    };
    (Some(one), after)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(line: &str) -> Vec<String> {
        let text = |piece| match piece {
            Piece::Word(word) => word.text,
            Piece::Open => "{".to_owned(),
            Piece::Close => "}".to_owned(),
        };
        pieces(line).0.into_iter().map(text).collect()
    }

    /// The expected words are those of keepalived 2.2.7.
    #[test]
    fn line_is_split_into_words_like_in_keepalived() {
        for (line, expected) in [
            ("weight 8}", &["weight", "8", "}"][..]),
            (
                "real_server 10.0.0.7 80{",
                &["real_server", "10.0.0.7", "80", "{"],
            ),
            ("path \"/a b\" x", &["path", "/a b", "x"]),
            (
                "path /half\"quoted word\"x",
                &["path", "/half", "quoted word", "x"],
            ),
            ("path '/single quoted'", &["path", "'/single", "quoted'"]),
            ("path /hash\"#x\"y#comment", &["path", "/hash", "#x", "y"]),
            ("path \"/4#not a comment!\"", &["path", "/4#not a comment!"]),
            ("weight 5 ! more", &["weight", "5"]),
            ("x ${UNDEF}y", &["x", "${UNDEF}y"]),
            ("x \"a \\\"b\\\" c\"", &["x", "a \\\"b\\\" c"]),
        ] {
            assert_eq!(texts(line), expected, "{line}");
        }
        assert!(pieces("path \"/open").1);
        assert!(!pieces("path \"/closed\"").1);
    }

    /// The expected characters are those of keepalived 2.2.7.
    #[test]
    fn escapes_and_quotes_are_resolved_like_in_keepalived() {
        for (text, expected) in [
            (
                "\"a\\.b\\d+ \\\\. \\\"x\\\" 'q'\"",
                &["a.bd+ \\. \"x\" 'q'"][..],
            ),
            ("a\\.b\\d+\\ c", &["a.bd+ c"]),
            ("'single quoted'", &["single quoted"]),
            ("\"/bin/echo a\" \"b c\"", &["/bin/echo a", "b c"]),
            ("\"\\x41\\101\\t\"", &["AA\t"]),
            ("", &[]),
        ] {
            assert_eq!(escaped(text), expected, "{text}");
        }
    }
}
