//! Reports unknown keys of a table, with suggestions.

use std::ops::Range;

use lvs_api::words::meant;

use super::Diagnostic;

/// Renamed, moved and removed keys: each with a key that the table contains today, and the new
/// spelling or the replacement.
const RENAMED: [(&str, &str, &str); 30] = [
    ("in_kernel", "fast_path", "write `fast_path`"),
    ("outlive", "warm_restart", "write `warm_restart`"),
    (
        "adopt",
        "manage_all_services",
        "write `manage_all_services`",
    ),
    (
        "drift",
        "manual_changes",
        "write `manual_changes`, \"revert\" or \"report\"",
    ),
    (
        "max_remove",
        "max_removed_percent",
        "write `max_removed_percent`",
    ),
    ("alpha", "start_down", "write `start_down`"),
    ("omega", "remove_on_exit", "write `remove_on_exit`"),
    ("min_share", "panic_below", "write `panic_below`"),
    ("upper", "resume_below", "write `max_connections`"),
    ("lower", "resume_below", "write `resume_below`"),
    ("drain", "withdraw_delay", "write `withdraw_delay`"),
    ("hold", "hold_without_lvsd", "write `hold_without_lvsd`"),
    ("address", "host_addresses", "write `host_addresses`"),
    ("peers", "mismatch_alarm_after", "write `addresses`"),
    ("wait", "mismatch_alarm_after", "write `connect_timeout`"),
    (
        "alarm",
        "mismatch_alarm_after",
        "write `mismatch_alarm_after`",
    ),
    (
        "token_file",
        "allowed_hosts",
        "write [[api.token]] with `name`, `file` (this path) and role = \"admin\"",
    ),
    ("procfs", "allowed_hosts", PROCFS),
    ("procfs_connections", "allowed_hosts", PROCFS),
    ("role", "ipvs", IPVS),
    ("interface", "ipvs", IPVS),
    ("syncid", "ipvs", IPVS),
    ("group", "ipvs", IPVS),
    ("port", "ipvs", IPVS),
    ("ttl", "ipvs", IPVS),
    ("maxlen", "ipvs", IPVS),
    ("key_file", "ipvs", "write it below [sync.peers]"),
    ("listen", "ipvs", "write it below [sync.peers]"),
    ("wait", "ipvs", "write `connect_timeout` below [sync.peers]"),
    (
        "alarm",
        "ipvs",
        "write `mismatch_alarm_after` below [sync.peers]",
    ),
];

const IPVS: &str = "write it below [sync.ipvs]";
const PROCFS: &str = "write `lvs-run -- COMMAND` to start the program that reads these files: it reads /proc/net/ip_vs* of the dataplane; and remove this key";

/// Reports a key that the table does not accept.
pub(crate) fn unknown_key(span: Range<usize>, key: &str, known: &[&str]) -> Diagnostic {
    let finding =
        Diagnostic::error(span, format!("unknown key `{key}`")).label("not a key of this table");
    let mut renamed = RENAMED.iter();
    let renamed = renamed.find(|(old, beside, _)| *old == key && known.contains(beside));
    if let Some((_, _, help)) = renamed {
        return finding.help(*help);
    }
    match meant(key, known.iter().copied()) {
        Some(word) => finding.help(format!("did you mean `{word}`?")),
        None => finding.help(format!("this table has the keys: {}", known.join(", "))),
    }
}
