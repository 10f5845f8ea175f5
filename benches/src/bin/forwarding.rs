//! Round trips and bulk transfers through the director, and through the kernel's own forwarding
//! between the same hosts.
//!
//! ```text
//! cargo run --release -p lvs-bench --bin forwarding [-- ROUNDS [PAIR...]]
//! ```
//!
//! Needs root, or user namespaces, and the release build of `lvs-dataplane` and `lvsadm`. Each
//! figure is the median of the rounds (5 by default) with the least and the greatest; the baseline
//! of each is measured in the same round. A pair is a method and a backend, as `nat-tun`.

use std::env;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lvs_testbed::{Forward, Host, Site, SiteOptions, Vip, wait_until};

/// Round trips of one byte in each measurement.
const ROUND_TRIPS: usize = 5_000;
/// Bytes of each bulk transfer.
const BULK: usize = 512 << 20;
/// Port of the measuring server.
const PORT: u16 = 7;

fn main() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["serve"] => serve(),
        ["measure", target] => {
            let target = target
                .parse()
                .with_context(|| format!("{target}: not an address"))?;
            let measured = measure(target)?;
            println!("{} {} {}", measured.p50, measured.p99, measured.gbit);
            Ok(())
        }
        [] => compare(5, &[]),
        [rounds, wanted @ ..] => compare(
            rounds
                .parse()
                .with_context(|| format!("{rounds}: not a number"))?,
            wanted,
        ),
    }
}

/// Microseconds of a round trip, and the speed of a download.
#[derive(Clone, Copy, Debug)]
struct Measured {
    p50: f64,
    p99: f64,
    gbit: f64,
}

/// The server. The first byte of a connection selects the service: `p` returns every byte, `b` is a
/// bulk download.
fn serve() -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    let block = vec![0x5a; 1 << 20];
    for stream in listener.incoming() {
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        if byte[0] == b'b' {
            for _ in 0..BULK / block.len() {
                if stream.write_all(&block).is_err() {
                    break;
                }
            }
        } else {
            while stream.write_all(&byte).is_ok() && stream.read_exact(&mut byte).is_ok() {}
        }
    }
    Ok(())
}

fn measure(target: SocketAddr) -> Result<Measured> {
    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    let mut byte = [b'p'];
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        stream.write_all(&byte)?;
        stream.read_exact(&mut byte)?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    // The server serves one connection after the other.
    drop(stream);

    let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(5))?;
    let mut buffer = vec![0; 1 << 20];
    let start = Instant::now();
    stream.write_all(b"b")?;
    let mut left = BULK;
    while left > 0 {
        match stream.read(&mut buffer)? {
            0 => bail!("the download ended {left} bytes early"),
            n => left -= n,
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "half a gibibyte is exact")]
    let gbit = BULK as f64 * 8.0 / 1e9 / start.elapsed().as_secs_f64();
    Ok(Measured {
        p50: times[ROUND_TRIPS / 2],
        p99: times[ROUND_TRIPS * 99 / 100],
        gbit,
    })
}

/// All pairs of a method and a backend, or those that are named.
fn compare(rounds: usize, wanted: &[&str]) -> Result<()> {
    println!(
        "{rounds} rounds; a round trip is one byte each way over TCP, bulk a download of {} MiB;\n\
         kernel: the same hosts, the director's kernel forwarding the packets to the same server\n",
        BULK >> 20
    );
    println!(
        "                  p50 us            p99 us            bulk Gbit/s       p50 and bulk, times the kernel's"
    );
    for (method, backend) in [
        (Forward::Nat, "af_packet"),
        (Forward::Dr, "af_packet"),
        (Forward::Tun, "af_packet"),
        (Forward::Nat, "tun"),
        (Forward::Tun, "tun"),
    ] {
        let name = format!("{} {backend}", method.word());
        if !wanted.is_empty() && !wanted.contains(&name.replace(' ', "-").as_str()) {
            continue;
        }
        let (mut kernel, mut director) = (Vec::new(), Vec::new());
        let mut options = SiteOptions::new("bench", method);
        options.servers = 1;
        options.ip_forward = true;
        if backend == "tun" {
            options.vip = Vip::Dataplane;
        }
        let mut site = Site::new(options)?;
        let program = env::current_exe()?;
        let _server = site.servers[0].spawn(&program, &["serve"])?;
        wait_until("the measuring server", Duration::from_secs(5), || {
            site.servers[0].listens("tcp", PORT)
        })?;
        let direct = SocketAddr::from((site.real_address(0), PORT));
        let service = site.service(PORT);
        let run = |client: &Host, target: SocketAddr| -> Result<Measured> {
            let printed = client.run(&program, &["measure", &target.to_string()])?;
            let numbers: Vec<f64> = printed
                .split_ascii_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect();
            let [p50, p99, gbit] = numbers[..] else {
                bail!("unexpected: {printed}")
            };
            Ok(Measured { p50, p99, gbit })
        };
        for _ in 0..rounds {
            // Without the dataplane, so that nothing looks at the packets.
            site.dataplane = None;
            kernel.push(run(&site.client, direct)?);
            site.start_dataplane(&["--backend", backend, "--fast-path", "off"])?;
            site.add_service(PORT, "rr")?;
            director.push(run(&site.client, service)?);
        }
        line(&format!("{} kernel", method.word()), &kernel, None);
        line(&name, &director, Some(&kernel));
    }
    Ok(())
}

fn line(name: &str, all: &[Measured], baseline: Option<&[Measured]>) {
    let spread = |all: &[Measured], field: fn(&Measured) -> f64| {
        let mut values: Vec<f64> = all.iter().map(field).collect();
        values.sort_by(f64::total_cmp);
        (
            values[values.len() / 2],
            values[0],
            values[values.len() - 1],
        )
    };
    print!("{name:<17}");
    for field in [
        |m: &Measured| m.p50,
        |m: &Measured| m.p99,
        |m: &Measured| m.gbit,
    ] {
        let (median, min, max) = spread(all, field);
        print!(" {median:>5.1} {:<11}", format!("({min:.1}-{max:.1})"));
    }
    if let Some(baseline) = baseline {
        for field in [|m: &Measured| m.p50, |m: &Measured| m.gbit] {
            print!(" {:>5.2}", spread(all, field).0 / spread(baseline, field).0);
        }
    }
    println!();
}
