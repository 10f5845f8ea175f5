//! Names and types of what maps hold and programs are called, in the form that the kernel keeps for
//! tools (BTF): `bpftool map dump` shows fields, not bytes. Nothing depends on it.

use lvs_core::memory::Layout;

use super::layout::{ABOUT_WORDS, COUNT_WORDS, conf, tunnel};
use super::layout::{
    HOP_WORDS, LOCAL_KEY_WORDS, LOCAL_WORDS, MAC_WORDS, SERVICE_WORDS, SHARE_WORDS, TUNNEL_WORDS,
};
use crate::outlive::KEPT_WORDS;
use crate::sys::{Typed, Types};

const INT: u32 = 1;
const PTR: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const FORWARD: u32 = 7;
const FUNCTION: u32 = 12;
const PROTOTYPE: u32 = 13;

/// A field: its name, the bytes of a number in it, and how many numbers there are.
type Field = (&'static str, usize, usize);

/// Words that are one field each, and words whose name is not known.
const fn word(name: &'static str) -> Field {
    (name, 8, 1)
}

const fn words(name: &'static str, count: usize) -> Field {
    (name, 8, count)
}

const CONF: &[Field] = &[
    words("keys", 2),
    word("narrow_buckets"),
    word("wide_buckets"),
    word("base"),
    word("epoch"),
    word("alive"),
    word("mark"),
    word("servers"),
    word("missed"),
    word("number"),
    word("taking_over"),
    word("homes"),
    words("unused", conf::WORDS - 13),
];

const NARROW: &[Field] = &[
    word("client"),
    word("virtual_and_way"),
    word("server_and_hop"),
    word("deadline"),
    word("timeout_and_record"),
    word("packets_and_flags"),
    word("engines"),
    word("state_and_epoch"),
];

const WIDE: &[Field] = &[
    word("client"),
    words("client_address", 2),
    words("virtual_address", 2),
    words("server_address", 2),
    word("ports_and_way"),
    words("engines", 3),
    word("deadline"),
    word("timeout_and_record"),
    word("packets_and_flags"),
    word("engines_too"),
    word("state_and_epoch"),
];

const TOLD: &[Field] = &[
    words("memo", 4),
    ("head", 4, 12),
    ("handle", 4, 1),
    ("reply", 4, 1),
    ("hop", 4, 1),
    ("valid", 4, 1),
    ("len", 4, 1),
    ("shape", 4, 1),
    ("record", 4, 1),
    ("protocol", 1, 1),
    ("v6", 1, 1),
    ("other_port", 1, 2),
    ("other_address", 4, 4),
    ("outer", 4, 14),
];

const SHARES: &[Field] = &[
    word("requests"),
    word("replies"),
    word("unknown"),
    word("unpublished"),
    word("unfit"),
    word("other"),
    word("waiting"),
    word("lost"),
    word("xdp"),
    words("unused", SHARE_WORDS - 9),
];

/// The maps, and what is in an entry; of slots, which lie in buckets, in one of them.
const MAPS: &[(&str, &[Field], usize)] = &[
    ("lvs_conf", CONF, 1),
    ("lvs_narrow", NARROW, Layout::WAYS),
    ("lvs_wide", WIDE, Layout::WAYS),
    ("lvs_narrow_tags", &[word("tags")], 1),
    ("lvs_wide_tags", &[word("tags")], 1),
    ("lvs_overflow", WIDE, 1),
    (
        "lvs_hops",
        &[
            word("link_and_mtu"),
            words("macs", HOP_WORDS - 2),
            word("xdp"),
        ],
        1,
    ),
    ("lvs_servers", &[word("hop_and_epoch")], 1),
    (
        "lvs_tunnels",
        &[
            word("way"),
            word("shape"),
            words("outer", tunnel::OUTER_WORDS),
            words("unused", TUNNEL_WORDS - tunnel::OUTER_WORDS - 3),
            word("identifications"),
        ],
        1,
    ),
    (
        "lvs_counts",
        &[
            word("in_packets"),
            word("in_bytes"),
            word("out_packets"),
            word("out_bytes"),
        ],
        1,
    ),
    ("lvs_shares", SHARES, 1),
    ("lvs_told", TOLD, 1),
    ("lvs_met", TOLD, 1),
    (
        "lvs_macs",
        &[word("interface"), words("address", MAC_WORDS - 1)],
        1,
    ),
    ("lvs_services", &[word("is_there")], 1),
    (
        "lvs_local_ends",
        &[words("address", LOCAL_WORDS - 1), word("port_and_slot")],
        1,
    ),
    (
        "lvs_about",
        &[
            words("maps", ABOUT_WORDS),
            words("table", Layout::HEADER_WORDS),
        ],
        1,
    ),
    (
        "lvs_kept",
        &[
            words("all", KEPT_WORDS - COUNT_WORDS),
            words("own", COUNT_WORDS),
        ],
        1,
    ),
    ("lvs_saved", &[word("bytes")], 1),
];

/// The only map with keys of its own, and their fields.
const KEYED: [(&str, &str, &[Field]); 2] = [
    (
        "lvs_services",
        "lvs_service",
        &[
            words("address", SERVICE_WORDS - 1),
            word("port_and_protocol"),
        ],
    ),
    (
        "lvs_local_ends",
        "lvs_ends",
        &[
            word("server_or_slot"),
            words("server_address", 2),
            word("local"),
            words("local_address", LOCAL_KEY_WORDS - 4),
        ],
    ),
];

/// Programs, and what they are called with.
const PROGRAMS: [(&str, &str); 4] = [
    ("lvs_filter", "__sk_buff"),
    ("lvs_ingress", "__sk_buff"),
    ("lvs_alone", "__sk_buff"),
    ("lvs_xdp", "xdp_md"),
];

/// Loads them; `None` from kernels that do not take them.
pub(super) fn load() -> Option<Types> {
    let (blob, typed) = described();
    Types::load(&blob, typed).ok()
}

#[derive(Default)]
struct Builder {
    types: Vec<u32>,
    names: Vec<u8>,
    count: u32,
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("these are few")
}

impl Builder {
    fn name(&mut self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        let at = number(self.names.len());
        self.names.extend(name.bytes().chain([0]));
        at
    }

    /// The next type: what it is, and of how many parts; its size, or another type.
    fn add(&mut self, name: &str, kind: u32, parts: usize, size: u32, rest: &[u32]) -> u32 {
        let name = self.name(name);
        self.types.extend([name, kind << 24 | number(parts), size]);
        self.types.extend(rest);
        self.count += 1;
        self.count
    }

    fn int(&mut self, name: &str, bytes: u32) -> u32 {
        self.add(name, INT, 0, bytes, &[bytes * 8])
    }

    fn array(&mut self, of: u32, index: u32, count: usize) -> u32 {
        self.add("", ARRAY, 0, 0, &[of, index, number(count)])
    }

    fn structure(&mut self, name: &str, fields: &[Field], ints: [u32; 3]) -> u32 {
        let [byte, half, whole] = ints;
        let mut parts = Vec::new();
        let mut at = 0;
        for &(field, bytes, count) in fields {
            let int = match bytes {
                1 => byte,
                4 => half,
                _ => whole,
            };
            let kind = match count {
                1 => int,
                count => self.array(int, half, count),
            };
            parts.extend([self.name(field), kind, number(at * 8)]);
            at += bytes * count;
        }
        self.add(name, STRUCT, fields.len(), number(at), &parts)
    }

    /// As the kernel wants to have it: a header, types, names.
    fn blob(&self) -> Vec<u8> {
        let types = number(self.types.len() * 4);
        let names = number(self.names.len());
        let mut blob = Vec::new();
        blob.extend(0xeb9f_u16.to_ne_bytes());
        blob.extend([1, 0]);
        for word in [24, 0, types, types, names].iter().chain(&self.types) {
            blob.extend(word.to_ne_bytes());
        }
        blob.extend(&self.names);
        blob
    }
}

/// All types, and which are whose.
fn described() -> (Vec<u8>, Typed) {
    let mut b = Builder {
        names: vec![0],
        ..Builder::default()
    };
    let ints = [("u8", 1), ("u32", 4), ("u64", 8)].map(|(name, bytes)| b.int(name, bytes));
    let mut typed = Typed::default();
    for &(map, fields, count) in MAPS {
        let mut value = b.structure(map, fields, ints);
        if count > 1 {
            value = b.array(value, ints[1], count);
        }
        let keyed = KEYED.iter().find(|(known, ..)| *known == map);
        let key = match keyed {
            Some((_, name, fields)) => b.structure(name, fields, ints),
            None => ints[1],
        };
        typed.maps.push((map, [key, value]));
    }
    for (program, context) in PROGRAMS {
        let context = b.add(context, FORWARD, 0, 0, &[]);
        let pointer = b.add("", PTR, 0, context, &[]);
        let argument = b.name("context");
        let prototype = b.add("", PROTOTYPE, 1, ints[1], &[argument, pointer]);
        let function = b.add(program, FUNCTION, 1, prototype, &[]);
        typed.programs.push((program, function));
    }
    (b.blob(), typed)
}

#[cfg(test)]
mod tests {
    use super::super::tests::open;
    use super::*;

    fn size(fields: &[Field]) -> usize {
        fields.iter().map(|(_, bytes, count)| bytes * count).sum()
    }

    /// The word with which a field begins.
    fn at(fields: &[Field], name: &str) -> usize {
        let place = fields.iter().position(|field| field.0 == name);
        size(&fields[..place.expect("there is such a field")]) / 8
    }

    #[test]
    fn fields_are_where_the_programs_read_them() {
        use super::super::layout::{TOLD_BYTES, share};
        for (fields, all) in [
            (
                CONF,
                &[
                    ("base", conf::BASE),
                    ("epoch", conf::EPOCH),
                    ("alive", conf::ALIVE),
                    ("mark", conf::MARK),
                    ("missed", conf::MISSED),
                    ("number", conf::NUMBER),
                    ("taking_over", conf::TAKING_OVER),
                    ("homes", conf::HOMES),
                ][..],
            ),
            (
                SHARES,
                &[
                    ("unknown", share::UNKNOWN),
                    ("unfit", share::UNFIT),
                    ("waiting", share::WAITING),
                    ("xdp", share::XDP),
                ][..],
            ),
        ] {
            for &(name, word) in all {
                assert_eq!(at(fields, name), word, "{name}");
            }
        }
        assert_eq!(size(CONF), conf::WORDS * 8);
        assert_eq!(size(NARROW), Layout::NARROW_WORDS * 8);
        assert_eq!(size(WIDE), Layout::WIDE_WORDS * 8);
        assert_eq!(size(TOLD), TOLD_BYTES as usize);
        assert_eq!(size(SHARES), SHARE_WORDS * 8);
        let numbers = Layout::NUMBERS;
        let known = |name: &str| {
            let found = numbers.iter().find(|(known, _)| *known == name);
            usize::try_from(found.expect("there is one").1).expect("it is small")
        };
        assert_eq!(at(NARROW, "deadline"), known("HOT_DEADLINE"));
        assert_eq!(at(NARROW, "state_and_epoch"), known("HOT_STATE"));
        let hot = known("WIDE_HOT");
        assert_eq!(at(WIDE, "deadline"), hot + known("HOT_DEADLINE"));
        assert_eq!(at(WIDE, "ports_and_way"), known("WIDE_ENDS"));
    }

    #[test]
    fn the_kernel_takes_the_types_with_all_maps_and_programs() {
        let Some(in_kernel) = open() else { return };
        let (blob, typed) = described();
        Types::load(&blob, typed).expect("it is well-formed");
        assert!(in_kernel.ingress().has_types());
        for (name, array) in in_kernel.arrays.all() {
            assert!(array.has_types(), "{name}");
        }
    }
}
