//! Filters of new connections.

use std::ops::Range;
use std::path::Path;

use lvs_core::Prefix;
use lvs_core::filter::{FilterLists, SourceFilter, parse_prefixes};
use toml::Spanned;

use super::Checker;
use crate::config::files::read_bounded;
use crate::config::raw::{OneOrMore, RawFilter};
use crate::text::Diagnostic;

impl Checker<'_> {
    pub(super) fn filter(&mut self, raw: &Spanned<RawFilter>) -> SourceFilter {
        let (span, raw) = (raw.span(), raw.get_ref());
        let mut lists = FilterLists::default();
        for (list, words, files) in [
            (&mut lists.allow, &raw.allow, &raw.allow_file),
            (&mut lists.deny, &raw.deny, &raw.deny_file),
        ] {
            for (word, place) in each(words.as_ref()) {
                match word.parse::<Prefix>() {
                    Ok(prefix) => list.push(prefix),
                    Err(reason) => self.report(Diagnostic::error(place, reason)),
                }
            }
            for (path, place) in each(files.as_ref()) {
                match read(path) {
                    Ok(more) => list.extend(more),
                    Err(reason) => self.report(Diagnostic::error(place, reason).help(
                        "name a file of networks, separated by whitespace or line breaks; # begins a comment",
                    )),
                }
            }
        }
        SourceFilter::new(lists).unwrap_or_else(|reason| {
            self.report(Diagnostic::error(self.first_line(&span), reason));
            SourceFilter::default()
        })
    }
}

/// The words of a key, each with the place of the key's value.
fn each(value: Option<&Spanned<OneOrMore>>) -> impl Iterator<Item = (&str, Range<usize>)> {
    value.into_iter().flat_map(|value| {
        let all = value.get_ref().0.iter();
        all.map(|word| (word.as_str(), value.span()))
    })
}

fn read(path: &str) -> Result<Vec<Prefix>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot read {path}: {error}");
    let bytes = read_bounded(Path::new(path)).map_err(|error| failed(&error))?;
    let text = String::from_utf8(bytes).map_err(|error| failed(&error))?;
    parse_prefixes(&text).map_err(|(line, reason)| format!("{path}, line {line}: {reason}"))
}
