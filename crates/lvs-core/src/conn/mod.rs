//! Connections: the table, its timers, and the protocols' state machines.

pub(crate) mod flag;
mod index;
mod link;
mod slot;
mod state;
mod table;
mod template;
mod templates;
mod wheel;
mod windows;

pub(crate) use self::slot::{Key, NO_SLOT, Slot, TEMPLATE_BIT};
pub(crate) use self::state::{Direction, State, Timeouts, sctp_next, tcp_next};
pub(crate) use self::table::ConnTable;
pub(crate) use self::template::Template;
pub(crate) use self::templates::Templates;
pub(crate) use self::wheel::tick_of;
pub(crate) use self::windows::{scattered, windows};
