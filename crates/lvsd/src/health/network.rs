//! Checks over this host's own network.

use std::future::Future;

use super::probe::Asked;
use super::{Advice, Check, Pins, ProbeError};

/// Makes health checks.
pub trait Prober: Send + Sync + 'static {
    /// Makes one check, within its timeout.
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
        // One deadline for all that a probe does.
        match tokio::time::timeout(check.timeout, check.probe.run(&asked)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::Server(format!(
                "{} did not answer within {:?}",
                asked.told(&check.probe.target(check.server)),
                check.timeout
            ))),
        }
    }
}
