//! The configuration as it will be after the changes of a list that are already checked.

use alloc::collections::BTreeMap;
use core::net::SocketAddr;

use crate::control::Census;
use crate::control::check::{Facts, View, is_mixed};
use crate::service::ServiceKeyOrd;
use crate::sync::SyncRole;
use crate::{Control, Family, Forwarding, ServiceKey};

/// The configuration after the earlier changes of a list, against which later changes are checked:
/// the present configuration, and the differences from it.
pub(super) struct Plan<'a> {
    control: &'a Control,
    noted: Noted,
}

/// The differences between the planned state and the present state of the director. They contain
/// only the changed services and servers, so that a list of ten changes does not copy a table of
/// 40,000 servers.
#[derive(Default)]
pub(super) struct Noted {
    /// A flush has removed all services of the director.
    flushed: bool,
    /// Changed services by key; `None` for a removed service.
    services: BTreeMap<ServiceKeyOrd, Option<Planned>>,
    mixed: usize,
    full_nat: [usize; 2],
    local: [bool; 2],
    master: bool,
    backup: bool,
    /// Number of rules that set firewall marks, after the changes.
    pub(super) marks: usize,
}

/// The planned state of a service that earlier changes of the list affect.
struct Planned {
    facts: Facts,
    /// Whether the service also has the director's servers that are not in `servers`.
    kept: bool,
    /// Changed servers by address; `None` for a removed server.
    servers: BTreeMap<SocketAddr, Option<Forwarding>>,
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Noted {
    pub(super) fn new(control: &Control) -> Self {
        Self {
            flushed: false,
            services: BTreeMap::new(),
            mixed: View::mixed(control),
            full_nat: FAMILIES.map(|family| View::full_nat(control, family)),
            local: FAMILIES.map(|family| View::has_local(control, family)),
            master: View::runs(control, SyncRole::Master),
            backup: View::runs(control, SyncRole::Backup),
            marks: control.marks().len(),
        }
    }
}

impl<'a> Plan<'a> {
    /// Continues a plan from the differences that [`into_noted`](Self::into_noted) returned.
    pub(super) const fn resume(control: &'a Control, noted: Noted) -> Self {
        Self { control, noted }
    }

    pub(super) fn into_noted(self) -> Noted {
        self.noted
    }

    pub(super) const fn noted(&mut self) -> &mut Noted {
        &mut self.noted
    }

    pub(super) const fn control(&self) -> &'a Control {
        self.control
    }

    pub(super) fn add_service(&mut self, key: &ServiceKey, one_packet: bool, needs_replies: bool) {
        let planned = Planned {
            facts: Facts {
                number: None,
                one_packet,
                needs_replies,
                census: Census::default(),
            },
            kept: false,
            servers: BTreeMap::new(),
        };
        self.noted.services.insert(key.into(), Some(planned));
    }

    pub(super) fn edit_service(&mut self, key: &ServiceKey, one_packet: bool, needs_replies: bool) {
        if let Some(planned) = self.touch(key) {
            planned.facts.one_packet = one_packet;
            planned.facts.needs_replies = needs_replies;
        }
    }

    pub(super) fn delete_service(&mut self, key: &ServiceKey) {
        if let Some(facts) = self.service(key) {
            self.noted.mixed -= facts.census.mixed;
            self.noted.full_nat[key.family() as usize] -= facts.census.full_nat;
            self.noted.services.insert(key.into(), None);
        }
    }

    pub(super) fn flush(&mut self) {
        self.noted.flushed = true;
        self.noted.services.clear();
        self.noted.mixed = 0;
        self.noted.full_nat = [0; 2];
    }

    /// Records that a server is added or edited, or removed if `forwarding` is `None`.
    pub(super) fn set_server(
        &mut self,
        key: &ServiceKey,
        addr: SocketAddr,
        forwarding: Option<Forwarding>,
    ) {
        let Some(facts) = self.service(key) else {
            return;
        };
        let before = self.server(key, &facts, addr);
        let mixed = is_mixed(key, addr);
        let Some(planned) = self.touch(key) else {
            return;
        };
        let old = planned.facts.census;
        if let Some(forwarding) = before {
            planned.facts.census.leave(mixed, forwarding);
        }
        if let Some(forwarding) = forwarding {
            planned.facts.census.enter(mixed, forwarding);
        }
        planned.servers.insert(addr, forwarding);
        let new = planned.facts.census;
        self.noted.mixed = self.noted.mixed - old.mixed + new.mixed;
        let full_nat = &mut self.noted.full_nat[key.family() as usize];
        *full_nat = *full_nat - old.full_nat + new.full_nat;
    }

    pub(super) fn set_local(&mut self, serves: impl Fn(Family) -> bool) {
        self.noted.local = FAMILIES.map(serves);
    }

    pub(super) const fn set_daemon(&mut self, role: SyncRole, runs: bool) {
        match role {
            SyncRole::Master => self.noted.master = runs,
            SyncRole::Backup => self.noted.backup = runs,
        }
    }

    /// Returns the planned state of a service for modification; `None` if the service does not
    /// exist. Copies the state from the director if no earlier change of the list affects the
    /// service.
    fn touch(&mut self, key: &ServiceKey) -> Option<&mut Planned> {
        let facts = self.service(key)?;
        let place = self.noted.services.entry(key.into());
        let planned = place.or_insert_with(|| {
            Some(Planned {
                facts,
                kept: true,
                servers: BTreeMap::new(),
            })
        });
        planned.as_mut()
    }
}

impl View for Plan<'_> {
    fn service(&self, key: &ServiceKey) -> Option<Facts> {
        match self.noted.services.get(&key.into()) {
            Some(planned) => planned.as_ref().map(|planned| planned.facts),
            None if self.noted.flushed => None,
            None => View::service(self.control, key),
        }
    }

    fn server(&self, key: &ServiceKey, facts: &Facts, addr: SocketAddr) -> Option<Forwarding> {
        match self.noted.services.get(&key.into()) {
            Some(planned) => {
                let planned = planned.as_ref()?;
                match planned.servers.get(&addr) {
                    Some(forwarding) => *forwarding,
                    None if planned.kept => View::server(self.control, key, facts, addr),
                    None => None,
                }
            }
            None if self.noted.flushed => None,
            None => View::server(self.control, key, facts, addr),
        }
    }

    fn runs(&self, role: SyncRole) -> bool {
        match role {
            SyncRole::Master => self.noted.master,
            SyncRole::Backup => self.noted.backup,
        }
    }

    fn mixed(&self) -> usize {
        self.noted.mixed
    }

    fn full_nat(&self, family: Family) -> usize {
        self.noted.full_nat[family as usize]
    }

    fn has_local(&self, family: Family) -> bool {
        self.noted.local[family as usize]
    }

    fn marks(&self) -> usize {
        self.noted.marks
    }
}
