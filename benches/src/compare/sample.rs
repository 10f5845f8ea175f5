//! One measurement, and the CPU time that it used.

use serde::Serialize;

use crate::machine::Used;

/// The value of a measurement, in the unit of its [`Work`](super::rows::Work), and the CPU time
/// that the measurement used.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) value: f64,
    pub(super) cpu: Option<Cpu>,
    /// Why the measurement does not count; `None` if it does.
    pub(super) disturbed: Option<String>,
}

impl Sample {
    pub(super) fn of(value: f64, used: &Used) -> Self {
        Self {
            value,
            cpu: None,
            disturbed: used.disturbed(),
        }
    }
}

/// Nanoseconds of CPU time per packet, request or KiB, by the part that used it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Cpu {
    /// CPU time of the director's process, including its system calls.
    pub(super) process: f64,
    /// CPU time of the threads that receive on the director's interfaces.
    pub(super) softirq: f64,
    /// CPU time of other soft interrupts that run in a thread.
    pub(super) other_softirq: f64,
    /// CPU time of generator, clients and servers, with the soft interrupts on their core.
    pub(super) endpoints: f64,
}

impl Cpu {
    pub(super) fn per(used: &Used, units: f64) -> Self {
        let per = |seconds: f64| seconds * 1e9 / units.max(1.0);
        Self {
            process: per(used.process),
            softirq: per(used.softirq),
            other_softirq: per(used.other_softirq),
            endpoints: per(used.endpoints),
        }
    }
}
