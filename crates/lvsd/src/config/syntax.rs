//! TOML syntax errors, with messages that name their cause.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, Error};

use crate::text::{Diagnostic, Findings, KEPT_MAX};

/// Number of bytes after the first error that are searched for further errors. The parser stores
/// all errors, so that this bounds its memory.
const REACH: usize = 64 << 10;

/// Maximum number of characters of a line that are searched for an unusual character.
const LINE_MAX: usize = 4096;

/// Parses a text to a tree.
///
/// # Errors
/// The text is not TOML. The findings are the first error, and errors shortly after it.
pub(super) fn parse(text: &str) -> Result<Spanned<DeTable<'_>>, Findings> {
    let first = match DeTable::parse(text) {
        Ok(tree) => return Ok(tree),
        Err(error) => error,
    };
    let start = first.span().map_or(0, |span| span.start);
    let mut end = text.len().min(start.saturating_add(REACH));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let (_, errors) = DeTable::parse_recoverable(&text[..end]);
    let mut findings = explain(&errors, text, end);
    // The cause of the first error may be far behind it.
    if findings.is_empty() {
        findings = explain(&[first], text, text.len());
    }
    Err(findings)
}

/// The parser's errors in the first `read` bytes of the text, without repetitions.
fn explain(errors: &[Error], text: &str, read: usize) -> Findings {
    let end = text.trim_end().len();
    let mut findings = Findings::default();
    let mut last = None;
    for error in errors.iter().take(KEPT_MAX) {
        let span = error.span().unwrap_or(0..0);
        // The end of this part may be the only cause of an error at its end.
        if read < end && span.end >= read {
            break;
        }
        let finding = strange_character(&span, text)
            .or_else(|| server_before_service(error, &span, text))
            .unwrap_or_else(|| syntax(error, span.clone(), end));
        if last.as_ref() != Some(&finding.primary.0) {
            last = Some(finding.primary.0.clone());
            findings.push(finding);
        }
        // All tables and strings that are open at the end have one cause.
        if span.start >= end {
            break;
        }
    }
    findings
}

fn syntax(error: &Error, span: Range<usize>, end: usize) -> Diagnostic {
    let message = error.message().lines().collect::<Vec<_>>().join(", ");
    let at_end = span.start >= end;
    let finding = Diagnostic::error(span, format!("not valid TOML: {message}"));
    if at_end {
        finding
            .label("the file ends here")
            .help("complete the file; a file that is partly written or copied ends like this")
    } else {
        finding
    }
}

/// Finds a character that word processors substitute for an ASCII one, on the line of the error and
/// outside of strings. `None` without such a character.
fn strange_character(span: &Range<usize>, text: &str) -> Option<Diagnostic> {
    let before = text.get(..span.start)?;
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    let line = text[start..].char_indices().take(LINE_MAX);
    let mut within = None;
    let (at, strange) = line.take_while(|(_, c)| *c != '\n').find(|(_, c)| {
        match (within, *c) {
            (Some(quote), c) if quote == c => within = None,
            (None, '"' | '\'') => within = Some(*c),
            _ => {}
        }
        within.is_none() && substitute(*c).is_some()
    })?;
    let (name, write) = substitute(strange)?;
    let place = start + at..start + at + strange.len_utf8();
    let code = u32::from(strange);
    Some(
        Diagnostic::error(place, format!("{name} (U+{code:04X}) is not TOML"))
            .help(format!("write {write} in its place")),
    )
}

/// For an error message: the name of a character that word processors insert, and the text to write
/// in its place. `None` for other characters.
const fn substitute(c: char) -> Option<(&'static str, &'static str)> {
    Some(match c {
        '\u{201c}' | '\u{201d}' | '\u{201e}' | '\u{00ab}' | '\u{00bb}' => {
            ("a typographic quotation mark", "an ASCII one, \"")
        }
        '\u{2018}' | '\u{2019}' | '\u{201a}' => ("a typographic apostrophe", "an ASCII one, '"),
        '\u{00a0}' | '\u{2007}' | '\u{202f}' => ("a non-breaking space", "an ordinary space"),
        '\u{2000}'..='\u{200a}' | '\u{3000}' => ("an unusual space", "an ordinary space"),
        '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}' => ("an invisible character", "nothing"),
        '\u{2010}'..='\u{2015}' | '\u{2212}' => ("a typographic dash", "a hyphen, -"),
        _ => return None,
    })
}

/// Reports a `[[service.server]]` before the first `[[service]]`, which makes `service` a table.
/// `None` if this is not the cause of the error.
fn server_before_service(error: &Error, span: &Range<usize>, text: &str) -> Option<Diagnostic> {
    let word = text.get(span.clone())?;
    if error.message() != "duplicate key" || word != "service" {
        return None;
    }
    let server = text.get(..span.start)?.find("[[service.server]]")?;
    Some(
        Diagnostic::error(
            server..server + "[[service.server]]".len(),
            "`[[service.server]]` has no [[service]] above it",
        )
        .context(span.clone(), "the first service")
        .help("move it after the [[service]] to which it belongs"),
    )
}
