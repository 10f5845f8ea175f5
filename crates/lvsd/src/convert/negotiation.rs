//! Converts ldirectord's negotiate and external checks.

use std::net::{IpAddr, Ipv4Addr};

use super::checks::{Check, list, refused, repaired};
use super::pcre;
use super::service::quote;

/// Maximum number of redirects that ldirectord follows.
const REDIRECTS: &str = "7";

/// Check settings of a service.
#[derive(Clone, Debug, Default)]
pub(super) struct Negotiation {
    pub(super) service: Option<String>,
    pub(super) request: Option<String>,
    pub(super) receive: Option<String>,
    pub(super) host: Option<String>,
    pub(super) method: Option<String>,
    pub(super) command: Option<String>,
}

/// A converted check, and the parts that were not converted.
pub(super) struct Negotiated {
    pub(super) check: Check,
    pub(super) lost: Vec<String>,
}

/// Default ports of ldirectord's services.
const PORTS: [(&str, u16); 19] = [
    ("ftp", 21),
    ("smtp", 25),
    ("dns", 53),
    ("http", 80),
    ("pop", 110),
    ("nntp", 119),
    ("imap", 143),
    ("ldap", 389),
    ("https", 443),
    ("submission", 587),
    ("ldaps", 636),
    ("imaps", 993),
    ("pops", 995),
    ("oracle", 1521),
    ("radius", 1812),
    ("http_proxy", 3128),
    ("mysql", 3306),
    ("sip", 5060),
    ("pgsql", 5432),
];

/// The text of a value in double quotes, or a value without any quotes.
fn text(value: &str) -> Result<&str, &'static str> {
    let is_bare = || !value.contains(['"', '\'']);
    quoted(value)
        // ldirectord refuses such a value, but its meaning is unambiguous.
        .or_else(|| is_bare().then_some(value))
        .ok_or("the value must be in double quotes, without `#`; ldirectord refuses the file")
}

impl Negotiation {
    /// Stores the value of a line, by the rules of ldirectord, except that `request` and `receive`
    /// may also have no quotes. `None` if the key is not one of these settings.
    ///
    /// # Errors
    /// Apart from missing quotes, ldirectord refuses the value, or lvsd has no equivalent; the text
    /// is the reason.
    pub(super) fn take(&mut self, key: &str, value: &str) -> Option<Result<(), &'static str>> {
        let (place, value) = match key {
            "service" => (&mut self.service, Ok(word(value))),
            "httpmethod" => (&mut self.method, Ok(word(value))),
            "request" => (&mut self.request, text(value)),
            "receive" => (&mut self.receive, text(value)),
            "virtualhost" => {
                let inner = value.strip_prefix('"').unwrap_or(value);
                let end = inner.find('"').unwrap_or(inner.len());
                (&mut self.host, Ok(&inner[..end]))
            }
            "checkcommand" => (&mut self.command, Ok(quoted(value).unwrap_or(value))),
            _ => return None,
        };
        Some(match value {
            Ok("") if key == "virtualhost" => {
                Err("ldirectord sends an empty `Host`; lvsd does not")
            }
            Ok("") => Err("it is empty, and ldirectord refuses the file"),
            Ok(value) => {
                *place = Some(value.to_owned());
                Ok(())
            }
            Err(why) => Err(why),
        })
    }

    /// Protocol of the check: the value of `service`, the protocol with this default port, or
    /// `none`. `port` is the port of the virtual server, and 0 for a mark.
    pub(super) fn protocol(&self, port: u16) -> &str {
        let by_port = || PORTS.iter().find(|(_, known)| *known == port);
        match &self.service {
            Some(name) => name,
            None => by_port().map_or("none", |(name, _)| name),
        }
    }

    /// Port at which ldirectord checks servers without a port: the default port of the check's
    /// protocol. `port` is the port of the virtual server, and 0 for a mark. `None` if the protocol
    /// has no default port.
    pub(super) fn port(&self, port: u16) -> Option<u16> {
        let protocol = self.protocol(port);
        let found = PORTS.iter().find(|(name, _)| *name == protocol);
        found.map(|(_, port)| *port)
    }

    /// Adds the type and the request of the protocol to `check`, and returns it with the parts that
    /// were not converted.
    ///
    /// # Errors
    /// lvsd has no equivalent; the text is the reason.
    pub(super) fn negotiate(
        &self,
        mut check: Check,
        protocol: &str,
        datagrams: bool,
    ) -> Result<Negotiated, String> {
        let kind = match protocol {
            "http" | "https" | "smtp" | "dns" => protocol,
            "submission" => "smtp",
            other => return Err(format!("service={other}: lvsd has no equivalent")),
        };
        let mut lost = Vec::new();
        check.insert("type", quote(kind));
        match kind {
            "http" | "https" => self.pages(kind, &mut check, &mut lost),
            "dns" => self.names(datagrams, &mut check, &mut lost),
            _ => {}
        }
        let optional = ["regex", "host", "path", "method", "name", "answer"];
        match repaired(&mut check, &optional) {
            Ok(removed) => {
                lost.extend(removed);
                Ok(Negotiated { check, lost })
            }
            Err(why) => Err(format!("service={protocol}: {why}")),
        }
    }

    fn pages(&self, scheme: &str, check: &mut Check, lost: &mut Vec<String>) {
        let request = self.request.as_deref().unwrap_or("/");
        let whole = request
            .trim_start_matches('/')
            .strip_prefix(scheme)
            .and_then(|rest| rest.strip_prefix("://"));
        let path = match whole {
            Some(rest) => {
                let end = rest.find('/').unwrap_or(rest.len());
                lost.push(format!(
                    "request={request}: lvsd sends the request to the real server, for {}",
                    &rest[end..]
                ));
                &rest[end..]
            }
            None => request,
        };
        let slash = if path.starts_with('/') { "" } else { "/" };
        // Perl's HTTP client encodes spaces like this.
        let path = path.replace(' ', "%20");
        check.insert("path", quote(&format!("{slash}{path}")));
        check.insert("redirects", REDIRECTS.to_owned());
        if let Some(receive) = &self.receive {
            match pcre::converted(receive, false) {
                Ok(regex) => {
                    check.insert("regex", quote(&regex));
                }
                Err(why) => lost.push(format!("receive={receive}: {why}")),
            }
        }
        if let Some(host) = &self.host {
            check.insert("host", quote(host));
        }
        if let Some(method) = &self.method {
            check.insert("method", quote(&method.to_ascii_uppercase()));
        }
    }

    fn names(&self, datagrams: bool, check: &mut Check, lost: &mut Vec<String>) {
        let name = self.request.as_deref().unwrap_or("/");
        let name = name.strip_prefix('/').unwrap_or(name);
        if !datagrams {
            lost.push("service=dns: lvsd sends the query over UDP".to_owned());
        }
        // An address is converted to a reverse look-up.
        let (name, record) = match name.parse::<Ipv4Addr>() {
            Ok(ip) => {
                let [a, b, c, d] = ip.octets();
                (format!("{d}.{c}.{b}.{a}.in-addr.arpa"), "PTR")
            }
            Err(_) => (name.to_owned(), "A"),
        };
        if !name.is_empty() {
            check.insert("name", quote(&name));
        }
        let answer = self.receive.as_ref().map(|text| text.replace("\\.", "."));
        let address = answer.as_ref().and_then(|text| {
            let text = text.strip_prefix('^').unwrap_or(text);
            text.strip_suffix('$')
                .unwrap_or(text)
                .parse::<IpAddr>()
                .ok()
        });
        match (address, &self.receive) {
            (Some(address), _) if record == "A" => {
                check.insert("answer", quote(&address.to_string()));
                return;
            }
            (_, None) => lost.push(
                "no `receive`: ldirectord uses no server then; lvsd accepts any answer".to_owned(),
            ),
            (_, Some(receive)) => lost.push(format!(
                "receive={receive}: lvsd does not compare the answers with it; it accepts any answer"
            )),
        }
        check.insert("record", quote(record));
    }

    /// Converts a check program. The addresses and ports of the virtual and the real server become
    /// its last arguments.
    ///
    /// # Errors
    /// lvsd has no equivalent; the text is the reason.
    pub(super) fn external(
        &self,
        mut check: Check,
        address: &str,
        port: &str,
    ) -> Result<Check, String> {
        let command = self.command.as_deref().unwrap_or("/bin/true");
        if command.contains(['"', '\'']) {
            return Err(format!(
                "checkcommand: ldirectord uses {command}, quotes included, as the name of a program"
            ));
        }
        let mut command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        if !command
            .first()
            .is_some_and(|program| program.starts_with('/'))
        {
            let program = command.first().cloned().unwrap_or_default();
            return Err(format!("checkcommand: `{program}` is not a complete path"));
        }
        let more = [address, port, "{address}", "{port}"];
        command.extend(more.map(str::to_owned));
        check.remove("port");
        check.insert("type", quote("exec"));
        check.insert("command", list(&command));
        match refused(&check) {
            None => Ok(check),
            Some(why) => Err(format!("checkcommand: {why}")),
        }
    }
}

/// The first sequence of characters of a value that satisfy `is_part`.
pub(super) fn first(value: &str, is_part: fn(char) -> bool) -> &str {
    let rest = value.find(is_part).map_or("", |start| &value[start..]);
    let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
    &rest[..end]
}

/// The first word of a value, of letters, digits and underscores.
pub(super) fn word(value: &str) -> &str {
    first(value, |c| c.is_ascii_alphanumeric() || c == '_')
}

/// The text between the double quote at the beginning and the last one, without escapes; `None`
/// without these quotes.
pub(super) fn quoted(value: &str) -> Option<&str> {
    let inner = value.strip_prefix('"')?;
    inner.rfind('"').map(|end| &inner[..end])
}
