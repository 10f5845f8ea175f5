//! The reasons why the kernel fast path is not available, with their fixes.

use std::io;

use lvs_core::api::FastPathInfo;

/// The reason why the kernel fast path is not available.
#[derive(Debug, thiserror::Error)]
pub enum FastPathError {
    /// The kernel does not permit the kernel fast path.
    #[error(
        "the kernel fast path is not permitted: it needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN in the initial user namespace, that is, root outside of containers: {0}"
    )]
    Permission(#[source] io::Error),
    /// A step failed, usually because the kernel lacks a feature.
    #[error("cannot {step} for the kernel fast path (it needs Linux 6.1 or newer): {source}")]
    Kernel {
        /// The step that failed, as a verb with its object.
        step: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel's BPF lacks an instruction that the programs use.
    #[error(
        "this kernel's BPF has no atomic operations with results, which Linux 5.12 and newer have: {0}"
    )]
    Old(#[source] io::Error),
    /// The maps would need more than a quarter of the free memory.
    #[error(
        "the connection table of the kernel fast path needs {needs} MiB at the start, and may use a quarter of the {free} MiB that are free"
    )]
    Memory {
        /// The size of all maps in MiB.
        needs: u64,
        /// The free memory in MiB.
        free: u64,
    },
    /// The kernel has no tcx, and the maps cannot be kept for a successor.
    #[error(
        "this kernel attaches the programs of the kernel fast path as tc filters (clsact), which remain after a kill of the dataplane; the next dataplane can find their maps only in a BPF file system: {0}"
    )]
    NoPins(#[source] io::Error),
    /// The kernel has no memory for the maps.
    #[error(
        "cannot {step} for the kernel fast path, which allocates all of its memory at the start: {source}"
    )]
    NoMemory {
        /// The step that failed, as a verb with its object.
        step: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Another setting or another dataplane excludes the kernel fast path.
    #[error("{why}: {fix}")]
    Setting {
        /// The setting, or another dataplane, that excludes the kernel fast path.
        why: &'static str,
        /// The action that resolves the conflict.
        fix: &'static str,
    },
    /// The built-in BPF object is not valid.
    #[error("the built-in BPF programs are damaged: run `make bpf`")]
    Object,
}

impl From<FastPathError> for FastPathInfo {
    fn from(error: FastPathError) -> Self {
        let reason = match &error {
            FastPathError::Setting { why, .. } => (*why).to_owned(),
            error => error.to_string(),
        };
        let fix = match &error {
            FastPathError::Permission(_) => {
                "run the dataplane as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN (systemd: AmbientCapabilities=, CapabilityBoundingSet=), outside of containers"
            }
            FastPathError::Kernel { .. } => {
                "use Linux 6.1 or newer with CONFIG_BPF_SYSCALL, CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF; from 6.6 on, CONFIG_NET_XGRESS replaces the last two"
            }
            FastPathError::Old(_) => "use a newer kernel, or --fast-path off",
            FastPathError::Memory { .. } => {
                "use a smaller --max-connections or --max-ipv6, or --fast-path on, which ignores this limit"
            }
            FastPathError::NoPins(_) => {
                "mount a BPF file system (mount -t bpf bpf /sys/fs/bpf), or correct the problem that the error names"
            }
            FastPathError::NoMemory { .. } => {
                "use a smaller --max-connections or --max-ipv6, or raise the memory limit of the dataplane's control group (systemd: MemoryMax=)"
            }
            FastPathError::Setting { fix, .. } => *fix,
            FastPathError::Object => "run `make bpf`, and build the dataplane again",
        };
        Self {
            wanted: true,
            active: false,
            attached_by: String::new(),
            reason,
            fix: fix.to_owned(),
        }
    }
}

pub(super) fn step(step: &'static str) -> impl FnOnce(io::Error) -> FastPathError {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied => FastPathError::Permission(source),
        io::ErrorKind::OutOfMemory => FastPathError::NoMemory { step, source },
        _ => FastPathError::Kernel { step, source },
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn fast_path_fix_depends_on_error_of_the_kernel() {
        let advised = |errno: Errno| FastPathInfo::from(step("allocate memory")(errno.into())).fix;
        assert!(advised(Errno::NOMEM).contains("--max-connections"));
        assert!(advised(Errno::PERM).contains("root"));
        assert!(advised(Errno::INVAL).contains("Linux 6.1"));
    }

    #[test]
    fn fast_path_setting_error_contains_reason_and_fix_once() {
        let error = FastPathError::Setting {
            why: "this",
            fix: "do that",
        };
        assert_eq!(error.to_string(), "this: do that");
        let info = FastPathInfo::from(error);
        assert_eq!((&*info.reason, &*info.fix), ("this", "do that"));
    }
}
