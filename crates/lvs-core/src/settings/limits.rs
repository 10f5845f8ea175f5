//! Limits of a service.

/// Limits of a service; 0 means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default, deny_unknown_fields))]
pub struct Limits {
    /// Maximum number of simultaneous connections.
    pub connections: u32,
    /// Maximum number of new connections per second and in a burst.
    pub rate: u32,
    /// Maximum number of new connections from one source per second and in a burst.
    pub source_rate: u32,
    /// Bits of an IPv4 address that make a source; 0 is all 32.
    pub source_bits_v4: u8,
    /// Prefix length of an IPv6 source; 0 is 64, the network in which one host may choose its
    /// addresses.
    pub source_bits_v6: u8,
}

impl Limits {
    /// Whether no limit is set.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }
}
