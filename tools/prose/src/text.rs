//! Extracts prose: sentences of Markdown pages, doc comments and messages; names of tests.

/// A paragraph, a cell of a table or a message.
#[derive(Default)]
pub(crate) struct Text {
    pub(crate) sentences: Vec<String>,
    pub(crate) cell: bool,
    /// Whether the text is the first paragraph of a doc comment.
    pub(crate) doc: bool,
}

impl Text {
    fn new(words: &str) -> Self {
        Self {
            sentences: sentences(&plain(words)),
            ..Self::default()
        }
    }

    pub(crate) fn begins_with(&self, words: &[&str]) -> bool {
        let first = self
            .sentences
            .first()
            .and_then(|sentence| sentence.split([' ', ',', '\'']).next());
        first.is_some_and(|first| words.contains(&first))
    }
}

/// Removes emphasis and the targets of links; code in backticks becomes one word.
fn plain(words: &str) -> String {
    let mut plain = String::new();
    for (at, part) in words.split('`').enumerate() {
        plain.push_str(if at % 2 == 1 { "X" } else { part });
    }
    let mut out = String::new();
    let mut rest = plain.as_str();
    while let Some(at) = rest.find("](") {
        out.push_str(&rest[..at]);
        rest = rest[at..].find(')').map_or("", |end| &rest[at + end + 1..]);
    }
    out.push_str(rest);
    out.retain(|c| !matches!(c, '*' | '[' | ']' | '!'));
    out.split_whitespace()
        .filter(|word| !word.contains("://"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Splits text into sentences of two or more words, which end at `.`, `?`, `!` or `:` before an
/// upper-case letter, quote or parenthesis.
fn sentences(words: &str) -> Vec<String> {
    let mut sentences: Vec<String> = Vec::new();
    let mut current: Vec<&str> = Vec::new();
    let mut words = words.split(' ').filter(|word| !word.is_empty()).peekable();
    while let Some(word) = words.next() {
        current.push(word);
        let ends = word
            .trim_end_matches([')', '"'])
            .ends_with(['.', '?', '!', ':']);
        let begins = words.peek().is_none_or(|next| {
            next.starts_with(|c: char| c.is_uppercase() || matches!(c, '"' | '('))
        });
        if (ends && begins) || words.peek().is_none() {
            if current.len() > 1 {
                sentences.push(current.join(" "));
            }
            current.clear();
        }
    }
    sentences
}

pub(crate) fn markdown(source: &str) -> Vec<Text> {
    let (mut texts, mut paragraph, mut code) = (Vec::new(), String::new(), false);
    for line in source.lines().map(str::trim).chain([""]) {
        if line.starts_with("```") {
            code = !code;
        }
        let item = line.starts_with("* ")
            || line.starts_with("- ")
            || line
                .split_once(". ")
                .is_some_and(|(n, _)| n.parse::<u8>().is_ok());
        if line.is_empty() || code || item || line.starts_with(['|', '#', '`']) {
            texts.push(Text::new(&std::mem::take(&mut paragraph)));
        }
        if code || line.starts_with("```") {
        } else if line.starts_with('|') {
            let cells = line.trim_matches('|').replace("\\|", "/");
            texts.extend(cells.split('|').map(|cell| Text {
                sentences: vec![plain(cell)],
                cell: true,
                doc: false,
            }));
        } else {
            paragraph.push_str(line.trim_start_matches(['#', '>', '*', '-', ' ']));
            paragraph.push(' ');
        }
    }
    texts
}

pub(crate) fn doc_comments(source: &str) -> Vec<Text> {
    let (mut texts, mut comment) = (Vec::new(), String::new());
    for line in source.lines().map(str::trim).chain([""]) {
        let doc = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        match doc.filter(|rest| !rest.starts_with('/')) {
            Some(rest) => {
                comment.push_str(rest.trim());
                comment.push('\n');
            }
            None if comment.is_empty() => {}
            None => {
                let mut paragraphs = markdown(&std::mem::take(&mut comment));
                paragraphs.retain(|text| !text.sentences.is_empty());
                if let Some(first) = paragraphs.first_mut() {
                    first.doc = true;
                }
                texts.append(&mut paragraphs);
            }
        }
    }
    texts
}

/// String literals of at least four words before the inline tests: messages, `--help` texts,
/// reasons.
pub(crate) fn messages(source: &str) -> Vec<Text> {
    let code = source
        .split("#[cfg(test)]\nmod ")
        .next()
        .unwrap_or_default();
    let lines: Vec<&str> = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = lines.join("\n").replace("\\\"", "'").replace("'\"'", "");
    let strings = code.split('"').skip(1).step_by(2);
    let strings = strings.map(|string| string.replace("\\n", " ").replace('\\', " "));
    let prose = |string: &String| {
        string
            .split_whitespace()
            .filter(|word| {
                word.chars()
                    .all(|c| c.is_alphabetic() || ",.:;'".contains(c))
            })
            .count()
            >= 4
    };
    strings
        .filter(prose)
        .map(|string| Text::new(&string))
        .collect()
}

pub(crate) fn test_names(source: &str) -> Vec<String> {
    let (mut names, mut test) = (Vec::new(), false);
    for line in source.lines().map(str::trim) {
        test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        let function = line
            .strip_prefix("async ")
            .unwrap_or(line)
            .strip_prefix("fn ");
        if let Some((name, _)) = function.and_then(|rest| rest.split_once('(')) {
            names.extend(std::mem::take(&mut test).then(|| name.to_owned()));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_table_yields_cells_and_code_is_skipped() {
        let texts = markdown("One thing. Two things.\n```sh\nwho am i\n```\n| a b | c d |\n");
        let sentences: Vec<&str> = texts
            .iter()
            .flat_map(|text| &text.sentences)
            .map(String::as_str)
            .collect();
        assert_eq!(sentences, ["One thing.", "Two things.", "a b", "c d"]);
    }

    #[test]
    fn doc_comment_with_code_and_link_becomes_plain_sentence() {
        let texts = doc_comments("/// What [`Net`](x::Net) needs of `a b`.\nstruct Net;\n");
        assert_eq!(texts[0].sentences, ["What X needs of X."]);
        assert!(texts[0].doc && texts[0].begins_with(&["What"]));
    }

    #[test]
    fn only_string_of_four_words_outside_comments_and_tests_is_message() {
        let found = messages(
            "// \"not this one here\"\nf(\"x\", \"the table is \\\n   full\");\n#[cfg(test)]\nmod tests { \"a b c d\" }",
        );
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].sentences, ["the table is full"]);
    }

    #[test]
    fn only_names_of_test_functions_are_extracted() {
        let source = "#[test]\nfn first() {}\nfn helper() {}\n#[tokio::test(start_paused = true)]\nasync fn second() {}";
        assert_eq!(test_names(source), ["first", "second"]);
    }
}
