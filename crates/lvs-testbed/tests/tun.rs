//! IPIP tunnelling, end to end: the real programs between a real client and real servers.

mod common;

use anyhow::Result;
use lvs_testbed::{Forward, SiteOptions};

#[test]
fn every_byte_arrives_and_every_listing_is_right() -> Result<()> {
    let site = common::site(SiteOptions::new("tun-http", Forward::Tun))?;
    common::requests_and_listings(&site)?;
    site.lvsadm("-C")?;
    common::schedulers(&site)
}

#[test]
fn bulk_both_ways_iperf_and_dns() -> Result<()> {
    let mut options = SiteOptions::new("tun-bulk", Forward::Tun);
    options.servers = 2;
    let site = common::site(options)?;
    site.add_service(80, "rr")?;
    common::bulk(&site)?;
    common::iperf_and_dns(&site)
}

#[test]
fn servers_come_and_go() -> Result<()> {
    let mut options = SiteOptions::new("tun-admin", Forward::Tun);
    options.servers = 3;
    common::administration(&common::site(options)?)
}
