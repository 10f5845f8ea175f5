//! `lvs-testbed strike`: sends the frames of an attack from the attacker's host.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lvs_dataplane::io::af_packet::AfPacket;
use lvs_dataplane::io::{BATCH, PacketIo};
use lvs_packet::frame::Frame;

use super::{Means, find};
use crate::packet::mac;

/// The addresses that an attack uses.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Target {
    /// The director's link-layer address
    #[arg(long, value_parser = mac)]
    pub mac: [u8; 6],
    /// The virtual address
    #[arg(long)]
    pub vip4: Ipv4Addr,
    /// The virtual IPv6 address
    #[arg(long)]
    pub vip6: Ipv6Addr,
    /// Another virtual address, with a service for all ports
    #[arg(long)]
    pub other4: Ipv4Addr,
    /// The director's own address
    #[arg(long)]
    pub director4: Ipv4Addr,
    /// The director's own IPv6 address
    #[arg(long)]
    pub director6: Ipv6Addr,
}

impl Target {
    pub(super) fn service4(&self, port: u16) -> SocketAddr {
        (self.vip4, port).into()
    }

    pub(super) fn service6(&self, port: u16) -> SocketAddr {
        (self.vip6, port).into()
    }

    pub(super) fn other4(&self, port: u16) -> SocketAddr {
        (self.other4, port).into()
    }

    /// A source address that no host has.
    pub(super) fn source4(&self, port: u16) -> SocketAddr {
        (Ipv4Addr::new(198, 18, 0, 7), port).into()
    }

    pub(super) fn source6(&self, port: u16) -> SocketAddr {
        (Ipv6Addr::new(0x2001, 0xdb8, 0xbad, 0, 0, 0, 0, 7), port).into()
    }

    /// The source of packet `n`: an address of 198.18.0.0/16 (RFC 2544), which no host has, and a
    /// port from 1024.
    pub(super) fn spoofed(&self, n: u32) -> SocketAddr {
        let [a, b, c, d] = n.wrapping_mul(0x9e37_79b1).to_be_bytes();
        let port = u16::from_be_bytes([c, d]).max(1024);
        (Ipv4Addr::new(198, 18, a, b), port).into()
    }
}

/// Generates the frames of an attack.
pub(super) trait Volley {
    /// Returns the next frame.
    fn next(&mut self) -> Frame;
}

/// Frames to send, and their rate.
#[derive(Clone, Debug, clap::Args)]
pub struct StrikeOptions {
    /// The attack
    pub name: String,
    /// The interface that sends the frames
    #[arg(long, default_value = "eth0")]
    pub interface: String,
    #[command(flatten)]
    target: Target,
    /// Frames a second
    #[arg(long)]
    pub rate: u64,
    /// Duration in milliseconds
    #[arg(long = "for", value_name = "MS")]
    pub for_ms: u64,
}

/// Sends the attack's frames. Prints the numbers of sent frames and of frames that the kernel
/// refused.
///
/// # Errors
///
/// The attack does not exist or sends no frames, the interface does not exist, or the kernel does
/// not permit a packet socket.
pub fn strike(options: &StrikeOptions) -> Result<()> {
    let attack = find(&options.name)?;
    let Means::Frames(volley) = attack.means else {
        anyhow::bail!(
            "the attack {} sends no frames: run it with `lvs-testbed attack`",
            attack.name
        );
    };
    let interface = &options.interface;
    let index = lvs_sys::if_index(interface)
        .with_context(|| format!("the interface {interface} does not exist"))?;
    let mut socket = AfPacket::open(index, interface)?;
    let mut volley = volley(&options.target);
    let (start, limit) = (Instant::now(), Duration::from_millis(options.for_ms));
    let (mut sent, mut refused) = (0, 0);
    let mut batch: Vec<Frame> = Vec::with_capacity(BATCH);
    while start.elapsed() < limit {
        let due = start.elapsed().as_micros() * u128::from(options.rate) / 1_000_000;
        let due = u64::try_from(due).unwrap_or(u64::MAX).saturating_sub(sent);
        if due == 0 {
            std::thread::sleep(Duration::from_micros(500));
            continue;
        }
        let count = due.min(BATCH as u64);
        batch.clear();
        batch.extend((0..count).map(|_| volley.next()));
        refused += socket.send(&mut batch) as u64;
        sent += count;
    }
    println!("{} {refused}", sent - refused);
    Ok(())
}
