//! The FUSE protocol (`linux/fuse.h`): requests of the kernel for the files of a file system in
//! userspace, and the replies to them.

use nix::errno::Errno;

use super::wire::{u32_at, u64_at};

pub(super) const LOOKUP: u32 = 1;
pub(super) const FORGET: u32 = 2;
pub(super) const GETATTR: u32 = 3;
pub(super) const SETATTR: u32 = 4;
pub(super) const READLINK: u32 = 5;
pub(super) const OPEN: u32 = 14;
pub(super) const READ: u32 = 15;
pub(super) const WRITE: u32 = 16;
pub(super) const STATFS: u32 = 17;
pub(super) const RELEASE: u32 = 18;
pub(super) const FLUSH: u32 = 25;
pub(super) const INIT: u32 = 26;
pub(super) const OPENDIR: u32 = 27;
pub(super) const READDIR: u32 = 28;
pub(super) const RELEASEDIR: u32 = 29;
pub(super) const INTERRUPT: u32 = 36;
pub(super) const BATCH_FORGET: u32 = 42;

/// Maximum length of the data of a `WRITE`, in bytes.
pub(super) const WRITE_MAX: usize = 4096;
/// Size of the buffer for a request, in bytes: the kernel requires 4,096 more than [`WRITE_MAX`].
pub(super) const REQUEST_MAX: usize = 2 * WRITE_MAX + 4096;

/// Length of `struct fuse_in_header` in bytes.
const IN: usize = 40;
/// Length of `struct fuse_out_header` in bytes.
const OUT: usize = 16;

/// Time in seconds for which the kernel may cache names and attributes.
const VALID_SECONDS: u64 = 60;

#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) operation: u32,
    pub(super) unique: u64,
    pub(super) node: u64,
    /// Id of the thread that makes the request.
    pub(super) thread: u32,
    /// The parameters of the operation.
    pub(super) body: &'a [u8],
}

impl<'a> Request<'a> {
    /// Parses a request; `None` if it is too short.
    pub(super) fn of(bytes: &'a [u8]) -> Option<Self> {
        Some(Self {
            operation: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
            thread: u32_at(bytes, 32)?,
            body: bytes.get(IN..)?,
        })
    }

    /// Whether the kernel expects no answer.
    pub(super) const fn is_notice(&self) -> bool {
        matches!(self.operation, FORGET | BATCH_FORGET | INTERRUPT)
    }

    /// The name that a `LOOKUP` requests; `None` if it is invalid.
    pub(super) fn name(&self) -> Option<&'a str> {
        let end = self.body.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&self.body[..end]).ok()
    }

    /// The number of the open file.
    pub(super) fn file(&self) -> Result<u64, Errno> {
        u64_at(self.body, 0).ok_or(Errno::EINVAL)
    }

    /// Returns offset and length of a `READ` or `READDIR`.
    pub(super) fn extent(&self) -> Result<(usize, usize), Errno> {
        let at = u64_at(self.body, 8).and_then(|at| usize::try_from(at).ok());
        let length = u32_at(self.body, 16).and_then(|length| usize::try_from(length).ok());
        at.zip(length).ok_or(Errno::EINVAL)
    }

    /// The bytes of a `WRITE`.
    pub(super) fn data(&self) -> Result<&'a [u8], Errno> {
        let length = u32_at(self.body, 16).and_then(|length| usize::try_from(length).ok());
        let data = self.body.get(40..).zip(length);
        data.and_then(|(data, length)| data.get(..length))
            .ok_or(Errno::EINVAL)
    }
}

/// Returns the answer to the request `unique`: data, or an error number.
pub(super) fn answer(unique: u64, result: Result<Vec<u8>, Errno>) -> Vec<u8> {
    let (errno, body) = match result {
        Ok(body) => (0, body),
        Err(errno) => (-(errno as i32), Vec::new()),
    };
    let length = u32::try_from(OUT + body.len()).unwrap_or(0);
    let mut answer = Vec::with_capacity(OUT + body.len());
    answer.extend(length.to_ne_bytes());
    answer.extend(errno.to_ne_bytes());
    answer.extend(unique.to_ne_bytes());
    answer.extend(body);
    answer
}

/// Answers `INIT` with the features of this server.
pub(super) fn init(body: &[u8]) -> Result<Vec<u8>, Errno> {
    const MAJOR: u32 = 7;
    /// The minor version of the protocol that this server needs, which Linux 5.4 has.
    const MINOR: u32 = 31;
    /// Features: `O_TRUNC` is a part of `OPEN`, and the kernel caches the targets of links.
    const ABILITIES: u32 = 1 << 3 | 1 << 23;
    let number = |at| u32_at(body, at).ok_or(Errno::EPROTO);
    if number(0)? != MAJOR {
        return Err(Errno::EPROTO);
    }
    let mut out = Vec::with_capacity(64);
    for value in [
        MAJOR,
        number(4)?.min(MINOR),
        0,
        number(12)? & ABILITIES,
        // Maximum number of background requests: 16. With 12, the device counts as congested.
        u32::from_ne_bytes([16, 0, 12, 0]),
        u32::try_from(WRITE_MAX).unwrap_or(0),
        1,
    ] {
        out.extend(value.to_ne_bytes());
    }
    out.resize(64, 0);
    Ok(out)
}

/// The attributes of a file, a link or a directory (`struct fuse_attr`), which the kernel reports
/// to callers of `stat`.
fn attributes(node: u64, mode: u32, length: usize) -> Vec<u8> {
    const BLOCK: u32 = 4096;
    let mut out = Vec::with_capacity(88);
    // Number, length, blocks and three times.
    for value in [node, length as u64, 0, 0, 0, 0] {
        out.extend(value.to_ne_bytes());
    }
    // Nanoseconds, mode, links, owner, group, device, block and flags.
    for value in [0, 0, 0, mode, 1, 0, 0, 0, BLOCK, 0] {
        out.extend(value.to_ne_bytes());
    }
    out
}

/// The answer to `LOOKUP`.
pub(super) fn entry(node: u64, mode: u32, length: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    for value in [node, 0, VALID_SECONDS, VALID_SECONDS, 0] {
        out.extend(value.to_ne_bytes());
    }
    out.extend(attributes(node, mode, length));
    out
}

/// The answer to `GETATTR` and `SETATTR`.
pub(super) fn attribute(node: u64, mode: u32, length: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(104);
    out.extend(VALID_SECONDS.to_ne_bytes());
    out.extend([0; 8]);
    out.extend(attributes(node, mode, length));
    out
}

/// The answer to `OPEN` and `OPENDIR`.
pub(super) fn opened(file: u64) -> Vec<u8> {
    /// Flag of an open file: the kernel does not cache its content, and ignores its length, which
    /// is unknown until the file is read.
    const DIRECT_IO: u32 = 1;
    let mut out = file.to_ne_bytes().to_vec();
    out.extend(DIRECT_IO.to_ne_bytes());
    out.extend([0; 4]);
    out
}

/// The answer to `WRITE`.
pub(super) fn written(length: usize) -> Vec<u8> {
    let length = u32::try_from(length).unwrap_or(0);
    [length.to_ne_bytes(), [0; 4]].concat()
}

/// The answer to `STATFS`: a file system without blocks.
pub(super) fn empty() -> Vec<u8> {
    const NAME_MAX: u32 = 255;
    let mut out = vec![0; 80];
    out[44..48].copy_from_slice(&NAME_MAX.to_ne_bytes());
    out
}

/// The answer to `READDIR`: the entries from `at` on that fit into `room`. Each entry has a type
/// (`S_IF*`) and a name.
pub(super) fn entries(all: &[(u32, String)], at: usize, room: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, (kind, name)) in all.iter().enumerate().skip(at) {
        let length = (24 + name.len()).next_multiple_of(8);
        if out.len() + length > room {
            break;
        }
        let end = out.len() + length;
        // The inode number in an entry has no meaning, but programs ignore an entry with number 0.
        for value in [1, index as u64 + 1] {
            out.extend(value.to_ne_bytes());
        }
        out.extend(u32::try_from(name.len()).unwrap_or(0).to_ne_bytes());
        out.extend((kind >> 12).to_ne_bytes());
        out.extend(name.as_bytes());
        out.resize(end, 0);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; IN];
        bytes[4..8].copy_from_slice(&operation.to_ne_bytes());
        bytes[8..16].copy_from_slice(&7_u64.to_ne_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn short_fuse_request_or_other_protocol_version_is_refused() {
        assert!(Request::of(&[0; IN - 1]).is_none());
        for operation in [READ, WRITE, READDIR, LOOKUP] {
            let bytes = request(operation, &[1; 15]);
            let short = Request::of(&bytes).expect("the request has a header");
            assert!(short.extent().is_err() && short.data().is_err());
            assert_eq!(
                short.name(),
                None,
                "a name without a final NUL was accepted"
            );
        }
        // The request is shorter than its header specifies.
        let bytes = request(WRITE, &[9; 41]);
        assert!(
            Request::of(&bytes)
                .expect("the request has a header")
                .data()
                .is_err()
        );
        assert!(init(&[7, 0, 0, 0]).is_err());
        assert!(
            init(&[8; 64]).is_err(),
            "another version of the protocol was accepted"
        );
    }

    #[test]
    fn fuse_answers_have_the_lengths_that_the_kernel_checks() {
        assert_eq!(entry(1, 0, 0).len(), 128);
        assert_eq!(attribute(1, 0, 0).len(), 104);
        assert_eq!(opened(1).len(), 16);
        assert_eq!(written(1).len(), 8);
        assert_eq!(empty().len(), 80);
        let mut body = [0; 64];
        body[..4].copy_from_slice(&7_u32.to_ne_bytes());
        body[4..8].copy_from_slice(&45_u32.to_ne_bytes());
        assert_eq!(
            init(&body)
                .expect("the version of the protocol is supported")
                .len(),
            64
        );
        let failure = answer(7, Err(Errno::ENOENT));
        assert_eq!(failure.len(), 16);
        assert_eq!(failure[4..8], (-2_i32).to_ne_bytes());
    }

    #[test]
    fn fuse_directory_is_read_in_pieces() {
        let all: Vec<_> = (0..9).map(|n| (0o100_000, format!("name{n}"))).collect();
        let (mut at, mut pieces) = (0, 0);
        while at < all.len() {
            let piece = entries(&all, at, 64);
            assert_eq!(piece.len() % 32, 0);
            at += piece.len() / 32;
            pieces += 1;
        }
        assert_eq!((at, pieces), (9, 5));
        assert!(entries(&all, 0, 31).is_empty() && entries(&all, 99, 64).is_empty());
    }
}
