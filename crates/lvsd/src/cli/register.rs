//! `lvsd register`: registers a server in an etcd pool while the command runs.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::config::Config;
use crate::sources::Cluster;
use crate::sources::etcd::{Access, Client, Registration};
use crate::sources::retry;

/// Registers a server in etcd.
#[derive(Debug, Args)]
pub(super) struct Register {
    /// Pool, as services name it: discover = { etcd = "POOL" }.
    #[arg(long)]
    pool: String,
    /// Address and port of this server; without a port, the port of the service applies.
    #[arg(long, value_name = "IP[:PORT]")]
    address: String,
    /// Weight. Default: the service's.
    #[arg(long)]
    weight: Option<u16>,
    /// Name of this server in the pool. Default: the address.
    #[arg(long)]
    id: Option<String>,
    /// Seconds after which etcd removes the server if this command does not renew its record.
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    lease: u64,
}

/// Registers a server in the etcd of `[cluster]` until a signal arrives.
pub(super) fn run(file: &Path, register: &Register) -> Result<(), String> {
    let (config, _) = Config::load(file).map_err(|error| error.to_string())?;
    let cluster = config.cluster.ok_or_else(|| {
        format!(
            "{} has no [cluster]; a file with only that table is sufficient",
            file.display()
        )
    })?;
    let lease = Duration::from_secs(register.lease);
    if !Cluster::LEASES.contains(&lease) {
        return Err(format!(
            "--lease {} is out of range: write 2 to 3600 seconds",
            register.lease
        ));
    }
    let registration = Registration {
        address: register.address.clone(),
        weight: register.weight,
    };
    registration
        .record()
        .map_err(|why| format!("--address: {why}"))?;
    let id = register.id.as_ref().unwrap_or(&register.address);
    for (option, name) in [("--pool", &register.pool), ("--id", id)] {
        if !Cluster::is_name(name) {
            return Err(format!(
                "{option} {name:?} is not a name: write 1 to 128 bytes without whitespace, slashes and control characters"
            ));
        }
    }
    let key = format!("{}servers/{}/{id}", cluster.prefix, register.pool);
    let value = serde_json::to_string(&registration).map_err(|error| error.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start an event loop: {error}"))?;
    let result = runtime.block_on(keep(&cluster, &key, &value, lease));
    runtime.shutdown_background();
    result
}

async fn keep(cluster: &Cluster, key: &str, value: &str, lease: Duration) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot listen for signals: {error}");
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut int = signal(SignalKind::interrupt()).map_err(failed)?;
    let access = Arc::new(cluster.access.clone());
    let members = access.endpoints.len().max(1);
    let (mut next, mut failures) = (0, 0);
    let mut held = None;
    loop {
        let Some(endpoint) = access.endpoints.get(next % members) else {
            return Err(
                "[cluster] contains no member of etcd: add etcd = [\"https://10.0.0.5:2379\"]"
                    .to_owned(),
            );
        };
        let mut client = Client::new(Arc::clone(&access), endpoint.clone());
        let over = tokio::select! {
            error = stay(&mut client, &mut held, key, value, lease) => Err(error),
            _ = term.recv() => Ok(()),
            _ = int.recv() => Ok(()),
        };
        match over {
            Ok(()) => return remove(&access, next, held, key, lease).await,
            Err(why) => {
                tracing::warn!("cannot keep {key} registered, and tries again: {endpoint}: {why}");
                next += 1;
                failures = (failures + 1).min(1000);
                let pause = retry(failures, Duration::from_millis(500));
                tokio::select! {
                    () = sleep(pause.min(lease / 3)) => {}
                    _ = term.recv() => return remove(&access, next, held, key, lease).await,
                    _ = int.recv() => return remove(&access, next, held, key, lease).await,
                }
            }
        }
    }
}

/// Revokes the lease `held` at the first etcd member that answers, so that etcd removes the
/// server's key. The member number `first` is asked first.
///
/// # Errors
/// No member revokes the lease within half of its time; it then expires.
async fn remove(
    access: &Arc<Access>,
    first: usize,
    held: Option<i64>,
    key: &str,
    lease: Duration,
) -> Result<(), String> {
    if let Some(id) = held {
        let mut why = "no member has answered".to_owned();
        let revoked = timeout(lease / 2, async {
            let members = access.endpoints.iter().cycle().skip(first);
            for endpoint in members.take(access.endpoints.len()) {
                let mut client = Client::new(Arc::clone(access), endpoint.clone());
                match client.revoke(id).await {
                    Ok(()) => return true,
                    Err(error) => why = format!("{endpoint}: {error}"),
                }
            }
            false
        });
        if revoked.await != Ok(true) {
            return Err(format!(
                "{key} cannot be removed, and expires within {lease:?}: {why}"
            ));
        }
    }
    tracing::info!("{key} is no longer registered");
    Ok(())
}

/// Registers the server at an etcd member, and renews the lease `held`. Returns the error of the
/// first request that fails.
async fn stay(
    client: &mut Client,
    held: &mut Option<i64>,
    key: &str,
    value: &str,
    lease: Duration,
) -> String {
    loop {
        let kept = match *held {
            Some(id) => client.keep(id).await,
            None => Ok(false),
        };
        let written = match kept {
            Ok(true) => Ok(()),
            Ok(false) => {
                *held = None;
                match client.grant(lease).await {
                    Ok(id) => {
                        *held = Some(id);
                        let put = client.put(key, value, id).await;
                        if put.is_ok() {
                            tracing::info!("registered {key}: {value}");
                        } else {
                            *held = None;
                        }
                        put
                    }
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            return error.to_string();
        }
        sleep_until(Instant::now() + lease / 3).await;
    }
}
