//! Sends the same frames, valid and hostile, to two dataplanes: one with the BPF programs, and one
//! that forwards all frames in userspace. Both must send the same frames, and have the same
//! connections, states, deadlines and counters.

use lvs_dataplane::fast_path::FastPathError;
use lvs_sys::is_root_of_all;
use lvs_sys::testing::not_run;
use lvs_testbed::hostile::{Forwarded, Method, twins};
use lvs_testbed::suite::size;

/// Number of frames for each combination of forwarding method and IP versions, in `make test`.
const QUICK_FRAMES: u64 = 15_000;
/// Number of frames for each of these combinations, in `make test-rest`.
const FULL_FRAMES: u64 = 150_000;

/// Reports the test as not run if BPF is not permitted. For root of the initial user namespace, a
/// missing permission is a failure; every other error is a failure for all users.
fn not_tested(error: &FastPathError) -> ! {
    let excused = matches!(error, FastPathError::Permission(_)) && !is_root_of_all();
    assert!(excused, "{error:?}");
    not_run(&format!("needs BPF: {error}"));
}

fn same(names: &[&str], seed: u64) {
    let frames = size(QUICK_FRAMES, FULL_FRAMES);
    for name in names {
        let method = Method::named(name).expect("no forwarding method has this name");
        match twins(method, seed, frames) {
            Ok(forwarded) => {
                let Forwarded { all, early } = forwarded;
                println!(
                    "{name}: {all} of {frames} frames were forwarded by the programs, {early} of them by XDP"
                );
                assert!(
                    all > frames / 20,
                    "{name}: only {all} of {frames} frames were forwarded by the programs"
                );
                // The XDP program runs for half of the frames; it forwards no frames into tunnels.
                let tunnel = !["nat", "fullnat", "dr"]
                    .iter()
                    .any(|kind| name.starts_with(kind));
                assert!(
                    tunnel && early == 0 || early > all / 4,
                    "{name}: XDP forwarded another share of the frames than expected: {early} of {all}"
                );
            }
            Err(error) => not_tested(&error),
        }
    }
}

#[test]
fn kernel_fast_path_sends_same_nat_frames_as_userspace() {
    same(&["nat4", "nat6"], 1);
}

#[test]
fn kernel_fast_path_sends_same_full_nat_frames_as_userspace() {
    same(&["fullnat4", "fullnat6"], 7);
}

#[test]
fn kernel_fast_path_sends_same_direct_routing_frames_as_userspace() {
    same(&["dr4", "dr6"], 2);
}

#[test]
fn kernel_fast_path_sends_same_ipip_frames_as_userspace() {
    same(&["ipip-4in4", "ipip-6in6", "ipip-6in4"], 3);
}

#[test]
#[ignore = "long"]
fn kernel_fast_path_sends_same_gre_frames_as_userspace() {
    same(&["gre-bare-4in4", "gre-bare-6in6"], 4);
}

#[test]
#[ignore = "long"]
fn kernel_fast_path_sends_same_gue_frames_as_userspace() {
    same(&["gue-bare-4in4", "gue-bare-6in6", "gue-6in4"], 5);
}

/// IPIP with IPv4 in IPv6, and GRE and GUE with checksums.
#[test]
fn kernel_fast_path_forwards_no_frames_of_unsupported_tunnels() {
    for name in ["ipip-4in6", "gre-4in4", "gue-6in6"] {
        let method = Method::named(name).expect("no forwarding method has this name");
        match twins(method, 6, 5000) {
            Ok(forwarded) => assert_eq!(forwarded, Forwarded::default(), "{name}"),
            Err(error) => not_tested(&error),
        }
    }
}
