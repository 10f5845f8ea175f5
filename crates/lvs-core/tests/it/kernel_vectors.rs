//! The kernel's own choices, recorded: every case is replayed and compared.

#[test]
fn schedulers_choose_as_the_kernel_does() {
    crate::replay::check(&crate::replay::cases("schedulers", |_| true), 1232);
}

#[test]
fn persistence_equals_the_kernel() {
    crate::replay::check(&crate::replay::cases("persistence", |_| true), 357);
}

#[test]
fn connection_states_equal_the_kernel() {
    crate::replay::check(&crate::replay::cases("tcpstates", |_| true), 1475);
}

#[test]
fn counters_and_rates_equal_the_kernel() {
    crate::replay::check(&crate::replay::cases("stats", |_| true), 74);
}

#[test]
fn backup_applies_messages_as_the_kernel_does() {
    let cases = crate::replay::cases("sync", |name| !name.starts_with("encode"));
    crate::replay::check_with(&cases, 1619, |case| crate::replay::Replay::run_backup(case));
}

#[test]
fn master_sends_the_messages_of_the_kernel() {
    let cases = crate::replay::cases("sync", |name| name.starts_with("encode"));
    crate::replay::check_with(&cases, 291, |case| crate::replay::Replay::run_master(case));
}

#[test]
fn proc_files_equal_the_kernel() {
    crate::replay::check(&crate::replay::cases("proc", |_| true), 3);
}
