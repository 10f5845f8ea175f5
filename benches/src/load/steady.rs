//! Measures the cost of replicating 10,000 new connections per second to another director.
//!
//! Two directors with NAT are on one network. One generator sends datagrams of 1,000 clients to one
//! of the directors as fast as it can. Another one sends 14,000 per second, each of which opens a
//! connection, so that at least some 10,000 arrive. The program compares the forwarded packets
//! round by round, with and without replication of each new connection. The other director is
//! running in both cases.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, Site, SiteOptions};

use crate::stats::Spread;
use crate::yardsticks::Yardsticks;

/// Port of the service.
const PORT: u16 = 7;
/// Required number of new connections per second, of which at least 90 % must succeed.
const NEW: u64 = 10_000;
/// New connections per second that are sent: a director at its limit loses packets of both
/// generators.
const SENT: u64 = 14_000;
/// Time for which packets are counted, after one second in which connections open.
const WINDOW: Duration = Duration::from_secs(4);
/// Seconds for which a generator sends.
const SECONDS: &str = "7";

/// Measures the packet rate with and without replication `rounds` times, and prints the rates and
/// their ratios.
pub(super) fn run(rounds: usize) -> Result<()> {
    let yardsticks = Yardsticks::build()?;
    let mut options = SiteOptions::new("steady", Forward::Nat);
    options.servers = 1;
    options.standby = true;
    let mut site = Site::new(options)?;
    site.servers[0].sh("nft add table ip sink\n\
         nft 'add chain ip sink in { type filter hook prerouting priority -300; }'\n\
         nft add rule ip sink in udp dport 7 drop")?;
    let key = site.testbed.dir().join("key");
    fs::write(&key, "0123456789abcdef0123456789abcdef")?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
    let key = key.display().to_string();
    let (mut with, mut without, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        // The order alternates, because the second measurement of a round finds a warm machine.
        let order = if round % 2 == 0 {
            [false, true]
        } else {
            [true, false]
        };
        let mut rates = [0.0; 2];
        for replicated in order {
            rates[usize::from(replicated)] = measure(&mut site, &yardsticks, &key, replicated)?;
        }
        println!(
            "round {}: {:.0} packets/s without replication, {:.0} with replication, ratio {:.3}",
            round + 1,
            rates[0],
            rates[1],
            rates[1] / rates[0]
        );
        without.push(rates[0]);
        with.push(rates[1]);
        ratios.push(rates[1] / rates[0]);
    }
    let spread =
        |values: &[f64]| Spread::of(values.iter().copied()).context("no round was measured");
    let (with, without, ratio) = (spread(&with)?, spread(&without)?, spread(&ratios)?);
    println!(
        "packets/s without replication {:.0}, with replication {:.0}; ratio {:.3} ({:.3} to {:.3}, {rounds} rounds)",
        without.median, with.median, ratio.median, ratio.min, ratio.max
    );
    Ok(())
}

/// Returns the packets per second that the first director forwards. `replicated`: whether it
/// replicates the connections to the second one.
fn measure(site: &mut Site, yardsticks: &Yardsticks, key: &str, replicated: bool) -> Result<f64> {
    let synchronised = |peer: &'static str| match replicated {
        true => vec![
            "--fast-path",
            "off",
            "--sync-peer",
            peer,
            "--sync-key",
            key,
            // Replicate each connection at its first packet.
            "--sysctl",
            "sync_threshold=1 50",
        ],
        false => vec!["--fast-path", "off"],
    };
    let (first, second) = (site.director.clone(), site.standby()?.clone());
    site.dataplane = Some(site.start_dataplane_on(&first, &[], &synchronised("192.0.2.2"))?);
    let other = site.start_dataplane_on(&second, &[], &synchronised("192.0.2.1"))?;
    site.add_service_weighted("-u", PORT, "rr", &[1])?;
    if replicated {
        site.lvsadm_on(&second, "sync --wait 10s")?;
    }
    let rate = SENT.to_string();
    let flood = generator(
        site,
        yardsticks,
        &["-a", "10.128.0.0", "-f", "1000", "-b", "10"],
    )?;
    let new = generator(
        site,
        yardsticks,
        &["-a", "10.160.0.0", "-f", "1000000", "-b", "20", "-r", &rate],
    )?;
    thread::sleep(Duration::from_secs(1));
    let before = counted(site)?;
    thread::sleep(WINDOW);
    let after = counted(site)?;
    let opened = after.connections - before.connections;
    let expected = NEW * WINDOW.as_secs();
    ensure!(
        opened * 10 >= expected * 9,
        "{opened} connections were opened instead of {expected}: the director is too slow for this benchmark"
    );
    for mut program in [flood, new] {
        program.wait(Duration::from_secs(10))?;
    }
    if replicated {
        let output = site.lvsadm_on(&first, "--json sync")?;
        let output: serde_json::Value = serde_json::from_str(&output)?;
        let known = output["peers"][0]["missing"].as_u64();
        ensure!(
            known.is_some_and(|missing| missing * 10 < expected),
            "too many connections were not replicated: {output}"
        );
    }
    drop(other);
    site.dataplane = None;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    Ok((after.packets - before.packets) as f64 / WINDOW.as_secs_f64())
}

fn generator(site: &Site, yardsticks: &Yardsticks, more: &[&str]) -> Result<Proc> {
    let mac = |host: &lvs_testbed::Host| -> Result<String> {
        Ok(host
            .sh("cat /sys/class/net/eth0/address")?
            .trim()
            .to_owned())
    };
    let (to, from) = (mac(&site.director)?, mac(&site.client)?);
    let (vip, port) = (site.vip.to_string(), PORT.to_string());
    let mut words = vec![
        "-m", "send", "-i", "eth0", "-d", &to, "-e", &from, "-v", &vip, "-p", &port, "-t", SECONDS,
        "-c", "0",
    ];
    words.extend(more);
    site.client.spawn(yardsticks.path("gen"), &words)
}

struct Counted {
    connections: u64,
    packets: u64,
}

fn counted(site: &Site) -> Result<Counted> {
    let listing = site.lvsadm("-L -n --stats --exact")?;
    let line = listing
        .lines()
        .find(|line| line.starts_with("UDP"))
        .with_context(|| listing.clone())?;
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let number = |n: usize| -> Result<u64> {
        Ok(words
            .get(n)
            .context("the listing has too few columns")?
            .parse()?)
    };
    Ok(Counted {
        connections: number(2)?,
        packets: number(3)?,
    })
}
