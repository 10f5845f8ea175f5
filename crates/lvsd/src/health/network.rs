//! Checks over this host's own network.

use std::future::Future;
use std::time::Instant;

use lvs_core::api::Forwarder;

use super::probe::Asked;
use super::{Advice, Check, Pins, ProbeError};

/// Makes health checks.
pub trait Prober: Send + Sync + 'static {
    /// Makes one check, within its timeout. The reason of a failed one may take as long again.
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send;
}

/// Makes checks over this host's own network.
#[derive(Clone, Debug, Default)]
pub struct Network {
    /// The connection to the dataplane, for checks through a service.
    pub pins: Option<Pins>,
}

impl Prober for Network {
    async fn probe(&self, check: &Check) -> Result<Advice, ProbeError> {
        let asked = Asked {
            server: check.server,
            via: check.via,
            pins: self.pins.as_ref(),
            timeout: check.timeout,
        };
        let began = Instant::now();
        // One deadline for all that a probe does.
        match tokio::time::timeout(check.timeout, check.probe.run(&asked)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::Server(
                match self.forwarder(check, began).await {
                    Some(Forwarder {
                        mac,
                        address,
                        interface,
                        ..
                    }) => format!(
                        "{}: the reply came by way of {} on {interface}, not from the server itself: its default gateway is not this director",
                        asked.describe(&check.probe.target(check.server)),
                        address.map_or_else(|| mac.clone(), |address| format!("{address} ({mac})")),
                    ),
                    None => format!(
                        "{} did not answer within {:?}",
                        asked.describe(&check.probe.target(check.server)),
                        check.timeout
                    ),
                },
            )),
        }
    }
}

impl Network {
    /// The host that forwarded a reply to a check through a service which got no answer since it
    /// `began`.
    async fn forwarder(&self, check: &Check, began: Instant) -> Option<Forwarder> {
        let (Some(pins), Some(_)) = (&self.pins, check.via) else {
            return None;
        };
        let server = check.server.ip();
        let answer = pins.forwarder(server, began);
        tokio::time::timeout(check.timeout, answer).await.ok()?
    }
}
