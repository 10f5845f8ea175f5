//! Directors that connect, to listen.

use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lvs_core::api::Waiting;
use tracing::{error, info, warn};

use super::frame::{Handshake, INTRODUCTION_LEN, Introduction, PROOF_LEN};
use super::{Peer, Peers, bind, is_missing, teller};
use crate::random::random;
use lvs_process::deadline;
use lvs_sys::Poller;

/// How long a peer may take to prove itself.
const PROOF: Duration = Duration::from_secs(3);
/// Connections from one address that have not proved themselves yet.
const GREETINGS_MAX: usize = 2;
/// How long what a peer has lent before may take to be adopted.
const SETTLE: Duration = Duration::from_secs(10);
/// Between two complaints about strangers.
const COMPLAIN: Duration = Duration::from_secs(60);

/// Between two attempts to listen at an address that the host does not have.
const BIND_AGAIN: Duration = Duration::from_millis(500);

/// Takes connections until the engine ends. Without a socket, waits for the address first.
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
            error!("other directors cannot be waited for: {error}");
            return;
        }
        while !peers.is_stopping() {
            let (stream, from) = match socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // No descriptors: later there may be some.
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
                    warn!("{ip} has connected to listen, and is none of the peers");
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
            if peers.spawn("lvs-peer-tells", serves).is_err() {
                peer.state().greeting -= 1;
            }
        }
    }
}

/// Waits until the host has the address to listen at; `None` if the engine ends first.
fn listen_in_time(peers: &Peers) -> Option<TcpListener> {
    let listen = peers.listen;
    let mut said = String::new();
    if let Some(Waiting { code, what, fix }) = peers.waiting() {
        warn!(code, "{what}. To do: {fix}");
    }
    while !peers.is_stopping() {
        match bind(listen) {
            Ok(socket) => {
                peers.listens.store(true, Ordering::Release);
                info!("other directors can connect to {listen}");
                return Some(socket);
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => {
                let text = error.to_string();
                if said != text {
                    warn!("cannot listen at {listen}: {text}: does another program have the port?");
                }
                said = text;
            }
        }
        peers.pause(BIND_AGAIN);
    }
    None
}

/// An address of IPv4 as such.
fn plain(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// Both sides prove that they have the key, in three seconds.
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
                "{} has not proved that it has the key: compare `sha256sum` of the key files",
                peer.address.ip()
            );
            None
        }
        Err(_) => {
            // It says nothing, or has gone: it may have seen our proof.
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
    answer.extend(handshake.teller_proof());
    let mut to = stream;
    to.write_all(&answer)?;
    let mut proof = [0; PROOF_LEN];
    read_until(stream, &mut proof, until)?;
    if !handshake.is_listener(&proof) {
        return Ok(None);
    }
    // What it lent as it was before is ours first, and told.
    peer.settle(theirs.identity, SETTLE);
    Ok(Some(handshake))
}

/// Reads all of it by then.
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

/// Tells a peer everything, in place of an older connection of its.
fn serve(peers: &Arc<Peers>, peer: &Arc<Peer>, stream: &TcpStream, handshake: &Handshake) {
    let Ok(tells) = stream.try_clone() else {
        return;
    };
    let (before, mine) = {
        let mut state = peer.state();
        state.telling += 1;
        (state.tells.replace(tells), state.telling)
    };
    if let Some(before) = before {
        let _ = before.shutdown(Shutdown::Both);
    }
    info!("{} listens", peer.address);
    teller::run(peers, peer, stream, handshake);
    {
        let mut state = peer.state();
        if state.telling == mine {
            state.tells = None;
        }
    }
}
