//! Parses `lvsadm -L -n`, with and without counters or rates, and `lvsadm -L -n -c`.

use anyhow::{Context, Result};

/// A line of a listing: a service, or one of its servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// `TCP`, `UDP`, `SCTP` or `FWM`; empty for a server.
    pub protocol: String,
    /// Address and port as printed.
    pub address: String,
    /// The words after the address: scheduler and flags, or forwarding method, weight and
    /// counters.
    pub words: Vec<String>,
}

impl Row {
    /// Whether the line describes a real server.
    #[must_use]
    pub fn is_server(&self) -> bool {
        self.protocol.is_empty()
    }

    /// The number in a column after the address, counted from 0.
    ///
    /// # Errors
    ///
    /// The column does not exist, or contains no number.
    pub fn number(&self, column: usize) -> Result<u64> {
        let word = self
            .words
            .get(column)
            .with_context(|| format!("{self:?} has no column {column}"))?;
        word.parse()
            .with_context(|| format!("{self:?}: {word:?} is not a number"))
    }
}

/// The rows of `-L -n`, `-L -n --stats --exact` or `-L -n --rate --exact`, without the headings.
#[must_use]
pub fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace().map(str::to_owned);
        let (Some(first), Some(second)) = (words.next(), words.next()) else {
            continue;
        };
        let protocol = match first.as_str() {
            "TCP" | "UDP" | "SCTP" | "FWM" => first,
            "->" if second != "RemoteAddress:Port" => String::new(),
            _ => continue,
        };
        rows.push(Row {
            protocol,
            address: second,
            words: words.collect(),
        });
    }
    rows
}

/// A line of `-L -n -c`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// `TCP` or `UDP`; `IP` for a template of a service with a mark.
    pub protocol: String,
    /// Remaining time in seconds.
    pub expires: u64,
    /// Name of the connection's state.
    pub state: String,
    /// Address and port of the client.
    pub source: String,
    /// Virtual address and port.
    pub virtual_address: String,
    /// Address and port of the real server.
    pub destination: String,
}

/// The rows of `-L -n -c`, without those of SCTP.
///
/// # Errors
///
/// A line does not have the columns of a connection, or its time is invalid.
pub fn connections(text: &str) -> Result<Vec<Connection>> {
    text.lines()
        .filter(|line| {
            line.starts_with("TCP") || line.starts_with("UDP") || line.starts_with("IP ")
        })
        .map(|line| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [
                protocol,
                expires,
                state,
                source,
                virtual_address,
                destination,
            ] = words[..]
            else {
                anyhow::bail!("the line is not a connection: {line:?}");
            };
            let (minutes, seconds) = expires
                .split_once(':')
                .with_context(|| format!("the time is not minutes:seconds: {line:?}"))?;
            Ok(Connection {
                protocol: protocol.to_owned(),
                expires: minutes.parse::<u64>()? * 60 + seconds.parse::<u64>()?,
                state: state.to_owned(),
                source: source.to_owned(),
                virtual_address: virtual_address.to_owned(),
                destination: destination.to_owned(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvsadm_listing_is_parsed() {
        let text = "IP Virtual Server version 1.2.1 (size=4096)\n\
                    Prot LocalAddress:Port Scheduler Flags\n\
                    \x20 -> RemoteAddress:Port           Forward Weight ActiveConn InActConn\n\
                    TCP  192.0.2.10:80 rr\n\
                    \x20 -> 10.0.0.11:80                 Masq    1      0          500       \n";
        let rows = rows(text);
        assert_eq!(rows.len(), 2);
        assert_eq!(
            (rows[0].protocol.as_str(), rows[0].words[0].as_str()),
            ("TCP", "rr")
        );
        assert!(rows[1].is_server());
        assert_eq!(rows[1].number(3).expect("the column is a number"), 500);
    }

    #[test]
    fn connection_listing_is_parsed() {
        let text = "IPVS connection entries\npro expire state       source             virtual            destination\n\
                    TCP 01:59  TIME_WAIT   192.0.2.100:40000 192.0.2.10:80      10.0.0.11:80\n";
        let connections = connections(text).expect("the listing is parsed");
        assert_eq!(connections.len(), 1);
        assert_eq!(
            (connections[0].expires, connections[0].state.as_str()),
            (119, "TIME_WAIT")
        );
    }
}
