//! Connections: the table, its timers, and the protocols' state machines.

mod flow;
mod index;
pub(crate) mod state;
pub(crate) mod table;
pub(crate) mod template;
mod wheel;

pub(crate) use self::state::State;
use self::table::flag;
pub(crate) use self::table::{ConnTable, Key, NO_SLOT, Slot, TEMPLATE_BIT};
pub(crate) use self::template::{Template, Templates};
use crate::Server;

/// The flags that connections to a server begin with.
pub(crate) fn server_flags(server: &Server, conntrack: bool) -> u32 {
    let method = server.forwarding();
    let mut flags = method as u32 | flag::INACTIVE;
    if !method.translates() {
        flags |= flag::NO_OUTPUT;
    }
    if conntrack {
        flags |= flag::NFCT;
    }
    flags
}
