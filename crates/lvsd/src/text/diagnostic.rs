//! Findings in a file, printed like errors of the Rust compiler: position, key, reason and fix.

use std::collections::HashSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::IsTerminal;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use lvs_api::words::counted;
use lvs_process::log;

use super::Files;

/// Maximum number of printed findings; the rest is only counted.
const SHOWN_MAX: usize = 20;

/// Maximum number of stored errors, and of stored warnings. Further ones are only counted.
pub(crate) const KEPT_MAX: usize = 1000;

/// Number of errors after which the rest of a file is not read.
const COUNTED_MAX: usize = 100_000;

/// The first [`KEPT_MAX`] lines, and the number of the others.
pub(crate) fn bounded(mut lines: Vec<String>) -> Vec<String> {
    if let Some(more) = lines.len().checked_sub(KEPT_MAX).filter(|more| *more > 0) {
        lines.truncate(KEPT_MAX);
        lines.push(format!("and {more} more"));
    }
    lines
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The file is refused because of the finding.
    Error,
    /// The file is accepted; the operator should check it.
    Warning,
}

/// One finding about a configuration file.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// Whether the file is refused because of this finding.
    pub severity: Severity,
    /// The finding in one line.
    pub title: String,
    /// Position in bytes of the text, and the message at that position.
    pub primary: (Range<usize>, String),
    /// Related positions, each with a note.
    pub context: Vec<(Range<usize>, String)>,
    /// Fix for the finding, if one is known.
    pub help: Option<String>,
}

/// Maximum length of a title, label or fix in bytes. These texts quote the file, whose words may
/// have any length.
const TEXT_MAX: usize = 600;

/// Replaces the middle of a text that is longer than [`TEXT_MAX`].
fn shortened(text: String) -> String {
    if text.len() <= TEXT_MAX {
        return text;
    }
    let boundary = |from: usize| (from..text.len()).find(|&at| text.is_char_boundary(at));
    let head = boundary(TEXT_MAX * 3 / 4).unwrap_or(0);
    let tail = boundary(text.len() - TEXT_MAX / 5).unwrap_or(text.len());
    format!("{} ... {}", &text[..head], &text[tail..])
}

impl Diagnostic {
    /// An error at `span`.
    pub fn error(span: Range<usize>, title: impl Into<String>) -> Self {
        Self {
            severity: Severity::Error,
            title: shortened(title.into()),
            primary: (span, String::new()),
            context: Vec::new(),
            help: None,
        }
    }

    /// A warning at `span`.
    pub fn warning(span: Range<usize>, title: impl Into<String>) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::error(span, title)
        }
    }

    /// Sets the message that is shown at the position of the finding.
    #[must_use]
    pub fn label(mut self, text: impl Into<String>) -> Self {
        self.primary.1 = shortened(text.into());
        self
    }

    /// Adds another position that the report shows.
    #[must_use]
    pub fn context(mut self, span: Range<usize>, text: impl Into<String>) -> Self {
        self.context.push((span, shortened(text.into())));
        self
    }

    /// Sets the fix of the finding.
    #[must_use]
    pub fn help(mut self, text: impl Into<String>) -> Self {
        self.help = Some(shortened(text.into()));
        self
    }

    /// Moves all positions by `by` bytes.
    fn shifted(mut self, by: usize) -> Self {
        let shift = |span: &mut Range<usize>| *span = span.start + by..span.end + by;
        shift(&mut self.primary.0);
        for (span, _) in &mut self.context {
            shift(span);
        }
        self
    }

    fn render(&self, files: &Files, text: &str, renderer: &Renderer) -> String {
        let (span, label) = &self.primary;
        let whole = || ("", 0..text.len());
        let (path, part) = files.part(span.start, text.len()).unwrap_or_else(whole);
        let clamp = |span: &Range<usize>, part: &Range<usize>| {
            let place = |at: usize| at.clamp(part.start, part.end) - part.start;
            place(span.start)..place(span.end)
        };
        let near = |span: &Range<usize>| part.contains(&span.start) || *span == part;
        let (here, far): (Vec<_>, Vec<_>) = self.context.iter().partition(|(span, _)| near(span));
        let window = window(text, &part, here.iter().map(|(span, _)| span).chain([span]));
        let mut primary = AnnotationKind::Primary.span(clamp(span, &window));
        if !label.is_empty() {
            primary = primary.label(label.as_str());
        }
        let context = |(span, label): &'_ (Range<usize>, String), part: &Range<usize>| {
            AnnotationKind::Context
                .span(clamp(span, part))
                .label(label.clone())
        };
        let snippet = source(text, &part, &window)
            .path(path)
            .annotation(primary)
            .annotations(here.into_iter().map(|one| context(one, &window)));
        let far = far.into_iter().map(|one| {
            let (path, part) = files.part(one.0.start, text.len()).unwrap_or_else(whole);
            let window = self::window(text, &part, [&one.0]);
            source(text, &part, &window)
                .path(path)
                .annotation(context(one, &window))
        });
        let level = match self.severity {
            Severity::Error => Level::ERROR,
            Severity::Warning => Level::WARNING,
        };
        let mut group = level.primary_title(self.title.as_str()).element(snippet);
        for snippet in far {
            group = group.element(snippet);
        }
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        renderer.render(&[group])
    }
}

/// Returns the range of the lines from the first to the last of `spans`, within `part`. With the
/// whole file instead, the renderer would read all of it for each finding.
fn window<'a>(
    text: &str,
    part: &Range<usize>,
    spans: impl IntoIterator<Item = &'a Range<usize>>,
) -> Range<usize> {
    let (mut first, mut last) = (part.end, part.start);
    for span in spans {
        first = first.min(span.start.clamp(part.start, part.end));
        last = last.max(span.end.clamp(part.start, part.end));
    }
    let bytes = text.as_bytes();
    let line_end = |byte: &u8| *byte == b'\n';
    // A position behind the last line end is shown on the last line.
    let before = bytes[part.start..first].strip_suffix(b"\n");
    let before = before
        .filter(|_| first == part.end)
        .unwrap_or(&bytes[part.start..first]);
    let start = before.iter().rposition(line_end).map_or(0, |at| at + 1);
    let end = bytes[last..part.end].iter().position(line_end);
    part.start + start..end.map_or(part.end, |at| last + at + 1)
}

/// The lines of `window` for the renderer, with their line numbers in `part`.
fn source<'a, T: Clone>(
    text: &'a str,
    part: &Range<usize>,
    window: &Range<usize>,
) -> Snippet<'a, T> {
    let before = &text.as_bytes()[part.start..window.start];
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    Snippet::source(&text[window.clone()]).line_start(line)
}

/// Findings of one file. Their number is limited, because a generated file can have a million
/// errors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings {
    /// The first [`KEPT_MAX`] findings of each severity.
    kept: Vec<Diagnostic>,
    /// Numbers of all errors and warnings.
    counts: [usize; 2],
    /// Hashes of position and title. A finding about all addresses of a service, or about all
    /// services, is pushed for each of them, but stored and counted once.
    seen: HashSet<u64>,
    /// Number of reported errors, including repeated ones.
    reported: usize,
}

impl Findings {
    pub(crate) fn push(&mut self, finding: Diagnostic) {
        self.reported += usize::from(finding.severity == Severity::Error);
        let mut hasher = DefaultHasher::new();
        (finding.primary.0.start, &finding.title).hash(&mut hasher);
        if self.is_full() || !self.seen.insert(hasher.finish()) {
            return;
        }
        let count = &mut self.counts[finding.severity as usize];
        *count += 1;
        if *count <= KEPT_MAX {
            self.kept.push(finding);
        }
    }

    /// Adds all findings of `other`.
    pub(crate) fn append(&mut self, other: Self) {
        let more = other.more();
        other
            .kept
            .into_iter()
            .for_each(|finding| self.push(finding));
        self.counts[0] += more[0];
        self.counts[1] += more[1];
    }

    /// Moves all positions by `by` bytes.
    pub(crate) fn shifted(mut self, by: usize) -> Self {
        let kept = self.kept.into_iter();
        self.kept = kept.map(|finding| finding.shifted(by)).collect();
        self
    }

    /// Number of errors so far, including repeated ones.
    pub(crate) const fn reported(&self) -> usize {
        self.reported
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.counts == [0, 0]
    }

    /// Whether the limit of errors is reached, so that the rest of the file need not be read.
    pub(crate) const fn is_full(&self) -> bool {
        self.counts[Severity::Error as usize] >= COUNTED_MAX
    }

    /// Numbers of errors and of warnings that are not stored.
    pub(crate) fn more(&self) -> [usize; 2] {
        self.counts.map(|count| count.saturating_sub(KEPT_MAX))
    }

    /// Returns the stored findings, in the order of the text.
    pub(crate) fn into_kept(mut self) -> Vec<Diagnostic> {
        self.kept.sort_by_key(|finding| finding.primary.0.start);
        self.kept
    }
}

/// All findings about one file.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the file.
    pub path: String,
    /// The text of the file, followed by the files of `conf.d`.
    pub text: String,
    /// The files in the text.
    pub files: Files,
    /// The findings in the order of the text; if there are too many, the first ones.
    pub findings: Vec<Diagnostic>,
    /// Numbers of further errors and of further warnings.
    pub more: [usize; 2],
}

impl Report {
    /// Number of errors.
    pub fn errors(&self) -> usize {
        self.count(Severity::Error)
    }

    fn count(&self, severity: Severity) -> usize {
        let kept = self.findings.iter().filter(|d| d.severity == severity);
        kept.count() + self.more[severity as usize]
    }

    /// At most [`SHOWN_MAX`] findings in the order of the text. Errors take precedence over
    /// warnings.
    fn shown(&self) -> Vec<&Diagnostic> {
        let all = self.findings.iter().enumerate();
        let (errors, warnings): (Vec<_>, Vec<_>) =
            all.partition(|(_, finding)| finding.severity == Severity::Error);
        let mut shown: Vec<_> = errors.into_iter().chain(warnings).take(SHOWN_MAX).collect();
        shown.sort_unstable_by_key(|(place, _)| *place);
        shown.into_iter().map(|(_, finding)| finding).collect()
    }

    /// The line with the number of findings that are not printed; `None` if all are printed.
    fn rest(&self) -> Option<String> {
        let (errors, warnings) = (self.errors(), self.count(Severity::Warning));
        let more = (errors + warnings).checked_sub(SHOWN_MAX)?;
        let stopped = match errors >= COUNTED_MAX {
            true => "; lvsd has stopped reading",
            false => "",
        };
        (more > 0).then(|| {
            let warnings = counted(warnings, "warning");
            format!(
                "and {more} more: {}, {warnings} in all{stopped}",
                counted(errors, "error")
            )
        })
    }

    /// At most 20 findings as texts without colours, followed by the number of the others, if any.
    pub fn lines(&self) -> Vec<String> {
        let renderer = Renderer::plain();
        let mut all: Vec<String> = self
            .shown()
            .iter()
            .map(|d| d.render(&self.files, &self.text, &renderer))
            .collect();
        all.extend(self.rest());
        all
    }

    /// Prints the texts of [`lines`](Self::lines) to standard error, with colours on a terminal.
    pub fn print(&self) {
        let renderer = match std::io::stderr().is_terminal() {
            true => Renderer::styled(),
            false => Renderer::plain(),
        };
        for finding in self.shown() {
            let level = match finding.severity {
                Severity::Error => tracing::Level::ERROR,
                Severity::Warning => tracing::Level::WARN,
            };
            let text = finding.render(&self.files, &self.text, &renderer);
            log::say(level, format_args!("{text}\n"));
        }
        if let Some(rest) = self.rest() {
            log::say(tracing::Level::ERROR, format_args!("{rest}\n"));
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("\n\n"))
    }
}

impl std::error::Error for Report {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diagnostic_texts_with_long_word_are_shortened_below_limit() {
        for word in ["x".repeat(3_000_000), "é".repeat(1_000_001)] {
            let title = format!("`{word}` is not an address and a port");
            let diagnostic = Diagnostic::error(0..0, title)
                .label(word.clone())
                .context(0..0, word.clone())
                .help(word);
            let title = &diagnostic.title;
            assert!(title.starts_with('`') && title.ends_with("` is not an address and a port"));
            let help = diagnostic.help.as_ref().expect("the diagnostic has a help");
            for text in [title, help, &diagnostic.primary.1, &diagnostic.context[0].1] {
                assert!(text.len() < TEXT_MAX, "{}", text.len());
            }
        }
        let short = Diagnostic::error(0..0, "é".repeat(TEXT_MAX / 2));
        assert_eq!(short.title, "é".repeat(TEXT_MAX / 2));
    }

    #[test]
    fn lines_beyond_the_maximum_number_are_omitted_and_counted() {
        let lines = |n: usize| vec!["x".to_owned(); n];
        assert_eq!(bounded(lines(KEPT_MAX)), lines(KEPT_MAX));
        let many = bounded(lines(KEPT_MAX + 7));
        assert_eq!(many.len(), KEPT_MAX + 1);
        assert_eq!(many.last().map(String::as_str), Some("and 7 more"));
    }
}
