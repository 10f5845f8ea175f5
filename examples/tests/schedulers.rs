//! The `schedulers` example, against picks that the kernel made.

use std::process::Command;

#[test]
fn shows_the_kernels_choices() {
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
    // Each server accepts connections up to one above its weight; the others have no server.
    assert_eq!(picks("ovf"), "aaaabbbcc---");
    for name in [
        "lc", "wlc", "sed", "nq", "fo", "dh", "sh", "mh", "lblc", "lblcr", "twos", "ewma",
    ] {
        assert!(!picks(name).contains(['-', '?']), "{name}: {}", picks(name));
    }
}
