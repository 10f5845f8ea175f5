//! `lvs-bench report`, end to end: checks that it measures and draws, not the results.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn report(directory: &Path, arguments: &[&str]) -> Output {
    let arguments = [&["mack"], arguments].concat();
    report_of(directory, &arguments)
}

fn report_of(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lvs-bench"));
    command.args(["report", "--quick", "--busy", "--out"]);
    command.arg(directory).args(arguments);
    command.output().expect("report starts")
}

fn runs(directory: &Path) -> Vec<(String, u64)> {
    let text = fs::read_to_string(directory.join("report.json")).expect("the file can be read");
    let document: Value = serde_json::from_str(&text).expect("the JSON is valid");
    assert_eq!(document["schema"], 1);
    let runs = document["runs"].as_array().expect("`runs` is a list");
    let of = |run: &Value| {
        assert_eq!(run["experiment"], "mack");
        assert!(run["cpu"]["elapsed"].as_f64() > Some(0.0), "{run}");
        for value in run["values"].as_array().expect("`values` is a list") {
            let plot = value["plot"].as_str();
            assert!(
                plot == Some("latency") || plot == Some("throughput"),
                "{value}"
            );
            assert!(
                value["x"].as_f64() > Some(0.0) && value["y"].as_f64() > Some(0.0),
                "{value}"
            );
        }
        (
            run["peer"].as_str().expect("`peer` is a text").to_owned(),
            run["round"].as_u64().expect("`round` is a number"),
        )
    };
    runs.iter().map(of).collect()
}

#[test]
fn report_refuses_unknown_experiment_and_peer() {
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let output = report(directory.path(), &["no-such"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("there is no experiment no-such"),
        "{error}"
    );
    let output = report(directory.path(), &["--peers", "nobody"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("nobody"),
        "{error}"
    );
}

/// `--resume` measures the rounds that an interrupted run lacks, and no others.
#[test]
#[ignore = "needs NetPIPE"]
fn plots_have_axes_a_legend_and_data_and_a_run_is_resumed() {
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let directory = directory.path();
    let peers = ["--peers", "direct,routing", "--rounds"];
    let output = report(directory, &[&peers[..], &["1"]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(runs(directory).len(), 2);
    // As if the run had been interrupted after the first peer.
    let file = directory.join("report.json");
    let mut document: Value =
        serde_json::from_slice(&fs::read(&file).expect("the file can be read"))
            .expect("the JSON is valid");
    document["runs"]
        .as_array_mut()
        .expect("`runs` is a list")
        .truncate(1);
    let kept = document["runs"][0].clone();
    fs::write(&file, document.to_string()).expect("the file can be written");
    let output = report(directory, &[&peers[..], &["2", "--resume"]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let all = runs(directory);
    assert_eq!(all.len(), 4);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 4, "{all:?}");
    let document: Value = serde_json::from_slice(&fs::read(&file).expect("the file can be read"))
        .expect("the JSON is valid");
    assert_eq!(document["runs"][0], kept);
    assert_eq!(document["complete"], true);

    let page = fs::read_to_string(directory.join("report.html")).expect("the file can be read");
    assert!(
        !page.contains("<script") && !page.contains("src="),
        "the page loads another file"
    );
    let plots: Vec<&str> = page.split("<svg").skip(1).collect();
    assert_eq!(plots.len(), 3);
    assert!(plots[1].contains("added time (µs)") && plots[1].contains("routing"));
    let lines = [plots[0], plots[2]].into_iter();
    for (plot, unit) in lines.zip(["time (µs)", "throughput (Mbit/s)"]) {
        let plot = plot.split("</svg>").next().expect("the element is closed");
        for words in ["message size (bytes)", unit, "direct", "routing"] {
            assert!(plot.contains(words), "{words}: {plot}");
        }
        // Each peer has a line of many points in its own colour.
        for colour in ["#000000", "#999999"] {
            let is_line = |element: &&str| {
                element.starts_with("polyline")
                    && element.contains(colour)
                    && element.matches(',').count() > 20
            };
            assert_eq!(plot.split('<').filter(is_line).count(), 1, "{colour}");
        }
    }
    let csv = fs::read_to_string(directory.join("report.csv")).expect("the file can be read");
    assert!(
        csv.starts_with("experiment,peer,round,plot,x,y,disturbed\nmack,direct,1,latency,1,"),
        "{csv}"
    );
}

#[test]
#[ignore = "needs httperf and wrk"]
fn report_of_web_experiments_has_plots_with_axes_legend_and_data() {
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let directory = directory.path();
    let experiments = ["orourke", "haddad", "--peers", "direct,routing", "--rounds"];
    let output = report_of(directory, &[&experiments[..], &["1"]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = fs::read_to_string(directory.join("report.json")).expect("the file can be read");
    let document: Value = serde_json::from_str(&text).expect("the JSON is valid");
    assert_eq!(document["missing"], Value::Array(Vec::new()), "{text}");
    assert_eq!(document["runs"].as_array().map(Vec::len), Some(4));
    let page = fs::read_to_string(directory.join("report.html")).expect("the file can be read");
    for (plot, units) in [
        ("orourke-replies", ["(requests/s)", "(replies/s)"]),
        ("orourke-errors", ["(requests/s)", "(% of requests)"]),
        ("orourke-response", ["(requests/s)", "(ms)"]),
        ("orourke-scaling", ["(count)", "(replies/s)"]),
        ("haddad-requests", ["(count)", "(1/s)"]),
        ("haddad-connections", ["(count)", "(1/s)"]),
        ("haddad-wait", ["(count)", "(µs)"]),
    ] {
        let begin = page.find(&format!("<figure id=\"{plot}\">"));
        let svg = &page[begin.unwrap_or_else(|| panic!("no {plot}"))..];
        let svg = svg
            .split("</figure>")
            .next()
            .expect("the element is closed");
        for words in units.into_iter().chain(["direct", "routing"]) {
            assert!(svg.contains(words), "{plot}: {words}");
        }
        for colour in ["#000000", "#999999"] {
            assert!(svg.contains(colour), "{plot}: nothing is drawn in {colour}");
        }
    }
    for words in [
        "direct: ",
        "replies/s at most",
        "requests/s",
        "client waits",
    ] {
        assert!(page.contains(words), "{words}");
    }
}

/// Also checks the numbers of runs of `mack-links`, `mack-files` and `mack-servers`.
#[test]
fn mack_services_work_through_exactly_the_supporting_peers() {
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let directory = directory.path();
    let asked = [
        "mack-links",
        "mack-files",
        "mack-servers",
        "mack-services",
        "--peers",
        "lvs-nat,lvs-dr,lvs-tunnel,nftables,haproxy,nginx,lvs-nat one,lvs-dr one,lvs-dr two",
        "--rounds",
        "1",
    ];
    let output = report_of(directory, &asked);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let text = fs::read_to_string(directory.join("report.json")).expect("the file can be read");
    let document: Value = serde_json::from_str(&text).expect("the JSON is valid");
    assert_eq!(document["missing"], Value::Array(Vec::new()));
    let runs = document["runs"].as_array().expect("`runs` is a list");
    let count = |experiment: &str| {
        let of = runs.iter().filter(|run| run["experiment"] == experiment);
        of.count()
    };
    assert_eq!(count("mack-links"), 9);
    assert_eq!(count("mack-files"), 6);
    assert_eq!(count("mack-servers"), 4);
    assert_eq!(count("mack-services"), 6);
    // telnet, rsh, lpd, session, with a mark, with port 0, UDP, TFTP, FTP passive and active.
    for (peer, works) in [
        ("lvs-nat", [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        ("lvs-dr", [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        ("lvs-tunnel", [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        ("nftables", [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        ("haproxy", [1, 0, 0, 0, 1, 1, 0, 0, 1, 0]),
        ("nginx", [1, 0, 0, 0, 1, 1, 1, 1, 1, 0]),
    ] {
        let mut found = runs
            .iter()
            .filter(|run| run["experiment"] == "mack-services" && run["peer"] == peer);
        let run = found.next().expect("the peer has a run");
        let mut seen = [0; 10];
        for value in run["values"].as_array().expect("`values` is a list") {
            let bar = value["x"].as_f64().expect("`x` is a number");
            let bar = (0..10).find(|known| f64::from(*known).total_cmp(&bar).is_eq());
            let bar = usize::try_from(bar.expect("one of the ten marks"))
                .expect("the number fits into a `usize`");
            seen[bar] = i32::from(value["y"].as_f64() > Some(0.0));
        }
        assert_eq!(seen, works, "{peer}: {}", run["notes"]);
    }
}
