//! Types of the control protocol: the requests of `lvsadm`, `lvsd` and other clients over a Unix
//! socket, and the dataplane's answers. [`Changes`] applies requests to a
//! [`Control`](crate::Control).
//!
//! Each line is one JSON object, in both directions. A request is `{"id": 1, "method":
//! "service.add", "params": {...}}`; its answer is `{"id": 1, "result": {...}}` or `{"id": 1,
//! "error": {"code": "exists", "message": "..."}}`. A long answer consists of lines `{"id": 1,
//! "item": {...}}` and a final line with `result`. The first request of a connection is `hello`.

// This module is first, because later modules use its macros.
#[macro_use]
mod call;

mod apply;
mod listing;
mod plan;
mod types;

pub use self::apply::{Applied, CHANGES_MAX, Changes, Done, Host, Need, Permissive, Refused};
pub use self::call::{Access, Call, NumberedCall};
pub use self::types::*;
