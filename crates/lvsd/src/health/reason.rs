//! The reason why a server is down, with its fix.

use std::fmt;

/// Greatest bytes of an observation: servers and programs can influence some.
const LEN_MAX: usize = 256;

/// The reason why a server is down, with its fix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reason {
    /// The observation.
    pub text: String,
    /// The fix; empty if the observation names none.
    pub fix: String,
}

impl Reason {
    /// The same, with a fix.
    #[must_use]
    pub fn with_fix(mut self, fix: String) -> Self {
        self.fix = fix;
        self
    }

    /// The same with at most [`LEN_MAX`] bytes of observation.
    pub(super) fn short(self) -> Self {
        Self {
            text: short(self.text),
            fix: self.fix,
        }
    }
}

impl<T: Into<String>> From<T> for Reason {
    fn from(text: T) -> Self {
        Self {
            text: text.into(),
            fix: String::new(),
        }
    }
}

/// The observation, then the fix: for a line of the log.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match self.fix.as_str() {
            "" => Ok(()),
            fix => write!(f, " ({fix})"),
        }
    }
}

/// A text without what is beyond [`LEN_MAX`].
pub(super) fn short(mut text: String) -> String {
    if text.len() > LEN_MAX {
        let mut ends = (0..=LEN_MAX - 3).rev();
        let end = ends.find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
        text.shrink_to_fit();
    }
    text
}
