//! `lvsd man` and `lvsd completions`, from the same table as the command line.

use std::io::{self, Write as _};

use clap::CommandFactory;
use clap_mangen::Man;

use super::Arguments;

pub(super) fn man() -> Vec<u8> {
    let mut page = Vec::new();
    let _ = write_page(&mut page);
    page
}

/// Writes one manual page for all commands, because separate pages would complicate packages.
fn write_page(page: &mut Vec<u8>) -> io::Result<()> {
    let command = Arguments::command();
    let man = Man::new(command.clone())
        .section("8")
        .manual("Linux Virtual Server");
    man.render_title(page)?;
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    writeln!(page, ".SH COMMANDS")?;
    for command in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        let name = format!("lvsd {}", command.get_name());
        writeln!(page, ".SS \"{}\"", name.replace('-', "\\-"))?;
        let man = Man::new(command.clone().bin_name(name));
        let mut part = Vec::new();
        man.render_description_section(&mut part)?;
        man.render_synopsis_section(&mut part)?;
        man.render_options_section(&mut part)?;
        for line in String::from_utf8_lossy(&part).lines() {
            match line.strip_prefix(".SH ") {
                Some("SYNOPSIS") => writeln!(page, ".PP")?,
                Some(_) => {}
                None => writeln!(page, "{line}")?,
            }
        }
    }
    writeln!(
        page,
        ".SH SEE ALSO\nlvs\\-dataplane(8), lvsadm(8), lvsd.toml(5)"
    )
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
    fn manual_page_and_bash_completions_contain_all_commands_of_lvsd() {
        Arguments::command().debug_assert();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the output is UTF-8");
        let (page, bash) = (text(man()), text(completions(clap_complete::Shell::Bash)));
        for command in Arguments::command().get_subcommands() {
            let name = command.get_name();
            let escaped = name.replace('-', "\\-");
            assert!(page.contains(&escaped) && bash.contains(name), "{name}");
        }
    }

    #[test]
    fn lvsd_command_list_equals_commands_that_lvsadm_lacks() {
        let of_both = ["drain", "undrain", "maintenance", "completions", "man"];
        let command = Arguments::command();
        let own = command.get_subcommands().map(clap::Command::get_name);
        let own = own.filter(|name| !of_both.contains(name));
        assert!(own.eq(lvs_api::guidance::LVSD_COMMANDS));
    }

    #[test]
    fn manual_pages_contain_options_of_commands_and_refer_to_shipped_pages_only() {
        let page = String::from_utf8(man()).expect("the output is UTF-8");
        for words in [
            "\\-\\-force",
            "\\-\\-why",
            "\\-\\-rest",
            "lvsd keepalived\\-config",
        ] {
            assert!(page.contains(words), "no {words:?} in {page}");
        }
        // The pages that tools/package installs.
        let shipped = ["lvsd(8)", "lvsadm(8)", "lvs\\-dataplane(8)", "lvsd.toml(5)"];
        let pages = [page, crate::schema::page()];
        for (page, section) in pages.iter().flat_map(|page| [(page, "(8)"), (page, "(5)")]) {
            for (end, _) in page.match_indices(section) {
                let before = &page[..end];
                let start = before.rfind([' ', '\n', '"']).map_or(0, |at| at + 1);
                let named = &page[start..end + section.len()];
                assert!(shipped.contains(&named), "{named}");
            }
        }
    }
}
