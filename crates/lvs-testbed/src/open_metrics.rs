//! A strict parser of OpenMetrics 1.0.0, for tests of exported pages.
//!
//! It refuses input that `prometheus_client` refuses although Prometheus accepts it, such as
//! duplicate samples, split or repeated families, or a missing `# EOF`.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail, ensure};

/// Returns the samples of a page by their name and labels.
///
/// # Errors
/// The page breaks a rule; the message contains the line.
pub fn read(page: &str) -> Result<BTreeMap<String, f64>> {
    let body = page
        .strip_suffix("# EOF\n")
        .context("the page does not end with the line # EOF")?;
    ensure!(body.ends_with('\n'), "the last line has no line end");
    let mut reader = Reader::default();
    for (number, line) in body.lines().enumerate() {
        reader
            .line(line)
            .with_context(|| format!("line {}: {line}", number + 1))?;
    }
    Ok(reader.samples)
}

#[derive(Default)]
struct Reader {
    /// Name and type of the present family.
    family: (String, String),
    described: HashSet<(String, String)>,
    families: HashSet<String>,
    samples: BTreeMap<String, f64>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<()> {
        if let Some(about) = line.strip_prefix("# ") {
            let mut words = about.splitn(3, ' ');
            let (kind, name) = (words.next(), words.next());
            let (kind, name) = kind.zip(name).context("the comment describes no family")?;
            ensure!(is_name(name), "{name} is not a valid name of a family");
            let value = words.next().unwrap_or_default();
            ensure!(
                ["HELP", "TYPE", "UNIT"].contains(&kind),
                "the comment {kind} is unknown"
            );
            ensure!(
                self.described.insert((kind.to_owned(), name.to_owned())),
                "{kind} of {name} occurs twice"
            );
            if self.family.0 != name {
                ensure!(
                    self.families.insert(name.to_owned()),
                    "the family {name} occurs twice"
                );
                self.family = (name.to_owned(), String::new());
            }
            if kind == "TYPE" {
                let known = ["counter", "gauge", "histogram", "info", "unknown"];
                ensure!(known.contains(&value), "the type {value} is unknown");
                value.clone_into(&mut self.family.1);
            }
            return Ok(());
        }
        let end = line.find(['{', ' ']).context("the sample has no value")?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = labels(rest)?;
        let suffix = name.strip_prefix(self.family.0.as_str());
        let suffix = suffix.context("the sample is outside of its family")?;
        let fits = match self.family.1.as_str() {
            "counter" => ["_total", "_created"].contains(&suffix),
            "histogram" => ["_bucket", "_sum", "_count", "_created"].contains(&suffix),
            "info" => suffix == "_info",
            "" => bail!("the sample precedes the type of its family"),
            _ => suffix.is_empty(),
        };
        ensure!(fits, "{suffix:?} does not belong to a {}", self.family.1);
        let value = rest.strip_prefix(' ').context("the sample has no value")?;
        let number: f64 = match value {
            "+Inf" => f64::INFINITY,
            "-Inf" => f64::NEG_INFINITY,
            "NaN" => f64::NAN,
            _ => value.parse().context("the value is not a number")?,
        };
        let key = format!("{name}{{{}}}", labels.join(","));
        ensure!(
            self.samples.insert(key.clone(), number).is_none(),
            "the sample {key} occurs twice"
        );
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    name.starts_with(first) && name.chars().all(|c| first(c) || c.is_ascii_digit())
}

/// The sorted labels at the beginning of a text, and the rest of the text.
fn labels(text: &str) -> Result<(Vec<String>, &str)> {
    let Some(mut rest) = text.strip_prefix('{') else {
        return Ok((Vec::new(), text));
    };
    let mut all = Vec::new();
    let mut names = HashSet::new();
    loop {
        let (name, after) = rest.split_once("=\"").context("the label has no `=\"`")?;
        ensure!(
            is_name(name) && !name.contains(':'),
            "{name} is not a valid name of a label"
        );
        ensure!(names.insert(name), "the label {name} occurs twice");
        let mut escaped = false;
        let end = after.find(|c: char| {
            let end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            end
        });
        let (value, after) = after.split_at(end.context("the label has no closing quote")?);
        let escapes = value
            .replace(r"\\", "")
            .replace(r#"\""#, "")
            .replace(r"\n", "");
        ensure!(!escapes.contains('\\'), "{value} has an unknown escape");
        all.push(format!("{name}=\"{value}\""));
        match after.as_bytes() {
            [b'"', b'}', ..] => {
                all.sort();
                return Ok((all, &after[2..]));
            }
            [b'"', b',', ..] => rest = &after[2..],
            _ => bail!("a label is followed neither by , nor by }}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_open_metrics_page_is_parsed() {
        let page = "# HELP a Text.\n# TYPE a counter\na_total{x=\"1\",y=\"a\\\"}\\\\\"} 3\na_total{x=\"2\"} 4\n\
                    # TYPE b gauge\nb 1.5\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 2\nh_sum 1\nh_count 2\n# EOF\n";
        let samples = read(page).expect("the page is valid");
        assert_eq!(samples.len(), 6);
        assert_eq!(samples["a_total{x=\"2\"}"], 4.0);
    }

    #[test]
    fn page_that_breaks_rule_of_open_metrics_is_refused() {
        for page in [
            "# TYPE a gauge\na 1\n",
            "# TYPE a gauge\na{x=\"1\",y=\"2\"} 1\na{y=\"2\",x=\"1\"} 1\n# EOF\n",
            "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# TYPE a gauge\na{x=\"1\"} 1\n# EOF\n",
            "# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\na{x=\"1\"} 1\n# EOF\n",
            "# TYPE a counter\na 1\n# EOF\n",
            "a 1\n# EOF\n",
            "# TYPE a gauge\na{x=\"1\",x=\"2\"} 1\n# EOF\n",
            "# TYPE a gauge\na{x=\"\\q\"} 1\n# EOF\n",
            "# TYPE a gauge\na one\n# EOF\n",
        ] {
            assert!(read(page).is_err(), "{page}");
        }
    }
}
