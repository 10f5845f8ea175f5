//! Metrics, the API and the dashboard of lvsd, read by third-party programs.

use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::browser::Browser;
use lvs_testbed::listing::{connections, rows};
use lvs_testbed::servers::{NginxOptions, nginx};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, open_metrics, programs, soon, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;

const TOKEN: &str = "test-token-0123456789";
/// Markup as the name of a service: a page that does not escape it runs the script.
const HOSTILE: &str = "<img src=x onerror=window.hacked=1>\\\"'{{7*7}}</script>&amp;";

fn site(label: &str) -> Result<Site> {
    Site::new(SiteOptions::with_servers(label, Forward::Nat, 3))
}

fn configure(site: &Site) -> Result<PathBuf> {
    let dir = site.testbed.dir();
    let token = dir.join("token");
    fs::write(&token, TOKEN)?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600))?;
    let mut text = format!(
        "[api]\nlisten = \"127.0.0.1:9560\"\n\
         [[api.token]]\nname = \"oncall\"\nfile = \"{}\"\nrole = \"admin\"\n\
         [dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\
         [defaults]\nforward = \"nat\"\ncheck = {{ type = \"tcp\", interval = \"200ms\", timeout = \"5s\" }}\n\
         [[service]]\nname = \"web\"\naddress = \"{}\"\nscheduler = \"rr\"\n",
        token.display(),
        site.service(80)
    );
    for index in 0..3 {
        text += &format!(
            "[[service.server]]\naddress = \"{}:80\"\n",
            site.real_address(index)
        );
    }
    text += &format!(
        "[[service]]\nname = '''{HOSTILE}'''\naddress = \"{}\"\n[[service.server]]\naddress = \"{}:80\"\n",
        site.service(8080),
        site.real_address(0)
    );
    text += "[[service]]\nname = \"marked\"\nfwmark = 7\ncheck = \"none\"\n[[service.server]]\naddress = \"10.9.9.9:80\"\nweight = 5\n\
             [[mark]]\nmark = 7\nprotocol = \"tcp\"\ndestination = \"192.0.2.77\"\n";
    let path = dir.join("lvsd.toml");
    fs::write(&path, text)?;
    Ok(path)
}

fn start(site: &Site) -> Result<Proc> {
    let dir = site.testbed.dir();
    let (config, state) = (dir.join("lvsd.toml"), dir.join("state"));
    fs::create_dir_all(&state)?;
    let words = ["--config".into(), config, "--state".into(), state];
    let lvsd = site.director.spawn(programs::find("lvsd")?, &words)?;
    let ready = soon("all servers to be up", || {
        let listing = site.lvsadm("-L -n").unwrap_or_default();
        rows(&listing).iter().filter(|row| row.is_server()).count() == 5
            && json(site, "v1/overview").is_ok_and(|o| o["usable"] == 5)
    });
    ready.with_context(|| lvsd.log())?;
    Ok(lvsd)
}

fn get(site: &Site, port: u16, path: &str) -> Result<String> {
    let url = format!("http://127.0.0.1:{port}/{path}");
    site.director.run("curl", &["-sSf", "-m", "20", &url])
}

fn json(site: &Site, path: &str) -> Result<Value> {
    Ok(serde_json::from_str(&get(site, 9560, path)?)?)
}

/// Parses metrics text: the series and their values.
fn series(text: &str) -> Result<BTreeMap<String, f64>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
            Ok((name.to_owned(), value.parse()?))
        })
        .collect()
}

fn load(site: &Site, requests: u64) -> Result<()> {
    let mut load = site.load();
    load.sizes = vec![1000];
    load.requests = requests;
    common::ok(site.client.load(&load)?, requests)?;
    Ok(())
}

/// Reads the metrics of services of all kinds with a strict parser.
#[test]
fn metrics_follow_the_rules_of_open_metrics() -> Result<()> {
    let site = site("strict")?;
    configure(&site)?;
    let _lvsd = start(&site)?;
    load(&site, 6)?;
    let accept = "accept: application/openmetrics-text";
    let url = "http://127.0.0.1:9560/metrics";
    let mut page = String::new();
    let words = ["-sSf", "-m", "20", "-H", accept, url];
    soon("lvsd to be connected to the dataplane", || {
        page = site.director.run("curl", &words).unwrap_or_default();
        page.contains("lvs_dataplane_up 1")
    })?;
    let samples = open_metrics::read(&page).with_context(|| page.clone())?;
    for series in [
        "lvs_drops_total{reason=\"short_header\"}",
        "lvs_drops_total{reason=\"untranslatable\"}",
        "lvs_dataplane_up{}",
    ] {
        ensure!(
            samples.contains_key(series),
            "the page has no {series}:\n{page}"
        );
    }
    Ok(())
}

/// `node_exporter` under `lvs-run` has the same values as lvsd, `promtool` reports no errors, and
/// Prometheus can scrape lvsd. Counters of traffic continue after a restart of lvsd.
#[test]
#[ignore = "needs Prometheus and its node exporter"]
fn metrics_are_read_by_third_party_programs() -> Result<()> {
    let site = site("metrics")?;
    configure(&site)?;
    let mut lvsd = start(&site)?;
    load(&site, 60)?;
    let dir = site.testbed.dir();

    let text = get(&site, 9560, "metrics")?;
    let file = dir.join("metrics.txt");
    fs::write(&file, &text)?;
    let lint = site
        .director
        .sh(&format!("promtool check metrics <{} 2>&1", file.display()))?;
    ensure!(lint.trim().is_empty(), "promtool reports faults: {lint}");

    // After all traffic has ended, the files that node_exporter reads have the counters of lvsd.
    let launcher = programs::find("lvs-run")?;
    let read = |name: &str| {
        let path = format!("/proc/{name}");
        site.director
            .run(&launcher, &["--", "cat", &path])
            .with_context(|| path.clone())
    };
    soon("lvsd and the files to have the same counters", || {
        let text = get(&site, 9560, "metrics").unwrap_or_default();
        text.contains("lvs_connections_total 60\n")
            && read("net/ip_vs_stats").is_ok_and(|stats| {
                let line = stats.lines().nth(2);
                line.is_some_and(|l| l.trim().starts_with("3C "))
            })
    })?;
    let lines = |text: String| text.lines().count();
    // A connection that was reset is removed from the table earlier than the others.
    soon(
        "the files to have as many connections as lvsadm lists",
        || {
            let listed = site.lvsadm("-L -n -c").unwrap_or_default();
            let listed = connections(&listed).unwrap_or_default().len();
            let read = |name| read(name).unwrap_or_default();
            let (conn, sync) = (read("net/ip_vs_conn"), read("net/ip_vs_conn_sync"));
            listed > 0
                && conn.lines().skip(1).all(|l| l.starts_with("TCP "))
                && conn.contains(" C000020A 0050 ")
                && lines(conn) == 1 + listed
                && sync.matches(" LOCAL ").count() == listed
        },
    )
    .with_context(|| {
        format!(
            "{:?}\n{:?}",
            read("net/ip_vs_conn"),
            read("net/ip_vs_conn_sync")
        )
    })?;
    ensure!(read("net/ip_vs_app")? == "prot port    usecnt name\n");
    soon("/proc to show the counters of the worker", || {
        read("net/ip_vs_stats_percpu").is_ok_and(|parts| {
            let worker = parts.lines().nth(2);
            worker.is_some_and(|l| l.starts_with("  0       3C "))
        })
    })?;
    ensure!(read("sys/net/ipv4/vs/sync_threshold")? == "3\t50\n");
    site.lvsadm("sysctl drop_entry=1")?;
    wait_until(
        "/proc/sys/net/ipv4/vs/drop_entry to contain 1",
        Duration::from_secs(10),
        || read("sys/net/ipv4/vs/drop_entry").is_ok_and(|text| text == "1\n"),
    )?;
    site.lvsadm("sysctl drop_entry=0")?;
    let exporter = site.director.spawn(
        &launcher,
        &[
            "--",
            "prometheus-node-exporter",
            "--collector.ipvs",
            "--web.listen-address=127.0.0.1:9100",
        ],
    )?;
    site.director.wait_for_port("tcp", 9100)?;
    let same = [
        ("lvs_connections_total", "node_ipvs_connections_total"),
        (
            "lvs_packets_total{direction=\"in\"}",
            "node_ipvs_incoming_packets_total",
        ),
        (
            "lvs_packets_total{direction=\"out\"}",
            "node_ipvs_outgoing_packets_total",
        ),
        (
            "lvs_bytes_total{direction=\"in\"}",
            "node_ipvs_incoming_bytes_total",
        ),
        (
            "lvs_bytes_total{direction=\"out\"}",
            "node_ipvs_outgoing_bytes_total",
        ),
    ];
    let mut seen = (BTreeMap::new(), BTreeMap::new());
    soon("lvsd and node_exporter to have the same counters", || {
        let of = |port| {
            let text = get(&site, port, "metrics").unwrap_or_default();
            series(&text).unwrap_or_default()
        };
        seen = (of(9560), of(9100));
        let totals = same.iter().all(|(own, theirs)| {
            let own = seen.0.get(*own);
            own.is_some() && own == seen.1.get(*theirs)
        });
        let backends = seen.1.keys();
        let backends = backends.filter(|name| name.starts_with("node_ipvs_backend_"));
        totals && backends.count() == 3 * 5
    })
    .with_context(|| format!("{seen:#?}\n{}", exporter.log()))?;

    // Prometheus scrapes lvsd successfully.
    let config = dir.join("prometheus.yml");
    fs::write(
        &config,
        "global: { scrape_interval: 1s }\nscrape_configs:\n- job_name: lvsd\n  static_configs:\n  - targets: ['127.0.0.1:9560']\n",
    )?;
    let prometheus = site.director.spawn(
        "prometheus",
        &[
            format!("--config.file={}", config.display()),
            format!("--storage.tsdb.path={}", dir.join("tsdb").display()),
            "--web.listen-address=127.0.0.1:9090".to_owned(),
        ],
    )?;
    let ask = |query: &str| -> Result<f64> {
        let text = site.director.run(
            "curl",
            &[
                "-sSf",
                "-G",
                "http://127.0.0.1:9090/api/v1/query",
                "--data-urlencode",
                &format!("query={query}"),
            ],
        )?;
        let answer: Value = serde_json::from_str(&text)?;
        let value = answer
            .pointer("/data/result/0/value/1")
            .and_then(Value::as_str);
        Ok(value.context(text.clone())?.parse()?)
    };
    let connections = "lvs_service_connections_total{service=\"web\"}";
    wait_until(
        "Prometheus to have scraped lvsd",
        Duration::from_secs(30),
        || {
            ask("up{job=\"lvsd\"}").is_ok_and(|up| up > 0.5)
                && ask(connections).is_ok_and(|n| (n - 60.0).abs() < 0.5)
                && ask("count(lvs_server_up == 1)").is_ok_and(|n| (n - 4.0).abs() < 0.5)
        },
    )
    .with_context(|| prometheus.log())?;

    let before = series(&get(&site, 9560, "metrics")?)?;
    let status = lvsd.stop(Signal::SIGTERM)?;
    ensure!(status.success(), "lvsd failed at its exit: {}", lvsd.log());
    let text = get(&site, 9100, "metrics")?;
    ensure!(
        text.contains("\nnode_ipvs_connections_total 60\n"),
        "node_exporter does not report 60 connections without lvsd: {text}"
    );
    load(&site, 30)?;
    let mut lvsd = start(&site)?;
    soon(
        "the metrics to contain the connections made without lvsd",
        || {
            get(&site, 9560, "metrics")
                .is_ok_and(|text| text.contains("lvs_connections_total 90\n"))
        },
    )?;
    let after = series(&get(&site, 9560, "metrics")?)?;
    for (name, value) in &before {
        let counter = name.split('{').next().unwrap_or_default();
        let parts = [
            "service",
            "server",
            "worker",
            "connections",
            "packets",
            "bytes",
            "drops",
        ];
        let traffic = parts
            .iter()
            .any(|part| counter.starts_with(&format!("lvs_{part}_")));
        if traffic && counter.ends_with("_total") {
            let now = after
                .get(name)
                .with_context(|| format!("the page no longer has {name}"))?;
            ensure!(now >= value, "counter {name} fell from {value} to {now}");
        }
    }
    soon("Prometheus to find no counter reset", || {
        ask(connections).is_ok_and(|n| (n - 90.0).abs() < 0.5)
    })?;
    for name in ["service_packets", "server_bytes", "drops"] {
        let resets = ask(&format!("sum(resets(lvs_{name}_total[5m]))"))?;
        ensure!(resets < 0.5, "lvs_{name}_total was reset or fell");
    }
    let rules = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/prometheus-alerts.yml"
    ));
    let queries = site.testbed.dir().join("queries.json");
    fs::write(&queries, grafana_queries()?)?;
    site.director.run(
        "promtool",
        &["check".into(), "rules".into(), rules, queries],
    )?;

    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

/// The queries of the Grafana dashboard as rules of Prometheus.
fn grafana_queries() -> Result<String> {
    let dashboard: Value =
        serde_json::from_str(include_str!("../../../../contrib/grafana/lvsd.json"))?;
    let panels = dashboard["panels"]
        .as_array()
        .context("the dashboard has no list of panels")?;
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let rules: Vec<Value> = targets
        .filter_map(|target| target["expr"].as_str())
        .enumerate()
        .map(|(n, query)| {
            let query = query
                .replace("$__rate_interval", "5m")
                .replace("$instance", ".*")
                .replace("$service", ".*");
            serde_json::json!({"record": format!("panel:{n}"), "expr": query})
        })
        .collect();
    ensure!(
        rules.len() > 20,
        "the dashboard has at most 20 queries: {rules:?}"
    );
    let groups = serde_json::json!({"groups": [{"name": "grafana", "rules": rules}]});
    Ok(groups.to_string())
}

/// Reading needs no credentials; a change needs a token or the control socket.
#[test]
fn api_shows_status_of_lvsd_and_requires_token_for_changes() -> Result<()> {
    let site = site("api")?;
    let path = configure(&site)?;
    let mut lvsd = start(&site)?;
    let program = programs::find("lvsd")?;

    // The status without values that change by themselves.
    let calm = |mut status: Value| {
        for key in ["uptime", "check_lag_ms", "dataplane"] {
            status[key] = Value::Null;
        }
        for service in status["services"].as_array_mut().into_iter().flatten() {
            for server in service["servers"].as_array_mut().into_iter().flatten() {
                server["since"] = Value::Null;
            }
        }
        status
    };
    let config = path.display().to_string();
    let mut both = (Value::Null, Value::Null);
    soon("the API and the commands to show the same state", || {
        let cli = site
            .director
            .run(&program, &["--config", &config, "status", "--json"]);
        let cli = cli.map(|text| serde_json::from_str(&text).unwrap_or_default());
        both = (
            calm(cli.unwrap_or_default()),
            calm(json(&site, "v1/status").unwrap_or_default()),
        );
        both.0 == both.1 && both.0["services"][0]["name"] == "web"
    })
    .with_context(|| format!("{both:#?}"))?;

    // Changes need no token over the Unix socket, but need one over TCP.
    let server = format!("{}:80", site.real_address(1));
    let body = |state: &str| {
        format!(
            "{{\"target\":{{\"host\":\"{}\"}},\"state\":\"{state}\",\"who\":\"ann\",\"why\":\"disk\"}}",
            site.real_address(1)
        )
    };
    let admin = || -> Result<String> {
        let status = json(&site, "v1/services/web")?;
        let servers = status[0]["status"]["servers"]
            .as_array()
            .context("the first service has no list of servers")?
            .clone();
        let one = servers.iter().find(|s| s["server"] == server.as_str());
        Ok(one.context("the status does not list the server")?["admin"]
            .as_str()
            .unwrap_or_default()
            .to_owned())
    };
    let socket = site.director.sh("ls /run/lvs/*.lvsd")?;
    let post = |words: &[&str], body: &str| {
        let mut all = vec![
            "-sS",
            "-m",
            "20",
            "-w",
            " %{http_code}",
            "--data-binary",
            body,
        ];
        all.extend_from_slice(words);
        site.director.run("curl", &all)
    };
    let refused = post(&["http://127.0.0.1:9560/v1/admin"], &body("drain"))?;
    ensure!(
        refused.ends_with(" 401") && refused.contains("Bearer") && admin()? == "ready",
        "a change without a token was not refused, or has drained the server: {refused}"
    );
    let done = post(
        &["--unix-socket", socket.trim(), "http://lvsd/v1/admin"],
        &body("drain"),
    )?;
    ensure!(
        done.ends_with(" 200") && admin()? == "drain",
        "the drain failed: {done}"
    );
    let header = format!("Authorization: Bearer {TOKEN}");
    let done = post(
        &["-H", &header, "http://127.0.0.1:9560/v1/admin"],
        &body("ready"),
    )?;
    ensure!(
        done.ends_with(" 200") && admin()? == "ready",
        "the return to service failed: {done}"
    );
    let events = get(&site, 9560, "v1/events")?;
    ensure!(
        events.contains("token oncall (ann) has returned"),
        "no `token oncall (ann) has returned` in {events}"
    );
    let done = post(&["-H", &header, "http://127.0.0.1:9560/v1/reload"], "")?;
    ensure!(
        done.ends_with(" 200") && done.contains("no change"),
        "the repeated request is not reported as \"no change\": {done}"
    );

    // A reload that removes the address closes only this listener.
    let text = fs::read_to_string(&path)?
        .replace("listen = \"127.0.0.1:9560\"", "listen = \"127.0.0.1:9561\"");
    fs::write(&path, text)?;
    lvsd.signal(Signal::SIGHUP)?;
    soon("the API to answer on the new port", || {
        get(&site, 9561, "v1/health").is_ok()
    })?;
    soon("the old port to be closed", || {
        get(&site, 9560, "v1/health").is_err()
    })?;
    lvsd.stop_ok(Signal::SIGINT)?;
    Ok(())
}

#[test]
#[ignore = "needs Chromium"]
fn dashboard_shows_state_and_makes_changes_in_browser() -> Result<()> {
    let mut site = site("page")?;
    configure(&site)?;
    let mut lvsd = start(&site)?;
    load(&site, 30)?;
    let browser = Browser::start(&site.director, site.testbed.dir())?;
    let long = Duration::from_secs(20);
    browser.screen(1280, 900, false)?;
    browser.open("http://127.0.0.1:9560/")?;
    browser.wait_for("#verdict", "All is well", long)?;

    // The page shows the hostile name as text everywhere.
    let seen =
        browser.run("return [...document.querySelectorAll('.name')].map((e) => e.textContent)")?;
    ensure!(
        seen.as_array()
            .is_some_and(|all| all.contains(&Value::from(HOSTILE))),
        "the page does not show the hostile name: {seen}"
    );
    let harmless = browser.run(
        "return [window.hacked === undefined, document.querySelectorAll('#list img').length]",
    )?;
    ensure!(
        harmless == serde_json::json!([true, 0]),
        "the hostile name was executed or is an element: {harmless}"
    );

    // Without the token, the page shows no buttons for changes.
    let services = "details[data-name=web]";
    browser.click(&format!("{services} summary"))?;
    browser.wait_for(services, "Scheduler rr", long)?;
    ensure!(browser.run("return document.querySelectorAll('td.do button').length")? == 0);
    browser.type_into("#token", "wrong-token-0123456789")?;
    browser.click("#unlock button")?;
    browser.wait_for("#rights", "the token differs", long)?;
    browser.type_into("#token", TOKEN)?;
    browser.click("#unlock button")?;
    browser.wait_for("#rights", "Changes are allowed", long)?;

    // A drain by keyboard has the same effect as `lvsadm drain`.
    let server = format!("{}:80", site.real_address(1));
    let button = format!("{services} button[aria-label='Drain {server} of web']");
    wait_until(
        "the page to show the button that drains a server",
        long,
        || browser.text(&button).is_ok_and(|t| t == "Drain"),
    )?;
    browser.run(&format!(
        "document.querySelector({}).focus()",
        Value::from(button.as_str())
    ))?;
    browser.press('\u{e007}')?;
    browser.wait_for("#ask-title", &server, long)?;
    browser.type_into("#ask-why", "new <b>disk</b>")?;
    browser.press('\u{e007}')?;
    browser.wait_for(services, "drain", long)?;
    let listing = site.lvsadm("-L -n")?;
    let row = listing
        .lines()
        .find(|l| l.contains(&server))
        .unwrap_or_default();
    ensure!(
        row.split_whitespace().nth(3) == Some("0"),
        "the weight of the drained server is not 0: {listing}"
    );
    let entry = &json(&site, "v1/status")?["admin"][0];
    ensure!(
        entry["why"] == "new <b>disk</b>" && entry["state"] == "drain",
        "the override in the status is not a drain with the entered reason: {entry}"
    );
    browser.wait_for("#events", "new <b>disk</b>", long)?;
    browser.click(&format!(
        "{services} button[aria-label='Put back {server} of web']"
    ))?;
    browser.click("#ask-go")?;
    wait_until("the status to contain no operator override", long, || {
        json(&site, "v1/status").is_ok_and(|s| s["admin"] == serde_json::json!([]))
    })?;

    // A dead server is shown first on the page, with the reason.
    site.programs.remove(2).kill();
    let killed = std::time::Instant::now();
    let dead = format!("{}:80", site.real_address(2));
    browser.wait_for("#broken", &dead, long)?;
    println!(
        "a server that died is on the page after {:.2?}",
        killed.elapsed()
    );
    browser.wait_for("#broken", "refused", long)?;
    browser.wait_for("#verdict", "1 server down", long)?;
    let first = browser
        .run("return [...document.querySelectorAll('main section')].find((s) => !s.hidden).id")?;
    ensure!(
        first == "trouble",
        "the first shown section is {first} instead of trouble"
    );

    // The page can be used by keyboard, and the browser reported no violation of its content
    // security policy.
    browser.run("document.activeElement.blur()")?;
    browser.press('/')?;
    ensure!(browser.run("return document.activeElement.id")? == "filter");
    browser.type_into("#filter", "mark")?;
    let left = browser.run("return document.querySelectorAll('#list details').length")?;
    ensure!(
        left == 1,
        "the filter does not show exactly one service: {left}"
    );
    browser.press('\u{e00c}')?;
    narrow_page_and_filters(&site, &browser)?;

    if let Ok(place) = std::env::var("LVS_PICTURES") {
        let path = site.testbed.dir().join("lvsd.toml");
        let text = fs::read_to_string(&path)?
            .replace(HOSTILE, "shop")
            .replace("\"marked\"", "\"mail\"");
        fs::write(&path, text)?;
        lvsd.signal(Signal::SIGHUP)?;
        pictures(&site, &browser, &PathBuf::from(place))?;
    }
    site.programs
        .push(nginx(&site.servers[2], &NginxOptions::default())?);
    browser.wait_for("#verdict", "All is well", long)?;
    lvsd.stop_ok(Signal::SIGINT)?;
    browser.wait_for("#verdict", "does not answer", long)?;
    if browser.text("#broken")?.contains("undefined") {
        bail!("{}", browser.text("body")?);
    }
    Ok(())
}

/// Checks the dashboard with axe-core on wide and narrow screens, in light and dark colours.
#[test]
#[ignore = "needs Chromium, axe-core"]
fn dashboard_breaks_no_accessibility_rule() -> Result<()> {
    let archive = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/axe-core.tgz");
    let site = site("axe")?;
    let axe = site
        .director
        .run("tar", &["-xzOf", archive, "package/axe.min.js"])?;
    let path = configure(&site)?;
    let mut lvsd = start(&site)?;
    let browser = Browser::start(&site.director, site.testbed.dir())?;
    let long = Duration::from_secs(20);
    let mut broken: Vec<String> = Vec::new();
    let mut check = |services: usize, state: &str| -> Result<()> {
        // axe-core takes long with many services, whose colours are those of few services; two of
        // the four screens are enough.
        let screens = [(1280, false), (320, true), (1280, true), (320, false)];
        let number = if services > 6 { 2 } else { screens.len() };
        for (width, dark) in screens.into_iter().take(number) {
            browser.screen(width, 900, dark)?;
            let found = browser.run(&format!(
                "{axe}; return axe.run().then((r) => r.violations.map((v) => \
                 [v.id, v.impact, v.nodes.length, v.nodes[0].html, v.nodes[0].failureSummary].join(' ')))"
            ))?;
            let found = found
                .as_array()
                .context("the browser did not return a list of broken rules")?;
            let place = format!("{services} services, {state}, {width} pixels, dark: {dark}");
            broken.extend(found.iter().map(|one| format!("{place}: {one}")));
        }
        Ok(())
    };
    for services in [6, 500] {
        let text = fs::read_to_string(&path)?;
        let mut more = String::new();
        for number in text.matches("[[service]]").count()..services {
            more += &format!(
                "[[service]]\nname = \"s{number}\"\naddress = \"{}\"\n[[service.server]]\naddress = \"{}:80\"\n",
                site.service(u16::try_from(10_000 + number)?),
                site.real_address(number % 3),
            );
        }
        fs::write(&path, text + &more)?;
        lvsd.signal(Signal::SIGHUP)?;
        wait_until("all services to be loaded", long, || {
            json(&site, "v1/status").is_ok_and(|status| {
                let all = status["services"].as_array();
                all.is_some_and(|all| all.len() == services)
            })
        })?;
        browser.screen(1280, 900, false)?;
        browser.open("http://127.0.0.1:9560/")?;
        browser.wait_for("#verdict", "All is well", Duration::from_secs(60))?;
        check(services, "all closed")?;
        browser.screen(1280, 900, false)?;
        if services == 6 {
            browser.type_into("#token", TOKEN)?;
            browser.click("#unlock button")?;
        }
        browser.wait_for("#rights", "Changes are allowed", long)?;
        browser.run("location.hash = '#service=web'")?;
        let web = "details[open][data-name=web]";
        browser.wait_for(web, "Drain", long)?;
        check(services, "an open one")?;
        browser.screen(1280, 900, false)?;
        browser.click(&format!("{web} td.do button"))?;
        browser.wait_for("#ask-title", "Drain", long)?;
        check(services, "a question")?;
        // While the dialog is open, axe-core does not check the rest of the page.
        browser.screen(1280, 900, false)?;
        browser.click("#ask-cancel")?;
    }
    lvsd.stop_ok(Signal::SIGINT)?;
    browser.wait_for("#verdict", "does not answer", long)?;
    check(500, "a director that does not answer")?;
    ensure!(
        broken.is_empty(),
        "axe-core found broken rules: {}",
        broken.join("\n")
    );
    // axe-core reports a page that breaks a rule: an image without alternative text.
    let found = browser.run(&format!(
        "document.body.append(new Image()); {axe}; \
         return axe.run().then((r) => r.violations.map((v) => v.id))"
    ))?;
    let found = found
        .as_array()
        .context("the browser did not return a list of broken rules")?;
    ensure!(
        found.contains(&Value::from("image-alt")),
        "axe-core did not find the image without text: {found:?}"
    );
    Ok(())
}

/// Tests the filters, a link to a service, and the title and icon of the page. Then checks that the
/// page fits a screen of 320 pixels.
fn narrow_page_and_filters(site: &Site, browser: &Browser) -> Result<()> {
    let long = Duration::from_secs(20);
    let set = |id: &str, value: &str, event: &str| {
        browser.run(&format!(
            "const e = document.getElementById('{id}'); e.value = {}; e.dispatchEvent(new Event('{event}'))",
            Value::from(value)
        ))
    };
    let shown = || browser.run("return document.querySelectorAll('#list details').length");
    set("state", "degraded", "change")?;
    ensure!(
        shown()? == 1,
        "the filter by state does not show exactly one service: {}",
        shown()?
    );
    ensure!(browser.run("return location.hash")? == "#state=degraded");
    set("state", "", "change")?;
    // Two services have a server on this host; the third service has one on another host.
    set("filter", &site.real_address(0).to_string(), "input")?;
    wait_until(
        "the page to show the two services of the host",
        long,
        || shown().is_ok_and(|count| count == 2),
    )?;
    browser.run("location.hash = '#service=marked'")?;
    browser.wait_for("details[open][data-name=marked]", "10.9.9.9:80", long)?;
    set("filter", "", "input")?;
    let name = site.director.run("uname", &["-n"])?;
    let title = browser.run("return document.title")?;
    ensure!(
        title
            .as_str()
            .is_some_and(|title| title.contains(name.trim())),
        "the title does not contain the name of the host: {title}"
    );
    let icon = browser.run("return document.getElementById('icon').href")?;
    ensure!(
        icon.as_str()
            .is_some_and(|icon| icon.starts_with("data:image/svg")),
        "the icon is not an SVG image: {icon}"
    );
    browser.screen(320, 800, false)?;
    wait_until("the page to be as wide as the screen", long, || {
        browser
            .run("return document.documentElement.scrollWidth <= 320")
            .is_ok_and(|fits| fits == true)
    })?;
    browser.screen(1280, 900, false)
}

/// Makes the pictures for the documentation, with four minutes of load in the charts.
fn pictures(site: &Site, browser: &Browser, place: &std::path::Path) -> Result<()> {
    for round in 0..48_u64 {
        load(site, 40 + 25 * (round % 7))?;
        std::thread::sleep(Duration::from_secs(5));
    }
    browser.run("document.activeElement.blur()")?;
    for (name, width, height, dark) in [
        ("dashboard", 1280, 1000, false),
        ("dashboard-dark", 1280, 1000, true),
        ("dashboard-phone", 390, 1000, false),
    ] {
        browser.screen(width, height, dark)?;
        browser.run("window.scrollTo(0, 0)")?;
        // The page draws the charts again one second after the size has changed.
        load(site, 100)?;
        std::thread::sleep(Duration::from_secs(3));
        browser.picture(&place.join(format!("{name}.png")))?;
    }
    browser.screen(1280, 900, false)
}
