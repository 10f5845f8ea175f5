//! What `lvsd` says: which virtual addresses this director is not to answer for, and what is wrong
//! between it and keepalived.

use std::net::IpAddr;

use lvs_dataplane::control::daemon::{Ask, Status, VrrpStatus};

use super::Findings;
use super::services::address_of;
use crate::operator::maintenance::daemon;
use crate::program::Invocation;

/// The director as `lvsd` knows it; nothing is known where none runs, or it does not answer.
#[derive(Debug, Default)]
pub(super) struct Director(Status);

impl Director {
    pub(super) fn ask(run: &Invocation<'_>) -> Self {
        let daemon = daemon(run).ok().flatten();
        let status = daemon.and_then(|mut daemon| daemon.ask(&Ask::Status {}).ok());
        Self(status.unwrap_or_default())
    }

    /// keepalived, if it says that another director has the addresses, or if nobody is to have
    /// them here.
    fn idle(&self) -> Option<&VrrpStatus> {
        let vrrp = self.0.director.vrrp.as_ref();
        vrrp.filter(|vrrp| !vrrp.active)
    }

    /// Whether nobody here is to answer for an address.
    pub(super) fn has_given_up(&self, vip: IpAddr) -> bool {
        let mut services = self.0.services.iter();
        self.idle().is_some()
            || services.any(|one| {
                one.withdrawn && address_of(&one.service).is_some_and(|addr| addr.ip() == vip)
            })
    }

    /// That it stands by, in words.
    pub(super) fn stands_by(&self) -> Option<&'static str> {
        self.idle()
            .filter(|vrrp| vrrp.state == "backup" && vrrp.ready)
            .map(|_| "this director stands by: another one has the virtual addresses")
    }

    pub(super) fn look(&self, findings: &mut Findings) {
        let Some(vrrp) = &self.0.director.vrrp else {
            return;
        };
        for trouble in &vrrp.trouble {
            findings.add(
                trouble.clone(),
                "lvsd maintenance status shows it until it is over",
            );
        }
        if vrrp.active || self.stands_by().is_some() {
            return;
        }
        if !vrrp.ready {
            findings.add(
                format!(
                    "this director is not ready, and so has no virtual address: it waits for {}",
                    vrrp.waits_for
                ),
                "lvsadm sync shows how far its peers are; lvsd status, whether the engine answers",
            );
            return;
        }
        let (what, cure) = match vrrp.state.as_str() {
            "fault" => (
                "keepalived finds a fault, and so this director has no virtual address",
                "is the interface of [vrrp] up, and has it an address? journalctl -u keepalived tells",
            ),
            _ => (
                "keepalived says nothing, or has stopped, and so this director has no virtual address",
                "systemctl restart keepalived; its file is to be what lvsd keepalived-config prints",
            ),
        };
        findings.add(what, cure);
    }
}

#[cfg(test)]
mod tests {
    use lvs_dataplane::control::daemon::{DirectorStatus, ServiceStatus};

    use super::*;

    const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 10));

    fn director(state: &str, active: bool, ready: bool) -> Director {
        let vrrp = Some(VrrpStatus {
            state: state.to_owned(),
            active,
            ready,
            waits_for: "the engine".to_owned(),
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
    fn one_that_stands_by_is_healthy() {
        let standby = director("backup", false, true);
        assert!(standby.has_given_up(VIP) && standby.stands_by().is_some());
        assert!(found(&standby).is_empty());
        let active = director("master", true, true);
        assert!(!active.has_given_up(VIP) && active.stands_by().is_none());
        assert!(found(&active).is_empty());
        let alone = Director::default();
        assert!(!alone.has_given_up(VIP) && alone.stands_by().is_none());
        assert!(found(&alone).is_empty());
    }

    #[test]
    fn one_that_cannot_be_active_is_not() {
        for (state, ready, words) in [
            ("backup", false, "waits for the engine"),
            ("master", false, "waits for the engine"),
            ("fault", true, "finds a fault"),
            ("stopped", true, "has stopped"),
            ("unknown", true, "says nothing"),
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
    fn what_lvsd_complains_of_is_found() {
        let mut director = director("master", true, true);
        let vrrp = director.0.director.vrrp.as_mut().expect("there is");
        vrrp.trouble = vec!["the FIFO is gone".to_owned()];
        assert_eq!(found(&director), ["the FIFO is gone"]);
    }

    #[test]
    fn an_address_that_is_given_up_below_a_quorum() {
        let text = r#"{"name": "web", "service": {"protocol": "tcp", "address": "192.0.2.10:80"}, "usable": 0,
            "quorum": false, "panic": false, "withdrawn": true, "servers": []}"#;
        let service: ServiceStatus = serde_json::from_str(text).expect("a service");
        let director = Director(Status {
            services: vec![service],
            ..Status::default()
        });
        assert!(director.has_given_up(VIP));
        assert!(!director.has_given_up(IpAddr::from([192, 0, 2, 11])));
    }
}
