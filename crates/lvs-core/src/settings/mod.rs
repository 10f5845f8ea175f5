//! Settings of a director and of its services: sysctls, initial timeouts, and settings that the
//! kernel's IPVS does not have.

mod extras;
mod limits;
mod profile;
mod sysctl;
mod when_full;

pub use self::extras::{Extras, OnServerDown};
pub use self::limits::Limits;
pub use self::profile::Profile;
pub use self::sysctl::Sysctls;
pub use self::when_full::WhenFull;
