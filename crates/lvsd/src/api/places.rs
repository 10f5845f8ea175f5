//! Limits of simultaneous connections over TCP: one source cannot lock out the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use lvs_core::Prefix;
use lvs_sys::lock;

/// Maximum number of connections over TCP.
const TCP_MAX: usize = 128;
/// Maximum number of TCP connections of one source: an IPv4 address, or an IPv6 /64.
pub(super) const SOURCE_MAX: usize = 32;
/// Maximum number of event streams of one source.
pub(super) const STREAMS_MAX: usize = 8;

/// The client to which a slot belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    /// A TCP connection of this source.
    Tcp(IpAddr),
    /// An event stream of a source over TCP. It needs this slot in addition to the slot of its
    /// connection.
    Stream(IpAddr),
}

/// Counts the open TCP connections and event streams of each source.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionLimits(Arc<Mutex<HashMap<Holder, usize>>>);

/// A slot for a connection, released on drop.
#[derive(Debug)]
pub(crate) struct ConnectionSlot(ConnectionLimits, Holder);

impl ConnectionLimits {
    /// Reserves a slot; `None` if all slots, or all slots of this client, are in use.
    pub(crate) fn take(&self, holder: Holder) -> Option<ConnectionSlot> {
        let holder = match holder {
            Holder::Tcp(ip) => Holder::Tcp(Prefix::source(ip)),
            Holder::Stream(ip) => Holder::Stream(Prefix::source(ip)),
        };
        let mut all = self.all();
        let own = all.get(&holder).copied().unwrap_or(0);
        let fits = match holder {
            Holder::Tcp(_) => {
                let tcp = all.iter().filter(|(one, _)| matches!(one, Holder::Tcp(_)));
                own < SOURCE_MAX && tcp.map(|(_, number)| number).sum::<usize>() < TCP_MAX
            }
            Holder::Stream(_) => own < STREAMS_MAX,
        };
        if !fits {
            return None;
        }
        all.insert(holder, own + 1);
        Some(ConnectionSlot(self.clone(), holder))
    }

    fn all(&self) -> MutexGuard<'_, HashMap<Holder, usize>> {
        lock(&self.0)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut all = self.0.all();
        if let Some(own) = all.get_mut(&self.1) {
            *own -= 1;
            if *own == 0 {
                all.remove(&self.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(places: &ConnectionLimits, holder: Holder) -> Vec<ConnectionSlot> {
        std::iter::from_fn(|| places.take(holder)).collect()
    }

    #[test]
    fn api_slots_of_one_source_and_in_total_are_bounded() {
        let places = ConnectionLimits::default();
        let source = |n: u8| Holder::Tcp(IpAddr::from([192, 0, 2, n]));
        let mut held = take_all(&places, source(1));
        assert_eq!(held.len(), SOURCE_MAX);
        // The same address in another notation.
        let mapped = "::ffff:192.0.2.1".parse().expect("the address is valid");
        assert!(places.take(Holder::Tcp(mapped)).is_none());
        // An IPv6 host can use any number of addresses of its network.
        let own = |n: u16| Holder::Tcp(IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, n]));
        for n in 0..SOURCE_MAX {
            let n = u16::try_from(n).expect("the number fits into 16 bits");
            held.push(places.take(own(n)).expect("a slot is free"));
        }
        assert!(places.take(own(999)).is_none());
        let other = Holder::Tcp([0x2001, 0xdb8, 0, 2, 0, 0, 0, 1].into());
        assert!(places.take(other).is_some());
        for n in 0..TCP_MAX - 2 * SOURCE_MAX {
            let n = u8::try_from(2 + n / 8).expect("the number fits into 8 bits");
            held.push(places.take(source(n)).expect("a slot is free"));
        }
        assert!(places.take(source(200)).is_none());
        // Streams have slots of their own.
        let stream = Holder::Stream(IpAddr::from([192, 0, 2, 1]));
        let streams = take_all(&places, stream);
        assert_eq!(streams.len(), STREAMS_MAX);
        drop((held, streams));
        assert!(places.all().is_empty());
    }
}
