//! The changes that a reload would make.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use lvs_api::words::counted;
use lvs_core::api::ServiceId;
use tokio::time::Instant;

use crate::admin::Admin;
use crate::config::Config;
use crate::dataplane::{Goal, Host, Link, Planned, Proxied};
use crate::desired::{Overrides, desired};
use crate::expand::Expanded;
use crate::health::{Advice, Key};
use crate::reconcile::Health;

/// The changes in the dataplane that a reload of a file would make, as text. New servers have not
/// been checked and count as up. `names` are the names of the running daemon's services.
///
/// # Errors
/// No dataplane runs, or it does not answer.
pub fn plan(
    host: impl Host,
    (config, expanded): (&Config, &Expanded),
    admin: &Admin,
    names: &HashMap<ServiceId, String>,
) -> Result<Planned, String> {
    let mut link = Link::new(Box::new(host), true, Instant::now());
    let addresses = link.addresses();
    let vips = expanded.own_vips(|ip| addresses.has(ip));
    let vips: BTreeSet<IpAddr> = vips.into_iter().collect();
    let there = link.servers(config.dataplane.hang_limit)?;
    let health = |key: &Key| {
        let health = match there.contains(key) {
            // The server keeps its present state.
            true => Health::Unknown,
            false => Health::Up,
        };
        (health, Advice::NONE)
    };
    let overrides = Overrides {
        admin,
        decisions: &HashMap::new(),
        vips: Some(&vips),
        generation: 0,
    };
    let mut desired = desired(config, expanded, health, &overrides);
    // The running daemon has the proxied services.
    let proxied = Proxied::part(&mut desired, expanded.proxied(), 0);
    let goal = Goal {
        proxied: None,
        desired,
        announced: vips,
        dataplane: config.dataplane.clone(),
        readied: HashSet::new(),
    };
    let mut planned = link.plan(&goal, names)?;
    if let Some(proxied) = proxied {
        let services = counted(proxied.desired.services.len(), "proxied service");
        planned.not_compared = Some(format!(
            "{services} not compared: `lvsd status` shows the present ones"
        ));
    }
    Ok(planned)
}
