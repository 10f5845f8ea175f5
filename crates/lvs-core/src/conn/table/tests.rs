//! Tests of the connection table. Some compare it with a simple model: the same operations must
//! give the same results.

use std::boxed::Box;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;
use std::vec;

use proptest::prelude::*;

use super::*;
use crate::conn::Key;
use crate::{Forwarding, State};

/// Server record to which some entries are bound later.
const REBOUND: u32 = 1000;
const ALL: usize = usize::MAX;

fn key(n: u16) -> Key {
    Key {
        protocol: Protocol::TCP,
        client: SocketAddr::from(([192, 0, 2, 1], n)),
        virt: "10.0.0.1:80".parse().unwrap(),
    }
}

fn draft(n: u16, timeout: u32) -> Draft {
    let mut draft = Draft::new(&key(n), "10.1.0.1:80".parse().unwrap(), 0);
    draft.timeout = timeout;
    draft
}

fn due(table: &mut ConnTable, now: Instant) -> Vec<u16> {
    let mut ports = Vec::new();
    loop {
        let mut budget = ALL;
        let due = table.take_due_by(now, &mut budget);
        if due.is_empty() {
            break;
        }
        for &handle in &due {
            ports.push(table.get(handle).client().port());
            table.remove(handle);
        }
        table.recycle(due);
    }
    ports
}

fn is_clear(table: &ConnTable) -> bool {
    let tags = |narrow| {
        let tags = table.slots.tags(narrow);
        (0..table.slots.buckets(narrow) as usize).all(|bucket| tags.word(bucket) == 0)
    };
    table.len == 0
        && (table.portless, table.mixed) == (0, 0)
        && table.overflow.is_clear()
        && table.parts.iter().all(|&used| used == 0)
        && tags(true)
        && tags(false)
        && table.indices(0..ALL).next().is_none()
}

#[test]
fn client_is_found_although_its_address_was_cached_as_no_client() {
    let mut table = ConnTable::new(8, 1);
    let server = "10.1.0.1:80".parse().unwrap();
    let out = |table: &ConnTable| table.find_out(Protocol::TCP, server, key(1).client);
    // Before the second look-up, the table has recorded that the address does not belong to a
    // client.
    assert_eq!((out(&table), out(&table)), (None, None));
    let entry = table.insert(&draft(1, 1), Instant::ZERO).unwrap();
    assert_eq!(out(&table), Some(entry));
    table.remove(entry);
    assert_eq!(out(&table), None);
}

#[test]
fn prefetch_hint_does_not_change_lookup_result() {
    let mut table = ConnTable::new(64, 1);
    let server = "10.1.0.1:80".parse().unwrap();
    for n in 1..=32 {
        table.insert(&draft(n, 1), Instant::ZERO).unwrap();
    }
    let aim = |table: &ConnTable, from, to| {
        let mut ahead = table.ahead(Protocol::TCP, from, to, |_| {});
        table.aim(&mut ahead, |_| {});
        ahead
    };
    for round in 0..2 {
        for n in 1..=40 {
            let Key { client, virt, .. } = key(n);
            let (there, back) = (aim(&table, client, virt), aim(&table, server, client));
            if round == 1 && n % 4 == 0 {
                // The entry changes between the prefetch and the decision.
                if let Some(handle) = table.find_in(&key(n)) {
                    table.remove(handle);
                }
                let other = draft(n + 100, 1);
                table.insert(&other, Instant::ZERO).unwrap();
            }
            let found = table.find_in(&key(n));
            assert_eq!(table.find_in_ahead(&key(n), &there), found);
            let reply = table.find_out_ahead(Protocol::TCP, server, client, &back);
            assert_eq!(reply, found);
            // The hint was prepared for another packet.
            assert_eq!(table.find_in_ahead(&key(n), &back), found);
            assert_eq!(found.is_some(), n <= 32 && (round == 0 || n % 4 != 0));
        }
    }
}

#[test]
fn lookup_finds_both_directions_and_newest_of_equal_entries() {
    let mut table = ConnTable::new(8, 1);
    let old = table.insert(&draft(1, 1), Instant::ZERO).unwrap();
    let new = table.insert(&draft(1, 1), Instant::ZERO).unwrap();
    assert_eq!(table.find_in(&key(1)), Some(new));
    let server = "10.1.0.1:80".parse().unwrap();
    let out = |table: &ConnTable, protocol| table.find_out(protocol, server, key(1).client);
    assert_eq!(out(&table, Protocol::TCP), Some(new));
    assert_eq!(out(&table, Protocol::UDP), None);
    table.remove(new);
    assert_eq!(table.find_in(&key(1)), Some(old));
    assert_eq!(out(&table, Protocol::TCP), Some(old));
    table.remove(old);
    assert_eq!(table.find_in(&key(1)), None);
    assert!(is_clear(&table));
}

#[test]
fn entry_is_not_offloadable_while_newer_entry_has_equal_key() {
    let mut table = ConnTable::new(8, 1);
    let old = table.insert(&draft(1, 1), Instant::ZERO).unwrap();
    table.get(old).publish(7);
    assert!(table.get(old).is_live());
    let new = table.insert(&draft(1, 1), Instant::ZERO).unwrap();
    assert!(!table.get(old).is_live());
    table.get(old).publish(7);
    assert!(!table.get(old).is_live());
    table.remove(new);
    table.get(old).publish(8);
    assert!(table.get(old).is_live());
}

#[test]
fn offloaded_slot_is_quarantined_after_removal() {
    let memory = Memory::heap(Layout::new(1, 1)).quarantined(Duration::from_millis(5));
    let mut table = ConnTable::with_memory(8, memory);
    // All of these entries have the same home slot.
    let connection = draft(1, 9);
    let first = table.insert(&connection, Instant::ZERO).unwrap();
    table.get(first).publish(1);
    table.remove(first);
    assert!(!table.is_used(first) && table.find_in(&key(1)).is_none());
    let second = table.insert(&connection, Instant::ZERO).unwrap();
    assert_ne!(first, second);
    table.remove(second);
    let later = Instant::ZERO + Duration::from_millis(5);
    assert_eq!(table.due_tick(later, &mut 1), None);
    assert_eq!(table.insert(&connection, later), Some(first));
    // A slot that was never offloaded is reused at once.
    table.remove(first);
    assert_eq!(table.insert(&connection, later), Some(first));
    // BPF programs may still read a connection that was evicted from the kernel fast path.
    table.get(first).publish(1);
    table.get(first).withdraw();
    table.remove(first);
    let third = table.insert(&connection, later).unwrap();
    assert_ne!(third, first);
    // BPF programs may also still read a connection that was evicted before its slot was last
    // written.
    table.get(third).publish(1);
    table.get(third).write(&connection);
    assert!(!table.get(third).is_live());
    table.remove(third);
    assert!(![first, third].contains(&table.insert(&connection, later).unwrap()));
}

#[test]
fn entries_prefer_home_slot_and_are_found_in_any_slot() {
    let mut table = ConnTable::new(4000, 1);
    let mut handles = Vec::new();
    let (mut at_home, mut counts) = (0, Vec::new());
    for n in 1..=4000 {
        let handle = table.insert(&draft(n, 9), Instant::ZERO).unwrap();
        let buckets = table.slots.buckets_of(true, key(n).client, Protocol::TCP);
        at_home += usize::from(handle as usize == buckets.unwrap().home());
        handles.push(handle);
        if n == 400 || n == 4000 {
            counts.push(at_home);
        }
    }
    assert!(counts[0] > 360 && counts[1] > 1600, "{counts:?}");
    for (n, &handle) in (1..).zip(&handles) {
        assert_eq!(table.find_in(&key(n)), Some(handle));
        table.remove(handle);
        assert_eq!(
            table.find_in(&key(n)),
            None,
            "a removed entry is still found"
        );
    }
    assert!(is_clear(&table));
}

/// Slots in quarantine count as used, so that the quarantine is never larger than the table, at any
/// rate of offloaded connections.
#[test]
fn quarantined_slots_count_as_used() {
    let memory = Memory::heap(Layout::new(1, 1)).quarantined(Duration::from_millis(5));
    let mut table = ConnTable::with_memory(8, memory);
    let places = table.slots.overflow as usize;
    for n in 0..10_000 {
        if let Some(handle) = table.insert(&draft(n, 9), Instant::ZERO) {
            table.get(handle).publish(1);
            table.remove(handle);
        }
        assert!(
            table.quarantined.len() <= places,
            "after connection {n}, {} of {places} slots are in quarantine",
            table.quarantined.len()
        );
    }
    assert!(!table.quarantined.is_empty() && table.len() == 0);
    let later = Instant::ZERO + Duration::from_millis(5);
    assert_eq!(table.due_tick(later, &mut 1), None);
    assert!(table.quarantined.is_empty());
}

fn nat(client: u16, virt: SocketAddr, server: SocketAddr) -> Draft {
    let key = Key {
        virt,
        ..key(client)
    };
    let mut draft = Draft::new(&key, server, Forwarding::Nat as u32);
    draft.timeout = 100;
    draft
}

/// One client port has connections to every port of one address, and through many addresses to one
/// server: the buckets depend only on the client, so all these entries have the same buckets.
#[test]
fn many_destinations_of_one_client_port_are_found() {
    let mut table = ConnTable::new(1 << 17, 1);
    let server: SocketAddr = "10.1.0.1:80".parse().unwrap();
    let virt = |n: u16| {
        let [high, low] = n.to_be_bytes();
        SocketAddr::from(([10, 2, high, low], 80))
    };
    let port = |n: u16| SocketAddr::from(([10, 0, 0, 1], n));
    let behind = |n: u16| SocketAddr::from(([10, 1, 0, 2], n));
    for n in 1..=u16::MAX {
        let to_addresses = nat(7, virt(n), server);
        table.insert(&to_addresses, Instant::ZERO).unwrap();
        let to_ports = nat(7, port(n), behind(n));
        table.insert(&to_ports, Instant::ZERO).unwrap();
    }
    for n in 1..=u16::MAX {
        for virt in [virt(n), port(n)] {
            let found = table.find_in(&Key { virt, ..key(7) }).unwrap();
            assert_eq!(table.get(found).virt(), virt);
        }
        let found = table.find_out(Protocol::TCP, behind(n), key(7).client);
        assert_eq!(table.get(found.unwrap()).virt(), port(n));
    }
    // The newest of the equal entries that remain is found. Entries are removed from the middle,
    // the end and the front.
    let newest = |table: &ConnTable| {
        let found = table.find_out(Protocol::TCP, server, key(7).client);
        found.map(|handle| table.get(handle).virt())
    };
    let to = |virt| Key { virt, ..key(7) };
    assert_eq!(newest(&table), Some(virt(u16::MAX)));
    for n in (2..u16::MAX).chain([1]) {
        let handle = table.find_in(&to(virt(n))).unwrap();
        table.remove(handle);
        assert_eq!(newest(&table), Some(virt(u16::MAX)));
    }
    let handle = table.find_in(&to(virt(u16::MAX))).unwrap();
    table.remove(handle);
    assert_eq!(newest(&table), None);
    for n in 1..=u16::MAX {
        let handle = table.find_in(&to(port(n))).unwrap();
        table.remove(handle);
    }
    assert!(is_clear(&table));
}

#[test]
fn full_table_refuses_entry_until_another_is_removed() {
    for capacity in [1, 2, 7, 100, 1000] {
        let mut table = ConnTable::new(usize::from(capacity), 1);
        let insert = |table: &mut ConnTable, n| table.insert(&draft(n, 1), Instant::ZERO);
        let first = insert(&mut table, 1).unwrap();
        for n in 2..=capacity {
            insert(&mut table, n).unwrap();
        }
        assert_eq!(insert(&mut table, 2000), None);
        table.remove(first);
        assert!(insert(&mut table, 2000).is_some());
        assert_eq!(table.find_in(&key(1)), None);
        assert!((2..=capacity).all(|n| table.find_in(&key(n)).is_some()));
        assert_eq!(table.indices(0..ALL).count(), usize::from(capacity));
    }
}

#[test]
fn full_buckets_overflow_and_the_overflow_is_bounded() {
    let layout = Layout {
        narrow_buckets: 2,
        wide_buckets: 0,
        overflow_slots: 10,
        keys: [1, 2],
    };
    let mut table = ConnTable::with_memory(1000, Memory::heap(layout));
    let taken: Vec<u16> = (1..=1000)
        .filter(|&n| table.insert(&draft(n, 1), Instant::ZERO).is_some())
        .collect();
    assert_eq!(taken.len(), 26);
    assert!(taken.iter().all(|&n| table.find_in(&key(n)).is_some()));
    assert_eq!(table.find_in(&key(999)), None);
    for n in taken {
        let handle = table.find_in(&key(n)).unwrap();
        table.remove(handle);
    }
    assert!(is_clear(&table));

    // Entries with equal keys, and entries without a client port, are removed as well; no bucket
    // loses another entry.
    let layout = Layout {
        narrow_buckets: 64,
        ..layout
    };
    for (flags, expected) in [(0, 11), (flag::NO_CPORT, 10)] {
        let mut table = ConnTable::with_memory(1000, Memory::heap(layout));
        let mut same = draft(7, 1);
        same.flags |= flags;
        let taken = (0..100).filter(|_| table.insert(&same, Instant::ZERO).is_some());
        assert_eq!(taken.count(), expected);
        for n in 100..300 {
            assert!(
                table.insert(&draft(n, 1), Instant::ZERO).is_some(),
                "client port {n} is refused after entries with the flags {flags:#x}"
            );
        }
    }

    for (connections, slots) in [
        (100, 100),
        (1 << 18, 1 << 18),
        (1 << 20, 1 << 18),
        (1 << 22, 1 << 18),
        (1 << 24, 1 << 20),
    ] {
        assert_eq!(Layout::new(connections, 1).overflow_slots, slots);
    }
}

#[test]
fn full_table_under_churn_keeps_most_entries_out_of_overflow() {
    let capacity = 20_000_u32;
    let mut table = ConnTable::new(capacity as usize, 3);
    let draft = |n: u32| {
        let client = SocketAddr::from((Ipv4Addr::from(n), 1000));
        let key = Key { client, ..key(1) };
        Draft::new(&key, "10.1.0.1:80".parse().unwrap(), 0)
    };
    for n in 0..10 * capacity {
        if n >= capacity {
            let handle = table.find_in(&draft(n - capacity).key).unwrap();
            table.remove(handle);
        }
        table.insert(&draft(n), Instant::ZERO).unwrap();
    }
    let elsewhere = table.indices(0..ALL).filter(|&n| !table.slots.in_place(n));
    assert!(elsewhere.count() < capacity as usize * 6 / 100);
}

#[test]
fn timers_fire_at_their_deadline_and_not_before() {
    // Timeouts from milliseconds to more than the wheel's span of 51 days.
    let timeouts = [
        1, 2, 16, 17, 18, 34, 35, 68, 69, 300, 4_000, 70_000, 71_000, 300_000, 4_000_000, 5_000_000,
    ];
    for timeout in timeouts {
        for start in [0, 5, 16, 17, 70_350, 4_460_000] {
            let mut table = ConnTable::new(8, 1);
            table
                .insert(&draft(2, 1), Instant::from_secs(start))
                .unwrap();
            assert_eq!(due(&mut table, Instant::from_secs(start + 1)), [2]);
            let start = start + 2;
            table
                .insert(&draft(1, timeout), Instant::from_secs(start))
                .unwrap();
            let deadline = Instant::from_secs(start + u64::from(timeout));
            let before = Instant::from_nanos(deadline.as_nanos() - 1);
            assert_eq!(
                due(&mut table, before),
                [0; 0],
                "timeout of {timeout} s, started at {start} s"
            );
            assert_eq!(
                due(&mut table, deadline),
                [1],
                "timeout of {timeout} s, started at {start} s"
            );
        }
    }
}

#[test]
fn timer_fires_within_5_ms_if_polled_at_next_wakeup() {
    for timeout in [1, 10, 60, 120, 900, 80_000, 5_000_000] {
        let mut table = ConnTable::new(8, 1);
        let start = Instant::from_secs(123_456);
        table.insert(&draft(1, timeout), start).unwrap();
        let deadline = start + Duration::from_secs(timeout.into());
        let mut wakeups = 0;
        let fired = loop {
            let now = table.next_wakeup().unwrap();
            wakeups += 1;
            if due(&mut table, now) == [1] {
                break now;
            }
        };
        assert!(fired >= deadline && fired - deadline < Duration::from_millis(5));
        // The wake-ups are the ticks at which books, pages, and portions of the last page are
        // distributed.
        assert!(
            wakeups < 150,
            "{wakeups} wakeups for a timeout of {timeout} s"
        );
    }
}

#[test]
fn moved_timer_fires_at_new_deadline() {
    let mut table = ConnTable::new(8, 1);
    let handle = table.insert(&draft(1, 900), Instant::ZERO).unwrap();
    table.get(handle).set_timeout(10);
    table.restart(handle, Instant::from_secs(1));
    assert_eq!(due(&mut table, Instant::from_secs(10)), [0; 0]);
    table.get(handle).set_timeout(900);
    table.restart(handle, Instant::from_secs(10));
    assert_eq!(due(&mut table, Instant::from_secs(909)), [0; 0]);
    assert_eq!(due(&mut table, Instant::from_secs(910)), [1]);
}

#[test]
fn all_timers_fire_if_budget_is_below_their_number() {
    let mut table = ConnTable::new(1000, 1);
    for n in 1..=1000 {
        table.insert(&draft(n, 100), Instant::ZERO).unwrap();
    }
    let now = Instant::from_secs(100);
    let (mut calls, mut fired) = (0, 0);
    while fired < 1000 {
        let due = table.take_due_by(now, &mut 7);
        fired += due.len();
        due.iter().for_each(|&handle| table.remove(handle));
        table.recycle(due);
        calls += 1;
        assert!(calls < 1000, "`take_due_by` returns too few handles");
    }
}

/// The wheel processes the timers of many connections with the same deadline in portions, and none
/// of them is late.
#[test]
fn timer_burst_is_spread_before_its_deadline() {
    let mut table = ConnTable::new(50_000, 1);
    for n in 1..=50_000 {
        table.insert(&draft(n, 100), Instant::ZERO).unwrap();
    }
    let deadline = Instant::from_secs(100);
    let mut most = 0;
    loop {
        let now = table.next_wakeup().unwrap();
        if now > deadline {
            break;
        }
        let mut budget = ALL;
        assert_eq!(table.due_tick(now, &mut budget), None);
        most = most.max(ALL - budget);
    }
    // The entries are distributed in 48 portions.
    assert!(most <= 50_000 / 48 + 1, "{most}");
    assert_eq!(due(&mut table, deadline).len(), 50_000);
}

#[derive(Default)]
struct Naive {
    /// Handle, content and deadline of each entry; the newest is the last.
    entries: Vec<(u32, Draft, Instant)>,
}

impl Naive {
    fn newest(&self, is: impl Fn(&Draft) -> bool) -> Option<u32> {
        let entry = self.entries.iter().rev().find(|entry| is(&entry.1));
        entry.map(|entry| entry.0)
    }

    fn find_client(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        self.newest(|draft| {
            draft.kinds() == kinds
                && draft.key.virt == key.virt
                && draft.key.client == SocketAddr::new(key.client.ip(), port)
                && draft.key.protocol == key.protocol
        })
    }

    fn find_in(&self, key: &Key) -> Option<u32> {
        let exact = self.find_client(key, key.client.port(), 0);
        exact.or_else(|| self.find_client(key, 0, kind::NO_CPORT))
    }

    fn find_out(&self, protocol: Protocol, source: SocketAddr, client: SocketAddr) -> Option<u32> {
        let mut newest_first = self.entries.iter().rev();
        let entry = newest_first.find(|(handle, draft, _)| {
            let from = match draft.method() {
                Forwarding::Nat => draft.server_addr,
                Forwarding::FullNat => return false,
                // A newer connection of the same client with the same address is found instead.
                _ if self.find_client(&draft.key, client.port(), draft.kinds())
                    != Some(*handle) =>
                {
                    return false;
                }
                _ => draft.key.virt,
            };
            from == source
                && draft.key.client == client
                && draft.key.protocol == protocol
                && !draft.has(flag::TEMPLATE)
        });
        entry.map(|entry| entry.0)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(Box<Draft>),
    Remove(usize),
    Restart(usize, u32),
    Hide(usize),
    Port(usize, u16),
    Rebind(usize, SocketAddr, u32),
    Advance(u64),
    TakeOver,
}

fn pick<T: Clone + fmt::Debug + 'static>(from: &[T]) -> impl Strategy<Value = T> + use<T> {
    proptest::sample::select(from.to_vec())
}

fn clients() -> Vec<SocketAddr> {
    let v4 = (1..4u16)
        .map(|n| SocketAddr::from((Ipv4Addr::from(0xc000_0200 + u32::from(n) / 3), 1000 + n)));
    let v6 = (1..3).map(|n| SocketAddr::from((Ipv6Addr::from(n), 1000)));
    let mapped = SocketAddr::from((Ipv4Addr::from(0xc000_0200).to_ipv6_mapped(), 1001));
    v4.chain(v6).chain([mapped]).collect()
}

fn virts(v6: bool) -> Vec<SocketAddr> {
    let addrs = if v6 {
        ["[2001:db8::1]:80", "[2001:db8::1]:81", "[2001:db8::2]:80"]
    } else {
        ["10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"]
    };
    addrs.map(|addr| addr.parse().unwrap()).to_vec()
}

fn servers() -> Vec<SocketAddr> {
    ["10.1.0.1:80", "10.1.0.2:80", "[2001:db8:1::1]:80"]
        .map(|addr| addr.parse().unwrap())
        .to_vec()
}

fn drafts() -> impl Strategy<Value = Box<Draft>> {
    let kinds = [
        0,
        0,
        0,
        0,
        0,
        0,
        flag::TEMPLATE,
        flag::NO_CPORT,
        flag::TEMPLATE | flag::NO_CPORT,
    ];
    (
        pick(&clients()),
        0..3_usize,
        pick(&servers()),
        pick(&[0_u32, 0, 0, 3, 2, 5]),
        pick(&kinds),
        1..3000_u32,
        pick(&[Protocol::TCP, Protocol::TCP, Protocol::UDP]),
    )
        .prop_map(
            |(mut client, virt, server, method, kinds, timeout, protocol)| {
                if kinds != 0 {
                    client.set_port(0);
                }
                let virt = virts(client.is_ipv6())[virt];
                let key = Key {
                    protocol,
                    client,
                    virt,
                };
                let mut draft = Draft::new(&key, server, method | kinds);
                draft.timeout = timeout;
                draft.mark = timeout ^ 0x1234_5678;
                draft.server = timeout % 7;
                draft.in_packets = timeout / 3;
                draft.state = State(3);
                Box::new(draft)
            },
        )
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => drafts().prop_map(Op::Insert),
        4 => any::<usize>().prop_map(Op::Remove),
        1 => (any::<usize>(), 1..3000_u32).prop_map(|(n, timeout)| Op::Restart(n, timeout)),
        1 => any::<usize>().prop_map(Op::Hide),
        1 => (any::<usize>(), 1001..1004_u16).prop_map(|(n, port)| Op::Port(n, port)),
        1 => (any::<usize>(), pick(&servers()[..2]), pick(&[0_u32, 3]))
            .prop_map(|(n, server, method)| Op::Rebind(n, server, method)),
        1 => (0..400_000_u64).prop_map(Op::Advance),
        1 => Just(Op::TakeOver),
    ]
}

/// Memory that remains after the table in it was dropped.
fn borrowed(layout: &Layout) -> [&'static [core::sync::atomic::AtomicU64]; 5] {
    let sizes = layout.region_words();
    sizes.map(|size| &*Box::leak(bytemuck::zeroed_slice_box(size)))
}

fn memory(layout: Layout, words: &[&'static [core::sync::atomic::AtomicU64]; 5]) -> Memory {
    let regions = words.map(|words| memory::Region::shared(words, Arc::new(())));
    Memory::new(layout, regions).unwrap()
}

fn agree(table: &ConnTable, naive: &Naive) {
    assert_eq!(table.len(), naive.entries.len());
    let mut handles: Vec<u32> = naive.entries.iter().map(|entry| entry.0).collect();
    handles.sort_unstable();
    assert_eq!(table.indices(0..ALL).collect::<Vec<_>>(), handles);
    for (handle, draft, expires) in &naive.entries {
        let entry = table.get(*handle);
        assert_eq!(std::format!("{entry:?}"), std::format!("{draft:?}"));
        assert_eq!(entry.expires(), *expires);
    }
    for protocol in [Protocol::TCP, Protocol::UDP] {
        for client in clients() {
            for virt in virts(client.is_ipv6()) {
                let key = Key {
                    protocol,
                    client,
                    virt,
                };
                assert_eq!(table.find_in(&key), naive.find_in(&key), "in {key:?}");
                assert_eq!(
                    table.find_template(&key),
                    naive.find_client(&key, 0, kind::TEMPLATE),
                    "template {key:?}"
                );
            }
            // A packet's addresses are of one family.
            let sources = virts(client.is_ipv6()).into_iter().chain(servers());
            for source in sources.filter(|source| source.is_ipv6() == client.is_ipv6()) {
                assert_eq!(
                    table.find_out(protocol, source, client),
                    naive.find_out(protocol, source, client),
                    "out {source} to {client}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn connection_table_agrees_with_naive_model(
        ops in proptest::collection::vec(ops(), 1..60),
        narrow_buckets in 1..3_u32,
        wide_buckets in 0..3_u32,
        capacity in 10..60_usize,
    ) {
        let layout = Layout { narrow_buckets, wide_buckets, overflow_slots: 64, keys: [5, 6] };
        let words = borrowed(&layout);
        let mut table = ConnTable::with_memory(capacity, memory(layout, &words));
        let mut naive = Naive::default();
        let mut now = Instant::from_secs(1_000_000);
        for op in ops {
            let any = |n: usize| (!naive.entries.is_empty()).then(|| n % naive.entries.len());
            match op {
                Op::Insert(draft) => match table.insert(&draft, now) {
                    Some(handle) => {
                        let expires = now + Duration::from_secs(draft.timeout.into());
                        naive.entries.push((handle, *draft, expires));
                    }
                    None => prop_assert_eq!(naive.entries.len(), capacity),
                },
                Op::Remove(n) => if let Some(n) = any(n) {
                    table.remove(naive.entries.remove(n).0);
                },
                Op::Restart(n, timeout) => if let Some(n) = any(n) {
                    let (handle, draft, expires) = &mut naive.entries[n];
                    table.get(*handle).set_timeout(timeout);
                    table.restart(*handle, now);
                    draft.timeout = timeout;
                    *expires = now + Duration::from_secs(timeout.into());
                },
                Op::Hide(n) => if let Some(n) = any(n).filter(|&n| naive.entries[n].1.has(flag::TEMPLATE)) {
                    let mut entry = naive.entries.remove(n);
                    table.hide_template(entry.0);
                    entry.1.key.virt.set_port(u16::MAX);
                    entry.1.server_addr.set_port(u16::MAX);
                    entry.1.flags |= flag::DYING;
                    naive.entries.push(entry);
                },
                Op::Port(n, port) => if let Some(n) = any(n).filter(|&n| naive.entries[n].1.has(flag::NO_CPORT)) {
                    let mut entry = naive.entries.remove(n);
                    table.set_client_port(entry.0, port);
                    entry.1.key.client.set_port(port);
                    entry.1.flags &= !flag::NO_CPORT;
                    naive.entries.push(entry);
                },
                Op::Rebind(n, server, method) => if let Some(n) = any(n) {
                    let mut entry = naive.entries.remove(n);
                    let change = |draft: &mut Draft| {
                        if draft.server_addr.is_ipv4() {
                            draft.server_addr = server;
                        }
                        draft.server = REBOUND;
                        draft.flags = draft.flags & !flag::METHOD | method;
                    };
                    table.change(entry.0, change);
                    change(&mut entry.1);
                    naive.entries.push(entry);
                },
                Op::Advance(millis) => {
                    now = now + Duration::from_millis(millis);
                    let mut fired = Vec::new();
                    loop {
                        let mut budget = ALL;
                        let due = table.take_due_by(now, &mut budget);
                        if due.is_empty() {
                            break;
                        }
                        fired.extend_from_slice(&due);
                        due.iter().for_each(|&handle| table.remove(handle));
                        table.recycle(due);
                    }
                    fired.sort_unstable();
                    let (gone, left) = naive.entries.into_iter().partition(|entry| entry.2 <= now);
                    naive.entries = left;
                    let mut gone: Vec<u32> = Vec::from_iter(gone.iter().map(|entry: &(u32, Draft, Instant)| entry.0));
                    gone.sort_unstable();
                    prop_assert_eq!(fired, gone);
                }
                Op::TakeOver => {
                    // A changed entry outside the overflow has no creation number, so that a
                    // process that takes over the table cannot find the newest of equal entries.
                    let ambiguous = naive.entries.iter().any(|entry| entry.1.server == REBOUND);
                    let hidden = naive.entries.iter().any(|entry| entry.1.has(flag::DYING));
                    if ambiguous || hidden {
                        continue;
                    }
                    let found = Layout::from_words(&layout.to_words()).unwrap();
                    let (successor, mut adoption) = ConnTable::found(capacity, memory(found, &words));
                    table = successor;
                    while table.adopt(&mut adoption, now, 7, |_, _| true) {}
                }
            }
            agree(&table, &naive);
        }
        for entry in naive.entries {
            table.remove(entry.0);
        }
        prop_assert!(is_clear(&table));
    }

    #[test]
    fn timers_agree_with_map_of_deadlines(
        steps in proptest::collection::vec((1u16..50, 1u32..90_000, 0u64..30_000), 1..200)
    ) {
        let mut table = ConnTable::new(64, 7);
        let mut model: std::collections::BTreeMap<u16, (u32, Instant)> = Default::default();
        let mut now = Instant::ZERO;
        for (port, timeout, wait) in steps {
            match table.find_in(&key(port)) {
                Some(handle) => {
                    table.get(handle).set_timeout(timeout);
                    table.restart(handle, now);
                }
                None => {
                    table.insert(&draft(port, timeout), now).unwrap();
                }
            }
            model.insert(port, (timeout, now + Duration::from_secs(u64::from(timeout))));
            now = now + Duration::from_millis(wait * 1237);
            let mut fired = due(&mut table, now);
            fired.sort_unstable();
            let expected: Vec<u16> =
                model.iter().filter(|(_, (_, at))| *at <= now).map(|(port, _)| *port).collect();
            prop_assert_eq!(&fired, &expected);
            model.retain(|_, (_, at)| *at > now);
            prop_assert_eq!(table.len(), model.len());
        }
    }
}

#[test]
fn adoption_keeps_valid_entries_and_drops_damaged_or_refused_entries() {
    let layout = Layout::new(100, 3);
    let words = borrowed(&layout);
    let mut table = ConnTable::with_memory(100, memory(layout, &words));
    let kept = table.insert(&draft(1, 60), Instant::ZERO).unwrap();
    let refused = table.insert(&draft(2, 60), Instant::ZERO).unwrap();
    let torn = table.insert(&draft(3, 60), Instant::ZERO).unwrap();
    // A slot whose tag was never written, and a slot whose first word belongs to another client.
    table.vacate(refused);
    table.slots.entry(torn).write(&draft(4, 60));
    drop(table);
    let (mut table, mut adoption) = ConnTable::found(100, memory(layout, &words));
    assert_eq!(table.find_in(&key(1)), Some(kept));
    let mut seen = vec![];
    while table.adopt(&mut adoption, Instant::from_secs(1), 10, |_, entry| {
        seen.push(entry.client().port());
        entry.client().port() != 2
    }) {}
    seen.sort_unstable();
    assert!(seen.contains(&1) && seen.contains(&2));
    assert_eq!(table.find_in(&key(1)), Some(kept));
    assert_eq!(
        (table.find_in(&key(2)), table.find_in(&key(3))),
        (None, None)
    );
    assert_eq!(due(&mut table, Instant::from_secs(59)), [0; 0]);
    assert!(due(&mut table, Instant::from_secs(60)).contains(&1));
    assert!(is_clear(&table));
}
