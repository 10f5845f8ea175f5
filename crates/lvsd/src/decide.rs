//! Decisions about services with missing servers: quorum, panic mode and sorry server (pure
//! functions).

use crate::config::{BelowQuorum, Service};
use crate::reconcile::Health;

/// A server, for decisions about its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerView {
    /// The server's health according to its checks.
    pub health: Health,
    /// Whether the file and the operators allow new connections to the server.
    pub wanted: bool,
}

/// A decision about a service, which depends on the previous one (hysteresis).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the service has its quorum.
    pub quorum: bool,
    /// Whether the service is in panic mode: too few servers are up, so that all are used.
    pub panic: bool,
    /// Whether the sorry server replaces the other servers.
    pub sorry: bool,
    /// Whether the service's VIP is withdrawn.
    pub withdrawn: bool,
}

impl Default for Decision {
    /// The initial decision: the quorum is reached.
    fn default() -> Self {
        Self {
            quorum: true,
            panic: false,
            sorry: false,
            withdrawn: false,
        }
    }
}

impl ServerView {
    /// Whether the server should receive new connections.
    pub fn is_usable(&self) -> bool {
        self.wanted && self.health == Health::Up
    }
}

/// Number of servers that should receive new connections.
pub fn usable(servers: &[ServerView]) -> usize {
    servers.iter().filter(|server| server.is_usable()).count()
}

/// Decides about a service; returns `None` while no decision is possible. Until all servers have
/// been checked (`settled`), a service can reach its quorum, but not lose it, because an unchecked
/// server may complete it.
pub fn decide(
    service: &Service,
    servers: &[ServerView],
    settled: bool,
    before: Option<Decision>,
) -> Option<Decision> {
    let decided = before;
    let before = before.unwrap_or_default();
    let usable = usable(servers);
    let needed = match before.quorum {
        true => service.quorum.down,
        false => service.quorum.up,
    };
    let quorum = usable >= usize::try_from(needed).unwrap_or(usize::MAX);
    if !settled {
        return match quorum {
            true => Some(Decision {
                panic: before.panic,
                ..Decision::default()
            }),
            false => decided,
        };
    }
    let sorry = service.sorry.is_some() && !quorum;
    let wanted = servers.iter().filter(|server| server.wanted).count();
    // A sorry server replaces the other servers instead of panic mode.
    let few = usable * 100 < wanted * usize::from(service.min_share);
    let panic = few && wanted > 0 && !sorry;
    Some(Decision {
        quorum,
        panic,
        sorry,
        withdrawn: !quorum && !panic && service.below_quorum == BelowQuorum::GiveUp,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    fn service(more: &str) -> Service {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n{more}\n\
             [[service.server]]\naddress = \"10.0.0.1\"\n[[service.server]]\naddress = \"10.0.0.2\"\n\
             [[service.server]]\naddress = \"10.0.0.3\"\n[[service.server]]\naddress = \"10.0.0.4\"\n"
        );
        let (config, _) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
        config.services[0].clone()
    }

    fn up(number: usize) -> Vec<ServerView> {
        let view = |n| ServerView {
            health: if n < number { Health::Up } else { Health::Down },
            wanted: true,
        };
        (0..4).map(view).collect()
    }

    /// Decisions about a service, one for each step; a step is the number of servers that are up.
    fn walk(service: &Service, steps: &[usize]) -> Vec<Decision> {
        let mut now = Decision::default();
        steps
            .iter()
            .map(|&number| {
                now =
                    decide(service, &up(number), true, Some(now)).expect("the service is decided");
                now
            })
            .collect()
    }

    #[test]
    fn quorum_is_gained_and_lost_at_different_numbers() {
        let service = service("quorum = { up = 3, down = 2 }\nsorry = \"10.0.0.99\"");
        let quorum = |steps: &[usize]| -> Vec<bool> {
            walk(&service, steps).iter().map(|d| d.quorum).collect()
        };
        assert_eq!(
            quorum(&[4, 2, 1, 2, 3, 2]),
            [true, true, false, false, true, true]
        );
        let sorry: Vec<bool> = walk(&service, &[4, 1, 2, 3])
            .iter()
            .map(|d| d.sorry)
            .collect();
        assert_eq!(sorry, [false, true, true, false]);
    }

    #[test]
    fn unknown_health_changes_no_decision() {
        let service = service("sorry = \"10.0.0.99\"");
        for before in [None, Some(Decision::default())] {
            assert_eq!(decide(&service, &up(0), false, before), before);
        }
    }

    #[test]
    fn quorum_can_be_reached_but_not_lost_while_servers_are_unchecked() {
        let service = service("quorum = 2\nsorry = \"10.0.0.99\"\npanic_below = 50");
        let has = Some(Decision::default());
        assert_eq!(decide(&service, &up(1), false, None), None);
        assert_eq!(decide(&service, &up(2), false, None), has);
        assert_eq!(decide(&service, &up(1), false, has), has);
        let lost = decide(&service, &up(1), true, has);
        assert!(lost.is_some_and(|lost| lost.sorry && !lost.quorum));
        assert_eq!(decide(&service, &up(1), false, lost), lost);
        assert_eq!(decide(&service, &up(2), false, lost), has);
    }

    #[test]
    fn sorry_server_overrides_panic_mode() {
        let service =
            service("quorum = { up = 3, down = 2 }\npanic_below = 60\nsorry = \"10.0.0.99\"");
        let both: Vec<(bool, bool)> = walk(&service, &[4, 2, 1, 2, 3])
            .iter()
            .map(|d| (d.panic, d.sorry))
            .collect();
        let wanted = [
            (false, false),
            (true, false),
            (false, true),
            (false, true),
            (false, false),
        ];
        assert_eq!(both, wanted);
    }

    #[test]
    fn panic_mode_uses_all_servers_below_threshold() {
        let lone = service("panic_below = 50");
        let panic: Vec<bool> = walk(&lone, &[4, 2, 1, 0, 2])
            .iter()
            .map(|d| d.panic)
            .collect();
        assert_eq!(panic, [false, false, true, true, false]);
        // A sorry server serves instead of panic mode if no server is up.
        let with = service("panic_below = 50\nsorry = \"10.0.0.99\"");
        let both: Vec<(bool, bool)> = walk(&with, &[1, 0])
            .iter()
            .map(|d| (d.panic, d.sorry))
            .collect();
        assert_eq!(both, [(true, false), (false, true)]);
    }

    #[test]
    fn vip_is_released_only_below_quorum() {
        let service = service("below_quorum = \"give-up\"\nquorum = 2");
        let gone: Vec<bool> = walk(&service, &[4, 1, 2])
            .iter()
            .map(|d| d.withdrawn)
            .collect();
        assert_eq!(gone, [false, true, false]);
    }

    proptest! {
        /// Sorry server and withdrawn VIP occur only without a quorum, and a number of servers
        /// between `down` and `up` changes no decision.
        #[test]
        fn decisions_for_any_health_are_consistent(
            up_at in 1u32..4,
            less in 0u32..4,
            share in 0u8..=100,
            sorry in any::<bool>(),
            steps in proptest::collection::vec(0usize..=4, 1..40),
        ) {
            let down = up_at.saturating_sub(less).max(1);
            let sorry_line = if sorry { "sorry = \"10.0.0.99\"\n" } else { "" };
            let service = service(&format!(
                "quorum = {{ up = {up_at}, down = {down} }}\npanic_below = {share}\nbelow_quorum = \"give-up\"\n{sorry_line}"
            ));
            let mut before = Decision::default();
            for number in steps {
                let now = decide(&service, &up(number), true, Some(before)).expect("the service is decided");
                prop_assert_eq!(now.sorry, sorry && !now.quorum);
                prop_assert!(!(now.sorry && now.panic));
                prop_assert!(!now.withdrawn || !now.quorum);
                let n = u32::try_from(number).expect("the number of servers fits into 32 bits");
                if n >= up_at { prop_assert!(now.quorum); }
                if n < down { prop_assert!(!now.quorum); }
                if (down..up_at).contains(&n) { prop_assert_eq!(now.quorum, before.quorum); }
                before = now;
            }
        }
    }
}
