//! Findings with their position in a text, and reading the keys of a table; used by the
//! configuration and by all types of checks.

mod diagnostic;
mod files;
mod keys;
mod unknown;
mod value;

pub use diagnostic::{Diagnostic, Report, Severity};
pub(crate) use diagnostic::{Findings, KEPT_MAX, bounded};
pub use files::Files;
pub(crate) use files::read_at_most;
pub(crate) use keys::{Keys, read_file};
pub(crate) use unknown::unknown_key;
pub(crate) use value::Value;
