//! Profiles of default timeouts.

/// A profile of default timeouts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// The timeouts of the kernel.
    #[default]
    Kernel,
    /// Long enough for the RFCs on address translation (RFC 5382, RFC 4787): in seconds, TCP
    /// ESTABLISHED 7440 instead of 900; SYN_SENT, SYN_RECV, SYNACK, FIN_WAIT, CLOSE_WAIT and
    /// LAST_ACK 240; SCTP ESTABLISHED 7440.
    Modern,
}
