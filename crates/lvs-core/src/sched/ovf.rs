//! Weighted overflow (`ip_vs_ovf`).

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::fo::heaviest;
use super::{About, Weights};
use crate::{Request, Scheduler, Server};

pub(super) const ABOUT: About = About {
    name: "ovf",
    summary: "the server with the highest weight, until its connections exceed the weight; then the next",
    weights: Weights::Capacity,
    goes_by_order: true,
    make: || Box::new(Overflow),
    ..About::USUAL
};

/// Chooses the server with the highest weight until it has more active connections than its weight,
/// then the server with the next lower weight.
///
/// Only active connections count, so UDP never overflows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overflow;

impl Scheduler for Overflow {
    fn weight_is_capacity(&self) -> bool {
        true
    }

    fn preview(&self) -> Option<Box<dyn Scheduler>> {
        Some(Box::new(*self))
    }

    fn pick(&mut self, servers: &[Arc<Server>], _: &Request) -> Option<usize> {
        heaviest(servers, |server| {
            server.is_usable() && i64::from(server.active()) <= i64::from(server.weight())
        })
    }
}
