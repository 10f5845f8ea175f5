//! The table of clients that send datagrams. If it is full, a new client takes the slot of another
//! client, or is refused.
//!
//! The source address of a datagram can be forged, so one sender can appear as any number of
//! clients. It does not receive the answers to forged addresses. A client is therefore *new* until
//! it has sent a datagram after an answer of its server; then it is *established*. If the table is
//! full, the oldest new client of the same service is evicted; if this service has less than its
//! share of slots, the oldest new client of the service with most clients. An established client is
//! evicted only if it is idle. For a source that already has many clients of the same service, only
//! a client of this source is evicted there ([`SOURCE_PART`]).

use lvs_core::Prefix;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lvs_core::api::ServiceId;

use super::close_signal::CloseSignal;

/// A new client is closed if no datagram was forwarded in either direction for this time, as in the
/// kernel's connection tracking. An established client that has sent no datagram for this time may
/// be evicted.
pub(super) const NEW_IDLE: Duration = Duration::from_secs(30);
/// Maximum number of evicted clients that still have a slot, because they must first close a
/// socket.
const LEAVING_MAX: usize = 1024;
/// If a client of a service must be evicted for a new client whose source has more than
/// 1/`SOURCE_PART` of the service's clients, an earlier client of the same source is evicted.
const SOURCE_PART: usize = 16;
/// Maximum number of new clients, and of established clients, that are examined for an eviction.
const LOOKS: usize = 64;

/// All clients of the proxy that send datagrams.
#[derive(Debug, Default)]
pub(super) struct Clients(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    services: HashMap<ServiceId, Queue>,
    /// The queues, ordered by length and number, so that the longest one is found at once.
    by_length: BTreeMap<(usize, u64), ServiceId>,
    /// Number of clients in the queues.
    present: usize,
    /// Number of clients in the queues, and of evicted clients that still have a slot.
    held: usize,
    /// The last number that was given to a client or a queue. A client gets a number when it
    /// arrives and when it becomes established; an established client also when it is examined for
    /// an eviction. A higher number is later.
    next: u64,
}

#[derive(Debug, Default)]
struct Queue {
    /// A number that no other queue has had.
    number: u64,
    /// New clients, in the order of their arrival.
    new: BTreeMap<u64, Arc<Client>>,
    /// Established clients, in the order in which they became established or were last examined for
    /// an eviction.
    talking: BTreeMap<u64, Arc<Client>>,
    sources: HashMap<IpAddr, usize>,
}

#[derive(Debug)]
struct Client {
    source: IpAddr,
    /// Position of the client in its queue; 0 after the client was evicted or has released its
    /// slot.
    number: AtomicU64,
    answered: AtomicBool,
    talks: AtomicBool,
    /// Time of the client's last datagram, in milliseconds on the balancer's clock.
    sent: AtomicU64,
    /// Signals that the client must be closed.
    close_signal: CloseSignal,
}

/// A client's slot; dropping it frees the slot.
#[derive(Debug)]
pub(super) struct Slot {
    clients: Arc<Clients>,
    service: ServiceId,
    client: Arc<Client>,
}

/// Result of the search for a slot.
#[derive(Debug)]
pub(super) enum Admission {
    /// A slot was free.
    Free(Slot),
    /// Another client was evicted, and the new client may use its slot.
    Instead(Slot),
    /// No slot is free, and no client can be evicted.
    Full,
}

impl Queue {
    fn len(&self) -> usize {
        self.new.len() + self.talking.len()
    }

    fn of(&self, source: IpAddr) -> usize {
        self.sources.get(&source).copied().unwrap_or(0)
    }

    fn remove(&mut self, client: &Client) -> bool {
        let number = client.number.swap(0, Ordering::AcqRel);
        if self.new.remove(&number).is_none() && self.talking.remove(&number).is_none() {
            return false;
        }
        if let Some(own) = self.sources.get_mut(&client.source) {
            *own -= 1;
            if *own == 0 {
                self.sources.remove(&client.source);
            }
        }
        true
    }

    /// The client that a new client evicts, if there is one; if `only` is set, a client with this
    /// source address.
    fn victim(&mut self, only: Option<IpAddr>, next: &mut u64, now: u64) -> Option<Arc<Client>> {
        let fits = |client: &&Arc<Client>| only.is_none_or(|source| client.source == source);
        if let Some(new) = self.new.values().take(LOOKS).find(fits) {
            return Some(Arc::clone(new));
        }
        let pause = u64::try_from(NEW_IDLE.as_millis()).unwrap_or(u64::MAX);
        for _ in 0..LOOKS.min(self.talking.len()) {
            let (_, client) = self.talking.pop_first()?;
            // The client becomes the last in the order of the queue.
            *next += 1;
            client.number.store(*next, Ordering::Release);
            self.talking.insert(*next, Arc::clone(&client));
            let paused = now.saturating_sub(client.sent.load(Ordering::Relaxed)) >= pause;
            if paused && fits(&&client) {
                return Some(client);
            }
        }
        None
    }
}

impl Clients {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of slots in use, including those of evicted clients.
    pub(super) fn held(&self) -> usize {
        self.table().held
    }

    /// Reserves a slot for `client` of `service`. At most `most` clients can have a slot, in
    /// addition to evicted clients that have not released theirs. `crowded` means that all slots of
    /// the proxy are in use, so that a client must be evicted.
    pub(super) fn slot(
        self: &Arc<Self>,
        service: ServiceId,
        client: SocketAddr,
        (most, crowded): (usize, bool),
        now: u64,
    ) -> Admission {
        let source = Prefix::source(client.ip());
        let mut table = self.table();
        if table.held >= most + LEAVING_MAX {
            return Admission::Full;
        }
        let full = table.present >= most || crowded;
        if full && !table.make_room(service, source, most, now) {
            return Admission::Full;
        }
        table.present += 1;
        table.held += 1;
        table.next += 1;
        let number = table.next;
        let client = Arc::new(Client {
            source,
            number: AtomicU64::new(number),
            answered: AtomicBool::new(false),
            talks: AtomicBool::new(false),
            sent: AtomicU64::new(now),
            close_signal: CloseSignal::default(),
        });
        table.with_queue(service, |queue| {
            queue.new.insert(number, Arc::clone(&client));
            *queue.sources.entry(source).or_default() += 1;
        });
        drop(table);
        let slot = Slot {
            clients: Arc::clone(self),
            service,
            client,
        };
        match full {
            true => Admission::Instead(slot),
            false => Admission::Free(slot),
        }
    }
}

impl Table {
    /// Calls `work` with the queue of a service. A queue without clients is removed afterwards.
    fn with_queue<T>(&mut self, service: ServiceId, work: impl FnOnce(&mut Queue) -> T) -> T {
        let queue = self.services.entry(service).or_insert_with(|| {
            self.next += 1;
            Queue {
                number: self.next,
                ..Queue::default()
            }
        });
        let (number, before) = (queue.number, queue.len());
        let done = work(queue);
        let after = queue.len();
        if before != after {
            self.by_length.remove(&(before, number));
            self.by_length.insert((after, number), service);
        }
        if after == 0 {
            self.by_length.remove(&(after, number));
            self.services.remove(&service);
        }
        done
    }

    /// Evicts a client; `false` if none can be evicted.
    fn make_room(&mut self, service: ServiceId, source: IpAddr, most: usize, now: u64) -> bool {
        let own = self.services.get(&service).map_or(0, Queue::len);
        let share = most / (self.services.len() + usize::from(own == 0));
        let (from, only) = if own > 0 && own >= share {
            let queue = &self.services[&service];
            let large = queue.of(source) > (own / SOURCE_PART).max(1);
            (service, large.then_some(source))
        } else {
            let Some((_, largest)) = self.by_length.last_key_value() else {
                return false;
            };
            (*largest, None)
        };
        let mut next = self.next;
        let victim = self.with_queue(from, |queue| {
            let victim = queue.victim(only, &mut next, now)?;
            queue.remove(&victim);
            Some(victim)
        });
        self.next = self.next.max(next);
        let Some(victim) = victim else {
            return false;
        };
        self.present -= 1;
        victim.close_signal.close();
        true
    }
}

impl Slot {
    /// Records that the client has sent a datagram. If the client's server has answered before, the
    /// client becomes established.
    pub(super) fn sent(&self, now: u64) {
        self.client.sent.store(now, Ordering::Relaxed);
        if self.talks() || !self.client.answered.load(Ordering::Relaxed) {
            return;
        }
        self.client.talks.store(true, Ordering::Relaxed);
        let mut table = self.clients.table();
        table.next += 1;
        let next = table.next;
        let Some(queue) = table.services.get_mut(&self.service) else {
            return;
        };
        let number = self.client.number.load(Ordering::Acquire);
        if let Some(client) = queue.new.remove(&number) {
            client.number.store(next, Ordering::Release);
            queue.talking.insert(next, client);
        }
    }

    /// Records that the client's server has sent an answer.
    pub(super) fn answered(&self) {
        self.client.answered.store(true, Ordering::Relaxed);
    }

    /// Whether the client is established: it has sent a datagram after an answer.
    pub(super) fn talks(&self) -> bool {
        self.client.talks.load(Ordering::Relaxed)
    }

    /// The time without datagrams after which the client is closed; `idle` is this time for an
    /// established client.
    pub(super) fn patience(&self, idle: Duration) -> Duration {
        match self.talks() {
            true => idle,
            false => idle.min(NEW_IDLE),
        }
    }

    /// Waits until the client is evicted.
    pub(super) async fn taken(&self) {
        self.client.close_signal.closed().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.clients.table();
        table.held -= 1;
        if table.with_queue(self.service, |queue| queue.remove(&self.client)) {
            table.present -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(n: u8) -> ServiceId {
        ServiceId::Udp {
            address: ([192, 0, 2, n], 53).into(),
        }
    }

    fn client(source: u16, port: u16) -> SocketAddr {
        let [high, low] = source.to_be_bytes();
        ([10, 0, high, low], port).into()
    }

    const MOST: usize = 100;

    fn slot(clients: &Arc<Clients>, of: u8, who: SocketAddr, now: u64) -> Admission {
        clients.slot(service(of), who, (MOST, false), now)
    }

    fn taken(slot: &Slot) -> bool {
        slot.client.number.load(Ordering::Relaxed) == 0
    }

    fn some(admission: Admission) -> Slot {
        match admission {
            Admission::Free(slot) | Admission::Instead(slot) => slot,
            Admission::Full => panic!("the client was not admitted: the table is full"),
        }
    }

    #[test]
    fn flood_evicts_oldest_new_clients_but_no_established_client_and_slots_stay_limited() {
        let clients = Arc::new(Clients::default());
        let talking = some(slot(&clients, 1, client(1, 1), 0));
        talking.sent(1);
        assert!(
            !talking.talks(),
            "the client is established before a server has answered"
        );
        talking.answered();
        talking.sent(2);
        assert!(talking.talks());
        let idle = Duration::from_secs(300);
        assert_eq!(talking.patience(idle), idle);
        let mut flood = Vec::new();
        for n in 0..1000_u16 {
            let one = some(slot(&clients, 1, client(1000 + n, 1), 3));
            assert_eq!(one.patience(idle), NEW_IDLE);
            // An answer to a forged address changes nothing.
            one.answered();
            flood.push(one);
        }
        assert!(!taken(&talking));
        let left: Vec<bool> = flood.iter().map(taken).collect();
        assert!(
            left[..901].iter().all(|taken| *taken),
            "one of the oldest new clients was not evicted"
        );
        assert!(left[901..].iter().all(|taken| !taken));
        // Clients of a flood that cannot be evicted do not get more slots than their share.
        let more = (0..2000_u16).map(|n| slot(&clients, 1, client(3000 + n, 1), 4));
        let more: Vec<Admission> = more.collect();
        assert!(matches!(more.last(), Some(Admission::Full)));
        assert_eq!(clients.held(), MOST + LEAVING_MAX);
        drop((flood, more, talking));
        let table = clients.table();
        assert_eq!((table.held, table.present, table.services.len()), (0, 0, 0));
        assert!(table.by_length.is_empty());
    }

    #[test]
    fn client_queues_are_ordered_by_length() {
        let clients = Arc::new(Clients::default());
        let mut held = std::collections::VecDeque::new();
        for n in 0..2000_u16 {
            let of = u8::try_from(n % 7 * (n % 11) % 50).expect("the number fits into 8 bits");
            held.push_back(slot(&clients, of, client(n, 1), 0));
            if n % 3 == 0 {
                held.pop_front();
            }
            let table = clients.table();
            let mut lengths: Vec<_> = table.services.values().map(Queue::len).collect();
            lengths.sort_unstable();
            let reported: Vec<_> = table.by_length.keys().map(|(length, _)| *length).collect();
            assert_eq!(reported, lengths);
            assert!(table.by_length.iter().all(|((length, number), service)| {
                let queue = &table.services[service];
                (queue.len(), queue.number) == (*length, *number)
            }));
        }
    }

    #[test]
    fn flood_from_one_ipv6_prefix_evicts_at_most_one_client_of_other_sources() {
        let clients = Arc::new(Clients::default());
        let own = |n: u16| SocketAddr::new([0x2001, 0xdb8, 0, 1, 0, 0, 0, n].into(), 1);
        let others: Vec<Slot> = (0..90)
            .map(|n| some(slot(&clients, 1, client(1000 + n, 1), 0)))
            .collect();
        let flood: Vec<Admission> = (0..500).map(|n| slot(&clients, 1, own(n), 0)).collect();
        assert!(others.iter().filter(|one| taken(one)).count() <= 1);
        drop(flood);
    }

    #[test]
    fn flooded_service_shares_client_slots_equally_with_other_service() {
        let clients = Arc::new(Clients::default());
        let mut flood: Vec<Slot> = (0..100)
            .map(|n| some(slot(&clients, 1, client(1000 + n, 1), 0)))
            .collect();
        let others: Vec<Slot> = (0..50)
            .map(|n| some(slot(&clients, 2, client(n, 1), 0)))
            .collect();
        flood.retain(|one| !taken(one));
        assert_eq!(flood.len(), 50);
        flood.extend((0..500).map(|n| some(slot(&clients, 1, client(2000 + n, 1), 0))));
        assert!(
            !others.iter().any(taken),
            "a client of another service was evicted"
        );
    }

    #[test]
    fn source_with_many_clients_uses_all_slots_only_without_other_clients() {
        let clients = Arc::new(Clients::default());
        let others: Vec<Slot> = (0..90)
            .map(|n| some(slot(&clients, 1, client(1000 + n, 1), 0)))
            .collect();
        let mut own = Vec::new();
        let mut refused = 0;
        for port in 1..=2000 {
            match slot(&clients, 1, client(1, port), 0) {
                Admission::Full => refused += 1,
                Admission::Free(slot) | Admission::Instead(slot) => own.push(slot),
            }
            own.retain(|one| !taken(one));
        }
        assert!(own.len() <= 10, "{}", own.len());
        assert!(others.iter().filter(|one| taken(one)).count() <= 1);
        // Only the first clients of the queue are examined, and none of them has this source.
        assert!(refused > 0);
        // Without other services, the service may use all slots.
        let alone = Arc::new(Clients::default());
        let mut own: Vec<Slot> = (1..=1000)
            .map(|port| some(slot(&alone, 1, client(1, port), 0)))
            .collect();
        own.retain(|one| !taken(one));
        assert_eq!(own.len(), MOST);
    }

    #[test]
    fn new_client_evicts_established_client_only_if_idle() {
        let clients = Arc::new(Clients::default());
        let talking: Vec<Slot> = (0..100)
            .map(|n| some(slot(&clients, 1, client(n, 1), 0)))
            .collect();
        for one in &talking {
            one.answered();
            one.sent(1_000);
        }
        let newcomer = |now| slot(&clients, 1, client(1000, 1), now);
        assert!(matches!(newcomer(2_000), Admission::Full));
        talking[50..].iter().for_each(|one| one.sent(30_000));
        let late: Vec<Admission> = (0..2).map(|_| newcomer(31_000)).collect();
        assert!(matches!(late[0], Admission::Instead(_)));
        let gone: Vec<usize> = (0..100).filter(|n| taken(&talking[*n])).collect();
        assert_eq!(gone.len(), 1, "more or fewer than one client was evicted");
        assert!(gone[0] < 50);
    }

    #[test]
    fn new_client_in_full_proxy_evicts_client_of_same_service_or_is_refused() {
        let clients = Arc::new(Clients::default());
        let crowded = |n| clients.slot(service(1), client(n, 1), (MOST, true), 0);
        assert!(
            matches!(crowded(1), Admission::Full),
            "a client got a slot, although none could be evicted"
        );
        let first = some(slot(&clients, 1, client(2, 1), 0));
        assert!(matches!(crowded(3), Admission::Instead(_)));
        assert!(taken(&first));
    }
}
