//! Packet sockets, and system calls that send or receive several messages.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::bpf::Program;
use super::{Plain, check, check_len, get_option, set_option, socklen};

/// Length in bytes of `virtio_net_hdr`, which precedes each frame on a socket with
/// `PACKET_VNET_HDR`.
pub const VNET_HDR_LEN: usize = 10;

/// Size in bytes of one control message with `tpacket_auxdata`, rounded up to the alignment of the
/// next message.
const CONTROL_LEN: usize = 64;

/// Length of `tpacket_auxdata` in bytes: three numbers of 32 bits and four of 16.
const AUXDATA_LEN: u32 = 20;
const _: () = assert!(size_of::<libc::tpacket_auxdata>() == AUXDATA_LEN as usize);

// SAFETY: a `repr(C)` struct of integers.
unsafe impl Plain for libc::tpacket_stats {}

use super::classic::{
    AND, IF_ANY_BIT, IF_EQUAL, JUMP, LOAD, LOAD_8, LOAD_8_AT_X, LOAD_16, MARK, PACKET_TYPE,
    PROTOCOL, RETURN, SHIFT_LEFT, TO_X, ancillary, network, op,
};

/// Return value of a filter that accepts the whole frame.
const WHOLE: u32 = u32::MAX;

/// `PACKET_OUTGOING` of linux/if_packet.h: a packet that this host sends.
const OUTGOING: u32 = 4;
/// `PACKET_LOOPBACK` of linux/if_packet.h: a copy of a multicast or broadcast packet that this host
/// sends.
const LOOPBACK: u32 = 5;
/// `PACKET_FANOUT_FLAG_IGNORE_OUTGOING` of linux/if_packet.h.
const IGNORE_OUTGOING: u32 = 0x4000;

/// The value of `PACKET_FANOUT` for a group whose packets a classic BPF program divides.
fn fanout(id: u16, flags: u16) -> i32 {
    let kind = libc::PACKET_FANOUT_CBPF | IGNORE_OUTGOING | u32::from(flags);
    (u32::from(id) | kind << 16).cast_signed()
}

fn set_program(
    fd: RawFd,
    level: libc::c_int,
    option: libc::c_int,
    program: &[libc::sock_filter],
) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        // The kernel only reads through it.
        filter: program.as_ptr().cast_mut(),
    };
    set_option(fd, level, option, &program)
}

/// Makes the socket receive no copies of multicast or broadcast packets that this host sends.
pub(super) fn only_from_others(fd: RawFd) -> io::Result<()> {
    let program = [
        op(LOAD, 0, 0, ancillary(PACKET_TYPE)),
        op(IF_EQUAL, 0, 1, LOOPBACK),
        op(RETURN, 0, 0, 0),
        op(RETURN, 0, 0, WHOLE),
    ];
    set_program(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// A classic BPF program that selects one of two sockets: it returns 1 for a packet that opens a
/// TCP connection, and 0 for all others, including fragments and IPv6 packets with extension
/// headers.
const BEGINS_TCP: [libc::sock_filter; 20] = [
    op(LOAD_16, 0, 0, ancillary(PROTOCOL)),
    op(IF_EQUAL, 0, 10, 0x0800),
    // IPv4: TCP, and not a fragment.
    op(LOAD_8, 0, 0, network(9)),
    op(IF_EQUAL, 0, 15, 6),
    op(LOAD_16, 0, 0, network(6)),
    op(IF_ANY_BIT, 13, 0, 0x3fff),
    op(LOAD_8, 0, 0, network(0)),
    op(AND, 0, 0, 0x0f),
    op(SHIFT_LEFT, 0, 0, 2),
    op(TO_X, 0, 0, 0),
    op(LOAD_8_AT_X, 0, 0, network(13)),
    op(JUMP, 0, 0, 4),
    // IPv6: TCP is the first header.
    op(IF_EQUAL, 0, 6, 0x86dd),
    op(LOAD_8, 0, 0, network(6)),
    op(IF_EQUAL, 0, 4, 6),
    op(LOAD_8, 0, 0, network(40 + 13)),
    // SYN is set, RST and ACK are not.
    op(AND, 0, 0, 0x16),
    op(IF_EQUAL, 0, 1, 0x02),
    op(RETURN, 0, 0, 1),
    op(RETURN, 0, 0, 0),
];

/// A non-blocking raw packet socket.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// A socket that does not receive before [`Self::bind`].
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_NET_RAW`.
    pub fn new() -> io::Result<Self> {
        // With protocol 0, the socket receives nothing, so that it receives no frame of another
        // interface before `bind`. SAFETY: takes numbers only.
        let fd = check(unsafe {
            libc::socket(
                libc::AF_PACKET,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
                0,
            )
        })?;
        // SAFETY: the descriptor is new, open and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Sets an option of level `SOL_PACKET` that is a number.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_packet_option(&self, option: i32, value: i32) -> io::Result<()> {
        set_option(self.fd.as_raw_fd(), libc::SOL_PACKET, option, &value)
    }

    /// If `member` is true, joins the multicast address `group` on the interface; otherwise leaves
    /// it. The kernel counts the joins: the interface leaves the group after as many calls with
    /// `false`.
    ///
    /// # Errors
    /// If the interface does not exist.
    pub fn set_group(&self, ifindex: u32, group: [u8; 6], member: bool) -> io::Result<()> {
        let mut address = [0; 8];
        address[..6].copy_from_slice(&group);
        let request = libc::packet_mreq {
            mr_ifindex: i32::try_from(ifindex)
                .map_err(|_| io::Error::from(io::ErrorKind::NotFound))?,
            mr_type: u16::try_from(libc::PACKET_MR_MULTICAST).expect("PACKET_MR_MULTICAST is 0"),
            mr_alen: 6,
            mr_address: address,
        };
        let option = if member {
            libc::PACKET_ADD_MEMBERSHIP
        } else {
            libc::PACKET_DROP_MEMBERSHIP
        };
        set_option(self.fd.as_raw_fd(), libc::SOL_PACKET, option, &request)
    }

    /// From now on, this socket receives no frames that this host sends, and no frames with this
    /// mark, unless it is 0. Call it before [`Self::bind`].
    ///
    /// # Errors
    /// No error is known.
    pub fn only_incoming(&self, mark: Option<u32>) -> io::Result<()> {
        // 0 is the mark of all unmarked frames.
        let mark = mark.filter(|&mark| mark != 0);
        self.filter(&[
            op(LOAD, 0, 0, ancillary(PACKET_TYPE)),
            op(IF_EQUAL, 3, 0, OUTGOING),
            op(LOAD, 0, 0, ancillary(MARK)),
            op(IF_EQUAL, u8::from(mark.is_some()), 0, mark.unwrap_or(0)),
            op(RETURN, 0, 0, WHOLE),
            op(RETURN, 0, 0, 0),
        ])
    }

    /// Makes the socket receive no packets until another filter is set.
    ///
    /// # Errors
    /// No error is known.
    pub fn only_nothing(&self) -> io::Result<()> {
        self.filter(&[op(RETURN, 0, 0, 0)])
    }

    fn filter(&self, program: &[libc::sock_filter]) -> io::Result<()> {
        self.set_program(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, program)
    }

    /// Attaches a classic BPF program to the socket; the kernel checks and copies it.
    fn set_program(
        &self,
        level: libc::c_int,
        option: libc::c_int,
        program: &[libc::sock_filter],
    ) -> io::Result<()> {
        set_program(self.fd.as_raw_fd(), level, option, program)
    }

    /// Divides the packets of the interface to which both sockets are bound: from now on, `other`
    /// receives packets that open a TCP connection, and this socket all others. Neither receives
    /// frames that this host sends.
    ///
    /// # Errors
    /// If the kernel does not support this, or, before Linux 6.14, while the interface is down.
    /// Then this socket continues to receive all packets, and `other` may receive all, too.
    pub fn share_with(&self, other: &Self) -> io::Result<()> {
        let group = self.lead_group()?;
        other.join_group(group)?;
        self.divide_by(&BEGINS_TCP)
    }

    /// Makes this socket the first member of a new group of sockets (`PACKET_FANOUT`) that are
    /// bound to the same interface and share the received frames. Returns the number of the group.
    /// Until a program divides the frames ([`Self::divide_by`]), this socket receives all of them.
    /// Frames that this host sends are not received.
    ///
    /// # Errors
    /// If the kernel cannot do that, or, if it is older than 6.14, while the interface is down.
    pub fn lead_group(&self) -> io::Result<u16> {
        let flag = u16::try_from(libc::PACKET_FANOUT_FLAG_UNIQUEID).unwrap_or(0);
        self.set_packet_option(libc::PACKET_FANOUT, fanout(0, flag))?;
        let raw = self.fd.as_raw_fd();
        let known = get_option(raw, libc::SOL_PACKET, libc::PACKET_FANOUT, 0_i32)?;
        Ok(u16::try_from(known.cast_unsigned() & 0xffff).unwrap_or(0))
    }

    /// Makes this socket the next member of a group.
    ///
    /// # Errors
    /// As [`Self::lead_group`].
    pub fn join_group(&self, group: u16) -> io::Result<()> {
        self.set_packet_option(libc::PACKET_FANOUT, fanout(group, 0))
    }

    /// Divides the received frames of the group by a classic BPF program that returns the number of
    /// a member. Any member may call this, and repeatedly.
    ///
    /// # Errors
    /// If the program is invalid, or the socket is not a member.
    pub fn divide_by(&self, program: &[libc::sock_filter]) -> io::Result<()> {
        self.set_program(libc::SOL_PACKET, libc::PACKET_FANOUT_DATA, program)
    }

    /// Returns another descriptor of the same socket.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn another(&self) -> io::Result<Self> {
        let fd = self.fd.try_clone()?;
        Ok(Self { fd })
    }

    /// From now on, the socket receives only frames that a BPF program accepts. Call it before
    /// [`Self::bind`].
    ///
    /// # Errors
    /// If the program is not a socket filter.
    pub fn only_passed_by(&self, program: &Program) -> io::Result<()> {
        set_option(
            self.fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_BPF,
            &program.fd(),
        )
    }

    /// Binds the socket to all protocols of one interface, and starts to receive.
    ///
    /// # Errors
    /// If the interface does not exist.
    pub fn bind(&self, ifindex: u32) -> io::Result<()> {
        self.bind_for(
            ifindex,
            u16::try_from(libc::ETH_P_ALL).expect("ETH_P_ALL is 3"),
        )
    }

    /// Binds the socket to one interface to send frames with this mark, without receiving.
    ///
    /// # Errors
    /// If the interface does not exist, or without `CAP_NET_ADMIN`.
    pub fn bind_to_send(&self, ifindex: u32, mark: u32) -> io::Result<()> {
        set_option(self.fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MARK, &mark)?;
        self.bind_for(ifindex, 0)
    }

    fn bind_for(&self, ifindex: u32, protocol: u16) -> io::Result<()> {
        let address = link_address(ifindex, protocol)?;
        // SAFETY: pointer and length describe `address`, which the kernel only reads.
        check(unsafe {
            libc::bind(
                self.fd.as_raw_fd(),
                std::ptr::from_ref(&address).cast(),
                socklen::<libc::sockaddr_ll>(),
            )
        })?;
        Ok(())
    }

    /// Sends one frame on an interface, to which the socket need not be bound. The socket must not
    /// have `PACKET_VNET_HDR`.
    ///
    /// # Errors
    /// If the interface does not exist or is down, or its queue is full.
    pub fn send_to(&self, ifindex: u32, frame: &[u8]) -> io::Result<()> {
        let address = link_address(ifindex, 0)?;
        // SAFETY: two pointers with their lengths, to the frame and to `address`, which the kernel
        // only reads.
        check_len(unsafe {
            libc::sendto(
                self.fd.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                std::ptr::from_ref(&address).cast(),
                socklen::<libc::sockaddr_ll>(),
            )
        })?;
        Ok(())
    }

    /// Returns the interface to which the socket is bound; `None` after the interface was removed.
    ///
    /// # Errors
    /// No error is known for a bound socket.
    pub fn interface(&self) -> io::Result<Option<u32>> {
        // SAFETY: sockaddr_ll consists of integers, so all-zero bytes are a valid value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut len = socklen::<libc::sockaddr_ll>();
        // SAFETY: pointer and length describe `address`; any bytes are a value of it.
        check(unsafe {
            libc::getsockname(
                self.fd.as_raw_fd(),
                std::ptr::from_mut(&mut address).cast(),
                &raw mut len,
            )
        })?;
        // The kernel's packet_notifier() sets it to -1 when the device is unregistered.
        Ok(u32::try_from(address.sll_ifindex).ok())
    }

    /// Returns the pending error of the socket, and clears it.
    ///
    /// # Errors
    /// The pending error.
    pub fn take_error(&self) -> io::Result<()> {
        match get_option(self.fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ERROR, 0_i32)? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Reads and resets the number of frames that were dropped because the receive buffer was full.
    ///
    /// # Errors
    /// No error is known for a packet socket.
    pub fn take_drops(&self) -> io::Result<u32> {
        let none = libc::tpacket_stats {
            tp_packets: 0,
            tp_drops: 0,
        };
        let stats = get_option(
            self.fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            none,
        )?;
        Ok(stats.tp_drops)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The kernel's metadata of a frame (`tpacket_auxdata`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Auxdata {
    /// The VLAN tag that the kernel has removed from the frame: protocol identifier and tag control
    /// information.
    pub vlan: Option<(u16, u16)>,
    /// Length of the frame in bytes, even if the frame did not fit into the buffer.
    pub len: u32,
}

/// A buffer for control messages, aligned as `cmsghdr` is.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// The arrays for `recvmmsg` and `sendmmsg`, which are allocated only once.
pub struct MessageBatch {
    messages: Box<[libc::mmsghdr]>,
    vectors: Box<[[libc::iovec; 2]]>,
    headers: Box<[[u8; VNET_HDR_LEN]]>,
    control: Box<[Control]>,
}

// SAFETY: each call writes the raw pointers from live references before the kernel reads them;
// between calls no code reads them.
unsafe impl Send for MessageBatch {}

impl MessageBatch {
    /// Creates a batch with room for `len` messages.
    pub fn new(len: usize) -> Self {
        // SAFETY: mmsghdr consists of integers and pointers that may be null, so all-zero bytes are
        // a valid value.
        let message: libc::mmsghdr = unsafe { std::mem::zeroed() };
        let vector = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            messages: vec![message; len].into_boxed_slice(),
            vectors: vec![[vector; 2]; len].into_boxed_slice(),
            headers: vec![[0; VNET_HDR_LEN]; len].into_boxed_slice(),
            control: vec![Control([0; CONTROL_LEN]); len].into_boxed_slice(),
        }
    }

    /// Receives at most one message into each of `buffers` (at most as many as the batch has
    /// slots), and returns the number of messages. [`Self::received`] describes each message.
    ///
    /// # Errors
    /// `WouldBlock` if no message is waiting; errors of the socket.
    pub fn receive<'a>(
        &mut self,
        fd: BorrowedFd<'_>,
        buffers: impl Iterator<Item = &'a mut [u8]>,
    ) -> io::Result<usize> {
        let mut count = 0;
        for (i, buffer) in buffers.take(self.messages.len()).enumerate() {
            self.vectors[i] = [
                libc::iovec {
                    iov_base: self.headers[i].as_mut_ptr().cast(),
                    iov_len: VNET_HDR_LEN,
                },
                libc::iovec {
                    iov_base: buffer.as_mut_ptr().cast(),
                    iov_len: buffer.len(),
                },
            ];
            let header = &mut self.messages[i].msg_hdr;
            header.msg_iov = self.vectors[i].as_mut_ptr();
            header.msg_iovlen = 2;
            header.msg_control = self.control[i].0.as_mut_ptr().cast();
            header.msg_controllen = CONTROL_LEN as _;
            header.msg_flags = 0;
            count = i + 1;
        }
        // SAFETY: each of the first `count` headers points to two vectors: to a header in this
        // value and to a buffer of the caller. All have their true lengths and are exclusively
        // borrowed until this function returns. The timeout may be null.
        let n = check(unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.messages.as_mut_ptr(),
                libc::c_uint::try_from(count).expect("a batch is small"),
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        })?;
        Ok(usize::try_from(n).unwrap_or(0))
    }

    /// Message `i` of the last [`Self::receive`]: its virtio header, its length in bytes without
    /// that header, and the kernel's metadata.
    pub fn received(&self, i: usize) -> (&[u8; VNET_HDR_LEN], usize, Auxdata) {
        let message = &self.messages[i];
        let len = usize::try_from(message.msg_len).unwrap_or(0);
        (
            &self.headers[i],
            len.saturating_sub(VNET_HDR_LEN),
            self.auxdata(i),
        )
    }

    fn auxdata(&self, i: usize) -> Auxdata {
        let mut header = self.messages[i].msg_hdr;
        header.msg_control = self.control[i].0.as_ptr().cast_mut().cast();
        header.msg_controllen = header.msg_controllen.min(CONTROL_LEN as _);
        let mut found = Auxdata::default();
        // SAFETY: control pointer and length describe this message's control buffer, which the last
        // receive call has filled.
        let mut cmsg = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
        while !cmsg.is_null() {
            // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a whole header inside of the
            // buffer.
            let head = unsafe { cmsg.read_unaligned() };
            // SAFETY: takes a number only.
            let need = unsafe { libc::CMSG_LEN(AUXDATA_LEN) };
            if head.cmsg_level == libc::SOL_PACKET
                && head.cmsg_type == libc::PACKET_AUXDATA
                && head.cmsg_len as usize >= need as usize
            {
                // SAFETY: the data behind the header is inside of the buffer, as the kernel has
                // written `cmsg_len`.
                let data = unsafe { libc::CMSG_DATA(cmsg) };
                // SAFETY: there are at least size_of::<tpacket_auxdata>() bytes, and any bytes are
                // a value of it.
                let aux = unsafe { data.cast::<libc::tpacket_auxdata>().read_unaligned() };
                found.len = aux.tp_len;
                if aux.tp_status & libc::TP_STATUS_VLAN_VALID != 0 {
                    found.vlan = Some((aux.tp_vlan_tpid, aux.tp_vlan_tci));
                }
            }
            // SAFETY: `cmsg` came from CMSG_FIRSTHDR or CMSG_NXTHDR of the same header.
            cmsg = unsafe { libc::CMSG_NXTHDR(&raw const header, cmsg) };
        }
        found
    }

    /// Sends messages in order, at most as many as the batch has slots. Each consists of a virtio
    /// header and a frame; the header is given separately, or is at the beginning of the bytes.
    /// Returns the number of messages that the kernel accepted.
    ///
    /// # Errors
    /// The kernel's error for the first message.
    pub fn send<'a>(
        &mut self,
        fd: BorrowedFd<'_>,
        messages: impl Iterator<Item = (Option<[u8; VNET_HDR_LEN]>, &'a [u8])>,
    ) -> io::Result<usize> {
        let mut count = 0;
        for (i, (header, bytes)) in messages.take(self.messages.len()).enumerate() {
            let bytes = libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            };
            let vectors = &mut self.vectors[i];
            let len = match header {
                // The kernel processes a single vector faster.
                None => {
                    vectors[0] = bytes;
                    1
                }
                Some(header) => {
                    self.headers[i] = header;
                    let header = libc::iovec {
                        iov_base: self.headers[i].as_mut_ptr().cast(),
                        iov_len: VNET_HDR_LEN,
                    };
                    *vectors = [header, bytes];
                    2
                }
            };
            let message = &mut self.messages[i].msg_hdr;
            message.msg_iov = vectors.as_mut_ptr();
            message.msg_iovlen = len;
            message.msg_control = std::ptr::null_mut();
            message.msg_controllen = 0;
            message.msg_flags = 0;
            count = i + 1;
        }
        if count == 0 {
            return Ok(0);
        }
        // SAFETY: each of the first `count` headers points to one vector (bytes of the caller) or
        // two (a header in this value, and bytes of the caller). All have their true lengths and
        // live until this function returns; the kernel writes only `msg_len`.
        let n = check(unsafe {
            libc::sendmmsg(
                fd.as_raw_fd(),
                self.messages.as_mut_ptr(),
                libc::c_uint::try_from(count).expect("a batch is small"),
                libc::MSG_DONTWAIT as _,
            )
        })?;
        Ok(usize::try_from(n).unwrap_or(0))
    }
}

impl fmt::Debug for MessageBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageBatch")
            .field("len", &self.messages.len())
            .finish_non_exhaustive()
    }
}

fn link_address(ifindex: u32, protocol: u16) -> io::Result<libc::sockaddr_ll> {
    let ifindex = i32::try_from(ifindex).map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).expect("AF_PACKET is 17"),
        sll_protocol: protocol.to_be(),
        sll_ifindex: ifindex,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    })
}
