//! `lvsd convert`: another program's file as lvsd's.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use lvs_dataplane::log;
use tracing::Level;

use super::{fail, print};
use crate::convert::{Kind, LENGTH_MAX, convert, kind, printable};
use crate::words::counted;

/// What could not be converted is in the result as comments.
const EXIT_LOSSY: u8 = 4;

/// A kind of file, as it is named on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(super) enum From {
    /// keepalived.conf
    Keepalived,
    /// ldirectord.cf
    Ldirectord,
    /// lvs.conf, lvs_dr.conf, lvs_nat.conf, lvs_tun.conf of the LVS HOWTO's configure script
    LvsConf,
}

pub(super) fn run(file: &Path, from: Option<From>, rest: Option<&Path>) -> ExitCode {
    let text = match read(file) {
        Ok(text) => text,
        Err(why) => return fail(&why),
    };
    let name = file.display().to_string();
    let known = from.map(|from| match from {
        From::Keepalived => Kind::Keepalived,
        From::Ldirectord => Kind::Ldirectord,
        From::LvsConf => Kind::LvsConf,
    });
    let Some(kind) = known.or_else(|| kind(&name, &text)) else {
        return fail(&format!(
            "{name} is none of the files that can be converted; name its kind with --from keepalived, ldirectord or lvs-conf"
        ));
    };
    let directory = file.parent().map(Path::to_owned).unwrap_or_default();
    let unread = RefCell::new(None);
    let include = |pattern: &str| included(&directory, pattern, &unread);
    let converted = match convert(kind, &name, &text, &include) {
        Ok(converted) => converted,
        Err(why) => return fail(&printable(&format!("{name}: {why}"))),
    };
    if let Some(why) = unread.take() {
        return fail(&why);
    }
    let mut toml = converted.toml;
    match rest {
        Some(path) => {
            if let Err(error) = std::fs::write(path, &converted.rest) {
                return fail(&format!("cannot write {}: {error}", path.display()));
            }
        }
        None if !converted.rest.is_empty() => {
            toml.push_str("\n# What keepalived keeps (--rest FILE writes it to a file):\n#\n");
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

fn read(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(LENGTH_MAX + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    if bytes.len() as u64 > LENGTH_MAX {
        return Err(format!(
            "{} is longer than {} MiB; name the file that was meant, or split it",
            path.display(),
            LENGTH_MAX >> 20
        ));
    }
    // Comments in old files are in whatever their writers had.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The files that `include` names: a path, the last part of which may have `*`. Why one that is
/// there cannot be read is left in `unread`.
fn included(
    directory: &Path,
    pattern: &str,
    unread: &RefCell<Option<String>>,
) -> Vec<(String, String)> {
    let path = directory.join(pattern);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let name = name.to_string_lossy();
    let mut paths: Vec<PathBuf> = match name.split_once('*') {
        None => vec![path.clone()],
        Some((before, after)) => {
            let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
            let fits = |path: &PathBuf| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.len() >= before.len() + after.len()
                    && name.starts_with(before)
                    && name.ends_with(after)
            };
            entries.map(|entry| entry.path()).filter(fits).collect()
        }
    };
    paths.sort();
    paths.retain(|path| path.is_file());
    let read = |path: PathBuf| match read(&path) {
        Ok(text) => Some((path.display().to_string(), text)),
        Err(why) => {
            unread.borrow_mut().get_or_insert(why);
            None
        }
    };
    paths.into_iter().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_too_long_are_refused_and_not_cut() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("long.conf");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(LENGTH_MAX).unwrap();
        assert!(read(&path).is_ok());
        file.set_len(LENGTH_MAX + 1).unwrap();
        let refused = read(&path).unwrap_err();
        assert!(refused.contains("longer than 16 MiB"), "{refused}");
        let unread = RefCell::new(None);
        assert!(included(directory.path(), "*.conf", &unread).is_empty());
        assert_eq!(unread.take(), Some(refused));
    }
}
