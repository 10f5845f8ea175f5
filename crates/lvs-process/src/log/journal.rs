//! Sends records to the journal by its own protocol
//! (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>): one datagram for each record, with fields in
//! addition to the text, so that `journalctl LVS_SERVER=10.0.0.2:80` finds the records about a
//! server.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use tracing::Level;
use tracing::field::{Field, Visit};

use super::message_ids::message_id;

pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// Precedes each field in front of a line. Two of these characters separate the fields from the
/// line.
const MARK: char = '\x1e';
/// Maximum length of a field's value in characters.
const VALUE_MAX: usize = 1024;

/// The fields of events that become fields of the journal.
const FIELDS: [(&str, &str); 4] = [
    ("service", "LVS_SERVICE"),
    ("server", "LVS_SERVER"),
    ("code", "LVS_CODE"),
    (EVENT, "LVS_EVENT"),
];

/// Name of the field with the kind of the event, which is not part of the text.
pub(super) const EVENT: &str = "event";

#[derive(Debug)]
pub(super) struct Journal {
    socket: UnixDatagram,
    path: PathBuf,
    identifier: String,
}

impl Journal {
    /// Creates a sender to the socket at `path`; fails if this process cannot connect to it.
    /// `identifier` is this program's name in the records.
    pub(super) fn at(path: &Path, identifier: String) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        // The socket may be missing, or may refuse this process.
        socket.connect(path)?;
        Ok(Self {
            // Each message is sent to the path, so that a restarted journal receives it.
            socket: UnixDatagram::unbound()?,
            path: path.to_owned(),
            identifier,
        })
    }

    /// Sends a record; false if the journal did not accept it.
    pub(super) fn send(&self, level: Level, line: &str) -> bool {
        let (fields, text) = parts(line);
        let mut record = Vec::with_capacity(line.len() + 128);
        put(&mut record, "PRIORITY", &priority(level).to_string());
        put(&mut record, "SYSLOG_IDENTIFIER", &self.identifier);
        for (name, value) in fields {
            put(&mut record, name, value);
            if let ("LVS_EVENT", Some(id)) = (name, message_id(value)) {
                put(&mut record, "MESSAGE_ID", id);
            }
        }
        put(&mut record, "MESSAGE", text);
        loop {
            match self.socket.send_to(&record, &self.path) {
                Ok(sent) => return sent == record.len(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

/// Adds a field to a record. A value of several lines is preceded by its length.
fn put(record: &mut Vec<u8>, name: &str, value: &str) {
    record.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        record.push(b'\n');
        record.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        record.push(b'=');
    }
    record.extend_from_slice(value.as_bytes());
    record.push(b'\n');
}

/// The priority for a level: as in syslog(3), and in the line prefix of sd-daemon(3).
pub(super) const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Collects the journal fields of an event, which are put in front of its line.
#[derive(Debug, Default)]
pub(super) struct Fields(String);

impl Fields {
    /// The fields as the prefix of a line; empty without fields.
    pub(super) fn front(mut self) -> String {
        if !self.0.is_empty() {
            self.0.push(MARK);
            self.0.push(MARK);
        }
        self.0
    }

    fn add(&mut self, name: &str, value: &str) {
        let Some((_, journal)) = FIELDS.iter().find(|(field, _)| *field == name) else {
            return;
        };
        let value = value.chars().filter(|c| !c.is_control()).take(VALUE_MAX);
        self.0.push(MARK);
        self.0.push_str(journal);
        self.0.push('=');
        self.0.extend(value);
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if FIELDS.iter().any(|(name, _)| *name == field.name()) {
            self.add(field.name(), &format!("{value:?}"));
        }
    }
}

/// Splits a line into the fields in its prefix and the rest.
pub(super) fn parts(line: &str) -> (impl Iterator<Item = (&str, &str)>, &str) {
    const END: &str = "\x1e\x1e";
    let (front, text) = match line.starts_with(MARK) {
        true => line.split_once(END).unwrap_or(("", line)),
        false => ("", line),
    };
    let fields = front.split(MARK).filter_map(|field| field.split_once('='));
    (fields, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_record_has_fields_and_whole_text_and_is_lost_without_journal() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let path = directory.path().join("socket");
        assert!(
            Journal::at(&path, String::new()).is_err(),
            "a sender was created without a socket"
        );
        let journal = UnixDatagram::bind(&path).expect("the socket can be opened");
        let sender = Journal::at(&path, "lvsd".to_owned()).expect("the socket exists");
        let mut fields = Fields::default();
        fields.add("service", "web\n\x1eMESSAGE=forged");
        fields.add("server", "10.0.0.2:80");
        fields.add("code", "refused");
        fields.add("other", "x");
        let line = format!("{} WARN server is down", fields.front());
        assert!(sender.send(Level::WARN, &line));
        let mut buffer = [0; 1024];
        let length = journal.recv(&mut buffer).expect("the record arrives");
        assert_eq!(
            String::from_utf8_lossy(&buffer[..length]),
            "PRIORITY=4\nSYSLOG_IDENTIFIER=lvsd\nLVS_SERVICE=webMESSAGE=forged\nLVS_SERVER=10.0.0.2:80\nLVS_CODE=refused\n\
             MESSAGE= WARN server is down\n"
        );
        let mut fields = Fields::default();
        fields.add(EVENT, "server_down");
        assert!(sender.send(Level::WARN, &format!("{}x", fields.front())));
        let length = journal.recv(&mut buffer).expect("the record arrives");
        let text = String::from_utf8_lossy(&buffer[..length]);
        let id = message_id("server_down").expect("the message has an identifier");
        let expected = format!("LVS_EVENT=server_down\nMESSAGE_ID={id}\nMESSAGE=x\n");
        assert!(
            text.ends_with(&expected),
            "does not end with {expected:?}: {text}"
        );
        assert!(sender.send(Level::INFO, "one\ntwo\x1e\x1e"));
        let length = journal.recv(&mut buffer).expect("the record arrives");
        let text = b"MESSAGE\n\x09\0\0\0\0\0\0\0one\ntwo\x1e\x1e\n";
        assert!(buffer[..length].ends_with(text), "{:?}", &buffer[..length]);
        // A restarted journal receives records again, and without a journal only the record is
        // lost.
        drop(journal);
        assert!(!sender.send(Level::INFO, "lost"));
        std::fs::remove_file(&path).expect("the file can be removed");
        let journal = UnixDatagram::bind(&path).expect("the socket can be opened");
        assert!(sender.send(Level::INFO, "again"));
        assert!(journal.recv(&mut buffer).is_ok());
    }
}
