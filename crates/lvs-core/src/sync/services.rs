//! Digests of services and of their servers, which peers compare. If they are equal, a scheduler
//! whose choice depends only on the client chooses the same server at both directors.
//!
//! ```text
//! services  each: key 20 | choice 8 | ways 8
//! key       kind 1 | protocol 1 | port 2 | address or mark 16
//! ```
//!
//! Digests use SipHash-1-3 with the same known keys at all directors. A secret key is not needed:
//! only peers send digests, and a peer gains nothing from two services with the same digest.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hash::Hasher;
use core::net::{IpAddr, SocketAddr};

use siphasher::sip::SipHasher13;

use super::bulk::Malformed;
use crate::conn::sip13;
use crate::service::ServiceKeyOrd;
use crate::{Family, Forwarding, Protocol, ServerConfig, ServiceConfig, ServiceKey};

/// Maximum number of services whose digests are sent: the services with the lowest keys.
pub const SERVICES_MAX: usize = 1 << 16;
/// Length in bytes of a service's key and digest.
pub const SERVICE_LEN: usize = KEY_LEN + 16;
const KEY_LEN: usize = 20;

/// Keys of the hash function of the digests, the same at all directors.
const KEYS: [u64; 2] = [0x6c76_7320_7461_626c, 0x6573_206f_6620_616c];

fn key_bytes(key: &ServiceKey) -> [u8; KEY_LEN] {
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
    bytes
}

fn parse_key(bytes: &[u8; KEY_LEN]) -> Result<ServiceKey, Malformed> {
    let [kind, protocol, high, low, address @ ..] = *bytes;
    let [a, b, c, d, ..] = address;
    let protocol = Protocol(protocol);
    let at = |ip: IpAddr| ServiceKey::Address {
        protocol,
        addr: SocketAddr::new(ip, u16::from_be_bytes([high, low])),
    };
    let mark = |family| ServiceKey::Mark {
        family,
        mark: u32::from_be_bytes([a, b, c, d]),
    };
    let known = [Protocol::TCP, Protocol::UDP, Protocol::SCTP].contains(&protocol);
    let key = match kind {
        0 if known => at([a, b, c, d].into()),
        1 if known => at(address.into()),
        2 => mark(Family::V4),
        3 => mark(Family::V6),
        _ => return Err(Malformed),
    };
    // Bytes that this kind of key does not use are zero.
    match key_bytes(&key) == *bytes {
        true => Ok(key),
        false => Err(Malformed),
    }
}

/// The digest of a service and of its servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceDigest {
    /// Digest of the settings on which the choice of a server depends.
    pub choice: u64,
    /// Digest of the paths to the servers; 0 if a server is the director itself, because no other
    /// director has that path.
    pub ways: u64,
}

impl ServiceDigest {
    /// Whether two things are equal: the settings on which the choice of a server depends, and the
    /// paths to the servers. If `ways` is 0 at one of the directors, the paths count as equal.
    pub const fn is_like(&self, other: &Self) -> bool {
        let unknown = self.ways == 0 || other.ways == 0;
        self.choice == other.choice && (unknown || self.ways == other.ways)
    }
}

/// The digests of a director's services, by key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceDigests(BTreeMap<ServiceKeyOrd, ServiceDigest>);

/// A service whose digests differ between two directors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Differs {
    /// The service whose digests differ.
    pub service: ServiceKey,
    /// Whether this director has the service.
    pub here: bool,
    /// Whether the peer has the service.
    pub there: bool,
}

impl ServiceDigests {
    /// Digests of the first [`SERVICES_MAX`] services, and the number of the remaining services.
    pub fn new(all: impl IntoIterator<Item = (ServiceKey, ServiceDigest)>) -> (Self, usize) {
        let all = all.into_iter();
        let mut all: BTreeMap<_, _> = all
            .map(|(key, digest)| (ServiceKeyOrd::from(&key), digest))
            .collect();
        let beyond = match all.keys().nth(SERVICES_MAX).copied() {
            Some(first) => all.split_off(&first).len(),
            None => 0,
        };
        (Self(all), beyond)
    }

    /// Number of services with a digest.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the digests contain no services.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends the encoded digests.
    pub fn write(&self, out: &mut Vec<u8>) {
        for (key, digest) in &self.0 {
            out.extend(key_bytes(&(*key).into()));
            out.extend(digest.choice.to_be_bytes());
            out.extend(digest.ways.to_be_bytes());
        }
    }

    /// Parses the output of [`write`](Self::write).
    ///
    /// # Errors
    /// If `bytes` are anything else, or contain more than [`SERVICES_MAX`] services.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let (services, []) = bytes.as_chunks::<SERVICE_LEN>() else {
            return Err(Malformed);
        };
        if services.len() > SERVICES_MAX {
            return Err(Malformed);
        }
        let mut all = BTreeMap::new();
        for service in services {
            let (key, words) = service.split_first_chunk().ok_or(Malformed)?;
            let [choice, ways] = *words.as_chunks().0 else {
                return Err(Malformed);
            };
            let [choice, ways] = [choice, ways].map(u64::from_be_bytes);
            let key = ServiceKeyOrd::from(&parse_key(key)?);
            all.insert(key, ServiceDigest { choice, ways });
        }
        Ok(Self(all))
    }

    /// The services whose digests differ from the peer's.
    pub fn compare<'a>(&'a self, theirs: &'a Self) -> impl Iterator<Item = Differs> + 'a {
        let ours = self.0.iter().filter_map(|(key, digest)| {
            let other = theirs.0.get(key);
            let same = other.is_some_and(|other| digest.is_like(other));
            (!same).then(|| Differs {
                service: (*key).into(),
                here: true,
                there: other.is_some(),
            })
        });
        let theirs = theirs.0.keys().filter(|key| !self.0.contains_key(key));
        ours.chain(theirs.map(|key| Differs {
            service: (*key).into(),
            here: false,
            there: true,
        }))
    }
}

/// Hash of a service's settings, as a part of [`ServiceDigest::choice`]. `slots` is the size of the
/// scheduler's hash table, 0 without one; `servers` is the number of servers.
pub(crate) fn settings(key: &ServiceKey, config: &ServiceConfig, slots: u32, servers: u32) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(KEYS[0], KEYS[1]);
    hasher.write(&key_bytes(key));
    let flags = config.flags.0 & crate::ServiceFlags::ALL;
    for number in [flags, config.timeout, config.netmask, slots, servers] {
        hasher.write(&number.to_be_bytes());
    }
    for name in [
        &*config.scheduler,
        config.engine.as_deref().unwrap_or_default(),
    ] {
        hasher.write(name.as_bytes());
        hasher.write(&[0]);
    }
    hasher.finish()
}

fn address(addr: SocketAddr) -> [u64; 3] {
    let ip = match addr.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let [a, b, c, d, e, f, g, h] = ip.segments().map(u64::from);
    [
        a << 48 | b << 32 | c << 16 | d,
        e << 48 | f << 32 | g << 16 | h,
        u64::from(addr.is_ipv6()) << 16 | u64::from(addr.port()),
    ]
}

/// Hash of a server, as a part of [`ServiceDigest::choice`]. `place` is its position in the list of
/// servers if the scheduler's choice depends on it, otherwise 0.
pub(crate) fn server(addr: SocketAddr, config: &ServerConfig, last_weight: i32, place: u64) -> u64 {
    let [a, b, c] = address(addr);
    let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let weights = pair(config.weight.cast_unsigned(), last_weight.cast_unsigned());
    let thresholds = pair(config.upper, config.lower);
    sip13(KEYS, [a, b, c, weights, thresholds, place])
}

/// Hash of the path to a server, as a part of [`ServiceDigest::ways`]; `None` if the server is the
/// director itself.
pub(crate) fn way(addr: SocketAddr, config: &ServerConfig) -> Option<u64> {
    let [a, b, c] = address(addr);
    let tunnel = match config.forwarding {
        Forwarding::Local => return None,
        Forwarding::Tunnel => config.tunnel.pack(),
        _ => 0,
    };
    Some(sip13(KEYS, [a, b, c, config.forwarding as u64, tunnel]))
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn key(n: u16) -> ServiceKey {
        ServiceKey::tcp(SocketAddr::from(([198, 51, 100, 1], n)))
    }

    fn digest(n: u64) -> ServiceDigest {
        ServiceDigest { choice: n, ways: 1 }
    }

    #[test]
    fn service_key_round_trips_and_invalid_bytes_are_refused() {
        let keys = [
            ServiceKey::tcp("198.51.100.1:80".parse().unwrap()),
            ServiceKey::udp("[2001:db8::1]:53".parse().unwrap()),
            ServiceKey::Mark {
                family: Family::V6,
                mark: 7,
            },
        ];
        for key in keys {
            let bytes = key_bytes(&key);
            assert_eq!(parse_key(&bytes), Ok(key));
            // An unknown kind, an unknown protocol, and an address byte that must be 0 for IPv4.
            for (at, byte) in [(0, 4), (1, 1), (19, 1)] {
                let mut other = bytes;
                other[at] ^= byte;
                let fine = at == 19 && key.family() == Family::V6 && key.port() != 0;
                assert_eq!(parse_key(&other).is_ok(), fine, "{key} {at}");
            }
        }
    }

    #[test]
    fn digest_comparison_names_differing_services_and_directors_that_have_them() {
        let ours = [
            (key(1), digest(1)),
            (key(2), digest(2)),
            (key(3), digest(3)),
        ];
        let theirs = [
            (key(1), digest(1)),
            (key(2), digest(9)),
            (key(4), digest(4)),
        ];
        let (ours, theirs) = (ServiceDigests::new(ours).0, ServiceDigests::new(theirs).0);
        let mut bytes = Vec::new();
        theirs.write(&mut bytes);
        assert_eq!(ServiceDigests::parse(&bytes), Ok(theirs.clone()));
        let differs = |n, here, there| Differs {
            service: key(n),
            here,
            there,
        };
        let found: Vec<_> = ours.compare(&theirs).collect();
        assert_eq!(
            found,
            [
                differs(2, true, true),
                differs(3, true, false),
                differs(4, false, true)
            ]
        );
        assert_eq!(ours.compare(&ours).count(), 0);
        assert_eq!(ServiceDigests::default().compare(&ours).count(), 3);
    }

    #[test]
    fn service_digests_beyond_maximum_are_omitted_and_refused_by_parser() {
        let all = |count: u32| {
            (0..count).map(|mark| {
                let family = Family::V4;
                (ServiceKey::Mark { family, mark }, digest(1))
            })
        };
        let count = u32::try_from(SERVICES_MAX).unwrap();
        let (most, beyond) = ServiceDigests::new(all(count + 2));
        assert_eq!((most.len(), beyond), (SERVICES_MAX, 2));
        let mut bytes = Vec::new();
        most.write(&mut bytes);
        assert_eq!(ServiceDigests::parse(&bytes), Ok(most));
        let one_more = vec![0; bytes.len() + SERVICE_LEN];
        assert_eq!(ServiceDigests::parse(&one_more), Err(Malformed));
    }

    #[test]
    fn service_digests_match_if_one_director_is_also_a_server() {
        let here = ServiceDigest { choice: 5, ways: 6 };
        let local = ServiceDigest { ways: 0, ..here };
        assert!(here.is_like(&local) && local.is_like(&here));
        assert!(!here.is_like(&ServiceDigest { ways: 7, ..here }));
        assert!(!local.is_like(&ServiceDigest { choice: 7, ..here }));
    }

    proptest::proptest! {
        #[test]
        fn service_digest_parser_does_not_panic_on_any_bytes(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            if let Ok(digests) = ServiceDigests::parse(&bytes) {
                let mut again = Vec::new();
                digests.write(&mut again);
                proptest::prop_assert_eq!(ServiceDigests::parse(&again), Ok(digests));
            }
        }
    }
}
