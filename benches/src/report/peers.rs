//! The measured peers, whose names are the same in every experiment, and the CPU time that they
//! use.

use anyhow::Result;

use super::Experiment;
use super::data::CpuSeconds;
use crate::compare::bed::Bed;
use crate::compare::contender::{Contender, Method};
use crate::machine::{Snapshot, Used};

/// A measured peer. Its name and colour are the same everywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) name: &'static str,
    pub(super) who: Contender,
}

const fn peer(name: &'static str, who: Contender) -> Peer {
    Peer { name, who }
}

pub(super) const PEERS: [Peer; 12] = [
    peer("direct", Contender::Direct),
    peer("routing", Contender::Route),
    peer("lvs-nat", Contender::AfPacket(Method::Nat)),
    peer("lvs-dr", Contender::AfPacket(Method::Dr)),
    peer("lvs-tunnel", Contender::AfPacket(Method::Tunnel)),
    peer("lvs-nat-fast-path", Contender::FastPath(Method::Nat)),
    peer("nftables", Contender::Nftables),
    peer("haproxy", Contender::Haproxy),
    peer("nginx", Contender::Nginx),
    peer("ip_vs nat", Contender::Ipvs(Method::Nat)),
    peer("ip_vs dr", Contender::Ipvs(Method::Dr)),
    peer("ip_vs tunnel", Contender::Ipvs(Method::Tunnel)),
];
/// Peers of most experiments: without direct routing and tunnels of the kernel's IPVS, which would
/// take time and show little.
pub(super) const USUAL: &[Peer] = PEERS.split_at(10).0;

/// The peers with these names. The word after a space names a variant of the peer: `lvs-nat lc`.
pub(super) const fn named<const COUNT: usize>(names: [&'static str; COUNT]) -> [Peer; COUNT] {
    let mut all = [PEERS[0]; COUNT];
    let mut place = 0;
    while place < COUNT {
        let mut known = 0;
        while !begins(names[place], PEERS[known].name) {
            known += 1;
        }
        all[place] = peer(names[place], PEERS[known].who);
        place += 1;
    }
    all
}

/// Whether a series belongs to a peer: its name is the peer's name, or continues it after a space.
const fn begins(name: &str, peer: &str) -> bool {
    let (name, peer) = (name.as_bytes(), peer.as_bytes());
    let mut at = 0;
    while at < peer.len() {
        if at >= name.len() || name[at] != peer[at] {
            return false;
        }
        at += 1;
    }
    name.len() == at || name[at] == b' '
}

pub(super) const fn names<const COUNT: usize>(peers: &[Peer; COUNT]) -> [&'static str; COUNT] {
    let mut names = [""; COUNT];
    let mut place = 0;
    while place < COUNT {
        names[place] = peers[place].name;
        place += 1;
    }
    names
}

/// The names of the peers of an experiment.
pub(super) fn of(experiment: &(impl Experiment + ?Sized)) -> Vec<&'static str> {
    experiment.peers().iter().map(|peer| peer.name).collect()
}

/// The interfaces of the director. The kernel threads that receive on them count as the director's
/// work.
pub(super) fn director_devices(bed: &Bed) -> [&str; 2] {
    [&bed.devices[1], &bed.devices[2]]
}

/// CPU time of the nodes since `first`, and why it is unreliable; `None` if it is reliable.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variant_of_peer_is_found_by_the_word_before_the_space() {
        let [lc, kernel] = named(["lvs-nat lc", "lvs-nat-fast-path"]);
        assert_eq!(
            (lc.name, lc.who),
            ("lvs-nat lc", Contender::AfPacket(Method::Nat))
        );
        assert_eq!(kernel.who, Contender::FastPath(Method::Nat));
        assert!(!begins("lvs-nat-fast-path", "lvs-nat") && !begins("lvs", "lvs-nat"));
    }
}
