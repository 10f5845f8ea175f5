//! Packet sockets: every frame of one Ethernet interface, including super-packets of 64 KiB and
//! partial checksums.
//!
//! Frames are received in a ring (`TPACKET_V2`), changed there, and sent from there. A frame that
//! does not fit into its slot is received by `recvmmsg`, in the order of arrival. `TPACKET_V3`
//! would pass on a block only when it is full or after a millisecond, which would be the latency of
//! an idle director. A slot of `TPACKET_V2` can be read as soon as the kernel has filled it, and it
//! is as fast under load if its slots are spread over the cache ([`SLOT`]). If rings are not
//! permitted, all frames are received by `recvmmsg`.
//!
//! Frames are sent without `PACKET_QDISC_BYPASS`. With it, a device that cannot segment would
//! refuse super-packets (`ENOBUFS`), and frames would bypass the host's egress rules.
//!
//! The socket receives a *copy* of each frame, before the host's own filters. The
//! [shield](crate::host::shield) hides the originals from the host. The kernel also delivers frames
//! for other stations (a promiscuous device, a macvlan child of the interface), so the caller
//! compares the destination with the interface's own address.

mod open;
mod program;

use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use self::open::Back;
pub use self::open::{Group, OpenError, SLOT};
use super::{BATCH, PacketIo, vnet};
use crate::fast_path::Attached;
use lvs_packet::frame::{Frame, MAX_FRAME};
use lvs_packet::wire::vlan;
use lvs_sys::{MessageBatch, PacketRing, PacketSocket, RingFrame};

/// Longest total wait of one call of `send` for a full queue.
const SEND_PATIENCE: Duration = Duration::from_millis(1);

/// Counters of the frames that the backend could not send since it was opened, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketCounters {
    /// Number of frames that were not sent because a queue or buffer was full.
    pub send_full: u64,
    /// Number of frames that were not sent because they were longer than the device accepts.
    pub send_too_long: u64,
    /// Number of frames that were not sent because the interface was down or removed.
    pub send_down: u64,
    /// Number of frames that were not sent for another reason.
    pub send_other: u64,
}

/// A packet socket on one Ethernet interface.
#[derive(Debug)]
pub struct AfPacket {
    /// The attached program of the kernel fast path, which handles the frames that the filter of
    /// the sockets refuses. Declared before the sockets, so that the program is detached before
    /// they are closed.
    _ingress: Option<Attached>,
    interface: String,
    ifindex: u32,
    /// The main socket, which sends, and receives all frames except the SYNs that [`Firsts`]
    /// receives.
    inlet: Inlet,
    firsts: Option<Box<Firsts>>,
    receiver: Receiver,
    transmit: MessageBatch,
    back: Option<Back>,
    counters: SocketCounters,
    was_down: bool,
    /// The position in the ring and the number of lost frames at the last [`keep`](Self::keep).
    kept: ((u64, usize), u64),
}

impl AfPacket {
    /// The interface's name when it was opened.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// The index of the interface.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Reinjects frames into the host as if the interface had just received them. Returns the
    /// number of refused frames: all, if the backend was opened without reinjection
    /// ([`Self::open_with`]).
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        match &self.back {
            Some(back) => {
                for frame in &mut *frames {
                    lvs_sys::turned(frame.bytes_mut());
                }
                send(&back.socket, &mut self.transmit, &mut self.counters, frames)
            }
            None => frames.len(),
        }
    }

    /// The counters of the backend.
    pub fn counters(&self) -> SocketCounters {
        self.counters
    }

    /// Number of received frames that were lost since the interface was opened: a ring or receive
    /// buffer was full, or the frame was longer than the buffer or had no valid virtio header.
    /// Reads the kernel's counter.
    pub fn drops(&mut self) -> u64 {
        let firsts = self.firsts.as_mut().map_or(0, |firsts| firsts.inlet.lost());
        self.inlet.lost() + firsts + self.receiver.cut
    }

    /// Closes a ring that is stuck; frames are then received by system calls. Returns true if it
    /// has closed the ring. Call it periodically between two calls of `recv`.
    ///
    /// The kernel keeps the slot of a frame for which it has no virtio header, and loses all later
    /// frames. One datagram of a virtual machine that its host must fragment
    /// (`VIRTIO_NET_HDR_GSO_UDP`) suffices (Linux 6.18, `tpacket_rcv()`). The queue of a socket
    /// loses only that frame.
    pub fn keep(&mut self) -> bool {
        let Some(ring) = &self.inlet.ring else {
            return false;
        };
        let (rounds, next, waits) = ring.progress();
        let lost = self.inlet.lost();
        let (at, before) = mem::replace(&mut self.kept, ((rounds, next), lost));
        if !waits || at != (rounds, next) || lost == before {
            return false;
        }
        // The socket must leave the fanout group first: closing the ring would change its position
        // there.
        self.firsts = None;
        let Some(ring) = self.inlet.ring.take() else {
            return false;
        };
        match ring.give_up(&self.inlet.socket) {
            Ok(()) => {
                tracing::warn!(
                    interface = self.interface,
                    "the kernel's ring for received frames is stuck: the dataplane now receives frames by system calls, which is slower. A frame without a virtio header has caused this, such as a virtual machine's UDP super-packet. To do: disable guest_ufo and host_ufo of the virtual machines, and restart the dataplane"
                );
                true
            }
            Err((ring, error)) => {
                if ring.is_none() {
                    tracing::error!(
                        interface = self.interface,
                        "no frames are received any more: the kernel's ring is stuck and cannot be closed ({error}): restart the dataplane"
                    );
                }
                // Some slots are still in use: try again at the next call.
                self.kept.1 = before;
                self.inlet.ring = ring;
                false
            }
        }
    }

    /// The error for an interface that is down or removed.
    fn down(&self, err: io::Error) -> io::Error {
        let (kind, what) = match self.inlet.socket.interface() {
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
    /// Handles the error of a receive call. Returns 0 frames if it is temporary, otherwise the
    /// error for the caller.
    fn nothing_received(&mut self, err: io::Error) -> io::Result<usize> {
        match err.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) if !self.was_down => Ok(0),
            // The kernel reports once that the interface went down (packet_notifier()), and not
            // that it was unregistered afterwards.
            Some(libc::EAGAIN | libc::EINTR) => match self.inlet.socket.interface() {
                Ok(None) => Err(self.down(io::Error::from_raw_os_error(libc::ENODEV))),
                _ => Ok(0),
            },
            Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => {
                self.was_down = true;
                Err(self.down(err))
            }
            // The frame is lost, because the kernel has no virtio header for it.
            Some(libc::EINVAL) => {
                self.receiver.cut += 1;
                Ok(0)
            }
            // The error of an earlier transmission: nothing was received.
            Some(libc::ENOBUFS | libc::EMSGSIZE) => Ok(0),
            _ => Err(err),
        }
    }

    /// Receives from the rings: first from the main ring, and then waiting SYNs, if all frames that
    /// arrived before them have been received.
    fn receive_from_rings(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        let Self {
            inlet,
            firsts,
            receiver,
            ..
        } = self;
        // Read before the main ring, which then contains all frames that arrived earlier.
        let waiting = match firsts {
            Some(firsts) => firsts.look(receiver, frames.len() / 2),
            None => 0,
        };
        let room = frames.len().saturating_sub(waiting);
        let taken = receiver.take_from_ring(inlet, &mut frames[..room]);
        let mut count = taken.count;
        if let Some(firsts) = firsts
            && (taken.empty || taken.newest >= firsts.newest)
        {
            count += firsts.hand_over(&mut frames[count..]);
        }
        if !taken.seen && count == 0 {
            let none = io::Error::from_raw_os_error(libc::EAGAIN);
            if let Some(firsts) = firsts {
                // Clear the same error of the other socket.
                let _ = firsts.inlet.socket.take_error();
            }
            let err = inlet.socket.take_error().err().unwrap_or(none);
            return self.nothing_received(err);
        }
        self.was_down = false;
        Ok(count)
    }

    fn receive_messages(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        match self.receiver.take_messages(&self.inlet, frames) {
            Ok((received, kept)) => {
                self.was_down &= received == 0;
                Ok(kept)
            }
            Err(err) => self.nothing_received(err),
        }
    }
}

/// A receiving socket, and its ring if it has one.
#[derive(Debug)]
struct Inlet {
    socket: PacketSocket,
    ring: Option<PacketRing>,
    /// Number of frames that were lost because the buffer was full, from the kernel's counters.
    lost: u64,
}

impl Inlet {
    fn new(socket: PacketSocket, ring: Option<PacketRing>) -> Self {
        Self {
            socket,
            ring,
            lost: 0,
        }
    }

    fn lost(&mut self) -> u64 {
        // The kernel resets the counter at each read.
        if let Ok(drops) = self.socket.take_drops() {
            self.lost += u64::from(drops);
        }
        self.lost
    }
}

/// The socket for SYNs, so that a flood of SYNs does not displace other frames. A SYN is handled
/// after all frames that arrived earlier, so that frames of one sender stay in order.
#[derive(Debug)]
struct Firsts {
    inlet: Inlet,
    /// Frames of the ring from `next` to `end`, and vacant frames.
    room: Vec<Frame>,
    next: usize,
    end: usize,
    /// Arrival time of the newest frame in nanoseconds.
    newest: u64,
}

impl Firsts {
    fn new(inlet: Inlet) -> Self {
        Self {
            inlet,
            room: (0..BATCH).map(|_| Frame::new()).collect(),
            next: 0,
            end: 0,
            newest: 0,
        }
    }

    /// Reads frames from the ring if none is waiting. Returns the number of waiting frames.
    fn look(&mut self, receiver: &mut Receiver, limit: usize) -> usize {
        if self.next == self.end {
            let limit = limit.min(self.room.len());
            let taken = receiver.take_from_ring(&mut self.inlet, &mut self.room[..limit]);
            (self.next, self.end, self.newest) = (0, taken.count, taken.newest);
        }
        self.end - self.next
    }

    /// Moves waiting frames to `frames` until it is full. Returns their number.
    fn hand_over(&mut self, frames: &mut [Frame]) -> usize {
        let waiting = &mut self.room[self.next..self.end];
        let count = waiting.len().min(frames.len());
        waiting[..count].swap_with_slice(&mut frames[..count]);
        self.next += count;
        count
    }
}

/// The rest of the caller's batch: buffers, and vacant frames without a buffer. A frame in a ring
/// replaces a vacant frame, and a frame in the socket queue needs a buffer. Both are exchanged with
/// this rest, so that two interfaces share a batch without allocations even if only one receives
/// from a ring.
struct Rest<'a> {
    frames: &'a mut [Frame],
    /// Index from which on no frame is vacant.
    vacant: usize,
    /// Index from which on no frame is a buffer.
    full: usize,
}

impl<'a> Rest<'a> {
    fn new(frames: &'a mut [Frame]) -> Self {
        let end = frames.len();
        Self {
            frames,
            vacant: end,
            full: end,
        }
    }

    /// Exchanges a buffer for a vacant frame; `false` if none is vacant.
    fn swap_for_vacant(&mut self, frame: &mut Frame) -> bool {
        Self::swap(self.frames, &mut self.vacant, frame, |frame| {
            frame.capacity() == 0
        })
    }

    /// Exchanges a vacant frame for a buffer; `false` if no buffer is available.
    fn swap_for_full(&mut self, frame: &mut Frame) -> bool {
        Self::swap(self.frames, &mut self.full, frame, |frame| {
            frame.capacity() >= MAX_FRAME
        })
    }

    fn swap(
        frames: &mut [Frame],
        end: &mut usize,
        frame: &mut Frame,
        fits: impl Fn(&Frame) -> bool,
    ) -> bool {
        let found = frames[..*end].iter().rposition(fits);
        *end = found.unwrap_or(0);
        found.map(|at| mem::swap(&mut frames[at], frame)).is_some()
    }
}

/// The frames that one read of a ring yielded.
struct Taken {
    count: usize,
    /// Whether the ring contained frames, so that it may contain more.
    seen: bool,
    /// Whether the ring is empty now.
    empty: bool,
    /// The arrival time of the last frame in nanoseconds.
    newest: u64,
}

#[derive(Debug)]
struct Receiver {
    messages: MessageBatch,
    /// Buffers of the caller that frames of the ring have replaced. Frames of the socket queue use
    /// them.
    spare: Vec<Frame>,
    /// Number of received frames that were dropped because they were longer than the receive
    /// buffer, or had no valid virtio header.
    cut: u64,
}

impl Receiver {
    fn new() -> Self {
        Self {
            messages: MessageBatch::new(BATCH),
            spare: Vec::new(),
            cut: 0,
        }
    }

    /// Receives from a socket's queue. Returns the number of received frames, and the number of
    /// complete frames among them.
    fn take_messages(&mut self, inlet: &Inlet, frames: &mut [Frame]) -> io::Result<(usize, usize)> {
        let buffers = frames.iter_mut().map(Frame::receive_buffer);
        let count = self.messages.receive(inlet.socket.as_fd(), buffers)?;
        let mut kept = 0;
        for i in 0..count {
            frames.swap(kept, i);
            // A truncated frame is skipped; complete frames keep their order.
            kept += usize::from(self.take_message(i, &mut frames[kept]));
        }
        Ok((count, kept))
    }

    /// Completes the frame of message `i`. Returns false if the message was truncated, or the VLAN
    /// tag does not fit.
    fn take_message(&mut self, i: usize, frame: &mut Frame) -> bool {
        let (header, len, aux) = self.messages.received(i);
        if u32::try_from(len).is_ok_and(|len| len < aux.len) {
            self.cut += 1;
            return false;
        }
        let offload = vnet::decode(header);
        frame.filled(len, offload);
        // The kernel has removed the VLAN tag: insert it again.
        aux.vlan
            .is_none_or(|(ethertype, bits)| vlan::insert(frame, ethertype, bits))
    }

    /// Receives the frames of a ring in order. If a slot only marks a frame in the socket queue,
    /// receives it from the queue.
    fn take_from_ring(&mut self, inlet: &mut Inlet, frames: &mut [Frame]) -> Taken {
        let limit = frames.len().min(BATCH);
        let (frames, rest) = frames.split_at_mut(limit);
        let mut rest = Rest::new(rest);
        // Return the slots of the previous batch. Otherwise the ring would stop at them one round
        // later, if only few frames arrive.
        for frame in frames.iter_mut().chain(&mut *rest.frames) {
            if frame.slot().is_some() {
                drop(frame.take());
            }
        }
        // The frames that are still in the socket queue.
        let mut queued = [false; BATCH];
        let mut taken = Taken {
            count: 0,
            seen: false,
            empty: false,
            newest: 0,
        };
        while let Some(ring) = &mut inlet.ring
            && taken.count < limit
        {
            let Some(found) = ring.next_frame() else {
                taken.empty = true;
                break;
            };
            (taken.seen, taken.newest) = (true, found.at);
            let frame = &mut frames[taken.count];
            if found.captured < found.len {
                if !found.queued {
                    // The socket queue was full.
                    inlet.lost += 1;
                    continue;
                }
                if frame.capacity() < MAX_FRAME && !rest.swap_for_full(frame) {
                    *frame = self.spare.pop().unwrap_or_default();
                }
                queued[taken.count] = true;
                taken.count += 1;
                continue;
            }
            let Some(lent) = lent(found) else {
                self.cut += 1;
                continue;
            };
            let keep = frame.capacity() >= MAX_FRAME && !rest.swap_for_vacant(frame);
            let buffer = mem::replace(frame, lent);
            if keep && self.spare.len() < BATCH {
                self.spare.push(buffer);
            }
            taken.count += 1;
        }
        if queued.contains(&true) {
            taken.count = self.take_queued(inlet, &mut frames[..taken.count], &queued);
        }
        taken
    }

    /// Receives the frames that are in the socket queue. Removes frames that could not be received,
    /// and returns the number of remaining frames.
    fn take_queued(
        &mut self,
        inlet: &Inlet,
        frames: &mut [Frame],
        queued: &[bool; BATCH],
    ) -> usize {
        let mut had = [false; BATCH];
        let mut from = 0;
        // The socket reports a pending error once, before the queued frames.
        for _ in 0..3 {
            let wanted = frames.iter_mut().zip(queued).skip(from);
            let wanted = wanted.filter(|(_, queued)| **queued);
            let buffers = wanted.map(|(frame, _)| frame.receive_buffer());
            let Ok(received) = self.messages.receive(inlet.socket.as_fd(), buffers) else {
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
                self.cut += 1;
            }
        }
        kept
    }
}

/// Creates a frame that stays in its slot of the ring; `None` if the slot is not valid or has no
/// valid virtio header, or the VLAN tag does not fit.
fn lent(found: RingFrame) -> Option<Frame> {
    let offload = vnet::decode(found.header()?);
    let place = found.start..found.start.checked_add(found.captured)?;
    if place.end > found.memory.len() {
        return None;
    }
    let mut frame = Frame::lent(found.memory, place, offload);
    match found.vlan {
        // The kernel has removed the VLAN tag: insert it again.
        Some((ethertype, bits)) => vlan::insert(&mut frame, ethertype, bits).then_some(frame),
        None => Some(frame),
    }
}

impl PacketIo for AfPacket {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        if self.inlet.ring.is_some() {
            self.receive_from_rings(frames)
        } else {
            self.receive_messages(frames)
        }
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        let Self {
            inlet,
            transmit,
            counters,
            ..
        } = self;
        send(&inlet.socket, transmit, counters, frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.inlet.socket.as_fd())
    }

    fn other_fd(&self) -> Option<BorrowedFd<'_>> {
        let firsts = self.firsts.as_ref()?;
        Some(firsts.inlet.socket.as_fd())
    }
}

/// Sends frames in order. Returns the number of refused frames.
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
                    lvs_sys::wait_writable(socket.as_fd(), patience);
                    // If the queue is full although the socket is writable, send once more, and do
                    // not loop.
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
