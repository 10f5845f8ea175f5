//! State that all packet workers of a director share.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::fragment::Reassembler;
use crate::icmp_limit::{Bucket, RateLimit};
use crate::ip_id::IpIds;
use crate::oversize::Oversize;
use crate::return_path::ReturnPaths;
use crate::settings::{Echo, Settings};
use crate::tunnel_path::TunnelPaths;

/// State of the whole director. Each worker's [`Pipeline`](crate::pipeline::Pipeline) has an `Arc`
/// of it. Limits apply to all workers together, and all workers use a path MTU that one of them has
/// received.
///
/// | | synchronised by | used for |
/// |---|---|---|
/// | fragments | 16 parts with a lock each | fragments |
/// | limits on ICMP errors | an atomic, and 16 parts with a lock each | ICMP errors made here |
/// | limit on answers to echo requests | an atomic | echo requests to addresses that the dataplane owns |
/// | identifications | atomics | packets made here, tunnel packets without "don't fragment" |
/// | path MTUs of tunnels | a lock, each entry an atomic | the first packet of a worker to a server, ICMP errors about tunnel packets; later packets read the atomic |
/// | hosts that forwarded replies to health checks | a lock | such replies |
/// | requests that were too long | a lock | ICMP "fragmentation needed" made here |
///
/// A packet of an established connection needs no lock. Each worker stores its own packets that
/// wait for a neighbour's link-layer address, because it must send them in order, before later
/// packets. The limits of these packets are divided among the workers
/// ([`Held::of_workers`](crate::held::Held::of_workers)).
#[derive(Debug)]
pub struct Common {
    /// Incomplete datagrams, of which fragments are missing.
    pub reassembler: Reassembler,
    /// Limits on the ICMP errors that the dataplane sends.
    pub rate_limit: RateLimit,
    /// Requests that exceeded the MTU of the path to their server.
    pub oversize: Oversize,
    /// Hosts that forwarded replies to health checks.
    pub return_paths: ReturnPaths,
    pub(super) echo: Bucket,
    pub(super) ip_ids: IpIds,
    pub(super) tunnels: TunnelPaths,
    pub(super) settings: Settings,
    pub(super) midnight: Duration,
    pub(super) workers: NonZeroUsize,
}

impl Common {
    /// The state of a director with one worker, whose clock was 0 at midnight (UTC).
    pub fn new(settings: Settings) -> Self {
        let echoes = match settings.echo {
            Echo::Answer(per_second) => per_second,
            Echo::Drop => 0,
        };
        Self {
            reassembler: Reassembler::default(),
            rate_limit: RateLimit::new(settings.limits),
            oversize: Oversize::default(),
            return_paths: ReturnPaths::default(),
            echo: Bucket::new(echoes, echoes),
            ip_ids: IpIds::default(),
            tunnels: TunnelPaths::default(),
            settings,
            midnight: Duration::ZERO,
            workers: NonZeroUsize::MIN,
        }
    }

    /// Sets the number of workers.
    #[must_use]
    pub fn with_workers(mut self, workers: NonZeroUsize) -> Self {
        self.workers = workers;
        self
    }

    /// Path MTUs of tunnels, which ICMP errors have reported.
    pub const fn tunnels(&self) -> &TunnelPaths {
        &self.tunnels
    }

    /// Sets `midnight`: the time of day (UTC) when the clock of the packets'
    /// [`Instant`](lvs_core::Instant)s was 0. IPv4 time stamp options need it.
    #[must_use]
    pub fn with_midnight(mut self, midnight: Duration) -> Self {
        self.midnight = midnight;
        self
    }
}
