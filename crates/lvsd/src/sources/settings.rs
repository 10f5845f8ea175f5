//! Settings of the sources: `[dns]`, and the source that a service names.

use std::net::SocketAddr;
use std::time::Duration;

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
