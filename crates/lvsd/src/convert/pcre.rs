//! Converts regular expressions of PCRE2 (keepalived) and Perl (ldirectord) for the crate `regex`.
//!
//! The crate accepts some syntax with another meaning, such as `\<` and `\v`, sets within a class
//! and possessive repetition, and it matches characters instead of bytes. Such parts are rewritten,
//! or the expression is refused.

use std::iter::Peekable;
use std::str::Chars;

/// `$` of PCRE: the end of the text, or the position before a final newline.
const END: &str = r"(?:\n?\z)";

/// Reason for which an expression is refused.
type Why = String;

/// Returns an expression for the crate `regex` that matches the same texts.
///
/// # Errors
/// A part has no equivalent; the text names it.
pub(super) fn converted(regex: &str, caseless: bool) -> Result<String, Why> {
    let mut reader = Reader {
        rest: regex.chars().peekable(),
        out: String::with_capacity(regex.len()),
        by_bytes: false,
        lines: false,
    };
    reader.read()?;
    let flags = match (caseless, reader.by_bytes) {
        (false, false) => "",
        (true, false) => "(?i)",
        (false, true) => "(?-u)",
        (true, true) => "(?i-u)",
    };
    Ok(format!("{flags}{}", reader.out))
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    out: String,
    /// Whether a part counts bytes in PCRE, but characters in the crate.
    by_bytes: bool,
    /// Whether `$` matches at the end of each line.
    lines: bool,
}

enum Member {
    Byte(u8),
    /// A set such as `\d` or `[:alpha:]`, in the crate's syntax.
    Set(String),
}

fn unknown(what: &str) -> Why {
    format!("lvsd does not support {what}")
}

impl Reader<'_> {
    fn read(&mut self) -> Result<(), Why> {
        let mut repeated = false;
        let mut first = true;
        while let Some(c) = self.rest.next() {
            let mut repeats = false;
            match c {
                '\\' => self.escape()?,
                '[' => self.class()?,
                '(' => self.group(first)?,
                '$' if self.lines => self.out.push('$'),
                '$' => self.end("$")?,
                '.' => {
                    self.by_bytes = true;
                    self.out.push('.');
                }
                '*' | '+' | '?' => {
                    self.repetition(c, repeated)?;
                    repeats = true;
                }
                '{' => match self.counts() {
                    Some(counts) => {
                        self.repetition_of(&format!("{{{counts}}}"), repeated)?;
                        repeats = true;
                    }
                    // `{,` is a repetition in Perl, but in PCRE2 only in later versions.
                    None if self.rest.peek() == Some(&',') => return Err(unknown("`{,`")),
                    None => self.byte(b'{'),
                },
                '^' | ')' | '|' => self.out.push(c),
                c => self.literal(c),
            }
            repeated = repeats;
            first = false;
        }
        Ok(())
    }

    fn repetition(&mut self, c: char, repeated: bool) -> Result<(), Why> {
        self.repetition_of(c.encode_utf8(&mut [0; 4]), repeated)
    }

    /// Translates a repetition and the character that makes it lazy.
    fn repetition_of(&mut self, sign: &str, repeated: bool) -> Result<(), Why> {
        if repeated {
            return Err(unknown("a repetition of a repetition"));
        }
        self.out.push_str(sign);
        match self.rest.peek() {
            Some('+') => Err(unknown(&format!("the possessive repetition `{sign}+`"))),
            Some('?') => {
                self.rest.next();
                self.out.push('?');
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Reads `{2}`, `{2,}` or `{2,3}` after the brace; `None` if the brace is a literal.
    fn counts(&mut self) -> Option<String> {
        let mut ahead = self.rest.clone();
        let mut counts = String::new();
        loop {
            match ahead.next()? {
                '}' => break,
                c if c.is_ascii_digit() || c == ',' => counts.push(c),
                _ => return None,
            }
        }
        let (low, high) = counts.split_once(',').unwrap_or((&counts, ""));
        if low.is_empty() || high.contains(',') {
            return None;
        }
        self.rest = ahead;
        Some(counts)
    }

    /// Translates an assertion of the end of the text, which PCRE also finds before a final
    /// newline. The crate's expression consumes this newline, so that a text after the assertion is
    /// refused.
    fn end(&mut self, sign: &str) -> Result<(), Why> {
        match self.rest.peek() {
            None | Some(')' | '|') => {
                self.out.push_str(END);
                Ok(())
            }
            Some(_) => Err(unknown(&format!("text after `{sign}`"))),
        }
    }

    fn literal(&mut self, c: char) {
        for &byte in c.encode_utf8(&mut [0; 4]).as_bytes() {
            self.byte(byte);
        }
    }

    fn byte(&mut self, byte: u8) {
        self.by_bytes |= !byte.is_ascii();
        push_byte(&mut self.out, byte, "");
    }

    fn escape(&mut self) -> Result<(), Why> {
        let c = self.rest.next().ok_or("it ends with a backslash")?;
        match c {
            'd' | 'D' | 'w' | 'W' | 's' | 'S' | 'B' => {
                self.by_bytes = true;
                self.out.extend(['\\', c]);
            }
            'b' if self.rest.peek() == Some(&'{') => return Err(unknown("`\\b{`")),
            'b' => {
                self.by_bytes = true;
                self.out.push_str("\\b");
            }
            'A' | 'z' => self.out.extend(['\\', c]),
            'Z' => self.end("\\Z")?,
            'h' => self.out.push_str(r"[\t \xA0]"),
            'H' => self.out.push_str(r"[^\t \xA0]"),
            'v' => self.out.push_str(r"[\n\x0B\f\r\x85]"),
            'V' => self.out.push_str(r"[^\n\x0B\f\r\x85]"),
            'N' if self.rest.peek() != Some(&'{') => self.out.push_str(r"[^\n]"),
            c => {
                let byte = self.code(c)?;
                self.byte(byte);
            }
        }
        self.by_bytes |= matches!(c, 'h' | 'H' | 'v' | 'V' | 'N');
        Ok(())
    }

    /// Reads the rest of an escape sequence that begins with `c`, and returns the byte that it
    /// stands for. Refuses sequences without an equivalent.
    fn code(&mut self, c: char) -> Result<u8, Why> {
        Ok(match c {
            'n' => b'\n',
            'r' => b'\r',
            't' => b'\t',
            'f' => 0x0c,
            'a' => 0x07,
            'e' => 0x1b,
            'x' if self.rest.peek() == Some(&'{') => return Err(unknown("`\\x{`")),
            'x' => {
                let mut value = 0;
                for _ in 0..2 {
                    let Some(digit) = self.rest.peek().and_then(|c| c.to_digit(16)) else {
                        break;
                    };
                    value = value * 16 + digit;
                    self.rest.next();
                }
                u8::try_from(value).unwrap_or_default()
            }
            '0' => {
                let mut value = 0;
                for _ in 0..2 {
                    let Some(digit) = self.rest.peek().and_then(|c| c.to_digit(8)) else {
                        break;
                    };
                    value = value * 8 + digit;
                    self.rest.next();
                }
                u8::try_from(value).unwrap_or_default()
            }
            '1'..='9' => return Err(unknown(&format!("the back-reference or octal `\\{c}`"))),
            c if c.is_ascii_alphabetic() => return Err(unknown(&format!("`\\{c}`"))),
            c => match u8::try_from(c) {
                Ok(byte) if byte.is_ascii() => byte,
                _ => return Err(unknown("a backslash before a letter beyond ASCII")),
            },
        })
    }

    /// Translates a group after `(`. `first`: the group begins the expression.
    fn group(&mut self, first: bool) -> Result<(), Why> {
        self.out.push('(');
        match self.rest.peek() {
            Some('?') => {}
            Some('*') => return Err(unknown("`(*`")),
            _ => return Ok(()),
        }
        self.rest.next();
        let mut text = String::new();
        while let Some(&c) = self.rest.peek() {
            if !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '<' | '^' | '\'' | '>'))
                || text.ends_with('>')
            {
                break;
            }
            text.push(c);
            self.rest.next();
        }
        let name = text
            .strip_prefix("P<")
            .or_else(|| text.strip_prefix('<'))
            .and_then(|name| name.strip_suffix('>'));
        let next = self.rest.peek().copied();
        match (name, next) {
            // The name of a group is irrelevant without references to it.
            (Some(name), _) if !name.is_empty() => Ok(()),
            (_, Some('=' | '!')) if matches!(text.as_str(), "" | "<") => Err(unknown(&format!(
                "the look-around `(?{text}{}`",
                next.unwrap_or('=')
            ))),
            (_, Some(':' | ')')) if text.chars().all(|c| matches!(c, 'i' | 'm' | 's' | '-')) => {
                let on = text.split('-').next().unwrap_or_default();
                if text.contains('m') && !(first && next == Some(')') && on.contains('m')) {
                    return Err(unknown("the flag m for a part"));
                }
                self.lines |= on.contains('m');
                self.by_bytes |= on.contains('i');
                self.out.push('?');
                self.out.push_str(&text);
                self.out.extend(self.rest.next());
                Ok(())
            }
            (_, next) => {
                let next = next.map(String::from).unwrap_or_default();
                Err(unknown(&format!("`(?{text}{next}`")))
            }
        }
    }

    /// Translates a class after `[`.
    fn class(&mut self) -> Result<(), Why> {
        let mut class = String::from("[");
        if self.rest.next_if_eq(&'^').is_some() {
            self.by_bytes = true;
            class.push('^');
        }
        let mut first = true;
        loop {
            let member = match self.rest.peek() {
                Some(']') if !first => {
                    self.rest.next();
                    break;
                }
                _ => self.members(&mut class)?,
            };
            first = false;
            let Some(member) = member else {
                continue;
            };
            let start = match member {
                Member::Set(set) => {
                    class.push_str(&set);
                    // After a set, `-` is a literal member.
                    if self.rest.next_if_eq(&'-').is_some() {
                        push_byte(&mut class, b'-', IN_CLASS);
                    }
                    continue;
                }
                Member::Byte(byte) => byte,
            };
            push_byte(&mut class, start, IN_CLASS);
            let mut ahead = self.rest.clone();
            if ahead.next() != Some('-') || matches!(ahead.peek(), None | Some(']')) {
                continue;
            }
            self.rest.next();
            match self.members(&mut class)? {
                Some(Member::Byte(end)) => {
                    class.push('-');
                    push_byte(&mut class, end, IN_CLASS);
                }
                Some(Member::Set(set)) => {
                    push_byte(&mut class, b'-', IN_CLASS);
                    class.push_str(&set);
                }
                None => return Err(unknown("a range to a character beyond ASCII")),
            }
        }
        class.push(']');
        self.out.push_str(&class);
        Ok(())
    }

    /// Reads the next member of a class. If it is a character above ASCII, appends all of its bytes
    /// to `class` as members, and returns `None`.
    fn members(&mut self, class: &mut String) -> Result<Option<Member>, Why> {
        let c = self.rest.next().ok_or("a character class is not closed")?;
        Ok(Some(match c {
            '[' if matches!(self.rest.peek(), Some(':' | '.' | '=')) => {
                let mut ahead = self.rest.clone();
                let kind = ahead.next();
                let name: String = ahead.by_ref().take_while(|&c| Some(c) != kind).collect();
                if ahead.next() != Some(']') {
                    return Ok(Some(Member::Byte(b'[')));
                }
                const NAMES: [&str; 14] = [
                    "alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph", "lower",
                    "print", "punct", "space", "upper", "word", "xdigit",
                ];
                if kind != Some(':') || !NAMES.contains(&name.trim_start_matches('^')) {
                    return Err(unknown(&format!("`[{}{name}`", kind.unwrap_or(':'))));
                }
                self.rest = ahead;
                self.by_bytes = true;
                Member::Set(format!("[:{name}:]"))
            }
            '\\' => {
                let c = self.rest.next().ok_or("a character class is not closed")?;
                match c {
                    'd' | 'D' | 'w' | 'W' | 's' | 'S' => {
                        self.by_bytes = true;
                        Member::Set(format!("\\{c}"))
                    }
                    'b' => Member::Byte(0x08),
                    'h' => {
                        self.by_bytes = true;
                        Member::Set(r"\t \xA0".to_owned())
                    }
                    'v' => {
                        self.by_bytes = true;
                        Member::Set(r"\n\x0B\f\r\x85".to_owned())
                    }
                    c => {
                        let byte = self.code(c)?;
                        self.by_bytes |= !byte.is_ascii();
                        Member::Byte(byte)
                    }
                }
            }
            c => match u8::try_from(c) {
                Ok(byte) if byte.is_ascii() => Member::Byte(byte),
                _ => {
                    self.by_bytes = true;
                    for &byte in c.encode_utf8(&mut [0; 4]).as_bytes() {
                        push_byte(class, byte, IN_CLASS);
                    }
                    if self.rest.peek() == Some(&'-') {
                        return Err(unknown("a range from a character beyond ASCII"));
                    }
                    return Ok(None);
                }
            },
        }))
    }
}

/// Additional special characters in a class of the crate.
const IN_CLASS: &str = "#&-~";

/// Appends a literal byte, escaped if it is special; `more` contains additional special characters.
fn push_byte(out: &mut String, byte: u8, more: &str) {
    match byte {
        b'\n' => out.push_str("\\n"),
        b'\r' => out.push_str("\\r"),
        b'\t' => out.push_str("\\t"),
        b' '..=b'~' => {
            let c = char::from(byte);
            if "\\.+*?()|[]{}^$".contains(c) || more.contains(c) {
                out.push('\\');
            }
            out.push(c);
        }
        _ => out.push_str(&format!("\\x{byte:02X}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pcre: &str, text: &[u8]) -> bool {
        let regex = converted(pcre, false).unwrap_or_else(|why| panic!("{pcre}: {why}"));
        regex::bytes::Regex::new(&regex)
            .unwrap_or_else(|e| panic!("{pcre}: {regex}: {e}"))
            .is_match(text)
    }

    /// The expected results are Perl's.
    #[test]
    fn converted_pcre_matches_same_texts_as_perl() {
        let all: [(&str, &[u8], &[u8]); 32] = [
            ("^OK$", b"OK\n", b"OK\n\n"),
            ("^OK\\Z", b"OK\n", b"OK!"),
            ("OK\\z", b"OK", b"OK\n"),
            ("[]$]a", b"$a", b"a"),
            ("[^]$]a", b"xa", b"$a"),
            ("a\\$", b"a$", b"a"),
            ("[[:alpha:]$]!", b"$!", b"!"),
            ("[[:^alpha:]]x", b"1x", b"ax"),
            ("\\<title\\>", b"<title>", b"title"),
            ("\\xe9", b"caf\xe9", "caf\u{e9}".as_bytes()),
            ("\u{e9}", "caf\u{e9}".as_bytes(), b"caf\xe9"),
            ("a.c", b"a\xffc", b"a\nc"),
            ("a\\xe9*b", b"a\xe9\xe9b", b"a\xe9"),
            ("[\\x80-\\xff]b", b"\xfeb", b"ab"),
            ("[a[b]x", b"[x", b"cx"),
            ("[a&&b]x", b"&x", b"cx"),
            ("[+--]x", b",x", b"*x"),
            ("[a-c-e]x", b"-x", b"dx"),
            ("[\\w-]x", b"-x", b"+x"),
            ("[~~a]x", b"~x", b"bx"),
            ("[\\]]x", b"]x", b"ax"),
            ("a{x", b"a{x", b"ax"),
            ("a{2}b", b"aab", b"ab"),
            ("a{2,3}?b", b"aaab", b"ab"),
            ("a\\vb", b"a\nb", b"a b"),
            ("a\\hb", b"a b", b"a\nb"),
            ("\\x4a\\x5", b"J\x05", b"J5"),
            ("\\012x", b"\nx", b"x"),
            ("(?i)ok", b"OK", b"O"),
            ("(?m)^b$", b"a\nb\nc", b"ab"),
            ("(?<n>a)(?:b)(?i:C)", b"abc", b"aBc"),
            ("\\_\\-\\/\\ \\\"", b"_-/ \"", b"\\_"),
        ];
        for (pcre, yes, no) in all {
            assert!(matches(pcre, yes), "{pcre}: {yes:?}");
            assert!(!matches(pcre, no), "{pcre}: {no:?}");
        }
    }

    #[test]
    fn pcre_expression_that_is_invalid_or_has_no_counterpart_is_refused() {
        for (pcre, why) in [
            ("a++b", "possessive repetition `++`"),
            ("a*+", "possessive"),
            ("a?+", "possessive"),
            ("a{2}+", "possessive repetition `{2}+`"),
            ("a{,3}b", "`{,`"),
            ("a**", "repetition of a repetition"),
            ("(?=a)", "look-around `(?=`"),
            ("(?<!a)b", "look-around `(?<!`"),
            ("(?>a)", "`(?>a`"),
            ("(a)\\1", "back-reference"),
            ("(?|a)", "`(?|`"),
            ("(?R)", "`(?R"),
            ("(?x)a b", "`(?x"),
            ("(?u)a", "`(?u"),
            ("a(?m)b$", "flag m"),
            ("(*UTF)a", "`(*`"),
            ("a$b", "after `$`"),
            ("\\Qa.b\\E", "`\\Q`"),
            ("\\Ga", "`\\G`"),
            ("\\Ka", "`\\K`"),
            // `\R` consumes `\r\n` without backtracking.
            ("a\\Rb", "`\\R`"),
            ("\\p{L}", "`\\p`"),
            ("\\u0041", "`\\u`"),
            ("\\x{263a}", "`\\x{`"),
            ("[[:<:]]a", "`[:<`"),
            ("[a", "is not closed"),
            ("a\\", "backslash"),
            ("\\b{start}", "`\\b{`"),
        ] {
            let refused = converted(pcre, false);
            assert!(
                refused.as_ref().is_err_and(|text| text.contains(why)),
                "{pcre}: {refused:?}"
            );
        }
    }

    #[test]
    fn pcre_expression_with_same_meaning_in_lvsd_is_unchanged_except_for_added_flags() {
        for regex in [
            "Welcome",
            "^HTTP/1",
            "(a|b)+c?",
            "[a-z0-9_]{2,}",
            "it's \"ok\"",
        ] {
            assert_eq!(converted(regex, false).as_deref(), Ok(regex));
        }
        assert_eq!(converted("ok", true).as_deref(), Ok("(?i)ok"));
        assert_eq!(converted("o.", true).as_deref(), Ok("(?i-u)o."));
    }

    proptest::proptest! {
        #[test]
        fn pcre_parser_does_not_panic_on_any_text(text in "\\PC{0,40}", caseless: bool) {
            let _ = converted(&text, caseless);
        }
    }
}
