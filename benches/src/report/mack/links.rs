//! Small MTUs, and a director with one or two interfaces.

use anyhow::{Context, Result};

use super::super::data::{Document, Value};
use super::super::peers::Peer;
use super::super::{
    Axis, Experiment, Measured, Plot, Turn, axis, log_axis, peers, plot, usual_bed,
};
use super::{netpipe, wiring};
use crate::compare::bed::Bed;
use crate::machine::Snapshot;
use crate::stats::Spread;
use crate::yardsticks::Yardsticks;

/// The experiment that runs NetPIPE with small MTUs, and through a director with one or two
/// interfaces.
#[derive(Debug)]
pub(in super::super) struct Links;

const MTU: &str = "mtu";
const TIME: &str = "time";
const RATE: &str = "rate";

const PEERS: [Peer; 14] = peers::named([
    "direct",
    "routing",
    "lvs-nat",
    "lvs-dr",
    "lvs-tunnel",
    "nftables",
    "haproxy",
    "nginx",
    "routing one",
    "routing two",
    "lvs-nat one",
    "lvs-nat two",
    "lvs-dr one",
    "lvs-dr two",
]);
/// Labels of the bars.
const BARS: [&str; 6] = [
    "routing one",
    "routing two",
    "lvs-nat one",
    "lvs-nat two",
    "lvs-dr one",
    "lvs-dr two",
];
/// MTUs in bytes. Every host must accept 576 bytes; 296 bytes were usual on serial lines.
const MTUS: [u16; 4] = [296, 576, 1006, 1500];
const LARGE: u32 = 256 << 10;

impl Experiment for Links {
    fn name(&self) -> &'static str {
        "mack-links"
    }

    fn title(&self) -> &'static str {
        "Small MTUs, one interface and two (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "NPtcp with messages of 256 KiB, over links that all have the given MTU. veth passes \
         super-packets of up to 64 KiB whole, whatever the MTU is. So the MTU matters mainly if \
         software segments or reassembles packets: with a tunnel, whose packets have 20 bytes \
         more. Then, with an MTU of 1500, NPtcp through a switch (a bridge of the kernel): between \
         a director with two interfaces and its client and server, and with one interface, which \
         receives and sends all packets. With lvs-dr one, the server answers through the switch; \
         with lvs-dr two, over a separate link."
    }

    fn plots(&self) -> &'static [Plot] {
        const WIRED: Axis = axis("interfaces of the director", "count");
        const {
            &[
                plot(
                    MTU,
                    "Throughput by MTU, messages of 256 KiB",
                    axis("MTU", "bytes"),
                    log_axis("throughput", "Mbit/s"),
                ),
                plot(
                    TIME,
                    "Time of a message of one byte, one way, through a switch",
                    WIRED,
                    axis("time", "µs"),
                ),
                plot(
                    RATE,
                    "Throughput of messages of 256 KiB through a switch",
                    WIRED,
                    axis("throughput", "Mbit/s"),
                ),
            ]
        }
    }

    fn bars(&self, plot: &Plot) -> &'static [&'static str] {
        if plot.name == MTU { &[] } else { &BARS }
    }

    fn peers(&self) -> &'static [Peer] {
        &PEERS
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["direct", "lvs-nat", "lvs-dr", "lvs-tunnel", "nftables"].contains(&peer.name)
            || ["lvs-nat one", "lvs-nat two"].contains(&peer.name)
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 0.5 } else { 1.5 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["NPtcp"]
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        let mut bed = usual_bed(peer, yardsticks)?;
        if let Some((_, interfaces)) = peer.name.split_once(' ') {
            wiring::switch(&mut bed, interfaces == "one")?;
        }
        Ok(bed)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let times = if turn.quick { 20 } else { 200 };
        let bar = (0_u8..).zip(BARS).find(|(_, name)| *name == turn.peer.name);
        let mut values = Vec::new();
        let mut add = |plot: &str, x: f64, y: f64| values.push(Value::new(plot, x, y));
        let first = Snapshot::take();
        if let Some((bar, _)) = bar {
            let small = netpipe(bed, 1, 1, times * 5)?;
            let (_, _, time) = *small.first().context("NPtcp printed no figure")?;
            add(TIME, bar.into(), time);
            add(RATE, bar.into(), large(bed, times)?);
        } else {
            for mtu in MTUS {
                resize(bed, mtu)?;
                let rate = large(bed, times).with_context(|| format!("MTU {mtu}"))?;
                add(MTU, mtu.into(), rate);
            }
        }
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        Ok((values, cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let mut sentences = Vec::new();
        for series in document.series(self.name(), MTU, &peers::of(self)) {
            let (Some((small, low)), Some((large, high))) =
                (series.points.first(), series.points.last())
            else {
                continue;
            };
            sentences.push(format!(
                "{}: {:.0} Mbit/s ({:.0}-{:.0}) with an MTU of {small:.0}, {:.0} ({:.0}-{:.0}) with {large:.0}: {:.2} times as much ({}).",
                series.peer, low.median, low.min, low.max, high.median, high.min, high.max,
                high.median / low.median, low.rounds
            ));
        }
        let at = |plot: &str, peer: &str| -> Option<Spread> {
            let all = document.series(self.name(), plot, &[peer]);
            Some(all.first()?.points.first()?.1)
        };
        for who in ["routing", "lvs-nat", "lvs-dr"] {
            for (plot, what, unit) in [
                (TIME, "a message of one byte", "µs"),
                (RATE, "messages of 256 KiB", "Mbit/s"),
            ] {
                let (Some(one), Some(two)) = (
                    at(plot, &format!("{who} one")),
                    at(plot, &format!("{who} two")),
                ) else {
                    continue;
                };
                let apart = if one.min > two.max || two.min > one.max {
                    ""
                } else {
                    ", which their spread does not distinguish"
                };
                sentences.push(format!(
                    "{who}, {what}: {:.1} {unit} ({:.1}-{:.1}) with one interface, {:.1} ({:.1}-{:.1}) with two{apart} ({}).",
                    one.median, one.min, one.max, two.median, two.min, two.max, one.rounds
                ));
            }
        }
        sentences
    }
}

fn large(bed: &Bed, times: u32) -> Result<f64> {
    let figures = netpipe(bed, LARGE, LARGE, times)?;
    Ok(figures.iter().map(|(_, rate, _)| *rate).fold(0.0, f64::max))
}

/// Sets the MTU of all links between client and server.
fn resize(bed: &Bed, mtu: u16) -> Result<()> {
    let all = format!(
        "for path in /sys/class/net/*; do\n\
           link=${{path##*/}}\n\
           case $link in lo|*ipip*|lvs-*) ;; *) ip link set \"$link\" mtu {mtu} ;; esac\n\
         done\nip route flush cache\n"
    );
    for host in [&bed.client, &bed.director, &bed.server] {
        host.sh(&all)?;
    }
    Ok(())
}
