//! Stores overrides on disk in a separate thread, because a busy disk may take seconds and the main
//! loop of lvsd must not wait.
//!
//! One write runs at a time. Changes in the meantime are stored by one further write with the
//! latest state, so that an older state never replaces a newer one.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use lvs_sys::lock;
use tokio::sync::oneshot;

use super::StoredOverride;
use crate::replace::replace_for_good;

/// Maximum number of renamed copies of damaged files.
const ASIDE_MAX: u32 = 100;

type Write = dyn Fn(&Path, &[StoredOverride]) -> io::Result<()> + Send + Sync;

/// Writes the overrides to their file.
pub(super) struct Keeper {
    path: PathBuf,
    write: Box<Write>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The overrides of the next write; `None` if no write is pending.
    next: Option<Vec<StoredOverride>>,
    /// Callers that wait for the next write.
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
    writing: bool,
    /// Whether a part of the stored overrides could not be read; their file is then renamed before
    /// the next write.
    unread: bool,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Keeper").field(&self.path).finish()
    }
}

/// A pending write of overrides.
#[derive(Debug)]
pub struct Kept(Option<oneshot::Receiver<Result<(), String>>>);

impl Kept {
    /// A completed write, for overrides that are not stored on disk.
    pub(super) const fn nowhere() -> Self {
        Self(None)
    }

    /// Waits until the overrides are stored.
    ///
    /// # Errors
    /// The overrides cannot be stored; the text contains the reason and the consequence.
    pub async fn done(self) -> Result<(), String> {
        match self.0 {
            None => Ok(()),
            Some(reported) => reported.await.unwrap_or_else(|_| {
                Err("lvsd exits before the override is stored; after the next start of lvsd, `lvsd status` shows whether the override applies".to_owned())
            }),
        }
    }
}

impl Keeper {
    pub(super) fn new(path: PathBuf, unread: bool) -> Self {
        Self::writing_by(path, unread, write)
    }

    fn writing_by(
        path: PathBuf,
        unread: bool,
        write: impl Fn(&Path, &[StoredOverride]) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let state = State {
            unread,
            ..State::default()
        };
        Self {
            path,
            write: Box::new(write),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Starts a write of all overrides on the current runtime.
    pub(super) fn keep(self: &Arc<Self>, all: Vec<StoredOverride>) -> Kept {
        let (reporter, reported) = oneshot::channel();
        let mut state = self.lock();
        state.next = Some(all);
        // Clients that have closed their connections no longer wait.
        state.waiting.retain(|waiting| !waiting.is_closed());
        state.waiting.push(reporter);
        if !state.writing {
            state.writing = true;
            let keeper = Arc::clone(self);
            tokio::task::spawn_blocking(move || keeper.write_all());
        }
        Kept(Some(reported))
    }

    /// Whether a write runs or waits.
    pub(super) fn is_writing(&self) -> bool {
        self.lock().writing
    }

    /// Writes the latest overrides until no further write is pending, and reports the result of
    /// each write to the callers that wait for it.
    fn write_all(&self) {
        loop {
            let mut state = self.lock();
            let Some(all) = state.next.take() else {
                state.writing = false;
                return;
            };
            let waiting = std::mem::take(&mut state.waiting);
            let unread = state.unread;
            drop(state);
            let result = self.write_one(&all, unread);
            for reporter in waiting {
                // The client may have closed its connection.
                let _ = reporter.send(result.clone());
            }
        }
    }

    fn write_one(&self, all: &[StoredOverride], unread: bool) -> Result<(), String> {
        let path = &self.path;
        if unread {
            let aside = put_aside(path).map_err(|error| {
                format!(
                    "cannot store the override: {} could neither be read nor be renamed ({error}); repair or remove that file, and restart lvsd; the restart discards this override",
                    path.display()
                )
            })?;
            tracing::warn!(
                "lvsd could not use the overrides in {}, and has renamed the file to {}",
                path.display(),
                aside.display()
            );
            self.lock().unread = false;
        }
        (self.write)(path, all).map_err(|error| {
            format!(
                "cannot store the override in {}: {error}; a restart of lvsd discards the override",
                path.display()
            )
        })
    }
}

/// Replaces the file of the overrides atomically.
fn write(path: &Path, all: &[StoredOverride]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    replace_for_good(path, &serde_json::to_vec(all)?, 0o600)
}

/// Renames a file to a free name in its directory; returns that name. A missing file is no error.
pub(super) fn put_aside(path: &Path) -> io::Result<PathBuf> {
    let names = (0..ASIDE_MAX).map(|n| match n {
        0 => path.with_extension("json.broken"),
        n => path.with_extension(format!("json.broken.{n}")),
    });
    for aside in names {
        match std::fs::symlink_metadata(&aside) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match std::fs::rename(path, &aside) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(aside),
                };
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!(
        "the maximum of {ASIDE_MAX} damaged files is reached; remove those that you do not need: {}*",
        path.with_extension("json.broken").display()
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use lvs_api::daemon::{AdminSpec, AdminState, Target};

    use super::*;
    use crate::clock::Now;

    fn stored(n: u8) -> StoredOverride {
        let target = Target {
            service: None,
            host: [10, 0, 0, n].into(),
            port: None,
        };
        let spec = AdminSpec {
            target,
            state: AdminState::Drain,
            who: None,
            why: None,
            until: None,
            force: false,
        };
        StoredOverride::new(spec, Now::at(1))
    }

    /// The first write is slow: one further write stores all overrides that are set in the
    /// meantime.
    #[tokio::test]
    async fn overrides_set_during_a_write_share_the_next_write_and_its_error() {
        let (begun, begins) = mpsc::channel();
        let (go, goes) = mpsc::channel::<io::Result<()>>();
        let goes = Mutex::new(goes);
        let keeper = Arc::new(Keeper::writing_by("x".into(), false, move |_, all| {
            begun.send(all.to_vec()).unwrap();
            goes.lock().unwrap().recv().unwrap()
        }));
        assert!(!keeper.is_writing());
        let first = keeper.keep(vec![stored(1)]);
        assert_eq!(begins.recv().unwrap(), [stored(1)]);
        // Clients that have disconnected use no memory.
        for _ in 0..1000 {
            drop(keeper.keep(vec![stored(2)]));
        }
        let second = keeper.keep(vec![stored(2)]);
        let third = keeper.keep(vec![stored(3)]);
        assert_eq!(keeper.lock().waiting.len(), 2);
        go.send(Ok(())).unwrap();
        first.done().await.unwrap();
        assert_eq!(
            begins.recv().unwrap(),
            [stored(3)],
            "not only the last list was written"
        );
        assert!(keeper.is_writing());
        go.send(Err(io::Error::other("full"))).unwrap();
        for kept in [second, third] {
            let why = kept.done().await.unwrap_err();
            assert!(
                why.contains("full") && why.contains("a restart of lvsd discards"),
                "{why}"
            );
        }
        while keeper.is_writing() {
            tokio::task::yield_now().await;
        }
        let fourth = keeper.keep(Vec::new());
        assert!(
            begins.recv().unwrap().is_empty(),
            "the next list was not written after the failure"
        );
        go.send(Ok(())).unwrap();
        fourth.done().await.unwrap();
    }
}
