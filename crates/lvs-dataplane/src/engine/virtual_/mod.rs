//! A worker without interfaces: the director and its clock, and for tests a network in memory.

mod bench;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::Duration;

use lvs_core::api::{Call, Failure, FailureCode, Host, Need, Refused};
use lvs_core::{Control, Explanation, Instant, LocalAddress, Options, Shard};
use serde_json::{Value, json};
use tracing::error;

use self::bench::{BenchNet, HOST_PORT, Marking, Test, Tested};
use super::Packets;
use super::calls::{Question, to_value};
use super::capture::Capture;
use super::decider::Decider;
use super::kernel_path::WithEngine;
use super::report::Report;
use super::shared::{Shared, Side};
use crate::control::server::Sink;
use crate::mailbox::{Closing, Mailbox};
use crate::packet::frame::Frame;
use crate::packet::intercept::Intercept;
use crate::packet::net::PortId;
use crate::packet::pipeline::{Env, Output, Pipeline, Settings};
use crate::sys::Poller;

pub(super) use self::bench::hex;
pub use self::bench::{Advance, BenchFrame, Inject, Interface, Mark, Neighbour, Network, Route};

/// Between two looks at the timers.
const TICK: Duration = Duration::from_millis(500);
/// Frames that an answer carries at most; what a test wants to see is little.
const SENT_MAX: usize = 4096;
/// Connections that are looked at in one go after a server went down.
const DOWN_BUDGET: usize = 4096;

/// A host whose interfaces this engine does not touch, or one that a test describes.
struct NoHost<'a> {
    net: &'a BenchNet,
    virtual_time: bool,
}

impl Host for NoHost<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        match need {
            Need::Own(_) => Err(Failure::new(
                FailureCode::Unsupported,
                "this engine has no interfaces (--no-interfaces): it can own no address",
            )),
            // A director that takes part in no synchronisation must not say that it does; tests
            // only want its bookkeeping.
            Need::Daemon(_) if !self.virtual_time => Err(Failure::new(
                FailureCode::Unsupported,
                "this engine has no interfaces (--no-interfaces): it takes part in no synchronisation",
            )),
            _ => Ok(()),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.net.is_broadcast(addr)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        self.net.mtu(interface)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        LocalAddress::new(addr)
    }
}

/// What [`Worker`](super::worker::Worker) is for an engine with interfaces.
pub(crate) struct Offline {
    shared: Arc<Shared>,
    decider: Decider,
    options: Options,
    net: BenchNet,
    pipeline: Pipeline,
    intercept: Arc<Intercept>,
    output: Output,
}

impl Offline {
    pub(super) fn new(shared: Arc<Shared>, shard: Shard, options: Options) -> Self {
        let mut worker = Self {
            decider: Decider::new(shared.clone(), shard, None),
            shared,
            options,
            net: BenchNet::default(),
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            intercept: Arc::default(),
            output: Output::new(),
        };
        worker.advance();
        worker
    }

    pub(super) fn run(mut self) {
        let shared = self.shared.clone();
        let Side::Virtual { offline, .. } = shared.side() else {
            return error!("an engine with interfaces has packet workers");
        };
        let _closing = Closing(offline);
        let mut poller = Poller::new();
        while !shared.is_stopping() {
            poller.clear();
            poller.add(offline.wake().as_fd());
            if let Err(error) = poller.wait(Some(TICK)) {
                return error!("cannot wait for jobs: {error}");
            }
            offline.wake().take();
            for job in offline.take() {
                job(&mut self);
            }
            if !shared.has_virtual_time() {
                self.advance();
                self.end_down(&mut Tested::default());
            }
        }
    }

    /// Does what is due.
    fn advance(&mut self) {
        let now = self.shared.now();
        let shard = &mut self.decider.shard;
        self.shared.control().advance_with(shard, now);
        // Nobody is there to send them to.
        while shard.take_sync_message(now).is_some() {}
        self.pipeline.expire(now);
    }

    /// Does what a test asks for.
    fn test(&mut self, test: Test) -> Tested {
        let mut done = match test {
            Test::Reset(net) => self.reset(*net),
            Test::Advance(advance) => {
                self.shared.set_now(advance.target(self.shared.now()));
                self.advance();
                self.follow();
                let mut done = Tested::default();
                self.end_down(&mut done);
                done
            }
            Test::Inject { frames, repeat } => self.inject(&frames, repeat),
        };
        done.now = self.shared.now();
        done
    }

    /// Makes changes, or none, and follows them.
    pub(super) fn apply(&mut self, changes: &[Call]) -> Result<Vec<String>, Refused> {
        let host = NoHost {
            net: &self.net,
            virtual_time: self.shared.has_virtual_time(),
        };
        let now = self.shared.now();
        self.shared.control().apply(changes, &host, now)?;
        self.follow();
        Ok(Vec::new())
    }

    /// Brings the packet path in line with the director.
    fn follow(&mut self) {
        let mut control = self.shared.control();
        control.sweep(&mut self.decider.shard);
        self.decider.take_marks(control.marks());
        self.intercept = Arc::new(Intercept::of(&control, &self.intercept));
        self.decider.take_intercept(&self.intercept);
        self.net.vips = self.intercept.vips();
    }

    /// Forgets everything.
    fn reset(&mut self, net: BenchNet) -> Tested {
        if let Side::Virtual { interfaces, .. } = self.shared.side() {
            let mut interfaces = interfaces.lock().unwrap_or_else(PoisonError::into_inner);
            *interfaces = net.names();
        }
        {
            let mut control = self.shared.control();
            let ftp_ports = control.ftp_ports().to_vec();
            *control = Control::new(self.options.clone());
            if let Err(error) = control.set_ftp_ports(ftp_ports) {
                error!("cannot keep the helper's ports: {error}");
            }
            control.set_local_addresses(net.local());
            let shard = control.shard(0).expect("there is at least one");
            self.decider = Decider::new(self.shared.clone(), shard, None);
        }
        self.net = net;
        self.pipeline = Pipeline::alone(Settings::UNLIMITED);
        self.shared.set_now(Instant::ZERO);
        self.advance();
        self.follow();
        Tested::default()
    }

    /// Passes frames through the packet path, one at a time.
    fn inject(&mut self, frames: &[(PortId, Vec<u8>)], repeat: u64) -> Tested {
        let now = self.shared.now();
        let pmtu_disc = self.shared.control().sysctls().pmtu_disc;
        let mut done = Tested::default();
        self.end_down(&mut done);
        for _ in 0..repeat {
            for (port, bytes) in frames {
                let env = Env {
                    net: &self.net,
                    intercept: &self.intercept,
                    pmtu_disc,
                };
                let mut decide = Marking {
                    decider: &mut self.decider,
                    net: &self.net,
                };
                let mut batch = [Frame::from_bytes(bytes)];
                self.pipeline
                    .process(*port, &mut batch, &env, &mut decide, now, &mut self.output);
                self.take_output(&mut done);
            }
        }
        done
    }

    /// Ends the connections of servers that went down.
    fn end_down(&mut self, done: &mut Tested) {
        let now = self.shared.now();
        let pmtu_disc = self.shared.control().sysctls().pmtu_disc;
        while self.decider.shard.has_down() {
            for reset in self.decider.shard.end_down(now, DOWN_BUDGET) {
                let env = Env {
                    net: &self.net,
                    intercept: &self.intercept,
                    pmtu_disc,
                };
                self.pipeline
                    .send_reset(&reset, &env, now, &mut self.output);
                self.take_output(done);
            }
        }
    }

    /// Keeps what would be sent.
    fn take_output(&mut self, done: &mut Tested) {
        for (to, frames) in self.output.queues() {
            if to == HOST_PORT {
                done.to_host += frames.len() as u64;
                continue;
            }
            let room = SENT_MAX.saturating_sub(done.sent.len());
            let kept = frames.iter().take(room);
            done.sent
                .extend(kept.map(|frame| (to, frame.bytes().to_vec())));
        }
        self.output.recycle();
    }
}

impl Packets for Offline {
    fn decider(&self) -> &Decider {
        &self.decider
    }

    fn explain(&mut self, question: &Question) -> Explanation {
        self.decider.explain(question, |_| Err(WithEngine::NotUsed))
    }

    fn report(&mut self) -> Report {
        Report::of(&self.decider, &self.pipeline)
    }

    fn capture(&mut self, _: Capture) {
        // Dropped, it tells who asked: no packet ever comes.
    }
}

/// Answers a method `test.*`.
pub(super) fn test(
    shared: &Shared,
    method: &str,
    params: Value,
    out: &mut Sink<'_>,
) -> Result<Value, Failure> {
    let (
        Side::Virtual {
            offline,
            interfaces,
        },
        true,
    ) = (shared.side(), shared.has_virtual_time())
    else {
        return Err(Failure::new(
            FailureCode::Malformed,
            format!("{method}: only an engine started with --no-interfaces --virtual-time has it"),
        ));
    };
    let ports = interfaces.lock();
    let ports = ports.unwrap_or_else(PoisonError::into_inner).clone();
    let test = bench::read(method, params, &ports)?;
    let tested = ask(offline, move |offline| offline.test(test))?;
    for (port, frame) in &tested.sent {
        let place = port.index().checked_sub(1);
        let name = place.and_then(|place| ports.get(place));
        out.item(&BenchFrame {
            dev: name.cloned().unwrap_or_default(),
            frame: hex(frame),
        })?;
    }
    to_value(&json!({
        "now_ms": tested.now.as_nanos() / 1_000_000,
        "to_host": tested.to_host,
    }))
}

/// Has the engine's thread do something, and waits for it, however long that takes: a test may hand
/// in millions of frames.
fn ask<T: Send + 'static>(
    offline: &Mailbox<Offline>,
    job: impl FnOnce(&mut Offline) -> T + Send + 'static,
) -> Result<T, Failure> {
    let (reply, answer) = mpsc::channel();
    offline.post(move |offline| drop(reply.send(job(offline))));
    answer
        .recv()
        .map_err(|_| Failure::new(FailureCode::Internal, "the engine ends"))
}
