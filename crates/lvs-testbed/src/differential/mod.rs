//! Compares this project with the real kernel and ipvsadm on random cases.
//!
//! ```text
//!  seed ─▶ cases ─▶ `lvs-testbed record`, run on a kernel with IPVS ─▶ recording ─▶ conformance, transcripts
//! ```
//!
//! A packet case sends frames of every kind to one director. A session consists of valid and
//! invalid command lines of `ipvsadm`. The kernel's results become a recording in the format that
//! the tests replay and compare.

mod commands;
mod kernel;
mod packets;
mod record;
mod sessions;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde_json::Value;

use self::record::Recorded;
use crate::conformance::{Through, conformance};
use crate::programs;
use crate::transcripts::{Program, transcripts};

/// Options of `lvs-testbed differential`.
#[derive(Clone, Debug, clap::Args)]
pub struct DifferentialOptions {
    /// A command that runs the program in its arguments as root on a kernel with IPVS, and passes
    /// its output on. The program must see this machine's files. Default: the program runs on this
    /// machine's kernel
    #[arg(long, value_name = "COMMAND")]
    kernel: Option<String>,
    /// Seed of the random choices; the same seed generates the same cases
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of packet cases
    #[arg(long, value_name = "N", default_value_t = 500)]
    packets: u64,
    /// Number of packet cases with FTP. The kernel needs its helper: `modprobe ip_vs_ftp`
    #[arg(long, value_name = "N", default_value_t = 200)]
    ftp: u64,
    /// Number of command lines of ipvsadm
    #[arg(long, value_name = "N", default_value_t = 2000)]
    commands: u64,
    /// Write cases, recordings, and the reasons why cases were not recorded to this directory
    #[arg(long, value_name = "DIRECTORY")]
    keep: Option<PathBuf>,
    /// Maximum number of differences that are shown for packets, for FTP, and for commands
    #[arg(long, value_name = "N", default_value_t = 20)]
    show: usize,
}

/// Options of `lvs-testbed record`.
#[derive(Clone, Debug, clap::Args)]
pub struct RecordOptions {
    /// Cases without the kernel's results: one JSON object on each line
    file: PathBuf,
}

/// Number of cases that one run of `lvs-testbed record` records.
const CHUNK: usize = 64;
/// Prefix of the output line about a case whose results vary, and which is not recorded.
const UNSTABLE: &str = "unstable ";
/// Prefix of the output line about a case that shows a known deviation, and is not recorded.
const DEVIATION: &str = "deviation ";

/// Runs `lvs-testbed record`: prints the recording.
///
/// # Errors
/// The file cannot be read or has an invalid case, the process is not root, or IPVS, `ip` or
/// `ipvsadm` is missing.
pub fn record(options: &RecordOptions) -> anyhow::Result<()> {
    let file = File::open(&options.file)
        .with_context(|| format!("cannot read {}", options.file.display()))?;
    let mut stdout = std::io::stdout().lock();
    for line in BufReader::new(file).lines() {
        let case: Value = serde_json::from_str(&line?).context("the case is not JSON")?;
        let name = case["name"].as_str().unwrap_or_default().to_owned();
        let recorded = if case.get("config").is_some() {
            record::record(&case).with_context(|| name.clone())?
        } else {
            Recorded::Case(sessions::record(&case).with_context(|| name.clone())?)
        };
        match recorded {
            Recorded::Case(recorded) => writeln!(stdout, "{recorded}")?,
            Recorded::Unstable(what) => writeln!(stdout, "{UNSTABLE}{name} {what}")?,
            Recorded::Deviation(what) => writeln!(stdout, "{DEVIATION}{name} {what}")?,
        }
        stdout.flush()?;
    }
    Ok(())
}

/// Cases that were not recorded.
#[derive(Debug, Default)]
struct Skipped {
    unstable: usize,
    deviations: usize,
}

/// Records `cases` on the kernel. Writes the recording to `to`, and the reasons of omitted cases to
/// the same path with the extension `skipped`.
fn ask(kernel: Option<&str>, cases: &[Value], to: &Path) -> anyhow::Result<Skipped> {
    let own = programs::own()?;
    let mut skipped = Skipped::default();
    let mut recording = File::create(to)?;
    let mut reasons = File::create(to.with_extension("skipped"))?;
    for (number, chunk) in cases.chunks(CHUNK).enumerate() {
        let input = to.with_extension(format!("{number}.cases"));
        let text: String = chunk.iter().map(|case| format!("{case}\n")).collect();
        fs::write(&input, text)?;
        let mut words = kernel.unwrap_or_default().split_whitespace();
        let mut command = match words.next() {
            Some(program) => {
                let mut command = Command::new(program);
                command.args(words).arg(&own);
                command
            }
            None => Command::new(&own),
        };
        let output = command
            .arg("record")
            .arg(&input)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut seen = 0;
        for line in text.lines() {
            if line.starts_with('{') {
                writeln!(recording, "{line}")?;
                seen += 1;
            } else if line.starts_with(UNSTABLE) || line.starts_with(DEVIATION) {
                writeln!(reasons, "{line}")?;
                skipped.unstable += usize::from(line.starts_with(UNSTABLE));
                skipped.deviations += usize::from(line.starts_with(DEVIATION));
                seen += 1;
            } else {
                eprintln!("{line}");
            }
        }
        ensure!(
            seen == chunk.len(),
            "the kernel has recorded {seen} of {} cases of {}",
            chunk.len(),
            input.display()
        );
        eprintln!(
            "{} of {} cases recorded",
            number * CHUNK + seen,
            cases.len()
        );
    }
    Ok(skipped)
}

/// Runs `lvs-testbed differential`, and prints differences and counts. If there are differences,
/// ends the process with exit status 1.
///
/// # Errors
/// A case cannot be recorded, a file cannot be written or read, or a program is not built.
pub fn run(options: &DifferentialOptions) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let directory = options.keep.as_deref().unwrap_or(scratch.path());
    fs::create_dir_all(directory)?;
    let kernel = options.kernel.as_deref();
    let mut differ = false;
    let seed = options.seed;
    let kinds = [
        (
            "packets",
            options.packets,
            packets::case as fn(u64, u64) -> Value,
        ),
        ("ftp", options.ftp, packets::ftp::case),
    ];
    for (kind, count, case) in kinds.into_iter().filter(|&(_, count, _)| count > 0) {
        let cases: Vec<Value> = (0..count).map(|number| case(seed, number)).collect();
        let recording = directory.join(format!("{kind}.jsonl"));
        let skipped = ask(kernel, &cases, &recording)?;
        let report = conformance(&[recording], None, 3, Through::Userspace)?;
        for mismatch in report.mismatches.iter().take(options.show) {
            println!("{mismatch}");
        }
        println!(
            "{kind}: {} cases agree with the kernel, {} do not; not recorded: {} with varying results, {} that differ by design",
            report.passed(),
            report.failed(),
            skipped.unstable,
            skipped.deviations
        );
        differ |= report.failed() > 0;
    }
    if options.commands > 0 {
        let cases = commands::sessions(options.seed, options.commands);
        let recording = directory.join("commands.jsonl");
        ask(kernel, &cases, &recording)?;
        let report = transcripts(&[recording], None, 1, Program::default())?;
        for difference in report.differences.iter().take(options.show) {
            println!("{difference}");
        }
        println!(
            "commands: {} equal to ipvsadm's, {} different",
            report.passed, report.failed
        );
        differ |= report.failed > 0;
    }
    if differ {
        // A returned error would be printed after the counts, which must be the last line.
        std::process::exit(1);
    }
    Ok(())
}
