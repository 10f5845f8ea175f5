//! A worker without packets: the director and its clock only.

use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lvs_core::Shard;
use lvs_core::api::{Failure, FailureCode, Info};
use tracing::error;

use super::decider::Decider;
use super::shared::{Command, Shared};
use crate::sys::Poller;

/// Between two looks at the timers.
const TICK: Duration = Duration::from_millis(500);

/// What [`Worker`](super::worker::Worker) is for an engine with interfaces.
pub(super) struct Offline {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    decider: Decider,
}

impl Offline {
    pub(super) fn new(
        shared: Arc<Shared>,
        commands: mpsc::Receiver<Command>,
        shard: Shard,
    ) -> Self {
        Self {
            decider: Decider::new(shared.clone(), shard, None),
            shared,
            commands,
        }
    }

    pub(super) fn run(mut self) {
        let mut poller = Poller::new();
        while !self.shared.is_stopping() {
            poller.clear();
            poller.add(self.shared.wake().as_fd());
            if let Err(error) = poller.wait(Some(TICK)) {
                return error!("cannot wait for commands: {error}");
            }
            self.shared.wake().take();
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            let now = self.shared.now();
            self.decider.shard.advance(now, usize::MAX);
            self.shared.control().advance(now);
        }
    }

    fn obey(&mut self, command: Command) {
        // Whoever asked may have given up waiting; then nobody needs the answer.
        match command {
            Command::Follow(reply) => {
                self.shared.control().sweep(&mut self.decider.shard);
                self.decider.follow_marks();
                let _ = reply.send(Ok(()));
            }
            Command::OwnVips(addresses, reply) => {
                let _ = reply.send(if addresses.is_empty() {
                    Ok(())
                } else {
                    Err(Failure {
                        code: FailureCode::Unsupported,
                        message:
                            "this engine has no interfaces (--no-interfaces): it can own no address"
                                .into(),
                    })
                });
            }
            Command::Connections { start, max, reply } => {
                let now = self.shared.now();
                let connections = self.decider.shard.connections_from(start, now);
                let _ = reply.send(connections.take(max).collect());
            }
            Command::IsBroadcast(_, reply) => {
                let _ = reply.send(false);
            }
            Command::Marked(reply) => {
                let _ = reply.send(self.decider.marked.clone());
            }
            Command::Info(reply) => {
                let _ = reply.send(Info {
                    connections: self.decider.shard.len() as u64,
                    capacity: self.decider.shard.capacity() as u64,
                    ..Info::default()
                });
            }
            Command::Reasons(reply) => {
                let _ = reply.send(self.decider.reasons().collect());
            }
        }
    }
}
