//! Settings under the kernel's names (`/proc/sys/net/ipv4/vs`).

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::Display;
use core::ops::RangeInclusive;

use crate::Error;

/// Generates the code for all sysctls from one table: the kernel's name, the type, the default, and
/// the parser of values.
macro_rules! sysctls {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:expr, $take:expr;)*) => {
        /// The values of all sysctls. Fields have the kernel's names and defaults. A boolean is
        /// false for 0, and true for any other number.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Sysctls {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Default for Sysctls {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl Sysctls {
            /// The names that can be read and written, sorted.
            pub const NAMES: &[&str] = &[$(stringify!($name),)*];

            /// The value as the kernel writes it.
            ///
            /// # Errors
            /// [`Error::UnknownSysctl`].
            pub fn get(&self, name: &str) -> Result<String, Error> {
                match name {
                    $(stringify!($name) => Ok(self.$name.show()),)*
                    _ => Err(Error::UnknownSysctl),
                }
            }

            /// Sets a value from its text.
            ///
            /// # Errors
            /// [`Error::SysctlValue`] if the sysctl does not accept the value
            /// ([`values`](Self::values)), and as [`get`](Self::get).
            pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
                match name {
                    $(stringify!($name) => self.$name = $take.take(value)?,)*
                    _ => return Err(Error::UnknownSysctl),
                }
                Ok(())
            }

            /// Describes the valid values of a sysctl.
            ///
            /// # Errors
            /// [`Error::UnknownSysctl`].
            pub fn values(name: &str) -> Result<String, Error> {
                match name {
                    $(stringify!($name) => Ok(Takes::<$type>::values(&$take)),)*
                    _ => Err(Error::UnknownSysctl),
                }
            }
        }
    };
}

sysctls! {
    /// Drop rate of `drop_packet` mode 3: with n, every n-th packet that would open a connection is
    /// dropped. Default 10.
    am_droprate: i32 = 10, NUMBER;
    /// Number of pages of free memory below which the automatic modes of the defences are active.
    /// They are also active while less than an eighth of the connection table is free. Default
    /// 1024.
    amemthresh: i32 = 1024, NUMBER;
    /// Forward no packets while a backup daemon runs. Default off.
    backup_only: bool = false, SWITCH;
    /// If no server of a firewall mark's service accepts a connection, send its packets to their
    /// own destination. Default off.
    cache_bypass: bool = false, SWITCH;
    /// When a SYN or an SCTP INIT may open a new connection in place of an old one with its
    /// addresses and ports: 0 never; otherwise in TIME_WAIT and CLOSE (SCTP: CLOSED); if the bit
    /// with value 2 is set, also in FIN_WAIT if no reply was ever seen. A connection that a
    /// persistence template or an FTP connection controls is not replaced. Default 1.
    conn_reuse_mode: i32 = 1, NUMBER;
    /// Keep netfilter's connection tracking. Here this sets only a flag that synchronisation
    /// messages contain. Default off.
    conntrack: bool = false, SWITCH;
    /// Log level of the kernel's debug builds; stored without effect. Default 0.
    debug_level: i32 = 0, NUMBER;
    /// Defence that removes half-open connections and some idle ones: 0 off, 1 and 2 automatic (see
    /// `amemthresh`), 3 always. Default 0.
    drop_entry: i32 = 0, Within(0..=3);
    /// Defence that drops packets which would open connections: 0 off, 1 and 2 automatic (see
    /// `amemthresh`), 3 always. Default 0.
    drop_packet: i32 = 0, Within(0..=3);
    /// CPUs of the kernel's estimator threads, as a list (`0-3,8`). Only an empty list has an
    /// effect here: it stops the estimation, as `run_estimation` 0 does. Default 0.
    est_cpulist: String = "0".into(), CPU_LIST;
    /// Nice value of the kernel's estimator threads; stored without effect. Default 0.
    est_nice: i32 = 0, Within(-20..=19);
    /// Remove connections of removed servers at once, and let a SYN of an existing connection
    /// choose another server if the connection's server has weight 0. Default off.
    expire_nodest_conn: bool = false, SWITCH;
    /// Ignore persistence templates whose server has weight 0. Default off.
    expire_quiescent_template: bool = false, SWITCH;
    /// Pass the inner packets of tunnels that the host decapsulates to the host. Default off. The
    /// embedding program decides which packets these are.
    ignore_tunneled: bool = false, SWITCH;
    /// Seconds after which `lblc` removes an unused destination. Default 86400.
    lblc_expiration: u32 = 86_400, POSITIVE;
    /// Seconds after which `lblcr` removes an unused destination, and after which it removes the
    /// most loaded server from a destination's unchanged set of servers. Default 86400.
    lblcr_expiration: u32 = 86_400, POSITIVE;
    /// Send "port unreachable" to a server that sends packets which belong to no connection.
    /// Default off.
    nat_icmp_send: bool = false, SWITCH;
    /// Check the MTU of tunnels, and copy DF to the outer header. Default on.
    pmtu_disc: bool = true, SWITCH;
    /// Take snapshots of counters and compute rates. Default on.
    run_estimation: bool = true, SWITCH;
    /// Let ICMP errors that belong to no connection open connections. Default off.
    schedule_icmp: bool = false, SWITCH;
    /// TCP state tables in which only the server's packets establish a connection: 0 off, 1 and 2
    /// automatic (see `amemthresh`), 3 always. Default 0.
    secure_tcp: i32 = 0, Within(0..=3);
    /// Any SCTP packet except ABORT may open a connection. Default off.
    sloppy_sctp: bool = false, SWITCH;
    /// Any TCP segment except RST may open a connection. Default off.
    sloppy_tcp: bool = false, SWITCH;
    /// Route replies as if the host had created them; stored without effect, because the dataplane
    /// looks up routes by destination only. Default on.
    snat_reroute: bool = true, SWITCH;
    /// Do not synchronise connections that a persistence template controls. Default off.
    sync_persist_mode: bool = false, SWITCH;
    /// Number of UDP ports to which a synchronisation daemon distributes its messages, a power of
    /// two. Default 1.
    sync_ports: u32 = 1, POWER_OF_TWO;
    /// Maximum number of messages in the queue of each port of a master. Default 16384 (the
    /// kernel's depends on its memory).
    sync_qlen_max: i32 = 16_384, NUMBER;
    /// Difference in seconds, between the end of a connection's timer and the end that was sent
    /// last, at which the connection is synchronised again; 0 means that only `sync_threshold`
    /// applies. Default 0.
    sync_refresh_period: u32 = 0, POSITIVE;
    /// Number of repeated messages about a refreshed connection, 0 to 3. Default 0.
    sync_retries: u32 = 0, Within(0..=3);
    /// Buffer of the synchronisation sockets in bytes; 0 is the system's. Default 0.
    sync_sock_size: i32 = 0, NUMBER;
    /// The packet at which a connection is synchronised, and the number of packets until each
    /// further synchronisation: 3 50 means packets 3, 53, 103 and so on. Default 3 50.
    sync_threshold: (u32, u32) = (3, 50), THRESHOLD;
    /// Version of the synchronisation messages that a master sends, 0 or 1. Default 1.
    sync_version: u32 = 1, Within(0..=1);
}

/// The format in which the kernel prints a value.
trait Show {
    fn show(&self) -> String;
}

impl Show for i32 {
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Show for u32 {
    fn show(&self) -> String {
        self.to_string()
    }
}

impl Show for bool {
    fn show(&self) -> String {
        i32::from(*self).to_string()
    }
}

impl Show for String {
    fn show(&self) -> String {
        self.clone()
    }
}

impl Show for (u32, u32) {
    fn show(&self) -> String {
        format!("{}\t{}", self.0, self.1)
    }
}

trait Takes<T> {
    fn take(&self, value: &str) -> Result<T, Error>;

    /// Describes the valid values, for messages.
    fn values(&self) -> String;
}

/// The values of one type: their parser, and their description.
struct Kind<T>(fn(&str) -> Result<T, Error>, &'static str);

impl<T> Takes<T> for Kind<T> {
    fn take(&self, value: &str) -> Result<T, Error> {
        self.0(value)
    }

    fn values(&self) -> String {
        self.1.into()
    }
}

struct Within<T>(RangeInclusive<T>);

impl<T: TryFrom<i32> + PartialOrd + Display> Takes<T> for Within<T> {
    fn take(&self, value: &str) -> Result<T, Error> {
        let number = T::try_from(number(value)?).map_err(|_| Error::SysctlValue)?;
        match self.0.contains(&number) {
            true => Ok(number),
            false => Err(Error::SysctlValue),
        }
    }

    fn values(&self) -> String {
        format!("a whole number from {} to {}", self.0.start(), self.0.end())
    }
}

const NUMBER: Kind<i32> = Kind(number, "a whole number");
const POSITIVE: Kind<u32> = Kind(positive, "a whole number of at least 0");
const SWITCH: Kind<bool> = Kind(|value| Ok(number(value)? != 0), "0 or 1");
const POWER_OF_TWO: Kind<u32> = Kind(power_of_two, "a power of two, such as 1, 2 or 4");
const CPU_LIST: Kind<String> = Kind(
    cpu_list,
    "CPUs and ranges of CPUs, such as \"0-3,8\", or \"\" for none",
);
const THRESHOLD: Kind<(u32, u32)> = Kind(
    threshold,
    "two whole numbers, the first below the second unless that is 0, such as \"3 50\"",
);

fn number(value: &str) -> Result<i32, Error> {
    value.trim().parse().map_err(|_| Error::SysctlValue)
}

fn positive(value: &str) -> Result<u32, Error> {
    u32::try_from(number(value)?).map_err(|_| Error::SysctlValue)
}

fn power_of_two(value: &str) -> Result<u32, Error> {
    let number = positive(value)?;
    match number.is_power_of_two() {
        true => Ok(number),
        false => Err(Error::SysctlValue),
    }
}

/// Parses a list of CPUs, such as `0-3,8`; it may be empty.
fn cpu_list(value: &str) -> Result<String, Error> {
    let list = value.trim();
    match is_cpu_list(list) {
        true => Ok(list.into()),
        false => Err(Error::SysctlValue),
    }
}

impl Sysctls {
    pub(crate) fn estimates(&self) -> bool {
        self.run_estimation && !self.est_cpulist.is_empty()
    }
}

fn is_cpu_list(list: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().ok();
    list.is_empty()
        || list.split(',').all(|item| match item.split_once('-') {
            None => number(item).is_some(),
            Some((first, last)) => {
                matches!((number(first), number(last)), (Some(a), Some(b)) if a <= b)
            }
        })
}

/// Parses two numbers; the first must be smaller, unless the second is 0
/// (`proc_do_sync_threshold`).
fn threshold(value: &str) -> Result<(u32, u32), Error> {
    let mut numbers = value.split_whitespace().map(|word| {
        let number = word.parse::<i32>().map_err(|_| Error::SysctlValue)?;
        u32::try_from(number).map_err(|_| Error::SysctlValue)
    });
    let mut next = || numbers.next().unwrap_or(Err(Error::SysctlValue));
    let (threshold, period) = (next()?, next()?);
    if threshold >= period && period != 0 {
        return Err(Error::SysctlValue);
    }
    Ok((threshold, period))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctl_set_stores_valid_value_and_refuses_invalid_value_or_unknown_name() {
        let mut sysctls = Sysctls::default();
        for name in Sysctls::NAMES {
            if matches!(*name, "sync_threshold" | "sync_version" | "sync_ports") {
                continue;
            }
            sysctls.set(name, "3").unwrap();
            assert_ne!(sysctls.get(name).unwrap(), "0", "{name}");
            sysctls.set(name, " 0\n").unwrap();
            assert_eq!(sysctls.get(name).unwrap(), "0", "{name}");
            assert_eq!(sysctls.set(name, "x"), Err(Error::SysctlValue), "{name}");
        }
        assert_eq!(sysctls.set("no_such", "1"), Err(Error::UnknownSysctl));
        sysctls.set("run_estimation", "1").unwrap();
        for list in ["0-3,8", "", "7"] {
            sysctls.set("est_cpulist", list).unwrap();
            assert_eq!(sysctls.get("est_cpulist").unwrap(), list);
            assert_eq!(sysctls.estimates(), !list.is_empty());
        }
        for bad in ["3-1", "0,", "-", "1-2-3", "a"] {
            let refused = sysctls.set("est_cpulist", bad);
            assert_eq!(refused, Err(Error::SysctlValue), "{bad}");
        }
    }

    #[test]
    fn sysctls_describe_valid_values() {
        for name in Sysctls::NAMES {
            assert!(!Sysctls::values(name).unwrap().is_empty(), "{name}");
        }
        let values = |name| Sysctls::values(name).unwrap();
        assert_eq!(values("est_nice"), "a whole number from -20 to 19");
        assert_eq!(values("sloppy_tcp"), "0 or 1");
        assert_eq!(Sysctls::values("no_such"), Err(Error::UnknownSysctl));
    }

    #[test]
    fn sysctl_names_are_sorted_and_values_out_of_range_are_refused() {
        assert!(Sysctls::NAMES.is_sorted());
        let mut sysctls = Sysctls::default();
        for (name, value) in [
            ("drop_entry", "4"),
            ("secure_tcp", "-1"),
            ("sync_version", "2"),
            ("sync_ports", "3"),
            ("sync_ports", "0"),
            ("sync_threshold", "50 50"),
            ("sync_threshold", "-1 50"),
            ("sync_threshold", "3"),
            ("sync_retries", "4"),
        ] {
            assert_eq!(
                sysctls.set(name, value),
                Err(Error::SysctlValue),
                "{name}={value}"
            );
        }
        assert_eq!(sysctls, Sysctls::default());
        sysctls.set("sync_threshold", "7\t0").unwrap();
        assert_eq!(sysctls.get("sync_threshold").unwrap(), "7\t0");
    }
}
