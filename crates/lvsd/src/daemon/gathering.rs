//! The file and what DNS and etcd say: both are read away from the loop, one at a time, and taken as
//! a reload.

use std::sync::Arc;

use lvs_api::daemon::DirectorSeen;

use super::Daemon;
use crate::config::{Config, LoadError, Report};
use crate::engine::Links;
use crate::events::About;
use crate::expand::{Expanded, expand};
use crate::health::Prober;
use crate::sources::Gathered;
use crate::sources::etcd::Director;
use crate::words::counted;

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reading {
    /// What DNS and etcd say, beside the file that is in force.
    Sources,
    /// The file, and what DNS and etcd say.
    File,
}

/// What came of it.
pub(super) struct Done {
    gathered: Gathered,
    read: Result<Read, LoadError>,
}

/// A file, and its services with what DNS and etcd say.
pub(super) struct Read {
    pub(super) config: Arc<Config>,
    pub(super) expanded: Expanded,
    /// What is questionable about the file, if that was read.
    pub(super) report: Option<Report>,
}

impl<P: Prober> Daemon<P> {
    /// DNS and etcd say something else.
    pub(super) fn take_sources(&mut self) {
        if self.reading.is_some() {
            self.again = self.again.max(Some(Reading::Sources));
        } else if self.sources.gathered() != self.gathered {
            self.read(Reading::Sources);
        }
    }

    /// Whether the file is being read, or has to be.
    pub(super) fn reads_file(&self) -> bool {
        self.reading.max(self.again) == Some(Reading::File)
    }

    /// Has it read, at once or after what is being read.
    pub(super) fn read(&mut self, what: Reading) {
        if self.reading.is_some() {
            self.again = self.again.max(Some(what));
            return;
        }
        self.reading = Some(what);
        let sender = self.done.0.clone();
        let (path, config) = (self.options.path.clone(), Arc::clone(&self.config));
        let gathered = self.sources.gathered();
        tokio::task::spawn_blocking(move || {
            let read = match what {
                Reading::Sources => Ok((config, None)),
                Reading::File => {
                    let loaded = Config::load(&path);
                    loaded.map(|(config, report)| (Arc::new(config), Some(report)))
                }
            };
            let read = read.map(|(config, report)| Read {
                expanded: expand(&config, &gathered),
                config,
                report,
            });
            // The daemon may be ending.
            let _ = sender.blocking_send(Done { gathered, read });
        });
    }

    /// Takes what was read.
    pub(super) fn take_done(&mut self, done: Done, link: &Links) {
        let read = self.reading.take();
        let again = self.again.take();
        if again == Some(Reading::File) {
            self.read(Reading::File);
            return;
        }
        let taken = match (read, done.read) {
            (Some(Reading::Sources), Ok(read)) => {
                self.take_expanded(read, link);
                true
            }
            (_, read) => self.take_file(read, link),
        };
        if taken {
            self.gathered = done.gathered;
        }
        // A file that is refused brings nothing of what they say into force.
        if again.is_some() || !taken {
            self.take_sources();
        }
    }

    /// Takes what DNS and etcd say beside the file that is in force.
    fn take_expanded(&mut self, read: Read, link: &Links) {
        let expanded = read.expanded;
        if expanded.is_same(&self.expanded) {
            self.expanded.revision = expanded.revision;
            self.held_back = None;
            return;
        }
        let Some(refusal) = self.refusal(&read.config, &expanded, "what sources say") else {
            let (before, after) = (self.expanded.servers(), expanded.servers());
            let message = format!(
                "what sources say has changed: {} (there were {before})",
                counted(after, "server")
            );
            tracing::info!(event = "sources", "{message}");
            self.events.tell("sources", About::default(), message);
            let lines = expanded.left_out.iter();
            for line in lines.filter(|line| !self.expanded.left_out.contains(line)) {
                tracing::warn!(event = "left_out", "left out: {line}");
            }
            self.load(read.config, expanded, link);
            self.held_back = None;
            self.goal_changed();
            return;
        };
        if self.held_back.as_ref() != Some(&refusal) {
            tracing::error!(event = "sources_refused", "{refusal}");
            self.events
                .tell("sources_refused", About::default(), refusal.clone());
        }
        self.held_back = Some(refusal);
    }

    /// Tells other directors how this one is.
    pub(super) fn tell_directors(&mut self) {
        if self.config.cluster.is_none() {
            return;
        }
        let status = self.cluster.status();
        let director = Director {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: self.expanded.revision.number,
            digest: self.expanded.revision.digest,
            services: self.expanded.services.len(),
            servers: self.expanded.servers(),
            ready: self.ready && self.contact.1,
            maintenance: status.maintenance.is_some(),
            left_out: !self.expanded.left_out.is_empty() || self.held_back.is_some(),
        };
        self.sources.tell(director);
    }

    /// The directors that etcd knows.
    pub(super) fn directors(&self) -> Vec<DirectorSeen> {
        let Some(cluster) = &self.config.cluster else {
            return Vec::new();
        };
        let all = self.sources.directors().into_iter();
        all.map(|(name, director)| DirectorSeen {
            own: name == cluster.director,
            name,
            version: director.version,
            revision: u64::try_from(director.revision).unwrap_or(0),
            digest: format!("{:08x}", director.digest),
            services: director.services,
            servers: director.servers,
            ready: director.ready,
            maintenance: director.maintenance,
            left_out: director.left_out,
        })
        .collect()
    }
}
