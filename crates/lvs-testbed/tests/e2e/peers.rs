//! Two directors that replicate their connections over TCP.

use crate::common;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::listing::{Connection, connections};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::servers::NginxOptions;
use lvs_testbed::{Forward, Host, Proc, Site, SiteOptions, Vip, programs, wait_until};
use serde_json::Value;

const KEY: &str = "0123456789abcdef0123456789abcdef";
/// Address of the first director.
const ONE: &str = "192.0.2.1";
const TWO: &str = "192.0.2.2";

/// Options with which a restarted dataplane does not take over state.
const ALONE: [&str; 2] = ["--fast-path", "off"];

fn site(label: &str, forward: Forward, rate: u64) -> Result<Site> {
    let mut options = SiteOptions::new(label, forward);
    options.standby = true;
    options.nginx = NginxOptions {
        rate,
        ..NginxOptions::default()
    };
    Site::new(options)
}

fn key(site: &Site, name: &str, key: &str) -> Result<String> {
    let path = site.testbed.dir().join(name);
    std::fs::write(&path, key)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(path.display().to_string())
}

/// Starts a dataplane with a peer, without the state of a killed dataplane.
fn dataplane(site: &Site, director: &Host, peer: &str, key: &str) -> Result<Proc> {
    dataplane_of(site, director, peer, key, "1")
}

/// [`dataplane`] with this number of packet workers.
fn dataplane_of(
    site: &Site,
    director: &Host,
    peer: &str,
    key: &str,
    workers: &str,
) -> Result<Proc> {
    let extra = ["--sync-peer", peer, "--sync-key", key, "--workers", workers];
    site.start_dataplane_on(director, &[], &[&extra[..], &ALONE].concat())
}

fn copy_services(site: &Site, from: &Host, to: &Host) -> Result<()> {
    let rules = site.lvsadm_on(from, "-S -n")?;
    let program = programs::find("lvsadm")?;
    run_with_input(to.command(program).arg("-R"), &rules).map(drop)
}

fn state(site: &Site, director: &Host) -> Result<Value> {
    let text = site.lvsadm_on(director, "--json sync")?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// The value `name` of the only peer in `lvsadm sync --json`.
fn of_peer(site: &Site, director: &Host, name: &str) -> Option<u64> {
    let state = state(site, director).ok()?;
    state["peers"][0][name].as_u64()
}

fn number(site: &Site, director: &Host, name: &str) -> u64 {
    let state = state(site, director).ok();
    state.and_then(|state| state[name].as_u64()).unwrap_or(0)
}

/// Moves the VIPs, and the local addresses to which servers reply, from one director to another.
/// Flushes the neighbour tables of the servers, the client and the router.
fn hand_over(site: &Site, from: &Host, to: &Host) -> Result<()> {
    let (vip, vip6) = (site.vip, site.vip6);
    let addresses = |verb: &str| {
        let mut script = format!("ip addr {verb} {vip}/32 dev eth0\n");
        script.push_str(&format!("ip addr {verb} {vip6}/128 dev eth0 || true\n"));
        if site.options.forward == Forward::Nat {
            script.push_str(&format!("ip addr {verb} 10.0.0.1/24 dev eth1\n"));
        }
        script
    };
    from.sh(&addresses("del"))?;
    to.sh(&addresses("add"))?;
    let neighbours = site
        .servers
        .iter()
        .chain([&site.client])
        .chain(&site.router);
    for host in neighbours {
        host.sh("ip neigh flush all; ip -6 neigh flush all")?;
    }
    Ok(())
}

const PATIENCE: Duration = Duration::from_secs(30);

fn wait(what: &str, done: impl FnMut() -> bool) -> Result<()> {
    wait_until(what, PATIENCE, done)
}

/// The listed connections of a director, without their timers.
fn connections_of(site: &Site, director: &Host) -> Result<BTreeSet<[String; 4]>> {
    let listing = site.lvsadm_on(director, "-L -c -n")?;
    let all = connections(&listing)?.into_iter();
    let key = |it: Connection| [it.source, it.virtual_address, it.destination, it.state];
    Ok(all.map(key).collect())
}

/// Kills a director while 250 clients download; the other one takes over. The killed director
/// starts again with an empty table, and takes the VIPs back when it has all connections. `workers`
/// are the numbers of packet workers of the two directors.
fn comes_back(label: &str, forward: Forward, workers: [&str; 2]) -> Result<()> {
    const CLIENTS: u64 = 250;
    let mut site = site(label, forward, 60_000)?;
    let (first, second) = (site.director.clone(), site.standby()?.clone());
    let key = key(&site, "key", KEY)?;
    let mut one = dataplane_of(&site, &first, TWO, &key, workers[0])?;
    let two = dataplane_of(&site, &second, ONE, &key, workers[1])?;
    site.add_service(80, "rr")?;
    copy_services(&site, &first, &second)?;
    for director in [&first, &second] {
        site.lvsadm_on(director, "sync --wait 120s")?;
    }
    let mut load = site.load();
    load.concurrency = CLIENTS;
    load.keepalive = true;
    load.sizes = vec![100_003];
    load.timeout_ms = 120_000;
    load.first_port = 20_000;
    let downloads = site.client.steady_load(&load)?;
    let mut scenario = || -> Result<()> {
        wait("the other director to have all connections", || {
            of_peer(&site, &second, "borrowed") == Some(CLIENTS)
        })?;
        ensure!(of_peer(&site, &first, "borrowed") == Some(0));
        wait("both directors to have the same connections", || {
            let all = [&first, &second].map(|director| connections_of(&site, director).ok());
            let count = all[0].as_ref().map(BTreeSet::len);
            count.is_some_and(|count| count as u64 == CLIENTS) && all[0] == all[1]
        })?;
        site.unplug()?;
        one.kill();
        site.fail_over()?;
        wait(
            "packets of the connections to arrive at the other director",
            || number(&site, &second, "replicated") == CLIENTS,
        )?;
        // The director has started again with an empty table.
        let vip = site.vip;
        let mut plug = format!("ip addr del {vip}/32 dev eth0; ip link set eth0 up\n");
        match forward {
            Forward::Nat => {
                plug.push_str("ip addr del 10.0.0.1/24 dev eth1; ip link set eth1 up\n");
            }
            _ => plug.push_str("ip route add default via 192.0.2.254\n"),
        }
        first.sh(&plug)?;
        one = dataplane_of(&site, &first, TWO, &key, workers[0])?;
        copy_services(&site, &second, &first)?;
        let printed = site.lvsadm_on(&first, "sync --wait 120s");
        let printed = printed.with_context(|| format!("{}\n{}", one.log(), two.log()))?;
        println!("{printed}");
        ensure!(
            of_peer(&site, &first, "borrowed") == Some(CLIENTS),
            "the director does not have all connections: {printed}"
        );
        hand_over(&site, &second, &first)?;
        wait(
            "packets of the connections to arrive at the director",
            || number(&site, &first, "replicated") == CLIENTS,
        )?;
        wait("the other director to receive the update", || {
            of_peer(&site, &second, "borrowed") == Some(CLIENTS)
                && of_peer(&site, &second, "missing") == Some(0)
        })?;
        // The downloads in progress, and as many new ones.
        downloads.wait_for_more(2 * CLIENTS)
    };
    let played = scenario();
    played.with_context(|| format!("{}\n{}", one.log(), two.log()))?;
    let report = downloads.finish()?;
    println!(
        "{forward:?}: {} downloads in {:.1} s",
        report.ok, report.seconds
    );
    report.all_ok(report.ok)?;
    for director in [&first, &second] {
        let state = state(&site, director)?;
        for name in ["nonsense", "no_room", "forged", "malformed", "full_syncs"] {
            ensure!(state[name] == 0, "{name} is {}, not 0", state[name]);
        }
    }
    drop(two);
    site.dataplane = Some(one);
    Ok(())
}

#[test]
fn restarted_nat_director_takes_over_when_ready() -> Result<()> {
    comes_back("back-nat", Forward::Nat, ["1", "1"])
}

#[test]
#[ignore = "long"]
fn restarted_direct_routing_director_takes_over_when_ready() -> Result<()> {
    comes_back("back-dr", Forward::Dr, ["1", "1"])
}

#[test]
#[ignore = "long"]
fn restarted_director_with_several_workers_takes_over_when_ready() -> Result<()> {
    comes_back("back-workers", Forward::Nat, ["2", "1"])?;
    comes_back("back-workers-2", Forward::Dr, ["2", "2"])
}

#[test]
fn peer_with_wrong_key_or_address_is_refused() -> Result<()> {
    let site = site("peerkey", Forward::Nat, 0)?;
    let (first, second) = (site.director.clone(), site.standby()?.clone());
    let (right, wrong) = (
        key(&site, "right", KEY)?,
        key(&site, "wrong", &KEY.replace('0', "f"))?,
    );
    let mut one = dataplane(&site, &first, TWO, &right)?;
    let mut two = dataplane(&site, &second, ONE, &wrong)?;
    for (director, log) in [(&first, &mut one), (&second, &mut two)] {
        wait("the directors to refuse each other's key", || {
            state(&site, director).is_ok_and(|state| {
                state["peers"][0]["state"] == "refused" && state["refused_key"] != 0
            })
        })
        .with_context(|| log.log())?;
        let state = state(&site, director)?;
        ensure!(
            state["ready"] == false,
            "the director is still reported as ready: {state}"
        );
        let printed = state["waits_for"].as_str().unwrap_or_default();
        ensure!(
            printed.contains("another key"),
            "no `another key` in {printed}"
        );
        wait(
            "the log to name sha256sum for a comparison of the keys",
            || log.log().contains("sha256sum"),
        )
        .with_context(|| log.log())?;
    }
    // The connection comes from an address that is not a peer's.
    let script = "exec 3<>/dev/tcp/192.0.2.2/8848 && cat <&3 | wc -c";
    let printed = site.client.run("bash", &["-c", script])?;
    ensure!(
        printed.trim() == "0",
        "the director sent bytes to an address that is not a peer's: {printed}"
    );
    wait("the refused address to be counted", || {
        number(&site, &second, "refused_address") == 1
    })?;
    // A program at the peer's address sends garbage, and then nothing.
    one.kill();
    let garbage =
        "exec 3<>/dev/tcp/192.0.2.2/8848 && head -c 5000 /dev/urandom >&3; cat <&3 | wc -c";
    let before = number(&site, &second, "refused_key");
    first.run("bash", &["-c", garbage])?;
    wait("the wrong key to be counted", || {
        number(&site, &second, "refused_key") > before
    })?;
    let silent = "for i in 1 2 3 4 5 6; do exec {fd}<>/dev/tcp/192.0.2.2/8848; done; sleep 600";
    let mut silent = first.spawn("bash", &["-c", silent])?;
    wait("connections above the limit to be refused", || {
        number(&site, &second, "refused_places") >= 4
    })?;
    silent.kill();
    // The director accepts the right key immediately.
    two.kill();
    let _two = dataplane(&site, &second, ONE, &right)?;
    let _one = dataplane(&site, &first, TWO, &right)?;
    for director in [&first, &second] {
        site.lvsadm_on(director, "sync --wait 120s")?;
        let state = state(&site, director)?;
        ensure!(
            state["peers"][0]["state"] == "in step",
            "the director is not in sync: {state}"
        );
    }
    Ok(())
}

#[test]
fn director_without_its_peer_becomes_ready_after_sync_wait() -> Result<()> {
    let site = site("peerwait", Forward::Nat, 0)?;
    let key = key(&site, "key", KEY)?;
    let first = site.director.clone();
    let start = |wait: &str| {
        let extra = ["--sync-peer", TWO, "--sync-key", &key, "--sync-wait", wait];
        site.start_dataplane_on(&first, &[], &extra)
    };
    let mut dataplane = start("3600")?;
    let state = state(&site, &first)?;
    ensure!(
        state["ready"] == false,
        "the director is reported as ready: {state}"
    );
    let program = programs::find("lvsadm")?.display().to_string();
    let printed = first.sh(&format!("{program} sync --wait 1s || echo status $?"))?;
    ensure!(
        printed.contains("not ready") && printed.contains("status 1"),
        "no `not ready` or no `status 1` in {printed}"
    );
    for wait in ["0", "1"] {
        dataplane.kill();
        dataplane = start(wait)?;
        site.lvsadm_on(&first, "sync --wait 120s")?;
    }
    wait("the dataplane to log that it is ready", || {
        dataplane.log().contains("ready: ")
    })
    .with_context(|| dataplane.log())
}

/// An operator adds `[sync.peers]` to lvsd's configuration file while the dataplane runs. The peers
/// take effect only after a restart of the dataplane.
#[test]
fn director_whose_dataplane_lacks_configured_peers_is_not_ready_until_restart() -> Result<()> {
    let mut options = SiteOptions::new("peerlack", Forward::Nat);
    options.vip = Vip::Dataplane;
    let site = Site::new(options)?;
    let key = key(&site, "key", KEY)?;
    let dir = site.testbed.dir().display().to_string();
    let (file, track, state) = (
        format!("{dir}/lvsd.toml"),
        format!("{dir}/track"),
        format!("{dir}/state"),
    );
    let write = |sync: &str| {
        let text = format!(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n{sync}\
             [vrrp]\ninterface = \"eth0\"\nrouter_id = 51\ntrack_file = \"{track}\"\nfifo = \"{dir}/fifo\"\n\
             [[service]]\naddress = \"{}\"\nforward = \"nat\"\ncheck = \"none\"\nservers = [\"{}:80\"]\n",
            site.service(80),
            site.real_address(0)
        );
        std::fs::write(&file, text)
    };
    let lvsd = programs::find("lvsd")?.display().to_string();
    let ask = |words: &str| site.director.sh(&format!("{lvsd} --config {file} {words}"));
    let is_written = |value: &str| {
        wait(&format!("the track file to contain `{value}`"), || {
            std::fs::read_to_string(&track).is_ok_and(|text| text.trim() == value)
        })
        .with_context(|| ask("maintenance status").unwrap_or_default())
    };
    write("")?;
    let daemon = site
        .director
        .spawn(&lvsd, &["--config", &file, "--state", &state])?;
    is_written("0").with_context(|| daemon.log())?;
    write(&format!(
        "[sync.peers]\naddresses = [\"192.0.2.99\"]\nkey_file = \"{key}\"\nconnect_timeout = \"1s\"\n"
    ))?;
    ask("reload")?;
    is_written("-100")?;
    let printed = ask("maintenance status")?;
    ensure!(
        printed.contains("NOT READY, waits for a restart of the dataplane")
            && printed.contains("without the peers 192.0.2.99"),
        "no `NOT READY, waits for a restart of the dataplane` or no `without the peers 192.0.2.99` in {printed}"
    );
    let found = super::doctor::findings_with_code(&site, "director_not_ready")?;
    ensure!(
        found.len() == 1,
        "doctor does not report exactly one finding: {found:?}"
    );
    let status: Value = serde_json::from_str(&ask("status --json")?)?;
    site.director
        .sh(&format!("kill -KILL {}", status["dataplane"]["pid"]))?;
    is_written("0")?;
    let printed = ask("maintenance status")?;
    ensure!(
        !printed.contains("NOT READY"),
        "unexpected `NOT READY` in {printed}"
    );
    Ok(())
}

#[test]
fn invalid_peer_options_are_reported() -> Result<()> {
    let site = site("peeropt", Forward::Nat, 0)?;
    let good = key(&site, "key", KEY)?;
    let open = key(&site, "open", KEY)?;
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644))?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    let absent = Path::new(&good)
        .with_file_name("absent")
        .display()
        .to_string();
    for (options, printed) in [
        (format!("--sync-peer {TWO}"), "--sync-key"),
        (format!("--sync-peer {TWO} --sync-key {open}"), "chmod 600"),
        (
            format!("--sync-peer {TWO} --sync-key {absent}"),
            "cannot read the key",
        ),
        (
            format!("--sync-peer two --sync-key {good}"),
            "expected 192.0.2.2",
        ),
        (
            format!("--sync-peer {TWO} --sync-peer {TWO}:9 --sync-key {good}"),
            "named twice",
        ),
    ] {
        let script = format!("{program} --interface eth0 {options} 2>&1 || true");
        let answer = site.director.sh(&script)?;
        ensure!(
            answer.contains(printed),
            "the invalid options are not reported: {options}: {answer}"
        );
    }
    Ok(())
}

/// Result of comparing the services and servers of a director with those of its peer: `alike`,
/// `differ` or `alarm`; empty if `lvsadm sync` shows none.
fn tables(site: &Site, director: &Host) -> String {
    let state = state(site, director).ok();
    let word = state.and_then(|state| state["tables"][0]["state"].as_str().map(str::to_owned));
    word.unwrap_or_default()
}

fn wait_for_tables(site: &Site, word: &str) -> Result<()> {
    let directors = [&site.director, site.standby()?];
    let all = |word: &str| {
        directors
            .iter()
            .all(|director| tables(site, director) == word)
    };
    wait(&format!("lvsadm sync to report {word}"), || all(word)).with_context(|| {
        let printed = directors.map(|director| site.lvsadm_on(director, "sync"));
        printed.into_iter().flatten().collect::<String>()
    })
}

/// Runs `lvsadm diff` on the first director, against the dataplane `other`, and returns its output.
/// Checks that the exit status is 0 if nothing differs, and 1 otherwise.
fn diff(site: &Site, other: &Proc) -> Result<String> {
    // Each host of the testbed has a /run of its own.
    let socket = format!(
        "/proc/{}/root/run/lvs/netns-$(stat -L -c %i /proc/{}/ns/net).sock",
        other.pid(),
        other.pid()
    );
    let program = programs::find("lvsadm")?;
    let output = site.director.sh(&format!(
        "status=0; {} diff {socket} || status=$?; echo \"exit status $status\"",
        program.display(),
    ))?;
    let differ = !output.contains("the same services and servers");
    ensure!(
        output.contains(&format!("exit status {}\n", u8::from(differ))),
        "the exit status of lvsadm diff does not match its output: {output}"
    );
    Ok(output)
}

/// If directors choose different servers, `lvsadm sync` names the service and the duration, and
/// `lvsadm diff` the reason.
#[test]
#[ignore = "long"]
fn differing_services_are_shown_and_lasting_difference_raises_alarm() -> Result<()> {
    let site = site("tables", Forward::Nat, 0)?;
    let (first, second) = (site.director.clone(), site.standby()?.clone());
    let key = key(&site, "key", KEY)?;
    let start = |director: &Host, peer: &str| {
        // This time is longer than the commands that change both directors, one after the other.
        let extra = [
            "--sync-peer",
            peer,
            "--sync-key",
            &key,
            "--sync-alarm",
            "30",
        ];
        site.start_dataplane_on(director, &[], &extra)
    };
    let one = start(&first, TWO)?;
    let two = start(&second, ONE)?;
    // Empty tables are also alike.
    wait_for_tables(&site, "alike")?;
    site.add_service(80, "mh")?;
    site.add_service(81, "wlc")?;
    copy_services(&site, &first, &second)?;
    wait_for_tables(&site, "alike")?;
    let (vip, server) = (site.vip, |n: usize| format!("{}:80", site.real_address(n)));
    // Servers fail and return in different orders on the two directors; afterwards their mh tables
    // are equal.
    let flap = |director: &Host, order: [usize; 2]| -> Result<()> {
        for n in order {
            let server = server(n);
            site.lvsadm_on(director, &format!("-e -t {vip}:80 -r {server} -m -w 0"))?;
            site.lvsadm_on(director, &format!("-e -t {vip}:80 -r {server} -m -w 1"))?;
        }
        Ok(())
    };
    flap(&first, [0, 1])?;
    flap(&second, [1, 0])?;
    wait_for_tables(&site, "alike")?;
    ensure!(
        !one.log().contains("has not chosen"),
        "unexpected `has not chosen` in {}",
        one.log()
    );

    // An operator changes a weight on one director.
    let edit = |weight: u8| {
        let server = server(1);
        site.lvsadm_on(
            &second,
            &format!("-e -t {vip}:80 -r {server} -m -w {weight}"),
        )
    };
    edit(7)?;
    let line = format!("{}: weight: 1 here, 7 there", server(1));
    let named = format!("TCP {vip}:80 differs");
    let is_named = |director: &Host| {
        let printed = site.lvsadm_on(director, "sync");
        printed.is_ok_and(|printed| printed.contains(&named))
    };
    let shows = |line: &str| -> Result<()> {
        let printed = diff(&site, &two)?;
        ensure!(
            printed.contains(line),
            "a line is missing: {line}: {printed}"
        );
        Ok(())
    };
    wait("lvsadm sync to name the difference", || is_named(&first))?;
    shows(&format!("TCP {vip}:80\n    {line}\n"))?;
    wait_for_tables(&site, "alarm")?;
    wait("the alarm to be logged", || {
        let log = one.log();
        log.contains("has not chosen the same servers as this director for 30 s")
            && log.contains(&named)
    })
    .with_context(|| one.log())?;
    let printed = first.sh(&format!(
        "{} doctor || true",
        programs::find("lvsadm")?.display()
    ))?;
    ensure!(
        printed.contains("lvsadm sync"),
        "no `lvsadm sync` in {printed}"
    );
    edit(1)?;
    wait_for_tables(&site, "alike")?;
    shows("both directors have the same services and servers")?;
    for dataplane in [&one, &two] {
        wait("the log to report that the difference has ended", || {
            dataplane.log().contains("as this director again")
        })
        .with_context(|| dataplane.log())?;
        let log = dataplane.log();
        ensure!(
            log.matches("has not chosen").count() == 1,
            "the difference was not logged exactly once: {log}"
        );
        ensure!(
            log.matches("as this director again").count() == 1,
            "the end of the difference was not logged exactly once: {log}"
        );
    }

    // A server with weight 0 keeps the mh slots of its earlier weight, which differs between the
    // directors.
    edit(7)?;
    edit(0)?;
    let server = server(1);
    site.lvsadm_on(&first, &format!("-e -t {vip}:80 -r {server} -m -w 0"))?;
    let line = format!("{server}: weight before it became 0: 1 here, 7 there");
    wait("lvsadm sync to name the difference", || is_named(&first))?;
    shows(&line)?;
    edit(1)?;
    edit(0)?;
    wait_for_tables(&site, "alike")?;

    // The result of mh depends on the order in which servers were added.
    let again = |director: &Host, order: [usize; 2]| -> Result<()> {
        for n in order {
            site.lvsadm_on(
                director,
                &format!("-d -t {vip}:80 -r {}:80", site.real_address(n)),
            )?;
        }
        for n in order {
            let server = format!("{}:80", site.real_address(n));
            site.lvsadm_on(director, &format!("-a -t {vip}:80 -r {server} -m -w 1"))?;
        }
        Ok(())
    };
    again(&first, [0, 1])?;
    again(&second, [1, 0])?;
    wait("lvsadm sync to name the difference", || is_named(&second))?;
    shows("order of the servers: number 1 is")?;
    again(&second, [0, 1])?;
    wait_for_tables(&site, "alike")?;

    // Only one director has the service.
    site.lvsadm_on(&second, &format!("-D -t {vip}:81"))?;
    for (director, side) in [(&first, "on this director"), (&second, "on the peer")] {
        let named = format!("TCP {vip}:81 only {side}");
        wait("lvsadm sync to name the service", || {
            let printed = site.lvsadm_on(director, "sync");
            printed.is_ok_and(|printed| printed.contains(&named))
        })?;
    }
    shows(&format!(
        "TCP {vip}:81\n    only this director has the service\n"
    ))?;

    // One director is removed: its connections are lost.
    drop(two);
    let doctor = format!("{} doctor || true", programs::find("lvsadm")?.display());
    wait("the missing peer to be detected", || {
        let printed = first.sh(&doctor);
        printed.is_ok_and(|printed| printed.contains("are not replicated to this director"))
    })?;
    wait("the log to report the missing peer", || {
        one.log().contains("has not been in step for")
    })?;
    Ok(())
}

/// Program that sends datagrams of a given length from a port of the client to the service.
const SEND: &str = r#"
use IO::Socket::INET;
my ($vip, $from, $count, $length) = @ARGV;
my $s = IO::Socket::INET->new(Proto => 'udp', LocalPort => $from, PeerAddr => $vip, PeerPort => 9) or die "$!";
for (1 .. $count) { $s->send('x' x $length); select undef, undef, undef, 0.02; }
"#;

/// Program that sends the ICMP error of a client whose port is closed.
const UNREACHABLE: &str = r#"
use Socket;
my ($vip, $client, $port) = @ARGV;
sub sum { my $s = 0; $s += $_ for unpack 'n*', $_[0]; $s = ($s & 0xffff) + ($s >> 16) for 1 .. 2; ~$s & 0xffff }
my $quoted = pack('CCnnnCCn', 0x45, 0, 128, 7, 0, 63, 17, 0) . inet_aton($vip) . inet_aton($client) . pack('nnnn', 9, $port, 108, 0);
my $icmp = pack('CCnN', 3, 3, 0, 0) . $quoted;
substr($icmp, 2, 2) = pack 'n', sum($icmp);
socket(my $s, PF_INET, SOCK_RAW, 1) or die "$!";
send($s, $icmp, 0, pack_sockaddr_in(0, inet_aton($vip))) or die "$!";
"#;

/// nft rules that count complete datagrams of one length from a port, and ICMP errors, at a server.
const COUNT: &str = "nft -f - <<'END'
table ip seen {
    counter whole { }
    counter error { }
    chain input {
        type filter hook input priority 0
        udp sport 5002 udp length 3008 counter name whole
        icmp type destination-unreachable counter name error
        udp dport 9 drop
    }
}
END";

fn seen(host: &Host, counter: &str) -> Result<u64> {
    let printed = host.sh(&format!("nft list counter ip seen {counter}"))?;
    let count = printed
        .split_once("packets ")
        .context("the rule has no counter")?
        .1;
    let count = count.split(' ').next().unwrap_or_default();
    Ok(count.parse()?)
}

/// A router with ECMP by ports sends fragments and ICMP errors, which it cannot hash by ports, to
/// another director than the rest of the connection.
#[test]
fn fragments_and_icmp_errors_at_another_director_reach_their_server() -> Result<()> {
    let mut options = SiteOptions::new("elsewhere", Forward::Dr);
    options.standby = true;
    options.vip = Vip::Routed;
    options.servers = 2;
    let site = Site::new(options)?;
    let (first, second) = (site.director.clone(), site.standby()?.clone());
    let key = key(&site, "key", KEY)?;
    let _one = dataplane(&site, &first, TWO, &key)?;
    let _two = dataplane(&site, &second, ONE, &key)?;
    site.add_service_weighted("-u", 9, "rr", &[1, 1])?;
    copy_services(&site, &first, &second)?;
    for director in [&first, &second] {
        site.lvsadm_on(director, "sync --wait 120s")?;
    }
    for server in &site.servers {
        server.sh(COUNT)?;
    }
    let vip = site.vip.to_string();
    for port in ["5001", "5002"] {
        let words = ["-e", SEND, &vip, port, "3", "100"];
        site.client.run("perl", &words)?;
    }
    wait("the other director to have both connections", || {
        of_peer(&site, &second, "borrowed") == Some(2)
    })?;
    // Without the replica, the other director would choose the first server of its rotation for
    // such a packet.
    let listing = site.lvsadm_on(&first, "-L -c -n")?;
    let of_port = |port: &str| listing.lines().find(|line| line.contains(port));
    let has = |port: &str, server: usize| {
        let address = site.real_address(server).to_string();
        of_port(port).is_some_and(|line| line.contains(&address))
    };
    let whole = match (has(":5001", 0), has(":5002", 0)) {
        (true, false) => [0, 2],
        (false, true) => [2, 0],
        _ => bail!("the connections are not divided in turn: {listing}"),
    };
    let router = site.router.as_ref().context("the site has no router")?;
    router.sh(&format!("ip route replace {vip}/32 via {TWO}"))?;
    let client = "198.51.100.100";
    let send = || -> Result<()> {
        let words = ["-e", SEND, &vip, "5002", "2", "3000"];
        site.client.run("perl", &words)?;
        for port in ["5001", "5002"] {
            let words = ["-e", UNREACHABLE, &vip, client, port];
            site.client.run("perl", &words)?;
        }
        Ok(())
    };
    let all = |counter| -> Result<Vec<u64>> {
        let servers = site.servers.iter();
        servers.map(|server| seen(server, counter)).collect()
    };
    let least = |counts: Result<Vec<u64>>, least: [u64; 2]| {
        counts.is_ok_and(|counts| {
            counts
                .iter()
                .zip(least)
                .all(|(count, least)| *count >= least)
        })
    };
    let came = || least(all("whole"), whole) && least(all("error"), [1, 1]);
    let arrived = || format!("{:?} {:?}", all("whole"), all("error"));
    let rounds = common::send_until(
        "datagrams and ICMP errors to reach their servers",
        PATIENCE,
        send,
        came,
    )
    .with_context(|| format!("{} {:?}", arrived(), site.lvsadm_on(&second, "drops")))?;
    let most = |counts: Vec<u64>, most: [u64; 2]| {
        let mut pairs = counts.iter().zip(most);
        pairs.all(|(count, most)| *count <= rounds * most)
    };
    ensure!(
        most(all("whole")?, whole) && most(all("error")?, [1, 1]),
        "the wrong server received datagrams or ICMP errors, or a server received them twice: {}",
        arrived()
    );
    Ok(())
}
