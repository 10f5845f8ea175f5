//! Runs the quick start of docs/operating.md as printed, each block in its host's namespace. Also
//! runs the blocks of README.md and docs/*.md that start a dataplane in the background.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lvs_testbed::programs;

/// Script that creates three namespaces with separate directories for written files, and cables:
/// client eth0 192.0.2.2 - 192.0.2.1, server 10.0.0.2 - 10.0.0.1.
const HOSTS: &str = r"
mount --make-rprivate /
for directory in /etc/lvsd /run /var/lib/lvsd; do mkdir -p $directory; mount -t tmpfs tmpfs $directory; done
cd /run
unshare --net sleep 6000 & client=$!
unshare --net sleep 6000 & server=$!
until [ $(readlink /proc/$client/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.05; done
until [ $(readlink /proc/$server/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.05; done
on() { nsenter --net=/proc/$1/ns/net ${@:2}; }
ip link set lo up
ip link add eth0 type veth peer name eth0 netns $client
ip link add eth1 type veth peer name eth0 netns $server
ip address add 192.0.2.1/24 dev eth0; ip address add 10.0.0.1/24 dev eth1
ip link set eth0 up; ip link set eth1 up
on $client ip link set lo up; on $client ip address add 192.0.2.2/24 dev eth0; on $client ip link set eth0 up
on $server ip link set lo up; on $server ip address add 10.0.0.2/24 dev eth0; on $server ip link set eth0 up
";

/// Script that creates a director with a network for clients, a network for servers, and a separate
/// `/run`.
const DIRECTOR: &str = r"
mount --make-rprivate /
mount -t tmpfs tmpfs /run
ip link set lo up
for n in 0 1; do ip link add eth$n type veth peer name peer$n; ip link set eth$n up; ip link set peer$n up; done
ip address add 192.0.2.2/24 dev eth0; ip address add 10.0.0.1/24 dev eth1
ip route add default via 192.0.2.1
";

/// The shell blocks of a page.
fn shell_blocks(page: &str) -> impl Iterator<Item = &str> {
    let blocks = page.split("\n```sh").skip(1);
    blocks.filter_map(|block| Some(block.split_once('\n')?.1.split_once("\n```")?.0))
}

/// Whether a line of the block starts `lvs-dataplane` in the background (`&`).
fn starts_dataplane(block: &str) -> bool {
    block.lines().any(|line| {
        let command = line.split('#').next().unwrap_or_default().trim_end();
        command.starts_with("lvs-dataplane ") && command.ends_with(" &")
    })
}

/// If an operator pastes the whole block, `lvsadm` runs before the dataplane answers.
#[test]
fn documented_block_pasted_at_once_configures_starting_dataplane() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    for entry in fs::read_dir(root.join("docs"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    let programs = programs::find("lvsd")?;
    let path = format!(
        "{}:{}",
        programs
            .parent()
            .context("the path has no parent directory")?
            .display(),
        std::env::var("PATH")?
    );
    let mut blocks = 0;
    for page in pages {
        let text = fs::read_to_string(&page)?;
        for block in shell_blocks(&text).filter(|block| starts_dataplane(block)) {
            let script = format!(
                "{DIRECTOR}bash -e <<'BLOCK'\n{block}\nlvsadm -Sn\nkill $!\nwait $! || true\nBLOCK\n"
            );
            let output = Command::new("unshare")
                .args([
                    "--net",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                ])
                .args(["timeout", "240", "bash", "-e", "-c", &script])
                .env("PATH", &path)
                .env_remove("LVS_SOCKET")
                .output()?;
            let out = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            let place = page.display();
            ensure!(
                output.status.success(),
                "the block failed: {place}:\n{block}\n{out}{errors}"
            );
            for rule in ["-A -t 192.0.2.10:", "-a -t 192.0.2.10:"] {
                ensure!(
                    out.contains(rule),
                    "{place}: no rule {rule} after the block:\n{block}\n{out}{errors}"
                );
            }
            blocks += 1;
        }
    }
    ensure!(
        blocks >= 8,
        "only {blocks} code blocks start a dataplane: expected at least 8"
    );
    Ok(())
}

#[test]
fn quick_start_blocks_run_as_printed() -> Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let text = fs::read_to_string(docs)?;
    let mut script = String::from(HOSTS);
    let mut blocks = 0;
    for block in text.split("\n```sh ").skip(1) {
        let (host, rest) = block
            .split_once('\n')
            .context("the block has no first line")?;
        let (commands, _) = rest
            .split_once("\n```")
            .context("the code block has no end")?;
        let enter = match host {
            "director" => String::new(),
            host => format!("nsenter --net=/proc/${host}/ns/net "),
        };
        writeln!(
            script,
            "echo '== {host}'\n{enter}bash -e <<'BLOCK' || {{ echo \"FAILED: $?\"; exit 1; }}\n{commands}\nBLOCK"
        )?;
        if commands.contains("lvsd &") {
            // The text says "Seconds later": until then the check has succeeded, and the dataplane
            // has the server.
            writeln!(
                script,
                "until lvsd status 2>/dev/null | grep -q ' up [^ ]* *weight 1 '; do sleep 0.1; done"
            )?;
        }
        blocks += 1;
    }
    ensure!(
        blocks == 5,
        "{blocks} code blocks of the quick start name a host: expected 5"
    );
    let lvsd = programs::find("lvsd")?;
    let beside = lvsd
        .parent()
        .context("the path has no parent directory")?
        .display();
    let path = format!("{beside}:{}", std::env::var("PATH")?);
    let output = Command::new("unshare")
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "timeout",
            "240",
            "bash",
            "-c",
        ])
        .arg(&script)
        .env("PATH", path)
        .output()?;
    let out = String::from_utf8_lossy(&output.stdout);
    let all = format!("{out}\n{}", String::from_utf8_lossy(&output.stderr));
    ensure!(
        output.status.success(),
        "a block of the quick start failed: {all}"
    );
    for words in [
        "/etc/lvsd/lvsd.toml: valid, 1 service with 1 server",
        "web (tcp 192.0.2.10:80): 1 of 1 server usable",
        "TCP  192.0.2.10:80 wlc",
        "\n200\n",
        "drain: 10.0.0.2:80",
    ] {
        ensure!(
            out.contains(words),
            "no {words:?} in the output of the blocks:\n{all}"
        );
    }
    Ok(())
}
