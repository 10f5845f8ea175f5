//! Hash maps whose clones share their unchanged parts.
//!
//! In `lvs-dataplane`, the thread that observes the host's network publishes a snapshot after each
//! change, and the packet workers read the last snapshot while this thread changes its maps. An
//! ordinary map would have to be copied completely for each change. This map consists of parts: a
//! clone copies one pointer, and the first change of a part after that copies only this part. An
//! insertion therefore costs about the same with ten entries as with 40,000. A look-up hashes
//! twice; the packet path caches the results if speed is important.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

/// Number of parts of a map. With 40,000 entries, the first change of a part copies 160 entries and
/// 256 pointers.
const PARTS: usize = 256;

type Part<K, V> = Arc<HashMap<K, V, RandomState>>;

/// A map that is cheap to clone, and to change after a clone.
#[derive(Clone)]
pub struct SharedMap<K, V> {
    /// The parts; empty before the first insertion.
    parts: Arc<[Part<K, V>]>,
    hasher: RandomState,
    len: usize,
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self {
            parts: Arc::new([]),
            hasher: RandomState::new(),
            len: 0,
        }
    }
}

impl<K, V> SharedMap<K, V> {
    /// Number of entries in the map.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the map is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The entries, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.parts.iter().flat_map(|part| part.iter())
    }

    /// The keys, in arbitrary order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }
}

impl<K: Eq + Hash, V> SharedMap<K, V> {
    #[inline]
    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        // The low and the highest bits select an entry within the part.
        (self.hasher.hash_one(key) >> 24) as usize % PARTS
    }

    /// The value of a key.
    #[inline]
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        if self.is_empty() {
            return None;
        }
        self.parts[self.place(key)].get(key)
    }

    /// Whether the map contains the key.
    #[inline]
    pub fn contains_key<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }
}

impl<K: Clone + Eq + Hash, V: Clone> SharedMap<K, V> {
    fn part(&mut self, place: usize) -> &mut HashMap<K, V> {
        if self.parts.is_empty() {
            let empty = Arc::new(HashMap::with_hasher(self.hasher.clone()));
            self.parts = (0..PARTS).map(|_| Arc::clone(&empty)).collect();
        }
        Arc::make_mut(&mut Arc::make_mut(&mut self.parts)[place])
    }

    /// Inserts a key with its value; returns the earlier value.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let place = self.place(&key);
        let old = self.part(place).insert(key, value);
        self.len += usize::from(old.is_none());
        old
    }

    /// Removes a key; returns its value.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        if !self.contains_key(key) {
            return None;
        }
        let place = self.place(key);
        let old = self.part(place).remove(key);
        self.len -= usize::from(old.is_some());
        old
    }

    /// Mutable access to the value of a key. If the key is absent, it is inserted with the value
    /// that `make` returns.
    pub fn entry(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        let new = !self.contains_key(&key);
        self.len += usize::from(new);
        let place = self.place(&key);
        self.part(place).entry(key).or_insert_with(make)
    }

    /// Mutable access to the value of a key.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        if !self.contains_key(key) {
            return None;
        }
        let place = self.place(key);
        self.part(place).get_mut(key)
    }

    /// Removes the entries for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let gone: Vec<K> = self
            .iter()
            .filter(|(key, value)| !keep(key, value))
            .map(|(key, _)| key.clone())
            .collect();
        for key in gone {
            self.remove(&key);
        }
    }
}

impl<K: Eq + Hash, V: PartialEq> PartialEq for SharedMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len
            && self
                .iter()
                .all(|(key, value)| other.get(key) == Some(value))
    }
}

impl<K: Eq + Hash, V: Eq> Eq for SharedMap<K, V> {}

impl<K: Clone + Eq + Hash, V: Clone> Extend<(K, V)> for SharedMap<K, V> {
    fn extend<T: IntoIterator<Item = (K, V)>>(&mut self, entries: T) {
        for (key, value) in entries {
            self.insert(key, value);
        }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> FromIterator<(K, V)> for SharedMap<K, V> {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(entries: T) -> Self {
        let mut map = Self::default();
        map.extend(entries);
        map
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// A set that is cheap to clone, and to change after a clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSet<T: Eq + Hash>(SharedMap<T, ()>);

impl<T: Eq + Hash> Default for SharedSet<T> {
    fn default() -> Self {
        Self(SharedMap::default())
    }
}

impl<T: Clone + Eq + Hash> SharedSet<T> {
    /// Adds a value; returns whether it is new.
    pub fn insert(&mut self, value: T) -> bool {
        // Adding an existing value copies nothing.
        !self.contains(&value) && self.0.insert(value, ()).is_none()
    }

    /// Removes a value; returns whether it existed.
    pub fn remove(&mut self, value: &T) -> bool {
        self.0.remove(value).is_some()
    }

    /// Whether the set contains the value.
    #[inline]
    pub fn contains(&self, value: &T) -> bool {
        self.0.contains_key(value)
    }

    /// Number of values in the set.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all values from the set.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The values, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.keys()
    }
}

impl<T: Clone + Eq + Hash> Extend<T> for SharedSet<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        for value in values {
            self.insert(value);
        }
    }
}

impl<T: Clone + Eq + Hash> FromIterator<T> for SharedSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut set = Self::default();
        set.extend(values);
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_of_shared_map_stays_unchanged_and_shares_memory() {
        let mut map: SharedMap<u32, u32> = (0..10_000).map(|n| (n, n)).collect();
        let copy = map.clone();
        assert_eq!(map.insert(7, 8), Some(7));
        assert_eq!(map.remove(&9), Some(9));
        assert_eq!(map.remove(&9), None);
        *map.entry(10_000, || 0) += 1;
        assert_eq!((map.len(), copy.len()), (10_000, 10_000));
        assert_eq!((map.get(&7), copy.get(&7)), (Some(&8), Some(&7)));
        assert_eq!((map.get(&9), copy.get(&9)), (None, Some(&9)));
        assert_ne!(map, copy);
        let shared = |(a, b): (&Part<u32, u32>, &Part<u32, u32>)| Arc::ptr_eq(a, b);
        let shared = map
            .parts
            .iter()
            .zip(&*copy.parts)
            .filter(|parts| shared(*parts));
        assert!(shared.count() >= PARTS - 3);
        map.retain(|key, _| *key < 3);
        let mut keys: Vec<u32> = map.keys().copied().collect();
        keys.sort_unstable();
        assert_eq!(keys, [0, 1, 2]);
        assert_eq!(map.len(), 3);
    }

    #[test]
    fn shared_set_contains_only_inserted_value_once() {
        let mut set = SharedSet::default();
        assert!(set.is_empty() && !set.contains(&1) && !set.remove(&1));
        assert!(set.insert(1) && !set.insert(1));
        assert_eq!(set.iter().collect::<Vec<_>>(), [&1]);
    }
}
