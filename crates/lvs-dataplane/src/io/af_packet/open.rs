//! Opens packet sockets: options, filters, rings.

use std::io;
use std::sync::Arc;

use super::program::program;
use super::{AfPacket, Firsts, Inlet, Receiver, SocketCounters};
use crate::fast_path::FastPath;
use crate::io::BATCH;
use crate::io::tun::HostDevice;
use lvs_packet::steer::Plan;
use lvs_sys::{MessageBatch, PacketRing, PacketSocket, TurnBack, TurnedBack};

/// Size in bytes of a socket's receive buffer and send buffer: some hundred super-packets, or ten
/// thousand small frames.
const BUFFER: i32 = 16 << 20;

/// Size in bytes of a slot of the ring: a frame of 1,514 bytes, its virtio header and the headroom.
/// It is an odd number of cache lines, so that the beginnings of slots are spread over the cache.
pub const SLOT: usize = 27 * 64;

/// Minimum number of slots of all rings of an interface: 14 MiB.
const SLOTS: usize = 8192;

/// Size in bytes of a slot for a SYN, which usually has no data.
const FIRST_SLOT: usize = 5 * 64;

/// Minimum number of slots for SYNs: 5 MiB, enough for 400,000 SYNs a second while the worker does
/// not run for 40 ms.
const FIRST_SLOTS: usize = 16_384;

/// Each of several workers gets at least 1/`SHARE_LEAST` of the slots that one worker would get.
const SHARE_LEAST: usize = 4;

/// Size in bytes of the receive buffer for SYNs with data (TCP Fast Open).
const FIRST_BUFFER: i32 = 1 << 20;

/// Number of additional bytes before a frame in its slot. The virtio header and the packet's
/// headers then share a cache line, and a tunnel's headers fit before the packet.
const RESERVE: u32 = 62;

/// `PACKET_IGNORE_OUTGOING` of `linux/if_packet.h` (Linux 4.20).
const PACKET_IGNORE_OUTGOING: i32 = 23;

/// The reason why an interface cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The process has no permission to open packet sockets.
    #[error(
        "no permission to open a packet socket on {interface}: run as root, or give the program CAP_NET_RAW and \
         CAP_NET_ADMIN"
    )]
    Permission {
        /// Name of the interface.
        interface: String,
    },
    /// The interface does not exist.
    #[error(
        "the interface {interface} (index {ifindex}) does not exist: `ip link` lists the interfaces"
    )]
    NoInterface {
        /// Name of the missing interface.
        interface: String,
        /// The index of the missing interface.
        ifindex: u32,
    },
    /// Another error of a system call.
    #[error("cannot {step} for {interface}: {source}")]
    Os {
        /// Name of the interface.
        interface: String,
        /// The step that failed, as a verb with its object.
        step: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn of(ifindex: u32, name: &str, step: &'static str, source: io::Error) -> Self {
        let interface = name.to_owned();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Permission { interface },
            Some(libc::ENODEV | libc::ENXIO) => Self::NoInterface { interface, ifindex },
            _ => Self::Os {
                interface,
                step,
                source,
            },
        }
    }
}

/// Reinjects frames into the host: the dataplane sends them with a mark, and they arrive on the
/// interface again.
///
/// ```text
///  send with mark ─▶ egress: the program redirects it ─▶ ingress: the packet socket ignores it (mark)
///                                                                 the shield removes the mark and accepts it
///                                                                 the host receives the original frame
/// ```
///
/// If such a frame leaves the interface nevertheless, no host accepts it ([`lvs_sys::turned`]).
#[derive(Debug)]
pub(super) struct Back {
    pub(super) socket: PacketSocket,
    /// The attached program, which reinjects the frames of all workers. Only the first worker has
    /// it.
    _turned: Option<TurnedBack>,
}

impl Back {
    fn open(ifindex: u32, turn: &TurnBack, first: bool) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        socket.set_packet_option(libc::PACKET_VNET_HDR, 1)?;
        lvs_sys::set_send_buffer(&socket, BUFFER)?;
        // Attach the program before any frame has the mark.
        let turned = first.then(|| turn.attach(ifindex)).transpose()?;
        socket.bind_to_send(ifindex, turn.mark())?;
        Ok(Self {
            socket,
            _turned: turned,
        })
    }
}

impl AfPacket {
    /// Opens the interface with this index; `name` is for messages only, because a name can change.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(ifindex: u32, name: &str) -> Result<Self, OpenError> {
        Opening::new(ifindex, name, By::Ring).open()
    }

    /// As [`Self::open`], but without a ring: slower, and without memory for a ring.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_without_ring(ifindex: u32, name: &str) -> Result<Self, OpenError> {
        Opening::new(ifindex, name, By::Messages).open()
    }

    /// As [`Self::open`], but SYNs have a separate queue, and with `turn`, frames can be reinjected
    /// into the host ([`Self::give_back`]); both only if the host permits it. With `fast_path`, the
    /// kernel fast path is attached, whose frames the socket does not receive.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with(
        ifindex: u32,
        name: &str,
        turn: Option<&TurnBack>,
        fast_path: Option<&Arc<FastPath>>,
    ) -> Result<Self, OpenError> {
        let opening = Opening {
            turn,
            fast_path,
            ..Opening::new(ifindex, name, By::RingAndFirsts)
        };
        opening.open()
    }

    /// As [`Self::open_with`], for several packet workers. Returns a backend for each, and the
    /// group that divides received frames among them by `plan`. If the kernel cannot divide frames,
    /// the first worker receives all of them.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_group(
        ifindex: u32,
        name: &str,
        turn: Option<&TurnBack>,
        fast_path: Option<&Arc<FastPath>>,
        plan: &Plan,
    ) -> Result<(Vec<Self>, Option<Group>), OpenError> {
        let workers = usize::try_from(plan.workers).unwrap_or(1);
        let by = By::Ring;
        let first = Opening {
            turn,
            fast_path,
            workers,
            ..Opening::new(ifindex, name, by)
        };
        let mut all = vec![first.open()?];
        let group = all[0].inlet.socket.lead_group();
        let further = Opening {
            waits: true,
            ..first
        };
        for _ in 1..workers {
            all.push(further.open()?);
        }
        let grouped = group.and_then(|group| {
            for io in &all[1..] {
                io.inlet.socket.join_group(group)?;
            }
            // Without the program, the first worker receives all frames.
            for io in &all[1..] {
                let opened = further.filter(&io.inlet.socket);
                opened.map_err(|error| io::Error::other(error.to_string()))?;
            }
            Ok(group)
        });
        let group = match grouped {
            Ok(group) => group,
            Err(error) => {
                tracing::warn!(
                    interface = name,
                    "the first packet worker receives all frames, and passes those of other workers on: the kernel does not divide them (PACKET_FANOUT: {error})"
                );
                return Ok((all, None));
            }
        };
        let firsts = further.firsts_of_group(&all, group);
        let has_firsts = firsts.is_some();
        for (io, firsts) in all.iter_mut().zip(firsts.into_iter().flatten()) {
            io.firsts = Some(Box::new(firsts));
        }
        let socket = all[0].inlet.socket.another();
        let socket = socket.map_err(further.fail("copy a descriptor"))?;
        let group = Group {
            socket,
            firsts: has_firsts,
        };
        let divided = group.divide(plan);
        divided.map_err(further.fail("divide received frames among packet workers"))?;
        Ok((all, Some(group)))
    }
}

/// The sockets of several packet workers on one interface.
///
/// The fanout group contains one socket of each worker, then one of each worker for SYNs. The
/// kernel restores this order, in which the sockets were created, when the interface comes up
/// again.
#[derive(Debug)]
pub struct Group {
    socket: PacketSocket,
    firsts: bool,
}

impl Group {
    /// Divides received frames among the workers by `plan` from now on.
    ///
    /// # Errors
    /// The kernel refuses; the earlier plan then stays in force.
    pub fn divide(&self, plan: &Plan) -> io::Result<()> {
        self.socket.divide_by(&program(plan, self.firsts))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Ring,
    /// By a ring; SYNs by another ring.
    RingAndFirsts,
    Messages,
}

/// An interface that is being opened.
#[derive(Clone, Copy)]
struct Opening<'a> {
    ifindex: u32,
    name: &'a str,
    by: By,
    turn: Option<&'a TurnBack>,
    fast_path: Option<&'a Arc<FastPath>>,
    /// Number of workers that share the interface.
    workers: usize,
    /// Whether the socket must not receive before it joins the fanout group.
    waits: bool,
}

impl<'a> Opening<'a> {
    const fn new(ifindex: u32, name: &'a str, by: By) -> Self {
        Self {
            ifindex,
            name,
            by,
            turn: None,
            fast_path: None,
            workers: 1,
            waits: false,
        }
    }

    /// Returns the number of slots of each worker's ring, if one worker alone would have `slots`.
    fn share(&self, slots: usize) -> usize {
        (slots / self.workers).max(slots / SHARE_LEAST)
    }

    fn fail(&self, step: &'static str) -> impl FnOnce(io::Error) -> OpenError {
        let (ifindex, name) = (self.ifindex, self.name);
        move |source| OpenError::of(ifindex, name, step, source)
    }

    fn open(self) -> Result<AfPacket, OpenError> {
        let name = self.name;
        let socket = self.socket()?;
        let tx = lvs_sys::set_send_buffer(&socket, BUFFER).map_err(self.fail("set SO_SNDBUF"))?;
        let rx =
            lvs_sys::set_receive_buffer(&socket, BUFFER).map_err(self.fail("set SO_RCVBUF"))?;
        if rx < BUFFER || tx < BUFFER {
            tracing::info!(
                interface = name,
                receive = rx,
                send = tx,
                "socket buffers are smaller than requested: without CAP_NET_ADMIN, raise net.core.rmem_max and wmem_max"
            );
        }
        if self.waits {
            let nothing = socket.only_nothing();
            nothing.map_err(self.fail("set a filter that drops all frames"))?;
        } else {
            self.filter(&socket)?;
        }
        let ring = match self.by {
            By::Ring | By::RingAndFirsts => {
                PacketRing::new(&socket, self.share(SLOTS), SLOT, RESERVE)
            }
            By::Messages => Err(io::ErrorKind::Unsupported.into()),
        };
        if let (By::Ring | By::RingAndFirsts, Err(error)) = (self.by, &ring) {
            tracing::info!(
                interface = name,
                "frames are received by system calls, which is slower than a ring in memory (PACKET_RX_RING): {error}"
            );
        }
        let back = self.turn.and_then(|turn| match Back::open(self.ifindex, turn, !self.waits) {
            Ok(back) => Some(back),
            Err(error) => {
                tracing::warn!(
                    "packets are reinjected into the host on {device}, because they cannot be reinjected on {name} ({error}): add {device} to the host's rules that match an interface",
                    device = HostDevice::NAME
                );
                None
            }
        });
        // Attach the programs before the kernel refuses the first frame. The programs of the first
        // worker serve all workers.
        let ingress = self
            .fast_path
            .filter(|_| !self.waits)
            .map(|fast_path| fast_path.attach(self.ifindex));
        let ingress = ingress.transpose();
        let ingress = ingress.map_err(self.fail("attach the kernel fast path"))?;
        let bound = socket.bind(self.ifindex);
        bound.map_err(self.fail("bind a packet socket"))?;
        let inlet = Inlet::new(socket, ring.ok());
        let firsts = match self.by {
            By::RingAndFirsts if inlet.ring.is_some() => self.firsts(&inlet.socket),
            _ => None,
        };
        Ok(AfPacket {
            _ingress: ingress,
            interface: name.to_owned(),
            ifindex: self.ifindex,
            inlet,
            firsts,
            receiver: Receiver::new(),
            transmit: MessageBatch::new(BATCH),
            back,
            counters: SocketCounters::default(),
            was_down: false,
            kept: ((0, 0), 0),
        })
    }

    /// Opens a socket that does not receive yet.
    fn socket(&self) -> Result<PacketSocket, OpenError> {
        let socket = PacketSocket::new().map_err(self.fail("open a packet socket"))?;
        for (option, step) in [
            (libc::PACKET_VNET_HDR, "set PACKET_VNET_HDR"),
            (PACKET_IGNORE_OUTGOING, "set PACKET_IGNORE_OUTGOING"),
            (libc::PACKET_AUXDATA, "set PACKET_AUXDATA"),
        ] {
            let set = socket.set_packet_option(option, 1);
            set.map_err(self.fail(step))?;
        }
        Ok(socket)
    }

    /// Attaches the socket's filter, which refuses reinjected frames and the frames of the kernel
    /// fast path.
    fn filter(&self, socket: &PacketSocket) -> Result<(), OpenError> {
        if let Some(fast_path) = self.fast_path {
            // This filter also refuses frames with the mark.
            let filtered = fast_path.filter(socket);
            return filtered.map_err(self.fail("set the filter of the kernel fast path"));
        }
        let filtered = socket.only_incoming(self.turn.map(TurnBack::mark));
        filtered.map_err(self.fail("set the filter of received frames"))
    }

    /// Opens the socket for SYNs, and excludes SYNs from `others`. On failure, `others` receives
    /// the SYNs.
    fn firsts(&self, others: &PacketSocket) -> Option<Box<Firsts>> {
        let opened = self.first_inlet(|socket| others.share_with(socket));
        self.reported(opened)
            .map(|inlet| Box::new(Firsts::new(inlet)))
    }

    /// Opens a socket for SYNs for each worker; if one fails, for none.
    fn firsts_of_group(&self, workers: &[AfPacket], group: u16) -> Option<Vec<Firsts>> {
        let opened = workers.iter().map(|_| {
            let inlet = self.first_inlet(|socket| socket.join_group(group))?;
            Ok(Firsts::new(inlet))
        });
        // If one has failed, the others are closed, and the main sockets receive SYNs.
        self.reported(opened.collect())
    }

    fn reported<T>(&self, opened: Result<T, OpenError>) -> Option<T> {
        opened
            .inspect_err(|error| {
                tracing::info!(
                    interface = self.name,
                    "SYNs have no separate queue (PACKET_FANOUT), so that a SYN flood displaces other packets: {error}"
                );
            })
            .ok()
    }

    /// Opens a socket for SYNs. `join` adds it to a fanout group.
    fn first_inlet(
        &self,
        join: impl FnOnce(&PacketSocket) -> io::Result<()>,
    ) -> Result<Inlet, OpenError> {
        let socket = self.socket()?;
        let joined = socket
            .only_nothing()
            .and_then(|()| PacketRing::new(&socket, self.share(FIRST_SLOTS), FIRST_SLOT, RESERVE))
            .and_then(|ring| {
                // SYNs that are longer than a slot use the socket queue.
                lvs_sys::set_receive_buffer(&socket, FIRST_BUFFER)?;
                // The socket receives nothing until it joins the group.
                socket.bind(self.ifindex)?;
                join(&socket)?;
                Ok(ring)
            });
        let ring = joined.map_err(self.fail("open a socket for SYNs"))?;
        // On failure the socket is closed, and the main socket receives SYNs again.
        self.filter(&socket)?;
        Ok(Inlet::new(socket, Some(ring)))
    }
}
