//! Converts the virtual servers of keepalived's configuration file.

mod group;
mod outside;
mod rest;
mod source;
mod virtual_server;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

pub(super) use self::group::{following, range};
use self::source::{DEPTH_MAX, Reader, Source, Token};
use super::item::{Item, shown};
use super::words::Word;
use super::{ADDRESSES_MAX, Options, Read};

pub(super) fn read(name: &str, text: &str, options: &Options<'_>) -> Result<Read, String> {
    let mut source = Reader::new(options).read(name, text)?;
    let items = items(&mut source)?;
    let mut read = Read {
        lost: std::mem::take(&mut source.lost),
        ..Read::default()
    };
    let mut groups: HashMap<&str, &Item> = HashMap::new();
    let mut vrrp = HashSet::new();
    for item in &items {
        match item.name() {
            "virtual_server_group" => match groups.entry(item.word(1)) {
                Entry::Vacant(place) => {
                    place.insert(item);
                }
                Entry::Occupied(first) => {
                    let why = format!(
                        "keepalived uses the first group of this name ({})",
                        first.get().at()
                    );
                    read.lost.push(item.lost(&why));
                }
            },
            "vrrp_instance" => vrrp.extend(vrrp_addresses(item)),
            _ => {}
        }
    }
    let outside = outside::settings(&items, &mut read.lost);
    // Number of addresses that groups may still contain, in the whole file.
    let mut room = ADDRESSES_MAX;
    for item in items.iter().filter(|item| item.name() == "virtual_server") {
        match virtual_server::convert(item, &groups, &vrrp, &outside, &mut room) {
            Ok(mut all) => read.services.append(&mut all),
            Err(why) => read.lost.push(item.lost(&why)),
        }
    }
    let namespace = "net_namespace";
    read.elsewhere = items.iter().any(|item| item.name().starts_with(namespace))
        || source
            .lines
            .iter()
            .any(|line| line.conditional && line.text.contains(namespace));
    read.local_addresses = outside.local_addresses(&read.services);
    read.rest = rest::write(&source, &items, &mut read.lost);
    Ok(read)
}

fn vrrp_addresses(item: &Item) -> Vec<IpAddr> {
    let lists = item
        .items()
        .iter()
        .filter(|item| item.name().starts_with("virtual_ipaddress"));
    lists
        .flat_map(Item::items)
        .filter_map(|item| item.name().split('/').next()?.parse().ok())
        .collect()
}

/// Message about a statement that follows another one on the same line.
const BEHIND: &str =
    "keepalived ignores text after another statement in the same line; lvsd reads it";

/// Keywords of a virtual server that begin a new statement even within a line.
const KEYWORDS: [&str; 38] = [
    "TCP_CHECK",
    "HTTP_GET",
    "SSL_GET",
    "SMTP_CHECK",
    "DNS_CHECK",
    "MISC_CHECK",
    "PING_CHECK",
    "UDP_CHECK",
    "BFD_CHECK",
    "FILE_CHECK",
    "inhibit_on_failure",
    "connect_port",
    "connect_ip",
    "connect_timeout",
    "bindto",
    "retry",
    "nb_get_retry",
    "delay_before_retry",
    "delay_loop",
    "warmup",
    "weight",
    "path",
    "digest",
    "status_code",
    "url",
    "virtualhost",
    "enable_sni",
    "regex",
    "uthreshold",
    "lthreshold",
    "lvs_method",
    "notify_up",
    "notify_down",
    "misc_path",
    "misc_timeout",
    "misc_dynamic",
    "payload",
    "require_reply",
];

/// Whether this word begins a new statement in a line whose first word is `first`.
fn begins(first: &str, word: &Word) -> bool {
    let of_kind = match word.text.as_str() {
        "type" => first == "name",
        "name" => first == "type",
        "user" => first.starts_with("misc_"),
        _ => false,
    };
    !word.quoted && (of_kind || KEYWORDS.contains(&word.text.as_str()))
}

fn items(source: &mut Source) -> Result<Vec<Item>, String> {
    #[derive(Default)]
    struct Open {
        items: Vec<Item>,
        /// Words of the statement to which the block belongs.
        words: Vec<Word>,
        line: usize,
    }
    let tokens = std::mem::take(&mut source.tokens);
    let place = |line: usize| source.lines[line].at.clone();
    let statement = |words: &mut Vec<Word>, line: usize, last: usize| Item {
        words: std::mem::take(words),
        block: None,
        at: place(line),
        lines: (line, last),
    };
    let mut outer: Vec<Open> = Vec::new();
    let mut inner = Open::default();
    let mut words: Vec<Word> = Vec::new();
    let mut first = 0;
    // Whether the statement follows another one on the same line.
    let mut behind = false;
    let mut lost = Vec::new();
    let mut pass = |item: &Item, behind: &mut bool| {
        if std::mem::take(behind) {
            lost.push(item.lost(BEHIND));
        }
    };
    for (token, line) in tokens {
        match token {
            Token::Word(word) => {
                let split = words.first().is_some_and(|name| begins(&name.text, &word));
                let outermost = outer.get(1).unwrap_or(&inner).words.first();
                let is_service = outermost.is_some_and(|name| name.text == "virtual_server");
                if !outer.is_empty() && is_service && split {
                    let item = statement(&mut words, first, line);
                    pass(&item, &mut behind);
                    inner.items.push(item);
                    behind = true;
                }
                if words.is_empty() {
                    first = line;
                }
                words.push(word);
            }
            Token::End if words.is_empty() => {}
            Token::End => {
                let item = statement(&mut words, first, line);
                pass(&item, &mut behind);
                inner.items.push(item);
            }
            Token::Open => {
                behind = false;
                if words.is_empty() {
                    // The brace is on a separate line.
                    let before = inner.items.pop().filter(|item| item.block.is_none());
                    let Some(item) = before else {
                        return Err(format!("{}: a block without a name", place(line)));
                    };
                    (words, first) = (item.words, item.lines.0);
                }
                if outer.len() >= DEPTH_MAX {
                    return Err(format!(
                        "{}: blocks are deeper than {DEPTH_MAX}",
                        place(line)
                    ));
                }
                let block = Open {
                    items: Vec::new(),
                    words: std::mem::take(&mut words),
                    line: first,
                };
                outer.push(std::mem::replace(&mut inner, block));
            }
            Token::Close => {
                if !words.is_empty() {
                    let item = statement(&mut words, first, line);
                    pass(&item, &mut behind);
                    inner.items.push(item);
                }
                let Some(around) = outer.pop() else {
                    return Err(format!(
                        "{}: a closing brace without an opening one",
                        place(line)
                    ));
                };
                let block = std::mem::replace(&mut inner, around);
                inner.items.push(Item {
                    words: block.words,
                    block: Some(block.items),
                    at: place(block.line),
                    lines: (block.line, line),
                });
            }
        }
    }
    if !outer.is_empty() {
        let raw: Vec<&str> = inner.words.iter().map(|word| word.raw.as_str()).collect();
        return Err(format!(
            "the file ends within a block: the brace of `{}` ({}) is not closed",
            shown(&raw.join(" ")),
            place(inner.line)
        ));
    }
    source.lost.append(&mut lost);
    Ok(inner.items)
}
