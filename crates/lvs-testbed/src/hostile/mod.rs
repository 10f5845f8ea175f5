//! Fuzz frames, and the properties that must hold for any frame. Tests of the packet path, fuzz
//! targets, and tests with real interfaces use them.
//!
//! ```text
//!  Entropy (a seed, or a fuzzer's bytes) ─▶ Generator ─▶ Act ─▶ Bed: director and packet path in memory
//!                                                               │
//!                                      oracle: checksums by another crate, conservation, bounds
//! ```
//!
//! [`Entropy`] makes choices. [`Generator`] turns them into frames (valid, damaged, contradictory)
//! and into changes around them. [`Bed`] passes the frames through the packet path, and panics if
//! any output is wrong.

mod bed;
mod entropy;
mod generator;
mod scene;
mod shoot;
mod twins;

pub use bed::{Bed, Summary};
pub use entropy::Entropy;
pub use generator::{Act, Generator, Shot, Side};
pub use scene::{Method, Scene};
pub use shoot::{ShootOptions, shoot};
pub use twins::{twins, two_ways};

pub use crate::kernel_path::Forwarded;

/// Number of frames for one director. The next director has other settings.
const WATCH: u64 = 5000;

/// Passes at least `frames` frames from `seed` through the packet path in memory, with one
/// forwarding method.
///
/// # Panics
/// An invariant does not hold; for example, a frame does not have exactly one fate, or a sent frame
/// is wrong.
pub fn storm(method: &Method, seed: u64, frames: u64) -> Summary {
    let mut settings = Entropy::seeded(!seed);
    let scene = Scene::new(method);
    let mut generator = Generator::new(scene.clone(), Entropy::seeded(seed));
    let mut summary = Summary::default();
    while summary.counters.received < frames {
        let mut bed = Bed::new(&scene, &mut settings);
        while bed.received() < WATCH {
            bed.act(generator.next_act());
        }
        summary.add(&bed.finish());
    }
    summary
}

/// As [`storm`], but `bytes` determine method, settings and steps.
///
/// # Panics
/// As [`storm`].
pub fn squall(bytes: &[u8]) {
    let mut entropy = Entropy::from_bytes(bytes);
    let scene = Scene::new(&entropy.pick(&Method::ALL));
    let mut bed = Bed::new(&scene, &mut entropy);
    let mut generator = Generator::new(scene, entropy);
    while !generator.is_done() {
        bed.act(generator.next_act());
    }
    bed.finish();
}
