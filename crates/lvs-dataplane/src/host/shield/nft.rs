//! The messages of nf_tables' netlink protocol that the shield uses.
//!
//! Rules are lists of expressions that load 32-bit registers and compare them;
//! `linux/netfilter/nf_tables.h` names the numbers. Numbers are in network byte order.

use crate::netlink::message::Builder;

const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFPROTO_NETDEV`.
const FAMILY: u8 = 5;

const NEWTABLE: u16 = 0;
const NEWCHAIN: u16 = 3;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const NEWSET: u16 = 9;
const NEWSETELEM: u16 = 12;
const DELSETELEM: u16 = 14;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;

/// Maximum number of elements in one message: an element has at most 60 bytes, and a list at most
/// 64 KiB.
const ELEMENTS_MAX: usize = 500;

/// The type number of IPv4 addresses. `nft list` prints keys by their type number.
pub(super) const TYPE_IP4: u32 = 7;
pub(super) const TYPE_IP6: u32 = 8;
pub(super) const TYPE_PROTOCOL: u32 = 12;
pub(super) const TYPE_PORT: u32 = 13;
pub(super) const TYPE_ICMP: u32 = 14;

/// `NFT_META_MARK`.
const META_MARK: u32 = 3;

/// The first 32-bit register (`NFT_REG32_00`); there are sixteen.
pub(super) const REG: u32 = 8;

/// The header from which a payload expression counts its offset.
#[derive(Clone, Copy)]
pub(super) enum Base {
    Link = 0,
    Network = 1,
    Transport = 2,
}

pub(super) struct SetSpec<'a> {
    pub(super) name: &'a str,
    pub(super) id: u32,
    pub(super) key_types: &'a [u32],
    pub(super) key_len: u32,
    /// Maximum number of elements; `None` for no limit.
    pub(super) limit: Option<u32>,
}

/// A transaction: the kernel applies all of its commands or none.
pub(super) struct Batch<'a> {
    table: &'a str,
    builder: Builder,
    commands: usize,
}

impl<'a> Batch<'a> {
    pub(super) fn new(table: &'a str, first_seq: u32) -> Self {
        let mut builder = Builder::new(first_seq);
        builder.begin(BATCH_BEGIN, NLM_F_REQUEST, &batch_header());
        builder.end();
        Self {
            table,
            builder,
            commands: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands == 0
    }

    /// Returns the bytes of the batch, the sequence number whose acknowledgement confirms the
    /// batch, and the first sequence number after the batch.
    pub(super) fn finish(mut self) -> (Vec<u8>, u32, u32) {
        // The kernel always reports errors; only the last command requests an acknowledgement.
        self.builder.add_flags(NLM_F_ACK);
        let acknowledged = self.builder.seq;
        self.builder
            .begin(BATCH_END, NLM_F_REQUEST, &batch_header());
        self.builder.end();
        (
            self.builder.bytes().to_vec(),
            acknowledged,
            self.builder.seq.wrapping_add(1),
        )
    }

    fn command(&mut self, kind: u16, flags: u16, fill: impl FnOnce(&mut Builder, &str)) {
        self.commands += 1;
        let header = [FAMILY, 0, 0, 0];
        self.builder
            .begin(SUBSYSTEM << 8 | kind, NLM_F_REQUEST | flags, &header);
        fill(&mut self.builder, self.table);
        self.builder.end();
    }

    /// Creates the table. The kernel removes it when the sending socket is closed.
    pub(super) fn add_table(&mut self) {
        const NFT_TABLE_F_OWNER: u32 = 2;
        self.command(NEWTABLE, NLM_F_CREATE | NLM_F_EXCL, |b, table| {
            b.attr_str(1, table);
            b.attr_be32(2, NFT_TABLE_F_OWNER);
        });
    }

    /// Creates a chain without a hook, as a target of jumps.
    pub(super) fn add_chain(&mut self, name: &str) {
        self.command(NEWCHAIN, NLM_F_CREATE | NLM_F_EXCL, |b, table| {
            b.attr_str(1, table);
            b.attr_str(3, name);
        });
    }

    /// Creates a chain at the ingress of a device.
    pub(super) fn add_ingress_chain(&mut self, name: &str, device: &str, priority: i32) {
        const NF_NETDEV_INGRESS: u32 = 0;
        const NF_ACCEPT: u32 = 1;
        self.command(NEWCHAIN, NLM_F_CREATE | NLM_F_EXCL, |b, table| {
            b.attr_str(1, table);
            b.attr_str(3, name);
            b.nest(4, |b| {
                b.attr_be32(1, NF_NETDEV_INGRESS);
                b.attr_be32(2, priority.cast_unsigned());
                b.attr_str(3, device);
            });
            b.attr_be32(5, NF_ACCEPT);
            b.attr_str(7, "filter");
        });
    }

    pub(super) fn delete_chain(&mut self, name: &str) {
        self.command(DELCHAIN, 0, |b, table| {
            b.attr_str(1, table);
            b.attr_str(3, name);
        });
    }

    pub(super) fn add_set(&mut self, set: &SetSpec<'_>) {
        // Six bits for each type, as nft encodes them.
        let key_type = set.key_types.iter().fold(0, |all, t| all << 6 | t);
        self.command(NEWSET, NLM_F_CREATE | NLM_F_EXCL, |b, table| {
            b.attr_str(1, table);
            b.attr_str(2, set.name);
            b.attr_be32(3, 0);
            b.attr_be32(4, key_type);
            b.attr_be32(5, set.key_len);
            if let Some(size) = set.limit {
                b.nest(9, |b| b.attr_be32(1, size));
            }
            b.attr_be32(10, set.id);
        });
    }

    pub(super) fn add_elements(&mut self, set: &str, keys: &[Vec<u8>]) {
        // NLM_F_EXCL makes the kernel report an element that exists already: its state then differs
        // from the expected one.
        self.elements(NEWSETELEM, NLM_F_CREATE | NLM_F_EXCL, set, keys);
    }

    pub(super) fn delete_elements(&mut self, set: &str, keys: &[Vec<u8>]) {
        self.elements(DELSETELEM, 0, set, keys);
    }

    fn elements(&mut self, kind: u16, flags: u16, set: &str, keys: &[Vec<u8>]) {
        for keys in keys.chunks(ELEMENTS_MAX) {
            self.command(kind, flags, |b, table| {
                b.attr_str(1, table);
                b.attr_str(2, set);
                b.nest(3, |b| {
                    for key in keys {
                        b.nest(1, |b| {
                            b.nest(1, |b| b.attr(1, key));
                        });
                    }
                });
            });
        }
    }

    pub(super) fn add_rule(&mut self, chain: &str, fill: impl FnOnce(&mut RuleBody<'_>)) {
        self.command(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, |b, table| {
            b.attr_str(1, table);
            b.attr_str(2, chain);
            b.nest(4, |b| fill(&mut RuleBody { b }));
        });
    }
}

/// The header of a batch's begin and end: any family, and the subsystem in network byte order.
fn batch_header() -> [u8; 4] {
    let [high, low] = SUBSYSTEM.to_be_bytes();
    [0, 0, high, low]
}

pub(super) struct RuleBody<'a> {
    b: &'a mut Builder,
}

impl RuleBody<'_> {
    fn expression(&mut self, name: &str, fill: impl FnOnce(&mut Builder)) -> &mut Self {
        self.b.nest(1, |b| {
            b.attr_str(1, name);
            b.nest(2, fill);
        });
        self
    }

    /// Loads bytes of the frame. The rule does not match if the frame is shorter.
    pub(super) fn load(&mut self, base: Base, offset: u32, len: u32, register: u32) -> &mut Self {
        self.expression("payload", |b| {
            b.attr_be32(1, register);
            b.attr_be32(2, base as u32);
            b.attr_be32(3, offset);
            b.attr_be32(4, len);
        })
    }

    pub(super) fn load_protocol(&mut self, register: u32) -> &mut Self {
        self.meta(16, register)
    }

    /// Loads the type of the frame's link-layer destination (`PACKET_HOST` and others).
    pub(super) fn load_packet_type(&mut self) -> &mut Self {
        self.meta(19, REG)
    }

    /// Loads the mark, in the host's byte order.
    pub(super) fn load_mark(&mut self) -> &mut Self {
        self.meta(META_MARK, REG)
    }

    /// Sets the packet's mark to 0.
    pub(super) fn clear_mark(&mut self) -> &mut Self {
        self.expression("immediate", |b| {
            b.attr_be32(1, REG);
            b.nest(2, |b| b.attr(1, &[0; 4]));
        });
        self.expression("meta", |b| {
            b.attr_be32(2, META_MARK);
            b.attr_be32(3, REG);
        })
    }

    fn meta(&mut self, key: u32, register: u32) -> &mut Self {
        self.expression("meta", |b| {
            b.attr_be32(1, register);
            b.attr_be32(2, key);
        })
    }

    pub(super) fn mask(&mut self, mask: &[u8]) -> &mut Self {
        self.expression("bitwise", |b| {
            b.attr_be32(1, REG);
            b.attr_be32(2, REG);
            b.attr_be32(3, u32::try_from(mask.len()).unwrap_or(0));
            b.nest(4, |b| b.attr(1, mask));
            b.nest(5, |b| b.attr(1, &[0; 16][..mask.len()]));
        })
    }

    pub(super) fn equal(&mut self, value: &[u8]) -> &mut Self {
        self.compare(0, value)
    }

    pub(super) fn not_equal(&mut self, value: &[u8]) -> &mut Self {
        self.compare(1, value)
    }

    /// Continues with the next expression if the number in the register, in network byte order, is
    /// less than `value`.
    pub(super) fn less(&mut self, value: &[u8]) -> &mut Self {
        self.compare(2, value)
    }

    fn compare(&mut self, op: u32, value: &[u8]) -> &mut Self {
        self.expression("cmp", |b| {
            b.attr_be32(1, REG);
            b.attr_be32(2, op);
            b.nest(3, |b| b.attr(1, value));
        })
    }

    /// Continues with the next expression if the registers from [`REG`] on contain an element of
    /// the set.
    pub(super) fn in_set(&mut self, set: &str) -> &mut Self {
        self.expression("lookup", |b| {
            b.attr_str(1, set);
            b.attr_be32(2, REG);
        })
    }

    /// Continues with the next expression if this host does not have the destination address.
    pub(super) fn not_for_host(&mut self) -> &mut Self {
        const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
        const NFTA_FIB_F_DADDR: u32 = 2;
        self.expression("fib", |b| {
            b.attr_be32(1, REG);
            b.attr_be32(2, NFT_FIB_RESULT_ADDRTYPE);
            b.attr_be32(3, NFTA_FIB_F_DADDR);
        });
        // The register holds RTN_LOCAL in the host's byte order.
        self.not_equal(&u32::from(libc::RTN_LOCAL).to_ne_bytes())
    }

    /// Continues with the next expression if the IPv6 packet has a fragment header.
    pub(super) fn has_fragment_header(&mut self) -> &mut Self {
        const IPPROTO_FRAGMENT: u8 = 44;
        const NFT_EXTHDR_F_PRESENT: u32 = 1;
        self.expression("exthdr", |b| {
            b.attr_be32(1, REG);
            b.attr(2, &[IPPROTO_FRAGMENT]);
            b.attr_be32(3, 0);
            b.attr_be32(4, 1);
            b.attr_be32(5, NFT_EXTHDR_F_PRESENT);
        });
        self.equal(&[1])
    }

    /// Loads the "next header" byte of an IPv6 fragment header.
    pub(super) fn load_next_header_of_fragment(&mut self) -> &mut Self {
        const IPPROTO_FRAGMENT: u8 = 44;
        self.expression("exthdr", |b| {
            b.attr_be32(1, REG);
            b.attr(2, &[IPPROTO_FRAGMENT]);
            b.attr_be32(3, 0);
            b.attr_be32(4, 1);
        });
        self
    }

    /// Counts and drops the packets that match all previous expressions.
    pub(super) fn drop(&mut self) {
        const NF_DROP: u32 = 0;
        self.expression("counter", |_| {});
        self.verdict(NF_DROP, None);
    }

    pub(super) fn accept(&mut self) {
        const NF_ACCEPT: u32 = 1;
        self.verdict(NF_ACCEPT, None);
    }

    /// Ends the chain, and continues in the chain that jumped to it.
    pub(super) fn go_back(&mut self) {
        const NFT_RETURN: i32 = -5;
        self.verdict(NFT_RETURN.cast_unsigned(), None);
    }

    pub(super) fn jump(&mut self, chain: &str) {
        const NFT_JUMP: i32 = -3;
        self.verdict(NFT_JUMP.cast_unsigned(), Some(chain));
    }

    fn verdict(&mut self, code: u32, chain: Option<&str>) {
        const NFT_REG_VERDICT: u32 = 0;
        self.expression("immediate", |b| {
            b.attr_be32(1, NFT_REG_VERDICT);
            b.nest(2, |b| {
                b.nest(2, |b| {
                    b.attr_be32(1, code);
                    if let Some(chain) = chain {
                        b.attr_str(2, chain);
                    }
                });
            });
        });
    }
}
