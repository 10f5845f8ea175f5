//! BPF maps, and their mappings in this process.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lvs_core::memory::{Layout, Memory, Region};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};

use super::{Program, number, pin, pinned, short_name};
use crate::attached::{self, call, descriptor};
use crate::map_memory;

/// Attributes of `BPF_MAP_CREATE` (the first fields of `bpf_attr`).
#[repr(C)]
struct CreateMap {
    kind: u32,
    key: u32,
    value: u32,
    entries: u32,
    flags: u32,
    inner: u32,
    node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct Element {
    map: u32,
    unused: u32,
    key: u64,
    value: u64,
    flags: u64,
}

const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_PROG_ARRAY: u32 = 3;
const BPF_MAP_TYPE_PERCPU_ARRAY: u32 = 6;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;
const BPF_MAP_TYPE_DEVMAP: u32 = 14;
/// The map allocates the memory of an entry when the entry is inserted.
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// A map in the kernel, for BPF programs.
#[derive(Debug)]
pub struct Map(OwnedFd);

impl Map {
    fn new(
        name: &str,
        kind: u32,
        [key, value]: [u32; 2],
        entries: u32,
        flags: u32,
        inner: u32,
    ) -> io::Result<Self> {
        let mut request = CreateMap {
            kind,
            key,
            value,
            entries,
            flags,
            inner,
            node: 0,
            name: short_name(name),
        };
        // SAFETY: the request contains no addresses.
        unsafe { descriptor(BPF_MAP_CREATE, &mut request) }.map(Self)
    }

    /// Opens the map that is pinned at a path, if it is of this kind. Also returns the length of
    /// the keys, the length of the values, and the maximum number of entries.
    fn pinned(path: &Path, kind: u32) -> io::Result<(Self, [u32; 3])> {
        let fd = pinned(path)?;
        // `type`, `id`, `key_size`, `value_size` and `max_entries` of `bpf_map_info`.
        let info = attached::reported(&fd)?;
        let [found, _, key, value, entries] = std::array::from_fn(|n| info[n]);
        match found == kind {
            true => Ok((Self(fd), [key, value, entries])),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Pins the map to a path in a BPF file system, so that it remains after this process exits.
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.0, path)
    }

    /// The map's descriptor, which a program's instructions contain.
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// An array in the kernel that BPF programs read and write, and that this process maps as 64-bit
/// words; or a memory file that other processes map as well.
#[derive(Debug)]
pub struct SharedArray {
    map: Map,
    memory: NonNull<u8>,
    words: usize,
}

// SAFETY: the mapping belongs to this value until it is dropped, and is not bound to a thread.
unsafe impl Send for SharedArray {}
// SAFETY: a shared reference gives access to atomics only.
unsafe impl Sync for SharedArray {}

impl SharedArray {
    /// Creates an array of `entries` entries of `words` words each, all zeros.
    ///
    /// # Errors
    /// As [`Program::load`](super::programs::Program::load); `OutOfMemory`.
    pub fn new(name: &str, words: usize, entries: u32) -> io::Result<Self> {
        let value = u32::try_from(words * 8).map_err(|_| io::ErrorKind::InvalidInput)?;
        let entries = entries.max(1);
        let kind = BPF_MAP_TYPE_ARRAY;
        let map = Map::new(name, kind, [4, value], entries, BPF_F_MMAPABLE, 0)?;
        Self::map(map, 0, words * entries as usize)
    }

    /// Maps a part of a memory file, from the page at `offset` on. Other processes map the file as
    /// well. It must be [sealed](seal): access to a page beyond the end of a shortened file kills
    /// the process.
    ///
    /// # Errors
    /// If the file cannot be mapped, can become shorter, or is too short.
    pub fn of_file(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        // Files of a file system on disk have no seals: `EINVAL`.
        if !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the memory file can become shorter: it is not sealed",
            ));
        }
        let end = (words as u64)
            .checked_mul(8)
            .and_then(|len| len.checked_add(offset));
        let len = file.metadata()?.len();
        if end.is_none_or(|end| len < end) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Self::map(Map(file.try_clone()?.into()), offset, words)
    }

    /// Opens the array that is pinned at this path, and has at least `words` words.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another map or has fewer words.
    pub fn pinned(path: &Path, words: usize) -> io::Result<Self> {
        let (map, _) = pinned_array(path)?;
        Self::map(map, 0, words)
    }

    /// Opens the array that is pinned at this path, with all of its words.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned_whole(path: &Path) -> io::Result<Self> {
        let (map, words) = pinned_array(path)?;
        Self::map(map, 0, words)
    }

    /// Maps a BPF array, or a memory file that is long enough and cannot become shorter.
    fn map(map: Map, offset: u64, words: usize) -> io::Result<Self> {
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        // All of the mapping exists as long as the value: the kernel refuses a mapping that is
        // longer than a BPF array, whose length never changes, and `of_file` has refused files that
        // are shorter or can become shorter.
        let len = words.checked_mul(8);
        let memory = map_memory(len, libc::MAP_SHARED, map.number(), offset)?;
        Ok(Self { map, memory, words })
    }

    /// Returns the words of the array.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this length, begins at a page, and never becomes shorter (`map`).
        // This process, BPF programs and other processes that map it access it only as atomics.
        unsafe { slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), self.words) }
    }

    /// Makes all words zeros again.
    #[cfg(any(test, feature = "testing"))]
    pub fn zero(&mut self) {
        // SAFETY: the mapping has this length, and this process has no other reference to it.
        unsafe { ptr::write_bytes(self.memory.as_ptr(), 0, self.words * 8) };
    }
}

impl Deref for SharedArray {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

impl Drop for SharedArray {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own. References to its words borrow this value, or
        // exist in regions that own it (`shared_table`), so no such reference exists now.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.words * 8) };
    }
}

/// Opens the pinned array at this path; also returns its length in words.
fn pinned_array(path: &Path) -> io::Result<(Map, usize)> {
    let (map, [_, value, entries]) = Map::pinned(path, BPF_MAP_TYPE_ARRAY)?;
    // The kernel aligns each entry to 8 bytes.
    let words = u64::from(value).div_ceil(8) * u64::from(entries);
    let words = usize::try_from(words).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok((map, words))
}

/// Seals a memory file, so that processes can map it safely: its length cannot change, and no
/// further seals (such as one against writes) can be added.
///
/// # Errors
/// If the file does not permit seals (`MFD_ALLOW_SEALING`).
pub fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(fcntl_add_seals(file, seals)?)
}

/// An array with separate entries for each processor.
#[derive(Debug)]
pub struct PerCpuArray(Map);

impl PerCpuArray {
    /// A new array with one entry of `bytes` zeros.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, bytes: u32) -> io::Result<Self> {
        let kind = BPF_MAP_TYPE_PERCPU_ARRAY;
        Map::new(name, kind, [4, bytes], 1, 0, 0).map(Self)
    }

    /// Opens the array that is pinned at this path.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another map.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let (map, _) = Map::pinned(path, BPF_MAP_TYPE_PERCPU_ARRAY)?;
        Ok(Self(map))
    }
}

impl Deref for PerCpuArray {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.0
    }
}

type Entries<const KEY: usize, const VALUE: usize> = Vec<([u64; KEY], [u64; VALUE])>;

/// A map for BPF programs, with keys of `KEY` words and values of `VALUE` words. The kernel
/// allocates an entry when it is inserted.
#[derive(Debug)]
pub struct SharedMap<const KEY: usize, const VALUE: usize>(Map);

impl<const KEY: usize, const VALUE: usize> SharedMap<KEY, VALUE> {
    /// An empty map for at most this many entries.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32) -> io::Result<Self> {
        let bytes =
            |words: usize| u32::try_from(words * 8).map_err(|_| io::ErrorKind::InvalidInput);
        let sizes = [bytes(KEY)?, bytes(VALUE)?];
        let kind = BPF_MAP_TYPE_HASH;
        Map::new(name, kind, sizes, entries, BPF_F_NO_PREALLOC, 0).map(Self)
    }

    /// Opens the map that is pinned at this path.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let (map, [key, value, _]) = Map::pinned(path, BPF_MAP_TYPE_HASH)?;
        if [key as usize, value as usize] != [KEY * 8, VALUE * 8] {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self(map))
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// If the map is full (`E2BIG`), or the kernel has no memory.
    pub fn insert(&self, key: &[u64; KEY], value: &[u64; VALUE]) -> io::Result<()> {
        let value = ptr::from_ref(value).expose_provenance() as u64;
        // SAFETY: the value lives until after the call, and has the length of the map's values.
        unsafe { self.element(BPF_MAP_UPDATE_ELEM, key, value) }
    }

    /// The value of a key; `None` if the map does not contain the key.
    pub fn get(&self, key: &[u64; KEY]) -> Option<[u64; VALUE]> {
        let mut value = [0_u64; VALUE];
        let to = ptr::from_mut(&mut value).expose_provenance() as u64;
        // SAFETY: the kernel writes one value of the map, as long as this memory, which no other
        // code uses.
        let found = unsafe { self.element(BPF_MAP_LOOKUP_ELEM, key, to) };
        found.ok().map(|()| value)
    }

    /// Removes a key.
    ///
    /// # Errors
    /// If the map does not contain it.
    pub fn remove(&self, key: &[u64; KEY]) -> io::Result<()> {
        // SAFETY: the command has no value.
        unsafe { self.element(BPF_MAP_DELETE_ELEM, key, 0) }
    }

    /// Returns keys and values. The result is complete if no entry is removed while this function
    /// reads.
    ///
    /// # Errors
    /// No error is known.
    pub fn entries(&self) -> io::Result<Entries<KEY, VALUE>> {
        let mut entries = Vec::new();
        let mut last = self.key_after(None)?;
        while let Some(key) = last {
            entries.extend(self.get(&key).map(|value| (key, value)));
            last = self.key_after(Some(&key))?;
        }
        Ok(entries)
    }

    fn key_after(&self, key: Option<&[u64; KEY]>) -> io::Result<Option<[u64; KEY]>> {
        let mut next = [0_u64; KEY];
        let to = ptr::from_mut(&mut next).expose_provenance() as u64;
        // SAFETY: the kernel writes one key, as long as this memory, which no other code uses.
        match unsafe { self.element(BPF_MAP_GET_NEXT_KEY, key, to) } {
            Ok(()) => Ok(Some(next)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs a command of bpf(2) on an entry of the map.
    ///
    /// # Safety
    /// `value` is the address of a value of the map if the command reads or writes one, or of a key
    /// if the command returns one.
    unsafe fn element<'a>(
        &self,
        command: libc::c_long,
        key: impl Into<Option<&'a [u64; KEY]>>,
        value: u64,
    ) -> io::Result<()> {
        let key = key.into().map_or(ptr::null(), ptr::from_ref);
        let mut request = Element {
            map: number(&self.0.0),
            unused: 0,
            key: key.expose_provenance() as u64,
            value,
            flags: 0,
        };
        // SAFETY: the key, if there is one, lives until after the call, and has the length of the
        // map's keys; the caller guarantees the same for the value.
        unsafe { call(command, &mut request) }.map(drop)
    }
}

impl<const KEY: usize, const VALUE: usize> Deref for SharedMap<KEY, VALUE> {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.0
    }
}

/// The kind of objects that a [`ReferenceMap`] refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Referents {
    /// Programs, as destinations of tail calls. The kernel empties the map when its last descriptor
    /// is closed and its last pin is removed.
    Programs,
    /// Other maps, which programs read through this one.
    Maps,
    /// Network devices, by their indices. The kernel empties an entry when its device is removed.
    Devices,
}

impl Referents {
    const fn kind(self) -> u32 {
        match self {
            Self::Programs => BPF_MAP_TYPE_PROG_ARRAY,
            Self::Maps => BPF_MAP_TYPE_ARRAY_OF_MAPS,
            Self::Devices => BPF_MAP_TYPE_DEVMAP,
        }
    }
}

/// An array for BPF programs whose entries refer to programs, maps or devices. An entry can be
/// empty.
#[derive(Debug)]
pub struct ReferenceMap(Map);

impl ReferenceMap {
    /// An empty map of programs or devices.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, referents: Referents, entries: u32) -> io::Result<Self> {
        Map::new(name, referents.kind(), [4; 2], entries, 0, 0).map(Self)
    }

    /// An empty map with one entry, for inner maps with the kind and the sizes of `like`.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn of_maps(name: &str, like: &Map) -> io::Result<Self> {
        let kind = Referents::Maps.kind();
        Map::new(name, kind, [4; 2], 1, 0, number(&like.0)).map(Self)
    }

    /// Opens the map that is pinned at this path.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned(path: &Path, referents: Referents) -> io::Result<Self> {
        match Map::pinned(path, referents.kind())? {
            (map, [4, 4, _]) => Ok(Self(map)),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Sets the program that runs after a tail call with this number.
    ///
    /// # Errors
    /// If the map has no such number, or the program is of another kind than the programs that use
    /// the map.
    pub fn put_program(&self, entry: u32, program: &Program) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, entry, program.number())
    }

    /// Sets the inner map, and waits until no program uses the previous one.
    ///
    /// # Errors
    /// If the map differs in kind or size from the map that was passed to
    /// [`of_maps`](Self::of_maps).
    pub fn put_map(&self, map: &Map) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, 0, number(&map.0))
    }

    /// Sets the device of the first entry.
    ///
    /// # Errors
    /// If there is no device with this index in this network namespace.
    pub fn put_device(&self, ifindex: u32) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, 0, ifindex)
    }

    /// Removes the reference in the first entry.
    pub fn clear(&self) {
        // An absent entry is not an error.
        let _ = self.element(BPF_MAP_DELETE_ELEM, 0, 0);
    }

    fn element(&self, command: libc::c_long, key: u32, value: u32) -> io::Result<()> {
        let mut request = Element {
            map: number(&self.0.0),
            unused: 0,
            key: ptr::from_ref(&key).expose_provenance() as u64,
            value: ptr::from_ref(&value).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: key and value live until after the call, and are 4 bytes long, as those of this
        // map (`new`, `of_maps`, `pinned`).
        unsafe { call(command, &mut request) }.map(drop)
    }
}

impl Deref for ReferenceMap {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.0
    }
}

/// Memory of a connection table in arrays that BPF programs read: narrow slots, their tags, wide
/// slots, their tags; and the overflow, which no program reads. Each array contains the regions of
/// `tables` tables, one after the other, and this is the memory of table `number`.
///
/// # Errors
/// If a region is shorter than `layout` requires, or there is no such table.
pub fn shared_table(
    layout: Layout,
    arrays: [Arc<SharedArray>; 5],
    number: usize,
    tables: NonZeroUsize,
) -> io::Result<Memory> {
    if number >= tables.get() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let regions = arrays.map(|array| {
        // SAFETY: as in `words`. Only the region uses the reference, and the region owns the array
        // as long as it exists.
        let words = unsafe {
            slice::from_raw_parts(array.memory.as_ptr().cast::<AtomicU64>(), array.words)
        };
        let len = words.len() / tables;
        Region::shared(&words[number * len..][..len], array)
    });
    Memory::new(layout, regions).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn memory_file_is_mapped_only_if_sealed_against_shrinking() -> io::Result<()> {
        let file = memfd_create("lvs-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(file);
        file.set_len(8192)?;
        let unsealed =
            SharedArray::of_file(&file, 0, 1024).expect_err("a file without seals was mapped");
        assert_eq!(unsealed.kind(), io::ErrorKind::InvalidInput);
        seal(&file)?;
        let array = SharedArray::of_file(&file, 4096, 512)?;
        array.words()[511].store(7, Relaxed);
        for len in [0, 4096, 16_384] {
            file.set_len(len)
                .expect_err("the length of a sealed file was changed");
        }
        assert_eq!(array.words()[511].load(Relaxed), 7);
        for (offset, words) in [(4096, 513), (0, usize::MAX / 4), (u64::MAX, 1)] {
            SharedArray::of_file(&file, offset, words)
                .expect_err("words beyond the end of the file were mapped");
        }
        let ordinary = tempfile::tempfile()?;
        ordinary.set_len(8192)?;
        SharedArray::of_file(&ordinary, 0, 1024)
            .expect_err("a file that does not support seals was mapped");
        Ok(())
    }
}
