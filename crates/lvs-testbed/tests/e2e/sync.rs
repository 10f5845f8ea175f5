//! Connection synchronisation between two directors: connections continue at the other director.

use crate::{common, fast_path};

use std::cell::Cell;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::load::SteadyLoad;
use lvs_testbed::netns::run_with_input;
use lvs_testbed::{Forward, Host, LoadOptions, Proc, Site, SiteOptions, wait_until};
use lvs_testbed::{programs, servers::NginxOptions};

/// Creates a site with a dataplane on each of two directors, without synchronisation daemons; nginx
/// sends at most `rate` bytes a second for each response. Returns the site and the second
/// dataplane.
fn directors(forward: Forward, rate: u64) -> Result<(Site, Proc)> {
    let mut options = SiteOptions::new("sync", forward);
    options.standby = true;
    options.nginx = NginxOptions {
        rate,
        ..NginxOptions::default()
    };
    let site = common::site(options)?;
    let standby = site.start_dataplane_on(site.standby()?, &[], &[])?;
    Ok((site, standby))
}

/// Copies the services of the first director to the second.
fn copy_services(site: &Site) -> Result<()> {
    let rules = site.lvsadm("-S -n")?;
    let program = programs::find("lvsadm")?;
    run_with_input(site.standby()?.command(program).arg("-R"), &rules).map(drop)
}

/// Number of connections in the state ESTABLISHED that `lvsadm -L -c -n` lists.
fn established(site: &Site, director: &Host) -> Result<usize> {
    let listing = site.lvsadm_on(director, "-L -c -n")?;
    Ok(listing.matches(" ESTABLISHED ").count())
}

fn reason(site: &Site, director: &Host, name: &str) -> Result<u64> {
    let listing = site.lvsadm_on(director, "--json drops --all")?;
    let listing: serde_json::Value = serde_json::from_str(&listing)?;
    let all = listing.as_array().context("the JSON value is not a list")?;
    let found = all.iter().find(|reason| reason["reason"] == name);
    let count = found.and_then(|reason| reason["count"].as_u64());
    count.with_context(|| format!("no count of {name} in {listing}"))
}

/// Rate of a download in bytes a second.
const RATE: u64 = 60_000;
/// Time limit of each step.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the load of clients with consecutive downloads over one connection each, so that each
/// client always has a download in progress.
fn downloads(site: &Site, clients: u64) -> LoadOptions {
    LoadOptions {
        concurrency: clients,
        keepalive: true,
        sizes: vec![100_003],
        timeout_ms: 120_000,
        first_port: 20_000,
        ..site.load()
    }
}

/// Checks that the downloads complete at the other director, and that further downloads succeed.
fn finish(downloads: SteadyLoad, clients: u64) -> Result<()> {
    downloads.wait_for_more(2 * clients)?;
    let report = downloads.finish()?;
    println!("{} downloads in {:.1} s", report.ok, report.seconds);
    report.all_ok(report.ok)
}

/// Kills the master while 200 clients download; the backup takes over.
fn downloads_go_on(forward: Forward, master: &str, backup: &str, sysctls: &[&str]) -> Result<()> {
    const CLIENTS: u64 = 200;
    let (mut site, _standby) = directors(forward, RATE)?;
    site.add_service(80, "rr")?;
    copy_services(&site)?;
    let standby = site.standby()?.clone();
    for sysctl in sysctls {
        for director in [&site.director, &standby] {
            site.lvsadm_on(director, &format!("sysctl {sysctl}"))?;
        }
    }
    site.lvsadm(&format!("--start-daemon master {master}"))?;
    site.lvsadm_on(&standby, &format!("--start-daemon backup {backup}"))?;

    let running = site.client.steady_load(&downloads(&site, CLIENTS))?;
    let mut known = 0;
    wait_until("the backup to have all connections", PATIENCE, || {
        known = established(&site, &standby).unwrap_or(0);
        known as u64 == CLIENTS
    })
    .with_context(|| format!("the backup has {known} connections"))?;
    site.unplug()?;
    if let Some(dataplane) = &mut site.dataplane {
        dataplane.kill();
    }
    site.fail_over()?;
    finish(running, CLIENTS)?;
    for name in [
        "sync_malformed",
        "sync_nonsense",
        "sync_no_room",
        "sync_lost",
    ] {
        ensure!(
            reason(&site, &standby, name)? == 0,
            "the counter is not 0: {name}"
        );
    }
    Ok(())
}

const PLAIN: &str = "--mcast-interface eth0 --syncid 5";

#[test]
fn nat_downloads_continue_after_kill_of_master() -> Result<()> {
    downloads_go_on(Forward::Nat, PLAIN, PLAIN, &[])
}

#[test]
#[ignore = "long"]
fn direct_routing_downloads_continue_after_kill_of_master() -> Result<()> {
    let group = "--mcast-interface eth0 --mcast-group ff02::81 --mcast-port 9000";
    downloads_go_on(Forward::Dr, group, group, &["sync_ports=4"])
}

#[test]
#[ignore = "long"]
fn tunnel_downloads_continue_after_kill_of_master() -> Result<()> {
    downloads_go_on(Forward::Tun, PLAIN, PLAIN, &["sync_version=0"])
}

/// The master also synchronises connections whose packets the kernel fast path forwards, from their
/// packet counters.
#[test]
#[ignore = "long"]
fn offloaded_connections_are_synchronised_and_continue_after_failover() -> Result<()> {
    const CLIENTS: u64 = 50;
    fast_path::require_permission()?;
    let mut options = SiteOptions::new("sync-kernel", Forward::Nat);
    options.standby = true;
    options.nginx = NginxOptions {
        rate: RATE,
        ..NginxOptions::default()
    };
    let mut site = Site::new(options)?;
    site.start_dataplane(&["--fast-path", "on"])?;
    let _standby = site.start_dataplane_on(site.standby()?, &[], &[])?;
    site.add_service(80, "rr")?;
    copy_services(&site)?;
    let standby = site.standby()?.clone();

    let running = site.client.steady_load(&downloads(&site, CLIENTS))?;
    let forwards_after = |requests: u64| {
        wait_until("the kernel fast path to forward packets", PATIENCE, || {
            fast_path::shares(&site).is_ok_and(|now| now.0 > requests + 1000)
        })
    };
    forwards_after(0)?;
    site.lvsadm_on(&standby, &format!("--start-daemon backup {PLAIN}"))?;
    site.lvsadm(&format!("--start-daemon master {PLAIN}"))?;
    let mut known = 0;
    wait_until("the backup to have all connections", PATIENCE, || {
        known = established(&site, &standby).unwrap_or(0);
        known as u64 == CLIENTS
    })
    .with_context(|| format!("the backup has {known} connections"))?;
    forwards_after(fast_path::shares(&site)?.0)?;
    site.unplug()?;
    if let Some(dataplane) = &mut site.dataplane {
        dataplane.kill();
    }
    site.fail_over()?;
    finish(running, CLIENTS)
}

/// Both directors run `lvsd` with the same file, so that each has daemons of both roles.
#[test]
fn downloads_continue_when_one_of_two_lvsd_directors_fails() -> Result<()> {
    const CLIENTS: u64 = 100;
    let mut options = SiteOptions::new("sync-lvsd", Forward::Nat);
    options.standby = true;
    options.nginx = NginxOptions {
        rate: RATE,
        ..NginxOptions::default()
    };
    let site = Site::new(options)?;
    let standby = site.standby()?.clone();
    let path = site.testbed.dir().join("lvsd.toml");
    let mut text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n\
         [sync.ipvs]\ninterface = \"eth0\"\nsyncid = 5\n\n\
         [[service]]\nname = \"web\"\naddress = \"{}\"\nforward = \"nat\"\nvip = \"host\"\n",
        site.service(80)
    );
    for index in 0..site.servers.len() {
        let address = site.real_address(index);
        text.push_str(&format!(
            "\n[[service.server]]\naddress = \"{address}:80\"\n"
        ));
    }
    std::fs::write(&path, text)?;
    let program = programs::find("lvsd")?;
    let file = path.display().to_string();
    let lvsd = |director: &Host, words: &str| {
        director.sh(&format!("{} --config {file} {words}", program.display()))
    };
    let mut daemons = Vec::new();
    for (name, director) in [("one", &site.director), ("two", &standby)] {
        let state = site.testbed.dir().join(name).display().to_string();
        let words = ["--config", &file, "--state", &state];
        let daemon = director.spawn(&program, &words)?;
        wait_until("both daemons to run", PATIENCE, || {
            let running = site.lvsadm_on(director, "-L --daemon");
            running.is_ok_and(|answer| answer.contains("master") && answer.contains("backup"))
        })
        .with_context(|| daemon.log())?;
        daemons.push(daemon);
    }

    let running = site.client.steady_load(&downloads(&site, CLIENTS))?;
    wait_until("the backup to have all connections", PATIENCE, || {
        established(&site, &standby).is_ok_and(|known| known as u64 == CLIENTS)
    })?;
    site.unplug()?;
    daemons[0].kill();
    site.fail_over()?;
    finish(running, CLIENTS).with_context(|| daemons[1].log())?;
    wait_until(
        "lvsd status to report the received connections",
        PATIENCE,
        || {
            let status = lvsd(&standby, "status --json").unwrap_or_default();
            let status: serde_json::Value = serde_json::from_str(&status).unwrap_or_default();
            let taken = status["dataplane"]["sync"]["taken"].as_u64();
            taken.is_some_and(|taken| taken >= CLIENTS)
        },
    )?;
    let output = lvsd(&standby, "status")?;
    ensure!(
        output.contains("synchronisation: "),
        "no `synchronisation: ` in {output}"
    );
    lvsd(&site.director, "stop --all")?;
    lvsd(&standby, "stop --all").map(drop)
}

/// Runs lvsadm on a director; returns its output and exit status.
fn says(director: &Host, arguments: &str) -> Result<(String, String)> {
    let program = programs::find("lvsadm")?;
    let script = format!("{} {arguments} 2>&1 || echo \"=> $?\"", program.display());
    let answer = director.sh(&script)?;
    Ok(match answer.split_once("=> ") {
        Some((text, status)) => (text.trim().to_owned(), status.trim().to_owned()),
        None => (answer.trim().to_owned(), "0".to_owned()),
    })
}

/// Number of UDP sockets bound or connected to 224.0.0.81, the default synchronisation group.
fn backup_sockets(director: &Host) -> Result<usize> {
    Ok(director
        .sh("cat /proc/net/udp")?
        .matches(" 510000E0:22")
        .count())
}

#[test]
fn sync_daemons_start_and_stop_as_in_the_kernel() -> Result<()> {
    let mut site = common::site(SiteOptions::with_servers("daemons", Forward::Nat, 1))?;
    let director = site.director.clone();
    site.add_service(80, "rr")?;
    let rules = site.lvsadm("-S -n")?;
    director.sh("ip link add d1 type veth peer name d2")?;
    let words = "--start-daemon master --mcast-interface d1";
    wait_until("the dataplane to use the new interface", PATIENCE, || {
        says(&director, words).is_ok_and(|(text, _)| text != "No such device")
    })?;
    // The expected answers are those of Linux 6.12.
    for (arguments, text, status) in [
        (
            "--start-daemon master --mcast-interface nope0",
            "No such device",
            "255",
        ),
        (
            "--start-daemon master --mcast-interface d1",
            "Network is unreachable",
            "255",
        ),
        (
            "--start-daemon master --mcast-interface d1 --mcast-group ff02::81",
            "Network is unreachable",
            "255",
        ),
        (
            "--start-daemon backup --mcast-interface d1 --mcast-group 10.1.1.1",
            "invalid IPv4 mcast-group `10.1.1.1'",
            "2",
        ),
        ("--stop-daemon master", "No daemon is running", "255"),
        ("-L --daemon", "", "0"),
        ("--start-daemon backup --mcast-interface d1", "", "0"),
        (
            "--start-daemon backup --mcast-interface eth0",
            "Daemon has already run",
            "255",
        ),
        // These lines are from Debian's /etc/init.d/ipvsadm.
        (
            "--start-daemon master --mcast-interface eth0 --syncid 0",
            "",
            "0",
        ),
        (
            "-L --daemon",
            "master sync daemon (mcast=eth0, syncid=0, maxlen=1472, group=224.0.0.81, port=8848, ttl=1)\n\
             backup sync daemon (mcast=d1, syncid=0, maxlen=1472, group=224.0.0.81, port=8848, ttl=1)",
            "0",
        ),
        ("--stop-daemon master", "", "0"),
        ("--stop-daemon backup --syncid 77", "", "0"),
        ("-L --daemon", "", "0"),
        (
            "--start-daemon backup --mcast-interface eth0 --mcast-group ff02::81 --mcast-ttl 5 --mcast-port 9000 --syncid 3",
            "",
            "0",
        ),
        (
            "-L --daemon",
            "backup sync daemon (mcast=eth0, syncid=3, maxlen=1452, group=ff02::81, port=9000, ttl=5)",
            "0",
        ),
        ("--stop-daemon backup", "", "0"),
    ] {
        let answer = says(&director, arguments)?;
        ensure!(
            answer == (text.to_owned(), status.to_owned()),
            "the answer differs from the kernel's: {arguments}: {answer:?}"
        );
    }
    let has_sockets = |count: usize| {
        wait_until(
            &format!("the daemon to have {count} sockets"),
            PATIENCE,
            || backup_sockets(&director).is_ok_and(|sockets| sockets == count),
        )
        .with_context(|| format!("{:?}", backup_sockets(&director)))
    };
    has_sockets(0)?;

    // The second daemon uses as many ports as the first one, although sync_ports has changed.
    site.lvsadm("sysctl sync_ports=4")?;
    site.lvsadm("--start-daemon master --mcast-interface eth0")?;
    site.lvsadm("sysctl sync_ports=2")?;
    site.lvsadm("--start-daemon backup --mcast-interface d1")?;
    // Each port has one socket.
    has_sockets(4)?;
    ensure!(
        site.lvsadm("-S -n")? == rules,
        "-S saved other rules than before the daemons were started"
    );

    // The interface is removed and created again.
    let joined = || -> Result<bool> {
        let groups = director.sh("cat /proc/net/igmp")?;
        let of_d1 = groups.split_once("d1 ").map_or("", |(_, rest)| rest);
        let of_d1 = of_d1
            .lines()
            .skip(1)
            .take_while(|line| line.starts_with('\t'));
        Ok(of_d1.into_iter().any(|line| line.contains("510000E0")))
    };
    director.sh("ip link set d1 up; ip link set d2 up")?;
    wait_until("the backup to be a member of the group", PATIENCE, || {
        joined().unwrap_or(false)
    })?;
    director.sh("ip link del d1")?;
    wait_until("the backup to have left the group", PATIENCE, || {
        joined().is_ok_and(|joined| !joined)
    })?;
    director.sh("ip link add d1 type veth peer name d2; ip link set d1 up; ip link set d2 up")?;
    wait_until("the backup to use its created interface", PATIENCE, || {
        joined().unwrap_or(false)
    })?;
    let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
    dataplane.stop(nix::sys::signal::Signal::SIGTERM)?;
    has_sockets(0).with_context(|| dataplane.log())
}

/// Sends a datagram from the client to the default multicast group.
fn send(site: &Site, bytes: &[u8]) -> Result<()> {
    let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    // printf of bash writes at each byte 10. `fullblock` makes dd send all of them at once.
    let script = format!(
        "printf '{escaped}' | dd bs=65536 iflag=fullblock status=none > /dev/udp/224.0.0.81/8848"
    );
    site.client.run("bash", &["-c", &script]).map(drop)
}

#[test]
fn invalid_sync_messages_are_counted_and_valid_part_of_damaged_message_is_used() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("nobody", Forward::Nat, 1))?;
    site.add_service(80, "rr")?;
    site.lvsadm("--start-daemon backup --mcast-interface eth0 --syncid 5")?;
    // 224.0.0.81, as /proc/net/igmp prints it.
    wait_until("the backup to join the multicast group", PATIENCE, || {
        let groups = site.director.sh("cat /proc/net/igmp");
        groups.is_ok_and(|groups| groups.contains("510000E0"))
    })?;
    let header = |syncid: u8, len: u8, count: u8| [0, syncid, 0, len, count, 1, 0, 0];
    // A connection of protocol 99.
    let mut nonsense = header(5, 44, 1).to_vec();
    nonsense.extend([0, 99, 0, 36]);
    nonsense.resize(44, 0);
    // The message announces two entries and contains one: the backup accepts that one.
    let mut damaged = header(5, 44, 2).to_vec();
    damaged.extend([0, 6, 0, 36, 0, 0, 0, 0, 0, 1, 0x9c, 0x40, 0, 80, 0, 80]);
    damaged.extend([
        0, 0, 0, 0, 0, 0, 0, 60, 192, 0, 2, 100, 192, 0, 2, 10, 10, 0, 0, 11,
    ]);
    let sent: [(&str, Vec<u8>); 7] = [
        ("sync_malformed", b"hello".to_vec()),
        ("sync_malformed", header(5, 9, 0).to_vec()),
        ("sync_other_id", header(9, 8, 0).to_vec()),
        ("sync_too_long", vec![0; 1473]),
        ("sync_nonsense", nonsense),
        ("sync_malformed", damaged.clone()),
        // An attacker replays the valid messages.
        ("sync_malformed", damaged),
    ];
    let mut messages = 0;
    for (name, bytes) in sent {
        let count = || reason(&site, &site.director, name);
        let before = count()?;
        let counted = || count().is_ok_and(|now| now > before);
        let what = format!("the counter {name} to increase");
        messages += common::send_until(&what, PATIENCE, || send(&site, &bytes), counted)?;
    }
    // A lost message is sent again; each message that arrives is counted once.
    let names = [
        "sync_malformed",
        "sync_other_id",
        "sync_too_long",
        "sync_nonsense",
    ];
    let counts = names.map(|name| reason(&site, &site.director, name));
    let counts = counts.into_iter().collect::<Result<Vec<_>>>()?;
    ensure!(
        counts.iter().sum::<u64>() <= messages,
        "more messages were counted than the {messages} sent: {counts:?}"
    );
    let listing = site.lvsadm("-L -c -n")?;
    ensure!(
        listing.matches("192.0.2.100:40000").count() == 1,
        "the connection of the valid part of a damaged message is not listed exactly once: {listing}"
    );
    let load = site.load_of(20);
    common::ok(site.client.load(&load)?, 20)?;
    Ok(())
}

#[test]
fn persistent_clients_keep_their_server_after_failover() -> Result<()> {
    let (mut site, _standby) = directors(Forward::Nat, 0)?;
    let service = site.service(80);
    site.lvsadm(&format!("-A -t {service} -s rr -p 300"))?;
    for index in 0..4 {
        let server = site.real_address(index);
        site.lvsadm(&format!("-a -t {service} -r {server} -m"))?;
    }
    copy_services(&site)?;
    let standby = site.standby()?.clone();
    for director in [&site.director, &standby] {
        for role in ["master", "backup"] {
            site.lvsadm_on(
                director,
                &format!("--start-daemon {role} --mcast-interface eth0"),
            )?;
        }
    }
    let url = format!("http://{service}/id");
    let client = site.client.clone();
    let ask = || client.run("curl", &["-sS", "-m", "60", &url]);
    let name = ask()?;
    let number: usize = name.trim().trim_start_matches("rs").parse()?;
    wait_until("the backup to have the template", PATIENCE, || {
        let listing = site.lvsadm_on(&standby, "-L -c -n");
        listing.is_ok_and(|listing| listing.contains("192.0.2.100:0"))
    })?;
    // With weight 0, the server gets no other clients.
    let server = site.real_address(number - 1);
    site.lvsadm_on(&standby, &format!("-e -t {service} -r {server} -m -w 0"))?;
    if let Some(dataplane) = &mut site.dataplane {
        dataplane.kill();
    }
    site.fail_over()?;
    for _ in 0..8 {
        let now = ask()?;
        ensure!(
            now == name,
            "{now} answered the persistent client instead of {name}"
        );
    }
    Ok(())
}

#[test]
fn sync_messages_of_local_users_are_ignored() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("ownuser", Forward::Nat, 1))?;
    let director = &site.director;
    site.lvsadm("--start-daemon backup --mcast-interface eth0")?;
    director.sh("ip route add 224.0.0.0/4 dev eth0")?;
    // Sends a message until it is counted; returns the number of sent messages. The dataplane reads
    // the socket's counter of refused messages once a second.
    let sent_until_counted = |host: &Host, name: &str| -> Result<u64> {
        let sent = Cell::new(0);
        let counted = || reason(&site, director, name).is_ok_and(|count| count > 0);
        let what = format!("the counter {name} to increase");
        wait_until(&what, PATIENCE, || {
            sent.set(sent.get() + 1);
            let message = "printf hello > /dev/udp/224.0.0.81/8848";
            host.run("bash", &["-c", message]).is_ok()
                && wait_until(&what, 2 * common::IN_TIME, counted).is_ok()
        })?;
        Ok(sent.get())
    };
    let own = sent_until_counted(director, "sync_lost")?;
    ensure!(
        reason(&site, director, "sync_malformed")? == 0,
        "sync_malformed is not 0"
    );
    let others = sent_until_counted(&site.client, "sync_malformed")?;
    let (lost, malformed) = (
        reason(&site, director, "sync_lost")?,
        reason(&site, director, "sync_malformed")?,
    );
    ensure!(
        lost <= own && malformed <= others,
        "more messages were counted than sent: {lost} lost of {own} own messages, {malformed} malformed of {others} others"
    );
    Ok(())
}

/// Source addresses of UDP sockets that are bound to a unicast address.
fn sources(director: &Host) -> Result<Vec<Ipv4Addr>> {
    let table = director.sh("cat /proc/net/udp")?;
    let sockets = table.lines().skip(1).filter_map(|line| {
        let local = line.split_whitespace().nth(1)?.split_once(':')?.0;
        let number = u32::from_str_radix(local, 16).ok()?;
        Some(Ipv4Addr::from(number.swap_bytes()))
    });
    Ok(sockets
        .filter(|addr| !addr.is_unspecified() && !addr.is_multicast())
        .collect())
}

#[test]
fn sync_master_sends_from_first_address_of_its_interface_and_stops_without_address() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("primary", Forward::Nat, 1))?;
    let director = &site.director;
    director.sh("ip link add d1 type veth peer name d2; ip link set d1 up; ip link set d2 up")?;
    director.sh("ip addr add 192.0.2.201/24 dev d1; ip addr add 192.0.2.202/24 dev d1")?;
    wait_until("the dataplane to use the new interface", PATIENCE, || {
        site.lvsadm("--start-daemon master --mcast-interface d1")
            .is_ok()
    })?;
    wait_until("a message to be sent from 192.0.2.201", PATIENCE, || {
        sources(director).is_ok_and(|all| all == [Ipv4Addr::new(192, 0, 2, 201)])
    })?;
    // The interface has other addresses, or none.
    director.sh("ip addr flush dev d1; ip addr add 192.0.2.203/24 dev d1")?;
    wait_until("a message to be sent from 192.0.2.203", PATIENCE, || {
        sources(director).is_ok_and(|all| all == [Ipv4Addr::new(192, 0, 2, 203)])
    })?;
    director.sh("ip addr flush dev d1")?;
    wait_until("the master to send no message", PATIENCE, || {
        sources(director).is_ok_and(|all| all.is_empty())
    })?;
    Ok(())
}
