//! FTP with real servers and real clients, active and passive, for example through NAT with the
//! helper, and through direct routing with persistence.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use lvs_testbed::netns::Proc;
use lvs_testbed::{Forward, Site, SiteOptions, Vip, content, servers};

/// Size of a file that is long enough for super-packets in both directions.
const SIZE: u64 = 3 << 20;

/// A site with an FTP server on every real server, and a file that all of them serve.
struct Ftp {
    site: Site,
    _servers: Vec<Proc>,
    file: PathBuf,
    sum: String,
    /// Client, virtual address and server of each connection in any listing during the transfers.
    /// The dataplane removes a reset connection after ten seconds.
    listed: Mutex<BTreeSet<String>>,
}

impl Ftp {
    fn new(options: SiteOptions, dataplane: &[&str]) -> Result<Self> {
        Self::announcing(options, dataplane, |_| None)
    }

    /// Starts a site and its FTP servers. For passive data connections, the servers announce the
    /// address that `address` returns, or their own if it returns none.
    fn announcing(
        options: SiteOptions,
        dataplane: &[&str],
        address: impl Fn(&Site) -> Option<Ipv4Addr>,
    ) -> Result<Self> {
        let mut site = Site::new(options)?;
        site.start_dataplane(dataplane)?;
        let address = address(&site);
        let servers = site.servers.iter();
        let servers = servers.map(|server| servers::vsftpd(server, address));
        let servers = servers.collect::<Result<_>>()?;
        let file = site.serve("file", SIZE)?;
        let sum = sum(&site, &file)?;
        Ok(Self {
            site,
            _servers: servers,
            file,
            sum,
            listed: Mutex::default(),
        })
    }

    /// Records the connections that are listed now.
    fn list(&self) -> Result<()> {
        let listing = self.site.lvsadm("-L -n -c")?;
        let ends = listing.lines().filter_map(|line| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            Some(words.get(3..6)?.join(" "))
        });
        lock(&self.listed)?.extend(ends);
        Ok(())
    }

    /// Adds a service for FTP with all servers.
    fn serve(&self, virt: SocketAddr, options: &str) -> Result<()> {
        let site = &self.site;
        site.lvsadm(&format!("-A -t {virt} {options}"))?;
        for index in 0..site.servers.len() {
            let addr: IpAddr = if virt.is_ipv6() {
                site.real_address6(index).into()
            } else {
                site.real_address(index).into()
            };
            let flag = site.options.forward.flag();
            site.lvsadm(&format!(
                "-a -t {virt} -r {} {flag}",
                SocketAddr::new(addr, 21)
            ))?;
        }
        Ok(())
    }

    /// Adds a persistent service for a mark, and rules that set the mark for the FTP ports.
    fn serve_mark(&self) -> Result<()> {
        let site = &self.site;
        site.lvsadm(&format!(
            "mark add --destination {} --protocol tcp --ports 20,21,30000-30099 --mark 21",
            site.vip
        ))?;
        site.lvsadm("-A -f 21 -s rr -p 300")?;
        for index in 0..site.servers.len() {
            let flag = site.options.forward.flag();
            site.lvsadm(&format!(
                "-a -f 21 -r {}:0 {flag}",
                site.real_address(index)
            ))?;
        }
        Ok(())
    }

    /// Runs a client that downloads the file twice (`got-1`, `got-2`) and uploads it twice (`up-1`,
    /// `up-2`) over one control connection; compares all four files.
    fn transfer(&self, what: &str, script: impl Fn(&str) -> String) -> Result<()> {
        let site = &self.site;
        let dir = site.testbed.dir().join("client");
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir)?;
        let (client, script) = (site.client.clone(), script(&dir.display().to_string()));
        let running = thread::spawn(move || client.sh(&script));
        while !running.is_finished() {
            self.list()?;
            thread::sleep(Duration::from_millis(200));
        }
        let ended = running.join().map_err(|_| anyhow!("the thread panicked"))?;
        ended.with_context(|| what.to_owned())?;
        self.list()?;
        let uploads: Vec<PathBuf> = (1..=site.servers.len())
            .map(|number| site.testbed.dir().join(format!("rs{number}-ftp/up")))
            .filter(|up| up.join("up-1").exists())
            .collect();
        ensure!(
            uploads.len() == 1,
            "{what}: the uploads did not reach exactly one server: {uploads:?}"
        );
        for path in [
            dir.join("got-1"),
            dir.join("got-2"),
            uploads[0].join("up-1"),
            uploads[0].join("up-2"),
        ] {
            let found = sum(site, &path).with_context(|| what.to_owned())?;
            ensure!(
                found == self.sum,
                "{what}: {} differs from what was sent",
                path.display()
            );
        }
        for name in ["up-1", "up-2"] {
            fs::remove_file(uploads[0].join(name))?;
        }
        Ok(())
    }

    fn curl(&self, what: &str, host: IpAddr, options: &str) -> Result<()> {
        let host = SocketAddr::new(host, 21);
        let file = self.file.display();
        // Further arguments of one call use the same control connection.
        self.transfer(&format!("curl {what}"), |dir| {
            format!(
                "c='curl -sS -g -m 240 {options}'; \
                 $c -o {dir}/got-1 ftp://{host}/www/file -o {dir}/got-2 ftp://{host}/www/file; \
                 $c -T {file} ftp://{host}/up/up-1 -T {file} ftp://{host}/up/up-2"
            )
        })
    }

    fn lftp(&self, what: &str, host: IpAddr, options: &str) -> Result<()> {
        let file = self.file.display();
        let url = SocketAddr::new(host, 21);
        self.transfer(&format!("lftp {what}"), |dir| {
            format!(
                "cd {dir}; HOME={dir} timeout 240 lftp -c 'set net:timeout 60; set net:max-retries 1; set cmd:fail-exit yes; {options}; \
                 open ftp://{url}; get www/file -o got-1; get www/file -o got-2; put {file} -o up/up-1; put {file} -o up/up-2'"
            )
        })
    }

    fn tnftp(&self, what: &str, host: IpAddr, commands: &str) -> Result<()> {
        let file = self.file.display();
        self.transfer(&format!("tnftp {what}"), |dir| {
            format!(
                "cd {dir}; timeout 240 tnftp -n -v {host} <<END\nuser anonymous nobody\nbinary\n{commands}\n\
                 get www/file got-1\nget www/file got-2\nput {file} up/up-1\nput {file} up/up-2\nquit\nEND\n"
            )
        })
    }

    /// The ports that clients named in PORT and EPRT commands, from the servers' logs.
    fn ports_named(&self) -> Result<Vec<u16>> {
        let mut ports = Vec::new();
        for server in &self.site.servers {
            let log = server.dir().join(format!("{}-ftp/log", server.name()));
            let log = fs::read_to_string(&log).with_context(|| format!("{}", log.display()))?;
            for line in log.lines() {
                let (_, command) = line.split_once("FTP command: ").unwrap_or_default();
                if let Some((_, list)) = command.split_once("\"PORT ") {
                    let bytes = list.trim_end_matches('"').split(',').skip(4);
                    let bytes = bytes.map(str::parse).collect::<Result<Vec<u8>, _>>()?;
                    let port = bytes.try_into().ok().context("the command has no port")?;
                    ports.push(u16::from_be_bytes(port));
                } else if let Some((_, list)) = command.split_once("\"EPRT ") {
                    ports.push(
                        list.split('|')
                            .nth(3)
                            .context("the command has no port")?
                            .parse()?,
                    );
                }
            }
        }
        Ok(ports)
    }

    /// Transfers files with curl, in each mode of data connections.
    fn every_mode(&self) -> Result<()> {
        let vip = IpAddr::V4(self.site.vip);
        self.curl("EPSV", vip, "")?;
        self.curl("PASV", vip, "--disable-epsv")?;
        self.curl("EPRT", vip, "-P -")?;
        self.curl("PORT", vip, "-P - --disable-eprt")
    }

    /// Transfers files with lftp and tnftp, in each mode of data connections that they support.
    fn other_clients(&self) -> Result<()> {
        let vip = IpAddr::V4(self.site.vip);
        self.lftp("PASV", vip, "set ftp:passive-mode on")?;
        self.lftp("EPSV", vip, "set ftp:prefer-epsv on")?;
        self.lftp("PORT", vip, "set ftp:passive-mode off")?;
        self.tnftp("EPSV", vip, "")?;
        self.tnftp("PASV", vip, "epsv4")?;
        self.tnftp("EPRT", vip, "passive")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    mutex.lock().map_err(|_| anyhow!("the thread panicked"))
}

fn sum(site: &Site, file: &std::path::Path) -> Result<String> {
    let printed = site.client.sh(&format!("sha256sum < {}", file.display()))?;
    Ok(printed.trim().to_owned())
}

fn options(label: &str, forward: Forward) -> SiteOptions {
    SiteOptions::with_servers(label, forward, 2)
}

/// Checks that the listed data connections use the virtual address: at least `passive` connections
/// from clients, and one for each of the `active` named ports. The VIP has one digit more than the
/// servers' addresses, so that the helper must shift sequence numbers.
fn data_connections_are_to_the_virtual_address(
    ftp: &Ftp,
    passive: usize,
    active: usize,
) -> Result<()> {
    let listed = lock(&ftp.listed)?;
    let virt = ftp.site.vip;
    let to_server = |line: &&String| line.contains(&format!("{virt}:300"));
    ensure!(
        listed.iter().filter(to_server).count() >= passive,
        "too few passive data connections were listed: {listed:#?}"
    );
    let named = ftp.ports_named()?;
    ensure!(
        named.len() == active,
        "clients did not name {active} ports: {named:?}"
    );
    // The listing shows a port once, even if a client named it twice.
    for port in named {
        let data = |line: &String| line.contains(&format!(":{port} {virt}:20 "));
        ensure!(
            listed.iter().any(data),
            "no data connection to port {port} was listed: {listed:#?}"
        );
    }
    Ok(())
}

#[test]
#[ignore = "needs lftp and tnftp"]
fn lftp_and_tnftp_transfer_files_through_nat() -> Result<()> {
    let ftp = Ftp::new(options("ftp-others", Forward::Nat), &["--helper", "ftp"])?;
    ftp.serve(ftp.site.service(21), "-s rr")?;
    ftp.other_clients()?;
    data_connections_are_to_the_virtual_address(&ftp, 16, 8)
}

#[test]
#[ignore = "needs lftp and tnftp"]
fn lftp_and_tnftp_transfer_files_by_direct_routing() -> Result<()> {
    let ftp = Ftp::new(options("ftp-dr-others", Forward::Dr), &[])?;
    ftp.serve(ftp.site.service(21), "-s rr -p 300")?;
    ftp.other_clients()
}

#[test]
#[ignore = "needs lftp and tnftp"]
fn lftp_and_tnftp_transfer_files_through_ipv6_nat() -> Result<()> {
    let ftp = Ftp::new(
        options("ftp-six-others", Forward::Nat),
        &["--helper", "ftp"],
    )?;
    let vip = IpAddr::V6(ftp.site.vip6);
    ftp.serve(SocketAddr::new(vip, 21), "-s rr")?;
    ftp.lftp("EPSV", vip, "set ftp:passive-mode on")?;
    ftp.lftp("EPRT", vip, "set ftp:passive-mode off")?;
    ftp.tnftp("EPSV", vip, "")?;
    ftp.tnftp("EPRT", vip, "passive")
}

#[test]
fn ftp_nat_with_helper_transfers_files() -> Result<()> {
    let ftp = Ftp::new(options("ftp-nat", Forward::Nat), &["--helper", "ftp"])?;
    ftp.serve(ftp.site.service(21), "-s rr")?;
    ftp.every_mode()?;

    data_connections_are_to_the_virtual_address(&ftp, 8, 8)?;

    // Many transfers run at once, over both servers.
    let (vip, dir) = (ftp.site.vip, ftp.site.testbed.dir().join("many"));
    fs::create_dir_all(&dir)?;
    ftp.site.client.sh(&format!(
        "pids=; for i in 1 2 3 4 5 6 7 8; do curl -sS -m 240 --disable-epsv -o {dir}/$i ftp://{vip}/www/file & pids=\"$pids $!\"; done; \
         for p in $pids; do wait $p; done",
        dir = dir.display()
    ))?;
    for number in 1..=8 {
        let found = sum(&ftp.site, &dir.join(number.to_string()))?;
        ensure!(found == ftp.sum, "download {number} differs from the file");
    }
    let listing = ftp.site.lvsadm("-L -n")?;
    let shares = lvs_testbed::listing::rows(&listing)
        .iter()
        .filter(|row| row.is_server())
        .map(|row| Ok(row.number(2)? + row.number(3)?))
        .collect::<Result<Vec<_>>>()?;
    ensure!(
        shares.len() == 2 && shares.iter().all(|n| *n > 0),
        "not both servers were used: {listing}"
    );
    Ok(())
}

#[test]
#[ignore = "long"]
fn ftp_nat_transfers_files_with_vip_of_dataplane_and_links_without_offloads() -> Result<()> {
    let mut options = options("ftp-own", Forward::Nat);
    options.vip = Vip::Dataplane;
    options.offloads = false;
    let ftp = Ftp::new(options, &["--helper", "ftp=21,2121"])?;
    ftp.serve(ftp.site.service(21), "-s rr -p 300")?;
    ftp.every_mode()
}

/// The host routes all packets to the dataplane, including those of data connections from port 20.
#[test]
#[ignore = "long"]
fn ftp_through_tun_device_transfers_files() -> Result<()> {
    let mut options = options("ftp-hop", Forward::Nat);
    options.vip = Vip::Dataplane;
    options.ip_forward = true;
    let ftp = Ftp::new(options, &["--helper", "ftp", "--backend", "tun"])?;
    ftp.serve(ftp.site.service(21), "-s rr")?;
    ftp.every_mode()
}

#[test]
#[ignore = "long"]
fn ftp_ipv6_nat_transfers_files() -> Result<()> {
    let ftp = Ftp::new(options("ftp-six", Forward::Nat), &["--helper", "ftp"])?;
    let vip = IpAddr::V6(ftp.site.vip6);
    ftp.serve(SocketAddr::new(vip, 21), "-s rr")?;
    ftp.curl("EPSV", vip, "")?;
    ftp.curl("EPRT", vip, "-P -")
}

/// Without the helper, servers announce the VIP, and one mark joins the FTP ports.
#[test]
#[ignore = "long"]
fn ftp_nat_with_mark_without_helper_transfers_files() -> Result<()> {
    let ftp = Ftp::announcing(options("ftp-blind", Forward::Nat), &[], |site| {
        Some(site.vip)
    })?;
    ftp.serve_mark()?;
    let vip = IpAddr::V4(ftp.site.vip);
    ftp.curl("PASV", vip, "--disable-epsv")?;
    ftp.curl("EPSV", vip, "")
}

#[test]
fn ftp_direct_routing_with_persistence_transfers_files() -> Result<()> {
    let ftp = Ftp::new(options("ftp-dr", Forward::Dr), &[])?;
    ftp.serve(ftp.site.service(21), "-s rr -p 300")?;
    ftp.every_mode()
}

#[test]
#[ignore = "long"]
fn ftp_direct_routing_with_mark_transfers_files() -> Result<()> {
    let ftp = Ftp::new(options("ftp-mark", Forward::Dr), &[])?;
    ftp.serve_mark()?;
    ftp.every_mode()
}

/// With direct routing and without persistence, the packets of a passive data connection belong to
/// no service.
#[test]
fn ftp_direct_routing_without_persistence_fails() -> Result<()> {
    let ftp = Ftp::new(options("ftp-none", Forward::Dr), &[])?;
    ftp.serve(ftp.site.service(21), "-s rr")?;
    let failed = ftp.site.client.sh(&format!(
        "curl -sS -m 5 -o /dev/null ftp://{}/www/file",
        ftp.site.vip
    ));
    ensure!(
        failed.is_err(),
        "the transfer succeeded without persistence: {failed:?}"
    );
    content::write_file(&ftp.file, 1)?;
    Ok(())
}
