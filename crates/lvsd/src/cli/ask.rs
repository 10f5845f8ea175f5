//! Requests to the running daemon: a reload, its status, its events.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::time::Duration;

use lvs_api::daemon::{Client, Event, Reloaded, Status};
use lvs_api::{Address, starting};

use crate::channels::unix_ms;

pub(super) fn connect(dataplane: &Address) -> Result<Client, String> {
    starting::connect_daemon(dataplane)?.ok_or_else(|| {
        format!(
            "no lvsd is running for the dataplane at {dataplane}; start it with `systemctl start lvsd`"
        )
    })
}

/// Requests a reload from the daemon; `None` if no daemon runs, or it has no control socket.
pub(super) fn reload(dataplane: &Address, force: bool) -> Result<Option<Reloaded>, String> {
    let Some(mut client) = starting::connect_daemon(dataplane)? else {
        return Ok(None);
    };
    client.reload(force).map(Some)
}

/// The status of the running daemon; `None` if no daemon answers.
pub(super) fn running(dataplane: &Address) -> Option<Status> {
    Client::connect(dataplane).ok().flatten()?.status().ok()
}

/// Prints new events until interrupted; with `last` or `since`, past events.
pub(super) fn events(
    dataplane: &Address,
    last: Option<usize>,
    since: Option<Duration>,
    json: bool,
) -> Result<(), String> {
    let mut output = io::stdout().lock();
    let mut print = |event: &Event| {
        let line = match json {
            true => serde_json::to_string(event).unwrap_or_default(),
            false => event_line(event),
        };
        writeln!(output, "{line}").and_then(|()| output.flush())
    };
    let mut client = connect(dataplane)?;
    if last.is_none() && since.is_none() {
        return client.events(|event| print(&event).is_ok());
    }
    let events = client.past_events()?;
    for event in past(&events, last, since, unix_ms()) {
        super::written(print(event))?;
    }
    Ok(())
}

/// The events of the period `since` before `now_ms`, and of these at most the newest `last`.
fn past(events: &[Event], last: Option<usize>, since: Option<Duration>, now_ms: u64) -> &[Event] {
    let since = since.map_or(0, |time| {
        now_ms.saturating_sub(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    });
    // Events may not be sorted by time, because the wall clock may have been set back.
    let older = events.iter().rposition(|event| event.time_ms < since);
    let begin = older.map_or(0, |older| older + 1);
    let begin = begin.max(events.len().saturating_sub(last.unwrap_or(usize::MAX)));
    &events[begin..]
}

fn event_line(event: &Event) -> String {
    let mut line = format!("{} {}", clock(event.time_ms / 1000), event.event);
    if let Some(service) = &event.service {
        let _ = write!(line, " {service}");
    }
    if let Some(server) = &event.server {
        let _ = write!(line, " {server}");
    }
    let address = event.server.map(|server| format!("{server}: "));
    let message = event.message.as_str();
    let short = address.and_then(|address| message.strip_prefix(&address));
    let _ = write!(line, ": {}", short.unwrap_or(message));
    line
}

/// Formats a time in seconds since 1970 as `2026-11-28T09:05:00Z`.
fn clock(unix: u64) -> String {
    let (hours, minutes, seconds) = (unix / 3600 % 24, unix / 60 % 60, unix % 60);
    let (year, month, day) = date(unix / 86_400);
    format!("{year}-{month:02}-{day:02}T{hours:02}:{minutes:02}:{seconds:02}Z")
}

/// Year, month and day of a number of days since 1970. The computation uses years from March to
/// February, so that the leap day is the last day.
const fn date(day: u64) -> (u64, u64, u64) {
    // Number of days since 1 March of the year 0; then the day in the cycle of 400 years.
    let days = day + 719_468;
    let in_era = days % 146_097;
    let year = (in_era - in_era / 1_460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year + year / 4 - year / 100);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - (153 * month + 2) / 5 + 1;
    let year = days / 146_097 * 400 + year;
    match month {
        0..10 => (year, month + 3, day),
        _ => (year + 1, month - 9, day),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_events_are_limited_by_number_and_time() {
        let event = |n: u64| Event {
            seq: n,
            time_ms: n * 1000,
            event: "drift".to_owned(),
            code: String::new(),
            service: None,
            id: None,
            server: None,
            message: String::new(),
        };
        let events: Vec<Event> = (1..=10).map(event).collect();
        let seconds = |s| Some(Duration::from_secs(s));
        let count = |last, since| past(&events, last, since, 11_000).len();
        assert_eq!(count(Some(3), None), 3);
        assert_eq!(count(None, seconds(5)), 5);
        assert_eq!(count(Some(3), seconds(5)), 3);
        assert_eq!(count(Some(50), seconds(1_000)), 10);
        assert_eq!(count(Some(0), None), 0);
        // The clock was set back by an hour after the second event.
        let mut stepped = events[..4].to_vec();
        for event in &mut stepped[..2] {
            event.time_ms += 3_600_000;
        }
        assert_eq!(past(&stepped, None, seconds(5), 5_000).len(), 4);
        assert_eq!(past(&stepped, None, seconds(1), 4_500).len(), 1);
    }

    #[test]
    fn event_line_contains_utc_date_and_server_address_once() {
        let event = Event {
            seq: 1,
            time_ms: 1_795_856_749_838,
            event: "server_down".to_owned(),
            code: "refused".to_owned(),
            service: Some("mail".to_owned()),
            id: None,
            server: Some(([10, 0, 0, 11], 25).into()),
            message: "10.0.0.11:25: connection refused".to_owned(),
        };
        assert_eq!(
            event_line(&event),
            "2026-11-28T09:05:49Z server_down mail 10.0.0.11:25: connection refused"
        );
        for (day, expected) in [
            (0, (1970, 1, 1)),
            (10_956, (1999, 12, 31)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(date(day), expected);
        }
    }
}
