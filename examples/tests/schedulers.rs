//! The `schedulers` example, compared with choices that were recorded from the kernel.

use std::process::Command;

#[test]
fn schedulers_example_shows_choices_of_kernel() {
    let output = Command::new(env!("CARGO_BIN_EXE_schedulers"))
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let picks = |name: &str| {
        let line = printed
            .lines()
            .find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name} is missing:\n{printed}"))[7..].to_owned()
    };
    assert_eq!(picks("rr"), "cbacbacbacba");
    assert_eq!(picks("wrr"), "cbaabacbaaba");
    assert_eq!(picks("none"), "------------");
    // Each server accepts one connection more than its weight; the last three connections get no
    // server.
    assert_eq!(picks("ovf"), "aaaabbbcc---");
    for name in [
        "lc", "wlc", "sed", "nq", "fo", "dh", "sh", "mh", "lblc", "lblcr", "twos", "ewma",
    ] {
        assert!(!picks(name).contains(['-', '?']), "{name}: {}", picks(name));
    }
}
