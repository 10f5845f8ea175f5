//! Instructions of the classic packet filter (linux/filter.h). This module needs no `unsafe`: a
//! program consists of numbers, which the kernel checks.
#![allow(
    missing_docs,
    reason = "the names are those of linux/filter.h, shortened"
)]

/// An instruction of the classic packet filter.
pub type Op = libc::sock_filter;

pub const LOAD: u16 = 0x20;
pub const LOAD_16: u16 = 0x28;
pub const LOAD_8: u16 = 0x30;
pub const LOAD_16_AT_X: u16 = 0x48;
pub const LOAD_8_AT_X: u16 = 0x50;
pub const LOAD_K: u16 = 0x00;
pub const LOAD_MEMORY: u16 = 0x60;
pub const LOAD_X_K: u16 = 0x01;
pub const LOAD_X_MEMORY: u16 = 0x61;
pub const STORE: u16 = 0x02;
pub const STORE_X: u16 = 0x03;
pub const ADD: u16 = 0x04;
pub const ADD_X: u16 = 0x0c;
pub const MULTIPLY: u16 = 0x24;
pub const MODULO: u16 = 0x94;
pub const AND: u16 = 0x54;
pub const SHIFT_LEFT: u16 = 0x64;
pub const SHIFT_RIGHT: u16 = 0x74;
pub const XOR_X: u16 = 0xac;
pub const TO_X: u16 = 0x07;
pub const IF_EQUAL: u16 = 0x15;
pub const IF_GREATER: u16 = 0x25;
pub const IF_NOT_LESS: u16 = 0x35;
pub const IF_ANY_BIT: u16 = 0x45;
pub const JUMP: u16 = 0x05;
pub const RETURN: u16 = 0x06;
pub const RETURN_A: u16 = 0x16;

/// An instruction. `jt` and `jf` are the numbers of instructions that it skips if its condition is
/// true or false.
pub const fn op(code: u16, jt: u8, jf: u8, k: u32) -> Op {
    Op { code, jt, jf, k }
}

/// Offset of a property of a frame that the kernel keeps outside the bytes of the frame
/// (`SKF_AD_OFF`). `word` is the number of the property.
pub const fn ancillary(word: u32) -> u32 {
    (-0x1000_i32).cast_unsigned().wrapping_add(word)
}
pub const PROTOCOL: u32 = 0;
pub const PACKET_TYPE: u32 = 4;
pub const MARK: u32 = 20;

/// Offset of a byte of the network header (`SKF_NET_OFF`).
pub const fn network(byte: u32) -> u32 {
    (-0x10_0000_i32).cast_unsigned().wrapping_add(byte)
}

/// Runs a program, and returns its result. `load` returns the 32-bit word at an offset.
#[cfg(test)]
pub(crate) fn run(program: &[Op], load: impl Fn(u32) -> u32) -> u32 {
    let (mut at, mut value) = (0, 0);
    loop {
        let one = program[at];
        at += 1;
        let skip_if = |holds: bool| usize::from(if holds { one.jt } else { one.jf });
        match one.code {
            LOAD => value = load(one.k),
            IF_EQUAL => at += skip_if(value == one.k),
            IF_NOT_LESS => at += skip_if(value >= one.k),
            JUMP => at += usize::try_from(one.k).expect("the offset fits"),
            RETURN => return one.k,
            other => panic!("unknown instruction {other:#x}"),
        }
    }
}
