//! Findings with positions in a text, and readers for the keys of a table.

mod diagnostic;
mod files;
mod keys;

pub use diagnostic::{Diagnostic, Report, Severity};
pub(crate) use diagnostic::{Findings, KEPT_MAX, bounded};
pub use files::Files;
pub(crate) use files::read_at_most;
pub(crate) use keys::{Keys, Value, read_file, unknown_key};
