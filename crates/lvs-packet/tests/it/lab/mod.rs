//! A lab: a director between a link with clients and a link with servers. Tables take the place of
//! the network, and there is no I/O.
#![allow(
    dead_code,
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    reason = "shared by test programs, of which each uses a part"
)]

pub mod director;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep};
use lvs_core::tunnel::Tunnel;
use lvs_core::{
    AcceptReason, Forward, Forwarding, Hook, IcmpError, Instant, PacketMeta, Protocol, Verdict,
};
use lvs_packet::frame::{Frame, Offload};
use lvs_packet::intercept::{Endpoint, Intercept, LocalClient};
use lvs_packet::net::{PortId, PortInfo};
use lvs_packet::pipeline::{Decide, Env, Output, Pipeline, Request};
use lvs_packet::settings::Settings;
pub use lvs_packet::testing::Table;
use lvs_packet::testing::{Route, made_up_mac};
use lvs_packet::wire::Mac;

pub const CLIENTS: PortId = PortId(0);
pub const SERVERS: PortId = PortId(1);
pub const HOST: PortId = PortId(2);

pub const CL_MAC: Mac = Mac([2, 0, 0, 0, 0, 0xc1]);
pub const GW_MAC: Mac = Mac([2, 0, 0, 0, 0, 0xc2]);
pub const SV_MAC: Mac = Mac([2, 0, 0, 0, 0, 0x51]);

pub const CL_ADDR: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);
pub const GW_ADDR: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 2);
pub const SV_ADDR: Ipv4Addr = Ipv4Addr::new(10, 1, 255, 254);

pub const CL_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xff, 0, 0, 0, 0, 0, 1);
pub const GW_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xff, 0, 0, 0, 0, 0, 2);
pub const SV_ADDR6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0xffff);

/// The network of the lab: 10.1.0.0/16 and fd00:1::/32 are on the servers' link, 240.0.0.0/4 and
/// fdff::/16 are unreachable, and all other addresses are behind a gateway on the clients' link.
pub fn table() -> Table {
    let port = |mac, mtu, ethernet| PortInfo {
        mac,
        mtu,
        ethernet,
        offload: true,
        gives_back: false,
    };
    Table {
        ports: vec![
            port(CL_MAC, 1500, true),
            port(SV_MAC, 1500, true),
            port(Mac([0; 6]), 65_535, false),
        ],
        host_port: Some(HOST),
        local: [
            CL_ADDR.into(),
            SV_ADDR.into(),
            CL_ADDR6.into(),
            SV_ADDR6.into(),
        ]
        .into(),
        routes: vec![
            Route::new("10.1.0.0/16", SERVERS, None, "10.1.255.254"),
            Route::unreachable("240.0.0.0/4"),
            Route::new("0.0.0.0/0", CLIENTS, Some("10.255.0.2"), "10.255.0.1"),
            Route::new("fd00:1::/32", SERVERS, None, "fd00:1::ffff"),
            Route::unreachable("fdff::/16"),
            Route::new("::/0", CLIENTS, Some("fd00:ff::2"), "fd00:ff::1"),
        ],
        neighbours: [
            ((CLIENTS, GW_ADDR.into()), GW_MAC),
            ((CLIENTS, GW_ADDR6.into()), GW_MAC),
        ]
        .into(),
        all_neighbours: Some(SERVERS),
        ..Table::default()
    }
}

/// Sets the MTU of the clients' and the servers' link.
pub fn set_mtu(net: &mut Table, mtu: [u32; 2]) {
    for (port, mtu) in net.ports.iter_mut().zip(mtu) {
        port.mtu = mtu;
    }
}

/// Sets whether all ports accept partial checksums and super-packets.
pub fn set_offload(net: &mut Table, offload: bool) {
    for port in &mut net.ports {
        port.offload = offload;
    }
}

pub fn server_mac(addr: Ipv4Addr) -> Mac {
    made_up_mac(addr.into())
}

/// A stateless decider with a list of services, each with at most one server.
#[derive(Debug, Default)]
pub struct OneServer {
    pub services: Vec<Service>,
    /// If set, the decision for each packet.
    pub verdict: Option<Verdict>,
    pub seen: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub protocol: Protocol,
    pub virt: SocketAddr,
    pub server: Option<SocketAddr>,
    pub method: Forwarding,
    pub tunnel: Tunnel,
}

impl Service {
    /// A service with one server, or without a server if `server` is empty. The tunnel, if the
    /// method is one, is IPIP.
    pub fn new(method: Forwarding, protocol: Protocol, virt: &str, server: &str) -> Self {
        Self {
            protocol,
            virt: virt.parse().expect("the address is valid"),
            server: server.parse().ok(),
            method,
            tunnel: Tunnel::Ipip,
        }
    }

    fn forward(&self, virt: SocketAddr) -> Verdict {
        match self.server {
            None => Verdict::Unreachable(lvs_core::DropReason::NoServer),
            Some(target) => Verdict::Forward(Forward {
                conn: None,
                server: None,
                method: self.method,
                target,
                source: None,
                virt,
                tunnel: self.tunnel,
                new: false,
                shift: None,
            }),
        }
    }
}

/// A reply verdict; its connection identifier, which only a director can assign, is 0.
pub fn reply(source: Option<SocketAddr>) -> Verdict {
    Verdict::Reply(lvs_core::Reply {
        conn: lvs_core::ConnId::from_index(0),
        server: None,
        source,
        destination: None,
        edit: None,
        probe: false,
    })
}

impl Decide for OneServer {
    fn packet(&mut self, meta: &PacketMeta<'_>, _: Instant) -> Verdict {
        self.seen += 1;
        if let Some(verdict) = self.verdict {
            return verdict;
        }
        let accept = Verdict::Accept(AcceptReason::NoService);
        let service = |wanted: &dyn Fn(&&Service) -> bool| {
            self.services
                .iter()
                .filter(|s| s.protocol == meta.tuple.protocol)
                .find(wanted)
                .copied()
        };
        if meta.hook != Hook::Transit
            && let Some(service) = service(&|s| s.virt == meta.tuple.dst)
        {
            return service.forward(service.virt);
        }
        match service(&|s| s.server == Some(meta.tuple.src) && s.method == Forwarding::Nat) {
            Some(service) => reply(Some(service.virt)),
            None => accept,
        }
    }

    fn icmp_error(&mut self, error: &IcmpError, _: Instant) -> Verdict {
        self.seen += 1;
        if let Some(verdict) = self.verdict {
            return verdict;
        }
        let inner = error.inner;
        for service in self
            .services
            .iter()
            .filter(|s| s.protocol == inner.protocol)
        {
            if inner.src == service.virt {
                if service.method == Forwarding::Nat && !error.checksum_ok {
                    return Verdict::Drop(lvs_core::DropReason::IcmpChecksum);
                }
                return service.forward(service.virt);
            }
            if Some(inner.dst) == service.server && service.method == Forwarding::Nat {
                return reply(Some(service.virt));
            }
            // An error that the director itself made about a request that it had not translated.
            if inner.dst == service.virt
                && service.method != Forwarding::Nat
                && error.hook == Hook::Output
            {
                return reply(None);
            }
        }
        Verdict::Accept(AcceptReason::UnrelatedIcmp)
    }
}

/// Runs `work` with a pipeline, checks that the pipeline has counted each frame once, and returns
/// the frames to be sent.
pub fn sent(
    pipeline: &mut Pipeline,
    out: &mut Output,
    work: impl FnOnce(&mut Pipeline, &mut Output),
) -> Vec<(PortId, Frame)> {
    work(pipeline, out);
    let counters = &pipeline.counters;
    assert_eq!(
        counters.received + counters.reassembled,
        counters.accounted(),
        "the fates do not add up to the number of frames"
    );
    let queues = out.queues();
    queues
        .flat_map(|(port, frames)| frames.iter().map(move |frame| (port, frame.clone())))
        .collect()
}

/// Replaces each frame by its bytes.
pub fn bytes(frames: Vec<(PortId, Frame)>) -> Vec<(PortId, Vec<u8>)> {
    let bytes = |(port, frame): (PortId, Frame)| (port, frame.bytes().to_vec());
    frames.into_iter().map(bytes).collect()
}

pub struct Lab {
    pub net: Table,
    pub intercept: Intercept,
    pub decide: OneServer,
    pub pipeline: Pipeline,
    pub pmtu_disc: bool,
    pub now: Instant,
    pub requests: Vec<Request>,
    /// Frames reinjected into the host on the port of their arrival.
    pub returned: Vec<(PortId, Vec<u8>)>,
}

impl Lab {
    pub fn new(services: &[Service]) -> Self {
        let mut lab = Self {
            net: table(),
            intercept: Intercept::default(),
            decide: OneServer {
                services: services.to_vec(),
                ..OneServer::default()
            },
            pipeline: Pipeline::alone(Settings::UNLIMITED),
            pmtu_disc: true,
            now: Instant::from_secs(10),
            requests: Vec::new(),
            returned: Vec::new(),
        };
        for s in services {
            lab.net.vips.insert(s.virt.ip());
            lab.net.local.insert(s.virt.ip());
            let endpoint = |addr: SocketAddr| Endpoint {
                address: addr.ip(),
                protocol: s.protocol,
                port: addr.port(),
            };
            lab.intercept.services.insert(endpoint(s.virt));
            if let Some(server) = s.server.filter(|_| s.method == Forwarding::Nat) {
                lab.intercept.nat_servers.insert(endpoint(server));
            }
        }
        lab
    }

    /// Makes the dataplane own the VIPs; the host does not have them.
    pub fn own_vips(&mut self) {
        self.net.own = self.net.vips.clone();
        self.intercept.own_vips = self.net.vips.clone();
        for vip in &self.net.own {
            self.net.local.remove(vip);
        }
    }

    pub fn send(&mut self, port: PortId, bytes: &[u8]) -> Vec<(PortId, Vec<u8>)> {
        self::bytes(self.send_frame(port, Frame::from_bytes(bytes)))
    }

    pub fn send_offloaded(
        &mut self,
        port: PortId,
        bytes: &[u8],
        offload: Offload,
    ) -> Vec<(PortId, Frame)> {
        let mut frame = Frame::from_bytes(bytes);
        frame.offload = offload;
        self.send_frame(port, frame)
    }

    pub fn send_frame(&mut self, port: PortId, frame: Frame) -> Vec<(PortId, Frame)> {
        let env = Env {
            net: &self.net,
            intercept: &self.intercept,
            pmtu_disc: self.pmtu_disc,
        };
        let mut out = Output::new();
        let sent = sent(&mut self.pipeline, &mut out, |pipeline, out| {
            let decide = &mut self.decide;
            pipeline.process(port, &mut [frame], &env, decide, self.now, out);
        });
        self.requests.append(&mut out.requests);
        for (port, frames) in out.returned() {
            let frames = frames.iter().map(|frame| (port, frame.bytes().to_vec()));
            self.returned.extend(frames);
        }
        sent
    }

    /// Reports that the replies to a client on this host are intercepted, and returns the frames
    /// that are sent then.
    pub fn intercept_client(&mut self, client: LocalClient) -> Vec<(PortId, Frame)> {
        self.intercept.local_clients.insert(client);
        let env = Env {
            net: &self.net,
            intercept: &self.intercept,
            pmtu_disc: self.pmtu_disc,
        };
        sent(&mut self.pipeline, &mut Output::new(), |pipeline, out| {
            pipeline.local_clients_intercepted(&env, self.now, out);
        })
    }
}

/// An IP packet as an Ethernet frame.
pub fn ethernet(dst: Mac, src: Mac, ip: &[u8]) -> Vec<u8> {
    let kind = if ip[0] >> 4 == 6 { 0x86dd } else { 0x0800 };
    [&dst.0[..], &src.0, &u16::to_be_bytes(kind), ip].concat()
}

/// A frame from the gateway of the clients.
pub fn from_client(ip: &[u8]) -> Vec<u8> {
    ethernet(CL_MAC, GW_MAC, ip)
}

/// The start of a packet builder: an IP header with a hop limit of 64.
pub fn header(src: IpAddr, dst: IpAddr) -> PacketBuilderStep<IpHeaders> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), 64),
        other => panic!("the addresses have different families: {other:?}"),
    }
}

/// A TCP segment of an established connection.
pub fn tcp(src: impl Into<SocketAddr>, dst: impl Into<SocketAddr>, payload: &[u8]) -> Vec<u8> {
    let (src, dst): (SocketAddr, SocketAddr) = (src.into(), dst.into());
    let mut ip = Vec::new();
    header(src.ip(), dst.ip())
        .tcp(src.port(), dst.port(), 1000, 500)
        .ack(77)
        .write(&mut ip, payload)
        .expect("writing to a vector succeeds");
    ip
}

pub fn udp(src: impl Into<SocketAddr>, dst: impl Into<SocketAddr>, payload: &[u8]) -> Vec<u8> {
    let (src, dst): (SocketAddr, SocketAddr) = (src.into(), dst.into());
    let mut ip = Vec::new();
    header(src.ip(), dst.ip())
        .udp(src.port(), dst.port())
        .write(&mut ip, payload)
        .expect("writing to a vector succeeds");
    ip
}

pub fn addr(text: &str) -> SocketAddr {
    text.parse().expect("the address is valid")
}

pub fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("the text is hexadecimal"))
        .collect()
}
