//! Numbers that the engine and its programs share: the other half of `bpf/layout.h`.

/// Words of the settings.
pub(super) mod conf {
    pub(crate) const KEYS: usize = 0;
    pub(crate) const NARROW_BUCKETS: usize = 2;
    pub(crate) const WIDE_BUCKETS: usize = 3;
    pub(crate) const BASE: usize = 4;
    pub(crate) const EPOCH: usize = 5;
    pub(crate) const ALIVE: usize = 6;
    pub(crate) const MARK: usize = 7;
    pub(crate) const SERVERS: usize = 8;
    pub(crate) const WORDS: usize = 16;
}

/// Words of a way out.
pub(super) const HOP_WORDS: usize = 4;
/// Words of a server's counters, on one processor: packets and bytes of requests, then of replies.
pub(super) const COUNT_WORDS: usize = 4;
/// Words of what became of frames, on one processor.
pub(super) const SHARE_WORDS: usize = 8;
/// Bytes of a decision that the filter leaves for the ingress.
pub(super) const TOLD_BYTES: u32 = 40;

#[cfg(test)]
mod tests {
    use lvs_core::memory::Layout;

    use super::*;

    const HEADER: &str = include_str!("../../bpf/layout.h");

    fn defined(name: &str) -> u64 {
        let line = HEADER.lines().find_map(|line| {
            line.strip_prefix("#define ")?
                .strip_prefix(name)?
                .strip_prefix(' ')
        });
        let text = line.unwrap_or_else(|| panic!("{name} is not defined"));
        let text = text.trim_end_matches(['U', 'L']);
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => text.parse(),
        }
        .unwrap_or_else(|_| panic!("{name} is {text}"))
    }

    #[test]
    fn the_programs_read_what_the_engine_writes() {
        let all = [
            ("WAYS", Layout::WAYS),
            ("NARROW_BYTES", Layout::NARROW_WORDS * 8),
            ("WIDE_BYTES", Layout::WIDE_WORDS * 8),
            ("CONF_KEY0", conf::KEYS),
            ("CONF_KEY1", conf::KEYS + 1),
            ("CONF_NARROW_BUCKETS", conf::NARROW_BUCKETS),
            ("CONF_WIDE_BUCKETS", conf::WIDE_BUCKETS),
            ("CONF_BASE", conf::BASE),
            ("CONF_EPOCH", conf::EPOCH),
            ("CONF_ALIVE", conf::ALIVE),
            ("CONF_MARK", conf::MARK),
            ("CONF_SERVERS", conf::SERVERS),
            ("CONF_WORDS", conf::WORDS),
            ("HOP_WORDS", HOP_WORDS),
            ("COUNT_WORDS", COUNT_WORDS),
            ("SHARE_WORDS", SHARE_WORDS),
        ];
        for (name, number) in all {
            assert_eq!(defined(name), number as u64, "{name}");
        }
    }
}
