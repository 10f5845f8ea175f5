//! Synchronisation: what a backup takes over, and what a master sends.

use super::*;

impl<'a> Replay<'a> {
    /// A backup's case: one message, or several with a listing after each.
    pub fn run_backup(case: &'a Value) -> Result<Vec<String>, Error> {
        let mut replay = Self::new(case)?;
        if case.get("payload").is_some() {
            replay.message(case)?;
        }
        for (number, step) in case["steps"].as_array().into_iter().flatten().enumerate() {
            replay.step = number;
            replay.message(step)?;
        }
        Ok(replay.mismatches)
    }

    pub(super) fn message(&mut self, step: &Value) -> Result<(), Error> {
        if step["op"] == "ipvsadm" {
            self.ipvsadm(step)?;
        } else {
            let message = frames::hex(&step["payload"]);
            self.director.handle_sync(&message, self.now);
            self.director.advance(self.now);
        }
        if step.get("entries").is_some() {
            self.conns(step);
        }
        self.destinations(step);
        Ok(())
    }

    /// Servers with their counts.
    pub(super) fn destinations(&mut self, step: &Value) {
        let Some(list) = step["destinations"].as_array() else {
            return;
        };
        let row = |service: &ServiceKey, server: &Server| {
            let name = match service {
                ServiceKey::Address { protocol, addr } => format!("{protocol} {addr}"),
                ServiceKey::Mark { mark, .. } => format!("FWM {mark}"),
            };
            let addr = server.addr();
            format!("{name} {addr} {} {}", server.active(), server.inactive())
        };
        let mut ours: Vec<String> = self
            .services
            .iter()
            .flat_map(|key| {
                self.servers(key)
                    .into_iter()
                    .map(move |server| row(key, &server))
            })
            .collect();
        let mut kernel: Vec<String> = list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry[key].as_str().unwrap_or("?").to_owned();
                let counts = (&entry["active"], &entry["inactive"]);
                format!(
                    "{} {} {} {}",
                    text("service"),
                    text("dest"),
                    counts.0,
                    counts.1
                )
            })
            .collect();
        ours.sort();
        kernel.sort();
        self.compare("destinations", &kernel.join("; "), &ours.join("; "));
    }

    /// A master's case: frames, and the datagrams that they lead to.
    pub fn run_master(case: &'a Value) -> Result<Vec<String>, Error> {
        let mut replay = Self::new(case)?;
        let mut sent: Vec<(usize, String)> = Vec::new();
        for (number, step) in case["steps"].as_array().expect("steps").iter().enumerate() {
            replay.step = number;
            if step["op"] == "conns" {
                replay.conns(step);
                replay.destinations(step);
            } else {
                replay.step(step)?;
            }
            if step["op"] == "wait" {
                while let Some(message) = replay.director.take_sync_message(replay.now) {
                    let hex: String = message
                        .bytes
                        .iter()
                        .map(|byte| format!("{byte:02x}"))
                        .collect();
                    sent.push((number, hex));
                }
            }
        }
        let recorded: Vec<(usize, String)> = case["datagrams"]
            .as_array()
            .expect("datagrams")
            .iter()
            .map(|datagram| {
                let after = datagram["after_step"].as_u64().expect("a step");
                (
                    usize::try_from(after).expect("a step"),
                    datagram["payload"].as_str().expect("payload").to_owned(),
                )
            })
            .collect();
        for (n, (kernel, ours)) in recorded.iter().zip(&sent).enumerate() {
            replay.compare(
                &format!("datagram {n}"),
                &format!("{kernel:?}"),
                &format!("{ours:?}"),
            );
        }
        replay.compare("number of datagrams", &recorded.len(), &sent.len());
        Ok(replay.mismatches)
    }
}
