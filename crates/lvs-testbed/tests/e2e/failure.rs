//! Processes, interfaces and connections that end and start again; invalid packets and arguments.

use crate::common;

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, SiteOptions, Vip, programs, soon, wait_until};
use nix::sys::signal::Signal;

#[test]
fn stopped_or_killed_dataplane_leaves_host_as_before() -> Result<()> {
    for vip in [Vip::Host, Vip::Dataplane] {
        let mut options = SiteOptions::with_servers("ends", Forward::Nat, 2);
        options.vip = vip;
        let mut site = lvs_testbed::Site::new(options)?;
        let before = common::host_state(&site)?;
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            site.start_dataplane(&[])?;
            site.add_service(80, "rr")?;
            let load = site.load_of(20);
            common::ok(site.client.load(&load)?, 20)?;
            ensure!(
                common::host_state(&site)? != before,
                "{vip:?}, {signal}: the running dataplane has no shield"
            );
            let mut dataplane = site.dataplane.take().context("no dataplane was started")?;
            let status = dataplane.stop(signal)?;
            ensure!(
                signal == Signal::SIGKILL || status.success(),
                "{vip:?}, {signal}: the dataplane failed at its exit: {status}: {}",
                dataplane.log()
            );
            common::wait_for_host_state(&site, &before)
                .with_context(|| format!("{vip:?}, {signal}"))?;
        }
    }
    Ok(())
}

/// A client that sends one request at the start and one for each line of its input, and reconnects
/// after a failure.
const ASKED: &str = r#"
use IO::Socket::INET; $| = 1; $SIG{PIPE} = 'IGNORE';
my $s;
sub ask {
    $s //= IO::Socket::INET->new(PeerAddr => $ARGV[0], PeerPort => 80) or die $@;
    syswrite $s, "GET /id HTTP/1.1\r\nHost: x\r\n\r\n";
    my $answer = '';
    until ($answer =~ /rs\d\n$/) {
        my $read = sysread $s, $answer, 4096, length $answer;
        next if $read;
        print defined $read ? "closed\n" : "$!\n";
        undef $s;
        return ask();
    }
    print "answered\n";
}
ask();
ask() while <STDIN>;
"#;

#[test]
fn dataplane_without_inherited_state_serves_new_and_resets_old_connections() -> Result<()> {
    let mut site = common::site(SiteOptions::with_servers("again", Forward::Nat, 2))?;
    site.add_service(80, "rr")?;
    let rules = site.testbed.dir().join("rules");
    fs::write(&rules, site.lvsadm("-S -n")?)?;

    // The client sends requests over one connection; the dataplane is killed and restarted between
    // two of them.
    let vip = site.vip.to_string();
    let mut old = site.client.spawn("perl", &["-e", ASKED, &vip])?;
    let says = |old: &Proc, lines: &str| {
        soon(&format!("the client to print {lines:?}"), || {
            old.log() == lines
        })
        .with_context(|| old.log())
    };
    says(&old, "answered\n")?;
    site.dataplane
        .as_mut()
        .context("no dataplane was started")?
        .kill();
    let path = rules.display().to_string();
    site.start_dataplane(&["--rules", &path, "--fast-path", "off"])?;

    // New connections work at once.
    let load = site.load_of(94);
    common::ok(site.client.load(&load)?, 94)?;
    // The host resets the connection, which the new dataplane does not know, and the client
    // connects again. The same happens after a reboot of an IPVS director.
    old.send("again\n")?;
    says(&old, "answered\nConnection reset by peer\nanswered\n")
}

#[test]
fn interface_is_used_again_after_link_down_or_removal() -> Result<()> {
    let mut site = common::site(SiteOptions::with_servers("away", Forward::Nat, 2))?;
    site.add_service(80, "rr")?;
    let mut load = site.load_of(20);
    common::ok(site.client.load(&load)?, 20)?;
    load.timeout_ms = 5000;

    let (director, client) = (site.director.clone(), site.client.clone());
    let come_back = |what: &str| -> Result<()> {
        wait_until(
            &format!("traffic to flow after {what}"),
            Duration::from_secs(30),
            || client.load(&load).is_ok_and(|report| report.failed == 0),
        )
    };
    director.sh("ip link set eth1 down")?;
    std::thread::sleep(Duration::from_millis(300));
    director.sh("ip link set eth1 up")?;
    come_back("the interface was set down and up")?;

    director.sh(&format!("ip link set eth1 netns {}", client.pid()))?;
    std::thread::sleep(Duration::from_millis(300));
    client.sh(&format!("ip link set eth1 netns {}", director.pid()))?;
    director.sh("ip addr add 10.0.0.1/24 dev eth1; ip link set eth1 up")?;
    come_back("the interface was removed and added again")?;
    ensure!(site.dataplane.as_mut().is_some_and(Proc::is_running));
    Ok(())
}

/// Starts a dataplane that must refuse to run, and returns its message.
fn refused(site: &lvs_testbed::Site, before: &[&str], arguments: &[&str]) -> Result<String> {
    let dataplane = programs::find("lvs-dataplane")?.display().to_string();
    let mut words: Vec<&str> = before.to_vec();
    words.push(&dataplane);
    words.extend_from_slice(arguments);
    let mut dataplane = site.director.spawn(words[0], &words[1..])?;
    let status = dataplane.wait(Duration::from_secs(10))?;
    let text = dataplane.log();
    println!("{arguments:?}: {status}: {text}");
    ensure!(
        !status.success(),
        "the dataplane exited without an error: {text}"
    );
    ensure!(
        !text.contains("panicked"),
        "unexpected `panicked` in {text}"
    );
    Ok(text)
}

#[test]
fn dataplane_that_cannot_run_reports_reason() -> Result<()> {
    let mut site = common::site(SiteOptions::with_servers("refused", Forward::Nat, 1))?;

    let text = refused(&site, &[], &["--interface", "eth0"])?;
    ensure!(
        text.contains("another dataplane is running"),
        "the second dataplane does not report the first: {text}"
    );
    site.add_service(80, "rr")?;
    let load = site.load_of(20);
    common::ok(site.client.load(&load)?, 20)?;
    site.dataplane = None;

    for name in ["no/pe0", "a-name-that-is-too-long", "eth0.7=10.7.0.1/24"] {
        let text = refused(&site, &[], &["--interface", name])?;
        ensure!(
            text.contains(name),
            "the message does not name the unusable interface: {text}"
        );
    }
    let caps = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"];
    let text = refused(&site, &caps, &["--interface", "eth0"])?;
    ensure!(
        text.contains("CAP_NET") || text.contains("root"),
        "the message does not name the missing privileges: {text}"
    );
    let text = refused(&site, &[], &["--rules", "/nonexistent"])?;
    ensure!(text.contains("/nonexistent"), "no `/nonexistent` in {text}");

    // A socket file of a killed dataplane does not prevent the start.
    let socket = site
        .testbed
        .dir()
        .join("dataplane.sock")
        .display()
        .to_string();
    for _ in 0..2 {
        let mut dataplane = site.director.spawn(
            programs::find("lvs-dataplane")?,
            &[
                "--interface",
                "eth0",
                "--interface",
                "eth1",
                "--socket",
                &socket,
            ],
        )?;
        soon("lvsadm to be answered", || {
            site.lvsadm(&format!("--socket {socket} -L -n")).is_ok()
        })
        .with_context(|| dataplane.log())?;
        dataplane.kill();
    }
    Ok(())
}

#[test]
fn refused_lvsadm_commands_change_nothing() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("rules", Forward::Nat, 1))?;
    site.add_service(80, "rr")?;
    let before = site.lvsadm("-S -n")?;
    let (service, server) = (site.service(80), site.real_address(0));
    for arguments in [
        format!("-A -t {service} -s rr"),
        format!("-A -t {} -s nonsense", site.service(81)),
        format!("-a -t {service} -r {server}:80 -m"),
        format!("-a -t {} -r {server}:80 -m", site.service(81)),
        format!("-d -t {service} -r 10.0.0.99:80"),
        format!("-a -t {service} -r {server}:8080 -m -w -1"),
        "-A -t 192.0.2.10 -s rr".to_owned(),
    ] {
        ensure!(
            site.lvsadm(&arguments).is_err(),
            "lvsadm {arguments} succeeded"
        );
        ensure!(
            site.lvsadm("-S -n")? == before,
            "lvsadm {arguments} changed the configuration"
        );
    }
    Ok(())
}

/// A neighbour sends truncated frames, frames with wrong lengths, and frames with each byte
/// changed, during valid traffic.
#[test]
fn invalid_frames_do_not_stop_dataplane_or_traffic() -> Result<()> {
    let mut site = common::site(SiteOptions::with_servers("frames", Forward::Nat, 1))?;
    site.add_service(80, "rr")?;
    let load = site.load_of(0);
    let steady = site.client.steady_load(&load)?;
    // After the first answer, the client has resolved the link-layer address.
    steady.wait_for_more(1)?;
    let script = format!(
        r#"
        mac=$(ip neigh show {vip} | sed 's/.*lladdr \([0-9a-f:]*\).*/\1/')
        own=$(cat /sys/class/net/eth0/address)
        index=$(cat /sys/class/net/eth0/ifindex)
        perl -MSocket -e '
        my ($mac, $own, $index) = @ARGV;
        my @a = map {{ pack("H12", s/://gr) }} $mac, $own;
        socket(S, 17, SOCK_RAW, 0) or die $!;
        my $to = pack("SnlSCCa8", 17, 0x0800, $index, 0, 0, 6, $a[0]);
        my $tcp = pack("nnNNCCnnn", 4000, 80, 1, 0, 0x50, 2, 1000, 0, 0) . ("x" x 20);
        my $udp = pack("nnnn", 4000, 80, 28, 0) . ("x" x 20);
        my $icmp = pack("CCnN", 3, 4, 0, 1400) . pack("CCnnnCCna4a4nnN", 0x45, 0, 40, 1, 0, 64, 6, 0, inet_aton("{vip}"), inet_aton("{client}"), 80, 4000, 1);
        my $count = 0;
        for my $part ([6, $tcp], [17, $udp], [1, $icmp], [4, $tcp]) {{
            my $ip = pack("CCnnnCCna4a4", 0x45, 0, 20 + length $part->[1], 7, 0, 64, $part->[0], 0, inet_aton("{client}"), inet_aton("{vip}"));
            my $sum = 0; $sum += $_ for unpack("n*", $ip); $sum = ($sum & 0xffff) + ($sum >> 16) while $sum >> 16;
            substr($ip, 10, 2) = pack("n", ~$sum & 0xffff);
            my $frame = $a[0] . $a[1] . pack("n", 0x0800) . $ip . $part->[1];
            for my $length (14 .. length $frame) {{ send(S, substr($frame, 0, $length), 0, $to) and $count++; }}
            for my $at (14 .. length($frame) - 1) {{
                for my $value (0, 1, 0x0f, 0x40, 0x7f, 0x80, 0xff) {{
                    my $bad = $frame; substr($bad, $at, 1) = chr $value;
                    send(S, $bad, 0, $to) and $count++;
                }}
            }}
        }}
        print $count;' "$mac" "$own" "$index""#,
        vip = site.vip,
        client = common::client_address(&site)?,
    );
    let sent: u64 = site.client.sh(&script)?.trim().parse()?;
    ensure!(sent > 1000, "only {sent} frames were sent");
    steady.finish_ok()?;
    let dataplane = site
        .dataplane
        .as_mut()
        .context("no dataplane was started")?;
    ensure!(
        dataplane.is_running() && !dataplane.log().contains("panicked"),
        "the dataplane exited or panicked: {}",
        dataplane.log()
    );
    Ok(())
}

/// Another host announces the VIP; the director announces it again.
#[test]
fn arp_announcement_of_vip_by_another_host_is_answered() -> Result<()> {
    let mut options = SiteOptions::with_servers("claim", Forward::Dr, 2);
    options.vip = Vip::Dataplane;
    let mut site = lvs_testbed::Site::new(options)?;
    let router = site
        .router
        .clone()
        .context("the one-arm site has a router")?;
    site.start_dataplane(&[])?;
    site.add_service(80, "rr")?;
    let load = site.load_of(10);
    common::ok(site.client.load(&load)?, 10)?;
    let ours = site.director.sh("cat /sys/class/net/eth0/address")?;
    let (ours, theirs) = (ours.trim(), "02:00:00:00:77:09");
    let known = |mac: &str| {
        let text = router.run("ip", &["neigh", "show", &site.vip.to_string()]);
        text.is_ok_and(|text| text.contains(mac))
    };
    ensure!(
        known(ours),
        "the router has no neighbour entry for the director"
    );
    let monitor = router.spawn("ip", &["monitor", "neigh"])?;
    // The first reported event shows that the program listens.
    let something = "ip neigh replace 192.0.2.250 lladdr 02:00:00:00:77:08 dev eth1; \
                     ip neigh del 192.0.2.250 dev eth1";
    soon("the monitor to listen", || {
        router.sh(something).is_ok() && !monitor.log().is_empty()
    })?;
    let other = &site.servers[1];
    other.sysctl("ipv4/conf/eth0/arp_notify", "1")?;
    other.sh(&format!(
        "ip addr del {0}/32 dev lo; ip addr add {0}/32 dev eth0",
        site.vip
    ))?;
    let are_received = || {
        let log = monitor.log();
        let vip = format!("{} ", site.vip);
        let mut lines = log.lines().filter(|line| line.starts_with(&vip));
        // The lines are in order; the director's line is the last.
        lines.any(|line| line.contains(theirs)) && lines.any(|line| line.contains(ours))
    };
    // The host announces the VIP each time its link-layer address is set. The director answers at
    // most once in 10 s.
    let announce = format!("ip link set eth0 address {theirs}");
    let output = soon("the router to receive both announcements", || {
        other.sh(&announce).is_ok()
            && wait_until("the announcements", 6 * common::IN_TIME, are_received).is_ok()
    });
    output.with_context(|| monitor.log())?;
    ensure!(
        known(ours),
        "the router's neighbour entry is not the director's any more"
    );
    Ok(())
}

/// The dataplane reports the link-layer address of the other host in its log or to `lvsadm -A`.
#[test]
fn vip_of_another_host_is_reported() -> Result<()> {
    let mut options = SiteOptions::with_servers("conflict", Forward::Dr, 1);
    options.vip = Vip::Dataplane;
    let mut site = lvs_testbed::Site::new(options)?;
    let router = site
        .router
        .clone()
        .context("the one-arm site has a router")?;
    router.sh(&format!("ip addr add {}/32 dev eth1", site.vip))?;
    site.start_dataplane(&[])?;
    let answer = site
        .add_service(80, "rr")
        .err()
        .map(|error| format!("{error:#}"));
    let mac = router.sh("cat /sys/class/net/eth1/address")?;
    let mac = mac.trim();
    let dataplane = site
        .dataplane
        .as_ref()
        .context("no dataplane was started")?;
    let output = || format!("{answer:?} {}", dataplane.log());
    soon(&format!("the dataplane to log {mac}"), || {
        output().contains(mac)
    })
    .with_context(output)
}
