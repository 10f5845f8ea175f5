//! An operator removes the files that connect `lvsd` with keepalived.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{LIMIT, Lab};
use crate::netns::wait_until;
use crate::programs;

impl Lab {
    /// Removes the track file of the standby director, whose keepalived writes a new one when it
    /// restarts. Also removes the FIFO of the active director: keepalived and lvsd continue to use
    /// the open one.
    pub(super) fn lose_files(&mut self) -> Result<()> {
        self.wait_state(1, "backup")?;
        let calm = self.doctor(1)?;
        ensure!(
            calm.is_empty(),
            "doctor has findings on the standby director: {calm:?}"
        );
        self.show_progress("director 2: its track file is removed, and keepalived restarted");
        let mut keepalived = self.directors[1]
            .keepalived
            .take()
            .context("no keepalived was started")?;
        keepalived.stop(Signal::SIGTERM)?;
        self.directors[1].host.sh("rm /run/lvs/vrrp.track")?;
        self.start_keepalived(1)?;
        wait_until("the track file to be written again", LIMIT, || {
            let text = self.directors[1].host.sh("cat /run/lvs/vrrp.track");
            text.is_ok_and(|text| text.trim() == "0")
        })
        .with_context(|| self.logs())?;
        self.wait_state(1, "backup")?;
        self.show_progress("director 1: its FIFO is removed");
        self.directors[0].host.sh("rm /run/lvs/vrrp.fifo")?;
        self.wait_trouble(0, true)?;
        let found = self.doctor(0)?;
        ensure!(
            found.len() == 1 && found[0].contains("restart keepalived"),
            "doctor does not report only `restart keepalived` on the active director: {found:?}"
        );
        self.reported.extend(found);
        Ok(())
    }

    /// Restarts keepalived, which ends all findings. The other director is in maintenance, so that
    /// this one becomes active again.
    pub(super) fn restart_keepalived(&mut self, index: usize) -> Result<()> {
        self.show_progress(&format!("director {}: keepalived is restarted", index + 1));
        let director = &mut self.directors[index];
        let mut keepalived = director
            .keepalived
            .take()
            .context("no keepalived was started")?;
        keepalived.stop(Signal::SIGTERM)?;
        self.wait_active(1 - index)?;
        self.start_keepalived(index)?;
        self.wait_trouble(index, false)?;
        self.wait_active(index)?;
        // keepalived removes the addresses before it writes its new state into the FIFO of lvsd.
        self.wait_state(1 - index, "backup")?;
        for index in [0, 1] {
            let found = self.doctor(index)?;
            ensure!(
                found.is_empty(),
                "doctor has findings on director {}: {found:?}",
                index + 1
            );
        }
        Ok(())
    }

    fn wait_trouble(&self, index: usize, any: bool) -> Result<()> {
        let has = |status: Value| status["vrrp"]["trouble"].is_array() == any;
        let what = match any {
            true => "lvsd to report trouble with keepalived",
            false => "lvsd to report no trouble with keepalived",
        };
        wait_until(what, LIMIT, || self.status(index).is_some_and(has)).with_context(|| self.logs())
    }

    fn wait_state(&self, index: usize, state: &str) -> Result<()> {
        let is = |status: Value| status["vrrp"]["state"] == state;
        wait_until(&format!("keepalived to be in state {state}"), LIMIT, || {
            self.status(index).is_some_and(is)
        })
        .with_context(|| self.logs())
    }

    /// Findings of `lvsadm doctor`, without `no_neighbour`: at a takeover on a loaded machine, more
    /// packets may wait for an ARP answer than the dataplane stores.
    fn doctor(&self, index: usize) -> Result<Vec<String>> {
        let lvsadm = programs::find("lvsadm")?;
        let reported = self.directors[index]
            .host
            .sh(&format!("{} doctor --json || [ $? = 1 ]", lvsadm.display()))?;
        let all: Value = serde_json::from_str(&reported)?;
        let all = all.as_array().context("doctor did not print a list")?;
        let all = all.iter().filter(|one| one["code"] != "no_neighbour");
        let what = all.map(|one| one["what"].as_str().unwrap_or_default().to_owned());
        Ok(what.collect())
    }
}
