//! `lvs-bench cluster`, end to end: all hosts send requests, and failed ones are named. No speeds
//! are checked.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lvs_testbed::{Host, Link, Proc, Testbed};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_lvs-bench");

fn cluster(words: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("cluster").args(words);
    command.output().expect("the cluster program starts")
}

fn json(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("no JSON: {error}"))
}

/// A program that replaces httperf.
fn fake(directory: &Path, script: &str) -> String {
    let file = directory.join("httperf");
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("the file can be written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755))
        .expect("the permissions can be set");
    file.display().to_string()
}

/// httperf's output for 500 connections, 10 of which have failed.
fn printed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cluster/httperf.txt")
}

fn web(host: &Host, directory: &Path) -> Proc {
    let file = directory.join("web.conf");
    let text = format!(
        "user root;\nworker_processes 1;\ndaemon off;\npid {}/web.pid;\nerror_log stderr crit;\n\
         events {{ worker_connections 1000; }}\n\
         http {{\n  access_log off;\n  server {{ listen 80; location / {{ return 200 'hello'; }} }}\n}}\n",
        directory.display()
    );
    fs::write(&file, text).expect("the file can be written");
    let server = host
        .spawn("nginx", &["-c", &file.display().to_string()])
        .expect("nginx can be started");
    host.wait_for_port("tcp", 80).expect("nginx listens");
    server
}

#[test]
fn cluster_refuses_invalid_options_and_fails_without_usable_host() {
    let usual = ["--server", "192.0.2.1", "--rates", "10"];
    for (words, message) in [
        (
            &["here"][..],
            "here is not a host: expected local, netns:NAME or ssh:",
        ),
        (&["ssh:"], "ssh:[USER@]HOST[:PORT]"),
        (&["ssh:-oProxyCommand=x"], "ssh cannot reach"),
        (&["netns:a/b"], "is not the name of a network namespace"),
        (&[], "HOST"),
        (&["local", "--rates", "20..10/1"], "decreases"),
        (&["local", "--seconds", "0"], "0 is not in 1..=3600"),
        (&["local", "--stop-at-errors", "0"], "is not a percentage"),
        (&["local", "--uri", "page"], "begins with /"),
        (
            &["local", "--server", "$(reboot)"],
            "give an address or a host's name",
        ),
        (&["local", "--ssh-option", "x"], "NAME=VALUE"),
        (
            &["local", "--httperf", "/no/such"],
            "/no/such is not installed there",
        ),
        (
            &["netns:lvs-no-such"],
            "all hosts have failed:\nnetns:lvs-no-such: ",
        ),
    ] {
        let mut all = words.to_vec();
        for pair in usual.chunks(2) {
            if !words.contains(&pair[0]) {
                all.extend(pair);
            }
        }
        let output = cluster(&all);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(message),
            "{words:?}: {error}"
        );
    }
}

#[test]
fn results_of_all_hosts_are_merged_and_errors_stop_the_run() {
    let directory = tempfile::tempdir().expect("the temporary directory can be created");
    let seen = directory.path().join("seen").display().to_string();
    let script = format!("echo \"$@\" >>{seen}\ncat {}", printed().display());
    let httperf = fake(directory.path(), &script);
    let words = [
        "local",
        "local",
        "--server",
        "192.0.2.1,192.0.2.2",
        "--uri",
        "/a'b?c=$d",
        "--rates",
        "100..300/100",
        "--seconds",
        "2",
        "--pause",
        "0",
        "--stop-at-errors",
        "3",
        "--httperf",
        &httperf,
    ];
    let output = cluster(&[&words[..], &["--json"]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result = json(&output);
    assert_eq!(result["schema"], 1);
    assert_eq!(result["complete"], true);
    let steps = result["steps"].as_array().expect("`steps` is a list");
    assert_eq!(steps.len(), 1, "the run did not stop after 4 % of errors");
    assert_eq!(steps[0]["connections"], 1000);
    assert_eq!(steps[0]["rate"], 480.0);
    assert_eq!(steps[0]["error_percent"], 4.0);
    assert_eq!(steps[0]["errors"]["timeout"], 14);
    assert_eq!(steps[0]["lifetime"]["p99_ms"], 6);
    assert_eq!(steps[0]["hosts"].as_array().map(Vec::len), Some(2));
    // Each host sends half of the rate, to its own server.
    let seen = fs::read_to_string(seen).expect("the commands that the hosts received");
    for server in ["192.0.2.1", "192.0.2.2"] {
        let words = format!(
            "--server={server} --port=80 --uri=/a'b?c=$d --timeout=1 --rate=50.000 --num-conns=100"
        );
        assert!(seen.contains(&words), "no {words:?} in {seen}");
    }
    let output = cluster(&words);
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().nth(1).unwrap_or_default();
    let numbers: Vec<_> = line.split_ascii_whitespace().take(9).collect();
    assert_eq!(
        numbers,
        ["100", "480.0", "4.00", "4.5", "0.2", "<1", "<2", "<6", "2"],
        "{text}"
    );
    assert!(
        line.contains("timeout 14, no descriptor 6, 4xx 8, 5xx 12"),
        "{line}"
    );
    assert!(line.contains("more hosts are needed"), "{line}");
}

#[test]
fn cluster_reports_failed_host_and_results_of_the_other_host() {
    for (fails, why) in [
        ("exec sleep 1000", "httperf exceeded its time limit"),
        (
            "echo it is out of order; exit 3",
            "httperf exited with status 3: it is out of order",
        ),
        ("echo nothing; exit 0", "the output of httperf lacks"),
        (
            "kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)",
            "the shell of the host exited",
        ),
        (
            "while :; do echo 0123456789012345678901234567890123456789; done",
            "the output of the host is too long for an output of httperf",
        ),
    ] {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let first = directory.path().join("first").display().to_string();
        let script = format!(
            "if mkdir {first} 2>/dev/null; then {fails}; fi\ncat {}",
            printed().display()
        );
        let httperf = fake(directory.path(), &script);
        let output = cluster(&[
            "local",
            "local",
            "--server",
            "192.0.2.1",
            "--rates",
            "10,20",
            "--seconds",
            "1",
            "--grace",
            "1",
            "--pause",
            "0",
            "--httperf",
            &httperf,
            "--json",
        ]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains("incomplete: host local failed"),
            "{fails}: {error}"
        );
        let result = json(&output);
        assert_eq!(result["complete"], false);
        let failed = result["failed"]
            .as_array()
            .expect("the list of failed hosts exists");
        assert_eq!(failed.len(), 1);
        assert!(
            failed[0]["why"]
                .as_str()
                .is_some_and(|message| message.contains(why)),
            "{fails}: no {why:?} in {failed:?}"
        );
        assert_eq!(failed[0]["offered"], 10.0);
        for step in result["steps"].as_array().expect("`steps` is a list") {
            assert_eq!(
                (&step["incomplete"], &step["rate"]),
                (&Value::Bool(true), &Value::from(240.0))
            );
            assert_eq!(step["hosts"].as_array().map(Vec::len), Some(1));
        }
        assert_eq!(result["steps"].as_array().map(Vec::len), Some(2));
    }
}

#[test]
#[ignore = "needs httperf"]
fn cluster_hosts_in_namespaces_each_send_half_of_requests() {
    let mut testbed = Testbed::new("cluster").expect("the testbed can be created");
    let [a, b, server] = testbed
        .hosts(["a", "b", "server"])
        .expect("the hosts can be created");
    let ports = [(&a, "eth0"), (&b, "eth0"), (&server, "eth0")];
    let lan = Link::Lan {
        name: "lan",
        ports: ports.to_vec(),
        mtu: 1500,
    };
    testbed.connect(&[lan]).expect("the LAN can be created");
    for (host, address) in [(&a, "10.9.0.1"), (&b, "10.9.0.2"), (&server, "10.9.0.3")] {
        let script = format!("ip addr add {address}/24 dev eth0\nip link set eth0 up");
        host.sh(&script).expect("the host can be configured");
    }
    let _web = web(&server, testbed.dir());
    let prefixes = testbed
        .expose(&[&a, &b])
        .expect("the namespaces can be named");
    let names: Vec<_> = prefixes
        .iter()
        .map(|prefix| format!("netns:{}", prefix.trim_start_matches("ip netns exec ")))
        .collect();
    let output = cluster(&[
        &names[0],
        &names[1],
        "--server",
        "10.9.0.3",
        "--rates",
        "40,80",
        "--seconds",
        "1",
        "--pause",
        "0",
        "--json",
    ]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result = json(&output);
    for (step, offered) in result["steps"]
        .as_array()
        .expect("`steps` is a list")
        .iter()
        .zip([40, 80])
    {
        assert_eq!(
            (&step["connections"], &step["status"][1]),
            (&Value::from(offered), &Value::from(offered))
        );
        assert_eq!(step["error_percent"], 0.0);
        for (host, name) in step["hosts"]
            .as_array()
            .expect("`hosts` is a list")
            .iter()
            .zip(&names)
        {
            assert_eq!(
                (&host["host"], &host["connections"]),
                (&Value::from(&**name), &Value::from(offered / 2))
            );
        }
    }
    assert_eq!(result["steps"].as_array().map(Vec::len), Some(2));
}

/// A real sshd, with its own key and configuration, in a namespace.
#[test]
#[ignore = "needs httperf, ssh and sshd"]
fn cluster_hosts_reached_by_ssh_send_requests_and_unreachable_host_is_reported() {
    let mut testbed = Testbed::new("cluster").expect("the testbed can be created");
    let [host] = testbed.hosts(["machine"]).expect("the host can be created");
    let directory = testbed.dir().to_owned();
    let at = |name: &str| directory.join(name).display().to_string();
    // sshd needs this directory for privilege separation; it exists on this host only.
    host.sh("ip link set lo up\nmount -t tmpfs none /run\nmkdir -m 755 /run/sshd")
        .expect("the host can be prepared");
    for key in ["host", "client"] {
        let words = ["-q", "-t", "ed25519", "-N", "", "-f", &at(key)];
        host.run("ssh-keygen", &words)
            .expect("the key can be generated");
    }
    let text = format!(
        "Port 2222\nListenAddress 127.0.0.1\nListenAddress ::1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
         PermitRootLogin prohibit-password\nPasswordAuthentication no\nPidFile none\n",
        at("host"),
        at("client.pub")
    );
    fs::write(at("sshd.conf"), text).expect("the file can be written");
    let _sshd = host
        .spawn("/usr/sbin/sshd", &["-D", "-e", "-f", &at("sshd.conf")])
        .expect("sshd can be started");
    host.wait_for_port("tcp", 2222).expect("sshd listens");
    let _web = web(&host, &directory);
    let key = format!("IdentityFile={}", at("client"));
    let mut words = vec!["cluster"];
    for option in [
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "IdentitiesOnly=yes",
        &key,
    ] {
        words.extend(["--ssh-option", option]);
    }
    words.extend(["ssh:root@127.0.0.1:2222", "ssh:root@[::1]:2222"]);
    words.extend([
        "--server",
        "127.0.0.1",
        "--rates",
        "20,40",
        "--seconds",
        "1",
        "--pause",
        "0",
        "--json",
    ]);
    let run = |words: &[&str]| {
        host.command(PROGRAM)
            .args(words)
            .output()
            .expect("the cluster program starts")
    };
    let output = run(&words);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let result = json(&output);
    assert_eq!(
        (&result["complete"], &result["steps"][1]["status"][1]),
        (&Value::Bool(true), &Value::from(40))
    );
    assert_eq!(result["steps"][1]["hosts"][1]["connections"], 20);

    // No process listens there.
    for word in words.iter_mut().filter(|word| word.contains("::1")) {
        *word = "ssh:root@127.0.0.1:2223";
    }
    let output = run(&words);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("host ssh:root@127.0.0.1 port 2223 failed"),
        "{error}"
    );
    let result = json(&output);
    assert_eq!(
        (&result["complete"], &result["steps"][1]["status"][1]),
        (&Value::Bool(false), &Value::from(20))
    );
    let why = result["failed"][0]["why"]
        .as_str()
        .expect("`why` is a text");
    assert!(why.contains("Connection refused"), "{why}");
}
