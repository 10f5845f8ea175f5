//! A lab in which a real director decides.

use std::net::IpAddr;

use lvs_core::{Connection, Control, Director, Instant, Options};
use lvs_packet::frame::{Frame, Offload};
use lvs_packet::intercept::Intercept;
use lvs_packet::net::PortId;
use lvs_packet::parse;
use lvs_packet::pipeline::{Env, Output, Pipeline};
use lvs_packet::settings::Settings;
use lvs_packet::wire::{ETHERNET_LEN, Mac};

use super::{CL_MAC, CLIENTS, GW_MAC, SERVERS, SV_MAC, Table, sent, table};

pub struct DirectorLab {
    pub net: Table,
    pub intercept: Intercept,
    pub director: Director,
    pub pipeline: Pipeline,
    pub now: Instant,
}

impl DirectorLab {
    pub fn new(set_up: impl FnOnce(&mut Control)) -> Self {
        let mut director = Director::new(Options {
            max_connections: 1000,
            ..Options::default()
        });
        let now = Instant::from_secs(10);
        director.advance(now);
        set_up(&mut director.control);
        let intercept = Intercept::of(&director.control, &Intercept::default());
        let mut net = Table {
            vips: intercept.vips(),
            ..table()
        };
        net.local.extend(intercept.vips());
        Self {
            net,
            intercept,
            director,
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            now,
        }
    }

    /// Passes an IP packet of the clients' gateway to the pipeline, and returns the sent packets
    /// without their link headers.
    pub fn request(&mut self, ip: &[u8], offload: Offload) -> Vec<(PortId, Frame)> {
        self.send(CLIENTS, CL_MAC, ip, offload)
    }

    /// Passes an IP packet of a server to the pipeline, and returns the sent packets without their
    /// link headers.
    pub fn answer(&mut self, ip: &[u8], offload: Offload) -> Vec<(PortId, Frame)> {
        self.send(SERVERS, SV_MAC, ip, offload)
    }

    /// Passes an IP packet to the pipeline, and returns the sent packets without their link
    /// headers. The offsets of `offload` are relative to the start of the IP packet.
    fn send(
        &mut self,
        port: PortId,
        mac: Mac,
        ip: &[u8],
        offload: Offload,
    ) -> Vec<(PortId, Frame)> {
        let mut frame = Frame::from_bytes(ip);
        frame.offload = offload;
        let link = frame
            .push_front(ETHERNET_LEN)
            .expect("the frame has headroom");
        link[..6].copy_from_slice(&mac.0);
        link[6..12].copy_from_slice(&GW_MAC.0);
        link[12..].copy_from_slice(if ip[0] >> 4 == 6 {
            &[0x86, 0xdd]
        } else {
            &[8, 0]
        });
        let env = Env::new(&self.net, &self.intercept);
        let mut sent = sent(&mut self.pipeline, &mut Output::new(), |pipeline, out| {
            let director = &mut self.director;
            pipeline.process(port, &mut [frame], &env, director, self.now, out);
        });
        for (port, frame) in &mut sent {
            assert!(*port == super::HOST || frame.pull_front(ETHERNET_LEN));
        }
        sent
    }

    /// Whether a packet is intercepted, and thus hidden from the host.
    pub fn covers(&self, ip: &[u8]) -> bool {
        let packet = parse::ip(ip, false).expect("the bytes are a valid packet");
        let to_host = self.net.local.contains(&packet.dst);
        self.intercept.covers(&packet, None, to_host)
    }

    pub fn connections(&self) -> Vec<Connection> {
        let all = self.director.shard.connections_from(0, self.now);
        let mut all: Vec<_> = all.collect();
        all.sort_by_key(|connection| connection.virt);
        all
    }

    pub fn states(&self) -> Vec<&'static str> {
        let all = self.connections();
        all.iter().map(|connection| connection.state).collect()
    }
}

/// Checks that exactly one packet was sent, on this port, and returns it.
pub fn only(sent: Vec<(PortId, Frame)>, port: PortId) -> Frame {
    assert_eq!(sent.len(), 1, "{sent:?}");
    let (to, frame) = sent.into_iter().next().expect("a frame was sent");
    assert_eq!(to, port);
    frame
}

pub fn addr(text: &str) -> IpAddr {
    text.parse().expect("the address is valid")
}
