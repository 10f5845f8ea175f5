//! Behaviour of a full table.

/// Behaviour of a full table for a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Refuses it.
    #[default]
    Drop,
    /// Ends another one for it, half-open or ended ones first, then idle ones; never one that moves
    /// data.
    Evict,
}
