//! Connections: the table, its timers, and the protocols' state machines.

mod index;
pub(crate) mod state;
pub(crate) mod table;
pub(crate) mod template;
mod wheel;

pub(crate) use self::state::State;
pub(crate) use self::table::{ConnTable, Key, NO_SLOT, Slot, TEMPLATE_BIT};
pub(crate) use self::template::{Template, Templates};
