//! Connections move between the kernel's IPVS and this director during downloads, in both
//! directions. The tests need a kernel with IPVS as User Mode Linux:
//!
//! ```text
//! LVS_UML=COMMAND cargo test --release -p lvs-testbed --test e2e sync_with_kernel -- --ignored
//! ```
//!
//! `COMMAND -o DIRECTORY -k ARGUMENTS SCRIPT` boots the kernel with these arguments, and runs the
//! script there as root. The script sees the files of the host, may write to the directory (`$OUT`
//! in the script), and can run ipvsadm.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::netns::run_with_input;
use lvs_testbed::servers::NginxOptions;
use lvs_testbed::{Forward, Host, LoadReport, Proc, Site, SiteOptions, programs, wait_until};

const DOWNLOADS: u64 = 500;
const BYTES: u64 = 400_000;
const RATE: u64 = 20_000;
const LONG: Duration = Duration::from_secs(15);

/// A User Mode Linux kernel that acts as the director, attached to two devices of a host.
struct Kernel {
    dir: PathBuf,
    asked: usize,
    _process: Proc,
}

impl Kernel {
    /// Boots a kernel on `host`. A second call removes the devices of the first kernel.
    fn boot(site: &Site, host: &Host, name: &str) -> Result<Self> {
        let dir = site.testbed.dir().join(name);
        fs::create_dir(&dir)?;
        host.sh("ip addr flush dev eth0; ip addr flush dev eth1\n\
             for n in 0 1; do\n\
               ip link del br$n 2>/dev/null || true; ip link del tap$n 2>/dev/null || true\n\
               ip link add br$n type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n\
               ip tuntap add dev tap$n mode tap\n\
               ip link set tap$n master br$n; ip link set eth$n master br$n\n\
               ip link set tap$n up; ip link set eth$n up; ip link set br$n up\n\
             done")?;
        let script = dir.join("director");
        fs::write(
            &script,
            "#!/bin/bash\n\
             ip link set vec0 up; ip link set vec1 up\n\
             sysctl -qw net.ipv4.ip_forward=1 net.ipv4.vs.sync_refresh_period=2\n\
             sysctl -qw net.ipv4.vs.sync_threshold='0 1'\n\
             n=0\n\
             while [ ! -e $OUT/end ]; do\n\
               if [ -e $OUT/do-$n ]; then\n\
                 bash $OUT/do-$n >$OUT/doing 2>&1; echo \"=> $?\" >>$OUT/doing\n\
                 mv $OUT/doing $OUT/did-$n; n=$((n + 1))\n\
               else sleep 0.05; fi\n\
             done\n",
        )?;
        let command = std::env::var("LVS_UML")
            .context("LVS_UML is not set; set it to a command that boots a kernel with IPVS")?;
        let device = |n: usize| format!("vec{n}:transport=tap,ifname=tap{n},depth=128,gro=0");
        let mut words: Vec<String> = command.split_whitespace().map(ToOwned::to_owned).collect();
        let arguments = format!("{} {}", device(0), device(1));
        let path = |path: &PathBuf| path.display().to_string();
        words.extend(["-o".into(), path(&dir), "-k".into(), arguments]);
        words.push(path(&script));
        host.run("chmod", &["755", &path(&script)])?;
        let process = host.spawn(&words[0], &words[1..])?;
        let mut this = Self {
            dir,
            asked: 0,
            _process: process,
        };
        this.sh("true")?;
        Ok(this)
    }

    /// Runs a script in the booted machine.
    fn sh(&mut self, script: &str) -> Result<String> {
        let (ask, answer) = (
            self.dir.join(format!("do-{}", self.asked)),
            self.dir.join(format!("did-{}", self.asked)),
        );
        self.asked += 1;
        let part = self.dir.join("part");
        fs::write(&part, script)?;
        fs::rename(&part, &ask)?;
        wait_until("the virtual machine to answer", LONG, || answer.exists())?;
        let message = fs::read_to_string(answer)?;
        let (text, status) = message
            .rsplit_once("=> ")
            .context("the output of the kernel contains no status")?;
        ensure!(
            status.trim() == "0",
            "the script failed in the kernel: {script}: {message}"
        );
        Ok(text.to_owned())
    }

    fn established(&mut self) -> Result<u64> {
        let count = self.sh("ipvsadm -L -c -n | grep -c ESTABLISHED || true")?;
        Ok(count.trim().parse()?)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let _ = fs::write(self.dir.join("end"), "");
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
#[ignore = "by hand: needs a kernel with IPVS (make sync-with-kernel)"]
fn downloads_continue_from_kernel_to_dataplane_and_back() -> Result<()> {
    let mut options = SiteOptions::new("kernel", Forward::Nat);
    options.standby = true;
    options.nginx = NginxOptions {
        rate: RATE,
        ..NginxOptions::default()
    };
    let site = Site::new(options)?;
    let standby = site.standby()?.clone();
    let mut dataplane = site.start_dataplane_on(&standby, &[], &[])?;
    let mut rules = format!("-A -t {} -s rr\n", site.service(80));
    for index in 0..site.servers.len() {
        let server = site.real_address(index);
        rules.push_str(&format!("-a -t {} -r {server}:80 -m\n", site.service(80)));
    }
    let lvsadm = programs::find("lvsadm")?;
    run_with_input(standby.command(lvsadm).arg("-R"), &rules)?;
    for sysctl in ["sync_refresh_period=2", "sync_threshold=0,1"] {
        let sysctl = sysctl.replace(',', " ");
        standby.run(programs::find("lvsadm")?, &["sysctl", &sysctl])?;
    }
    site.lvsadm_on(&standby, "--start-daemon backup --mcast-interface eth0")?;
    let ours = || -> Result<u64> {
        let listing = site.lvsadm_on(&standby, "-L -c -n")?;
        Ok(listing.matches(" ESTABLISHED ").count() as u64)
    };
    let addresses = |verb: &str, [front, back]: [&str; 2]| {
        format!(
            "ip addr {verb} {}/32 dev {front}; ip addr {verb} 10.0.0.1/24 dev {back}",
            site.vip
        )
    };
    let serve = format!("ipvsadm -R <<END\n{rules}END\n");

    let mut kernel = Kernel::boot(&site, &site.director, "before")?;
    kernel.sh("ip addr add 192.0.2.1/24 dev vec0")?;
    kernel.sh(&addresses("add", ["vec0", "vec1"]))?;
    kernel.sh(&serve)?;
    kernel.sh("ipvsadm --start-daemon master --mcast-interface vec0")?;

    let mut load = site.load_of(DOWNLOADS);
    load.concurrency = DOWNLOADS;
    load.sizes = vec![BYTES];
    load.timeout_ms = 60_000;
    load.first_port = 20_000;
    let file = site.serve(&format!("s/{BYTES}"), BYTES)?;
    let client = site.client.clone();
    let report: Result<LoadReport> = std::thread::scope(|scope| {
        let downloads = scope.spawn(|| client.load(&load));
        wait_until("the connections of the kernel to arrive", LONG, || {
            ours().is_ok_and(|count| count == DOWNLOADS)
        })?;
        ensure!(
            kernel.established()? == DOWNLOADS,
            "the kernel does not have all connections"
        );
        // The first director fails: its kernel stops sending at once.
        site.fail_over()?;
        drop(kernel);

        // The VIP returns to a kernel director with an empty table.
        std::thread::sleep(Duration::from_secs(2));
        let mut kernel = Kernel::boot(&site, &site.director, "after")?;
        kernel.sh("ip addr add 192.0.2.1/24 dev vec0; ip addr add 10.0.0.3/24 dev vec1")?;
        kernel.sh(&serve)?;
        kernel.sh("ipvsadm --start-daemon backup --mcast-interface vec0")?;
        site.lvsadm_on(&standby, "--start-daemon master --mcast-interface eth0")?;
        wait_until(
            "the dataplane's connections to arrive at the kernel",
            LONG,
            || kernel.established().is_ok_and(|count| count == DOWNLOADS),
        )?;
        ensure!(ours()? == DOWNLOADS, "a connection has ended");
        dataplane.kill();
        standby.sh(&addresses("del", ["eth0", "eth1"]))?;
        standby.sh("ip link set eth0 down; ip link set eth1 down")?;
        kernel.sh(&addresses("add", ["vec0", "vec1"]))?;
        for host in site.servers.iter().chain([&site.client]) {
            host.sh("ip neigh flush all")?;
        }
        let report = downloads
            .join()
            .unwrap_or_else(|_| anyhow::bail!("a thread panicked"));
        drop(kernel);
        report
    });
    drop(file);
    let report = report?;
    println!("{} downloads in {:.1} s", report.ok, report.seconds);
    report.all_ok(DOWNLOADS)
}
