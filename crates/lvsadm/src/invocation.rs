//! One run of the program: its name, its streams and its dataplane.

use std::cell::OnceCell;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};

use lvs_api::names::Names;
use lvs_api::{Address, Client};
use lvs_core::Protocol;
use lvs_core::ipvsadm::{Command, Refusal, Resolve, parse, parse_own};

/// The programs as which this binary can run, depending on its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// lvsadm: the command line of ipvsadm, with additional options and commands.
    Lvsadm,
    /// ipvsadm, without the additional commands.
    Ipvsadm,
    /// The script ipvsadm-save.
    Save,
    /// The script ipvsadm-restore.
    Restore,
}

impl Program {
    /// Returns the program for the name by which it was started.
    pub fn of(argv0: &[u8]) -> Self {
        match argv0.rsplit(|&b| b == b'/').next() {
            Some(b"ipvsadm") => Self::Ipvsadm,
            Some(b"ipvsadm-save") => Self::Save,
            Some(b"ipvsadm-restore") => Self::Restore,
            _ => Self::Lvsadm,
        }
    }
}

/// The function that connects to a dataplane.
pub(crate) type Connect<'a> = &'a mut dyn FnMut(&Address) -> Result<Client, String>;

/// One run of a program.
pub(crate) struct Invocation<'a> {
    pub(crate) program: Program,
    pub(crate) argv0: String,
    pub(crate) address: Address,
    pub(crate) json: bool,
    pub(crate) connect: Connect<'a>,
    pub(crate) names: LazyNames<'a>,
    pub(crate) input: &'a mut dyn Read,
    pub(crate) output: &'a mut dyn Write,
    pub(crate) errors: &'a mut dyn Write,
}

impl Invocation<'_> {
    /// Whether the output must be exactly that of ipvsadm, including its unclear messages.
    pub(crate) fn is_ipvsadm(&self) -> bool {
        self.program != Program::Lvsadm
    }

    /// Parses a command line. The options are those of ipvsadm; if the program runs as lvsadm, also
    /// its additional options.
    pub(crate) fn parse<W: AsRef<[u8]>>(&self, words: &[W]) -> Result<Command, Refusal> {
        let parse = if self.is_ipvsadm() { parse } else { parse_own };
        parse(&self.argv0, words, &self.names)
    }

    pub(crate) const fn address(&self) -> &Address {
        &self.address
    }

    pub(crate) fn client(&mut self) -> Result<Client, String> {
        (self.connect)(&self.address)
    }

    /// Connects to the dataplane at another socket.
    pub(crate) fn client_at(&mut self, address: &Address) -> Result<Client, String> {
        (self.connect)(address)
    }
}

/// The names of hosts and ports, read from their files at the first look-up.
pub(crate) struct LazyNames<'a> {
    pub(crate) load: &'a dyn Fn() -> Names,
    pub(crate) names: OnceCell<Names>,
}

impl LazyNames<'_> {
    fn get(&self) -> &Names {
        self.names.get_or_init(self.load)
    }
}

impl Resolve for LazyNames<'_> {
    fn host(&self, name: &str) -> Option<Ipv4Addr> {
        self.get().host(name)
    }

    fn port(&self, name: &str, protocol: Protocol) -> Option<u16> {
        self.get().port(name, protocol)
    }

    fn host_name(&self, address: IpAddr) -> Option<String> {
        self.get().host_name(address)
    }

    fn port_name(&self, port: u16, protocol: Protocol) -> Option<String> {
        self.get().port_name(port, protocol)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_name_selects_mode() {
        assert_eq!(Program::of(b"/sbin/ipvsadm"), Program::Ipvsadm);
        assert_eq!(Program::of(b"ipvsadm-save"), Program::Save);
        assert_eq!(Program::of(b"./ipvsadm-restore"), Program::Restore);
        assert_eq!(Program::of(b"/usr/bin/lvsadm"), Program::Lvsadm);
    }
}
