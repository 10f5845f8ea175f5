//! The file with the services of etcd behind it, one part each. The file wins, and a service that
//! is wrong is left out alone: what it was when it was last right takes its place.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::files::Joined;
use super::shape::remote;
use super::{Base, Config, Facts, Files, Report, Revision, Severity};
use crate::sources::Gathered;
use crate::sources::etcd::Etcd;

/// Readings of everything until what is still wrong is given up.
const ROUNDS_MAX: usize = 64;

/// A service of etcd.
struct Part {
    name: String,
    text: String,
    /// What it was when it was last right, if that is something else.
    good: Option<String>,
}

impl Part {
    /// Goes back to what was right; false if there is nothing.
    fn fall_back(&mut self) -> bool {
        match self.good.take() {
            Some(good) if good != self.text => {
                self.text = good;
                true
            }
            _ => false,
        }
    }
}

/// The file at `path` with that text, and what sources say.
///
/// # Errors
/// What is wrong with the file. With what sources say, nothing is.
pub(super) fn read(
    path: &str,
    text: &str,
    files: &Files,
    facts: Option<&Facts>,
    gathered: &Gathered,
) -> Result<(Config, Report), Report> {
    let read_alone = |gathered| Config::read(path, text, files.clone(), facts, gathered);
    let mut alone = read_alone(gathered)?;
    let cluster = alone.0.cluster.as_ref();
    let prefix = cluster.map(|cluster| cluster.prefix.clone());
    let etcd = gathered
        .etcd
        .as_ref()
        .filter(|etcd| Some(&etcd.prefix) == prefix.as_ref());
    let Some(etcd) = etcd else {
        if gathered.etcd.is_some() {
            // Its pools are those of another prefix.
            let dns = gathered.dns.clone();
            alone = read_alone(&Gathered { dns, etcd: None })?;
        }
        alone.0.awaits_etcd = alone.0.cluster.is_some();
        return Ok(alone);
    };
    let revision = Revision {
        number: etcd.revision,
        digest: etcd.digest(),
    };
    alone.0.revision = revision;
    if etcd.services.is_empty() {
        return Ok(alone);
    }
    let mut refused = BTreeMap::new();
    let mut parts = parts(etcd, &mut refused);
    let whole = |parts: &[Part]| {
        let mut joined = Joined {
            text: text.to_owned(),
            files: files.clone(),
        };
        for part in parts {
            joined.push(
                format!("etcd:{}services/{}", etcd.prefix, part.name),
                &part.text,
            );
        }
        Config::read(path, &joined.text, joined.files, facts, gathered)
    };
    let mut merged = None;
    for _ in 0..ROUNDS_MAX {
        if parts.is_empty() {
            break;
        }
        match whole(&parts) {
            Ok(done) => {
                merged = Some(done);
                break;
            }
            Err(report) => {
                let mut blamed = blamed(&report, files.count());
                if blamed.is_empty() {
                    // The file is right without them: one of them makes it wrong.
                    let (mut right, mut wrong) = (0, parts.len());
                    while right + 1 < wrong {
                        let middle = right.midpoint(wrong);
                        match whole(&parts[..middle]) {
                            Ok(_) => right = middle,
                            Err(_) => wrong = middle,
                        }
                    }
                    let why = report
                        .findings
                        .iter()
                        .find(|d| d.severity == Severity::Error);
                    let why = why.map_or_else(String::new, |why| why.title.clone());
                    blamed.insert(right, why);
                }
                give_up(&mut parts, blamed, &mut refused);
            }
        }
    }
    let (mut config, report) = match merged {
        Some(merged) => merged,
        None => {
            for part in parts.drain(..) {
                let why = "too many others are wrong".to_owned();
                refused.entry(part.name).or_insert((why, false));
            }
            alone
        }
    };
    config.revision = revision;
    config.base = Base(Some(Arc::new((text.to_owned(), files.clone()))));
    config.in_force = parts
        .into_iter()
        .map(|part| (part.name, Arc::from(part.text)))
        .collect();
    let lines = refused.into_iter().map(|(name, (why, fell_back))| {
        let instead = match fell_back {
            true => "; what it was before stays",
            false => "",
        };
        format!("etcd key {}services/{name}: {why}{instead}", etcd.prefix)
    });
    config.left_out.extend(lines);
    Ok((config, report))
}

/// Those that are right by themselves.
fn parts(etcd: &Etcd, refused: &mut BTreeMap<String, (String, bool)>) -> Vec<Part> {
    let mut parts = Vec::new();
    for (name, text) in &etcd.services {
        let mut part = Part {
            name: name.clone(),
            text: text.text.clone(),
            good: text.good.clone(),
        };
        if let Err(why) = remote(&part.text) {
            let right = part.fall_back() && remote(&part.text).is_ok();
            refused.insert(name.clone(), (why, right));
            if !right {
                continue;
            }
        }
        parts.push(part);
    }
    parts
}

/// The parts behind the first so many that errors are about, and the first error of each.
fn blamed(report: &Report, files: usize) -> BTreeMap<usize, String> {
    let mut blamed = BTreeMap::new();
    for finding in &report.findings {
        let number = report.files.number(finding.primary.0.start);
        if finding.severity == Severity::Error
            && let Some(number) = number.checked_sub(files)
        {
            let at = finding.primary.0.start;
            let line = 1 + report.text[..at].matches('\n').count();
            let place = report.files.place(line);
            let line = place.rsplit(':').next().unwrap_or_default();
            blamed
                .entry(number)
                .or_insert_with(|| format!("line {line}: {}", finding.title));
        }
    }
    blamed
}

/// Takes what is wrong back to what was right, or out.
fn give_up(
    parts: &mut Vec<Part>,
    blamed: BTreeMap<usize, String>,
    refused: &mut BTreeMap<String, (String, bool)>,
) {
    let mut gone = BTreeSet::new();
    for (number, why) in blamed {
        let Some(part) = parts.get_mut(number) else {
            continue;
        };
        let back = part.fall_back();
        let entry = refused.entry(part.name.clone()).or_insert((why, back));
        entry.1 = back;
        if !back {
            gone.insert(number);
        }
    }
    let mut number = 0;
    parts.retain(|_| {
        number += 1;
        !gone.contains(&(number - 1))
    });
}
