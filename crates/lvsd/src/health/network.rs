//! Checks over this host's own network.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use lvs_api::{guidance, reverse_path::strict_interfaces};
use lvs_core::api::Forwarder;

use super::probe::Asked;
use super::{Advice, Check, Code, Pins, ProbeError, Reason, reverse_path};

/// Makes health checks.
pub trait Prober: Send + Sync + 'static {
    /// Performs one check within its timeout. To find the reason of a failure may take as long
    /// again.
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send;
}

/// A prober that uses this host's own network.
#[derive(Clone, Debug, Default)]
pub struct Network {
    /// The connection to the dataplane, for checks through a service.
    pub pins: Option<Pins>,
}

/// The result of a check of the server's own address, which is made when a check through a service
/// gets no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnAddress {
    /// The check succeeded.
    Good,
    /// The check failed for this reason.
    Failed(Reason),
    /// The address did not answer either.
    Silent,
}

impl Prober for Network {
    async fn probe(&self, check: &Check) -> Result<Advice, ProbeError> {
        let accepted = AtomicBool::new(false);
        let asked = Asked {
            server: check.server,
            via: check.via,
            pins: self.pins.as_ref(),
            timeout: check.timeout,
            accepted: Some(&accepted),
        };
        let began = Instant::now();
        // With NAT, replies reach this host by way of the dataplane. The filter is one of IPv4.
        let direct = check
            .via
            .filter(|via| !via.method.translates() && via.virt.is_ipv4());
        let dropped = direct.map(|_| reverse_path::dropped());
        let mut own = OwnAddress::Silent;
        // One deadline for all that a probe does.
        let limited = tokio::time::timeout(check.timeout, async {
            let run = check.probe.run(&asked);
            let Some(_) = check.via else {
                return run.await;
            };
            tokio::pin!(run);
            tokio::select! {
                result = &mut run => result,
                () = check_own_address(check, &mut own) => run.await,
            }
        });
        if let Ok(result) = limited.await {
            return result;
        }
        let timeout = check.timeout;
        let target = asked.describe(&check.probe.target(check.server));
        let ip = check.server.ip();
        if accepted.load(Relaxed) {
            let text = format!(
                "{target} accepted the connection and did not answer completely within {timeout:?}"
            );
            let fix = format!(
                "on {ip}: is the program overloaded or stuck, and do long packets arrive (ping -M do -s 1472 between {ip} and this director)?"
            );
            let reason = Reason::from(text).of(Code::Stalled);
            return Err(ProbeError::Server(reason.with_fix(fix)));
        }
        let silent = format!("{target} did not answer within {timeout:?}");
        let filter = format!(
            "on {ip}: is the host up, and does a filter drop the packets (nft list ruleset)?"
        );
        let Some(via) = check.via else {
            // Checks that can take the way of a client ask the server itself; others may ask a program.
            let fix = check.probe.via().map(|_| filter);
            let reason = Reason::from(silent).of(Code::Silent);
            let reason = reason.with_fix(fix.unwrap_or_default());
            return Err(ProbeError::Server(reason));
        };
        let vip = via.virt.ip();
        let fix = guidance::for_unanswered(check.server, via.method, Some(vip));
        if let Some(forwarder) = self.forwarder(check, began).await {
            let (mac, interface) = (forwarder.mac, forwarder.interface);
            let router = match forwarder.address {
                Some(address) => format!("{address} ({mac})"),
                None => mac,
            };
            let text = format!(
                "{target}: the reply arrived through {router} on {interface}, not from the server itself: its default gateway is not this director"
            );
            let code = Code::OtherGateway;
            return Err(ProbeError::Server(Reason { code, text, fix }));
        }
        let answers = !matches!(own, OwnAddress::Silent);
        let strict = match dropped {
            Some(before) if answers && reverse_path::dropped() > before => strict_interfaces(),
            _ => Vec::new(),
        };
        if !strict.is_empty() {
            let text = format!(
                "{silent}: rp_filter of this director dropped packets during the check; it is strict on {}",
                strict.join(", ")
            );
            let settings = strict
                .iter()
                .map(|name| format!(" net.ipv4.conf.{name}.rp_filter=2"));
            let fix = format!(
                "on this director: sysctl -w{}, so that replies from {vip} arrive",
                settings.collect::<String>()
            );
            let code = Code::ReversePath;
            return Err(ProbeError::Server(Reason { code, text, fix }));
        }
        Err(ProbeError::Server(match own {
            OwnAddress::Good => Reason {
                code: Code::ClientPath,
                text: format!("{silent}, but the same check of its own address succeeds"),
                fix,
            },
            OwnAddress::Failed(own) => {
                let text = format!("{silent}; the same check of its own address: {}", own.text);
                match own.code {
                    // Nothing on the way to the server is right.
                    Code::NextHop | Code::Unreachable | Code::Filtered => Reason { text, ..own },
                    _ => Reason {
                        code: Code::ClientPath,
                        text,
                        fix,
                    },
                }
            }
            OwnAddress::Silent => Reason {
                code: Code::Silent,
                text: format!("{silent}, nor did its own address"),
                fix: filter,
            },
        }))
    }
}

/// Checks the server's own address when half of the time of a check through a service has passed,
/// and sets `own` to the result.
async fn check_own_address(check: &Check, own: &mut OwnAddress) {
    tokio::time::sleep(check.timeout / 2).await;
    let asked = Asked {
        server: check.server,
        via: None,
        pins: None,
        timeout: check.timeout / 2,
        accepted: None,
    };
    let result = check.probe.run(&asked).await;
    *own = match result {
        Ok(_) => OwnAddress::Good,
        Err(ProbeError::Server(reason)) => OwnAddress::Failed(reason),
        Err(ProbeError::Local(text)) => OwnAddress::Failed(text.into()),
    };
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
