//! Checks `[lvsd]`: the daemon's own settings.

use std::time::Duration;

use lvs_api::words::meant;

use super::Checker;
use crate::config::raw::RawDaemon;
use crate::config::{Daemon, OnDrift};
use crate::notify_command::{self, Notice};
use crate::text::Diagnostic;

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
            confine: self.one_of(raw.confine.as_ref(), &["off", "auto"]),
            adopt: raw.manage_all_services.unwrap_or(false),
            max_remove: self
                .number(
                    raw.max_removed_percent.as_ref(),
                    "`max_removed_percent`",
                    0..=100,
                )
                .and_then(|percent| u8::try_from(percent).ok()),
            log: log.map(|words| words.get_ref().clone()),
            on_drift: self
                .word(
                    raw.manual_changes.as_ref(),
                    &[("revert", OnDrift::Repair), ("report", OnDrift::Report)],
                )
                .unwrap_or_default(),
            notify: Notice {
                words: self.notify(raw),
                user: self.notify_user(raw),
                limit: raw
                    .notify_timeout
                    .as_ref()
                    .map_or(Notice::default().limit, |time| time.get_ref().0),
            },
        }
    }
}

impl Checker<'_> {
    /// Returns the user and group id with which the notification program runs: the ids of
    /// `notify_user`, or of the user `nobody` if this key is missing or its user is unknown.
    /// Returns `None` if no notification program is set.
    fn notify_user(&mut self, raw: &RawDaemon) -> Option<(u32, u32)> {
        raw.notify.as_ref()?;
        let name = raw
            .notify_user
            .as_ref()
            .map_or("nobody", |name| name.get_ref());
        let user = notify_command::user(name);
        if let (None, Some(name)) = (user, &raw.notify_user) {
            self.report(
                Diagnostic::error(
                    name.span(),
                    format!("this host has no user `{}`", name.get_ref()),
                )
                .help("`getent passwd` lists the users"),
            );
        }
        // The conventional ids of the user `nobody`.
        Some(user.unwrap_or((65_534, 65_534)))
    }

    /// Checks the notification program, and returns it with its arguments; empty without `notify`.
    fn notify(&mut self, raw: &RawDaemon) -> Vec<String> {
        if let Some(time) = &raw.notify_timeout
            && !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&time.get_ref().0)
        {
            self.report(
                Diagnostic::error(time.span(), "`notify_timeout` is out of range")
                    .help("use a time from \"100ms\" to \"10m\""),
            );
        }
        let Some(words) = &raw.notify else {
            return Vec::new();
        };
        let all = &words.get_ref().0;
        if !all.first().is_some_and(|program| program.starts_with('/')) {
            self.report(
                Diagnostic::error(words.span(), "`notify` is not the path of a program").help(
                    "write notify = \"/usr/local/bin/on-event\", or an array of the program and its arguments",
                ),
            );
        }
        all.clone()
    }
}

/// Checks that `words` are a filter of the log: a level, and levels of modules, separated by
/// commas. The parser of the log's crate would accept a misspelt level as the name of a module, and
/// disable all other messages.
///
/// # Errors
/// The error and its fix.
pub(crate) fn check_filter(words: &str) -> Result<(), (String, String)> {
    for word in words.split(',').map(str::trim) {
        let (part, level) = match word.split_once('=') {
            Some((part, level)) => (Some(part), level),
            None => (None, word),
        };
        if !LEVELS.iter().any(|known| known.eq_ignore_ascii_case(level)) {
            let title = format!("`{level}` is not a log level");
            let lower = level.to_lowercase();
            return Err(match meant(&lower, LEVELS) {
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
                format!("`{part}` is not the name of a module"),
                "write a level for all modules, or a module and its level: \"lvsd=debug\""
                    .to_owned(),
            ));
        }
    }
    Ok(())
}
