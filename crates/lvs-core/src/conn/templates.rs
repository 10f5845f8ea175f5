//! All persistence templates, their search structures, and their timers.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::Ordering::Relaxed;

use super::memory::{Layout, Memory, OutOfMemory};
use super::{ConnTable, Draft, Key, Sparse, Template};
use crate::hash::hsiphash;
use crate::{Instant, Protocol};

/// Key of a template with engine data: client network, virtual address, protocol and the data.
type EngineKey = (IpAddr, SocketAddr, Protocol, Box<[u8]>);

#[derive(Debug)]
pub(crate) struct Templates {
    pub(crate) table: ConnTable,
    records: Sparse<Option<Arc<Template>>>,
    by_engine: BTreeMap<EngineKey, u32>,
    /// Position at which the search for an evictable template continues.
    pub(crate) hand: usize,
}

impl Templates {
    pub(crate) fn new(capacity: usize, seed: u64) -> Result<Self, OutOfMemory> {
        let memory = Memory::try_heap(Layout::new(capacity, seed))?;
        Ok(Self {
            table: ConnTable::with_memory(capacity, memory),
            records: Sparse::default(),
            by_engine: BTreeMap::new(),
            hand: 0,
        })
    }

    #[cfg(test)]
    pub(crate) const fn capacity(&self) -> usize {
        self.table.capacity()
    }

    pub(crate) fn get(&self, index: u32) -> &Arc<Template> {
        let record = self.records.get(index);
        record
            .and_then(Option::as_ref)
            .expect("indices lead to templates in use")
    }

    /// The template of a client network (`ip_vs_ct_in_get`); with `data`, the template for this
    /// data of a persistence engine.
    pub(crate) fn find(&self, key: &Key, data: Option<&[u8]>) -> Option<u32> {
        match data {
            None => self.table.find_template(key),
            Some(data) => {
                let key = (key.client.ip(), key.virt, key.protocol, data.into());
                self.by_engine.get(&key).copied()
            }
        }
    }

    /// As [`find`](Self::find), but only if `valid` accepts the template's server; otherwise no
    /// look-up finds the template any more.
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

    /// Inserts a template and starts its timer; `None` if the table is full.
    pub(crate) fn insert(
        &mut self,
        template: Template,
        now: Instant,
    ) -> Option<(u32, Arc<Template>)> {
        let mut key = template.key;
        if let Some((_, data)) = &template.engine {
            // The port of a template is always 0. In this key, it is a hash of the data, so that
            // calls of one client are distributed over the hash table.
            let hash = data.chunks(4).fold(0, |hash, chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                hsiphash(u32::from_le_bytes(word), (hash, 0)).into()
            });
            let port = u16::try_from(hash & 0xffff).unwrap_or(0);
            key.client.set_port(port.max(1));
        }
        let mut slot = Draft::new(&key, template.server_addr, template.flags.load(Relaxed));
        slot.timeout = template.timeout.load(Relaxed);
        let index = self.table.insert(&slot, now)?;
        if let Some(key) = engine_key(&template) {
            self.by_engine.insert(key, index);
        }
        let template = Arc::new(template);
        *self.records.entry(index) = Some(template.clone());
        Some((index, template))
    }

    pub(crate) fn restart(&mut self, index: u32, now: Instant) {
        let timeout = self.get(index).timeout.load(Relaxed);
        self.table.get(index).set_timeout(timeout);
        self.table.restart(index, now);
    }

    /// Moves the deadline of the timer to `at`, unless it is later already.
    pub(crate) fn restart_until(&mut self, index: u32, at: Instant) {
        let timeout = self.get(index).timeout.load(Relaxed);
        let slot = self.table.get(index);
        slot.set_timeout(timeout);
        let at = slot.expires().max(at);
        self.table.restart_until(index, at);
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
        *self.records.entry(index) = None;
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
