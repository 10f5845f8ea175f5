//! Checks over this host's own network.

use std::future::Future;
use std::net::IpAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use lvs_api::{guidance, reverse_path::strict_interfaces};
use lvs_core::api::Forwarder;
use lvs_sys::lock;

use super::probe::{Asked, Progress};
use super::{Advice, Check, Code, Pins, ProbeError, Reason, Via, next_hop, reverse_path};

/// Makes health checks.
pub trait Prober: Send + Sync + 'static {
    /// Performs one check within its timeout. After a check through a service, each of up to two
    /// queries to the dataplane may take as long again.
    fn probe(&self, check: &Check) -> impl Future<Output = Result<Advice, ProbeError>> + Send;
}

/// A prober that uses this host's own network.
#[derive(Clone, Debug, Default)]
pub struct Network {
    /// The connection to the dataplane, without which no check through a service can be made.
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
    /// The server's own address did not answer, either.
    Silent,
    /// This host could not make the check, for this reason.
    NotMade(String),
}

impl From<Result<Advice, ProbeError>> for OwnAddress {
    fn from(result: Result<Advice, ProbeError>) -> Self {
        match result {
            Ok(_) => Self::Good,
            Err(ProbeError::Server(reason)) => Self::Failed(reason),
            Err(ProbeError::Local(why)) => Self::NotMade(why),
        }
    }
}

impl OwnAddress {
    const fn answers(&self) -> bool {
        matches!(self, Self::Good | Self::Failed(_))
    }

    /// The reason for the failure of a check that the server at `ip` did not answer completely,
    /// although it accepted the connection.
    fn stalled(&self, ip: IpAddr, text: &str) -> Reason {
        let long =
            format!("do long packets arrive (ping -M do -s 1472 between {ip} and this director)");
        match self {
            Self::Good => Reason {
                code: Code::ClientPath,
                text: format!("{text}, but the same check of the server's own address succeeds"),
                fix: format!("on {ip}: {long}, and does a filter drop some (nft list ruleset)?"),
            },
            _ => Reason {
                code: Code::Stalled,
                text: text.to_owned(),
                fix: format!("on {ip}: is the program overloaded or stuck, and {long}?"),
            },
        }
    }

    /// The reason for the failure of a check through a service that got no answer. `fix` applies if
    /// only the path of clients fails.
    fn unanswered(self, silent: &str, fix: String) -> Reason {
        match self {
            Self::Good => Reason {
                code: Code::ClientPath,
                text: format!("{silent}, but the same check of the server's own address succeeds"),
                fix,
            },
            Self::Failed(own) => {
                let text = format!(
                    "{silent}; the same check of the server's own address: {}",
                    own.text
                );
                match own.code {
                    // Nothing on the path to the server works.
                    Code::NextHop | Code::Unreachable | Code::Filtered => Reason { text, ..own },
                    _ => Reason {
                        code: Code::ClientPath,
                        text,
                        fix,
                    },
                }
            }
            Self::Silent => Reason::from(format!(
                "{silent}, and the server's own address did not answer, either"
            ))
            .of(Code::Silent),
            Self::NotMade(why) => Reason::from(format!(
                "{silent}; lvsd could not check the server's own address: {why}"
            ))
            .of(Code::Silent),
        }
    }
}

impl Prober for Network {
    async fn probe(&self, check: &Check) -> Result<Advice, ProbeError> {
        let progress = Progress::default();
        let result = self.attempt(check, &progress).await;
        let result = match result {
            Ok(advice) => Ok(advice),
            Err(error) => Err(with_fix(next_hop::named(error, check.server).await, check)),
        };
        if check.via.is_none() {
            return result;
        }
        // An earlier check with the same source port may have left a connection to another server.
        match result {
            Err(ProbeError::Local(_)) => result,
            Ok(_) | Err(ProbeError::Server(_)) => {
                self.check_forwarded(check, &progress).await?;
                result
            }
        }
    }
}

/// Adds a fix to a reason without one, according to its code. A reason stays without a fix if its
/// code has none, or if a program, a file or the answer of an agent is the source of the reason.
fn with_fix(error: ProbeError, check: &Check) -> ProbeError {
    let (ip, reason) = match error {
        ProbeError::Server(reason) if reason.fix.is_empty() => (check.server.ip(), reason),
        error => return error,
    };
    let has_none = match check.probe.name() {
        "exec" | "file" => true,
        "agent" => reason.code == Code::CheckFailed,
        _ => false,
    };
    if has_none {
        return ProbeError::Server(reason);
    }
    let fix = match reason.code {
        Code::Silent => format!(
            "on {ip}: is the host up, and does a filter drop the packets (nft list ruleset)?"
        ),
        Code::Unreachable => format!(
            "is there a route to {ip}, here and on the routers of the path (ip route get {ip}), and are their interfaces up (ip link)?"
        ),
        Code::Refused => format!(
            "on {ip}: is a program listening (ss -ltun), or does a filter reject the packets (nft list ruleset)?"
        ),
        Code::CheckFailed => format!("on {ip}: see the log of the program"),
        _ => String::new(),
    };
    ProbeError::Server(reason.with_fix(fix))
}

impl Network {
    /// Makes a check within its timeout. The caller determines whether the dataplane has caused a
    /// failure.
    async fn attempt(&self, check: &Check, progress: &Progress) -> Result<Advice, ProbeError> {
        let asked = Asked {
            server: check.server,
            via: check.via,
            pins: self.pins.as_ref(),
            timeout: check.timeout,
            progress: Some(progress),
        };
        let began = Instant::now();
        let filtered = check.via.filter(Via::is_filtered);
        let dropped = filtered.map(|_| reverse_path::dropped());
        let mut own = OwnAddress::Silent;
        // All steps of a probe share one deadline.
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
        if progress.accepted.load(Relaxed) {
            let text = format!(
                "{target} accepted the connection and did not answer completely within {timeout:?}"
            );
            return Err(ProbeError::Server(own.stalled(ip, &text)));
        }
        let silent = format!("{target} did not answer within {timeout:?}");
        let Some(via) = check.via else {
            return Err(ProbeError::Server(Reason::from(silent).of(Code::Silent)));
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
                "{target}: the reply arrived through {router} on {interface}, not from the server itself: the server's default gateway is not this director"
            );
            let fix = format!(
                "on {ip}: replace its default gateway by this director (lvsadm realserver-setup --method nat --gateway ADDRESS {vip} prints the command)"
            );
            let code = Code::OtherGateway;
            return Err(ProbeError::Server(Reason { code, text, fix }));
        }
        let strict = match dropped {
            Some(before) if own.answers() && reverse_path::dropped() > before => {
                strict_interfaces()
            }
            _ => Vec::new(),
        };
        if !strict.is_empty() {
            let text = format!(
                "{silent}: rp_filter of this director dropped packets during the check; rp_filter is strict on {}",
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
        let fix = format!(
            "{fix}; if all servers fail this way: does a filter of this director drop the replies from {vip} (nft list ruleset there)?"
        );
        Err(ProbeError::Server(own.unanswered(&silent, fix)))
    }
}

/// Checks the server's own address after half of the timeout of a through-VIP check, and sets `own`
/// to the result.
async fn check_own_address(check: &Check, own: &mut OwnAddress) {
    tokio::time::sleep(check.timeout / 2).await;
    let asked = Asked {
        server: check.server,
        via: None,
        pins: None,
        timeout: check.timeout / 2,
        progress: None,
    };
    *own = check.probe.run(&asked).await.into();
}

impl Network {
    /// Checks that the dataplane has forwarded the connection of a through-VIP check to the server.
    async fn check_forwarded(&self, check: &Check, progress: &Progress) -> Result<(), ProbeError> {
        let silent = || ProbeError::Local("the dataplane does not answer lvsd".to_owned());
        let pin = lock(&progress.pin).take();
        let (Some(pins), Some(pin)) = (&self.pins, pin) else {
            return Err(silent());
        };
        match tokio::time::timeout(check.timeout, pins.check_opened(pin)).await {
            Ok(opened) => opened.map_err(ProbeError::Local),
            Err(_) => Err(silent()),
        }
    }

    /// Returns the host that forwarded the server's reply to a through-VIP check that got no
    /// answer. `None` for other checks, and if the dataplane reports no forwarded reply since
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const SILENT: &str = "10.0.0.1:80 did not answer within 1s";

    fn unanswered(own: OwnAddress) -> Reason {
        own.unanswered(SILENT, "path".to_owned())
    }

    #[test]
    fn reason_without_fix_gets_fix_of_its_code() {
        let fix = |kind: &str, reason: Reason| {
            let text = format!(
                "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ncheck = {{ {kind} }}\n\
                 [[service.server]]\naddress = \"10.0.0.1:80\"\n"
            );
            let (config, _) =
                Config::from_toml("test.toml", &text).unwrap_or_else(|report| panic!("{report}"));
            let check = config.services[0].servers[0].check.as_ref();
            let check = check.expect("the server has a check");
            match with_fix(ProbeError::Server(reason), check) {
                ProbeError::Server(reason) => reason.fix,
                ProbeError::Local(why) => panic!("{why}"),
            }
        };
        let reason = |code| Reason::from("x").of(code);
        for (kind, code, words) in [
            (
                "type = \"tcp\"",
                Code::Silent,
                "on 10.0.0.1: is the host up",
            ),
            (
                "type = \"ping\"",
                Code::Silent,
                "on 10.0.0.1: is the host up",
            ),
            (
                "type = \"tcp\"",
                Code::Unreachable,
                "is there a route to 10.0.0.1",
            ),
            (
                "type = \"udp\"",
                Code::Refused,
                "on 10.0.0.1: is a program listening",
            ),
            (
                "type = \"http\"",
                Code::CheckFailed,
                "on 10.0.0.1: see the log",
            ),
        ] {
            let fix = fix(kind, reason(code));
            assert!(fix.starts_with(words), "{kind}: {fix}");
        }
        let agent = "type = \"agent\", port = 9";
        assert_eq!(fix(agent, reason(Code::CheckFailed)), "");
        let known = reason(Code::Refused).with_fix("look".to_owned());
        assert_eq!(fix("type = \"tcp\"", known), "look");
    }

    #[test]
    fn stalled_check_of_server_whose_own_address_answers_blames_client_path() {
        let stalled = |own: OwnAddress| own.stalled([10, 0, 0, 1].into(), "accepted");
        let reason = stalled(OwnAddress::Good);
        assert_eq!(reason.code, Code::ClientPath);
        assert!(
            reason.text.ends_with("the server's own address succeeds"),
            "{reason}"
        );
        assert_eq!(stalled(OwnAddress::Silent).code, Code::Stalled);
    }

    #[test]
    fn check_of_own_address_that_is_not_made_does_not_blame_client_path() {
        let local = ProbeError::Local("too many open files".to_owned());
        let reason = unanswered(Err(local).into());
        assert_eq!((reason.code, &*reason.fix), (Code::Silent, ""));
        assert!(reason.text.ends_with(": too many open files"), "{reason}");
    }

    #[test]
    fn failed_check_of_own_address_blames_next_hop_or_client_path() {
        let failed = |code| OwnAddress::Failed(Reason::from("no route").of(code));
        assert_eq!(unanswered(failed(Code::NextHop)).code, Code::NextHop);
        let reason = unanswered(failed(Code::Refused));
        assert_eq!((reason.code, &*reason.fix), (Code::ClientPath, "path"));
    }
}
