//! Measures the delay of health checks: a given number of checks per second of servers that answer,
//! while other servers are unreachable.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use lvsd::config::{Config, checks_of};
use lvsd::counters::{BOUNDS, Counters};
use lvsd::health::{Checks, Network, raise_limits};

/// Number of ports at each address of the servers that answer.
const PORTS: usize = 50;

/// Options of the measurement.
#[derive(Clone, Copy, Debug, Args)]
pub struct Options {
    /// Checks a second, each of a different server
    #[arg(long, default_value_t = 10_000)]
    checks: usize,
    /// Number of additional servers that do not answer
    #[arg(long, default_value_t = 5_000)]
    holes: usize,
    /// Duration in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// Starts this program again in a new network namespace, and measures the health checks of lvsd
/// there: their rate, processor time and start lag.
pub(super) fn run(options: Options) -> Result<()> {
    raise_limits();
    // In this namespace, the loopback interface answers, and a link without a host at its other end
    // drops all packets.
    if std::env::var_os("LVS_CHECKS_INSIDE").is_none() {
        let program = std::env::current_exe()?;
        let mut words = vec!["-n".to_owned(), "--".into(), "sh".into(), "-c".into()];
        words.push(
            "ip link set lo up && ip link add hole type veth peer name gone && ip link set gone up && ip addr add 10.99.0.1/16 dev hole && ip link set hole up && \
             ip route add 10.98.0.0/16 dev hole && ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:01 dev hole && \
             ip route replace 10.98.0.0/16 via 10.99.0.2 && exec \"$0\" \"$@\""
                .into(),
        );
        words.push(program.display().to_string());
        words.extend(std::env::args().skip(1));
        let status = std::process::Command::new("unshare")
            .args(words)
            .env("LVS_CHECKS_INSIDE", "1")
            .status()
            .context("cannot run unshare: install util-linux, and run this benchmark as root")?;
        std::process::exit(status.code().unwrap_or(1));
    }
    let addresses = options.checks.div_ceil(PORTS);
    let servers = (0..addresses).flat_map(|n| {
        let [_, _, high, low] = u32::try_from(n + 1).unwrap_or(1).to_be_bytes();
        (0..PORTS).map(move |port| {
            let port = 20_000 + u16::try_from(port).unwrap_or(0);
            SocketAddr::from(([127, 9, high, low], port))
        })
    });
    let servers: Vec<SocketAddr> = servers.take(options.checks).collect();
    listen();
    let mut text = String::from(
        "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
         check = { type = \"tcp\", interval = \"1s\", timeout = \"900ms\", via = \"server\" }\n",
    );
    for server in &servers {
        text.push_str(&format!("[[service.server]]\naddress = \"{server}\"\n"));
    }
    text.push_str(
        "[[service]]\naddress = \"192.0.2.2:80\"\nforward = \"nat\"\n\
         check = { type = \"tcp\", interval = \"2s\", timeout = \"1s\", via = \"server\" }\n",
    );
    for n in 0..options.holes {
        let [_, _, high, low] = u32::try_from(n).unwrap_or(0).to_be_bytes();
        text.push_str(&format!(
            "[[service.server]]\naddress = \"10.98.{high}.{low}:80\"\n"
        ));
    }
    // Without lvsd's validation of configurations, which refuses some of these addresses.
    let (config, _) =
        Config::from_toml("checks", &text).map_err(|report| anyhow::anyhow!("{report}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let counters = Arc::<Counters>::default();
        let (mut checks, mut reports) =
            Checks::counted_in(Network::default(), None, Arc::clone(&counters));
        checks.set(checks_of(&config.services));
        // At the start, all checks run at once; later they are spread.
        tokio::time::sleep(Duration::from_secs(5)).await;
        let (mut up, mut down) = (0, 0);
        let mut count = |report| {
            for change in checks.take(report).changes {
                match change.up {
                    true => up += 1,
                    false => down += 1,
                }
            }
        };
        while let Ok(report) = reports.try_recv() {
            count(report);
        }
        let before = counters.get().lag.classes;
        let cpu = processor();
        tokio::time::sleep(Duration::from_secs(options.seconds)).await;
        let after = counters.get().lag.classes;
        let used = processor() - cpu;
        let all: u64 = after.iter().zip(&before).map(|(a, b)| a - b).sum();
        println!(
            "{up} up, {down} down; {:.0} checks/s, {:.0} % of a core",
            per(all, options.seconds),
            used * 100.0 / options.seconds.max(1) as f64
        );
        for share in [50, 90, 99, 100] {
            let mut seen = 0;
            let late = after.iter().zip(&before).position(|(a, b)| {
                seen += a - b;
                seen * 100 >= all * share
            });
            match late.and_then(|class| BOUNDS.get(class)) {
                Some(bound) => println!("start lag p{share}: at most {} ms", bound * 1e3),
                None => println!(
                    "start lag p{share}: more than {} s",
                    BOUNDS[BOUNDS.len() - 1]
                ),
            }
        }
        anyhow::Ok(())
    })
}

#[expect(clippy::cast_precision_loss, reason = "counts of a short run")]
fn per(all: u64, seconds: u64) -> f64 {
    all as f64 / seconds.max(1) as f64
}

/// CPU seconds of this process, including its listeners.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(") ")
        .next()
        .unwrap_or_default()
        .split(' ')
        .collect();
    let ticks = |n: usize| {
        fields
            .get(n)
            .and_then(|field| field.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}

/// Listens on the ports of the servers, on all addresses of the host: a thread for each port.
fn listen() {
    for port in 0..PORTS {
        let port = 20_000 + u16::try_from(port).unwrap_or(0);
        let listener = match std::net::TcpListener::bind(("0.0.0.0", port)) {
            Ok(listener) => listener,
            Err(error) => {
                eprintln!("cannot listen on port {port}: {error}");
                continue;
            }
        };
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                drop(stream);
            }
        });
    }
}
