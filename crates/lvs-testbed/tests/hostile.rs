//! A million frames that nobody should send for each forwarding method: none panics the packet path, each has one fate, and
//! what leaves is right.

use lvs_testbed::hostile::{Method, Summary, storm};

/// Frames for each method. Without optimisation it takes a hundred times as long.
const FRAMES: u64 = if cfg!(debug_assertions) {
    20_000
} else {
    1_000_000
};

fn weather(names: &[&str]) -> Summary {
    let mut all = Summary::default();
    for (seed, name) in (1..).zip(names) {
        let method = Method::named(name).expect("a method");
        let summary = storm(method, seed, FRAMES);
        println!("{name}: {summary:?}\n{:?}", summary.drops());
        all.add(&summary);
    }
    all
}

#[test]
fn nat() {
    weather(&["nat4", "nat6"]);
}
