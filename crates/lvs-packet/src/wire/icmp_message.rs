//! Parts that ICMP messages of both IP versions share: fields, and the errors that the dataplane
//! sends.

/// Fields of a message, of either IP version.
pub mod field {
    use crate::wire::Field;

    /// Offset of the message's type.
    pub const TYPE: usize = 0;
    /// Offset of the message's code.
    pub const CODE: usize = 1;
    /// Checksum of the message.
    pub const CHECKSUM: Field = 2..4;
    /// The second word, which depends on the type. An ICMPv6 "packet too big" has the MTU here.
    pub const REST: Field = 4..8;
    /// The MTU in an ICMP "fragmentation needed" (RFC 1191 section 4).
    pub const MTU: Field = 6..8;
}

/// Length in bytes of the header of a message, after which an error quotes a packet.
pub const HEADER_LEN: usize = field::REST.end;

/// Errors that the director sends, named and numbered as in ICMP for IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Type 3, code 0: no route to the destination.
    NetUnreachable,
    /// Type 3, code 1: the destination host does not answer.
    HostUnreachable,
    /// Type 3, code 2: the destination does not support the protocol.
    ProtocolUnreachable,
    /// Type 3, code 3: no connection or service on this port.
    PortUnreachable,
    /// Type 3, code 4, with the MTU that the packet exceeds (RFC 1191).
    FragmentationNeeded(u16),
    /// Type 11, code 0: the TTL or hop limit reached zero.
    TtlExceeded,
    /// Type 12, code 0, with the offset of the invalid byte in the header.
    ParameterProblem(u8),
    /// An error of another host, which the dataplane forwards.
    Relayed {
        /// Type of the ICMP error.
        kind: u8,
        /// Code of the ICMP error.
        code: u8,
        /// The second word of the ICMP header.
        rest: [u8; 4],
    },
}

impl ErrorKind {
    /// Type, code and the second word of the message.
    pub const fn header(self) -> (u8, u8, [u8; 4]) {
        match self {
            Self::NetUnreachable => (3, 0, [0; 4]),
            Self::HostUnreachable => (3, 1, [0; 4]),
            Self::ProtocolUnreachable => (3, 2, [0; 4]),
            Self::PortUnreachable => (3, 3, [0; 4]),
            Self::FragmentationNeeded(mtu) => {
                let [a, b] = mtu.to_be_bytes();
                (3, 4, [0, 0, a, b])
            }
            Self::TtlExceeded => (11, 0, [0; 4]),
            Self::ParameterProblem(at) => (12, 0, [at, 0, 0, 0]),
            Self::Relayed { kind, code, rest } => (kind, code, rest),
        }
    }
}
