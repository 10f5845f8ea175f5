//! Runs each attack for a second. The dataplane must continue to run with bounded memory, count
//! refused packets, and serve valid clients. `lvs-testbed attack` measures the rates.

use anyhow::Result;
use lvs_testbed::attack;

/// The attacks run one after the other, because each uses the whole machine.
#[test]
#[ignore = "long"]
fn dataplane_under_attack_uses_bounded_memory_and_serves_valid_clients() -> Result<()> {
    for name in attack::names() {
        attack::run(name, 1, 1, None)?.check()?;
    }
    Ok(())
}
