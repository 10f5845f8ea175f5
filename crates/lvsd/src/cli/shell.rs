//! `lvsd man` and `lvsd completions`, from the same table as the command line.

use clap::CommandFactory;

use super::Arguments;

pub(super) fn man() -> Vec<u8> {
    let mut page = Vec::new();
    // Into memory, which does not fail.
    let _ = clap_mangen::Man::new(Arguments::command())
        .section("8")
        .manual("Linux Virtual Server")
        .render(&mut page);
    page
}

pub(super) fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "lvsd", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_and_completions_know_all_commands() {
        Arguments::command().debug_assert();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        let (page, bash) = (text(man()), text(completions(clap_complete::Shell::Bash)));
        for command in Arguments::command().get_subcommands() {
            let name = command.get_name();
            let escaped = name.replace('-', "\\-");
            assert!(page.contains(&escaped) && bash.contains(name), "{name}");
        }
        assert!(page.contains("check\\-config"), "{page}");
    }
}
