//! Numbers that the dataplane and its BPF programs share. The programs read them from
//! `bpf/layout.h`.

use lvs_core::memory::Layout;

/// Indices of the words of the settings (map `lvs_conf`).
pub(crate) mod conf {
    pub(crate) const KEYS: usize = 0;
    pub(crate) const NARROW_BUCKETS: usize = 2;
    pub(crate) const WIDE_BUCKETS: usize = 3;
    pub(crate) const BASE: usize = 4;
    pub(crate) const EPOCH: usize = 5;
    pub(crate) const ALIVE: usize = 6;
    pub(crate) const MARK: usize = 7;
    pub(crate) const SERVERS: usize = 8;
    pub(crate) const MISSED: usize = 9;
    pub(crate) const NUMBER: usize = 10;
    pub(crate) const TAKING_OVER: usize = 11;
    pub(crate) const HOMES: usize = 12;
    pub(crate) const TRIES: usize = 13;
    pub(crate) const WORKERS: usize = 14;
    /// Number of words from [`WORKERS`] on that describe how connections are divided among workers:
    /// number of workers, whether the client's address alone selects the worker, and the keys.
    pub(crate) const DIVISION_WORDS: usize = 2 + STEER_WORDS;
    pub(crate) const STEER_WORDS: usize = 4;
    pub(crate) const WORDS: usize = 24;
}

/// Number of words at the beginning of the map `lvs_about`: magic number, version, number of
/// processors and cookie of the network namespace.
pub(super) const HOST_WORDS: usize = 4;
/// Number of all words of the map `lvs_about`: the host, the connection tables, and the division of
/// connections among workers.
pub(super) const ABOUT_WORDS: usize = HOST_WORDS + Layout::HEADER_WORDS + conf::DIVISION_WORDS;
/// Number of words in the key of a virtual service.
pub(crate) const SERVICE_WORDS: usize = 3;
/// Bit in the last word of a key: clients of the service open data connections to other ports
/// (passive FTP).
pub(super) const SERVICE_DATA: u64 = 1 << 32;
/// Maximum number of rules for marks in the map; each has one range of ports.
pub(super) const RULES: u32 = 1024;
pub(super) const RULE_WORDS: usize = 16;

/// The number of entries for next hops; entry 0 is not used.
pub(super) const HOPS: u16 = 16_384;
/// The maximum number of servers whose connections are offloaded.
pub(super) const SERVERS: u32 = 4_096;
/// Number of words that describe a next hop.
pub(super) const HOP_WORDS: usize = 4;
/// Number of words that describe the tunnel path to a server.
pub(super) const TUNNEL_WORDS: usize = 16;
/// Number of words in a server's counters on one processor: packets and bytes of requests, then of
/// replies.
pub(super) const COUNT_WORDS: usize = 4;
/// Number of words in the counters of frames' fates on one processor.
pub(super) const SHARE_WORDS: usize = 16;
/// Number of words of an interface's entry in the array of MAC addresses.
pub(super) const MAC_WORDS: usize = 2;
pub(super) const MAC_PLACES: u32 = 4096;
/// Length in bytes of a decision that the filter passes to the ingress program.
pub(super) const TOLD_BYTES: u32 = 760;

/// Indices of the programs that a program continues with by a tail call.
pub(super) mod next {
    pub(crate) const ALONE: u32 = 0;
    pub(crate) const INGRESS: u32 = 1;
    pub(crate) const HELD: u32 = 2;
    pub(crate) const PROGRAMS: u32 = 3;
}

/// Indices of the words of a rule for marks, and values of its words.
pub(super) mod rule {
    pub(crate) const DST: usize = 0;
    pub(crate) const DST_MASK: usize = 2;
    pub(crate) const SRC: usize = 4;
    pub(crate) const SRC_MASK: usize = 6;
    pub(crate) const FIRST: usize = 8;
    pub(crate) const LAST: usize = 9;
    pub(crate) const LINK: usize = 10;
    pub(crate) const LINK_MASK: usize = 11;
    pub(crate) const KIND: usize = 12;
    pub(crate) const KIND_MASK: usize = 13;
    pub(crate) const WHAT: usize = 14;

    pub(crate) const HOLD: u64 = 1;
    pub(crate) const HOST: u64 = 2;
    pub(crate) const LOOK: u64 = 3;
    pub(crate) const TO_SERVICE: u64 = 0x100;
}

/// Bits of a value in the map of this host's addresses, services, servers and clients
/// (`lvs_local`).
pub(crate) mod own {
    pub(crate) const ANY_TCP: u64 = 1;
    pub(crate) const ANY_UDP: u64 = 2;
    pub(crate) const ANY_SCTP: u64 = 4;
    pub(crate) const NODES: u64 = 8;
    pub(crate) const NODE: u64 = 1 << 33;
    pub(crate) const CLIENT: u64 = 1 << 34;
}

/// Number of words of a key in the map of local addresses and ports (full NAT).
pub(super) const LOCAL_KEY_WORDS: usize = 6;
pub(super) const LOCAL_WORDS: usize = 3;

/// Indices of the words of a local address and port.
pub(super) mod local {
    pub(crate) const ADDR: usize = 0;
    pub(crate) const PORT: usize = 2;
}

/// Indices of the words of a next hop: interface and MTU, MAC addresses, whether XDP may send
/// frames there.
pub(super) mod hop {
    pub(crate) const LINK: usize = 0;
    pub(crate) const MACS: usize = 1;
    pub(crate) const XDP: usize = 3;
}

/// Indices of the words of the tunnel path to a server, and the bits of the word `SHAPE`.
pub(super) mod tunnel {
    pub(crate) const WAY: usize = 0;
    pub(crate) const SHAPE: usize = 1;
    pub(crate) const OUTER_WORDS: usize = 7;

    pub(crate) const V6: u64 = 0x100;
    pub(crate) const GRE: u64 = 0x200;
    pub(crate) const GUE: u64 = 0x400;
    pub(crate) const DF: u64 = 0x800;
}

/// Indices of the words of a server's counters.
pub(super) mod count {
    pub(crate) const IN_PACKETS: usize = 0;
    pub(crate) const IN_BYTES: usize = 1;
    pub(crate) const OUT_PACKETS: usize = 2;
    pub(crate) const OUT_BYTES: usize = 3;
}

/// Indices of the words of an interface's entry in the array of MAC addresses.
pub(super) mod mac {
    pub(crate) const LINK: usize = 0;
    pub(crate) const ADDR: usize = 1;
}

/// Indices of the counters of frames' fates.
pub(super) mod share {
    pub(crate) const REQUESTS: usize = 0;
    pub(crate) const REPLIES: usize = 1;
    pub(crate) const UNKNOWN: usize = 2;
    pub(crate) const UNPUBLISHED: usize = 3;
    pub(crate) const UNFIT: usize = 4;
    pub(crate) const OTHER: usize = 5;
    pub(crate) const WAITING: usize = 6;
    pub(crate) const LOST: usize = 7;
    pub(crate) const XDP: usize = 8;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const HEADER: &str = include_str!("../../bpf/layout.h");

    /// The names and numbers that the header defines.
    fn defined() -> BTreeMap<String, u64> {
        let mut all: BTreeMap<String, u64> = BTreeMap::new();
        for line in HEADER.lines() {
            let Some((name, text)) = line
                .strip_prefix("#define ")
                .and_then(|l| l.split_once(' '))
            else {
                continue;
            };
            let number = |text: &str| {
                let text = text.trim_end_matches(['U', 'L']);
                match text.strip_prefix("0x") {
                    Some(hex) => u64::from_str_radix(hex, 16),
                    None => text.parse(),
                }
            };
            let names = text.trim_matches(['(', ')']).split(" | ");
            let value = number(text).unwrap_or_else(|_| names.map(|name| all[name]).sum());
            assert!(
                all.insert(name.to_owned(), value).is_none(),
                "{name} is defined twice"
            );
        }
        all
    }

    #[test]
    fn bpf_programs_and_dataplane_have_the_same_layout() {
        let ours = [
            ("CONF_KEY0", conf::KEYS),
            ("CONF_KEY1", conf::KEYS + 1),
            ("CONF_NARROW_BUCKETS", conf::NARROW_BUCKETS),
            ("CONF_WIDE_BUCKETS", conf::WIDE_BUCKETS),
            ("CONF_BASE", conf::BASE),
            ("CONF_EPOCH", conf::EPOCH),
            ("CONF_ALIVE", conf::ALIVE),
            ("CONF_MARK", conf::MARK),
            ("CONF_SERVERS", conf::SERVERS),
            ("CONF_MISSED", conf::MISSED),
            ("CONF_NUMBER", conf::NUMBER),
            ("CONF_TAKING_OVER", conf::TAKING_OVER),
            ("CONF_HOMES", conf::HOMES),
            ("CONF_TRIES", conf::TRIES),
            ("CONF_WORKERS", conf::WORKERS),
            ("CONF_BY_ADDRESS", conf::WORKERS + 1),
            ("CONF_STEER", conf::WORKERS + 2),
            ("CONF_STEER_WORDS", conf::STEER_WORDS),
            ("CONF_WORDS", conf::WORDS),
            ("SERVICE_WORDS", SERVICE_WORDS),
            ("RULES", RULES as usize),
            ("RULE_WORDS", RULE_WORDS),
            ("RULE_DST", rule::DST),
            ("RULE_DST_MASK", rule::DST_MASK),
            ("RULE_SRC", rule::SRC),
            ("RULE_SRC_MASK", rule::SRC_MASK),
            ("RULE_FIRST", rule::FIRST),
            ("RULE_LAST", rule::LAST),
            ("RULE_LINK", rule::LINK),
            ("RULE_LINK_MASK", rule::LINK_MASK),
            ("RULE_KIND", rule::KIND),
            ("RULE_KIND_MASK", rule::KIND_MASK),
            ("RULE_WHAT", rule::WHAT),
            ("HOP_WORDS", HOP_WORDS),
            ("HOP_LINK", hop::LINK),
            ("HOP_MACS", hop::MACS),
            ("HOP_XDP", hop::XDP),
            ("MAC_WORDS", MAC_WORDS),
            ("MAC_LINK", mac::LINK),
            ("MAC_ADDR", mac::ADDR),
            ("MAC_PLACES", MAC_PLACES as usize),
            ("LOCAL_KEY_WORDS", LOCAL_KEY_WORDS),
            ("LOCAL_WORDS", LOCAL_WORDS),
            ("LOCAL_ADDR", local::ADDR),
            ("LOCAL_PORT", local::PORT),
            ("COUNT_WORDS", COUNT_WORDS),
            ("TOLD_BYTES", TOLD_BYTES as usize),
            ("NEXT_ALONE", next::ALONE as usize),
            ("NEXT_INGRESS", next::INGRESS as usize),
            ("NEXT_HELD", next::HELD as usize),
            ("NEXT_PROGRAMS", next::PROGRAMS as usize),
            ("TUNNEL_WORDS", TUNNEL_WORDS),
            ("TUNNEL_WAY", tunnel::WAY),
            ("TUNNEL_SHAPE", tunnel::SHAPE),
            ("TUNNEL_OUTER", tunnel::SHAPE + 1),
            ("TUNNEL_OUTER_WORDS", tunnel::OUTER_WORDS),
            ("TUNNEL_IDS", TUNNEL_WORDS - 1),
            ("COUNT_IN_PACKETS", count::IN_PACKETS),
            ("COUNT_IN_BYTES", count::IN_BYTES),
            ("COUNT_OUT_PACKETS", count::OUT_PACKETS),
            ("COUNT_OUT_BYTES", count::OUT_BYTES),
            ("SHARE_WORDS", SHARE_WORDS),
            ("SHARE_REQUESTS", share::REQUESTS),
            ("SHARE_REPLIES", share::REPLIES),
            ("SHARE_UNKNOWN", share::UNKNOWN),
            ("SHARE_UNPUBLISHED", share::UNPUBLISHED),
            ("SHARE_UNFIT", share::UNFIT),
            ("SHARE_OTHER", share::OTHER),
            ("SHARE_WAITING", share::WAITING),
            ("SHARE_LOST", share::LOST),
            ("SHARE_XDP", share::XDP),
        ];
        let shapes = [
            ("TUNNEL_LEN", 0xff),
            ("TUNNEL_V6", tunnel::V6),
            ("TUNNEL_GRE", tunnel::GRE),
            ("TUNNEL_GUE", tunnel::GUE),
            ("TUNNEL_DF", tunnel::DF),
            ("SERVICE_DATA", SERVICE_DATA),
            ("RULE_ACTION", 0xff),
            ("RULE_HOLD", rule::HOLD),
            ("RULE_HOST", rule::HOST),
            ("RULE_LOOK", rule::LOOK),
            ("RULE_TO_SERVICE", rule::TO_SERVICE),
            ("OWN_NODE", own::NODE),
            ("OWN_ANY_TCP", own::ANY_TCP),
            ("OWN_ANY_UDP", own::ANY_UDP),
            ("OWN_ANY_SCTP", own::ANY_SCTP),
            ("OWN_NODES", own::NODES),
            ("OWN_CLIENT", own::CLIENT),
        ];
        let ours = ours.map(|(name, number)| (name, number as u64));
        let ours = ours.into_iter().chain(shapes);
        let mut found = defined();
        for (name, number) in ours.chain(Layout::NUMBERS.iter().copied()) {
            assert_eq!(found.remove(name), Some(number), "{name}");
        }
        assert!(found.is_empty(), "unknown layout {found:?}");
    }
}
