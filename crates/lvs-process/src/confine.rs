//! After its start, a process drops privileges that it cannot regain: system calls (seccomp) and
//! write access to directories (Landlock). A vulnerability in code that handles untrusted input is
//! then less useful. If the kernel lacks one of the two, the process continues without it, and
//! reports that.
//!
//! ```text
//!                 refused                                    may write to
//! lvsd            modules, kexec, clocks, other processes    as before
//! lvs-dataplane   the same; programs, mounts, namespaces,    its socket's directory, /dev,
//!                 keys, io_uring                             /proc/sys/net, /sys/fs/bpf
//! ```
//!
//! The children of `lvsd` (the dataplane, programs of checks and of `notify`) inherit the
//! restrictions, so only calls that no such program needs are refused. A child can still have more
//! rights than `lvsd` itself (`sudo`, `ping`). The dataplane starts its state keeper before it
//! drops privileges, and no program afterwards.

use std::io;
use std::path::{Path, PathBuf};

use lvs_core::api::Confinement;

use lvs_sys::seccomp::{Foreign, refuse};

/// System calls for the administration of the host and of other processes. Neither a dataplane nor
/// programs of checks and of `notify` use them.
const NOBODYS: &[i64] = &[
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_pivot_root,
    libc::SYS_syslog,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
];

/// System calls that the dataplane does not use after its start.
const NOT_THE_DATAPLANES: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fsconfig,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_personality,
];

/// Sandboxes this process as `lvsd`. Returns whether seccomp is in use, and if not, the reason.
pub fn daemon() -> Confinement {
    let mut done = Confinement::default();
    note(&mut done, refuse(NOBODYS, Foreign::Made));
    done
}

fn note(done: &mut Confinement, seccomp: io::Result<()>) {
    match seccomp {
        Ok(()) => done.by.push("seccomp".to_owned()),
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => done.not_by.push(
            "seccomp (it needs CAP_SYS_ADMIN or no_new_privs: NoNewPrivileges=yes in a unit, or `setpriv --no-new-privs`)"
                .to_owned(),
        ),
        Err(error) => done.not_by.push(format!("seccomp ({error})")),
    }
}

/// Access that the sandboxed dataplane still needs.
#[derive(Clone, Debug)]
pub struct Places {
    /// The path of the control socket; `None` for an abstract name.
    pub socket: Option<PathBuf>,
    /// Whether the dataplane may open TCP connections: to its peers, or to DNS servers if a file of
    /// rules contains host names.
    pub tcp: bool,
}

/// Sandboxes this process as a dataplane. Call it before threads are started. Returns which of
/// Landlock and seccomp are in use, and the reason for each of the two that is not.
pub fn dataplane(places: &Places) -> Confinement {
    let mut done = Confinement::default();
    // The process starts no program that needs more rights.
    let given_up = rustix::thread::set_no_new_privs(true);
    match given_up
        .map_err(|error| error.to_string())
        .and_then(|()| landlock(places))
    {
        Ok(()) => done.by.push("landlock".to_owned()),
        Err(why) => done.not_by.push(format!("landlock ({why})")),
    }
    let calls: Vec<i64> = NOBODYS.iter().chain(NOT_THE_DATAPLANES).copied().collect();
    note(&mut done, refuse(&calls, Foreign::Refused));
    done
}

/// Restricts this thread and threads that it starts later: they cannot execute files, and can write
/// only to the directory of the control socket and to some of the kernel's directories. If the
/// directory of the socket does not exist, they can write to the nearest existing directory above
/// it. They can use TCP only if `places.tcp` is true.
fn landlock(places: &Places) -> Result<(), String> {
    use landlock::{
        ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
        RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    };
    // Landlock ignores the rights that an older kernel does not support.
    let writes = AccessFs::from_write(ABI::V5);
    let made = || -> Result<_, landlock::RulesetError> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(writes | AccessFs::Execute)?;
        if !places.tcp {
            rules = rules.handle_access(AccessNet::from_all(ABI::V5))?;
        }
        let mut rules = rules.create()?;
        let socket = places.socket.as_deref().and_then(Path::parent);
        let socket = socket.and_then(|directory| directory.ancestors().find(|path| path.is_dir()));
        let kernels = ["/dev", "/proc/sys/net", "/sys/fs/bpf"].map(Path::new);
        for place in kernels.into_iter().chain(socket) {
            // Paths that do not exist need no rule.
            if let Ok(place) = PathFd::new(place) {
                rules = rules.add_rule(PathBeneath::new(place, writes))?;
            }
        }
        rules.restrict_self()
    };
    match made() {
        Ok(status) if status.ruleset == RulesetStatus::NotEnforced => {
            Err("this kernel does not support Landlock, or it is disabled: add landlock to `lsm=` on the kernel's command line".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}
