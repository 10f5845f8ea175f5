//! What a health check does: one kind a file, each with its configuration, its parsing and its run.
//!
//! To add a kind, write its file with a type that implements `Kind`, name it in `kinds!` below,
//! and document it in `docs/configuration.md` (a test compares that page with the registry).

#[cfg(test)]
mod banner;
mod tcp;

use std::fmt;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;

use crate::config::{Check, Keys};

/// Why a probe did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeError {
    /// The server does not serve: the reason.
    Server(String),
    /// This host could not even ask, which says nothing about the server: the reason.
    Local(String),
}

impl ProbeError {
    /// What an error of a socket says, which was connected or to be connected to `target`.
    fn of_socket(error: &io::Error, target: impl fmt::Display) -> Self {
        let reason = format!("{target}: {error}");
        match error.kind() {
            ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::TimedOut => Self::Server(reason),
            // Out of descriptors, of ports, of memory, or forbidden by a local rule.
            _ => Self::Local(reason),
        }
    }
}

/// Asks a server whether it serves.
pub trait Prober: Send + Sync + 'static {
    /// One check, within its timeout.
    fn probe(&self, check: &Check) -> impl Future<Output = Result<(), ProbeError>> + Send;
}

/// Probes over this host's own network.
#[derive(Clone, Copy, Debug, Default)]
pub struct Network;

impl Prober for Network {
    async fn probe(&self, check: &Check) -> Result<(), ProbeError> {
        // One deadline for all that a probe does.
        match tokio::time::timeout(check.timeout, check.probe.run(check.server)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::Server(format!(
                "{} did not answer within {:?}",
                check.probe.target(check.server),
                check.timeout
            ))),
        }
    }
}

/// A check that does not fit a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Misfit {
    pub(crate) title: &'static str,
    pub(crate) help: &'static str,
}

/// One kind of health check.
pub(crate) trait Kind: Sized {
    /// The value of `type` in the file.
    const NAME: &'static str;
    /// Its own keys, beside those that every check has.
    const KEYS: &'static [&'static str];

    /// Reads its own keys. `None` if something is wrong with them, which `keys` has then been told.
    fn parse(keys: &mut Keys<'_>) -> Option<Self>;

    /// The same for one server: what depends on its address is filled in.
    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit>;

    /// Where it goes, for messages.
    fn target(&self, server: SocketAddr) -> String;

    /// One probe of `server`. It is dropped when the check's timeout is over.
    fn run(&self, server: SocketAddr) -> impl Future<Output = Result<(), ProbeError>> + Send;
}

/// What the registry says about a kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KindInfo {
    pub(crate) name: &'static str,
    pub(crate) keys: &'static [&'static str],
    pub(crate) parse: fn(&mut Keys<'_>) -> Option<Probe>,
}

/// The registry: an enum over the kinds, and what is dispatched on it.
macro_rules! kinds {
    ($($(#[$attribute:meta])* $kind:ident => $module:ident,)+) => {
        /// What one check does, of whichever kind.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Probe {
            $($(#[$attribute])* #[doc = concat!("`type = \"", stringify!($module), "\"`.")]
            $kind($module::$kind),)+
        }

        impl Probe {
            /// All kinds.
            pub(crate) const KINDS: &[KindInfo] = &[
                $($(#[$attribute])* KindInfo {
                    name: <$module::$kind as Kind>::NAME,
                    keys: <$module::$kind as Kind>::KEYS,
                    parse: |keys| <$module::$kind as Kind>::parse(keys).map(Self::$kind),
                },)+
            ];

            /// The same for one server.
            pub(crate) fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.bind(server).map(Self::$kind),)+
                }
            }

            /// The name of its kind.
            pub const fn name(&self) -> &'static str {
                match self {
                    $($(#[$attribute])* Self::$kind(_) => <$module::$kind as Kind>::NAME,)+
                }
            }

            /// Where it goes, for messages.
            pub fn target(&self, server: SocketAddr) -> String {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.target(server),)+
                }
            }

            async fn run(&self, server: SocketAddr) -> Result<(), ProbeError> {
                match self {
                    $($(#[$attribute])* Self::$kind(probe) => probe.run(server).await,)+
                }
            }
        }
    };
}

kinds! {
    Tcp => tcp,
    #[cfg(test)]
    Banner => banner,
}

impl Probe {
    /// The kind called `name`.
    pub(crate) fn kind(name: &str) -> Option<&'static KindInfo> {
        Self::KINDS.iter().find(|kind| kind.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENTATION: &str = include_str!("../../../../../docs/configuration.md");

    /// The kinds and keys that `text` does not have: a heading for each kind, and each key in what
    /// stands under it.
    fn undocumented(text: &str) -> Vec<String> {
        let mut missing = Vec::new();
        for kind in Probe::KINDS {
            let heading = format!("\n#### type = \"{}\"\n", kind.name);
            let Some((_, rest)) = text.split_once(&heading) else {
                missing.push(kind.name.to_owned());
                continue;
            };
            let section = rest.split("\n#").next().unwrap_or_default();
            for key in kind.keys {
                if !section.contains(&format!("| `{key}` |")) {
                    missing.push(format!("{}.{key}", kind.name));
                }
            }
        }
        missing
    }

    #[test]
    fn every_kind_is_documented() {
        assert_eq!(
            undocumented(DOCUMENTATION),
            [banner::Banner::NAME],
            "docs/configuration.md must describe every kind but the one that only tests have"
        );
        let without_port = DOCUMENTATION.replace("| `port` |", "| port |");
        assert_eq!(undocumented(&without_port), ["tcp.port", "banner"]);
    }

    #[test]
    fn names_are_unique() {
        for (n, kind) in Probe::KINDS.iter().enumerate() {
            let again = Probe::KINDS[n + 1..].iter().any(|k| k.name == kind.name);
            assert!(!again, "{}", kind.name);
        }
    }
}
