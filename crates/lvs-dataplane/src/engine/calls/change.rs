//! Calls that change something: one way in for all of them.

use lvs_core::api::{Applied, Call, Changes, Done, Failure, Refused};
use serde_json::Value;

use super::to_value;
use crate::engine::shared::{Shared, Side};
use crate::host::update::Update;
use crate::in_kernel::InKernel;

/// Changes that are made with the control half locked: some ten microseconds.
const PIECE: usize = 16;

impl Shared {
    /// Makes these changes, or none, and waits until the packet path has followed: when the caller has its answer, the
    /// next packet is handled the new way. What is done and not followed yet is no refusal, but a warning.
    pub(super) fn apply(&self, changes: Vec<Call>, list: bool) -> Result<Value, Failure> {
        let refused = |refused: Refused| Failure {
            change: list.then_some(refused.change),
            ..refused.failure
        };
        let warnings = match self.side() {
            Side::Host(_) => self.apply_on_host(&changes).map_err(refused)?,
            Side::Virtual { offline, .. } => {
                let (reply, answer) = std::sync::mpsc::channel();
                offline.post(move |offline| drop(reply.send(offline.apply(&changes))));
                match answer.recv() {
                    Ok(applied) => applied.map_err(refused)?,
                    Err(_) => vec!["the engine ends".to_owned()],
                }
            }
        };
        to_value(&Done { warnings })
    }

    fn apply_on_host(&self, changes: &[Call]) -> Result<Vec<String>, Refused> {
        let _changing = self.changing();
        let applied = {
            // What the kernel has counted belongs to what is there now; and it forwards nothing by what is half made.
            let _held = self.in_kernel().map(InKernel::hold);
            self.fold();
            self.make(changes)?
        };
        self.has_changed();
        let Some(update) = Update::of(&applied, changes) else {
            return Ok(Vec::new());
        };
        // It is done, whatever comes.
        let followed = self.follow(update);
        Ok(followed.unwrap_or_else(|failure| vec![failure.message]))
    }

    /// Makes changes, or none; a long list, a flush and what a service leaves in pieces, between which packets that need the control half have their turn.
    fn make(&self, calls: &[Call]) -> Result<Applied, Refused> {
        let host = self.view();
        let now = self.now();
        let deletes =
            |call: &Call| matches!(call, Call::ServiceFlush {} | Call::ServiceDelete { .. });
        if calls.len() <= PIECE && !calls.iter().any(deletes) {
            return self.control().apply(calls, &*host, now);
        }
        let mut changes = Changes::new(calls)?;
        while changes.check(&self.control(), &*host, PIECE)? {}
        loop {
            let applied = changes.make(&mut self.control(), now, PIECE);
            if let Some(applied) = applied {
                return Ok(applied);
            }
        }
    }

    /// Has the keeper follow a change, and waits until every packet worker has what it has published. Gives what could not
    /// be followed yet.
    fn follow(&self, update: Update) -> Result<Vec<String>, Failure> {
        let (generation, warnings) = self.ask_keeper(move |keeper, reply| {
            let warnings = keeper.update(update);
            keeper.when_published(move |generation| drop(reply.send((generation, warnings))));
        })?;
        self.wait_for(generation)?;
        Ok(warnings)
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::api::{ServiceId, ServiceSpec};
    use lvs_core::{Control, Family, Options, ServiceConfig};

    use super::*;
    use crate::engine::shared::HostSide;

    #[test]
    fn what_is_done_and_not_followed_is_a_success_with_a_warning() {
        let side = Side::Host(HostSide::new(1).expect("descriptors"));
        let shared = Shared::new(Control::new(Options::default()), side, false);
        shared.keeper().expect("a host has one").close();
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 1], 80).into(),
        };
        let add = Call::ServiceAdd(ServiceSpec {
            service,
            config: ServiceConfig::new(Family::V4, "rr"),
            owner: None,
        });
        let answer = shared.apply(vec![add.clone()], false).expect("it is done");
        let done: Done = serde_json::from_value(answer).expect("it is that");
        assert_eq!(done.warnings.len(), 1);
        assert!(done.warnings[0].contains("keeper"), "{done:?}");
        assert_eq!(shared.control().services().count(), 1);

        let refusal = shared.apply(vec![add], false).expect_err("there is one");
        assert_eq!(refusal.code, lvs_core::api::FailureCode::Exists);
    }
}
