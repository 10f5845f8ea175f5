//! The configuration that a program has made, for a dataplane that restarts without it. Programs
//! such as keepalived send only differences, and never add their services again.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

use lvs_core::api::{CHANGES_MAX, Call, ServerSpec, ServiceId, ServiceSpec, Sysctl, Timeouts};
use lvs_core::sync::{SyncDaemon, SyncRole};

/// The services, servers and settings that a program has configured: at most as many as one request
/// to the dataplane may contain.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Services in the order in which they were added, as the program's listings must show them.
    services: BTreeMap<u64, Service>,
    numbers: HashMap<ServiceId, u64>,
    /// The number for the next service.
    next: u64,
    servers: usize,
    daemons: Vec<SyncDaemon>,
    timeouts: Option<Timeouts>,
    sysctls: BTreeMap<String, String>,
    /// Whether the maximum was exceeded, so that nothing is stored any more.
    is_full: bool,
}

#[derive(Debug)]
struct Service {
    spec: ServiceSpec,
    /// Servers in the order in which they were added.
    servers: Vec<ServerSpec>,
}

impl Kept {
    /// Whether no configuration is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0 && self.daemons.is_empty() && self.timeouts.is_none()
    }

    fn len(&self) -> usize {
        self.services.len() + self.servers + self.sysctls.len()
    }

    /// Records a change. Returns `false` if there are now too many changes: the recorded changes
    /// are then discarded, and further changes are ignored (`true` is returned) until the program
    /// deletes all services.
    pub(super) fn keep(&mut self, call: &Call) -> bool {
        if matches!(call, Call::ServiceFlush {}) {
            self.services.clear();
            self.numbers.clear();
            self.servers = 0;
            self.is_full = false;
        }
        if self.is_full {
            return true;
        }
        self.change(call);
        // One change is reserved for the timeouts.
        if self.len() < CHANGES_MAX {
            return true;
        }
        *self = Self {
            is_full: true,
            ..Self::default()
        };
        false
    }

    fn change(&mut self, call: &Call) {
        match call {
            Call::ServiceAdd(spec) => {
                let servers = Vec::new();
                let spec = spec.clone();
                self.numbers.insert(spec.service, self.next);
                self.services.insert(self.next, Service { spec, servers });
                self.next += 1;
            }
            Call::ServiceEdit(spec) => {
                if let Some(service) = self.service(spec.service) {
                    service.spec = spec.clone();
                }
            }
            Call::ServiceDelete { service } => {
                let number = self.numbers.remove(service);
                let gone = number.and_then(|number| self.services.remove(&number));
                self.servers -= gone.map_or(0, |gone| gone.servers.len());
            }
            Call::ServerAdd(spec) | Call::ServerEdit(spec) => {
                // Services of other programs are not recorded, and neither are their servers.
                let Some(service) = self.service(spec.service) else {
                    return;
                };
                match find(&mut service.servers, spec.server) {
                    Some(known) => *known = spec.clone(),
                    None => {
                        service.servers.push(spec.clone());
                        self.servers += 1;
                    }
                }
            }
            Call::ServerDelete { service, server } => {
                let servers = self.service(*service).map(|service| &mut service.servers);
                let index = servers
                    .as_ref()
                    .and_then(|servers| servers.iter().position(|known| known.server == *server));
                if let (Some(servers), Some(index)) = (servers, index) {
                    servers.remove(index);
                    self.servers -= 1;
                }
            }
            Call::DaemonStart(daemon) => {
                self.stop(daemon.role);
                self.daemons.push(daemon.clone());
            }
            Call::DaemonStop { role, .. } => self.stop(*role),
            Call::TimeoutsSet(new) => {
                // 0 does not change a timeout.
                let old = self.timeouts.take().unwrap_or(*new);
                let newest = |new: u32, old: u32| if new == 0 { old } else { new };
                self.timeouts = Some(Timeouts {
                    tcp: newest(new.tcp, old.tcp),
                    tcp_fin: newest(new.tcp_fin, old.tcp_fin),
                    udp: newest(new.udp, old.udp),
                });
            }
            Call::SysctlSet(Sysctl { name, value }) => {
                self.sysctls.insert(name.clone(), value.clone());
            }
            _ => {}
        }
    }

    fn service(&mut self, id: ServiceId) -> Option<&mut Service> {
        self.services.get_mut(self.numbers.get(&id)?)
    }

    fn stop(&mut self, role: SyncRole) {
        self.daemons.retain(|daemon| daemon.role != role);
    }

    /// Returns the requests that restore the configuration: one that is applied as a whole, and one
    /// for each synchronisation daemon, whose interface may be missing.
    pub(super) fn requests(&self) -> Vec<Call> {
        let timeouts = self.timeouts.map(Call::TimeoutsSet);
        let sysctls = self.sysctls.iter().map(|(name, value)| {
            let (name, value) = (name.clone(), value.clone());
            Call::SysctlSet(Sysctl { name, value })
        });
        let services = self.services.values().flat_map(|service| {
            let servers = service.servers.iter().cloned().map(Call::ServerAdd);
            std::iter::once(Call::ServiceAdd(service.spec.clone())).chain(servers)
        });
        let changes: Vec<Call> = timeouts
            .into_iter()
            .chain(sysctls)
            .chain(services)
            .collect();
        let daemons = self.daemons.iter().cloned().map(Call::DaemonStart);
        let all = (!changes.is_empty()).then_some(Call::Apply { changes });
        all.into_iter().chain(daemons).collect()
    }
}

fn find(servers: &mut [ServerSpec], server: SocketAddr) -> Option<&mut ServerSpec> {
    servers.iter_mut().find(|known| known.server == server)
}

#[cfg(test)]
mod tests {
    use lvs_core::{Family, Forwarding, ServerConfig, ServiceConfig};

    use super::*;

    fn service(last: u8) -> ServiceId {
        ServiceId::Tcp {
            address: ([192, 0, 2, last], 80).into(),
        }
    }

    fn add(last: u8, scheduler: &str) -> ServiceSpec {
        ServiceSpec {
            service: service(last),
            config: ServiceConfig::new(Family::V4, scheduler),
            owner: None,
        }
    }

    fn server(of: u8, number: u32, weight: i32) -> ServerSpec {
        let [_, a, b, c] = number.to_be_bytes();
        ServerSpec {
            service: service(of),
            server: ([10, a, b, c], 80).into(),
            config: ServerConfig::new(weight, Forwarding::Nat),
        }
    }

    #[test]
    fn lvs_run_stores_latest_configuration_of_program_until_flush() {
        let mut kept = Kept::default();
        assert!(kept.is_empty() && kept.requests().is_empty());
        let timeouts = |tcp, tcp_fin, udp| Timeouts { tcp, tcp_fin, udp };
        let daemon = SyncDaemon {
            role: SyncRole::Master,
            interface: "eth0".to_owned(),
            syncid: 1,
            maxlen: None,
            group: None,
            port: None,
            ttl: None,
        };
        for call in [
            Call::ServiceAdd(add(9, "rr")),
            Call::ServerAdd(server(9, 1, 1)),
            Call::ServiceAdd(add(2, "rr")),
            Call::ServerAdd(server(2, 1, 1)),
            Call::ServerAdd(server(2, 2, 1)),
            Call::ServiceDelete {
                service: service(9),
            },
            Call::ServiceAdd(add(1, "wrr")),
            Call::ServiceEdit(add(2, "wlc")),
            Call::ServerEdit(server(2, 1, 7)),
            Call::ServerDelete {
                service: service(2),
                server: server(2, 2, 1).server,
            },
            // The server's service was added by another program.
            Call::ServerAdd(server(77, 1, 1)),
            Call::ServiceZero { service: None },
            Call::TimeoutsSet(timeouts(100, 20, 30)),
            Call::TimeoutsSet(timeouts(0, 50, 0)),
            Call::DaemonStart(daemon.clone()),
        ] {
            assert!(kept.keep(&call), "{call:?}");
        }
        let changes = vec![
            Call::TimeoutsSet(timeouts(100, 50, 30)),
            Call::ServiceAdd(add(2, "wlc")),
            Call::ServerAdd(server(2, 1, 7)),
            Call::ServiceAdd(add(1, "wrr")),
        ];
        let all = [Call::Apply { changes }, Call::DaemonStart(daemon)];
        assert_eq!(kept.requests(), all);
        kept.keep(&Call::ServiceFlush {});
        assert_eq!(kept.len(), 0);
    }

    #[test]
    fn lvs_run_discards_configuration_above_limit_until_flush() {
        let mut kept = Kept::default();
        assert!(kept.keep(&Call::ServiceAdd(add(1, "rr"))));
        let all = u32::try_from(CHANGES_MAX).expect("the number fits into 32 bits");
        // Only the service is searched here, because the search for a server is linear.
        let service = kept.service(service(1)).expect("the service was added");
        service.servers = (2..all).map(|number| server(1, number, 1)).collect();
        kept.servers = service.servers.len();
        assert!(!kept.keep(&Call::ServerAdd(server(1, all, 1))));
        assert!(kept.is_empty());
        assert!(kept.keep(&Call::ServiceAdd(add(2, "rr"))) && kept.is_empty());
        // A flush discards everything; later calls are recorded again.
        kept.keep(&Call::ServiceFlush {});
        assert!(kept.keep(&Call::ServiceAdd(add(2, "rr"))));
        assert!(!kept.is_empty());
    }
}
