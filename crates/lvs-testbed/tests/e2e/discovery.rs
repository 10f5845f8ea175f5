//! Discovery of servers by DNS, with real name servers.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, programs, soon};
use nix::sys::signal::Signal;

use crate::common::usable;

fn site(label: &str) -> Result<Site> {
    Site::new(SiteOptions::with_servers(label, Forward::Nat, 4))
}

fn start(site: &Site) -> Result<Proc> {
    let dir = site.testbed.dir();
    let path = |name: &str| dir.join(name).display().to_string();
    let (config, state) = (path("lvsd.toml"), path("state"));
    site.director.spawn(
        programs::find("lvsd")?,
        &["--config", &config, "--state", &state],
    )
}

fn ask(site: &Site, command: &str) -> Result<String> {
    let dir = site.testbed.dir();
    let lvsd = programs::find("lvsd")?;
    let lvsd = lvsd.display();
    let (config, state) = (dir.join("lvsd.toml"), dir.join("state"));
    site.director.sh(&format!(
        "{lvsd} --config {} --state {} {command} 2>&1 || true",
        config.display(),
        state.display()
    ))
}

fn wait_usable(site: &Site, servers: &[usize], lvsd: &Proc) -> Result<()> {
    soon(&format!("the servers {servers:?} to be usable"), || {
        usable(site) == servers
    })
    .with_context(|| format!("{:?}\nlvsd printed:\n{}", site.lvsadm("-L -n"), lvsd.log()))
}

fn unbound(site: &Site, host: &Host, servers: &[usize]) -> Result<Proc> {
    let dir = site.testbed.dir();
    let mut data = String::new();
    for n in servers {
        data += &format!(
            " local-data: \"_web._tcp.pool.test. 1 IN SRV 10 {} 80 rs{n}.pool.test.\"\n \
             local-data: \"rs{n}.pool.test. 1 IN A {}\"\n",
            n + 1,
            site.real_address(*n)
        );
    }
    // The records do not fit into one datagram: lvsd must not use the truncated answers.
    for n in 0..60 {
        data += &format!(
            " local-data: \"_web._tcp.pool.test. 1 IN SRV 20 1 80 spare-server-number-{n}.pool.test.\"\n"
        );
    }
    let path = dir.join("unbound.conf");
    let d = dir.display();
    fs::write(
        &path,
        format!(
            "server:\n interface: 0.0.0.0@5300\n access-control: 0.0.0.0/0 allow\n do-daemonize: no\n use-syslog: no\n chroot: \"\"\n \
             username: \"\"\n directory: \"{d}\"\n pidfile: \"\"\n module-config: \"iterator\"\n \
             local-zone: \"pool.test.\" static\n{data}remote-control:\n control-enable: no\n"
        ),
    )?;
    let proc = host.spawn("unbound", &["-d", "-c", &path.display().to_string()])?;
    host.wait_for_port("udp", 5300)?;
    host.wait_for_port("tcp", 5300)?;
    Ok(proc)
}

/// Writes the servers of `pool.test` for dnsmasq.
fn zone(site: &Site, servers: &[usize]) -> Result<()> {
    let lines = servers
        .iter()
        .map(|n| format!("{} pool.test\n", site.real_address(*n)));
    Ok(fs::write(
        site.testbed.dir().join("zone"),
        lines.collect::<String>(),
    )?)
}

fn file(site: &Site, name: &str, port: u16, more: &str) -> Result<()> {
    let text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n\
         [dns]\nname_servers = \"{}:{port}\"\nmin_ttl = \"1s\"\ntimeout = \"2s\"\n\n\
         [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\nforward = \"nat\"\ndrain = \"30s\"\n\
         discover = {{ dns = \"{name}\" }}\n{more}",
        site.real_address(0),
        site.service(80)
    );
    Ok(fs::write(site.testbed.dir().join("lvsd.toml"), text)?)
}

#[test]
fn servers_follow_changed_dns_zone_and_no_download_breaks() -> Result<()> {
    let site = site("zone")?;
    let zone_file = site.testbed.dir().join("zone").display().to_string();
    zone(&site, &[0, 1])?;
    let hosts = format!("--addn-hosts={zone_file}");
    let mut dnsmasq = site.servers[0].spawn(
        "dnsmasq",
        &[
            "--no-daemon",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            &hosts,
            "--local-ttl=1",
            "--local=/test/",
            "--port=5301",
            "--user=root",
        ],
    )?;
    site.servers[0].wait_for_port("udp", 5301)?;
    file(&site, "pool.test", 5301, "")?;
    let mut lvsd = start(&site)?;
    wait_usable(&site, &[0, 1], &lvsd)?;
    // `status` and `plan` use the same state as the daemon.
    let status = || ask(&site, "status").unwrap_or_default();
    soon("lvsd status to list the servers of DNS", || {
        status().contains("dns pool.test: 2 servers")
    })
    .with_context(status)?;
    // `lvsd plan` reads the answers that the daemon stores, with a delay.
    let plan = || ask(&site, "plan");
    soon("lvsd plan to report no change", || {
        plan().is_ok_and(|plan| plan.contains("othing"))
    })
    .with_context(|| plan().unwrap_or_default())?;

    let mut load = site.load();
    load.sizes = vec![1, 20_011, 2_097_152];
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    for servers in [&[0usize, 1, 2][..], &[2, 3], &[1, 3], &[0, 1, 2, 3]] {
        zone(&site, servers)?;
        dnsmasq.signal(Signal::SIGHUP)?;
        wait_usable(&site, servers, &lvsd)?;
        steady.wait_for_more(20)?;
    }
    // First the zone is emptied by mistake, then the name server is unreachable: lvsd uses the last
    // usable answer.
    zone(&site, &[])?;
    dnsmasq.signal(Signal::SIGHUP)?;
    soon(
        "lvsd status to report that the name server does not answer",
        || ask(&site, "status").is_ok_and(|status| status.contains("NO USABLE ANSWER")),
    )?;
    wait_usable(&site, &[0, 1, 2, 3], &lvsd)?;
    dnsmasq.kill();
    // A restarted daemon also uses the last usable answer.
    lvsd.signal(Signal::SIGKILL)?;
    lvsd.wait(Duration::from_secs(5))?;
    let mut lvsd = start(&site)?;
    soon(
        "lvsd status to report the answer from before the restart",
        || {
            ask(&site, "status")
                .is_ok_and(|status| status.contains("from before the start of lvsd"))
        },
    )?;
    wait_usable(&site, &[0, 1, 2, 3], &lvsd)?;
    steady.wait_for_more(100)?;
    let report = steady.finish_ok()?;
    ensure!(
        report.ok > 100,
        "at most 100 requests were answered: {report:?}"
    );
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

#[test]
#[ignore = "needs Unbound"]
fn srv_records_over_tcp_set_hosts_ports_and_weights() -> Result<()> {
    let site = site("srv")?;
    let mut server = unbound(&site, &site.servers[0], &[0, 1])?;
    // For a server that the file also names, the settings of the file apply.
    let own = format!(
        "\n[[service.server]]\naddress = \"{}:80\"\nweight = 50\n",
        site.real_address(3)
    );
    file(&site, "_web._tcp.pool.test", 5300, &own)?;
    let lvsd = start(&site)?;
    wait_usable(&site, &[0, 1, 3], &lvsd)?;
    let weight = |n: usize| -> Result<u64> {
        let listing = site.lvsadm("-L -n")?;
        let address = format!("{}:80", site.real_address(n));
        let rows = rows(&listing);
        let row = rows.iter().find(|row| row.address == address);
        row.with_context(|| listing.clone())?.number(1)
    };
    ensure!((weight(0)?, weight(1)?, weight(3)?) == (1, 2, 50));
    server.kill();
    let _server = unbound(&site, &site.servers[0], &[1, 2, 3])?;
    wait_usable(&site, &[1, 2, 3], &lvsd)?;
    ensure!((weight(1)?, weight(2)?, weight(3)?) == (2, 3, 50));
    let output = ask(&site, "reload")?;
    ensure!(output.contains("no change"), "no `no change` in {output}");
    Ok(())
}
