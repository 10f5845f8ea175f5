//! Durations of HTTP downloads and uploads, by the size of the file.

use std::fs::File;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::super::data::{Document, Value};
use super::super::peers::Peer;
use super::super::{Axis, Experiment, Measured, Plot, Turn, log_axis, peers, plot, usual_bed, web};
use crate::compare::bed::Bed;
use crate::compare::programs::PING_PORT;
use crate::machine::Snapshot;
use crate::transfers::Took;
use crate::yardsticks::Yardsticks;

/// The experiment that transfers files of 1 byte to 64 MiB, one after the other.
#[derive(Debug)]
pub(in super::super) struct Files;

const NEW: &str = "new";
const KEEP: &str = "keep";
const UP: &str = "up";

const SIZES: [u64; 8] = [
    1,
    128,
    1 << 10,
    16 << 10,
    128 << 10,
    1 << 20,
    16 << 20,
    64 << 20,
];
const QUICK: [u64; 4] = [1, 16 << 10, 1 << 20, 64 << 20];

impl Experiment for Files {
    fn name(&self) -> &'static str {
        "mack-files"
    }

    fn title(&self) -> &'static str {
        "Files by HTTP, and uploads, by size (Mack, 2000)"
    }

    fn what(&self) -> &'static str {
        "One client requests files of 1 byte to 64 MiB from nginx, one after another: each over a \
         new connection, then all over one persistent connection. It also sends uploads of these \
         sizes over a persistent connection; the server acknowledges each. A point is the mean \
         time of a file, over a tenth of a second or more (0.25 s without --quick). With direct \
         routing and tunnels, only the client's packets pass the director."
    }

    fn plots(&self) -> &'static [Plot] {
        const SIZE: Axis = log_axis("file size", "bytes");
        const TIME: Axis = log_axis("time", "µs");
        const {
            &[
                plot(NEW, "Time of a file over a new connection", SIZE, TIME),
                plot(
                    KEEP,
                    "Time of a file over a persistent connection",
                    SIZE,
                    TIME,
                ),
                plot(
                    UP,
                    "Time of an upload over a persistent connection",
                    SIZE,
                    TIME,
                ),
            ]
        }
    }

    fn seconds(&self, quick: bool) -> f64 {
        if quick { 1.7 } else { 7.5 }
    }

    fn programs(&self) -> &'static [&'static str] {
        &["nginx"]
    }

    fn is_quick(&self, peer: &Peer) -> bool {
        ["direct", "lvs-nat", "nftables", "haproxy", "ip_vs nat"].contains(&peer.name)
    }

    fn bed(&self, peer: &Peer, yardsticks: &Yardsticks) -> Result<Bed> {
        let mut bed = usual_bed(peer, yardsticks)?;
        bed.serve_pings()?;
        Ok(bed)
    }

    fn measure(&self, turn: &Turn<'_>, bed: &mut Bed) -> Result<Measured> {
        let directory = tempfile::tempdir()?;
        let (sizes, time): (&[u64], _) = match turn.quick {
            true => (&QUICK, "--for=100"),
            false => (&SIZES, "--for=250"),
        };
        for size in sizes {
            File::create(directory.path().join(size.to_string()))?.set_len(*size)?;
        }
        let mut server = web::serve(&bed.server, directory.path(), None)?;
        let own = std::env::current_exe()?.display().to_string();
        let target = bed.target(false);
        let (web, uploads) = (format!("{target}:80"), format!("{target}:{PING_PORT}"));
        let words: Vec<_> = sizes.iter().map(u64::to_string).collect();
        let sizes = format!("--sizes={}", words.join(","));
        let words = [
            "60",
            "taskset",
            "-c",
            "0",
            &own,
            "endpoint",
            "transfers",
            &web,
            &uploads,
            &sizes,
            time,
        ];
        let first = Snapshot::take();
        let printed = bed.client.run("timeout", &words)?;
        let (cpu, disturbed) = peers::used_since(bed, &first)?;
        server.stop(Signal::SIGTERM)?;
        let all: Vec<Took> =
            serde_json::from_str(&printed).context("cannot parse the output of the client")?;
        let value = |took: &Took| {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            let x = took.bytes as f64;
            [(NEW, took.new), (KEEP, took.keep), (UP, took.up)]
                .map(|(plot, y)| Value::new(plot, x, y))
        };
        Ok((all.iter().flat_map(value).collect(), cpu, disturbed))
    }

    fn conclusions(&self, document: &Document) -> Vec<String> {
        let peers = peers::of(self);
        let mut sentences = Vec::new();
        for (plot, what) in [
            (NEW, "over a new connection"),
            (KEEP, "over a persistent connection"),
        ] {
            for series in document.series(self.name(), plot, &peers) {
                let (Some((least, time)), Some((most, long))) =
                    (series.points.first(), series.points.last())
                else {
                    continue;
                };
                // Bytes per microsecond are MB per second.
                sentences.push(format!(
                    "{}, {what}: a file of {least:.0} byte takes {:.0} µs ({:.0}-{:.0}), a file of {:.0} MiB arrives at {:.0} MB/s ({:.0}-{:.0}; {}).",
                    series.peer, time.median, time.min, time.max, most / 1_048_576.0,
                    most / long.median, most / long.max, most / long.min, time.rounds
                ));
            }
        }
        for series in document.series(self.name(), UP, &peers) {
            if let Some((most, long)) = series.points.last() {
                sentences.push(format!(
                    "{}: an upload of {:.0} MiB is sent at {:.0} MB/s ({:.0}-{:.0}, {}).",
                    series.peer,
                    most / 1_048_576.0,
                    most / long.median,
                    most / long.max,
                    most / long.min,
                    long.rounds
                ));
            }
        }
        sentences
    }
}
