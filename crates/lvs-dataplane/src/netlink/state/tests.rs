//! Messages of the kernel, and the state after them.

use super::*;
use crate::netlink::message::{Builder, messages};

/// Type and flags of a message about a route.
type Change = (u16, u16);
const ADD: Change = (libc::RTM_NEWROUTE, 0);
const DELETE: Change = (libc::RTM_DELROUTE, 0);
const REPLACE: Change = (libc::RTM_NEWROUTE, 0x100);

fn route(b: &mut Builder, change: Change, dst: &str, kind: u8, (metric, oif): (u32, u32)) {
    let (dst, len) = dst.split_once('/').expect("the text is a network");
    let IpAddr::V4(dst) = ip(dst) else {
        panic!("{dst}");
    };
    let (af, len) = (u8::try_from(libc::AF_INET).unwrap(), len.parse().unwrap());
    let table = if kind == libc::RTN_LOCAL { LOCAL } else { MAIN };
    b.begin(
        change.0,
        change.1,
        &[af, len, 0, 0, table, 4, 0, kind, 0, 0, 0, 0],
    );
    b.attr(libc::RTA_DST, &dst.octets());
    b.attr(libc::RTA_PRIORITY, &metric.to_ne_bytes());
    if oif != 0 {
        b.attr(libc::RTA_OIF, &oif.to_ne_bytes());
    }
    b.end();
}

fn apply(state: &mut NetState, builder: &Builder) -> Changes {
    let mut changes = Changes::default();
    for message in messages(builder.bytes()) {
        state.apply(&message, &mut changes);
    }
    changes
}

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

const MAIN: u8 = libc::RT_TABLE_MAIN;
const LOCAL: u8 = libc::RT_TABLE_LOCAL;

#[test]
fn route_lookup_prefers_longest_prefix_then_least_metric() {
    let mut state = NetState::default();
    let mut b = Builder::new(1);
    route(&mut b, ADD, "0.0.0.0/0", libc::RTN_UNICAST, (0, 9));
    route(&mut b, ADD, "10.0.0.0/8", libc::RTN_UNICAST, (200, 2));
    route(&mut b, ADD, "10.0.0.0/8", libc::RTN_UNICAST, (100, 1));
    route(&mut b, ADD, "10.1.0.0/16", libc::RTN_BLACKHOLE, (0, 0));
    route(&mut b, ADD, "10.0.0.1/32", libc::RTN_LOCAL, (0, 1));
    assert!(apply(&mut state, &b).routes);
    assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(1));
    assert_eq!(state.lookup(ip("11.0.0.2")).map(|h| h.oif), Some(9));
    assert_eq!(
        state.lookup(ip("10.1.2.3")).map(|h| h.kind),
        Some(RouteKind::Blackhole)
    );
    assert!(state.is_local(ip("10.0.0.1")));
    assert!(!state.is_local(ip("10.0.0.2")));
    assert_eq!(state.lookup(ip("2001:db8::1")), None);

    let mut b = Builder::new(1);
    route(&mut b, DELETE, "10.0.0.0/8", libc::RTN_UNICAST, (100, 1));
    assert!(apply(&mut state, &b).routes);
    assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(2));

    let mut b = Builder::new(1);
    route(&mut b, REPLACE, "10.0.0.0/8", libc::RTN_UNICAST, (200, 7));
    apply(&mut state, &b);
    assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(7));
    let mut b = Builder::new(1);
    route(&mut b, DELETE, "10.0.0.0/8", libc::RTN_UNICAST, (200, 7));
    apply(&mut state, &b);
    assert_eq!(state.lookup(ip("10.0.0.2")).map(|h| h.oif), Some(9));
}

#[test]
fn gateways_of_default_routes_precede_gateways_of_other_routes() {
    let mut state = NetState::default();
    let mut b = Builder::new(1);
    let routes = (1..200).map(|n| ([10, 0, n, 0], 24, [192, 0, 2, n]));
    for (dst, len, gateway) in routes.chain([([0; 4], 0, [192, 0, 2, 254])]) {
        let af = u8::try_from(libc::AF_INET).unwrap();
        let head = [af, len, 0, 0, MAIN, 4, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
        b.begin(libc::RTM_NEWROUTE, 0, &head);
        b.attr(libc::RTA_DST, &dst);
        b.attr(libc::RTA_OIF, &3_u32.to_ne_bytes());
        b.attr(libc::RTA_GATEWAY, &gateway);
        b.end();
    }
    apply(&mut state, &b);
    let all: Vec<_> = state.gateways().collect();
    assert_eq!(all.first(), Some(&(3, ip("192.0.2.254"))));
    assert_eq!(all.len(), 200);
}

#[test]
fn repeated_route_message_reports_no_change() {
    let mut state = NetState::default();
    let mut b = Builder::new(1);
    route(&mut b, ADD, "10.0.0.0/8", libc::RTN_UNICAST, (0, 1));
    assert!(apply(&mut state, &b).routes);
    assert_eq!(apply(&mut state, &b), Changes::default());
}

/// Builds a message about a link that is up, with a carrier if it is `running`.
fn link_message(b: &mut Builder, running: bool, mac: [u8; 6], master: u32, event: Option<u32>) {
    let running = if running { libc::IFF_RUNNING } else { 0 };
    let flags = (libc::IFF_UP | running).cast_unsigned();
    let mut head = [0; 16];
    head[2..4].copy_from_slice(&libc::ARPHRD_ETHER.to_ne_bytes());
    head[4..8].copy_from_slice(&7_u32.to_ne_bytes());
    head[8..12].copy_from_slice(&flags.to_ne_bytes());
    b.begin(libc::RTM_NEWLINK, 0, &head);
    b.attr(libc::IFLA_IFNAME, b"eth0\0");
    b.attr(libc::IFLA_ADDRESS, &mac);
    if master != 0 {
        b.attr(libc::IFLA_MASTER, &master.to_ne_bytes());
    }
    if let Some(event) = event {
        b.attr(IFLA_EVENT, &event.to_ne_bytes());
    }
    b.end();
}

#[test]
fn link_that_comes_up_or_changes_is_reported_as_appeared() {
    let mut state = NetState::default();
    let mut appears = |running, mac, master, event| {
        let mut b = Builder::new(1);
        link_message(&mut b, running, mac, master, event);
        let changes = apply(&mut state, &b);
        assert!(changes.appeared.iter().all(|&ifindex| ifindex == 7));
        changes.appeared.len() == 1
    };
    let (one, two) = ([2; 6], [4; 6]);
    assert!(
        !appears(false, one, 0, None),
        "a link without carrier has appeared"
    );
    assert!(
        appears(true, one, 0, None),
        "a link that has come up has not appeared"
    );
    assert!(
        !appears(true, one, 0, None),
        "an unchanged link has appeared"
    );
    assert!(
        appears(true, two, 0, None),
        "a link with another MAC address has not appeared"
    );
    assert!(
        appears(true, two, 3, None),
        "a link that has become a port of a bridge has not appeared"
    );
    assert!(appears(true, two, 3, Some(IFLA_EVENT_NOTIFY_PEERS)));
    assert!(
        !appears(true, two, 3, Some(2)),
        "a link has appeared after an event that changes nothing"
    );
    assert!(!appears(false, two, 3, Some(IFLA_EVENT_NOTIFY_PEERS)));
}

#[test]
fn address_of_mac_is_lowest_neighbour_address_that_is_not_excluded() {
    let (vip, server, mac) = (ip("10.0.0.1"), ip("10.0.0.7"), [4; 6]);
    let mut state = NetState::of_link(7, (ip("10.0.0.0"), 24), (vip, mac));
    state.add_neighbour(7, (server, mac));
    state.add_neighbour(7, (ip("10.0.0.8"), mac));
    assert_eq!(state.address_of(7, mac, |host| *host == vip), Some(server));
    assert_eq!(state.address_of(8, mac, |_| false), None);
}

proptest::proptest! {
    #[test]
    fn netlink_state_update_of_any_bytes_does_not_panic(kind in 16_u16..40, payload: Vec<u8>) {
        let message = Message { kind, flags: 0, seq: 0, payload: &payload };
        NetState::default().apply(&message, &mut Changes::default());
    }
}
