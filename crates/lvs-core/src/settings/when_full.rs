//! Action for a new connection if the table is full.

/// Action for a new connection if the table is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Refuse the new connection.
    #[default]
    Drop,
    /// Evict another connection for the new one: first a half-open, ended or unused one, then an
    /// idle one; never a connection that transfers data. If no candidate is found, refuse the new
    /// connection.
    Evict,
}
