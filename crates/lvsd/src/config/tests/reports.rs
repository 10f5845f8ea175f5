//! Positions, order and number of findings.

use super::*;

#[test]
fn errors_of_a_file_are_all_reported_with_position_and_fix() {
    let found = errors(
        r#"[[service]]
name = "web"
adress = "192.0.2.10:80"
scheduler = "wcl"
forward = "masq"
check = { type = "tcp", intervall = "5s", timeout = 2 }
[[service.server]]
address = "10.0.0.11:80"
weight = "5"
"#,
    );
    assert_eq!(
        found,
        r#"error: unknown key `adress`
 --> test.toml:3:1
  |
3 | adress = "192.0.2.10:80"
  | ^^^^^^ not a key of this table
  |
  = help: did you mean `address`?

error: unknown scheduler `wcl`
 --> test.toml:4:13
  |
4 | scheduler = "wcl"
  |             ^^^^^
  |
  = help: did you mean "wlc"? the schedulers are: dh, ewma, fo, lblc, lblcr, lc, mh, none, nq, ovf, rr, sed, sh, twos, wlc, wrr

error: unknown forwarding method `masq`
 --> test.toml:5:11
  |
5 | forward = "masq"
  |           ^^^^^^
  |
  = help: write "nat"

error: unknown key `intervall`
 --> test.toml:6:25
  |
6 | check = { type = "tcp", intervall = "5s", timeout = 2 }
  |                         ^^^^^^^^^ not a key of this table
  |
  = help: did you mean `interval`?

error: a duration needs its unit; write "2s" for 2 seconds or "2ms" for milliseconds
 --> test.toml:6:53
  |
6 | check = { type = "tcp", intervall = "5s", timeout = 2 }
  |                                                     ^

error: the value has a wrong type
 --> test.toml:9:10
  |
9 | weight = "5"
  |          ^^^ expected a whole number, found the string "5"
  |
  = help: write it without quotes: 5"#
    );
}

#[test]
fn string_of_wrong_type_is_reported_as_written() {
    let text = "[[service]]\naddress = \"192.0.2.10:80\"\n[[service.server]]\naddress = \"10.0.0.1\"\nweight = \"roadmap\"\n";
    let report = Config::from_toml("test.toml", text).expect_err("the invalid file is accepted");
    let report = report.to_string();
    assert!(report.contains("found the string \"roadmap\""), "{report}");
}

#[test]
fn file_with_warnings_only_is_accepted() {
    let text = "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\ncheck = { type = \"tcp\", interval = \"1s\", timeout = \"3s\" }\n[[service.server]]\naddress = \"10.0.0.1\"\n";
    let (_, warnings) = Config::from_toml("test.toml", text).unwrap();
    assert!(
        warnings.to_string().contains("longer than the interval"),
        "no `longer than the interval` in {warnings}"
    );
}

#[test]
fn missing_configuration_file_is_an_error() {
    let error = Config::load(Path::new("/nonexistent/lvsd.toml")).unwrap_err();
    assert!(
        matches!(&error, LoadError::Read { path, source }
            if path == "/nonexistent/lvsd.toml" && source.kind() == ErrorKind::NotFound),
        "{error}"
    );
}

proptest::proptest! {
    /// Any text yields a configuration or a report.
    #[test]
    fn configuration_parser_does_not_panic_on_any_text(at in 0..FULL.len(), length in 0usize..20, new in "[\\[\\]{}=\"\\n a-z0-9é.]{0,8}") {
        let mut text = FULL.to_owned();
        let end = (at + length).min(text.len());
        text.replace_range(at..end, &new);
        if let Err(report) = Config::from_toml("test.toml", &text) {
            proptest::prop_assert!(!report.to_string().is_empty());
        }
    }
}

#[test]
fn unreadable_file_is_reported_with_fix_and_non_utf8_file_with_position() {
    let message = |path: &Path| {
        Config::load(path)
            .expect_err("a missing file is accepted")
            .to_string()
    };
    let directory = tempfile::tempdir().unwrap();
    let here = message(directory.path());
    assert!(
        here.contains("name a file in this directory"),
        "no `name a file in this directory` in {here}"
    );
    let file = directory.path().join("lvsd.toml");
    assert!(message(&file).contains("put the configuration there"));
    std::fs::write(&file, b"[lvsd]\nlog = \"\xe4\"\n").unwrap();
    let latin = Config::load(&file).expect_err("a file that is not UTF-8 is accepted");
    assert!(
        matches!(
            latin,
            LoadError::NotText {
                line: 2,
                offset: 14,
                byte: 0xe4,
                ..
            }
        ),
        "{latin}"
    );

    // Root may read every file, so the test constructs this error.
    let denied = LoadError::Read {
        path: "lvsd.toml".to_owned(),
        source: ErrorKind::PermissionDenied.into(),
    };
    assert!(
        denied
            .to_string()
            .contains("permit the user of lvsd to read the file"),
        "no `permit the user of lvsd to read the file` in {denied}"
    );
}

/// The files have errors in 37,205 servers, or in as many keys of one table or items of an array. If
/// the time were not proportional to their number, the test would take very long.
#[test]
fn errors_of_long_file_are_all_counted_and_first_20_printed() {
    const N: usize = 37_205;
    let mut servers = String::from("[[service]]\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n");
    let mut keys = String::from("[lvsd]\n");
    let mut sysctls = String::from("[sysctl]\n");
    let mut values = String::from("[dataplane]\ninterface = [");
    let mut methods = String::from(
        "[[service]]\naddress = \"192.0.2.1:80\"\nscheduler = \"ewma\"\nforward = \"dr\"\n",
    );
    for n in 0..N {
        let host = format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255);
        servers.push_str(&format!("[[service.server]]\nadress = \"{host}:80\"\n"));
        methods.push_str(&format!("[[service.server]]\naddress = \"{host}:80\"\n"));
        keys.push_str(&format!("key{n} = 1\n"));
        sysctls.push_str(&format!("key{n} = []\n"));
        values.push_str("1, true, ");
    }
    values.push_str("]\n");
    for (text, findings) in [
        (&servers, N),
        (&keys, N),
        (&sysctls, N),
        (&values, 2 * N),
        (&methods, 1),
    ] {
        let report = report(text);
        let errors = report.errors();
        assert_eq!(errors, findings, "{report}");
        let message = report.to_string();
        assert_eq!(message.matches("error: ").count(), findings.min(20));
        if findings > 20 {
            let rest = format!("and {} more: {findings} errors", findings - 20);
            assert!(message.contains(&rest), "no {rest:?} in {message}");
        }
    }
}

/// The input resembles a file of a faulty generator.
#[test]
#[ignore = "long"]
fn report_of_very_many_findings_is_bounded_and_contains_error_after_warnings() {
    let mut keys = String::from("[lvsd]\n");
    for n in 0..150_000 {
        keys.push_str(&format!("key{n} = 1\n"));
    }
    let report = report(&keys);
    assert_eq!((report.errors(), report.findings.len()), (100_000, 1000));
    let message = report.to_string();
    assert_eq!(message.matches("error: ").count(), 20);
    let rest = "and 99980 more: 100000 errors, 0 warnings in all; lvsd has stopped reading";
    assert!(
        message.ends_with(rest),
        "does not end with {rest:?}: {message}"
    );

    // Memory for valid services is bounded, too.
    let services = format!(
        "[[service]]\naddress = [{}]\nforward = \"nat\"\n",
        "\"192.0.2.1:80\", ".repeat(200_000)
    );
    for text in [services, "[[service]]\n".repeat(300_000)] {
        let message = self::report(&text).to_string();
        assert!(
            message.contains("there are more than 100000 services"),
            "no `there are more than 100000 services` in {message}"
        );
    }

    // Invalid mark rules also count towards the limit.
    for (rule, errors) in [
        ("drop = true\nsource = \"192.0.2.1\"\n", 1),
        // One error about the unknown key, and two about missing keys of each rule.
        ("a = 1\n", 1 + 2 * 1024),
    ] {
        let report = self::report(&format!("[[mark]]\n{rule}").repeat(150_000));
        assert_eq!(report.errors(), errors, "{report}");
        let all = report.findings.iter();
        let title = "there are more than 1024 rules for marks";
        assert_eq!(all.filter(|finding| finding.title == title).count(), 1);
    }

    // The parser finds an error on each line, and stores all within its reach.
    let syntax = format!("{}=\n", "a = \n".repeat(200_000));
    let report = self::report(&syntax);
    assert!(
        (20..=1000).contains(&report.errors()),
        "{}",
        report.errors()
    );

    // Many warnings do not hide an error after them.
    let mut warned = String::new();
    for n in 0..1200 {
        let (high, low) = (n >> 8, n & 255);
        warned.push_str(&format!(
            "[[service]]\naddress = \"10.9.{high}.{low}:80\"\nforward = \"nat\"\n"
        ));
    }
    warned.push_str("check = { type = \"tcp\", rise = 0 }\n");
    let report = self::report(&warned);
    assert_eq!((report.errors(), report.findings.len()), (1, 1001));
    let message = report.to_string();
    assert!(
        message.contains("`rise` is out of range"),
        "no \"`rise` is out of range\" in {message}"
    );
    assert!(
        message.ends_with("and 1181 more: 1 error, 1200 warnings in all"),
        "does not end with `and 1181 more: 1 error, 1200 warnings in all`: {message}"
    );
}

/// The renderer receives only the lines of the finding, but prints line numbers of the whole file.
#[test]
fn finding_far_down_in_a_file_is_shown_with_its_line() {
    let mut text = "# a comment\n".repeat(5000);
    text.push_str("[[service]]\nnane = \"web\"\n# end\n");
    let message = errors(&text);
    for words in [
        "test.toml:5002:1",
        "5002 | nane = \"web\"",
        "did you mean `name`?",
    ] {
        assert!(message.contains(words), "no {words:?} in {message}");
    }
    assert!(
        !message.contains("# end") && !message.contains("[[service]]\n"),
        "unexpected `# end` or unexpected `[[service]]` in {message}"
    );
}

#[test]
fn error_after_29_warnings_is_among_the_20_shown_findings() {
    let mut text = String::new();
    for n in 1..30 {
        text.push_str(&format!(
            "[[service]]\naddress = \"192.0.2.{n}:80\"\nforward = \"nat\"\n"
        ));
    }
    text.push_str("check = { type = \"tcp\", rise = 0 }\n");
    let message = errors(&text);
    assert!(
        message.contains("`rise` is out of range"),
        "no \"`rise` is out of range\" in {message}"
    );
    assert_eq!(message.matches("warning: ").count(), 19);
    assert!(
        message.contains("and 10 more: 1 error, 29 warnings in all"),
        "no `and 10 more: 1 error, 29 warnings in all` in {message}"
    );
}

#[test]
fn common_mistakes_in_configuration_are_reported_once_with_position_and_cause() {
    let service = |address: &str| {
        format!(
            "[[service]]\naddress = \"{address}\"\nforward = \"nat\"\ncheck = \"none\"\n[[service.server]]\naddress = \"10.0.0.1:80\"\n"
        )
    };
    for (text, place, help) in [
        ("[[services]]\naddress = \"192.0.2.1:80\"\n".to_owned(), "1:3 unknown key `services`", "write [[service]]"),
        ("[[service.server]]\naddress = \"10.0.0.1:80\"\n".into(), "1:3 `[[service.server]]` has no [[service]] above it", "write [[service]] and its address first"),
        ("[[service.server]]\naddress = \"10.0.0.1:80\"\n[[service]]\naddress = \"192.0.2.1:80\"\n".into(), "1:1 `[[service.server]]` has no [[service]] above it", "move it after the [[service]]"),
        ("[service]\naddress = \"192.0.2.1:80\"\n[[service.server]]\naddress = \"10.0.0.1:80\"\n".into(), "1:1 the value has a wrong type", "double brackets"),
        ("[dataplane]\nfast_path = [\"on\"]\n".into(), "2:13 the value has a wrong type", "write it without brackets: \"on\"\n"),
        ("[dataplane]\nfast_path = [\n  'on', ]\n".into(), "2:13 the value has a wrong type", "write it without brackets: 'on'\n"),
        ("[dataplane]\nfast_path = [\"off\", \"on\"]\n".into(), "2:13 the value has a wrong type", "write one value, without brackets\n"),
        ("[dataplane]\nfast_path = []\n".into(), "2:13 the value has a wrong type", "write one value, without brackets\n"),
        ("[dataplane]\nfast_path = [[\"on\"]]\n".into(), "2:13 the value has a wrong type", "write one value, without brackets\n"),
        ("[dataplane]\nfast_path = { on = true }\n".into(), "2:13 the value has a wrong type", "expected a string, found a table\n"),
        ("[dataplane]\nfast_path = true\n".into(), "2:13 the value has a wrong type", "write it in quotes: \"true\"\n"),
        ("[dataplane]\ninterface = [[\"eth0\"]]\n".into(), "2:14 the value has a wrong type", "write it without brackets: \"eth0\"\n"),
        ("[dataplane]\nmax_connections = [5]\n".into(), "2:19 the value has a wrong type", "write it without brackets: 5\n"),
        ("[dataplane]\nhang_limit = [\"5s\"]\n".into(), "2:14 the value has a wrong type", "write it without brackets: \"5s\"\n"),
        (service("2001:db8::1:443"), "2:11 `2001:db8::1:443` is ambiguous", "\"[2001:db8::1]:443\" for the port 443"),
        (service("192.0.2.1:99999"), "2:11 99999 in `192.0.2.1:99999` is not a port", "between 1 and 65535"),
        (service("192.0.2.256:80"), "2:11 256 in `192.0.2.256:80` is not a part of an IPv4 address", "between 0 and 255"),
        (service("192.0.02.1:80"), "2:11 `192.0.02.1:80` has a number with a leading zero", "octal"),
        (service("web.example.org:80"), "2:11 `web.example.org:80` is not an address and a port", "names are not resolved"),
        ("[[service]]\nname = \u{201c}web\u{201d}\n".into(), "2:8 a typographic quotation mark (U+201C) is not TOML", "an ASCII one"),
        ("[[service]]\nname\u{a0}= \"web\"\n".into(), "2:5 a non-breaking space (U+00A0) is not TOML", "an ordinary space"),
        ("[[service]]\nname = \"web\n".into(), "2:12 not valid TOML: invalid basic string, expected `\"`", "partly written"),
        ("[[service]]\nchecks = [{ a = 1 }, { b = [".into(), "2:29 not valid TOML: unclosed array, expected `]`", "partly written"),
        ("[[mark]]\ndestination = \"192.0.2.1/33\"\nmark = 1\n".into(), "2:15 `destination` of a rule for marks: 192.0.2.1/33: expected an address, or a network such as 192.0.2.0/24", ""),
        ("[[mark]]\nmark = 1\nports = \"80-70\"\ndestination = \"192.0.2.1\"\n".into(), "3:9 `ports` of a rule for marks: 80-70: the end of the range is lower than its beginning", ""),
        ("[[mark]]\nmark = 1\ninterface = \"a b\"\ndestination = \"192.0.2.1\"\n".into(), "3:13 `interface` of the rule is not the name of an interface", ""),
    ] {
        let reported = reported(&text);
        let errors: Vec<_> = reported.iter().filter(|t| !t.contains("there is no [[service]]")).collect();
        assert_eq!(errors, [place], "{text}");
        let message = self::errors(&text) + "\n";
        assert!(message.contains(help), "{text}: no {help:?} in {message}");
    }
}

#[test]
fn loopback_server_causes_warning_with_nat_but_not_with_dr_or_proxy() {
    for (forward, warns) in [("nat", true), ("dr", false), ("proxy", false)] {
        let text = format!(
            "[[service]]\naddress = \"192.0.2.10:8080\"\nforward = \"{forward}\"\ncheck = {{ type = \"tcp\" }}\n[[service.server]]\naddress = \"127.0.0.1:8080\"\n"
        );
        let (_, warnings) = Config::from_toml("test.toml", &text).unwrap();
        let warnings = warnings.to_string();
        assert_eq!(
            warnings.contains("cannot reach the server"),
            warns,
            "{forward}: {warnings}"
        );
    }
}

/// The parser reports the start of a key with too many parts, far from its end.
#[test]
fn key_of_100000_parts_or_unterminated_long_string_causes_exactly_one_error() {
    let long = ["a"; 100_000].join(".");
    for text in [
        format!("{long} = 1\n"),
        format!("[{long}]\n"),
        format!("[[service]]\n{long} = 1\n"),
        format!("a = {{ {long} = 1 }}\n"),
        format!("a = \"{}\n", "x".repeat(200_000)),
    ] {
        let report = Config::from_toml("test.toml", &text).unwrap_err();
        assert_eq!(report.errors(), 1, "{}", &text[..40]);
    }
}
