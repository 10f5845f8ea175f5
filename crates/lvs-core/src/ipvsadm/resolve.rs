//! Names of hosts and ports.

use alloc::string::String;
use core::net::{IpAddr, Ipv4Addr};

use crate::Protocol;

/// Names of hosts and ports, in both directions. Each method returns `None` for an unknown name or
/// number.
pub trait Resolve {
    /// The IPv4 address of the host with this name.
    fn host(&self, name: &str) -> Option<Ipv4Addr>;
    /// The port with this name, such as `http`.
    fn port(&self, name: &str, protocol: Protocol) -> Option<u16>;
    /// The name of a host.
    fn host_name(&self, address: IpAddr) -> Option<String>;
    /// The name of a port.
    fn port_name(&self, port: u16, protocol: Protocol) -> Option<String>;
}

/// A resolver that resolves no names: a command line can contain only numeric addresses and ports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numeric;

impl Resolve for Numeric {
    fn host(&self, _: &str) -> Option<Ipv4Addr> {
        None
    }

    fn port(&self, _: &str, _: Protocol) -> Option<u16> {
        None
    }

    fn host_name(&self, _: IpAddr) -> Option<String> {
        None
    }

    fn port_name(&self, _: u16, _: Protocol) -> Option<String> {
        None
    }
}
