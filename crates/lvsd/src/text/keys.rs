//! Reads tables whose keys depend on a kind, such as health checks, and reports unknown keys of any
//! table, with suggestions.

use std::fmt;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use lvs_api::files::open_without_waiting;
use lvs_api::words::meant;
use lvs_core::api::ServiceId;
use serde::Deserialize;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use toml::Spanned;

use super::{Diagnostic, Findings, read_at_most};

/// Maximum size of a file that a key names, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// A TOML value with the positions of all its parts, for tables whose keys depend on a kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// `"..."`
    String(String),
    /// A whole number, limited to the range of `i64`.
    Integer(i64),
    /// A number with a fraction.
    Float(f64),
    /// `true`, `false`
    Boolean(bool),
    /// `[...]`
    Array(Vec<Spanned<Self>>),
    /// `{...}`
    Table(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl Value {
    /// A description of the value for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::String(text) => format!("the string {text:?}"),
            Self::Integer(number) => format!("the number `{number}`"),
            Self::Float(number) => format!("the number `{number}`"),
            Self::Boolean(word) => format!("the word `{word}`"),
            Self::Array(_) => "an array".to_owned(),
            Self::Table(_) => "a table".to_owned(),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_str<E: de::Error>(self, v: &str) -> Result<Value, E> {
                Ok(Value::String(v.to_owned()))
            }

            fn visit_bool<E: de::Error>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Boolean(v))
            }

            fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
                Ok(Value::Float(v))
            }

            fn visit_i64<E: de::Error>(self, v: i64) -> Result<Value, E> {
                Ok(Value::Integer(v))
            }

            fn visit_u64<E: de::Error>(self, v: u64) -> Result<Value, E> {
                Ok(Value::Integer(i64::try_from(v).unwrap_or(i64::MAX)))
            }

            fn visit_i128<E: de::Error>(self, v: i128) -> Result<Value, E> {
                Ok(Value::Integer(if v < 0 { i64::MIN } else { i64::MAX }))
            }

            fn visit_u128<E: de::Error>(self, _: u128) -> Result<Value, E> {
                Ok(Value::Integer(i64::MAX))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = seq.next_element()? {
                    all.push(item);
                }
                Ok(Value::Array(all))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    all.push(entry);
                }
                Ok(Value::Table(all))
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// The keys of a table, and the list to which errors about them are added.
///
/// Each reader reports an invalid value and returns `None`; for a missing key, it returns
/// `Some(None)`.
pub(crate) struct Keys<'a> {
    /// Position of the table in the file.
    pub(crate) table: Range<usize>,
    pub(crate) entries: &'a [(Spanned<String>, Spanned<Value>)],
    pub(crate) text: &'a str,
    /// The service to which the table belongs, if the address of the service is valid.
    pub(crate) service: Option<&'a ServiceId>,
    pub(crate) findings: Findings,
}

impl Keys<'_> {
    /// Position of the whole table.
    pub(crate) fn table(&self) -> Range<usize> {
        self.table.clone()
    }

    /// The service to which the table belongs, if its address is valid.
    pub(crate) const fn service(&self) -> Option<&ServiceId> {
        self.service
    }

    pub(crate) fn report(&mut self, finding: Diagnostic) {
        self.findings.push(finding);
    }

    fn value(&self, key: &str) -> Option<&Spanned<Value>> {
        let mut entries = self.entries.iter();
        entries
            .find(|(name, _)| name.get_ref() == key)
            .map(|(_, value)| value)
    }

    fn wrong_type(&mut self, span: Range<usize>, expected: &str, found: &Value) {
        self.report(
            Diagnostic::error(span, "the value has a wrong type")
                .label(format!("expected {expected}, found {}", found.describe())),
        );
    }

    pub(crate) fn string(&mut self, key: &str) -> Option<Option<String>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        match value.get_ref() {
            Value::String(text) => Some(Some(text.clone())),
            other => {
                self.wrong_type(value.span(), "a string", other);
                None
            }
        }
    }

    /// Reads a whole number within `range`.
    pub(crate) fn number(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<Option<i64>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        match value.get_ref() {
            Value::Integer(number) if range.contains(number) => Some(Some(*number)),
            Value::Integer(_) => {
                let written = self.text.get(value.span()).unwrap_or_default();
                let (first, last) = (range.start(), range.end());
                self.report(
                    Diagnostic::error(value.span(), format!("`{key}` {written} is out of range"))
                        .help(format!("write a number from {first} to {last}")),
                );
                None
            }
            other => {
                self.wrong_type(value.span(), "a whole number", other);
                None
            }
        }
    }

    /// Position of a key's value, or of the table if the key is missing.
    pub(crate) fn place(&self, key: &str) -> Range<usize> {
        self.value(key).map_or_else(|| self.table(), Spanned::span)
    }

    pub(crate) fn boolean(&mut self, key: &str) -> Option<Option<bool>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        match value.get_ref() {
            Value::Boolean(word) => Some(Some(*word)),
            other => {
                self.wrong_type(value.span(), "`true` or `false`", other);
                None
            }
        }
    }

    /// Reads a string or a whole number, as text.
    pub(crate) fn scalar(&mut self, key: &str) -> Option<Option<String>> {
        match self.value(key).map(Spanned::get_ref) {
            Some(Value::Integer(number)) => Some(Some(number.to_string())),
            _ => self.string(key),
        }
    }

    /// Reads one of the words in `known`.
    pub(crate) fn word<T: Clone>(&mut self, key: &str, known: &[(&str, T)]) -> Option<Option<T>> {
        let Some(word) = self.string(key)? else {
            return Some(None);
        };
        if let Some((_, value)) = known.iter().find(|(name, _)| *name == word) {
            return Some(Some(value.clone()));
        }
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let finding = Diagnostic::error(self.place(key), format!("unknown word `{word}`"));
        self.report(match meant(&word, names.iter().copied()) {
            Some(name) => finding.help(format!("did you mean \"{name}\"?")),
            None => finding.help(format!("use one of: {}", names.join(", "))),
        });
        None
    }

    /// Reads a string or an array of strings.
    pub(crate) fn strings(&mut self, key: &str) -> Option<Option<Vec<String>>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        let items = match value.get_ref() {
            Value::String(text) => return Some(Some(vec![text.clone()])),
            Value::Array(items) => items,
            other => {
                self.wrong_type(value.span(), "a string or an array of strings", other);
                return None;
            }
        };
        let mut strings = Vec::new();
        for item in items {
            match item.get_ref() {
                Value::String(text) => strings.push(text.clone()),
                other => {
                    self.wrong_type(item.span(), "a string", other);
                    return None;
                }
            }
        }
        Some(Some(strings))
    }

    /// Reads an array of tables, whose keys must be among `known`.
    pub(crate) fn tables<T>(
        &mut self,
        key: &str,
        known: &[&str],
        mut read: impl FnMut(&mut Keys<'_>) -> Option<T>,
    ) -> Option<Option<Vec<T>>> {
        let Some(value) = self.value(key).cloned() else {
            return Some(None);
        };
        let Value::Array(items) = value.get_ref() else {
            self.wrong_type(value.span(), "an array of tables", value.get_ref());
            return None;
        };
        let mut all = Vec::new();
        for item in items {
            let Value::Table(entries) = item.get_ref() else {
                self.wrong_type(item.span(), "a table", item.get_ref());
                return None;
            };
            for (name, _) in entries {
                if !known.contains(&name.get_ref().as_str()) {
                    self.report(unknown_key(name.span(), name.get_ref(), known));
                    return None;
                }
            }
            let mut keys = Keys {
                table: item.span(),
                entries,
                text: self.text,
                service: self.service,
                findings: Findings::default(),
            };
            let one = read(&mut keys);
            self.findings.append(keys.findings);
            all.push(one?);
        }
        Some(Some(all))
    }

    /// Reads the file that a key names. Reports an unreadable file.
    pub(crate) fn file(&mut self, key: &str) -> Option<Option<Vec<u8>>> {
        let Some(path) = self.string(key)? else {
            return Some(None);
        };
        match read_file(&path) {
            Ok(bytes) => Some(Some(bytes)),
            Err(error) => {
                self.report(
                    Diagnostic::error(self.place(key), format!("cannot read {path:?}: {error}"))
                        .help("write the path of a file that lvsd can read"),
                );
                None
            }
        }
    }

    /// Reads a port number above 0.
    pub(crate) fn port(&mut self, key: &str) -> Option<Option<u16>> {
        let number = self.number(key, 1..=i64::from(u16::MAX))?;
        Some(number.and_then(|port| u16::try_from(port).ok()))
    }
}

pub(crate) fn read_file(path: &str) -> io::Result<Vec<u8>> {
    read_at_most(open_without_waiting(Path::new(path))?, FILE_MAX)
}

/// Renamed, moved and removed keys: each with a key that the table contains today, and the new
/// spelling or the replacement.
const RENAMED: [(&str, &str, &str); 30] = [
    ("in_kernel", "fast_path", "write `fast_path`"),
    ("outlive", "warm_restart", "write `warm_restart`"),
    (
        "adopt",
        "manage_all_services",
        "write `manage_all_services`",
    ),
    (
        "drift",
        "manual_changes",
        "write `manual_changes`, \"revert\" or \"report\"",
    ),
    (
        "max_remove",
        "max_removed_percent",
        "write `max_removed_percent`",
    ),
    ("alpha", "start_down", "write `start_down`"),
    ("omega", "remove_on_exit", "write `remove_on_exit`"),
    ("min_share", "panic_below", "write `panic_below`"),
    ("upper", "resume_below", "write `max_connections`"),
    ("lower", "resume_below", "write `resume_below`"),
    ("drain", "withdraw_delay", "write `withdraw_delay`"),
    ("hold", "hold_without_lvsd", "write `hold_without_lvsd`"),
    ("address", "host_addresses", "write `host_addresses`"),
    ("peers", "mismatch_alarm_after", "write `addresses`"),
    ("wait", "mismatch_alarm_after", "write `connect_timeout`"),
    (
        "alarm",
        "mismatch_alarm_after",
        "write `mismatch_alarm_after`",
    ),
    (
        "token_file",
        "allowed_hosts",
        "write [[api.token]] with `name`, `file` (this path) and role = \"admin\"",
    ),
    ("procfs", "allowed_hosts", PROCFS),
    ("procfs_connections", "allowed_hosts", PROCFS),
    ("role", "ipvs", IPVS),
    ("interface", "ipvs", IPVS),
    ("syncid", "ipvs", IPVS),
    ("group", "ipvs", IPVS),
    ("port", "ipvs", IPVS),
    ("ttl", "ipvs", IPVS),
    ("maxlen", "ipvs", IPVS),
    ("key_file", "ipvs", "write it below [sync.peers]"),
    ("listen", "ipvs", "write it below [sync.peers]"),
    ("wait", "ipvs", "write `connect_timeout` below [sync.peers]"),
    (
        "alarm",
        "ipvs",
        "write `mismatch_alarm_after` below [sync.peers]",
    ),
];

const IPVS: &str = "write it below [sync.ipvs]";
const PROCFS: &str = "write `lvs-run -- COMMAND` to start the program that reads /proc/net/ip_vs*, so that it reads these files of the dataplane; and remove this key";

/// An error about a key that the table does not accept, with a suggestion or the list of keys.
pub(crate) fn unknown_key(span: Range<usize>, key: &str, known: &[&str]) -> Diagnostic {
    let finding =
        Diagnostic::error(span, format!("unknown key `{key}`")).label("not a key of this table");
    let mut renamed = RENAMED.iter();
    let renamed = renamed.find(|(old, beside, _)| *old == key && known.contains(beside));
    if let Some((_, _, help)) = renamed {
        return finding.help(*help);
    }
    match meant(key, known.iter().copied()) {
        Some(word) => finding.help(format!("did you mean `{word}`?")),
        None => finding.help(format!("this table has the keys: {}", known.join(", "))),
    }
}
