//! Requests to the kernel's tables, each acknowledged before the next.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::message::{Builder, Message, messages};

#[derive(Debug)]
pub(crate) struct Requests {
    socket: Socket,
    seq: u32,
    buf: Vec<u8>,
}

impl Requests {
    /// Connects to the kernel, in this thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        Self::of(NETLINK_ROUTE)
    }

    /// As [`open`](Self::open), for another netlink family (`NETLINK_*`).
    pub(super) fn of(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        lvs_sys::set_receive_buffer(&socket, 1 << 20)?;
        Ok(Self {
            socket,
            seq: 1,
            buf: Vec::with_capacity(64 << 10),
        })
    }

    /// Sets the maximum length of an interface's queue in packets. (The ioctl for this works only
    /// in the initial user namespace.)
    pub(crate) fn set_queue_length(&mut self, ifindex: u32, packets: u32) -> io::Result<()> {
        // struct ifinfomsg
        let mut header = [0; 16];
        header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        self.request(libc::RTM_SETLINK, 0, &header, |b| {
            b.attr(libc::IFLA_TXQLEN, &packets.to_ne_bytes());
        })
    }

    /// Sends a request and waits for its acknowledgement.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: i32,
        header: &[u8],
        fill: impl FnOnce(&mut Builder),
    ) -> io::Result<()> {
        self.ask(kind, flags, header, fill, |_| {})
    }

    /// As [`request`](Self::request). `each` receives the messages before the acknowledgement.
    pub(super) fn ask(
        &mut self,
        kind: u16,
        flags: i32,
        header: &[u8],
        fill: impl FnOnce(&mut Builder),
        mut each: impl FnMut(&Message<'_>),
    ) -> io::Result<()> {
        self.send(kind, flags | libc::NLM_F_ACK, header, fill)?;
        self.answers(&mut each)
    }

    /// Requests a whole table. If the table changes during the reading, later events report the
    /// changes.
    pub(crate) fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        mut each: impl FnMut(&Message<'_>),
    ) -> io::Result<()> {
        self.send(kind, libc::NLM_F_DUMP, header, |_| {})?;
        self.answers(&mut each)
    }

    /// Passes the messages of an answer to `each`, up to the acknowledgement or the end of a table.
    fn answers(&mut self, each: &mut dyn FnMut(&Message<'_>)) -> io::Result<()> {
        const NLMSG_DONE: u16 = 3;
        loop {
            self.buf.clear();
            receive(&self.socket, &mut self.buf)?;
            for message in messages(&self.buf) {
                if message.seq != self.seq {
                    continue;
                }
                match message.error() {
                    Some((0, _)) => return Ok(()),
                    Some(error) => return Err(refusal(error)),
                    None if message.kind == NLMSG_DONE => return Ok(()),
                    None => each(&message),
                }
            }
        }
    }

    fn send(
        &mut self,
        kind: u16,
        flags: i32,
        header: &[u8],
        fill: impl FnOnce(&mut Builder),
    ) -> io::Result<()> {
        let flags = flags | libc::NLM_F_REQUEST;
        self.seq = self.seq.wrapping_add(1).max(1);
        let mut builder = Builder::new(self.seq);
        builder.begin(kind, u16::try_from(flags).unwrap_or(0), header);
        fill(&mut builder);
        builder.end();
        self.socket.send(builder.bytes(), 0).map(drop)
    }
}

/// Receives one complete datagram, even if a signal interrupts the call.
fn receive(socket: &Socket, buf: &mut Vec<u8>) -> io::Result<()> {
    loop {
        match socket.recv(buf, libc::MSG_TRUNC) {
            Ok(len) if len > buf.len() => {
                return Err(io::Error::other(
                    "the kernel's netlink answer exceeds the receive buffer",
                ));
            }
            Ok(_) => return Ok(()),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
}

/// Converts a refusal of the kernel to an error. Logs the kernel's text, if it sent one.
pub(crate) fn refusal((errno, words): (i32, Option<String>)) -> io::Error {
    let err = io::Error::from_raw_os_error(errno);
    if let Some(words) = words {
        tracing::debug!("the kernel reports: {words} ({err})");
    }
    err
}
