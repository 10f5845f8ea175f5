//! Which entry a packet belongs to.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::buckets::{Buckets, Tags, lanes};
use super::memory::Layout;
use super::overflow::Side;
use super::slot::{
    IDENTITY, Line, PEER, is_client_v6, kind, narrow, narrow_hash, protocol_part, wide, wide_hash,
    wide_identity, wire,
};
use super::{ConnTable, is_same};
use crate::conn::Key;
use crate::{Forwarding, Protocol};

impl ConnTable {
    /// The connection of a packet from a client (`ip_vs_conn_in_get`); the newest one of equals.
    #[inline]
    pub(crate) fn find_in(&self, key: &Key) -> Option<u32> {
        let port = key.client.port();
        // Entries of port 0 (templates, unknown ports) are not for packets from port 0.
        let exact = if port == 0 {
            None
        } else {
            self.find_client(key, port, 0)
        };
        if exact.is_some() || self.portless == 0 {
            return exact;
        }
        self.find_overflow_in(key, 0, kind::NO_CPORT)
    }

    /// The template with this key (`ip_vs_ct_in_get`).
    pub(crate) fn find_template(&self, key: &Key) -> Option<u32> {
        self.find_client(key, 0, kind::TEMPLATE)
    }

    /// The newest entry of a client's address and `port` with just `kinds` of what tells kinds of
    /// entries apart.
    #[inline]
    fn find_client(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let (IpAddr::V4(client), IpAddr::V4(virt)) = (key.client.ip(), key.virt.ip()) else {
            return self.find_wide_in(key, port, kinds);
        };
        let identity = narrow(client.octets(), port) | protocol_part(key.protocol);
        let virt = narrow(virt.octets(), key.virt.port());
        let hash = narrow_hash(self.slots.memory.layout.keys, identity);
        let found = self.find_narrow(hash, |word, line| {
            let alike = word & (IDENTITY | kind::TOLD_APART) == identity | kinds
                && line[1].load(Relaxed) & PEER == virt;
            alike.then_some(kind::SHADOWED_IN)
        });
        match found {
            Found::Entry(handle) => return Some(handle),
            Found::Perhaps => {
                let found = self.find_overflow_in(key, port, kinds);
                if found.is_some() {
                    return found;
                }
            }
            Found::Nothing => {}
        }
        if self.mixed == 0 {
            return None;
        }
        self.find_wide_in(key, port, kinds)
    }

    fn find_wide_in(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let (client, virt) = (wide(key.client.ip()), wide(key.virt.ip()));
        let identity = wide_identity(client, port, key.protocol);
        let found = self.find_wide(client, identity, |word, line| {
            let load = |n: usize| line[n].load(Relaxed);
            let alike = word & (IDENTITY | kind::TOLD_APART) == identity | kinds
                && [load(1), load(2)] == client
                && [load(3), load(4)] == virt
                && load(7) & 0xffff == wire(key.virt.port())
                && is_client_v6(load(7)) == key.client.is_ipv6();
            alike.then_some(kind::SHADOWED_IN)
        });
        match found {
            Found::Entry(handle) => Some(handle),
            Found::Perhaps => self.find_overflow_in(key, port, kinds),
            Found::Nothing => None,
        }
    }

    #[cold]
    fn find_overflow_in(&self, key: &Key, port: u16, kinds: u64) -> Option<u32> {
        let client = SocketAddr::new(key.client.ip(), port);
        let hash = self.overflow.hash(key.protocol, client, key.virt);
        self.overflow.find(hash, |handle, side| {
            let entry = self.get(handle);
            side == Side::In
                && entry.word0() & kind::TOLD_APART == kinds
                && entry.protocol() == key.protocol
                && is_same(entry.client(), client)
                && is_same(entry.virt(), key.virt)
        })
    }

    /// The connection of a packet from `source` to `client` (`ip_vs_conn_out_get`): `source` is the
    /// real server where the connection is translated, the virtual address elsewhere.
    #[inline]
    pub(crate) fn find_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let (IpAddr::V4(to), IpAddr::V4(from)) = (client.ip(), source.ip()) else {
            return self.find_wide_out(protocol, source, client);
        };
        let identity = narrow(to.octets(), client.port()) | protocol_part(protocol);
        let peer = narrow(from.octets(), source.port());
        let (hash, _) = self.addressee_hash(identity);
        let found = self.find_narrow(hash, |word, line| {
            if word & (IDENTITY | kind::TEMPLATE) != identity {
                return None;
            }
            let (virt, server) = (line[1].load(Relaxed), line[2].load(Relaxed));
            answers(virt >> 48, virt & PEER == peer, server & PEER == peer)
        });
        match found {
            Found::Entry(handle) => return Some(handle),
            Found::Perhaps => {
                let found = self.find_overflow_out(protocol, source, client);
                if found.is_some() {
                    return found;
                }
            }
            Found::Nothing => {}
        }
        if self.mixed == 0 {
            return None;
        }
        self.find_wide_out(protocol, source, client)
    }

    fn find_wide_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let (to, from) = (wide(client.ip()), wide(source.ip()));
        let identity = wide_identity(to, client.port(), protocol);
        let port = wire(source.port());
        let found = self.find_wide(to, identity, |word, line| {
            let load = |n: usize| line[n].load(Relaxed);
            if word & (IDENTITY | kind::TEMPLATE) != identity || [load(1), load(2)] != to {
                return None;
            }
            let ends = load(7);
            if is_client_v6(ends) != client.is_ipv6() {
                return None;
            }
            let virt = ends & 0xffff == port && [load(3), load(4)] == from;
            let server = ends >> 16 & 0xffff == port && [load(5), load(6)] == from;
            answers(ends >> 48, virt, server)
        });
        match found {
            Found::Entry(handle) => Some(handle),
            Found::Perhaps => self.find_overflow_out(protocol, source, client),
            Found::Nothing => None,
        }
    }

    #[cold]
    fn find_overflow_out(
        &self,
        protocol: Protocol,
        source: SocketAddr,
        client: SocketAddr,
    ) -> Option<u32> {
        let hash = self.overflow.hash(protocol, client, source);
        self.overflow.find(hash, |handle, side| {
            let entry = self.get(handle);
            entry.word0() & kind::TEMPLATE == 0
                && (side == Side::Out || !entry.method().translates())
                && entry.protocol() == protocol
                && is_same(entry.client(), client)
                && is_same(side.peer(entry), source)
        })
    }

    /// The narrow slot of a client with this hash for which `is` says which shadow would cover it.
    #[inline]
    fn find_narrow(&self, hash: u64, is: impl Fn(u64, &Line) -> Option<u64>) -> Found {
        let buckets = Buckets::of(hash, self.slots.memory.layout.narrow_buckets);
        if self.at_home[0] {
            // What lies in a free slot is nobody's.
            let line = self.slots.narrow_line(buckets.home());
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line) {
                return Found::entry(buckets.home(), word & shadow != 0);
            }
        }
        let tags = self.slots.tags(true);
        let first = tags.word(buckets.first);
        let words = [
            (buckets.first, first),
            (buckets.second, tags.word(buckets.second)),
        ];
        for (bucket, word) in words {
            for lane in lanes(word, buckets.tag) {
                let slot = bucket * Layout::WAYS + lane;
                let line = self.slots.narrow_line(slot);
                let word = line[0].load(Relaxed);
                if let Some(shadow) = is(word, line) {
                    return Found::entry(slot, word & shadow != 0);
                }
            }
        }
        Found::none(first)
    }

    /// As [`find_narrow`](Self::find_narrow), of the wide slots.
    fn find_wide(
        &self,
        client: [u64; 2],
        identity: u64,
        is: impl Fn(u64, &Line) -> Option<u64>,
    ) -> Found {
        let layout = &self.slots.memory.layout;
        if layout.wide_buckets == 0 {
            return Found::Perhaps;
        }
        let hash = wide_hash(layout.keys, client, identity);
        let buckets = Buckets::of(hash, layout.wide_buckets);
        if self.at_home[1] {
            let line = self.slots.memory.wide.line(2 * buckets.home());
            let word = line[0].load(Relaxed);
            if let Some(shadow) = is(word, line) {
                let handle = self.slots.wide as usize + buckets.home();
                return Found::entry(handle, word & shadow != 0);
            }
        }
        let tags = self.slots.tags(false);
        for bucket in [buckets.first, buckets.second] {
            for lane in lanes(tags.word(bucket), buckets.tag) {
                let slot = bucket * Layout::WAYS + lane;
                let line = self.slots.memory.wide.line(2 * slot);
                let word = line[0].load(Relaxed);
                if let Some(shadow) = is(word, line) {
                    return Found::entry(self.slots.wide as usize + slot, word & shadow != 0);
                }
            }
        }
        Found::none(tags.word(buckets.first))
    }

    /// The hash of whom a packet is addressed to, and whether it was so to the packet before: those
    /// of a virtual address's clients all are.
    #[inline]
    fn addressee_hash(&self, identity: u64) -> (u64, bool) {
        if let Some(hash) = self.addressee.get(identity) {
            return (hash, true);
        }
        let hash = narrow_hash(self.slots.memory.layout.keys, identity);
        self.addressee.set(identity, hash);
        (hash, false)
    }

    /// Where a look-up of a packet between these two will look, whichever of them is the client.
    /// Reads what lies at home there, or the tags, so that [`warm`](Self::warm) does not wait
    /// for them.
    #[inline]
    pub(crate) fn ahead(&self, protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> Ahead {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (src.ip(), dst.ip()) else {
            return self.ahead_wide(protocol, src, dst);
        };
        let layout = &self.slots.memory.layout;
        let identity = |addr: Ipv4Addr, port| narrow(addr.octets(), port) | protocol_part(protocol);
        let client = identity(from, src.port());
        let other = identity(to, dst.port());
        let other = match self.addressee_hash(other) {
            // What it leads to was read for the packet before.
            (_, true) => None,
            (hash, false) => Some(self.aim(true, other, hash)),
        };
        let hash = narrow_hash(layout.keys, client);
        Ahead {
            narrow: true,
            sides: [Some(self.aim(true, client, hash)), other],
        }
    }

    fn ahead_wide(&self, protocol: Protocol, src: SocketAddr, dst: SocketAddr) -> Ahead {
        let layout = &self.slots.memory.layout;
        let aim = |addr: SocketAddr| {
            let client = wide(addr.ip());
            let identity = wide_identity(client, addr.port(), protocol);
            let hash = wide_hash(layout.keys, client, identity);
            self.aim(false, identity, hash)
        };
        let used = layout.wide_buckets != 0;
        Ahead {
            narrow: false,
            sides: [src, dst].map(|addr| used.then(|| aim(addr))),
        }
    }

    /// Reads what is first looked at for one end with this hash.
    #[inline]
    fn aim(&self, narrow: bool, identity: u64, hash: u64) -> Aim {
        let buckets = Buckets::of(hash, self.slots.buckets(narrow));
        let home = buckets.home();
        let read = match (self.at_home[usize::from(!narrow)], narrow) {
            (false, _) => self.slots.tags(narrow).both(&buckets),
            (true, true) => self.slots.narrow_line(home)[0].load(Relaxed),
            (true, false) => self.slots.memory.wide.line(2 * home)[0].load(Relaxed),
        };
        Aim {
            buckets,
            identity,
            read,
        }
    }

    /// Reads what a look-up there will read, and changes nothing: a batch of packets of which all
    /// are read first waits for memory once. The result says nothing; it is there to be used.
    #[inline]
    pub(crate) fn warm(&self, ahead: &Ahead) -> u64 {
        let at_home = self.at_home[usize::from(!ahead.narrow)];
        let mut read = 0;
        for aim in ahead.sides.iter().flatten() {
            read ^= aim.read;
            if at_home && aim.read & IDENTITY == aim.identity {
                if !ahead.narrow {
                    let line = 2 * aim.buckets.home() + 1;
                    read ^= self.slots.memory.wide.line(line)[0].load(Relaxed);
                }
                continue;
            }
            let tags = self.slots.tags(ahead.narrow);
            for bucket in [aim.buckets.first, aim.buckets.second] {
                let Some(lane) = lanes(tags.word(bucket), aim.buckets.tag).next() else {
                    continue;
                };
                let slot = bucket * Layout::WAYS + lane;
                if ahead.narrow {
                    read ^= self.slots.narrow_line(slot)[0].load(Relaxed);
                } else {
                    let line = |line| self.slots.memory.wide.line(line)[0].load(Relaxed);
                    read ^= line(2 * slot) ^ line(2 * slot + 1);
                }
            }
        }
        read
    }
}

/// Where a look-up will look.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    narrow: bool,
    /// Of both ends, if it is worth the while.
    sides: [Option<Aim>; 2],
}

/// Where one end's entry lies, if there is one.
#[derive(Clone, Copy, Debug)]
struct Aim {
    buckets: Buckets,
    identity: u64,
    /// The first word of what lies at home, or what the tags are together.
    read: u64,
}

/// One hash, and what it is of.
#[derive(Debug, Default)]
pub(super) struct Memo {
    of: AtomicU64,
    hash: AtomicU64,
    /// Both together: whoever reads one of before and the other of after does not take them for a
    /// pair.
    check: AtomicU64,
}

impl Memo {
    #[inline]
    fn get(&self, of: u64) -> Option<u64> {
        let hash = self.hash.load(Relaxed);
        let is_it = self.of.load(Relaxed) == of && self.check.load(Relaxed) == of ^ hash;
        // No identity is 0.
        (is_it && of != 0).then_some(hash)
    }

    #[inline]
    fn set(&self, of: u64, hash: u64) {
        self.of.store(of, Relaxed);
        self.hash.store(hash, Relaxed);
        self.check.store(of ^ hash, Relaxed);
    }
}

/// Where a look-up ends.
enum Found {
    /// In a slot in place.
    Entry(u32),
    /// Nothing there is the newest: the overflow knows, if anybody does.
    Perhaps,
    Nothing,
}

impl Found {
    #[inline]
    fn entry(slot: usize, shadowed: bool) -> Self {
        match u32::try_from(slot) {
            Ok(handle) if !shadowed => Self::Entry(handle),
            _ => Self::Perhaps,
        }
    }

    #[inline]
    const fn none(first: u64) -> Self {
        if Tags::is_overflowed(first) {
            Self::Perhaps
        } else {
            Self::Nothing
        }
    }
}

/// Whether packets to the client from that virtual address, or that server, belong to an entry of
/// this way; if so, which shadow covers it from them.
#[inline]
fn answers(way: u64, is_virt: bool, is_server: bool) -> Option<u64> {
    match Forwarding::from_bits((way & 7) as u32) {
        Forwarding::Nat => is_server.then_some(kind::SHADOWED_OUT),
        Forwarding::FullNat => None,
        _ => is_virt.then_some(kind::SHADOWED_IN),
    }
}
