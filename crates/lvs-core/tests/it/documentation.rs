//! Checks that the documentation covers the schedulers, sysctls and other parts of the code, and
//! that the files, functions, tests and links in it exist.

use std::fs;
use std::path::{Path, PathBuf};

use lvs_core::sched::BUILT_IN;
use lvs_core::settings::Sysctls;
use lvs_core::tunnel::{TunnelChecksum, TunnelType};

/// The text of a file; the path is relative to the root of the project.
fn text(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The part of a page from a heading to the next heading of the same or a higher level.
fn section(path: &str, heading: &str) -> String {
    let page = text(path);
    let rank = heading.bytes().take_while(|&byte| byte == b'#').count();
    let mut lines = page.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "{path} has no section `{heading}`");
    let ends = |line: &&str| {
        let hashes = line.bytes().take_while(|&byte| byte == b'#').count();
        !(1..=rank).contains(&hashes)
    };
    lines.take_while(ends).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_scheduler_is_documented() {
    let config = section("docs/configuration.md", "## [[service]]");
    let row = config
        .lines()
        .find(|line| line.starts_with("| `scheduler` |"))
        .expect("docs/configuration.md has no key `scheduler`");
    let table = section("docs/lvsadm.md", "## Schedulers");
    for about in BUILT_IN {
        let name = about.name;
        assert!(
            row.contains(&format!("`\"{name}\"`")),
            "docs/configuration.md: the key `scheduler` does not list {name}"
        );
        assert!(
            table.contains(&format!("\n| `{name}` | ")),
            "docs/lvsadm.md: no line for {name}"
        );
        if !about.in_ipvs {
            assert!(
                text("docs/beyond-the-kernel.md").contains(&format!("`{name}`")) || name == "none",
                "docs/beyond-the-kernel.md does not mention {name}"
            );
        }
    }
}

#[test]
fn every_sysctl_is_documented_with_its_default() {
    let section = section("docs/configuration.md", "## [sysctl]");
    let defaults = Sysctls::default();
    for name in Sysctls::NAMES {
        let value = defaults.get(name).unwrap().replace('\t', " ");
        let cells: Vec<Vec<&str>> = section
            .lines()
            .filter(|line| line.starts_with(&format!("| `{name}` |")))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        assert!(
            cells.iter().any(|cells| cells.get(3) == Some(&&*value)),
            "docs/configuration.md: no line for {name} with the default {value}: {cells:?}"
        );
    }
}

#[test]
fn every_tunnel_type_and_checksum_is_documented() {
    let pages = [
        ("docs/tunnelling.md", "tun-type "),
        ("docs/configuration.md", "\""),
        ("docs/control-protocol.md", "\"type\":\""),
    ];
    for kind in TunnelType::ALL {
        for (page, before) in pages {
            let word = kind.name;
            assert!(
                text(page).contains(&format!("{before}{word}")),
                "{page} does not contain `{before}{word}`"
            );
        }
    }
    for checksum in TunnelChecksum::ALL {
        for (page, word) in [
            ("docs/tunnelling.md", format!("--tun-{}", checksum.option())),
            ("docs/configuration.md", format!("\"{}\"", checksum.name())),
        ] {
            assert!(text(page).contains(&word), "{page} does not contain {word}");
        }
    }
}

#[cfg(feature = "api")]
#[test]
fn every_control_call_is_documented() {
    let methods = section("docs/control-protocol.md", "## Methods");
    for (name, _) in lvs_core::api::Call::METHODS {
        assert!(
            methods
                .lines()
                .filter_map(|line| line.strip_prefix("| ")?.split_once(" |"))
                .any(|(cell, _)| cell.contains(&format!("`{name}`"))),
            "docs/control-protocol.md: no line for {name}"
        );
    }
}

#[test]
fn files_in_code_map_exist() {
    let map = section("ARCHITECTURE.md", "## Code map");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seen = 0;
    for word in map.split('`').skip(1).step_by(2) {
        let is_path = [
            "lvs-api/",
            "lvs-core/",
            "lvs-dataplane/",
            "lvs-packet/",
            "lvs-process/",
            "lvs-proxy/",
            "lvs-sys/",
            "lvsd/",
            "lvsadm/",
            "lvs-testbed/",
        ]
        .iter()
        .any(|start| word.starts_with(start));
        if !is_path || word.contains("NAME") || word.contains('{') {
            continue;
        }
        seen += 1;
        assert!(
            crates.join(word).exists(),
            "ARCHITECTURE.md names {word}, which does not exist"
        );
    }
    assert!(seen > 20, "the code map has only {seen} paths");
}

/// Expands `a/{b,c}.rs` to `a/b.rs` and `a/c.rs`.
fn spelled_out(path: &str) -> Vec<String> {
    match path.split_once('{') {
        Some((before, rest)) => {
            let (names, after) = rest.split_once('}').expect("the path has a closing brace");
            let names = names.split(',');
            names.map(|name| format!("{before}{name}{after}")).collect()
        }
        None => vec![path.to_owned()],
    }
}

fn sources_below(directory: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(directory).expect("the directory is readable") {
        let path = entry.expect("the entry is readable").path();
        if path.is_dir() {
            sources_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path.display().to_string());
        }
    }
}

/// A page may name a file by the end of its path.
#[test]
fn files_that_architecture_names_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sources = Vec::new();
    sources_below(&crates, &mut sources);
    let mut count = 0;
    for page in ["ARCHITECTURE.md", "docs/decisions.md", "docs/limits.md"] {
        let content = text(page);
        let words = content.split('`').skip(1).step_by(2);
        let named = words.filter(|word| word.ends_with(".rs") && !word.contains("NAME"));
        for path in named.flat_map(spelled_out) {
            count += 1;
            let end = format!("/{path}");
            assert!(
                sources.iter().any(|source| source.ends_with(&end)),
                "{page} names {path}, which does not exist"
            );
        }
    }
    assert!(count > 150, "the pages name only {count} files");
}

/// ARCHITECTURE.md names 15 files through which a packet of an existing connection passes, and a
/// function in each. All of these functions must exist.
#[test]
fn path_of_packet_has_fifteen_files_with_existing_functions() {
    let way = section("ARCHITECTURE.md", "### From socket to socket");
    let rows: Vec<Vec<&str>> = way
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('`').skip(1).step_by(2).collect())
        .collect();
    assert_eq!(rows.len(), 15, "lines of the table in: {way}");
    for row in rows {
        let source = text(&format!("crates/{}", row[0]));
        let function = format!("fn {}", row[1]);
        let begins = |rest: &str| rest.starts_with('(') || rest.starts_with('<');
        assert!(
            source.split(&function).skip(1).any(begins),
            "ARCHITECTURE.md names a function that {} does not have: {function}",
            row[0]
        );
    }
}

/// Whether a source file, without its tests, depends on forwarding methods.
fn depends_on_method(source: &str) -> bool {
    let tests = ["mod tests {", "pub(crate) mod tests {"];
    let tests = tests.map(|line| format!("#[cfg(test)]\n{line}"));
    let end = tests.iter().filter_map(|start| source.find(start)).min();
    let lines = source[..end.unwrap_or(source.len())].lines();
    lines
        .filter(|line| !line.trim_start().starts_with("//"))
        .any(|line| line.contains("Forwarding::") || line.contains("translates()"))
}

#[test]
fn files_that_depend_on_forwarding_method_are_in_architecture_list() {
    let list = section("ARCHITECTURE.md", "### A forwarding method");
    let named: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut count = 0;
    for program in [
        "lvs-api",
        "lvs-core",
        "lvs-packet",
        "lvs-process",
        "lvs-proxy",
        "lvs-sys",
        "lvs-dataplane",
        "lvsadm",
        "lvsd",
    ] {
        let mut sources = Vec::new();
        sources_below(&crates.join(program).join("src"), &mut sources);
        for path in sources {
            let inside = path
                .rsplit_once("/../")
                .expect("the path contains `/../`")
                .1;
            let is_test = inside.contains("/tests") || inside.ends_with("/testing.rs");
            let source = fs::read_to_string(&path).expect("the file is readable");
            if is_test || !depends_on_method(&source) {
                continue;
            }
            count += 1;
            let covers = |place: &&&str| {
                inside == **place || (place.ends_with('/') && inside.starts_with(**place))
            };
            assert!(
                named.iter().any(|place| covers(&place)),
                "ARCHITECTURE.md: `A forwarding method` does not name {inside}"
            );
        }
    }
    assert!(count > 40, "only {count} files depend on a method");
}

/// Adds the names of the tests below a directory of crates, and their files, to `found`.
fn tests_below(directory: &Path, found: &mut Vec<(String, PathBuf)>) {
    for entry in fs::read_dir(directory).expect("the directory is readable") {
        let path = entry.expect("the entry is readable").path();
        if path.is_dir() {
            tests_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("the file is readable");
            let mut marked = false;
            for line in source.lines().map(str::trim_start) {
                let name = line
                    .trim_start_matches("async ")
                    .strip_prefix("fn ")
                    .and_then(|rest| rest.split('(').next());
                match name {
                    Some(name) if marked => found.push((name.to_owned(), path.clone())),
                    _ => {}
                }
                // Other attributes and comments may be between the attribute and the function.
                marked = line == "#[test]"
                    || line.starts_with("#[tokio::test")
                    || (marked && (line.starts_with("#[") || line.starts_with("//")));
            }
        }
    }
}

/// Each difference in docs/decisions.md must name its test, each test named there must exist, and
/// each test of `tests/e2e/deviations.rs` must be named there.
#[test]
fn every_deviation_has_its_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tests = Vec::new();
    tests_below(&crates, &mut tests);
    let exists = |name: &str| match name.strip_suffix('*') {
        Some(front) => tests.iter().any(|(test, _)| test.starts_with(front)),
        None => tests.iter().any(|(test, _)| test == name),
    };
    let list = section("docs/decisions.md", "## Deviations from the kernel");
    let mut named = Vec::new();
    for entry in list.split("\n* ").skip(1) {
        let quoted: Vec<&str> = entry.split('`').skip(1).step_by(2).collect();
        let title = entry.lines().next().unwrap_or_default();
        assert!(
            quoted.iter().any(|name| exists(name)),
            "docs/decisions.md names no existing test of `{title}`"
        );
        // Names of tests are sentences; sysctls and keys have fewer words.
        let sentence = |name: &&&str| {
            name.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_*".contains(&byte))
                && name.matches('_').count() > 2
        };
        for name in quoted.iter().filter(sentence) {
            assert!(
                exists(name),
                "docs/decisions.md: {name} of `{title}` is no test"
            );
        }
        named.extend(quoted);
    }
    for (test, path) in &tests {
        if path.ends_with("tests/e2e/deviations.rs") {
            assert!(
                named.contains(&test.as_str()),
                "docs/decisions.md: the deviation that {test} pins is missing"
            );
        }
    }
}

/// Each line of docs/limits.md must name an existing test. If it also names a file, the tests named
/// before that file must be in it.
#[test]
fn every_limit_has_its_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut tests = Vec::new();
    tests_below(&crates, &mut tests);
    let page = text("docs/limits.md");
    let rows: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| subject | limit |"))
        .collect();
    assert!(
        rows.len() > 60,
        "docs/limits.md has too few lines: {rows:?}"
    );
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 5, "docs/limits.md: {row}");
        let (what, cell) = (cells[0], cells[4]);
        // Tests that are named without a file are in the next named file, or in any file.
        let mut named = Vec::new();
        for quoted in cell.split('`').skip(1).step_by(2) {
            if quoted.ends_with(".rs") {
                for test in named.drain(..) {
                    let there = |path: &PathBuf| path.to_string_lossy().ends_with(quoted);
                    assert!(
                        tests.iter().any(|(name, path)| name == test && there(path)),
                        "docs/limits.md: {quoted} has no test {test} (`{what}`)"
                    );
                }
            } else {
                assert!(
                    tests.iter().any(|(name, _)| name == quoted),
                    "docs/limits.md: {quoted} of `{what}` is no test"
                );
                named.push(quoted);
            }
        }
        let is_test = |quoted: &str| tests.iter().any(|(name, _)| name == quoted);
        assert!(
            cell.split('`').any(is_test),
            "docs/limits.md: no test of `{what}`"
        );
    }
}

/// Clients with read access can make exactly these calls; the access depends on the method's name.
#[cfg(feature = "api")]
#[test]
fn read_access_permits_exactly_the_listed_calls() {
    use lvs_core::api::{Access, Call};

    let reads = Call::METHODS.iter().filter(|(_, a)| *a == Access::Read);
    let reads: Vec<&str> = reads.map(|(name, _)| *name).collect();
    let expected = [
        "hello",
        "info",
        "service.list",
        "conn.list",
        "timeouts.get",
        "sysctl.get",
        "daemon.list",
        "sync.get",
        "drops",
        "explain",
        "mark.list",
        "filter.list",
        "local.get",
        "server.return_path",
    ];
    assert_eq!(reads, expected);
    assert!(Call::METHODS.len() >= 34);
    for (name, access) in Call::METHODS {
        assert_eq!(Access::of_method(name), *access, "{name}");
    }
    assert_eq!(Access::of_method("no.such.call"), Access::Write);
}

/// Returns the names of the pages below `docs/`.
fn pages() -> Vec<String> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let entries = fs::read_dir(docs).expect("the directory `docs` is readable");
    let names = entries.map(|entry| entry.expect("the entry is readable").file_name());
    let names = names.map(|name| name.into_string().expect("the file name is UTF-8"));
    names.filter(|name| name.ends_with(".md")).collect()
}

/// The targets of the links of a page; code has no links.
fn links(page: &str) -> Vec<String> {
    let mut prose = String::new();
    for (at, block) in page.split("\n```").enumerate() {
        if at % 2 == 0 {
            prose.push_str(block);
        }
    }
    let spans = prose.split('`').enumerate();
    let text: String = spans
        .filter(|(at, _)| at % 2 == 0)
        .map(|(_, span)| span)
        .collect();
    let targets = text.split("](").skip(1);
    targets
        .filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()))
        .collect()
}

/// The anchors that GitHub and mdBook give the headings of a page: lower case, hyphens for spaces,
/// no punctuation.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let words = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    words
        .map(|heading| {
            let kept = heading.chars().filter_map(|c| match c {
                ' ' => Some('-'),
                '-' | '_' => Some(c),
                _ => c.is_alphanumeric().then_some(c),
            });
            kept.collect()
        })
        .collect()
}

/// `mdbook build` would omit a page that the summary does not list.
#[test]
fn book_summary_lists_every_page_once() {
    let summary = links(&text("docs/SUMMARY.md"));
    for page in pages().iter().filter(|page| *page != "SUMMARY.md") {
        let count = summary.iter().filter(|link| *link == page).count();
        assert_eq!(count, 1, "docs/SUMMARY.md: links to {page}");
    }
}

/// The code in docs/embedding.md consists of lines of an example that the workspace compiles and
/// tests.
#[test]
fn embedding_page_blocks_are_lines_of_the_example() {
    let example = text("examples/src/bin/embed.rs");
    let page = text("docs/embedding.md");
    let blocks: Vec<&str> = page
        .split("\n```")
        .filter_map(|block| block.strip_prefix("rust\n"))
        .collect();
    assert!(!blocks.is_empty(), "docs/embedding.md has no Rust block");
    for block in blocks {
        assert!(
            example.contains(block),
            "docs/embedding.md has a block that is not in examples/src/bin/embed.rs:\n{block}"
        );
    }
}

#[test]
fn every_alert_has_severity_and_runbook() {
    let rules = text("examples/prometheus-alerts.yml");
    let alerts: Vec<&str> = rules.split("- alert: ").skip(1).collect();
    assert!(alerts.len() > 20, "only {} alerts", alerts.len());
    for alert in alerts {
        let name = alert.lines().next().expect("the alert has a name");
        let severity = ["critical", "warning", "info"]
            .iter()
            .any(|word| alert.contains(&format!("labels: {{severity: {word}}}\n")));
        assert!(severity, "the alert {name} has no severity");
        let runbook = alert.split("runbook: \"").nth(1);
        let runbook = runbook.and_then(|rest| rest.split('"').next());
        let (page, anchor) = runbook
            .and_then(|link| link.split_once('#'))
            .unwrap_or_else(|| panic!("the alert {name} has no runbook with a heading"));
        assert!(
            anchors(&text(page)).iter().any(|found| found == anchor),
            "the runbook of the alert {name}, {page}, has no heading #{anchor}"
        );
    }
}

#[test]
fn relative_links_of_pages_resolve() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<String> = pages().iter().map(|page| format!("docs/{page}")).collect();
    let others = [
        "README",
        "ARCHITECTURE",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ];
    pages.extend(others.map(|page| format!("{page}.md")));
    let mut count = 0;
    for page in pages {
        let content = text(&page);
        for link in links(&content).iter().filter(|link| !link.contains("://")) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let directory = root
                .join(&page)
                .parent()
                .expect("the page is in a directory")
                .to_owned();
            let target = match file {
                "" => root.join(&page),
                file => directory.join(file),
            };
            assert!(
                target.exists(),
                "{page} links to {link}, which does not exist"
            );
            if !anchor.is_empty() && target.extension().is_some_and(|kind| kind == "md") {
                let there = fs::read_to_string(&target).expect("the page is readable");
                assert!(
                    anchors(&there).iter().any(|found| found == anchor),
                    "{page} links to the heading {link}, which does not exist"
                );
            }
        }
    }
    assert!(count > 200, "the pages have only {count} links");
}
