//! Random operations on the director and on a naive model of it: both must agree on every decision,
//! every count and every listing.

use lvs_core::TcpFlags;
use lvs_testbed::fuzz::naive::{Op, Pair};
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    let flags = prop_oneof![
        4 => Just(TcpFlags::SYN),
        4 => Just(TcpFlags::ACK),
        2 => Just(TcpFlags::FIN | TcpFlags::ACK),
        2 => Just(TcpFlags::SYN | TcpFlags::ACK),
        1 => Just(TcpFlags::RST),
        1 => Just(0),
    ];
    let thresholds = (0u32..5, 0u32..5).prop_map(|(a, b)| (a.max(b), a.min(b)));
    prop_oneof![
        12 => (0u8..12, flags.clone()).prop_map(|(client, flags)| Op::FromClient(client, flags)),
        6 => (0u8..4, 0u8..12, flags).prop_map(|(server, client, flags)| Op::FromServer(server, client, flags)),
        2 => (0u8..4, 0i32..8, thresholds.clone(), any::<bool>())
            .prop_map(|(server, weight, (upper, lower), nat)| Op::Add(server, weight, upper, lower, nat)),
        2 => (0u8..4, 0i32..8, thresholds)
            .prop_map(|(server, weight, (upper, lower))| Op::Edit(server, weight, upper, lower)),
        1 => (0u8..4).prop_map(Op::Delete),
        3 => prop_oneof![0u64..4, 5u64..130, 300u64..2000].prop_map(Op::Wait),
        1 => (prop_oneof![Just("expire_nodest_conn"), Just("expire_quiescent_template"), Just("conn_reuse_mode")], 0i32..4)
            .prop_map(|(name, value)| Op::Sysctl(name, value)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn director_agrees_with_naive_model(
        scheduler in prop_oneof![Just("rr"), Just("wlc"), Just("sed")],
        persistent: bool,
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut pair = Pair::new(scheduler, persistent);
        for op in &ops {
            pair.apply(op);
        }
        pair.finish();
    }
}
