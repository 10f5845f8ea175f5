//! The common entry of all calls that change services, servers, settings or synchronisation
//! daemons.

use std::net::IpAddr;

use lvs_core::api::{Applied, Call, Changes, Done, Failure, Host, Need, Refused, Sysctl};
use lvs_core::full_nat::LocalAddress;
use lvs_core::sync::{self, SyncDaemon};

use crate::dataplane::handle::Handle;
use crate::fast_path::FastPath;
use crate::host::update::Update;
use crate::host::view::View;
use crate::sync::Prepared;

/// Number of changes that are applied while the control half is locked once, for some ten
/// microseconds.
const PIECE: usize = 16;

impl Handle {
    /// Applies all of these changes or none, and waits until all packet workers use them. After the
    /// answer, the changes therefore apply to the next packet. If the keeper or a worker does not
    /// answer in time, or a part cannot be applied to the host yet, the result is a success with a
    /// warning. `list`: a refusal contains the number of the refused change.
    pub(in crate::dataplane) fn apply(
        &self,
        changes: Vec<Call>,
        list: bool,
    ) -> Result<Done, Failure> {
        let refused = |refused: Refused| Failure {
            change: list.then_some(refused.change),
            ..refused.failure
        };
        let warnings = self.apply_all(&changes).map_err(refused)?;
        Ok(Done { warnings })
    }

    fn apply_all(&self, changes: &[Call]) -> Result<Vec<String>, Refused> {
        let _changing = self.context.changing();
        let daemons = self.prepare_daemons(changes);
        let applied = {
            // The kernel's counters belong to the services before the change, and the kernel fast
            // path must not use a half-applied change.
            let _held = self.context.fast_path().map(FastPath::hold);
            self.context.fold();
            self.make(changes, &daemons)?
        };
        self.keeping.has_changed(&self.context);
        let Some(update) = Update::of(&applied, changes) else {
            return Ok(Vec::new());
        };
        // The change is applied, whatever the result of the update.
        let followed = self.follow(update);
        self.follow_daemons(daemons);
        Ok(followed.unwrap_or_else(|failure| vec![failure.message]))
    }

    /// Applies all changes or none. A long list, a flush and the deletion of a service are
    /// applied in pieces. Between two pieces, packet workers can lock the control half.
    fn make(&self, calls: &[Call], daemons: &[Attempt]) -> Result<Applied, Refused> {
        let view = self.context.view();
        let host = WithDaemons {
            view: &view,
            daemons,
        };
        let now = self.context.now();
        let deletes =
            |call: &Call| matches!(call, Call::ServiceFlush {} | Call::ServiceDelete { .. });
        if calls.len() <= PIECE && !calls.iter().any(deletes) {
            return self.context.control().apply(calls, &host, now);
        }
        let mut changes = Changes::new(calls)?;
        while changes.check(&self.context.control(), &host, PIECE)? {}
        loop {
            let applied = changes.make(&mut self.context.control(), now, PIECE);
            if let Some(applied) = applied {
                return Ok(applied);
            }
        }
    }

    /// Opens the sockets of synchronisation daemons that the changes start. This happens before
    /// anything is locked, because it may take some time, and may fail. No socket is opened for
    /// daemons that are refused anyway, or that follow a refused change.
    fn prepare_daemons(&self, changes: &[Call]) -> Vec<Attempt> {
        let starts = |call: &Call| matches!(call, Call::DaemonStart(_));
        if !changes.iter().any(starts) {
            return Vec::new();
        }
        let view = self.context.view();
        let changes = &changes[..self.possible(changes, &view)];
        let (mut sysctls, mut running, next) = {
            let control = self.context.control();
            let running: Vec<_> = control.daemons().iter().map(|daemon| daemon.role).collect();
            let next = control.next_sync_ports();
            (control.sysctls().clone(), running, next)
        };
        let mut ports = (!running.is_empty()).then_some(next);
        let mut attempts = Vec::new();
        for call in changes {
            match call {
                Call::SysctlSet(Sysctl { name, value }) => {
                    // A refused value is reported later.
                    let _ = sysctls.set(name, value);
                }
                Call::DaemonStop { role, .. } => {
                    running.retain(|running| running != role);
                    ports = ports.filter(|_| !running.is_empty());
                }
                Call::DaemonStart(daemon) => {
                    let Some(mtu) = view.mtu(&daemon.interface) else {
                        continue;
                    };
                    if !daemon.group.is_none_or(|group| group.is_multicast()) {
                        continue;
                    }
                    running.push(daemon.role);
                    let ports = *ports.get_or_insert_with(|| sync::ports(sysctls.sync_ports));
                    let daemon = daemon.completed(mtu);
                    let made = self
                        .threads
                        .daemons
                        .prepare(&daemon, ports, sysctls.sync_sock_size);
                    attempts.push((daemon, made));
                }
                _ => {}
            }
        }
        attempts
    }

    /// Returns the number of changes before the first one that would be refused, assuming that
    /// every synchronisation daemon can open its sockets.
    fn possible(&self, changes: &[Call], view: &View) -> usize {
        let host = Willing(view);
        let check = || {
            let mut all = Changes::new(changes)?;
            while all.check(&self.context.control(), &host, PIECE)? {}
            Ok(())
        };
        check().map_or_else(|refused: Refused| refused.change, |()| changes.len())
    }

    /// Stops and starts synchronisation daemons, so that exactly the daemons in the configuration
    /// of the control half run.
    fn follow_daemons(&self, attempts: Vec<Attempt>) {
        let wanted = self.context.control().daemons().to_vec();
        let prepared = attempts.into_iter().filter_map(|(_, made)| made.ok());
        self.threads.daemons.follow(&wanted, prepared.collect());
    }

    /// Posts a change to the keeper, and waits until every packet worker uses the snapshot that
    /// contains the change. Returns a warning for each part of the change that the keeper could not
    /// apply to the host yet.
    fn follow(&self, update: Update) -> Result<Vec<String>, Failure> {
        let (generation, warnings) = self.threads.ask_keeper(move |keeper, reply| {
            let warnings = keeper.update(update);
            keeper.when_published(move |generation| drop(reply.send((generation, warnings))));
        })?;
        self.threads.wait_for(generation)?;
        Ok(warnings)
    }
}

/// A synchronisation daemon to be started, and its sockets or the error.
type Attempt = (SyncDaemon, Result<Prepared, Failure>);

/// Checks changes against the host's snapshot, given the sockets that were opened for
/// synchronisation daemons.
struct WithDaemons<'a> {
    view: &'a View,
    daemons: &'a [Attempt],
}

impl Host for WithDaemons<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        let Need::Daemon(daemon) = need else {
            return self.view.permits(need);
        };
        let attempt = self.daemons.iter().find(|(tried, _)| tried == *daemon);
        match attempt {
            Some((_, made)) => made.as_ref().map(drop).map_err(Clone::clone),
            // The interface appeared, or changed its MTU, a moment ago.
            None => Err(lvs_core::Error::NoDevice.into()),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.view.is_broadcast(addr)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        self.view.mtu(interface)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        self.view.local_ports(addr)
    }
}

/// Checks changes against the host's snapshot, as if every synchronisation daemon could open its
/// sockets.
struct Willing<'a>(&'a View);

impl Host for Willing<'_> {
    fn permits(&self, need: &Need<'_>) -> Result<(), Failure> {
        match need {
            Need::Daemon(_) => Ok(()),
            need => self.0.permits(need),
        }
    }

    fn is_broadcast(&self, addr: IpAddr) -> bool {
        self.0.is_broadcast(addr)
    }

    fn mtu(&self, interface: &str) -> Option<u32> {
        self.0.mtu(interface)
    }

    fn local_ports(&self, addr: IpAddr) -> LocalAddress {
        self.0.local_ports(addr)
    }
}

#[cfg(test)]
mod tests {
    use lvs_core::api::{ServiceId, ServiceSpec};
    use lvs_core::{Control, Family, Options, ServiceConfig};

    use super::*;

    #[test]
    fn change_without_keeper_warns_and_duplicate_service_is_refused() {
        let control = Control::new(Options::default());
        let handle = Handle::without_host(control);
        handle.threads.keeper().close();
        let service = ServiceId::Tcp {
            address: ([192, 0, 2, 1], 80).into(),
        };
        let add = Call::ServiceAdd(ServiceSpec {
            service,
            config: ServiceConfig::new(Family::V4, "rr"),
            owner: None,
        });
        let done = handle
            .apply(vec![add.clone()], false)
            .expect("the change succeeds");
        assert_eq!(done.warnings.len(), 1);
        assert!(done.warnings[0].contains("keeper"), "{done:?}");
        assert_eq!(handle.context.control().services().count(), 1);

        let start = Call::DaemonStart(SyncDaemon {
            role: sync::SyncRole::Master,
            interface: "eth0".to_owned(),
            syncid: 0,
            maxlen: None,
            group: None,
            port: None,
            ttl: None,
        });
        // No socket is opened for a call that follows a refused one.
        let list = [Call::ServiceFlush {}, add.clone(), add.clone(), start];
        assert_eq!(handle.possible(&list, &View::default()), 2);

        let refusal = handle
            .apply(vec![add], false)
            .expect_err("an existing service was added again");
        assert_eq!(refusal.code, lvs_core::api::FailureCode::Exists);
    }
}
