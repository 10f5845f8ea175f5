//! What is wrong with a file, shown as the Rust compiler would show it: the place, the key, the
//! reason and a remedy.

use std::fmt;
use std::io::IsTerminal;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use lvs_dataplane::log;

use super::Files;
use crate::words::counted;

/// Findings that are shown; of the rest, how many there are.
const SHOWN_MAX: usize = 20;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The file is refused.
    Error,
    /// The file is taken; the operator should look.
    Warning,
}

/// One finding about a configuration file.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// Whether the file can be used in spite of it.
    pub severity: Severity,
    /// What is wrong, in one line.
    pub title: String,
    /// The place, as bytes of the text, and what to say there.
    pub primary: (Range<usize>, String),
    /// Other places that matter.
    pub context: Vec<(Range<usize>, String)>,
    /// What to do.
    pub help: Option<String>,
}

impl Diagnostic {
    /// An error at `span`.
    pub fn error(span: Range<usize>, title: impl Into<String>) -> Self {
        Self {
            severity: Severity::Error,
            title: title.into(),
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

    /// Says `text` at the place.
    #[must_use]
    pub fn label(mut self, text: impl Into<String>) -> Self {
        self.primary.1 = text.into();
        self
    }

    /// Shows another place.
    #[must_use]
    pub fn context(mut self, span: Range<usize>, text: impl Into<String>) -> Self {
        self.context.push((span, text.into()));
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn help(mut self, text: impl Into<String>) -> Self {
        self.help = Some(text.into());
        self
    }

    /// The same in a text that has so many bytes before this one's.
    #[must_use]
    pub(super) fn shifted(mut self, by: usize) -> Self {
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
        let mut primary = AnnotationKind::Primary.span(clamp(span, &part));
        if !label.is_empty() {
            primary = primary.label(label.as_str());
        }
        let here = |span: &Range<usize>| part.contains(&span.start) || *span == part;
        let context = |(span, label): &'_ (Range<usize>, String), part: &Range<usize>| {
            AnnotationKind::Context
                .span(clamp(span, part))
                .label(label.clone())
        };
        let near = self.context.iter().filter(|(span, _)| here(span));
        let snippet = Snippet::source(&text[part.clone()])
            .path(path)
            .annotation(primary)
            .annotations(near.map(|one| context(one, &part)));
        let far = self.context.iter().filter(|(span, _)| !here(span));
        let far = far.map(|one| {
            let (path, part) = files.part(one.0.start, text.len()).unwrap_or_else(whole);
            Snippet::source(&text[part.clone()])
                .path(path)
                .annotation(context(one, &part))
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

/// All findings about one file.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the file.
    pub path: String,
    /// Its text, with that of the files of `conf.d` behind it.
    pub text: String,
    /// Which part of the text is which file.
    pub files: Files,
    /// The findings, in the order of the text.
    pub findings: Vec<Diagnostic>,
}

impl Report {
    /// Number of errors.
    pub fn errors(&self) -> usize {
        self.findings
            .iter()
            .filter(|d| d.severity == Severity::Error)
            .count()
    }

    /// The findings that are worth being shown, in the order of the text: the first [`SHOWN_MAX`],
    /// errors before warnings.
    fn shown(&self) -> Vec<&Diagnostic> {
        let all = self.findings.iter().enumerate();
        let (errors, warnings): (Vec<_>, Vec<_>) =
            all.partition(|(_, finding)| finding.severity == Severity::Error);
        let mut shown: Vec<_> = errors.into_iter().chain(warnings).take(SHOWN_MAX).collect();
        shown.sort_unstable_by_key(|(place, _)| *place);
        shown.into_iter().map(|(_, finding)| finding).collect()
    }

    /// What is said about those that are not shown.
    fn rest(&self) -> Option<String> {
        let more = self.findings.len().checked_sub(SHOWN_MAX)?;
        (more > 0).then(|| {
            let errors = self.errors();
            let warnings = counted(self.findings.len() - errors, "warning");
            format!(
                "and {more} more: {}, {warnings} in all",
                counted(errors, "error")
            )
        })
    }

    /// The findings as texts, with colours where `coloured`.
    pub fn lines(&self, coloured: bool) -> Vec<String> {
        let renderer = renderer(coloured);
        let mut all: Vec<String> = self
            .shown()
            .iter()
            .map(|d| d.render(&self.files, &self.text, &renderer))
            .collect();
        all.extend(self.rest());
        all
    }

    /// As one text, with colours where `coloured`.
    pub fn render(&self, coloured: bool) -> String {
        self.lines(coloured).join("\n\n")
    }

    /// Writes it to standard error, coloured where that is a terminal.
    pub fn print(&self) {
        let renderer = renderer(std::io::stderr().is_terminal());
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

fn renderer(coloured: bool) -> Renderer {
    if coloured {
        Renderer::styled()
    } else {
        Renderer::plain()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Report {}
