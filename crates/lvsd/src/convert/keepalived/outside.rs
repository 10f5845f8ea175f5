//! Converts statements outside of virtual servers that affect virtual servers, such as global
//! settings, certificates and local addresses of full NAT.

use std::collections::HashMap;
use std::net::IpAddr;

use super::group::{following, range};
use crate::convert::item::{Item, is_on};
use crate::convert::{ADDRESSES_MAX, Service};

/// Top-level statements that keepalived continues to use.
const KEPT: [&str; 23] = [
    "global_defs",
    "static_ipaddress",
    "static_routes",
    "static_rules",
    "track_group",
    "vrrp_sync_group",
    "vrrp_instance",
    "vrrp_script",
    "vrrp_track_process",
    "vrrp_track_file",
    "track_file",
    "garp_group",
    "bfd_instance",
    "linkbeat_interfaces",
    "linkbeat_use_polling",
    "namespace_with_ipsets",
    "instance",
    "use_pid_dir",
    "child_wait_time",
    "interface_up_down_delays",
    "net_namespace",
    "net_namespace_ipvs",
    "include_check",
];

/// Top-level statements that are converted, or that concern only virtual servers.
const TAKEN: [&str; 4] = [
    "virtual_server",
    "virtual_server_group",
    "SSL",
    "local_address_group",
];

/// Statements in `global_defs` that concern only virtual servers. keepalived needs IPVS for them.
const TAKEN_GLOBALS: [&str; 6] = [
    "lvs_sync_daemon",
    "lvs_timeouts",
    "lvs_flush",
    "lvs_flush_on_stop",
    "lvs_notify_fifo",
    "lvs_notify_fifo_script",
];

/// Whether a statement at this depth of blocks is removed from keepalived's file.
pub(super) fn is_taken(item: &Item, depth: usize) -> bool {
    let words: &[&str] = match depth {
        0 => &TAKEN,
        1 => &TAKEN_GLOBALS,
        _ => &[],
    };
    words.contains(&item.name())
}

/// Settings outside of virtual servers that apply to them.
#[derive(Debug, Default)]
pub(super) struct Outside {
    /// Default user of check scripts.
    pub(super) script_user: Option<String>,
    /// Local addresses of full NAT by group.
    local: HashMap<String, Vec<IpAddr>>,
}

impl Outside {
    pub(super) fn local_group(&self, name: &str) -> Option<&[IpAddr]> {
        let addresses = self.local.get(name)?;
        (!addresses.is_empty()).then_some(addresses.as_slice())
    }

    /// Local addresses of all groups that services use.
    pub(super) fn local_addresses(&self, services: &[Service]) -> Vec<IpAddr> {
        let mut all: Vec<IpAddr> = services
            .iter()
            .filter_map(|service| self.local.get(service.local_group.as_deref()?))
            .flatten()
            .copied()
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

pub(super) fn settings(items: &[Item], lost: &mut Vec<String>) -> Outside {
    let mut outside = Outside::default();
    if !items.iter().any(|item| item.name() == "virtual_server") {
        return outside;
    }
    for item in items {
        match item.name() {
            "global_defs" => globals(item, &mut outside, lost),
            "SSL" => lost.extend(item.items().iter().map(certificate)),
            "net_namespace" | "net_namespace_ipvs" => lost.push(item.lost(
                "the services are in the network namespace in which lvs-dataplane is started",
            )),
            "local_address_group" => {
                let mut room = ADDRESSES_MAX;
                let mut all = Vec::new();
                for address in item.items() {
                    match range(address.name()) {
                        Some((first, count)) if count <= room => {
                            room -= count;
                            all.extend(following(first, count));
                        }
                        _ => lost.push(
                            address.lost("the value is not an address, or too many addresses"),
                        ),
                    }
                }
                outside.local.insert(item.word(1).to_owned(), all);
            }
            "" | "virtual_server" | "virtual_server_group" => {}
            name if KEPT.contains(&name) => {}
            _ => lost.push(item.lost("keepalived has no such keyword outside of a block")),
        }
    }
    outside
}

fn globals(item: &Item, outside: &mut Outside, lost: &mut Vec<String>) {
    for item in item.items() {
        let why = match item.name() {
            "script_user" => {
                outside.script_user = Some(item.word(1).to_owned());
                if item.len() > 2 && item.word(2) != item.word(1) {
                    lost.push(item.lost("checks run in the group of the user"));
                }
                continue;
            }
            "lvs_sync_daemon" => {
                "connections are not synchronised: set [sync.ipvs] with interface and syncid"
            }
            "lvs_timeouts" => {
                "the timeouts are not converted: set them with `lvsadm --set TCP TCPFIN UDP`"
            }
            "lvs_flush" | "lvs_flush_on_stop" => "lvsd removes only its own services",
            "lvs_notify_fifo" | "lvs_notify_fifo_script" => {
                "events of services are sent to the program of `notify` in [lvsd]"
            }
            "notify_fifo" | "notify_fifo_script" => {
                "it continues to apply to VRRP; events of services are sent to the program of `notify` in [lvsd]"
            }
            "notification_email" => {
                "it continues to apply to VRRP; lvsd sends no e-mail about servers: use `notify` in [lvsd]"
            }
            "smtp_alert" | "smtp_alert_checker" if is_on(item) => {
                "lvsd sends no e-mail about servers: use `notify` in [lvsd]"
            }
            "rs_init_notifies" => "lvsd runs the program of `notify` in [lvsd] instead",
            "nftables_ipvs" => "the result has a service for each address instead of a mark",
            "checker_log_all_failures" if is_on(item) => {
                "lvsd logs changes: `lvsd status` shows the last reason"
            }
            _ => continue,
        };
        lost.push(item.lost(why));
    }
}

/// Describes a line of `SSL`, which is not converted.
fn certificate(item: &Item) -> String {
    item.lost_of(
        "SSL",
        match item.name() {
            "certificate" => "set `cert` of the checks of type https",
            "key" => "set `key` of the checks of type https",
            "ca" => {
                "keepalived does not verify servers with it; set `ca` of the checks of type https to do so"
            }
            "password" => "checks of type https cannot use a key with a password",
            _ => "lvsd has no equivalent",
        },
    )
}
