//! Splits a command line into options as the library popt does, because users of ipvsadm rely on
//! its behaviour.

use alloc::vec::Vec;

use super::table::{self, Argument, OptionSpec};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    Unknown,
    MissingArgument,
    UnwantedArgument,
}

impl Problem {
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Unknown => "unknown option",
            Self::MissingArgument => "missing argument",
            Self::UnwantedArgument => "option does not take an argument",
        }
    }
}

pub(super) type Found<'a> = (&'static OptionSpec, Option<&'a [u8]>);

/// The words of a command line, without the program's name, and the position up to which they were
/// read.
pub(super) struct Words<'a, W> {
    words: &'a [W],
    next: usize,
    long: fn(&[u8]) -> Option<&'static OptionSpec>,
    /// The unread part of a word with several short options, such as `-Lnc`.
    glued: &'a [u8],
    /// Whether `--` was read, so that no options follow.
    ended: bool,
    /// Words that are not options, in order.
    leftovers: Vec<&'a [u8]>,
}

impl<'a, W: AsRef<[u8]>> Words<'a, W> {
    pub(super) const fn new(
        words: &'a [W],
        long: fn(&[u8]) -> Option<&'static OptionSpec>,
    ) -> Self {
        Self {
            words,
            next: 0,
            long,
            glued: &[],
            ended: false,
            leftovers: Vec::new(),
        }
    }

    /// The next option; `None` at the end of the line. Words before it that are not options are
    /// added to `leftovers`.
    pub(super) fn next(&mut self) -> Result<Option<Found<'a>>, Problem> {
        if self.glued.is_empty() {
            loop {
                let Some(word) = self.take() else {
                    return Ok(None);
                };
                if self.ended || word.len() < 2 || word[0] != b'-' {
                    self.leftovers.push(word);
                } else if word == b"--" {
                    self.ended = true;
                } else if let Some(name) = word.strip_prefix(b"--") {
                    return self.long(name).map(Some);
                } else {
                    self.glued = &word[1..];
                    break;
                }
            }
        }
        self.short().map(Some)
    }

    /// The last word that was read, for error messages.
    pub(super) fn current(&self) -> &'a [u8] {
        match self.next.checked_sub(1).and_then(|i| self.words.get(i)) {
            Some(word) => word.as_ref(),
            None => &[],
        }
    }

    /// The words that are neither options nor their arguments. The list is complete when
    /// [`next`](Self::next) has returned `None`.
    pub(super) fn leftovers(&self) -> &[&'a [u8]] {
        &self.leftovers
    }

    fn take(&mut self) -> Option<&'a [u8]> {
        let word = self.words.get(self.next)?.as_ref();
        self.next += 1;
        Some(word)
    }

    fn long(&mut self, word: &'a [u8]) -> Result<Found<'a>, Problem> {
        let (name, inline) = match word.iter().position(|&b| b == b'=') {
            Some(at) => (&word[..at], Some(&word[at + 1..])),
            None => (word, None),
        };
        let spec = (self.long)(name).ok_or(Problem::Unknown)?;
        self.argument(spec, inline)
    }

    fn short(&mut self) -> Result<Found<'a>, Problem> {
        let (&letter, rest) = self.glued.split_first().ok_or(Problem::Unknown)?;
        self.glued = &[];
        let spec = table::short(letter).ok_or(Problem::Unknown)?;
        if spec.argument == Argument::No {
            if rest.first() == Some(&b'=') {
                return Err(Problem::UnwantedArgument);
            }
            self.glued = rest;
            return Ok((spec, None));
        }
        let inline = match rest {
            [] => None,
            [b'=', value @ ..] => Some(value),
            value => Some(value),
        };
        self.argument(spec, inline)
    }

    fn argument(
        &mut self,
        spec: &'static OptionSpec,
        inline: Option<&'a [u8]>,
    ) -> Result<Found<'a>, Problem> {
        let value = match (spec.argument, inline) {
            (Argument::No, Some(_)) => return Err(Problem::UnwantedArgument),
            (Argument::No, None) => None,
            (_, Some(value)) => Some(value),
            (Argument::Required(_), None) => Some(self.take().ok_or(Problem::MissingArgument)?),
            (Argument::Optional(_), None) => match self.words.get(self.next) {
                Some(word) if word.as_ref().first() != Some(&b'-') => self.take(),
                _ => None,
            },
        };
        Ok((spec, value))
    }
}
