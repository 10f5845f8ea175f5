//! Reads keepalived's file with its includes like keepalived: lines for some hosts (`@ID`),
//! definitions (`$NAME=`), sequences and lists (`~SEQ`, `~LST`).

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::rc::Rc;

use crate::convert::item::{SourcePlace, shown};
use crate::convert::words::{self, BANG, HASH, Piece, Word};
use crate::convert::{INCLUDES_MAX, LENGTH_MAX, Options, without_mark};

/// Maximum depth of nested blocks, and of nested includes.
pub(super) const DEPTH_MAX: usize = 32;
/// Maximum length of a line with expanded macros, in bytes.
const LINE_MAX: usize = 65_536;
/// Maximum depth of macros that contain other macros.
const MACROS_DEPTH_MAX: usize = 64;
/// Cost of a generated line in addition to its length: it limits the number of empty lines, too.
const LINE_COST: u64 = 16;

/// A line of a file.
#[derive(Clone, Debug)]
pub(super) struct Physical {
    pub(super) text: String,
    pub(super) at: SourcePlace,
    /// Number of includes around the line.
    pub(super) depth: usize,
    /// Whether the line is an `include`. The included lines follow it.
    pub(super) include: bool,
    /// Name of the macro that the line defines.
    pub(super) defines: Option<String>,
    /// Whether the line is only for some hosts (`@ID`).
    pub(super) conditional: bool,
    /// Whether the line continues the definition on the line before it.
    pub(super) continues: bool,
}

impl Physical {
    /// The `include` line of an included file with the directory of this file in the path, for use
    /// in the main file.
    pub(super) fn included_from_elsewhere(&self) -> String {
        let line = words::without_comment(&self.text).trim();
        let word = line.split_whitespace().next().unwrap_or_default();
        let directory = self
            .at
            .file
            .as_deref()
            .map(Path::new)
            .and_then(Path::parent);
        let pattern = included(line).unwrap_or_default();
        let path = directory.unwrap_or(Path::new("")).join(pattern);
        format!("{word} {}", path.display())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Word(Word),
    Open,
    Close,
    End,
}

/// A file with its includes, as lines and as tokens.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub(super) lines: Vec<Physical>,
    /// Tokens, each with the index of its line in `lines`.
    pub(super) tokens: Vec<(Token, usize)>,
    pub(super) lost: Vec<String>,
}

/// A line to read, or a macro to set before the next line.
enum Work {
    Line(String, usize),
    Set(String, String),
}

pub(super) struct Reader<'a> {
    options: &'a Options<'a>,
    source: Source,
    /// Names of the files that are being read, from the main file to the innermost included file.
    open: Vec<String>,
    included: usize,
    macros: HashMap<String, String>,
    /// Macros that are defined only for some hosts, with their positions.
    conditional: HashMap<String, SourcePlace>,
    /// Number of bytes read and expanded so far.
    written: u64,
    /// Number of open blocks, and name of the outermost one.
    depth: usize,
    top: String,
    reported: HashSet<&'static str>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(options: &'a Options<'a>) -> Self {
        Self {
            options,
            source: Source::default(),
            open: Vec::new(),
            included: 0,
            macros: HashMap::new(),
            conditional: HashMap::new(),
            written: 0,
            depth: 0,
            top: String::new(),
            reported: HashSet::new(),
        }
    }

    pub(super) fn read(mut self, name: &str, text: &str) -> Result<Source, String> {
        self.file(name, text)?;
        Ok(self.source)
    }

    fn file(&mut self, name: &str, text: &str) -> Result<(), String> {
        let depth = self.open.len();
        self.open.push(name.to_owned());
        let file: Option<Rc<str>> = (depth > 0).then(|| name.into());
        self.spend(text.len() as u64)?;
        let mut lines = (1..).zip(without_mark(text).lines());
        while let Some((number, text)) = lines.next() {
            let at = SourcePlace {
                file: file.clone(),
                line: number,
            };
            let index = self.push(text, &at, depth);
            let line = words::without_comment(text).trim();
            if included(line).is_some() {
                self.source.lines[index].include = true;
            }
            // A definition continues on the next line if its line ends in a backslash.
            let mut whole = line.to_owned();
            let definition = line.split_whitespace().find(|word| !word.starts_with('@'));
            if let Some((name, _)) = definition.and_then(defined) {
                self.source.lines[index].defines = Some(name.to_owned());
                if let Some(first) = continued(text) {
                    whole = words::without_comment(first).trim().to_owned();
                    whole.push('\n');
                    for (number, text) in lines.by_ref() {
                        let at = SourcePlace {
                            file: file.clone(),
                            line: number,
                        };
                        let index = self.push(text, &at, depth);
                        self.source.lines[index].continues = true;
                        let more = continued(text);
                        whole.push_str(words::without_comment(more.unwrap_or(text)).trim());
                        if more.is_none() {
                            break;
                        }
                        whole.push('\n');
                    }
                }
            }
            self.line(whole, index, &at)?;
        }
        self.open.pop();
        Ok(())
    }

    fn push(&mut self, text: &str, at: &SourcePlace, depth: usize) -> usize {
        self.source.lines.push(Physical {
            text: text.to_owned(),
            at: at.clone(),
            depth,
            include: false,
            defines: None,
            conditional: text.trim_start().starts_with('@'),
            continues: false,
        });
        self.source.lines.len() - 1
    }

    fn spend(&mut self, bytes: u64) -> Result<(), String> {
        self.written += bytes;
        if self.written > LENGTH_MAX {
            return Err(format!(
                "its includes, macros and sequences expand to more than {} MiB; split the file",
                LENGTH_MAX >> 20
            ));
        }
        Ok(())
    }

    fn lose(&mut self, at: &SourcePlace, text: &str, why: &str) {
        let text = shown(text);
        self.source.lost.push(format!("{at}: {text}: {why}"));
    }

    fn include(&mut self, pattern: &str, at: &SourcePlace) -> Result<(), String> {
        let name = self.open.last().cloned().unwrap_or_default();
        let directory = Path::new(&name).parent().unwrap_or(Path::new(""));
        let what = format!("include {pattern}");
        if self.open.len() > DEPTH_MAX {
            self.lose(at, &what, &format!("includes are deeper than {DEPTH_MAX}"));
            return Ok(());
        }
        let files = match (self.options.include)(directory, pattern) {
            Ok(files) => files,
            Err(why) => {
                self.lose(at, &what, &why);
                return Ok(());
            }
        };
        for (name, text) in files {
            if self.open.contains(&name) {
                self.lose(at, &what, &format!("{name} includes itself"));
                continue;
            }
            self.included += 1;
            if self.included > INCLUDES_MAX {
                self.lose(at, &what, &format!("more than {INCLUDES_MAX} files"));
                return Ok(());
            }
            self.file(&name, &text)?;
        }
        Ok(())
    }

    /// Reads a line. `line` contains `\n` if it is a definition of several lines.
    fn line(&mut self, line: String, index: usize, at: &SourcePlace) -> Result<(), String> {
        let mut work = vec![Work::Line(line, 0)];
        while let Some(next) = work.pop() {
            let (line, depth) = match next {
                Work::Set(name, value) => {
                    self.macros.insert(name, value);
                    continue;
                }
                Work::Line(line, depth) => (line, depth),
            };
            let text = line.trim();
            if let Some(rest) = text.strip_prefix('@') {
                let (id, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                if self.is_for_this_host(id, rest, text, at)? {
                    work.push(Work::Line(rest.to_owned(), depth));
                }
                continue;
            }
            if let Some((name, value)) = defined(text) {
                let value = value.trim_start_matches([' ', '\t']);
                // Definitions of several lines usually begin on the line after the name.
                let value = value.strip_prefix('\n').unwrap_or(value);
                self.conditional.remove(name);
                self.macros.insert(name.to_owned(), value.to_owned());
                continue;
            }
            if text.starts_with("~SEQ") || text.starts_with("~LST") {
                self.repeat(text, depth, at, &mut work)?;
                continue;
            }
            // keepalived uses a path in quotes literally.
            let quoted = included(text).is_some() && text.contains('"');
            let replaced = match quoted {
                true => None,
                false => self.replace(text, at)?,
            };
            match replaced {
                // The path, or the whole line, may contain macros.
                None => match included(text) {
                    Some(pattern) => self.include(&pattern, at)?,
                    None => self.words(text, index, at),
                },
                Some(made) => {
                    if depth >= MACROS_DEPTH_MAX || made.len() > LINE_MAX {
                        let why = format!(
                            "its macros make more than {LINE_MAX} bytes, or refer to themselves; the line is left out"
                        );
                        self.lose(at, text, &why);
                        break;
                    }
                    self.spend(made.len() as u64 + LINE_COST)?;
                    let lines = made.split('\n').rev();
                    work.extend(lines.map(|line| Work::Line(line.to_owned(), depth + 1)));
                }
            }
        }
        Ok(())
    }

    /// Whether a line after `@ID` applies to the host that `--config-id` names. Without this
    /// option, the result is `false`: the loss of a line about virtual servers or `SSL` is
    /// reported, and a macro that the line defines has no value.
    ///
    /// # Errors
    /// There is no `--config-id`, and the line opens or closes a block without its other end, or
    /// begins with a macro or a sequence outside of virtual servers and `SSL`.
    fn is_for_this_host(
        &mut self,
        id: &str,
        rest: &str,
        text: &str,
        at: &SourcePlace,
    ) -> Result<bool, String> {
        if let Some(own) = self.options.config_id {
            return Ok(match id.strip_prefix('^') {
                Some(other) => other != own,
                None => id == own,
            });
        }
        let refused = |why: &str| {
            Err(format!(
                "{at}: {}: {why}; name the host with --config-id ID, as `keepalived -i ID` does",
                shown(text)
            ))
        };
        if let Some((name, _)) = defined(rest) {
            self.conditional.insert(name.to_owned(), at.clone());
            self.macros.remove(name);
            return Ok(false);
        }
        let (pieces, _) = words::pieces(rest);
        let count = |what: &Piece| pieces.iter().filter(|piece| *piece == what).count();
        if count(&Piece::Open) != count(&Piece::Close) {
            return refused("the block is for some hosts only");
        }
        let outermost = match self.depth {
            0 => rest,
            _ => self.top.as_str(),
        };
        if outermost.starts_with("virtual_server") || outermost.starts_with("SSL") {
            let why = "the line is for some hosts only: name the host with --config-id ID, as `keepalived -i ID` does";
            self.lose(at, text, why);
        } else if rest.starts_with('$') || rest.starts_with('~') {
            return refused("the line is for some hosts only");
        }
        // Other lines stay in the file for keepalived.
        Ok(false)
    }

    /// Repeats the line after `~SEQ(VAR, FIRST, STEP, LAST)` or `~LST(VAR, VALUE, ...)` for each
    /// value.
    fn repeat(
        &mut self,
        text: &str,
        depth: usize,
        at: &SourcePlace,
        work: &mut Vec<Work>,
    ) -> Result<(), String> {
        let bad =
            "invalid syntax: expected ~SEQ(NAME, FIRST, STEP, LAST) or ~LST(NAME, VALUE, ...)";
        let parts = text
            .split_once('(')
            .and_then(|(word, rest)| Some((word, rest.split_once(')')?)));
        let Some((word, (inner, line))) = parts else {
            self.lose(at, text, bad);
            return Ok(());
        };
        let mut inner = inner.to_owned();
        for _ in 0..MACROS_DEPTH_MAX {
            match self.replace(&inner, at)? {
                Some(made) if made.len() <= LINE_MAX => inner = made,
                _ => break,
            }
        }
        let mut steps = Vec::new();
        let room = LENGTH_MAX.saturating_sub(self.written);
        let each = line.len() as u64 + LINE_COST;
        match word {
            "~SEQ" | "~SEQx" => {
                let Some((name, first, step, last)) = sequence(&inner) else {
                    self.lose(at, text, bad);
                    return Ok(());
                };
                let count =
                    u64::try_from((i128::from(last) - i128::from(first)) / i128::from(step))
                        .map_or(0, |count| count.saturating_add(1));
                if count.saturating_mul(each) > room {
                    self.spend(room + 1)?;
                }
                self.spend(count * each)?;
                let mut value = first;
                for _ in 0..count {
                    let shown = match word {
                        "~SEQx" => format!("{value:x}"),
                        _ => value.to_string(),
                    };
                    steps.push(vec![(name.clone(), shown)]);
                    value = value.saturating_add(step);
                }
            }
            "~LST" => {
                let Some(list) = list(&inner) else {
                    self.lose(at, text, bad);
                    return Ok(());
                };
                self.spend(list.len() as u64 * each)?;
                steps = list;
            }
            _ => {
                self.lose(at, text, bad);
                return Ok(());
            }
        }
        for step in steps.into_iter().rev() {
            work.push(Work::Line(line.trim().to_owned(), depth + 1));
            work.extend(step.into_iter().map(|(name, value)| Work::Set(name, value)));
        }
        Ok(())
    }

    /// Replaces each macro that has a value in a text once; `None` without such macros.
    fn replace(&mut self, text: &str, at: &SourcePlace) -> Result<Option<String>, String> {
        let mut made = String::new();
        let mut rest = text;
        let mut any = false;
        while let Some(dollar) = rest.find('$') {
            made.push_str(&rest[..dollar]);
            rest = &rest[dollar..];
            let value = match name(rest) {
                Some((name, after)) => self.value(name, at, text)?.map(|value| (value, after)),
                None => None,
            };
            match value {
                Some((value, after)) => {
                    any = true;
                    made.push_str(&value);
                    rest = after;
                    if made.len() > LINE_MAX {
                        break;
                    }
                }
                None => {
                    made.push('$');
                    rest = &rest[1..];
                }
            }
        }
        made.push_str(rest);
        Ok(any.then_some(made))
    }

    fn value(
        &mut self,
        name: &str,
        at: &SourcePlace,
        text: &str,
    ) -> Result<Option<String>, String> {
        if let Some(value) = self.macros.get(name) {
            return Ok(Some(value.clone()));
        }
        if let Some(place) = self.conditional.get(name)
            && self.depth > 0
            && self.top.starts_with("virtual_server")
        {
            return Err(format!(
                "{at}: {}: ${name} is defined by a line for some hosts only ({place}); name the host with \
                 --config-id ID, as `keepalived -i ID` does",
                shown(text)
            ));
        }
        let mut words = name.split_whitespace();
        let value = match words.next() {
            Some("_HASH") => HASH.to_string(),
            Some("_BANG") => BANG.to_string(),
            Some("_PWD") => {
                let file = self.open.last().map(Path::new);
                let directory = file.and_then(Path::parent).unwrap_or(Path::new("."));
                directory.display().to_string()
            }
            Some("_INSTANCE") if self.options.config_id.is_some() => {
                self.options.config_id.unwrap_or_default().to_owned()
            }
            Some("_INSTANCE") => {
                if self.reported.insert("_INSTANCE") {
                    self.lose(
                        at,
                        text,
                        "${_INSTANCE} is the name of a host: set it with --config-id ID, as `keepalived -i ID` does",
                    );
                }
                return Ok(None);
            }
            Some("_RANDOM") => {
                let least = words.next().unwrap_or("0").to_owned();
                if self.reported.insert("_RANDOM") {
                    let why =
                        format!("the converter uses no random numbers: ${{_RANDOM}} is {least}");
                    self.lose(at, text, &why);
                }
                least
            }
            _ => return Ok(None),
        };
        Ok(Some(value))
    }

    fn words(&mut self, text: &str, index: usize, at: &SourcePlace) {
        let (pieces, open) = words::pieces(text);
        if open {
            self.lose(
                at,
                text,
                "the quote is not closed: it is read up to the end of the line",
            );
        }
        if self.depth == 0
            && let Some(Piece::Word(word)) = pieces.first()
        {
            self.top.clone_from(&word.text);
        }
        for piece in pieces {
            let token = match piece {
                Piece::Word(word) => Token::Word(word),
                Piece::Open => {
                    self.depth += 1;
                    Token::Open
                }
                Piece::Close => {
                    self.depth = self.depth.saturating_sub(1);
                    Token::Close
                }
            };
            self.source.tokens.push((token, index));
        }
        self.source.tokens.push((Token::End, index));
    }
}

/// Pattern of an `include` statement or one of its variants; `None` for other lines.
fn included(line: &str) -> Option<String> {
    let (word, rest) = line.split_once(char::is_whitespace)?;
    let known = [
        "include", "includer", "includem", "includew", "includeb", "includea",
    ];
    let rest = rest.trim();
    let pattern = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next(),
        None => rest.split_whitespace().next(),
    };
    known
        .contains(&word)
        .then(|| pattern.unwrap_or_default().to_owned())
}

/// The line without its final backslash; `None` without one.
fn continued(line: &str) -> Option<&str> {
    line.trim_end().strip_suffix('\\')
}

/// Parses `$NAME=VALUE`; `None` for other texts.
fn defined(text: &str) -> Option<(&str, &str)> {
    let (name, value) = text.strip_prefix('$')?.split_once('=')?;
    is_name(name).then_some((name, value))
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The macro name at the start of a text, and the rest: `${NAME}`, or `$NAME` before whitespace, a
/// comma, a closing parenthesis or the end. `None` for other texts.
fn name(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_prefix('$')?;
    if let Some(inner) = text.strip_prefix('{') {
        let (name, rest) = inner.split_once('}')?;
        let word = name.split_whitespace().next()?;
        return is_name(word).then_some((name, rest));
    }
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let ends =
        rest.is_empty() || rest.starts_with(|c: char| c.is_whitespace() || matches!(c, ',' | ')'));
    (ends && is_name(name)).then_some((name, rest))
}

/// Macro name, first value, step and last value of a sequence, of which first value and step may be
/// omitted. `None` if the text is invalid.
fn sequence(text: &str) -> Option<(String, i64, i64, i64)> {
    let mut words = text.split(',').map(str::trim);
    let name = words.next().filter(|name| is_name(name))?.to_owned();
    let numbers: Option<Vec<i64>> = words.map(integer).collect();
    let toward = |first: i64, last: i64| if last >= first { 1 } else { -1 };
    let (first, step, last) = match *numbers?.as_slice() {
        [last] => {
            let first = if last > 0 { 1 } else { -1 };
            (first, first, last)
        }
        [first, last] => (first, toward(first, last), last),
        [first, step, last] if step != 0 => (first, step, last),
        _ => return None,
    };
    Some((name, first, step, last))
}

fn integer(text: &str) -> Option<i64> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    let hexadecimal = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"));
    let number = match hexadecimal {
        Some(digits) => i64::from_str_radix(digits, 16),
        None => digits.parse(),
    };
    number.ok()?.checked_mul(sign)
}

/// For each repetition of a list, the macro names with their values; `None` if the text is invalid.
fn list(text: &str) -> Option<Vec<Vec<(String, String)>>> {
    let mut groups = groups(text)?.into_iter();
    let names = groups.next()?;
    if !names.iter().all(|name| is_name(name)) {
        return None;
    }
    groups
        .map(|values| {
            let fits = values.len() == names.len();
            fits.then(|| names.iter().cloned().zip(values).collect())
        })
        .collect()
}

/// Splits a list of words and groups: `a, {b, c}` becomes `[a]` and `[b, c]`. `None` if the text is
/// invalid.
fn groups(text: &str) -> Option<Vec<Vec<String>>> {
    let mut all = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (group, after) = match rest.strip_prefix('{') {
            Some(inner) => {
                let (inner, after) = inner.split_once('}')?;
                let values = inner.split(',').map(|word| word.trim().to_owned());
                (values.collect(), after.trim_start())
            }
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                (vec![rest[..end].trim().to_owned()], &rest[end..])
            }
        };
        all.push(group);
        rest = match after.strip_prefix(',') {
            Some(after) => after.trim_start(),
            None if after.is_empty() => after,
            None => return None,
        };
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalived_sequence_has_default_bounds_and_step_and_invalid_sequence_is_none() {
        let numbers = |text| sequence(text).map(|(_, first, step, last)| (first, step, last));
        assert_eq!(numbers("A, 4, 5"), Some((4, 1, 5)));
        assert_eq!(numbers("A, 5, 4"), Some((5, -1, 4)));
        assert_eq!(numbers("A,3"), Some((1, 1, 3)));
        assert_eq!(numbers("A, -3"), Some((-1, -1, -3)));
        assert_eq!(numbers("A, 0x90, 0x10, 0xc0"), Some((0x90, 0x10, 0xc0)));
        assert_eq!(numbers("A, 1, 0, 2"), None);
        assert_eq!(numbers("A, x"), None);
    }

    #[test]
    fn keepalived_list_of_groups_sets_all_names_and_incomplete_group_returns_none() {
        let pair = |a: &str, b: &str| {
            vec![
                ("A".to_owned(), a.to_owned()),
                ("B".to_owned(), b.to_owned()),
            ]
        };
        assert_eq!(
            list("{A, B}, {10,1},{20, 4}"),
            Some(vec![pair("10", "1"), pair("20", "4")])
        );
        assert_eq!(list("A, 5,6").map(|list| list.len()), Some(2));
        assert_eq!(list("{A, B}, 5"), None);
    }

    #[test]
    fn keepalived_macro_name_ends_at_whitespace_comma_brace_or_parenthesis() {
        assert_eq!(name("$NET"), Some(("NET", "")));
        assert_eq!(name("$NET 80"), Some(("NET", " 80")));
        assert_eq!(name("$FIRST,$LAST"), Some(("FIRST", ",$LAST")));
        assert_eq!(name("$LAST) x"), Some(("LAST", ") x")));
        assert_eq!(name("${NET}1"), Some(("NET", "1")));
        assert_eq!(name("$NET.5"), None);
        assert_eq!(name("$1"), None);
    }
}
