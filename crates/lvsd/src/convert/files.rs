//! Reads files to convert, and files that they include.

use std::io::Read as _;
use std::path::{Component, Path, PathBuf};

use super::LENGTH_MAX;

/// Maximum number of patterns from braces, and of files that match a pattern.
const MATCHES_MAX: usize = 1024;

/// Reads the text of a file.
///
/// # Errors
/// The file cannot be read or is too long; the text is the reason.
pub fn read(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(LENGTH_MAX + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    if bytes.len() as u64 > LENGTH_MAX {
        return Err(format!(
            "{} is longer than {} MiB; name the intended file, or split it",
            path.display(),
            LENGTH_MAX >> 20
        ));
    }
    // Comments in old files may use any character set.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Names and texts of the files in a directory that match a pattern (glob(7), with braces).
///
/// # Errors
/// No regular file matches, too many files match, or one cannot be read; the text is the reason.
pub fn included(directory: &Path, pattern: &str) -> Result<Vec<(String, String)>, String> {
    let mut paths = Vec::new();
    for pattern in braces(pattern)? {
        let mut found = glob(directory, &pattern)?;
        found.sort();
        paths.append(&mut found);
    }
    let there = paths.iter().find(|path| !path.is_file());
    let why = match there {
        Some(path) if path.is_dir() => format!("{} is a directory", path.display()),
        Some(path) => format!("{} is not a regular file", path.display()),
        None => "no such file".to_owned(),
    };
    paths.retain(|path| path.is_file());
    if paths.is_empty() {
        return Err(why);
    }
    paths
        .into_iter()
        .map(|path| read(&path).map(|text| (path.display().to_string(), text)))
        .collect()
}

/// Expands braces: `a{b,c{d,e}}` becomes `ab`, `acd` and `ace`.
fn braces(pattern: &str) -> Result<Vec<String>, String> {
    let mut done = Vec::new();
    let mut open = vec![pattern.to_owned()];
    while let Some(next) = open.pop() {
        if done.len() + open.len() >= MATCHES_MAX {
            return Err(format!(
                "its braces expand to more than {MATCHES_MAX} names"
            ));
        }
        match first_braces(&next) {
            None => done.push(next),
            Some((before, choices, after)) => open.extend(
                choices
                    .iter()
                    .rev()
                    .map(|choice| format!("{before}{choice}{after}")),
            ),
        }
    }
    Ok(done)
}

/// The text before the first braces, the alternatives in them, and the text after them; `None`
/// without complete braces.
fn first_braces(text: &str) -> Option<(&str, Vec<&str>, &str)> {
    let open = text.find('{')?;
    let mut depth = 0;
    let mut begin = open + 1;
    let mut choices = Vec::new();
    for (at, c) in text[open..].char_indices() {
        let at = open + at;
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => {
                choices.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
        if depth == 0 {
            choices.push(&text[begin..at]);
            return Some((&text[..open], choices, &text[at + 1..]));
        }
    }
    None
}

/// The existing paths below `directory` that match a pattern without braces. `Err` is the reason if
/// too many match.
pub(super) fn glob(directory: &Path, pattern: &str) -> Result<Vec<PathBuf>, String> {
    let mut paths = vec![directory.to_owned()];
    for component in Path::new(pattern).components() {
        let name = match component {
            Component::Normal(name) => name.to_string_lossy().into_owned(),
            other => {
                for path in &mut paths {
                    path.push(other);
                }
                continue;
            }
        };
        if !name.contains(['*', '?', '[']) {
            for path in &mut paths {
                path.push(name.replace('\\', ""));
            }
            paths.retain(|path| path.symlink_metadata().is_ok());
            continue;
        }
        let wanted: Vec<char> = name.chars().collect();
        let mut found = Vec::new();
        for path in &paths {
            let place = if path.as_os_str().is_empty() {
                Path::new(".")
            } else {
                path
            };
            for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
                let name: Vec<char> = entry.file_name().to_string_lossy().chars().collect();
                let hidden = name.first() == Some(&'.') && wanted.first() != Some(&'.');
                if !hidden && fits(&wanted, &name) {
                    found.push(path.join(entry.file_name()));
                }
            }
            if found.len() > MATCHES_MAX {
                return Err(format!("more than {MATCHES_MAX} files match"));
            }
        }
        paths = found;
    }
    Ok(paths)
}

/// Whether a name matches a pattern with `*`, `?` and `[...]`, in time proportional to the product
/// of both lengths.
fn fits(pattern: &[char], name: &[char]) -> bool {
    let (mut p, mut n) = (0, 0);
    // The position of the last `*`, and the end of the text that it has matched so far.
    let mut star = None::<(usize, usize)>;
    loop {
        let step = match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
                continue;
            }
            None if n == name.len() => return true,
            Some(_) if n < name.len() => one(&pattern[p..], name[n]),
            _ => None,
        };
        match (step, star) {
            (Some(length), _) => {
                p += length;
                n += 1;
            }
            (None, Some((at, tried))) if tried < name.len() => {
                star = Some((at, tried + 1));
                (p, n) = (at + 1, tried + 1);
            }
            _ => return false,
        }
    }
}

/// Length of the part at the start of a pattern that matches `c`; `None` if it does not match.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', literal, ..] => (*literal == c).then_some(2),
        ['[', rest @ ..] => {
            let negated = matches!(rest.first(), Some('!' | '^'));
            let set = &rest[usize::from(negated)..];
            // A bracket at the beginning of a set is one of its characters.
            let Some(end) = (1..set.len()).find(|at| set[*at] == ']') else {
                return (c == '[').then_some(1);
            };
            let mut within = &set[..end];
            let mut found = false;
            while let [first, more @ ..] = within {
                (found, within) = match more {
                    ['-', last, after @ ..] => (found || (*first..=*last).contains(&c), after),
                    after => (found || *first == c, after),
                };
            }
            (found != negated).then_some(end + 2 + usize::from(negated))
        }
        [literal, ..] => (*literal == c).then_some(1),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn include_pattern_matches_names_like_glob() {
        let is_match = |pattern: &str, name: &str| {
            let chars = |text: &str| text.chars().collect::<Vec<char>>();
            fits(&chars(pattern), &chars(name))
        };
        for (pattern, name, expected) in [
            ("*.conf", "a.conf", true),
            ("*.conf", "a.conf~", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("?.inc", "x.inc", true),
            ("?.inc", ".inc", false),
            ("[xy].inc", "y.inc", true),
            ("[a-c]", "b", true),
            ("[!a-c]", "b", false),
            ("[!a-c]", "d", true),
            ("[]x]", "]", true),
            ("[x", "[x", true),
            ("*", "", true),
        ] {
            assert_eq!(is_match(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn braces_of_include_pattern_are_expanded_and_too_many_alternatives_refused() {
        assert_eq!(
            braces("a{b,c{d,e},}f").unwrap(),
            ["abf", "acdf", "acef", "af"]
        );
        assert_eq!(braces("a{b").unwrap(), ["a{b"]);
        assert!(braces(&"{a,b}".repeat(40)).is_err());
    }

    #[test]
    fn include_pattern_returns_matching_files_in_order_or_reason() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("b.conf"), "b").unwrap();
        std::fs::write(at("a.conf"), "a").unwrap();
        std::fs::write(at(".hidden.conf"), "h").unwrap();
        std::fs::create_dir(at("d")).unwrap();
        let texts = |pattern: &str| -> Result<Vec<String>, String> {
            let all = included(directory.path(), pattern)?;
            Ok(all.into_iter().map(|(_, text)| text).collect())
        };
        assert_eq!(texts("*.conf").unwrap(), ["a", "b"]);
        assert_eq!(texts("{b,a}.conf").unwrap(), ["b", "a"]);
        assert_eq!(texts("./d/../[ab].conf").unwrap(), ["a", "b"]);
        assert_eq!(texts("c.conf").unwrap_err(), "no such file");
        assert!(texts("d").unwrap_err().ends_with("is a directory"));
        assert_eq!(
            included(Path::new("/"), "dev/null").unwrap_err(),
            "/dev/null is not a regular file"
        );
    }

    #[test]
    fn file_longer_than_16_mib_is_refused_by_converter() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("long.conf");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(LENGTH_MAX).unwrap();
        assert!(read(&path).is_ok());
        file.set_len(LENGTH_MAX + 1).unwrap();
        let refused = read(&path).unwrap_err();
        assert!(
            refused.contains("longer than 16 MiB"),
            "no `longer than 16 MiB` in {refused}"
        );
        assert_eq!(included(directory.path(), "*.conf").unwrap_err(), refused);
    }
}
