//! The engine: a director between the packets of this host's interfaces and a control socket.

mod calls;
mod capture;
mod config;
mod decider;
mod door;
mod hook;
mod inbox;
mod kernel_path;
mod local_clients;
mod network;
mod pages;
mod peers;
mod priority;
mod remedies;
mod report;
#[cfg(feature = "testing")]
pub mod rig;
mod rules;
mod shared;
mod successor;
mod worker;

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

pub use lvs_core::api::WORKERS_MAX;
use lvs_core::api::{Call, Failure, LocalPool, SyncDaemon};
use lvs_core::{Control, Instant, Options};
use serde_json::Value;
use tracing::{info, warn};

pub use self::config::{
    Config, PEERS_ALARM, PEERS_WAIT, PeersConfig, RulesError, StartError, UseKernel,
};
pub use self::door::Pauses;
use self::door::Requests;
pub use self::hook::{HookAction, PacketHook};
use self::kernel_path::Wanted;
use self::peers::Peers;
pub use self::shared::Shared;
use self::successor::{Estate, Shards};
use self::worker::{Equipment, Worker};
use crate::host::is_interface_name;
use crate::host::keeper::{Keeper, Outliving, Setup};
use crate::host::update::Update;
use crate::host::view::View;
pub use crate::host::{Backend, HostError};
use crate::in_kernel::RIPE;
use crate::outlive::{Holder, Outlive};
use crate::random::random;
use lvs_api::Address;
use lvs_packet::common::Common;
use lvs_packet::pipeline::Settings;
use lvs_packet::steer::Steering;
use lvs_process::server::{self, Handle, Permissions, Server, Sink};
use lvs_sys::TablePages;

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    /// The packet workers, then the keeper.
    threads: Vec<JoinHandle<()>>,
    server: Option<Handle>,
}

impl Engine {
    /// Starts an engine in this thread's network namespace. When it returns, the control socket
    /// answers and packets are handled.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        check_interface_names(&config.interfaces)?;
        let address = config.address.clone().unwrap_or_default();
        // First of all: a second engine must not touch anything.
        let permissions = Permissions {
            writers: config.group,
            readers: config.readers,
        };
        let server = Server::bind(&address, permissions)?;
        let address = server.address().clone();
        let workers = match config.workers {
            Some(workers) if workers.get() > WORKERS_MAX => {
                return Err(StartError::Workers(workers));
            }
            Some(workers) => workers,
            None => NonZeroUsize::MIN,
        };
        if workers.get() > 1 && config.peers.is_some() {
            let text = format!(
                "--workers {workers}: several packet workers do not tell their connections to other directors: leave out --workers, or --sync-peer (--start-daemon does not mind)"
            );
            return Err(StartError::Peers(text));
        }
        if workers.get() > 1 && config.hook.is_some() {
            return Err(StartError::Hook(workers));
        }
        let (control, options) = new_control(&config, workers)?;
        let setup = Setup {
            backend: config.backend,
            interfaces: config.interfaces,
            own_all_vips: config.own_vips,
            in_kernel: None,
            xdp: config.xdp,
            steering: (workers.get() > 1).then(|| steering(workers, &options, &config.ftp_ports)),
            outlive: Outliving::default(),
        };
        let wanted = Wanted {
            wanted: config.in_kernel,
            ripe: config.in_kernel_after.unwrap_or(RIPE),
            wide: config
                .max_ipv6
                .unwrap_or_else(|| kernel_path::wide(options.max_connections)),
            outlive: config.outlive,
        };
        let threads = Threads {
            workers,
            pin: config.pin.unwrap_or(workers.get() > 1),
            hook: config.hook,
            real_time: config.real_time,
        };
        let mut engine = Self::start_on_host(control, setup, config.settings, threads, wanted)?;
        if !config.local_addresses.is_empty() || config.hairpin {
            engine
                .call(Call::LocalSet(LocalPool {
                    addresses: config.local_addresses,
                    hairpin: config.hairpin,
                }))
                .map_err(|failure| StartError::LocalAddresses(failure.message))?;
        }
        if !config.marks.is_empty() {
            let rules = config.marks.iter().map(ToString::to_string).collect();
            engine
                .call(Call::MarkSet { rules })
                .map_err(|failure| StartError::Marks(failure.message))?;
        }
        if engine.shared.is_successor() && config.rules.is_some() {
            info!("--rules is not read: services are those of the engine before this one");
        } else if let Some((text, name)) = config.rules {
            rules::apply(&engine.shared, &text, &name)?;
        }
        if let Some(config) = config.peers.filter(|config| !config.peers.is_empty()) {
            let peers = Peers::start(&config, &engine.shared).map_err(StartError::Peers)?;
            engine.shared.use_peers(peers);
        }
        let handle = server.serve(engine.shared()).map_err(StartError::Thread)?;
        engine.shared.use_lock(handle.leaving());
        engine.server = Some(handle);
        info!("ready at {address}");
        Ok(engine)
    }

    /// Starts the packet workers and the keeper of the host.
    fn start_on_host(
        control: Control,
        mut setup: Setup,
        settings: Settings,
        threads: Threads,
        mut wanted: Wanted,
    ) -> Result<Self, StartError> {
        let Threads {
            workers: count,
            pin,
            mut hook,
            real_time,
        } = threads;
        let against = kernel_path::against(count, hook.is_some(), setup.backend, &settings);
        let (opened, why_not) = wanted.open(&control, against, !setup.xdp.is_empty())?;
        let (in_kernel, memory) = opened.unzip();
        let opened = match (&in_kernel, wanted.outlive) {
            (Some(in_kernel), holder) => {
                if let Some(holder) = holder {
                    holder.end();
                }
                let estate = Estate::InKernel(in_kernel.clone());
                let memories = memory.into_iter().collect();
                let made = successor::shards(&control, &estate, memories, None);
                Some((estate, made))
            }
            (None, Some(holder)) => open_outlive(&control, count, holder),
            (None, None) => None,
        };
        let (estate, made) = opened.unzip();
        let mut pages: Vec<Option<TablePages>> = Vec::new();
        let (mut shards, inheritance) = if let Some(made) = made {
            made
        } else {
            let made = (0..count.get()).map(|n| pages::shard(&control, n));
            let made: Vec<_> = made.collect::<Result<_, _>>()?;
            let (shards, of_tables) = made.into_iter().flatten().unzip();
            pages = of_tables;
            (shards, None)
        };
        let found = inheritance.is_some();
        let shared = Arc::new(Shared::new(control, count.get()).map_err(StartError::Thread)?);
        let director: Weak<Shared> = Arc::downgrade(&shared);
        shared.daemons().serve(director);
        shared.not_in_kernel(why_not);
        if let Some(estate) = &estate {
            setup.outlive = estate.outliving();
            // A successor goes by its own when it has taken over.
            if !found {
                estate.set_clock(shared.now());
            }
            shared.use_estate(estate.clone());
        }
        if let Some(in_kernel) = &in_kernel {
            shared.use_in_kernel(in_kernel.clone());
            setup.in_kernel = Some(in_kernel.clone());
        }
        let midnight = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(shared.now().saturating_since(Instant::ZERO));
        let common = Common::new(settings).with_midnight(midnight);
        let common = Arc::new(common.with_workers(count));
        let (requests, queues): (Vec<_>, Vec<_>) =
            shards.iter().map(|_| Requests::new(shared.clone())).unzip();
        let left = estate.as_ref().filter(|_| found).map(|estate| {
            let (mut control, now) = (shared.control(), shared.now());
            successor::restore(&mut control, &View::default(), estate, now)
        });
        let steering = setup.steering.clone();
        let mut keeper = Keeper::new(shared.clone(), setup, queues)?;
        let mut daemons = Vec::new();
        // Before connections wait for a worker.
        let equipments = shards.iter().map(|_| Equipment::new(common.clone()));
        let equipments: Vec<_> = equipments.collect();
        if let (Some(estate), Some(left), Some(inheritance)) = (&estate, left, inheritance) {
            // Packets that come meanwhile wait in the sockets; the host does not see them.
            for warning in keeper.update(Update::All) {
                warn!("{warning}");
            }
            keeper.publish();
            let (records, steering) = (&left.records, steering.as_deref());
            successor::take_over(&shared, &mut shards, estate, inheritance, records, steering);
            daemons = left.daemons;
        }
        if let Some(estate) = &estate {
            estate.keep_shield(&keeper);
        }
        let cpus = if pin { own_cpus(count) } else { Vec::new() };
        let mut workers = Vec::new();
        let mut pages = pages.into_iter();
        let parts = shards.into_iter().zip(requests).zip(equipments);
        for (number, ((shard, requests), equipment)) in parts.enumerate() {
            let mut worker = Worker::new(
                shared.clone(),
                number,
                shard,
                equipment,
                requests,
                hook.take(),
            );
            if let Some(in_kernel) = &in_kernel {
                worker.use_in_kernel(in_kernel.clone(), wanted.ripe.get());
            }
            if let Some(Some(pages)) = pages.next() {
                worker.use_pages(pages);
            }
            if let Some(&cpu) = cpus.get(number) {
                worker.run_on(cpu);
            }
            workers.push(worker);
        }
        let mut engine = Self::new(shared.clone());
        for (number, worker) in workers.into_iter().enumerate() {
            engine.spawn(format!("lvs-worker-{number}"), move || {
                worker.run(real_time);
            })?;
        }
        engine.spawn("lvs-keeper".to_owned(), move || {
            keeper.run(shared.keeper());
            shared.drop_ports();
            if let Some(estate) = estate {
                estate.end();
            }
        })?;
        engine.start_daemons(daemons)?;
        Ok(engine)
    }

    /// Starts the synchronisation daemons of the engine before this one, in time those whose
    /// interface is down or gone now.
    fn start_daemons(&mut self, daemons: Vec<SyncDaemon>) -> Result<(), StartError> {
        let waiting = successor::start_daemons(&self.shared, daemons);
        if waiting.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        self.spawn("lvs-sync-waits".to_owned(), move || {
            successor::start_daemons_in_time(&shared, waiting);
        })
    }

    const fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            threads: Vec::new(),
            server: None,
        }
    }

    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let thread = thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(StartError::Thread)?);
        Ok(())
    }

    /// Does what a client of the control socket could ask for. Items of a list are not kept.
    ///
    /// # Errors
    /// The refusal that the client would get; then nothing has changed.
    pub fn call(&self, call: Call) -> Result<Value, Failure> {
        let mut nowhere = std::io::sink();
        server::Handler::call(&*self.shared, call, &mut Sink::new(0, &mut nowhere))
    }

    /// Where its control socket is.
    pub fn address(&self) -> Option<&Address> {
        self.server.as_ref().map(Handle::address)
    }

    /// A handle to stop the engine from another thread.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Waits until the engine has stopped.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                tracing::error!("the thread {name} has failed");
            }
        }
        // What the packet workers had to say at last is sent.
        self.shared.daemons().end();
        if let Some(peers) = self.shared.peers() {
            peers.end();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.stop();
        self.wait();
    }
}

/// How the threads of packet workers are to run.
struct Threads {
    workers: NonZeroUsize,
    pin: bool,
    hook: Option<Box<dyn PacketHook>>,
    real_time: bool,
}

/// Refuses names that no interface can have, and addresses.
fn check_interface_names(names: &[String]) -> Result<(), StartError> {
    for name in names {
        let error = if let Some((vlan, _)) = name.split_once('=') {
            format!(
                "{name:?}: the dataplane does not create {vlan}: create the VLAN interface with `ip link add link TRUNK name {vlan} \
                 type vlan id VLAN` and its addresses with `ip addr add`, and give --interface {vlan}"
            )
        } else if is_interface_name(name) {
            continue;
        } else {
            format!(
                "{name:?}: no interface can have that name: a name has 1 to 15 bytes, without /, : and whitespace"
            )
        };
        return Err(StartError::Interface(error));
    }
    Ok(())
}

/// How packets are divided among workers.
fn steering(workers: NonZeroUsize, options: &Options, ftp_ports: &[u16]) -> Arc<Steering> {
    // What is known of the one hash is to say nothing of the other.
    let seed = options.seed.rotate_left(32) ^ 0x6c76_7377_6f72_6b65;
    Arc::new(Steering::new(workers, seed, !ftp_ports.is_empty()))
}

/// A processor for each worker; none where there are fewer.
fn own_cpus(workers: NonZeroUsize) -> Vec<usize> {
    let cpus = lvs_sys::permitted_cpus();
    if cpus.len() < workers.get() {
        info!(
            "packet workers run on any processor: {workers} workers, and {} processors that this process may use",
            cpus.len()
        );
        return Vec::new();
    }
    cpus
}

/// What outlives the engine without the path in the kernel, and the shards whose tables lie there.
fn open_outlive(
    control: &Control,
    workers: NonZeroUsize,
    holder: Holder,
) -> Option<(Estate, Shards)> {
    let opened = Outlive::open(control.layout(), workers.get(), holder);
    let made = opened.and_then(|outlive| {
        let (memories, left) = (outlive.memories()?, outlive.memories_left()?);
        let estate = Estate::Memory(Arc::new(outlive));
        let shards = successor::shards(control, &estate, memories, left);
        Ok((estate, shards))
    });
    made.inspect_err(|error| warn!("connections do not outlive this engine: {error}"))
        .ok()
}

/// The control half as it is at the start.
fn new_control(config: &Config, workers: NonZeroUsize) -> Result<(Control, Options), StartError> {
    let mut options = Options {
        seed: random_seed()?,
        profile: config.profile,
        when_full: config.when_full,
        schedulers: config.schedulers.clone(),
        shards: workers.get(),
        ..Options::default()
    };
    // Each worker has its part of the table.
    let max = config.max_connections.unwrap_or(options.max_connections);
    options.max_connections = max.div_ceil(workers.get());
    let mut control = Control::try_new(options.clone())?;
    for (name, value) in &config.sysctls {
        control
            .set_sysctl(name, value)
            .map_err(|error| StartError::Sysctl {
                name: name.clone(),
                value: value.clone(),
                error,
            })?;
    }
    control
        .set_ftp_ports(config.ftp_ports.clone())
        .map_err(StartError::Helper)?;
    Ok((control, options))
}

fn random_seed() -> Result<u64, StartError> {
    random().map(u64::from_ne_bytes).map_err(StartError::Random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_name_that_kernel_refuses_is_refused() {
        let check = |name: &str| check_interface_names(&[name.to_owned()]);
        for good in ["eth0", "eth0.100", "eth0.4095", "wan.x", ".7"] {
            assert!(check(good).is_ok(), "{good}");
        }
        for wrong in [
            "",
            ".",
            "..",
            "a-name-that-is-too-long",
            "eth0/1",
            "eth0:1",
            "eth 0",
        ] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
        let error = check("eth0.100=10.0.0.1/24").expect_err("it is an address");
        assert!(error.to_string().contains("ip link add"), "{error}");
    }
}
