//! Converts keepalived's health checks.
//!
//! lvsd's own parser reads each result. Keys that it refuses are omitted, or the check is replaced;
//! both are reported.

use super::item::{Item, is_on};
use super::pcre;
use super::service::{Keys, duration, port, quote, table};
use crate::config::Config;

/// A check's keys and their values, in TOML.
pub(super) type Check = Keys;

/// A kind of check: keepalived's name, lvsd's name, and the keywords that are not reported as lost,
/// in addition to [`RHYTHM`].
type Known = (&'static str, &'static str, &'static [&'static str]);

const KNOWN: &[Known] = &[
    ("TCP_CHECK", "tcp", &["connect_port"]),
    (
        "HTTP_GET",
        "http",
        // lvsd always checks all pages, as keepalived does with `fast_recovery`.
        &[
            "connect_port",
            "url",
            "virtualhost",
            "nb_get_retry",
            "fast_recovery",
        ],
    ),
    (
        "SSL_GET",
        "https",
        // lvsd always sends SNI if the file sets a name.
        &[
            "connect_port",
            "url",
            "virtualhost",
            "nb_get_retry",
            "fast_recovery",
            "enable_sni",
        ],
    ),
    ("SMTP_CHECK", "smtp", &["connect_port", "helo_name", "host"]),
    ("DNS_CHECK", "dns", &["connect_port", "name", "type"]),
    (
        "UDP_CHECK",
        "udp",
        &["connect_port", "payload", "require_reply"],
    ),
    ("PING_CHECK", "ping", &[]),
    (
        "MISC_CHECK",
        "exec",
        &["misc_path", "misc_timeout", "misc_dynamic", "user"],
    ),
];

/// Keywords of every kind of check: intervals, timeouts and retries.
const RHYTHM: &[&str] = &[
    "delay_loop",
    "retry",
    "connect_timeout",
    "delay_before_retry",
    "",
];

/// Maximum interval and retry delay of a check in seconds.
const DAY: f64 = 86_400.0;
/// Maximum timeout of a check in seconds.
const TIMEOUT_MAX: f64 = 600.0;
/// Maximum of lvsd's `fall`.
const FALL_MAX: f64 = 1000.0;

/// The reason why `warmup` is not converted.
pub(super) const WARMUP: &str =
    "first checks are not delayed; a server is not used before its first check";

/// Enclosing blocks and other settings of a check.
pub(super) struct Context<'a> {
    /// Blocks with default settings for this one, the innermost first.
    pub(super) around: [&'a Item; 2],
    /// Port of the server; 0 if it has none.
    pub(super) port: u16,
    /// Default user of check scripts.
    pub(super) script_user: Option<&'a str>,
}

/// Whether lvsd has an equivalent of this check.
pub(super) fn is_known(name: &str) -> bool {
    KNOWN.iter().any(|(known, ..)| *known == name)
}

/// lvsd's name of a kind of check; `None` if lvsd has no equivalent.
pub(super) fn kind(name: &str) -> Option<&'static str> {
    let known = KNOWN.iter().find(|(known, ..)| *known == name);
    known.map(|(_, kind, _)| *kind)
}

/// Depth of a check: 0 without a check, 1 for `ping`, 2 for `tcp`, 3 for every other type.
pub(super) fn depth(check: &Check) -> u8 {
    match check.get("type").map(String::as_str) {
        None => 0,
        Some("\"ping\"") => 1,
        Some("\"tcp\"") => 2,
        Some(_) => 3,
    }
}

/// The check `"none"`: lvsd does not check the server.
pub(super) fn none() -> Check {
    Check::from([("none", String::new())])
}

/// The error with which lvsd refuses a check; `None` if the check is valid.
pub(super) fn refused(check: &Check) -> Option<String> {
    let text = format!(
        "[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\ncheck = {}\n\
         [[service.server]]\naddress = \"192.0.2.2:80\"\n",
        table(check)
    );
    Config::from_toml("check", &text).err()?;
    super::refused(&text)
}

/// Removes from a check the keys of `optional` that lvsd refuses, and returns them with the
/// reasons. `Err` is the error that remains if the check is not valid without these keys.
pub(super) fn repaired(
    check: &mut Check,
    optional: &[&'static str],
) -> Result<Vec<String>, String> {
    let mut out = Vec::new();
    while let Some(why) = refused(check) {
        let is_at_fault = |key: &&&'static str| {
            let mut without = check.clone();
            without.remove(**key).is_some() && refused(&without).as_ref() != Some(&why)
        };
        let Some(key) = optional.iter().find(is_at_fault) else {
            return Err(why);
        };
        let value = check.remove(key).unwrap_or_default();
        out.push(format!("{key} = {value}: {why}"));
    }
    Ok(out)
}

/// The number of a timing statement, if keepalived accepts it. A check may have 0 retries, other
/// blocks may not.
fn timing(item: &Item, of_check: bool) -> Option<f64> {
    let word = item.word(1);
    let plain = word
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = word.parse().ok().filter(|_| plain)?;
    let least = match item.name() {
        "retry" | "nb_get_retry" if of_check => 0.0,
        "retry" => 1.0,
        "delay_before_retry" | "misc_timeout" => 0.0,
        _ => 0.000_001,
    };
    (number >= least).then_some(number)
}

/// The message about a time or number of retries that keepalived refuses or lvsd limits; `None` if
/// the statement needs no message.
pub(super) fn bad_timing(item: &Item, of_check: bool) -> Option<String> {
    let name = item.name();
    let most = match name {
        "delay_loop" | "delay_before_retry" => DAY,
        "connect_timeout" | "misc_timeout" => TIMEOUT_MAX,
        "retry" => FALL_MAX - 1.0,
        "nb_get_retry" if of_check => FALL_MAX - 1.0,
        _ => return None,
    };
    match timing(item, of_check) {
        None => Some(item.lost(
            "keepalived refuses this number: the value of the enclosing block applies, or the default",
        )),
        Some(number) if number > most => Some(item.lost(&format!("lvsd uses {most}"))),
        Some(number) if number > 0.0 && number < 0.01 && most >= TIMEOUT_MAX && name != "retry" => {
            Some(item.lost("lvsd uses 10 ms"))
        }
        Some(_) => None,
    }
}

/// The setting of this name in a check or, if the check has none, in the innermost enclosing block
/// that has it.
fn setting<'a>(item: &'a Item, around: &[&'a Item], name: &str) -> Option<&'a Item> {
    item.find(name)
        .or_else(|| around.iter().find_map(|block| block.find(name)))
}

pub(super) fn keepalived(item: &Item, context: &Context<'_>, lost: &mut Vec<String>) -> Check {
    let name = item.name();
    let Some((_, kind, words)) = KNOWN.iter().find(|(known, ..)| *known == name) else {
        return none();
    };
    let mut check = Check::from([("type", quote(kind))]);
    for item in item.items() {
        lost.extend(bad_timing(item, true));
        let known = words.contains(&item.name()) || RHYTHM.contains(&item.name());
        let off = matches!(item.name(), "alpha" | "log_all_failures") && !is_on(item);
        if !known && !off {
            lost.push(item.lost_of(
                name,
                match item.name() {
                    "nb_get_retry" => "lvsd ignores it, as keepalived does here",
                    "warmup" => WARMUP,
                    "alpha" => "set `start_down` of the service",
                    "log_all_failures" => "`lvsd status` shows the last reason",
                    _ => "lvsd has no equivalent",
                },
            ));
        }
    }
    let host = item.find("host");
    let own = item.find("connect_port");
    let own = own.or_else(|| host?.find("connect_port"));
    let own_port = own.and_then(|item| port(item.word(1)));
    if let Some(own) = own.filter(|_| own_port.is_none()) {
        lost.push(own.lost_of(name, "the value is not a port"));
    }
    match *kind {
        "ping" | "exec" => {}
        _ if own_port.is_none() && context.port == 0 => {
            lost.push(format!(
                "{}: {name}: without a port, no check is possible",
                item.at()
            ));
            return none();
        }
        _ => {
            if let Some(port) = own_port.filter(|port| *port != 0) {
                check.insert("port", port.to_string());
            }
        }
    }
    rhythm(item, &context.around, &mut check);
    match *kind {
        "http" | "https" => pages(item, &context.around, &mut check, lost),
        "smtp" => mail(item, &mut check, lost),
        "dns" => {
            if let Some(item) = item.find("name") {
                check.insert("name", quote(item.word(1)));
            }
            if let Some(item) = item.find("type") {
                check.insert("record", quote(&item.word(1).to_ascii_uppercase()));
            }
        }
        "udp" => datagram(item, &mut check, lost),
        "exec" => {
            if let Err(why) = program(item, context, &mut check, lost) {
                lost.push(format!(
                    "{}: {name}: {why}: the server is not checked",
                    item.at()
                ));
                return none();
            }
        }
        _ => {}
    }
    let optional = [
        "host",
        "helo",
        "name",
        "record",
        "payload_hex",
        "reply_hex",
        "user",
        "port",
    ];
    match repaired(&mut check, &optional) {
        Ok(out) => {
            lost.extend(
                out.iter()
                    .map(|what| format!("{}: {name}: {what}", item.at())),
            );
            check
        }
        Err(why) => instead(item, kind, check, &why, lost),
    }
}

/// Replaces a check that lvsd refuses by a TCP check, or by no check if that is not possible.
fn instead(item: &Item, kind: &str, mut check: Check, why: &str, lost: &mut Vec<String>) -> Check {
    let (name, at) = (item.name(), item.at());
    let stream = matches!(kind, "http" | "https" | "smtp" | "tcp");
    let common = [
        "port",
        "interval",
        "fast_interval",
        "timeout",
        "rise",
        "fall",
    ];
    check.retain(|key, _| common.contains(key));
    check.insert("type", quote("tcp"));
    if stream && refused(&check).is_none() {
        lost.push(format!(
            "{at}: {name}: {why}: a TCP connection is checked instead"
        ));
        return check;
    }
    lost.push(format!("{at}: {name}: {why}: the server is not checked"));
    none()
}

/// Converts the interval, the timeout and the retries.
fn rhythm(item: &Item, around: &[&Item], check: &mut Check) {
    // The last valid number in the innermost block that has one.
    let last = |block: &Item, name: &str, of_check: bool| {
        let named = block
            .items()
            .iter()
            .rev()
            .filter(|item| item.name() == name);
        named.filter_map(|item| timing(item, of_check)).next()
    };
    let own = |name: &str| last(item, name, true);
    let number =
        |name: &str| own(name).or_else(|| around.iter().find_map(|block| last(block, name, false)));
    let interval = number("delay_loop").unwrap_or(60.0).clamp(0.01, DAY);
    let name = item.name();
    let pages = matches!(name, "HTTP_GET" | "SSL_GET");
    let timeout = match name {
        // keepalived limits a program's run time to the interval.
        "MISC_CHECK" => own("misc_timeout")
            .filter(|seconds| *seconds > 0.0)
            .unwrap_or(interval),
        _ => number("connect_timeout").unwrap_or(5.0),
    };
    let of_pages = match pages {
        true => own("retry").or_else(|| own("nb_get_retry")),
        false => None,
    };
    let retry = of_pages.or_else(|| number("retry")).unwrap_or(match name {
        "MISC_CHECK" => 0.0,
        "DNS_CHECK" => 3.0,
        _ => 1.0,
    });
    let fall = (retry.trunc() + 1.0).clamp(1.0, FALL_MAX);
    let pause = number("delay_before_retry").unwrap_or(match name {
        "DNS_CHECK" => interval,
        _ if pages => 3.0,
        _ => 1.0,
    });
    check.insert("interval", duration(interval));
    check.insert("timeout", duration(timeout.clamp(0.01, TIMEOUT_MAX)));
    check.insert("rise", "1".to_owned());
    check.insert("fall", format!("{fall:.0}"));
    // keepalived delays only retries.
    if fall > 1.0 {
        check.insert("fast_interval", duration(pause.clamp(0.01, DAY)));
    }
}

/// A keyword that changes the meaning of `regex` and has no equivalent in lvsd; `None` if `url`
/// contains none.
fn changes_meaning(url: &Item) -> Option<String> {
    for word in ["regex_no_match", "regex_min_offset", "regex_max_offset"] {
        if url.find(word).is_some() {
            return Some(word.to_owned());
        }
    }
    let options = url.find("regex_options")?.rest(1);
    let mut options = options.split_whitespace();
    let other = options.find(|word| *word != "caseless")?;
    Some(format!("regex_options {other}"))
}

/// Converts a check of web pages (`HTTP_GET`, `SSL_GET`) to keys of `check`.
fn pages(item: &Item, around: &[&Item], check: &mut Check, lost: &mut Vec<String>) {
    let name = item.name();
    let outer = setting(item, around, "virtualhost").map(|item| item.word(1).to_owned());
    let mut hosts = Vec::new();
    let mut pages = Vec::new();
    for url in item.items().iter().filter(|item| item.name() == "url") {
        let mut page = Check::new();
        let mut own = outer.clone();
        for item in url.items() {
            match item.name() {
                "path" => {
                    let (path, named) = path(item, name, lost);
                    page.insert("path", quote(&path));
                    own = own.or(named);
                }
                "status_code" => {
                    if let Some(ranges) = statuses(item, name, lost) {
                        page.insert("status", quote(&ranges));
                    }
                }
                "regex" => match changes_meaning(url) {
                    Some(word) => lost.push(
                        item.lost_of(name, &format!("without `{word}` the check would differ")),
                    ),
                    None => {
                        let regex = item.escaped().into_iter().next().unwrap_or_default();
                        let caseless = url.find("regex_options").is_some();
                        match pcre::converted(&regex, caseless) {
                            _ if regex.is_empty() => {}
                            Ok(regex) => {
                                page.insert("regex", quote(&regex));
                            }
                            Err(why) => lost.push(item.lost_of(name, &why)),
                        }
                    }
                },
                "regex_options" if item.rest(1) == "caseless" => {}
                "virtualhost" => own = Some(item.word(1).to_owned()),
                "digest" => lost.push(item.lost_of(name, "pages are not compared by their digest")),
                "" => {}
                _ => lost.push(item.lost_of(name, "lvsd has no equivalent")),
            }
        }
        if url.find("path").is_none() {
            lost.push(url.lost_of(
                name,
                "keepalived ignores a url without a path; lvsd requests /",
            ));
        }
        hosts.push((url, own.filter(|host| !host.is_empty())));
        for what in repaired_page(&mut page) {
            lost.push(url.lost_of(name, &what));
        }
        pages.push(page);
    }
    let host = hosts.iter().find_map(|(_, host)| host.clone());
    for (url, own) in hosts.iter().filter(|(_, own)| *own != host) {
        let own = own.as_deref().unwrap_or("none");
        let first = host.as_deref().unwrap_or_default();
        let why = format!("virtualhost {own}: a check has one host name for all pages: {first}");
        lost.push(url.lost_of(name, &why));
    }
    let host = host.or(outer).filter(|host| !host.is_empty());
    if let Some(host) = host {
        check.insert("host", quote(&host));
    }
    match pages.as_mut_slice() {
        [] => lost.push(item.lost_of(
            "url",
            "without a url keepalived exits again and again; lvsd requests /",
        )),
        [one] => check.append(one),
        many => {
            let many: Vec<String> = many.iter().map(table).collect();
            check.insert("urls", format!("[{}]", many.join(", ")));
        }
    }
}

/// Removes from a page the keys that lvsd refuses, and returns them with the reasons. A page that
/// would still be invalid stays unchanged.
fn repaired_page(page: &mut Check) -> Vec<String> {
    let mut check = page.clone();
    check.insert("type", quote("http"));
    match repaired(&mut check, &["regex", "status", "path"]) {
        Ok(out) => {
            check.remove("type");
            *page = check;
            out
        }
        Err(_) => Vec::new(),
    }
}

/// The path of a page; also the host if the URL is absolute.
fn path(item: &Item, name: &str, lost: &mut Vec<String>) -> (String, Option<String>) {
    let argument = item.word(1);
    let whole = argument
        .strip_prefix("http://")
        .or_else(|| argument.strip_prefix("https://"));
    let (host, path) = match whole {
        Some(rest) => {
            let end = rest.find('/').unwrap_or(rest.len());
            let host = rest[..end].to_owned();
            (Some(host).filter(|host| !host.is_empty()), &rest[end..])
        }
        None => (None, argument),
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut written = slash.to_owned();
    for c in path.chars() {
        match c {
            c if c.is_ascii_graphic() => written.push(c),
            c => {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    written.push_str(&format!("%{byte:02X}"));
                }
            }
        }
    }
    if written != argument {
        lost.push(item.lost_of(name, &format!("lvsd requests {written}")));
    }
    (written, host)
}

/// Converts status codes such as `200 301-302 4xx` to ranges, and reports invalid ones. `None` if
/// none is valid.
fn statuses(item: &Item, name: &str, lost: &mut Vec<String>) -> Option<String> {
    let code = |text: &str| {
        text.parse::<u16>()
            .ok()
            .filter(|code| (100..=999).contains(code))
    };
    let mut ranges = Vec::new();
    for n in 1..item.len() {
        let word = item.word(n);
        let class = word.strip_suffix("xx").or_else(|| word.strip_suffix("XX"));
        let class = class.filter(|class| matches!(*class, "1" | "2" | "3" | "4" | "5"));
        let range = match (class, word.split_once('-')) {
            (Some(class), _) => Some(format!("{class}00-{class}99")),
            (None, Some((first, last))) => match (code(first), code(last)) {
                (Some(first), Some(last)) if first <= last => Some(format!("{first}-{last}")),
                _ => None,
            },
            (None, None) => code(word).map(|code| code.to_string()),
        };
        match range {
            Some(range) => ranges.push(range),
            None => lost.push(item.lost_of(name, &format!("`{word}` is not a status"))),
        }
    }
    (!ranges.is_empty()).then(|| ranges.join(","))
}

fn mail(item: &Item, check: &mut Check, lost: &mut Vec<String>) {
    let name = item.name();
    if let Some(item) = item.find("helo_name")
        && !item.word(1).is_empty()
    {
        check.insert("helo", quote(item.word(1)));
    }
    let hosts: Vec<&Item> = item
        .items()
        .iter()
        .filter(|item| item.name() == "host")
        .collect();
    for (n, host) in hosts.iter().enumerate() {
        if n + 1 < hosts.len() {
            lost.push(host.lost_of(name, "a check has one host name: the last one"));
            continue;
        }
        for item in host
            .items()
            .iter()
            .filter(|item| item.name() != "connect_port")
        {
            lost.push(item.lost_of(name, "lvsd has no equivalent"));
        }
    }
}

/// Converts a `UDP_CHECK` to keys of `check`.
fn datagram(item: &Item, check: &mut Check, lost: &mut Vec<String>) {
    if let Some(payload) = item.find("payload") {
        match hex(&payload.rest(1)) {
            Some(bytes) if !payload.rest(1).contains(['x', 'X']) => {
                check.insert("payload_hex", quote(&bytes.join(" ")));
            }
            _ => lost.push(payload.lost_of("UDP_CHECK", "it is not hexadecimal")),
        }
    }
    match item.find("require_reply") {
        None => {
            check.insert("silence", quote("up"));
        }
        Some(reply) if reply.word(1).is_empty() => {}
        Some(reply) => match hex(&reply.rest(1)) {
            Some(bytes) => {
                let half = |byte: &String| byte != "XX" && byte.contains('X');
                if bytes.iter().any(half) {
                    lost.push(reply.lost_of(
                        "UDP_CHECK",
                        "lvsd can ignore only whole bytes: it ignores each byte that keepalived ignores in part",
                    ));
                }
                let bytes: Vec<&str> = bytes
                    .iter()
                    .map(|byte| if half(byte) { "XX" } else { byte })
                    .collect();
                check.insert("reply_hex", quote(&bytes.join(" ")));
            }
            None => {
                lost.push(
                    reply.lost_of("UDP_CHECK", "it is not hexadecimal: any reply is accepted"),
                );
            }
        },
    }
}

/// Parses hexadecimal bytes: `Ab12f 3 456` is AB 12 0F 03 45 06. `X` matches any half of a byte.
/// `None` if another character occurs.
fn hex(text: &str) -> Option<Vec<String>> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        let digits: Vec<char> = word
            .chars()
            .map(|c| if c == 'x' { 'X' } else { c })
            .collect();
        if !digits.iter().all(|c| c.is_ascii_hexdigit() || *c == 'X') {
            return None;
        }
        for pair in digits.chunks(2) {
            bytes.push(match pair {
                ['X'] => "XX".to_owned(),
                [one] => format!("0{one}"),
                pair => pair.iter().collect(),
            });
        }
    }
    Some(bytes)
}

/// Converts a check script (`MISC_CHECK`) to keys of `check`; an error if it has no usable command.
fn program(
    item: &Item,
    context: &Context<'_>,
    check: &mut Check,
    lost: &mut Vec<String>,
) -> Result<(), String> {
    let name = item.name();
    let path = item.find("misc_path").ok_or("it has no misc_path")?;
    let mut words = path.escaped();
    if words.len() > 1 {
        let more = words.split_off(1).join(" ");
        let why = format!("keepalived ignores `{more}`: it reads the text within the first quotes");
        lost.push(path.lost_of(name, &why));
    }
    let command = self::words(&words.concat());
    match command.first() {
        Some(program) if program.starts_with('/') => {}
        program => {
            let program = program.map_or("", String::as_str);
            return Err(format!("`{program}` is not a complete path"));
        }
    }
    check.insert("command", list(&command));
    if item.find("misc_dynamic").is_some_and(is_on) {
        check.insert("dynamic", "true".to_owned());
    }
    let user = item.find("user");
    if let Some(item) = user.filter(|item| item.len() > 2) {
        lost.push(item.lost_of(name, "lvsd uses the group of the user"));
    }
    match user.map(|item| item.word(1)).or(context.script_user) {
        Some(user) => {
            check.insert("user", quote(user));
        }
        None => lost.push(format!(
            "{}: {name}: no `user`: the program runs as nobody, not as keepalived_script or root; set `user` of the check",
            item.at()
        )),
    }
    Ok(())
}

pub(super) fn list(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
    format!("[{}]", words.join(", "))
}

/// Splits a command line into words like a shell, without expanding variables.
pub(super) fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    let mut all = line.chars();
    while let Some(c) = all.next() {
        match (quote, c) {
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().extend(all.next()),
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_command_line_is_split_into_words_like_in_a_shell() {
        for (line, expected) in [
            ("/bin/x  a\tb", &["/bin/x", "a", "b"][..]),
            (
                "/bin/x 'a b' \"c \\\" d\" ''",
                &["/bin/x", "a b", "c \" d", ""][..],
            ),
            ("/bin/x a\\ b\"c\"'d'", &["/bin/x", "a bcd"][..]),
            ("'open", &["open"][..]),
            ("", &[][..]),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }

    #[test]
    fn udp_payload_hex_digits_are_split_into_bytes_like_in_keepalived() {
        let bytes = hex("Ab12f 3 456 546443123").unwrap();
        assert_eq!(bytes.join(" "), "Ab 12 0f 03 45 06 54 64 43 12 03");
        assert_eq!(hex("22 xx X").unwrap().join(" "), "22 XX XX");
        assert_eq!(hex("22 no"), None);
    }
}
