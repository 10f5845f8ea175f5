//! The kernel's own choices, recorded: every case is replayed and compared.

mod replay;

#[test]
fn schedulers_choose_as_the_kernel_does() {
    let mut cases = replay::cases("schedulers", |_| true);
    cases.retain(|c| !c["flags"].as_array().unwrap().iter().any(|f| f == "ops"));
    replay::check(&cases, 1225);
}
