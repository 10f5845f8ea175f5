//! `make prose`: counts prose that is hard to read, and fails if a page or a crate exceeds its
//! ceiling.
//!
//! Run it from the root of the project. It prints the rows above their ceilings. `-v` prints all
//! rows in the format of `ceilings.txt`; `-v NAME` prints every place of one page or crate.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

mod text;

use text::{Text, doc_comments, markdown, messages, test_names};

/// Ceilings, one row for each page or crate. A ceiling may only be lowered.
const CEILINGS: &str = include_str!("../ceilings.txt");
/// Ceilings of a page or crate without a row.
const DEFAULT: [usize; COLUMNS] = [4, 3, 2, 5, 0, 0, 0];
const COLUMNS: usize = 7;
const NAMES: [&str; COLUMNS] = [
    "free relatives and indefinite persons in 1,000 words",
    "figurative verbs in 1,000 words",
    "archaic words in 1,000 words",
    "sentences over 35 words in 100",
    "cells over 15 words",
    "doc comments that begin with What, Who or Those",
    "test names without the form unit_condition_result",
];
const PRONOUNS: usize = 0;
const VERBS: usize = 1;
const OLD_WORDS: usize = 2;
const LONG: usize = 3;
const WIDE: usize = 4;
const BEGINS: usize = 5;
const TESTS: usize = 6;
const LONG_SENTENCE: usize = 35;
const WIDE_CELL: usize = 15;

const RELATIVES: &[&str] = &["what", "who", "whom", "whoever", "whomever"];
/// After one of these words, a relative pronoun replaces a noun.
const LEADS: &str = " of to for by with from and or but than as on at in about into that is are was were say says said tell tells told \
    ask asks asked know knows known show shows shown see sees seen do does find finds learn decide decides depends matter matters \
    exactly just only all not if when unless ";
const PERSONS: &str = " somebody someone nobody anybody anyone everybody everyone people ";
const FIGURATIVE: &str =
    " tell tells told telling hear hears heard say says said saying know knows knew known ";
const ARCHAIC: &str = " anew beforehand blanks thereby hereby therein whence hence lest thereof wherein whereupon parted amid amidst nought \
    likewise beside ";
const ARCHAIC_PHRASES: &[&str] = &[
    "all the same",
    "by itself",
    "by themselves",
    "of chance",
    "to be had",
];
/// Words that must not occur in test names, because they name neither unit, condition nor result.
const RIDDLES: &str = " what who whom whoever whatever those nobody somebody anybody everybody told tells tell heard hears knows said says anew beside ";
const FIRST: &str = " a an the it they ";

/// Counts of one page or crate.
#[derive(Default)]
struct Counts {
    words: usize,
    sentences: usize,
    /// Places of the occurrences, by column.
    found: [Vec<String>; COLUMNS],
}

impl Counts {
    fn add(&mut self, text: &Text) {
        for sentence in &text.sentences {
            let words: Vec<String> = sentence.split(' ').map(clean).collect();
            let count = words.iter().filter(|word| !word.is_empty()).count();
            self.words += count;
            self.sentences += 1;
            if count > LONG_SENTENCE && !text.cell {
                self.found[LONG].push(sentence.clone());
            }
            if count > WIDE_CELL && text.cell {
                self.found[WIDE].push(sentence.clone());
            }
            let question = sentence.trim_end().ends_with('?');
            let raw: Vec<&str> = sentence.split(' ').collect();
            for (at, word) in words.iter().enumerate() {
                let before = at
                    .checked_sub(1)
                    .map_or("", |before| words[before].as_str());
                let clause = at == 0 || raw[at - 1].ends_with([',', ':', ';', '(', '—', '–', '.']);
                let free = RELATIVES.contains(&word.as_str())
                    && (clause
                        || word.len() > 4
                        || one_of(LEADS, before)
                        || before == "those"
                        || before == "he");
                let which = word == "which" && before == "that";
                let others = word == "others" && !one_of(" the all these among ", before);
                if (free && !question) || which || others || one_of(PERSONS, word) {
                    self.found[PRONOUNS].push(near(&raw, at));
                }
                if one_of(FIGURATIVE, word) {
                    self.found[VERBS].push(near(&raw, at));
                }
                if one_of(ARCHAIC, word) {
                    self.found[OLD_WORDS].push(near(&raw, at));
                }
            }
            let lower = words.join(" ");
            let phrases = ARCHAIC_PHRASES
                .iter()
                .filter(|phrase| lower.contains(*phrase));
            self.found[OLD_WORDS].extend(phrases.map(|phrase| (*phrase).to_owned()));
        }
        if text.doc && text.begins_with(&["What", "Who", "Whoever", "Whom", "Whatever", "Those"]) {
            self.found[BEGINS].extend(text.sentences.first().cloned());
        }
    }

    /// The row in the format of `ceilings.txt`: occurrences in 1,000 words, long sentences in 100,
    /// then numbers.
    fn row(&self) -> [usize; COLUMNS] {
        std::array::from_fn(|column| {
            let found = self.found[column].len();
            match column {
                PRONOUNS..=OLD_WORDS => (1000 * found).div_ceil(self.words.max(1)),
                LONG => (100 * found).div_ceil(self.sentences.max(1)),
                _ => found,
            }
        })
    }
}

fn clean(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphabetic())
        .to_lowercase()
}

fn one_of(list: &str, word: &str) -> bool {
    !word.is_empty() && list.contains(&format!(" {word} "))
}

fn near(words: &[&str], at: usize) -> String {
    words[at.saturating_sub(4)..words.len().min(at + 5)].join(" ")
}

/// Adds the files below `directory` with this extension to `found`, in sorted order, without those
/// in directories `target` and `corpus`.
fn files(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() && !path.ends_with("target") && !path.ends_with("corpus") {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
}

fn page(path: &Path) -> Counts {
    let mut counts = Counts::default();
    let source = fs::read_to_string(path).unwrap_or_default();
    markdown(&source).iter().for_each(|text| counts.add(text));
    counts
}

fn package(directory: &Path) -> Counts {
    let mut counts = Counts::default();
    let mut sources = Vec::new();
    files(directory, "rs", &mut sources);
    for path in sources {
        let source = fs::read_to_string(&path).unwrap_or_default();
        doc_comments(&source)
            .iter()
            .for_each(|text| counts.add(text));
        for name in test_names(&source) {
            let first = name.split('_').next().unwrap_or_default();
            if one_of(FIRST, first) || name.split('_').any(|word| one_of(RIDDLES, word)) {
                counts.found[TESTS].push(name);
            }
        }
        if !path.components().any(|part| part.as_os_str() == "tests") && !path.ends_with("tests.rs")
        {
            messages(&source).iter().for_each(|text| counts.add(text));
        }
    }
    counts
}

fn ceiling(name: &str) -> [usize; COLUMNS] {
    let row = CEILINGS
        .lines()
        .find(|line| line.split_whitespace().next() == Some(name));
    let mut numbers = row
        .into_iter()
        .flat_map(|row| row.split_whitespace().skip(1))
        .map(str::parse);
    let mut ceilings = DEFAULT;
    if row.is_some() {
        ceilings.fill_with(|| numbers.next().and_then(Result::ok).unwrap_or(0));
    }
    ceilings
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let verbose = arguments.first().is_some_and(|argument| argument == "-v");
    let (mut pages, mut packages) = (Vec::new(), Vec::new());
    files(Path::new("docs"), "md", &mut pages);
    let root = [
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
    ];
    pages.extend(root.map(PathBuf::from));
    packages.extend(
        fs::read_dir("crates")
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path()),
    );
    packages.extend(["benches", "examples", "fuzz"].map(PathBuf::from));
    packages.sort();
    let rows = pages
        .iter()
        .map(|path| (path, page(path)))
        .chain(packages.iter().map(|path| (path, package(path))));
    let mut above = 0;
    for (path, counts) in rows {
        let name = path.display().to_string();
        let (row, ceilings) = (counts.row(), ceiling(&name));
        if verbose && arguments.len() == 1 {
            println!(
                "{name:<32}{}",
                row.map(|number| format!("{number:>6}")).concat()
            );
        }
        for column in 0..COLUMNS {
            if arguments.get(1) == Some(&name) {
                counts.found[column]
                    .iter()
                    .for_each(|place| println!("{}: {place}", NAMES[column]));
            }
            if row[column] > ceilings[column] {
                above += 1;
                let (found, most) = (row[column], ceilings[column]);
                eprintln!(
                    "make prose: {name}: {}: {found}, the ceiling is {most}; `cargo run -p lvs-prose -- -v {name}` shows the places",
                    NAMES[column]
                );
            }
        }
    }
    if pages.len() < 10 || packages.len() < 10 {
        eprintln!("make prose: run it from the root of the project");
        return ExitCode::FAILURE;
    }
    ExitCode::from(u8::from(above > 0))
}
