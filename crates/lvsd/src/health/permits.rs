//! Limits of concurrent probes: in total, for one target, and for targets that may not answer.
//!
//! A probe of an unreachable host keeps its permit for the whole timeout. So targets that are not
//! up get at most half of all permits: the rest stays for good servers. The limit for each address
//! prevents one host with many services from delaying the others. A probe that needs several
//! descriptors counts as several, except in the limit for its address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use lvs_sys::lock;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// Maximum number of concurrent probes to one address.
const PER_TARGET: usize = 64;
/// Maximum number of descriptors of all probes, even if the limit of this process is higher.
const MOST: usize = 16_384;
const LEAST: usize = 64;
/// Descriptors that are reserved for other purposes: this number, and the number of all descriptors
/// divided by [`OTHERS_PART`].
const RESERVED: usize = 128;
const OTHERS_PART: usize = 4;

/// The state of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetHealth {
    /// The server is up.
    Good,
    /// The server is down, or was not checked yet.
    Doubtful,
}

#[derive(Debug)]
pub(super) struct Permits {
    size: usize,
    all: Semaphore,
    doubtful: Semaphore,
    targets: Mutex<HashMap<IpAddr, Arc<Semaphore>>>,
}

/// The permission to probe, until it is dropped.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    permits: &'a Permits,
    target: IpAddr,
    one: Option<OwnedSemaphorePermit>,
    _doubtful: Option<SemaphorePermit<'a>>,
    _all: Option<SemaphorePermit<'a>>,
}

impl Permits {
    /// Permits for the descriptors that the process may open, without those reserved for other
    /// purposes.
    pub(super) fn new() -> Self {
        let limit = getrlimit(Resource::Nofile).current;
        let files = limit.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
        Self::with(of_files(files))
    }

    /// Maximum number of descriptors that probes use.
    pub(super) const fn size(&self) -> usize {
        self.size
    }

    fn with(all: usize) -> Self {
        Self {
            size: all,
            all: Semaphore::new(all),
            doubtful: Semaphore::new(all / 2),
            targets: Mutex::default(),
        }
    }

    /// Waits for the permission to probe `target` with this number of descriptors.
    pub(super) async fn get(
        &self,
        target: IpAddr,
        standing: TargetHealth,
        descriptors: u32,
    ) -> Permit<'_> {
        let one = Arc::clone(
            self.targets()
                .entry(target)
                .or_insert_with(|| Arc::new(Semaphore::new(PER_TARGET))),
        );
        // Acquire the narrower permits first: a check that waits for one holds none of the wider.
        let mut permit = Permit {
            permits: self,
            target,
            one: one.acquire_owned().await.ok(),
            _doubtful: None,
            _all: None,
        };
        if standing == TargetHealth::Doubtful {
            permit._doubtful = self.doubtful.acquire_many(descriptors).await.ok();
        }
        permit._all = self.all.acquire_many(descriptors).await.ok();
        permit
    }

    fn targets(&self) -> std::sync::MutexGuard<'_, HashMap<IpAddr, Arc<Semaphore>>> {
        lock(&self.targets)
    }
}

/// Returns the number of descriptors that probes may use, if the process may open `files`.
fn of_files(files: usize) -> usize {
    let most = files.saturating_sub(RESERVED + files / OTHERS_PART);
    most.clamp(LEAST, MOST)
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut targets = self.permits.targets();
        drop(self.one.take());
        // No check owns or waits for a permit of this target: such a check would also own the
        // semaphore.
        let last = targets
            .get(&self.target)
            .is_some_and(|one| Arc::strong_count(one) == 1);
        if last {
            targets.remove(&self.target);
        }
    }
}

/// Raises this process's limit of open descriptors to the maximum that it may set.
pub fn raise_limits() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::debug!("the limit of descriptors is unchanged: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn host(n: u8) -> IpAddr {
        [10, 0, 0, n].into()
    }

    #[test]
    fn probe_descriptors_follow_open_file_limit_within_minimum_and_maximum() {
        for (files, most) in [
            (100, LEAST),
            (1024, 640),
            (16_384, 12_160),
            (22_016, 16_384),
            (1 << 20, 16_384),
            (usize::MAX, 16_384),
        ] {
            assert_eq!(of_files(files), most, "{files}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn unanswered_probes_leave_descriptor_permits_for_healthy_servers() {
        let permits = Permits::with(4);
        let _one = permits.get(host(1), TargetHealth::Doubtful, 1).await;
        let _two = permits.get(host(2), TargetHealth::Doubtful, 1).await;
        let third = permits.get(host(3), TargetHealth::Doubtful, 1);
        let third = tokio::time::timeout(Duration::from_secs(60), third);
        assert!(third.await.is_err());
        let since = tokio::time::Instant::now();
        for n in 4..6 {
            let _good = permits.get(host(n), TargetHealth::Good, 1).await;
        }
        assert_eq!(since.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn check_with_several_descriptors_uses_several_permits() {
        let permits = Permits::with(8);
        let _many = permits.get(host(1), TargetHealth::Good, 5).await;
        let _few = permits.get(host(2), TargetHealth::Good, 3).await;
        let more = permits.get(host(3), TargetHealth::Good, 1);
        let more = tokio::time::timeout(Duration::from_secs(60), more);
        assert!(more.await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn descriptor_permits_of_one_target_are_bounded() {
        let permits = Permits::with(1000);
        let mut held = Vec::new();
        for _ in 0..PER_TARGET {
            held.push(permits.get(host(1), TargetHealth::Good, 1).await);
        }
        let more = permits.get(host(1), TargetHealth::Good, 1);
        assert!(
            tokio::time::timeout(Duration::from_secs(60), more)
                .await
                .is_err()
        );
        let _other = permits.get(host(2), TargetHealth::Good, 1).await;
        held.clear();
        assert_eq!(
            permits.targets().len(),
            1,
            "a target without probes was not removed"
        );
    }
}
