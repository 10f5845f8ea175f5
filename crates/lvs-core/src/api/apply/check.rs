//! Checks whether the director can make a change, in the order in which the kernel checks it.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::IpAddr;

use super::super::call::Call;
use super::super::types::{Failure, FailureCode, LocalPool};
use super::host::{Host, Need};
use super::step::{Step, serves};
use crate::control::check::{self, View};
use crate::mark::{self, MarkRule};
use crate::settings::Sysctls;
use crate::sync::{self, SyncDaemon, SyncRole};
use crate::{Control, Error, ServiceKey};

/// Maximum number of local addresses of full NAT: a connection may have to try all of them.
const LOCAL_ADDRESSES_MAX: usize = 256;

/// Checks whether a change is possible, and returns it with parsed parameters.
pub(super) fn check_call<'a>(
    view: &impl View,
    control: &Control,
    call: &'a Call,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    Ok(match call {
        Call::ServiceAdd(spec) => {
            let key = spec.service.into();
            host.permits(&Need::Service(key))?;
            check::add_service(view, control, &key, &spec.config)?;
            Step::AddService(spec)
        }
        Call::ServiceEdit(spec) => {
            check::edit_service(view, control, &spec.service.into(), &spec.config)?;
            Step::EditService(spec)
        }
        Call::ServiceDelete { service } => {
            let key = (*service).into();
            check::service(view, &key)?;
            Step::DeleteService(key)
        }
        Call::ServiceFlush {} => Step::Flush,
        Call::ServiceZero { service } => {
            let key = service.map(ServiceKey::from);
            if let Some(key) = &key {
                check::service(view, key)?;
            }
            Step::Zero(key)
        }
        Call::ServerAdd(spec) => {
            host.permits(&Need::Server(spec.config.forwarding))?;
            check::add_server(view, &spec.service.into(), spec.server, &spec.config)?;
            if host.is_broadcast(spec.server.ip()) {
                return Err(Error::NotUnicast.into());
            }
            Step::AddServer(spec)
        }
        Call::ServerEdit(spec) => {
            host.permits(&Need::Server(spec.config.forwarding))?;
            check::edit_server(view, &spec.service.into(), spec.server, &spec.config)?;
            Step::EditServer(spec)
        }
        Call::ServerDelete { service, server } => {
            let key = (*service).into();
            check::delete_server(view, &key, *server)?;
            Step::DeleteServer(key, *server)
        }
        Call::ServerArrange { service, servers } => {
            let key = (*service).into();
            check::service(view, &key)?;
            Step::ArrangeServers(key, servers)
        }
        Call::TimeoutsSet(timeouts) => {
            check::timeouts([timeouts.tcp, timeouts.tcp_fin, timeouts.udp])?;
            Step::SetTimeouts(*timeouts)
        }
        Call::SysctlSet(sysctl) => {
            // The values of other sysctls do not decide whether a value is valid.
            Sysctls::default().set(&sysctl.name, &sysctl.value)?;
            Step::SetSysctl(sysctl)
        }
        Call::DaemonStart(daemon) => start_daemon(view, daemon, host)?,
        Call::DaemonStop { role, .. } => {
            check::stop_daemon(view, *role)?;
            Step::StopDaemon(*role)
        }
        Call::MarkAdd { .. } | Call::MarkDelete { .. } | Call::MarkSet { .. } => {
            change_marks(view, call, host)?
        }
        Call::VipsOwn { addresses } => {
            for &addr in addresses {
                host.permits(&Need::Own(addr))?;
            }
            Step::OwnVips(addresses)
        }
        Call::FilterSet(spec) => {
            let key = spec.service.map(ServiceKey::from);
            if let Some(key) = &key {
                check::service(view, key)?;
            }
            Step::SetFilter(key, &spec.filter)
        }
        Call::LocalSet(pool) => set_local(view, pool, host)?,
        no_change!() => return Err(misplaced()),
    })
}

/// Checks whether a synchronisation daemon can be started. As in the kernel (`start_sync_thread`),
/// it checks in this order: that no service has a server of another address family, that the
/// interface exists, and that no daemon of this role is running. Then it checks that the group is
/// a multicast address, and that the host permits the daemon.
fn start_daemon<'a>(
    view: &impl View,
    daemon: &SyncDaemon,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    check::families(view)?;
    let mtu = host.mtu(&daemon.interface).ok_or(Error::NoDevice)?;
    check::start_daemon(view, daemon.role)?;
    let group = daemon.group.unwrap_or_else(|| sync::GROUP.into());
    if !group.is_multicast() {
        let text = format!("{group} is not a multicast group: the usual one is 224.0.0.81");
        return Err(invalid(text));
    }
    let daemon = daemon.completed(mtu);
    host.permits(&Need::Daemon(&daemon))?;
    let ipv6 = group.is_ipv6();
    Ok(match daemon.role {
        SyncRole::Master => {
            let master = sync::Master::new(daemon.syncid, daemon.maxlen, ipv6).counted();
            Step::StartMaster(master, daemon)
        }
        SyncRole::Backup => {
            let backup = sync::Backup::new(daemon.syncid, daemon.maxlen, mtu, ipv6);
            Step::StartBackup(backup, daemon)
        }
    })
}

fn change_marks<'a>(
    view: &impl View,
    call: &'a Call,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    let read = |text: &String| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let rule = MarkRule::parse(&words).map_err(invalid)?;
        host.permits(&Need::Mark(&rule))?;
        Ok::<_, Failure>(rule)
    };
    let (step, count) = match call {
        Call::MarkAdd { rule, position } => {
            let rule = read(rule)?;
            let last = view.marks() + 1;
            let position = position.unwrap_or(last);
            if !(1..=last).contains(&position) {
                let expected = format!("{position} is not a valid position: use 1 to {last}");
                return Err(invalid(expected));
            }
            (Step::InsertMark(position - 1, rule), last)
        }
        Call::MarkDelete { position } => {
            let count = view.marks();
            if !(1..=count).contains(position) {
                let text =
                    format!("rule {position} does not exist: the number of rules is {count}");
                return Err(invalid(text));
            }
            (Step::DeleteMark(position - 1), count - 1)
        }
        Call::MarkSet { rules } => {
            let rules = rules.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let count = rules.len();
            (Step::SetMarks(rules), count)
        }
        _ => return Err(misplaced()),
    };
    if count > mark::RULES_MAX {
        return Err(Failure::new(
            FailureCode::Full,
            format!(
                "the list would contain {count} mark rules, and the maximum is {}",
                mark::RULES_MAX
            ),
        ));
    }
    Ok(step)
}

fn set_local<'a>(
    view: &impl View,
    wanted: &'a LocalPool,
    host: &dyn Host,
) -> Result<Step<'a>, Failure> {
    check_local(&wanted.addresses)?;
    let mut pool = Vec::with_capacity(wanted.addresses.len());
    for &addr in &wanted.addresses {
        host.permits(&Need::Local(addr))?;
        pool.push(host.local_ports(addr));
    }
    check::local_pool(view, |family| serves(&pool, family), wanted.hairpin)?;
    Ok(Step::SetLocal(pool, wanted.hairpin))
}

/// Checks whether full NAT can use these local addresses: their number, each address, and that no
/// address is listed twice.
fn check_local(addresses: &[IpAddr]) -> Result<(), Failure> {
    if addresses.len() > LOCAL_ADDRESSES_MAX {
        let count = addresses.len();
        return Err(invalid(format!(
            "the list has {count} local addresses: the maximum is {LOCAL_ADDRESSES_MAX}"
        )));
    }
    let mut seen = BTreeSet::new();
    for addr in addresses {
        let unusable = match addr {
            IpAddr::V4(addr) => addr.is_broadcast() || addr.is_link_local(),
            IpAddr::V6(addr) => addr.is_unicast_link_local() || addr.to_ipv4_mapped().is_some(),
        };
        if unusable || addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() {
            return Err(invalid(format!(
                "{addr} cannot be a local address: it must be a unicast address that servers can reach"
            )));
        }
        if !seen.insert(addr) {
            return Err(invalid(format!(
                "{addr} is listed twice among the local addresses"
            )));
        }
    }
    Ok(())
}

fn misplaced() -> Failure {
    invalid("a list of changes can contain only calls that change the configuration".to_string())
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureCode::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_that_are_unusable_duplicate_or_more_than_256_are_refused() {
        for addr in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "fe80::1",
            "ff02::1",
            "::1",
        ] {
            let failure = check_local(&[addr.parse().unwrap()]).expect_err(addr);
            assert!(
                failure.message.contains(addr),
                "the refusal of {addr} does not name it: {}",
                failure.message
            );
        }
        let addr: IpAddr = "10.0.0.1".parse().unwrap();
        assert!(check_local(&[addr]).is_ok() && check_local(&[]).is_ok());
        let twice = check_local(&[addr, addr]).unwrap_err();
        assert!(
            twice.message.contains("twice"),
            "no `twice` in {}",
            twice.message
        );
        let many = check_local(&[addr; 257]).unwrap_err();
        assert!(many.message.contains("257"), "no `257` in {}", many.message);
    }
}
