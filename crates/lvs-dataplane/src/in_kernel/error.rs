//! Why there is no path in the kernel, and what to do about it.

use std::io;

use lvs_core::api::InKernelInfo;

/// Why there is no path in the kernel.
#[derive(Debug, thiserror::Error)]
pub enum InKernelError {
    /// The kernel does not permit it.
    #[error(
        "the path in the kernel is not permitted: it needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN in the first user namespace, that is, \
         root outside of containers: {0}"
    )]
    Permission(#[source] io::Error),
    /// The kernel has not got what it needs.
    #[error(
        "cannot {step} for the path in the kernel (Linux 6.1 or newer has what it needs): {source}"
    )]
    Kernel {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel's programs cannot do what ours have to.
    #[error(
        "this kernel's BPF has no atomic operations with results, which Linux 5.12 and newer have: {0}"
    )]
    Old(#[source] io::Error),
    /// It would take a large part of the memory that is free.
    #[error(
        "its connection table takes {needs} MiB at once, and {free} MiB are free, of which it may have a quarter"
    )]
    Memory {
        /// MiB that it takes.
        needs: u64,
        /// MiB that are free.
        free: u64,
    },
    /// There is no place for what a successor needs.
    #[error(
        "as filters (clsact), its programs stay when the engine is killed, and its successor would not find what they use: {0}"
    )]
    NoPins(#[source] io::Error),
    /// The kernel has no memory for it.
    #[error("cannot {step} for the path in the kernel, which takes it at once: {source}")]
    NoMemory {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something else speaks against it.
    #[error("{why}: {remedy}")]
    Setting {
        /// What.
        why: &'static str,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The programs that are built in cannot be read.
    #[error("the programs that are built in are damaged: `make bpf` makes them")]
    Object,
}

impl From<InKernelError> for InKernelInfo {
    fn from(error: InKernelError) -> Self {
        let reason = match &error {
            InKernelError::Setting { why, .. } => (*why).to_owned(),
            error => error.to_string(),
        };
        let remedy = match &error {
            InKernelError::Permission(_) => {
                "run the engine as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN (systemd: AmbientCapabilities=, CapabilityBoundingSet=), outside of containers"
            }
            InKernelError::Kernel { .. } => {
                "Linux 6.1 or newer with CONFIG_BPF_SYSCALL, CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF has what it needs; from 6.6 on, CONFIG_NET_XGRESS is enough"
            }
            InKernelError::Old(_) => "a newer kernel, or --in-kernel off",
            InKernelError::Memory { .. } => {
                "a smaller --max-connections or --max-ipv6 takes less; --in-kernel on takes it all the same"
            }
            InKernelError::NoPins(_) => "mount a BPF file system: mount -t bpf bpf /sys/fs/bpf",
            InKernelError::NoMemory { .. } => {
                "a smaller --max-connections or --max-ipv6 takes less; the engine's control group (systemd: MemoryMax=) may permit more"
            }
            InKernelError::Setting { remedy, .. } => *remedy,
            InKernelError::Object => "make bpf, and build the engine again",
        };
        Self {
            wanted: true,
            active: false,
            attached_by: String::new(),
            reason,
            remedy: remedy.to_owned(),
        }
    }
}

pub(super) fn step(step: &'static str) -> impl FnOnce(io::Error) -> InKernelError {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied => InKernelError::Permission(source),
        io::ErrorKind::OutOfMemory => InKernelError::NoMemory { step, source },
        _ => InKernelError::Kernel { step, source },
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_is_missing_is_what_is_advised() {
        let advised = |errno: Errno| InKernelInfo::from(step("make memory")(errno.into())).remedy;
        assert!(advised(Errno::NOMEM).contains("--max-connections"));
        assert!(advised(Errno::PERM).contains("root"));
        assert!(advised(Errno::INVAL).contains("Linux 6.1"));
    }

    #[test]
    fn what_to_do_about_a_setting_is_said_once() {
        let error = InKernelError::Setting {
            why: "this",
            remedy: "do that",
        };
        assert_eq!(error.to_string(), "this: do that");
        let info = InKernelInfo::from(error);
        assert_eq!((&*info.reason, &*info.remedy), ("this", "do that"));
    }
}
