//! What programs of the classic packet filter are made of (linux/filter.h). No unsafe here: a
//! program is numbers, which the kernel checks.

/// One instruction.
pub(crate) type Op = libc::sock_filter;

pub(crate) const LOAD: u16 = 0x20;
pub(crate) const LOAD_16: u16 = 0x28;
pub(crate) const LOAD_8: u16 = 0x30;
pub(crate) const LOAD_16_AT_X: u16 = 0x48;
pub(crate) const LOAD_8_AT_X: u16 = 0x50;
pub(crate) const LOAD_K: u16 = 0x00;
pub(crate) const LOAD_MEMORY: u16 = 0x60;
pub(crate) const LOAD_X_K: u16 = 0x01;
pub(crate) const LOAD_X_MEMORY: u16 = 0x61;
pub(crate) const STORE: u16 = 0x02;
pub(crate) const STORE_X: u16 = 0x03;
pub(crate) const ADD: u16 = 0x04;
pub(crate) const ADD_X: u16 = 0x0c;
pub(crate) const MULTIPLY: u16 = 0x24;
pub(crate) const MODULO: u16 = 0x94;
pub(crate) const AND: u16 = 0x54;
pub(crate) const SHIFT_LEFT: u16 = 0x64;
pub(crate) const SHIFT_RIGHT: u16 = 0x74;
pub(crate) const XOR_X: u16 = 0xac;
pub(crate) const TO_X: u16 = 0x07;
pub(crate) const IF_EQUAL: u16 = 0x15;
pub(crate) const IF_GREATER: u16 = 0x25;
pub(crate) const IF_NOT_LESS: u16 = 0x35;
pub(crate) const IF_ANY_BIT: u16 = 0x45;
pub(crate) const JUMP: u16 = 0x05;
pub(crate) const RETURN: u16 = 0x06;
pub(crate) const RETURN_A: u16 = 0x16;

/// An instruction; `jt` and `jf`: how many to pass over if a condition is true, or false.
pub(crate) const fn op(code: u16, jt: u8, jf: u8, k: u32) -> Op {
    Op { code, jt, jf, k }
}

/// What the kernel knows of a frame beside its bytes (`SKF_AD_OFF`), by number.
pub(crate) const fn ancillary(word: u32) -> u32 {
    (-0x1000_i32).cast_unsigned().wrapping_add(word)
}
pub(crate) const PROTOCOL: u32 = 0;
pub(crate) const PACKET_TYPE: u32 = 4;
pub(crate) const MARK: u32 = 20;
pub(crate) const TAG_PRESENT: u32 = 48;

/// A byte of the network header (`SKF_NET_OFF`).
pub(crate) const fn network(byte: u32) -> u32 {
    (-0x10_0000_i32).cast_unsigned().wrapping_add(byte)
}
