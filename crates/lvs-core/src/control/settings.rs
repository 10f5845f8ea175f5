//! Settings of the whole director, and properties of its host.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

use super::Control;
use super::check;
use super::defense::{self, Defense};
use super::full_nat;
use crate::mark::MarkRule;
use crate::settings::Sysctls;
use crate::sync::SyncDaemon;
use crate::{Error, shard};

impl Control {
    /// Timeouts of TCP ESTABLISHED, TCP FIN_WAIT and UDP in seconds.
    pub fn timeouts(&self) -> (u32, u32, u32) {
        self.settings.timeouts.settable()
    }

    /// Sets the timeouts of TCP ESTABLISHED, TCP FIN_WAIT and UDP in seconds; 0 leaves a timeout
    /// unchanged. A connection uses the new value from its next packet on.
    ///
    /// # Errors
    /// [`Error::TimeoutRange`].
    pub fn set_timeouts(&mut self, tcp: u32, tcp_fin: u32, udp: u32) -> Result<(), Error> {
        check::timeouts([tcp, tcp_fin, udp])?;
        self.settings.timeouts.set(tcp, tcp_fin, udp);
        self.changed();
        Ok(())
    }

    /// The present sysctls.
    pub const fn sysctls(&self) -> &Sysctls {
        &self.settings.sysctls
    }

    /// Sets a sysctl.
    ///
    /// # Errors
    /// As [`Sysctls::set`].
    pub fn set_sysctl(&mut self, name: &str, value: &str) -> Result<(), Error> {
        let modes =
            |sysctls: &Sysctls| [sysctls.drop_entry, sysctls.drop_packet, sysctls.secure_tcp];
        let before = modes(&self.settings.sysctls);
        self.settings.sysctls.set(name, value)?;
        // Only a mode that changes takes effect immediately. A mode that is written again takes
        // effect at the next second (`proc_do_defense_mode`).
        if modes(&self.settings.sysctls) != before {
            self.update_defense();
            let needed = Defense::is_needed(&self.settings.sysctls);
            self.next_defense = match (needed, self.next_defense) {
                (true, None) => self.clock.map(|clock| clock + defense::PERIOD),
                (true, planned) => planned,
                (false, _) => None,
            };
            self.plan();
        }
        for service in self.services.values_mut() {
            service.pool.sysctls_changed(&self.settings.sysctls);
        }
        self.changed();
        Ok(())
    }

    /// Sets the amount of free memory, in pages of 4 KiB, on which the automatic modes of the
    /// defences depend (`drop_entry`, `drop_packet`, `secure_tcp`). Until the first call, the
    /// defences assume sufficient memory.
    pub fn set_memory(&mut self, free_pages: u64) {
        self.defense.set_memory(free_pages);
    }

    /// Sets the host's own addresses, as prefixes. `cache_bypass` does not apply to IPv4 packets to
    /// these addresses. If a server has one of these addresses, the client's address is not
    /// translated.
    pub fn set_local_addresses(&mut self, prefixes: Vec<(IpAddr, u8)>) {
        self.local = full_nat::prefixes(prefixes);
    }

    pub(crate) fn is_local(&self, addr: IpAddr) -> bool {
        self.local.iter().any(|prefix| prefix.contains(addr))
    }

    /// Enables the FTP helper for control connections to these virtual ports, like the kernel
    /// module `ip_vs_ftp`. By default, the helper is off. The helper applies to connections that
    /// are opened from now on.
    ///
    /// The helper needs the segments' bytes ([`PacketMeta::segment`](crate::PacketMeta::segment)).
    /// The embedding program then changes segments according to the verdicts
    /// ([`Forward::shift`](crate::Forward::shift), [`Reply::edit`](crate::Reply::edit)).
    ///
    /// # Errors
    /// [`Error::HelperPorts`] if a port is 0 or occurs twice, or if there are more than
    /// [`FTP_PORTS_MAX`](crate::ftp::FTP_PORTS_MAX).
    pub fn set_ftp_ports(&mut self, ports: Vec<u16>) -> Result<(), Error> {
        shard::check_ports(&ports)?;
        self.settings.ftp_ports = ports;
        self.changed();
        Ok(())
    }

    /// The ports set by [`set_ftp_ports`](Self::set_ftp_ports).
    pub fn ftp_ports(&self) -> &[u16] {
        &self.settings.ftp_ports
    }

    /// The rules that set marks on packets. A packet's mark is part of its
    /// [`PacketMeta`](crate::PacketMeta): the embedding program applies the rules.
    pub const fn marks(&self) -> &Arc<[MarkRule]> {
        &self.marks
    }

    /// The virtual addresses that the embedding program answers ARP for.
    pub fn own_vips(&self) -> &[IpAddr] {
        &self.own_vips
    }

    #[cfg(feature = "api")]
    pub(crate) fn set_marks(&mut self, marks: Arc<[MarkRule]>) {
        self.marks = marks;
    }

    #[cfg(feature = "api")]
    pub(crate) fn set_own_vips(&mut self, addresses: &[IpAddr]) {
        self.own_vips = addresses.to_vec();
    }

    #[cfg(feature = "api")]
    pub(crate) fn note_daemon(&mut self, daemon: SyncDaemon) {
        self.daemons.push(daemon);
    }

    /// The running synchronisation daemons that `apply` (feature `api`) has started, in the order
    /// of their start.
    pub fn daemons(&self) -> &[SyncDaemon] {
        &self.daemons
    }
}
