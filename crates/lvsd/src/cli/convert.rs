//! `lvsd convert`: converts another program's file to a file of lvsd.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use lvs_api::words::counted;
use lvs_process::log;
use tracing::Level;

use super::{fail, print};
use crate::convert::{
    Converted, Options, SourceFormat, ask, compare, convert, files, kind, printable,
};

/// Exit code if some statements have no counterpart, and are comments in the result.
const EXIT_LOSSY: u8 = 4;
/// Exit code if the result was not compared, for example because keepalived could not run.
const EXIT_NOT_COMPARED: u8 = 5;

/// Format of the source file.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum From {
    /// keepalived.conf
    Keepalived,
    /// ldirectord.cf
    Ldirectord,
    /// lvs.conf, lvs_dr.conf, lvs_nat.conf, lvs_tun.conf of the LVS HOWTO's configure script
    LvsConf,
}

/// Converts a file; `Err` is the reason why that is impossible.
fn converted(
    file: &Path,
    from: Option<From>,
    config_id: Option<&str>,
) -> Result<(SourceFormat, Converted), String> {
    let text = files::read(file)?;
    let name = file.display().to_string();
    let known = from.map(|from| match from {
        From::Keepalived => SourceFormat::Keepalived,
        From::Ldirectord => SourceFormat::Ldirectord,
        From::LvsConf => SourceFormat::LvsConf,
    });
    let kind = known.or_else(|| kind(&name, &text)).ok_or_else(|| {
        format!(
            "{name} is not recognised as a file that can be converted; specify its format with --from keepalived, ldirectord or lvs-conf"
        )
    })?;
    let options = Options {
        include: &files::included,
        config_id,
    };
    let converted = convert(kind, &name, &text, &options)
        .map_err(|why| printable(&format!("{name}: {why}")))?;
    Ok((kind, converted))
}

/// Compares the converted file with keepalived's own reading of the source file.
pub(super) fn check(file: &Path, from: Option<From>, config_id: Option<&str>) -> ExitCode {
    let (kind, converted) = match converted(file, from, config_id) {
        Ok(converted) => converted,
        Err(why) => return fail(&why),
    };
    let not_asked = |why: &str| {
        let name = file.display();
        log::say(
            Level::ERROR,
            format_args!("lvsd: {name} was not compared: {}", printable(why)),
        );
        ExitCode::from(EXIT_NOT_COMPARED)
    };
    if kind != SourceFormat::Keepalived {
        return not_asked("only keepalived can print its interpretation of a file");
    }
    if converted.elsewhere {
        return not_asked("keepalived would enter the network namespace that the file names");
    }
    let compared = ask::keepalived(file, config_id)
        .and_then(|printed| compare::compare(&converted.toml, &printed));
    let compared = match compared {
        Ok(compared) => compared,
        Err(why) => return not_asked(&why),
    };
    let mut text = String::new();
    for difference in &compared.differences {
        text.push_str(&format!("{}\n", printable(difference)));
    }
    let services = counted(compared.services, "service");
    let servers = counted(compared.servers, "server");
    text.push_str(&format!("compared with keepalived: {services}, {servers}"));
    text.push_str(match compared.whole {
        true => "\n",
        false => {
            "; addresses and ports only, without groups: keepalived prints more if the kernel has IPVS (`modprobe ip_vs`)\n"
        }
    });
    let lost = counted(converted.lost.len(), "thing");
    text.push_str(&format!(
        "{}; {lost} not converted: `lvsd convert` without --check lists them\n",
        match compared.differences.len() {
            0 => "no difference".to_owned(),
            number => counted(number, "difference"),
        }
    ));
    match (print(text.as_bytes()), compared.differences.is_empty()) {
        (ExitCode::SUCCESS, true) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

pub(super) fn run(
    file: &Path,
    from: Option<From>,
    rest: Option<&Path>,
    config_id: Option<&str>,
) -> ExitCode {
    let (_, converted) = match converted(file, from, config_id) {
        Ok(converted) => converted,
        Err(why) => return fail(&why),
    };
    let mut toml = converted.toml;
    match rest {
        Some(path) => {
            if let Err(error) = std::fs::write(path, &converted.rest) {
                return fail(&format!("cannot write {}: {error}", path.display()));
            }
        }
        None if !converted.rest.is_empty() => {
            toml.push_str("\n# The parts that keepalived continues to use (--rest FILE writes them to a file):\n#\n");
            for line in converted.rest.lines() {
                toml.push_str(&format!("# {}\n", printable(line)));
            }
        }
        None => {}
    }
    if print(toml.as_bytes()) != ExitCode::SUCCESS {
        return ExitCode::FAILURE;
    }
    if converted.lost.is_empty() {
        return ExitCode::SUCCESS;
    }
    for lost in &converted.lost {
        log::say(
            Level::WARN,
            format_args!("not converted: {}", printable(lost)),
        );
    }
    let lost = counted(converted.lost.len(), "thing");
    log::say(
        Level::WARN,
        format_args!("lvsd: {lost} not converted; each is a comment in the result"),
    );
    let _ = std::io::stderr().flush();
    ExitCode::from(EXIT_LOSSY)
}
