//! TFTP with real servers and clients: a UDP service whose connections last as long as a transfer.

use crate::common;

use std::fs;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::netns::Proc;
use lvs_testbed::{Forward, Site, SiteOptions, servers};

/// Size of the file in bytes: a few hundred blocks of 512 bytes, and one short block.
const SIZE: u64 = 300_001;

fn site(label: &str, forward: Forward, single_port: bool) -> Result<(Site, Vec<Proc>)> {
    let site = common::site(SiteOptions::with_servers(label, forward, 2))?;
    site.serve("file", SIZE)?;
    let servers = site.servers.iter();
    let servers = servers.map(|server| servers::tftp(server, single_port));
    let servers = servers.collect::<Result<_>>()?;
    site.add_service_weighted("-u", 69, "rr", &[1, 1])?;
    Ok((site, servers))
}

/// Each client fetches the file twice, once from each server.
fn fetch(site: &Site) -> Result<()> {
    let dir = site.testbed.dir().join("client");
    fs::create_dir_all(&dir)?;
    let expected = fs::read(site.testbed.dir().join("www/file"))?;
    let (vip, to) = (site.vip, dir.join("file"));
    let to = to.display();
    let clients = [
        format!("timeout 120 tftp -m binary {vip} -c get file {to}"),
        format!("timeout 120 atftp --get --remote-file file --local-file {to} {vip} 69"),
        format!(
            "timeout 120 atftp --option 'blksize 1400' --get --remote-file file --local-file {to} {vip} 69"
        ),
        format!("curl -sS -m 120 -o {to} tftp://{vip}/file"),
    ];
    for client in &clients {
        for _ in 0..2 {
            let _ = fs::remove_file(dir.join("file"));
            site.client.sh(client)?;
            let found = fs::read(dir.join("file")).with_context(|| client.clone())?;
            ensure!(
                found == expected,
                "{client}: the received file differs from the served one"
            );
        }
    }
    let listing = site.lvsadm("-L -n")?;
    let rows: Vec<_> = rows(&listing);
    let servers = rows.iter().filter(|row| row.is_server());
    for server in servers {
        let transfers = server.number(3)?;
        ensure!(
            transfers == clients.len() as u64,
            "InActConn is not the number of clients: {listing}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs tftp-hpa and atftp"]
fn tftp_file_arrives_through_nat() -> Result<()> {
    let (site, _servers) = site("tftp-nat", Forward::Nat, true)?;
    fetch(&site)
}

#[test]
#[ignore = "needs tftp-hpa and atftp"]
fn tftp_file_arrives_by_direct_routing() -> Result<()> {
    let (site, _servers) = site("tftp-dr", Forward::Dr, true)?;
    fetch(&site)
}

#[test]
#[ignore = "needs tftp-hpa and atftp"]
fn tftp_file_arrives_through_tunnel() -> Result<()> {
    let (site, _servers) = site("tftp-tun", Forward::Tun, true)?;
    fetch(&site)
}

/// Packets from a random port of the server belong to no connection.
#[test]
#[ignore = "needs tftp-hpa and atftp"]
fn tftp_transfer_from_server_with_random_source_port_fails() -> Result<()> {
    let (site, _servers) = site("tftp-ports", Forward::Nat, false)?;
    let failed = site.client.sh(&format!(
        "curl -sS -m 5 -o /dev/null tftp://{}/file",
        site.vip
    ));
    ensure!(failed.is_err(), "the transfer succeeded: {failed:?}");
    Ok(())
}
