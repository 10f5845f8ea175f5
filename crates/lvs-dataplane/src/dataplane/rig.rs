//! Packet workers without threads and sockets, for measurements in memory. Not part of the programs
//! (feature `testing`).

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use anyhow::{Context as _, Result};
use lvs_core::Control;

use super::context::Context;
use super::pages;
use super::threads::{Requests, Threads};
use super::worker::{Equipment, Worker};
use crate::host::view::{KnownPort, Tables, View};
use crate::netlink::NetState;
use lvs_packet::common::Common;
use lvs_packet::frame::Frame;
use lvs_packet::net::{PortId, PortInfo};
use lvs_packet::pipeline::Request;
use lvs_packet::settings::Settings;

/// The only port of the director; its link has the index 1.
const PORT: PortId = PortId(1);

/// Workers of one director without a network. They process frames as the workers of a dataplane do,
/// but do not receive or send frames.
#[derive(Debug)]
pub struct Rig {
    /// The workers. A caller may move each one to a separate thread.
    pub workers: Vec<RigWorker>,
}

/// A worker of a [`Rig`].
pub struct RigWorker {
    worker: Worker,
    /// Requests to the keeper; no thread reads them.
    _requests: Receiver<Request>,
}

impl fmt::Debug for RigWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RigWorker").finish_non_exhaustive()
    }
}

impl Rig {
    /// Creates one worker for each shard of `control`, in a network whose link 1 is `port`. `vips`
    /// are addresses of services.
    ///
    /// # Errors
    /// The host has no free memory or file descriptors, or `control` has no shards.
    pub fn new(
        control: Control,
        network: NetState,
        port: PortInfo,
        vips: &[IpAddr],
    ) -> Result<Self> {
        let shards = (0..).map_while(|number| pages::shard(&control, number).transpose());
        let shards: Vec<_> = shards.collect::<Result<_, _>>()?;
        let count = NonZeroUsize::new(shards.len()).context("the director has no shards")?;
        let context = Context::without_kernel(control);
        let threads = Arc::new(Threads::new(count.get())?);
        let common = Arc::new(Common::new(Settings::UNLIMITED).with_workers(count));
        let mut tables = Tables::new(network);
        let known = KnownPort {
            ifindex: 1,
            name: Arc::from("memory"),
            info: port,
            down: None,
            decapsulates: false,
        };
        tables.set_port(PORT, known);
        for vip in vips {
            tables.add_vip(*vip);
        }
        context.publish(Arc::new(View {
            generation: 1,
            tables: Arc::new(tables),
            config: 1,
            ..View::default()
        }));
        let workers = (0..).zip(shards).map(|(number, (shard, pages))| {
            let (requests, queue) = Requests::new();
            let common = common.clone();
            let mut worker = Worker::new(
                context.clone(),
                threads.clone(),
                number,
                shard,
                Equipment::new(common),
                requests,
                None,
            );
            if let Some(pages) = pages {
                worker.use_pages(pages);
            }
            RigWorker {
                worker,
                _requests: queue,
            }
        });
        Ok(Self {
            workers: workers.collect(),
        })
    }
}

impl RigWorker {
    /// Processes a batch, and frees its frames. Returns the number of frames that would have been
    /// sent.
    pub fn process(&mut self, frames: &mut [Frame]) -> usize {
        self.worker.process(PORT, frames)
    }

    /// Converts the memory of the connection table to large pages, as a dataplane does over time.
    pub fn enlarge_pages(&mut self) {
        self.worker.enlarge_pages();
    }

    /// Runs the due timers of the worker.
    pub fn timers(&mut self) {
        self.worker.timers();
    }
}
