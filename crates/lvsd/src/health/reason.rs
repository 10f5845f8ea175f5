//! The reason why a server is down or suspicious, with its fix.

use std::fmt;

/// Maximum length of [`Reason::text`] in bytes: servers and programs can influence this text.
const LEN_MAX: usize = 256;

/// The kind of a fault of a server, for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// The check failed for a reason without a code of its own, such as an unexpected answer.
    #[default]
    CheckFailed,
    /// The connection was refused.
    Refused,
    /// A filter rejected the packets, as an ICMP error shows.
    Filtered,
    /// This host, or another host on the path, reports that the server cannot be reached.
    Unreachable,
    /// The next hop does not answer ARP or neighbour discovery.
    NextHop,
    /// The server did not answer at all.
    Silent,
    /// The server accepted the connection, and then sent no complete answer.
    Stalled,
    /// The server answers on its own address, but not on the path of clients.
    ClientPath,
    /// The replies arrive through another router.
    OtherGateway,
    /// The reverse path filter of this host drops the replies.
    ReversePath,
    /// The certificate of the server is not accepted.
    Certificate,
    /// Too many connections of clients to the server are not answered.
    ClientsUnanswered,
    /// The server is up, and went down several times recently.
    Flapping,
    /// The server is up, but its checks are slow.
    Slow,
}

impl Code {
    /// All codes, in the order of the enum.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 14] = [
        Self::CheckFailed,
        Self::Refused,
        Self::Filtered,
        Self::Unreachable,
        Self::NextHop,
        Self::Silent,
        Self::Stalled,
        Self::ClientPath,
        Self::OtherGateway,
        Self::ReversePath,
        Self::Certificate,
        Self::ClientsUnanswered,
        Self::Flapping,
        Self::Slow,
    ];

    /// The name of the code in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CheckFailed => "check_failed",
            Self::Refused => "refused",
            Self::Filtered => "filtered",
            Self::Unreachable => "unreachable",
            Self::NextHop => "next_hop",
            Self::Silent => "silent",
            Self::Stalled => "stalled",
            Self::ClientPath => "client_path",
            Self::OtherGateway => "other_gateway",
            Self::ReversePath => "reverse_path",
            Self::Certificate => "certificate",
            Self::ClientsUnanswered => "clients_unanswered",
            Self::Flapping => "flapping",
            Self::Slow => "slow",
        }
    }
}

/// The reason why a server is down or suspicious, with its fix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reason {
    /// The code of the reason.
    pub code: Code,
    /// The reason, as observed.
    pub text: String,
    /// The fix; empty if the observation already contains it, or none is known.
    pub fix: String,
}

impl Reason {
    /// Replaces the fix of the reason.
    #[must_use]
    pub fn with_fix(mut self, fix: String) -> Self {
        self.fix = fix;
        self
    }

    /// Replaces the code of the reason.
    #[must_use]
    pub(super) const fn of(mut self, code: Code) -> Self {
        self.code = code;
        self
    }

    /// Shortens the text to [`LEN_MAX`] bytes.
    pub(super) fn short(self) -> Self {
        Self {
            text: short(self.text),
            ..self
        }
    }
}

impl<T: Into<String>> From<T> for Reason {
    fn from(text: T) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }
}

/// Formats the text and then the fix, for a log line.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match self.fix.as_str() {
            "" => Ok(()),
            fix => write!(f, " ({fix})"),
        }
    }
}

/// A text, shortened to [`LEN_MAX`] bytes.
pub(super) fn short(mut text: String) -> String {
    if text.len() > LEN_MAX {
        let mut ends = (0..=LEN_MAX - 3).rev();
        let end = ends.find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
        text.shrink_to_fit();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::Code;

    #[test]
    fn reason_codes_are_documented_in_manual_and_openapi() {
        let manual = include_str!("../../../../docs/operating.md");
        let api: serde_json::Value =
            serde_json::from_str(include_str!("../api/openapi.json")).expect("the JSON is valid");
        let properties = &api["components"]["schemas"]["ServerStatus"]["properties"];
        let names = Code::ALL.map(Code::name);
        assert_eq!(properties["code"]["enum"], serde_json::json!(names));
        for name in names {
            assert!(manual.contains(&format!("`{name}`")), "{name}");
        }
    }
}
