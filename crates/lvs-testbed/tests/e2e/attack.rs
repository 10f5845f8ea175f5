//! Runs each attack for a second: the dataplane continues to run, its memory is bounded, refused
//! packets are counted, and answers to valid clients are right. `lvs-testbed attack` measures their
//! speed.

use anyhow::Result;
use lvs_testbed::attack;

/// The attacks run one after the other, because each uses the whole machine.
#[test]
#[ignore = "long"]
fn attacks_are_bounded_and_counted() -> Result<()> {
    for name in attack::names() {
        attack::run(name, 1, 1, None)?.check()?;
    }
    Ok(())
}
