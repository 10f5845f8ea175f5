//! Settings of the sources: `[dns]`, `[cluster]`, and the source that a service names.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::etcd::Access;

/// `[cluster]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The members of etcd, and the credentials for them.
    pub access: Access,
    /// The prefix of all keys.
    pub prefix: String,
    /// The name of this director.
    pub director: String,
    /// The time without a renewal after which a director counts as gone.
    pub lease: Duration,
}

impl Cluster {
    /// The default prefix of keys.
    pub const PREFIX: &'static str = "/lvs/";
    /// The default of [`Cluster::lease`].
    pub const LEASE: Duration = Duration::from_secs(10);
    /// The default time limit of a request.
    pub const TIMEOUT: Duration = Duration::from_secs(3);
    /// Permitted durations of a lease.
    pub const LEASES: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(3600);
    /// Maximum number of bytes of a prefix or a name.
    pub(crate) const NAME_MAX: usize = 128;

    /// Whether the name can be a part of an etcd key between slashes.
    pub fn is_name(name: &str) -> bool {
        let right = |c: char| !c.is_control() && !c.is_whitespace() && c != '/';
        (1..=Self::NAME_MAX).contains(&name.len()) && name.chars().all(right)
    }
}

/// `[dns]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookups {
    /// Name servers; if empty, the name servers of `/etc/resolv.conf`.
    pub name_servers: Vec<SocketAddr>,
    /// The longest wait for an answer.
    pub timeout: Duration,
    /// Shortest interval between two look-ups of a name.
    pub min: Duration,
    /// Longest interval between two look-ups of a name.
    pub max: Duration,
}

impl Default for Lookups {
    fn default() -> Self {
        Self {
            name_servers: Vec::new(),
            timeout: Duration::from_secs(2),
            min: Duration::from_secs(5),
            max: Duration::from_secs(300),
        }
    }
}

/// Source of servers besides the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A DNS name, in lower case and without a final dot.
    Dns(String),
    /// A pool of servers that have registered themselves in etcd.
    Etcd(String),
}
