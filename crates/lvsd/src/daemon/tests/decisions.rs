//! Quorum, `panic_below`, sorry server and VIP against a model of the documentation.

use super::*;

/// A change of one of four servers.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Dies(u8),
    Lives(u8),
    Drained(u8),
    Ready(u8),
}

/// The expected state according to the documentation.
#[derive(Clone, Debug)]
struct Model {
    quorum: (usize, usize),
    share: usize,
    sorry: bool,
    up: [bool; 4],
    drained: [bool; 4],
    has_quorum: bool,
}

impl Model {
    /// Applies a change. Returns the weights of the servers and of the sorry server, and whether
    /// the VIP is owned.
    fn turn(&mut self, turn: Turn) -> (Vec<i32>, Option<i32>, bool) {
        match turn {
            Turn::Dies(n) => self.up[usize::from(n)] = false,
            Turn::Lives(n) => self.up[usize::from(n)] = true,
            Turn::Drained(n) => self.drained[usize::from(n)] = true,
            Turn::Ready(n) => self.drained[usize::from(n)] = false,
        }
        let count = |is: &dyn Fn(usize) -> bool| (0..4).filter(|n| is(*n)).count();
        let usable = count(&|n| self.up[n] && !self.drained[n]);
        let wanted = count(&|n| !self.drained[n]);
        if usable < self.quorum.1 {
            self.has_quorum = false;
        } else if usable >= self.quorum.0 {
            self.has_quorum = true;
        }
        let sorry = self.sorry && !self.has_quorum;
        let too_few = usable * 100 < wanted * self.share;
        let all = too_few && !sorry;
        let weight = |n: usize| i32::from(!sorry && !self.drained[n] && (self.up[n] || all));
        let owned = self.has_quorum || all;
        ((0..4).map(weight).collect(), sorry.then_some(1), owned)
    }
}

fn turns() -> impl proptest::strategy::Strategy<Value = Vec<Turn>> {
    use proptest::prelude::*;
    let turn = (0..4u8, 0..6u8).prop_map(|(n, what)| match what {
        0 | 1 => Turn::Dies(n),
        2 | 3 => Turn::Lives(n),
        4 => Turn::Drained(n),
        _ => Turn::Ready(n),
    });
    proptest::collection::vec(turn, 1..12)
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 32, ..Default::default() })]

    /// Quorum with hysteresis, `panic_below`, sorry server and VIP, for any sequence of events and
    /// overrides.
    #[test]
    fn daemon_decisions_match_the_documented_rules(
        up in 1..=4usize,
        less in 0..3usize,
        share in proptest::sample::select(vec![0usize, 30, 60, 100]),
        sorry in proptest::bool::ANY,
        turns in turns(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let mut model = Model {
            quorum: (up, up.saturating_sub(less).max(1)),
            share,
            sorry,
            up: [true; 4],
            drained: [false; 4],
            has_quorum: true,
        };
        let mut text = format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\ndrain = \"0s\"\n\
             quorum = {{ up = {}, down = {} }}\npanic_below = {share}\nbelow_quorum = \"give-up\"\n\
             check = {{ type = \"tcp\", interval = \"1s\", timeout = \"1s\", rise = 1, fall = 1 }}\n",
            model.quorum.0, model.quorum.1
        );
        if sorry {
            text.push_str("sorry = \"10.0.0.99:80\"\n");
        }
        for n in 0..4 {
            text.push_str(&format!("[[service.server]]\naddress = \"10.0.0.{n}:80\"\n"));
        }
        runtime.block_on(async {
            let daemon = Running::start(World::default(), Dead::default(), &text);
            tokio::time::sleep(Duration::from_secs(5)).await;
            for (number, turn) in turns.iter().enumerate() {
                let (weights, sorry, owned) = model.turn(*turn);
                let admin = |n: u8, state| {
                    daemon.ask::<AdminDone>(ChangeRequest::Admin(AdminSpec {
                        target: Target {
                            service: None,
                            host: [10, 0, 0, n].into(),
                            port: None,
                        },
                        state,
                        who: None,
                        why: None,
                        until: None,
                        force: true,
                    }))
                };
                match *turn {
                    Turn::Dies(n) => daemon.dead.set(&format!("10.0.0.{n}:80"), true),
                    Turn::Lives(n) => daemon.dead.set(&format!("10.0.0.{n}:80"), false),
                    Turn::Drained(n) => drop(admin(n, AdminState::Drain).await.unwrap()),
                    Turn::Ready(n) => drop(admin(n, AdminState::Ready).await.unwrap()),
                }
                tokio::time::sleep(Duration::from_secs(4)).await;
                let now: Vec<i32> = daemon.world.weights(web()).iter().map(|(_, w)| *w).collect();
                let wanted: Vec<i32> = weights.into_iter().chain(sorry).collect();
                assert_eq!(now, wanted, "after {:?} of {turns:?}", number + 1);
                let vip = "192.0.2.10".parse().unwrap();
                let owns = daemon.world.dataplane().vips().contains(&vip);
                assert_eq!(owns, owned, "after {:?} of {turns:?}", number + 1);
            }
            daemon.stop().await;
        });
    }
}
