//! The handshake of two peers and the format of their messages. The *sender*
//! sends connections, and the *receiver* stores them.
//!
//! ```text
//! receiver ─ magic 8 | identity 16 | nonce 32 ──────────────────────────────▶ sender
//!          ◀─ magic 8 | identity 16 | nonce 32 | proof 32 ──────────────────
//!          ─ proof 32 ──────────────────────────────────────────────────────▶
//!
//! nonce    random 24 | marker 6 | supported features 2
//! frame    length 4 | kind 1 | payload | code 16
//! ```
//!
//! A frame that a peer does not support ends the session, so a peer sends only frames of the
//! features that the other peer has announced. A peer of an older version announces nothing: its
//! whole nonce is random. In one of 2^48 sessions, bytes 24 to 29 of this nonce equal the marker by
//! chance: such a session ends, and the peers open another one.
//!
//! A proof is an HMAC-SHA-256 with the shared key over both introductions, with a different label
//! for each side. Each direction of a session has its own key, which is derived from the shared key
//! and both introductions. The code of a frame covers its sequence number too, so an attacker
//! cannot change, repeat or omit a frame, or move it to another session, without ending the
//! session. Frames are not encrypted.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use lvs_core::sync::bulk::DIGEST_LEN;
use lvs_core::sync::services::{SERVICE_LEN, SERVICES_MAX};
use sha2::Sha256;

use lvs_api::directors;

/// The first bytes of each session, in both directions.
const MAGIC: [u8; 8] = *b"LVSPEER1";
/// Length of an [`Introduction`] in bytes.
pub(super) const INTRODUCTION_LEN: usize = 56;
/// Length of a proof in bytes.
pub(super) const PROOF_LEN: usize = 32;

/// The longest payload in bytes: a digest of connections with the digests of all services.
pub(super) const PAYLOAD_MAX: usize = 8 + DIGEST_LEN + SERVICES_MAX * SERVICE_LEN;
const HEADER_LEN: usize = 5;
const CODE_LEN: usize = 16;

/// The secret key of all peers.
#[derive(Clone)]
pub(super) struct Key(Vec<u8>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Reads the key from a file, see [`directors::read_key`].
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        directors::read_key(path).map(Self)
    }

    #[cfg(test)]
    pub(super) fn of(text: &[u8]) -> Self {
        Self(text.to_vec())
    }

    fn code(&self, label: &str, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = new_mac(&self.0);
        mac.update(label.as_bytes());
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}

fn new_mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// Bytes 24 to 29 of a nonce whose last two bytes are flags: the features of its sender.
const MARKER: [u8; 6] = *b"\xf1lvsp\xf1";
const SERVICES: u16 = 4;

/// The first message of each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    /// Random bytes that identify this run of the dataplane.
    pub(super) identity: [u8; 16],
    pub(super) nonce: [u8; 32],
}

impl Introduction {
    /// Creates the introduction of this director, with random bytes for its nonce.
    pub(super) fn new(identity: [u8; 16], random: [u8; 24]) -> Self {
        let mut nonce = [0; 32];
        nonce[..24].copy_from_slice(&random);
        nonce[24..30].copy_from_slice(&MARKER);
        nonce[30..].copy_from_slice(&SERVICES.to_be_bytes());
        Self { identity, nonce }
    }

    fn compares_services(&self) -> bool {
        let [.., high, low] = self.nonce;
        self.nonce[24..30] == MARKER && u16::from_be_bytes([high, low]) & SERVICES != 0
    }

    pub(super) fn to_bytes(self) -> [u8; INTRODUCTION_LEN] {
        let mut bytes = [0; INTRODUCTION_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.identity);
        bytes[24..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Parses an introduction; `None` if the magic number is wrong.
    pub(super) fn parse(bytes: &[u8; INTRODUCTION_LEN]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (identity, nonce) = rest.split_first_chunk()?;
        Some(Self {
            identity: *identity,
            nonce: nonce.try_into().ok()?,
        })
    }
}

/// The introductions of both peers, and the key.
#[derive(Debug)]
pub(super) struct Handshake {
    key: Key,
    receiver: [u8; INTRODUCTION_LEN],
    sender: [u8; INTRODUCTION_LEN],
    services: bool,
}

const TELLER: &str = "lvs peer: I tell";
const LISTENER: &str = "lvs peer: I listen";
const REPLICATED: &str = "lvs peer: what is told";
const ASKED: &str = "lvs peer: what is asked";

impl Handshake {
    pub(super) fn new(key: &Key, receiver: Introduction, sender: Introduction) -> Self {
        Self {
            key: key.clone(),
            receiver: receiver.to_bytes(),
            sender: sender.to_bytes(),
            services: receiver.compares_services() && sender.compares_services(),
        }
    }

    /// Whether both peers send digests of their services, to compare them.
    pub(super) fn compares_services(&self) -> bool {
        self.services
    }

    fn code(&self, label: &str) -> [u8; 32] {
        self.key.code(label, &[&self.receiver, &self.sender])
    }

    pub(super) fn sender_proof(&self) -> [u8; PROOF_LEN] {
        self.code(TELLER)
    }

    pub(super) fn receiver_proof(&self) -> [u8; PROOF_LEN] {
        self.code(LISTENER)
    }

    /// Whether the sender's proof is valid. Compares in constant time.
    pub(super) fn is_sender(&self, proof: &[u8; PROOF_LEN]) -> bool {
        self.verify(TELLER, proof)
    }

    /// Whether the receiver's proof is valid. Compares in constant time.
    pub(super) fn is_receiver(&self, proof: &[u8; PROOF_LEN]) -> bool {
        self.verify(LISTENER, proof)
    }

    fn verify(&self, label: &str, proof: &[u8; PROOF_LEN]) -> bool {
        let mut mac = new_mac(&self.key.0);
        mac.update(label.as_bytes());
        mac.update(&self.receiver);
        mac.update(&self.sender);
        mac.verify_slice(proof).is_ok()
    }

    /// The authentication state of frames that the sender writes.
    pub(super) fn replicated(&self) -> Sequence {
        Sequence::new(self.code(REPLICATED))
    }

    /// The authentication state of frames that the receiver writes.
    pub(super) fn asked(&self) -> Sequence {
        Sequence::new(self.code(ASKED))
    }
}

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// From the sender: the keys of the hash function of its digests, 16 bytes.
    Keys = 1,
    /// From the sender: connections and templates.
    Items = 2,
    /// From the sender: a serial number of 8 bytes, the digest of all connections as of the
    /// preceding frames, and, if both peers support this, the digests of the sender's services.
    Digest = 3,
    /// From the sender: the full sync is complete.
    Whole = 4,
    /// From the receiver: the numbers of the ranges of connections that the sender must send again,
    /// 2 bytes each.
    Want = 5,
    /// From the receiver: the serial number of a digest that it has compared.
    Seen = 6,
}

impl Kind {
    const ALL: [Self; 6] = [
        Self::Keys,
        Self::Items,
        Self::Digest,
        Self::Whole,
        Self::Want,
        Self::Seen,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Parses the payload of [`Kind::Keys`].
pub(super) fn keys(bytes: [u8; 16]) -> [u64; 2] {
    let (words, _) = bytes.as_chunks();
    [words[0], words[1]].map(u64::from_be_bytes)
}

/// The reason why a session ends while frames are read.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The connection was closed, has failed or has timed out.
    Io(io::Error),
    /// A frame exceeds the longest payload.
    TooLong,
    /// The authentication code of a frame is wrong: the frame was changed, repeated or reordered,
    /// or its writer does not have the key.
    Forged,
    /// The frame is authentic, but violates the protocol.
    Malformed,
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the peer has closed the connection")
            }
            Self::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
                f.write_str("the peer has sent nothing, or has read nothing, for too long")
            }
            Self::Io(error) => error.fmt(f),
            Self::TooLong => f.write_str("the peer sent a frame above the maximum length"),
            Self::Forged => f.write_str("the peer's data was changed in transit"),
            Self::Malformed => {
                f.write_str("the peer sent an unknown message: does it run another version?")
            }
        }
    }
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

#[derive(Clone)]
pub(super) struct Sequence {
    mac: Hmac<Sha256>,
    next: u64,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence")
            .field("next", &self.next)
            .finish()
    }
}

impl Sequence {
    fn new(key: [u8; 32]) -> Self {
        Self {
            mac: new_mac(&key),
            next: 0,
        }
    }

    /// Computes the authentication code of the next frame, and counts the frame.
    fn mac(&mut self, header: &[u8], payload: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        mac.update(&self.next.to_be_bytes());
        mac.update(header);
        mac.update(payload);
        self.next += 1;
        mac
    }

    /// Appends a frame to `out`.
    ///
    /// # Panics
    /// If the payload is longer than [`PAYLOAD_MAX`].
    pub(super) fn seal(&mut self, kind: Kind, payload: &[u8], out: &mut Vec<u8>) {
        assert!(
            payload.len() <= PAYLOAD_MAX,
            "the payload exceeds the maximum length"
        );
        let len = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
        let header = [len[0], len[1], len[2], len[3], kind as u8];
        let code = self.mac(&header, payload).finalize().into_bytes();
        out.extend(header);
        out.extend(payload);
        out.extend(&code[..CODE_LEN]);
    }

    pub(super) fn read(&mut self, from: &mut impl Read) -> Result<(Kind, Vec<u8>), FrameError> {
        let mut header = [0; HEADER_LEN];
        from.read_exact(&mut header)?;
        let [a, b, c, d, kind] = header;
        let len = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if len > PAYLOAD_MAX {
            return Err(FrameError::TooLong);
        }
        let mut payload = vec![0; len + CODE_LEN];
        from.read_exact(&mut payload)?;
        let code = payload.split_off(len);
        self.mac(&header, &payload)
            .verify_truncated_left(&code)
            .map_err(|_| FrameError::Forged)?;
        let kind = Kind::of(kind).ok_or(FrameError::Malformed)?;
        Ok((kind, payload))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn handshake(key: &[u8], nonce: u8) -> Handshake {
        let introduction = |identity, nonce| Introduction {
            identity: [identity; 16],
            nonce: [nonce; 32],
        };
        let key = Key::of(key);
        Handshake::new(&key, introduction(1, nonce), introduction(2, 8))
    }

    #[test]
    fn handshake_proof_is_valid_for_one_side_one_key_and_one_session() {
        let ours = handshake(b"one", 1);
        assert!(ours.is_sender(&ours.sender_proof()) && ours.is_receiver(&ours.receiver_proof()));
        assert!(
            !ours.is_sender(&ours.receiver_proof()),
            "a receiver's proof is also valid for a sender"
        );
        for other in [handshake(b"two", 1), handshake(b"one", 2)] {
            assert!(!ours.is_sender(&other.sender_proof()));
            assert!(!ours.is_receiver(&other.receiver_proof()));
        }
        let bytes = Introduction {
            identity: [3; 16],
            nonce: [4; 32],
        };
        assert_eq!(Introduction::parse(&bytes.to_bytes()), Some(bytes));
        assert_eq!(Introduction::parse(&[0; INTRODUCTION_LEN]), None);
    }

    #[test]
    fn service_comparison_requires_authenticated_marker_in_nonces_of_both_peers() {
        let new = Introduction::new([3; 16], [4; 24]);
        let old = Introduction {
            identity: [5; 16],
            nonce: [6; 32],
        };
        assert!(new.compares_services() && !old.compares_services());
        assert_eq!(Introduction::parse(&new.to_bytes()), Some(new));
        let both = |receiver, sender| {
            Handshake::new(&Key::of(b"one"), receiver, sender).compares_services()
        };
        assert!(both(new, new) && !both(new, old) && !both(old, new));
        // The proofs cover the marker: an attacker who removes it makes them invalid.
        let mut without = new;
        without.nonce[31] = 0;
        assert!(!without.compares_services());
        let [replicated, heard] =
            [new, without].map(|it| Handshake::new(&Key::of(b"one"), new, it));
        assert!(!heard.is_sender(&replicated.sender_proof()));
    }

    #[test]
    fn sealed_peer_frames_are_opened_in_order_and_forged_frames_are_refused() {
        let handshake = handshake(b"one", 1);
        let (mut sealed, mut ends) = (Vec::new(), Vec::new());
        let mut replicated = handshake.replicated();
        for (kind, payload) in [
            (Kind::Items, &b"first"[..]),
            (Kind::Digest, &[7; PAYLOAD_MAX]),
            (Kind::Whole, b""),
        ] {
            replicated.seal(kind, payload, &mut sealed);
            ends.push(sealed.len());
        }
        let mut from = &sealed[..];
        let mut read = handshake.replicated();
        assert_eq!(
            read.read(&mut from).unwrap(),
            (Kind::Items, b"first".to_vec())
        );
        assert_eq!(read.read(&mut from).unwrap().1.len(), PAYLOAD_MAX);
        assert_eq!(read.read(&mut from).unwrap(), (Kind::Whole, Vec::new()));
        assert!(matches!(read.read(&mut from), Err(FrameError::Io(_))));

        // The frame is repeated, reordered, changed, or from the other direction.
        let forged = |mut read: Sequence, mut bytes: &[u8]| {
            matches!(read.read(&mut bytes), Err(FrameError::Forged))
        };
        let mut second = handshake.replicated();
        second.read(&mut &sealed[..]).unwrap();
        assert!(forged(second, &sealed));
        assert!(forged(handshake.replicated(), &sealed[ends[0]..]));
        assert!(forged(handshake.asked(), &sealed));
        for at in 0..ends[0] {
            let mut changed = sealed[..ends[0]].to_vec();
            changed[at] ^= 1;
            changed.resize(PAYLOAD_MAX * 2, 0);
            let answer = handshake.replicated().read(&mut &changed[..]);
            assert!(
                matches!(answer, Err(FrameError::Forged | FrameError::TooLong)),
                "a change of byte {at} was not detected"
            );
        }
    }

    #[test]
    fn peer_key_file_that_is_missing_unsafe_or_of_wrong_length_is_refused() {
        let dir = std::env::temp_dir().join(format!("lvs-key-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("the directory can be created");
        let path = dir.join("key");
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).expect("the file can be written");
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("the permissions can be set");
            Key::read(&path).map(|key| key.0)
        };
        let good = "0123456789abcdef0123456789abcdef";
        assert_eq!(write(&format!(" {good}\n"), 0o640), Ok(good.into()));
        write(good, 0o660).expect_err("a key file that its group may write was accepted");
        let output =
            write(good, 0o644).expect_err("a key file that all users may read was accepted");
        assert!(output.contains("chmod 600"), "{output}");
        let output = write("short", 0o600).expect_err("a key that is too short was accepted");
        assert!(output.contains("openssl rand -hex 32"), "{output}");
        assert!(write(&"x".repeat(5000), 0o600).is_err());
        std::fs::remove_dir_all(&dir).expect("the directory can be removed");
        let output = Key::read(&path).expect_err("a key was read from a missing file");
        assert!(output.contains("cannot read the key"), "{output}");
    }

    proptest::proptest! {
        #[test]
        fn peer_frame_of_random_bytes_is_refused(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let mut from = &bytes[..];
            proptest::prop_assert!(handshake(b"one", 1).replicated().read(&mut from).is_err());
        }
    }
}
