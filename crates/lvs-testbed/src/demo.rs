//! `lvs-testbed demo`.

/// What to show.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoOptions {}

/// Runs the demo.
///
/// # Errors
///
/// When something did not work.
pub fn main(_options: &DemoOptions) -> anyhow::Result<()> {
    Ok(())
}
