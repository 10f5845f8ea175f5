//! Each attack for a second: the dataplane lives, its memory is bounded, what it refuses is
//! counted, and what honest clients get is right. How fast they get it is measured by hand:
//! `lvs-testbed attack`.

use anyhow::Result;
use lvs_testbed::attack;

/// One attack at a time: each takes all the machine has.
#[test]
#[ignore = "long"]
fn attacks_are_bounded_and_counted() -> Result<()> {
    for name in attack::names() {
        attack::run(name, 1, 1, None)?.check()?;
    }
    Ok(())
}
