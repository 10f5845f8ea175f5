//! Lists many connections of a director while it forwards.

use crate::common;

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::connections;
use lvs_testbed::{Forward, SiteOptions, soon};
use serde_json::Value;

/// Number of connections. A listing reads them in more than ten pieces of the table.
const CONNECTIONS: usize = 6000;

#[test]
#[ignore = "long"]
fn listing_is_complete_while_other_connections_open_and_close() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("listing", Forward::Nat, 2))?;
    site.add_service(80, "rr")?;
    site.add_service_weighted("-u", 9, "rr", &[1, 1])?;
    let send = || {
        site.client.sh(&format!(
            r#"perl -MSocket -e '
            my $to = sockaddr_in(9, inet_aton("{vip}"));
            for my $port (20001 .. {last}) {{
                socket(S, PF_INET, SOCK_DGRAM, 17) or die $!;
                bind(S, sockaddr_in($port, INADDR_ANY)) or die "$port: $!";
                send(S, "x", 0, $to);
                select(undef, undef, undef, 0.005) if $port % 50 == 0;
            }}'"#,
            vip = site.vip,
            last = 20_000 + CONNECTIONS,
        ))
    };
    // The client repeats lost packets. A duplicate opens no connection.
    soon("the director to list all connections", || {
        let sent = send().is_ok();
        let listed = site.lvsadm("-L -n -c").unwrap_or_default();
        sent && listed
            .lines()
            .filter(|line| line.starts_with("UDP"))
            .count()
            >= CONNECTIONS
    })?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    for _ in 0..3 {
        let listed = connections(&site.lvsadm("-L -n -c")?)?;
        let sources: Vec<&str> = listed
            .iter()
            .filter(|connection| connection.protocol == "UDP")
            .map(|connection| connection.source.as_str())
            .collect();
        ensure!(
            sources.len() == CONNECTIONS,
            "the number of listed connections is wrong: {}",
            sources.len()
        );
        ensure!(sources.iter().collect::<HashSet<_>>().len() == CONNECTIONS);
        let json: Value = serde_json::from_str(&site.lvsadm("--json -L -c")?)?;
        let udp = json
            .as_array()
            .context("the JSON value is not a list")?
            .iter()
            .filter(|connection| connection["protocol"] == 17);
        ensure!(udp.count() == CONNECTIONS);
    }
    // A reader may end after the first lines without an error.
    let first = site.director.sh(&format!(
        "{} -Lnc | head -n 3 | wc -l",
        lvs_testbed::programs::find("lvsadm")?.display()
    ))?;
    ensure!(
        first.trim() == "3",
        "the number of lines that head received is not 3: {first}"
    );
    steady.wait_for_more(4)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 3,
        "at most 3 requests were answered: {report:?}"
    );
    Ok(())
}
