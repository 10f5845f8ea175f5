//! Stores the maintenance of a director in the state directory, so that it survives a reboot.

use std::io;
use std::path::{Path, PathBuf};

use lvs_api::daemon::{Maintenance, WORDS_MAX};
use serde::{Deserialize, Serialize};

use crate::clock::{Moment, Now};
use crate::replace::replace_for_good;

/// The stored form of a maintenance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    #[serde(flatten)]
    pub(super) wish: Maintenance,
    /// Start on the boot-time clock. Changes of the wall clock do not affect it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) began: Option<Moment>,
}

impl Kept {
    /// A maintenance that begins now.
    pub(super) fn begin(who: Option<String>, why: Option<String>, now: Now) -> Self {
        Self {
            wish: Maintenance {
                since: now.unix,
                who,
                why,
            },
            began: Some(Moment::new(now.boot)),
        }
    }

    /// The maintenance for `lvsd status`. Its start time follows the present wall clock.
    pub(super) fn shown(&self, now: Now) -> Maintenance {
        let began = self.began.as_ref().and_then(Moment::of_this_boot);
        Maintenance {
            since: began.map_or(self.wish.since, |began| now.unix_of(began)),
            ..self.wish.clone()
        }
    }
}

/// The path of the maintenance file of the daemon whose overrides are at `admin`.
pub fn path(admin: &Path) -> PathBuf {
    let name = admin.to_string_lossy();
    let name = name.strip_suffix(".admin.json").unwrap_or(&name);
    PathBuf::from(format!("{name}.maintenance.json"))
}

/// Reads the stored maintenance; `None` if the file does not exist, because the director is not in
/// maintenance. If the file is unreadable, the director counts as in maintenance, because a broken
/// file must not end maintenance.
pub(super) fn recall(path: &Path) -> Option<Kept> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => return Some(unread(path, &error.to_string())),
    };
    Some(serde_json::from_slice(&text).unwrap_or_else(|error| unread(path, &error.to_string())))
}

fn unread(path: &Path, error: &str) -> Kept {
    let path = path.display();
    tracing::error!(
        "cannot read {path}: {error}; the director counts as in maintenance until `lvsd maintenance off`"
    );
    let wish = Maintenance {
        why: Some("the stored maintenance cannot be read".to_owned()),
        ..Maintenance::default()
    };
    Kept { wish, began: None }
}

/// Checks that the operator's name and the reason are single lines of limited length.
pub(super) fn check(wish: Option<&Maintenance>) -> Result<(), String> {
    let words = wish.into_iter().flat_map(|wish| [&wish.who, &wish.why]);
    for text in words.flatten() {
        if text.chars().count() > WORDS_MAX || text.contains(char::is_control) {
            return Err(format!(
                "use a name and a reason of one line each, of at most {WORDS_MAX} characters"
            ));
        }
    }
    Ok(())
}

pub(super) fn keep(path: &Path, wish: Option<&Kept>) -> Result<(), String> {
    let result = match wish {
        Some(wish) => {
            super::make_directory_of(path);
            serde_json::to_vec(wish)
                .map_err(io::Error::from)
                .and_then(|text| replace_for_good(path, &text, 0o600))
        }
        None => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    };
    result.map_err(|error| {
        format!(
            "the change was undone, because it cannot be stored in {}: {error}; permit lvsd to write there, or use another directory with --state",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maintenance_reason_of_several_lines_or_above_200_characters_is_refused() {
        let parsed = |why: String| {
            check(Some(&Maintenance {
                why: Some(why),
                ..Maintenance::default()
            }))
        };
        assert_eq!(parsed("ä".repeat(200)), Ok(()));
        let refused = parsed("ä".repeat(201)).unwrap_err();
        assert!(
            refused.contains("at most 200"),
            "no `at most 200` in {refused}"
        );
        parsed("x\ny".to_owned()).unwrap_err();
    }

    #[test]
    fn maintenance_continues_with_damaged_file_and_ends_when_file_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = path(&directory.path().join("x.admin.json"));
        assert!(path.ends_with("x.maintenance.json"));
        assert!(recall(&path).is_none());
        std::fs::write(&path, "{").unwrap();
        assert!(recall(&path).is_some());
        keep(&path, None).unwrap();
        keep(&path, None).unwrap();
        assert!(recall(&path).is_none());
    }
}
