//! The receive ring of a packet socket (`TPACKET_V2`): the kernel copies frames into memory that
//! this process reads.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::arena::{Arena, Lent};
use super::packet::{PacketSocket, VNET_HDR_LEN};
use super::{page_size, set_option};

/// Length in bytes of a slot's header. This process writes only its first word, the status.
const HEAD: usize = size_of::<libc::tpacket2_hdr>();
/// The status word of a slot while this process uses the slot; it differs from 0 (the kernel's
/// slot) and from `TP_STATUS_USER`.
const TAKEN: u32 = 1 << 30;

/// The receive ring of one socket. Slots are read in the order in which the kernel fills them.
///
/// A frame that is longer than a slot is in the socket's queue, as without a ring. A slot still
/// marks the position of the frame, and contains at most the frame's beginning. Slots can therefore
/// be shorter than the longest frame.
#[derive(Debug)]
pub struct PacketRing {
    arena: Arc<Arena>,
    next: usize,
    /// Number of complete rounds through the slots.
    rounds: u64,
    /// Number of consecutive calls of [`next_frame`](Self::next_frame) that found a frame.
    streak: usize,
    /// Offset of the last frame's link header in its slot.
    mac: usize,
}

/// Length of a cache line in bytes.
const LINE: usize = 64;

/// While frames are waiting, the slot that is this number of slots ahead of the next one is
/// prefetched.
const AHEAD: usize = 12;

/// A frame in a ring, or a marker for a frame that is in the socket's queue.
#[derive(Debug)]
pub struct RingFrame {
    /// The slot without its header. When it is dropped, the slot belongs to the kernel again.
    pub memory: Lent,
    /// Offset of the frame in `memory`. Its virtio header precedes it.
    pub start: usize,
    /// Number of the frame's bytes in `memory`.
    pub captured: usize,
    /// Length of the frame in bytes.
    pub len: usize,
    /// Whether the whole frame is in the socket's queue, after the frames of all earlier slots.
    pub queued: bool,
    /// The VLAN tag that the kernel has removed from the frame: protocol identifier and tag control
    /// information.
    pub vlan: Option<(u16, u16)>,
    /// Time of arrival in nanoseconds, for comparison with other frames of rings.
    pub at: u64,
}

impl RingFrame {
    /// The virtio header in front of the frame; `None` if there are too few bytes.
    pub fn header(&self) -> Option<&[u8; VNET_HDR_LEN]> {
        self.memory.get(..self.start)?.last_chunk()
    }
}

impl PacketRing {
    /// Creates the ring of a socket, with at least `slots` slots of `slot_len` bytes, which must be
    /// a multiple of 16. In each slot, `reserve` bytes in front of the frame remain free. The
    /// socket must have virtio headers, and must not be bound yet. After an error, the socket
    /// receives as before.
    ///
    /// # Errors
    /// If the sizes are invalid, the kernel has no such rings or no memory, or this process may not
    /// map them.
    pub fn new(
        socket: &PacketSocket,
        slots: usize,
        slot_len: usize,
        reserve: u32,
    ) -> io::Result<Self> {
        let fd = socket.as_fd();
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        // Slots are contiguous only if the blocks, which consist of whole pages, also consist of
        // whole slots.
        let page = page_size();
        let mut in_block = 1;
        while slot_len == 0 || !(in_block * slot_len).is_multiple_of(page) {
            in_block += 1;
            if in_block > page || slot_len == 0 {
                return Err(invalid());
            }
        }
        let blocks = slots.div_ceil(in_block);
        let slots = blocks.checked_mul(in_block).ok_or_else(invalid)?;
        let number = |n: usize| u32::try_from(n).map_err(|_| invalid());
        let request = libc::tpacket_req {
            tp_block_size: number(in_block * slot_len)?,
            tp_block_nr: number(blocks)?,
            tp_frame_size: number(slot_len)?,
            tp_frame_nr: number(slots)?,
        };
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        socket.set_packet_option(libc::PACKET_VERSION, version)?;
        socket.set_packet_option(
            libc::PACKET_RESERVE,
            libc::c_int::try_from(reserve).map_err(|_| invalid())?,
        )?;
        socket.set_packet_option(libc::PACKET_COPY_THRESH, 1)?;
        let raw = fd.as_raw_fd();
        set_option(raw, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        match Arena::of_ring(fd, slots, slot_len, HEAD) {
            Ok(arena) => Ok(Self {
                arena,
                next: 0,
                rounds: 0,
                streak: 0,
                mac: 0,
            }),
            Err(error) => {
                without_ring(socket)?;
                Err(error)
            }
        }
    }

    /// The number of complete rounds, the index of the next slot to read, and whether the kernel
    /// owns this slot. A slot of the kernel contains no frame; if the kernel no longer fills the
    /// slot at this index, the ring is stuck.
    pub fn progress(&self) -> (u64, usize, bool) {
        let waits = self.arena.word(self.next).load(Ordering::Relaxed) == 0;
        (self.rounds, self.next, waits)
    }

    /// Removes the ring: from then on, the socket receives without one.
    ///
    /// # Errors
    /// Returns the ring while one of its slots is lent; or the kernel's error, after which the
    /// socket receives nothing.
    pub fn give_up(self, socket: &PacketSocket) -> Result<(), (Option<Self>, io::Error)> {
        if Arc::strong_count(&self.arena) > 1 {
            return Err((Some(self), io::ErrorKind::ResourceBusy.into()));
        }
        // Unmap the ring before the memory is freed.
        drop(self);
        without_ring(socket).map_err(|error| (None, error))
    }

    /// Takes the next frame from the ring, if one has arrived. The slot of the frame stays lent
    /// until the frame is dropped.
    #[inline]
    pub fn next_frame(&mut self) -> Option<RingFrame> {
        let word = self.arena.word(self.next);
        // Acquire: earlier writes of the kernel are visible.
        let status = word.load(Ordering::Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            self.streak = 0;
            return None;
        }
        word.store(TAKEN, Ordering::Relaxed);
        self.read_ahead();
        // SAFETY: the slot begins with such a header. By its status, the kernel has finished
        // writing it, and does not access it until the status is 0.
        let header = unsafe {
            self.arena
                .start(self.next)
                .cast::<libc::tpacket2_hdr>()
                .read()
        };
        self.mac = usize::from(header.tp_mac);
        // SAFETY: by its old status, the slot belonged to this process. Its new status is neither 0
        // nor the old one, so the slot is lent only once.
        let memory = unsafe { self.arena.lend_owned(self.next) };
        self.next += 1;
        if self.next == self.arena.slots() {
            (self.next, self.rounds) = (0, self.rounds + 1);
        }
        let length = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let vlan = (status & libc::TP_STATUS_VLAN_VALID != 0)
            .then_some((header.tp_vlan_tpid, header.tp_vlan_tci));
        Some(RingFrame {
            memory,
            start: usize::from(header.tp_mac).saturating_sub(HEAD),
            captured: length(header.tp_snaplen),
            len: length(header.tp_len),
            queued: status & libc::TP_STATUS_COPY != 0,
            vlan,
            at: u64::from(header.tp_sec) * 1_000_000_000 + u64::from(header.tp_nsec),
        })
    }

    /// If many frames have arrived without a pause, prefetches a slot that will be read soon: its
    /// header, and the headers of its frame. Another processor has written these cache lines;
    /// without the prefetch, this thread would wait for them longer than all other work on a small
    /// frame takes.
    #[inline]
    fn read_ahead(&mut self) {
        self.streak += 1;
        // There are few frames: the kernel still has to write to the next slots.
        if self.streak < AHEAD {
            return;
        }
        let ahead = self.next + AHEAD;
        let slots = self.arena.slots();
        let slot = if ahead < slots { ahead } else { ahead - slots };
        if slot < slots {
            self.arena.prefetch(slot, 0);
            self.arena.prefetch(slot, self.mac);
            self.arena.prefetch(slot, self.mac + LINE);
        }
    }
}

fn without_ring(socket: &PacketSocket) -> io::Result<()> {
    let none = libc::tpacket_req {
        tp_block_size: 0,
        tp_block_nr: 0,
        tp_frame_size: 0,
        tp_frame_nr: 0,
    };
    let raw = socket.as_fd().as_raw_fd();
    set_option(raw, libc::SOL_PACKET, libc::PACKET_RX_RING, &none)
}
