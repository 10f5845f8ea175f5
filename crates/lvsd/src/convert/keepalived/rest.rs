//! Selects the lines that keepalived continues to use: all except those that concern only virtual
//! servers.

use super::outside::is_taken;
use super::source::Source;
use crate::convert::item::{Item, shown};
use crate::convert::words::without_comment;

/// Whether a line is removed from keepalived's file, or remains. Both apply if the line has
/// statements of both kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fate {
    taken: bool,
    /// Whether some words of the line remain.
    kept: bool,
    /// Whether the line is within a block that remains.
    within: bool,
}

/// Returns the text of the lines that keepalived continues to use; empty without such lines.
/// Reports in `lost` if this text lacks lines for some hosts.
pub(super) fn write(source: &Source, items: &[Item], lost: &mut Vec<String>) -> String {
    let kept = |item: &Item| !item.name().is_empty() && !is_taken(item, 0);
    if !items.iter().any(kept) {
        return String::new();
    }
    let mut fates = vec![Fate::default(); source.lines.len()];
    for item in items {
        mark(item, 0, &mut fates);
    }
    if fates.iter().any(|fate| fate.taken && fate.kept) || needs_definitions(source, &fates) {
        if let Some(line) = source.lines.iter().find(|line| line.conditional) {
            lost.push(format!(
                "{}: {}: keepalived's part lacks the lines for some hosts: one line of the file has both virtual servers and other statements",
                line.at,
                shown(line.text.trim())
            ));
        }
        let mut text = String::new();
        for item in items {
            anew(item, 0, &mut text);
        }
        return text;
    }
    let mut text = String::new();
    copy(source, &fates, 0..source.lines.len(), &mut text);
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// Sets the fates of a statement's lines.
fn mark(item: &Item, depth: usize, fates: &mut [Fate]) {
    let (first, last) = item.lines;
    if is_taken(item, depth) {
        for fate in &mut fates[first..=last] {
            fate.taken = true;
        }
        return;
    }
    fates[first].kept = true;
    fates[last].kept = true;
    for fate in &mut fates[first..=last] {
        fate.within = true;
    }
    for item in item.items() {
        mark(item, depth + 1, fates);
    }
}

/// Whether a remaining line uses a macro that a removed line defines.
fn needs_definitions(source: &Source, fates: &[Fate]) -> bool {
    let lines = || source.lines.iter().zip(fates);
    let mut names: Vec<&str> = lines()
        .filter(|(_, fate)| fate.taken)
        .filter_map(|(line, _)| line.defines.as_deref())
        .collect();
    names.sort_unstable();
    names.dedup();
    let used = |text: &str| {
        names.iter().any(|name| {
            text.contains(&format!("${{{name}}}"))
                || text
                    .split_whitespace()
                    .any(|word| word.strip_prefix('$') == Some(name))
        })
    };
    !names.is_empty()
        && lines()
            .filter(|(line, fate)| !fate.taken && line.text.contains('$'))
            .any(|(line, _)| used(&line.text))
}

/// Copies the remaining lines. An `include` is copied if all of its lines remain; otherwise its
/// remaining lines replace it. A comment outside of blocks is copied if the line below it is.
fn copy(source: &Source, fates: &[Fate], range: std::ops::Range<usize>, text: &mut String) {
    let mut at = range.start;
    let mut comments = String::new();
    while at < range.end {
        let line = &source.lines[at];
        let inner = source.lines[at + 1..range.end]
            .iter()
            .take_while(|inner| inner.depth > line.depth)
            .count();
        let within = at + 1..at + 1 + inner;
        let fate = fates[at];
        at = within.end;
        let bare = without_comment(&line.text).trim();
        if fate.taken {
            comments.clear();
        } else if line.include && fates[within.clone()].iter().any(|fate| fate.taken) {
            comments.clear();
            copy(source, fates, within, text);
        } else if line.include && line.depth > 0 {
            text.push_str(&line.included_from_elsewhere());
            text.push('\n');
        } else if bare.is_empty() && !fate.within && !line.continues {
            let empty = line.text.trim().is_empty();
            // Each removed block leaves at most one empty line.
            if empty && !text.is_empty() && !text.ends_with("\n\n") {
                text.push('\n');
            }
            match empty {
                true => comments.clear(),
                false => comments.push_str(&format!("{}\n", line.text)),
            }
        } else {
            text.push_str(&comments);
            comments.clear();
            text.push_str(&line.text);
            text.push('\n');
        }
    }
}

/// Appends a statement to `text`, written from its words instead of copied from the file, without
/// the parts that are removed.
fn anew(item: &Item, depth: usize, text: &mut String) {
    if is_taken(item, depth) {
        return;
    }
    let indent = "    ".repeat(depth);
    let words: Vec<&str> = item.words.iter().map(|word| word.raw.as_str()).collect();
    text.push_str(&format!("{indent}{}", words.join(" ")));
    match &item.block {
        None => text.push('\n'),
        Some(block) => {
            text.push_str(" {\n");
            for item in block {
                anew(item, depth + 1, text);
            }
            text.push_str(&format!("{indent}}}\n"));
        }
    }
}
