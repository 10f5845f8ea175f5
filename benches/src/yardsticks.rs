//! The yardsticks: minimal forwarders, generators and tables. They are separate C files, which `cc`
//! compiles when a bench starts, so that building the workspace needs no C compiler.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Name and source of each yardstick.
const SOURCES: [(&str, &str); 5] = [
    ("gen", include_str!("../yardsticks/gen.c")),
    ("judge", include_str!("../yardsticks/judge.c")),
    ("null_packet", include_str!("../yardsticks/null_packet.c")),
    ("null_tun", include_str!("../yardsticks/null_tun.c")),
    ("line_table", include_str!("../yardsticks/line_table.c")),
];
const HEADER: &str = include_str!("../yardsticks/yardstick.h");

/// The compiled yardstick programs.
#[derive(Debug)]
pub struct Yardsticks {
    dir: tempfile::TempDir,
    /// Directory of another build of the programs, to compare with.
    pub(crate) other: Option<PathBuf>,
}

impl Yardsticks {
    /// Builds the yardsticks in a temporary directory, which is removed with the value.
    ///
    /// # Errors
    ///
    /// There is no C compiler (`$CC`, or `cc`), or the kernel's headers are missing.
    pub fn build() -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("lvs-bench-")
            .tempdir()
            .context("cannot make a directory for the yardsticks")?;
        std::fs::write(dir.path().join("yardstick.h"), HEADER)?;
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut running = Vec::new();
        for (name, source) in SOURCES {
            let file = dir.path().join(format!("{name}.c"));
            std::fs::write(&file, source)?;
            let child = Command::new(&compiler)
                .args(["-O3", "-Wall", "-o"])
                .arg(dir.path().join(name))
                .arg(&file)
                .stderr(Stdio::piped())
                .spawn()
                .with_context(|| {
                    format!("cannot start the C compiler {compiler}: install one (`tools/setup bench`), or set CC")
                })?;
            running.push((name, child));
        }
        for (name, child) in running {
            let output = child.wait_with_output()?;
            ensure!(
                output.status.success(),
                "the yardstick {name}.c does not compile:\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(Self { dir, other: None })
    }

    /// Path of one of the programs.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A directory for files of the compared programs.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// A minimal table, in which no entry expires or has a state: the lower bound for the cost of a
/// packet in memory.
#[derive(Debug)]
pub struct LineTable {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl LineTable {
    /// Fills a table with `flows` flows of `2^bits` clients, and binds the process to a core.
    ///
    /// # Errors
    ///
    /// The table cannot be started, or has no memory.
    pub fn new(yardsticks: &Yardsticks, flows: u32, bits: u32, cpu: usize) -> Result<Self> {
        let mut child = Command::new(yardsticks.path("line_table"))
            .args([
                format!("-f{flows}"),
                format!("-b{bits}"),
                format!("-c{cpu}"),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the line table")?;
        let input = child.stdin.take();
        let output = BufReader::new(
            child
                .stdout
                .take()
                .context("the output of the line table is not piped")?,
        );
        let mut table = Self {
            child,
            input,
            output,
        };
        let line = table.line()?;
        ensure!(line == "ready", "the line table printed {line:?}");
        Ok(table)
    }

    /// Nanoseconds for each packet: parse, look up, rewrite; the mean over a million random
    /// packets.
    ///
    /// # Errors
    ///
    /// If the table's process has exited.
    pub fn measure(&mut self) -> Result<f64> {
        let input = self
            .input
            .as_mut()
            .context("the input of the line table is not piped")?;
        input
            .write_all(b"\n")
            .context("the line table has exited")?;
        let line = self.line()?;
        line.parse()
            .with_context(|| format!("the line table printed {line:?}"))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("the line table has exited");
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for LineTable {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yardstick_programs_compile_and_measure_table() {
        let yardsticks = Yardsticks::build().expect("the yardsticks can be compiled");
        let mut table = LineTable::new(&yardsticks, 1000, 10, 0).expect("the table is allocated");
        assert!(table.measure().expect("the table can be measured") > 0.0);
    }
}
