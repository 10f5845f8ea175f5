//! The seccomp filter that selects the system calls to report to the supervisor.
//!
//! The filter can read the arguments of a call, but not the memory of the program. It therefore
//! selects calls that send or receive by their descriptor numbers: the supervisor gives the sockets
//! of generic netlink high numbers. It selects `socket` by family and protocol, and `getsockopt`
//! and `setsockopt` by level and option.

use std::ops::Range;

use super::Kind;
use crate::classic::{IF_EQUAL, IF_NOT_LESS, JUMP, LOAD, Op, RETURN, op};
use crate::seccomp::{ARCH, ARCHITECTURE, NUMBER};

/// The option numbers of the old IPVS interface (`IP_VS_SO_*`), at level `IPPROTO_IP`.
pub const IPVS_OPTIONS: Range<u32> = 1152..1168;

/// Ranges of descriptor numbers; a program's generic netlink sockets get numbers in these ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Numbers of the sockets for which only system calls that send are reported.
    pub plain: Range<u32>,
    /// Numbers of the sockets for which system calls that send or receive are reported. This range
    /// follows `plain`.
    pub strict: Range<u32>,
}

impl Places {
    /// Upper limit of the descriptor numbers: 1,024, because `select` accepts no larger numbers.
    const END: u32 = 1024;
    /// Number of descriptor numbers in each range.
    const EACH: u32 = 32;

    /// Returns the highest possible ranges for a program that may have `limit` descriptors; `None`
    /// if it may have too few.
    pub fn below(limit: u64) -> Option<Self> {
        let end = u32::try_from(limit).map_or(Self::END, |limit| limit.min(Self::END));
        let middle = end.checked_sub(Self::EACH)?;
        let start = middle.checked_sub(Self::EACH)?;
        // Lower numbers are for the program's own descriptors.
        (start >= Self::EACH).then_some(Self {
            plain: start..middle,
            strict: middle..end,
        })
    }
}

/// Offset of the lower half of an argument: the kernel reads descriptors, levels and options as
/// `int`.
const fn argument(index: u32) -> u32 {
    let low = if cfg!(target_endian = "big") { 4 } else { 0 };
    16 + 8 * index + low
}

const ALLOW: Op = op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW);
const NOTIFY: Op = op(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF);

/// Instructions that report the call if argument `index` is in `range`, and otherwise allow it.
fn in_range(index: u32, range: Range<u32>) -> [Op; 5] {
    [
        op(LOAD, 0, 0, argument(index)),
        op(IF_NOT_LESS, 0, 1, range.start),
        op(IF_NOT_LESS, 0, 1, range.end),
        ALLOW,
        NOTIFY,
    ]
}

/// Instructions that allow the call unless argument `index` equals `value`.
fn equals(index: u32, value: u32) -> [Op; 3] {
    [
        op(LOAD, 0, 0, argument(index)),
        op(IF_EQUAL, 1, 0, value),
        ALLOW,
    ]
}

/// The filter; `None` for an architecture whose system call numbers this module does not have. It
/// never reports calls by the conventions of another architecture (32-bit programs, x32).
pub(super) fn program(places: &Places) -> Option<Vec<Op>> {
    let mut all = vec![
        op(LOAD, 0, 0, ARCH),
        op(IF_EQUAL, 1, 0, ARCHITECTURE?),
        ALLOW,
        op(LOAD, 0, 0, NUMBER),
    ];
    let mut group = |kinds: &[Kind], body: &[Op]| {
        for (index, kind) in kinds.iter().enumerate() {
            let number = Kind::ALL.iter().find(|(of, _)| of == kind);
            let number = number.and_then(|(_, number)| u32::try_from(*number).ok());
            // The jump skips the remaining comparisons and the jump instruction.
            let past = u8::try_from(kinds.len() - index).unwrap_or(u8::MAX);
            all.push(op(IF_EQUAL, past, 0, number.unwrap_or(u32::MAX)));
        }
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        all.push(op(JUMP, 0, 0, length));
        all.extend_from_slice(body);
    };
    group(
        &[Kind::Sendto, Kind::Sendmsg, Kind::Write, Kind::Writev],
        &in_range(0, places.plain.start..places.strict.end),
    );
    group(
        &[Kind::Recvfrom, Kind::Recvmsg],
        &in_range(0, places.strict.clone()),
    );
    let netlink = equals(0, libc::AF_NETLINK.cast_unsigned());
    let generic = equals(2, libc::NETLINK_GENERIC.cast_unsigned());
    group(
        &[Kind::Socket],
        &[&netlink[..], &generic, &[NOTIFY]].concat(),
    );
    let ip = equals(1, libc::IPPROTO_IP.cast_unsigned());
    group(
        &[Kind::Getsockopt, Kind::Setsockopt],
        &[&ip[..], &in_range(2, IPVS_OPTIONS)].concat(),
    );
    all.push(ALLOW);
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classic::run;

    /// Whether the filter reports a system call.
    fn is_noticed(program: &[Op], arch: u32, number: u32, arguments: [u64; 6]) -> bool {
        let verdict = run(program, |offset| match offset {
            NUMBER => number,
            ARCH => arch,
            other => {
                let index =
                    usize::try_from((other - 16) / 8).expect("the offset is that of an argument");
                u32::try_from(arguments[index] & 0xffff_ffff).expect("the value has 32 bits")
            }
        });
        verdict == libc::SECCOMP_RET_USER_NOTIF
    }

    fn number(kind: Kind) -> u32 {
        let found = Kind::ALL.iter().find(|(of, _)| *of == kind);
        u32::try_from(found.expect("the number is in the table").1).expect("the number is small")
    }

    #[test]
    fn notify_filter_reports_only_reserved_descriptors_generic_netlink_and_ipvs_options() {
        let Some(arch) = ARCHITECTURE else { return };
        let places = Places::below(1 << 20).expect("the limit of descriptors is high enough");
        let program = program(&places).expect("the architecture is supported");
        let noticed = |kind, arguments| is_noticed(&program, arch, number(kind), arguments);
        for (kind, from) in [
            (Kind::Sendto, 960),
            (Kind::Sendmsg, 960),
            (Kind::Write, 960),
            (Kind::Writev, 960),
            (Kind::Recvfrom, 992),
            (Kind::Recvmsg, 992),
        ] {
            for fd in 0..1100 {
                let expected = (from..1024).contains(&fd);
                assert_eq!(
                    noticed(kind, [fd, 0, 0, 0, 0, 0]),
                    expected,
                    "{kind:?} {fd}"
                );
                // The kernel ignores the upper half of the argument.
                assert_eq!(
                    noticed(kind, [fd | 7 << 32, 0, 0, 0, 0, 0]),
                    expected,
                    "{kind:?} {fd}"
                );
            }
        }
        assert!(noticed(Kind::Socket, [16, 3, 16, 0, 0, 0]));
        assert!(!noticed(Kind::Socket, [16, 3, 0, 0, 0, 0]));
        assert!(!noticed(Kind::Socket, [2, 3, 16, 0, 0, 0]));
        for kind in [Kind::Getsockopt, Kind::Setsockopt] {
            for option in 1100..1200 {
                let expected =
                    IPVS_OPTIONS.contains(&u32::try_from(option).expect("the number is small"));
                assert_eq!(
                    noticed(kind, [3, 0, option, 0, 0, 0]),
                    expected,
                    "{kind:?} {option}"
                );
                assert!(!noticed(kind, [3, 1, option, 0, 0, 0]));
            }
        }
        for number in (0..500).filter(|n| !Kind::ALL.iter().any(|(_, of)| i64::from(*n) == *of)) {
            assert!(!is_noticed(&program, arch, number, [16, 0, 16, 0, 0, 0]));
        }
    }

    #[test]
    fn notify_filter_ignores_calls_of_other_architectures() {
        let places = Places::below(1024).expect("the limit of descriptors is high enough");
        let Some(program) = program(&places) else {
            return;
        };
        let arguments = [16, 3, 16, 0, 0, 0];
        let number = number(Kind::Socket);
        assert!(!is_noticed(&program, 0x4000_0003, number, arguments));
        // x32 has the architecture of x86-64, and numbers with this bit.
        let arch = ARCHITECTURE.expect("the architecture is supported");
        assert!(!is_noticed(&program, arch, number | 0x4000_0000, arguments));
    }

    #[test]
    fn descriptor_ranges_are_below_descriptor_limit_and_limit_below_96_is_refused() {
        assert_eq!(Places::below(u64::MAX), Places::below(1024));
        let low = Places::below(256).expect("the limit of descriptors is high enough");
        assert_eq!((low.plain.start, low.strict.end), (192, 256));
        assert_eq!(Places::below(95), None);
        assert!(Places::below(96).is_some());
    }
}
