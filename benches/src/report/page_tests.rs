//! Tests of the page in a browser, and of the JSON against its schema, with made-up figures for all
//! plots.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use lvs_testbed::Testbed;
use lvs_testbed::browser::Browser;
use plotters::style::RGBColor;
use serde::Deserialize;

use super::data::{CpuSeconds, Document, Missing, Run, SCHEMA, Value};
use super::{EXPERIMENTS, Experiment, draw, html, peers};

/// The visible content of a plot.
#[derive(Debug, Deserialize)]
struct Seen {
    id: String,
    /// The texts in the plot.
    texts: Vec<String>,
    /// Elements that are not completely within the plot.
    outside: Vec<String>,
    /// For each colour of drawn marks: their extent as a share of the plot's width and height.
    drawn: Vec<(String, f64, f64)>,
}

const LOOK: &str = "
    return [...document.querySelectorAll('figure')].map((figure) => {
        const svg = figure.querySelector('svg'), all = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll('text')];
        const outside = texts.filter((text) => {
            const box = text.getBoundingClientRect();
            return box.width === 0 || box.left < all.left || box.right > all.right || box.top < all.top || box.bottom > all.bottom;
        });
        const drawn = new Map();
        for (const shape of svg.querySelectorAll('rect, circle, line, polyline, polygon, path')) {
            const colour = [shape.getAttribute('stroke'), shape.getAttribute('fill')].find((c) => c && c.startsWith('#'));
            const box = shape.getBoundingClientRect(), old = drawn.get(colour);
            if (!colour) continue;
            drawn.set(colour, old ? {
                left: Math.min(old.left, box.left), right: Math.max(old.right, box.right),
                top: Math.min(old.top, box.top), bottom: Math.max(old.bottom, box.bottom),
            } : box);
        }
        return {
            id: figure.id,
            texts: texts.map((text) => text.textContent.trim()),
            outside: outside.map((text) => text.textContent.trim()),
            drawn: [...drawn].map(([colour, box]) => [colour, (box.right - box.left) / all.width, (box.bottom - box.top) / all.height]),
        };
    })";

/// A report with made-up values of three rounds of each peer of each experiment.
fn sample() -> Document {
    let mut document = Document {
        schema: SCHEMA,
        complete: true,
        quick: true,
        rounds: 3,
        machine: vec![("kernel".into(), "made up & <drawn>".into())],
        ..Document::default()
    };
    for experiment in EXPERIMENTS {
        let peers = peers::of(experiment);
        for (place, peer) in peers.iter().enumerate() {
            for round in 1..=3_u8 {
                let mut values = Vec::new();
                for plot in experiment.plots() {
                    let bars = experiment.bars(plot).len();
                    let xs: Vec<usize> = match bars {
                        0 => vec![1, 10, 100, 1000],
                        bars => (0..bars).filter(|bar| bar % peers.len() == place).collect(),
                    };
                    values.extend(xs.into_iter().map(|x| {
                        Value::new(
                            plot.name,
                            count(x),
                            10.0 + count(place) + f64::from(round) + count(x),
                        )
                    }));
                }
                document.runs.push(Run {
                    experiment: experiment.name().into(),
                    peer: (*peer).into(),
                    round: round.into(),
                    values,
                    cpu: CpuSeconds {
                        elapsed: 1.0,
                        process: 0.5,
                        ..CpuSeconds::default()
                    },
                    disturbed: (round == 3).then(|| "somebody compiled".into()),
                    notes: vec!["a note".into()],
                });
            }
        }
        document.missing.push(Missing {
            experiment: experiment.name().into(),
            peer: "kernel IPVS".into(),
            why: "absent".into(),
        });
    }
    document
}

fn count(number: usize) -> f64 {
    u32::try_from(number).map_or(f64::MAX, f64::from)
}

fn hex(colour: RGBColor) -> String {
    format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2)
}

/// The peers that the legend of a plot must contain, and their colours.
fn legend(
    experiment: &dyn Experiment,
    document: &Document,
    plot: &super::Plot,
) -> Vec<(String, String)> {
    let series = experiment.series(document, plot);
    let bars = !experiment.bars(plot).is_empty();
    let name = |peer: &str| match bars {
        true => peer.split(' ').next().unwrap_or_default().to_owned(),
        false => peer.to_owned(),
    };
    let mut names: Vec<String> = series.iter().map(|one| name(&one.peer)).collect();
    names.dedup();
    let colour = |name: String| {
        let colour = hex(html::look(&name).colour);
        (name, colour)
    };
    names.into_iter().map(colour).collect()
}

fn check(seen: &Seen, experiment: &dyn Experiment, document: &Document, plot: &super::Plot) {
    let id = &seen.id;
    for axis in [&plot.x, &plot.y] {
        assert!(!axis.unit.is_empty() && !axis.name.is_empty(), "{id}");
        let words = format!("{} ({})", axis.name, axis.unit);
        assert!(
            seen.texts.contains(&words),
            "{id} has no axis {words}: {seen:?}"
        );
    }
    assert!(
        seen.texts.contains(&plot.title.to_owned()),
        "{id} has no title: {seen:?}"
    );
    assert!(
        seen.outside.is_empty(),
        "{id}: elements are cut off: {:?}",
        seen.outside
    );
    let ticks = seen
        .texts
        .iter()
        .filter(|text| text.starts_with(|first: char| first.is_ascii_digit()));
    assert!(ticks.count() >= 3, "{id}: axes without numbers: {seen:?}");
    let bars = experiment.bars(plot);
    for bar in bars {
        assert!(
            seen.texts.iter().any(|text| text == bar),
            "{id}: no bar {bar}"
        );
    }
    let legend = legend(experiment, document, plot);
    assert!(!legend.is_empty(), "{id} is empty");
    for (peer, colour) in legend {
        assert!(seen.texts.contains(&peer), "{id}: the legend lacks {peer}");
        let drawn = seen.drawn.iter().find(|(own, ..)| *own == colour);
        let (_, width, height) =
            drawn.unwrap_or_else(|| panic!("{id}: nothing is drawn for {peer} in {colour}"));
        // The marks must be wider than the legend's key.
        assert!(
            *height > 0.05 && (*width > 0.5 || !bars.is_empty()),
            "{id}: the marks of {peer} are too small: {width} by {height} of the plot"
        );
    }
}

#[test]
#[ignore = "needs Chromium"]
fn each_plot_has_axes_with_units_a_legend_and_data_in_a_browser() {
    let document = sample();
    let mut testbed = Testbed::new("page").expect("the testbed can be created");
    let [host] = testbed.hosts(["reader"]).expect("the host can be created");
    draw(&document, testbed.dir()).expect("the page can be written");
    let browser = Browser::start(&host, testbed.dir()).expect("the browser can be started");
    browser
        .screen(1280, 900, false)
        .expect("the size of the screen can be set");
    let page = testbed.dir().join("report.html");
    browser
        .open(&format!("file://{}", page.display()))
        .expect("the page can be opened");
    let seen = browser.run(LOOK).expect("the script returns a value");
    let seen: Vec<Seen> = serde_json::from_value(seen).expect("the value describes the plots");
    let plots: Vec<_> = EXPERIMENTS
        .into_iter()
        .flat_map(|experiment| {
            experiment
                .plots()
                .iter()
                .map(move |plot| (experiment, plot))
        })
        .collect();
    let ids = plots
        .iter()
        .map(|(experiment, plot)| format!("{}-{}", experiment.name(), plot.name));
    assert!(ids.eq(seen.iter().map(|seen| seen.id.clone())), "{seen:?}");
    for (seen, (experiment, plot)) in seen.iter().zip(&plots) {
        check(seen, *experiment, &document, plot);
    }
    // A phone scrolls down, and sideways only within a plot or a table.
    browser
        .screen(390, 844, false)
        .expect("the size of the screen can be set");
    let wide = browser.run("return document.documentElement.scrollWidth - innerWidth");
    assert_eq!(wide.expect("the width is known"), 0);
    let alone = "return performance.getEntriesByType('resource').length + document.scripts.length";
    assert_eq!(
        browser.run(alone).expect("the script returns a number"),
        0,
        "the page loads another file"
    );
}

#[test]
fn page_names_missing_peers_and_plots() {
    let mut document = sample();
    let orourke = EXPERIMENTS[0];
    document.missing.clear();
    document.runs.retain(|run| run.peer == "direct");
    for run in &mut document.runs {
        run.values.retain(|value| value.plot == "replies");
    }
    let page = html::page(&document, &[orourke]).expect("the page can be written");
    for words in [
        "<li>routing, lvs-tunnel, lvs-nat-fast-path, nftables, nginx, ip_vs dr, ip_vs tunnel: left out with --quick</li>",
        "<li>lvs-nat, lvs-dr, haproxy, ip_vs nat: not requested</li>",
        "<li>“Errors, two servers”: no figures with --quick</li>",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
    // A missing value has no bar.
    let plots = orourke.plots().iter();
    let bars = plots.filter(|plot| plot.name == "cost");
    let all = sample();
    let mut few = all.clone();
    few.runs
        .retain(|run| ["lvs-nat", "haproxy"].contains(&&*run.peer));
    for (plot, document, is_there) in bars.flat_map(|bar| [(bar, &all, true), (bar, &few, false)]) {
        let series = orourke.series(document, plot);
        let svg = html::plot(plot, &series, orourke.bars(plot)).expect("the plot can be drawn");
        let svg = svg.expect("the plot has data");
        assert!(svg.contains("haproxy") && svg.contains("nginx") == is_there);
    }
    document.runs.clear();
    let page = html::page(&document, &[orourke]).expect("the page can be written");
    assert!(page.contains("There are too few measurements") && !page.contains("<ul></ul>"));
}

#[test]
#[ignore = "needs jsonschema"]
fn benchmark_report_matches_its_schema() {
    // The program of Debian: another one with this name may not work, or may not exist for this
    // user.
    const JSONSCHEMA: &str = "/usr/bin/jsonschema";
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/report.schema.json");
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let file = directory.path().join("report.json");
    let is_valid = |document: &serde_json::Value| {
        std::fs::write(&file, document.to_string()).expect("the file can be written");
        let mut command = Command::new(JSONSCHEMA);
        let output = command
            .arg("-i")
            .arg(&file)
            .arg(&schema)
            .output()
            .expect("the checker runs");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), error)
    };
    let good = serde_json::to_value(sample()).expect("the value can be written as JSON");
    let (valid, error) = is_valid(&good);
    assert!(valid, "{error}");
    let mut bad = good.clone();
    bad["runs"][0]["cpu"]["process"] = (-1.0).into();
    assert!(!is_valid(&bad).0);
    let mut bad = good.clone();
    bad["runs"][0]["extra"] = 1.into();
    assert!(!is_valid(&bad).0, "an unknown field is accepted");
    let mut bad = good;
    bad["missing"][0]
        .as_object_mut()
        .expect("`missing` is an object")
        .remove("why");
    assert!(!is_valid(&bad).0);
}

#[test]
fn peers_have_distinct_colours_of_the_palette() {
    let palette = [
        "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
        "#999999", "#663311",
    ];
    let all = EXPERIMENTS.into_iter().flat_map(peers::of);
    let peers: HashSet<&str> = all
        .map(|peer| peer.split(' ').next().unwrap_or_default())
        .collect();
    let colours: HashSet<String> = peers
        .iter()
        .map(|peer| hex(html::look(peer).colour))
        .collect();
    assert_eq!(
        colours.len(),
        peers.len(),
        "two peers look alike: {peers:?}"
    );
    assert!(
        colours
            .iter()
            .all(|colour| palette.contains(&colour.as_str())),
        "{colours:?}"
    );
}

#[test]
fn peers_of_one_experiment_look_different() {
    for experiment in EXPERIMENTS {
        let peers = peers::of(experiment);
        let looks: HashSet<String> = peers
            .iter()
            .map(|peer| format!("{:?}", html::look(peer)))
            .collect();
        assert_eq!(looks.len(), peers.len(), "{}", experiment.name());
    }
}
