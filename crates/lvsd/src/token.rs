//! The tokens that allow changes over TCP.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lvs_api::files::open_without_waiting;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// Permitted lengths of a token, in characters.
const LENGTH: std::ops::RangeInclusive<usize> = 16..=256;

/// Rights of a client. Each role includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads, as clients without a token do.
    Read,
    /// Sets the administrative state of servers.
    Drain,
    /// Makes all changes.
    Admin,
}

impl Role {
    /// Names of the roles in the configuration file.
    pub const WORDS: [(&str, Self); 3] = [
        ("read", Self::Read),
        ("drain", Self::Drain),
        ("admin", Self::Admin),
    ];

    /// Returns the name of the role in the configuration file.
    pub fn word(self) -> &'static str {
        Self::WORDS[self as usize].0
    }
}

/// A token of `[[api.token]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name of the client.
    pub name: String,
    /// The file with the token.
    pub file: PathBuf,
    /// The rights of the client.
    pub role: Role,
}

/// Reads all tokens, which must differ, and returns them and the errors. If the file of a token is
/// unusable, the previous token of the same name in `before` stays valid, unless another name has
/// this token now.
pub(crate) fn read_all(
    all: Vec<Named>,
    before: &[(Named, Token)],
) -> (Vec<(Named, Token)>, Vec<String>) {
    let (mut tokens, mut unusable) = (Vec::<(Named, Token)>::new(), Vec::new());
    for named in all {
        let token = Token::read(&named.file);
        let same = tokens.iter().find(|(_, other)| token.as_ref() == Ok(other));
        let same = same.map(|(other, _)| {
            format!(
                "it is also the token of `{}`; make one for each name",
                other.name
            )
        });
        match same.map_or(token, Err) {
            Ok(token) => tokens.push((named, token)),
            Err(why) => unusable.push((named, why)),
        }
    }
    let mut errors = Vec::new();
    for (named, why) in unusable {
        let old = before.iter().find(|(old, _)| old.name == named.name);
        let old = old.filter(|(_, old)| tokens.iter().all(|(_, token)| token != old));
        let state = match old {
            Some(_) => "its previous content stays valid",
            None => "no client can use it",
        };
        errors.push(format!("token `{}`: {why}; until then {state}", named.name));
        tokens.extend(old.map(|(_, token)| (named, token.clone())));
    }
    (tokens, errors)
}

/// Returns the owner of the token `words`, or `None` if no token is equal to it. Compares all
/// tokens, so that the duration does not reveal which one matches.
pub(crate) fn owner<'a>(all: &'a [(Named, Token)], words: &[u8]) -> Option<&'a Named> {
    all.iter().fold(None, |found, (named, token)| {
        let is = token.is(words);
        found.or(is.then_some(named))
    })
}

/// A secret token, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    #[cfg(test)]
    pub(crate) fn for_tests(words: &str) -> Self {
        Self(words.to_owned())
    }

    /// Reads the token in a file.
    ///
    /// # Errors
    /// The path cannot be read or is no regular file, or the file belongs to another user or is
    /// accessible to other users. Or the content is not one line of 16 to 256 printable characters
    /// without whitespace. The text contains the reason and the fix.
    pub fn read(path: &Path) -> Result<Self, String> {
        let name = path.display();
        let make = format!("make one: `(umask 077; head -c 24 /dev/urandom | base64 >{name})`");
        let file = open_without_waiting(path)
            .map_err(|error| format!("cannot read the token in {name}: {error}; {make}"))?;
        let meta = file
            .metadata()
            .map_err(|error| format!("cannot read the token in {name}: {error}; {make}"))?;
        if !meta.is_file() {
            return Err(format!("{name} is not a file with a token; {make}"));
        }
        if meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(format!(
                "the token in {name} belongs to another user, who can change it: `chown root {name}`"
            ));
        }
        if meta.mode() & 0o077 != 0 {
            return Err(format!(
                "other users may read or write the token in {name}: `chmod 600 {name}`"
            ));
        }
        let mut text = String::new();
        file.take(4096)
            .read_to_string(&mut text)
            .map_err(|error| format!("cannot read the token in {name}: {error}; {make}"))?;
        let token = text.trim_end_matches(['\n', '\r']);
        if !LENGTH.contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!(
                "the token in {name} is not one line of {} to {} printable characters without whitespace; {make}",
                LENGTH.start(),
                LENGTH.end()
            ));
        }
        Ok(Self(token.to_owned()))
    }

    /// Whether `words` are the token, compared in constant time.
    pub fn is(&self, words: &[u8]) -> bool {
        let mut padded = [0; *LENGTH.end() + 1];
        let mut own = padded;
        own[..self.0.len()].copy_from_slice(self.0.as_bytes());
        let len = words.len().min(padded.len());
        padded[..len].copy_from_slice(&words[..len]);
        // The last byte of `own` is always zero, so that a longer text cannot match.
        bool::from(own.ct_eq(&padded)) && words.len() == self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn token_with_any_difference_is_refused() {
        let token = Token("0123456789abcdef".to_owned());
        assert!(token.is(b"0123456789abcdef"));
        for other in [
            &b""[..],
            b"0123456789abcde",
            b"0123456789abcdeF",
            b"0123456789abcdef0",
            b"0123456789abcdef\0",
            &[b'0'; 5000],
        ] {
            assert!(!token.is(other), "{:?}", String::from_utf8_lossy(other));
        }
        let long = Token("x".repeat(*LENGTH.end()));
        assert!(long.is("x".repeat(256).as_bytes()));
        assert!(!long.is("x".repeat(257).as_bytes()));
        assert!(!long.is("x".repeat(300).as_bytes()));
        assert_eq!(format!("{token:?}"), "Token");
    }

    #[test]
    fn previous_token_of_unusable_file_is_dropped_only_if_another_name_has_the_token() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let named = |name: &str| Named {
            name: name.to_owned(),
            file: directory.path().join(name),
            role: Role::Drain,
        };
        let write = |name: &str, token: &str| {
            std::fs::write(directory.path().join(name), token).expect("the file can be written");
            let private = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(directory.path().join(name), private)
                .expect("the permissions can be set");
        };
        let (one, two) = ("0123456789abcdef", "fedcba9876543210");
        let read = |before: &[(Named, Token)]| read_all(vec![named("ann"), named("bob")], before);
        let name_of = |all: &[(Named, Token)], token: &str| {
            owner(all, token.as_bytes()).map(|named| named.name.clone())
        };
        write("ann", one);
        write("bob", two);
        let (before, errors) = read(&[]);
        assert_eq!((before.len(), errors), (2, Vec::new()));
        // The file of bob has the token of ann now, and the file of ann is unusable.
        write("ann", "");
        write("bob", one);
        let (after, errors) = read(&before);
        assert_eq!(name_of(&after, one).as_deref(), Some("bob"));
        assert_eq!((after.len(), name_of(&after, two)), (1, None));
        assert!(errors[0].contains("token `ann`"), "{errors:?}");
        assert!(errors[0].contains("no client can use it"), "{errors:?}");
        // As long as no other name has it, the previous token stays valid.
        write("bob", two);
        let (after, errors) = read(&before);
        assert_eq!(name_of(&after, one).as_deref(), Some("ann"));
        assert!(
            errors[0].contains("previous content stays valid"),
            "{errors:?}"
        );
    }

    #[test]
    fn token_file_that_is_short_readable_by_group_missing_or_no_file_is_refused() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file can be created");
        let read = |file: &tempfile::NamedTempFile| Token::read(file.path());
        assert!(read(&file).unwrap_err().contains("16 to 256"));
        writeln!(file, "0123456789abcdef").expect("the file can be written");
        assert!(read(&file).is_ok());
        let public = std::fs::Permissions::from_mode(0o640);
        std::fs::set_permissions(file.path(), public).expect("the permissions can be set");
        assert!(read(&file).unwrap_err().contains("chmod 600"));
        let none = Path::new("/nonexistent/token");
        assert!(Token::read(none).unwrap_err().contains("umask 077"));
        assert!(
            Token::read(Path::new("/"))
                .unwrap_err()
                .contains("not a file")
        );
    }
}
