//! Persistence templates: which real server the clients of a network go to.
//!
//! A template is shared: the control half finds, renews and ends it; the shards whose connections were made from it
//! count themselves in and out, and read it for synchronisation, without a lock.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use super::table::flag;
use super::{ConnTable, Key, Slot};
use crate::sched::hash::hsiphash;
use crate::{Instant, Protocol};

/// What is known of a template. Its timer is in [`Templates`].
#[derive(Debug)]
pub(crate) struct Template {
    /// Client network with port 0; protocol 0 and the mark as address for a service of a mark.
    pub(crate) key: Key,
    /// Address and port of the server, as connections made from it begin with.
    pub(crate) server_addr: SocketAddr,
    /// Index of the server's record, or [`NO_SLOT`](super::NO_SLOT).
    pub(crate) server: AtomicU32,
    pub(crate) flags: AtomicU32,
    pub(crate) mark: u32,
    /// Name of the persistence engine and its data.
    pub(crate) engine: Option<(&'static str, Box<[u8]>)>,
    /// Seconds that each new connection gives it.
    pub(crate) timeout: AtomicU32,
    /// One of its connections was established.
    pub(crate) assured: AtomicBool,
    /// Connections made from it.
    pub(crate) controlled: AtomicU32,
    /// How often it was considered for synchronisation.
    pub(crate) in_packets: AtomicU32,
    /// When it was synchronised last, as `Slot::sync_end`.
    pub(crate) sync_end: AtomicU32,
    /// Adjustment of sequence numbers, as it came by synchronisation.
    sequences: [AtomicU32; 6],
    /// Its server is gone or quiesced: it is not found any more and ends when its time comes.
    pub(crate) invalid: AtomicBool,
}

impl Template {
    pub(crate) fn new(
        key: Key,
        server_addr: SocketAddr,
        flags: u32,
        timeout: u32,
        now: Instant,
    ) -> Self {
        Self {
            key,
            server_addr,
            server: AtomicU32::new(super::NO_SLOT),
            flags: AtomicU32::new(flags | flag::TEMPLATE),
            mark: 0,
            engine: None,
            timeout: AtomicU32::new(timeout),
            assured: AtomicBool::new(false),
            controlled: AtomicU32::new(0),
            in_packets: AtomicU32::new(0),
            sync_end: AtomicU32::new(crate::sync::ticks(now) & !3),
            sequences: Default::default(),
            invalid: AtomicBool::new(false),
        }
    }

    pub(crate) fn sequences(&self) -> [u32; 6] {
        core::array::from_fn(|n| self.sequences[n].load(Relaxed))
    }

    pub(crate) fn set_sequences(&self, sequences: [u32; 6]) {
        for (place, number) in self.sequences.iter().zip(sequences) {
            place.store(number, Relaxed);
        }
    }

    /// State, as the kernel names it.
    pub(crate) fn state_name(&self) -> &'static str {
        if self.assured.load(Relaxed) {
            "ASSURED"
        } else {
            "NONE"
        }
    }

    /// A connection made from it is gone. `true` if it was the last one and the template does not outlive that when
    /// connections are ended by force.
    pub(crate) fn release(&self) -> bool {
        self.controlled.fetch_sub(1, Relaxed) == 1 && !self.assured.load(Relaxed)
    }
}

/// What engine data is found by: client network, virtual address, protocol and the data.
type EngineKey = (IpAddr, SocketAddr, Protocol, Box<[u8]>);

/// All templates and their timers.
#[derive(Debug)]
pub(crate) struct Templates {
    pub(crate) table: ConnTable,
    records: Vec<Option<Arc<Template>>>,
    by_engine: BTreeMap<EngineKey, u32>,
    /// Where to look next for one that can go.
    pub(crate) hand: usize,
}

impl Templates {
    pub(crate) fn new(capacity: usize, seed: u64) -> Self {
        Self {
            table: ConnTable::new(capacity, seed),
            records: Vec::new(),
            by_engine: BTreeMap::new(),
            hand: 0,
        }
    }

    pub(crate) fn get(&self, index: u32) -> &Arc<Template> {
        self.records[index as usize]
            .as_ref()
            .expect("indices lead to templates in use")
    }

    /// The template of a client network (`ip_vs_ct_in_get`); with an engine, of its data.
    pub(crate) fn find(&self, key: &Key, data: Option<&[u8]>) -> Option<u32> {
        match data {
            None => self.table.find_template(key),
            Some(data) => {
                let key = (key.client.ip(), key.virt, key.protocol, data.into());
                self.by_engine.get(&key).copied()
            }
        }
    }

    /// The same, if it leads to the place of a server that `valid` takes. If not, it is never found again.
    pub(crate) fn find_valid(
        &mut self,
        key: &Key,
        data: Option<&[u8]>,
        valid: impl Fn(usize) -> bool,
    ) -> Option<u32> {
        let index = self.find(key, data)?;
        if valid(self.get(index).server.load(Relaxed) as usize) {
            return Some(index);
        }
        self.invalidate(index);
        None
    }

    /// Keeps a template and starts its timer; `None` if the table is full.
    pub(crate) fn insert(
        &mut self,
        template: Template,
        now: Instant,
    ) -> Option<(u32, Arc<Template>)> {
        let mut key = template.key;
        if let Some((_, data)) = &template.engine {
            // The port is 0 in every template; here it spreads the calls of one client over the hash table.
            let hash = data.chunks(4).fold(0, |hash, chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                hsiphash(u32::from_le_bytes(word), (hash, 0)).into()
            });
            let port = u16::try_from(hash & 0xffff).unwrap_or(0);
            key.client.set_port(port.max(1));
        }
        let mut slot = Slot::new(&key, template.server_addr, template.flags.load(Relaxed));
        slot.timeout = template.timeout.load(Relaxed);
        let index = self.table.insert(slot, now)?;
        if let Some(key) = engine_key(&template) {
            self.by_engine.insert(key, index);
        }
        let template = Arc::new(template);
        let place = index as usize;
        if self.records.len() <= place {
            self.records.resize(place + 1, None);
        }
        self.records[place] = Some(template.clone());
        Some((index, template))
    }

    /// Lets the timer run for the template's timeout from `now`.
    pub(crate) fn restart(&mut self, index: u32, now: Instant) {
        let timeout = self.get(index).timeout.load(Relaxed);
        self.table.get_mut(index).timeout = timeout;
        self.table.restart(index, now);
    }

    /// Hides a template from [`find`](Self::find).
    pub(crate) fn invalidate(&mut self, index: u32) {
        let template = self.get(index).clone();
        if !template.invalid.swap(true, Relaxed) {
            if let Some(key) = engine_key(&template)
                && self.by_engine.get(&key) == Some(&index)
            {
                self.by_engine.remove(&key);
            }
            self.table.hide_template(index);
        }
    }

    pub(crate) fn remove(&mut self, index: u32) -> Arc<Template> {
        let template = self.get(index).clone();
        if let Some(key) = engine_key(&template)
            && self.by_engine.get(&key) == Some(&index)
        {
            self.by_engine.remove(&key);
        }
        self.table.remove(index);
        self.records[index as usize] = None;
        template
    }
}

fn engine_key(template: &Template) -> Option<EngineKey> {
    let (_, data) = template.engine.as_ref()?;
    let Key {
        protocol,
        client,
        virt,
    } = template.key;
    Some((client.ip(), virt, protocol, data.clone()))
}
