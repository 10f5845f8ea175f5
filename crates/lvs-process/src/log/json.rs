//! Log lines as JSON objects, for programs that collect the logs of containers.

use std::fmt::{self, Write as _};

use serde_json::Value;
use tracing::Level;
use tracing::field::{Field, Visit};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Maximum length of a value in bytes: a line with two values of this length fits into the queue,
/// even if every byte must be escaped.
const VALUE_MAX: usize = 1200;

#[derive(Debug, Default)]
pub(super) struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    /// The event as a JSON line.
    pub(super) fn line(&self, program: &str, level: Level) -> String {
        line(program, level, &self.message, &self.others)
    }

    fn add(&mut self, field: &Field, value: Value) {
        self.others.push((field.name(), value));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            _ => self.add(field, text.into()),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            _ => self.add(field, value.into()),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}

/// A JSON line: time, level, program and message, then `others`. Long values are shortened.
pub(super) fn line(
    program: &str,
    level: Level,
    message: &str,
    others: &[(&'static str, Value)],
) -> String {
    let mut time = String::new();
    // If the clock cannot be read, the line is still written.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    let mut line = String::from("{");
    for (name, value) in [
        ("time", time.as_str()),
        ("level", level.as_str()),
        ("program", program),
        ("message", cut(message)),
    ] {
        let comma = if name == "time" { "" } else { "," };
        let _ = write!(line, "{comma}\"{name}\":{}", Value::from(value));
    }
    for (name, value) in others {
        let value = match value {
            Value::String(text) => Value::from(cut(text)),
            other => other.clone(),
        };
        let _ = write!(line, ",{}:{value}", Value::from(*name));
    }
    line.push('}');
    line
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(VALUE_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_log_line_with_quotes_and_line_feeds_is_one_object() {
        let text = line(
            "lvsd",
            Level::WARN,
            "two\nlines and a \"word\"",
            &[("service", "web".into()), ("pid", 7_u64.into())],
        );
        assert!(!text.contains('\n'), "{text}");
        let object: Value = serde_json::from_str(&text).expect("the JSON is valid");
        assert_eq!(object["level"], "WARN");
        assert_eq!(object["program"], "lvsd");
        assert_eq!(object["message"], "two\nlines and a \"word\"");
        assert_eq!(object["service"], "web");
        assert_eq!(object["pid"], 7);
        let time = object["time"].as_str().expect("`time` is a text");
        assert!(time.ends_with('Z') && time.contains('T'), "{time}");
    }

    #[test]
    fn long_json_log_message_is_cut_off_and_line_stays_valid() {
        for long in ["\u{1}".repeat(100_000), "ä".repeat(100_000)] {
            let text = line("lvsd", Level::INFO, &long, &[("a", long.as_str().into())]);
            assert!(text.len() < 16 << 10, "the line has {} bytes", text.len());
            let object: Value = serde_json::from_str(&text).expect("the JSON is valid");
            let message = object["message"].as_str().expect("`message` is a text");
            assert!(message.len() >= VALUE_MAX - 1, "{}", message.len());
        }
    }
}
