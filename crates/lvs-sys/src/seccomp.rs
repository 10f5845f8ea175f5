//! A seccomp filter that refuses some system calls and permits all others (seccomp(2)).
use std::io;

use crate::classic::{IF_EQUAL, IF_NOT_LESS, LOAD, Op, RETURN, op};

/// Action for system calls by the conventions of another architecture (32-bit programs), in which
/// the numbers mean other calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// The kernel executes these calls.
    Made,
    /// The kernel refuses these calls with `EPERM`.
    Refused,
}

/// `AUDIT_ARCH_*` (linux/audit.h) of the target architecture.
#[cfg(target_arch = "x86_64")]
pub(crate) const ARCHITECTURE: Option<u32> = Some(0xc000_003e);
#[cfg(target_arch = "aarch64")]
pub(crate) const ARCHITECTURE: Option<u32> = Some(0xc000_00b7);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) const ARCHITECTURE: Option<u32> = None;

/// System call numbers with this bit are those of x32.
const X32: u32 = 0x4000_0000;

/// Offsets of the system call number and the architecture in `struct seccomp_data`.
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCH: u32 = 4;

/// Returns the filter program: it refuses `calls`, fewer than 250, with `EPERM`, and permits or
/// refuses calls by foreign conventions, as `foreign` specifies.
fn program(architecture: u32, calls: &[i64], foreign: Foreign) -> Vec<Op> {
    let refuse = op(
        RETURN,
        0,
        0,
        libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned(),
    );
    let make = op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW);
    let stranger = match foreign {
        Foreign::Made => make,
        Foreign::Refused => refuse,
    };
    let mut all = vec![
        op(LOAD, 0, 0, ARCH),
        op(IF_EQUAL, 1, 0, architecture),
        stranger,
        op(LOAD, 0, 0, NUMBER),
        op(IF_NOT_LESS, 0, 1, X32),
        stranger,
    ];
    let count = calls.len();
    for (index, call) in calls.iter().enumerate() {
        // The jump skips the remaining comparisons and the instruction after the last one.
        let past = u8::try_from(count - index).unwrap_or(u8::MAX);
        all.push(op(
            IF_EQUAL,
            past,
            0,
            u32::try_from(*call).unwrap_or(X32 - 1),
        ));
    }
    all.extend([make, refuse]);
    all
}

/// From now on, the kernel refuses `calls` with `EPERM`, and permits or refuses calls by foreign
/// conventions, as `foreign` specifies. This applies to all threads of this process, and to all
/// processes that they start.
pub fn refuse(calls: &[i64], foreign: Foreign) -> io::Result<()> {
    let Some(architecture) = ARCHITECTURE else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let mut all = program(architecture, calls, foreign);
    let length = u16::try_from(all.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog {
        len: length,
        filter: all.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions live until after the call, which copies them.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    match done {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // With this flag, the kernel returns the number of a thread that already has another
        // filter.
        thread => Err(io::Error::other(format!(
            "thread {thread} already has another seccomp filter"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classic::run;

    fn verdict(program: &[Op], arch: u32, number: u32) -> u32 {
        run(program, |offset| match offset {
            ARCH => arch,
            _ => number,
        })
    }

    #[test]
    fn seccomp_refuses_listed_calls_and_optionally_foreign_architectures() {
        let calls: Vec<i64> = (10..70).collect();
        for (foreign, others) in [
            (Foreign::Made, libc::SECCOMP_RET_ALLOW),
            (Foreign::Refused, libc::SECCOMP_RET_ERRNO | 1),
        ] {
            let all = program(7, &calls, foreign);
            for number in 0..100 {
                let refused = (10..70).contains(&number);
                let expected = match refused {
                    true => libc::SECCOMP_RET_ERRNO | 1,
                    false => libc::SECCOMP_RET_ALLOW,
                };
                assert_eq!(verdict(&all, 7, number), expected, "{number}");
                assert_eq!(verdict(&all, 8, number), others, "{number}");
                assert_eq!(verdict(&all, 7, number | X32), others, "{number}");
            }
        }
    }
}
