//! `type = "file"`: a file says how the server is, in the words of HAProxy's agents.

use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::words::{self, LINE_MAX};
use super::{Advice, Asked, Kind, Misfit, ProbeError};
use crate::config::{Diagnostic, Keys};

/// A file's first line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct File {
    path: String,
    /// Whether a file that is not there means that the server serves.
    missing_ok: bool,
}

impl Kind for File {
    const NAME: &'static str = "file";
    const KEYS: &'static [&'static str] = &["path", "missing"];
    const RISE: u32 = 1;
    const FALL: u32 = 1;

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let Some(path) = keys.string("path")?.filter(|path| path.starts_with('/')) else {
            let at = keys.place("path");
            keys.report(
                Diagnostic::error(at, "`path` of the check is no whole path of a file").help(
                    "write path = \"/run/health/{address}\"; {address} and {port} are those of the server",
                ),
            );
            return None;
        };
        let missing = keys.word("missing", &[("down", false), ("up", true)])?;
        Some(Self {
            path,
            missing_ok: missing.unwrap_or(false),
        })
    }

    fn bind(&self, server: SocketAddr) -> Result<Self, Misfit> {
        let path = self.path.replace("{address}", &server.ip().to_string());
        let path = path.replace("{port}", &server.port().to_string());
        Ok(Self {
            path,
            ..self.clone()
        })
    }

    fn target(&self, _: SocketAddr) -> String {
        self.path.clone()
    }

    async fn run(&self, _: &Asked<'_>) -> Result<Advice, ProbeError> {
        let path = PathBuf::from(&self.path);
        // A file may be on a disk that does not answer, or be a pipe.
        let read = tokio::task::spawn_blocking(move || first_line(&path)).await;
        let wrong = |why: String| ProbeError::Server(format!("{}: {why}", self.path));
        let line = match read {
            Ok(Ok(line)) => line,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                return match self.missing_ok {
                    true => Ok(Advice::NONE),
                    false => Err(wrong("there is no such file".to_owned())),
                };
            }
            Ok(Err(error)) => return Err(ProbeError::Local(format!("{}: {error}", self.path))),
            Err(error) => return Err(ProbeError::Local(error.to_string())),
        };
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(Advice::NONE);
        }
        let said = words::parse(&line).map_err(wrong)?;
        match said.down {
            None => Ok(said.advice),
            Some(why) => Err(wrong(why)),
        }
    }
}

fn first_line(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    use std::os::unix::fs::OpenOptionsExt;
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)?;
    let mut text = Vec::new();
    file.take(LINE_MAX as u64).read_to_end(&mut text)?;
    if let Some(end) = text.iter().position(|b| *b == b'\n') {
        text.truncate(end);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::Weight;
    use crate::health::probe::hostile::probe;

    #[tokio::test]
    async fn what_it_says_and_that_it_is_not_there() {
        let directory = tempfile::tempdir().expect("a directory");
        let server: SocketAddr = "127.0.0.1:81".parse().unwrap();
        let path = directory.path().join("127.0.0.1-81");
        let pattern = directory.path().join("{address}-{port}");
        let check = format!("{{ type = \"file\", path = \"{}\" }}", pattern.display());
        let lenient = check.replace(" }", ", missing = \"up\" }");
        assert!(matches!(
            probe(&check, server).await,
            Err(ProbeError::Server(why)) if why.contains("no such file")
        ));
        assert_eq!(probe(&lenient, server).await, Ok(Advice::NONE));
        for (text, good) in [("", true), ("up\n", true), ("down\n", false), ("?", false)] {
            std::fs::write(&path, text).expect("written");
            assert_eq!(probe(&check, server).await.is_ok(), good, "{text}");
        }
        std::fs::write(&path, "30%\nmore").expect("written");
        let advice = Advice::weight(Weight::Percent(30));
        assert_eq!(probe(&check, server).await, Ok(advice));
        std::fs::write(&path, vec![b'x'; 1 << 20]).expect("written");
        assert!(probe(&check, server).await.is_err());
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("a directory");
        assert!(matches!(
            probe(&check, server).await,
            Err(ProbeError::Local(_))
        ));
    }
}
