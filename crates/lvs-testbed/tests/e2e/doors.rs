//! Control sockets with hostile or faulty peers: users without rights, clients that do not read,
//! and dataplanes that hang.

use crate::common;

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, programs, soon, wait_until};
use nix::sys::signal::Signal;

/// Command that runs a program without capabilities and with the user id of `nobody`.
const NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--",
];
/// Command that runs a program as root without capabilities.
const BARE_ROOT: [&str; 4] = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"];

fn site(label: &str) -> Result<Site> {
    Site::new(SiteOptions::with_servers(label, Forward::Nat, 2))
}

/// Runs `lvsadm` through the launcher program; returns its output, or its error.
fn lvsadm_by(site: &Site, launcher: &[&str], arguments: &str) -> Result<String> {
    let program = programs::find("lvsadm")?.display().to_string();
    let mut words = launcher.to_vec();
    words.push(&program);
    words.extend(arguments.split_ascii_whitespace());
    site.director.run(words[0], &words[1..])
}

fn refused_by(site: &Site, launcher: &[&str], arguments: &str) -> Result<String> {
    match lvsadm_by(site, launcher, arguments) {
        Ok(output) => anyhow::bail!("lvsadm {arguments} was not refused by {launcher:?}: {output}"),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// Starts a process that listens at the abstract socket `name`. Any user can bind such a name.
fn squat(site: &Site, launcher: &[&str], name: &str) -> Result<Proc> {
    let program = programs::own()?.display().to_string();
    let mut words = launcher.to_vec();
    words.extend([&*program, "dataplane", name]);
    let squatter = site.director.spawn(words[0], &words[1..])?;
    soon("the socket name to be in use", || {
        squatter.log().contains("ready at")
    })
    .with_context(|| squatter.log())?;
    Ok(squatter)
}

/// Returns a launcher: a shell that runs `script`, whose parameters are the command line of a
/// program.
fn stderr_to(script: &str) -> [String; 4] {
    ["sh", "-c", script, "sh"].map(str::to_owned)
}

fn requests(site: &Site, count: u64) -> Result<()> {
    let load = site.load_of(count);
    common::ok(site.client.load(&load)?, count).map(drop)
}

#[test]
fn log_without_reader_or_on_full_disk_breaks_no_request() -> Result<()> {
    let mut site = site("log")?;
    let fifo = site.testbed.dir().join("log").display().to_string();
    let stuff = format!(
        "mkfifo {fifo}; exec 3<>{fifo}; dd if=/dev/zero of={fifo} bs=4096 count=64 oflag=nonblock 2>&-; exec \"$@\" 2>{fifo}"
    );
    for script in ["exec \"$@\" 2>/dev/full", &stuff] {
        let launcher = stderr_to(script);
        let launcher: Vec<&str> = launcher.iter().map(String::as_str).collect();
        let mut words = vec!["env", "LVS_LOG=trace"];
        words.extend(launcher);
        site.start_dataplane_by(&words, &[])?;
        site.add_service(80, "rr")?;
        requests(&site, 40)?;
        let mut open = site.load();
        open.keepalive = true;
        open.pause_ms = 5;
        let steady = site.client.steady_load(&open)?;
        for _ in 0..3 {
            // Each connection causes one log line.
            site.director
                .sh("ip rule add to 198.51.100.1 table 77; ip rule del to 198.51.100.1 table 77; ip addr add 198.51.100.9/32 dev lo; ip addr del 198.51.100.9/32 dev lo")?;
            requests(&site, 40)?;
        }
        steady.finish_ok()?;
        let dataplane = site
            .dataplane
            .as_mut()
            .context("no dataplane was started")?;
        ensure!(dataplane.is_running(), "the dataplane has exited");
        ensure!(dataplane.stop(Signal::SIGTERM)?.success());
    }
    Ok(())
}

#[test]
fn control_socket_rights_depend_on_capabilities_and_groups_not_on_uid() -> Result<()> {
    let mut site = site("rights")?;
    site.start_dataplane(&["--group", "4242"])?;
    let add = format!("-A -t {} -s rr", site.service(81));
    let own = "mark add --source 203.0.113.0/24 --destination 192.0.2.10 --drop";
    let output = refused_by(&site, &BARE_ROOT, own)?;
    ensure!(
        output.contains("does not have CAP_NET_ADMIN"),
        "no `does not have CAP_NET_ADMIN` in {output}"
    );
    let output = refused_by(&site, &["unshare", "-U", "-r", "--"], own)?;
    ensure!(
        output.contains("user namespace that is not the dataplane's"),
        "no `user namespace that is not the dataplane's` in {output}"
    );
    let output = refused_by(&site, &NOBODY, own)?;
    ensure!(
        output.contains("only root with CAP_NET_ADMIN"),
        "no `only root with CAP_NET_ADMIN` in {output}"
    );
    // Users without any right may read the state.
    for launcher in [&BARE_ROOT[..], &["unshare", "-U", "-r", "--"], &NOBODY] {
        let output = refused_by(&site, launcher, &add)?;
        ensure!(
            output.contains("Permission denied (you must be root)"),
            "{launcher:?}: no `Permission denied (you must be root)` in {output}"
        );
        ensure!(lvsadm_by(&site, launcher, "-L -n")?.contains("Scheduler"));
    }
    let member = [&NOBODY[..3], &["--groups=4242", "--inh-caps=-all", "--"]].concat();
    lvsadm_by(&site, &member, &add)?;
    ensure!(
        site.lvsadm("-L -n")?
            .contains(&site.service(81).to_string())
    );

    site.start_dataplane(&["--readers", "4242"])?;
    ensure!(lvsadm_by(&site, &member, "-L -n")?.contains("Scheduler"));
    refused_by(&site, &member, &add)?;
    let output = refused_by(&site, &NOBODY, "-L -n")?;
    ensure!(output.contains("--readers"), "no `--readers` in {output}");
    Ok(())
}

#[test]
fn lvsd_starts_although_other_users_use_its_socket_names() -> Result<()> {
    let site = site("squat")?;
    for launcher in [&NOBODY[..], &BARE_ROOT] {
        let mut squatters = vec![
            squat(&site, launcher, "@lvs-dataplane")?,
            squat(&site, launcher, "@lvsd")?,
        ];
        let output = refused_by(&site, &[], "-L -n")?;
        ensure!(
            output.contains("no dataplane answers"),
            "{launcher:?}: no `no dataplane answers` in {output}"
        );
        let output = refused_by(&site, &[], "--socket @lvs-dataplane -L -n")?;
        ensure!(
            output.contains("it is possibly not a dataplane"),
            "{launcher:?}: no `it is possibly not a dataplane` in {output}"
        );
        // The foreign processes do not answer: the programs must not wait forever for them.
        for squatter in &squatters {
            squatter.signal(Signal::SIGSTOP)?;
        }
        let config = site.testbed.dir().join("lvsd.toml");
        let text = format!(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n[[service]]\naddress = \"{}\"\nforward = \"nat\"\nserver = [{{ address = \"{}:80\" }}]\n",
            site.service(80),
            site.real_address(0)
        );
        fs::write(&config, text)?;
        let mut lvsd = site.director.spawn(
            programs::find("lvsd")?,
            &["--config", &config.display().to_string()],
        )?;
        soon("lvsd to be ready", || lvsd.log().contains("ready:")).with_context(|| lvsd.log())?;
        requests(&site, 20)?;
        // The error message of a second lvsd names the first one.
        let mut second = site.director.spawn(
            programs::find("lvsd")?,
            &["--config", &config.display().to_string()],
        )?;
        ensure!(!second.wait(Duration::from_secs(10))?.success());
        ensure!(
            second.log().contains("another lvsd (pid"),
            "{launcher:?}: no `another lvsd (pid` in {}",
            second.log()
        );
        lvsd.stop_ok(Signal::SIGINT)?;
        for squatter in &mut squatters {
            squatter.kill();
        }
    }
    Ok(())
}

#[test]
fn hung_dataplane_is_replaced_by_lvsd_and_ended_when_lvsd_stops() -> Result<()> {
    let site = site("hang")?;
    let config = site.testbed.dir().join("lvsd.toml");
    let mut text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\nhang_limit = \"5s\"\nfast_path = \"off\"\n[[service]]\naddress = \"{}\"\nforward = \"nat\"\nscheduler = \"rr\"\n",
        site.service(80)
    );
    for index in 0..2 {
        write!(
            text,
            "[[service.server]]\naddress = \"{}:80\"\n",
            site.real_address(index)
        )?;
    }
    fs::write(&config, text)?;
    let start = || {
        site.director.spawn(
            programs::find("lvsd")?,
            &["--config", &config.display().to_string()],
        )
    };
    let dataplane = |lvsd: &Proc| {
        let log = lvsd.log();
        let last = log
            .lines()
            .rev()
            .find(|line| line.contains("the dataplane pid="))
            .map(str::to_owned);
        last.and_then(|line| {
            line.split("pid=")
                .nth(1)?
                .split(' ')
                .next()?
                .parse::<i32>()
                .ok()
        })
        .with_context(|| log)
    };
    let mut lvsd = start()?;
    let replaced = |lvsd: &Proc, hung: i32| {
        wait_until(
            "lvsd to replace the hung dataplane",
            Duration::from_secs(30),
            || {
                dataplane(lvsd).is_ok_and(|pid| pid != hung)
                    && lvsd.log().matches("added ").count() > 0
            },
        )
        .with_context(|| lvsd.log())
    };
    soon("lvsd to log that it is ready", || {
        lvsd.log().contains("ready:")
    })
    .with_context(|| lvsd.log())?;
    requests(&site, 20)?;
    let first = dataplane(&lvsd)?;
    site.director.sh(&format!("kill -STOP {first}"))?;
    replaced(&lvsd, first)?;
    soon("requests to be answered", || requests(&site, 20).is_ok())?;

    // The next lvsd after a crash also stops a hung dataplane that lvsd started.
    let second = dataplane(&lvsd)?;
    lvsd.kill();
    site.director.sh(&format!("kill -STOP {second}"))?;
    let mut lvsd = start()?;
    replaced(&lvsd, second)?;
    soon("requests to be answered again", || {
        requests(&site, 20).is_ok()
    })?;

    // Stopping lvsd also ends a hung dataplane.
    let third = dataplane(&lvsd)?;
    site.director.sh(&format!("kill -STOP {third}"))?;
    lvsd.stop_ok(Signal::SIGINT)?;
    let is_gone = || {
        let all = site.director.sh("ps -eo pid");
        all.is_ok_and(|all| all.split_whitespace().all(|pid| pid != third.to_string()))
    };
    soon("the third dataplane to end", is_gone).with_context(|| lvsd.log())
}

/// A client of the control socket. Its third argument selects its behaviour: `parse` sends requests
/// that are expensive to parse, `list` repeatedly requests the longest listing, and `idle` keeps a
/// connection open.
const HOSTILE: &str = r#"
use IO::Socket::UNIX;
my ($path, $seconds, $what) = @ARGV;
$SIG{PIPE} = 'IGNORE';
$| = 1;
my $hello = qq({"id":1,"method":"hello","params":{"version":1}}\n);
my $end = time + $seconds;
while (time < $end) {
    my $s = IO::Socket::UNIX->new(Peer => $path) or next;
    if ($what eq 'parse') {
        print $s '{"id":1,"method":"service.add","params":[' . ('[],' x 350000) . "[]]}\n";
        print $s $hello . '{"id":2,"method":"service.add","params":[' . ('[],' x 350000) . "[]]}\n";
        $s->flush; shutdown $s, 1; 1 while <$s>;
        print "answered\n";
    } elsif ($what eq 'list') {
        print $s $hello; $s->flush; <$s>;
        while (time < $end) {
            print $s qq({"id":2,"method":"service.list"}\n); $s->flush;
            my $line; do { $line = <$s> } while (defined $line && $line !~ /"(result|error)"/);
            last unless defined $line;
            print "answered\n";
        }
    } else {
        print $s 'x'; $s->flush; <$s>;
    }
}
"#;

/// Starts 33 unprivileged users: a third sends requests that are expensive to parse, a third
/// requests lists, and a third keeps connections open.
fn hostile_users(site: &Site, socket: &str, seconds: &str) -> Result<Vec<Proc>> {
    let script = site.testbed.dir().join("hostile.pl");
    fs::write(&script, HOSTILE)?;
    let script = script.display().to_string();
    let mut users = Vec::new();
    for what in ["parse", "list", "idle"].iter().cycle().take(33) {
        let mut words: Vec<&str> = NOBODY[1..].to_vec();
        words.extend(["perl", &script, socket, seconds, what]);
        users.push(site.director.spawn(NOBODY[0], &words)?);
    }
    Ok(users)
}

/// Peak of the resident memory of a process, in MiB.
fn resident(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    Ok(kib.context("/proc/PID/status has no VmHWM")? / 1024)
}

#[test]
#[ignore = "long"]
fn local_users_without_rights_use_bounded_memory_and_break_no_request() -> Result<()> {
    let mut site = site("users")?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    let mut rules = String::new();
    for service in 0..16 {
        writeln!(rules, "-A -t 198.51.100.{service}:80 -s rr")?;
        for server in 0..1000 {
            writeln!(
                rules,
                "-a -t 198.51.100.{service}:80 -r 10.0.{}.{}:80 -m",
                100 + server / 200,
                1 + server % 200
            )?;
        }
    }
    site.lvsadm_restore(&rules)?;
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?
        .pid();
    let socket = site
        .director
        .sh("ls /run/lvs/netns-$(stat -Lc %i /proc/self/ns/net).sock")?;
    let socket = socket.trim();
    let before = resident(dataplane)?;
    let mut users = hostile_users(&site, socket, "6")?;
    let mut load = site.load();
    load.sizes = vec![1000];
    load.keepalive = true;
    load.pause_ms = 2;
    let steady = site.client.steady_load(&load)?;
    // The clients of both kinds have received answers before memory is measured.
    for kind in 0..2 {
        soon("a hostile user of each kind to have an answer", || {
            let mut alike = users.iter().skip(kind).step_by(3);
            alike.any(|user| user.log().contains("answered"))
        })?;
    }
    steady.wait_for_more(1)?;
    // Opening connections needs the lock that listings hold.
    requests(&site, 200)?;
    // Users with write access still receive answers.
    site.lvsadm("-L -n --stats -t 198.51.100.1:80")?;
    let report = steady.finish_ok()?;
    let taken = resident(dataplane)?.saturating_sub(before);
    println!("peak memory grew by {taken} MiB; {report:?}");
    ensure!(taken <= 64, "peak memory grew by {taken} MiB");
    for user in &mut users {
        user.wait(Duration::from_secs(30))?;
    }
    Ok(())
}
