//! `type = "tcp"`: a connection can be opened. It is reset at once, nothing is sent.

use std::net::SocketAddr;

use lvs_core::api::ServiceId;
use tokio::net::TcpStream;

use super::{Kind, Misfit, ProbeError};
use crate::config::{Diagnostic, Keys};

/// A TCP connection to the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tcp {
    /// Port to connect to, where it is not the server's.
    port: Option<u16>,
}

impl Tcp {
    fn address(&self, server: SocketAddr) -> SocketAddr {
        SocketAddr::new(server.ip(), self.port.unwrap_or(server.port()))
    }
}

impl Kind for Tcp {
    const NAME: &'static str = "tcp";
    const KEYS: &'static [&'static str] = &["port"];

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = keys.port("port")?;
        let other = matches!(
            keys.service(),
            Some(ServiceId::Udp { .. } | ServiceId::Sctp { .. })
        );
        if port.is_none() && other {
            keys.report(
                Diagnostic::warning(
                    keys.table(),
                    "a TCP check of a service that is not TCP",
                )
                .help("give the check a `port` on which the servers take TCP connections, if it is meant"),
            );
        }
        Some(Self { port })
    }

    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
        match self.address(server).port() {
            0 => Err(Misfit {
                title: "the check has no port to connect to",
                help: "the server has no port of its own; add `port` to the check",
            }),
            port => Ok(Self { port: Some(port) }),
        }
    }

    fn target(&self, server: SocketAddr) -> String {
        self.address(server).to_string()
    }

    async fn run(&self, server: SocketAddr) -> Result<(), ProbeError> {
        let target = self.address(server);
        match TcpStream::connect(target).await {
            Ok(stream) => {
                // A reset instead of a farewell: neither end keeps anything of a probe.
                let _ = stream.set_zero_linger();
                Ok(())
            }
            Err(error) => Err(ProbeError::of_socket(&error, target)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn open_and_closed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        let server = SocketAddr::new(open.ip(), 1);
        let probe = Tcp {
            port: Some(open.port()),
        };
        assert_eq!(probe.run(server).await, Ok(()));
        assert_eq!(Tcp { port: None }.run(open).await, Ok(()));
        drop(listener);
        let refused = probe.run(server).await;
        assert!(
            matches!(&refused, Err(ProbeError::Server(why)) if why.contains("refused")),
            "{refused:?}"
        );
    }

    #[test]
    fn a_server_without_a_port_needs_one_in_the_check() {
        let server = "10.0.0.1:0".parse().unwrap();
        assert!(Tcp { port: None }.bind(server).is_err());
        let bound = Tcp { port: Some(80) }.bind(server).unwrap();
        assert_eq!(bound.target(server), "10.0.0.1:80");
    }
}
