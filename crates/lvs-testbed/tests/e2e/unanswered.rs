//! Servers that pass their checks but do not answer clients (passive health checks): the dataplane
//! counts the attempts, and `lvsadm doctor` names the server until it answers clients again.

use crate::common;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Site, SiteOptions, programs, servers, soon, wait_until};
use serde_json::Value;

/// A client that sends a request every 200 ms. The time limit of a request permits two repeated
/// SYNs.
const CLIENT: &str = "while :; do curl -s -m 5 -o /dev/null http://VIP/id & sleep 0.2; done";

/// A client that sends a DNS question every 200 ms, from another port each time, and sends it again
/// after 2.2 s.
const DNS_CLIENT: &str = r"ask() {
    exec 3<> /dev/udp/VIP/53
    for _ in 1 2; do
        printf '\x41\x42\1\0\0\1\0\0\0\0\0\0\2id\4test\0\0\x10\0\1' >&3
        sleep 2.2
    done
}
while :; do ask & sleep 0.2; done";

const OTHER_GATEWAY: [&str; 2] = [
    "ip route change default via 10.0.0.99",
    "ip route change default via 10.0.0.1",
];

fn doctor(site: &Site) -> Result<String> {
    let lvsadm = programs::find("lvsadm")?.display().to_string();
    let text = site.director.sh(&format!("{lvsadm} doctor || true"))?;
    Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Breaks the second of three servers, waits until doctor reports it, repairs it, and waits until
/// the finding ends.
fn found_and_healed(site: &Site, port: u16, faults: [&str; 2], fix: &str) -> Result<()> {
    let vip = site.vip.to_string();
    let client = if port == 53 { DNS_CLIENT } else { CLIENT };
    let client = client.replace("VIP", &vip);
    let _load = site.client.spawn("bash", &["-c", &client])?;
    let [fault, repair] = faults.map(|words| words.replace("VIP", &vip));
    site.servers[1].sh(&fault)?;
    let finding = |n| format!("connections to {}:{port}", site.real_address(n));
    // On a busy machine, other servers may also be named for a minute after late answers.
    let found = |text: &str| {
        let of_good = [0, 2].iter().any(|&good| text.contains(&finding(good)));
        let parts = [&finding(1), "got no answer", fix];
        parts.iter().all(|part| text.contains(part)) && !of_good
    };
    wait_until(
        "doctor to report the expected finding",
        Duration::from_secs(40),
        || doctor(site).is_ok_and(|text| found(&text)),
    )
    .with_context(|| format!("{:?}", doctor(site)))?;
    site.servers[1].sh(&repair)?;
    let healed = || doctor(site).is_ok_and(|text| !text.contains("got no answer"));
    wait_until("the finding to end", Duration::from_secs(70), healed)
}

#[test]
#[ignore = "long"]
fn doctor_reports_server_without_vip_on_lo_until_repaired() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("unansw", Forward::Dr, 3))?;
    site.add_service(80, "rr")?;
    let faults = ["ip addr del VIP/32 dev lo", "ip addr add VIP/32 dev lo"];
    found_and_healed(&site, 80, faults, "realserver-setup")
}

#[test]
#[ignore = "long"]
fn doctor_reports_server_with_another_gateway_until_repaired() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("unansw", Forward::Nat, 3))?;
    site.add_service(80, "rr")?;
    found_and_healed(&site, 80, OTHER_GATEWAY, "default gateway")
}

#[test]
#[ignore = "long"]
fn doctor_reports_udp_server_with_another_gateway_until_repaired() -> Result<()> {
    let site = common::site(SiteOptions::with_servers("unudp", Forward::Nat, 3))?;
    let _servers = site
        .servers
        .iter()
        .map(servers::dnsmasq)
        .collect::<Result<Vec<_>>>()?;
    site.add_service_weighted("-u", 53, "rr", &[1, 1, 1])?;
    found_and_healed(&site, 53, OTHER_GATEWAY, "default gateway")
}

/// `lvsd` names the server in its status and its log.
#[test]
#[ignore = "long"]
fn lvsd_names_server_without_answers_until_it_answers() -> Result<()> {
    let site = Site::new(SiteOptions::with_servers("unlvsd", Forward::Nat, 3))?;
    let servers = (0..3).map(|index| format!("\"{}:80\"", site.real_address(index)));
    let text = format!(
        "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n[[service]]\nname = \"web\"\naddress = \"{}\"\n\
         scheduler = \"rr\"\nforward = \"nat\"\ncheck = {{ type = \"tcp\", interval = \"1s\" }}\nservers = [{}]\n",
        site.service(80),
        servers.collect::<Vec<_>>().join(", ")
    );
    let path = site.testbed.dir().join("lvsd.toml");
    std::fs::write(&path, text)?;
    let (path, program) = (path.display().to_string(), programs::find("lvsd")?);
    let lvsd = site.director.spawn(&program, &["--config", &path])?;
    let ask = |words: &str| {
        let program = program.display();
        site.director
            .sh(&format!("{program} --config {path} {words} 2>&1 || true"))
    };
    let health = |index: u8| -> Result<String> {
        let status: Value = serde_json::from_str(&ask("status --json")?)?;
        let servers = &status["services"][0]["servers"];
        let health = servers[usize::from(index)]["health"].as_str();
        Ok(health.unwrap_or_default().to_owned())
    };
    let all = |wanted: [&str; 3]| {
        wait_until(
            &format!("the status to contain {wanted:?}"),
            Duration::from_secs(90),
            || {
                (0..3).all(|index| {
                    health(index).is_ok_and(|health| health == wanted[usize::from(index)])
                })
            },
        )
        .with_context(|| format!("{:?}\nlvsd printed:\n{}", ask("status"), lvsd.log()))
    };
    all(["up", "up", "up"])?;
    let client = CLIENT.replace("VIP", &site.vip.to_string());
    let _load = site.client.spawn("sh", &["-c", &client])?;
    site.servers[1].sh(OTHER_GATEWAY[0])?;
    all(["up", "suspicious", "up"])?;
    let text = ask("status")?;
    ensure!(
        text.contains("default gateway"),
        "no `default gateway` in {text}"
    );
    site.servers[1].sh(OTHER_GATEWAY[1])?;
    all(["up", "up", "up"])?;
    let (broken, good) = (site.real_address(1), site.real_address(0));
    let says = |words: &str, server| {
        let server = format!("server={server}:80");
        let log = lvsd.log();
        let mut lines = log.lines();
        lines.any(|line| line.contains(words) && line.contains(&server))
    };
    for words in ["server is suspicious", "clients can use the server again"] {
        // lvsd writes the log with a delay.
        soon("the log to name the server", || says(words, &broken)).with_context(|| lvsd.log())?;
        ensure!(
            !says(words, &good),
            "the log names the wrong server: {}",
            lvsd.log()
        );
    }
    Ok(())
}
