//! `lvsadm -R --atomic`: applies all lines or none.
//!
//! The lines become one call, `apply`. The dataplane checks all of it before it changes its
//! configuration.

use std::io;

use lvs_api::Error;
use lvs_core::api::{Call, Done, Failure};
use lvs_core::ipvsadm::{Command, failure_text, rules};

use crate::invocation::Invocation;
use crate::session::warn;

/// Returns the words without `--atomic` if the command is `-R --atomic`.
pub(crate) fn restore_words(words: &[Vec<u8>]) -> Option<Vec<Vec<u8>>> {
    let rest: Vec<Vec<u8>> = words
        .iter()
        .filter(|word| *word != b"--atomic")
        .cloned()
        .collect();
    let restore = |word: &Vec<u8>| word == b"-R" || word == b"--restore";
    (rest.len() < words.len() && rest.first().is_some_and(restore)).then_some(rest)
}

pub(crate) fn restore(run: &mut Invocation<'_>, words: &[Vec<u8>]) -> io::Result<u8> {
    if let Err(refusal) = run.parse(words) {
        run.errors.write_all(refusal.text())?;
        return Ok(refusal.status());
    }
    let mut text = Vec::new();
    run.input.read_to_end(&mut text)?;
    let lines = match read(run, &text) {
        Ok(lines) => lines,
        Err(WrongLine { number, text }) => return refuse(run, Some(number), &text),
    };
    let mut client = match run.client() {
        Ok(client) => client,
        Err(reason) => {
            writeln!(run.errors, "{}: {reason}", run.argv0)?;
            return Ok(2);
        }
    };
    let (lines, changes): (Vec<_>, Vec<_>) = lines
        .into_iter()
        .map(|line| ((line.number, line.command), line.call))
        .unzip();
    match client.call::<Done>(&Call::Apply { changes }) {
        Ok(done) => {
            warn(run, &done)?;
            Ok(0)
        }
        Err(Error::Refused(failure)) => {
            let line = failure.change.and_then(|change| lines.get(change));
            refuse(
                run,
                line.map(|(number, _)| *number),
                refusal_text(line, &failure),
            )
        }
        // Without an answer, the changes may have been made or not.
        Err(error) => {
            writeln!(
                run.errors,
                "{}: {error}; `{} -Ln` shows whether the lines were applied",
                run.argv0, run.argv0
            )?;
            Ok(255)
        }
    }
}

/// A line of the input, and the call for it.
struct Line {
    number: usize,
    command: Command,
    call: Call,
}

/// A line that is invalid, or that `-R --atomic` does not permit.
struct WrongLine {
    number: usize,
    text: String,
}

fn read(run: &Invocation<'_>, text: &[u8]) -> Result<Vec<Line>, WrongLine> {
    let mut lines = Vec::new();
    for (number, words) in rules(text) {
        let wrong = |text: String| WrongLine { number, text };
        let command = run
            .parse(&words)
            .map_err(|refusal| wrong(refusal.of_line(&words)))?;
        let call = command.call().ok_or_else(|| {
            wrong("`-R --atomic' accepts only commands that change the configuration".into())
        })?;
        lines.push(Line {
            number,
            command,
            call,
        });
    }
    Ok(lines)
}

/// Returns ipvsadm's message for a refused line, or the dataplane's message if no single line is at
/// fault.
fn refusal_text<'a>(line: Option<&(usize, Command)>, failure: &'a Failure) -> &'a str {
    line.map_or(&failure.message, |(_, command)| {
        failure_text(command, failure)
    })
}

fn refuse(run: &mut Invocation<'_>, line: Option<usize>, text: &str) -> io::Result<u8> {
    let place = line.map_or_else(String::new, |line| format!("line {line}: "));
    writeln!(
        run.errors,
        "{}: {place}{}; nothing was changed",
        run.argv0,
        text.trim_end()
    )?;
    Ok(255)
}
