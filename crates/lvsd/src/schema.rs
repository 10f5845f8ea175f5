//! Generates the JSON Schema of `lvsd.toml` and the manual page `lvsd.toml(5)` from the source of
//! `config/raw.rs`, where each key is a field with a doc comment.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::config::DEFAULTS;

/// Source of the types into which the configuration file is parsed.
const SOURCE: &str = include_str!("config/raw.rs");

/// A table of the configuration file: type, description and keys.
struct Table {
    name: String,
    about: String,
    keys: Vec<Key>,
}

#[derive(Clone)]
struct Key {
    name: String,
    about: String,
    kind: String,
}

fn tables() -> Vec<Table> {
    let mut all: Vec<Table> = Vec::new();
    let (mut about, mut renamed) = (String::new(), None);
    let mut inside = false;
    let mut skipped = false;
    for line in SOURCE.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("///") {
            let _ = write!(about, "{} ", words.trim());
        } else if line == "#[serde(skip)]" {
            skipped = true;
        } else if let Some(rest) = line.strip_prefix("#[serde(rename = \"") {
            renamed = rest.split('"').next().map(ToOwned::to_owned);
        } else if line.starts_with("#[") {
            // An attribute that is irrelevant for the schema.
        } else if let Some(name) = line
            .strip_prefix("pub(super) struct ")
            .and_then(|l| l.strip_suffix(" {"))
        {
            let about = std::mem::take(&mut about);
            all.push(Table {
                name: name.to_owned(),
                about: about.trim().to_owned(),
                keys: Vec::new(),
            });
            inside = true;
        } else if line == "}" {
            inside = false;
            about.clear();
        } else if let (true, Some((name, kind)), Some(table)) = (
            inside,
            line.strip_prefix("pub(super) ")
                .and_then(|field| field.trim_end_matches(',').split_once(": ")),
            all.last_mut(),
        ) {
            let about = std::mem::take(&mut about);
            let name = renamed.take().unwrap_or_else(|| name.to_owned());
            // The type within a tuple has its own description.
            if !std::mem::take(&mut skipped) && !kind.contains('(') {
                let mut kind = kind.to_owned();
                for wrapper in ["Option<", "Spanned<"] {
                    if let Some(inner) =
                        kind.strip_prefix(wrapper).and_then(|k| k.strip_suffix('>'))
                    {
                        kind = inner.to_owned();
                    }
                }
                table.keys.push(Key {
                    name,
                    about: about.trim().to_owned(),
                    kind,
                });
            }
        } else {
            about.clear();
        }
    }
    all.retain(|table| table.name.starts_with("Raw"));
    let service = all.iter().position(|table| table.name == "RawService");
    if let Some(at) = service {
        let keys = all[at].keys.iter();
        let keys = keys.filter(|key| DEFAULTS.contains(&key.name.as_str()));
        let defaults = Table {
            name: "RawDefaults".to_owned(),
            about: "`[defaults]`: keys that services have unless they set their own.".to_owned(),
            keys: keys.cloned().collect(),
        };
        all.insert(at, defaults);
    }
    all
}

fn kind(kind: &str) -> Value {
    let either =
        |one: Value, table: &str| json!({ "anyOf": [one, { "$ref": format!("#/$defs/{table}") }] });
    match kind {
        "bool" => json!({ "type": "boolean" }),
        "String" => json!({ "type": "string" }),
        "Whole" => json!({ "type": "integer" }),
        "Scalar" => json!({ "type": ["string", "integer"] }),
        "RawDuration" => json!({ "type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$" }),
        "OneOrMore" | "Addresses" => {
            json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] })
        }
        "RawQuorum" => either(json!({ "type": "integer" }), "RawQuorumTable"),
        "RawPassive" => json!({ "type": ["boolean", "integer"] }),
        "RawTarget" => either(json!({ "type": "string" }), "RawServer"),
        "RawTunnel" => either(json!({ "type": "string" }), "RawTunnelTable"),
        // Each type of check has keys of its own.
        "RawCheck" => json!({ "anyOf": [{ "const": "none" }, { "type": "object" }] }),
        other if other.starts_with("BTreeMap<") => json!({ "type": "object" }),
        other => match other
            .strip_prefix("Vec<Spanned<")
            .or_else(|| other.strip_prefix("Vec<"))
        {
            Some(inner) => {
                json!({ "type": "array", "items": self::kind(inner.trim_end_matches('>')) })
            }
            None => json!({ "$ref": format!("#/$defs/{other}") }),
        },
    }
}

/// Returns the JSON Schema of the configuration file, for editors.
pub fn json() -> Value {
    let mut definitions = Map::new();
    for table in tables() {
        let keys = table.keys.iter().map(|key| {
            let mut value = kind(&key.kind);
            value["description"] = key.about.clone().into();
            (key.name.clone(), value)
        });
        let keys: Map<String, Value> = keys.collect();
        let open = table.name == "RawCheckTable";
        let value = json!({
            "type": "object", "description": table.about, "additionalProperties": open, "properties": keys,
        });
        definitions.insert(table.name, value);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lvsd.toml",
        "$ref": "#/$defs/RawConfig",
        "$defs": definitions,
    })
}

/// Returns the manual page `lvsd.toml(5)`.
pub fn page() -> String {
    let plain = |text: &str| {
        text.replace('\\', "\\e")
            .replace('-', "\\-")
            .replace('`', "")
    };
    let mut page = String::from(
        ".TH lvsd.toml 5 \"\" \"lvsd\" \"Linux Virtual Server\"\n.SH NAME\nlvsd.toml \\- configuration of the daemon of a Linux Virtual Server\n\
         .SH DESCRIPTION\nThe format is TOML. \\fBlvsd check\\fR reports the errors in a file. \\fBlvsd plan\\fR prints the changes that a reload of the file would make.\n",
    );
    for table in tables() {
        if table.name == "RawConfig" {
            continue;
        }
        let about = match table.about.is_empty() {
            true => table.name.trim_start_matches("Raw").to_owned(),
            false => table
                .about
                .split(". ")
                .next()
                .unwrap_or_default()
                .to_owned(),
        };
        let _ = writeln!(
            page,
            ".SH \"{}\"",
            plain(about.trim_end_matches('.')).replace('"', "\\(dq")
        );
        for key in table.keys {
            let about = plain(&key.about);
            // A line must not begin like a roff request.
            let guard = if about.starts_with(['.', '\'']) {
                "\\&"
            } else {
                ""
            };
            let _ = writeln!(page, ".TP\n.B {}\n{guard}{about}", plain(&key.name));
        }
    }
    page.push_str(".SH SEE ALSO\nlvsd(8), lvsadm(8), lvs\\-dataplane(8)\n");
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of the reference that document the keys.
    static PAGES: [&str; 2] = [
        include_str!("../../../docs/configuration.md"),
        include_str!("../../../docs/proxy.md"),
    ];

    /// Rows of the reference whose first cell names `key`.
    fn rows(key: &str) -> Vec<Vec<&'static str>> {
        let lines = PAGES.iter().flat_map(|page| page.lines());
        let rows = lines.filter_map(|line| line.strip_prefix("| "));
        let cells = rows.map(|row| row.split(" | ").map(str::trim).collect::<Vec<_>>());
        let named = |cell: &str| cell.split(['`', '.', ' ', '=']).any(|name| name == key);
        cells.filter(|cells| named(cells[0])).collect()
    }

    /// The default value in a key's description, if it states one.
    fn default(about: &str) -> Option<&str> {
        let (_, default) = about.split_once("Default: ")?;
        let word = default.split_whitespace().next()?;
        let word = word.trim_end_matches(['.', ',', ';']).trim_matches('`');
        let is_value = default.starts_with(|c: char| c.is_ascii_digit() || c == '`' || c == '/');
        (is_value || ["true", "false"].contains(&word)).then_some(word)
    }

    #[test]
    fn configuration_reference_contains_each_key_with_its_default() {
        for table in tables() {
            // Each type of check has its own keys, which other tests compare with the reference.
            let keys = table.keys.iter().filter(|key| {
                table.name != "RawCheckTable" || !["kind", "own"].contains(&&*key.name)
            });
            for Key { name, about, .. } in keys {
                let rows = rows(name);
                let headings = [
                    format!("[{name}]"),
                    format!("[{name}."),
                    format!(".{name}]"),
                ];
                assert!(
                    !rows.is_empty()
                        || headings
                            .iter()
                            .any(|heading| { PAGES.iter().any(|page| page.contains(heading)) }),
                    "docs/configuration.md has no row for {name} of {}",
                    table.name
                );
                if let Some(default) = default(about) {
                    assert!(
                        rows.iter()
                            .any(|row| row.get(2).is_some_and(|cell| cell.contains(default))),
                        "docs/configuration.md: no row for {name} of {} with the default {default}: \
                         {rows:?}",
                        table.name
                    );
                }
            }
        }
    }

    #[test]
    fn schema_and_manual_page_contain_each_key() {
        let schema = json();
        let keys = |table: &str| -> Vec<String> {
            let keys = schema["$defs"][table]["properties"].as_object();
            keys.map(|keys| keys.keys().cloned().collect())
                .unwrap_or_default()
        };
        let page = page();
        for (table, path) in [
            ("RawService", "[[service]]"),
            ("RawServer", "[[service]]\n[[service.server]]"),
            ("RawDaemon", "[lvsd]"),
            ("RawDefaults", "[defaults]"),
            ("RawDataplane", "[dataplane]"),
            ("RawMark", "[[mark]]"),
            ("RawSync", "[sync]"),
            ("RawSyncIpvs", "[sync.ipvs]"),
            ("RawSyncPeers", "[sync.peers]"),
            ("RawVrrp", "[vrrp]"),
            ("RawDns", "[dns]"),
            ("RawCluster", "[cluster]"),
            ("RawKubernetes", "[kubernetes]"),
            ("RawPool", "[[kubernetes.pool]]"),
            ("RawApi", "[api]"),
            ("RawApiToken", "[[api.token]]"),
            ("RawAnnounce", "[announce]"),
        ] {
            // The parser's error lists the accepted keys.
            let Err(report) = crate::config::Config::from_toml(
                "x",
                &format!("{path}\nqqqqqqqqqqqqqqqqqqq = 1\n"),
            ) else {
                panic!("an unknown key is accepted");
            };
            let report = report.to_string();
            let known = report
                .split("this table has the keys: ")
                .nth(1)
                .expect("the error lists the keys");
            let known = known.lines().next().unwrap_or_default();
            for key in known.split(", ").map(str::trim) {
                assert!(
                    keys(table).iter().any(|k| k == key),
                    "{key} of {table}: {:?}",
                    keys(table)
                );
                assert!(
                    page.contains(&format!(".B {}\n", key.replace('-', "\\-"))),
                    "{key}"
                );
            }
        }
        // Each reference has its definition.
        let text = schema.to_string();
        for reference in text.split("#/$defs/").skip(1) {
            let name = reference.split('"').next().unwrap_or_default();
            assert!(schema["$defs"][name].is_object(), "{name}");
        }
    }
}
