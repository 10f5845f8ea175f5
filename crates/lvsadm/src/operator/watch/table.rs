//! The table of `lvsadm watch`: rates between two readings of the counters, sorted.

use std::collections::HashMap;
use std::net::SocketAddr;

use lvs_core::api::{ServiceId, ServiceInfo};
use lvs_core::stats::Counts;

use crate::operator::service_text;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Rate,
    Bytes,
    Active,
    Name,
}

impl Sort {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Rate, "rate"),
        (Self::Bytes, "bytes"),
        (Self::Active, "active"),
        (Self::Name, "name"),
    ];

    pub(super) fn of(text: &str) -> Option<Self> {
        let mut all = Self::ALL.iter();
        all.find(|(_, name)| *name == text).map(|(sort, _)| *sort)
    }

    pub(super) fn next(self) -> Self {
        match self {
            Self::Rate => Self::Bytes,
            Self::Bytes => Self::Active,
            Self::Active => Self::Name,
            Self::Name => Self::Rate,
        }
    }

    pub(super) fn name(self) -> &'static str {
        let mut all = Self::ALL.iter();
        all.find(|(sort, _)| *sort == self)
            .map_or("", |(_, name)| name)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    name: String,
    weight: Option<i32>,
    overloaded: bool,
    active: u32,
    inactive: u32,
    /// Per second: connections, incoming and outgoing packets, incoming and outgoing bytes.
    rates: [f64; 5],
}

/// The row of a service, and the rows of its servers.
pub(super) type Block = (Row, Vec<Row>);

/// The counters at the previous refresh.
pub(super) type Before = HashMap<(ServiceId, Option<SocketAddr>), Counts>;

#[expect(clippy::cast_precision_loss, reason = "a rate to be read")]
fn rates(before: Option<&Counts>, now: &Counts, seconds: f64) -> [f64; 5] {
    let Some(before) = before else {
        return [0.0; 5];
    };
    let rate = |of: fn(&Counts) -> u64| of(now).saturating_sub(of(before)) as f64 / seconds;
    [
        rate(|c| c.conns),
        rate(|c| c.in_packets),
        rate(|c| c.out_packets),
        rate(|c| c.in_bytes),
        rate(|c| c.out_bytes),
    ]
}

pub(super) fn table(
    services: &[ServiceInfo],
    before: &mut Before,
    seconds: f64,
    sort: Sort,
) -> Vec<Block> {
    let mut now = Before::new();
    let mut blocks = Vec::new();
    for info in services {
        let key = (info.service, None);
        let mut servers = Vec::new();
        for server in &info.servers {
            let key = (info.service, Some(server.server));
            servers.push(Row {
                name: server.server.to_string(),
                weight: Some(server.config.weight),
                overloaded: server.overloaded,
                active: server.active,
                inactive: server.inactive,
                rates: rates(before.get(&key), &server.stats.live, seconds),
            });
            now.insert(key, server.stats.live);
        }
        let row = Row {
            name: format!("{} {}", service_text(info.service), info.config.scheduler),
            weight: None,
            overloaded: false,
            active: servers.iter().map(|row| row.active).sum(),
            inactive: servers.iter().map(|row| row.inactive).sum(),
            rates: rates(before.get(&key), &info.stats.live, seconds),
        };
        now.insert(key, info.stats.live);
        servers.sort_by(|a, b| order(a, b, sort));
        blocks.push((row, servers));
    }
    blocks.sort_by(|(a, _), (b, _)| order(a, b, sort));
    *before = now;
    blocks
}

fn order(a: &Row, b: &Row, sort: Sort) -> std::cmp::Ordering {
    let by = |of: fn(&Row) -> f64| of(b).total_cmp(&of(a));
    let first = match sort {
        Sort::Rate => by(|row| row.rates[0]),
        Sort::Bytes => by(|row| row.rates[3] + row.rates[4]),
        Sort::Active => by(|row| row.active.into()),
        Sort::Name => std::cmp::Ordering::Equal,
    };
    first.then_with(|| a.name.cmp(&b.name))
}

/// Formats a number with at most six characters.
fn short(number: f64) -> String {
    for (unit, size) in [("G", 1e9), ("M", 1e6), ("K", 1e3)] {
        if number >= size * 10.0 {
            return format!("{:.0}{unit}", number / size);
        }
        if number >= size && unit != "K" {
            return format!("{:.1}{unit}", number / size);
        }
    }
    if number > 0.0 && number < 10.0 {
        format!("{number:.1}")
    } else {
        format!("{number:.0}")
    }
}

const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[31m";
const YELLOW: &str = "\x1b[33m";
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Formats a row with at most `width` columns.
fn line(row: &Row, width: usize, colors: bool) -> String {
    let [conns, pin, pout, bytes_in, bytes_out] = row.rates.map(short);
    let (indent, weight) = match row.weight {
        None => ("", String::new()),
        Some(weight) => ("  ", weight.to_string()),
    };
    let name = format!("{indent}{}", row.name);
    let mark = if row.overloaded { "  full" } else { "" };
    let mut text = format!(
        "{name:<38}{weight:>7}{:>8}{:>9}{conns:>8}{pin:>8}{pout:>8}{bytes_in:>8}{bytes_out:>8}{mark}",
        row.active, row.inactive
    );
    cut(&mut text, width);
    let color = match row.weight {
        None => BOLD,
        Some(0) => YELLOW,
        Some(_) if row.overloaded => RED,
        Some(_) if row.rates == [0.0; 5] && row.active == 0 => DIM,
        Some(_) => "",
    };
    if colors && !color.is_empty() {
        format!("{color}{text}{PLAIN}")
    } else {
        text
    }
}

/// Truncates a text to `width` characters.
fn cut(text: &mut String, width: usize) {
    if let Some((at, _)) = text.char_indices().nth(width) {
        text.truncate(at);
    }
}

pub(super) fn lines(blocks: &[Block], sort: Sort, width: usize, colors: bool) -> Vec<String> {
    let mut title = format!(
        "{:<38}{:>7}{:>8}{:>9}{:>8}{:>8}{:>8}{:>8}{:>8}",
        format!("by {}", sort.name()),
        "weight",
        "active",
        "inactive",
        "conn/s",
        "in p/s",
        "out p/s",
        "in B/s",
        "out B/s"
    );
    cut(&mut title, width);
    let mut lines = vec![title];
    for (service, servers) in blocks {
        lines.push(line(service, width, colors));
        lines.extend(servers.iter().map(|row| line(row, width, colors)));
    }
    if blocks.is_empty() {
        lines.push("no services".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(conns: u64, weight: i32) -> ServiceInfo {
        let text = format!(
            r#"{{"service": {{"protocol": "tcp", "address": "192.0.2.1:80"}},
                "config": {{"scheduler": "rr", "flags": 0, "timeout": 0, "netmask": 4294967295}},
                "stats": {{"live": {{"conns": {conns}, "in_bytes": {}}}}},
                "servers": [{{"server": "10.0.0.1:80", "config": {{"weight": {weight}, "forwarding": "nat"}},
                    "active": 3, "inactive": 1, "persistent": 0, "overloaded": false,
                    "stats": {{"live": {{"conns": {conns}}}}}}},
                   {{"server": "10.0.0.2:80", "config": {{"weight": 1, "forwarding": "nat"}},
                    "active": 7, "inactive": 0, "persistent": 0, "overloaded": true, "stats": {{}}}}]}}"#,
            conns * 1000
        );
        serde_json::from_str(&text).expect("the JSON is valid")
    }

    #[test]
    fn watch_shows_rates_a_second_in_sorted_and_coloured_rows() {
        let mut before = Before::new();
        let first = table(&[service(10, 1)], &mut before, 1.0, Sort::Rate);
        assert_eq!(first[0].0.rates, [0.0; 5]);
        let second = table(&[service(30, 0)], &mut before, 2.0, Sort::Rate);
        let (service_row, servers) = &second[0];
        assert_eq!(service_row.rates[0], 10.0);
        assert_eq!(service_row.rates[3], 10_000.0);
        assert_eq!((service_row.active, service_row.inactive), (10, 1));
        assert_eq!(servers[0].name, "10.0.0.1:80");
        let by_active = table(&[service(30, 0)], &mut before, 1.0, Sort::Active);
        assert_eq!(by_active[0].1[0].name, "10.0.0.2:80");
        let text = lines(&second, Sort::Rate, 200, true);
        assert!(
            text[1].starts_with(BOLD) && text[2].starts_with(YELLOW) && text[3].starts_with(RED)
        );
        assert!(
            lines(&second, Sort::Rate, 40, false)
                .iter()
                .all(|line| !line.contains('\x1b') && line.len() <= 40)
        );
    }

    #[test]
    fn watch_restarted_counters_show_no_rate() {
        let counts = |conns| Counts {
            conns,
            ..Counts::default()
        };
        assert_eq!(rates(Some(&counts(9)), &counts(1), 1.0), [0.0; 5]);
    }

    #[test]
    fn watch_numbers_have_at_most_six_characters() {
        for (number, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (12.4, "12"),
            (9999.0, "9999"),
            (12_345.0, "12K"),
            (1_234_567.0, "1.2M"),
            (12_345_678.0, "12M"),
            (1e10, "10G"),
        ] {
            assert_eq!(short(number), text);
            assert!(short(number).len() <= 6);
        }
    }
}
