//! Persistence engines: besides the client's address, a datum in the packet identifies related
//! connections. SIP is the only engine.

/// Maximum length of an engine's data in bytes (`IP_VS_PEDATA_MAXLEN`).
const DATA_MAX: usize = 255;

pub(crate) const SIP: &str = "sip";

/// The Call-ID of a SIP message (RFC 3261 section 20.8), found as the kernel's engine finds it
/// (`get_callid`, `ct_sip_get_header`); `None` if there is none, if it is longer than 255 bytes, or
/// if no line break follows it directly.
///
/// The search ignores the start line, and continues beyond an empty line.
pub(crate) fn call_id(message: &[u8]) -> Option<&[u8]> {
    let mut from = 0;
    loop {
        let start = header(message, from)?;
        let len = call_id_len(&message[start..]);
        if len == 0 {
            // The kernel adds the offset from the start of the message to the previous start, so
            // that its search skips bytes.
            from += start;
            continue;
        }
        let ended = matches!(message.get(start + len), Some(b'\r' | b'\n'));
        return (ended && len <= DATA_MAX).then(|| &message[start..start + len]);
    }
}

/// Position of the value of the next Call-ID header at or after `from`.
fn header(message: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while at < message.len() {
        if !is_break(message[at]) {
            at += 1;
            continue;
        }
        at = skip_break(message, at);
        let line = message.get(at..)?;
        let name = match line {
            [b' ' | b'\t', ..] => None,
            _ if starts_with_ignoring_case(line, b"call-id") => Some(7),
            // The compact form, unless a longer name begins with it.
            [b'i' | b'I', next, ..] if !is_letter(*next) => Some(1),
            _ => None,
        };
        let Some(name) = name else {
            at += 1;
            continue;
        };
        let colon = skip_space(message, at + name)?;
        if message.get(colon) != Some(&b':') || colon + 1 >= message.len() {
            return None;
        }
        return skip_space(message, colon + 1);
    }
    None
}

/// The position after the line break at `at`; CR LF is one line break.
fn skip_break(message: &[u8], at: usize) -> usize {
    if message[at] == b'\r' && message.get(at + 1) == Some(&b'\n') {
        at + 2
    } else {
        at + 1
    }
}

/// Skips whitespace with at most one line break. `None` if no whitespace follows the line break.
fn skip_space(message: &[u8], at: usize) -> Option<usize> {
    let blanks = |at: usize| {
        let rest = &message[at.min(message.len())..];
        at + rest.iter().take_while(|byte| is_blank(**byte)).count()
    };
    let at = blanks(at);
    if !message.get(at).copied().is_some_and(is_break) {
        return Some(at);
    }
    let next = skip_break(message, at);
    is_blank(*message.get(next)?).then(|| blanks(next))
}

/// Length of a Call-ID at the beginning of `text`: a word, optionally followed by `@` and another
/// word. 0 without a Call-ID.
fn call_id_len(text: &[u8]) -> usize {
    let word = |text: &[u8]| text.iter().take_while(|byte| is_word(**byte)).count();
    let first = word(text);
    if first == 0 || text.get(first) != Some(&b'@') {
        return first;
    }
    match word(&text[first + 1..]) {
        0 => 0,
        second => first + 1 + second,
    }
}

fn starts_with_ignoring_case(text: &[u8], name: &[u8]) -> bool {
    text.get(..name.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(name))
}

fn is_break(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n')
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// Whether the byte is a letter of Latin-1, as the kernel's `isalpha` defines it.
fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || matches!(byte, 0xc0..=0xd6 | 0xd8..=0xf6 | 0xf8..=0xff)
}

fn is_word(byte: u8) -> bool {
    is_letter(byte) || byte.is_ascii_digit() || b"!\"%'()*+-./:<>?[\\]_`{}~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sip_call_id_is_found_or_none_as_in_linux() {
        for (message, expected) in [
            ("INVITE x\r\nCall-ID: a@b\r\n\r\n", Some("a@b")),
            ("INVITE x\r\ncall-id:a\n", Some("a")),
            ("INVITE x\r\nI :\ta\r", Some("a")),
            ("INVITE x\r\nInfo: z\r\ni: a\r\n", Some("a")),
            ("INVITE x\r\nCall-ID:\r\n a\r\n", Some("a")),
            ("INVITE x\r\nCall-ID \r\n\t: \n\ta\r\n", Some("a")),
            ("INVITE x\r\n\r\nCall-ID: a\r\n", Some("a")),
            // After two line feeds the line's first character is skipped.
            ("INVITE x\n\nCall-ID: a\n", None),
            ("Call-ID: a\r\n", None),
            ("INVITE x\r\n Call-ID: a\r\n", None),
            ("INVITE x\r\nCall-ID: a", None),
            ("INVITE x\r\nCall-ID: a \r\n", None),
            ("INVITE x\r\nCall-ID: a;b\r\n", None),
            ("INVITE x\r\nCall-ID:\r\nb\r\n", None),
            ("INVITE x\r\nCall-ID; a\r\ni: b\r\n", None),
            ("INVITE x\r\nCall-ID: a@\r\ni: b\r\n", Some("b")),
            ("INVITE x\r\nCall-ID: @\r\ni: b\r\n", Some("b")),
            // After the second rejected header, the search continues beyond the next line, as in
            // Linux 6.12.
            ("x\r\nCall-ID: @\r\ni: one\r\n", Some("one")),
            ("x\r\nCall-ID: @\r\nCall-ID: @\r\ni: two\r\n", None),
            ("", None),
            ("\r", None),
            ("\r\n", None),
            ("\r\ni", None),
            ("\r\nCall-ID", None),
            ("\r\nCall-ID:", None),
            ("\r\nCall-ID: ", None),
        ] {
            let found = call_id(message.as_bytes());
            assert_eq!(found, expected.map(str::as_bytes), "{message:?}");
        }
    }

    #[test]
    fn sip_call_id_over_255_bytes_is_ignored() {
        let message = |len| std::format!("x\r\ni: {}\r\n", "a".repeat(len));
        assert_eq!(call_id(message(255).as_bytes()).unwrap().len(), 255);
        assert_eq!(call_id(message(256).as_bytes()), None);
    }
}
