//! Packet sockets: every frame of one Ethernet interface, 64 KiB aggregates and unfinished checksums included.
//!
//! Frames are received in a ring (`TPACKET_V2`), where they are changed and sent from; a frame that does not fit its slot
//! comes with `recvmmsg`, when it is its turn. The newer ring, `TPACKET_V3`, hands over a block only when it is full or a
//! millisecond has passed, which would be the latency of an idle director; a slot of this one can be read as soon as the
//! kernel has filled it, and under load it is no slower as long as its slots do not share a few places of the cache
//! ([`SLOT`]). Where rings are not permitted, everything comes with `recvmmsg`, straight into its buffers.
//!
//! Frames are sent without `PACKET_QDISC_BYPASS`, because with it a device that cannot segment refuses aggregates
//! (`ENOBUFS`) that the ordinary path cuts in software, and the host's own rules for what leaves are passed by.
//!
//! The socket sees a *copy* of what the host receives, before the host's own filters; what the host must not see is the
//! business of the [shield](crate::host::shield). Frames for other stations are delivered too (a promiscuous device, a
//! macvlan child of the same interface): the caller compares the destination with the interface's own address.

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::tun::HostDevice;
use super::{BATCH, Capabilities, PacketIo, vnet};
use crate::in_kernel::InKernel;
use crate::packet::frame::{Frame, MAX_FRAME};
use crate::packet::wire::{Mac, vlan};
use crate::sys::{
    self, MessageBatch, PacketRing, PacketSocket, RingFrame, TcLink, TurnBack, TurnedBack,
};

/// Receive and send buffer of a socket: room for some hundred aggregates, or ten thousand small frames.
const BUFFER: i32 = 16 << 20;

/// Bytes of a slot of the ring: a frame of 1,514 bytes, its virtio header and the headroom. An odd number of cache lines, so
/// that the beginnings of all slots are spread over the cache.
pub const SLOT: usize = 27 * 64;

/// Slots of the ring, at least: 14 MiB of memory for each interface.
const SLOTS: usize = 8192;

/// Bytes in front of a frame in its slot beside the usual: the virtio header and those of the packet are in one cache line,
/// and there is room for the headers of a tunnel.
const RESERVE: u32 = 62;

/// How long one call of `send` may wait in all for a full queue.
const SEND_PATIENCE: Duration = Duration::from_millis(1);

/// What keeps an interface from being opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The process may not open packet sockets.
    #[error(
        "no permission to open a packet socket on {interface}: run as root, or give the program CAP_NET_RAW and \
         CAP_NET_ADMIN"
    )]
    Permission {
        /// The interface.
        interface: String,
    },
    /// There is no such interface.
    #[error("there is no interface {interface} (index {ifindex}): `ip link` lists them")]
    NoInterface {
        /// The interface.
        interface: String,
        /// The index that was asked for.
        ifindex: u32,
    },
    /// Anything else.
    #[error("cannot {step} for {interface}: {source}")]
    Os {
        /// The interface.
        interface: String,
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What the backend itself has counted since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCounters {
    /// Frames that were not sent because a queue or buffer was full.
    pub send_full: u64,
    /// Frames that were not sent because they were longer than the device takes.
    pub send_too_long: u64,
    /// Frames that were not sent because the interface was down or gone.
    pub send_down: u64,
    /// Frames that were not sent for another reason.
    pub send_other: u64,
    /// Frames that came in cut, being longer than a buffer; they are not handed over.
    pub receive_cut: u64,
}

/// A way back for frames that the host should have seen: sent with a mark, they come in again on the interface.
///
/// ```text
///  send, marked ─▶ egress: program turns it round ─▶ ingress: our packet socket does not take it (the mark)
///                                                            the shield takes the mark off and lets it pass
///                                                            the host sees it as it came
/// ```
///
/// What leaves in spite of that is nobody's on the wire ([`sys::turned`]).
#[derive(Debug)]
struct Back {
    socket: PacketSocket,
    _turned: TurnedBack,
}

impl Back {
    fn open(ifindex: u32, turn: &TurnBack) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        socket.set_packet_option(libc::PACKET_VNET_HDR, 1)?;
        sys::set_send_buffer(&socket, BUFFER)?;
        // Nothing may leave with the mark before the program is there.
        let turned = turn.attach(ifindex)?;
        socket.bind_to_send(ifindex, turn.mark())?;
        Ok(Self {
            socket,
            _turned: turned,
        })
    }
}

/// A packet socket on one Ethernet interface.
#[derive(Debug)]
pub struct AfPacket {
    /// The path in the kernel takes what the socket's filter refuses: it goes first.
    _ingress: Option<TcLink>,
    socket: PacketSocket,
    interface: String,
    ifindex: u32,
    ring: Option<PacketRing>,
    receive: MessageBatch,
    transmit: MessageBatch,
    /// Buffers of the caller's that the ring's have taken the place of: what comes by the queue needs them.
    spare: Vec<Frame>,
    back: Option<Back>,
    counters: SocketCounters,
    kernel_drops: u64,
    was_down: bool,
}

/// How frames are received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Ring,
    Messages,
}

impl AfPacket {
    /// Opens the interface with this index; `name` is for messages only, as a name can change.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(ifindex: u32, name: &str) -> Result<Self, OpenError> {
        Self::open_for(ifindex, name, By::Ring, false, None, None)
    }

    /// As [`Self::open`], without a ring: slower, and without its memory.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_without_ring(ifindex: u32, name: &str) -> Result<Self, OpenError> {
        Self::open_for(ifindex, name, By::Messages, false, None, None)
    }

    /// As [`Self::open_without_ring`], for frames with a VLAN tag only.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_tagged(ifindex: u32, name: &str) -> Result<Self, OpenError> {
        Self::open_for(ifindex, name, By::Messages, true, None, None)
    }

    /// As [`Self::open`], with a way back for what the host should have seen ([`Self::give_back`]), and without the frames
    /// that the path in the kernel takes, where that is possible.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with(
        ifindex: u32,
        name: &str,
        turn: Option<&TurnBack>,
        in_kernel: Option<&InKernel>,
    ) -> Result<Self, OpenError> {
        Self::open_for(ifindex, name, By::Ring, false, turn, in_kernel)
    }

    fn open_for(
        ifindex: u32,
        name: &str,
        by: By,
        tagged: bool,
        turn: Option<&TurnBack>,
        in_kernel: Option<&InKernel>,
    ) -> Result<Self, OpenError> {
        let fail = |step: &'static str| {
            move |source: io::Error| match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => OpenError::Permission {
                    interface: name.to_owned(),
                },
                Some(libc::ENODEV | libc::ENXIO) => OpenError::NoInterface {
                    interface: name.to_owned(),
                    ifindex,
                },
                _ => OpenError::Os {
                    interface: name.to_owned(),
                    step,
                    source,
                },
            }
        };
        let socket = PacketSocket::new().map_err(fail("open a packet socket"))?;
        for (option, step) in [
            (libc::PACKET_VNET_HDR, "set PACKET_VNET_HDR"),
            (PACKET_IGNORE_OUTGOING, "set PACKET_IGNORE_OUTGOING"),
            (libc::PACKET_AUXDATA, "set PACKET_AUXDATA"),
        ] {
            socket.set_packet_option(option, 1).map_err(fail(step))?;
        }
        let rx = sys::set_receive_buffer(&socket, BUFFER).map_err(fail("set SO_RCVBUF"))?;
        let tx = sys::set_send_buffer(&socket, BUFFER).map_err(fail("set SO_SNDBUF"))?;
        if rx < BUFFER || tx < BUFFER {
            tracing::info!(
                interface = name,
                receive = rx,
                send = tx,
                "socket buffers are smaller than wished: without CAP_NET_ADMIN, raise net.core.rmem_max and wmem_max"
            );
        }
        if tagged {
            socket.only_tagged().map_err(fail("filter for tags"))?;
        }
        if let Some(in_kernel) = in_kernel {
            // It minds the mark as well.
            let filtered = socket.only_passed_by(in_kernel.filter());
            filtered.map_err(fail("filter for the path in the kernel"))?;
        } else if let Some(turn) = turn {
            let filtered = socket.without_mark(turn.mark());
            filtered.map_err(fail("filter for marks"))?;
        }
        let ring = match by {
            By::Ring => PacketRing::new(&socket, SLOTS, SLOT, RESERVE),
            By::Messages => Err(io::ErrorKind::Unsupported.into()),
        };
        if let (By::Ring, Err(error)) = (by, &ring) {
            tracing::info!(
                interface = name,
                "frames are received by system calls, which is slower than a ring in memory (PACKET_RX_RING): {error}"
            );
        }
        let back = turn.and_then(|turn| match Back::open(ifindex, turn) {
            Ok(back) => Some(back),
            Err(error) => {
                tracing::warn!(
                    "what is given back to the host cannot come in by {name} ({error}), but by {}: rules of the host that name an \
                     interface should name that one too",
                    HostDevice::NAME
                );
                None
            }
        });
        // Before the first frame is refused.
        let ingress = in_kernel.map(|in_kernel| in_kernel.attach(ifindex));
        let ingress = ingress.transpose();
        let ingress = ingress.map_err(fail("attach the path in the kernel"))?;
        socket.bind(ifindex).map_err(fail("bind a packet socket"))?;
        Ok(Self {
            _ingress: ingress,
            socket,
            interface: name.to_owned(),
            ifindex,
            ring: ring.ok(),
            receive: MessageBatch::new(BATCH),
            transmit: MessageBatch::new(BATCH),
            spare: Vec::new(),
            back,
            counters: SocketCounters::default(),
            kernel_drops: 0,
            was_down: false,
        })
    }

    /// The interface's name when it was opened.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Has the interface take in frames for a group, or no longer.
    ///
    /// # Errors
    /// If the interface is gone.
    pub fn set_group(&self, group: Mac, member: bool) -> io::Result<()> {
        self.socket.set_group(self.ifindex, group.0, member)
    }

    /// The interface's index.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Gives frames back to the host as if they had just come in; returns how many were refused. Without a way back
    /// ([`Self::open_with`]) all are.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        match &self.back {
            Some(back) => {
                for frame in &mut *frames {
                    sys::turned(frame.bytes_mut());
                }
                send(&back.socket, &mut self.transmit, &mut self.counters, frames)
            }
            None => frames.len(),
        }
    }

    /// What the backend has counted.
    pub fn counters(&self) -> SocketCounters {
        self.counters
    }

    /// Frames that came in and were lost, since the interface was opened: for want of room in the ring or the receive buffer,
    /// or because they were cut. Asks the kernel.
    pub fn drops(&mut self) -> u64 {
        // The kernel's counter starts again with each reading.
        if let Ok(stats) = self.socket.take_stats() {
            self.kernel_drops += u64::from(stats.drops);
        }
        self.kernel_drops + self.counters.receive_cut
    }

    /// The error for an interface that is down or gone.
    fn down(&self, err: io::Error) -> io::Error {
        let (kind, what) = match self.socket.interface() {
            Ok(None) => (io::ErrorKind::NotFound, "gone"),
            _ => (io::ErrorKind::NetworkDown, "down"),
        };
        io::Error::new(
            kind,
            format!("interface {} is {what}: {err}", self.interface),
        )
    }
}

impl AfPacket {
    /// What becomes of a receive call that found nothing, but an error.
    fn nothing_received(&mut self, err: io::Error) -> io::Result<usize> {
        match err.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) if !self.was_down => Ok(0),
            // The kernel tells once that the interface went down (packet_notifier()) and says nothing when it is
            // unregistered afterwards.
            Some(libc::EAGAIN | libc::EINTR) => match self.socket.interface() {
                Ok(None) => Err(self.down(io::Error::from_raw_os_error(libc::ENODEV))),
                _ => Ok(0),
            },
            Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => {
                self.was_down = true;
                Err(self.down(err))
            }
            // An error that a transmission has left behind; nothing was received.
            Some(libc::ENOBUFS | libc::EMSGSIZE) => Ok(0),
            _ => Err(err),
        }
    }

    /// Receives from the queue.
    fn receive_messages(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        let count = match self.receive.receive(
            self.socket.as_fd(),
            frames.iter_mut().map(Frame::receive_buffer),
        ) {
            Ok(count) => count,
            Err(err) => return self.nothing_received(err),
        };
        if count > 0 {
            self.was_down = false;
        }
        let mut kept = 0;
        for i in 0..count {
            frames.swap(kept, i);
            // Nothing was received into the other one if it was cut: the order of the kept stays.
            kept += usize::from(self.take_message(i, &mut frames[kept]));
        }
        Ok(kept)
    }

    /// Completes a frame that message `i` was received into; `false` if it is not to be had whole.
    fn take_message(&mut self, i: usize, frame: &mut Frame) -> bool {
        let (header, len, aux) = self.receive.received(i);
        if u32::try_from(len).is_ok_and(|len| len < aux.len) {
            self.counters.receive_cut += 1;
            return false;
        }
        let offload = vnet::decode(header);
        frame.filled(len, offload);
        // The kernel has taken it out: so that the frame is what was on the wire.
        aux.vlan
            .is_none_or(|(ethertype, bits)| vlan::insert(frame, ethertype, bits))
    }

    /// Receives from the ring, and from the queue what the ring says is there.
    fn receive_from_ring(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        let limit = frames.len().min(BATCH);
        // Nobody would give them back if few came from now on, and a round later the ring would stand still at their slots.
        for frame in frames.iter_mut().filter(|frame| frame.slot().is_some()) {
            drop(frame.take());
        }
        // Which of the frames are in the queue.
        let mut queued = [false; BATCH];
        let (mut count, mut seen) = (0, false);
        while let Some(ring) = &mut self.ring
            && count < limit
            && let Some(found) = ring.next_frame()
        {
            seen = true;
            let frame = &mut frames[count];
            if found.captured < found.len {
                if !found.queued {
                    // The queue had no room for it.
                    self.kernel_drops += 1;
                    continue;
                }
                if frame.capacity() < MAX_FRAME {
                    *frame = self.spare.pop().unwrap_or_default();
                }
                queued[count] = true;
                count += 1;
                continue;
            }
            let Some(lent) = lent(found) else {
                self.counters.receive_cut += 1;
                continue;
            };
            let buffer = mem::replace(frame, lent);
            if buffer.capacity() >= MAX_FRAME && self.spare.len() < BATCH {
                self.spare.push(buffer);
            }
            count += 1;
        }
        if !seen {
            let none = io::Error::from_raw_os_error(libc::EAGAIN);
            let err = self.socket.take_error().err().unwrap_or(none);
            return self.nothing_received(err);
        }
        self.was_down = false;
        if queued.contains(&true) {
            count = self.take_queued(&mut frames[..count], &queued);
        }
        Ok(count)
    }

    /// Receives those of the frames that are in the queue; how many there are with them, without those that could not be had.
    fn take_queued(&mut self, frames: &mut [Frame], queued: &[bool; BATCH]) -> usize {
        let mut had = [false; BATCH];
        let mut from = 0;
        // An error of the socket's, which is told once, is in front of what waits.
        for _ in 0..3 {
            let wanted = frames.iter_mut().zip(queued).skip(from);
            let wanted = wanted.filter(|(_, queued)| **queued);
            let buffers = wanted.map(|(frame, _)| frame.receive_buffer());
            let Ok(received) = self.receive.receive(self.socket.as_fd(), buffers) else {
                continue;
            };
            for i in 0..received {
                while !queued[from] {
                    from += 1;
                }
                had[from] = self.take_message(i, &mut frames[from]);
                from += 1;
            }
            if !queued[from..].contains(&true) {
                break;
            }
        }
        let mut kept = 0;
        for i in 0..frames.len() {
            if !queued[i] || had[i] {
                frames.swap(kept, i);
                kept += 1;
            } else if i >= from {
                self.counters.receive_cut += 1;
            }
        }
        kept
    }
}

/// A frame of the ring's, where it is.
fn lent(found: RingFrame) -> Option<Frame> {
    let offload = vnet::decode(found.header()?);
    let place = found.start..found.start.checked_add(found.captured)?;
    if place.end > found.memory.len() {
        return None;
    }
    let mut frame = Frame::lent(found.memory, place, offload);
    match found.vlan {
        // The kernel has taken it out: so that the frame is what was on the wire.
        Some((ethertype, bits)) => vlan::insert(&mut frame, ethertype, bits).then_some(frame),
        None => Some(frame),
    }
}

impl PacketIo for AfPacket {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        if self.ring.is_some() {
            self.receive_from_ring(frames)
        } else {
            self.receive_messages(frames)
        }
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        send(&self.socket, &mut self.transmit, &mut self.counters, frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "af_packet",
            ethernet: true,
            offload: true,
        }
    }
}

/// Sends frames in order and returns how many were refused.
fn send(
    socket: &PacketSocket,
    transmit: &mut MessageBatch,
    counters: &mut SocketCounters,
    frames: &mut [Frame],
) -> usize {
    let mut refused = 0;
    let mut done = 0;
    let mut patience = SEND_PATIENCE;
    while done < frames.len() {
        let messages = frames[done..].iter_mut().map(|frame| {
            let header = vnet::encode(&frame.offload);
            if frame.headroom() < header.len() {
                return (Some(header), frame.bytes());
            }
            (None, frame.behind(&header).unwrap_or_default())
        });
        let err = match transmit.send(socket.as_fd(), messages) {
            Ok(sent) if sent > 0 => {
                done += sent;
                continue;
            }
            Ok(_) => break,
            Err(err) => err,
        };
        match err.raw_os_error() {
            Some(libc::EINTR) => continue,
            Some(libc::EAGAIN | libc::ENOBUFS) => {
                if !patience.is_zero() {
                    let started = std::time::Instant::now();
                    sys::wait_writable(socket.as_fd(), patience);
                    // A queue that is full though the socket is writable gets one more try, not a busy loop.
                    let spent = started.elapsed().max(SEND_PATIENCE / 4);
                    patience = patience.saturating_sub(spent);
                    continue;
                }
                counters.send_full += 1;
            }
            Some(libc::EMSGSIZE) => counters.send_too_long += 1,
            Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => {
                let rest = frames.len() - done;
                counters.send_down += u64::try_from(rest).unwrap_or(u64::MAX);
                return refused + rest;
            }
            _ => counters.send_other += 1,
        }
        refused += 1;
        done += 1;
    }
    refused
}

/// `PACKET_IGNORE_OUTGOING` of `linux/if_packet.h` (Linux 4.20).
const PACKET_IGNORE_OUTGOING: i32 = 23;
