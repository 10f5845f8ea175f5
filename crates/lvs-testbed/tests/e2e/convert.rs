//! `lvsd convert --check` with the installed keepalived.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lvs_testbed::programs;

/// Runs `lvsd convert --check`; returns its exit code, standard output and standard error.
fn check(file: &Path) -> Result<(Option<i32>, String, String)> {
    let output = Command::new(programs::find("lvsd")?)
        .args(["convert", "--check"])
        .arg(file)
        .output()
        .context("cannot run lvsd convert --check")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    ))
}

fn service(marker: &Path) -> String {
    format!(
        "$SERVER= \\\n    real_server 10.0.0.${{N}} 80 {{ \\\n        weight ${{N}} \\\n        TCP_CHECK {{ \\\n        }} \\\n    }}\n\
         virtual_server 192.0.2.1 80 {{\n    delay_loop 6\n    lb_algo rr\n    lb_kind DR\n    protocol TCP\n    alpha\n    omega\n    \
         quorum_up \"/usr/bin/touch {marker}\"\n    quorum_down \"/usr/bin/touch {marker}\"\n    \
         ~SEQ(N, 1, 3) $SERVER\n}}\n\
         virtual_server fwmark 7 {{\n    lb_kind NAT\n    real_server 10.0.0.1 80 {{\n        notify_down \"/usr/bin/touch {marker}\"\n    }}\n}}\n",
        marker = marker.display()
    )
}

#[test]
#[ignore = "needs keepalived"]
fn convert_check_compares_with_keepalived_and_runs_no_script() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("keepalived.conf");
    let marker = directory.path().join("marker");
    std::fs::write(&file, service(&marker))?;
    let (code, out, err) = check(&file)?;
    ensure!(
        code == Some(0),
        "the comparison failed: {code:?}: {out}{err}"
    );
    ensure!(
        out.contains("compared with keepalived: 2 services, 4 servers")
            && out.contains("no difference"),
        "no `compared with keepalived: 2 services, 4 servers` or no `no difference` in {out}"
    );
    ensure!(!marker.exists(), "keepalived has run a script of the file");
    Ok(())
}

#[test]
#[ignore = "needs keepalived"]
fn convert_check_reports_difference_and_exits_with_code_1() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("keepalived.conf");
    // The file has a server with the virtual server's own address; lvsd omits it.
    std::fs::write(
        &file,
        "virtual_server 192.0.2.1 80 {\n    protocol TCP\n    real_server 10.0.0.1 80 {\n    }\n    real_server 192.0.2.1 80 {\n    }\n}\n",
    )?;
    let (code, out, err) = check(&file)?;
    ensure!(
        code == Some(1),
        "the exit status is not 1: {code:?}: {out}{err}"
    );
    let expected =
        "192.0.2.1:80 tcp: server 192.0.2.1: missing in the result, present in keepalived";
    ensure!(out.contains(expected), "no {expected:?} in {out}");
    Ok(())
}
