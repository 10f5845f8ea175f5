//! The signals of the daemon, and the waits for a dataplane: for the end of a request, and for its
//! exit.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Signal;
use crate::dataplane::{Links, Stopped};

/// Longest wait for a stopping dataplane.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// The fix for a dataplane that does not answer.
const UNSTICK: &str = "if the dataplane was stopped (state T in `ps`), continue it with `kill -CONT`; if it hangs, end it with `kill -9`";

/// Receives the daemon's signals. A signal that arrives during a request to the dataplane is
/// stored.
pub(super) struct Signals {
    receiver: mpsc::Receiver<Signal>,
    early: Option<Signal>,
}

impl Signals {
    pub(super) const fn new(receiver: mpsc::Receiver<Signal>) -> Self {
        Self {
            receiver,
            early: None,
        }
    }

    /// Waits for the next signal, a stored one first. If the sender is dropped, returns
    /// [`Signal::Stop`].
    pub(super) async fn next(&mut self) -> Signal {
        match self.early.take() {
            Some(signal) => signal,
            None => self.receiver.recv().await.unwrap_or(Signal::Stop),
        }
    }

    /// Waits for a signal to stop while `dataplane` handles a request, and stores the signal. If
    /// lvsd can exit without the dataplane, this function then returns `Ok` at once. Otherwise it
    /// logs that lvsd waits, and returns an error if the request has not ended within
    /// [`STOP_LIMIT`]. `lets_go`: lvsd removes some services when it exits.
    pub(super) async fn hurries(&mut self, dataplane: &str, lets_go: bool) -> Result<(), String> {
        loop {
            match self.early {
                Some(Signal::Stop) if !lets_go => return Ok(()),
                Some(Signal::Stop | Signal::StopAll) => break,
                Some(Signal::Reload | Signal::ForcedReload) | None => {
                    let signal = self.receiver.recv().await;
                    self.early = Some(signal.unwrap_or(Signal::Stop));
                }
            }
        }
        tracing::info!(
            "lvsd is stopping, waiting up to {STOP_LIMIT:?} for {dataplane}, which handles a request"
        );
        tokio::time::sleep(STOP_LIMIT).await;
        Err(format!(
            "lvsd is stopping, but {dataplane} does not answer, and is still running: {UNSTICK}"
        ))
    }
}

/// Stops the dataplane and waits until its process has exited. Kills a dataplane that an lvsd
/// started and that does not exit in time.
pub(super) async fn stop(link: Box<Links>) -> Result<(), String> {
    let dataplane = link.dataplane.in_words();
    match link.dataplane.contact().0 {
        Some(_) => tracing::info!("lvsd is stopping, waiting up to {STOP_LIMIT:?} for {dataplane}"),
        None => tracing::info!("lvsd is stopping"),
    }
    let limit = Instant::now() + STOP_LIMIT;
    let (mut link, stopped) = blocking(link, Links::stop).await?;
    match stopped {
        Stopped::Asked => {}
        Stopped::Already(how) => tracing::info!("the dataplane had already exited: {how}"),
        Stopped::Killed(why) => tracing::warn!("{why}; lvsd has killed the dataplane"),
        Stopped::Not(why) => tracing::warn!("{why}"),
    }
    loop {
        let (back, running) = blocking(link, |link, _| link.dataplane.still_running()).await?;
        link = back;
        if !running {
            return Ok(());
        }
        if Instant::now() >= limit {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (_, ended) = blocking(link, |link, _| link.dataplane.end()).await?;
    ended.map_err(|error| {
        format!("{dataplane} still runs after {STOP_LIMIT:?} ({error}); {UNSTICK}")
    })?;
    tracing::warn!(
        "{dataplane} was still running {STOP_LIMIT:?} after the signal to stop; it was killed"
    );
    Ok(())
}

/// Runs a blocking function outside of the daemon's loop.
pub(super) async fn blocking<T: Send + 'static>(
    mut link: Box<Links>,
    work: impl FnOnce(&mut Links, Instant) -> T + Send + 'static,
) -> Result<(Box<Links>, T), String> {
    let now = Instant::now();
    tokio::task::spawn_blocking(move || {
        let result = work(&mut link, now);
        (link, result)
    })
    .await
    .map_err(|e| format!("internal error of lvsd: {e}"))
}
