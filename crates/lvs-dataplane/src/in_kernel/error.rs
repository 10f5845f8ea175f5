//! Why there is no path in the kernel, and what to do about it.

use std::io;

use lvs_core::api::InKernelInfo;

/// Why there is no path in the kernel.
#[derive(Debug, thiserror::Error)]
pub enum InKernelError {
    /// The kernel does not permit it.
    #[error(
        "the path in the kernel is not permitted: it needs CAP_BPF and CAP_NET_ADMIN in the first user namespace, that is, \
         root outside of containers: {0}"
    )]
    Permission(#[source] io::Error),
    /// The kernel has not got what it needs.
    #[error(
        "cannot {step} for the path in the kernel (Linux 6.6 or newer has what it needs): {source}"
    )]
    Kernel {
        /// What was being done.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something else speaks against it.
    #[error("{0}")]
    Setting(&'static str),
    /// The programs that are built in cannot be read.
    #[error("the programs that are built in are damaged: `make bpf` makes them")]
    Object,
}

impl From<InKernelError> for InKernelInfo {
    fn from(error: InKernelError) -> Self {
        let remedy = match &error {
            InKernelError::Permission(_) => {
                "run the engine as root, or with CAP_BPF and CAP_NET_ADMIN (systemd: AmbientCapabilities=), outside of containers"
            }
            InKernelError::Kernel { .. } => {
                "Linux 6.6 or newer with CONFIG_BPF_SYSCALL and CONFIG_NET_XGRESS has what it needs"
            }
            InKernelError::Setting(_) => "leave that setting out, or --in-kernel auto",
            InKernelError::Object => "make bpf, and build the engine again",
        };
        Self {
            wanted: true,
            active: false,
            reason: error.to_string(),
            remedy: remedy.to_owned(),
        }
    }
}

pub(super) fn step(step: &'static str) -> impl FnOnce(io::Error) -> InKernelError {
    move |source| match source.kind() {
        io::ErrorKind::PermissionDenied => InKernelError::Permission(source),
        _ => InKernelError::Kernel { step, source },
    }
}
