//! Accepts peers that connect in order to receive connections from this director.

use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lvs_core::api::Waiting;
use tracing::{error, info, warn};

use super::frame::{Handshake, INTRODUCTION_LEN, Introduction, PROOF_LEN};
use super::{Peer, Peers, bind, is_missing, sender};
use lvs_process::deadline;
use lvs_sys::Poller;
use lvs_sys::random;

/// Time limit for a connecting peer to prove that it has the key.
const PROOF: Duration = Duration::from_secs(3);
/// Maximum number of unauthenticated connections from one address.
const GREETINGS_MAX: usize = 2;
/// Longest wait until this director owns the connections that it borrowed from an earlier run of a
/// peer.
const SETTLE: Duration = Duration::from_secs(10);
/// Shortest interval between two log lines about refused connections.
const COMPLAIN: Duration = Duration::from_secs(60);

/// Interval between two attempts to listen on an address that the host does not have.
const BIND_AGAIN: Duration = Duration::from_millis(500);

/// Accepts the TCP connections of configured peers until the dataplane ends or the socket fails,
/// and serves each in its own thread. Closes and counts connections from other addresses, and
/// connections of a peer that already has [`GREETINGS_MAX`] unauthenticated connections. Without
/// `socket`, first waits until the host has the listening address.
pub(super) fn run(peers: &Arc<Peers>, socket: Option<TcpListener>) {
    let Some(socket) = socket.or_else(|| listen_in_time(peers)) else {
        return;
    };
    let mut poller = Poller::new();
    let mut complained: Option<Instant> = None;
    while !peers.is_stopping() {
        poller.clear();
        poller.add(peers.wake.as_fd());
        poller.add(socket.as_fd());
        if let Err(error) = poller.wait(None) {
            error!(
                "peers can no longer connect: cannot wait for connections: {error}; restart the dataplane"
            );
            return;
        }
        while !peers.is_stopping() {
            let (stream, from) = match socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // No file descriptor is free.
                    peers.pause(Duration::from_millis(100));
                    break;
                }
            };
            let ip = plain(from.ip());
            let peer = peers
                .peers
                .iter()
                .find(|peer| plain(peer.address.ip()) == ip);
            let Some(peer) = peer else {
                peers.count(|counts| &counts.refused_address);
                if complained.is_none_or(|at| at.elapsed() > COMPLAIN) {
                    complained = Some(Instant::now());
                    warn!(
                        "a connection from {ip} was refused, because this address is not a configured peer (--sync-peer)"
                    );
                }
                continue;
            };
            {
                let mut state = peer.state();
                if state.greeting >= GREETINGS_MAX {
                    drop(state);
                    peers.count(|counts| &counts.refused_places);
                    continue;
                }
                state.greeting += 1;
            }
            let (all, of) = (peers.clone(), peer.clone());
            let serves = move || {
                let met = greet(&all, &of, &stream);
                of.state().greeting -= 1;
                if let Some(handshake) = met {
                    serve(&all, &of, &stream, &handshake);
                }
            };
            if peers.spawn("lvs-peer-sends", serves).is_err() {
                peer.state().greeting -= 1;
            }
        }
    }
}

/// Waits until the host has the listening address; `None` if the dataplane ends first.
fn listen_in_time(peers: &Peers) -> Option<TcpListener> {
    let listen = peers.listen;
    let mut last_text = String::new();
    if let Some(Waiting {
        code, what, fix, ..
    }) = peers.waiting()
    {
        warn!(code, "{what}. To do: {fix}");
    }
    while !peers.is_stopping() {
        match bind(listen) {
            Ok(socket) => {
                peers.listens.store(true, Ordering::Release);
                info!("peers can connect to {listen}");
                return Some(socket);
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => {
                let text = error.to_string();
                if last_text != text {
                    warn!(
                        "peers cannot connect: cannot listen at {listen}: {text}: is another program using the port?"
                    );
                }
                last_text = text;
            }
        }
        peers.pause(BIND_AGAIN);
    }
    None
}

/// Converts an IPv4-mapped address to IPv4.
fn plain(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// Performs the handshake, in which each side proves that it has the key. Then waits until this
/// director owns the connections of an earlier run of the peer, for [`SETTLE`] at most. `None` if
/// the handshake fails: the failure is counted, and a wrong key is logged.
fn greet(peers: &Peers, peer: &Peer, stream: &TcpStream) -> Option<Handshake> {
    let met = try_greet(peers, peer, stream);
    match met {
        Ok(Some(handshake)) => Some(handshake),
        Ok(None) => {
            peers.count(|counts| &counts.refused_key);
            let mut state = peer.state();
            if state.complained.is_some_and(|at| at.elapsed() < COMPLAIN) {
                return None;
            }
            state.complained = Some(Instant::now());
            drop(state);
            warn!(
                "peer {} has not proved that it has the key: compare `sha256sum` of the key files",
                peer.address.ip()
            );
            None
        }
        Err(_) => {
            // The client has sent no proof or has closed the connection, perhaps because it rejects
            // this director's proof.
            peers.count(|counts| &counts.refused_key);
            None
        }
    }
}

fn try_greet(peers: &Peers, peer: &Peer, stream: &TcpStream) -> io::Result<Option<Handshake>> {
    let until = Instant::now() + PROOF;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PROOF))?;
    let mut theirs = [0; INTRODUCTION_LEN];
    read_until(stream, &mut theirs, until)?;
    let Some(theirs) = Introduction::parse(&theirs) else {
        return Ok(None);
    };
    let ours = Introduction::new(peers.identity, random()?);
    let handshake = Handshake::new(&peers.key, theirs, ours);
    let mut answer = ours.to_bytes().to_vec();
    answer.extend(handshake.sender_proof());
    let mut to = stream;
    to.write_all(&answer)?;
    let mut proof = [0; PROOF_LEN];
    read_until(stream, &mut proof, until)?;
    if !handshake.is_receiver(&proof) {
        return Ok(None);
    }
    // First this director takes over the connections of the peer's earlier run.
    peer.settle(theirs.identity, SETTLE);
    Ok(Some(handshake))
}

/// Fills the buffer, or fails at the deadline.
pub(super) fn read_until(
    stream: &TcpStream,
    mut bytes: &mut [u8],
    until: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        match deadline::read_until(stream, bytes, until)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes = &mut bytes[count..],
        }
    }
    Ok(())
}

/// Closes an older session with a peer, and sends connections to the peer until the new session
/// ends.
fn serve(peers: &Arc<Peers>, peer: &Arc<Peer>, stream: &TcpStream, handshake: &Handshake) {
    let Ok(sending) = stream.try_clone() else {
        return;
    };
    let (before, mine) = {
        let mut state = peer.state();
        state.sending_streams += 1;
        (state.sending.replace(sending), state.sending_streams)
    };
    if let Some(before) = before {
        let _ = before.shutdown(Shutdown::Both);
    }
    info!(
        "the connections of this director are replicated to peer {}",
        peer.address
    );
    sender::run(peers, peer, stream, handshake);
    {
        let mut state = peer.state();
        if state.sending_streams == mine {
            state.sending = None;
        }
    }
}
