//! Checks `[api]`: metrics, the API and the dashboard.

use std::net::SocketAddr;
use std::path::PathBuf;

use toml::Spanned;

use super::Checker;
use crate::config::Api;
use crate::config::raw::{OneOrMore, RawApi, RawApiToken};
use crate::text::Diagnostic;
use crate::token::{Named, Role, Token};

/// Maximum number of tokens.
const TOKENS_MAX: usize = 16;
/// Maximum number of characters of a token's name.
const NAME_MAX: usize = 32;
/// The fix for a token with a missing key.
const EXAMPLE: &str = "write name = \"oncall\", file = \"/etc/lvsd/oncall.token\" and role = \"drain\" (or \"read\", \"admin\")";

impl Checker<'_> {
    pub(super) fn api(&mut self, raw: &RawApi) -> Api {
        let listen = raw.listen.as_ref().map(|words| self.listen(words));
        let listen = listen.unwrap_or_default();
        let tokens = self.tokens(&raw.token);
        if let (Some(first), true) = (raw.token.first(), listen.is_empty()) {
            let line = self.first_line(&first.span());
            self.report(
                Diagnostic::warning(line, "`[[api.token]]` has no effect without `listen`")
                    .help("write listen = \"127.0.0.1:9560\" below [api]"),
            );
        }
        Api {
            listen,
            allowed_hosts: self.allowed_hosts(raw.allowed_hosts.as_ref()),
            tokens,
            dashboard: raw.dashboard.unwrap_or(true),
        }
    }

    fn tokens(&mut self, all: &[Spanned<RawApiToken>]) -> Vec<Named> {
        if let Some(beyond) = all.get(TOKENS_MAX) {
            let line = self.first_line(&beyond.span());
            self.report(
                Diagnostic::error(line, format!("there are more than {TOKENS_MAX} tokens"))
                    .help("let clients with the same role share a token"),
            );
        }
        let (mut tokens, mut secrets) = (Vec::<Named>::new(), Vec::new());
        for spanned in all.iter().take(TOKENS_MAX) {
            let (span, raw) = (spanned.span(), spanned.get_ref());
            let keys = [
                ("`name`", &raw.name),
                ("`file`", &raw.file),
                ("`role`", &raw.role),
            ];
            for (key, _) in keys.iter().filter(|(_, value)| value.is_none()) {
                self.missing(&span, key, EXAMPLE);
            }
            let role = self.word(raw.role.as_ref(), &Role::WORDS);
            let file = self.absolute(raw.file.as_ref(), "`file`");
            if let (Some(path), Some(place), true) = (&file, &raw.file, self.facts.is_some()) {
                match Token::read(path) {
                    Ok(secret) if secrets.contains(&secret) => self.report(
                        Diagnostic::error(place.span(), "another name has the same token")
                            .help("make a token for each name, so that lvsd can tell them apart"),
                    ),
                    Ok(secret) => secrets.push(secret),
                    Err(why) => self.report(
                        Diagnostic::error(place.span(), "the token cannot be used").help(why),
                    ),
                }
            }
            let Some(name) = &raw.name else { continue };
            let text = name.get_ref();
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            if !(1..=NAME_MAX).contains(&text.len()) || !text.bytes().all(fits) {
                self.report(
                    Diagnostic::error(name.span(), format!("{text:?} is not a name of a token"))
                        .help(format!(
                            "write 1 to {NAME_MAX} letters, digits, `-`, `_` and `.`"
                        )),
                );
            } else if tokens.iter().any(|other| other.name == *text) {
                self.report(
                    Diagnostic::error(name.span(), format!("two tokens have the name `{text}`"))
                        .help("write a different name for each token"),
                );
            } else if let (Some(file), Some(role)) = (file, role) {
                let name = text.clone();
                tokens.push(Named { name, file, role });
            }
        }
        tokens
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
