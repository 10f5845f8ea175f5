//! Several active directors behind a router with BIRD: the scenarios of `lvs-testbed cluster` with
//! small numbers, and the announced routes. The configuration files are those of `examples`, with
//! each director's own addresses.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::cluster::ClusterOptions;
use lvs_testbed::cluster::many::{Scenario, play, play_in_turn};
use lvs_testbed::{Forward, Site, SiteOptions, Vip, soon};

use crate::common;

const DOWNLOADS: u64 = 60;

fn options(forward: Forward, downloads: u64) -> ClusterOptions {
    ClusterOptions {
        forward: forward.word().to_owned(),
        downloads,
        ..ClusterOptions::default()
    }
}

fn nothing_breaks(scenario: Scenario, forward: Forward) -> Result<()> {
    common::nothing_breaks(&[play(scenario, &options(forward, DOWNLOADS))?])
}

#[test]
#[ignore = "needs BIRD"]
fn maintenance_of_one_of_three_directors_keeps_direct_routing_connections() -> Result<()> {
    nothing_breaks(Scenario::Members, Forward::Dr)
}

#[test]
#[ignore = "needs BIRD"]
fn maintenance_of_one_of_three_directors_keeps_ipv6_direct_routing_connections() -> Result<()> {
    let options = ClusterOptions {
        ipv6: true,
        ..options(Forward::Dr, DOWNLOADS)
    };
    common::nothing_breaks(&[play(Scenario::Members, &options)?])
}

#[test]
#[ignore = "needs BIRD"]
fn maintenance_of_one_of_three_directors_keeps_tunnel_connections() -> Result<()> {
    nothing_breaks(Scenario::Members, Forward::Tun)
}

#[test]
#[ignore = "needs BIRD"]
fn tunnel_connections_survive_death_and_return_of_dataplane() -> Result<()> {
    nothing_breaks(Scenario::Dataplane, Forward::Tun)
}

#[test]
#[ignore = "needs BIRD"]
fn direct_routing_directors_are_in_sync_again_after_disconnection() -> Result<()> {
    nothing_breaks(Scenario::Partition, Forward::Dr)
}

#[test]
#[ignore = "needs BIRD"]
fn tunnel_downloads_survive_suspended_dataplane_and_lost_sync_packets() -> Result<()> {
    let scenarios = [Scenario::Stopped, Scenario::Loss];
    let outcomes = play_in_turn(&scenarios, &options(Forward::Tun, 30))?;
    common::nothing_breaks(&outcomes)?;
    let output = outcomes[0].reported.join("\n");
    ensure!(
        output.contains("NOT READY, waits for"),
        "no `NOT READY, waits for` in {output}"
    );
    ensure!(
        outcomes[1].reported.len() == 3,
        "the number of reported problems is not 3: {outcomes:?}"
    );
    Ok(())
}

#[test]
#[ignore = "needs BIRD"]
fn direct_routing_downloads_without_peers_survive_drain_and_maintenance() -> Result<()> {
    let options = options(Forward::Dr, 30);
    common::nothing_breaks(&play_in_turn(&[Scenario::Alone], &options)?)
}

#[test]
#[ignore = "needs BIRD and etcd"]
fn direct_routing_downloads_survive_loss_of_etcd() -> Result<()> {
    nothing_breaks(Scenario::Etcd, Forward::Dr)
}

#[test]
#[ignore = "needs BIRD, FRR and ExaBGP"]
fn maintenance_and_killed_dataplanes_of_frr_and_exabgp_directors_break_no_download() -> Result<()> {
    nothing_breaks(Scenario::Daemons, Forward::Dr)
}

#[test]
#[ignore = "needs BIRD, FRR and ExaBGP"]
fn maintenance_of_frr_and_exabgp_directors_with_tun_backend_breaks_no_download() -> Result<()> {
    nothing_breaks(Scenario::Routed, Forward::Tun)
}

#[test]
#[ignore = "needs BIRD"]
fn tunnel_downloads_survive_killed_bird_and_power_failure() -> Result<()> {
    let scenarios = [Scenario::Bird, Scenario::Power];
    common::nothing_breaks(&play_in_turn(&scenarios, &options(Forward::Tun, 60))?)
}

/// A script that makes one call over the dataplane's control socket, and prints the answer. In a
/// call, `@9@x@` stands for nine times x, separated by commas.
const CALL: &str = r#"
use IO::Socket::UNIX;
my ($path, $method, $params) = @ARGV;
$params =~ s/@(\d+)@(.*?)@/join(',', ($2) x $1)/e;
my $s = IO::Socket::UNIX->new(Peer => $path) or die "$path: $!";
print $s qq({"id":1,"method":"hello","params":{"version":1}}\n);
print $s qq({"id":2,"method":"$method","params":$params}\n);
$s->flush;
<$s>; print scalar <$s>;
"#;

const SOCKET: &str = "/run/lvs-announce-test.sock";

fn announce(site: &Site, addresses: &str, hold: u32) -> Result<String> {
    let params = format!(r#"{{"addresses":[{addresses}],"hold":{hold}}}"#);
    let words = ["-e", CALL, SOCKET, "vips.announce", &params];
    site.director.run("perl", &words)
}

fn routes(site: &Site) -> Result<String> {
    site.director
        .sh("ip route show dev lvs-host0 2>/dev/null || true; ip -6 route show dev lvs-host0 2>/dev/null || true")
}

fn has_route(site: &Site, words: &str) -> bool {
    routes(site).is_ok_and(|routes| routes.contains(words))
}

fn routed(site: &Site, words: &str) -> Result<()> {
    ensure!(
        has_route(site, words),
        "the route is not announced: {words}: {}",
        routes(site)?
    );
    Ok(())
}

fn not_routed(site: &Site, words: &str) -> Result<()> {
    ensure!(
        !has_route(site, words),
        "the route is still announced: {words}: {}",
        routes(site)?
    );
    Ok(())
}

fn site(label: &str) -> Result<Site> {
    let mut options = SiteOptions::new(label, Forward::Dr);
    options.vip = Vip::Routed;
    let mut site = Site::new(options)?;
    site.director.sh("mount -t tmpfs tmpfs /run")?;
    let program = lvs_testbed::programs::find("lvs-dataplane")?;
    let words = ["--interface", "eth0", "--socket", SOCKET];
    site.dataplane = Some(site.director.spawn(program, &words)?);
    soon("the dataplane to answer on its control socket", || {
        site.lvsadm(&format!("--socket {SOCKET} -L -n")).is_ok()
    })?;
    for words in [
        "-A -t 203.0.113.10:80 -s mh".to_owned(),
        format!("-a -t 203.0.113.10:80 -r {}:80 -g", site.real_address(0)),
    ] {
        site.lvsadm(&format!("--socket {SOCKET} {words}"))?;
    }
    Ok(site)
}

#[test]
fn routes_follow_announcements_and_end_with_dataplane() -> Result<()> {
    const VIP: &str = "203.0.113.10";
    let mut site = site("announce-routes")?;
    let both = |standing: &str| {
        format!(
            r#"{{"address":"{VIP}","standing":"{standing}"}},{{"address":"fd00:203::10","standing":"{standing}"}}"#
        )
    };
    announce(&site, &both("announced"), 600)?;
    routed(&site, "203.0.113.10 proto 77")?;
    routed(&site, "fd00:203::10 proto 77")?;
    // No interface has the VIP, but the dataplane answers for it, even echo requests.
    let load = site.load();
    let load = lvs_testbed::LoadOptions {
        requests: 20,
        ..load
    };
    common::ok(site.client.load(&load)?, 20)?;
    site.client.sh(&format!("ping -c 1 -w 60 {VIP}"))?;
    // A host on the link asks for the address; the dataplane does not answer ARP for it.
    let asked = site.servers[1].sh(&format!(
        "ip addr del {VIP}/32 dev lo; ip route add {VIP}/32 dev eth0; ping -c 1 -W 1 {VIP}; ip neigh show {VIP}"
    ));
    ensure!(asked.is_err(), "the dataplane answers ARP: {asked:?}");
    announce(&site, &both("leaving"), 600)?;
    routed(&site, "203.0.113.10 proto 78")?;
    routed(&site, "fd00:203::10 proto 78")?;
    // An announcement without settings keeps the earlier settings.
    announce(&site, &format!(r#"{{"address":"{VIP}"}}"#), 600)?;
    routed(&site, "203.0.113.10 proto 78")?;
    not_routed(&site, "fd00:203::10")?;
    announce(&site, &both("withdrawn"), 600)?;
    not_routed(&site, "proto 7")?;
    // The director still serves packets to a withdrawn address.
    common::ok(site.client.load(&load)?, 20)?;
    // Another program deletes the route.
    announce(&site, &both("announced"), 600)?;
    std::thread::sleep(Duration::from_millis(1200));
    site.director.sh(&format!("ip route del {VIP}/32"))?;
    soon("the route to be announced again", || {
        has_route(&site, "203.0.113.10 proto 77")
    })?;
    // Simulates an lvsd that no longer renews the announcements.
    announce(&site, &both("announced"), 600)?;
    soon("the routers to prefer other directors", || {
        has_route(&site, "203.0.113.10 proto 78")
    })?;
    let output = site.lvsadm(&format!("--socket {SOCKET} sync"))?;
    ensure!(
        output.contains("routers prefer other directors"),
        "no `routers prefer other directors` in {output}"
    );
    ensure!(
        output.contains("check whether lvsd runs"),
        "no `check whether lvsd runs` in {output}"
    );
    announce(&site, &both("announced"), 1)?;
    soon("the routes to be withdrawn", || {
        !has_route(&site, "proto 7")
    })?;
    announce(&site, &both("announced"), 600)?;
    routed(&site, "203.0.113.10 proto 77")?;
    site.dataplane
        .take()
        .into_iter()
        .for_each(|mut dataplane| dataplane.kill());
    soon("the routes to be removed", || {
        site.director
            .sh("ip route; ip -6 route")
            .is_ok_and(|routes| !routes.contains("lvs-host0"))
    })
}

#[test]
fn maintenance_command_returns_when_routes_have_changed() -> Result<()> {
    let mut options = SiteOptions::new("announce-maint", Forward::Dr);
    options.vip = Vip::Routed;
    let site = Site::new(options)?;
    let dir = site.testbed.dir().display().to_string();
    let text = format!(
        "[dataplane]\ninterface = \"eth0\"\n[announce]\nwithdraw_delay = \"1h\"\n\
         [[service]]\naddress = \"203.0.113.10:80\"\nvip = \"announce\"\nscheduler = \"mh\"\nforward = \"dr\"\n\
         check = \"none\"\nservers = [\"{}:80\"]\n",
        site.real_address(0)
    );
    std::fs::write(format!("{dir}/lvsd.toml"), text)?;
    let (lvsd, file, state) = (
        lvs_testbed::programs::find("lvsd")?,
        format!("{dir}/lvsd.toml"),
        format!("{dir}/state"),
    );
    let words = ["--config", &file, "--state", &state];
    let daemon = site.director.spawn(&lvsd, &words)?;
    soon("the address to be announced", || {
        has_route(&site, "203.0.113.10 proto 77")
    })
    .with_context(|| daemon.log())?;
    for (change, route) in [("on", "proto 78"), ("off", "proto 77")].repeat(5) {
        let words = ["--config", &file, "maintenance", change];
        let printed = site.director.run(&lvsd, &words)?;
        let now = routes(&site)?;
        ensure!(
            now.contains(&format!("203.0.113.10 {route}")),
            "the route has not changed: {change}: {now}"
        );
        ensure!(
            !printed.contains("has not applied"),
            "{change}: unexpected `has not applied` in {printed}"
        );
    }
    Ok(())
}

#[test]
fn invalid_announcements_are_refused_and_existing_host_route_is_kept() -> Result<()> {
    let site = site("announce-bad")?;
    let one = r#"{"address":"203.0.113.10","standing":"announced"}"#;
    announce(&site, one, 600)?;
    let answer = announce(&site, &format!("@4097@{one}@"), 600)?;
    ensure!(
        answer.contains("the maximum is 4096"),
        "no `the maximum is 4096` in {answer}"
    );
    for bad in [
        r#"{"address":"203.0.113.10","standing":"loud"}"#,
        r#"{"address":"here"}"#,
        r#"{"standing":"announced"}"#,
    ] {
        let answer = announce(&site, bad, 600)?;
        ensure!(
            answer.contains("\"error\""),
            "the invalid list was accepted: {bad}: {answer}"
        );
    }
    routed(&site, "203.0.113.10 proto 77")?;
    // The host already has such a route of its own.
    site.director.sh("ip route add blackhole 198.18.0.1/32")?;
    let other = r#"{"address":"198.18.0.1","standing":"announced"}"#;
    let answer = announce(&site, &format!("{one},{other}"), 600)?;
    ensure!(
        answer.contains("the host already has one"),
        "no `the host already has one` in {answer}"
    );
    ensure!(answer.contains("withdrawn"), "no `withdrawn` in {answer}");
    routed(&site, "203.0.113.10 proto 77")?;
    Ok(())
}
