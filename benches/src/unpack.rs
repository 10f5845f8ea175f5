//! The receiving end of IPIP tunnels on a kernel without `ipip`: a program at the ingress of an
//! interface removes the outer header. GSO/GRO super-packets stay whole, as with the kernel's own
//! tunnel devices. Fragments are passed to the host, which reassembles them.

use std::thread;

use anyhow::{Context, Result};
use lvs_sys::{Instruction, Program, ProgramKind};

/// Unpacks tunnel packets that arrive on an interface, until the process is killed. Prints `ready`
/// when it has begun.
///
/// # Errors
///
/// If the interface does not exist, or the kernel has no tcx (it exists since Linux 6.6).
pub(crate) fn run(device: &str) -> Result<()> {
    let index = format!("/sys/class/net/{device}/ifindex");
    let index = std::fs::read_to_string(&index).with_context(|| index.clone())?;
    let program = Program::load(ProgramKind::Ingress, "unpack", &CODE)?;
    let _attached = program.attach(index.trim().parse()?)?;
    println!("ready");
    loop {
        thread::park();
    }
}

/// Offset of the fragment field in the outer IP header, after the Ethernet header; hop limit and
/// protocol follow.
const PLACE: i32 = 14 + 6;
/// Mask of the compared bits: all except "don't fragment" and the hop limit.
const MASK: i32 = i32::from_ne_bytes([0xbf, 0xff, 0, 0xff]);
/// The compared bits of a packet that is not a fragment and has the protocol IPIP.
const WHOLE: i32 = i32::from_ne_bytes([0, 0, 0, 4]);
/// Length of the outer header in bytes.
const HEADER: i32 = 20;
/// `ETH_P_IP`, in the byte order of `__sk_buff`.
const IPV4: i32 = 0x0800_u16.to_be() as i32;
/// `BPF_ADJ_ROOM_MAC`: adjusts the room between the Ethernet and the IP header.
const BEHIND_ETHERNET: i32 = 1;
/// `BPF_F_ADJ_ROOM_FIXED_GSO` and `BPF_F_ADJ_ROOM_DECAP_L3_IPV4`: the removed bytes are an outer
/// header of IPv4, and the length of segments is unchanged.
const FLAGS: i32 = 1 | 1 << 7;
const LOAD_BYTES: i32 = 26;
const ADJUST_ROOM: i32 = 50;
/// `TCX_NEXT`.
const NEXT: i32 = -1;

const CODE: [Instruction; 20] = [
    op(0xbf, 0x16, 0, 0),               // r6 = the packet
    op(0x61, 0x61, 16, 0),              // r1 = its protocol
    op(0x55, 0x01, 15, IPV4),           // to the end, unless that is IPv4
    op(0xbf, 0x61, 0, 0),               // r1 = the packet
    op(0xb4, 0x02, 0, PLACE),           // w2 = from where
    op(0xbf, 0xa3, 0, 0),               // r3 = to where: the stack
    op(0x07, 0x03, 0, -8),              //
    op(0xb4, 0x04, 0, 4),               // w4 = how much
    op(0x85, 0x00, 0, LOAD_BYTES),      //
    op(0x55, 0x00, 8, 0),               // to the end, if there is none
    op(0x61, 0xa1, -8, 0),              // r1 = what was there
    op(0x54, 0x01, 0, MASK),            // w1 &= what matters
    op(0x56, 0x01, 5, WHOLE),           // to the end, unless it is that
    op(0xbf, 0x61, 0, 0),               // r1 = the packet
    op(0xb4, 0x02, 0, -HEADER),         // w2 = so much more
    op(0xb4, 0x03, 0, BEHIND_ETHERNET), // w3
    op(0xb4, 0x04, 0, FLAGS),           // w4
    op(0x85, 0x00, 0, ADJUST_ROOM),     //
    op(0xb4, 0x00, 0, NEXT),            // w0 = go on
    op(0x95, 0x00, 0, 0),               // return w0
];

const fn op(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}
