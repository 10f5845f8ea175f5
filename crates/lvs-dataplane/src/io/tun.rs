//! TUN devices: IP packets between this process and the host's own stack.
//!
//! There are three uses: the dataplane reinjects packets that the shield has hidden and that are
//! for the host; it exchanges packets with clients and servers on this host; and the TUN backend
//! receives and sends all packets.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::{PacketIo, vnet};
use crate::netlink::Requests;
use lvs_packet::frame::Frame;
use lvs_packet::wire::{decrement_ttl, increment_ttl};
use lvs_sys::TunDevice;

/// The reason why a TUN device cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The kernel has no TUN driver, or this container has no `/dev/net/tun`.
    #[error("/dev/net/tun is missing: load the module tun, or add the device to the container")]
    NoDriver,
    /// The process has no permission to open `/dev/net/tun`.
    #[error(
        "no permission to open /dev/net/tun: `chmod 0666 /dev/net/tun` (the mode in Debian; a capability is required as well), or run as root"
    )]
    File,
    /// The process has no permission to create devices.
    #[error(
        "no permission to create the device {name}: run as root, or give the program CAP_NET_ADMIN"
    )]
    Permission {
        /// Name of the device.
        name: String,
    },
    /// A device of this name already exists.
    #[error(
        "the device {name} already exists: another dataplane is running in this network namespace, or a killed one has left it (`lvs-dataplane --cleanup`, or `ip link delete {name}`)"
    )]
    Exists {
        /// Name of the device.
        name: String,
    },
    /// Another error of a system call.
    #[error("device {name}: cannot {step}: {source}")]
    Os {
        /// Name of the device.
        name: String,
        /// The step that failed, as a verb with its object.
        step: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl TunError {
    fn of_creation(name: &str, source: io::Error) -> Self {
        let name = name.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoDriver,
            // Opening the file fails with EACCES, and the driver with EPERM.
            io::ErrorKind::PermissionDenied if source.raw_os_error() == Some(libc::EACCES) => {
                Self::File
            }
            io::ErrorKind::PermissionDenied => Self::Permission { name },
            io::ErrorKind::ResourceBusy => Self::Exists { name },
            _ => failed(&name, "create the queue")(source),
        }
    }
}

/// Maximum number of packets that wait for the dataplane. The kernel's default of 500 is too low
/// for a burst of small packets.
const QUEUE: u32 = 8192;

/// The device through which the dataplane reinjects packets into the host, and into which own VIPs
/// are routed.
///
/// It has no address, configures no IPv6 address automatically, and accepts packets of 64 KiB.
/// Reverse-path filtering must not apply to it, because a reinjected packet has the source of a
/// client elsewhere. The kernel uses the greater value of `net.ipv4.conf.all.rp_filter` and the
/// device's own, so `all` must be 0. If it is not, the dataplane first copies its value to the
/// interfaces, and to `default` for later ones: the filter of every other interface never changes,
/// even after a `kill -9`. An orderly stop restores all values (drop the device on a thread of the
/// network namespace in which it was created). If an operator sets `all` again while the dataplane
/// is running, the host filters reinjected packets.
///
/// `accept_local` is off, except with [`LOCAL`](Self::LOCAL) and in the TUN backend: a packet from
/// outside with one of the host's own addresses as its source is forged, and the device refuses it
/// as the interface of its arrival would have done.
///
/// With the TUN backend, the host routes all packets through such a device, in both directions:
///
/// ```text
///  interface ─▶ routing ─▶ device ─▶ director ─▶ device ─▶ routing ─▶ interface
///               TTL - 1      TTL + 1   TTL - 1     TTL + 1   TTL - 1
/// ```
///
/// The host forwards each packet twice, before and after the dataplane, and decrements the TTL each
/// time. The dataplane therefore increments the TTL when it receives a packet, in order to decide
/// about it as it arrived, and again when it sends the packet. It does not increment the TTL of a
/// reinjected packet: if a rule of the host led that packet into the device again, it would loop
/// forever.
#[derive(Debug)]
pub struct HostDevice {
    device: TunDevice,
    name: String,
    ifindex: u32,
    /// Whether the host routes all packets through the device.
    is_hop: bool,
    /// The host's settings that the device has changed; `None` for another worker's sender, which
    /// receives no packets.
    owns: Option<RpFilter>,
}

impl HostDevice {
    /// The name of the device through which packets are reinjected into the host.
    pub const NAME: &'static str = "lvs-host0";

    /// The name of the device for the host's own packets to its own addresses.
    pub const LOCAL: &'static str = "lvs-local0";

    /// The name of the device of the TUN backend.
    pub const HOP: &'static str = "lvs-tun0";

    /// Creates the device and brings it up.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn create() -> Result<Self, TunError> {
        let name = Self::NAME;
        Self::set_up(name, TunDevice::create(name), |_| Ok(()))
    }

    /// As [`create`](Self::create), for [`LOCAL`](Self::LOCAL): `accept_local` permits packets from
    /// the host's own addresses, and `route_localnet` permits servers on loopback addresses.
    ///
    /// # Errors
    /// See [`TunError`].
    pub(crate) fn create_local() -> Result<Self, TunError> {
        let name = Self::LOCAL;
        Self::set_up(name, TunDevice::create(name), |conf| {
            write_setting(&conf.join("accept_local"), 1)
                .and_then(|()| write_setting(&conf.join("route_localnet"), 1))
                .map_err(failed(name, "permit the host's own addresses as sources"))
        })?
        .with_long_queue()
    }

    /// Creates the device of the TUN backend with forwarding enabled, or reuses the device that
    /// another dataplane has `left`. The device accepts packets whose source is an address of the
    /// host, as in the outer headers of tunnels.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn create_hop(left: Option<OwnedFd>) -> Result<Self, TunError> {
        let name = Self::HOP;
        // The device may have been deleted in the meantime.
        let left = left.filter(|_| lvs_sys::if_index(name).is_ok());
        let device = match left {
            Some(left) => Ok(TunDevice::of(left)),
            None => TunDevice::create(name),
        };
        let host = Self::set_up(name, device, |conf| {
            // The host has already checked the sources of packets on the interface of their
            // arrival.
            write_setting(&conf.join("accept_local"), 1)
                .map_err(failed(name, "permit the host's own addresses as sources"))?;
            write_setting(&conf.join("forwarding"), 1).map_err(failed(name, "switch on forwarding"))
        })?
        .with_long_queue()?;
        Ok(Self {
            is_hop: true,
            ..host
        })
    }

    fn with_long_queue(self) -> Result<Self, TunError> {
        Requests::open()
            .and_then(|mut requests| requests.set_queue_length(self.ifindex, QUEUE))
            .map_err(failed(&self.name, "set the queue's length"))?;
        Ok(self)
    }

    /// Configures a created device; `prepare` runs before the device is up.
    fn set_up(
        name: &str,
        device: io::Result<TunDevice>,
        prepare: impl FnOnce(&Path) -> Result<(), TunError>,
    ) -> Result<Self, TunError> {
        let device = device.map_err(|error| TunError::of_creation(name, error))?;
        let fail = |step| failed(name, step);
        lvs_sys::set_mtu(name, u16::MAX).map_err(fail("set the MTU"))?;
        let conf = PathBuf::from("/proc/sys/net/ipv4/conf");
        let own = conf.join(name);
        write_setting(&own.join("rp_filter"), 0).map_err(fail("switch off rp_filter"))?;
        let rp_filter = RpFilter::clear(&conf, name)
            .map_err(fail("move net.ipv4.conf.all.rp_filter to the interfaces"))?;
        // No link-local address, and no router solicitations. A host without IPv6 lacks the
        // settings.
        let conf6 = Path::new("/proc/sys/net/ipv6/conf").join(name);
        if conf6.is_dir() {
            write_setting(&conf6.join("addr_gen_mode"), 1)
                .map_err(fail("switch off automatic IPv6 addresses"))?;
            write_setting(&conf6.join("accept_ra"), 0)
                .map_err(fail("switch off IPv6 router advertisements"))?;
        }
        prepare(&own)?;
        lvs_sys::set_up(name).map_err(fail("bring the link up"))?;
        Ok(Self {
            ifindex: lvs_sys::if_index(name).map_err(fail("find the index"))?,
            device,
            name: name.to_owned(),
            is_hop: false,
            owns: Some(rp_filter),
        })
    }

    /// Returns a sender for the device, for another worker. Only the owner of the device receives
    /// packets.
    ///
    /// # Errors
    /// If the process has no free file descriptor.
    pub fn sender(&self) -> Result<Self, TunError> {
        let device = self.device.another();
        Ok(Self {
            device: device.map_err(failed(&self.name, "copy a descriptor"))?,
            name: self.name.clone(),
            ifindex: self.ifindex,
            is_hop: self.is_hop,
            owns: None,
        })
    }

    /// Reinjects packets, with the TTL that they had when they arrived. Returns the number of
    /// refused packets.
    pub fn give_back(&mut self, frames: &mut [Frame]) -> usize {
        if self.is_hop {
            for frame in &mut *frames {
                decrement_ttl(frame.bytes_mut());
            }
        }
        self.write(frames)
    }

    fn write(&self, frames: &[Frame]) -> usize {
        let accepts = |frame: &&Frame| {
            let header = vnet::encode(&frame.offload);
            self.device.write(&header, frame.bytes()).is_ok()
        };
        frames.len() - frames.iter().filter(accepts).count()
    }

    /// Number of packets that were dropped since the device was created because its queues were
    /// full.
    pub fn drops(&self) -> u64 {
        let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        transmit_drops(&text, self.name()).unwrap_or(0)
    }

    /// The index of the device.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl PacketIo for HostDevice {
    fn recv(&mut self, frames: &mut [Frame]) -> io::Result<usize> {
        if self.owns.is_none() {
            return Ok(0);
        }
        let mut header = [0; vnet::LEN];
        for (i, frame) in frames.iter_mut().enumerate() {
            match self.device.read(&mut header, frame.receive_buffer()) {
                Ok(len) => frame.filled(len, vnet::decode(&header)),
                Err(err) if i > 0 || err.kind() == io::ErrorKind::WouldBlock => return Ok(i),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => return Ok(0),
                // EBADFD: the device was deleted. EIO: the device is down.
                Err(err) => {
                    let kind = match err.raw_os_error() {
                        Some(libc::EBADFD) => io::ErrorKind::NotFound,
                        Some(libc::EIO) => io::ErrorKind::NetworkDown,
                        _ => err.kind(),
                    };
                    return Err(io::Error::new(kind, format!("device {}: {err}", self.name)));
                }
            }
            if self.is_hop {
                increment_ttl(frame.bytes_mut());
            }
        }
        Ok(frames.len())
    }

    fn send(&mut self, frames: &mut [Frame]) -> usize {
        if self.is_hop {
            for frame in &mut *frames {
                increment_ttl(frame.bytes_mut());
            }
        }
        self.write(frames)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.owns.as_ref().map(|_| self.device.as_fd())
    }
}

/// Returns a device's counter of dropped packets in `/proc/net/dev`: in the column for
/// transmission, because the host transmits the packets that the dataplane receives.
fn transmit_drops(text: &str, device: &str) -> Option<u64> {
    const TRANSMIT_DROP: usize = 11;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, numbers) = lines.find(|(name, _)| name.trim() == device)?;
    let number = numbers.split_ascii_whitespace().nth(TRANSMIT_DROP)?;
    number.parse().ok()
}

fn failed(name: &str, step: &'static str) -> impl FnOnce(io::Error) -> TunError {
    let name = name.to_owned();
    move |source| TunError::Os { name, step, source }
}

/// The changed `rp_filter` settings, in the order in which they are restored.
#[derive(Debug, Default)]
struct RpFilter {
    moved: Vec<Moved>,
}

#[derive(Debug)]
struct Moved {
    path: PathBuf,
    old: u32,
    new: u32,
}

impl RpFilter {
    /// Sets `all` below `conf` to 0. The filter of each interface stays unchanged, except for
    /// `except` and the devices through which packets reach the host.
    fn clear(conf: &Path, except: &str) -> io::Result<Self> {
        let mut this = Self::default();
        let all = conf.join("all/rp_filter");
        let strictest = read_setting(&all)?;
        if strictest == 0 {
            return Ok(this);
        }
        // `all` is cleared last and restored first, so that no interface is ever filtered less
        // strictly than before.
        this.moved.push(Moved {
            path: all.clone(),
            old: strictest,
            new: 0,
        });
        for entry in fs::read_dir(conf)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == "all" || name == except || name == HostDevice::NAME {
                continue;
            }
            let path = entry.path().join("rp_filter");
            // An interface may be removed while its setting is read.
            let Ok(old) = read_setting(&path) else {
                continue;
            };
            if old < strictest && write_setting(&path, strictest).is_ok() {
                this.moved.push(Moved {
                    path,
                    old,
                    new: strictest,
                });
            }
        }
        write_setting(&all, 0)?;
        tracing::warn!(
            was = strictest,
            "net.ipv4.conf.all.rp_filter is 0 while the dataplane runs; each interface keeps its reverse-path filter by its own setting"
        );
        Ok(this)
    }
}

impl Drop for RpFilter {
    fn drop(&mut self) {
        for Moved { path, old, new } in &self.moved {
            // Keep a value that another program has changed in the meantime.
            if read_setting(path).is_ok_and(|now| now == *new)
                && let Err(err) = write_setting(path, *old)
            {
                tracing::warn!("cannot set {} back to {old}: {err}", path.display());
            }
        }
    }
}

/// Reads a number from a file below `/proc/sys`.
pub(crate) fn read_setting(path: &Path) -> io::Result<u32> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} does not contain a number", path.display()),
        )
    })
}

/// The fix for a read-only `/proc/sys` in a container.
const WRITABLE: &str = "run the container with `--security-opt unmask=/proc/sys` (podman), or `--security-opt systempaths=unconfined` (docker)";

/// Writes a setting, even if it already has the value: a written setting no longer follows
/// `default` (devinet_copy_dflt_conf()). A failed write, such as to a read-only `/proc/sys` in a
/// container, is no error if the setting already has the value.
pub(crate) fn write_setting(path: &Path, value: u32) -> io::Result<()> {
    match fs::write(path, value.to_string()) {
        Err(_) if read_setting(path).is_ok_and(|now| now == value) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            let why = format!("{} = {value}: {error}: {WRITABLE}", path.display());
            Err(io::Error::new(error.kind(), why))
        }
        result => result.map_err(|err| {
            io::Error::new(err.kind(), format!("{} = {value}: {err}", path.display()))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transmit_drops_of_interface_are_read_from_proc_net_dev() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
            lo:     1       2    3    4    5     6          7         8      9      10    11   12    13     14      15         16\n\
            lvs-tun0:100  2    3    4    5     6          7         8      9      10    11   1200    13     14      15         16\n";
        assert_eq!(transmit_drops(text, "lvs-tun0"), Some(1200));
        assert_eq!(transmit_drops(text, "lvs-tun1"), None);
    }
}
