//! BPF maps, and their mappings in this process.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lvs_core::memory::{Layout, Memory, Region};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};

use super::{number, pin, pinned, short_name};
use crate::attached::{self, call, descriptor};

/// The used attributes of `BPF_MAP_CREATE` (the first fields of `bpf_attr`).
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

/// Attributes of `BPF_MAP_UPDATE_ELEM` and `BPF_MAP_DELETE_ELEM`.
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
pub(super) const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
pub(super) const BPF_MAP_TYPE_PROG_ARRAY: u32 = 3;
const BPF_MAP_TYPE_PERCPU_ARRAY: u32 = 6;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;
const BPF_MAP_TYPE_DEVMAP: u32 = 14;
/// The map allocates the memory of an entry when the entry is inserted.
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// An array in the kernel that BPF programs read and write, and that this process maps as 64-bit
/// words; or a memory file that other processes map as well.
#[derive(Debug)]
pub struct SharedArray {
    fd: OwnedFd,
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
        let fd = create_map(
            name,
            BPF_MAP_TYPE_ARRAY,
            [4, value],
            entries.max(1),
            BPF_F_MMAPABLE,
        )?;
        Self::map(fd, 0, words * entries.max(1) as usize)
    }

    /// A part of a memory file that begins at a page. Other processes map the file as well. It must
    /// be [sealed](seal): access to a page beyond the end of a shortened file kills the process.
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
        Self::map(file.try_clone()?.into(), offset, words)
    }

    /// Opens the array that was pinned under this name and has at least `words` words.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another map.
    pub fn pinned(path: &Path, words: usize) -> io::Result<Self> {
        let (fd, _) = pinned_array(path)?;
        Self::map(fd, 0, words)
    }

    /// The array that is pinned under this name, with its length.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned_whole(path: &Path) -> io::Result<Self> {
        let (fd, words) = pinned_array(path)?;
        Self::map(fd, 0, words)
    }

    /// Maps a descriptor: of a BPF array, or of a memory file that is long enough and cannot become
    /// shorter.
    fn map(fd: OwnedFd, offset: u64, words: usize) -> io::Result<Self> {
        let offset = offset.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = words
            .checked_mul(8)
            .filter(|&len| isize::try_from(len).is_ok())
            .ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping of an open descriptor touches no memory that exists. All of it
        // exists as long as the mapping: the kernel refuses a mapping that is longer than a BPF
        // array, whose length never changes, and `of_file` has refused files that are shorter or
        // can become shorter.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, memory, words })
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

    /// Pins the map under a name in a BPF file system, so that it remains after this process exits.
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// The number of the array's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
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
fn pinned_array(path: &Path) -> io::Result<(OwnedFd, usize)> {
    let (fd, [_, value, entries]) = pinned_map(path, BPF_MAP_TYPE_ARRAY)?;
    // The kernel aligns each entry to 8 bytes.
    let words = u64::from(value).div_ceil(8) * u64::from(entries);
    let words = usize::try_from(words).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok((fd, words))
}

/// The pinned map of this kind at a path, the lengths of its keys and values, and its maximum
/// number of entries.
fn pinned_map(path: &Path, kind: u32) -> io::Result<(OwnedFd, [u32; 3])> {
    let fd = pinned(path)?;
    // `type`, `id`, `key_size`, `value_size` and `max_entries` of `bpf_map_info`.
    let info = attached::reported(&fd)?;
    let [found, _, key, value, entries] = std::array::from_fn(|n| info[n]);
    match found == kind {
        true => Ok((fd, [key, value, entries])),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Opens the pinned map of this kind at a path. Its keys and values have four bytes.
pub(super) fn pinned_numbers(path: &Path, kind: u32) -> io::Result<OwnedFd> {
    match pinned_map(path, kind)? {
        (fd, [4, 4, _]) => Ok(fd),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// Fixes the length of a memory file, so that processes can map it safely: it can neither shrink
/// nor grow, and no further seals, such as one against writes, can be added.
///
/// # Errors
/// If the file does not permit seals (`MFD_ALLOW_SEALING`).
pub fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(fcntl_add_seals(file, seals)?)
}

/// An array with separate entries for each processor.
#[derive(Debug)]
pub struct PerCpuArray {
    fd: OwnedFd,
}

impl PerCpuArray {
    /// A new array of zeros; `bytes` is the size of an entry.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, bytes: u32, entries: u32) -> io::Result<Self> {
        let kind = BPF_MAP_TYPE_PERCPU_ARRAY;
        let fd = create_map(name, kind, [4, bytes], entries, 0)?;
        Ok(Self { fd })
    }

    /// Opens the array that was pinned under this name.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is another map.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let (fd, _) = pinned_map(path, BPF_MAP_TYPE_PERCPU_ARRAY)?;
        Ok(Self { fd })
    }

    /// Does the same as [`SharedArray::pin`].
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// The number of the map's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// A set of keys of `WORDS` words, in which BPF programs look up keys.
#[derive(Debug)]
pub struct SharedSet<const WORDS: usize>(SharedMap<WORDS, 1>);

impl<const WORDS: usize> SharedSet<WORDS> {
    /// An empty set for at most this many keys.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32) -> io::Result<Self> {
        SharedMap::new(name, entries).map(Self)
    }

    /// The set that is pinned under this name.
    ///
    /// # Errors
    /// As [`SharedMap::pinned`].
    pub fn pinned(path: &Path) -> io::Result<Self> {
        SharedMap::pinned(path).map(Self)
    }

    /// Adds a key.
    ///
    /// # Errors
    /// If the set is full.
    pub fn insert(&self, key: &[u64; WORDS]) -> io::Result<()> {
        self.0.insert(key, &[1])
    }

    /// Removes a key.
    ///
    /// # Errors
    /// If the set does not contain it.
    pub fn remove(&self, key: &[u64; WORDS]) -> io::Result<()> {
        self.0.remove(key)
    }

    /// Does the same as [`SharedArray::pin`].
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        self.0.pin(path)
    }

    /// The number of the map's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.0.number()
    }
}

/// Keys and their values.
type Entries<const KEY: usize, const VALUE: usize> = Vec<([u64; KEY], [u64; VALUE])>;

/// A map with values of `VALUE` words by keys of `KEY` words, for BPF programs. The kernel
/// allocates an entry when it is inserted.
#[derive(Debug)]
pub struct SharedMap<const KEY: usize, const VALUE: usize> {
    fd: OwnedFd,
}

impl<const KEY: usize, const VALUE: usize> SharedMap<KEY, VALUE> {
    /// An empty map for at most this many entries.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str, entries: u32) -> io::Result<Self> {
        let bytes =
            |words: usize| u32::try_from(words * 8).map_err(|_| io::ErrorKind::InvalidInput);
        let fd = create_map(
            name,
            BPF_MAP_TYPE_HASH,
            [bytes(KEY)?, bytes(VALUE)?],
            entries,
            BPF_F_NO_PREALLOC,
        )?;
        Ok(Self { fd })
    }

    /// The map that is pinned under this name.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let (fd, [key, value, _]) = pinned_map(path, BPF_MAP_TYPE_HASH)?;
        if [key as usize, value as usize] != [KEY * 8, VALUE * 8] {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { fd })
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

    /// The value of a key.
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

    /// Runs a command of bpf(2) on an element of the map.
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
            map: number(&self.fd),
            unused: 0,
            key: key.expose_provenance() as u64,
            value,
            flags: 0,
        };
        // SAFETY: the key, if there is one, lives until after the call, and has the length of the
        // map's keys; the caller guarantees the same for the value.
        unsafe { call(command, &mut request) }.map(drop)
    }

    /// Does the same as [`SharedArray::pin`].
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// The number of the map's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// An outer map with one entry (`BPF_MAP_TYPE_ARRAY_OF_MAPS`), in which BPF programs look up an
/// inner map; the entry can be empty.
#[derive(Debug)]
pub struct MapPlace {
    fd: OwnedFd,
}

impl MapPlace {
    /// An empty outer map, for inner maps like the given one.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new<const KEY: usize, const VALUE: usize>(
        name: &str,
        like: &SharedMap<KEY, VALUE>,
    ) -> io::Result<Self> {
        let mut request = CreateMap {
            kind: BPF_MAP_TYPE_ARRAY_OF_MAPS,
            key: 4,
            value: 4,
            entries: 1,
            flags: 0,
            inner: number(&like.fd),
            node: 0,
            name: short_name(name),
        };
        // SAFETY: there are no addresses in it.
        let fd = unsafe { descriptor(BPF_MAP_CREATE, &mut request) }?;
        Ok(Self { fd })
    }

    /// The outer map that is pinned under this name.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` if it is a map of another kind.
    pub fn pinned(path: &Path) -> io::Result<Self> {
        let fd = pinned_numbers(path, BPF_MAP_TYPE_ARRAY_OF_MAPS)?;
        Ok(Self { fd })
    }

    /// Sets the inner map, which must have the type and the sizes of the map that was passed to
    /// [`new`](Self::new). Waits until no program uses the previous inner map.
    ///
    /// # Errors
    /// If the maps differ in kind or size.
    pub fn put<const KEY: usize, const VALUE: usize>(
        &self,
        map: &SharedMap<KEY, VALUE>,
    ) -> io::Result<()> {
        self.element(BPF_MAP_UPDATE_ELEM, number(&map.fd))
    }

    /// Empties the entry: BPF programs find no inner map.
    pub fn clear(&self) {
        // An absent entry is not an error.
        let _ = self.element(BPF_MAP_DELETE_ELEM, 0);
    }

    fn element(&self, command: libc::c_long, map: u32) -> io::Result<()> {
        place(&self.fd, command, 0, map)
    }

    /// Does the same as [`SharedArray::pin`].
    ///
    /// # Errors
    /// If the directory does not exist, or the name is in use.
    pub fn pin(&self, path: &Path) -> io::Result<()> {
        pin(&self.fd, path)
    }

    /// The number of the map's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// A slot for the index of a network device, for BPF programs. The kernel empties the slot when the
/// device is removed.
#[derive(Debug)]
pub struct DeviceSlot {
    fd: OwnedFd,
}

impl DeviceSlot {
    /// An empty slot.
    ///
    /// # Errors
    /// As [`SharedArray::new`].
    pub fn new(name: &str) -> io::Result<Self> {
        let fd = create_map(name, BPF_MAP_TYPE_DEVMAP, [4; 2], 1, 0)?;
        Ok(Self { fd })
    }

    /// Sets the device.
    ///
    /// # Errors
    /// If there is no device with this index in this network namespace.
    pub fn set(&self, ifindex: u32) -> io::Result<()> {
        place(&self.fd, BPF_MAP_UPDATE_ELEM, 0, ifindex)
    }

    /// The number of the map's descriptor, for the instructions of a program.
    pub fn number(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// Sets or deletes an entry of a map of programs, maps or devices.
pub(super) fn place(map: &OwnedFd, command: libc::c_long, key: u32, value: u32) -> io::Result<()> {
    let mut request = Element {
        map: number(map),
        unused: 0,
        key: ptr::from_ref(&key).expose_provenance() as u64,
        value: ptr::from_ref(&value).expose_provenance() as u64,
        flags: 0,
    };
    // SAFETY: key and value live until after the call, and are 4 bytes long, as those of every map
    // of programs, maps or devices (`new`, `pinned_numbers`).
    unsafe { call(command, &mut request) }.map(drop)
}

/// Memory for a connection table in arrays that programs read: narrow slots, their tags, wide
/// slots, their tags, and the overflow, which no program reads. Each array has a region of equal
/// length for each of `tables` tables, and this is the memory of table `number`.
///
/// # Errors
/// If the regions are shorter than `layout` requires, or there is no such table.
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

/// Creates a map with the given number of entries, and the given sizes of keys and values.
pub(super) fn create_map(
    name: &str,
    kind: u32,
    [key, value]: [u32; 2],
    entries: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    let mut request = CreateMap {
        kind,
        key,
        value,
        entries,
        flags,
        inner: 0,
        node: 0,
        name: short_name(name),
    };
    // SAFETY: there are no addresses in it.
    unsafe { descriptor(BPF_MAP_CREATE, &mut request) }
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
        let unsealed = SharedArray::of_file(&file, 0, 1024).expect_err("the file is not sealed");
        assert_eq!(unsealed.kind(), io::ErrorKind::InvalidInput);
        seal(&file)?;
        let array = SharedArray::of_file(&file, 4096, 512)?;
        array.words()[511].store(7, Relaxed);
        for len in [0, 4096, 16_384] {
            file.set_len(len).expect_err("its length is fixed");
        }
        assert_eq!(array.words()[511].load(Relaxed), 7);
        for (offset, words) in [(4096, 513), (0, usize::MAX / 4), (u64::MAX, 1)] {
            SharedArray::of_file(&file, offset, words).expect_err("the file is shorter");
        }
        let ordinary = tempfile::tempfile()?;
        ordinary.set_len(8192)?;
        SharedArray::of_file(&ordinary, 0, 1024).expect_err("the file does not support seals");
        Ok(())
    }
}
