//! `lvsadm completions` and `lvsadm man`, generated from the tables that the parser and the
//! commands use.

mod completions;
mod page;

use super::{Operator, Outcome, Trouble, Words};
use crate::invocation::Invocation;

/// Prints the completions of `operators` for a shell.
pub(super) fn completions(
    run: &mut Invocation<'_>,
    words: &Words,
    operators: &[Operator],
) -> Outcome {
    let text = match words.free.as_slice() {
        [shell] if shell == "bash" => completions::bash(operators),
        [shell] if shell == "zsh" => completions::zsh(operators),
        [shell] if shell == "fish" => completions::fish(operators),
        _ => return Err(Trouble::Usage("expected a shell: bash, zsh or fish".into())),
    };
    run.output.write_all(text.as_bytes())?;
    Ok(0)
}

/// Prints the manual page, with the commands `operators`.
pub(super) fn man(run: &mut Invocation<'_>, words: &Words, operators: &[Operator]) -> Outcome {
    words.no_arguments()?;
    run.output.write_all(page::page(operators).as_bytes())?;
    Ok(0)
}
