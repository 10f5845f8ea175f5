//! Frames that no host should send, for NAT, direct routing and tunnels (a million for each method
//! and IP version in `make test-rest`). The dataplane must assign exactly one fate to each frame,
//! send only valid frames, and not panic.

use std::collections::BTreeSet;

use lvs_testbed::hostile::{Method, Summary, storm};
use lvs_testbed::suite::size;

/// Number of frames for each method, in `make test`.
const QUICK_FRAMES: u64 = 40_000;
/// Number of frames for each method, in `make test-rest`.
const FULL_FRAMES: u64 = 1_000_000;

/// Maximum resident memory, in bytes, of the test process. It may run several tests of this file at
/// the same time.
const RESIDENT_MAX: usize = 768 << 20;

fn weather(seed: u64, names: &[&str]) {
    let frames = size(QUICK_FRAMES, FULL_FRAMES);
    let mut drops = BTreeSet::new();
    for name in names {
        let method = Method::named(name).expect("no forwarding method has this name");
        let summary = storm(method, seed, frames);
        let Summary {
            counters,
            right,
            came_right,
            trains,
            tunnelled,
            ..
        } = &summary;
        println!("{name}: {counters:?}, {:?}", summary.drops());
        println!(
            "{name}: correct checksums: {came_right} received, {right} sent; {trains} fragmented datagrams, {tunnelled} packets in tunnels"
        );
        println!(
            "{name}: at most {} connections, {} frames waiting, {} bytes of fragments",
            summary.connections, summary.waiting, summary.fragments
        );
        // Frames of each kind must have been received, and some of them must have each fate.
        let tenth = frames / 10;
        assert!(
            counters.received >= frames && counters.dropped_total() > tenth,
            "{name}: {counters:?}"
        );
        assert!(counters.sent > frames / 50, "{name}: {counters:?}");
        assert!(
            *came_right > tenth && *right > tenth && *trains > frames / 1000,
            "{name}: {came_right} {right} {trains}"
        );
        for fate in [
            counters.held,
            counters.left,
            counters.given_back,
            counters.answered,
        ] {
            assert!(fate > frames / 1000, "{name}: {counters:?}");
        }
        assert_eq!(*tunnelled > tenth / 4, method.name.contains("in"), "{name}");
        drops.extend(summary.drops().into_keys());
        let resident = resident();
        assert!(
            resident < RESIDENT_MAX,
            "{name}: the tests use too much memory: {resident} bytes"
        );
    }
    println!("{drops:?}");
}

/// Returns the resident memory of this process in bytes.
fn resident() -> usize {
    let text =
        std::fs::read_to_string("/proc/self/statm").expect("/proc/self/statm cannot be read");
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.map_or(0, |pages: usize| pages * 4096)
}

#[test]
fn hostile_frames_through_ipv4_nat_cause_no_panic_or_invalid_frame() {
    weather(1, &["nat4"]);
}

#[test]
fn hostile_frames_through_ipv6_nat_cause_no_panic_or_invalid_frame() {
    weather(2, &["nat6"]);
}

#[test]
fn hostile_frames_by_direct_routing_cause_no_panic_or_invalid_frame() {
    weather(3, &["dr4", "dr6"]);
}

#[test]
fn hostile_frames_through_ipip_cause_no_panic_or_invalid_frame() {
    weather(4, &["ipip-4in4", "ipip-6in6"]);
}

#[test]
#[ignore = "long"]
fn hostile_frames_through_ipip_of_another_family_cause_no_panic_or_invalid_frame() {
    weather(5, &["ipip-4in6", "ipip-6in4"]);
}

#[test]
#[ignore = "long"]
fn hostile_frames_through_gre_cause_no_panic_or_invalid_frame() {
    weather(6, &["gre-4in4", "gre-6in6"]);
}

#[test]
#[ignore = "long"]
fn hostile_frames_through_gue_cause_no_panic_or_invalid_frame() {
    weather(7, &["gue-4in4", "gue-6in6"]);
}

#[test]
#[ignore = "long"]
fn hostile_frames_through_gue_of_another_family_cause_no_panic_or_invalid_frame() {
    weather(8, &["gue-4in6", "gue-6in4"]);
}
