//! Unmodified IPVS programs under `lvs-run`: keepalived with virtual servers, and ipvsadm.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::common;
use anyhow::{Context, Result, ensure};
use lvs_testbed::listing::rows;
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, programs, soon, wait_until};
use nix::sys::signal::Signal;

/// Creates a site with three servers; keepalived uses the last one as sorry server.
fn site(label: &str) -> Result<Site> {
    let mut site = Site::new(SiteOptions::with_servers(label, Forward::Nat, 3))?;
    site.serve("alive", 100)?;
    site.start_dataplane(&[])?;
    Ok(site)
}

/// Writes a configuration of keepalived with the weights of the first two servers.
fn configure(site: &Site, weights: [u32; 2], quorum: u32) -> Result<PathBuf> {
    let mut text = format!(
        "global_defs {{\n  script_user root\n}}\nvirtual_server {} 80 {{\n  delay_loop 1\n  lb_algo wrr\n  lb_kind NAT\n  \
         protocol TCP\n  quorum {quorum}\n  sorry_server {} 80\n",
        site.vip,
        site.real_address(2)
    );
    for (server, weight) in weights.iter().enumerate() {
        write!(
            text,
            "  real_server {} 80 {{\n    weight {weight}\n    TCP_CHECK {{\n      connect_timeout 10\n      retry 0\n    }}\n  }}\n",
            site.real_address(server)
        )?;
    }
    text.push_str("}\n");
    let file = site.testbed.dir().join("keepalived.conf");
    fs::write(&file, text)?;
    Ok(file)
}

fn keepalived(site: &Site, file: &std::path::Path) -> Result<Proc> {
    let pid = |name: &str| site.testbed.dir().join(name).display().to_string();
    let (parent, checkers) = (pid("keepalived.pid"), pid("checkers.pid"));
    let file = file.display().to_string();
    let arguments = [
        "--",
        "keepalived",
        "--dont-fork",
        "--log-console",
        "--check",
        "--use-file",
        &file,
        "--pid",
        &parent,
        "--checkers_pid",
        &checkers,
    ];
    let launcher = programs::find("lvs-run")?;
    site.director
        .spawn(launcher.display().to_string(), &arguments)
        .context("cannot start keepalived: install the package keepalived")
}

/// Waits until `lvsadm` lists exactly the servers in `expected`: the number of each server, counted
/// from 0, and its weight.
fn wait_listed(site: &Site, program: &Proc, expected: &[(usize, u64)]) -> Result<()> {
    common::wait_listed(site, || site.lvsadm("-L -n"), expected).with_context(|| program.log())
}

#[test]
#[ignore = "needs keepalived"]
fn keepalived_under_lvs_run_removes_dead_servers_reloads_and_stops() -> Result<()> {
    let mut site = site("lvsrun")?;
    let file = configure(&site, [2, 1], 1)?;
    let mut program = keepalived(&site, &file)?;
    wait_listed(&site, &program, &[(0, 2), (1, 1)])?;
    ensure!(common::answering(&site)? == ["rs1", "rs2"]);

    // A dead server is removed, and the sorry server replaces the last one.
    site.programs.remove(0).kill();
    wait_listed(&site, &program, &[(1, 1)])?;
    ensure!(common::answering(&site)? == ["rs2"]);
    site.programs.remove(0).kill();
    wait_listed(&site, &program, &[(2, 1)])?;
    ensure!(common::answering(&site)? == ["rs3"]);
    for server in 0..2 {
        let revived = nginx(&site.servers[server], &NginxOptions::default())?;
        site.programs.push(revived);
    }
    wait_listed(&site, &program, &[(0, 2), (1, 1)])?;

    // A reload changes a weight.
    configure(&site, [5, 1], 1)?;
    program.signal(Signal::SIGHUP)?;
    wait_listed(&site, &program, &[(0, 5), (1, 1)])?;
    ensure!(program.is_running(), "keepalived exited: {}", program.log());

    // The quorum needs both servers: the sorry server replaces the remaining one.
    configure(&site, [5, 1], 6)?;
    program.signal(Signal::SIGHUP)?;
    let last = site.programs.pop();
    last.context("no program was started on the second server")?
        .kill();
    wait_listed(&site, &program, &[(2, 1)])?;

    let status = program.stop(Signal::SIGTERM)?;
    soon("keepalived to remove its services", || {
        site.lvsadm("-L -n")
            .is_ok_and(|text| rows(&text).is_empty())
    })
    .with_context(|| format!("{status}: {}", program.log()))
}

/// A keepalived that continued without `lvs-run` would leave dead servers in the table.
#[test]
#[ignore = "needs keepalived"]
fn keepalived_exits_when_its_lvs_run_is_killed() -> Result<()> {
    let site = site("lvsrunkill")?;
    let file = configure(&site, [2, 1], 1)?;
    let mut program = keepalived(&site, &file)?;
    wait_listed(&site, &program, &[(0, 2), (1, 1)])?;
    // Of all processes in this network namespace, only the supervisor has several threads.
    site.director.sh(
        "for p in /proc/[0-9]*; do \
           [ \"$(cat $p/comm)\" = lvs-run ] && [ $(ls $p/task | wc -l) -gt 1 ] && \
           [ \"$(readlink $p/ns/net)\" = \"$(readlink /proc/self/ns/net)\" ] && kill -9 ${p#/proc/}; \
         done 2>/dev/null; true",
    )?;
    program.wait(Duration::from_secs(20))?;
    Ok(())
}

/// Runs the tests of the library that kube-proxy and dockerd use, in a static Go program. The
/// library accepts only replies from the kernel's netlink port.
#[test]
#[ignore = "by hand: needs the tests of moby/ipvs (make test-kubernetes)"]
fn moby_ipvs_library_under_lvs_run_passes_its_own_tests() -> Result<()> {
    let program = std::env::var("LVS_MOBY_IPVS")
        .context("LVS_MOBY_IPVS is not set to a program; run `make test-kubernetes`")?;
    let site = site("lvsrunmoby")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let names = site.director.sh(&format!("{program} -test.list ."))?;
    let names: Vec<&str> = names.lines().collect();
    for expected in ["TestService", "TestDestination", "TestTimeouts"] {
        ensure!(names.contains(&expected), "no {expected:?} in {names:?}");
    }
    for name in names {
        // The tests leave services behind.
        site.lvsadm("-C")?;
        let run = format!("{launcher} -- {program} -test.v -test.run '^{name}$' 2>&1 || true");
        let printed = site.director.sh(&run)?;
        ensure!(
            printed.contains(&format!("--- PASS: {name} ")),
            "a test of the library failed: {name}: {printed}"
        );
    }
    Ok(())
}

/// ipvsadm configures the dataplane through netlink: directly, from a shell, and below a second
/// `lvs-run`. Without CAP_NET_ADMIN, it is refused.
#[test]
fn services_added_by_ipvsadm_are_listed_by_lvsadm() -> Result<()> {
    let site = site("lvsrunadm")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let service = site.service(80);
    let run = |command: &str| site.director.sh(&format!("{launcher} -- {command}"));
    run(&format!("ipvsadm -A -t {service} -s wrr"))?;
    run(&format!(
        "sh -c 'ipvsadm -a -t {service} -r {} -m -w 3'",
        site.real_address(0)
    ))?;
    let (theirs, ours) = (run("ipvsadm -Ln")?, site.lvsadm("-L -n")?);
    ensure!(
        theirs == ours,
        "ipvsadm and lvsadm list different services: {theirs}\n{ours}"
    );
    let nested = run(&format!("{launcher} -- ipvsadm -Ln"))?;
    ensure!(
        nested == ours,
        "ipvsadm below a second lvs-run lists other services: {nested}"
    );
    ensure!(common::answering(&site)? == ["rs1"]);
    let refused = run("setpriv --bounding-set=-net_admin ipvsadm -Ln 2>&1 || true")?;
    ensure!(
        refused.contains("Can't initialize ipvs"),
        "no `Can't initialize ipvs` in {refused}"
    );
    // A program with a low limit of open files cannot use the netlink sockets of `lvs-run`, and
    // falls back to the socket options of IPVS. The listings are equal as soon as the last packets
    // of the clients are handled.
    let mut both = (String::new(), String::new());
    soon("the listings to be equal", || {
        let few = run("sh -c 'ulimit -n 512; ipvsadm -Ln'");
        let ours = site.lvsadm("-L -n");
        both = (few.unwrap_or_default(), ours.unwrap_or_default());
        both.0 == both.1 && both.0.contains(&service.to_string())
    })
    .with_context(|| format!("{both:?}"))?;
    // `lvs-run` exits with the program's status.
    let status = site.director.sh(&format!(
        "{launcher} -- ipvsadm -D -t 192.0.2.99:80 2>&1 || echo $?; {launcher} -- /no/such/program 2>/dev/null || echo $?"
    ))?;
    ensure!(
        status == "No such service\n255\n127\n",
        "the output is not `No such service / 255 / 127`: {status}"
    );
    Ok(())
}

/// Servers see the local address, while ipvsadm lists NAT. Without a local address, ipvsadm reports
/// an error.
#[test]
fn nat_server_added_under_lvs_run_with_fullnat_uses_full_nat() -> Result<()> {
    let mut site = site("lvsrunfull")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let (service, server) = (site.service(80), site.real_address(0));
    let run = |site: &Site, command: &str| {
        let command = format!("{launcher} --fullnat -- ipvsadm {command}");
        site.director.sh(&command)
    };
    let add = format!("-a -t {service} -r {server}:80 -m");
    run(&site, &format!("-A -t {service} -s rr"))?;
    ensure!(run(&site, &add).is_err());
    site.start_dataplane(&["--local-address", "10.0.0.1"])?;
    run(&site, &format!("-A -t {service} -s rr"))?;
    run(&site, &add)?;
    run(&site, &format!("-e -t {service} -r {server}:80 -m -w 3"))?;
    let rules = site.lvsadm("-S -n")?;
    ensure!(
        rules.contains("--fullnat -w 3"),
        "no `--fullnat -w 3` in {rules}"
    );
    let listed = run(&site, "-Ln")?;
    ensure!(listed.contains(" Masq    3 "), "no ` Masq 3 ` in {listed}");
    let seen = site
        .client
        .sh(&format!("curl -sS -f -m 60 http://{}/addr", site.vip))?;
    ensure!(
        seen.trim() == "10.0.0.1",
        "the server sees another client address than 10.0.0.1: {seen}"
    );
    Ok(())
}

/// Some programs use the socket options of IPVS instead of netlink.
#[test]
fn lvs_run_answers_ipvs_socket_options() -> Result<()> {
    let site = site("lvsrunopt")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    site.add_service(80, "rr")?;
    let info = r#"perl -MSocket -e 'socket(S, AF_INET, SOCK_RAW, 255) or die "$!"; my $i = getsockopt(S, 0, 1153) or die "$!"; print join(" ", unpack("L3", $i))'"#;
    let counted = site.director.sh(&format!("{launcher} -- {info}"))?;
    ensure!(
        counted == "66049 4096 1",
        "the version, table size and number of services are not `66049 4096 1`: {counted:?}"
    );
    let flush = r#"perl -MSocket -e 'socket(S, AF_INET, SOCK_RAW, 255) or die "$!"; setsockopt(S, 0, 1157, "") or die "$!"'"#;
    site.director.sh(&format!("{launcher} -- {flush}"))?;
    let listing = site.lvsadm("-L -n")?;
    ensure!(rows(&listing).is_empty(), "services are left: {listing}");
    Ok(())
}

/// All users see the IPVS files in `/proc`, but only in the program's mount namespace.
#[test]
fn ipvs_proc_files_are_visible_only_under_lvs_run() -> Result<()> {
    let site = site("lvsrunproc")?;
    site.add_service(80, "rr")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let run = |command: &str| site.director.sh(&format!("{launcher} -- {command}"));
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";

    ensure!(common::answering(&site)? == ["rs1", "rs2", "rs3"]);
    soon("ipvsadm to list a connection", || {
        run("ipvsadm -Lnc").is_ok_and(|text| text.contains(&site.vip.to_string()))
    })
    .with_context(|| run("ipvsadm -Lnc 2>&1").unwrap_or_default())?;
    let services = run(&format!("{nobody} cat /proc/net/ip_vs"))?;
    ensure!(
        services.lines().count() == 3 + 1 + 3,
        "not all services and servers are listed: {services}"
    );
    let stats = run("head -qn 1 /proc/net/ip_vs_stats /proc/net/ip_vs_stats_percpu")?;
    ensure!(
        stats.matches("Total Incoming Outgoing").count() == 2,
        "not both tables of counters are printed: {stats}"
    );

    // All other files are those of the kernel.
    let same = "cmp /proc/net/if_inet6 /proc/self/net/if_inet6 && ls -A /proc/net/ /proc/sys/net/ipv4/ && \
                cat /proc/sys/net/ipv4/ip_forward && test ! -e /proc/net/none";
    let listed = run(&format!("{nobody} sh -c '{same}'"))?;
    ensure!(
        listed.contains("ip_vs_conn\n") && listed.contains("\nvs\n"),
        "no `ip_vs_conn` or no `vs` in {listed}"
    );
    ensure!(
        !listed.contains(".lvs-run"),
        "unexpected `.lvs-run` in {listed}"
    );
    let outside = site.director.sh("readlink /proc/net")?;
    ensure!(
        outside == "self/net\n",
        "outside of lvs-run, /proc/net does not point to `self/net`: {outside}"
    );

    // Only root can write sysctls; other users can read them.
    let set = "cd /proc/sys/net/ipv4/vs; echo 1 > conntrack; cat conntrack; sysctl -n net.ipv4.vs.sync_threshold; \
               echo x > conntrack || cat conntrack";
    let values = run(&format!("sh -c '{set}' 2>/dev/null"))?;
    ensure!(
        values == "1\n3\t50\n1\n",
        "the values of the sysctls are not `1 / 3\t50 / 1`: {values:?}"
    );
    let set = "sh -c 'echo 0 | tee /proc/sys/net/ipv4/vs/conntrack' 2>&1";
    let refused = run(&format!("{nobody} {set} || true"))?;
    ensure!(
        refused.contains("Permission denied"),
        "no `Permission denied` in {refused}"
    );
    let refused = run(&format!("setpriv --bounding-set=-net_admin {set} || true"))?;
    ensure!(
        refused.contains("Operation not permitted"),
        "no `Operation not permitted` in {refused}"
    );
    ensure!(run("cat /proc/sys/net/ipv4/vs/conntrack")? == "1\n");

    // The other network namespace has no dataplane.
    let other = run(
        "unshare --net sh -c 'cmp /proc/net/if_inet6 /proc/self/net/if_inet6 && cat /proc/net/ip_vs' 2>&1 || true",
    )?;
    ensure!(
        other.contains("No such device"),
        "no `No such device` in {other}"
    );

    // A container without root has its own /proc.
    let own = format!(
        "{nobody} unshare --user --map-root-user --pid --fork --mount-proc readlink /proc/net 2>&1 || true"
    );
    let (inside, outside) = (run(&own)?, site.director.sh(&own)?);
    ensure!(
        inside == outside,
        "a container under lvs-run has another /proc/net than outside: {inside}{outside}"
    );
    Ok(())
}

/// `lvs-run` adds the services of ipvsadm or keepalived to a restarted dataplane.
#[test]
fn lvs_run_restores_services_in_restarted_dataplane() -> Result<()> {
    let mut site = site("lvsrunagain")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let service = site.service(80);
    let script = format!(
        "ipvsadm -A -t {service} -s wrr && ipvsadm -a -t {service} -r {}:80 -m -w 3 && ipvsadm --set 100 20 30 && exec sleep 600",
        site.real_address(0)
    );
    let mut program = site
        .director
        .spawn(&launcher, &["--", "sh", "-c", &script])?;
    let timeouts = |site: &Site| site.lvsadm("-L --timeout").unwrap_or_default();
    let patience = Duration::from_secs(30);
    wait_until("the dataplane to have the timeouts", patience, || {
        timeouts(&site).contains("100 20 30")
    })
    .with_context(|| program.log())?;
    let before = site.lvsadm("-S -n")?;
    site.dataplane
        .take()
        .context("no dataplane was started")?
        .kill();
    site.start_dataplane(&[])?;
    wait_until("the new dataplane to have the services", patience, || {
        site.lvsadm("-S -n").is_ok_and(|text| text == before)
            && timeouts(&site).contains("100 20 30")
    })
    .with_context(|| format!("{before}\n{:?}\n{}", site.lvsadm("-S -n"), program.log()))?;
    program.kill();
    Ok(())
}

/// If lvsd and keepalived changed the same services, each would revert the other's changes.
#[test]
fn ipvsadm_change_is_refused_while_lvsd_manages_services() -> Result<()> {
    let site = site("lvsrunlock")?;
    let launcher = programs::find("lvs-run")?.display().to_string();
    let file = site.testbed.dir().join("lvsd.toml");
    fs::write(
        &file,
        format!(
            "[[service]]\naddress = \"{}:80\"\nforward = \"nat\"\ncheck = \"none\"\nservers = [\"{}:80\"]\n",
            site.vip,
            site.real_address(0)
        ),
    )?;
    let lvsd = programs::find("lvsd")?.display().to_string();
    let file = file.display().to_string();
    let state = site.testbed.dir().join("state").display().to_string();
    fs::create_dir_all(&state)?;
    let words = ["--config", &file, "--state", &state];
    let program = site.director.spawn(&lvsd, &words)?;
    soon("the dataplane to have lvsd's service", || {
        site.lvsadm("-L -n")
            .is_ok_and(|text| rows(&text).len() == 2)
    })
    .with_context(|| program.log())?;
    let listed = site.director.sh(&format!("{launcher} -- ipvsadm -Ln"))?;
    ensure!(
        rows(&listed).len() == 2,
        "the service or its server is missing: {listed}"
    );
    let refused = site
        .director
        .sh(&format!("! {launcher} -- ipvsadm -C 2>&1"))?;
    ensure!(
        site.lvsadm("-L -n")? == listed,
        "the refused command changed services: {refused}"
    );
    Ok(())
}
