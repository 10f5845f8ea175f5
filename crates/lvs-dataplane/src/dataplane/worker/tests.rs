use std::num::NonZeroUsize;

use lvs_core::{Control, Family, Forwarding, Options, ServerConfig, ServiceConfig, ServiceKey};

use super::*;
use crate::dataplane::hook::HookAction;
use crate::dataplane::kernel_path::WithDataplane;
use crate::host::view::{KnownPort, Tables, View};
use crate::io::memory::MemoryIo;
use crate::netlink::NetState;
use lvs_packet::frame::{Arena, Offload};
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortInfo;
use lvs_packet::settings::Settings;
use lvs_packet::steer::Steering;
use lvs_packet::wire::Mac;

const WORKERS: usize = 2;
const PORT: PortId = PortId(1);
const MAC: Mac = Mac([2; 6]);
const SERVER_MAC: Mac = Mac([4; 6]);
const VIRT: ([u8; 4], u16) = ([198, 51, 100, 1], 80);
const SERVER: ([u8; 4], u16) = ([10, 0, 0, 2], 8080);

/// A SYN from a port of a client, in a slot of a backend's memory.
fn syn(arena: &Arc<Arena>, slot: usize, port: u16) -> Frame {
    let builder = etherparse::PacketBuilder::ethernet2([6; 6], MAC.0)
        .ipv4([192, 0, 2, 7], VIRT.0, 64)
        .tcp(port, VIRT.1, 1, 1000)
        .syn();
    let mut bytes = Vec::with_capacity(builder.size(0));
    builder
        .write(&mut bytes, &[])
        .expect("writing to a vector succeeds");
    let mut lent = arena.lend(slot).expect("the slot is free");
    lent[64..64 + bytes.len()].copy_from_slice(&bytes);
    Frame::lent(lent, 64..64 + bytes.len(), Offload::default())
}

/// Two workers of one director with one service. `steering` divides the packets among them.
struct Bed {
    context: Arc<Context>,
    threads: Arc<Threads<Worker>>,
    workers: Vec<Worker>,
    queues: Vec<std::sync::mpsc::Receiver<Request>>,
    key: ServiceKey,
}

fn bed(steering: Option<Arc<Steering>>) -> Bed {
    let mut control = Control::new(Options {
        shards: WORKERS,
        max_connections: 256,
        ..Options::default()
    });
    let key = ServiceKey::tcp(VIRT.into());
    let config = ServiceConfig::new(Family::V4, "rr");
    control
        .add_service(key, config, None)
        .expect("the service is new");
    let server = ServerConfig::new(1, Forwarding::Nat);
    control
        .add_server(&key, SERVER.into(), &server, Instant::ZERO)
        .expect("the server is new");
    let shards: Vec<Shard> = (0..WORKERS).map_while(|n| control.shard(n)).collect();
    let context = Context::without_kernel(control);
    let threads = Arc::new(Threads::new(WORKERS).expect("descriptors are available"));
    let workers = NonZeroUsize::new(WORKERS).expect("WORKERS is not zero");
    let common = Arc::new(Common::new(Settings::UNLIMITED).with_workers(workers));
    let mut queues = Vec::new();
    let workers: Vec<Worker> = (0..)
        .zip(shards)
        .map(|(number, shard)| {
            let (requests, queue) = Requests::new();
            queues.push(queue);
            Worker::new(
                context.clone(),
                threads.clone(),
                number,
                shard,
                Equipment::new(common.clone()),
                requests,
                None,
            )
        })
        .collect();

    publish(&context, 1, SERVER.0, steering);
    Bed {
        context,
        threads,
        workers,
        queues,
        key,
    }
}

/// Publishes a snapshot with one link. Of its hosts, only `neighbour` is resolved.
fn publish(
    context: &Context,
    generation: u64,
    neighbour: [u8; 4],
    steering: Option<Arc<Steering>>,
) {
    let network = ([10, 0, 0, 0].into(), 24);
    let neighbour = (neighbour.into(), SERVER_MAC.0);
    let mut tables = Tables::new(NetState::of_link(7, network, neighbour));
    let port = KnownPort {
        ifindex: 7,
        name: Arc::from("test"),
        info: PortInfo {
            mac: MAC,
            mtu: 1500,
            ethernet: true,
            offload: true,
            gives_back: false,
        },
        down: None,
        decapsulates: false,
    };
    tables.set_port(PORT, port);
    tables.add_vip(VIRT.0.into());
    let intercept = Intercept::of(&context.control(), &Intercept::default());
    context.publish(Arc::new(View {
        generation,
        tables: Arc::new(tables),
        intercept: Arc::new(intercept),
        config: 1,
        steering,
        ..View::default()
    }));
}

/// The first port of a worker.
fn memory(worker: &mut Worker) -> &mut MemoryIo {
    match worker.ports.iter_mut().next() {
        Some((_, Port::Memory(io))) => io,
        _ => panic!("the worker has no port in memory"),
    }
}

/// Returns what a worker has sent: MAC address, destination address and port of each frame.
fn sent(worker: &mut Worker) -> Vec<(Vec<u8>, Vec<u8>, u16)> {
    let sent = memory(worker).take();
    let seen = sent.iter().map(|frame| {
        let bytes = frame.bytes();
        let port = u16::from_be_bytes([bytes[36], bytes[37]]);
        (bytes[..6].to_vec(), bytes[30..34].to_vec(), port)
    });
    seen.collect()
}

fn to_server() -> (Vec<u8>, Vec<u8>, u16) {
    (SERVER_MAC.0.to_vec(), SERVER.0.to_vec(), SERVER.1)
}

#[test]
fn query_about_connection_reports_why_it_is_not_offloaded() {
    let mut bed = bed(None);
    let worker = &mut bed.workers[0];
    worker.do_jobs();
    let mut question = Question {
        tuple: lvs_core::Tuple {
            protocol: lvs_core::Protocol::TCP,
            src: ([192, 0, 2, 7], 1000).into(),
            dst: VIRT.into(),
        },
        mark: None,
        interface: None,
    };
    let reported = worker.explain(&question);
    assert_eq!(reported.fast_path, Some(false), "{reported:?}");
    assert_eq!(reported.fast_path_why, WithDataplane::NotUsed.to_string());
    question.tuple.dst.set_port(VIRT.1 + 1);
    let reported = worker.explain(&question);
    assert_eq!(
        reported.fast_path, None,
        "a packet that opens no connection has a state in the fast path: {reported:?}"
    );
}

#[test]
fn two_workers_of_one_director_forward_packets_and_their_counts_are_added() {
    let Bed {
        context,
        threads,
        mut workers,
        queues,
        key,
    } = bed(None);
    assert_eq!(threads.taken(), 0);

    let arena = Arena::new(2 * WORKERS, 2048).expect("the memory can be mapped");
    for (number, worker) in workers.iter_mut().enumerate() {
        let mut io = MemoryIo::new();
        for place in 0..2 {
            let port = u16::try_from(4000 + 10 * number + place).expect("the number is small");
            io.input.push_back(syn(&arena, 2 * number + place, port));
        }
        worker.attach(PORT, Port::Memory(io));
    }
    std::thread::scope(|scope| {
        for worker in &mut workers {
            scope.spawn(|| worker.receive(PORT));
        }
    });
    assert_eq!(threads.taken(), 1, "a worker uses an older snapshot");
    assert_eq!(
        arena.lent(),
        0,
        "lent frames were not returned to the backend"
    );
    let reports = workers.iter_mut().map(Worker::report);
    let all = reports
        .reduce(Report::add)
        .expect("two workers send a report");
    assert_eq!((all.connections, all.capacity), (4, 512));
    let templates = all.decisions(3);
    let templates = templates.filter(|of| of.reason == "evicted_template");
    assert_eq!(
        templates.map(|of| of.packets.count).collect::<Vec<_>>(),
        [3]
    );
    let control = context.control();
    let server = control.service(&key).expect("the service exists").servers()[0].clone();
    assert_eq!(
        server.inactive() + server.active(),
        4,
        "the server's connections of both workers were not added up"
    );
    drop(control);
    for worker in &mut workers {
        assert_eq!(sent(worker), [to_server(), to_server()]);
    }
    assert!(queues.iter().all(|queue| queue.try_recv().is_err()));
}

#[test]
fn packet_that_waits_for_neighbour_leaves_before_later_packet() {
    let Bed {
        context,
        mut workers,
        ..
    } = bed(None);
    let worker = &mut workers[0];
    let arena = Arena::new(2, 2048).expect("the memory can be mapped");
    publish(&context, 2, [10, 0, 0, 9], None);
    let mut io = MemoryIo::new();
    io.input.push_back(syn(&arena, 0, 4000));
    worker.attach(PORT, Port::Memory(io));
    worker.receive(PORT);
    assert_eq!((sent(worker), worker.pipeline.held.len()), (vec![], 1));

    publish(&context, 3, SERVER.0, None);
    memory(worker).input.push_back(syn(&arena, 1, 4001));
    worker.receive(PORT);
    let sources = memory(worker).take();
    let sources = sources.iter().map(|frame| {
        let bytes = frame.bytes();
        u16::from_be_bytes([bytes[34], bytes[35]])
    });
    assert_eq!(sources.collect::<Vec<_>>(), [4000, 4001]);
}

/// A packet that arrives at any worker is handled once, by the worker that owns its connection.
#[test]
fn packet_at_wrong_worker_is_passed_to_its_owner() {
    let count = NonZeroUsize::new(WORKERS).expect("WORKERS is not zero");
    let steering = Arc::new(Steering::new(count, 7, false));
    let Bed {
        context,
        mut workers,
        key,
        ..
    } = bed(Some(steering.clone()));
    let ports = 4000..4040_u16;
    let arena = Arena::new(ports.len(), 2048).expect("the memory can be mapped");
    let mut io = MemoryIo::new();
    for (slot, port) in ports.clone().enumerate() {
        io.input.push_back(syn(&arena, slot, port));
    }
    workers[0].attach(PORT, Port::Memory(io));
    workers[1].attach(PORT, Port::Memory(MemoryIo::new()));
    workers[0].receive(PORT);
    assert_eq!(
        arena.lent(),
        0,
        "the backend's frame itself was passed to the other worker"
    );
    let homes = |home: usize| {
        let client = IpAddr::from([192, 0, 2, 7]);
        let ports = ports.clone();
        ports
            .filter(|&port| steering.of_client(client, port) == home)
            .count()
    };
    assert!(homes(0) > 5 && homes(1) > 5);
    let of = |worker: &mut Worker| worker.report().workers[0];
    let first = of(&mut workers[0]);
    assert_eq!(first.connections, homes(0) as u64);
    assert_eq!(first.handed_over, homes(1) as u64);
    assert_eq!(
        of(&mut workers[1]).connections,
        0,
        "the worker has a connection before it has read its inbox"
    );
    workers[1].take_parcels();
    let second = of(&mut workers[1]);
    let theirs = homes(1) as u64;
    assert_eq!((second.connections, second.taken), (theirs, theirs));
    assert_eq!((second.packets, second.handed_over), (0, 0));
    for (home, worker) in workers.iter_mut().enumerate() {
        assert_eq!(sent(worker), vec![to_server(); homes(home)]);
        let counters = &worker.pipeline.counters;
        let came = counters.received + counters.reassembled + counters.taken;
        assert_eq!(came, counters.accounted(), "worker {home}: {counters:?}");
    }
    let control = context.control();
    let server = control.service(&key).expect("the service exists").servers()[0].clone();
    assert_eq!(server.inactive() + server.active(), 40);
}

/// A SYN with FIN or ACK opens a connection, as in the kernel, so it counts as a SYN.
#[test]
fn syn_limiter_counts_all_packets_that_open_connections() {
    const ALONE: u8 = 0;
    const FIN: u8 = 1;
    const ACK: u8 = 2;
    let Bed { mut workers, .. } = bed(None);
    let worker = &mut workers[0];
    worker.attach(PORT, Port::Memory(MemoryIo::new()));
    let segment = |source: [u8; 4], port: u16, flags: u8| {
        let mut tcp = etherparse::TcpHeader::new(port, VIRT.1, 1, 1000);
        (tcp.syn, tcp.fin, tcp.ack) = (true, flags & FIN != 0, flags & ACK != 0);
        let builder = etherparse::PacketBuilder::ethernet2([6; 6], MAC.0)
            .ipv4(source, VIRT.0, 64)
            .tcp_header(tcp);
        let mut bytes = Vec::with_capacity(builder.size(0));
        builder
            .write(&mut bytes, &[])
            .expect("writing to a vector succeeds");
        Frame::from_bytes(&bytes)
    };
    let receive = |worker: &mut Worker, frames: Vec<Frame>| {
        let io = memory(worker);
        io.input.extend(frames);
        while worker.receive(PORT) {}
    };
    let client = [192, 0, 2, 7];
    let refused = |worker: &Worker| worker.pipeline.counters.dropped[FrameDrop::SynFlood.index()];
    receive(worker, vec![segment(client, 4000, ALONE)]);
    assert_eq!((sent(worker).len(), refused(worker)), (1, 0));
    for (nth, flags) in [ALONE, FIN, ACK].into_iter().enumerate() {
        worker.pipeline.syn_limiter.is_flooded(worker.context.now());
        let source = |n: u16| {
            [
                198,
                18,
                u8::try_from(nth).expect("the number is small"),
                n.to_be_bytes()[1],
            ]
        };
        let flood = (0..200).map(|n| segment(source(n), 5000 + n, flags));
        let before = refused(worker);
        receive(worker, flood.collect());
        let passed = sent(worker).len();
        assert!(
            passed < 100,
            "too many packets with SYN and {flags} passed: {passed} of 200"
        );
        let counted = refused(worker);
        assert_eq!(counted - before, 200 - passed as u64, "SYN and {flags}");
        // A packet of an existing connection is not counted.
        receive(worker, vec![segment(client, 4000, ACK)]);
        assert_eq!(sent(worker).len(), 1, "SYN and {flags}");
        assert_eq!(refused(worker), counted, "SYN and {flags}");
    }
}

/// A frame from another worker does not wait for the next timer if it arrives during a batch.
#[test]
fn frame_from_other_worker_during_round_is_processed_next() {
    struct Late(Arc<Threads<Worker>>, Option<Frame>);
    impl PacketHook for Late {
        fn packet(&mut self, _: &lvs_core::PacketMeta<'_>) -> HookAction {
            if let Some(frame) = self.1.take() {
                let mut late = vec![Parcel::Frame(PORT, frame)];
                let (taken, wake) = self.0.worker(0).inbox.put(1, &mut late);
                assert_eq!(taken, 1);
                if wake {
                    self.0.worker(0).mailbox.wake().notify();
                }
            }
            HookAction::Continue
        }
    }
    let Bed {
        threads,
        mut workers,
        ..
    } = bed(None);
    let arena = Arena::new(2, 2048).expect("the memory can be mapped");
    let late = Frame::from_bytes(syn(&arena, 1, 4001).bytes());
    let worker = &mut workers[0];
    worker.decider.hook = Some(Box::new(Late(threads.clone(), Some(late))));
    worker.attach(PORT, Port::Memory(MemoryIo::new()));
    let first = Frame::from_bytes(syn(&arena, 0, 4000).bytes());
    let (_, wake) = threads
        .worker(0)
        .inbox
        .put(1, &mut vec![Parcel::Frame(PORT, first)]);
    assert!(wake);
    threads.worker(0).mailbox.wake().notify();
    let more = worker.do_for_others(true);
    assert_eq!(sent(worker).len(), 1);
    let woken = threads.worker(0).mailbox.wake().take();
    assert!(more || woken, "the worker sleeps with packets in its inbox");
    worker.do_for_others(true);
    assert_eq!(sent(worker).len(), 1);
}

/// Real-time scheduling ends even during a long round.
#[test]
fn real_time_worker_is_demoted_during_long_round() {
    use super::super::priority::Pretended;

    let Bed { mut workers, .. } = bed(None);
    let [worker, ..] = &mut *workers else {
        panic!("there are two workers")
    };
    let mut io = MemoryIo::new();
    let arena = Arena::new(3 * BATCH, 2048).expect("the memory can be mapped");
    for slot in 0..3 * BATCH {
        io.input.push_back(syn(&arena, slot, 4000));
    }
    worker.attach(PORT, Port::Memory(io));
    let busy = |worker: &mut Worker| {
        let thread = Pretended::default();
        let hour = Duration::from_secs(3600);
        let past = SystemInstant::now() - hour;
        worker.priority = Some(Priority::of(Box::new(thread.clone()), true, past));
        assert!(thread.is_real_time());
        thread.compute(hour);
        thread
    };

    let thread = busy(worker);
    worker.receive(PORT);
    assert!(
        !thread.is_real_time(),
        "the worker was not demoted while it received batches of a port"
    );

    let thread = busy(worker);
    let frame = Frame::from_bytes(syn(&arena, 0, 4000).bytes());
    let mut parcels = vec![Parcel::Frame(PORT, frame)];
    worker.link().inbox.put(1, &mut parcels);
    worker.take_parcels();
    assert!(
        !thread.is_real_time(),
        "the worker was not demoted while it processed frames of other workers"
    );

    let thread = busy(worker);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    for _ in 0..2 {
        let (seen, thread) = (seen.clone(), thread.clone());
        worker.link().mailbox.post(move |_| {
            let mut seen = seen.lock().expect("no thread panicked with the lock");
            seen.push(thread.is_real_time());
        });
    }
    worker.do_jobs();
    assert_eq!(
        *seen.lock().expect("no thread panicked with the lock"),
        [true, false],
        "the worker was not demoted between two jobs"
    );

    let thread = busy(worker);
    worker.do_for_others(false);
    assert!(
        !thread.is_real_time(),
        "the worker was not demoted while it ran timers"
    );
    assert_eq!(worker.report().workers[0].demoted, 1);
}

/// A worker does not wait for a stuck worker to which it passes packets: it drops only the packets
/// for which the stuck worker's inbox has no room.
#[test]
fn stuck_worker_loses_only_its_own_packets() {
    let count = NonZeroUsize::new(WORKERS).expect("WORKERS is not zero");
    let steering = Arc::new(Steering::new(count, 7, false));
    let Bed { mut workers, .. } = bed(Some(steering.clone()));
    let client = IpAddr::from([192, 0, 2, 7]);
    let of = |home: usize| {
        let port = (1024..).find(|&port| steering.of_client(client, port) == home);
        port.expect("half of the ports belong to this worker")
    };
    let (own, others) = (of(0), of(1));
    workers[0].attach(PORT, Port::Memory(MemoryIo::new()));
    let rounds = super::super::inbox::PARCELS_MAX / 32 + 4;
    for _ in 0..rounds {
        let arena = Arena::new(33, 2048).expect("the memory can be mapped");
        let Some((_, Port::Memory(io))) = workers[0].ports.iter_mut().next() else {
            panic!("the port exists")
        };
        for slot in 0..32 {
            io.input.push_back(syn(&arena, slot, others));
        }
        io.input.push_back(syn(&arena, 32, own));
        while workers[0].receive(PORT) {}
    }
    let seen = workers[0].report().workers[0];
    assert_eq!(seen.handed_over, super::super::inbox::PARCELS_MAX as u64);
    assert_eq!(seen.busy, (rounds * 32) as u64 - seen.handed_over);
    // On a busy machine, the limiter refuses some SYNs.
    let refused = workers[0]
        .pipeline
        .counters
        .dropped_for(FrameDrop::SynFlood);
    let left = sent(&mut workers[0]).len() as u64;
    assert_eq!(
        left + refused,
        rounds as u64,
        "frames of this worker were lost"
    );
    let counters = &workers[0].pipeline.counters;
    assert_eq!(counters.received, counters.accounted(), "{counters:?}");
}
