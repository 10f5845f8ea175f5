//! A killed dataplane: its successor in the same network namespace takes over its state, a
//! dataplane in another namespace does not, and the host does not answer on ports of services while
//! no dataplane runs.

use crate::common;

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, programs, soon};
use nix::sys::signal::Signal;

/// Time limit of each step.
const SOON: Duration = Duration::from_secs(20);
const KERNEL: [&str; 2] = ["--fast-path", "on"];
const HOLDER: [&str; 4] = ["--fast-path", "off", "--warm-restart", "on"];

fn kill(site: &mut Site) -> Result<()> {
    let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
    dataplane.signal(Signal::SIGKILL)?;
    dataplane.wait(SOON).map(drop)
}

/// Options of each available kind of state keeper, including the kernel fast path if it is
/// permitted.
fn ways() -> Result<Vec<&'static [&'static str]>> {
    let kernel = super::fast_path::is_permitted()?.then_some(&KERNEL[..]);
    Ok(kernel.into_iter().chain([&HOLDER[..]]).collect())
}

/// The kernel may reuse the inode number of a removed namespace.
#[test]
fn dataplane_of_removed_namespace_has_no_successor() -> Result<()> {
    super::fast_path::require_permission()?;
    let mut site = Site::new(SiteOptions::new("wr-ns", Forward::Nat))?;
    site.start_dataplane(&KERNEL)?;
    site.add_service(80, "rr")?;
    site.lvsadm("mark add --source 203.0.113.0/24 --drop")?;
    kill(&mut site)?;
    let program = programs::find("lvs-dataplane")?.display().to_string();
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let log = site.director.dir().join("next");
    let log = log.display();
    // The state of the old namespace is moved to the inode number of the new one.
    let script = format!(
        "own=$(stat -Lc %i /proc/self/ns/net); exec unshare -n sh -c '\
         mv /sys/fs/bpf/lvs/'$own' /sys/fs/bpf/lvs/$(stat -Lc %i /proc/self/ns/net) && \
         ip link set lo up && ip link add d0 type veth peer name d1 && ip link set d0 up && \
         {{ {program} --fast-path on >{log} 2>&1 & pid=$!; \
         for n in $(seq 2400); do {lvsadm} -L -n >/dev/null 2>&1 && break; sleep .05; done; \
         {lvsadm} -L -n; {lvsadm} mark list; kill $pid; wait $pid; echo left: $(ls /sys/fs/bpf/lvs); }}'"
    );
    let output = site.director.sh(&script)?;
    let log = fs::read_to_string(site.director.dir().join("next"))?;
    ensure!(
        log.contains("the previous dataplane belonged to a removed network namespace"),
        "no `the previous dataplane belonged to a removed network namespace` in {log}"
    );
    ensure!(
        !log.contains("continues with the state of"),
        "unexpected `continues with the state of` in {log}"
    );
    ensure!(
        !output.contains(":80") && !output.contains("203.0.113"),
        "unexpected `:80` or unexpected `203.0.113` in {output}"
    );
    ensure!(
        output.trim().ends_with("left:"),
        "files of the dataplane are left: {output}"
    );
    Ok(())
}

/// The state of these services and servers is larger than 8 MiB.
#[test]
#[ignore = "long"]
fn successor_takes_over_2_001_services_and_more_than_22_000_servers() -> Result<()> {
    const SERVICES: u32 = 2_000;
    for words in ways()? {
        let mut options = SiteOptions::new("wr-many", Forward::Nat);
        options.paced = Some(60_000);
        let mut site = Site::new(options)?;
        site.start_dataplane_by(&["env", "LVS_LOG=debug"], words)?;
        let mut rules = String::new();
        for n in 0..SERVICES {
            let service = format!("192.18.{}.{}:80", n / 250, 1 + n % 250);
            writeln!(rules, "-A -t {service} -s rr")?;
            for server in 0..11 {
                writeln!(
                    rules,
                    "-a -t {service} -r 10.99.0.{}:{} -m",
                    1 + server,
                    8000 + n
                )?;
            }
        }
        site.lvsadm_restore(&rules)?;
        site.add_service(80, "rr")?;
        let mut load = site.load_of(2);
        load.concurrency = 2;
        load.sizes = vec![60_000 * 60];
        load.timeout_ms = 60_000;
        let client = site.client.clone();
        let running = std::thread::spawn(move || client.load(&load));
        let opened = || {
            let listed = site.lvsadm("-L -n -c");
            listed.is_ok_and(|listed| listed.matches("ESTABLISHED").count() == 2)
        };
        soon("two connections to be established", opened)?;
        let servers = 22_000 + site.servers.len();
        common::says(&site, &format!("servers={servers}"))?;
        kill(&mut site)?;
        site.start_dataplane(words)?;
        let log = common::says(&site, "took over")?;
        ensure!(
            log.contains("services=2001"),
            "{words:?}: no `services=2001` in {log}"
        );
        let report = running
            .join()
            .map_err(|_| anyhow::anyhow!("the thread panicked"))??;
        report.all_ok(2)?;
        let saved = site.lvsadm("-S -n")?;
        let listed = saved.lines().filter(|line| line.starts_with("-a ")).count();
        ensure!(
            listed == servers,
            "{words:?}: {listed} of {servers} servers are listed"
        );
    }
    Ok(())
}

/// Exit status of curl if the connection is refused.
const REFUSED: &str = "7";
const SILENT: &str = "28";

#[test]
fn host_does_not_answer_on_ports_of_address_and_mark_services_without_dataplane() -> Result<()> {
    for words in ways()? {
        let mut site = Site::new(SiteOptions::new("wr-mark", Forward::Nat))?;
        let vip = site.vip;
        site.start_dataplane(words)?;
        site.add_service(80, "rr")?;
        for rule in [
            "--protocol tcp --ports 9005 --host",
            "--protocol tcp --ports 9000-9100 --mark 7",
            "--protocol tcp --ports 443 --mark 8",
        ] {
            site.lvsadm(&format!("mark add --destination {vip} {rule}"))?;
        }
        let server = site.real_address(0);
        site.lvsadm("-A -f 7 -s rr")?;
        site.lvsadm(&format!("-a -f 7 -r {server}:80 -m"))?;
        site.lvsadm(&format!("-A --sctp-service {vip}:36412 -s rr"))?;
        let (client, url) = (site.client.clone(), format!("http://{vip}"));
        let status = |port: u16| -> Result<String> {
            let status = client.sh(&format!(
                "status=0; curl -s -m 1 -o /dev/null {url}:{port}/ || status=$?; echo $status"
            ))?;
            Ok(status.trim().to_owned())
        };
        soon("the mark's service to serve", || {
            status(9001).is_ok_and(|status| status == "0")
        })?;
        kill(&mut site)?;
        for port in [80, 9001, 9100] {
            ensure!(
                status(port)? == SILENT,
                "{words:?}: the host answers port {port}"
            );
        }
        // No rule contains port 81. The kernel fast path passes the packets of port 9005, and of
        // port 443, whose mark has no service, to the host. The state keeper drops packets to the
        // ports of all rules.
        let hosts: &[u16] = match words == KERNEL {
            true => &[81, 9005, 443],
            false => &[81],
        };
        for &port in hosts {
            let is_hosts = || status(port).is_ok_and(|status| status == REFUSED);
            soon(&format!("the host to answer on port {port}"), is_hosts)?;
        }
        let program = programs::find("lvs-dataplane")?;
        site.director
            .sh(&format!("{} --cleanup", program.display()))?;
    }
    Ok(())
}

/// The state of a removed namespace may belong to another tenant; the next dataplane must not use
/// it.
#[test]
fn files_of_removed_namespaces_are_deleted_at_start_of_dataplane() -> Result<()> {
    // The dataplane deletes new files of other namespaces only if it can see all processes.
    super::fast_path::require_permission()?;
    let mut site = Site::new(SiteOptions::new("wr-sweep", Forward::Nat))?;
    // No network namespace has this inode number.
    site.director.sh("mkdir -p -m 755 /run/lvs; \
         for name in sock sock.lock sock.lvsd sock.lvsd.lock sock.7.lvsd.toml; do \
         echo 1 >/run/lvs/netns-12.$name; done")?;
    site.start_dataplane(&[])?;
    soon("the old files to be deleted", || {
        let left = site.director.sh("ls /run/lvs").unwrap_or_default();
        !left.contains("netns-12") && left.contains(".sock.lock")
    })
}
