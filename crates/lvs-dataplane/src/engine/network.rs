//! The network as a packet worker sees it: the keeper's view, and what the worker remembers of it.

use std::cell::Cell;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::host::view::View;
use crate::packet::net::{Net, NextHop, PortId, PortInfo};
use crate::packet::wire::Mac;

/// All that the packet path asks about one address.
#[derive(Clone, Copy, Debug)]
struct Way {
    local: bool,
    vip: bool,
    own: bool,
    hop: Option<NextHop>,
    /// Of the next hop.
    mac: Option<Mac>,
}

/// An answer, whom it is about, and when it was given.
#[derive(Clone, Copy)]
struct Remembered {
    generation: u32,
    addr: IpAddr,
    way: Way,
}

/// Answers about addresses, one place for all addresses with the same hash: a stranger may displace what is remembered
/// by choosing addresses, and then costs a look into the tables, as without it.
struct Memo {
    places: Box<[Cell<Option<Remembered>>]>,
    /// What was written in an earlier generation is forgotten.
    generation: u32,
}

impl Memo {
    const BITS: u32 = 11;

    fn place(&self, addr: IpAddr) -> &Cell<Option<Remembered>> {
        let bits = match addr {
            IpAddr::V4(addr) => addr.to_bits(),
            IpAddr::V6(addr) => {
                let octets = addr.octets();
                octets.chunks_exact(4).fold(0, |sum, word| {
                    sum ^ u32::from_be_bytes([word[0], word[1], word[2], word[3]])
                })
            }
        };
        &self.places[(bits.wrapping_mul(0x9e37_79b1) >> (32 - Self::BITS)) as usize]
    }

    fn get(&self, addr: IpAddr) -> Option<Way> {
        let found = self.place(addr).get()?;
        (found.generation == self.generation && found.addr == addr).then_some(found.way)
    }

    fn put(&self, addr: IpAddr, way: Way) {
        let generation = self.generation;
        self.place(addr).set(Some(Remembered {
            generation,
            addr,
            way,
        }));
    }
}

impl Default for Memo {
    fn default() -> Self {
        let places = (0..1 << Self::BITS).map(|_| Cell::new(None)).collect();
        Self {
            places,
            generation: 0,
        }
    }
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memo").finish_non_exhaustive()
    }
}

/// The latest view that a worker has taken.
#[derive(Debug, Default)]
pub(super) struct Network {
    view: Arc<View>,
    ways: Memo,
}

impl Network {
    /// Takes another view. What is remembered of the last one is forgotten if it may differ.
    pub(super) fn take(&mut self, view: Arc<View>) {
        if !Arc::ptr_eq(&self.view.tables, &view.tables) {
            self.ways.generation = self.ways.generation.wrapping_add(1);
        }
        self.view = view;
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    fn way(&self, addr: IpAddr) -> Way {
        if let Some(way) = self.ways.get(addr) {
            return way;
        }
        let tables = &self.view.tables;
        let hop = tables.route(addr);
        let way = Way {
            local: tables.state.is_local(addr),
            vip: tables.vips.contains(&addr),
            own: tables.own.contains(&addr),
            hop,
            mac: hop.and_then(|hop| tables.neighbour(hop.port, hop.addr)),
        };
        self.ways.put(addr, way);
        way
    }
}

impl Net for Network {
    fn port(&self, port: PortId) -> Option<PortInfo> {
        Some(self.view.tables.port(port)?.info)
    }

    fn host_port(&self) -> Option<PortId> {
        Some(PortId::HOST)
    }

    fn is_forged(&self, src: IpAddr) -> bool {
        self.view.tables.may_be_forged(src) && (self.is_local(src) || self.is_own_vip(src))
    }

    fn is_local(&self, addr: IpAddr) -> bool {
        self.way(addr).local
    }

    fn is_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).vip
    }

    fn is_own_vip(&self, addr: IpAddr) -> bool {
        self.way(addr).own
    }

    fn route(&self, dst: IpAddr) -> Option<NextHop> {
        self.way(dst).hop
    }

    fn neighbour(&self, port: PortId, addr: IpAddr) -> Option<Mac> {
        let way = self.way(addr);
        match way.hop {
            // The usual case: the neighbour is its own next hop.
            Some(hop) if hop.port == port && hop.addr == addr => way.mac,
            _ => self.view.tables.neighbour(port, addr),
        }
    }
}
