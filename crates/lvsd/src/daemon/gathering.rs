//! What sources say: it is put together with the files away from the loop, and taken as a reload.

use std::collections::BTreeSet;

use lvs_dataplane::control::daemon::DirectorSeen;

use super::{Daemon, Reading, summary};
use crate::config::{Config, Report, label};
use crate::engine::Links;
use crate::events::About;
use crate::health::{Key, Prober};
use crate::reconcile::Health;
use crate::sources::Gathered;
use crate::sources::etcd::{DOWN_MAX, Director, Told, Verdict};
use crate::words::counted;

/// What other directors find of servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Votes {
    /// So many have to find a server down, if that is asked for.
    agree: usize,
    /// What each of the others finds down.
    others: Vec<BTreeSet<String>>,
}

/// How directors find a server: so many of so many find it down, and so many have to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) down: usize,
    pub(super) all: usize,
    pub(super) needed: usize,
}

impl Votes {
    /// What all find of a server that this director finds to be so; nothing if it decides alone.
    pub(super) fn count(&self, key: &Key, own: Health) -> Option<Count> {
        if self.agree == 0 || self.others.is_empty() || own == Health::Unknown {
            return None;
        }
        let name = name(key);
        let others = self.others.iter().filter(|down| down.contains(&name));
        let all = self.others.len() + 1;
        Some(Count {
            down: others.count() + usize::from(own == Health::Down),
            all,
            needed: self.agree.min(all),
        })
    }
}

impl Count {
    pub(super) const fn health(self) -> Health {
        match self.down >= self.needed {
            true => Health::Down,
            false => Health::Up,
        }
    }

    pub(super) fn words(self) -> String {
        format!(
            "{} of {} directors find it down, {} have to",
            self.down, self.all, self.needed
        )
    }
}

/// A server, as directors name it to each other.
fn name(key: &Key) -> String {
    format!("{} {}", label(&key.0), key.1)
}

/// What sources say, with the files of that generation.
pub(super) struct Merged {
    generation: u64,
    gathered: Gathered,
    result: Result<(Config, Report), Report>,
}

impl<P: Prober> Daemon<P> {
    /// Sources say something else.
    pub(super) fn take_sources(&mut self) {
        self.take_votes();
        // A file that is being read may be older than this.
        if self.reading.is_some() {
            self.reading = Some(Reading::Again);
        } else if self.merging.is_some() {
            self.merging = Some(Reading::Again);
        } else {
            self.merge();
        }
    }

    /// Has what sources say put together with the files, away from the loop.
    fn merge(&mut self) {
        let gathered = self.sources.gathered();
        if gathered == self.gathered && self.held_back.is_none() {
            return;
        }
        self.merging = Some(Reading::Once);
        let sender = self.merged.0.clone();
        let (config, generation) = (self.config.clone(), self.generation);
        tokio::task::spawn_blocking(move || {
            let result = config.with(&gathered);
            // Nobody takes it when the daemon is ending.
            let _ = sender.blocking_send(Merged {
                generation,
                gathered,
                result,
            });
        });
    }

    /// Takes it, as a reload of the same files.
    pub(super) fn take_merged(&mut self, merged: Merged, link: &Links) {
        let again = self.merging.take() == Some(Reading::Again);
        if self.reading.is_some() {
            self.reading = Some(Reading::Again);
            return;
        }
        if merged.generation != self.generation {
            self.merge();
            return;
        }
        self.take_gathered(merged, link);
        if again {
            self.merge();
        }
    }

    fn take_gathered(&mut self, merged: Merged, link: &Links) {
        self.gathered = merged.gathered;
        let refusal = match merged.result {
            Ok((config, _)) if config == self.config => {
                self.config.revision = config.revision;
                self.held_back = None;
                return;
            }
            Ok((config, _)) => match self.refusal(&config, "what sources say") {
                None => {
                    let (before, after) = (self.config.servers(), config.servers());
                    let message = format!(
                        "what sources say has changed: {} (there were {before})",
                        counted(after, "server")
                    );
                    tracing::info!(event = "sources", "{message}");
                    self.events.tell("sources", About::default(), message);
                    for line in config
                        .left_out
                        .iter()
                        .filter(|line| !self.config.left_out.contains(line))
                    {
                        tracing::warn!(event = "left_out", "left out: {line}");
                    }
                    self.load(config, link);
                    self.held_back = None;
                    self.goal_changed();
                    return;
                }
                Some(why) => why,
            },
            Err(report) => format!(
                "what sources say is not taken, because the file is no longer valid: {}",
                summary(&report)
            ),
        };
        if self.held_back.as_ref() != Some(&refusal) {
            tracing::error!(event = "sources_refused", "{refusal}");
            self.events
                .tell("sources_refused", About::default(), refusal.clone());
        }
        self.held_back = Some(refusal);
    }

    /// Takes what other directors find of servers.
    pub(super) fn take_votes(&mut self) {
        let cluster = self.config.cluster.as_ref();
        let votes = match cluster.filter(|cluster| cluster.agree > 0) {
            Some(cluster) => Votes {
                agree: cluster.agree,
                others: self.sources.verdicts(&cluster.director),
            },
            None => Votes::default(),
        };
        if votes != self.votes {
            if votes.others.len() != self.votes.others.len() {
                let others = counted(votes.others.len(), "other director");
                tracing::info!(event = "votes", "{others} share what they find of servers");
            }
            self.votes = votes;
            self.goal_changed();
        }
    }

    /// Tells other directors how this one is.
    pub(super) fn tell_directors(&mut self) {
        let Some(cluster) = &self.config.cluster else {
            return;
        };
        let status = self.cluster.status();
        let director = Director {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: self.config.revision.number,
            digest: self.config.revision.digest,
            services: self.config.services.len(),
            servers: self.config.servers(),
            ready: self.ready && self.contact.1,
            maintenance: status.maintenance.is_some(),
            left_out: !self.config.left_out.is_empty() || self.held_back.is_some(),
        };
        let verdict = (cluster.agree > 0).then(|| {
            let services = self.config.services.iter();
            let keys = services.flat_map(|service| {
                let servers = service.servers.iter();
                servers.map(|server| (service.id, server.address))
            });
            let down = keys.filter(|key| self.checks.health(key) == Health::Down);
            Verdict {
                down: down.map(|key| name(&key)).take(DOWN_MAX).collect(),
            }
        });
        self.sources.tell(Told { director, verdict });
    }

    /// The directors that etcd knows.
    pub(super) fn directors(&self) -> Vec<DirectorSeen> {
        let Some(cluster) = &self.config.cluster else {
            return Vec::new();
        };
        let all = self.sources.directors().into_iter();
        all.map(|(name, director, down)| DirectorSeen {
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
            down,
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::api::ServiceId;

    use super::*;

    #[test]
    fn a_server_is_down_when_so_many_of_those_that_live_find_it_down() {
        let address = ([192, 0, 2, 10], 80).into();
        let key: Key = (ServiceId::Tcp { address }, ([10, 0, 0, 1], 80).into());
        let finds = |down: bool| -> BTreeSet<String> {
            let down = down.then(|| "tcp 192.0.2.10:80 10.0.0.1:80".to_owned());
            down.into_iter().collect()
        };
        for (agree, others, own, health) in [
            (0, &[true, true][..], Health::Up, None),
            (2, &[], Health::Down, None),
            (2, &[true], Health::Unknown, None),
            (2, &[false, false], Health::Down, Some(Health::Up)),
            (2, &[true, false], Health::Down, Some(Health::Down)),
            (2, &[true, true], Health::Up, Some(Health::Down)),
            (3, &[true, false], Health::Down, Some(Health::Up)),
            // Of fewer than have to agree, all.
            (3, &[true], Health::Down, Some(Health::Down)),
            (3, &[false], Health::Down, Some(Health::Up)),
            (1, &[false, false], Health::Down, Some(Health::Down)),
        ] {
            let votes = Votes {
                agree,
                others: others.iter().map(|down| finds(*down)).collect(),
            };
            let count = votes.count(&key, own);
            assert_eq!(
                count.map(Count::health),
                health,
                "{agree} {others:?} {own:?}"
            );
        }
    }
}
