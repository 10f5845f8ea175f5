//! Unprivileged users of the director's host, who use the control socket.

use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lvs_api::{Address, Client};
use lvs_core::api::Call;
use serde::de::IgnoredAny;

use crate::programs;
use crate::site::Site;

/// Number of users that list services in a loop.
const LISTERS: u32 = 16;
/// Number of users that send unfinished requests (1 MiB of brackets) in a loop.
const HOLDERS: u32 = 32;

/// Runs users that list services, and users that send unfinished requests to the control socket.
/// Returns the number of listings plus the number of connections for unfinished requests.
pub(super) fn hostile(site: &Site, time: Duration) -> Result<u64> {
    nobody(site, time, &[])
}

/// Runs users that only compute, for comparison.
pub(super) fn compute(site: &Site, time: Duration) -> Result<u64> {
    nobody(site, time, &["--compute"])
}

fn nobody(site: &Site, time: Duration, more: &[&str]) -> Result<u64> {
    let own = programs::own()?;
    let mut words = vec![
        "setpriv".to_owned(),
        "--reuid=65534".to_owned(),
        "--regid=65534".to_owned(),
        "--clear-groups".to_owned(),
        "--".to_owned(),
        own.display().to_string(),
        "hostile-user".to_owned(),
        format!("--for={}", time.as_millis()),
    ];
    words.extend(more.iter().map(ToString::to_string));
    let printed = site.director.run(&words[0], &words[1..])?;
    let answered = printed.trim().parse();
    answered.with_context(|| format!("the hostile users printed no number: {printed}"))
}

/// Options of a hostile user.
#[derive(Clone, Debug, clap::Args)]
pub struct UserOptions {
    /// Duration in milliseconds
    #[arg(long = "for", value_name = "MS")]
    pub for_ms: u64,
    /// Use processor time, but send no requests
    #[arg(long)]
    pub compute: bool,
}

/// Runs `lvs-testbed hostile-user`. Prints the number of listings plus the number of connections
/// for unfinished requests; 0 if the users only compute.
///
/// # Errors
/// None: failed listings and connections are not counted.
pub fn user(options: &UserOptions) -> Result<()> {
    let limit = Duration::from_millis(options.for_ms);
    let start = Instant::now();
    if options.compute {
        std::thread::scope(|scope| {
            for _ in 0..HOLDERS + LISTERS {
                scope.spawn(|| while start.elapsed() < limit {});
            }
        });
        println!("0");
        return Ok(());
    }
    let answered: u64 = std::thread::scope(|scope| {
        let holders = (0..HOLDERS).map(|_| scope.spawn(move || hold(start, limit)));
        let mut threads: Vec<_> = holders.collect();
        threads.extend((0..LISTERS).map(|_| scope.spawn(move || list(start, limit))));
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or(0))
            .sum()
    });
    println!("{answered}");
    Ok(())
}

fn connect() -> std::io::Result<UnixStream> {
    match Address::from_env().path() {
        Some(path) => UnixStream::connect(path),
        None => UnixStream::connect_addr(&SocketAddr::from_abstract_name("lvs-dataplane")?),
    }
}

/// Sends an unfinished request, and waits until the dataplane closes the connection. Repeats this
/// until `limit` after `start`. Returns the number of connections.
fn hold(start: Instant, limit: Duration) -> u64 {
    let brackets = "[],".repeat((1 << 20) / 3);
    let mut attempts = 0;
    while start.elapsed() < limit {
        if let Ok(mut stream) = connect() {
            attempts += 1;
            let short = Some(Duration::from_millis(200));
            let _ = stream.set_write_timeout(short);
            let _ = stream.set_read_timeout(short);
            let _ = stream.write_all(brackets.as_bytes());
            let mut answer = [0; 4096];
            while start.elapsed() < limit {
                match stream.read(&mut answer) {
                    Ok(0) => break,
                    Err(error) if error.kind() != ErrorKind::WouldBlock => break,
                    _ => {}
                }
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    attempts
}

/// Lists the dataplane's services in a loop. Returns the number of answers.
fn list(start: Instant, limit: Duration) -> u64 {
    let mut answered = 0;
    while start.elapsed() < limit {
        let Ok(mut client) = Client::connect(&Address::from_env()) else {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        while start.elapsed() < limit {
            let listed = client.collect::<IgnoredAny>(&Call::ServiceList { service: None });
            if listed.is_err() {
                break;
            }
            answered += 1;
        }
    }
    answered
}
