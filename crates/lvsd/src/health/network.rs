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
        let limited = tokio::time::timeout(check.timeout, check.probe.run(&asked));
        if let Ok(result) = limited.await {
            return result;
        }
        let target = asked.describe(&check.probe.target(check.server));
        let Some(forwarder) = self.forwarder(check, began).await else {
            let timeout = check.timeout;
            return Err(ProbeError::Server(format!(
                "{target} did not answer within {timeout:?}"
            )));
        };
        let (mac, interface) = (forwarder.mac, forwarder.interface);
        let router = match forwarder.address {
            Some(address) => format!("{address} ({mac})"),
            None => mac,
        };
        Err(ProbeError::Server(format!(
            "{target}: the reply came by way of {router} on {interface}, not from the server itself: its default gateway is not this director"
        )))
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
