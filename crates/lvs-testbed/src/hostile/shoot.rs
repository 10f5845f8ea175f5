//! Sends fuzz frames from a real interface.

use std::net::IpAddr;

use anyhow::{Context, Result};
use lvs_dataplane::io::af_packet::AfPacket;
use lvs_dataplane::io::{BATCH, PacketIo};
use lvs_packet::frame::Frame;

use super::generator::{Act, Generator, MACS, Shot, Side};
use super::{Entropy, Method, Scene};
use crate::packet::mac;

/// Options of `lvs-testbed shoot`.
#[derive(Clone, Debug, clap::Args)]
pub struct ShootOptions {
    /// The interface that sends the frames
    #[arg(long)]
    pub interface: String,
    /// The director's link-layer address on that interface; without it, packets are sent without an
    /// Ethernet header
    #[arg(long, value_parser = mac)]
    pub to: Option<[u8; 6]>,
    /// Send the frames of servers instead of those of clients
    #[arg(long)]
    pub as_server: bool,
    /// The virtual address
    #[arg(long)]
    pub vip: IpAddr,
    /// The director's own addresses, on the clients' and on the servers' link
    #[arg(long, num_args = 2)]
    pub director: Vec<IpAddr>,
    /// Source addresses for the frames, which no real host has
    #[arg(long, required = true)]
    pub client: Vec<IpAddr>,
    /// Addresses of the real servers
    #[arg(long, required = true)]
    pub server: Vec<IpAddr>,
    /// Seed of the random choices
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number of frames
    #[arg(long, default_value_t = 20_000)]
    pub frames: usize,
}

/// Sends the frames in batches with short pauses, and prints the number of frames that the
/// interface has accepted.
///
/// # Errors
///
/// If the interface does not exist, or the process may not open a packet socket.
pub fn shoot(options: &ShootOptions) -> Result<()> {
    let method = Method::named("nat4").context("no method is called nat4")?;
    let mut scene = Scene::new(method);
    scene.vips = [options.vip; 2];
    scene.director = [options.director[0], options.director[1]];
    scene.clients.clone_from(&options.client);
    scene.servers.clone_from(&options.server);
    scene.shift = 0;
    let mut generator = Generator::new(scene, Entropy::seeded(options.seed));
    let mac = options.to;
    let mut frames = Vec::new();
    while frames.len() < options.frames {
        let (Act::Send(shots) | Act::Train { shots, .. }) = generator.next_act() else {
            continue;
        };
        frames.extend(shots.into_iter().filter_map(|shot| aim(shot, mac, options)));
    }
    let taken = send(&options.interface, &mut frames)?;
    println!("{taken} of {} frames sent", frames.len());
    Ok(())
}

/// The frame in the form in which this host sends it; `None` if another host sends it, or it is too
/// short.
fn aim(shot: Shot, mac: Option<[u8; 6]>, options: &ShootOptions) -> Option<Frame> {
    let mut frame = shot.frame;
    let Some(mac) = mac else {
        // A TUN device accepts packets without a link header.
        let bare = shot.from == Side::Host || frame.pull_front(14);
        return (bare && !frame.is_empty()).then_some(frame);
    };
    let wanted = if options.as_server {
        Side::Servers
    } else {
        Side::Clients
    };
    if shot.from != wanted || frame.len() < 14 {
        return None;
    }
    let to = &mut frame.bytes_mut()[..6];
    if MACS.iter().any(|director| to == director) {
        to.copy_from_slice(&mac);
    }
    Some(frame)
}

/// Sends frames with their offload metadata, and returns the number of frames that the interface
/// has accepted.
fn send(interface: &str, frames: &mut [Frame]) -> Result<usize> {
    let index = lvs_sys::if_index(interface)
        .with_context(|| format!("the interface {interface} does not exist"))?;
    let mut socket = AfPacket::open(index, interface)?;
    let refused: usize = frames
        .chunks_mut(BATCH)
        .map(|batch| {
            // Without the pause, the receiver would lose frames.
            std::thread::sleep(std::time::Duration::from_micros(200));
            socket.send(batch)
        })
        .sum();
    Ok(frames.len() - refused)
}
