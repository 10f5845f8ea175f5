//! Defences against floods of half-open connections: `drop_packet`, `drop_entry` and `secure_tcp`
//! (`update_defense_level`).
//!
//! The kernel's `drop_entry` visits random buckets of its hash table. Here, slots are visited at
//! random; the share of visited entries a second is the same, and the same states are spared.

use core::time::Duration;

use crate::Protocol;
use crate::conn::State;
use crate::random::SplitMix64;
use crate::settings::Sysctls;

/// Interval between two updates of the defences.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);

/// The tables are nearly full if their free slots are fewer than all slots divided by this number.
const RESERVE: usize = 8;

#[derive(Debug)]
pub(crate) struct Defense {
    /// Number of free pages of memory, as the caller reported last.
    available: u64,
    /// Number of free slots of all tables.
    free: usize,
    /// Number of slots of all tables.
    slots: usize,
    /// If this is n, every n-th packet that would open a connection is dropped; 0 drops none.
    rate: u64,
    counter: u64,
    pub(crate) drops_entries: bool,
    pub(crate) secure: bool,
    lottery: [u8; 9],
    random: SplitMix64,
    /// Remainder of the number of visits in the last round of `drop_entry`, in 32nds of a slot.
    visits: u64,
}

impl Defense {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            available: u64::MAX,
            free: 0,
            slots: 0,
            rate: 0,
            counter: 0,
            drops_entries: false,
            secure: false,
            lottery: [0; 9],
            random: SplitMix64::new(seed),
            visits: 0,
        }
    }

    pub(crate) fn set_memory(&mut self, available: u64) {
        self.available = available;
    }

    /// Sets the numbers of free slots, and of all slots, of the tables.
    pub(crate) fn set_occupancy(&mut self, free: usize, slots: usize) {
        (self.free, self.slots) = (free, slots);
    }

    /// Whether any defence is configured (its sysctl is not 0), so that [`update`](Self::update)
    /// must run at each [`PERIOD`].
    pub(crate) fn is_needed(sysctls: &Sysctls) -> bool {
        sysctls.drop_entry != 0 || sysctls.drop_packet != 0 || sysctls.secure_tcp != 0
    }

    /// Decides which defences are on, from the amounts of free memory and of free slots, and sets
    /// the rate of `drop_packet`. A sysctl of a defence changes from 1 (automatic, off) to 2
    /// (automatic, on) and back; 0 (off) and 3 (always on) stay.
    ///
    /// The kernel's table grows until memory is short. This table has a fixed size, so slots become
    /// short first: its last eighth corresponds to the kernel's `amemthresh` pages.
    pub(crate) fn update(&mut self, sysctls: &mut Sysctls) {
        let threshold = u64::try_from(sysctls.amemthresh).unwrap_or(0);
        let short_of_memory = self.available < threshold;
        let reserve = self.slots / RESERVE;
        let short_of_slots = self.free < reserve;
        let low = short_of_memory || short_of_slots;
        let decide = |mode: &mut i32| match *mode {
            1 | 2 => {
                *mode = if low { 2 } else { 1 };
                low
            }
            mode => mode == 3,
        };
        self.drops_entries = decide(&mut sysctls.drop_entry);
        self.secure = decide(&mut sysctls.secure_tcp);
        let drops = decide(&mut sysctls.drop_packet);
        if !drops {
            self.rate = 0;
        } else if sysctls.drop_packet == 3 {
            self.rate = u64::try_from(sysctls.am_droprate).unwrap_or(0);
        } else {
            let memory = short_of_memory.then(|| threshold / (threshold - self.available));
            // The table is full: drop one in two, so that some clients still get a connection.
            let slots = short_of_slots.then(|| (reserve / (reserve - self.free)).max(2) as u64);
            self.rate = memory.into_iter().chain(slots).min().unwrap_or(0);
            self.counter = self.rate;
        }
    }

    /// Whether a packet that would open a connection is dropped (`ip_vs_todrop`).
    pub(crate) fn drops_packet(&mut self) -> bool {
        if self.rate == 0 {
            return false;
        }
        let drops = self.drops_next();
        self.counter = if drops { self.rate } else { self.counter - 1 };
        drops
    }

    /// As [`drops_packet`](Self::drops_packet), without counting a packet.
    pub(crate) const fn drops_next(&self) -> bool {
        self.rate != 0 && self.counter <= 1
    }

    /// If this is n, every n-th packet that would open a connection is dropped; 0 drops none.
    pub(crate) const fn rate(&self) -> u64 {
        self.rate
    }

    /// Number of slots that `drop_entry` visits in this second: a 32nd of `len` slots.
    pub(crate) fn visits(&mut self, len: usize) -> usize {
        self.visits += len as u64;
        let visits = self.visits / 32;
        self.visits %= 32;
        usize::try_from(visits).unwrap_or(usize::MAX)
    }

    /// The number of a random slot below `len`.
    pub(crate) fn draw(&mut self, len: usize) -> u32 {
        u32::try_from(self.random.draw_below(len as u64)).unwrap_or(0)
    }

    /// Whether `drop_entry` removes a connection (`ip_vs_random_dropentry`). `idle` is the time
    /// since its last packet.
    pub(crate) fn drops_connection(
        &mut self,
        protocol: Protocol,
        state: State,
        idle: Duration,
        packets: u32,
    ) -> bool {
        match (protocol, state.0) {
            // SYN_RECV and SYNACK; INIT1 and INIT.
            (Protocol::TCP, 3 | 10) | (Protocol::SCTP, 1 | 2) => true,
            (Protocol::TCP, 1) | (Protocol::SCTP, 8) => self.draws_lot(idle, packets),
            (Protocol::TCP | Protocol::SCTP, _) => false,
            _ => self.draws_lot(idle, packets),
        }
    }

    /// Decides whether to remove an entry that was idle for a minute or longer (`todrop_entry`). Of
    /// the entries that have had n packets (n from 1 to 8), every n-th is removed. Other entries
    /// stay.
    pub(crate) fn draws_lot(&mut self, idle: Duration, packets: u32) -> bool {
        let (Ok(rate @ 1..=8), true) = (u8::try_from(packets), idle >= Duration::from_secs(60))
        else {
            return false;
        };
        let counter = &mut self.lottery[usize::from(rate)];
        *counter = counter.saturating_sub(1);
        if *counter > 0 {
            return false;
        }
        *counter = rate;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_defences_are_active_only_while_memory_is_low() {
        let mut sysctls = Sysctls::default();
        for name in ["drop_packet", "drop_entry", "secure_tcp"] {
            sysctls.set(name, "1").unwrap();
        }
        let mut defense = Defense::new(1);
        defense.update(&mut sysctls);
        assert!(!defense.drops_entries && !defense.secure && !defense.drops_packet());
        assert_eq!(
            (sysctls.drop_packet, sysctls.drop_entry, sysctls.secure_tcp),
            (1, 1, 1)
        );
        defense.set_memory(1024 - 256);
        defense.update(&mut sysctls);
        assert!(defense.drops_entries && defense.secure);
        assert_eq!(
            (sysctls.drop_packet, sysctls.drop_entry, sysctls.secure_tcp),
            (2, 2, 2)
        );
        // 1024 / 256: one in four packets is dropped.
        let dropped: std::vec::Vec<bool> = (0..8).map(|_| defense.drops_packet()).collect();
        assert_eq!(
            dropped,
            [false, false, false, true, false, false, false, true]
        );
        defense.set_memory(1024);
        defense.update(&mut sysctls);
        assert!(!defense.drops_entries && !defense.drops_packet());
        assert_eq!(sysctls.drop_packet, 1);
    }

    #[test]
    fn automatic_defences_are_active_only_while_few_slots_are_free() {
        let mut sysctls = Sysctls::default();
        for name in ["drop_packet", "drop_entry", "secure_tcp"] {
            sysctls.set(name, "1").unwrap();
        }
        let mut defense = Defense::new(1);
        // 96 of the last eighth's 128 slots are free: one in four packets is dropped.
        for (free, rate) in [(1024, 0), (128, 0), (96, 4), (32, 2), (0, 2), (128, 0)] {
            defense.set_occupancy(free, 1024);
            defense.update(&mut sysctls);
            assert_eq!(
                (defense.rate, defense.drops_entries),
                (rate, rate > 0),
                "{free} of 1024 slots are free"
            );
            assert_eq!(
                (defense.secure, sysctls.secure_tcp),
                (rate > 0, 1 + i32::from(rate > 0))
            );
        }
    }

    #[test]
    fn drop_packet_mode_3_drops_one_packet_in_am_droprate() {
        let mut sysctls = Sysctls::default();
        sysctls.set("drop_packet", "3").unwrap();
        let mut defense = Defense::new(1);
        defense.update(&mut sysctls);
        let dropped = (0..30).filter(|_| defense.drops_packet()).count();
        assert_eq!(dropped, 3);
    }

    #[test]
    fn drop_entry_probability_falls_with_packets_and_is_0_in_first_minute() {
        let mut defense = Defense::new(1);
        let minute = Duration::from_secs(60);
        let drops = |defense: &mut Defense, packets| {
            (0..24)
                .filter(|_| defense.draws_lot(minute, packets))
                .count()
        };
        for (packets, expected) in [(0, 0), (1, 24), (2, 12), (8, 3), (9, 0)] {
            assert_eq!(
                drops(&mut defense, packets),
                expected,
                "entries with {packets} packets"
            );
        }
        assert!(!defense.draws_lot(Duration::from_secs(59), 1));
    }
}
