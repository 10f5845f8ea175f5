//! The `geographic` example.

use std::process::Command;

#[test]
fn geographic_clients_use_servers_of_their_region_until_region_is_drained() {
    let output = Command::new(env!("CARGO_BIN_EXE_geographic"))
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = printed.lines().collect();
    let to = |line: usize| lines[line].split(" -> ").nth(1).unwrap();
    assert!(lines[0].starts_with("as configured"), "{printed}");
    assert_eq!([to(1), to(2)], ["10.1.0.2:80", "10.1.0.1:80"], "{printed}");
    assert_eq!([to(3), to(4)], ["10.2.0.1:80"; 2], "{printed}");
    assert!(
        to(5).starts_with("10.1."),
        "a client without a region was not sent to the least loaded server: {printed}"
    );
    let drained = [to(7), to(8), to(9), to(10), to(11)];
    assert_eq!(drained, ["10.2.0.1:80"; 5], "{printed}");
}
