//! The snapshot of the kernel's tables, with a real kernel. Needs root.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::common::Host;
use lvs_dataplane::netlink::{Changes, NetState, Netlink, RouteKind};
use lvs_sys::Poller;

fn addr(s: &str) -> IpAddr {
    s.parse().unwrap()
}

/// Processes events until `done` returns true for the state and for all changes so far. Returns
/// these changes.
fn follow(
    netlink: &mut Netlink,
    state: &mut NetState,
    mut done: impl FnMut(&NetState, &Changes) -> bool,
) -> Changes {
    let mut all = Changes::default();
    let end = Instant::now() + Duration::from_secs(120);
    while !done(state, &all) {
        assert!(
            Instant::now() < end,
            "no event of the kernel reported the change in time: {all:?}"
        );
        let mut poller = Poller::new();
        poller.add(netlink.fd());
        poller.wait(Some(Duration::from_millis(200))).unwrap();
        let changes = netlink.poll_events(state).unwrap();
        all.links |= changes.links;
        all.addresses |= changes.addresses;
        all.routes |= changes.routes;
        all.resynchronised |= changes.resynchronised;
        all.neighbours.extend(changes.neighbours);
    }
    all
}

#[test]
fn net_state_follows_links_addresses_and_routes() {
    let (host, other) = (Host::new(), Host::new());
    host.veth("e0", &other, "o0");
    host.sh("ip addr add 10.0.0.1/24 dev e0; ip addr add 10.0.0.3/24 dev e0; ip addr add fd00::1/64 dev e0");
    host.sh("ip route add default via 10.0.0.254; ip route add 10.7.0.0/16 via 10.0.0.9 mtu 1400 src 10.0.0.3");
    host.sh("ip route add blackhole 10.8.0.0/16; ip route add 10.9.0.0/16 nexthop via 10.0.0.5 nexthop via 10.0.0.6");
    // The kernel makes the local route of an IPv6 address later (addrconf_dad_work()).
    host.sh("timeout 120 sh -c 'until ip -6 route show table local | grep -q fd00::1; do sleep 0.05; done'");
    let (mut netlink, mut state) = host.run(|| Netlink::open().unwrap());
    let link = state.link_by_name("e0").unwrap().clone();
    assert_eq!(host.run(|| lvs_sys::if_index("e0").unwrap()), link.index);
    assert_eq!(
        (link.kind.as_deref(), link.mtu, link.up, link.running),
        (Some("veth"), 1500, true, true)
    );
    assert!(link.is_arp_capable());
    assert!(!state.link_by_name("lo").unwrap().is_arp_capable());
    assert!(
        state.is_local(addr("10.0.0.1"))
            && state.is_local(addr("127.5.5.5"))
            && state.is_local(addr("fd00::1"))
    );
    assert!(!state.is_local(addr("10.0.0.2")));
    let hit = state.lookup(addr("10.0.0.2")).unwrap();
    assert_eq!(
        (hit.kind, hit.oif, hit.gateway),
        (RouteKind::Unicast, link.index, None)
    );
    assert_eq!(
        state.lookup(addr("10.0.0.255")).unwrap().kind,
        RouteKind::Broadcast
    );
    assert_eq!(
        state.lookup(addr("8.8.8.8")).unwrap().gateway,
        Some(addr("10.0.0.254"))
    );
    let hit = state.lookup(addr("10.7.1.1")).unwrap();
    assert_eq!(
        (hit.gateway, hit.mtu, hit.prefsrc),
        (Some(addr("10.0.0.9")), Some(1400), Some(addr("10.0.0.3")))
    );
    assert_eq!(
        state.lookup(addr("10.8.1.1")).unwrap().kind,
        RouteKind::Blackhole
    );
    assert_eq!(
        state.lookup(addr("10.9.1.1")).unwrap().gateway,
        Some(addr("10.0.0.5"))
    );
    assert_eq!(
        state.source_address(addr("8.8.8.8")),
        Some(addr("10.0.0.1"))
    );
    assert_eq!(
        state.source_address(addr("10.7.1.1")),
        Some(addr("10.0.0.3"))
    );
    assert_eq!(state.source_address(addr("fd00::2")), Some(addr("fd00::1")));
    assert!(
        netlink
            .poll_events(&mut state)
            .unwrap()
            .neighbours
            .is_empty()
    );

    host.ip("route replace default via 10.0.0.253");
    follow(&mut netlink, &mut state, |state, _| {
        state.lookup(addr("8.8.8.8")).unwrap().gateway == Some(addr("10.0.0.253"))
    });
    host.ip("route del default");
    let changes = follow(&mut netlink, &mut state, |state, _| {
        state.lookup(addr("8.8.8.8")).is_none()
    });
    assert!(changes.routes);
    host.sh("ip route add default via 10.0.0.254 metric 7; ip link set e0 mtu 1400; ip addr del fd00::1/64 dev e0");
    follow(&mut netlink, &mut state, |state, all| {
        all.links
            && all.addresses
            && state.link(link.index).unwrap().mtu == 1400
            && state.lookup(addr("8.8.8.8")).is_some()
            && !state.is_local(addr("fd00::1"))
    });
    // The kernel reports no event for routes that it removes with a link.
    host.ip("link set e0 down");
    follow(&mut netlink, &mut state, |state, _| {
        !state.link(link.index).unwrap().up && state.lookup(addr("8.8.8.8")).is_none()
    });
    host.ip("link set e0 up");
    follow(&mut netlink, &mut state, |state, _| {
        state.lookup(addr("10.0.0.2")).is_some() && state.lookup(addr("8.8.8.8")).is_none()
    });
    host.ip("link delete e0");
    follow(&mut netlink, &mut state, |state, _| {
        state.link_by_name("e0").is_none() && state.lookup(addr("10.0.0.2")).is_none()
    });
    assert_eq!(state.addresses(link.index).count(), 0);
}

#[test]
fn neighbours_are_resolved_by_the_kernel() {
    let (host, other) = (Host::new(), Host::new());
    host.veth("e0", &other, "o0");
    host.sh("ip addr add 10.0.0.1/24 dev e0; ip addr add fd00::1/64 dev e0 nodad");
    other.sh("ip addr add 10.0.0.2/24 dev o0; ip addr add fd00::2/64 dev o0 nodad");
    let (mut netlink, mut state) = host.run(|| Netlink::open().unwrap());
    let link = state.link_by_name("e0").unwrap().index;
    let mac = other.run(|| {
        let (_, state) = Netlink::open().unwrap();
        state.link_by_name("o0").unwrap().mac.unwrap()
    });
    for ip in ["10.0.0.2", "fd00::2"] {
        let ip = addr(ip);
        assert_eq!(state.neighbour(link, ip), None);
        netlink.resolve(&state, link, ip).unwrap();
        let changes = follow(&mut netlink, &mut state, |state, _| {
            state.neighbour(link, ip).and_then(|n| n.usable()) == Some(mac)
        });
        assert!(changes.neighbours.contains(&(link, ip)));
    }
    let real = addr("10.0.0.2");
    netlink.resolve(&state, link, real).unwrap();
    assert!(!host.sh("ip neigh show 10.0.0.2").contains("managed"));
    // No host answers for this address. A manual entry stays unchanged.
    netlink.resolve(&state, link, addr("10.0.0.7")).unwrap();
    follow(&mut netlink, &mut state, |state, _| {
        state
            .neighbour(link, addr("10.0.0.7"))
            .is_some_and(|n| n.is_failed() && n.usable().is_none())
    });
    host.ip("neigh add 10.0.0.8 lladdr 02:00:00:00:00:08 dev e0 nud permanent");
    follow(&mut netlink, &mut state, |state, _| {
        state
            .neighbour(link, addr("10.0.0.8"))
            .is_some_and(|n| n.is_static())
    });
    netlink.resolve(&state, link, addr("10.0.0.8")).unwrap();
    assert!(host.sh("ip neigh show 10.0.0.8").contains("PERMANENT"));
}

#[test]
fn net_state_is_read_again_after_lost_events() {
    let host = Host::new();
    let (mut netlink, mut state) = host.run(|| Netlink::open().unwrap());
    // Far more than fits into the socket's buffer.
    host.sh(
        "ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up
         seq 1 60000 | awk '{ printf \"route add 10.%d.%d.%d/32 dev d0\\n\", $1/65536, $1/256%256, $1%256 }' | ip -batch -",
    );
    let changes = follow(&mut netlink, &mut state, |state, all| {
        all.resynchronised && state.lookup(addr("10.0.234.96")).is_some()
    });
    assert!(changes.links && changes.routes);
    assert!(state.link_by_name("d0").unwrap().up);
}

#[test]
fn host_route_is_added_once_and_removed() {
    let host = Host::new();
    host.sh("ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up");
    let (mut netlink, mut state) = host.run(|| Netlink::open().unwrap());
    let link = state.link_by_name("d0").unwrap().index;
    for vip in ["192.0.2.1", "2001:db8::1"] {
        let vip = addr(vip);
        netlink.add_host_route(vip, link).unwrap();
        let twice = netlink.add_host_route(vip, link).unwrap_err();
        assert!(
            twice.to_string().contains("the host already has one"),
            "{vip}: {twice}"
        );
        follow(&mut netlink, &mut state, |state, _| {
            state.lookup(vip).is_some_and(|h| h.oif == link)
        });
        netlink.delete_host_route(vip, link).unwrap();
        netlink.delete_host_route(vip, link).unwrap();
        follow(&mut netlink, &mut state, |state, _| {
            state.lookup(vip).is_none()
        });
    }
}
