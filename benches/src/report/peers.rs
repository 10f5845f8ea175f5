//! Who is measured, by every experiment alike, and what it used.

use anyhow::Result;

use super::Experiment;
use super::data::CpuSeconds;
use crate::compare::bed::Bed;
use crate::compare::contender::{Contender, Method};
use crate::machine::{Snapshot, Used};

/// Who is measured; its name is the same everywhere, as is its colour.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) name: &'static str,
    pub(super) who: Contender,
}

pub(super) const PEERS: [Peer; 9] = [
    Peer {
        name: "direct",
        who: Contender::Direct,
    },
    Peer {
        name: "routing",
        who: Contender::Route,
    },
    Peer {
        name: "lvs-nat",
        who: Contender::AfPacket(Method::Nat),
    },
    Peer {
        name: "lvs-dr",
        who: Contender::AfPacket(Method::Dr),
    },
    Peer {
        name: "lvs-tunnel",
        who: Contender::AfPacket(Method::Tunnel),
    },
    Peer {
        name: "lvs-nat-in-kernel",
        who: Contender::InKernel(Method::Nat),
    },
    Peer {
        name: "nftables",
        who: Contender::Nftables,
    },
    Peer {
        name: "haproxy",
        who: Contender::Haproxy,
    },
    Peer {
        name: "nginx",
        who: Contender::Nginx,
    },
];

/// Their names, in their order.
pub(super) fn names() -> Vec<&'static str> {
    PEERS.iter().map(|peer| peer.name).collect()
}

/// The names of those that take part in an experiment.
pub(super) fn of(experiment: &(impl Experiment + ?Sized)) -> Vec<&'static str> {
    experiment.peers().iter().map(|peer| peer.name).collect()
}

/// The interfaces of the director, whose receiving threads are its work.
pub(super) fn director_devices(bed: &Bed) -> [&str; 2] {
    [&bed.devices[1], &bed.devices[2]]
}

/// What the nodes used since `first`, and why it should not be believed.
pub(super) fn used_since(bed: &mut Bed, first: &Snapshot) -> Result<(CpuSeconds, Option<String>)> {
    let used: Used = Snapshot::take().since(first, bed.pid(), &director_devices(bed));
    bed.check_alive()?;
    let cpu = CpuSeconds {
        elapsed: used.seconds,
        process: used.process,
        softirq: used.softirq,
        other_softirq: used.other_softirq,
        endpoints: used.endpoints,
    };
    Ok((cpu, used.disturbed()))
}
