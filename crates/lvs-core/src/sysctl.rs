//! Settings under the kernel's names (`/proc/sys/net/ipv4/vs`).

use alloc::string::{String, ToString};

use crate::Error;

/// The values in force. Fields have the kernel's names and defaults; a boolean is on for every number but 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sysctls {
    /// When a SYN may take over the addresses and ports of an old connection: 0 never; otherwise in TIME_WAIT and
    /// CLOSE; with bit 2 also in FIN_WAIT if no reply was ever seen. Default 1.
    pub conn_reuse_mode: i32,
    /// End connections of removed servers at once, and let a SYN leave a quiesced server. Default off.
    pub expire_nodest_conn: bool,
    /// Check the MTU of tunnels, and copy DF to the outer header. Default on.
    pub pmtu_disc: bool,
    /// 2 and 3 use the state tables that trust only the server. Default 0.
    pub secure_tcp: i32,
    /// Let any TCP segment but RST open a connection. Default off.
    pub sloppy_tcp: bool,
}

impl Default for Sysctls {
    fn default() -> Self {
        Self {
            conn_reuse_mode: 1,
            expire_nodest_conn: false,
            pmtu_disc: true,
            secure_tcp: 0,
            sloppy_tcp: false,
        }
    }
}

/// Names that the kernel has and this director does not act on yet.
const LATER: &[&str] = &[
    "am_droprate",
    "amemthresh",
    "backup_only",
    "cache_bypass",
    "conntrack",
    "drop_entry",
    "drop_packet",
    "expire_quiescent_template",
    "ignore_tunneled",
    "lblc_expiration",
    "lblcr_expiration",
    "nat_icmp_send",
    "run_estimation",
    "schedule_icmp",
    "sloppy_sctp",
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

impl Sysctls {
    /// The names that can be read and written, sorted.
    pub const NAMES: &[&str] = &[
        "conn_reuse_mode",
        "expire_nodest_conn",
        "pmtu_disc",
        "secure_tcp",
        "sloppy_tcp",
    ];

    /// The value as the kernel writes it.
    ///
    /// # Errors
    /// [`Error::UnknownSysctl`], or [`Error::Unsupported`] for one that only the kernel has.
    pub fn get(&self, name: &str) -> Result<String, Error> {
        Ok(match name {
            "conn_reuse_mode" => self.conn_reuse_mode.to_string(),
            "expire_nodest_conn" => i32::from(self.expire_nodest_conn).to_string(),
            "pmtu_disc" => i32::from(self.pmtu_disc).to_string(),
            "secure_tcp" => self.secure_tcp.to_string(),
            "sloppy_tcp" => i32::from(self.sloppy_tcp).to_string(),
            _ => return Err(Self::missing(name)),
        })
    }

    /// Sets a value from its text.
    ///
    /// # Errors
    /// [`Error::SysctlValue`] if the text is no number or out of range, and as [`get`](Self::get).
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let number = || value.trim().parse::<i32>().map_err(|_| Error::SysctlValue);
        match name {
            "conn_reuse_mode" => self.conn_reuse_mode = number()?,
            "expire_nodest_conn" => self.expire_nodest_conn = number()? != 0,
            "pmtu_disc" => self.pmtu_disc = number()? != 0,
            "secure_tcp" => {
                self.secure_tcp = match number()? {
                    mode @ (0 | 3) => mode,
                    1 | 2 => return Err(Error::Unsupported("secure_tcp by memory (1, 2)")),
                    _ => return Err(Error::SysctlValue),
                }
            }
            "sloppy_tcp" => self.sloppy_tcp = number()? != 0,
            _ => return Err(Self::missing(name)),
        }
        Ok(())
    }

    fn missing(name: &str) -> Error {
        LATER
            .iter()
            .find(|later| **later == name)
            .map_or(Error::UnknownSysctl, |name| Error::Unsupported(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_what_it_is_set_to() {
        let mut sysctls = Sysctls::default();
        for name in Sysctls::NAMES {
            sysctls.set(name, "3").unwrap();
            assert_ne!(sysctls.get(name).unwrap(), "0", "{name}");
            sysctls.set(name, " 0\n").unwrap();
            assert_eq!(sysctls.get(name).unwrap(), "0", "{name}");
            assert_eq!(sysctls.set(name, "x"), Err(Error::SysctlValue), "{name}");
        }
        assert_eq!(sysctls.set("no_such", "1"), Err(Error::UnknownSysctl));
        assert_eq!(
            sysctls.set("drop_entry", "1"),
            Err(Error::Unsupported("drop_entry"))
        );
    }
}
