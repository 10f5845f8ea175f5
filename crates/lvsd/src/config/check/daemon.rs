//! The daemon's own settings.

use super::Checker;
use crate::config::Daemon;
use crate::config::diagnostic::{Diagnostic, did_you_mean};
use crate::config::raw::RawDaemon;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

impl Checker<'_> {
    pub(super) fn daemon(&mut self, raw: &RawDaemon) -> Daemon {
        let log = raw.log.as_ref();
        if let Some(words) = log
            && let Err((title, help)) = check_filter(words.get_ref())
        {
            self.report(Diagnostic::error(words.span(), title).help(help));
        }
        Daemon {
            adopt: raw.adopt.unwrap_or(false),
            max_remove: self
                .number(raw.max_remove.as_ref(), "`max_remove`", 0..=100)
                .and_then(|percent| u8::try_from(percent).ok()),
            log: log.map(|words| words.get_ref().clone()),
        }
    }
}

/// Whether `words` are a filter of the log: a level, and levels of parts, with commas between.
/// Others would take a misspelt level for the name of a part, and log nothing else.
///
/// # Errors
/// What is wrong, and what to do.
pub(crate) fn check_filter(words: &str) -> Result<(), (String, String)> {
    for word in words.split(',').map(str::trim) {
        let (part, level) = match word.split_once('=') {
            Some((part, level)) => (Some(part), level),
            None => (None, word),
        };
        if !LEVELS.iter().any(|known| known.eq_ignore_ascii_case(level)) {
            let title = format!("`{level}` is not a level of the log");
            let lower = level.to_lowercase();
            return Err(match did_you_mean(&lower, LEVELS) {
                Some(meant) => (title, format!("did you mean \"{meant}\"?")),
                None => (
                    title,
                    format!("write one of {}, or \"lvsd=debug\"", LEVELS.join(", ")),
                ),
            });
        }
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        if let Some(part) = part
            && (part.is_empty() || !part.chars().all(name))
        {
            return Err((
                format!("`{part}` is not a part of the program"),
                "write a level for everything, or \"lvsd=debug\"".to_owned(),
            ));
        }
    }
    Ok(())
}
