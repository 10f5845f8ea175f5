//! Servers and clients of old Unix services that are hard to balance: a terminal (telnet), commands
//! with a second connection back to the client (rsh), a printer that checks its client's port
//! (lpd), a session over two ports, and a file over UDP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

pub(crate) const TELNET: u16 = 23;
pub(crate) const RSH: u16 = 514;
pub(crate) const LPD: u16 = 515;
pub(crate) const UDP: u16 = 7005;
/// The name and the login port of each session service. A session continues at the port after its
/// login port. The services are balanced in different ways.
pub(crate) const SESSIONS: [(&str, u16); 3] = [
    ("session", 7001),
    ("session, mark", 7003),
    ("session, port 0", 7007),
];

/// Source ports of rcmd(3), which only privileged programs can bind.
const RESERVED: RangeInclusive<u16> = 512..=1023;
/// Source ports from which a print server accepts clients (RFC 1179).
const PRINTERS: RangeInclusive<u16> = 721..=731;
/// Length in bytes of a block of the UDP file, and of a print job.
const BLOCK: usize = 1024;
/// Time limit for opening a connection, and for each read of a TCP client. After a lost SYN, which
/// the client repeats after a second, the connection can still succeed.
const LIMIT: Duration = Duration::from_millis(2500);

/// Serves all classic services.
#[derive(Clone, Debug, Args)]
pub struct Serve {
    /// Name of this server, in one word
    name: String,
    /// Addresses from which UDP requests are answered
    #[arg(required = true)]
    addresses: Vec<Ipv4Addr>,
}

/// Uses all classic services, one after the other.
#[derive(Clone, Debug, Args)]
pub struct Use {
    /// The virtual address
    target: Ipv4Addr,
    /// Virtual address of the service with port 0
    second: Ipv4Addr,
    /// Duration of each measurement in milliseconds
    #[arg(long = "for", value_name = "MS")]
    for_ms: u64,
}

/// The result of transactions with one service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Fared {
    pub(crate) name: String,
    /// Transactions per second; 0 if the service does not work.
    pub(crate) rate: f64,
    /// The reason if the service does not work.
    pub(crate) error: Option<String>,
}

type Handler = fn(TcpStream, SocketAddr, &str) -> Result<()>;

impl Serve {
    /// Serves until the process is killed.
    ///
    /// # Errors
    ///
    /// A port or an address cannot be bound, or the last UDP socket fails later.
    pub fn run(&self) -> Result<()> {
        let name: Arc<str> = self.name.as_str().into();
        let mut all: Vec<(u16, Handler)> = vec![(TELNET, terminal), (RSH, shell), (LPD, printer)];
        for (_, port) in SESSIONS {
            all.extend([(port, log_in as Handler), (port + 1, go_on)]);
        }
        for (port, handler) in all {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
            let listener = listener.with_context(|| format!("cannot listen at port {port}"))?;
            let name = name.clone();
            thread::spawn(move || accept(&listener, handler, &name));
        }
        let mut threads = Vec::new();
        for address in &self.addresses {
            let socket = UdpSocket::bind((*address, UDP))?;
            threads.push(thread::spawn(move || blocks(&socket)));
        }
        println!("ready");
        let first = threads.pop().context("no address is given")?;
        first
            .join()
            .map_err(|_| anyhow::anyhow!("a server panicked"))?
    }
}

fn accept(listener: &TcpListener, handler: Handler, name: &Arc<str>) {
    for stream in listener.incoming().flatten() {
        let name = name.clone();
        thread::spawn(move || {
            // A client that closes its connection is not an error.
            let _ = ready(&stream).and_then(|peer| handler(stream, peer, &name));
        });
    }
}

fn ready(stream: &TcpStream) -> Result<SocketAddr> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT * 10))?;
    stream.set_write_timeout(Some(LIMIT))?;
    Ok(stream.peer_addr()?)
}

fn terminal(mut stream: TcpStream, _: SocketAddr, name: &str) -> Result<()> {
    writeln!(stream, "{name} login:")?;
    let mut typed = [0; 64];
    loop {
        let count = stream.read(&mut typed)?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&typed[..count])?;
    }
}

fn shell(mut stream: TcpStream, peer: SocketAddr, name: &str) -> Result<()> {
    if !RESERVED.contains(&peer.port()) {
        stream.write_all(b"\x01permission denied: the client's port is not a reserved one\n")?;
        return Ok(());
    }
    let mut reader = BufReader::new(stream.try_clone()?);
    let back: u16 = until(&mut reader, 0)?.parse()?;
    let back = SocketAddr::new(peer.ip(), back);
    let mut errors = match connect(RESERVED, back) {
        Ok(stream) => stream,
        Err(error) => {
            writeln!(stream, "\x01no connection back: {error:#}")?;
            return Ok(());
        }
    };
    // The names of the local and the remote user, and the command.
    for _ in 0..3 {
        until(&mut reader, 0)?;
    }
    write!(stream, "\0{name}")?;
    write!(errors, "{name}")?;
    Ok(())
}

fn printer(mut stream: TcpStream, peer: SocketAddr, _: &str) -> Result<()> {
    if !PRINTERS.contains(&peer.port()) {
        stream.write_all(b"\x01")?;
        return Ok(());
    }
    let mut reader = BufReader::new(stream.try_clone()?);
    ensure!(
        until(&mut reader, b'\n')?.starts_with('\x02'),
        "the client requests something else than to print"
    );
    stream.write_all(b"\0")?;
    let file = until(&mut reader, b'\n')?;
    let count = file
        .strip_prefix('\x03')
        .and_then(|rest| rest.split(' ').next());
    let count: usize = count.context("the client sends no file")?.parse()?;
    ensure!(count <= BLOCK, "the print job is longer than {BLOCK} bytes");
    stream.write_all(b"\0")?;
    let mut file = vec![0; count + 1];
    reader.read_exact(&mut file)?;
    stream.write_all(b"\0")?;
    Ok(())
}

fn log_in(mut stream: TcpStream, _: SocketAddr, name: &str) -> Result<()> {
    writeln!(stream, "{name}")?;
    Ok(())
}

/// Serves the second port of a session. Answers `y` to a client that has logged in at this server,
/// otherwise `n`.
fn go_on(mut stream: TcpStream, _: SocketAddr, name: &str) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let known = until(&mut reader, b'\n')? == name;
    stream.write_all(if known { b"y" } else { b"n" })?;
    Ok(())
}

fn blocks(socket: &UdpSocket) -> Result<()> {
    let mut number = [0; 8];
    let mut block = vec![b'x'; BLOCK + 8];
    loop {
        let (count, client) = socket.recv_from(&mut number)?;
        if count == number.len() {
            block[..8].copy_from_slice(&number);
            socket.send_to(&block, client)?;
        }
    }
}

/// Reads the text before the byte `end`, at most 1,024 bytes.
fn until(reader: &mut impl BufRead, end: u8) -> Result<String> {
    let mut text = Vec::new();
    reader.take(1024).read_until(end, &mut text)?;
    ensure!(text.pop() == Some(end), "the connection ended early");
    Ok(String::from_utf8(text)?)
}

/// Returns the next port of a range, so that a port is reused as late as possible.
fn next_port(range: &RangeInclusive<u16>) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let count = range.end() - range.start() + 1;
    range.start() + NEXT.fetch_add(1, Ordering::Relaxed) % count
}

fn bound(range: &RangeInclusive<u16>) -> Result<Socket> {
    for _ in range.clone() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        let own = SocketAddr::from((Ipv4Addr::UNSPECIFIED, next_port(range)));
        if socket.bind(&own.into()).is_ok() {
            return Ok(socket);
        }
    }
    bail!("no port of {range:?} is free")
}

fn connect(range: RangeInclusive<u16>, to: SocketAddr) -> Result<TcpStream> {
    for _ in range.clone() {
        let socket = bound(&range)?;
        match socket.connect_timeout(&to.into(), LIMIT) {
            Ok(()) => {
                let stream = TcpStream::from(socket);
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LIMIT))?;
                return Ok(stream);
            }
            // The previous connection from this port may still exist.
            Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => {}
            Err(error) => return Err(error).with_context(|| format!("cannot connect to {to}")),
        }
    }
    bail!("no port of {range:?} is free")
}

impl Use {
    /// Uses the services, and prints the results.
    ///
    /// # Errors
    ///
    /// If the results cannot be printed. A service that does not work is a part of the results.
    pub fn run(&self) -> Result<()> {
        let at = |port: u16| SocketAddr::new(IpAddr::V4(self.target), port);
        let mut all = vec![
            self.fare("telnet", || type_into(at(TELNET))),
            self.fare("rsh", || once(|| run_command(at(RSH)))),
            self.fare("lpd", || once(|| print(at(LPD)))),
        ];
        for (name, port) in SESSIONS {
            let address = if name.ends_with('0') {
                self.second
            } else {
                self.target
            };
            let session = || session(address, port);
            all.push(self.fare(name, || once(session)));
        }
        all.push(self.fare("UDP file", || read_blocks(at(UDP))));
        println!("{}", serde_json::to_string(&all)?);
        Ok(())
    }

    /// Repeats transactions until the measurement ends, or one of them fails. `begin` creates the
    /// client.
    fn fare<T: FnMut() -> Result<()>>(
        &self,
        name: &str,
        begin: impl FnOnce() -> Result<T>,
    ) -> Fared {
        let limit = Duration::from_millis(self.for_ms);
        let measure = || -> Result<f64> {
            let mut transaction = begin()?;
            let (start, mut count) = (Instant::now(), 0_u32);
            while start.elapsed() < limit {
                transaction()?;
                count += 1;
            }
            Ok(f64::from(count) / start.elapsed().as_secs_f64())
        };
        let (rate, error) = match measure() {
            Ok(rate) => (rate, None),
            Err(error) => (0.0, Some(format!("{error:#}"))),
        };
        Fared {
            name: name.to_owned(),
            rate,
            error,
        }
    }
}

fn once<T: FnMut() -> Result<()>>(transaction: T) -> Result<T> {
    Ok(transaction)
}

fn open(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, LIMIT)
        .with_context(|| format!("cannot connect to {to}"))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

fn type_into(to: SocketAddr) -> Result<impl FnMut() -> Result<()>> {
    let mut stream = open(to)?;
    until(&mut BufReader::with_capacity(1, stream.try_clone()?), b'\n')?;
    Ok(move || {
        let mut key = [b'k'];
        stream.write_all(&key)?;
        stream
            .read_exact(&mut key)
            .context("the server returned no byte")?;
        ensure!(
            key == [b'k'],
            "the server returned another byte than it received"
        );
        Ok(())
    })
}

fn run_command(to: SocketAddr) -> Result<()> {
    let listener = bound(&RESERVED)?;
    listener.listen(1)?;
    listener.set_read_timeout(Some(LIMIT))?;
    let own = listener
        .local_addr()?
        .as_socket()
        .context("the socket has no address and port")?;
    let mut stream = connect(RESERVED, to)?;
    write!(stream, "{}\0me\0me\0name\0", own.port())?;
    listener.set_nonblocking(true)?;
    stream.set_nonblocking(true)?;
    let start = Instant::now();
    let back = loop {
        if let Ok((back, from)) = listener.accept() {
            let from = from
                .as_socket()
                .context("the socket has no address and port")?;
            ensure!(
                RESERVED.contains(&from.port()),
                "the connection back is from port {}",
                from.port()
            );
            break TcpStream::from(back);
        }
        // Data of another connection may arrive first.
        let mut first = [0];
        if stream
            .peek(&mut first)
            .is_ok_and(|count| count == 0 || first != [0])
        {
            stream.set_nonblocking(false)?;
            let mut text = String::new();
            let _ = (&stream).take(200).read_to_string(&mut text);
            bail!(
                "the server refused the command: {}",
                text.trim_matches(['\x01', '\n'])
            );
        }
        ensure!(
            start.elapsed() < LIMIT,
            "the server opened no connection to the client"
        );
        thread::yield_now();
    };
    stream.set_nonblocking(false)?;
    back.set_nonblocking(false)?;
    back.set_read_timeout(Some(LIMIT))?;
    let (mut output, mut errors) = (String::new(), String::new());
    (&stream).take(200).read_to_string(&mut output)?;
    (&back).take(200).read_to_string(&mut errors)?;
    ensure!(
        output.strip_prefix('\0') == Some(errors.as_str()) && !errors.is_empty(),
        "the two connections belong to different servers: {output:?}, {errors:?}"
    );
    Ok(())
}

fn print(to: SocketAddr) -> Result<()> {
    let mut stream = connect(PRINTERS, to)?;
    let mut accepted = |what: &[u8]| -> Result<()> {
        let mut answer = [1];
        stream.write_all(what)?;
        stream
            .read_exact(&mut answer)
            .context("the printer did not acknowledge the request")?;
        ensure!(answer == [0], "the printer refuses the client's port");
        Ok(())
    };
    accepted(b"\x02lp\n")?;
    accepted(format!("\x03{BLOCK} dfA001client\n").as_bytes())?;
    let mut file = vec![b'x'; BLOCK];
    file.push(0);
    accepted(&file)?;
    // The side that closes first keeps the port in TIME_WAIT: here, the server.
    let _ = stream.read(&mut [0]);
    Ok(())
}

fn session(address: Ipv4Addr, port: u16) -> Result<()> {
    let at = |port| SocketAddr::new(IpAddr::V4(address), port);
    let mut name = until(&mut BufReader::new(open(at(port))?), b'\n')?;
    name.push('\n');
    for _ in 0..4 {
        let mut stream = open(at(port + 1))?;
        stream.write_all(name.as_bytes())?;
        let mut known = [0];
        stream
            .read_exact(&mut known)
            .context("the server did not answer")?;
        ensure!(
            known == [b'y'],
            "the connection reached another server, which does not have the session"
        );
    }
    Ok(())
}

fn read_blocks(to: SocketAddr) -> Result<impl FnMut() -> Result<()>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(LIMIT / 10))?;
    let mut number = 0_u64;
    Ok(move || {
        number += 1;
        let mut block = vec![0; BLOCK + 64];
        for _ in 0..3 {
            socket.send(&number.to_be_bytes())?;
            while let Ok(count) = socket.recv(&mut block) {
                if count == BLOCK + 8 && block[..8] == number.to_be_bytes() {
                    return Ok(());
                }
            }
        }
        bail!("no block arrived after three requests")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(handler: Handler) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the socket can be opened");
        let address = listener.local_addr().expect("the socket has an address");
        thread::spawn(move || accept(&listener, handler, &"one".into()));
        address
    }

    #[test]
    fn terminal_session_receives_echo() {
        let mut transaction = type_into(served(terminal)).expect("the terminal sends its banner");
        transaction().expect("the terminal returns the key");
        transaction().expect("the terminal returns the key");
    }

    #[test]
    fn shell_and_printer_servers_check_source_port_of_client() {
        assert!(
            nix::unistd::geteuid().is_root(),
            "reserved ports: run this test as root"
        );
        run_command(served(shell)).expect("the client runs");
        print(served(printer)).expect("the client can connect to the printer");
        let mut stream = open(served(printer)).expect("the server accepts the connection");
        stream
            .write_all(b"\x02lp\n")
            .expect("the request can be written");
        let mut answer = [0];
        stream.read_exact(&mut answer).expect("the server answers");
        assert_eq!(answer, [1]);
        let stream = open(served(shell)).expect("the server accepts the connection");
        let refused = until(&mut BufReader::new(stream), b'\n').expect("the server answers");
        assert!(refused.contains("permission denied"), "{refused}");
    }

    #[test]
    fn udp_client_receives_block_and_missing_server_is_an_error() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        let address = socket.local_addr().expect("the socket has an address");
        thread::spawn(move || blocks(&socket));
        read_blocks(address).expect("the socket can be opened")().expect("the block arrives");
        let nobody = UdpSocket::bind("127.0.0.1:0").expect("the socket can be opened");
        let address = nobody.local_addr().expect("the socket has an address");
        assert!(read_blocks(address).expect("the socket can be opened")().is_err());
    }

    #[test]
    fn session_server_rejects_client_of_another_server() {
        let wrong: Handler = |stream, peer, _| go_on(stream, peer, "two");
        let asked = |handler| {
            let mut stream = open(served(handler)).expect("the server accepts the connection");
            stream
                .write_all(b"one\n")
                .expect("the request can be written");
            let mut known = [0];
            stream.read_exact(&mut known).expect("the server answers");
            known[0]
        };
        assert_eq!((asked(go_on), asked(wrong)), (b'y', b'n'));
    }
}
