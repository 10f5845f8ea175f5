//! Two directors with keepalived: the scenarios of `lvs-testbed cluster`, with small numbers.

use anyhow::{Result, ensure};
use lvs_testbed::Forward;
use lvs_testbed::cluster::{Balancer, ClusterOptions, Scenario, play, play_with};

const DOWNLOADS: u64 = 60;

fn nothing_breaks(scenario: Scenario, forward: Forward) -> Result<()> {
    let outcome = play(scenario, forward, DOWNLOADS)?;
    println!("{}", serde_json::to_string(&outcome)?);
    ensure!(outcome.broken == 0, "{outcome:?}");
    Ok(())
}

#[test]
fn a_director_dies_and_comes_back_empty_nat() -> Result<()> {
    nothing_breaks(Scenario::Returns, Forward::Nat)
}

#[test]
fn a_director_dies_and_comes_back_empty_dr() -> Result<()> {
    nothing_breaks(Scenario::Returns, Forward::Dr)
}

#[test]
fn maintenance_moves_everything_there_and_back_nat() -> Result<()> {
    nothing_breaks(Scenario::Planned, Forward::Nat)
}

#[test]
fn a_director_that_finds_its_servers_down_gives_way() -> Result<()> {
    nothing_breaks(Scenario::Quorum, Forward::Nat)?;
    nothing_breaks(Scenario::Quorum, Forward::Dr)
}

/// HAProxy in the director's place: what it carries ends with it, and the laboratory says so.
#[test]
fn a_proxy_that_dies_takes_its_connections_along() -> Result<()> {
    let options = ClusterOptions {
        list: false,
        forward: "nat".to_owned(),
        downloads: DOWNLOADS,
        director: Balancer::HaProxy,
        live: false,
        scenario: None,
    };
    let outcome = play_with(Scenario::Kill, Forward::Nat, &options)?;
    println!("{}", serde_json::to_string(&outcome)?);
    ensure!(outcome.broken == DOWNLOADS, "{outcome:?}");
    ensure!(outcome.director == "haproxy" && outcome.forward == "proxy");
    Ok(())
}

#[test]
fn maintenance_moves_everything_there_and_back_tun() -> Result<()> {
    nothing_breaks(Scenario::Planned, Forward::Tun)
}
