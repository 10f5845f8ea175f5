//! Runs the program, with the behaviour that its name selects.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;

use lvs_api::Address;
use lvs_api::names::Names;
use lvs_core::ipvsadm::{Command, NO_IPVS_HINT};

use crate::invocation::{Connect, Invocation, LazyNames, Program};
use crate::session::Session;
use crate::{atomic, operator, own};

/// The exit status that a shell reports for a program that wrote to a closed pipe.
const BROKEN_PIPE: u8 = 141;

/// The standard streams.
pub struct Streams<'a> {
    /// Standard input.
    pub input: &'a mut dyn Read,
    /// Standard output.
    pub output: &'a mut dyn Write,
    /// Standard error.
    pub errors: &'a mut dyn Write,
}

impl std::fmt::Debug for Streams<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}

/// Runs as the program that the file name in `argv[0]` selects (`ipvsadm`, `ipvsadm-save` or
/// `ipvsadm-restore`, otherwise `lvsadm`), with the arguments that follow. Returns the exit status.
///
/// `address` is the dataplane's address if the arguments contain no `--socket`. `connect` opens the
/// connection to a dataplane. `names` creates the resolver of host and port names when one is first
/// needed.
pub fn run(
    argv: &[Vec<u8>],
    address: Address,
    connect: Connect<'_>,
    names: &dyn Fn() -> Names,
    streams: &mut Streams<'_>,
) -> u8 {
    let (argv0, words) = match argv.split_first() {
        Some((argv0, words)) => (String::from_utf8_lossy(argv0).into_owned(), words),
        None => ("lvsadm".into(), argv),
    };
    let mut output = BufWriter::with_capacity(64 << 10, &mut *streams.output);
    let mut invocation = Invocation {
        program: Program::of(argv0.as_bytes()),
        argv0,
        address,
        json: false,
        connect,
        names: LazyNames {
            load: names,
            names: OnceCell::new(),
        },
        input: &mut *streams.input,
        output: &mut output,
        errors: &mut *streams.errors,
    };
    let done = match invocation.program {
        Program::Lvsadm => invocation.lvsadm(words),
        Program::Ipvsadm => invocation.ipvsadm(words),
        Program::Save => invocation.save(words),
        Program::Restore => invocation.restore(),
    };
    match done.and_then(|status| output.flush().map(|()| status)) {
        Ok(status) => status,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => BROKEN_PIPE,
        Err(error) => {
            let _ = writeln!(streams.errors, "write error: {error}");
            1
        }
    }
}

impl Invocation<'_> {
    fn ipvsadm(&mut self, words: &[Vec<u8>]) -> io::Result<u8> {
        // ipvsadm opens its interface before it parses the command line.
        let reason = match (self.connect)(&self.address) {
            Ok(client) if client.hello().writable => return Session::new(client).line(self, words),
            Ok(_) => "Permission denied (you must be root)".into(),
            Err(reason) => reason,
        };
        writeln!(self.errors, "Can't initialize ipvs: {reason}")?;
        writeln!(self.errors, "{NO_IPVS_HINT}")?;
        Ok(2)
    }

    fn save(&mut self, words: &[Vec<u8>]) -> io::Result<u8> {
        let mut call = vec![b"-S".to_vec()];
        for word in words.iter().filter(|word| word.starts_with(b"-")) {
            if word != b"-n" {
                let name = self.argv0.rsplit('/').next().unwrap_or_default().to_owned();
                writeln!(
                    self.errors,
                    "{name}: Script to save the IPVS table to stdout.\n   \
                     With the -n option, prints out the table in numeric format."
                )?;
                return Ok(1);
            }
            if call.len() == 1 {
                call.push(word.clone());
            }
        }
        self.argv0 = "ipvsadm".into();
        self.ipvsadm(&call)
    }

    /// Runs as ipvsadm-restore: reads all of the input, clears the table, and then applies the
    /// rules.
    fn restore(&mut self) -> io::Result<u8> {
        let mut text = Vec::new();
        self.input.read_to_end(&mut text)?;
        let rules = restore_input(&text);
        if is_binary(&text) {
            writeln!(self.errors, "grep: (standard input): binary file matches")?;
        }
        self.argv0 = "ipvsadm".into();
        self.ipvsadm(&[b"-C".to_vec()])?;
        self.output.flush()?;
        let mut input = rules.as_slice();
        Invocation {
            program: self.program,
            argv0: self.argv0.clone(),
            address: self.address.clone(),
            json: false,
            connect: &mut *self.connect,
            names: LazyNames {
                load: self.names.load,
                names: OnceCell::new(),
            },
            input: &mut input,
            output: &mut *self.output,
            errors: &mut *self.errors,
        }
        .ipvsadm(&[b"-R".to_vec()])
    }

    fn lvsadm(&mut self, mut words: &[Vec<u8>]) -> io::Result<u8> {
        loop {
            match words {
                [option, rest @ ..] if option == b"--json" => {
                    self.json = true;
                    words = rest;
                }
                [option, socket, rest @ ..] if option == b"--socket" => {
                    self.address = Address::new(OsStr::from_bytes(socket));
                    words = rest;
                }
                [option, rest @ ..] if option.starts_with(b"--socket=") => {
                    self.address = Address::new(OsStr::from_bytes(&option[9..]));
                    words = rest;
                }
                [option] if option == b"--socket" => {
                    writeln!(
                        self.errors,
                        "--socket: missing argument: a path, or @NAME for an abstract socket"
                    )?;
                    return Ok(2);
                }
                _ => break,
            }
        }
        if let Some((word, rest)) = words.split_first()
            && let Some(operator) = operator::find(word)
        {
            return operator.run(self, rest);
        }
        match words {
            [word] if word == b"help" => {
                self.output.write_all(operator::help().as_bytes())?;
                return Ok(0);
            }
            [word, about] if word == b"help" => {
                return match operator::help_on(about) {
                    Ok(text) => self.output.write_all(text.as_bytes()).map(|()| 0),
                    Err(text) => self.errors.write_all(text.as_bytes()).map(|()| 2),
                };
            }
            [word, _, more, ..] if word == b"help" => {
                let more = String::from_utf8_lossy(more);
                writeln!(
                    self.errors,
                    "lvsadm help: unexpected argument {more:?}: name one command or scheduler at a time"
                )?;
                return Ok(2);
            }
            [word, ..] => {
                if let Some(text) = operator::unknown(word) {
                    self.errors.write_all(text.as_bytes())?;
                    return Ok(2);
                }
            }
            [] => {}
        }
        if let Some(rest) = atomic::restore_words(words) {
            return atomic::restore(self, &rest);
        }
        // Errors of the command line itself need no dataplane.
        match self.parse(words) {
            Err(refusal) => {
                self.errors.write_all(refusal.text())?;
                return Ok(refusal.status());
            }
            Ok(Command::Help) => {
                self.output.write_all(operator::help().as_bytes())?;
                return Ok(0);
            }
            Ok(Command::Version) => {
                self.output.write_all(own::VERSION.as_bytes())?;
                return Ok(0);
            }
            Ok(_) => {}
        }
        match (self.connect)(&self.address) {
            Ok(client) => Session::new(client).line(self, words),
            Err(reason) => {
                writeln!(self.errors, "{}: {reason}", self.argv0)?;
                Ok(2)
            }
        }
    }
}

/// Whether the `grep` in the script ipvsadm-restore would take the input for a binary file: it
/// contains a NUL, and not only comments.
fn is_binary(text: &[u8]) -> bool {
    let mut lines = text.split_inclusive(|&b| b == b'\n' || b == 0);
    text.contains(&0) && lines.any(|line| !line.starts_with(b"#"))
}

/// Returns the rules that the script ipvsadm-restore passes to ipvsadm: without lines that begin
/// with `#`, and with exactly one line break at the end. A binary file, and a text that `echo`
/// would read as options, contain no rules.
fn restore_input(text: &[u8]) -> Vec<u8> {
    let mut rules = Vec::with_capacity(text.len() + 1);
    if !text.contains(&0) {
        let lines = text.split_inclusive(|&b| b == b'\n');
        lines
            .filter(|line| !line.starts_with(b"#"))
            .for_each(|line| rules.extend_from_slice(line));
    }
    while rules.last() == Some(&b'\n') {
        rules.pop();
    }
    // The `echo` in the script ipvsadm-restore would read these words as its own options.
    if rules.len() > 1
        && rules[0] == b'-'
        && rules[1..].iter().all(|b| matches!(b, b'n' | b'e' | b'E'))
    {
        rules.clear();
    }
    rules.push(b'\n');
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipvsadm_restore_omits_comments_and_binary_input() {
        assert_eq!(restore_input(b"# c\n-C\n #x\n\n\n"), b"-C\n #x\n");
        assert_eq!(restore_input(b"-n\n"), b"\n");
        assert_eq!(restore_input(b""), b"\n");
        assert_eq!(restore_input(b"-C\n\0"), b"\n");
        assert!(is_binary(b"-C\n\0") && is_binary(b"#\0x"));
        assert!(!is_binary(b"-C\n") && !is_binary(b"#\0#\n"));
    }
}
