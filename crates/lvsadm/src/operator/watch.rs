//! `lvsadm watch`: services and servers with rates, again and again.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use lvs_core::api::{Call, Counts, ServiceId, ServiceInfo};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};

use super::{Outcome, Trouble, Words, connect, service_text};
use crate::program::Invocation;

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
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

    fn of(text: &str) -> Option<Self> {
        let mut all = Self::ALL.iter();
        all.find(|(_, name)| *name == text).map(|(sort, _)| *sort)
    }

    fn next(self) -> Self {
        match self {
            Self::Rate => Self::Bytes,
            Self::Bytes => Self::Active,
            Self::Active => Self::Name,
            Self::Name => Self::Rate,
        }
    }

    fn name(self) -> &'static str {
        let mut all = Self::ALL.iter();
        all.find(|(sort, _)| *sort == self)
            .map_or("", |(_, name)| name)
    }
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    name: String,
    weight: Option<i32>,
    overloaded: bool,
    active: u32,
    inactive: u32,
    /// Per second: connections, packets in and out, bytes in and out.
    rates: [f64; 5],
}

/// A service and its servers.
type Block = (Row, Vec<Row>);

/// The counters of the last look.
type Before = HashMap<(ServiceId, Option<SocketAddr>), Counts>;

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
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

fn table(services: &[ServiceInfo], before: &mut Before, seconds: f64, sort: Sort) -> Vec<Block> {
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

/// A number in at most six places.
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

/// A row of at most `width` columns.
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

/// Names are of ASCII.
fn cut(text: &mut String, width: usize) {
    if let Some((at, _)) = text.char_indices().nth(width) {
        text.truncate(at);
    }
}

fn lines(blocks: &[Block], sort: Sort, width: usize, colors: bool) -> Vec<String> {
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

/// The terminal as it was; dropped, it is so again.
struct Terminal(Termios);

impl Terminal {
    /// Keys come at once and are not shown; a read waits a tenth of a second at most. None where nothing can be drawn:
    /// not a terminal, or one that says it is dumb.
    fn take() -> Option<Self> {
        let stdin = std::io::stdin();
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        if dumb || !stdin.is_terminal() || !std::io::stdout().is_terminal() {
            return None;
        }
        let before = tcgetattr(&stdin).ok()?;
        let mut keys = before.clone();
        keys.local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        keys.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
        keys.control_chars[SpecialCharacterIndices::VTIME as usize] = 1;
        tcsetattr(&stdin, SetArg::TCSANOW, &keys).ok()?;
        Some(Self(before))
    }

    /// Lines and columns of the screen. They are asked for again each time, so that a changed window is noticed.
    fn size() -> (usize, usize) {
        let size = Command::new("stty")
            .arg("size")
            .stdin(Stdio::inherit())
            .stderr(Stdio::null())
            .output();
        let text = size.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        screen_size(&text.unwrap_or_default())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, &self.0);
    }
}

/// Lines and columns as `stty size` prints them; the usual ones where that is of no use.
fn screen_size(text: &str) -> (usize, usize) {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(lines)), Some(Ok(columns))) if lines > 2 && columns > 10 => (lines, columns),
        _ => (24, 80),
    }
}

/// What a key means.
enum Key {
    Quit,
    Sort,
}

/// Waits, or less long if a key that means something is pressed.
fn wait(run: &mut Invocation<'_>, terminal: Option<&Terminal>, time: Duration) -> Option<Key> {
    if terminal.is_none() {
        thread::sleep(time);
        return None;
    }
    let started = Instant::now();
    while started.elapsed() < time {
        let mut key = [0];
        match run.input.read(&mut key) {
            Ok(1) => match key[0] {
                // Ctrl-C, Ctrl-D, escape.
                b'q' | b'Q' | 3 | 4 | 27 => return Some(Key::Quit),
                b's' => return Some(Key::Sort),
                _ => {}
            },
            Ok(_) => {}
            // The terminal is gone.
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => {
                return Some(Key::Quit);
            }
            Err(_) => {}
        }
    }
    None
}

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let interval = match words.number::<f64>("--interval")?.unwrap_or(1.0) {
        seconds if (0.1..=3600.0).contains(&seconds) => Duration::from_secs_f64(seconds),
        _ => return Err(Trouble::Usage("--interval: 0.1 to 3600 seconds".into())),
    };
    let mut count: Option<u64> = words.number("--count")?;
    let mut sort = match words.value("--sort") {
        None => Sort::Rate,
        Some(text) => Sort::of(text)
            .ok_or_else(|| Trouble::Usage(format!("--sort {text}: rate, bytes, active or name")))?,
    };
    let mut client = connect(run)?;
    let terminal = Terminal::take();
    let colors = terminal.is_some()
        && !words.has("--no-color")
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut before = Before::new();
    let mut looked: Option<Instant> = None;
    if terminal.is_some() {
        // The other screen, without cursor.
        run.output.write_all(b"\x1b[?1049h\x1b[?25l")?;
    }
    let result = loop {
        let services: Vec<ServiceInfo> = match client.collect(&Call::ServiceList { service: None })
        {
            Ok(services) => services,
            Err(error) => break Err(error.into()),
        };
        let seconds = looked.map_or(1.0, |at| at.elapsed().as_secs_f64().max(0.001));
        looked = Some(Instant::now());
        let (height, width) = match terminal {
            Some(_) => Terminal::size(),
            None => (usize::MAX, usize::MAX),
        };
        let blocks = table(&services, &mut before, seconds, sort);
        let mut text = lines(&blocks, sort, width, colors);
        if terminal.is_some() {
            let height = height.saturating_sub(2);
            let hidden = text.len().saturating_sub(height);
            text.truncate(height);
            // Each line is overwritten in its place, so that nothing flickers, and what is below is cleared.
            run.output.write_all(b"\x1b[H")?;
            for line in &text {
                write!(run.output, "{line}\x1b[K\r\n")?;
            }
            let more = if hidden > 0 {
                format!("{hidden} more lines; ")
            } else {
                String::new()
            };
            write!(run.output, "\x1b[J{more}q ends, s sorts")?;
        } else {
            for line in &text {
                writeln!(run.output, "{line}")?;
            }
            writeln!(run.output)?;
        }
        run.output.flush()?;
        if let Some(count) = &mut count {
            *count = count.saturating_sub(1);
            if *count == 0 {
                break Ok(0);
            }
        }
        match wait(run, terminal.as_ref(), interval) {
            Some(Key::Quit) => break Ok(0),
            Some(Key::Sort) => sort = sort.next(),
            None => {}
        }
    };
    if terminal.is_some() {
        run.output.write_all(b"\x1b[?25h\x1b[?1049l")?;
        run.output.flush()?;
    }
    result
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
        serde_json::from_str(&text).expect("a service")
    }

    #[test]
    fn rates_are_differences_and_rows_are_sorted() {
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
        assert_eq!(screen_size("50 132\n"), (50, 132));
        assert_eq!(screen_size("0 0\n"), (24, 80));
        assert_eq!(screen_size(""), (24, 80));
    }

    #[test]
    fn counters_that_start_again_give_no_rate() {
        let counts = |conns| Counts {
            conns,
            ..Counts::default()
        };
        assert_eq!(rates(Some(&counts(9)), &counts(1), 1.0), [0.0; 5]);
    }

    #[test]
    fn numbers_are_short() {
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
