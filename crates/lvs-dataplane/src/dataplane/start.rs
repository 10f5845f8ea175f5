//! The start of a dataplane, in four phases: open the connection tables, attach to the host, take
//! over the connections of a predecessor, and start the threads.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lvs_core::api::{Call, Done, Failure, FailureCode, LocalPool};
use lvs_core::mark::MarkRule;
use lvs_core::sync::SyncDaemon;
use lvs_core::{Control, Instant, Options, Shard};
use tracing::{info, warn};

use super::config::{Config, StartError, check_interface_names};
use super::context::{Context, KernelPath};
use super::handle::Handle;
use super::hook::PacketHook;
use super::kernel_path::{self, Against, Wanted};
use super::peers::Peers;
use super::successor::{self, Inheritance, Keeping, Left, Shards};
use super::threads::{Requests, Threads};
use super::warm_state::WarmState;
use super::worker::{Equipment, Worker};
use super::{pages, recent, rules};
use crate::fast_path::OFFLOAD_AFTER;
use crate::host::keeper::Keeper;
use crate::host::setup::{Outliving, Setup};
use crate::host::update::Update;
use crate::host::view::View;
use crate::warm_restart::{StateKeeper, WarmRestart};
use lvs_api::Address;
use lvs_packet::common::Common;
use lvs_packet::pipeline::Request;
use lvs_packet::settings::Settings;
use lvs_packet::steer::Steering;
use lvs_process::server::{self, Permissions, Server};
use lvs_sys::TablePages;
use lvs_sys::random;

/// A running dataplane. Dropping this value stops the dataplane.
#[derive(Debug)]
pub struct Dataplane {
    handle: Arc<Handle>,
    /// The packet workers, the keeper, and the thread that starts a predecessor's synchronisation
    /// daemons when their interfaces are up.
    threads: Vec<JoinHandle<()>>,
    server: Option<server::Handle>,
}

impl Dataplane {
    /// Starts a dataplane in this thread's network namespace. When it returns successfully, the
    /// control socket answers and packets are forwarded.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        check_interface_names(&config.interfaces)?;
        let address = config.address.clone().unwrap_or_default();
        // This check is first: a second dataplane must not change the host.
        let permissions = Permissions {
            writers: config.group,
            readers: config.readers,
        };
        let server = Server::bind(&address, permissions)?;
        let address = server.address().clone();
        let workers = config.workers()?;
        let (control, options) = new_control(&config, workers)?;
        let mut setup = Setup {
            backend: config.backend,
            interfaces: config.interfaces,
            own_all_vips: config.own_vips,
            fast_path: None,
            xdp: config.xdp,
            xdp_auto: config.xdp_auto,
            steering: None,
            warm_restart: Outliving::default(),
        };
        let wanted = Wanted {
            wanted: kernel_path::with_xdp(config.fast_path, !setup.xdp.is_empty())?,
            wide: config
                .max_ipv6
                .unwrap_or_else(|| {
                    let all = options.max_connections.saturating_mul(workers.get());
                    kernel_path::wide(all)
                })
                .div_ceil(workers.get()),
            warm_restart: config.warm_restart,
        };
        let against = kernel_path::against(config.hook.is_some(), setup.backend, &config.settings);
        let run = Run {
            hook: config.hook,
            real_time: config.real_time,
            offload_after: config.fast_path_after.unwrap_or(OFFLOAD_AFTER).get(),
        };

        let xdp = setup.xdp_auto || !setup.xdp.is_empty();
        let steering = steering(workers, &options, &config.ftp_ports);
        let tables = ConnTables::open(&control, &steering, against, xdp, wanted)?;
        let steering = tables.steering(steering);
        setup.steering = (workers.get() > 1).then(|| Arc::new(steering));
        let mut host = OnHost::attach(control, workers, setup, config.settings, tables)?;
        let daemons = host.take_over();
        let mut dataplane = host.run(run)?;

        dataplane.start_daemons(daemons)?;
        let pool = LocalPool {
            addresses: config.local_addresses,
            hairpin: config.hairpin,
        };
        dataplane.configure(pool, &config.marks, config.rules)?;
        if let Some(config) = config.peers.filter(|config| !config.peers.is_empty()) {
            let (context, threads) = (&dataplane.handle.context, &dataplane.handle.threads);
            let peers = Peers::start(&config, context, threads).map_err(StartError::Peers)?;
            dataplane.handle.use_peers(peers);
        }
        let served = server
            .serve(dataplane.handle())
            .map_err(StartError::Thread)?;
        dataplane.handle.use_lock(served.leaving());
        dataplane.server = Some(served);
        info!("ready at {address}");
        Ok(dataplane)
    }

    fn configure(
        &self,
        pool: LocalPool,
        marks: &[MarkRule],
        rules: Option<(String, String)>,
    ) -> Result<(), StartError> {
        if !pool.addresses.is_empty() || pool.hairpin {
            self.apply(vec![Call::LocalSet(pool)])
                .map_err(|failure| StartError::LocalAddresses(failure.message))?;
        }
        if self.handle.keeping.is_successor() {
            if rules.is_some() {
                info!(
                    "--rules is not applied: the services and rules for marks of the previous dataplane were taken over"
                );
            }
            return Ok(());
        }
        if !marks.is_empty() {
            let rules = marks.iter().map(ToString::to_string).collect();
            self.apply(vec![Call::MarkSet { rules }])
                .map_err(|failure| StartError::Marks(failure.message))?;
        }
        match rules {
            Some((text, name)) => Ok(rules::apply(&self.handle, &text, &name)?),
            None => Ok(()),
        }
    }

    /// Starts the synchronisation daemons of a predecessor. A thread waits for interfaces that are
    /// missing or down.
    fn start_daemons(&mut self, daemons: Vec<SyncDaemon>) -> Result<(), StartError> {
        let waiting = start_daemons(&self.handle, daemons);
        if waiting.is_empty() {
            return Ok(());
        }
        let handle = self.handle.clone();
        self.spawn("lvs-sync-waits".to_owned(), move || {
            start_daemons_in_time(&handle, waiting);
        })
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

    /// Changes services, servers or settings, as the control socket does: all of these changes, or
    /// none.
    ///
    /// # Errors
    /// Returns the refusal that a client would get; then nothing has changed.
    pub fn apply(&self, changes: Vec<Call>) -> Result<Done, Failure> {
        self.handle.apply(changes, true)
    }

    /// Returns the address of the control socket; `None` while it is not open.
    pub fn address(&self) -> Option<&Address> {
        self.server.as_ref().map(server::Handle::address)
    }

    /// Returns a handle to the dataplane, for example to stop it from another thread.
    pub fn handle(&self) -> Arc<Handle> {
        self.handle.clone()
    }

    /// Waits until the dataplane has stopped.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                tracing::error!("the thread {name} has panicked");
            }
        }
        // The synchronisation daemons end here: they send the last messages of the packet workers
        // first.
        self.handle.threads.daemons.end();
        if let Some(peers) = self.handle.peers() {
            peers.end();
        }
    }
}

impl Drop for Dataplane {
    fn drop(&mut self) {
        self.handle.stop();
        self.wait();
    }
}

/// Phase 1: the connection tables.
struct ConnTables {
    kernel: KernelPath,
    state: Option<Arc<dyn WarmState>>,
    shards: Vec<Shard>,
    /// The connections of a predecessor, which the dataplane can take over.
    inheritance: Option<Inheritance>,
    /// The pages of tables in the program's own memory.
    pages: Vec<Option<TablePages>>,
}

impl ConnTables {
    /// Opens the tables in BPF maps, in memory that a state keeper keeps, or in the process's own
    /// memory.
    fn open(
        control: &Control,
        steering: &Steering,
        against: Option<Against>,
        xdp: bool,
        mut wanted: Wanted,
    ) -> Result<Self, StartError> {
        let workers = steering.workers();
        let (kernel, opened) = match wanted.open(control, steering, against, xdp)? {
            Ok((fast_path, memories)) => {
                if let Some(state_keeper) = wanted.warm_restart {
                    state_keeper.end();
                }
                let made = successor::shards(control, &*fast_path, memories, None);
                let state: Arc<dyn WarmState> = fast_path.clone();
                (Ok(fast_path), Some((state, made)))
            }
            Err(why_not) => {
                let state_keeper = wanted.warm_restart;
                let opened = state_keeper
                    .and_then(|state_keeper| open_warm_restart(control, workers, state_keeper));
                (Err(why_not), opened)
            }
        };
        if let Some((state, (shards, inheritance))) = opened {
            return Ok(Self {
                kernel,
                state: Some(state),
                shards,
                inheritance,
                pages: Vec::new(),
            });
        }
        let made = (0..workers.get()).map(|n| pages::shard(control, n));
        let made: Vec<_> = made.collect::<Result<_, _>>()?;
        let (shards, pages) = made.into_iter().flatten().unzip();
        Ok(Self {
            kernel,
            state: None,
            shards,
            inheritance: None,
            pages,
        })
    }

    /// The rule that assigns connections to workers: a predecessor's, if its connections are stored
    /// by that rule; otherwise `steering`.
    fn steering(&self, steering: Steering) -> Steering {
        match &self.kernel {
            Ok(fast_path) => fast_path.steering().clone(),
            Err(_) => steering,
        }
    }
}

/// Phases 2 and 3: a dataplane that is attached to the host, and whose threads do not run yet.
struct OnHost {
    handle: Arc<Handle>,
    keeper: Keeper,
    shards: Vec<Shard>,
    pages: Vec<Option<TablePages>>,
    requests: Vec<Requests>,
    equipments: Vec<Equipment>,
    /// The connections of a predecessor, and the state to restore after them.
    left: Option<(Inheritance, Left)>,
    steering: Option<Arc<Steering>>,
}

impl OnHost {
    /// Restores the services of a predecessor, and attaches to the host.
    fn attach(
        control: Control,
        workers: NonZeroUsize,
        mut setup: Setup,
        settings: Settings,
        tables: ConnTables,
    ) -> Result<Self, StartError> {
        let ConnTables {
            kernel,
            state,
            shards,
            inheritance,
            pages,
        } = tables;
        setup.fast_path = kernel.as_ref().ok().cloned();
        let context = Arc::new(Context::new(control, kernel));
        let threads = Threads::new(workers.get()).map_err(StartError::Thread)?;
        if let Some(state) = &state {
            setup.warm_restart = state.outliving();
            // A successor sets its clock after it has taken over the connections.
            if inheritance.is_none() {
                state.set_clock(context.now());
            }
        }
        let midnight = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .saturating_sub(context.now().saturating_since(Instant::ZERO));
        let common = Common::new(settings).with_midnight(midnight);
        let common = Arc::new(common.with_workers(workers));
        let (requests, queues): (Vec<_>, Vec<Receiver<Request>>) =
            shards.iter().map(|_| Requests::new()).unzip();
        let left = state.as_ref().zip(inheritance);
        let left = left.map(|(state, inheritance)| {
            let (mut control, now) = (context.control(), context.now());
            let left = successor::restore(&mut control, &View::default(), &**state, now);
            (inheritance, left)
        });
        let steering = setup.steering.clone();
        let handle = Handle::new(context, Arc::new(threads), Keeping::new(state));
        let keeper = Keeper::new(handle.clone(), setup, queues)?;
        // Created before connections are assigned to workers.
        let equipments = shards.iter().map(|_| Equipment::new(common.clone()));
        let equipments = equipments.collect();
        Ok(Self {
            handle,
            keeper,
            shards,
            pages,
            requests,
            equipments,
            left,
            steering,
        })
    }

    /// Takes over the connections of a predecessor. Returns the predecessor's synchronisation
    /// daemons.
    fn take_over(&mut self) -> Vec<SyncDaemon> {
        let Some(state) = self.handle.keeping.state() else {
            return Vec::new();
        };
        let mut daemons = Vec::new();
        if let Some((inheritance, left)) = self.left.take() {
            // The sockets queue packets that arrive in the meantime; the host does not see them.
            for warning in self.keeper.update(Update::All) {
                warn!("{warning}");
            }
            self.keeper.publish();
            let (context, shards) = (&self.handle.context, &mut self.shards);
            let (records, steering) = (&left.records, self.steering.as_deref());
            successor::take_over(context, shards, state, inheritance, records, steering);
            daemons = left.daemons;
        }
        state.keep_shield(&self.keeper);
        daemons
    }

    /// Phase 4: starts the packet workers and the keeper.
    fn run(self, run: Run) -> Result<Dataplane, StartError> {
        let Run {
            mut hook,
            real_time,
            offload_after,
        } = run;
        let (context, threads) = (&self.handle.context, &self.handle.threads);
        let count = NonZeroUsize::new(self.shards.len());
        let several = count.filter(|count| count.get() > 1);
        let cpus = several.map_or_else(Vec::new, own_cpus);
        let mut workers = Vec::new();
        let mut pages = self.pages.into_iter();
        let parts = self.shards.into_iter().zip(self.requests);
        for (number, ((shard, requests), equipment)) in parts.zip(self.equipments).enumerate() {
            let (context, threads, hook) = (context.clone(), threads.clone(), hook.take());
            let mut worker =
                Worker::new(context, threads, number, shard, equipment, requests, hook);
            worker.use_fast_path(offload_after);
            if let Some(Some(pages)) = pages.next() {
                worker.use_pages(pages);
            }
            if let Some(&cpu) = cpus.get(number) {
                worker.run_on(cpu);
            }
            workers.push(worker);
        }
        let handle = self.handle.clone();
        let mut dataplane = Dataplane {
            handle: self.handle,
            threads: Vec::new(),
            server: None,
        };
        for (number, worker) in workers.into_iter().enumerate() {
            dataplane.spawn(format!("lvs-worker-{number}"), move || {
                worker.run(real_time);
            })?;
        }
        let sampled = Arc::downgrade(&handle);
        let sampler = recent::start(move || {
            if let Some(handle) = sampled.upgrade() {
                handle.sample_reasons();
            }
        });
        let sampler = sampler.map_err(StartError::Thread)?;
        handle.use_sampler(sampler);
        let keeper = self.keeper;
        dataplane.spawn("lvs-keeper".to_owned(), move || {
            keeper.run(handle.threads.keeper());
            handle.threads.drop_ports();
            if let Some(state) = handle.keeping.state() {
                state.end();
            }
        })?;
        Ok(dataplane)
    }
}

struct Run {
    hook: Option<Box<dyn PacketHook>>,
    real_time: bool,
    /// Number of packets from the client after which a connection is offloaded.
    offload_after: u32,
}

/// Interval between two attempts to start a synchronisation daemon whose interface is missing or
/// down.
const AGAIN: Duration = Duration::from_millis(500);

/// Starts the synchronisation daemons of a predecessor. Returns the daemons whose interface is
/// missing or down, and logs other failures.
fn start_daemons(handle: &Handle, daemons: Vec<SyncDaemon>) -> Vec<SyncDaemon> {
    let starts = |daemon: &SyncDaemon| {
        let started = handle.apply(vec![Call::DaemonStart(daemon.clone())], false);
        let Err(failure) = started else { return false };
        let waits = matches!(
            failure.code,
            FailureCode::NoDevice | FailureCode::Unreachable
        );
        // An operator has started a daemon in the meantime: keep it.
        if !waits && failure.code != FailureCode::Running {
            warn!(
                "the synchronisation daemon of the previous dataplane on {} was not restored: {}; start it with `lvsadm --start-daemon`",
                daemon.interface, failure.message
            );
        }
        waits
    };
    daemons.into_iter().filter(starts).collect()
}

/// Starts synchronisation daemons as soon as their interfaces are up.
fn start_daemons_in_time(handle: &Handle, mut waiting: Vec<SyncDaemon>) {
    for daemon in &waiting {
        warn!(
            "a synchronisation daemon of the previous dataplane starts as soon as the interface {} is up",
            daemon.interface
        );
    }
    while !waiting.is_empty() && !handle.context.is_stopping() {
        thread::sleep(AGAIN);
        waiting = start_daemons(handle, waiting);
    }
}

/// Opens the memory that a state keeper keeps, and creates shards whose tables are in this memory.
/// `None` after a failure, which is logged.
fn open_warm_restart(
    control: &Control,
    workers: NonZeroUsize,
    state_keeper: StateKeeper,
) -> Option<(Arc<dyn WarmState>, Shards)> {
    let opened = WarmRestart::open(control.layout(), workers.get(), state_keeper);
    let made = opened.and_then(|warm_restart| {
        let (memories, left) = (warm_restart.memories()?, warm_restart.memories_left()?);
        let shards = successor::shards(control, &warm_restart, memories, left);
        Ok((Arc::new(warm_restart) as Arc<dyn WarmState>, shards))
    });
    made.inspect_err(|error| {
        warn!("a warm restart is not possible ({error}): if this dataplane is killed, its connections end");
    })
    .ok()
}

/// Returns the rule that divides packets among several workers.
fn steering(workers: NonZeroUsize, options: &Options, ftp_ports: &[u16]) -> Steering {
    // The connection table has `options.seed`: with another seed, the two hashes of a connection
    // are independent.
    let seed = options.seed.rotate_left(32) ^ 0x6c76_7377_6f72_6b65;
    Steering::new(workers, seed, !ftp_ports.is_empty())
}

/// The processors that this process may use: each worker is bound to a different one. Empty if
/// there are fewer processors than workers.
fn own_cpus(workers: NonZeroUsize) -> Vec<usize> {
    let cpus = lvs_sys::permitted_cpus();
    if cpus.len() < workers.get() {
        info!(
            "packet workers are not bound to processors: {workers} workers, and {} processors that this process may use",
            cpus.len()
        );
        return Vec::new();
    }
    cpus
}

/// Creates the control half from the configuration.
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
