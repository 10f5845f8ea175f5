//! Reading the keys of a table that belong to one kind of something, such as a kind of health
//! check.

use std::ops::{Range, RangeInclusive};

use lvs_core::api::ServiceId;
use toml::Spanned;

use super::Diagnostic;
use super::value::Value;

/// The keys of one kind's own, and where to complain about them.
///
/// Each reader answers `None` for a wrong value, which is then in the findings, and `Some(None)`
/// for a key that is not there.
pub(crate) struct Keys<'a> {
    /// The table in the file.
    pub(super) table: Range<usize>,
    pub(super) entries: &'a [(Spanned<String>, Spanned<Value>)],
    pub(super) text: &'a str,
    /// The service that the table belongs to, where that is known.
    pub(super) service: Option<&'a ServiceId>,
    pub(super) findings: Vec<Diagnostic>,
}

impl Keys<'_> {
    /// The place of the whole table.
    pub(crate) fn table(&self) -> Range<usize> {
        self.table.clone()
    }

    /// The service that the table belongs to, where its address is right.
    pub(crate) const fn service(&self) -> Option<&ServiceId> {
        self.service
    }

    /// Something is wrong, or should be looked at.
    pub(crate) fn report(&mut self, finding: Diagnostic) {
        self.findings.push(finding);
    }

    fn value(&self, key: &str) -> Option<&Spanned<Value>> {
        let mut entries = self.entries.iter();
        entries
            .find(|(name, _)| name.get_ref() == key)
            .map(|(_, value)| value)
    }

    fn wrong_type(&mut self, span: Range<usize>, expected: &str, found: &Value) {
        self.report(
            Diagnostic::error(span, "value of a wrong type")
                .label(format!("expected {expected}, found {}", found.describe())),
        );
    }

    /// A string.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "no kind but the tests' has a string yet")
    )]
    pub(crate) fn string(&mut self, key: &str) -> Option<Option<String>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        match value.get_ref() {
            Value::String(text) => Some(Some(text.clone())),
            other => {
                self.wrong_type(value.span(), "a string", other);
                None
            }
        }
    }

    /// A whole number within `range`.
    pub(crate) fn number(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<Option<i64>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        match value.get_ref() {
            Value::Integer(number) if range.contains(number) => Some(Some(*number)),
            Value::Integer(_) => {
                let written = self.text.get(value.span()).unwrap_or_default();
                let (first, last) = (range.start(), range.end());
                self.report(
                    Diagnostic::error(value.span(), format!("`{key}` {written} is out of range"))
                        .help(format!("give a number from {first} to {last}")),
                );
                None
            }
            other => {
                self.wrong_type(value.span(), "a whole number", other);
                None
            }
        }
    }

    /// A port that can be connected to.
    pub(crate) fn port(&mut self, key: &str) -> Option<Option<u16>> {
        let number = self.number(key, 1..=i64::from(u16::MAX))?;
        Some(number.and_then(|port| u16::try_from(port).ok()))
    }
}
