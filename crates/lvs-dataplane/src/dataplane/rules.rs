//! Rules in the form of `ipvsadm-save`, applied when the dataplane starts.

use lvs_core::ipvsadm::{Command, Lines, failure_text, parse_own};

use super::config::RulesError;
use super::handle::Handle;
use lvs_api::names::Names;

/// Applies all lines of a file. The first invalid line is an error, and the dataplane does not
/// start. Comments (`#`) and empty lines are skipped, as in `ipvsadm-restore`.
pub(super) fn apply(handle: &Handle, text: &str, file: &str) -> Result<(), RulesError> {
    let names = Names::system();
    for (number, line) in text.lines().enumerate() {
        if line.starts_with('#') {
            continue;
        }
        let fail = |message: String| RulesError {
            file: file.to_owned(),
            line: number + 1,
            message: message.trim_end().to_owned(),
        };
        let mut lines = Lines::default();
        let words = line
            .bytes()
            .find_map(|byte| lines.push(byte))
            .or_else(|| lines.finish());
        let Some(words) = words.filter(|words| !words.is_empty()) else {
            continue;
        };
        let command = parse_own("lvs-dataplane", &words, &names)
            .map_err(|refusal| fail(refusal.of_line(&words)))?;
        let call = match &command {
            Command::List(_) | Command::Save { .. } => None,
            command => command.call(),
        };
        let Some(call) = call else {
            return Err(fail(
                "a file of rules can contain only commands that change the configuration".into(),
            ));
        };
        handle
            .apply(vec![call], false)
            .map_err(|failure| fail(failure_text(&command, &failure).to_owned()))?;
    }
    Ok(())
}
