//! Full NAT: decisions about connections whose client address is also translated.

use std::net::SocketAddr;

use lvs_core::full_nat::LocalAddress;
use lvs_core::{
    Director, DropReason, Error, Family, Forward, Forwarding, Hook, IcmpError, Instant, Options,
    PacketMeta, Reply, ServerConfig, ServiceConfig, ServiceFlags, ServiceKey, TcpFlags, Tuple,
    Verdict,
};

use crate::common::{CLIENT, VIP, addr};

const SERVER: &str = "10.0.0.11:8080";
const LOCAL: &str = "10.0.0.2";

fn at(seconds: u64) -> Instant {
    Instant::from_secs(seconds)
}

fn local(addr: &str, first: u16, last: u16) -> LocalAddress {
    LocalAddress {
        addr: addr.parse().unwrap(),
        first,
        last,
    }
}

fn director(forwarding: Forwarding, servers: &[&str]) -> Director {
    let mut director = Director::new(Options::default());
    let control = &mut director.control;
    control
        .set_local_pool(vec![local(LOCAL, 1024, 2047)], false)
        .unwrap();
    let service = ServiceKey::tcp(addr(VIP));
    control
        .add_service(service, ServiceConfig::new(Family::V4, "rr"), None)
        .unwrap();
    for server in servers {
        let config = ServerConfig::new(1, forwarding);
        control
            .add_server(&service, addr(server), &config, at(0))
            .unwrap();
    }
    director
}

fn tcp(src: SocketAddr, dst: SocketAddr, flags: u8) -> PacketMeta<'static> {
    PacketMeta::tcp(Hook::Local, src, dst, flags)
}

fn syn(director: &mut Director, client: &str, now: Instant) -> Verdict {
    director.handle_packet(&tcp(addr(client), addr(VIP), TcpFlags::SYN), now)
}

fn forwarded(verdict: Verdict) -> Forward {
    match verdict {
        Verdict::Forward(forward) => forward,
        other => panic!("the packet is not forwarded: {other:?}"),
    }
}

fn replied(verdict: Verdict) -> Reply {
    match verdict {
        Verdict::Reply(reply) => reply,
        other => panic!("the packet is not sent to the client: {other:?}"),
    }
}

#[test]
fn full_nat_translates_both_ends_in_both_directions() {
    let mut director = director(Forwarding::FullNat, &[SERVER]);
    let forward = forwarded(syn(&mut director, CLIENT, at(1)));
    let source = forward.source.expect("the packet gets a local address");
    assert_eq!(
        (forward.method, forward.target),
        (Forwarding::FullNat, addr(SERVER))
    );
    assert_eq!(source.ip(), addr("10.0.0.2:0").ip());
    assert!((1024..=2047).contains(&source.port()));

    let answer = tcp(addr(SERVER), source, TcpFlags::SYN | TcpFlags::ACK);
    let reply = replied(director.handle_packet(&answer, at(1)));
    assert_eq!(
        (reply.source, reply.destination),
        (Some(addr(VIP)), Some(addr(CLIENT)))
    );
    let ack = tcp(addr(CLIENT), addr(VIP), TcpFlags::ACK);
    assert_eq!(
        forwarded(director.handle_packet(&ack, at(1))).source,
        Some(source)
    );
    let listed = director.shard.connections_from(0, at(1)).next().unwrap();
    assert_eq!(listed.state, "ESTABLISHED");

    // A packet from another server, to another port, or to the client's own address instead of the
    // local one, is not a reply.
    for (src, dst) in [
        ("10.0.0.12:8080", source),
        ("10.0.0.11:80", source),
        (SERVER, addr(CLIENT)),
        (VIP, addr(CLIENT)),
    ] {
        let stray = director.handle_packet(&tcp(addr(src), dst, TcpFlags::ACK), at(1));
        assert!(
            matches!(stray, Verdict::Accept(_)),
            "a packet from {src} to {dst} was not passed to the host: {stray:?}"
        );
    }

    // First the server sends an error about a request, then the client sends one about a reply.
    let error = |src: &str, inner_src: SocketAddr, inner_dst: SocketAddr| IcmpError {
        hook: Hook::Local,
        src: addr(src).ip(),
        dst: inner_src.ip(),
        inner: Tuple::tcp(inner_src, inner_dst),
        inner_ports: true,
        checksum_ok: true,
        mark: 0,
        len: 96,
    };
    let about = error("10.0.0.254:0", source, addr(SERVER));
    let reply = replied(director.handle_icmp_error(&about, at(2)));
    assert_eq!(
        (reply.source, reply.destination),
        (Some(addr(VIP)), Some(addr(CLIENT)))
    );
    let about = error(CLIENT, addr(VIP), addr(CLIENT));
    let forward = forwarded(director.handle_icmp_error(&about, at(2)));
    assert_eq!(
        (forward.target, forward.source),
        (addr(SERVER), Some(source))
    );
}

#[test]
fn full_nat_without_free_port_drops_and_counts_no_connection() {
    let mut director = director(Forwarding::FullNat, &[SERVER]);
    let control = &mut director.control;
    control
        .set_local_pool(vec![local(LOCAL, 1024, 1033)], false)
        .unwrap();
    for n in 0..10 {
        forwarded(syn(
            &mut director,
            &format!("192.0.2.7:{}", 2000 + n),
            at(1),
        ));
    }
    let refused = syn(&mut director, CLIENT, at(1));
    assert_eq!(refused, Verdict::Drop(DropReason::NoLocalPort));
    assert_eq!(director.shard.len(), 10);
    let service = director.control.services().next().unwrap();
    assert_eq!(
        (service.servers()[0].total(), service.stats().live.conns),
        (10, 10)
    );
    // A second address doubles the number of ports; a connection that ends (SYN_RECV, 60 s)
    // releases its port.
    let control = &mut director.control;
    control
        .set_local_pool(
            vec![local(LOCAL, 1024, 1033), local("10.0.0.3", 1024, 1024)],
            false,
        )
        .unwrap();
    let forward = forwarded(syn(&mut director, CLIENT, at(1)));
    assert_eq!(forward.source, Some(addr("10.0.0.3:1024")));
    director.advance(at(62));
    assert_eq!(director.shard.len(), 0);
    forwarded(syn(&mut director, CLIENT, at(62)));
}

#[test]
fn impossible_full_nat_configurations_are_refused() {
    let mut director = director(Forwarding::FullNat, &[SERVER]);
    let control = &mut director.control;
    assert_eq!(
        control.set_local_pool(vec![], false),
        Err(Error::LocalAddressNeeded)
    );
    assert_eq!(
        control.set_local_pool(vec![], true),
        Err(Error::LocalAddressNeeded)
    );
    let service = ServiceKey::udp(addr(VIP));
    let mut config = ServiceConfig::new(Family::V4, "rr");
    config.flags = ServiceFlags(ServiceFlags::ONE_PACKET);
    control.add_service(service, config.clone(), None).unwrap();
    let server = ServerConfig::new(1, Forwarding::FullNat);
    let added = control.add_server(&service, addr(SERVER), &server, at(0));
    assert_eq!(added, Err(Error::FullNatOnePacket));
    let nat = ServerConfig::new(1, Forwarding::Nat);
    control
        .add_server(&service, addr(SERVER), &nat, at(0))
        .unwrap();
    assert_eq!(
        control.edit_server(&service, addr(SERVER), &server),
        Err(Error::FullNatOnePacket)
    );
    control
        .edit_service(&service, ServiceConfig::new(Family::V4, "rr"), None)
        .unwrap();
    control
        .edit_server(&service, addr(SERVER), &server)
        .unwrap();
    assert_eq!(
        control.edit_service(&service, config, None),
        Err(Error::FullNatOnePacket)
    );
    let six = ServiceKey::tcp(addr("[fd00::1]:80"));
    control
        .add_service(six, ServiceConfig::new(Family::V6, "rr"), None)
        .unwrap();
    let added = control.add_server(&six, addr("[fd00::11]:80"), &server, at(0));
    assert_eq!(added, Err(Error::LocalAddressNeeded));
    let added = control.add_server(&six, addr(SERVER), &server, at(0));
    assert_eq!(added, Err(Error::FamilyMismatch));
}

#[test]
fn hairpin_translates_both_ends_only_if_replies_would_bypass_director() {
    let servers = ["10.0.0.12:80", "10.9.0.11:80"];
    let cases = [
        // The clients: a host on the network of the second server, a server itself on any network,
        // and an unrelated host.
        ("10.9.0.50:1000", "10.9.0.11:80", true),
        ("10.0.0.12:1000", "10.0.0.12:80", true),
        ("10.0.0.12:1001", "10.9.0.11:80", true),
        ("192.0.2.7:1000", "10.0.0.12:80", false),
        ("10.9.0.50:1001", "10.0.0.12:80", false),
    ];
    for (hairpin, (client, server, both)) in [false, true]
        .into_iter()
        .flat_map(|on| cases.map(|case| (on, case)))
    {
        let mut director = director(Forwarding::Nat, &servers);
        let control = &mut director.control;
        control.set_networks(vec![(addr("10.9.0.0:0").ip(), 24)]);
        control
            .set_local_pool(vec![local(LOCAL, 1024, 2047)], hairpin)
            .unwrap();
        for other in servers.into_iter().filter(|other| *other != server) {
            let quiesced = ServerConfig::new(0, Forwarding::Nat);
            control
                .edit_server(&ServiceKey::tcp(addr(VIP)), addr(other), &quiesced)
                .unwrap();
        }
        let forward = forwarded(syn(&mut director, client, at(1)));
        assert_eq!(forward.target, addr(server));
        assert_eq!(
            forward.source.is_some(),
            both && hairpin,
            "{client} to {server}"
        );
    }
}

#[test]
fn full_nat_to_local_server_keeps_client_address() {
    let mut director = director(Forwarding::FullNat, &[SERVER]);
    director
        .control
        .set_local_addresses(vec![(addr(SERVER).ip(), 32)]);
    let forward = forwarded(syn(&mut director, CLIENT, at(1)));
    assert_eq!((forward.method, forward.source), (Forwarding::Nat, None));
}
