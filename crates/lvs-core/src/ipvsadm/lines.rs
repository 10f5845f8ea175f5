//! Splits the input of `ipvsadm -R` into command lines.

use alloc::vec::Vec;

/// Maximum length of a word in bytes; a longer word is split into words of this length.
pub const WORD_MAX: usize = 4096;

/// Splits a byte stream into command lines. Words are separated by spaces, tabs and carriage
/// returns; there are no quotes and no comments. Each word `ipvsadm` and each empty line is
/// omitted.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    words: Vec<Vec<u8>>,
    word: Vec<u8>,
}

impl Lines {
    /// The state at the start of a stream.
    pub const fn new() -> Self {
        Self {
            words: Vec::new(),
            word: Vec::new(),
        }
    }

    /// Adds one byte. At the end of a non-empty line, returns its words.
    pub fn push(&mut self, byte: u8) -> Option<Vec<Vec<u8>>> {
        match byte {
            b' ' | b'\t' | b'\r' => self.end_word(),
            b'\n' => return self.finish(),
            _ => {
                if self.word.len() == WORD_MAX {
                    self.end_word();
                }
                self.word.push(byte);
            }
        }
        None
    }

    /// Ends the stream; returns the words of the last line if it has no line break.
    pub fn finish(&mut self) -> Option<Vec<Vec<u8>>> {
        self.end_word();
        let words = core::mem::take(&mut self.words);
        (!words.is_empty()).then_some(words)
    }

    fn end_word(&mut self) {
        let mut word = core::mem::take(&mut self.word);
        if word.is_empty() {
            return;
        }
        // ipvsadm reads a word as a C string: a NUL ends it.
        if let Some(end) = word.iter().position(|&b| b == 0) {
            word.truncate(end);
        }
        if word != b"ipvsadm" {
            self.words.push(word);
        }
    }
}

/// The command lines of a file that ipvsadm-save wrote, each with its line number, from 1. Empty
/// lines are skipped, and so are lines that begin with `#`, as in ipvsadm-restore.
pub fn rules(text: &[u8]) -> impl Iterator<Item = (usize, Vec<Vec<u8>>)> + '_ {
    text.split(|&b| b == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.starts_with(b"#"))
        .filter_map(|(i, line)| {
            let mut lines = Lines::new();
            for &byte in line {
                lines.push(byte);
            }
            Some((i + 1, lines.finish()?))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvsadm_reader_splits_words_and_lines() {
        let mut lines = Lines::new();
        let mut seen = Vec::new();
        for &byte in b"\n  \nipvsadm -A\t-t 192.0.2.1:80\r\n-C" {
            seen.extend(lines.push(byte));
        }
        seen.extend(lines.finish());
        let expected: [&[&[u8]]; 2] = [&[b"-A", b"-t", b"192.0.2.1:80"], &[b"-C"]];
        assert_eq!(seen, expected);
        assert_eq!(lines.finish(), None);
    }

    #[test]
    fn ipvsadm_rules_have_line_numbers() {
        let lines: Vec<_> = rules(b"# saved\n\n-C\n -S -n").collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].0, 3);
        assert_eq!(lines[1], (4, [b"-S".to_vec(), b"-n".to_vec()].to_vec()));
    }

    #[test]
    fn ipvsadm_reader_splits_words_above_maximum_length() {
        let mut lines = Lines::new();
        for _ in 0..WORD_MAX + 1 {
            assert_eq!(lines.push(b'r'), None);
        }
        let line = lines.push(b'\n').expect("the line has words");
        assert_eq!(line.iter().map(Vec::len).collect::<Vec<_>>(), [WORD_MAX, 1]);
    }
}
