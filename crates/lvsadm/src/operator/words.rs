//! Parses the arguments after a command by the table of its options.

use super::{Operator, Trouble};

/// The arguments after a command.
#[derive(Debug, Default)]
pub(crate) struct Words {
    pub(crate) free: Vec<String>,
    options: Vec<(&'static str, String)>,
}

impl Words {
    pub(super) fn new(operator: &Operator, words: &[Vec<u8>]) -> Result<Self, String> {
        let mut taken = Self::default();
        let mut words = words
            .iter()
            .map(|word| String::from_utf8_lossy(word).into_owned());
        while let Some(word) = words.next() {
            if !word.starts_with('-') || word == "-" {
                taken.free.push(word);
                continue;
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let flag = operator
                .flags
                .iter()
                .find(|flag| flag.name == name)
                .ok_or_else(|| format!("unknown option {name}"))?;
            let value = match (flag.argument.is_empty(), value) {
                (true, None) => String::new(),
                (true, Some(_)) => return Err(format!("{name} takes no argument")),
                (false, Some(value)) => value,
                (false, None) => words
                    .next()
                    .ok_or_else(|| format!("{name}: missing argument {}", flag.argument))?,
            };
            taken.options.push((flag.name, value));
        }
        Ok(taken)
    }

    /// Fails if there are other words than options.
    pub(crate) fn no_arguments(&self) -> Result<(), Trouble> {
        match self.free.first() {
            None => Ok(()),
            Some(word) => Err(Trouble::Usage(format!("unexpected argument {word}"))),
        }
    }

    /// The value of an option; `None` if it was not given. If it was given several times, the last
    /// value applies.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        let mut options = self.options.iter().rev();
        let found = options.find(|(option, _)| *option == name)?;
        Some(&found.1)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// The value of an option as a number; `None` if the option was not given.
    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, Trouble> {
        self.value(name)
            .map(|text| {
                text.parse()
                    .map_err(|_| Trouble::Usage(format!("{name}: {text:?} is not a valid number")))
            })
            .transpose()
    }
}
