//! Attaches the XDP program to the interfaces that the operator has named. With `--xdp auto`, also
//! to each interface whose driver has native XDP, unless [`check`] finds a reason against it, such
//! as an offload that the interface would lose.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use lvs_core::api::NoXdp;
use tracing::{info, warn};

use super::HostError;
use super::keeper::Keeper;
use crate::fast_path::{AttachedXdp, FastPath};
use crate::io::af_packet::OpenError;
use crate::netlink::{Driver, Link, NetState, Offloads, XdpFeatures};

/// Offloads that merge received packets, by the kernel's and by ethtool's names. XDP runs before
/// GRO, and drivers do not merge packets for a program.
const MERGE: [(&str, &str); 3] = [
    ("rx-gro", "gro"),
    ("rx-gro-hw", "rx-gro-hw"),
    ("rx-lro", "lro"),
];
/// Offloads that remove VLAN tags before XDP receives the frame.
const UNTAG: [(&str, &str); 2] = [
    ("rx-vlan-hw-parse", "rxvlan"),
    ("rx-vlan-stag-hw-parse", "rx-vlan-stag-hw-parse"),
];

/// The properties of an interface on which the choice of XDP depends.
#[derive(Clone, Debug)]
struct Facts<'a> {
    name: &'a str,
    /// The features of the driver, and the offloads.
    device: Result<(Driver, Offloads), String>,
    /// Whether another program is attached to the interface by XDP.
    has_program: bool,
    /// Whether the interface is a bond or team: its ports have their own offloads.
    is_bond: bool,
    /// The bridge or bond of which the interface is a port.
    master: Option<&'a str>,
    /// A VLAN interface on top of the interface.
    vlan: Option<&'a str>,
}

impl<'a> Facts<'a> {
    fn of(
        link: &'a Link,
        state: &'a NetState,
        fast_path: &FastPath,
        features: Result<&mut XdpFeatures, &mut String>,
    ) -> Self {
        let read = |features: &mut XdpFeatures| -> io::Result<_> {
            let device = (features.driver(link.index)?, features.offloads(link.index)?);
            Ok((device, features.has_program(link.index)?))
        };
        let features = features.map_err(|error| error.clone());
        let read = features.and_then(|found| read(found).map_err(|error| error.to_string()));
        let master = link.master.and_then(|master| state.link(master));
        let mut others = state.links();
        let vlan = others.find(|other| {
            other.parent == Some(link.index) && other.kind.as_deref() == Some("vlan")
        });
        Self {
            name: &link.name,
            has_program: read.as_ref().is_ok_and(|(_, has)| *has)
                // The program of a killed predecessor is replaced.
                && !fast_path.has_pinned_xdp(link.index),
            device: read.map(|(device, _)| device),
            is_bond: matches!(link.kind.as_deref(), Some("bond" | "team")),
            master: master.map(|master| &*master.name),
            vlan: vlan.map(|vlan| &*vlan.name),
        }
    }
}

/// Decides whether `--xdp auto` chooses an interface.
fn check(facts: &Facts<'_>) -> Result<(), NoXdp> {
    let name = facts.name;
    let (driver, offloads) = match &facts.device {
        Ok(device) => device,
        Err(error) => {
            let reason = format!(
                "the kernel does not report the XDP features and offloads of {name}: {error}"
            );
            return Err(no(NoXdp::UNREPORTED, reason, "use Linux 6.3 or newer"));
        }
    };
    // A veth has GRO while it has an XDP program, even if the operator has disabled GRO.
    let mut merges = set(&offloads.wanted, &MERGE[..1]);
    merges.extend(set(&offloads.active, &MERGE[1..]));
    let untags = set(&offloads.active, &UNTAG);
    let permits = |offloads: &[&str]| {
        let off = offloads.join(" off ");
        format!("`ethtool -K {name} {off} off` and a restart of the dataplane permit XDP")
    };
    Err(if !driver.redirects() {
        no(
            NoXdp::UNSUPPORTED,
            "its driver has no native XDP that redirects frames",
            format!("`ethtool -i {name}` names the driver"),
        )
    } else if facts.has_program {
        no(
            NoXdp::PROGRAM,
            "another XDP program is attached to it",
            format!("`ip link show {name}` shows it; detach it and restart the dataplane"),
        )
    } else if let Some(master) = facts.master {
        no(
            NoXdp::PORT,
            format!("it is a port of {master}"),
            format!("--xdp {name} uses XDP nevertheless"),
        )
    } else if facts.is_bond {
        no(
            NoXdp::BOND,
            "its ports may merge packets or remove VLAN tags",
            format!("check the offloads of its ports; --xdp {name} uses XDP"),
        )
    } else if !merges.is_empty() {
        no(
            NoXdp::AGGREGATION,
            format!(
                "it merges received packets ({}), which makes bulk TCP cheaper and is not possible with XDP",
                merges.join(", ")
            ),
            format!(
                "{}; bulk TCP then takes more processor time",
                permits(&merges)
            ),
        )
    } else if let (Some(vlan), false) = (facts.vlan, untags.is_empty()) {
        no(
            NoXdp::VLAN,
            format!("it removes the VLAN tags of {vlan} before XDP receives the frames"),
            format!("{}; the processor then removes the tags", permits(&untags)),
        )
    } else {
        return Ok(());
    })
}

/// Returns the names (for ethtool) of the `offloads` that are set.
fn set(names: &BTreeSet<String>, offloads: &[(&str, &'static str)]) -> Vec<&'static str> {
    let set = offloads.iter().filter(|(name, _)| names.contains(*name));
    set.map(|(_, word)| *word).collect()
}

fn no(code: &str, reason: impl Into<String>, fix: impl Into<String>) -> NoXdp {
    NoXdp {
        code: code.to_owned(),
        reason: reason.into(),
        fix: fix.into(),
    }
}

impl Keeper {
    /// Attaches the XDP program to an interface that the operator has named, or that [`check`]
    /// accepts with `--xdp auto`. If it is not attached with `--xdp auto`, stores and logs the
    /// reason.
    ///
    /// # Errors
    /// The program cannot be attached to an interface that the operator has named.
    pub(super) fn attach_xdp(&mut self, link: &Link) -> Result<(), HostError> {
        let Some(fast_path) = self.setup.fast_path.clone() else {
            return Ok(());
        };
        let (ifindex, name) = (link.index, &link.name);
        // An earlier attempt to open the interface may have failed after this step.
        if self.attached_xdp.contains_key(&ifindex) || fast_path.no_xdp(ifindex).is_some() {
            return Ok(());
        }
        if self.setup.xdp.contains(name) {
            let attached = fast_path.attach_xdp(ifindex);
            let failed = |error| OpenError::of(ifindex, name, "attach the XDP program", error);
            self.attached_xdp.insert(ifindex, attached.map_err(failed)?);
        } else if self.setup.xdp_auto {
            let facts = Facts::of(link, &self.tables.state, &fast_path, self.xdp.as_mut());
            let chosen =
                check(&facts).and_then(|()| attach(&fast_path, ifindex, self.xdp.as_mut().ok()));
            match chosen {
                Ok(attached) => {
                    info!("{name} uses XDP");
                    self.attached_xdp.insert(ifindex, attached);
                }
                Err(no_xdp) => {
                    let NoXdp { code, reason, fix } = &no_xdp;
                    if code == NoXdp::REFUSED {
                        warn!(
                            code,
                            "{name} uses tc instead of XDP: {reason}. To do: {fix}"
                        );
                    } else {
                        info!(code, "{name} uses tc instead of XDP: {reason}");
                    }
                    fast_path.set_no_xdp(ifindex, Some(no_xdp));
                }
            }
        }
        Ok(())
    }

    pub(super) fn detach_xdp(&mut self, ifindex: u32) {
        self.attached_xdp.remove(&ifindex);
        if let Some(fast_path) = &self.setup.fast_path {
            fast_path.set_no_xdp(ifindex, None);
        }
    }
}

/// Attaches the XDP program for `--xdp auto`. Detaches it if the interface cannot send frames even
/// then.
fn attach(
    fast_path: &Arc<FastPath>,
    ifindex: u32,
    features: Option<&mut XdpFeatures>,
) -> Result<AttachedXdp, NoXdp> {
    let attached = fast_path.attach_xdp(ifindex).map_err(|error| {
        no(
            NoXdp::REFUSED,
            format!("the program cannot be attached: {error}"),
            "correct the problem that the error names, and restart the dataplane",
        )
    })?;
    let driver = features.and_then(|features| features.driver(ifindex).ok());
    match driver.unwrap_or_default().transmits() {
        true => Ok(attached),
        false => Err(no(
            NoXdp::NO_TRANSMIT,
            "it cannot send frames without socket buffers",
            "for a veth, enable GRO at its other end (ethtool -K PEER gro on) and restart the dataplane",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// Applies `change` to an interface that would get XDP. Returns the reason why it then gets no
    /// XDP; an empty one if it still gets XDP.
    fn decision(change: impl FnOnce(&mut Facts<'_>, &mut Driver, &mut Offloads)) -> NoXdp {
        let mut driver = Driver(0b11);
        let mut offloads = Offloads {
            wanted: names(&["rx-checksum"]),
            active: names(&["rx-checksum", "rx-vlan-hw-parse", "rx-gro"]),
        };
        let mut facts = Facts {
            name: "eth0",
            device: Ok(Default::default()),
            has_program: false,
            is_bond: false,
            master: None,
            vlan: None,
        };
        change(&mut facts, &mut driver, &mut offloads);
        facts.device = facts.device.map(|_| (driver, offloads));
        check(&facts).err().unwrap_or_default()
    }

    #[test]
    fn interface_that_loses_no_offload_gets_xdp() {
        assert_eq!(decision(|_, _, _| {}), NoXdp::default());
        let tagged = decision(|facts, _, offloads| {
            facts.vlan = Some("eth0.7");
            offloads.active.clear();
        });
        assert_eq!(tagged, NoXdp::default());
    }

    #[test]
    fn interface_with_any_obstacle_gets_no_xdp_and_code_names_obstacle() {
        let found = [
            decision(|facts, _, _| facts.device = Err("no such family".to_owned())),
            decision(|_, driver, _| *driver = Driver(0b101)),
            decision(|_, driver, _| *driver = Driver(0b110)),
            decision(|facts, _, _| facts.has_program = true),
            decision(|facts, _, _| facts.master = Some("br0")),
            decision(|facts, _, _| facts.is_bond = true),
            decision(|_, _, offloads| offloads.wanted = names(&["rx-gro"])),
            decision(|_, _, offloads| offloads.active = names(&["rx-gro-hw"])),
            decision(|_, _, offloads| offloads.active = names(&["rx-lro"])),
            decision(|facts, _, _| facts.vlan = Some("eth0.7")),
        ];
        assert!(found[0].reason.ends_with(": no such family"), "{found:?}");
        let expected = [
            NoXdp::UNREPORTED,
            NoXdp::UNSUPPORTED,
            NoXdp::UNSUPPORTED,
            NoXdp::PROGRAM,
            NoXdp::PORT,
            NoXdp::BOND,
            NoXdp::AGGREGATION,
            NoXdp::AGGREGATION,
            NoXdp::AGGREGATION,
            NoXdp::VLAN,
        ];
        assert_eq!(found.map(|no_xdp| no_xdp.code), expected);
    }

    #[test]
    fn fix_disables_each_offload_that_prevents_xdp() {
        let fix = decision(|_, _, offloads| {
            offloads.wanted = names(&["rx-gro"]);
            offloads.active = names(&["rx-gro", "rx-lro"]);
        })
        .fix;
        assert!(fix.contains("`ethtool -K eth0 gro off lro off`"), "{fix}");
    }

    #[test]
    fn xdp_codes_are_documented_once() {
        let page = include_str!("../../../../docs/fast-path.md");
        for code in NoXdp::CODES {
            assert_eq!(page.matches(&format!("| `{code}` |")).count(), 1, "{code}");
        }
    }
}
