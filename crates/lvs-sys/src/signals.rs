//! Signals that do not end a process.

/// Signals whose default action ends the process, and that no operator sends to end one: a terminal
/// that closes, timers, what `killall` and logrotate send to programs that reload.
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

/// Real-time signals, but for those that a C library keeps for itself and refuses to change.
const REAL_TIME: std::ops::RangeInclusive<libc::c_int> = 32..=64;

/// The numbers of all signals that would end a process and mean nothing to it. A system may refuse
/// to change some of them.
pub fn harmless() -> impl Iterator<Item = i32> {
    SIGNALS.into_iter().chain(REAL_TIME)
}

/// Makes this process ignore signals that would end it without an orderly stop: SIGHUP, SIGUSR1,
/// SIGUSR2, SIGALRM and the like, and real-time signals. Programs that it starts ignore them, too.
pub fn ignore_signals() {
    for signal in harmless() {
        // SAFETY: takes numbers; to ignore a signal runs no code of ours. A signal that cannot be
        // ignored is refused, and stays as it is.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Gives SIGHUP, SIGINT, SIGQUIT and SIGTERM their default action again. A process inherits ignored signals: `nohup` ignores SIGHUP,
/// and a shell without job control ignores SIGINT and SIGQUIT for what it starts in the background.
pub fn restore_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: takes numbers; the default action runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}
