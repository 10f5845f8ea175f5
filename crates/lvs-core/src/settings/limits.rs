//! Limits of the connections of a service.

/// Limits of the connections of a service; 0 means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default, deny_unknown_fields))]
pub struct Limits {
    /// Maximum number of simultaneous connections.
    pub connections: u32,
    /// Maximum number of new connections per second, and of new connections at once.
    pub rate: u32,
    /// Maximum number of new connections from one source per second, and at once.
    pub source_rate: u32,
    /// Prefix length that counts as one IPv4 source; 0 is 32.
    pub source_bits_v4: u8,
    /// Prefix length that counts as one IPv6 source; 0 is 64, because a host can choose any address
    /// in its /64.
    pub source_bits_v6: u8,
}

impl Limits {
    /// Whether no limit is set.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }
}
