//! Weighted random twos choice (`ip_vs_twos`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::About;
use crate::random::SplitMix64;
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "twos",
    summary: "the less loaded of two servers drawn at random by weight",
    draws_lots: true,
    make: || Box::<RandomTwos>::default(),
    ..About::USUAL
};

/// Chooses two servers at random by weight, and uses the one with less load in relation to its
/// weight.
#[derive(Clone, Copy, Debug, Default)]
pub struct RandomTwos {
    /// Random numbers that depend on the director's seed only. In the kernel they are
    /// unpredictable.
    random: SplitMix64,
}

impl RandomTwos {
    fn draw(&mut self, last: u32) -> i64 {
        let drawn = self.random.draw_below(u64::from(last) + 1);
        i64::try_from(drawn).unwrap_or(0)
    }
}

impl Scheduler for RandomTwos {
    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        let usable = || (0..servers.len()).filter(|&index| servers[index].is_usable());
        let mut total = 0u32;
        let mut last = None;
        for index in usable() {
            total = total.wrapping_add(servers[index].weight().unsigned_abs());
            last = Some(index);
        }
        let mut choices = [(last?, None), (last?, None)];
        let mut draws = [self.draw(total), self.draw(total)];
        for index in usable() {
            let weight = servers[index].weight();
            for (draw, choice) in draws.iter_mut().zip(&mut choices) {
                *draw -= i64::from(weight);
                if *draw <= 0 && choice.1.is_none() {
                    *choice = (index, Some((weight, servers[index].overhead())));
                }
            }
            if choices.iter().all(|choice| choice.1.is_some()) {
                break;
            }
        }
        // The products have 32 bits and may overflow, as in the kernel. A draw that finds no server
        // (because the total overflowed) counts as weight and load 0.
        let [(first, one), (second, two)] = choices;
        let ((w1, h1), (w2, h2)) = (one.unwrap_or_default(), two.unwrap_or_default());
        Some(if w2.wrapping_mul(h1) > w1.wrapping_mul(h2) {
            second
        } else {
            first
        })
    }

    fn seed(&mut self, seed: u64) {
        self.random = SplitMix64::new(seed);
    }
}
