//! `lvsadm completions` and `lvsadm man`, generated from the tables that the parser and the
//! commands use.

mod completions;
mod page;

use super::{Outcome, Trouble, Words};
use crate::invocation::Invocation;

pub(super) fn completions(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let text = match words.free.as_slice() {
        [shell] if shell == "bash" => completions::bash(),
        [shell] if shell == "zsh" => completions::zsh(),
        [shell] if shell == "fish" => completions::fish(),
        _ => return Err(Trouble::Usage("expected a shell: bash, zsh or fish".into())),
    };
    run.output.write_all(text.as_bytes())?;
    Ok(0)
}

pub(super) fn man(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    words.no_arguments()?;
    run.output.write_all(page::page().as_bytes())?;
    Ok(0)
}
