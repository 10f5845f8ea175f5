//! Settings under the kernel's names (`/proc/sys/net/ipv4/vs`).

use alloc::format;
use alloc::string::{String, ToString};

use crate::Error;

/// The values in force. Fields have the kernel's names and defaults; a boolean is on for every number but 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sysctls {
    /// Drop rate of `drop_packet` mode 3: one of so many connections. Default 10.
    pub am_droprate: i32,
    /// Pages of free memory below which the automatic defences act. Default 1024.
    pub amemthresh: i32,
    /// Forward nothing while a backup daemon runs. Default off.
    pub backup_only: bool,
    /// Send packets of a mark without servers on to their own destination. Default off.
    pub cache_bypass: bool,
    /// When a SYN may take over the addresses and ports of an old connection: 0 never; otherwise in TIME_WAIT and
    /// CLOSE; with bit 2 also in FIN_WAIT if no reply was ever seen. Default 1.
    pub conn_reuse_mode: i32,
    /// Keep netfilter's connection tracking: here only the flag that the synchronisation protocol carries. Default off.
    pub conntrack: bool,
    /// How much the kernel's debug builds log; kept and without effect. Default 0.
    pub debug_level: i32,
    /// Defence that drops half-open connections: 0 off, 1 and 2 by memory, 3 always. Default 0.
    pub drop_entry: i32,
    /// Defence that drops packets which open connections: 0 off, 1 and 2 by memory, 3 always. Default 0.
    pub drop_packet: i32,
    /// CPUs of the kernel's estimator threads, as a list (`0-3,8`). Which ones they are has no effect here; an empty list
    /// stops the estimation, as `run_estimation` does. Default 0.
    pub est_cpulist: String,
    /// Priority of the kernel's estimator threads; kept and without effect. Default 0.
    pub est_nice: i32,
    /// End connections of removed servers at once, and let a SYN leave a quiesced server. Default off.
    pub expire_nodest_conn: bool,
    /// Let clients leave a persistent server whose weight is 0. Default off.
    pub expire_quiescent_template: bool,
    /// Leave the content of packets of other protocols alone when the host decapsulates it. Default off. Which packets
    /// that are is known to whoever embeds the director: to Ethernet over GRE it comes by a device of its own.
    pub ignore_tunneled: bool,
    /// Seconds after which `lblc` forgets an unused destination. Default 86400.
    pub lblc_expiration: u32,
    /// Seconds after which `lblcr` forgets an unused destination, and lets a set shrink. Default 86400.
    pub lblcr_expiration: u32,
    /// Tell a server that speaks without a connection: port unreachable. Default off.
    pub nat_icmp_send: bool,
    /// Check the MTU of tunnels, and copy DF to the outer header. Default on.
    pub pmtu_disc: bool,
    /// Take snapshots of counters and compute rates. Default on.
    pub run_estimation: bool,
    /// Let ICMP errors of unknown connections open connections. Default off.
    pub schedule_icmp: bool,
    /// State tables that trust only the server: 0 off, 1 and 2 by memory, 3 always. Default 0.
    pub secure_tcp: i32,
    /// Let any SCTP packet but ABORT open a connection. Default off.
    pub sloppy_sctp: bool,
    /// Let any TCP segment but RST open a connection. Default off.
    pub sloppy_tcp: bool,
    /// Route replies as if the host had made them. Default on; without effect where routes are looked up by destination
    /// alone.
    pub snat_reroute: bool,
    /// Do not synchronise connections that a template controls. Default off.
    pub sync_persist_mode: bool,
    /// UDP ports that a synchronisation daemon spreads its messages over, a power of two. Default 1.
    pub sync_ports: u32,
    /// Messages that wait to be sent at most. Default 16384 (the kernel's depends on its memory).
    pub sync_qlen_max: i32,
    /// Seconds in which a connection is synchronised about once; 0 goes by `sync_threshold`. Default 0.
    pub sync_refresh_period: u32,
    /// Further messages about a connection when it is refreshed, 0 to 3. Default 0.
    pub sync_retries: u32,
    /// Buffer of the synchronisation sockets in bytes; 0 is the system's. Default 0.
    pub sync_sock_size: i32,
    /// A connection is synchronised at packet `.0` and then at every `.1`th. Default 3 50.
    pub sync_threshold: (u32, u32),
    /// Version of the synchronisation messages that a master sends, 0 or 1. Default 1.
    pub sync_version: u32,
}

impl Default for Sysctls {
    fn default() -> Self {
        Self {
            am_droprate: 10,
            amemthresh: 1024,
            backup_only: false,
            cache_bypass: false,
            conn_reuse_mode: 1,
            conntrack: false,
            debug_level: 0,
            drop_entry: 0,
            drop_packet: 0,
            est_cpulist: "0".into(),
            est_nice: 0,
            expire_nodest_conn: false,
            expire_quiescent_template: false,
            ignore_tunneled: false,
            lblc_expiration: 86_400,
            lblcr_expiration: 86_400,
            nat_icmp_send: false,
            pmtu_disc: true,
            run_estimation: true,
            schedule_icmp: false,
            secure_tcp: 0,
            sloppy_sctp: false,
            sloppy_tcp: false,
            snat_reroute: true,
            sync_persist_mode: false,
            sync_ports: 1,
            sync_qlen_max: 16_384,
            sync_refresh_period: 0,
            sync_retries: 0,
            sync_sock_size: 0,
            sync_threshold: (3, 50),
            sync_version: 1,
        }
    }
}

impl Sysctls {
    /// The names that can be read and written, sorted.
    pub const NAMES: &[&str] = &[
        "am_droprate",
        "amemthresh",
        "backup_only",
        "cache_bypass",
        "conn_reuse_mode",
        "conntrack",
        "debug_level",
        "drop_entry",
        "drop_packet",
        "est_cpulist",
        "est_nice",
        "expire_nodest_conn",
        "expire_quiescent_template",
        "ignore_tunneled",
        "lblc_expiration",
        "lblcr_expiration",
        "nat_icmp_send",
        "pmtu_disc",
        "run_estimation",
        "schedule_icmp",
        "secure_tcp",
        "sloppy_sctp",
        "sloppy_tcp",
        "snat_reroute",
        "sync_persist_mode",
        "sync_ports",
        "sync_qlen_max",
        "sync_refresh_period",
        "sync_retries",
        "sync_sock_size",
        "sync_threshold",
        "sync_version",
    ];

    /// The value as the kernel writes it.
    ///
    /// # Errors
    /// [`Error::UnknownSysctl`].
    pub fn get(&self, name: &str) -> Result<String, Error> {
        Ok(match name {
            "am_droprate" => self.am_droprate.to_string(),
            "amemthresh" => self.amemthresh.to_string(),
            "backup_only" => i32::from(self.backup_only).to_string(),
            "cache_bypass" => i32::from(self.cache_bypass).to_string(),
            "conn_reuse_mode" => self.conn_reuse_mode.to_string(),
            "conntrack" => i32::from(self.conntrack).to_string(),
            "debug_level" => self.debug_level.to_string(),
            "drop_entry" => self.drop_entry.to_string(),
            "drop_packet" => self.drop_packet.to_string(),
            "est_cpulist" => self.est_cpulist.clone(),
            "est_nice" => self.est_nice.to_string(),
            "expire_nodest_conn" => i32::from(self.expire_nodest_conn).to_string(),
            "expire_quiescent_template" => i32::from(self.expire_quiescent_template).to_string(),
            "ignore_tunneled" => i32::from(self.ignore_tunneled).to_string(),
            "lblc_expiration" => self.lblc_expiration.to_string(),
            "lblcr_expiration" => self.lblcr_expiration.to_string(),
            "nat_icmp_send" => i32::from(self.nat_icmp_send).to_string(),
            "pmtu_disc" => i32::from(self.pmtu_disc).to_string(),
            "run_estimation" => i32::from(self.run_estimation).to_string(),
            "schedule_icmp" => i32::from(self.schedule_icmp).to_string(),
            "secure_tcp" => self.secure_tcp.to_string(),
            "sloppy_sctp" => i32::from(self.sloppy_sctp).to_string(),
            "sloppy_tcp" => i32::from(self.sloppy_tcp).to_string(),
            "snat_reroute" => i32::from(self.snat_reroute).to_string(),
            "sync_persist_mode" => i32::from(self.sync_persist_mode).to_string(),
            "sync_ports" => self.sync_ports.to_string(),
            "sync_qlen_max" => self.sync_qlen_max.to_string(),
            "sync_refresh_period" => self.sync_refresh_period.to_string(),
            "sync_retries" => self.sync_retries.to_string(),
            "sync_sock_size" => self.sync_sock_size.to_string(),
            "sync_threshold" => {
                let (threshold, period) = self.sync_threshold;
                format!("{threshold}\t{period}")
            }
            "sync_version" => self.sync_version.to_string(),
            _ => return Err(Error::UnknownSysctl),
        })
    }

    /// Sets a value from its text.
    ///
    /// # Errors
    /// [`Error::SysctlValue`] if the text is no number or out of range, and as [`get`](Self::get).
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let number = || value.trim().parse::<i32>().map_err(|_| Error::SysctlValue);
        let positive = || u32::try_from(number()?).map_err(|_| Error::SysctlValue);
        match name {
            "am_droprate" => self.am_droprate = number()?,
            "amemthresh" => self.amemthresh = number()?,
            "backup_only" => self.backup_only = number()? != 0,
            "cache_bypass" => self.cache_bypass = number()? != 0,
            "conn_reuse_mode" => self.conn_reuse_mode = number()?,
            "conntrack" => self.conntrack = number()? != 0,
            "debug_level" => self.debug_level = number()?,
            "drop_entry" => self.drop_entry = within(number()?, 0..=3)?,
            "drop_packet" => self.drop_packet = within(number()?, 0..=3)?,
            "est_cpulist" => {
                let list = value.trim();
                if !is_cpu_list(list) {
                    return Err(Error::SysctlValue);
                }
                self.est_cpulist = list.into();
            }
            "est_nice" => self.est_nice = within(number()?, -20..=19)?,
            "expire_nodest_conn" => self.expire_nodest_conn = number()? != 0,
            "expire_quiescent_template" => self.expire_quiescent_template = number()? != 0,
            "ignore_tunneled" => self.ignore_tunneled = number()? != 0,
            "lblc_expiration" => self.lblc_expiration = positive()?,
            "lblcr_expiration" => self.lblcr_expiration = positive()?,
            "nat_icmp_send" => self.nat_icmp_send = number()? != 0,
            "pmtu_disc" => self.pmtu_disc = number()? != 0,
            "run_estimation" => self.run_estimation = number()? != 0,
            "schedule_icmp" => self.schedule_icmp = number()? != 0,
            "secure_tcp" => self.secure_tcp = within(number()?, 0..=3)?,
            "sloppy_sctp" => self.sloppy_sctp = number()? != 0,
            "sloppy_tcp" => self.sloppy_tcp = number()? != 0,
            "snat_reroute" => self.snat_reroute = number()? != 0,
            "sync_persist_mode" => self.sync_persist_mode = number()? != 0,
            "sync_ports" => {
                let ports = positive()?;
                if !ports.is_power_of_two() {
                    return Err(Error::SysctlValue);
                }
                self.sync_ports = ports;
            }
            "sync_qlen_max" => self.sync_qlen_max = number()?,
            "sync_refresh_period" => self.sync_refresh_period = positive()?,
            "sync_retries" => self.sync_retries = within(positive()?, 0..=3)?,
            "sync_sock_size" => self.sync_sock_size = number()?,
            "sync_threshold" => self.sync_threshold = threshold(value)?,
            "sync_version" => self.sync_version = within(positive()?, 0..=1)?,
            _ => return Err(Error::UnknownSysctl),
        }
        Ok(())
    }

    /// Whether snapshots are taken and rates computed.
    pub(crate) fn estimates(&self) -> bool {
        self.run_estimation && !self.est_cpulist.is_empty()
    }
}

/// Numbers and ranges with commas between them, or nothing.
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

fn within<T: PartialOrd>(value: T, range: core::ops::RangeInclusive<T>) -> Result<T, Error> {
    if range.contains(&value) {
        Ok(value)
    } else {
        Err(Error::SysctlValue)
    }
}

/// Two numbers; the first is smaller unless the second is 0 (`proc_do_sync_threshold`).
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
    fn every_name_reads_back_what_it_is_set_to() {
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
    fn names_are_sorted_and_values_have_their_ranges() {
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
