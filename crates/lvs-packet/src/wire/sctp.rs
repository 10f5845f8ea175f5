//! The common header of SCTP (RFC 9260 section 3.1).

use crate::frame::PartialChecksum;

/// Fields of the header.
pub mod field {
    use crate::wire::Field;

    /// CRC32c over the whole packet.
    pub const CHECKSUM: Field = 8..12;
}

/// Length in bytes of the header, after which the chunks begin.
pub const HEADER_LEN: usize = field::CHECKSUM.end;
/// Length in bytes of the header of a chunk.
pub const CHUNK_LEN: usize = 4;

impl PartialChecksum {
    /// Whether the checksum is the CRC32c of SCTP, which is the only checksum at this offset. A
    /// device would store another kind of checksum there, because the virtio header cannot describe
    /// a CRC.
    #[inline]
    pub const fn is_crc(self) -> bool {
        self.offset as usize == field::CHECKSUM.start
    }
}
