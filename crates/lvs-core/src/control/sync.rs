//! Start and stop of synchronisation daemons, and synchronisation messages about templates.

use super::Control;
use super::check;
use crate::sync::{self, Backup, Master, Message, SyncRole};
use crate::{Error, Instant};

impl Control {
    /// Starts the master: from now on, shards make messages about connections.
    ///
    /// # Errors
    /// [`Error::DaemonRunning`]; [`Error::FamilyMismatch`] while the address family of a server
    /// differs from its service's.
    pub fn start_master(&mut self, master: Master) -> Result<(), Error> {
        check::start_daemon(self, SyncRole::Master)?;
        self.sync_ports = self.next_sync_ports();
        self.settings.master = Some(Master {
            ports: self.sync_ports,
            ..master
        });
        self.changed();
        Ok(())
    }

    /// Stops the master.
    ///
    /// # Errors
    /// [`Error::DaemonNotRunning`].
    pub fn stop_master(&mut self) -> Result<(), Error> {
        check::stop_daemon(self, SyncRole::Master)?;
        self.settings.master = None;
        self.daemons
            .retain(|daemon| daemon.role != SyncRole::Master);
        self.changed();
        Ok(())
    }

    /// Starts the backup: from now on, [`handle_sync`](Self::handle_sync) accepts messages.
    ///
    /// # Errors
    /// As [`start_master`](Self::start_master).
    pub fn start_backup(&mut self, backup: Backup) -> Result<(), Error> {
        check::start_daemon(self, SyncRole::Backup)?;
        self.sync_ports = self.next_sync_ports();
        self.backup = Some(backup);
        self.changed();
        Ok(())
    }

    /// Stops the backup.
    ///
    /// # Errors
    /// [`Error::DaemonNotRunning`].
    pub fn stop_backup(&mut self) -> Result<(), Error> {
        check::stop_daemon(self, SyncRole::Backup)?;
        self.backup = None;
        self.daemons
            .retain(|daemon| daemon.role != SyncRole::Backup);
        self.changed();
        Ok(())
    }

    /// The settings of the running master; `None` if no master is running.
    pub const fn master(&self) -> Option<Master> {
        self.settings.master
    }

    /// The settings of the running backup; `None` if no backup is running.
    pub const fn backup(&self) -> Option<Backup> {
        self.backup
    }

    /// Number of UDP ports of a daemon that would start now: as many as a running daemon has.
    /// Without a running daemon, the sysctl `sync_ports` determines the number.
    pub fn next_sync_ports(&self) -> u16 {
        if self.settings.master.is_some() || self.backup.is_some() {
            return self.sync_ports;
        }
        sync::ports(self.settings.sysctls.sync_ports)
    }

    /// The next synchronisation message about templates whose timers this `Control` has run, if a
    /// message is full or old enough, or the master was stopped. For a director of one shard,
    /// [`Shard::take_sync_message`](crate::Shard::take_sync_message) returns all messages.
    pub fn take_sync_message(&mut self, now: Instant) -> Option<Message> {
        if self.settings.master.is_none() {
            self.sync.finish(&self.settings.sysctls);
        }
        self.sync.take(now, &self.settings.sysctls)
    }
}
