//! A statement of keepalived's file.

use super::source::{SourcePlace, shown};
use super::words::{self, Word};

/// A statement: its words and the statements of its block.
#[derive(Clone, Debug, Default)]
pub(in crate::convert) struct Item {
    pub(super) words: Vec<Word>,
    pub(super) block: Option<Vec<Self>>,
    pub(super) at: SourcePlace,
    /// Its first and last line, counted over all files.
    pub(super) lines: (usize, usize),
}

impl Item {
    pub(in crate::convert) fn name(&self) -> &str {
        self.word(0)
    }

    pub(in crate::convert) fn word(&self, n: usize) -> &str {
        self.words.get(n).map_or("", |word| word.text.as_str())
    }

    /// Number of words, the name included.
    pub(in crate::convert) fn len(&self) -> usize {
        self.words.len()
    }

    /// The words from the `n`th on, with a space between two.
    pub(in crate::convert) fn rest(&self, n: usize) -> String {
        let words: Vec<&str> = self
            .words
            .iter()
            .skip(n)
            .map(|word| word.text.as_str())
            .collect();
        words.join(" ")
    }

    /// The words after the name of the statement, with the quotes and escapes of scripts and
    /// regular expressions.
    pub(in crate::convert) fn escaped(&self) -> Vec<String> {
        let raw: Vec<&str> = self
            .words
            .iter()
            .skip(1)
            .map(|word| word.raw.as_str())
            .collect();
        words::escaped(&raw.join(" "))
    }

    pub(in crate::convert) fn items(&self) -> &[Self] {
        self.block.as_deref().unwrap_or_default()
    }

    /// The last statement of this name, which keepalived uses.
    pub(in crate::convert) fn find(&self, name: &str) -> Option<&Self> {
        self.items().iter().rev().find(|item| item.name() == name)
    }

    /// The written text, shortened.
    pub(in crate::convert) fn text(&self) -> String {
        let raw: Vec<&str> = self.words.iter().map(|word| word.raw.as_str()).collect();
        shown(&raw.join(" "))
    }

    /// The message that the statement is not converted: position, text and reason.
    pub(in crate::convert) fn lost(&self, why: &str) -> String {
        format!("{}: {}: {why}", self.at, self.text())
    }

    /// The message that a statement in a block of this name is not converted.
    pub(in crate::convert) fn lost_of(&self, name: &str, why: &str) -> String {
        format!("{}: {name}: {}: {why}", self.at, self.text())
    }

    pub(in crate::convert) fn at(&self) -> &SourcePlace {
        &self.at
    }
}

/// Whether a statement that `no` disables is on.
pub(in crate::convert) fn is_on(item: &Item) -> bool {
    !matches!(item.word(1), "no" | "off" | "false")
}
