//! Replays cases of one connection packet by packet (the kind `tcpstates`). After each packet,
//! compares state, timer and counters.

use std::net::SocketAddr;

use anyhow::Context;
use lvs_core::{Connection, Protocol, ServiceKey};
use serde_json::Value;

use super::bed::{Bed, CLIENTS, Emitted, SERVERS};
use super::case::{Halt, Json, Replayed, protocol, seconds, sysctl_text};
use super::frames;
use super::report::Log;
use super::steps::{
    Known, compare_conns, compare_counts, from_client, from_server, later, listed_seconds,
};

struct Replay<'a> {
    bed: Bed,
    known: Known,
    service: ServiceKey,
    virt: SocketAddr,
    protocol: Protocol,
    client: SocketAddr,
    /// The server of the latest connection.
    server: SocketAddr,
    case: &'a Value,
}

pub(super) fn replay(case: &Value, log: &mut Log) -> Replayed<()> {
    let mut bed = Bed::new(1024, log)?;
    bed.set_up(case)?;
    if let Some(backup) = case.get("backup") {
        let settings = super::sync::backup(backup)?;
        bed.change().0.start_backup(settings)?;
    }
    let mut whole = case.clone();
    let fields = whole.as_object_mut().context("the case is not an object")?;
    let id = case
        .fields("service")
        .context("the case has no `service`")?;
    for (key, value) in id {
        fields.insert(key.clone(), value.clone());
    }
    let proto = case.text("proto")?;
    let service = bed.add_service(&whole, Some(proto))?;
    let ServiceKey::Address { addr: virt, .. } = service else {
        return Err(anyhow::anyhow!("the case's service has a mark instead of an address").into());
    };
    let destinations = case.list("destinations")?;
    let mut known = Known::default();
    known.learn(destinations)?;
    let server = destinations.first().map(super::case::place).transpose()?;
    let mut replay = Replay {
        bed,
        known,
        service,
        virt,
        protocol: protocol(proto)?,
        client: case.endpoint("client")?,
        server: server.unwrap_or(virt),
        case,
    };
    for (number, step) in case.list("steps")?.iter().enumerate() {
        let what = step.maybe_text("flags").or(step.maybe_text("chunk"));
        log.at(number, step.maybe_text("op").or(what));
        replay.step(step, log)?;
    }
    Ok(())
}

impl Replay<'_> {
    fn step(&mut self, step: &Value, log: &mut Log) -> Replayed<()> {
        match step.maybe_text("op") {
            None => self.packet(step, log)?,
            Some("wait") => self.bed.wait(seconds(step)?),
            Some("edit") => self.bed.edit_server(&self.service, step)?,
            Some("add") => {
                self.known.learn(std::slice::from_ref(step))?;
                self.bed.add_server(&self.service, step)?;
            }
            Some("del") => self.bed.delete_server(&self.service, step)?,
            Some("sysctl") => {
                let value = step.get("value").map(sysctl_text).unwrap_or_default();
                let (control, _) = self.bed.change();
                control.set_sysctl(step.text("name")?, &value)?;
            }
            Some("sync") => {
                let message = step.frame("payload")?;
                self.bed.director.handle_sync(&message, self.bed.now);
                if step.get("dest").is_some() {
                    self.server = step.endpoint("dest")?;
                }
            }
            Some("set") => self.bed.set_timeouts(step)?,
            Some("counts") => {
                compare_counts(&self.bed, &self.service, step, log)?;
                return Ok(());
            }
            Some("conns") => {
                compare_conns(&self.bed, step, true, false, log)?;
                return Ok(());
            }
            Some(other) => return Err(Halt::Unsupported(format!("step {other:?}"))),
        }
        // Timers that the step has set to "now" fire.
        self.bed.director.advance(self.bed.now);
        self.compare_state(step, log)
    }

    fn payload(&self, src: SocketAddr, dst: SocketAddr, step: &Value) -> anyhow::Result<Vec<u8>> {
        Ok(match self.protocol {
            Protocol::TCP => {
                let len = usize::try_from(step.maybe_number("len").unwrap_or(0))?;
                let flags = frames::tcp_flags(step.text("flags")?)?;
                frames::tcp(src, dst, flags, len)
            }
            Protocol::SCTP => frames::sctp(src, dst, step.text("chunk")?)?,
            _ => frames::udp(src, dst, b"x"),
        })
    }

    fn packet(&mut self, step: &Value, log: &mut Log) -> Replayed<()> {
        let client = match step.get("client") {
            Some(_) => step.endpoint("client")?,
            None => self.client,
        };
        let expected_dest = step
            .get("dest")
            .map(|_| step.endpoint("dest"))
            .transpose()?;
        let from_the_client = step.text("dir")? == "c2s";
        let sent = if from_the_client {
            let packet = self.payload(client, self.virt, step)?;
            self.bed.inject(CLIENTS, &from_client(&packet))
        } else {
            let server = match step.get("from") {
                Some(_) => step.endpoint("from")?,
                None => self.server,
            };
            let source = match self.case.text("forward")? {
                "masq" => server,
                _ => self.virt,
            };
            let packet = self.payload(source, client, step)?;
            self.bed.inject(SERVERS, &from_server(server.ip(), &packet))
        };
        let (forwarded, source, reply) = self.read(&sent, from_the_client);
        // The host's answers to SCTP are not compared.
        if step.maybe_text("reply") != Some("local-stack") {
            log.compare("forwarded", &step.maybe_text("forwarded"), &forwarded);
            log.compare("reply", &step.maybe_text("reply"), &reply.as_deref());
        }
        if let Some(expected) = step.maybe_text("source") {
            log.compare("source", &Some(expected), &source.as_deref());
        }
        if let Some(dest) = expected_dest {
            self.server = dest;
        }
        Ok(())
    }

    /// Describes the last sent frame: a request to a server, a reply to a client with its source
    /// address, or the name of the director's own answer.
    fn read(
        &self,
        sent: &[Emitted],
        from_the_client: bool,
    ) -> (Option<&'static str>, Option<String>, Option<String>) {
        let Some(emitted) = sent.last() else {
            return (None, None, None);
        };
        match (from_the_client, emitted.port == SERVERS) {
            (true, true) => (Some("server"), None, None),
            (false, false) => {
                let source = frames::read(emitted.packet()).map(|read| read.src.to_string());
                (Some("client"), source, None)
            }
            _ => (None, None, Some(frames::reply_name(emitted.packet()))),
        }
    }

    fn compare_state(&self, step: &Value, log: &mut Log) -> Replayed<()> {
        let client = match step.get("client") {
            Some(_) => step.endpoint("client")?,
            None => self.client,
        };
        let entries: Vec<Connection> = self
            .bed
            .director
            .shard
            .connections_from(0, self.bed.now)
            .filter(|conn| !conn.template && conn.client == client && conn.virt == self.virt)
            .collect();
        if let Some(expected) = step.get("entries").and_then(Value::as_array) {
            let mut expected: Vec<_> = expected
                .iter()
                .map(|e| {
                    (
                        e.maybe_text("state"),
                        e.maybe_text("dest").map(str::to_owned),
                    )
                })
                .collect();
            let mut got: Vec<_> = entries
                .iter()
                .map(|conn| (Some(conn.state), Some(conn.server.to_string())))
                .collect();
            expected.sort();
            got.sort();
            log.compare("entries", &expected, &got);
        } else if step.get("state").is_some() {
            let entry = entries.first();
            log.compare(
                "state",
                &step.maybe_text("state"),
                &entry.map(|conn| conn.state),
            );
            if let Some(entry) = entry {
                self.compare_entry(step, entry, log);
            }
        }
        let service = self.bed.director.control.service(&self.service);
        let servers = service
            .context("the director has no service of the case")?
            .servers();
        let total = |of: fn(&lvs_core::Server) -> u32| {
            servers.iter().map(|server| i64::from(of(server))).sum()
        };
        for (name, got) in [
            ("active", total(lvs_core::Server::active)),
            ("inactive", total(lvs_core::Server::inactive)),
        ] {
            if let Some(expected) = step.maybe_number(name) {
                log.compare::<i64>(name, &expected, &got);
            }
        }
        Ok(())
    }

    fn compare_entry(&self, step: &Value, entry: &Connection, log: &mut Log) {
        let left = listed_seconds(entry.expires);
        if let Some(timeout) = step.maybe_number("timeout") {
            log.compare("timeout", &timeout, &left);
        }
        // The kernel rounds the recorded value down, so that it may be less by one.
        if let Some(expires) = step.maybe_number("expires")
            && !(-1..=0).contains(&later(expires, left))
        {
            log.mismatch("expires", &expires.to_string(), &left.to_string());
        }
        if let Some(dest) = step.maybe_text("dest") {
            log.compare("dest", &dest, &entry.server.to_string().as_str());
        }
    }
}
