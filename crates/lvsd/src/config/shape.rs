//! Converts the TOML tree of a file to [`RawConfig`], and reports misspelt keys and values of a
//! wrong type, not only the first one.
//!
//! serde stops at the first error. Therefore this module removes the faulty part and reads the rest
//! again: separately for each service, server and rule, and for all unknown keys of a table at
//! once. The cost is thus proportional to the length of the file.

use std::borrow::Cow;
use std::mem::discriminant;
use std::ops::Range;

use lvs_core::mark::RULES_MAX;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, ValueDeserializer};

use super::raw::{Addresses, DEFAULTS, RawConfig, RawService, RawTarget};
use super::syntax;
use crate::text::{Diagnostic, Findings, unknown_key};

/// Position of a value that is not in the text, such as a default.
pub(super) const NOWHERE: Range<usize> = usize::MAX..usize::MAX;

/// Maximum number of services. Each needs some kilobytes of memory, even if its text is short.
pub(crate) const SERVICES_MAX: usize = 100_000;

/// Reads all valid parts of `text`, and reports the errors; `None` if `text` is not TOML or nothing
/// in it is valid. `defaults` is the text of `[defaults]`, unless `text` itself contains that
/// table.
pub(super) fn shape(text: &str, defaults: &str) -> (Option<RawConfig>, Findings) {
    let tree = match syntax::parse(text) {
        Ok(tree) => tree,
        Err(findings) => return (None, findings),
    };
    let mut reader = Reader {
        text,
        findings: Findings::default(),
    };
    let (defaults, _) = DeTable::parse_recoverable(defaults);
    let raw = reader.file(tree, nowhere(defaults.into_inner()));
    (raw, reader.findings)
}

/// Returns the syntax errors of a main file that has a directory `conf.d` next to it.
pub(super) fn main_file(text: &str) -> Findings {
    match syntax::parse(text) {
        Ok(_) => Findings::default(),
        Err(findings) => findings,
    }
}

/// Checks a file of `conf.d`, which may contain only `[[service]]` and `[[mark]]`.
pub(super) fn part(text: &str) -> Findings {
    let tree = match syntax::parse(text) {
        Ok(tree) => tree,
        Err(findings) => return findings,
    };
    let mut reader = Reader {
        text,
        findings: Findings::default(),
    };
    let mut table = tree.into_inner();
    reader.orphans(&mut table);
    for (key, value) in &table {
        let name = key.get_ref().as_ref();
        let finding = match value.get_ref() {
            DeValue::Array(_) if matches!(name, "service" | "mark") => continue,
            DeValue::Array(_) | DeValue::Table(_) if matches!(name, "service" | "mark") => {
                Diagnostic::error(key.span(), format!("`{name}` must be an array of tables"))
                    .help(format!("write [[{name}]]"))
            }
            DeValue::Table(_) => {
                Diagnostic::error(key.span(), format!("[{name}] belongs in the main file"))
                    .help("a file of conf.d has [[service]] and [[mark]] only")
            }
            _ => Diagnostic::error(key.span(), format!("`{name}` is outside of all tables"))
                .help("a file of conf.d has [[service]] and [[mark]] only"),
        };
        reader.findings.push(finding);
    }
    reader.findings
}

/// Checks the text of a service in etcd or of Kubernetes: like a file of `conf.d` that contains one
/// `[[service]]`, nothing else, and no check that runs a program.
///
/// # Errors
/// The first error, as text.
pub(super) fn remote(text: &str) -> Result<(), String> {
    if let Some(finding) = part(text).into_kept().into_iter().next() {
        let line = 1 + text[..finding.primary.0.start.min(text.len())]
            .matches('\n')
            .count();
        return Err(format!("line {line}: {}", finding.title));
    }
    let (tree, _) = DeTable::parse_recoverable(text);
    let table = tree.into_inner();
    let services = match table.get(&key("service")).map(Spanned::get_ref) {
        Some(DeValue::Array(services)) => services.len(),
        _ => 0,
    };
    if services != 1 || table.len() != 1 {
        return Err("it must contain exactly one [[service]] and nothing else".to_owned());
    }
    match table.values().any(|value| runs_programs(value.get_ref())) {
        true => Err(
            "checks with type = \"exec\" run programs on this host: they are permitted in files only"
                .to_owned(),
        ),
        false => Ok(()),
    }
}

/// Whether the value contains a check that runs a program.
fn runs_programs(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::Table(table) => table.iter().any(|(key, value)| {
            let exec = matches!(value.get_ref(), DeValue::String(word) if word.as_ref() == "exec");
            (key.get_ref() == "type" && exec) || runs_programs(value.get_ref())
        }),
        DeValue::Array(items) => items.iter().any(|item| runs_programs(item.get_ref())),
        _ => false,
    }
}

struct Reader<'a> {
    text: &'a str,
    findings: Findings,
}

impl<'a> Reader<'a> {
    fn file(&mut self, tree: Spanned<DeTable<'a>>, defaults: DeTable<'a>) -> Option<RawConfig> {
        let span = tree.span();
        let mut table = tree.into_inner();
        self.orphans(&mut table);
        let services = take_array(&mut table, "service");
        let mut marks = take_array(&mut table, "mark");
        if let Some(rule) = marks.get(RULES_MAX) {
            let title = format!("there are more than {RULES_MAX} rules for marks");
            self.findings.push(
                Diagnostic::error(rule.span(), title)
                    .help("combine rules: a rule can have several ranges of ports; or check that this is the intended file"),
            );
            marks.truncate(RULES_MAX);
        }
        let sysctls = take_table(&mut table, "sysctl");
        self.peers_of_sync(&mut table);
        self.foreign_defaults(&mut table);
        let mut file = Spanned::new(span, DeValue::Table(table));
        let mut raw: RawConfig = self.read_in(&mut file)?;
        let defaults = match file.into_inner() {
            DeValue::Table(mut file) => {
                match file.remove(&key("defaults")).map(Spanned::into_inner) {
                    Some(DeValue::Table(own)) => own,
                    _ => defaults,
                }
            }
            _ => defaults,
        };
        raw.defaults_text = as_text(&defaults);
        for service in services {
            if self.findings.is_full() || raw.service.len() > SERVICES_MAX {
                break;
            }
            if let Some(service) = self.service(service, &defaults) {
                self.each_address(service, &mut raw.service);
            }
        }
        if let Some(service) = raw.service.get(SERVICES_MAX) {
            let title = format!("there are more than {SERVICES_MAX} services");
            self.findings
                .push(Diagnostic::error(service.span(), title).help(
                "an array of addresses makes a service for each address; check that this is the intended file",
            ));
        }
        raw.mark = self.read_all(marks);
        for (key, value) in sysctls {
            let name = Spanned::new(key.span(), key.into_inner().into_owned());
            if let Some(value) = self.read(value) {
                raw.sysctl.insert(name, value);
            }
        }
        Some(raw)
    }

    fn service(
        &mut self,
        mut item: Spanned<DeValue<'a>>,
        defaults: &DeTable<'a>,
    ) -> Option<Spanned<RawService>> {
        let (mut inline, mut tables) = (Vec::new(), Vec::new());
        if let DeValue::Table(table) = item.get_mut() {
            inline = take_array(table, "servers");
            tables = take_array(table, "server");
            self.discovery_as_servers(table);
            merge(table, defaults, [&inline, &tables]);
        }
        let mut service: Spanned<RawService> = self.read(item)?;
        let raw = service.get_mut();
        raw.servers = self.read_all(inline);
        raw.server = raw.servers.iter().map(RawTarget::server).collect();
        raw.server.extend(self.read_all(tables));
        Some(service)
    }

    /// Reports and removes keys that `[defaults]` may not have.
    fn foreign_defaults(&mut self, file: &mut DeTable<'a>) {
        let Some(DeValue::Table(defaults)) = file.get_mut(&key("defaults")).map(Spanned::get_mut)
        else {
            return;
        };
        for (key, value) in std::mem::take(defaults) {
            if DEFAULTS.contains(&key.get_ref().as_ref()) {
                defaults.insert(key, value);
            } else {
                self.unknown(&key, &value, &DEFAULTS);
            }
        }
    }

    /// Reports and removes `servers = { dns = ... }`, the spelling of an earlier version.
    fn discovery_as_servers(&mut self, service: &mut DeTable<'a>) {
        if let Some(servers) = service.get(&key("servers"))
            && matches!(servers.get_ref(), DeValue::Table(_))
        {
            self.findings.push(
                Diagnostic::error(servers.span(), "`servers` must be an array of servers")
                    .help("write discover = { dns = \"...\" } or { etcd = \"...\" } for servers by DNS or etcd"),
            );
            service.remove(&key("servers"));
        }
    }

    /// Reports and removes `[sync] peers = [...]`, the spelling of an earlier version.
    fn peers_of_sync(&mut self, file: &mut DeTable<'a>) {
        let Some(DeValue::Table(sync)) = file.get_mut(&key("sync")).map(Spanned::get_mut) else {
            return;
        };
        if let Some(peers) = sync.get(&key("peers"))
            && matches!(peers.get_ref(), DeValue::Array(_) | DeValue::String(_))
        {
            self.findings.push(
                Diagnostic::error(peers.span(), "`peers` of [sync] must be a table")
                    .help("write `addresses` below [sync.peers]"),
            );
            sync.remove(&key("peers"));
        }
    }

    /// Reads all valid items. Stops if there are too many errors.
    fn read_all<T: Deserialize<'a>>(&mut self, items: Vec<Spanned<DeValue<'a>>>) -> Vec<T> {
        let mut all = Vec::new();
        for item in items {
            if self.findings.is_full() {
                break;
            }
            all.extend(self.read(item));
        }
        all
    }

    /// Adds a service for each address of `service` to `all`, or `service` itself if it has no key
    /// `address`. Reports an empty array of addresses.
    fn each_address(
        &mut self,
        mut service: Spanned<RawService>,
        all: &mut Vec<Spanned<RawService>>,
    ) {
        let Some(addresses) = service.get_mut().addresses.take() else {
            all.push(service);
            return;
        };
        let span = addresses.span();
        match addresses.into_inner() {
            Addresses::One(address) => {
                service.get_mut().address = Some(Spanned::new(span, address));
                all.push(service);
            }
            Addresses::Several(addresses) => {
                if addresses.is_empty() {
                    self.findings.push(
                        Diagnostic::error(span, "the array of addresses is empty")
                            .help("write at least one: address = [\"192.0.2.10:80\"]"),
                    );
                }
                let room = (SERVICES_MAX + 1).saturating_sub(all.len());
                for address in addresses.into_iter().take(room) {
                    let mut one = service.clone();
                    one.get_mut().address = Some(address);
                    all.push(one);
                }
            }
        }
    }

    /// Reports and removes a `[[service.server]]` before the first `[[service]]`, which TOML parses
    /// as a table.
    fn orphans(&mut self, table: &mut DeTable<'a>) {
        let name = key("service");
        let Some((found, DeValue::Table(service))) = table
            .get_key_value(&name)
            .map(|(found, value)| (found.span(), value.get_ref()))
        else {
            return;
        };
        let server = service.get(&key("server")).map(Spanned::get_ref);
        if service.len() == 1 && matches!(server, Some(DeValue::Array(_))) {
            self.findings.push(
                Diagnostic::error(found, "`[[service.server]]` has no [[service]] above it")
                    .help("a server belongs to the [[service]] before it: write [[service]] and its address first"),
            );
            table.remove(&name);
        }
    }

    /// Reads the valid parts of a value; `None` if there are none.
    fn read<T: Deserialize<'a>>(&mut self, mut value: Spanned<DeValue<'a>>) -> Option<T> {
        self.read_in(&mut value)
    }

    /// As [`read`](Self::read); the invalid parts are removed from `value`.
    fn read_in<T: Deserialize<'a>>(&mut self, value: &mut Spanned<DeValue<'a>>) -> Option<T> {
        // Each round removes at least one key or item, so that the loop ends.
        loop {
            let error = match T::deserialize(ValueDeserializer::from(value.clone())) {
                Ok(raw) => return Some(raw),
                Err(error) => error,
            };
            let span = error.span().unwrap_or(0..0);
            let message = error.message();
            if value.span() == span || !self.cut(value.get_mut(), &span, message) {
                self.findings.push(explain(message, &span, self.text));
                return None;
            }
        }
    }

    /// Removes the part at `span`, which `message` reports, and its siblings with the same error.
    /// Returns false if no such part exists.
    fn cut(&mut self, value: &mut DeValue<'a>, span: &Range<usize>, message: &str) -> bool {
        match value {
            DeValue::Table(table) => self.cut_entry(table, span, message),
            DeValue::Array(items) => self.cut_item(items, span, message),
            _ => false,
        }
    }

    fn cut_entry(&mut self, table: &mut DeTable<'a>, span: &Range<usize>, message: &str) -> bool {
        let mut entries = table.iter();
        let found = entries.find(|(key, value)| key.span() == *span || value.span() == *span);
        let Some((key, _)) = found else {
            return table
                .iter_mut()
                .any(|(_, value)| self.cut(value.get_mut(), span, message));
        };
        match known_keys(message).filter(|_| key.span() == *span) {
            Some(known) => {
                for (key, value) in std::mem::take(table) {
                    if known.contains(&key.get_ref().as_ref()) {
                        table.insert(key, value);
                    } else {
                        self.unknown(&key, &value, &known);
                    }
                }
            }
            None => {
                let key = key.clone();
                table.remove(&key);
                self.findings.push(explain(message, span, self.text));
            }
        }
        true
    }

    fn unknown(
        &mut self,
        key: &Spanned<Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
        known: &[&str],
    ) {
        let finding = unknown_key(key.span(), key.get_ref(), known);
        let tables = matches!(value.get_ref(), DeValue::Array(items) if items.iter().any(|item| matches!(item.get_ref(), DeValue::Table(_))));
        let finding = match (tables, key.get_ref().as_ref()) {
            (true, "services" | "marks") => {
                let word = key.get_ref().trim_end_matches('s');
                finding.help(format!(
                    "write [[{word}]]: each such table defines one {word}"
                ))
            }
            _ => finding,
        };
        self.findings.push(finding);
    }

    fn cut_item(&mut self, items: &mut DeArray<'a>, span: &Range<usize>, message: &str) -> bool {
        let Some(wrong) = items.iter().find(|item| item.span() == *span) else {
            return items
                .iter_mut()
                .any(|item| self.cut(item.get_mut(), span, message));
        };
        // Siblings of the same type are invalid, too.
        let kind = discriminant(wrong.get_ref());
        let mut kept = DeArray::new();
        for item in std::mem::replace(items, DeArray::new()) {
            if discriminant(item.get_ref()) == kind {
                let mut finding = explain(message, &item.span(), self.text);
                if item.span() != *span
                    && let Some((expected, _)) = finding.primary.1.split_once(", found")
                {
                    // The message is about another item.
                    finding.primary.1 = expected.to_owned();
                }
                self.findings.push(finding);
            } else {
                kept.push(item);
            }
        }
        *items = kept;
        true
    }
}

/// Adds the defaults that a service does not set, except those that do not fit it: flags of another
/// scheduler, `vip` and `below_quorum` of a service with a mark, and a tunnel that no server uses.
fn merge<'a>(
    service: &mut DeTable<'a>,
    defaults: &DeTable<'a>,
    servers: [&Vec<Spanned<DeValue<'a>>>; 2],
) {
    // Default flags require the default scheduler; a service with a mark has no VIP.
    let scheduler = service.contains_key(&key("scheduler"));
    let mark = service.contains_key(&key("fwmark"));
    let tunnels = |table: &DeTable<'_>| {
        let forward = table.get(&key("forward")).map(Spanned::get_ref);
        matches!(forward, Some(DeValue::String(word)) if word.as_ref() == "tun")
    };
    let mut servers = servers.into_iter().flatten();
    let server =
        servers.any(|server| matches!(server.get_ref(), DeValue::Table(server) if tunnels(server)));
    let own = service.contains_key(&key("forward"));
    let tunnel = server || tunnels(if own { service } else { defaults });
    for (key, value) in defaults {
        let meant = match key.get_ref().as_ref() {
            "scheduler_flags" => !scheduler,
            "vip" | "below_quorum" => !mark,
            "tunnel" => tunnel,
            _ => true,
        };
        if meant && !service.contains_key(key) {
            service.insert(key.clone(), value.clone());
        }
    }
}

/// Replaces all positions in a table by [`NOWHERE`].
fn nowhere(table: DeTable<'_>) -> DeTable<'_> {
    fn moved(value: Spanned<DeValue<'_>>) -> Spanned<DeValue<'_>> {
        let value = match value.into_inner() {
            DeValue::Table(table) => DeValue::Table(nowhere(table)),
            DeValue::Array(items) => {
                let mut all = DeArray::new();
                items.into_iter().for_each(|item| all.push(moved(item)));
                DeValue::Array(all)
            }
            other => other,
        };
        Spanned::new(NOWHERE, value)
    }
    let mut all = DeTable::new();
    for (key, value) in table {
        all.insert(Spanned::new(NOWHERE, key.into_inner()), moved(value));
    }
    all
}

fn as_text(table: &DeTable<'_>) -> String {
    let value = Spanned::new(0..0, DeValue::Table(table.clone()));
    let table = toml::Table::deserialize(ValueDeserializer::from(value));
    table.map_or_else(|_| String::new(), |table| table.to_string())
}

fn key(name: &str) -> Spanned<Cow<'_, str>> {
    Spanned::new(0..0, Cow::Borrowed(name))
}

/// Removes and returns the items of an array; empty if the value is not an array.
fn take_array<'a>(table: &mut DeTable<'a>, name: &'a str) -> Vec<Spanned<DeValue<'a>>> {
    let there = table.get(&key(name)).map(Spanned::get_ref);
    if !matches!(there, Some(DeValue::Array(_))) {
        return Vec::new();
    }
    match table.remove(&key(name)).map(Spanned::into_inner) {
        Some(DeValue::Array(items)) => items.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Removes and returns the entries of a subtable, like [`take_array`].
fn take_table<'a>(
    table: &mut DeTable<'a>,
    name: &'a str,
) -> Vec<(Spanned<Cow<'a, str>>, Spanned<DeValue<'a>>)> {
    let there = table.get(&key(name)).map(Spanned::get_ref);
    if !matches!(there, Some(DeValue::Table(_))) {
        return Vec::new();
    }
    match table.remove(&key(name)).map(Spanned::into_inner) {
        Some(DeValue::Table(entries)) => entries.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Extracts the accepted keys from serde's message about an unknown key; `None` for other messages.
fn known_keys(message: &str) -> Option<Vec<&str>> {
    // The forms of serde's message: unknown field `x`, expected one of `a`, `b`; expected `a`;
    // there are no fields.
    let rest = message.strip_prefix("unknown field `")?;
    let (_, list) = rest.rsplit_once("`, expected ")?;
    Some(list.split('`').skip(1).step_by(2).collect())
}

/// Converts serde's message to a finding, with a fix for common values of a wrong type.
fn explain(message: &str, span: &Range<usize>, text: &str) -> Diagnostic {
    let written = text.get(span.clone()).unwrap_or_default();
    if let Some(rest) = message.strip_prefix("invalid type: ")
        && let Some((found, expected)) = rest.split_once(", expected ")
    {
        let expected = match expected {
            "a boolean" | "bool" => "true or false",
            "a sequence" => "an array of tables or values",
            other => other.strip_prefix("struct ").map_or(other, |_| "a table"),
        };
        let finding = Diagnostic::error(span.clone(), "the value has a wrong type")
            .label(format!("expected {expected}, found {}", plain(found)));
        let number = written.trim_matches(['"', '\'']);
        return if expected == "a whole number" && number.parse::<i64>().is_ok() {
            finding.help(format!("write it without quotes: {number}"))
        } else if let Some(percent) = number.strip_suffix('%')
            && expected == "a whole number"
            && percent.parse::<i64>().is_ok()
        {
            finding.help(format!("write the number by itself: {percent}"))
        } else if found == "sequence" && !expected.contains("table") {
            finding.help(match only_item(written) {
                Some(item) => format!("write it without brackets: {item}"),
                None => "write one value, without brackets".to_owned(),
            })
        } else if expected.starts_with("a string") && found != "map" {
            finding.help(format!("write it in quotes: \"{}\"", one_line(written)))
        } else if expected.starts_with("an array of tables") && found.starts_with("string") {
            finding.help(format!("write it in brackets: [{}]", one_line(written)))
        } else if expected.starts_with("an array of tables") && found == "map" {
            finding
                .help("write the table's name in double brackets: [[service]], [[service.server]]")
        } else {
            finding
        };
    }
    if message.ends_with("number overflowed") {
        return Diagnostic::error(
            span.clone(),
            format!("the number {written} is out of range"),
        )
        .help(format!("a number in this file cannot exceed {}", u32::MAX));
    }
    Diagnostic::error(span.clone(), one_line(message))
}

/// The item of an array that has one item, which is no array and no table; `None` for other texts.
fn only_item(array: &str) -> Option<&str> {
    let item = array.strip_prefix('[')?.strip_suffix(']')?.trim();
    let item = item.strip_suffix(',').unwrap_or(item).trim_end();
    let one = DeValue::parse(item).ok()?;
    let simple = !matches!(one.get_ref(), DeValue::Array(_) | DeValue::Table(_));
    (simple && !item.contains('\n')).then_some(item)
}

/// Replaces serde's name of a type at the start of `found`, such as `map`, by the word for it in
/// messages, such as `a table`. The value after it stays.
fn plain(found: &str) -> String {
    const WORDS: [(&str, &str); 6] = [
        ("map", "a table"),
        ("sequence", "an array"),
        ("integer", "the number"),
        ("floating point", "the number"),
        ("boolean", "the word"),
        ("string", "the string"),
    ];
    let known = WORDS
        .iter()
        .find_map(|(word, new)| Some((new, found.strip_prefix(word)?)));
    known.map_or_else(|| found.to_owned(), |(new, value)| format!("{new}{value}"))
}

fn one_line(message: &str) -> String {
    message.lines().collect::<Vec<_>>().join(", ")
}
