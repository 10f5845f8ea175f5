//! Decides whether a dataplane uses the kernel fast path.

use std::io;
use std::sync::Arc;

use lvs_core::Control;
use lvs_core::api::FastPathInfo;
use lvs_core::memory::Memory;
use lvs_core::offload::Unpublished;
use tracing::{info, warn};

use super::config::{StartError, UseKernel};
use crate::fast_path::{FastPath, FastPathError, Room};
use crate::host::Backend;
use crate::warm_restart::StateKeeper;
use lvs_packet::settings::{ReversePath, Settings};
use lvs_packet::steer::Steering;
use lvs_packet::ways::NoWay;

/// The configuration of the kernel fast path.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) wanted: UseKernel,
    /// Maximum number of connections whose client or server has an IPv6 address (wide slots).
    pub(super) wide: usize,
    /// The state keeper for warm restart, used if the kernel fast path is not.
    pub(super) warm_restart: Option<StateKeeper>,
}

/// The kernel fast path, and the memory for each worker's connection table.
type Opened = (Arc<FastPath>, Vec<Memory>);

impl Wanted {
    /// Opens the kernel fast path, if it is configured and possible. Otherwise removes the kernel
    /// fast path of a killed predecessor, and returns the reason. With [`UseKernel::On`], the
    /// reason is a [`StartError`], and nothing is removed.
    pub(super) fn open(
        &mut self,
        control: &Control,
        steering: &Steering,
        against: Option<Against>,
        xdp: bool,
    ) -> Result<Result<Opened, FastPathInfo>, StartError> {
        if self.wanted == UseKernel::Off {
            end_what_is_left();
            let reason = match xdp {
                true => "--xdp auto has no effect with --fast-path off",
                false => "",
            };
            return Ok(Err(FastPathInfo {
                reason: reason.to_owned(),
                ..FastPathInfo::default()
            }));
        }
        let opened = match against.or_else(|| self.held_elsewhere()) {
            Some(Against { why, fix }) => Err(FastPathError::Setting { why, fix }),
            None => self.open_now(control, steering, xdp),
        };
        match opened {
            Ok(opened) => {
                let by = opened.0.attached_by();
                info!("established connections are forwarded by the kernel fast path ({by})");
                Ok(Ok(opened))
            }
            Err(error) if self.wanted == UseKernel::On => Err(StartError::FastPath(error)),
            Err(error) => {
                let cause = match (&error, self.wanted) {
                    // The operator has chosen this setting, but not the kernel fast path.
                    (FastPathError::Setting { why, .. }, UseKernel::Try) => (*why).to_owned(),
                    _ => error.to_string(),
                };
                info!("the dataplane itself forwards all packets: {cause}");
                if xdp {
                    warn!(
                        "--xdp has no effect: it is a part of the kernel fast path, which is not used"
                    );
                }
                end_what_is_left();
                let info = FastPathInfo {
                    wanted: self.wanted == UseKernel::Auto,
                    ..error.into()
                };
                Ok(Err(info))
            }
        }
    }

    fn open_now(
        &self,
        control: &Control,
        steering: &Steering,
        xdp: bool,
    ) -> Result<Opened, FastPathError> {
        let room = match self.wanted {
            UseKernel::On => Room::default(),
            _ => Room::of_this_host(),
        };
        let layout = control.layout().with_wide(self.wide);
        let fast_path = FastPath::open_or_find(layout, steering, xdp, room)?;
        if self.wanted == UseKernel::Try && self.warm_restart.is_some() && !fast_path.outlives() {
            return Err(FastPathError::Setting {
                why: "a kill of the dataplane would end its connections (--warm-restart): nothing can be pinned in /sys/fs/bpf, see the log",
                fix: "correct the problem that the log reports (mount -t bpf bpf /sys/fs/bpf mounts the file system), or use --fast-path auto",
            });
        }
        let workers = 0..steering.workers().get();
        let memories = workers.map(|worker| fast_path.memory(worker));
        let memories = memories.collect::<Result<_, _>>()?;
        Ok((Arc::new(fast_path), memories))
    }

    /// Returns an obstacle if the configuration is [`UseKernel::Try`] and the state keeper has the
    /// connections of the predecessor.
    fn held_elsewhere(&self) -> Option<Against> {
        let held = self.warm_restart.as_ref().is_some_and(StateKeeper::is_used);
        (held && self.wanted == UseKernel::Try).then_some(Against {
            why: "the state keeper has the connections of the previous dataplane (--warm-restart), and cannot pass them to the kernel fast path",
            fix: "stop the dataplane and start it again, or use --fast-path auto: both end these connections",
        })
    }
}

/// The reason why a connection is not offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum WithDataplane {
    #[error("the dataplane does not use the kernel fast path")]
    NotUsed,
    #[error(
        "the kernel fast path is suspended: the configuration is being changed, or `lvsadm doctor` shows the reason"
    )]
    Change,
    #[error("ignore_tunneled is set")]
    IgnoreTunneled,
    #[error(
        "no packet of the connection has arrived since the last change of configuration, routes or settings"
    )]
    Stale,
    #[error("connections are offloaded after {of} packets from the client")]
    New { of: u32 },
    #[error(
        "the client has sent {sent} of the {of} packets after which the connection is offloaded"
    )]
    Early { sent: u32, of: u32 },
    #[error("the connection is checked again after at most {of} more packets from its client")]
    Later { of: u32 },
    #[error(transparent)]
    Connection(#[from] Unpublished),
    #[error("a rule for marks could drop packets of the connection or pass them to this host")]
    Marks,
    #[error("a capture shows the packets of the connection")]
    Captured,
    #[error(
        "the kernel fast path has room for 4,096 servers, and the connection's server is not among them"
    )]
    Number,
    #[error("the BPF map of the local addresses and ports of full NAT does not exist yet")]
    Locals,
    #[error(transparent)]
    Way(#[from] NoWay),
}

/// Combines the options for the kernel fast path and for XDP. `xdp` means that the operator has
/// named interfaces for XDP, which requires the kernel fast path.
pub(super) fn with_xdp(wanted: UseKernel, xdp: bool) -> Result<UseKernel, StartError> {
    match wanted {
        UseKernel::Off if xdp => Err(StartError::XdpAlone),
        UseKernel::Try if xdp => Ok(UseKernel::Auto),
        wanted => Ok(wanted),
    }
}

/// Removes the kernel fast path of a killed predecessor: its programs would forward the same
/// packets as this dataplane. Logs a removal, and the reason if it is not possible.
fn end_what_is_left() {
    match FastPath::clean_up() {
        Ok(0) => {}
        Ok(_) => warn!(
            "connections that the kernel fast path of the previous dataplane forwarded have ended: this dataplane does not use the kernel fast path"
        ),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => warn!(
            "{error}: packets would be forwarded twice: stop one of the two dataplanes, or use different interfaces for them (--interface)"
        ),
        Err(error) => warn!("cannot remove the state of another dataplane in the kernel: {error}"),
    }
}

/// A setting that excludes the kernel fast path, and the fix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Against {
    why: &'static str,
    fix: &'static str,
}

/// Returns the first setting that excludes the kernel fast path.
pub(super) fn against(hooked: bool, backend: Backend, settings: &Settings) -> Option<Against> {
    let (why, fix) = if hooked {
        (
            "an embedding program inspects each packet",
            "start the dataplane without its hook",
        )
    } else if backend == Backend::Tun {
        (
            "with --backend tun the host routes packets to the dataplane, and programs at interfaces do not receive them",
            "remove --backend tun",
        )
    } else if settings.reverse_path != ReversePath::Off {
        (
            "--reverse-path needs a check of the interface on which each packet arrives: the kernel fast path has no such check",
            "remove --reverse-path",
        )
    } else {
        return None;
    };
    Some(Against { why, fix })
}

/// Returns the default number of wide slots (for IPv6) in a table of `connections` connections.
pub(super) fn wide(connections: usize) -> usize {
    const ALL_OF: usize = 1 << 20;
    (connections / 4).max(connections.min(ALL_OF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fix_names_hook_or_tun_backend_that_excludes_kernel_fast_path() {
        let settings = Settings::default();
        let reason = |hooked, backend| {
            let against = against(hooked, backend, &settings);
            against.map(|Against { fix, .. }| fix)
        };
        assert_eq!(reason(false, Backend::Auto), None);
        assert!(reason(true, Backend::Auto).is_some_and(|text| text.contains("hook")));
        let tun = reason(false, Backend::Tun);
        assert!(tun.is_some_and(|text| text.contains("--backend tun")));
    }

    #[test]
    fn xdp_option_is_refused_if_fast_path_is_off_and_changes_try_to_auto() {
        use UseKernel::{Auto, Off, On, Try};
        for (wanted, expected) in [(Try, Auto), (Auto, Auto), (On, On)] {
            assert!(with_xdp(wanted, true).is_ok_and(|wanted| wanted == expected));
        }
        for wanted in [Off, Try, Auto, On] {
            assert!(with_xdp(wanted, false).is_ok_and(|same| same == wanted));
        }
        let error = with_xdp(Off, true)
            .expect_err("--xdp was accepted with --fast-path off")
            .to_string();
        assert!(error.starts_with("--xdp"), "{error}");
    }

    #[test]
    fn wide_slots_are_a_quarter_of_table_or_all_of_the_first_1_048_576() {
        let tables = [1, 1 << 20, 2_000_000, 10_000_000];
        assert_eq!(tables.map(wide), [1, 1 << 20, 1 << 20, 2_500_000]);
    }
}
