//! The kernel's own choices, recorded: every case is replayed and compared.

#[test]
fn schedulers_choose_as_the_kernel_does() {
    crate::replay::check(&crate::replay::cases("schedulers", |_| true), 1232);
}

#[test]
fn persistence_is_the_kernels() {
    crate::replay::check(&crate::replay::cases("persistence", |_| true), 357);
}

#[test]
fn connections_go_through_the_kernels_states() {
    crate::replay::check(&crate::replay::cases("tcpstates", |_| true), 1475);
}

#[test]
fn counters_and_rates_are_the_kernels() {
    crate::replay::check(&crate::replay::cases("stats", |_| true), 74);
}

#[test]
fn a_backup_makes_of_messages_what_the_kernel_makes() {
    let cases = crate::replay::cases("sync", |name| !name.starts_with("encode"));
    crate::replay::check_with(&cases, 1619, |case| crate::replay::Replay::run_backup(case));
}

#[test]
fn a_master_sends_what_the_kernel_sends() {
    let cases = crate::replay::cases("sync", |name| name.starts_with("encode"));
    crate::replay::check_with(&cases, 291, |case| crate::replay::Replay::run_master(case));
}

#[test]
fn files_in_proc_read_as_the_kernels() {
    crate::replay::check(&crate::replay::cases("proc", |_| true), 3);
}
