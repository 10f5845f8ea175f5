//! What directors tell each other of their services' tables, so that it shows whether all of them
//! choose alike: a digest of each service's settings and servers, and, of those that differ, the
//! table itself.
//!
//! ```text
//! key      kind 1 | protocol 1 | port 2 | address or mark 16
//! tables   1: more follow, 0: that is all | digests: key 20 | choice 8 | ways 8
//! asked    keys
//! table    key 20 | flags 4 | timeout 4 | netmask 4 | slots 4 | servers 4
//!          | length 1 scheduler | length 1 engine | servers, those at first:
//!          family 1 | method 1 | port 2 | address 16 | weight 4 | last weight 4 | upper 4 | lower 4 | tunnel 8
//! ```
//!
//! Digests are of SipHash-1-3 with keys that all directors have: whoever makes a digest is trusted,
//! and has nothing to gain from two tables with one.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::hash::Hasher;
use core::net::{IpAddr, SocketAddr};

use siphasher::sip::SipHasher13;

use super::bulk::Malformed;
use crate::conn::sip13;
use crate::{Family, Forwarding, Protocol, ServiceConfig, ServiceKey, Tunnel};

/// Services whose tables are compared with one director, at most: the first by their keys.
pub const TABLES_MAX: usize = 1 << 16;
/// Tables that are asked for at a time, at most.
pub const ASKED_MAX: usize = 16;
/// Servers of a table that are told, at most.
pub const SERVERS_TOLD_MAX: usize = 1024;
/// Bytes of a scheduler's or a persistence engine's name that are told.
const NAME_MAX: usize = 64;
/// Differences between two tables that are named, at most.
const NAMED_MAX: usize = 8;

const KEY_LEN: usize = 20;
const DIGEST_LEN: usize = KEY_LEN + 16;
const SERVER_LEN: usize = 44;

/// Keys of the digests.
const KEYS: [u64; 2] = [0x6c76_7320_7461_626c, 0x6573_206f_6620_616c];

/// What identifies a service, as it is told. The order is that of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableKey([u8; KEY_LEN]);

impl fmt::Debug for TableKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.service())
    }
}

impl From<&ServiceKey> for TableKey {
    fn from(key: &ServiceKey) -> Self {
        let mut bytes = [0; KEY_LEN];
        match *key {
            ServiceKey::Address { protocol, addr } => {
                bytes[1] = protocol.0;
                bytes[2..4].copy_from_slice(&addr.port().to_be_bytes());
                match addr.ip() {
                    IpAddr::V4(ip) => bytes[4..8].copy_from_slice(&ip.octets()),
                    IpAddr::V6(ip) => {
                        bytes[0] = 1;
                        bytes[4..].copy_from_slice(&ip.octets());
                    }
                }
            }
            ServiceKey::Mark { family, mark } => {
                bytes[0] = match family {
                    Family::V4 => 2,
                    Family::V6 => 3,
                };
                bytes[4..8].copy_from_slice(&mark.to_be_bytes());
            }
        }
        Self(bytes)
    }
}

impl TableKey {
    fn parse(bytes: [u8; KEY_LEN]) -> Result<Self, Malformed> {
        let [kind, protocol, ..] = bytes;
        let known = [Protocol::TCP, Protocol::UDP, Protocol::SCTP].contains(&Protocol(protocol));
        let this = Self(bytes);
        // What stands for nothing is zero.
        match kind {
            0 | 1 if !known => Err(Malformed),
            0..=3 if Self::from(&this.service()) == this => Ok(this),
            _ => Err(Malformed),
        }
    }

    /// The service.
    pub fn service(&self) -> ServiceKey {
        let [kind, protocol, high, low, address @ ..] = self.0;
        let [a, b, c, d, ..] = address;
        let port = u16::from_be_bytes([high, low]);
        let at = |ip: IpAddr| ServiceKey::Address {
            protocol: Protocol(protocol),
            addr: SocketAddr::new(ip, port),
        };
        let mark = |family| ServiceKey::Mark {
            family,
            mark: u32::from_be_bytes([a, b, c, d]),
        };
        match kind {
            0 => at([a, b, c, d].into()),
            1 => at(address.into()),
            2 => mark(Family::V4),
            _ => mark(Family::V6),
        }
    }
}

/// The digest of a service's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableDigest {
    /// Of everything that the choice of a server depends on; 0: there is no such service.
    pub choice: u64,
    /// Of the ways to the servers; 0 if one of them is the director itself, where no other
    /// director has the same.
    pub ways: u64,
}

impl TableDigest {
    /// There is no such service.
    pub const GONE: Self = Self { choice: 0, ways: 0 };

    /// Whether two directors choose alike, and reach their servers alike.
    pub const fn is_like(&self, other: &Self) -> bool {
        let unknown = self.ways == 0 || other.ways == 0;
        self.choice == other.choice && (unknown || self.ways == other.ways)
    }
}

/// Digests, by their services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables(BTreeMap<TableKey, TableDigest>);

impl Tables {
    /// Those of the first [`TABLES_MAX`] services, and how many there are beyond.
    pub fn new(all: impl IntoIterator<Item = (TableKey, TableDigest)>) -> (Self, usize) {
        let mut all: BTreeMap<_, _> = all.into_iter().collect();
        let beyond = match all.keys().nth(TABLES_MAX).copied() {
            Some(first) => all.split_off(&first).len(),
            None => 0,
        };
        (Self(all), beyond)
    }

    /// Services.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// There is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The digest of a service, if there is one.
    pub fn get(&self, key: &TableKey) -> Option<TableDigest> {
        self.0.get(key).copied()
    }

    /// What differs between two: the key, what is here and what is there.
    fn differing<'a>(
        &'a self,
        other: &'a Self,
        alike: impl Fn(&TableDigest, &TableDigest) -> bool + 'a,
    ) -> impl Iterator<Item = (TableKey, TableDigest, TableDigest)> + 'a {
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        core::iter::from_fn(move || {
            loop {
                let first = match (ours.peek(), theirs.peek()) {
                    (None, None) => return None,
                    (Some((key, _)), None) | (None, Some((key, _))) => **key,
                    (Some((here, _)), Some((there, _))) => **here.min(there),
                };
                let take = |from: &mut core::iter::Peekable<
                    alloc::collections::btree_map::Iter<'a, TableKey, TableDigest>,
                >| {
                    let found = from.next_if(|(key, _)| **key == first);
                    found.map_or(TableDigest::GONE, |(_, digest)| *digest)
                };
                let (here, there) = (take(&mut ours), take(&mut theirs));
                let both = here.choice != 0 && there.choice != 0;
                if !(both && alike(&here, &there)) {
                    return Some((first, here, there));
                }
            }
        })
    }

    /// In which services another director's tables differ from these.
    pub fn compare<'a>(
        &'a self,
        theirs: &'a Self,
    ) -> impl Iterator<Item = (TableKey, TableDigest, TableDigest)> + 'a {
        self.differing(theirs, TableDigest::is_like)
    }

    /// What whoever knows `before` has to be told: payloads of at most so many bytes.
    pub fn told_since(&self, before: &Self, most: usize) -> Vec<Vec<u8>> {
        let changed: Vec<_> = self.differing(before, |a, b| a == b).collect();
        let portions = changed.chunks(((most - 1) / DIGEST_LEN).max(1));
        let last = portions.len().saturating_sub(1);
        let portion = |(n, portion): (usize, &[(TableKey, TableDigest, TableDigest)])| {
            let mut bytes = alloc::vec![u8::from(n < last)];
            for (key, here, _) in portion {
                bytes.extend(key.0);
                bytes.extend(here.choice.to_be_bytes());
                bytes.extend(here.ways.to_be_bytes());
            }
            bytes
        };
        portions.enumerate().map(portion).collect()
    }

    /// Takes what another director tells of its own; `true` if that is all for now.
    ///
    /// # Errors
    /// If it is not such, or more than [`TABLES_MAX`].
    pub fn hear(&mut self, told: &[u8]) -> Result<bool, Malformed> {
        let (&more, digests) = told.split_first().ok_or(Malformed)?;
        let (digests, []) = digests.as_chunks::<DIGEST_LEN>() else {
            return Err(Malformed);
        };
        for digest in digests {
            let (key, words) = digest.split_first_chunk().ok_or(Malformed)?;
            let [choice, ways] = *words.as_chunks().0 else {
                return Err(Malformed);
            };
            let [choice, ways] = [choice, ways].map(u64::from_be_bytes);
            let key = TableKey::parse(*key)?;
            if choice == 0 {
                self.0.remove(&key);
            } else {
                self.0.insert(key, TableDigest { choice, ways });
            }
        }
        // What comes and what goes is in the order of the keys.
        let most = match more {
            0 => TABLES_MAX,
            1 => 2 * TABLES_MAX,
            _ => return Err(Malformed),
        };
        match self.0.len() <= most {
            true => Ok(more == 0),
            false => Err(Malformed),
        }
    }
}

/// The payload that asks for these tables.
pub fn ask(keys: &[TableKey]) -> Vec<u8> {
    let keys = keys.iter().take(ASKED_MAX);
    keys.flat_map(|key| key.0).collect()
}

/// The tables that somebody asks for.
///
/// # Errors
/// If that is none, more than [`ASKED_MAX`], or no key.
pub fn asked(bytes: &[u8]) -> Result<Vec<TableKey>, Malformed> {
    match bytes.as_chunks() {
        (keys, []) if (1..=ASKED_MAX).contains(&keys.len()) => {
            keys.iter().map(|key| TableKey::parse(*key)).collect()
        }
        _ => Err(Malformed),
    }
}

/// A server, as far as directors have it in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableServer {
    /// Its address and port.
    pub address: SocketAddr,
    /// Its configured weight.
    pub weight: i32,
    /// The weight that it had before it had none, where the scheduler goes by that; else 0.
    pub last_weight: i32,
    /// Its upper threshold.
    pub upper: u32,
    /// Its lower threshold.
    pub lower: u32,
    /// The way to it.
    pub method: Forwarding,
    /// The tunnel, packed, if that is the way.
    pub tunnel: u64,
}

impl TableServer {
    fn place(&self) -> [u64; 3] {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let [a, b, c, d, e, f, g, h] = ip.segments().map(u64::from);
        let family = u64::from(self.address.is_ipv6()) << 16;
        [
            a << 48 | b << 32 | c << 16 | d,
            e << 48 | f << 32 | g << 16 | h,
            family | u64::from(self.address.port()),
        ]
    }

    /// Its part in the choice; `at` is its place, where that matters.
    pub(crate) fn choice(&self, at: u64) -> u64 {
        let [a, b, c] = self.place();
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let weights = pair(
            self.weight.cast_unsigned(),
            self.last_weight.cast_unsigned(),
        );
        sip13(KEYS, [a, b, c, weights, pair(self.upper, self.lower), at])
    }

    /// Its part in the ways; `None` if it is the director itself.
    pub(crate) fn way(&self) -> Option<u64> {
        let [a, b, c] = self.place();
        let method = self.method as u64;
        (self.method != Forwarding::Local).then(|| sip13(KEYS, [a, b, c, method, self.tunnel]))
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push(u8::from(self.address.is_ipv6()));
        out.push(self.method as u8);
        out.extend(self.address.port().to_be_bytes());
        let mut address = [0; 16];
        match self.address.ip() {
            IpAddr::V4(ip) => address[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => address = ip.octets(),
        }
        out.extend(address);
        out.extend(self.weight.to_be_bytes());
        out.extend(self.last_weight.to_be_bytes());
        out.extend(self.upper.to_be_bytes());
        out.extend(self.lower.to_be_bytes());
        out.extend(self.tunnel.to_be_bytes());
    }

    fn parse(bytes: &[u8; SERVER_LEN]) -> Result<Self, Malformed> {
        let mut from = Reader(bytes);
        let ([family, method], port) = (from.take()?, from.take()?);
        let address: [u8; 16] = from.take()?;
        let [a, b, c, d, rest @ ..] = address;
        let ip = match family {
            0 if rest == [0; 12] => IpAddr::from([a, b, c, d]),
            1 => address.into(),
            _ => return Err(Malformed),
        };
        let method = Forwarding::from_bits(method.into());
        let server = Self {
            address: SocketAddr::new(ip, u16::from_be_bytes(port)),
            weight: from.number()?.cast_signed(),
            last_weight: from.number()?.cast_signed(),
            upper: from.number()?,
            lower: from.number()?,
            method,
            tunnel: u64::from_be_bytes(from.take()?),
        };
        match bytes[1] == method as u8 {
            true => Ok(server),
            false => Err(Malformed),
        }
    }

    fn way_text(&self) -> String {
        let tunnel = Tunnel::unpack(self.tunnel);
        match self.method {
            Forwarding::Nat => "NAT".to_string(),
            Forwarding::Local => "local".to_string(),
            Forwarding::Tunnel => match tunnel.port() {
                0 => format!(
                    "tunnel {} {}",
                    tunnel.about().name,
                    tunnel.checksum().name()
                ),
                port => format!(
                    "tunnel {} {port} {}",
                    tunnel.about().name,
                    tunnel.checksum().name()
                ),
            },
            Forwarding::Route => "direct routing".to_string(),
            Forwarding::Bypass => "bypass".to_string(),
            Forwarding::FullNat => "full NAT".to_string(),
        }
    }
}

/// A service's table: what its digest is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The service.
    pub key: TableKey,
    /// Its flags.
    pub flags: u32,
    /// Its persistence timeout.
    pub timeout: u32,
    /// Its persistence netmask.
    pub netmask: u32,
    /// Slots of the scheduler's hash table; 0 without one.
    pub slots: u32,
    /// How many servers there are.
    pub count: u32,
    /// Its scheduler.
    pub scheduler: String,
    /// Its persistence engine; empty without one.
    pub engine: String,
    /// Its servers, or the first of them.
    pub servers: Vec<TableServer>,
}

impl Table {
    pub(crate) fn new(key: &ServiceKey, config: &ServiceConfig, slots: u32, count: usize) -> Self {
        Self {
            key: key.into(),
            flags: config.flags.0 & crate::ServiceFlags::ALL,
            timeout: config.timeout,
            netmask: config.netmask,
            slots,
            count: u32::try_from(count).unwrap_or(u32::MAX),
            scheduler: config.scheduler.clone(),
            engine: config.engine.clone().unwrap_or_default(),
            servers: Vec::new(),
        }
    }

    /// The part of the settings in the choice.
    pub(crate) fn choice(&self) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(KEYS[0], KEYS[1]);
        hasher.write(&self.key.0);
        for number in [
            self.flags,
            self.timeout,
            self.netmask,
            self.slots,
            self.count,
        ] {
            hasher.write(&number.to_be_bytes());
        }
        for name in [&self.scheduler, &self.engine] {
            hasher.write(name.as_bytes());
            hasher.write(&[0]);
        }
        hasher.finish()
    }

    /// As it is told.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = self.key.0.to_vec();
        for number in [
            self.flags,
            self.timeout,
            self.netmask,
            self.slots,
            self.count,
        ] {
            out.extend(number.to_be_bytes());
        }
        for name in [&self.scheduler, &self.engine] {
            let name = name.bytes().filter(u8::is_ascii_graphic).take(NAME_MAX);
            let name: Vec<u8> = name.collect();
            out.push(u8::try_from(name.len()).unwrap_or(0));
            out.extend(name);
        }
        for server in self.servers.iter().take(SERVERS_TOLD_MAX) {
            server.write(&mut out);
        }
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) has made.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut from = Reader(bytes);
        let mut table = Self {
            key: TableKey::parse(from.take()?)?,
            flags: from.number()?,
            timeout: from.number()?,
            netmask: from.number()?,
            slots: from.number()?,
            count: from.number()?,
            scheduler: from.name()?,
            engine: from.name()?,
            servers: Vec::new(),
        };
        let (servers, []) = from.0.as_chunks() else {
            return Err(Malformed);
        };
        if servers.len() > SERVERS_TOLD_MAX || servers.len() as u64 > u64::from(table.count) {
            return Err(Malformed);
        }
        let servers: Result<_, _> = servers.iter().map(TableServer::parse).collect();
        table.servers = servers?;
        Ok(table)
    }

    /// In what another director's table of the service differs from this one, in words.
    pub fn differences(&self, theirs: &Self, ordered: bool) -> Vec<String> {
        let mut all = Named::default();
        let flags = |table: &Self| format!("{:#x}", table.flags);
        all.compare("scheduler", &self.scheduler, &theirs.scheduler);
        all.compare("flags", &flags(self), &flags(theirs));
        all.compare("persistence timeout", &self.timeout, &theirs.timeout);
        let mask = |table: &Self| format!("{:#x}", table.netmask);
        all.compare("persistence netmask", &mask(self), &mask(theirs));
        let engine = |table: &Self| match table.engine.is_empty() {
            true => "none".to_string(),
            false => table.engine.clone(),
        };
        all.compare("persistence engine", &engine(self), &engine(theirs));
        all.compare("slots of the hash table", &self.slots, &theirs.slots);
        all.compare("servers", &self.count, &theirs.count);
        // Of those that were not told nothing is known.
        let whole = |table: &Self| table.servers.len() as u64 == u64::from(table.count);
        let (here_whole, there_whole) = (whole(self), whole(theirs));
        let by_address = |table: &Self| -> BTreeMap<SocketAddr, TableServer> {
            let servers = table.servers.iter();
            servers.map(|server| (server.address, *server)).collect()
        };
        let (here, mut there) = (by_address(self), by_address(theirs));
        let mut same = here_whole && there_whole;
        for (address, server) in &here {
            match there.remove(address) {
                Some(other) => all.server(server, &other),
                None if there_whole => {
                    same = false;
                    all.add(|| format!("{address}: only here"));
                }
                None => same = false,
            }
        }
        for address in there.keys() {
            same = false;
            if here_whole {
                all.add(|| format!("{address}: only there"));
            }
        }
        if ordered && same {
            let pairs = self.servers.iter().zip(&theirs.servers);
            let mut places = (1..).zip(pairs);
            if let Some((place, (here, there))) =
                places.find(|(_, (here, there))| here.address != there.address)
            {
                let (here, there) = (here.address, there.address);
                all.add(|| {
                    format!("order of the servers: number {place} is {here} here, {there} there")
                });
            }
        }
        all.done(here_whole && there_whole)
    }
}

/// Differences that have been found.
#[derive(Default)]
struct Named {
    lines: Vec<String>,
    more: usize,
}

impl Named {
    fn add(&mut self, line: impl FnOnce() -> String) {
        match self.lines.len() < NAMED_MAX {
            true => self.lines.push(line()),
            false => self.more += 1,
        }
    }

    fn compare<T: PartialEq + fmt::Display>(&mut self, what: &str, here: &T, there: &T) {
        if here != there {
            self.add(|| format!("{what}: {here} here, {there} there"));
        }
    }

    fn server(&mut self, here: &TableServer, there: &TableServer) {
        let address = here.address;
        self.compare(&format!("{address}: weight"), &here.weight, &there.weight);
        if here.weight == there.weight {
            let what = format!("{address}: weight before it was 0");
            self.compare(&what, &here.last_weight, &there.last_weight);
        }
        let what = format!("{address}: upper threshold");
        self.compare(&what, &here.upper, &there.upper);
        let what = format!("{address}: lower threshold");
        self.compare(&what, &here.lower, &there.lower);
        let local = [here.method, there.method].contains(&Forwarding::Local);
        if !local && here.way() != there.way() {
            let what = format!("{address}: forwarding");
            self.compare(&what, &here.way_text(), &there.way_text());
        }
    }

    fn done(mut self, whole: bool) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("and {} more", self.more));
        }
        if self.lines.is_empty() && !whole {
            let text = format!("among the servers beyond the first {SERVERS_TOLD_MAX}");
            self.lines.push(text);
        }
        self.lines
    }
}

/// Bytes that are read from their beginning.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn number(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_be_bytes)
    }

    /// A name, of what names are made of: it is shown.
    fn name(&mut self) -> Result<String, Malformed> {
        let [len] = self.take()?;
        let (name, rest) = self.0.split_at_checked(len.into()).ok_or(Malformed)?;
        self.0 = rest;
        let fine = name.len() <= NAME_MAX && name.iter().all(u8::is_ascii_graphic);
        let name = core::str::from_utf8(name).ok().filter(|_| fine);
        name.map(ToString::to_string).ok_or(Malformed)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn key(n: u16) -> TableKey {
        let address = SocketAddr::from(([198, 51, 100, 1], n));
        TableKey::from(&ServiceKey::tcp(address))
    }

    fn digest(n: u64) -> TableDigest {
        TableDigest { choice: n, ways: 1 }
    }

    fn server(n: u8, weight: i32) -> TableServer {
        TableServer {
            address: SocketAddr::from(([10, 0, 0, n], 80)),
            weight,
            last_weight: 0,
            upper: 0,
            lower: 0,
            method: Forwarding::Nat,
            tunnel: 0,
        }
    }

    fn table(servers: Vec<TableServer>) -> Table {
        let key = key(80).service();
        let mut config = ServiceConfig::new(key.family(), "mh");
        config.engine = Some("sip".into());
        let mut table = Table::new(&key, &config, 4093, servers.len());
        table.servers = servers;
        table
    }

    #[test]
    fn keys_are_read_as_they_were_written_and_nothing_else_is_one() {
        let keys = [
            ServiceKey::tcp("198.51.100.1:80".parse().unwrap()),
            ServiceKey::udp("[2001:db8::1]:53".parse().unwrap()),
            ServiceKey::Mark {
                family: Family::V6,
                mark: 7,
            },
        ];
        for key in keys {
            let told = TableKey::from(&key);
            assert_eq!(told.service(), key);
            assert_eq!(TableKey::parse(told.0), Ok(told));
            // A kind, a protocol and a byte of the address that no service has.
            for (at, byte) in [(0, 4), (1, 1), (19, 1)] {
                let mut other = told.0;
                other[at] ^= byte;
                let fine = at == 19 && key.family() == Family::V6 && key.port() != 0;
                assert_eq!(TableKey::parse(other).is_ok(), fine, "{key} {at}");
            }
        }
    }

    #[test]
    fn what_is_told_is_what_has_changed() {
        let mut before = Tables::default();
        let mut heard = Tables::default();
        for round in 0..50_u16 {
            let all = (0..100).filter(|n| n % 7 != round % 7);
            let all = all.map(|n| (key(n), digest(u64::from(n / (1 + round)) + 1)));
            let (now, beyond) = Tables::new(all);
            assert_eq!(beyond, 0);
            // Room for two of them in each.
            let told = now.told_since(&before, 80);
            for (n, portion) in told.iter().enumerate() {
                assert!(portion.len() <= 80);
                assert_eq!(heard.hear(portion), Ok(n + 1 == told.len()));
            }
            assert_eq!(heard, now);
            assert_eq!(now.compare(&heard).count(), 0);
            before = now;
        }
        assert!(before.told_since(&before, 80).is_empty());
        let differ: Vec<_> = Tables::default().compare(&heard).collect();
        assert_eq!(differ.len(), heard.len());
        assert!(
            differ
                .iter()
                .all(|(.., here, _)| *here == TableDigest::GONE)
        );
    }

    #[test]
    fn no_more_tables_are_taken_than_are_compared() {
        let all = |count: u32| {
            (0..count).map(|mark| {
                let family = Family::V4;
                let key = TableKey::from(&ServiceKey::Mark { family, mark });
                (key, digest(1))
            })
        };
        let count = u32::try_from(TABLES_MAX).unwrap();
        let (most, beyond) = Tables::new(all(count + 2));
        assert_eq!((most.len(), beyond), (TABLES_MAX, 2));
        let mut heard = Tables::default();
        for portion in most.told_since(&Tables::default(), 60_000) {
            heard.hear(&portion).expect("as many as may be");
        }
        let one_more = Tables(all(count + 1).collect());
        let mut told = one_more.told_since(&most, 60_000);
        assert_eq!(heard.hear(&told.remove(0)), Err(Malformed));
        // Nor while more follow, without end.
        let mut heard = Tables::default();
        let twice = Tables(all(2 * count + 1).collect());
        let told = twice.told_since(&Tables::default(), 60_000);
        let refused = told.iter().position(|portion| heard.hear(portion).is_err());
        assert_eq!(refused, Some(told.len() - 1));
    }

    #[test]
    fn a_director_among_the_servers_is_no_difference() {
        let here = TableDigest { choice: 5, ways: 6 };
        let local = TableDigest { ways: 0, ..here };
        assert!(here.is_like(&local) && local.is_like(&here));
        assert!(!here.is_like(&TableDigest { ways: 7, ..here }));
        assert!(!local.is_like(&TableDigest { choice: 7, ..here }));
        let mut other = server(1, 1);
        other.method = Forwarding::Local;
        let differences = table(vec![server(1, 1)]).differences(&table(vec![other]), true);
        assert!(differences.is_empty(), "{differences:?}");
    }

    #[test]
    fn what_differs_is_named() {
        let ours = table(vec![server(1, 1), server(2, 1), server(3, 1)]);
        let of = |change: &dyn Fn(&mut Table)| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            theirs.count = u32::try_from(theirs.servers.len()).unwrap();
            ours.differences(&theirs, true).join("; ")
        };
        assert_eq!(of(&|_| {}), "");
        type Change<'a> = &'a dyn Fn(&mut Table);
        let cases: [(Change<'_>, &str); 10] = [
            (
                &|t| t.scheduler = "wrr".into(),
                "scheduler: mh here, wrr there",
            ),
            (&|t| t.flags = 1, "flags: 0x0 here, 0x1 there"),
            (
                &|t| t.engine.clear(),
                "persistence engine: sip here, none there",
            ),
            (
                &|t| t.slots = 251,
                "slots of the hash table: 4093 here, 251 there",
            ),
            (
                &|t| t.servers[1].weight = 4,
                "10.0.0.2:80: weight: 1 here, 4 there",
            ),
            (
                &|t| t.servers[1].last_weight = 4,
                "10.0.0.2:80: weight before it was 0: 0 here, 4 there",
            ),
            (
                &|t| t.servers[1].method = Forwarding::Route,
                "10.0.0.2:80: forwarding: NAT here, direct routing there",
            ),
            (
                &|t| t.servers.truncate(2),
                "servers: 3 here, 2 there; 10.0.0.3:80: only here",
            ),
            (
                &|t| t.servers.push(server(4, 1)),
                "servers: 3 here, 4 there; 10.0.0.4:80: only there",
            ),
            (
                &|t| t.servers.swap(0, 2),
                "order of the servers: number 1 is 10.0.0.1:80 here, 10.0.0.3:80 there",
            ),
        ];
        for (change, said) in cases {
            assert_eq!(of(change), said);
        }
        let all = of(&|t| t.servers = (10..30).map(|n| server(n, 1)).collect());
        assert!(all.ends_with("only here; 10.0.0.10:80: only there; 10.0.0.11:80: only there; 10.0.0.12:80: only there; 10.0.0.13:80: only there; and 16 more"), "{all}");
    }

    #[test]
    fn a_long_table_is_told_in_part() {
        let servers: Vec<_> = (0..=SERVERS_TOLD_MAX)
            .map(|n| {
                let port = u16::try_from(n).unwrap();
                let address = SocketAddr::from(([10, 0, 0, 1], port));
                TableServer {
                    address,
                    ..server(1, 1)
                }
            })
            .collect();
        let ours = table(servers.clone());
        let bytes = ours.to_bytes();
        assert!(bytes.len() <= 64 << 10, "it fits into a frame");
        let theirs = Table::parse(&bytes).unwrap();
        assert_eq!(theirs.servers.len(), SERVERS_TOLD_MAX);
        assert_eq!(theirs.count, ours.count);
        assert_eq!(
            ours.differences(&theirs, true),
            ["among the servers beyond the first 1024"]
        );
    }

    #[test]
    fn what_is_asked_for_is_a_few_keys() {
        let keys: Vec<_> = (0..20).map(key).collect();
        assert_eq!(asked(&ask(&keys)).as_deref(), Ok(&keys[..ASKED_MAX]));
        assert_eq!(asked(&[]), Err(Malformed));
        assert_eq!(asked(&ask(&keys)[1..]), Err(Malformed));
        let too_many: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
        assert_eq!(asked(&too_many), Err(Malformed));
    }

    proptest::proptest! {
        #[test]
        fn nothing_received_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            let _ = Tables::default().hear(&bytes);
            let _ = asked(&bytes);
            if let Ok(table) = Table::parse(&bytes) {
                proptest::prop_assert_eq!(table.to_bytes(), bytes);
            }
        }
    }
}
