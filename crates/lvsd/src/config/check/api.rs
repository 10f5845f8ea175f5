//! Metrics, the API and the dashboard.

use std::net::SocketAddr;
use std::path::PathBuf;

use toml::Spanned;

use super::Checker;
use crate::config::Api;
use crate::config::raw::{OneOrMore, RawApi};
use crate::text::Diagnostic;
use crate::token::Token;

impl Checker<'_> {
    pub(super) fn api(&mut self, raw: &RawApi) -> Api {
        let listen = raw.listen.as_ref().map(|words| self.listen(words));
        let listen = listen.unwrap_or_default();
        let token_file = self.absolute(raw.token_file.as_ref(), "`token_file`");
        if let (Some(path), Some(place), true) =
            (&token_file, &raw.token_file, self.facts.is_some())
            && let Err(why) = Token::read(path)
        {
            self.report(Diagnostic::error(place.span(), "the token cannot be used").help(why));
        }
        if let (Some(place), true) = (&raw.token_file, listen.is_empty()) {
            self.report(
                Diagnostic::warning(place.span(), "`token_file` has no effect without `listen`")
                    .help("write listen = \"127.0.0.1:9560\""),
            );
        }
        Api {
            listen,
            allowed_hosts: self.allowed_hosts(raw.allowed_hosts.as_ref()),
            token_file,
            procfs: self.procfs(raw.procfs.as_ref()),
            procfs_connections: self
                .number(
                    raw.procfs_connections.as_ref(),
                    "`procfs_connections`",
                    0..=10_000_000,
                )
                .and_then(|most| usize::try_from(most).ok()),
            dashboard: raw.dashboard.unwrap_or(true),
        }
    }

    fn listen(&mut self, words: &Spanned<OneOrMore>) -> Vec<SocketAddr> {
        let mut all = Vec::new();
        for word in &words.get_ref().0 {
            match word.parse::<SocketAddr>() {
                Ok(address) if address.port() == 0 => self.report(
                    Diagnostic::error(words.span(), "lvsd cannot listen on port 0")
                        .help("write a port, as in \"127.0.0.1:9560\""),
                ),
                Ok(address) if address.ip().is_multicast() => self.report(
                    Diagnostic::error(words.span(), format!("{} is a multicast address", address.ip()))
                        .help("name an address of this host, as in \"127.0.0.1:9560\""),
                ),
                Ok(address) if all.contains(&address) => self.report(
                    Diagnostic::error(words.span(), format!("{address} is named twice"))
                        .help("name each address once"),
                ),
                Ok(address) => all.push(address),
                Err(_) => self.report(
                    Diagnostic::error(words.span(), format!("`{word}` is not an address with a port"))
                        .help(
                            "write \"127.0.0.1:9560\" for this host only, \"[::]:9560\" for every host that can reach it",
                        ),
                ),
            }
        }
        all
    }

    fn allowed_hosts(&mut self, words: Option<&Spanned<OneOrMore>>) -> Vec<String> {
        let Some(words) = words else {
            return Vec::new();
        };
        let mut all = Vec::new();
        for word in &words.get_ref().0 {
            let name = word.strip_suffix('.').unwrap_or(word);
            let fits = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if !name.is_empty() && name.chars().all(fits) {
                all.push(name.to_owned());
                continue;
            }
            self.report(
                Diagnostic::error(words.span(), format!("`{word}` is not a host name")).help(
                    "write the name alone, without scheme, port or wildcard: \"lb.example.com\"",
                ),
            );
        }
        all
    }

    fn procfs(&mut self, place: Option<&Spanned<String>>) -> Option<PathBuf> {
        let path = self.absolute(place, "`procfs`")?;
        let place = place?;
        let kernels = ["/proc", "/sys", "/dev"]
            .iter()
            .any(|own| path.starts_with(own));
        if kernels || path.parent().is_none() {
            self.report(
                Diagnostic::error(
                    place.span(),
                    format!("{} is reserved for the kernel", path.display()),
                )
                .help("use a directory for lvsd only: \"/run/lvs/proc\""),
            );
            return None;
        }
        Some(path)
    }

    fn absolute(&mut self, place: Option<&Spanned<String>>, what: &str) -> Option<PathBuf> {
        let place = place?;
        self.printable(place, what);
        let path = PathBuf::from(place.get_ref());
        if !path.is_absolute() || path.components().any(|part| part.as_os_str() == "..") {
            self.report(
                Diagnostic::error(place.span(), format!("{what} is not an absolute path"))
                    .help("write the complete path from /, without .."),
            );
            return None;
        }
        Some(path)
    }
}
