//! The TCP check: a connection can be opened. It is closed at once, nothing is sent.

use std::io::{self, ErrorKind};

use tokio::net::TcpStream;

use super::{ProbeError, Prober};
use crate::config::{Check, CheckKind};

/// Checks over this host's own network.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpProber;

impl Prober for TcpProber {
    async fn probe(&self, check: &Check) -> Result<(), ProbeError> {
        match check.kind {
            CheckKind::Tcp => {}
        }
        match tokio::time::timeout(check.timeout, TcpStream::connect(check.target)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(judge(&error, check)),
            Err(_) => Err(ProbeError::Server(format!(
                "{} did not answer within {:?}",
                check.target, check.timeout
            ))),
        }
    }
}

fn judge(error: &io::Error, check: &Check) -> ProbeError {
    match error.kind() {
        ErrorKind::ConnectionRefused
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::HostUnreachable
        | ErrorKind::NetworkUnreachable
        | ErrorKind::TimedOut => ProbeError::Server(format!("{}: {error}", check.target)),
        // Out of descriptors, of ports, of memory, or forbidden by a local rule.
        _ => ProbeError::Local(format!("{}: {error}", check.target)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(target: std::net::SocketAddr) -> Check {
        Check {
            kind: CheckKind::Tcp,
            target,
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
            rise: 1,
            fall: 1,
        }
    }

    #[tokio::test]
    async fn open_and_closed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        assert_eq!(TcpProber.probe(&check(target)).await, Ok(()));
        drop(listener);
        let refused = TcpProber.probe(&check(target)).await;
        assert!(
            matches!(&refused, Err(ProbeError::Server(why)) if why.contains("refused")),
            "{refused:?}"
        );
    }
}
