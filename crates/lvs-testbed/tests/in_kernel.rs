//! The path in the kernel, end to end: the same traffic as through the engine alone, and the same listings.
//!
//! Needs BPF in the first user namespace; where that is not permitted, there is nothing to test.

mod common;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Mode, Site, SiteOptions};

const ON: [&str; 2] = ["--in-kernel", "on"];

/// A site whose engine forwards in the kernel; `None` where that is not permitted.
fn site(label: &str, forward: Forward, servers: usize) -> Result<Option<Site>> {
    if Mode::detect()? == Mode::Rootless {
        eprintln!("the path in the kernel needs root: nothing is tested");
        return Ok(None);
    }
    let mut options = SiteOptions::new(label, forward);
    options.servers = servers;
    let mut site = Site::new(options)?;
    site.start_engine(&ON)?;
    Ok(Some(site))
}

/// What `lvsadm drops` says was forwarded in the kernel: requests and replies.
fn shares(site: &Site) -> Result<(u64, u64)> {
    let all = site.lvsadm("drops --json --all")?;
    let all: serde_json::Value = serde_json::from_str(&all)?;
    let count = |reason: &str| {
        let items = all.as_array().context("a list")?;
        let item = items.iter().find(|item| item["reason"] == reason);
        item.and_then(|item| item["count"].as_u64())
            .with_context(|| format!("{reason} in {all}"))
    };
    Ok((count("kernel_requests")?, count("kernel_replies")?))
}

macro_rules! method {
    ($name:ident, $forward:ident) => {
        mod $name {
            use super::*;

            #[test]
            fn every_byte_arrives_and_every_listing_is_right() -> Result<()> {
                let label = format!("ink-{}-http", stringify!($name));
                let Some(site) = site(&label, Forward::$forward, 4)? else {
                    return Ok(());
                };
                common::requests_and_listings(&site)?;
                let (requests, _) = shares(&site)?;
                ensure!(requests > 0, "downloads of 10 MiB are published");
                site.lvsadm("-C")?;
                common::schedulers(&site)
            }

            #[test]
            fn bulk_both_ways_iperf_and_dns() -> Result<()> {
                let label = format!("ink-{}-bulk", stringify!($name));
                let Some(site) = site(&label, Forward::$forward, 2)? else {
                    return Ok(());
                };
                site.add_service(80, "rr")?;
                common::bulk(&site)?;
                let (requests, replies) = shares(&site)?;
                ensure!(requests > 1000, "{requests} requests");
                let translated = matches!(Forward::$forward, Forward::Nat);
                ensure!((replies > 1000) == translated, "{replies} replies");
                common::iperf_and_dns(&site)
            }

            #[test]
            fn servers_come_and_go() -> Result<()> {
                let label = format!("ink-{}-admin", stringify!($name));
                match site(&label, Forward::$forward, 3)? {
                    Some(site) => common::administration(&site),
                    None => Ok(()),
                }
            }
        }
    };
}

method!(nat, Nat);
method!(dr, Dr);
