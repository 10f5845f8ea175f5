//! Reasons why an operation is refused. A refused operation changes nothing.

use core::fmt;

/// The reason why an operation was refused. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Error {
    /// A service with this key already exists (EEXIST).
    ServiceExists,
    /// No service has this key (ESRCH).
    NoService,
    /// The service already has this real server (EEXIST).
    ServerExists,
    /// The service does not have this real server (ENOENT).
    NoServer,
    /// No scheduler has this name (ENOENT).
    UnknownScheduler,
    /// No persistence engine has this name (ENOENT).
    UnknownEngine,
    /// The weight is below 0 (ERANGE).
    WeightRange,
    /// The lower threshold is above the upper one (ERANGE).
    ThresholdRange,
    /// An upper threshold above 2^31 − 1 (EINVAL).
    ThresholdTooLarge,
    /// A GUE tunnel to port 0 (EINVAL).
    TunnelPort,
    /// The address cannot be the address of a server: it is unspecified, multicast, broadcast, IPv6
    /// link-local or IPv4-mapped (EINVAL).
    NotUnicast,
    /// The address family of the server differs from its service's (EINVAL). This is permitted only
    /// for a tunnel server, and only while no synchronisation daemon is running or to be started.
    FamilyMismatch,
    /// The protocol of the service is not TCP, UDP or SCTP (EINVAL).
    Protocol,
    /// A firewall mark of 0 (EINVAL).
    ZeroMark,
    /// An IPv6 prefix length outside 1..=128 (EINVAL).
    PrefixLength,
    /// A timeout above the maximum of the kernel's tick counter, 8,589,934 s (EINVAL).
    TimeoutRange,
    /// The service's scheduler measures the latency of the servers' answers, but the answers do not
    /// pass through the director: the server's forwarding method is neither NAT nor full NAT.
    NeedsReplies,
    /// No sysctl has this name (ENOENT).
    UnknownSysctl,
    /// The sysctl does not accept this value (EINVAL).
    SysctlValue,
    /// The network interface does not exist (ENODEV).
    NoDevice,
    /// A synchronisation daemon of this role is already running (EEXIST).
    DaemonRunning,
    /// No synchronisation daemon of this role is running (ESRCH).
    DaemonNotRunning,
    /// Full NAT requires a local address of the service's family, and none is configured.
    LocalAddressNeeded,
    /// Full NAT and one-packet scheduling exclude each other: replies would match no connection.
    FullNatOnePacket,
    /// No helper has this name (ENOENT).
    UnknownHelper,
    /// The ports of a helper contain 0, contain a port twice, or are too many (EINVAL).
    HelperPorts,
    /// 16,384 pins already wait for their connections ([`Control::pin`](crate::Control::pin)).
    TooManyPins,
    /// The kernel's IPVS supports this, but the director does not yet; the text names it.
    Unsupported(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ServiceExists => "the service already exists",
            Self::NoService => "the service does not exist",
            Self::ServerExists => "the service already has this real server",
            Self::NoServer => "the service does not have this real server",
            Self::UnknownScheduler => "no scheduler of this name",
            Self::UnknownEngine => "no persistence engine of this name",
            Self::WeightRange => "the weight is below 0",
            Self::ThresholdRange => "the lower threshold is above the upper one",
            Self::ThresholdTooLarge => "the upper threshold is above 2147483647",
            Self::TunnelPort => "a GUE tunnel needs a port from 1 to 65535",
            Self::NotUnicast => "the address of a real server must be a unicast address",
            Self::FamilyMismatch => {
                "a server whose address family differs from its service's needs a tunnel, and no \
                 synchronisation daemon may run"
            }
            Self::Protocol => "the protocol of a service must be TCP, UDP or SCTP",
            Self::ZeroMark => "a firewall mark must not be 0",
            Self::PrefixLength => "an IPv6 prefix length is between 1 and 128",
            Self::TimeoutRange => "a timeout is at most 8589934 seconds",
            Self::NeedsReplies => {
                "this scheduler measures the response time of servers, whose replies pass through the director only with NAT and full NAT: use one of these methods, or choose another scheduler"
            }
            Self::UnknownSysctl => "no sysctl of this name",
            Self::SysctlValue => "the sysctl does not accept this value",
            Self::NoDevice => "no such network interface",
            Self::DaemonRunning => "a synchronisation daemon of this role is already running",
            Self::DaemonNotRunning => "no synchronisation daemon of this role is running",
            Self::LocalAddressNeeded => "full NAT needs a local address of the service's family",
            Self::FullNatOnePacket => {
                "full NAT keeps connections, and one-packet scheduling does not: use only one of the two"
            }
            Self::UnknownHelper => "there is no helper of this name; the only helper is ftp",
            Self::HelperPorts => "a helper has up to 8 different ports from 1 to 65535",
            Self::TooManyPins => {
                "the maximum of 16384 expected health check connections is reached; an unused one is removed within 17 minutes"
            }
            Self::Unsupported(what) => return write!(f, "{what}: not supported yet"),
        })
    }
}

impl core::error::Error for Error {}
