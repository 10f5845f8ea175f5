//! Converts published files of other programs to files that `lvsd check` accepts, with expected
//! losses. `convert/README.md` lists the sources of the files.

use std::path::{Path, PathBuf};
use std::process::Command;

use lvsd::config::Config;
use lvsd::convert::{Converted, Options, convert, kind};

const OPTIONS: Options<'static> = Options {
    include: &|_, _| Err("no such file".to_owned()),
    config_id: None,
};

fn converted(path: &Path) -> Result<Converted, String> {
    let text =
        String::from_utf8_lossy(&std::fs::read(path).expect("the file can be read")).into_owned();
    let name = path.display().to_string();
    let kind = kind(&name, &text).ok_or("the format is unknown")?;
    convert(kind, &name, &text, &OPTIONS)
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|end| end != "md" && end != "sh" && end != "gz")
        })
        .collect();
    all.sort();
    all
}

fn checked(path: &Path) -> (Converted, Config) {
    let converted = converted(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    match Config::from_toml("converted.toml", &converted.toml) {
        Ok((config, _)) => (converted, config),
        Err(report) => panic!("{}:\n{}\n{report}", path.display(), converted.toml),
    }
}

#[test]
fn typical_files_of_keepalived_ldirectord_and_lvs_howto_are_converted() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert");
    let all = files(&directory);
    assert_eq!(all.len(), 20);
    let about =
        std::fs::read_to_string(directory.join("README.md")).expect("the README is readable");
    for path in &all {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        assert!(
            about.contains(&format!("| {name} |")),
            "README.md does not list {name}"
        );
        let (converted, config) = checked(path);
        assert!(!config.services.is_empty());
        for service in &config.services {
            assert!(!service.servers.is_empty(), "{name}: {}", service.name);
        }
        // Each omitted statement is a comment.
        let comments = converted.toml.matches("# NOT CONVERTED").count();
        assert_eq!(comments == 0, converted.lost.is_empty(), "{name}");
    }
}

/// Known numbers of services and servers, so that an empty result does not pass.
#[test]
fn typical_files_convert_to_expected_numbers_of_services_and_servers() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert");
    let counts = |name: &str| {
        let (_, config) = checked(&directory.join(name));
        let servers = config.services.iter().map(|service| service.servers.len());
        (config.services.len(), servers.sum::<usize>())
    };
    for (name, expected) in [
        ("keepalived-api-server.conf", (1, 2)),
        ("keepalived-one-line.conf", (1, 3)),
        ("keepalived-group.conf", (9, 18)),
        ("keepalived-ipv6.conf", (17, 51)),
        ("keepalived-macros.conf", (1, 2)),
        ("ldirectord-heartbeat.cf", (1, 5)),
        ("lvs_dr.conf", (6, 10)),
    ] {
        assert_eq!(counts(name), expected, "{name}");
    }
    let (_, one_line) = checked(&directory.join("keepalived-one-line.conf"));
    for server in &one_line.services[0].servers {
        let check = server
            .check
            .as_ref()
            .expect("the check after the weight is converted");
        assert_eq!(
            check.timeout.as_secs(),
            3,
            "the timeout was limited to the interval"
        );
    }
    let (_, api) = checked(&directory.join("keepalived-api-server.conf"));
    assert_eq!(
        api.services[0].config.timeout, 0,
        "`persistence_timeout 0` sets persistence"
    );
}

/// Converts the samples in Debian's packages keepalived and ldirectord, if they are installed or
/// `SAMPLES` is the directory of an unpacked package (`dpkg -x`).
#[test]
fn samples_of_debian_packages_are_converted() {
    let root = std::env::var("SAMPLES").unwrap_or_default();
    let mut seen = 0;
    for directory in [
        "/usr/share/doc/keepalived/samples",
        "/usr/share/doc/ldirectord/examples",
    ] {
        for root in ["", root.as_str()] {
            for path in files(Path::new(&format!("{root}{directory}"))) {
                // Many files contain only VRRP.
                match converted(&path) {
                    Ok(_) => {
                        checked(&path);
                        seen += 1;
                    }
                    Err(why) => assert!(
                        why.contains("no virtual server") || why == "the format is unknown",
                        "{}: {why}",
                        path.display()
                    ),
                }
            }
        }
    }
    println!("{seen} samples with virtual servers");
}

/// Lines of `convert/cases` that begin with `#=` contain the expected result.
#[test]
fn conversion_cases_yield_results_annotated_in_their_files() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert/cases");
    let all: Vec<PathBuf> = files(&directory)
        .into_iter()
        .filter(|path| path.is_file() && path.extension().is_some_and(|end| end != "inc"))
        .collect();
    assert!(all.len() > 40, "{}", all.len());
    let wrong: Vec<String> = all.iter().flat_map(|path| case(path)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Expectations of a file that are not met.
fn case(path: &Path) -> Vec<String> {
    let name = path.display().to_string();
    let text = lvsd::convert::files::read(path).expect("the file can be read");
    let expected: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("#= ")?.split_once(' '))
        .map(|(word, rest)| (word.to_owned(), rest.replace("\\n", "\n")))
        .collect();
    assert!(!expected.is_empty(), "{name} contains no expectation");
    let first = |what: &str| expected.iter().find(|(word, _)| word == what);
    let options = Options {
        include: &lvsd::convert::files::included,
        config_id: first("config-id").map(|(_, id)| id.as_str()),
    };
    let kind = kind(&name, &text).expect("the format is detected");
    let done = match (convert(kind, &name, &text, &options), first("error")) {
        (Err(why), Some((_, expected))) if why.contains(expected) => return Vec::new(),
        (Err(why), _) => return vec![format!("{name}: {why}")],
        (Ok(done), None) => done,
        (Ok(done), Some((_, expected))) => {
            return vec![format!(
                "{name}: the conversion did not fail with `{expected}`\n{}",
                done.toml
            )];
        }
    };
    let config = match Config::from_toml("converted.toml", &done.toml) {
        Ok((config, _)) => config,
        Err(report) => return vec![format!("{name}: {report}\n{}", done.toml)],
    };
    let servers: Vec<String> = config
        .services
        .iter()
        .flat_map(|service| &service.servers)
        .map(|server| server.address.to_string())
        .collect();
    let is_so = |word: &str, rest: &str| match word {
        "config-id" => true,
        "services" => rest == config.services.len().to_string(),
        "servers" => rest == servers.join(" "),
        "has" => done.toml.contains(rest),
        "not" => !done.toml.contains(rest),
        "lost" => done.lost.iter().any(|lost| lost.contains(rest)),
        "losses" => rest == done.lost.len().to_string(),
        "rest" => done.rest.contains(rest),
        "not-rest" => !done.rest.contains(rest),
        _ => false,
    };
    expected
        .iter()
        .filter(|(word, rest)| !is_so(word, rest))
        .map(|(word, rest)| {
            format!(
                "{name}: the expectation `{word} {rest}` is not met\nservers {}\n{:#?}\n{}\n--- rest\n{}",
                servers.join(" "),
                done.lost,
                done.toml,
                done.rest
            )
        })
        .collect()
}

#[test]
fn convert_with_omitted_settings_exits_with_code_4() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert");
    let run = |name: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_lvsd"))
            .arg("convert")
            .arg(directory.join(name))
            .output()
            .expect("lvsd starts");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (code, toml) = run("lvs_nat.conf");
    assert_eq!(code, Some(4));
    assert!(
        toml.contains("# NOT CONVERTED: line 6: DIRECTOR_INSIDEIP"),
        "no `# NOT CONVERTED: line 6: DIRECTOR_INSIDEIP` in {toml}"
    );
    let (code, toml) = run("keepalived-api-server.conf");
    assert!(code == Some(0) || code == Some(4));
    assert!(
        toml.contains("# vrrp_instance vip_1 {"),
        "no `# vrrp_instance vip_1 {{` in {toml}"
    );
}

#[test]
fn convert_check_that_cannot_compare_reports_reason_and_exits_with_code_5() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/convert");
    for (name, why) in [
        (
            "ldirectord-web.cf",
            "only keepalived can print its interpretation of a file",
        ),
        (
            "cases/keepalived-global-settings.conf",
            "keepalived would enter the network namespace",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lvsd"))
            .args(["convert", "--check"])
            .arg(directory.join(name))
            .output()
            .expect("lvsd starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{name}: {errors}");
        assert!(errors.contains(why), "{name}: no {why:?} in {errors}");
        assert!(output.stdout.is_empty(), "{name}");
    }
}
