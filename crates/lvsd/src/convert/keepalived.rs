//! keepalived's file: words and blocks, of which the virtual servers are taken.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    ADDRESSES_MAX, INCLUDES_MAX, LENGTH_MAX, Server, Service, bare, checks, endpoint, port, quote,
    scheduler,
};

/// How deep blocks and includes may be.
const DEPTH_MAX: usize = 32;
/// The longest name of a macro, in bytes.
const NAME_MAX: usize = 128;
/// The longest word that macros make, in bytes.
const WORD_MAX: usize = 4096;
/// Macros that a word may stand for, those of their values too.
const MACROS_MAX: usize = 1024;

/// A statement: its words, and what stands in its block.
#[derive(Clone, Debug, Default)]
pub(super) struct Item {
    pub(super) words: Vec<String>,
    block: Option<Vec<Self>>,
}

impl Item {
    pub(super) fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    pub(super) fn word(&self, n: usize) -> &str {
        self.words.get(n).map_or("", String::as_str)
    }

    pub(super) fn items(&self) -> &[Self] {
        self.block.as_deref().unwrap_or_default()
    }

    pub(super) fn find(&self, name: &str) -> Option<&Self> {
        self.items().iter().find(|item| item.name() == name)
    }

    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.find(name)?.word(1).parse().ok()
    }

    pub(super) fn text(&self) -> String {
        self.words.join(" ")
    }
}

type Read = (Vec<Service>, Vec<String>, String);

pub(super) fn read(
    name: &str,
    text: &str,
    include: &dyn Fn(&str) -> Vec<(String, String)>,
) -> Result<Read, String> {
    let mut lost = Vec::new();
    let mut reader = Reader {
        include,
        included: 0,
        open: vec![name.to_owned()],
        macros: HashMap::new(),
        written: 0,
        lost: &mut lost,
    };
    let mut tokens = Vec::new();
    reader.tokens(text, 0, &mut tokens)?;
    let items = items(&mut tokens.into_iter().peekable(), 0)?;
    let mut groups: HashMap<&str, &Item> = HashMap::new();
    let mut vrrp = HashSet::new();
    for item in &items {
        match item.name() {
            "virtual_server_group" => {
                groups.insert(item.word(1), item);
            }
            "vrrp_instance" => vrrp.extend(vrrp_addresses(item)),
            _ => {}
        }
    }
    let mut services = Vec::new();
    let mut rest = String::new();
    // Addresses that groups may still stand for, in the whole file.
    let mut room = ADDRESSES_MAX;
    for item in &items {
        match item.name() {
            "virtual_server" => match virtual_server(item, &groups, &vrrp, &mut room) {
                Ok(mut all) => services.append(&mut all),
                Err(why) => lost.push(format!(
                    "virtual_server {}: {why}",
                    item.words[1..].join(" ")
                )),
            },
            "virtual_server_group" => {}
            _ => write(item, 0, &mut rest),
        }
    }
    Ok((services, lost, rest))
}

struct Reader<'a> {
    include: &'a dyn Fn(&str) -> Vec<(String, String)>,
    included: usize,
    /// The files that are being read, each included by the one before it.
    open: Vec<String>,
    macros: HashMap<String, String>,
    /// Bytes that macros have made.
    written: u64,
    lost: &'a mut Vec<String>,
}

/// A word, a brace, or the end of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    /// One that stood in quotes: its blanks are its own.
    Quoted(String),
    Open,
    Close,
    End,
}

impl Reader<'_> {
    fn tokens(&mut self, text: &str, depth: usize, out: &mut Vec<Token>) -> Result<(), String> {
        for line in text.lines() {
            let words = words(line);
            let first = match words.first() {
                Some(Token::Word(first) | Token::Quoted(first)) => first.as_str(),
                _ => "",
            };
            if let (
                "include" | "includer" | "includem" | "includew" | "includeb" | "includea",
                Some(Token::Word(pattern) | Token::Quoted(pattern)),
            ) = (first, words.get(1))
            {
                let files = (self.include)(pattern);
                if files.is_empty() || depth >= DEPTH_MAX {
                    self.lost.push(format!("include {pattern}: no such file"));
                }
                for (name, text) in files {
                    if self.open.contains(&name) {
                        self.lost
                            .push(format!("include {pattern}: {name} includes itself"));
                        continue;
                    }
                    self.included += 1;
                    if self.included <= INCLUDES_MAX && depth < DEPTH_MAX {
                        self.open.push(name);
                        self.tokens(&text, depth + 1, out)?;
                        self.open.pop();
                    }
                }
                continue;
            }
            if let Some((name, value)) = first
                .strip_prefix('$')
                .and_then(|rest| rest.split_once('='))
            {
                let more = words[1..].iter().filter_map(|token| match token {
                    Token::Word(word) => Some(word.clone()),
                    Token::Quoted(word) => Some(format!("\"{word}\"")),
                    Token::Open => Some("{".to_owned()),
                    Token::Close => Some("}".to_owned()),
                    Token::End => None,
                });
                let value: Vec<String> = std::iter::once(value.to_owned()).chain(more).collect();
                let value = value.join(" ");
                if name.len() > NAME_MAX {
                    self.lost.push(format!(
                        "${}: the name of a macro has at most {NAME_MAX} bytes",
                        start(name, NAME_MAX)
                    ));
                } else {
                    self.macros.insert(name.to_owned(), value);
                }
                continue;
            }
            if first.starts_with('@') {
                self.lost
                    .push(format!("{}: the line is for some hosts only", line.trim()));
                continue;
            }
            for token in words {
                match token {
                    // What a macro stands for is read as if it stood there.
                    Token::Word(word) if word.contains('$') => {
                        out.extend(self::words(&self.expand(word)?));
                    }
                    Token::Quoted(word) if word.contains('$') => {
                        out.push(Token::Quoted(self.expand(word)?));
                    }
                    token => out.push(token),
                }
            }
            out.push(Token::End);
        }
        Ok(())
    }

    /// A word with the values of its macros.
    fn expand(&mut self, word: String) -> Result<String, String> {
        let mut expansion = Expansion::default();
        expansion.add(&word, &self.macros, 0);
        if expansion.macros == 0 {
            return Ok(word);
        }
        if expansion.cut {
            self.lost.push(format!(
                "{}: with its macros it is longer than {WORD_MAX} bytes, or has more than \
                 {MACROS_MAX} of them, or they stand for themselves; the rest of it is cut off",
                start(&word, 80)
            ));
        }
        self.written += expansion.text.len() as u64;
        if self.written > LENGTH_MAX {
            return Err(format!(
                "its macros make more than {} MiB; split the file",
                LENGTH_MAX >> 20
            ));
        }
        Ok(expansion.text)
    }
}

/// A word whose macros are replaced, from left to right.
#[derive(Default)]
struct Expansion {
    text: String,
    /// How many there were.
    macros: usize,
    cut: bool,
}

impl Expansion {
    fn add<'a>(&mut self, mut text: &'a str, macros: &'a HashMap<String, String>, depth: usize) {
        while let Some(dollar) = text.find('$') {
            self.push(&text[..dollar]);
            if self.cut {
                return;
            }
            text = &text[dollar..];
            let Some((value, rest)) = first_macro(text, macros) else {
                self.push("$");
                text = &text[1..];
                continue;
            };
            self.macros += 1;
            self.cut |= self.macros > MACROS_MAX || depth >= DEPTH_MAX;
            if self.cut {
                return;
            }
            self.add(value, macros, depth + 1);
            text = rest;
        }
        self.push(text);
    }

    fn push(&mut self, text: &str) {
        let fitting = start(text, WORD_MAX - self.text.len());
        if !self.cut {
            self.text.push_str(fitting);
        }
        self.cut |= fitting.len() < text.len();
    }
}

/// The value of the macro that `text` begins with, `${NAME}` or `$NAME`, and what follows it. Of
/// the names that fit, the longest is meant.
fn first_macro<'a>(
    text: &'a str,
    macros: &'a HashMap<String, String>,
) -> Option<(&'a str, &'a str)> {
    let name = text.strip_prefix('$')?;
    if let Some((name, rest)) = name.strip_prefix('{').and_then(|name| name.split_once('}'))
        && let Some(value) = macros.get(name)
    {
        return Some((value, rest));
    }
    let longest = start(name, NAME_MAX).len();
    let ends = (1..=longest)
        .rev()
        .filter(|end| name.is_char_boundary(*end));
    ends.map(|end| name.split_at(end))
        .find_map(|(name, rest)| Some((macros.get(name)?.as_str(), rest)))
}

/// As much of a text as `length` bytes hold.
fn start(text: &str, length: usize) -> &str {
    let mut end = length.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn words(line: &str) -> Vec<Token> {
    let mut out = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    // What has been seen of a word: nothing, letters, quotes.
    let (mut any, mut quotes) = (false, false);
    let finish = |word: &mut String, any: &mut bool, quotes: &mut bool, out: &mut Vec<Token>| {
        match (*any, *quotes) {
            (false, _) => {}
            (true, false) => out.push(Token::Word(std::mem::take(word))),
            (true, true) => out.push(Token::Quoted(std::mem::take(word))),
        }
        (*any, *quotes) = (false, false);
    };
    let mut all = line.chars().peekable();
    while let Some(c) = all.next() {
        match c {
            '\\' if quoted && matches!(all.peek(), Some('"' | '\\')) => word.extend(all.next()),
            '"' => {
                quoted = !quoted;
                (any, quotes) = (true, true);
            }
            c if quoted => word.push(c),
            '!' | '#' => break,
            '{' if word.ends_with('$') => {
                word.push(c);
            }
            '}' if word.contains("${") => word.push(c),
            '{' | '}' => {
                finish(&mut word, &mut any, &mut quotes, &mut out);
                out.push(if c == '{' { Token::Open } else { Token::Close });
            }
            c if c.is_whitespace() => finish(&mut word, &mut any, &mut quotes, &mut out),
            c => {
                word.push(c);
                any = true;
            }
        }
    }
    finish(&mut word, &mut any, &mut quotes, &mut out);
    out
}

/// The words of a check that stand in one line with others.
const KEYWORDS: [&str; 23] = [
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
    "weight",
    "path",
    "digest",
    "status_code",
    "url",
];

fn items(
    tokens: &mut std::iter::Peekable<std::vec::IntoIter<Token>>,
    depth: usize,
) -> Result<Vec<Item>, String> {
    if depth > DEPTH_MAX {
        return Err(format!("blocks are deeper than {DEPTH_MAX}"));
    }
    let mut all: Vec<Item> = Vec::new();
    let mut words: Vec<String> = Vec::new();
    let finish = |words: &mut Vec<String>, all: &mut Vec<Item>| {
        if !words.is_empty() {
            all.push(Item {
                words: std::mem::take(words),
                block: None,
            });
        }
    };
    while let Some(token) = tokens.next() {
        match token {
            Token::Word(word) | Token::Quoted(word) => {
                // Several on one line, as people write small blocks.
                if depth > 0 && !words.is_empty() && KEYWORDS.contains(&word.as_str()) {
                    finish(&mut words, &mut all);
                }
                words.push(word);
            }
            Token::End => finish(&mut words, &mut all),
            Token::Open => {
                let block = items(tokens, depth + 1)?;
                if words.is_empty() {
                    // The brace stands in a line of its own.
                    match all.last_mut().filter(|item| item.block.is_none()) {
                        Some(item) => item.block = Some(block),
                        None => return Err("a block without a name".to_owned()),
                    }
                } else {
                    all.push(Item {
                        words: std::mem::take(&mut words),
                        block: Some(block),
                    });
                }
            }
            Token::Close => {
                finish(&mut words, &mut all);
                return match depth {
                    0 => Err("a closing brace without an opening one".to_owned()),
                    _ => Ok(all),
                };
            }
        }
    }
    finish(&mut words, &mut all);
    match depth {
        0 => Ok(all),
        _ => Err("the file ends within a block".to_owned()),
    }
}

fn write(item: &Item, depth: usize, text: &mut String) {
    let indent = "    ".repeat(depth);
    let words: Vec<String> = item
        .words
        .iter()
        .map(
            |word| match word.contains(char::is_whitespace) || word.is_empty() {
                true => format!("\"{word}\""),
                false => word.clone(),
            },
        )
        .collect();
    text.push_str(&format!("{indent}{}", words.join(" ")));
    match &item.block {
        None => text.push('\n'),
        Some(block) => {
            text.push_str(" {\n");
            for item in block {
                write(item, depth + 1, text);
            }
            text.push_str(&format!("{indent}}}\n"));
        }
    }
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

/// What a group stands for: addresses with ports, and marks. It takes as many from `room`: each
/// mark is a service with `servers` of its own.
fn group(
    item: &Item,
    servers: usize,
    room: &mut usize,
    lost: &mut Vec<String>,
) -> (Vec<(IpAddr, u16)>, Vec<u32>) {
    let (mut addresses, mut marks) = (Vec::new(), Vec::new());
    let full = |item: &Item| {
        format!(
            "{}: the groups of a file stand for at most {ADDRESSES_MAX} addresses, and servers of marks",
            item.text()
        )
    };
    for item in item.items() {
        if item.name() == "fwmark" {
            let left = room.checked_sub(1 + servers);
            match (item.word(1).parse(), left) {
                (Ok(mark), Some(left)) => {
                    marks.push(mark);
                    *room = left;
                }
                (Ok(_), None) => lost.push(full(item)),
                (Err(_), _) => lost.push(item.text()),
            }
            continue;
        }
        let port = if item.word(1).is_empty() {
            Some(0)
        } else {
            port(item.word(1))
        };
        let (Some((first, count)), Some(port)) = (range(item.name()), port) else {
            lost.push(item.text());
            continue;
        };
        match room.checked_sub(count) {
            Some(left) => {
                addresses.extend(following(first, count).map(|ip| (ip, port)));
                *room = left;
            }
            None => lost.push(full(item)),
        }
    }
    (addresses, marks)
}

/// `192.0.2.1`, `192.0.2.1-10`, `192.0.2.1-192.0.3.9`, `192.0.2.8/29`, and the same in IPv6
/// (`2001:db8::1-a`): the first address, and how many there are.
fn range(text: &str) -> Option<(IpAddr, usize)> {
    if let Some((first, length)) = text.split_once('/') {
        let (first, length): (IpAddr, u32) = (first.parse().ok()?, length.parse().ok()?);
        let (number, bits) = match first {
            IpAddr::V4(ip) => (u32::from(ip).into(), 32_u32),
            IpAddr::V6(ip) => (u128::from(ip), 128),
        };
        let count = 1_u128.checked_shl(bits.checked_sub(length)?)?;
        // keepalived passes over an address within the network, too.
        return (number & (count - 1) == 0).then_some((first, amount(count)));
    }
    let Some((first, last)) = text.split_once('-') else {
        return Some((text.parse().ok()?, 1));
    };
    let first: IpAddr = first.parse().ok()?;
    let more = match (first, last.parse::<IpAddr>().ok()) {
        (IpAddr::V4(first), Some(IpAddr::V4(last))) => {
            u32::from(last).checked_sub(first.into())?.into()
        }
        (IpAddr::V6(first), Some(IpAddr::V6(last))) => {
            u128::from(last).checked_sub(first.into())?
        }
        (_, Some(_)) => return None,
        (IpAddr::V4(ip), None) => last.parse::<u8>().ok()?.checked_sub(ip.octets()[3])?.into(),
        (IpAddr::V6(ip), None) => u16::from_str_radix(last, 16)
            .ok()?
            .checked_sub(ip.segments()[7])?
            .into(),
    };
    Some((first, amount(more.checked_add(1)?)))
}

/// A number of addresses; what is no number here is more than there is room for, too.
fn amount(count: u128) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// So many addresses from `first` on, which there is room for.
fn following(first: IpAddr, count: usize) -> impl Iterator<Item = IpAddr> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    (0..count).map(move |n| match first {
        IpAddr::V4(ip) => Ipv4Addr::from(u32::from(ip).wrapping_add(n)).into(),
        IpAddr::V6(ip) => Ipv6Addr::from(u128::from(ip).wrapping_add(n.into())).into(),
    })
}

fn virtual_server(
    item: &Item,
    groups: &HashMap<&str, &Item>,
    vrrp: &HashSet<IpAddr>,
    room: &mut usize,
) -> Result<Vec<Service>, String> {
    let mut lost = Vec::new();
    let (addresses, marks) = match item.word(1) {
        "group" => {
            let group_item = groups
                .get(item.word(2))
                .ok_or_else(|| format!("there is no group {}", item.word(2)))?;
            let servers = item.items().iter();
            let servers = servers.filter(|item| item.name() == "real_server").count();
            group(group_item, servers, room, &mut lost)
        }
        "fwmark" => {
            let mark = item.word(2).parse().map_err(|_| "not a mark".to_owned())?;
            (Vec::new(), vec![mark])
        }
        address => {
            let ip = address
                .parse()
                .map_err(|_| format!("{address} is not an address"))?;
            let port = match item.word(2) {
                "" => 0,
                word => port(word).ok_or_else(|| format!("{word} is not a port"))?,
            };
            (vec![(ip, port)], Vec::new())
        }
    };
    if addresses.is_empty() && marks.is_empty() {
        return Err(format!("nothing is left of its group: {}", lost.join("; ")));
    }
    let mut service = Service {
        lost: lost
            .into_iter()
            .map(|what| format!("{what} of its group"))
            .collect(),
        ..Service::default()
    };
    settings(item, &mut service);
    if item.find("protocol").is_none() && !addresses.is_empty() {
        service.lose(
            "no `protocol`: it is UDP, as with keepalived; write protocol = \"tcp\" if that is meant",
        );
    }
    let mut services = Vec::new();
    // One list of addresses, in which all have the protocol and the family of the servers.
    if !addresses.is_empty() {
        let mut one = service.clone();
        if addresses.iter().any(|(ip, _)| vrrp.contains(ip)) {
            one.string("vip", "host");
        }
        if item.find("protocol").is_none() {
            one.string("protocol", "udp");
        }
        // All ports: keepalived makes such a service persistent.
        let persistence = one.keys.get("persistence");
        if addresses.iter().any(|(_, port)| *port == 0)
            && !persistence.is_some_and(|keys| keys.contains("timeout"))
        {
            add_persistence(&mut one, format!("timeout = {}", duration_whole(360)));
        }
        one.addresses = addresses
            .iter()
            .map(|(ip, port)| endpoint(*ip, *port))
            .collect();
        services.push(one);
    }
    let six = service
        .servers
        .iter()
        .any(|server| server.address.starts_with('['));
    for mark in marks {
        let mut one = service.clone();
        one.fwmark = Some((mark, six));
        for key in ["protocol", "vip"] {
            one.keys.remove(key);
        }
        // With a mark keepalived leaves the port as it is, whatever the server's.
        for server in &mut one.servers {
            server.take_port();
        }
        services.push(one);
    }
    Ok(services)
}

fn method(word: &str) -> Option<&'static str> {
    Some(match word {
        "NAT" => "nat",
        "DR" => "dr",
        "TUN" => "tun",
        _ => return None,
    })
}

fn settings(item: &Item, service: &mut Service) {
    service.string("forward", "nat");
    let outer = item;
    let inhibit = item.find("inhibit_on_failure").is_some_and(is_on);
    let mut flags: Vec<&str> = Vec::new();
    let (mut quorum, mut hysteresis) = (None, 0);
    let mut sorry = None;
    for item in item.items() {
        let value = item.word(1);
        match item.name() {
            // Of the checks, and what becomes of servers.
            "delay_loop" | "inhibit_on_failure" | "retry" | "nb_get_retry"
            | "delay_before_retry" | "connect_timeout" | "virtualhost" => {}
            "lb_algo" | "lvs_sched" => match scheduler(value) {
                Ok(name) => service.string("scheduler", name),
                Err(why) => service.lose(why),
            },
            "lb_kind" | "lvs_method" => match method(value) {
                Some(method) => {
                    service.string("forward", method);
                    lose_tunnel(item, service);
                }
                None => service.lose(format!("{}: NAT is used, as by keepalived", item.text())),
            },
            "protocol" => match value {
                "TCP" | "tcp" => {}
                "UDP" | "udp" => service.string("protocol", "udp"),
                "SCTP" | "sctp" => service.string("protocol", "sctp"),
                _ => service.lose(item.text()),
            },
            // None at all.
            "persistence_timeout" if value == "0" => {}
            "persistence_timeout" => {
                let seconds: u64 = value.parse().unwrap_or(360);
                let timeout = duration_whole(seconds.clamp(1, 31 * 86_400));
                add_persistence(service, format!("timeout = {timeout}"));
            }
            "persistence_granularity" => {
                add_persistence(service, format!("netmask = {}", quote(value)));
            }
            "persistence_engine" => {
                add_persistence(service, format!("engine = {}", quote(value)));
            }
            "ops" => {
                service.keys.insert("one_packet", "true".to_owned());
            }
            "hashed" | "flag-1" => flags.push("flag-1"),
            "flag-2" => flags.push("flag-2"),
            "flag-3" => flags.push("flag-3"),
            "sh-port" => flags.push("sh-port"),
            "sh-fallback" => flags.push("sh-fallback"),
            "mh-port" => flags.push("mh-port"),
            "mh-fallback" => flags.push("mh-fallback"),
            "quorum" => quorum = value.parse::<u32>().ok().filter(|n| *n > 0),
            "hysteresis" => hysteresis = value.parse().unwrap_or(0),
            "sorry_server" => match (value.parse::<IpAddr>(), port(item.word(2))) {
                (Ok(ip), Some(port)) => sorry = Some((ip, port)),
                _ => service.lose(item.text()),
            },
            "real_server" => {
                let server = real_server(item, outer, inhibit);
                match server {
                    Ok(server) => service.servers.push(server),
                    Err(why) => service.lose(why),
                }
            }
            // Checks decide from the start here, and nothing waits.
            "warmup" => {}
            "alpha" | "omega" if !is_on(item) => {}
            "alpha" => {
                service.keys.insert("alpha", "true".to_owned());
            }
            "omega" => {
                service.keys.insert("omega", "true".to_owned());
            }
            "quorum_up" | "quorum_down" => service.lose(format!(
                "{}: see `notify` in [lvsd], for all events of all services",
                item.text()
            )),
            "" => {}
            _ => service.lose(item.text()),
        }
    }
    if let Some((ip, port)) = sorry {
        // Only NAT changes ports.
        match service
            .keys
            .get("forward")
            .is_some_and(|word| word == "\"nat\"")
        {
            true => service.string("sorry", &endpoint(ip, port)),
            false => service.string("sorry", &bare(ip)),
        }
    }
    if let Some(quorum) = quorum {
        set_quorum(service, quorum, hysteresis);
    }
    if !flags.is_empty() {
        let all: Vec<String> = flags.iter().map(|flag| quote(flag)).collect();
        service
            .keys
            .insert("scheduler_flags", format!("[{}]", all.join(", ")));
    }
    on_check_failure(service, inhibit);
}

/// `quorum` and `hysteresis`.
fn set_quorum(service: &mut Service, quorum: u32, hysteresis: u32) {
    let (up, down) = (
        quorum.saturating_add(hysteresis),
        quorum.saturating_sub(hysteresis).max(1),
    );
    let value = match up == down {
        true => up.to_string(),
        false => format!("{{ up = {up}, down = {down} }}"),
    };
    service.keys.insert("quorum", value);
    let weighted = service
        .servers
        .iter()
        .any(|s| s.keys.get("weight").is_some_and(|w| w != "1"));
    if weighted {
        service.lose(format!(
            "quorum {quorum}: it counts servers here, and not their weights"
        ));
    }
}

/// What becomes of servers whose checks fail: for all of them, as it is said here.
fn on_check_failure(service: &mut Service, inhibit: bool) {
    let all_inhibit = inhibit
        || (!service.servers.is_empty()
            && service
                .servers
                .iter()
                .all(|s| s.keys.contains_key("inhibit")));
    for server in &mut service.servers {
        let own = server.keys.remove("inhibit").is_some();
        if own && !all_inhibit {
            server.lost.push(
                "inhibit_on_failure: set on_check_failure = \"quiesce\" for the service".to_owned(),
            );
        }
    }
    service.string(
        "on_check_failure",
        if all_inhibit { "quiesce" } else { "remove" },
    );
}

/// What `lb_kind TUN` says about the tunnel.
fn lose_tunnel(item: &Item, service: &mut Service) {
    if let Some(kind) = item.words.get(2..).filter(|rest| !rest.is_empty()) {
        service.lose(format!(
            "tunnel {}; see `tunnel` in the documentation",
            kind.join(" ")
        ));
    }
}

/// Sets one more key of `persistence`.
fn add_persistence(service: &mut Service, key: String) {
    let before = service.keys.remove("persistence");
    service.keys.insert("persistence", merge(before, key));
}

fn duration_whole(seconds: u64) -> String {
    quote(&format!("{seconds}s"))
}

/// A key more in an inline table.
fn merge(before: Option<String>, key: String) -> String {
    let inner = before.map(|before| before.trim_matches(['{', '}', ' ']).to_owned());
    match inner {
        Some(inner) => format!("{{ {inner}, {key} }}"),
        None => format!("{{ {key} }}"),
    }
}

/// Whether a statement that may say `no` says something else, or nothing.
fn is_on(item: &Item) -> bool {
    !matches!(item.word(1), "no" | "off" | "false")
}

fn real_server(item: &Item, outer: &Item, inhibit: bool) -> Result<Server, String> {
    let bad = || {
        format!(
            "real_server {}: not an address and a port",
            item.words[1..].join(" ")
        )
    };
    let ip: IpAddr = item.word(1).parse().map_err(|_| bad())?;
    let port = match item.word(2) {
        "" => 0,
        word => port(word).ok_or_else(bad)?,
    };
    let mut server = Server {
        address: match port {
            0 => bare(ip),
            port => endpoint(ip, port),
        },
        ..Server::default()
    };
    let own = item;
    if inhibit {
        server.keys.insert("inhibit", String::new());
    }
    for item in item.items() {
        let value = item.word(1);
        let number = || value.parse::<u32>().ok();
        match item.name() {
            "weight" => match value.parse::<i32>() {
                Ok(weight) if weight >= 0 => {
                    server.keys.insert("weight", weight.to_string());
                }
                _ => server.lost.push(item.text()),
            },
            "inhibit_on_failure" if is_on(item) => {
                server.keys.insert("inhibit", String::new());
            }
            "inhibit_on_failure" => {
                server.keys.remove("inhibit");
            }
            "uthreshold" | "lthreshold" => match number() {
                Some(number) => {
                    let key = if item.name() == "uthreshold" {
                        "upper"
                    } else {
                        "lower"
                    };
                    server.keys.insert(key, number.to_string());
                }
                None => server.lost.push(item.text()),
            },
            "lb_kind" | "lvs_method" => match method(value) {
                Some(method) => {
                    server.keys.insert("forward", quote(method));
                }
                None => server.lost.push(item.text()),
            },
            name if checks::is_known(name) => {
                let check = checks::keepalived(item, &[own, outer], port, &mut server.lost);
                add_check(&mut server, check);
            }
            "delay_loop" | "retry" | "nb_get_retry" | "delay_before_retry" | "connect_timeout"
            | "virtualhost" | "warmup" => {}
            "alpha" if !is_on(item) || outer.find("alpha").is_some_and(is_on) => {}
            name if name.ends_with("_CHECK") => {
                server.lost.push(match server.check.is_empty() {
                    true => format!("{name}: the server is not checked"),
                    false => format!("{name}: the server is checked without it"),
                });
                if server.check.is_empty() {
                    server.check = checks::none();
                }
            }
            "" => {}
            _ => server.lost.push(item.text()),
        }
    }
    Ok(server)
}

/// keepalived wants all checks of a server to succeed; here it has one, the one that tells most.
fn add_check(server: &mut Server, check: checks::Check) {
    let other = if server.check.is_empty() || checks::depth(&check) > checks::depth(&server.check) {
        std::mem::replace(&mut server.check, check)
    } else {
        check
    };
    if let Some(kind) = other.get("type") {
        server.lost.push(format!(
            "a second check, {}: a server has one check here",
            kind.trim_matches('"')
        ));
    }
}
