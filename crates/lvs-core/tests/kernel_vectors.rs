//! The kernel's own choices, recorded: every case is replayed and compared.

mod replay;

#[test]
fn schedulers_choose_as_the_kernel_does() {
    replay::check(&replay::cases("schedulers", |_| true), 1232);
}

#[test]
fn persistence_is_the_kernels() {
    replay::check(&replay::cases("persistence", |_| true), 357);
}

#[test]
fn connections_go_through_the_kernels_states() {
    let mut cases = replay::cases("tcpstates", |_| true);
    cases.retain(|case| case.get("backup").is_none());
    replay::check(&cases, 1382);
}
