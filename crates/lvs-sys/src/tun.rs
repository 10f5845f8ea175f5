//! TUN devices.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::check;
use super::device::request;

/// A queue of a TUN device with `IFF_NO_PI` and `IFF_VNET_HDR`.
#[derive(Debug)]
pub struct TunDevice {
    file: File,
}

/// Work that the reader of the device does itself: checksums, and TCP super-packets over IPv4 and
/// IPv6, also with ECN. `TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN` of `linux/if_tun.h`.
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x08;

/// The device's descriptor gets a number from this one on. The kernel closes the descriptors of a
/// killed process from the highest number down, and routes over the device must disappear first.
/// The usual limit is 1,024.
const LAST: i32 = 1000;

impl TunDevice {
    /// Creates the device `name`, which exists until its last descriptor is closed.
    ///
    /// # Errors
    /// `NotFound` without `/dev/net/tun`, `PermissionDenied` without `CAP_NET_ADMIN`,
    /// `ResourceBusy` if the device already exists.
    pub fn create(name: &str) -> io::Result<Self> {
        Self::open(name, libc::IFF_TUN)
    }

    /// As [`create`](Self::create), with Ethernet frames (TAP) instead of IP packets.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_tap(name: &str) -> io::Result<Self> {
        Self::open(name, libc::IFF_TAP)
    }

    /// The device of a descriptor that another process has opened and passed to this one.
    pub fn of(descriptor: OwnedFd) -> Self {
        Self {
            file: descriptor.into(),
        }
    }

    /// Returns another descriptor of the same queue.
    ///
    /// # Errors
    /// If no descriptor is available.
    pub fn another(&self) -> io::Result<Self> {
        let file = self.file.try_clone()?;
        Ok(Self { file })
    }

    fn open(name: &str, kind: libc::c_int) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/net/tun")?;
        let mut request = request(name)?;
        // Do not become a second owner of an existing device with this name.
        let flags = kind | libc::IFF_TUN_EXCL | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let [low, high, ..] = flags.to_le_bytes();
        request.ifr_ifru.ifru_flags = libc::c_short::from_le_bytes([low, high]);
        // SAFETY: TUNSETIFF reads and writes an ifreq with a NUL-terminated name and `ifru_flags`
        // set.
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, OFFLOADS) })?;
        // When a process is killed, the kernel closes the descriptor with the highest number first,
        // and needs 100 ms for a few packet sockets. Routes over this device must disappear at
        // once.
        let last = rustix::io::fcntl_dupfd_cloexec(&file, LAST);
        Ok(Self {
            file: last.map_or(file, File::from),
        })
    }

    /// Reads a packet with its virtio header. Returns the length of the packet without this header.
    ///
    /// # Errors
    /// `WouldBlock` if no packet is waiting.
    pub fn read(&self, header: &mut [u8; 10], packet: &mut [u8]) -> io::Result<usize> {
        let len = header.len();
        let n =
            (&self.file).read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(packet)])?;
        n.checked_sub(len)
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Writes a packet after its virtio header.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write(&self, header: &[u8; 10], packet: &[u8]) -> io::Result<()> {
        let n = (&self.file).write_vectored(&[IoSlice::new(header), IoSlice::new(packet)])?;
        // The driver accepts a complete packet or nothing (tun_get_user()).
        if n < header.len() + packet.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }
}

impl AsFd for TunDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
