//! Sets which signals end the process.

/// Signals whose default action is to kill the process, although operators do not send them for
/// this purpose: a closed terminal, timers, and signals that `killall` and logrotate send to make
/// programs reload.
const SIGNALS: [libc::c_int; 12] = [
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPIPE,
    libc::SIGXFSZ,
    libc::SIGPWR,
    libc::SIGXCPU,
    libc::SIGSTKFLT,
];

/// The real-time signals. A C library reserves some of them, and refuses to change their action.
const REAL_TIME: std::ops::RangeInclusive<libc::c_int> = 32..=64;

/// Signals that by default kill a process that has no use for them. The system may refuse to change
/// the action of some of them.
pub fn harmless() -> impl Iterator<Item = i32> {
    SIGNALS.into_iter().chain(REAL_TIME)
}

/// Signals that had their default action before this process ignored them.
#[derive(Debug)]
pub struct Ignored(Vec<i32>);

impl Ignored {
    /// Restores the default action of these signals. Signals that were ignored before, as by
    /// `nohup`, stay ignored.
    pub fn restore(self) {
        for signal in self.0 {
            // SAFETY: takes numbers; the default action runs no handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

/// Makes this process, and programs that it starts, ignore signals that would kill it without an
/// orderly stop: SIGHUP, SIGUSR1, SIGUSR2, SIGALRM and the like, and real-time signals.
pub fn ignore_signals() -> Ignored {
    let ignore = |&signal: &i32| {
        // SAFETY: takes numbers; an ignored signal runs no handler. The kernel refuses a signal
        // that cannot be ignored, and its action is unchanged.
        let before = unsafe { libc::signal(signal, libc::SIG_IGN) };
        before == libc::SIG_DFL
    };
    Ignored(harmless().filter(ignore).collect())
}

/// Restores the default action of SIGHUP, SIGINT, SIGQUIT and SIGTERM. The process may have
/// inherited that it ignores them: `nohup` ignores SIGHUP, and a shell without job control ignores
/// SIGINT and SIGQUIT for its background processes.
pub fn restore_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: takes numbers; the default action runs no handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The signals that this process ignores, as a bit mask: bit 0 stands for signal 1.
    fn ignored() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status")
            .expect("the status file of this process is readable");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        u64::from_str_radix(
            mask.expect("the status contains the mask of ignored signals")
                .trim(),
            16,
        )
        .expect("the text is a number")
    }

    #[test]
    fn restored_signals_have_their_previous_action() {
        let before = ignored();
        let former = ignore_signals();
        let all = ignored();
        for signal in [
            libc::SIGHUP,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGALRM,
            40,
        ] {
            assert!(
                all & (1 << (signal - 1)) != 0,
                "signal {signal} is not ignored; the mask is {all:x}"
            );
        }
        // The second call finds the signals ignored, so it restores none.
        ignore_signals().restore();
        assert_eq!(ignored(), all);
        former.restore();
        assert_eq!(ignored(), before);
    }
}
