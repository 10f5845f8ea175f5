//! Findings from the status of `lvsd`, and fixes that depend on this status.

use std::net::{IpAddr, SocketAddr};

use lvs_api::daemon::{AdminState, ServerStatus, ServiceStatus, Status, VrrpStatus};
use lvs_api::guidance;
use lvs_core::api::ServiceId;

use super::Findings;
use super::code::Code;
use crate::invocation::Invocation;
use crate::operator::maintenance::daemon;

/// The status of `lvsd`; empty if no lvsd is running, or it does not answer.
#[derive(Debug, Default)]
pub(super) struct Director(Status);

impl Director {
    pub(super) fn ask(run: &Invocation<'_>) -> Self {
        let daemon = daemon(run).ok().flatten();
        let status = daemon.and_then(|mut daemon| daemon.status().ok());
        Self(status.unwrap_or_default())
    }

    /// The path of `lvsd`'s configuration file; `the file of lvsd` if the path is unknown.
    pub(super) fn file(&self) -> &str {
        match self.0.config.as_str() {
            "" => "the file of lvsd",
            path => path,
        }
    }

    fn service(&self, id: &ServiceId) -> Option<&ServiceStatus> {
        self.0.services.iter().find(|one| one.service == *id)
    }

    /// The status of a server, if `lvsd` finds the server suspicious.
    pub(super) fn suspicious(
        &self,
        service: &ServiceId,
        server: SocketAddr,
    ) -> Option<&ServerStatus> {
        let mut servers = self.service(service)?.servers.iter();
        servers.find(|one| one.server == server && one.health == "suspicious")
    }

    /// Why a service of `lvsd` has no usable server, and the fix.
    pub(super) fn why_unusable(&self, service: &ServiceId) -> String {
        let file = self.file();
        let Some(status) = self.service(service) else {
            return format!(
                "lvsd manages the service, but does not answer or no longer has it in its configuration: start lvsd, or check {file}"
            );
        };
        let servers = status
            .servers
            .iter()
            .filter(|server| server.configured.is_some());
        let servers: Vec<&ServerStatus> = servers.collect();
        if servers.is_empty() {
            return format!(
                "lvsd manages the service as `{}`: add servers to it in {file} and run lvsd reload",
                status.name
            );
        }
        let mut causes = Vec::new();
        let down = servers.iter().filter(|server| server.health == "down");
        let down: Vec<String> = down
            .map(|server| match server.reason.as_str() {
                "" => server.server.to_string(),
                reason => format!("{}: {reason}", server.server),
            })
            .collect();
        if let Some(first) = down.first() {
            causes.push(format!(
                "the checks of {} of its {} servers fail ({first}): repair these servers",
                down.len(),
                servers.len()
            ));
        }
        let away = servers
            .iter()
            .filter(|server| server.admin != AdminState::Ready);
        match away.count() {
            0 => {}
            n => causes.push(format!(
                "{n} of its {} servers are drained or in maintenance: end this with lvsadm undrain",
                servers.len()
            )),
        }
        let by_check = servers
            .iter()
            .filter(|server| server.configured.is_some_and(|weight| weight > 0))
            .filter(|server| server.health == "up" && server.weight == Some(0));
        match by_check.count() {
            n if n > 0 && causes.is_empty() => causes.push(format!(
                "the checks of {n} of its {} servers set their weight to 0: make the program or the agent of the check answer with another weight",
                servers.len()
            )),
            _ => {}
        }
        if causes.is_empty() {
            causes.push(format!(
                "set a server to a weight above 0 in {file} and run lvsd reload"
            ));
        }
        format!(
            "lvsd manages the service as `{}`: {}; lvsd status shows each server",
            status.name,
            causes.join("; ")
        )
    }

    /// keepalived's state, if this director does not have the virtual addresses.
    fn idle(&self) -> Option<&VrrpStatus> {
        let vrrp = self.0.director.vrrp.as_ref();
        vrrp.filter(|vrrp| !vrrp.active)
    }

    /// Whether this director does not answer for an address because it is not active in VRRP, or
    /// because a service with this address is withdrawn.
    pub(super) fn has_given_up(&self, vip: IpAddr) -> bool {
        let mut services = self.0.services.iter();
        self.idle().is_some()
            || services.any(|one| {
                one.withdrawn && one.service.address().is_some_and(|addr| addr.ip() == vip)
            })
    }

    /// A line for the output if the director is standby and ready; `None` in other cases.
    pub(super) fn stands_by(&self) -> Option<&'static str> {
        self.idle()
            .filter(|vrrp| vrrp.state == "backup" && vrrp.ready)
            .map(|_| "this director is standby: another director has the virtual addresses")
    }

    pub(super) fn look(&self, findings: &mut Findings) {
        let loaded = &self.0.loaded;
        if !loaded.ok && loaded.time > 0 {
            findings.add(
                Code::ConfigurationRefused,
                loaded.message.clone(),
                format!(
                    "lvsd check shows all errors of {}; correct them and run lvsd reload",
                    self.file()
                ),
            );
        }
        let director = &self.0.director;
        let Some(vrrp) = &director.vrrp else {
            if !director.missing_peers.is_empty() {
                let peers = director
                    .missing_peers
                    .iter()
                    .map(|peer| peer.ip().to_string());
                findings.add(
                    Code::DirectorNotReady,
                    format!(
                        "this director is not ready: its dataplane was started without the peers {}, and replicates nothing to them",
                        peers.collect::<Vec<_>>().join(", ")
                    ),
                    guidance::RESTART_DATAPLANE,
                );
            }
            return;
        };
        for trouble in &vrrp.trouble {
            findings.add(
                Code::VrrpTrouble,
                trouble.clone(),
                "correct this error; lvsd maintenance status and the log of lvsd show whether it persists",
            );
        }
        if (vrrp.active && vrrp.ready) || self.stands_by().is_some() {
            return;
        }
        if !vrrp.ready {
            let so = match vrrp.active {
                true => "but is active",
                false => "and so has no virtual address",
            };
            findings.add(
                Code::DirectorNotReady,
                format!(
                    "this director is not ready, {so}: it waits for {}",
                    vrrp.waits_for
                ),
                match director.missing_peers.is_empty() {
                    true => "lvsadm sync shows the state of its peers, and lvsd status whether the dataplane answers",
                    false => guidance::RESTART_DATAPLANE,
                },
            );
            return;
        }
        let (code, what, fix) = match vrrp.state.as_str() {
            "fault" => (
                Code::VrrpFault,
                "keepalived reports a fault, and so this director has no virtual address",
                "check that the interface of [vrrp] is up and has an address; journalctl -u keepalived shows the fault",
            ),
            _ => (
                Code::VrrpSilent,
                "keepalived reports nothing, or has stopped: this director has no virtual address",
                "systemctl restart keepalived; its file must have the content that lvsd keepalived-config prints",
            ),
        };
        findings.add(code, what, fix);
    }
}

#[cfg(test)]
mod tests {
    use lvs_api::daemon::DirectorStatus;

    use super::*;

    const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 10));

    fn director(state: &str, active: bool, ready: bool) -> Director {
        let vrrp = Some(VrrpStatus {
            state: state.to_owned(),
            active,
            ready,
            waits_for: "the dataplane".to_owned(),
            ..VrrpStatus::default()
        });
        let director = DirectorStatus {
            vrrp,
            ..DirectorStatus::default()
        };
        Director(Status {
            director,
            ..Status::default()
        })
    }

    fn found(director: &Director) -> Vec<String> {
        let mut findings = Findings::default();
        director.look(&mut findings);
        findings.0.into_iter().map(|one| one.what).collect()
    }

    #[test]
    fn fix_of_unusable_service_depends_on_states_of_its_servers() {
        let service = ServiceId::Tcp {
            address: (VIP, 80).into(),
        };
        let server = |n: u8, health: &str, admin, reason: &str| -> ServerStatus {
            let server = serde_json::json!({
                "server": format!("10.0.0.{n}:80"), "configured": 1, "admin": admin,
                "health": health, "since": null, "reason": reason, "weight": 0,
                "active": 0, "inactive": 0,
            });
            serde_json::from_value(server).expect("the JSON is valid")
        };
        let director = |servers: Vec<ServerStatus>| {
            let status = serde_json::json!({
                "name": "web", "service": service, "usable": 0, "quorum": false,
                "panic": false, "servers": servers,
            });
            let status: ServiceStatus = serde_json::from_value(status).expect("the JSON is valid");
            Director(Status {
                config: "/etc/lvsd/web.toml".to_owned(),
                services: vec![status],
                ..Status::default()
            })
        };
        let why = |servers| director(servers).why_unusable(&service);
        let ready = AdminState::Ready;
        let output = why(vec![
            server(1, "down", ready, "connection refused"),
            server(2, "up", AdminState::Drain, ""),
        ]);
        for words in [
            "`web`",
            "1 of its 2 servers fail (10.0.0.1:80: connection refused)",
            "lvsadm undrain",
            "lvsd status",
        ] {
            assert!(output.contains(words), "no {words:?} in {output}");
        }
        let output = why(vec![server(1, "up", ready, "")]);
        assert!(
            output.contains("set their weight to 0"),
            "no `set their weight to 0` in {output}"
        );
        let idle = ServerStatus {
            configured: Some(0),
            ..server(1, "up", ready, "")
        };
        let output = why(vec![idle]);
        assert!(
            output.contains("weight above 0 in /etc/lvsd/web.toml"),
            "no `weight above 0 in /etc/lvsd/web.toml` in {output}"
        );
        let output = why(Vec::new());
        assert!(
            output.contains("add servers to it in /etc/lvsd/web.toml"),
            "no `add servers to it in /etc/lvsd/web.toml` in {output}"
        );
        let suspicious = |health: &str| {
            let director = director(vec![server(1, health, ready, "no answer")]);
            let found = director.suspicious(&service, ([10, 0, 0, 1], 80).into());
            found.map(|status| status.reason.clone())
        };
        assert_eq!(suspicious("suspicious").as_deref(), Some("no answer"));
        assert_eq!(suspicious("down"), None);
        let unknown = Director::default().why_unusable(&service);
        assert!(
            unknown.contains("start lvsd"),
            "no `start lvsd` in {unknown}"
        );
    }

    #[test]
    fn doctor_reports_active_director_only_if_it_is_not_ready() {
        let standby = director("backup", false, true);
        assert!(standby.has_given_up(VIP) && standby.stands_by().is_some());
        assert!(found(&standby).is_empty());
        let active = director("master", true, true);
        assert!(!active.has_given_up(VIP) && active.stands_by().is_none());
        assert!(found(&active).is_empty());
        let [unready] = &found(&director("master", true, false))[..] else {
            panic!("there is not exactly one finding");
        };
        assert!(
            unready.contains("but is active: it waits for the dataplane"),
            "no `but is active: it waits for the dataplane` in {unready}"
        );
        let alone = Director::default();
        assert!(!alone.has_given_up(VIP) && alone.stands_by().is_none());
        assert!(found(&alone).is_empty());
    }

    #[test]
    fn doctor_director_that_cannot_become_active_is_a_finding() {
        for (state, ready, words) in [
            ("backup", false, "waits for the dataplane"),
            ("master", false, "waits for the dataplane"),
            ("fault", true, "reports a fault"),
            ("stopped", true, "has stopped"),
            ("unknown", true, "reports nothing"),
        ] {
            let director = director(state, false, ready);
            assert!(director.has_given_up(VIP) && director.stands_by().is_none());
            let found = found(&director);
            assert!(
                found.len() == 1 && found[0].contains(words),
                "{state}: {found:?}"
            );
        }
    }

    #[test]
    fn doctor_reports_vrrp_troubles_of_lvsd() {
        let mut director = director("master", true, true);
        let vrrp = director
            .0
            .director
            .vrrp
            .as_mut()
            .expect("the status has `vrrp`");
        vrrp.trouble = vec!["the FIFO was removed".to_owned()];
        assert_eq!(found(&director), ["the FIFO was removed"]);
    }

    #[test]
    fn doctor_address_of_withdrawn_service_counts_as_released() {
        let text = r#"{"name": "web", "service": {"protocol": "tcp", "address": "192.0.2.10:80"}, "usable": 0,
            "quorum": false, "panic": false, "withdrawn": true, "servers": []}"#;
        let service: ServiceStatus = serde_json::from_str(text).expect("the JSON is valid");
        let director = Director(Status {
            services: vec![service],
            ..Status::default()
        });
        assert!(director.has_given_up(VIP));
        assert!(!director.has_given_up(IpAddr::from([192, 0, 2, 11])));
    }
}
