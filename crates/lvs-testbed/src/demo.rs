//! `lvs-testbed demo`: a running director for demonstration.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::programs;
use crate::site::{Forward, Site, SiteOptions, Topology};

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoOptions {
    /// The forwarding methods to show, in this order
    #[arg(long, value_delimiter = ',', default_value = "nat,dr,tun", value_parser = parse_method)]
    pub methods: Vec<Forward>,
    /// Leave all programs running at the end, until Enter or Ctrl-C
    #[arg(long)]
    pub hold: bool,
    /// HTTP requests for each method
    #[arg(long, default_value_t = 400)]
    pub requests: u64,
    /// Size of the bulk download in MiB
    #[arg(long, default_value_t = 512)]
    pub bulk: u64,
}

fn parse_method(word: &str) -> Result<Forward> {
    Ok(match word {
        "nat" => Forward::Nat,
        "dr" => Forward::Dr,
        "tun" => Forward::Tun,
        "fullnat" => Forward::FullNat,
        _ => bail!("unknown forwarding method {word:?}: use nat, dr, tun or fullnat"),
    })
}

/// Runs the demo.
///
/// # Errors
/// A program is missing, or a forwarding method did not work; the output shows the reason.
pub fn main(options: &DemoOptions) -> Result<()> {
    let style = Style::detect();
    for program in ["lvs-dataplane", "lvsadm"] {
        programs::find(program)?;
    }
    println!(
        "A client, a director and four nginx servers, each in a network namespace of this machine.\n\
         The director is lvs-dataplane, a process; the kernel's ip_vs is not used."
    );
    let mut sites = Vec::new();
    let mut verdicts = Vec::new();
    for method in &options.methods {
        match show(*method, options, &style) {
            Ok((site, verdict)) => {
                verdicts.push((*method, Ok(verdict)));
                // Without `--hold`, the programs of the site stop here.
                if options.hold {
                    sites.push(site);
                }
            }
            Err(error) => {
                println!(
                    "\n  {}",
                    style.bad(&format!("this forwarding method did not work: {error:#}"))
                );
                verdicts.push((*method, Err(error)));
            }
        }
    }

    println!("\n{}", style.heading("Verdict"));
    for (method, verdict) in &verdicts {
        match verdict {
            Ok(text) => println!("  {:<4} {}  {text}", method.word(), style.good("works")),
            Err(_) => println!("  {:<4} {}", method.word(), style.bad("FAILED")),
        }
    }
    if !sites.is_empty() {
        hold(&mut sites, &style)?;
    }
    let failed = verdicts
        .iter()
        .filter(|(_, verdict)| verdict.is_err())
        .count();
    ensure!(
        failed == 0,
        "{failed} of {} forwarding methods did not work",
        verdicts.len()
    );
    println!("\nAll hosts and programs of the demo are removed.");
    Ok(())
}

fn show(method: Forward, options: &DemoOptions, style: &Style) -> Result<(Site, String)> {
    let (title, picture) = match method {
        Forward::Nat => (
            "NAT: the director rewrites the addresses of requests and replies",
            "client 192.0.2.100 ── 192.0.2.1 director 10.0.0.1 ── rs1..rs4 10.0.0.11-14",
        ),
        Forward::Dr => (
            "Direct routing: the director changes the MAC address, servers answer the client directly",
            "client 198.51.100.100 ── router ── LAN 192.0.2.0/24: director .1, rs1..rs4 .11-.14",
        ),
        Forward::Tun => (
            "Tunnelling: the director encapsulates packets in IPIP, servers may be anywhere",
            "client 198.51.100.100 ── router ── director 192.0.2.1, and router ── rs1..rs4 10.0.0.11-14",
        ),
        Forward::FullNat => (
            "Full NAT: servers see an address of the director as the client, and may have any gateway",
            "client 198.51.100.100 ── router ── director 192.0.2.1 and .50, and router ── rs1..rs4 10.0.0.11-14",
        ),
    };
    println!("\n{}\n  {picture}", style.heading(title));
    let start = Instant::now();
    let mut site = Site::new(SiteOptions::new(&format!("demo-{}", method.word()), method))?;
    site.start_dataplane(&[])?;
    println!(
        "  up in {:.1} s; VIP {}\n",
        start.elapsed().as_secs_f64(),
        site.vip
    );

    println!(
        "  director# lvs-dataplane {} &",
        site.dataplane_arguments().join(" ")
    );
    let service = site.service(80);
    director(&site, &format!("-A -t {service} -s rr"))?;
    for index in 0..site.servers.len() {
        let server = site.real_address(index);
        director(
            &site,
            &format!("-a -t {service} -r {server}:80 {}", method.flag()),
        )?;
    }

    let load = site.load_of(options.requests);
    print!(
        "\n  client$ {} requests of 1 byte to 10 MiB to {service}, each byte checked: ",
        options.requests
    );
    std::io::stdout().flush()?;
    let report = site.client.load(&load)?;
    println!("{:.1} s, {:.0} Mbit/s", report.seconds, report.mbits());
    for (server, count) in &report.servers {
        let bar = "#".repeat(usize::try_from(count * 40 / report.ok.max(1)).unwrap_or(0));
        println!("    {server:<4} {count:>5}  {bar}");
    }
    report.all_ok(options.requests)?;
    let servers = site.servers.len() as u64;
    let (least, most) = (
        options.requests / servers,
        options.requests.div_ceil(servers),
    );
    ensure!(
        report.servers.len() as u64 == servers
            && report.servers.values().all(|n| (least..=most).contains(n)),
        "rr did not spread the requests evenly: {:?}",
        report.servers
    );

    print!(
        "\n  client$ curl -o /dev/null http://{}/bulk   ({} MiB): ",
        site.vip, options.bulk
    );
    std::io::stdout().flush()?;
    let size = options.bulk << 20;
    site.serve("bulk", size)?;
    let printed = site.client.sh(&format!(
        "curl --fail --silent --show-error --max-time 120 -o /dev/null -w '%{{size_download}} %{{speed_download}}' http://{}/bulk",
        site.vip
    ))?;
    let (length, speed) = printed
        .split_once(' ')
        .context("curl did not print two numbers")?;
    ensure!(
        length.parse() == Ok(size),
        "the download has {length} bytes instead of {size}"
    );
    let gbits = speed.trim().parse::<f64>()? * 8.0 / 1e9;
    println!("{gbits:.1} Gbit/s");

    // Listings show counters that are up to two seconds old.
    std::thread::sleep(Duration::from_millis(2500));
    println!("\n  director# lvsadm -Ln --stats");
    let table = site.lvsadm("-Ln --stats")?;
    for line in table.lines() {
        println!("    {line}");
    }
    let verdict = format!(
        "{} requests, at least {least} for each server; bulk download {gbits:.1} Gbit/s",
        report.ok
    );
    Ok((site, verdict))
}

/// Shows a command for the director, and runs it.
fn director(site: &Site, arguments: &str) -> Result<()> {
    println!("  director# lvsadm {arguments}");
    site.lvsadm(arguments).map(drop)
}

fn hold(sites: &mut [Site], style: &Style) -> Result<()> {
    let lvsadm = programs::find("lvsadm")?;
    println!(
        "\n{}",
        style.heading("Still running; commands for another terminal (as the same user)")
    );
    for site in sites.iter_mut() {
        let hosts = [
            site.client.clone(),
            site.director.clone(),
            site.servers[0].clone(),
        ];
        let prefixes = site.testbed.expose(&hosts.each_ref())?;
        let [client, director, server] = prefixes.as_slice() else {
            bail!("the numbers of hosts and names differ")
        };
        println!("\n  {}:", site.options.forward.word());
        println!("    {client} curl http://{}/id", site.vip);
        println!("    {director} {} -Ln --stats", lvsadm.display());
        println!("    {director} {} -Lnc", lvsadm.display());
        println!(
            "    {director} {} -e -t {} -r {}:80 -w 0 {}",
            lvsadm.display(),
            site.service(80),
            site.real_address(0),
            site.options.forward.flag()
        );
        println!("    {server} ss -tn");
        if site.options.topology == Topology::TwoArm {
            println!("    {director} nft list ruleset");
        }
    }
    print!("\nPress Enter or Ctrl-C to stop all programs and remove all hosts. ");
    std::io::stdout().flush()?;
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

struct Style {
    colour: bool,
}

impl Style {
    fn detect() -> Self {
        Self {
            colour: std::io::stdout().is_terminal()
                && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        }
    }

    fn heading(&self, text: &str) -> String {
        self.paint("1", text)
    }

    fn good(&self, text: &str) -> String {
        self.paint("32", text)
    }

    fn bad(&self, text: &str) -> String {
        self.paint("31", text)
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}
