//! Connections: the table, its timers, and the state machines of the protocols.

mod draft;
pub(crate) mod flag;
mod state;
mod table;

pub(crate) use self::table::memory;
mod template;
mod templates;
mod windows;

pub(crate) use self::draft::{Draft, Key, NO_SLOT, TEMPLATE_BIT};
pub(crate) use self::state::{Direction, State, Timeouts, sctp_next, tcp_next};
pub use self::table::Ahead;
pub(crate) use self::table::hash::sip13;
pub(crate) use self::table::sparse::Sparse;
pub(crate) use self::table::{ConnTable, Entry, adopt, tick_of};
pub(crate) use self::template::Template;
pub(crate) use self::templates::Templates;
pub(crate) use self::windows::{scattered, windows};
