//! `lvsd status` and `lvsd check-health`: the state of the director as text.

mod director;
mod services;

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use lvs_api::Address;
use lvs_api::daemon::{MaintenanceSpec, ServiceStatus, Status};
use lvs_api::words::counted;

use self::director::{director, fault_lines, of_director};
use self::services::{Overrides, of_services};
use super::ask::connect;
use crate::clock::unix_time;
use crate::config::label;
use crate::verdict::{self, Level, Verdict};

/// Width of the output in columns, unless the terminal is narrower.
const COLUMNS: usize = 80;

/// Interval of updates of `--watch`.
const PERIOD: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    /// Shows only services with this name or address; `None` for all services.
    pub(super) name: Option<String>,
    /// Shows only broken services, and services with servers that are down, suspicious, slow or
    /// flapping.
    pub(super) broken: bool,
}

impl Selection {
    fn apply(&self, status: &mut Status) -> Result<(), String> {
        if let Some(name) = &self.name {
            status.services.retain(|service| has_name(service, name));
            if status.services.is_empty() {
                return Err(format!(
                    "there is no service `{name}`; `lvsd status` lists names and addresses"
                ));
            }
        }
        if self.broken {
            let services = &mut status.services;
            services.retain(|service| !verdict::is_well(service));
        }
        Ok(())
    }

    const fn is_all(&self) -> bool {
        self.name.is_none() && !self.broken
    }
}

/// Whether a service has this name, address (`192.0.2.10:80`) or label (`tcp 192.0.2.10:80`).
fn has_name(service: &ServiceStatus, name: &str) -> bool {
    let label = label(&service.service);
    let address = label.split_once(' ').map(|(_, address)| address);
    service.name == name || label == name || address == Some(name)
}

/// Format of the output.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    colour: bool,
    /// Maximum width of a line; if `None`, each server has one line of any length.
    width: Option<usize>,
    /// Whether the output contains check durations, failures and clients of all servers.
    details: bool,
}

impl Look {
    fn of_output(details: bool) -> Self {
        let output = io::stdout();
        if !output.is_terminal() {
            return Self {
                details,
                ..Self::default()
            };
        }
        let columns = window().map_or(COLUMNS, |(_, columns)| columns);
        Self {
            colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            width: Some(columns.clamp(COLUMNS / 2, COLUMNS)),
            details,
        }
    }

    /// Adds the colour of a state to a text, if the output has colours.
    fn paint(self, state: &str, text: String) -> String {
        let colour = match state {
            "down" | "broken" => 31,
            "suspicious" | "unknown" | "degraded" => 33,
            "ok" => 32,
            _ => return text,
        };
        match self.colour {
            true => format!("\x1b[{colour}m{text}\x1b[0m"),
            false => text,
        }
    }
}

/// Size of the terminal in lines and columns, if standard output is a terminal.
fn window() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then(|| (size.ws_row.into(), size.ws_col.into()))
}

pub(super) fn status(dataplane: &Address, selection: &Selection, json: bool) -> Result<(), String> {
    let mut status = connect(dataplane)?.status()?;
    if json {
        selection.apply(&mut status)?;
        let text = serde_json::to_string_pretty(&status).map_err(|error| error.to_string())?;
        return super::write((text + "\n").as_bytes());
    }
    let look = Look::of_output(selection.name.is_some());
    super::write(rendered(status, selection, look)?.as_bytes())
}

/// Prints the status repeatedly until interrupted, or until the selected service is missing or the
/// output fails. On a terminal, the status replaces the previous output.
pub(super) fn watch(dataplane: &Address, selection: &Selection) -> Result<(), String> {
    loop {
        let look = Look::of_output(selection.name.is_some());
        let status = connect(dataplane).and_then(|mut client| client.status());
        let mut text = match status {
            Ok(status) => rendered(status, selection, look)?,
            Err(why) => look.paint("broken", why) + "\n",
        };
        if let Some((lines, _)) = window() {
            text = format!("\x1b[H\x1b[2J{}", first_lines(&text, lines));
        }
        super::write(text.as_bytes())?;
        std::thread::sleep(PERIOD);
    }
}

/// Shortens a text for a terminal with `lines` lines. If lines are omitted, the last line shows
/// their number.
fn first_lines(text: &str, lines: usize) -> String {
    let all = text.lines().count();
    if all < lines {
        return text.to_owned();
    }
    let shown = lines.saturating_sub(2);
    let mut out: String = text.split_inclusive('\n').take(shown).collect();
    let _ = write!(out, "... and {} below", counted(all - shown, "line"));
    out
}

/// Formats the selected services of a status. The first line is a summary of the whole director.
fn rendered(mut status: Status, selection: &Selection, look: Look) -> Result<String, String> {
    let verdict = Verdict::of(&status);
    selection.apply(&mut status)?;
    let level = match verdict.level {
        Level::Ok => "ok",
        Level::Warning => "degraded",
        Level::Critical => "broken",
    };
    let mut text = look.paint(
        level,
        format!("{}: {}", verdict.level.name(), verdict.words),
    ) + "\n";
    if selection.is_all() {
        text.push_str(&of_director(&status, unix_time()));
    } else {
        // These faults may be the causes of the faults of servers.
        fault_lines(&mut text, &status);
    }
    // The lines of the director list all overrides.
    let overrides = Overrides::new(&status, unix_time());
    let overrides = (!selection.is_all()).then_some(&overrides);
    of_services(&mut text, &status, overrides, look);
    Ok(match look.width {
        Some(width) => wrapped(&text, width),
        None => text,
    })
}

/// Breaks lines longer than `width` at spaces, or within longer words. Colour codes have no width.
fn wrapped(text: &str, width: usize) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        let indent = (indent + 2).min(width / 2);
        let mut rest = line;
        let mut room = width;
        while let Some(end) = line_end(rest, room) {
            out.push_str(rest[..end].trim_end());
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            rest = rest[end..].trim_start();
            room = width - indent;
        }
        out.push_str(rest);
        out.push('\n');
    }
    out
}

/// The byte at which to break a line: at the last space in the first `room` columns, or without a
/// space after these columns. `None` if the line has at most `room` columns.
fn line_end(line: &str, room: usize) -> Option<usize> {
    let begin = line.len() - line.trim_start().len();
    let (mut columns, mut escape, mut space) = (0, false, None);
    for (at, char) in line.char_indices() {
        match char {
            '\x1b' => escape = true,
            'm' if escape => escape = false,
            _ if escape => {}
            _ if columns == room && char == ' ' => return Some(at),
            _ if columns == room => return Some(space.unwrap_or(at)),
            _ => {
                if char == ' ' && at > begin {
                    space = Some(at);
                }
                columns += 1;
            }
        }
    }
    None
}

/// Queries the running daemon, and returns the line and the exit code of a monitoring plugin; the
/// exit code is 3 if the daemon does not answer.
pub(super) fn check_health(dataplane: &Address) -> (String, u8) {
    match connect(dataplane).and_then(|mut client| client.status()) {
        Ok(status) => health_line(&Verdict::of(&status)),
        Err(why) => (format!("LVS UNKNOWN - {}\n", one_line(&why)), 3),
    }
}

fn health_line(verdict: &Verdict) -> (String, u8) {
    let code = match verdict.level {
        Level::Ok => 0,
        Level::Warning => 1,
        Level::Critical => 2,
    };
    let mut line = format!(
        "LVS {} - {} |",
        verdict.level.name(),
        one_line(&verdict.words)
    );
    for (name, number) in &verdict.numbers {
        let _ = write!(line, " {name}={number}");
    }
    line.push('\n');
    (line, code)
}

/// Replaces control characters by spaces, and `|` by `/`: monitoring systems read the text after a
/// `|` as performance data.
fn one_line(text: &str) -> String {
    let plain = |char: char| match char {
        '|' => '/',
        char if char.is_control() => ' ',
        char => char,
    };
    text.chars().map(plain).collect()
}

/// Starts maintenance if `on` is `Some(true)`, or ends it if `on` is `Some(false)`. Then prints the
/// state of maintenance, VRRP and announcements.
pub(super) fn maintenance(
    dataplane: &Address,
    on: Option<bool>,
    why: Option<String>,
    json: bool,
) -> Result<(), String> {
    let mut client = connect(dataplane)?;
    let status = match on {
        Some(on) => client.maintenance(&MaintenanceSpec { on, who: None, why })?,
        None => client.status()?.director,
    };
    let text = match json {
        true => serde_json::to_string_pretty(&status).map_err(|error| error.to_string())? + "\n",
        false => director(&status, unix_time()),
    };
    super::write(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use lvs_api::daemon::{
        AdminEntry, AdminSpec, AdminState, CheckNotMade, CheckStatus, DataplaneStatus, Maintenance,
        ProxyStatus, ServerStatus, ServiceKey, Target, VrrpStatus,
    };
    use lvs_core::api::{
        Confinement, Conflict, DownInterface, PeerStanding, ReasonCount, Refusals, ServiceId,
        SilentHop, TablesInfo, TablesState, Waiting,
    };
    use lvs_core::recent::RecentCount;

    use super::*;

    fn text_of(status: &Status, look: Look) -> String {
        let mut text = of_director(status, 1000);
        of_services(&mut text, status, None, look);
        text
    }

    #[test]
    fn status_text_shows_dataplane_confinement_proxy_quorum_and_each_server() {
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 10], 80).into(),
        };
        let server = |n: u8, health: &str, reason: &str| ServerStatus {
            server: ([10, 0, 0, n], 80).into(),
            configured: Some(1),
            admin: if n == 1 {
                AdminState::Drain
            } else {
                AdminState::Ready
            },
            health: health.to_owned(),
            since: Some(3723),
            code: String::new(),
            reason: reason.to_owned(),
            fix: String::new(),
            attempts: Default::default(),
            latency_us: None,
            checks: None,
            check_not_made: (n == 1).then(|| CheckNotMade {
                seconds: 62,
                reason: "too many open files".to_owned(),
            }),
            weight: Some(0),
            active: 7,
            inactive: 0,
        };
        let suspicious = ServerStatus {
            fix: "on 10.0.0.3: look".to_owned(),
            ..server(3, "suspicious", "15 of 20 connections got no answer")
        };
        let unnamed = |n| ServerStatus {
            configured: None,
            since: None,
            ..server(n, "unchecked", "")
        };
        let status = Status {
            pid: 7,
            version: "1".to_owned(),
            uptime: 59,
            services: vec![ServiceStatus {
                name: "web".to_owned(),
                service,
                proxied: false,
                usable: 0,
                quorum: false,
                panic: false,
                sorry: None,
                sorry_server: Some(([10, 0, 0, 9], 80).into()),
                withdrawn: false,
                conflict: false,
                unheard: false,
                refusals: Vec::new(),
                drops: Vec::new(),
                servers: vec![
                    server(1, "up", ""),
                    server(2, "down", "connection refused"),
                    suspicious,
                    unnamed(8),
                    unnamed(9),
                ],
            }],
            proxy: Some(ProxyStatus {
                connections: 1,
                most: 2,
                full: 3,
                evicted: 4,
                refused: 5,
            }),
            dataplane: DataplaneStatus {
                confinement: Some(Confinement {
                    by: vec!["landlock".to_owned()],
                    not_by: vec!["seccomp (why)".to_owned()],
                }),
                ..DataplaneStatus::default()
            },
            ..Status::default()
        };
        let text = text_of(&status, Look::default());
        for words in [
            "lvsd 1 (pid 7), up 59s; NO DATAPLANE answers",
            "\nlvsd is not confined; the dataplane is confined by landlock, not by seccomp (why)\n",
            "\nproxied connections: 1 (maximum 2); 3 refused at the maximum, 4 evicted, 5 refused without a usable server, or by a limit or filter\n",
            "web (tcp 192.0.2.10:80): 0 of 3 servers usable; BELOW ITS QUORUM",
            "10.0.0.1:80           up 1h02m          weight 0   active 7     inactive 0  drain; NOT CHECKED for 1m02s: too many open files\n",
            "down 1h02m        weight 0   active 7     inactive 0  connection refused\n",
            "15 of 20 connections got no answer\n    fix: on 10.0.0.3: look\n",
            "10.0.0.8:80           unchecked         weight 0   active 7     inactive 0  not in the file\n",
            "10.0.0.9:80           unchecked         weight 0   active 7     inactive 0  sorry server\n",
        ] {
            assert!(text.contains(words), "no {words:?} in:\n{text}");
        }
    }

    #[test]
    fn status_text_shows_peers_of_connected_dataplane_only_and_cause_of_its_wait() {
        let peer = |n: u8, state: &str, seconds: u64, missing: u64, trouble: &str| PeerStanding {
            peer: ([192, 0, 2, n], 8848).into(),
            state: state.to_owned(),
            seconds,
            missing,
            trouble: trouble.to_owned(),
        };
        let mut status = Status::default();
        status.dataplane.connected = true;
        status.dataplane.peers = vec![
            peer(2, "in step", 0, 0, ""),
            peer(3, "away", 13, 0, "no route to host"),
            peer(4, "behind", 5, 7, ""),
        ];
        status.dataplane.tables = vec![TablesInfo {
            peer: ([192, 0, 2, 2], 8848).into(),
            state: TablesState::Alike,
            differ: 0,
            seconds: 0,
        }];
        let text = text_of(&status, Look::default());
        for line in [
            "peer 192.0.2.2: in step; the same services and servers as this director\n",
            "PEER NOT IN STEP: 192.0.2.3 (away for 13s): no route to host; its connections break if this director takes over. To do: run lvsadm sync on both directors",
            "\npeer 192.0.2.3: AWAY for 13s\n",
            "peer 192.0.2.4: BEHIND for 5s, 7 connections missing\n",
        ] {
            assert!(text.contains(line), "no {line:?} in:\n{text}");
        }
        status.dataplane.waiting = vec![Waiting {
            code: "interface_missing".to_owned(),
            what: "eth7 is missing".to_owned(),
            fix: "make it".to_owned(),
            since: None,
        }];
        let text = text_of(&status, Look::default());
        assert!(
            text.contains("NOT IN USE: eth7 is missing. To do: make it\n"),
            "no `NOT IN USE: eth7 is missing. To do: make it` in {text}"
        );
        status.dataplane.connected = false;
        assert!(!text_of(&status, Look::default()).contains("peer "));
    }

    /// A director with a suspicious server in the service `api`, and another service without
    /// faults.
    fn suspicious() -> Status {
        let mut snapshot = crate::api::overview::tests::snapshot("web");
        let web = &mut snapshot.status.services[0];
        web.servers.truncate(1);
        let mut api = web.clone();
        api.name = "api".to_owned();
        let server = &mut api.servers[0];
        server.health = "suspicious".to_owned();
        server.reason =
            "15 of 20 connections of clients got no answer in the last minute".to_owned();
        server.fix = "on 10.0.0.1: is this director its default gateway (ip route)?".to_owned();
        server.checks = Some(CheckStatus {
            last_us: 1_234,
            p50_us: 1_280,
            p99_us: 700_000,
            slow_in_a_row: 0,
            falls_in_day: 7,
            down_seconds_in_day: 98,
            since_fall: Some(5),
            fall_reason: "connection refused".to_owned(),
            falls: 9,
            down_seconds: 200,
            own_address: "this director does not have 192.0.2.10".to_owned(),
        });
        server.attempts.last_5_minutes.opened = 20;
        server.latency_us = Some(1_234);
        snapshot.status.services.push(api);
        snapshot.status
    }

    fn refused(reason: &str, recent: u64) -> Refusals {
        Refusals {
            reason: reason.to_owned(),
            packets: RecentCount {
                count: recent,
                recent,
                last_minute: recent / 2,
                since: Some(130),
                ago: Some(4),
            },
        }
    }

    fn dropped(reason: &str) -> ReasonCount {
        ReasonCount {
            action: "drop".to_owned(),
            reason: reason.to_owned(),
            packets: RecentCount {
                count: 500,
                recent: 12,
                last_minute: 3,
                since: Some(130),
                ago: Some(4),
            },
            help: String::new(),
            fix: String::new(),
        }
    }

    #[test]
    fn status_text_shows_dropped_and_refused_packets_with_reason_rate_and_times() {
        let mut status = suspicious();
        status.dataplane.drops = vec![dropped("no_server")];
        status.services[0].refusals = vec![refused("no_server", 8), refused("filtered", 1)];
        status.services[0].drops = vec![refused("no_route", 2)];
        let text = text_of(&status, Look::default());
        for line in [
            "\ndropped in five minutes: 12 no_server (3 in the last minute, first 2m10s ago, last 4s ago). To do: `lvsadm drops` lists the meaning and the fix of each reason\n",
            " usable\n  refused in five minutes: 8 no_server (4 in the last minute, first 2m10s ago, last 4s ago)\n  dropped in five minutes: 2 no_route (1 in the last minute, first 2m10s ago, last 4s ago)\n",
        ] {
            assert!(text.contains(line), "no {line:?} in:\n{text}");
        }
        status.dataplane.drops = ["a", "b", "c", "d", "e"].map(dropped).to_vec();
        let text = text_of(&status, Look::default());
        assert!(
            text.contains("last 4s ago), 2 other reasons. To do"),
            "no `last 4s ago), 2 other reasons. To do` in {text}"
        );
    }

    /// A status with long names, IPv6 addresses, large numbers, suspicious and down servers, and
    /// most of the lines about a director.
    fn wide() -> Status {
        let mut status = suspicious();
        status.version = "0.12.13-rc1".to_owned();
        status.config = format!("/etc/lvsd/{}.toml", "long-name".repeat(12));
        status.dataplane.version = Some("0.12.12".to_owned());
        status.dataplane.down = vec![DownInterface {
            interface: "enp129s0f1np1".to_owned(),
            since: Some(90_000),
        }];
        status.dataplane.conflicts = vec![Conflict {
            code: Conflict::VIP.to_owned(),
            interface: "enp129s0f1np1".to_owned(),
            own_mac: "aa:bb:cc:dd:ee:00".to_owned(),
            address: "2001:db8:1234:5678:9abc:def0:1234:5678".parse().unwrap(),
            mac: "aa:bb:cc:dd:ee:ff".to_owned(),
            host: None,
            answers: refused("", 7).packets,
        }];
        status.dataplane.drops = ["no_server", "source_rate", "table_full", "too_big"]
            .map(dropped)
            .to_vec();
        status.services[0].refusals = vec![refused("no_server", 1_000_000)];
        status.services[0].drops = status.services[0].refusals.clone();
        status.dataplane.silent_hops = vec![SilentHop {
            address: "2001:db8:1234:5678:9abc:def0:1234:5678".parse().unwrap(),
            interface: "enp129s0f1np1".to_owned(),
            since: 90_000,
        }];
        status.dataplane.waiting = vec![Waiting {
            code: "interface_missing".to_owned(),
            what: "this host does not have the configured interface enp129s0f0np0".to_owned(),
            fix: "make it, or take it out of [dataplane] interface".to_owned(),
            since: Some(90_000),
        }];
        status.director.maintenance = Some(Maintenance {
            who: Some("ann".to_owned()),
            why: Some("new disks in both of the hosts of this rack, until tomorrow".to_owned()),
            since: 900,
        });
        status.director.vrrp = Some(VrrpStatus {
            state: "backup".to_owned(),
            waits_for: "the connections of 2001:db8:1234:5678:9abc:def0:1234:5678".to_owned(),
            ..VrrpStatus::default()
        });
        let api = &mut status.services[1];
        api.name = "a-service-with-a-very-long-name-of-the-department-of-long-names".to_owned();
        api.service = ServiceId::Tcp {
            address: "[2001:db8:1234:5678:9abc:def0:1234:5678]:65535"
                .parse()
                .unwrap(),
        };
        let mut wide = api.servers[0].clone();
        wide.server = "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535"
            .parse()
            .unwrap();
        wide.since = Some(725);
        wide.weight = Some(65_535);
        wide.active = 4_000_000_000;
        wide.inactive = 1_234_567;
        wide.reason = "x".repeat(200);
        let mut down = api.servers[0].clone();
        down.server = "255.255.255.255:65535".parse().unwrap();
        down.health = "down".to_owned();
        down.reason = "did not answer within 1s".to_owned();
        api.servers.extend([wide, down]);
        status
    }

    /// Removes colour codes.
    fn plain(text: &str) -> String {
        let mut parts = text.split('\x1b');
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            out.push_str(part.split_once('m').map_or("", |(_, text)| text));
        }
        out
    }

    #[test]
    fn status_lines_fit_terminal_of_80_columns_and_have_colour_only_on_request() {
        for details in [false, true] {
            for colour in [false, true] {
                let look = Look {
                    colour,
                    width: Some(80),
                    details,
                };
                let text = rendered(wide(), &Selection::default(), look).unwrap();
                assert_eq!(text.contains('\x1b'), colour);
                for line in plain(&text).lines() {
                    assert!(line.chars().count() <= 80, "{line}\n{text}");
                }
            }
        }
        let look = Look::default();
        let text = rendered(wide(), &Selection::default(), look).unwrap();
        assert!(!text.contains('\x1b'), "{text}");
    }

    #[test]
    fn status_row_with_longest_ipv4_address_fits_80_columns() {
        let mut status = suspicious();
        let server = &mut status.services[1].servers[0];
        server.server = "255.255.255.255:65535".parse().unwrap();
        server.since = Some(725);
        (server.active, server.inactive) = (99_999, 99_999);
        let look = Look {
            width: Some(80),
            ..Look::default()
        };
        let text = rendered(status, &Selection::default(), look).unwrap();
        let row =
            "\n  255.255.255.255:65535 suspicious 12m05s weight 1   active 99999 inactive 99999\n";
        assert!(text.contains(row), "no {row:?} in {text}");
        assert!(row.trim_matches('\n').len() <= 80);
    }

    #[test]
    fn detailed_status_text_lists_worst_services_and_servers_first() {
        let look = Look {
            colour: true,
            width: Some(80),
            details: true,
        };
        let mut status = suspicious();
        let mut down = status.services[1].servers[0].clone();
        down.health = "down".to_owned();
        status.services[1].servers.push(down);
        let text = rendered(status, &Selection::default(), look).unwrap();
        assert!(
            text.starts_with(
                "\x1b[33mWARNING: 1 server down; 1 server suspicious; 2 servers flapping\x1b[0m\n"
            ),
            "does not begin with `\x1b[33mWARNING: 1 server down; 1 server suspicious; 2 servers flapping\x1b[0m`: {text}"
        );
        let place = |words: &str| {
            text.find(words)
                .unwrap_or_else(|| panic!("{words}: {text}"))
        };
        assert!(place("api (tcp") < place("web (tcp"), "{text}");
        assert!(
            place("\x1b[31mdown 1m00s") < place("\x1b[33msuspicious 1m00s"),
            "{text}"
        );
        let plain = plain(&text);
        let words: Vec<&str> = plain.split_whitespace().collect();
        let words = words.join(" ");
        for printed in [
            "15 of 20 connections of clients got no answer in the last minute; went down 7 times in 24 h, last 5s ago, for 1m38s in total",
            "; checks take 1.2 ms (5 minutes: p50 1.2 ms, p99 700 ms)",
            "clients opened 20 connections in 5 minutes, 0 without an answer",
            "the server answers new connections in 1.2 ms",
            "fix: on 10.0.0.1: is this director its default gateway",
        ] {
            assert!(words.contains(printed), "no {printed:?} in {words}");
        }
    }

    #[test]
    fn server_with_three_slow_checks_or_three_falls_has_note_in_status_without_details() {
        let shown = |slow_in_a_row, falls_in_day| {
            let mut status = suspicious();
            let server = &mut status.services[1].servers[0];
            server.health = "up".to_owned();
            server.checks = Some(CheckStatus {
                slow_in_a_row,
                falls_in_day,
                since_fall: Some(5),
                fall_reason: "has status 500".to_owned(),
                ..CheckStatus::default()
            });
            let text = text_of(&status, Look::default());
            let falls = "for 0s in total; the last reason: has status 500";
            (text.contains("checks take"), text.contains(falls))
        };
        assert_eq!(shown(2, 2), (false, false));
        assert_eq!(shown(3, 2), (true, false));
        assert_eq!(shown(2, 3), (false, true));
    }

    #[test]
    fn watched_status_is_shortened_to_terminal_height_with_number_of_omitted_lines() {
        let text = "a\nb\nc\nd\n";
        assert_eq!(first_lines(text, 5), text);
        assert_eq!(first_lines(text, 4), "a\nb\n... and 2 lines below");
        assert_eq!(first_lines(text, 1), "... and 4 lines below");
    }

    #[test]
    fn status_of_one_service_shows_operator_time_and_reason_of_each_override() {
        let mut status = suspicious();
        let service = &mut status.services[0];
        let address = service.servers[0].server;
        let target = Target {
            service: None,
            host: address.ip(),
            port: None,
        };
        let spec = AdminSpec {
            target,
            state: AdminState::Maintenance,
            who: Some("ann".to_owned()),
            why: Some("new disk".to_owned()),
            until: Some(1600),
            force: false,
        };
        let of_service = AdminSpec {
            target: Target {
                service: Some(ServiceKey(service.service)),
                ..target
            },
            state: AdminState::Drain,
            who: None,
            why: None,
            until: None,
            ..spec
        };
        service.servers[0].admin = AdminState::Maintenance;
        let note = |status: &Status| {
            let service = &status.services[0];
            Overrides::new(status, 1000).note(service, &service.servers[0])
        };
        let since = 400;
        status.admin = vec![AdminEntry { spec, since }];
        assert_eq!(
            note(&status),
            format!(
                "maintenance for 10m00s by ann, ends in 10m00s: new disk (ends with: lvsadm undrain all {address})"
            )
        );
        status.services[0].servers[0].admin = AdminState::Drain;
        assert_eq!(
            note(&status),
            format!("drain, weight 0 was set by hand (ends with: lvsadm undrain web {address})")
        );
        let spec = of_service;
        status.admin.push(AdminEntry { spec, since });
        assert_eq!(
            note(&status),
            format!("drain for 10m00s by ? (ends with: lvsadm undrain web {address})")
        );
        let named = |name: Option<&str>| {
            let selection = Selection {
                name: name.map(str::to_owned),
                broken: false,
            };
            rendered(status.clone(), &selection, Look::default()).expect("the service exists")
        };
        assert!(named(Some("web")).contains("by ? (ends with"));
        assert!(!named(None).contains("ends with"));
    }

    #[test]
    fn status_selects_services_by_name_address_or_broken_state_and_refuses_unknown_name() {
        let names = |selection: &Selection| {
            let mut status = suspicious();
            selection.apply(&mut status)?;
            let services = status.services.iter();
            Ok::<_, String>(services.map(|one| one.name.clone()).collect::<Vec<_>>())
        };
        let named = |name: &str| Selection {
            name: Some(name.to_owned()),
            broken: false,
        };
        let broken = Selection {
            name: None,
            broken: true,
        };
        assert_eq!(names(&Selection::default()).unwrap(), ["web", "api"]);
        assert_eq!(names(&named("api")).unwrap(), ["api"]);
        assert_eq!(names(&named("192.0.2.10:80")).unwrap(), ["web", "api"]);
        assert_eq!(names(&named("tcp 192.0.2.10:80")).unwrap(), ["web", "api"]);
        assert_eq!(names(&broken).unwrap(), ["api"]);
        let why = names(&named("mail")).unwrap_err();
        assert!(
            why.contains("no service `mail`"),
            "no \"no service `mail`\" in {why}"
        );
    }

    #[test]
    fn health_line_replaces_reserved_characters_and_has_performance_data_and_exit_code() {
        let (line, code) = health_line(&Verdict::of(&suspicious()));
        assert_eq!(code, 1);
        assert_eq!(
            line,
            "LVS WARNING - 1 server suspicious; 1 server flapping | services=2 broken=0 degraded=0 servers=2 usable=2 down=0 suspicious=1 flapping=1 slow=0 out_of_service=0\n"
        );
        let verdict = Verdict {
            level: Level::Critical,
            words: "a|b\nc".to_owned(),
            numbers: Vec::new(),
        };
        assert_eq!(
            health_line(&verdict),
            ("LVS CRITICAL - a/b c |\n".to_owned(), 2)
        );
    }
}
