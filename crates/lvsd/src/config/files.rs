//! Joins the files of a configuration to one text: the main file, and `conf.d/*.toml` in the order
//! of their names.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{LoadError, shape};
use crate::text::{Files, Findings, read_at_most};

/// Maximum size of a file in bytes, about 20 times the size of a file with 40,000 servers.
const FILE_MAX: u64 = 64 << 20;

/// Files that are joined to one text.
struct Joined {
    text: String,
    files: Files,
}

impl Joined {
    /// Appends a file; returns the position of its first byte in the joined text.
    fn push(&mut self, path: String, part: &str) -> usize {
        if !self.text.ends_with('\n') && !self.text.is_empty() {
            self.text.push('\n');
        }
        let start = self.text.len();
        self.files.begin(path, &self.text);
        self.text.push_str(part);
        start
    }
}

/// The joined text of all files.
pub(super) struct Whole {
    pub(super) files: Files,
    pub(super) text: String,
    /// Findings about single files.
    pub(super) findings: Findings,
}

/// Reads the main file at `path`, and the files of `conf.d` next to it.
pub(super) fn read(path: &Path) -> Result<Whole, LoadError> {
    let mut joined = Joined {
        text: read_one(path)?,
        files: Files::from(path.display().to_string().as_str()),
    };
    let mut findings = Findings::default();
    let parts = beside(path)?;
    if !parts.is_empty() {
        findings = shape::main_file(&joined.text);
    }
    for path in parts {
        let part = read_one(&path)?;
        let own = shape::part(&part);
        let start = joined.push(path.display().to_string(), &part);
        findings.append(own.shifted(start));
    }
    Ok(Whole {
        files: joined.files,
        text: joined.text,
        findings,
    })
}

/// The files of `conf.d`; none if the directory does not exist. An unreadable directory is an
/// error, because its services would otherwise be removed.
fn beside(path: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let directory = path
        .parent()
        .unwrap_or_else(|| Path::new(""))
        .join("conf.d");
    let unread = |source| LoadError::Read {
        path: directory.display().to_string(),
        source,
    };
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        // A dangling link, perhaps to a file system that is not mounted, is an error.
        Err(error) if error.kind() == ErrorKind::NotFound && !directory.is_symlink() => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(unread(error)),
    };
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.map_err(unread)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".toml") && !name.starts_with('.') {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

/// Reads a file or a pipe; an error if it is longer than the maximum size.
pub(in crate::config) fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(File::open(path)?, FILE_MAX)
}

fn read_one(path: &Path) -> Result<String, LoadError> {
    let name = || path.display().to_string();
    let bytes = read_bounded(path).map_err(|source| LoadError::Read {
        path: name(),
        source,
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        LoadError::NotText {
            path: name(),
            line: 1 + bytes[..offset].iter().filter(|b| **b == b'\n').count(),
            offset,
            byte: bytes[offset],
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use crate::config::{Config, LoadError};

    fn load(main: &str, parts: &[(&str, &str)]) -> Result<Config, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lvsd.toml");
        std::fs::write(&path, main).unwrap();
        std::fs::create_dir(directory.path().join("conf.d")).unwrap();
        for (name, text) in parts {
            std::fs::write(directory.path().join("conf.d").join(name), text).unwrap();
        }
        match Config::load(&path) {
            Ok((config, _)) => Ok(config),
            Err(LoadError::Refused(report)) => Err(report.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    const MAIN: &str = "[defaults]\nforward = \"nat\"\n[sysctl]\nsync_version = 1";
    const PART: &str =
        "[[service]]\naddress = \"192.0.2.1:80\"\n[[service.server]]\naddress = \"10.0.0.1\"\n";

    #[test]
    fn service_in_joined_file_keeps_its_file_and_line() {
        let second = PART.replace("192.0.2.1", "192.0.2.2");
        let config = load(
            MAIN,
            &[
                ("b.toml", &second),
                ("a.toml", PART),
                ("c.conf", "x"),
                (".d.toml", "x"),
            ],
        );
        let config = config.unwrap();
        let places: Vec<String> = config
            .services
            .iter()
            .map(|service| config.files.place(service.line))
            .collect();
        assert!(places[0].ends_with("conf.d/a.toml:1"), "{places:?}");
        assert!(places[1].ends_with("conf.d/b.toml:1"), "{places:?}");
        assert_eq!(
            config.services[1].address().unwrap().to_string(),
            "192.0.2.2:80"
        );
    }

    #[test]
    fn error_in_file_of_conf_d_is_shown_in_that_file() {
        for (part, words) in [
            ("[[service]]\nadress = 1\n", "b.toml:2:1"),
            ("[[service]\n", "not valid TOML"),
            ("x = 1\n", "`x` is outside of all tables"),
            (
                "[sysctl]\nsync_version = 0\n",
                "[sysctl] belongs in the main file",
            ),
            (
                "[[service.server]]\naddress = \"10.0.0.2\"\n",
                "has no [[service]] above it",
            ),
        ] {
            let report = load(MAIN, &[("a.toml", PART), ("b.toml", part)]).unwrap_err();
            assert!(
                report.contains(words) && report.contains("conf.d/b.toml"),
                "{part}: {report}"
            );
            assert!(
                !report.contains("a.toml"),
                "{part}: unexpected `a.toml` in {report}"
            );
        }
        let twice = load(MAIN, &[("a.toml", PART), ("b.toml", PART)]).unwrap_err();
        assert!(
            twice.contains("exists twice") && twice.contains("a.toml"),
            "no `exists twice` or no `a.toml` in {twice}"
        );
    }

    #[test]
    fn unreadable_conf_d_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let (main, parts) = (
            directory.path().join("lvsd.toml"),
            directory.path().join("conf.d"),
        );
        std::fs::write(&main, format!("{MAIN}\n{PART}")).unwrap();
        let refused = || match Config::load(&main) {
            Err(error @ LoadError::Read { .. }) => error.to_string(),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("the unreadable conf.d counts as empty"),
        };
        assert!(Config::load(&main).is_ok());
        std::fs::write(&parts, "").unwrap();
        let file = refused();
        assert!(
            file.contains("conf.d") && file.contains("make it a directory"),
            "no `conf.d` or no `make it a directory` in {file}"
        );
        for target in [parts.as_path(), "nowhere".as_ref()] {
            std::fs::remove_file(&parts).unwrap();
            std::os::unix::fs::symlink(target, &parts).unwrap();
            assert!(refused().contains("conf.d"));
        }
    }

    #[test]
    fn endless_configuration_file_is_refused_at_64_mib() {
        let error = super::read_bounded("/dev/zero".as_ref()).unwrap_err();
        assert_eq!(error.to_string(), "it is longer than 64 MiB");
        let error = Config::load("/dev/zero".as_ref()).unwrap_err();
        assert!(
            matches!(&error, LoadError::Read { path, source }
                if path == "/dev/zero" && source.kind() == ErrorKind::FileTooLarge),
            "{error}"
        );
    }
}
