//! Reinjection of frames: a BPF program makes frames that are sent on an interface with a certain
//! mark arrive on the same interface instead.
//!
//! If another process removes the program, or another program runs before it, the frame is really
//! sent, and must cause no harm. Its source is therefore the interface's own link-layer address, so
//! that switches learn the correct port. Its destination is the original source with one bit
//! changed, an address that no host has. The program exchanges the addresses and changes the bit
//! back.

use std::io;

use super::bpf::{Instruction, Program, ProgramKind, ProgramLink};

/// The loaded program, which can be attached to interfaces. It stays loaded as long as this value
/// or one of its [`TurnedBack`]s exists.
#[derive(Debug)]
pub struct TurnBack {
    program: Program,
    id: u32,
    mark: u32,
}

/// The bit of a link-layer address that marks it as locally administered, in its first byte.
const LOCAL: u8 = 0x02;

/// Changes a received frame to the form in which it is sent for reinjection; the program changes it
/// back.
pub fn turned(frame: &mut [u8]) {
    if let Some((addresses, _)) = frame.split_first_chunk_mut::<12>() {
        addresses.rotate_left(6);
        addresses[0] ^= LOCAL;
    }
}

/// The program, attached to the egress of one interface. It is detached when this value is dropped,
/// or the interface is removed.
#[derive(Debug)]
pub struct TurnedBack {
    _link: ProgramLink,
}

impl TurnBack {
    /// Loads the program for this mark, which is not 0.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_BPF` and `CAP_NET_ADMIN` in the initial user namespace;
    /// `Unsupported` or `InvalidInput` from kernels that lack a feature.
    pub fn load(mark: u32) -> io::Result<Self> {
        let op = |code, registers, offset, immediate| Instruction {
            code,
            registers,
            offset,
            immediate,
        };
        // Offsets in `__sk_buff`, and on the stack: both addresses before and after the change.
        const MARK: i16 = 8;
        const IFINDEX: i16 = 40;
        const BEFORE: i16 = -16;
        const AFTER: i16 = -32;
        const TCX_NEXT: i32 = -1;
        const TCX_DROP: i32 = 2;
        const BPF_F_INGRESS: i32 = 1;
        const BPF_FUNC_STORE_BYTES: i32 = 9;
        const BPF_FUNC_REDIRECT: i32 = 23;
        const BPF_FUNC_LOAD_BYTES: i32 = 26;
        let local = i32::from(u16::from_ne_bytes([LOCAL, 0]));
        let halfword = |from: i16, to: i16| {
            [
                op(0x69, 0xa1, BEFORE + from, 0), // r1 = a halfword of the stack
                op(0x6b, 0x1a, AFTER + to, 0),    // a halfword of the stack = r1
            ]
        };
        let mut program = vec![
            op(0xbf, 0x16, 0, 0),                   // r6 = skb
            op(0x61, 0x12, MARK, 0),                // w2 = skb->mark
            op(0xb4, 0x00, 0, TCX_NEXT),            // w0 = the next program decides
            op(0x56, 0x02, 34, mark.cast_signed()), // if w2 != mark goto end
            op(0xb7, 0x02, 0, 0),                   // r2 = 0
            op(0xbf, 0xa3, 0, 0),                   // r3 = stack
            op(0x07, 0x03, 0, BEFORE.into()),       // r3 += BEFORE
            op(0xb7, 0x04, 0, 12),                  // r4 = two addresses
            op(0x85, 0x00, 0, BPF_FUNC_LOAD_BYTES),
            op(0x55, 0x00, 27, 0), // if r0 != 0 goto drop
        ];
        program.extend((0..3).flat_map(|n| halfword(6 + 2 * n, 2 * n)));
        program.extend((0..3).flat_map(|n| halfword(2 * n, 6 + 2 * n)));
        program.extend([
            op(0x69, 0xa1, AFTER + 6, 0), // r1 = the first two bytes of the source
            op(0xa7, 0x01, 0, local),     // r1 ^= LOCAL
            op(0x6b, 0x1a, AFTER + 6, 0), // the first two bytes of the source = r1
            op(0xbf, 0x61, 0, 0),         // r1 = skb
            op(0xb7, 0x02, 0, 0),         // r2 = 0
            op(0xbf, 0xa3, 0, 0),         // r3 = stack
            op(0x07, 0x03, 0, AFTER.into()), // r3 += AFTER
            op(0xb7, 0x04, 0, 12),        // r4 = two addresses
            op(0xb7, 0x05, 0, 0),         // r5 = no flags
            op(0x85, 0x00, 0, BPF_FUNC_STORE_BYTES),
            op(0x55, 0x00, 4, 0),                 // if r0 != 0 goto drop
            op(0x61, 0x61, IFINDEX, 0),           // w1 = skb->ifindex
            op(0xb7, 0x02, 0, BPF_F_INGRESS),     // r2 = to the ingress
            op(0x85, 0x00, 0, BPF_FUNC_REDIRECT), // r0 = bpf_redirect(r1, r2)
            op(0x95, 0x00, 0, 0),                 // return r0
            op(0xb4, 0x00, 0, TCX_DROP),          // drop: w0 = drop
            op(0x95, 0x00, 0, 0),                 // end: return r0
        ]);
        let program = Program::load(ProgramKind::Egress, "lvs_back", &program)?;
        let id = program.id()?;
        Ok(Self { program, id, mark })
    }

    /// The mark of the frames that the program reinjects.
    pub const fn mark(&self) -> u32 {
        self.mark
    }

    /// Attaches the program to the egress of an interface, before all other BPF programs and `tc`
    /// filters.
    ///
    /// # Errors
    /// If the interface does not exist, or the kernel has no tcx (Linux 6.6).
    pub fn attach(&self, ifindex: u32) -> io::Result<TurnedBack> {
        let link = self.program.attach(ifindex)?;
        Ok(TurnedBack { _link: link })
    }

    /// Whether the program is attached to the egress of an interface, as its first program; an
    /// earlier program could drop frames.
    ///
    /// # Errors
    /// If the interface does not exist, or the kernel does not report its programs.
    pub fn is_first_at(&self, ifindex: u32) -> io::Result<bool> {
        self.program.is_first_at(self.id, ifindex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the program does not run, and the frame is really sent, no host accepts it, and no switch
    /// learns a wrong port from it.
    #[test]
    fn turned_frame_has_swapped_addresses_and_inverted_local_bit() {
        let mut frame = *b"\x02own..\x52theirs";
        turned(&mut frame);
        assert_eq!(&frame, b"\x50their\x02own..s");
        let mut short = [1; 11];
        turned(&mut short);
        assert_eq!(short, [1; 11]);
    }
}
