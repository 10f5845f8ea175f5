//! The packet engine.
fn main() {}
