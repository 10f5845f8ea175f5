//! Repeats a published evaluation of LVS: `ipvsadm` by its usual path, 2 to 8 private servers
//! behind a masquerading director, and clients that run `wget` in a loop. Listings are written to
//! files during the downloads.

use crate::common;

use std::fs;

use anyhow::{Result, ensure};
use lvs_testbed::listing::{Row, rows};
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, Site, SiteOptions, content, programs};

/// Sizes of the files in bytes.
const FILES: [u64; 10] = [
    100_000, 250_000, 500_000, 750_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 7_500_000,
    10_000_000,
];

#[test]
#[ignore = "needs wget"]
fn published_lvs_evaluation_downloads_are_complete_and_balanced() -> Result<()> {
    let mut site = Site::new(SiteOptions::with_servers("evaluation", Forward::Nat, 8))?;
    for (index, size) in FILES.iter().enumerate() {
        site.serve(&format!("data/file{}", index + 1), *size)?;
    }
    site.director.install(
        &programs::find("lvsadm")?,
        &["ipvsadm", "ipvsadm-save", "ipvsadm-restore"],
    )?;
    site.start_dataplane(&[])?;
    site.director.sh("echo 1 >/proc/sys/net/ipv4/ip_forward\n\
         iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE")?;
    let _outside = nginx(
        &site.client,
        &NginxOptions {
            ports: vec![8080],
            keepalive: false,
            ..NginxOptions::default()
        },
    )?;

    for (scheduler, servers) in [("rr", 2), ("wrr", 4), ("lc", 6), ("rr", 8)] {
        run(&site, scheduler, servers)?;
    }

    // Manually added services can be saved and restored.
    let saved = site.director.sh("ipvsadm-save -n")?;
    ensure!(
        saved.lines().count() == 9,
        "the number of saved rules is not 9: {saved}"
    );
    site.director.sh("ipvsadm -C")?;
    site.director
        .sh(&format!("ipvsadm-restore <<END\n{saved}END\n"))?;
    ensure!(site.director.sh("ipvsadm-save -n")? == saved);
    Ok(())
}

fn run(site: &Site, scheduler: &str, servers: usize) -> Result<()> {
    let vip = site.vip;
    let mut script = format!("/sbin/ipvsadm -C\n/sbin/ipvsadm -A -t {vip}:80 -s {scheduler}\n");
    for index in 0..servers {
        let server = site.real_address(index);
        script.push_str(&format!("/sbin/ipvsadm -a -t {vip}:80 -r {server}:80 -m\n"));
    }
    script.push_str("/sbin/ipvsadm --zero\n");
    site.director.sh(&script)?;

    // A server downloads a file itself while four clients download from the service.
    let dir = site.testbed.dir().join("clients");
    fs::create_dir_all(&dir)?;
    let mut clients = Vec::new();
    for number in 0..4 {
        let script = format!(
            "cd {dir}; for i in 1 2 3 4 5 6 7 8 9 10; do \
             wget --tries=1 --timeout=120 -O testfile{number}-$i -q http://{vip}/data/file$i || exit 1; done",
            dir = dir.display()
        );
        clients.push(site.client.spawn("sh", &["-c", script.as_str()])?);
    }
    let outside = common::client_address(site)?;
    let listings = "ipvsadm -L -n --stats >>$D/stats; ipvsadm -L -n --rate >>$D/rate; \
                    ipvsadm -L -n --connection >>$D/connection";
    site.director
        .sh(&format!("D={}; {listings}", dir.display()))?;
    let address = site.servers[0].sh(&format!(
        "wget -q -O - http://{outside}:8080/addr; wget -q -O /dev/null http://{outside}:8080/data/file10"
    ))?;
    ensure!(
        address == "192.0.2.1\n",
        "the connection of a server has the source address {address} instead of 192.0.2.1"
    );
    for client in &mut clients {
        let status = client.wait(std::time::Duration::from_secs(120))?;
        ensure!(
            status.success(),
            "a client failed: {status}: {}",
            client.log()
        );
    }
    let all = 4 * FILES.iter().sum::<u64>();
    let whole =
        |rows: &[Row]| -> Result<bool> { Ok(rows[0].number(0)? == 40 && rows[0].number(4)? > all) };
    common::wait_for_counters(site, "the counters to include all downloads", whole)?;
    site.director
        .sh(&format!("D={}; {listings}", dir.display()))?;

    for (index, size) in FILES.iter().enumerate() {
        let mut expected = vec![0; usize::try_from(*size)?];
        content::fill(0, &mut expected);
        for number in 0..4 {
            let file = dir.join(format!("testfile{number}-{}", index + 1));
            ensure!(
                fs::read(&file)? == expected,
                "{} differs from what was sent",
                file.display()
            );
            fs::remove_file(file)?;
        }
    }
    let exact = site.director.sh("ipvsadm -L -n --stats --exact")?;
    let rows = rows(&exact);
    ensure!(
        rows.len() == 1 + servers,
        "not all servers are listed: {exact}"
    );
    ensure!(
        rows[0].number(0)? == 40 && rows[0].number(4)? > all,
        "the counters of the service are wrong: {exact}"
    );
    let least = 40 / servers as u64;
    for row in &rows[1..] {
        let count = row.number(0)?;
        let even = (least..=40_u64.div_ceil(servers as u64)).contains(&count);
        // The count of a server that returns includes its old connections until they expire.
        // Therefore lc prefers the new ones, as in the kernel.
        ensure!(
            even || scheduler == "lc",
            "{scheduler} did not distribute connections evenly: {exact}"
        );
    }
    for file in ["stats", "rate", "connection"] {
        let text = fs::read_to_string(dir.join(file))?;
        ensure!(
            text.contains(&format!("{vip}:80")),
            "the listing in the file lacks the service: {file}: {text}"
        );
        fs::remove_file(dir.join(file))?;
    }
    Ok(())
}
