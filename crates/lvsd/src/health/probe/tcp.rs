//! `type = "tcp"`: checks that a connection can be opened. It is reset at once, and no data is
//! sent.

use std::net::SocketAddr;

use lvs_core::Protocol;
use lvs_core::api::ServiceId;

use super::{Advice, Asked, Port, ProbeError, ProbeKind};
use crate::text::{Diagnostic, Keys};

/// A check that opens a TCP connection to the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tcp {
    port: Port,
}

impl ProbeKind for Tcp {
    const NAME: &'static str = "tcp";
    const KEYS: &'static [&'static str] = &["port"];
    const VIA: Option<Protocol> = Some(Protocol::TCP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let port = Port::parse(keys)?;
        let other = matches!(
            keys.service(),
            Some(ServiceId::Udp { .. } | ServiceId::Sctp { .. })
        );
        if port == Port::default() && other {
            keys.report(
                Diagnostic::warning(
                    keys.table(),
                    "the service does not use TCP, and its check does",
                )
                .help("set a `port` for the check on which the servers accept TCP connections, if TCP is intended"),
            );
        }
        Some(Self { port })
    }

    fn port(&mut self) -> Option<&mut Port> {
        Some(&mut self.port)
    }

    fn target(&self, server: SocketAddr) -> String {
        self.port.address(server).to_string()
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        asked.connect(self.port.address(asked.server)).await?;
        Ok(Advice::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tcp_probe_succeeds_at_open_port_and_fails_at_closed_port() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        let server = SocketAddr::new(open.ip(), 1);
        let probe = Tcp {
            port: Port(Some(open.port())),
        };
        assert_eq!(probe.run(&Asked::at(server)).await, Ok(Advice::NONE));
        assert_eq!(Tcp::default().run(&Asked::at(open)).await, Ok(Advice::NONE));
        drop(listener);
        let refused = probe.run(&Asked::at(server)).await;
        assert!(
            matches!(&refused, Err(ProbeError::Server(why)) if why.text.contains("refused")),
            "{refused:?}"
        );
    }

    #[test]
    fn server_without_port_requires_port_in_check() {
        let server = "10.0.0.1:0".parse().unwrap();
        assert!(Tcp::default().bind(server).is_err());
        let bound = Tcp {
            port: Port(Some(80)),
        }
        .bind(server)
        .unwrap();
        assert_eq!(bound.target(server), "10.0.0.1:80");
    }
}
