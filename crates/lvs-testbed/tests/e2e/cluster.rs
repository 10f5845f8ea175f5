//! Two directors with keepalived: the scenarios of `lvs-testbed cluster`, with small numbers.

use anyhow::{Result, ensure};
use lvs_testbed::Forward;
use lvs_testbed::cluster::pair::{Scenario, play};
use lvs_testbed::cluster::{Balancer, ClusterOptions};

use crate::common;

const DOWNLOADS: u64 = 60;

fn options(forward: Forward) -> ClusterOptions {
    ClusterOptions {
        forward: forward.word().to_owned(),
        downloads: DOWNLOADS,
        ..ClusterOptions::default()
    }
}

fn nothing_breaks(scenario: Scenario, forward: Forward) -> Result<()> {
    common::nothing_breaks(&[play(scenario, &options(forward))?])
}

#[test]
#[ignore = "needs keepalived"]
fn nat_connections_survive_death_and_return_of_director() -> Result<()> {
    nothing_breaks(Scenario::Returns, Forward::Nat)
}

#[test]
#[ignore = "needs keepalived"]
fn direct_routing_connections_survive_death_and_return_of_director() -> Result<()> {
    nothing_breaks(Scenario::Returns, Forward::Dr)
}

#[test]
#[ignore = "needs keepalived"]
fn nat_connections_survive_maintenance_of_director() -> Result<()> {
    nothing_breaks(Scenario::Planned, Forward::Nat)
}

#[test]
#[ignore = "needs keepalived"]
fn director_whose_checks_fail_hands_over_without_broken_downloads() -> Result<()> {
    nothing_breaks(Scenario::Quorum, Forward::Nat)?;
    nothing_breaks(Scenario::Quorum, Forward::Dr)
}

/// `lvsadm doctor` reports the missing files, and nothing else.
#[test]
#[ignore = "needs keepalived"]
fn removed_files_between_lvsd_and_keepalived_are_reported_and_restored() -> Result<()> {
    nothing_breaks(Scenario::Files, Forward::Nat)
}

/// For comparison with the director.
#[test]
#[ignore = "needs keepalived and HAProxy"]
fn killed_haproxy_breaks_its_connections() -> Result<()> {
    let options = ClusterOptions {
        director: Balancer::HaProxy,
        ..options(Forward::Nat)
    };
    let outcome = play(Scenario::Kill, &options)?;
    println!("{}", serde_json::to_string(&outcome)?);
    ensure!(
        outcome.broken == DOWNLOADS,
        "not all downloads broke: {outcome:?}"
    );
    ensure!(outcome.director == "haproxy" && outcome.forward == "proxy");
    Ok(())
}

#[test]
#[ignore = "needs keepalived"]
fn tunnel_connections_survive_maintenance_of_director() -> Result<()> {
    nothing_breaks(Scenario::Planned, Forward::Tun)
}

#[test]
#[ignore = "needs keepalived"]
fn ipv6_nat_connections_survive_maintenance_of_director() -> Result<()> {
    let options = ClusterOptions {
        ipv6: true,
        ..options(Forward::Nat)
    };
    let outcome = play(Scenario::Planned, &options)?;
    ensure!(
        outcome.family == "ipv6",
        "the downloads did not use IPv6: {outcome:?}"
    );
    common::nothing_breaks(&[outcome])
}
