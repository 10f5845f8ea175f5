//! Options of earlier versions.

use std::process::Command;

#[test]
fn removed_option_error_names_its_replacement() {
    for (option, instead) in [
        ("--echo-limit=5", "`--echo N`; 0 drops all requests"),
        ("--icmp-msgs-burst=5", "`--icmp-limit`"),
        ("--icmp-msgs-per-sec=5", "`--icmp-limit N`; 0 disables"),
        ("--icmp-ratelimit=5", "`--icmp-limit N`"),
        ("--pin=on", "`CPUAffinity=`"),
        ("--real-time=off", "`LimitRTPRIO=0`"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lvs-dataplane"))
            .arg(option)
            .output()
            .expect("the program starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option}: {text}");
        assert!(text.contains(instead), "{option}: {text}");
    }
}
