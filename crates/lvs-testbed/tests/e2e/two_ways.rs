//! Sends the same frames, valid and hostile, to two dataplanes: one with the userspace fast path,
//! and one with the slow path only. Both must send the same frames, and have the same connections,
//! states, deadlines and counters.

use lvs_testbed::hostile::{Method, two_ways};
use lvs_testbed::suite::size;

/// Number of frames for each method, in `make test`.
const QUICK_FRAMES: u64 = 15_000;
/// Number of frames for each method, in `make test-rest`.
const FULL_FRAMES: u64 = 1_000_000;

fn same(names: &[&str], seed: u64) {
    let frames = size(QUICK_FRAMES, FULL_FRAMES);
    for name in names {
        let method = Method::named(name).expect("no forwarding method has this name");
        let passed = two_ways(method, seed, frames);
        println!("{name}: {passed} of {frames} frames used the userspace fast path");
        // The userspace fast path handles only IPv4 packets to IPv4 servers.
        let short = name.ends_with("4") && !name.contains("6in");
        assert_eq!(
            short,
            passed > frames / 20,
            "{name}: {passed} of {frames} frames used the userspace fast path"
        );
        assert!(
            short || passed == 0,
            "{name}: {passed} frames used the userspace fast path"
        );
    }
}

#[test]
fn userspace_fast_path_sends_same_nat_frames_as_slow_path() {
    same(&["nat4", "nat6"], 11);
}

#[test]
fn userspace_fast_path_sends_same_direct_routing_frames_as_slow_path() {
    same(&["dr4", "dr6"], 12);
}

#[test]
fn userspace_fast_path_sends_same_tunnel_frames_as_slow_path() {
    same(&["ipip-4in4", "ipip-6in4", "gre-4in4"], 13);
}
