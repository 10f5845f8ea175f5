//! Connections whose packets a program in the kernel may forward, out of the same memory.

use super::Shard;
use crate::ConnId;

impl Shard {
    /// Lets a program that reads the table's memory forward the packets of a connection, as long as `epoch` is in force.
    /// `client_hop` is the program's index of the way to the client; without one it asks for each reply. `false` if the
    /// connection is not one for it: it has ended, or others have the same addresses and ports.
    ///
    /// Whatever changes the connection's state is decided here all the same: the program hands such packets up.
    pub fn publish(&mut self, conn: ConnId, epoch: u16, client_hop: Option<u16>) -> bool {
        if !self.table.is_used(conn.0) {
            return false;
        }
        let entry = self.table.get(conn.0);
        entry.set_next_hop(client_hop);
        entry.publish(epoch);
        entry.is_live()
    }

    /// From now on the packets of a connection come to userspace.
    pub fn withdraw(&mut self, conn: ConnId) {
        if self.table.is_used(conn.0) {
            self.table.get(conn.0).withdraw();
        }
    }

    /// Whether a program in the kernel may forward the packets of a connection.
    pub fn is_published(&self, conn: ConnId) -> bool {
        self.table.is_used(conn.0) && self.table.get(conn.0).is_live()
    }
}
