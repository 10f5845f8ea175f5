//! A statement of keepalived's file.

use std::fmt;
use std::rc::Rc;

use super::words::{self, Word};

/// Position of a statement.
#[derive(Clone, Debug, Default)]
pub(super) struct SourcePlace {
    /// Path of the included file; `None` for the main file.
    pub(super) file: Option<Rc<str>>,
    pub(super) line: usize,
}

impl fmt::Display for SourcePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            None => write!(f, "line {}", self.line),
            Some(file) => write!(f, "{file} line {}", self.line),
        }
    }
}

/// A statement: its words, and the statements of its block.
#[derive(Clone, Debug, Default)]
pub(super) struct Item {
    pub(super) words: Vec<Word>,
    pub(super) block: Option<Vec<Self>>,
    pub(super) at: SourcePlace,
    /// First and last line of the statement, counted over all files.
    pub(super) lines: (usize, usize),
}

impl Item {
    pub(super) fn name(&self) -> &str {
        self.word(0)
    }

    pub(super) fn word(&self, n: usize) -> &str {
        self.words.get(n).map_or("", |word| word.text.as_str())
    }

    /// Number of words, including the name.
    pub(super) fn len(&self) -> usize {
        self.words.len()
    }

    /// The words from index `n` on, joined by spaces.
    pub(super) fn rest(&self, n: usize) -> String {
        let words: Vec<&str> = self
            .words
            .iter()
            .skip(n)
            .map(|word| word.text.as_str())
            .collect();
        words.join(" ")
    }

    /// The words after the name, split by the quoting rules of scripts and regular expressions.
    pub(super) fn escaped(&self) -> Vec<String> {
        let raw: Vec<&str> = self
            .words
            .iter()
            .skip(1)
            .map(|word| word.raw.as_str())
            .collect();
        words::escaped(&raw.join(" "))
    }

    pub(super) fn items(&self) -> &[Self] {
        self.block.as_deref().unwrap_or_default()
    }

    /// The last statement of this name in the block: keepalived uses the last one. `None` if the
    /// block has none.
    pub(super) fn find(&self, name: &str) -> Option<&Self> {
        self.items().iter().rev().find(|item| item.name() == name)
    }

    /// The words of the statement without its block, truncated for messages.
    pub(super) fn text(&self) -> String {
        let raw: Vec<&str> = self.words.iter().map(|word| word.raw.as_str()).collect();
        shown(&raw.join(" "))
    }

    /// Message that the statement is not converted: position, text and reason.
    pub(super) fn lost(&self, why: &str) -> String {
        format!("{}: {}: {why}", self.at, self.text())
    }

    /// Message that a statement in a block `name` is not converted.
    pub(super) fn lost_of(&self, name: &str, why: &str) -> String {
        format!("{}: {name}: {}: {why}", self.at, self.text())
    }

    pub(super) fn at(&self) -> &SourcePlace {
        &self.at
    }
}

/// Whether a statement enables its setting: its first value is not `no`, `off` or `false`.
pub(super) fn is_on(item: &Item) -> bool {
    !matches!(item.word(1), "no" | "off" | "false")
}

/// The first line of a text, truncated for messages.
pub(super) fn shown(text: &str) -> String {
    /// Maximum length of the shown text in bytes.
    const MOST: usize = 160;
    let first = text.lines().next().unwrap_or_default();
    let text_shown = start(first, MOST);
    match text_shown.len() < text.len() {
        true => format!("{text_shown}..."),
        false => text_shown.to_owned(),
    }
}

/// Truncates a text to at most `length` bytes.
fn start(text: &str, length: usize) -> &str {
    let mut end = length.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
