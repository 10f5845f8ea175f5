//! The UDP header (RFC 768).

/// Fields of the header.
pub mod field {
    use crate::packet::wire::Field;

    /// Source port.
    pub const SOURCE: Field = 0..2;
    /// Destination port.
    pub const DESTINATION: Field = 2..4;
    /// Length of header and payload.
    pub const LENGTH: Field = 4..6;
    /// Checksum; 0 is none.
    pub const CHECKSUM: Field = 6..8;
}

/// Length of the header.
pub const HEADER_LEN: usize = field::CHECKSUM.end;
