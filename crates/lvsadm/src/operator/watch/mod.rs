//! `lvsadm watch`: services and servers with their rates, refreshed at an interval.

mod table;
mod terminal;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use lvs_core::api::{Call, ServiceInfo};

use lvs_api::Client;

use self::table::{Before, Sort, lines, table};
use self::terminal::{Key, Terminal, wait};
use super::{Outcome, Trouble, Words, connect};
use crate::invocation::Invocation;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let interval = match words.number::<f64>("--interval")?.unwrap_or(1.0) {
        seconds if (0.1..=3600.0).contains(&seconds) => Duration::from_secs_f64(seconds),
        seconds => {
            return Err(Trouble::Usage(format!(
                "--interval {seconds}: expected 0.1 to 3600 seconds"
            )));
        }
    };
    let count: Option<u64> = words.number("--count")?;
    let sort = match words.value("--sort") {
        None => Sort::Rate,
        Some(text) => Sort::of(text).ok_or_else(|| {
            Trouble::Usage(format!(
                "--sort {text}: expected rate, bytes, active or name"
            ))
        })?,
    };
    let mut client = connect(run)?;
    let terminal = Terminal::take();
    let colors = terminal.is_some()
        && !words.has("--no-color")
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let screen = Screen { terminal, colors };
    if screen.terminal.is_some() {
        // The alternate screen, without cursor.
        run.output.write_all(b"\x1b[?1049h\x1b[?25l")?;
    }
    let result = refresh(run, &mut client, &screen, interval, (count, sort));
    if screen.terminal.is_some() {
        run.output.write_all(b"\x1b[?25h\x1b[?1049l")?;
        run.output.flush()?;
    }
    result
}

/// Draws the table at each interval, until it was drawn `count` times or a key ends the command.
fn refresh(
    run: &mut Invocation<'_>,
    client: &mut Client,
    screen: &Screen,
    interval: Duration,
    (mut count, mut sort): (Option<u64>, Sort),
) -> Outcome {
    let mut before = Before::new();
    let mut looked: Option<Instant> = None;
    loop {
        let services: Vec<ServiceInfo> = client.collect(&Call::ServiceList { service: None })?;
        let seconds = looked.map_or(1.0, |at| at.elapsed().as_secs_f64().max(0.001));
        looked = Some(Instant::now());
        screen.draw(run.output, &services, &mut before, seconds, sort)?;
        if let Some(count) = &mut count {
            *count = count.saturating_sub(1);
            if *count == 0 {
                return Ok(0);
            }
        }
        match wait(run, screen.terminal.as_ref(), interval) {
            Some(Key::Quit) => return Ok(0),
            Some(Key::Sort) => sort = sort.next(),
            None => {}
        }
    }
}

/// How the table is shown: redrawn on a terminal, or else printed again at each interval.
struct Screen {
    terminal: Option<Terminal>,
    colors: bool,
}

impl Screen {
    fn draw(
        &self,
        out: &mut dyn Write,
        services: &[ServiceInfo],
        before: &mut Before,
        seconds: f64,
        sort: Sort,
    ) -> io::Result<()> {
        let (height, width) = match self.terminal {
            Some(_) => Terminal::size(),
            None => (usize::MAX, usize::MAX),
        };
        let blocks = table(services, before, seconds, sort);
        let mut text = lines(&blocks, sort, width, self.colors);
        if self.terminal.is_some() {
            let height = height.saturating_sub(2);
            let cut = text.len().saturating_sub(height);
            text.truncate(height);
            // Overwriting each line in place avoids flicker. Then the rest of the screen is
            // cleared.
            out.write_all(b"\x1b[H")?;
            for line in &text {
                write!(out, "{line}\x1b[K\r\n")?;
            }
            let more = if cut > 0 {
                format!("{cut} more lines; ")
            } else {
                String::new()
            };
            write!(out, "\x1b[J{more}q quits, s sorts")?;
        } else {
            for line in &text {
                writeln!(out, "{line}")?;
            }
            writeln!(out)?;
        }
        out.flush()
    }
}
