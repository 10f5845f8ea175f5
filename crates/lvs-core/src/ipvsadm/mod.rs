//! The command line of ipvsadm 1.31: its grammar, and the texts that it prints.
//!
//! [`parse`] turns the words of one command line into a [`Command`], or into the [`Refusal`] that
//! ipvsadm would print, byte for byte. [`parse_own`] also accepts options that ipvsadm does not
//! have. [`render`] writes the listings from the answers of a dataplane. [`Lines`] cuts a file of
//! rules into command lines. This module uses no file, socket or name server: the caller resolves
//! names by [`Resolve`].
//!
//! ```
//! use lvs_core::ipvsadm::{Command, Numeric, parse};
//!
//! let words = ["-A", "-t", "192.0.2.1:80", "-s", "rr"];
//! let Ok(Command::AddService(spec)) = parse("ipvsadm", &words, &Numeric) else {
//!     panic!("the line is valid");
//! };
//! assert_eq!(spec.config.scheduler, "rr");
//!
//! let refusal = parse("ipvsadm", &["-A"], &Numeric).unwrap_err();
//! assert_eq!(refusal.status(), 2);
//! assert_eq!(refusal.text(), b"You need to supply the 'service-address' option for the 'add-service' command\n");
//! ```

mod command;
mod lines;
mod parse;
mod popt;
pub mod render;
mod resolve;
pub mod table;
mod value;

pub use command::{Command, Format, ListOptions, What};
pub use lines::{Lines, WORD_MAX, rules};
pub use parse::{Refusal, parse, parse_own};
pub use resolve::{Numeric, Resolve};

use crate::api::{Failure, FailureCode};

/// The output of `-v`, and the first line of `-h`.
pub const VERSION_TEXT: &str = "ipvsadm v1.31 2019/12/24 (compiled with popt and IPVS v1.2.1)\n";

/// The output of `-h` after [`VERSION_TEXT`].
pub const HELP_TEXT: &str = include_str!("help.txt");

/// The hint that ipvsadm prints after the reason why it cannot use IPVS.
pub const NO_IPVS_HINT: &str =
    "Are you sure that IP Virtual Server is built in the kernel or as module?";

/// The line that ipvsadm prints when `command` is refused with `failure`, without the line break.
///
/// A refusal that IPVS in the kernel does not have gets its own text, mostly the dataplane's.
pub fn failure_text<'a>(command: &Command, failure: &'a Failure) -> &'a str {
    let of_server = matches!(
        command,
        Command::AddServer(_) | Command::EditServer(_) | Command::DeleteServer { .. }
    );
    match failure.code {
        FailureCode::Exists if of_server => "Destination already exists",
        FailureCode::Exists => "Service already exists",
        FailureCode::NoService if of_server => "Service not defined",
        FailureCode::NoService => "No such service",
        FailureCode::NoServer => "No such destination",
        FailureCode::NoScheduler => "Scheduler or persistence engine not found",
        FailureCode::Running => "Daemon has already run",
        FailureCode::NotRunning => "No daemon is running",
        FailureCode::Permission => "Permission denied (you must be root)",
        FailureCode::Invalid => {
            "Invalid operation.  Possibly wrong module version, address not unicast, ..."
        }
        FailureCode::Full => "Memory allocation problem",
        FailureCode::Range => "Numerical result out of range",
        FailureCode::NoDevice => "No such device",
        FailureCode::Unreachable => "Network is unreachable",
        FailureCode::NoLocalAddress => {
            "full NAT needs a local address of the service's family: start the dataplane with \
             --local-address, or use `lvsadm local add`"
        }
        FailureCode::Unsupported
        | FailureCode::Malformed
        | FailureCode::Version
        | FailureCode::Internal => &failure.message,
    }
}
