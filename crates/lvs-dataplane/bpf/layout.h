// SPDX-License-Identifier: MIT OR Apache-2.0
// What the dataplane and its programs in the kernel share: numbers, not types, because the dataplane writes the same memory as
// 64-bit words. `lvs-dataplane/src/fast_path/layout.rs` has the other half, and a test compares the two.
#pragma once

// ---- connections (lvs-core/src/conn/table/slot.rs) ----

#define WAYS 8
#define NARROW_BYTES 64
#define WIDE_BYTES 128

// Word 0 of a slot.
#define IDENTITY 0x00ffffffffffffffULL
#define KIND_LIVE 0x0100000000000000ULL
#define KIND_TEMPLATE 0x0200000000000000ULL
#define KIND_NO_CPORT 0x0400000000000000ULL
#define KIND_HIDDEN 0x0800000000000000ULL
#define KIND_SHADOWED_IN 0x1000000000000000ULL
#define KIND_SHADOWED_OUT 0x2000000000000000ULL
#define KIND_DISTINCT (KIND_TEMPLATE | KIND_NO_CPORT | KIND_HIDDEN)
// An address of IPv4 and a port.
#define PEER 0x0000ffffffffffffULL

// Words of a narrow slot; those of a wide one's second line have the same numbers from HOT on.
#define NARROW_VIRT 1
#define NARROW_SERVER 2
#define WIDE_CLIENT 1
#define WIDE_VIRT 3
#define WIDE_SERVER 5
#define WIDE_ENDS 7
#define WIDE_HOT 8
#define HOT_DEADLINE 3
#define HOT_SERVER 4
#define HOT_FLAGS 5
#define HOT_STATE 7

// The way of a connection: forwarding method, and which ends are of IPv6.
#define WAY_METHOD 7
#define WAY_CLIENT_V6 8
#define WAY_SERVER_V6 16
#define METHOD_NAT 0
#define METHOD_TUNNEL 2
#define METHOD_ROUTE 3
#define METHOD_FULL_NAT 5

// Flags with which a packet may change more than counters and the deadline.
#define FLAGS_UP 0x6e083e00U
#define FLAG_NO_OUTPUT 0x80U
#define STATE_TCP_ESTABLISHED 1
#define STATE_NONE 0

// A word of tags.
#define TAG_OVERFLOWED 0x80ULL
// Above the tag in the hash: the slot of the first bucket where an entry lies if it could.
#define HOME 7

// ---- settings of the dataplane: words of the only entry of lvs_conf ----

#define CONF_KEY0 0
#define CONF_KEY1 1
#define CONF_NARROW_BUCKETS 2
#define CONF_WIDE_BUCKETS 3
// CLOCK_MONOTONIC at the dataplane's time 0, in nanoseconds.
#define CONF_BASE 4
// Connections that were published in this epoch are in force; 0 for none.
#define CONF_EPOCH 5
// Until when connections go on without a dataplane, in its time.
#define CONF_ALIVE 6
// Frames with this mark are given back to the host; 0 for none.
#define CONF_MARK 7
// As far as counters are used, a CPU.
#define CONF_SERVERS 8
// Not 0 once lvs_ingress was not run for a frame that lvs_filter had left to it: somebody else's program is in front of it,
// or it is detached. Everything goes up from then on. The programs set it, the dataplane clears it.
#define CONF_MISSED 9
// The last epoch that was begun, in force or not.
#define CONF_NUMBER 10
// Not 0 while a dataplane takes over: it has the packets, but the host is not yet kept from them.
#define CONF_TAKING_OVER 11
// Whether entries are looked for at home first: 1 for those of IPv4, 2 for the others.
#define CONF_HOMES 12
// Dataplanes that have taken over and have not lived for long since. The programs do not care.
#define CONF_TRIES 13
// Packet workers. Each map of the connection table has as many regions of equal length, one after the other.
#define CONF_WORKERS 14
// Not 0 if the client's address alone selects the worker.
#define CONF_BY_ADDRESS 15
// The keys of the hash that selects the worker (lvs-packet/src/steer.rs), two in a word, the low half first: factors of the words
// of an IPv6 address; the summand and the factor before the port; the factors behind it.
#define CONF_STEER 16
#define CONF_STEER_WORDS 4
#define CONF_WORDS 24

// ---- ways out: lvs_hops ----

// Words: interface | MTU << 32; 6 bytes of destination, 6 of source, 4 unused; 1 if lvs_xdp may send there.
#define HOP_WORDS 4
#define HOP_LINK 0
#define HOP_MACS 1
#define HOP_XDP 3

// ---- servers, by record: lvs_servers ----

// One word: hop | epoch << 16.

// ---- ways through tunnels, by record of the server: lvs_tunnels ----

#define TUNNEL_WORDS 16
// Hop | epoch << 16 | number of the version of what follows << 32. Whoever has read that reads this one again.
#define TUNNEL_WAY 0
// Length of the outer headers, in bytes, and what they are.
#define TUNNEL_SHAPE 1
#define TUNNEL_LEN 0xff
#define TUNNEL_V6 0x100
#define TUNNEL_GRE 0x200
#define TUNNEL_GUE 0x400
// The outer header forbids fragmentation where the inner one does.
#define TUNNEL_DF 0x800
// The outer headers, but for what depends on the packet.
#define TUNNEL_OUTER 2
#define TUNNEL_OUTER_WORDS 7
// Identifications that were given; in a cache line of their own.
#define TUNNEL_IDS 15

// ---- what lvs_filter leaves for lvs_ingress: lvs_told ----

#define TOLD_BYTES 760

// ---- programs that go on where another one ends: lvs_next ----

#define NEXT_ALONE 0
#define NEXT_INGRESS 1
#define NEXT_HELD 2
#define NEXT_PROGRAMS 3

// ---- virtual services, for when there is no dataplane: lvs_services ----

// Key: address (IPv4 in the first 4 bytes), port, protocol; 0 as the port for all of them. The value says nothing. With
// SERVICE_DATA in its last word, clients of the service open data connections to other ports (FTP).
#define SERVICE_WORDS 3
#define SERVICE_DATA 0x100000000ULL

// ---- rules for marks, for when there is no dataplane: the only entry of lvs_rules ----

// The first one that matches decides. The first without an action ends them.
#define RULES 1024
#define RULE_WORDS 16
// Addresses as in a key of lvs_services, and their bits that matter.
#define RULE_DST 0
#define RULE_DST_MASK 2
#define RULE_SRC 4
#define RULE_SRC_MASK 6
// First port; last port.
#define RULE_FIRST 8
#define RULE_LAST 9
// Interface; its bits that matter: all or none.
#define RULE_LINK 10
#define RULE_LINK_MASK 11
// Protocol << 16 | 1 for IPv6; its bits that matter.
#define RULE_KIND 12
#define RULE_KIND_MASK 13
// What becomes of the packet.
#define RULE_WHAT 14
#define RULE_ACTION 0xff
// It is dropped: it is for a service, or is to be dropped anyway.
#define RULE_HOLD 1
#define RULE_HOST 2
// There is no service with the mark: look whether there is one at the address.
#define RULE_LOOK 3
// The rule matches packets to services only.
#define RULE_TO_SERVICE 0x100

// ---- local ends of connections by full NAT: the map in lvs_locals, if there is one ----

// Key of a reply: its ends, the server first, each as word 0 of a slot has the client, and 16 bytes of IPv6. Of a request: the
// slot, 1 << 32 if that is a wide one, and zeros.
#define LOCAL_KEY_WORDS 6
// Words: local address, as an end has it (IPv4 in the first 4 bytes); port | slot << 32.
#define LOCAL_WORDS 3
#define LOCAL_ADDR 0
#define LOCAL_PORT 2

// ---- link-layer addresses of interfaces that have lvs_xdp: lvs_macs ----

// By the interface, modulo their number. Words: interface; address, in its first 6 bytes.
#define MAC_WORDS 2
#define MAC_LINK 0
#define MAC_ADDR 1
#define MAC_PLACES 4096

// ---- counters of a server and a CPU: lvs_counts ----

#define COUNT_IN_PACKETS 0
#define COUNT_IN_BYTES 1
#define COUNT_OUT_PACKETS 2
#define COUNT_OUT_BYTES 3
#define COUNT_WORDS 4

// ---- what became of frames, a CPU: lvs_shares ----

#define SHARE_REQUESTS 0
#define SHARE_REPLIES 1
// Of no connection, or of one that is looked up elsewhere.
#define SHARE_UNKNOWN 2
// Of a connection that is not published, or not in this epoch.
#define SHARE_UNPUBLISHED 3
// It may change the connection's state, or does not fit.
#define SHARE_UNFIT 4
// No TCP or UDP, or with options, fragments, tags of VLANs.
#define SHARE_OTHER 5
// Of a known connection or for a service, while there is no dataplane: dropped, its sender repeats it.
#define SHARE_WAITING 6
// Lost: dropped for want of memory, or left to lvs_ingress, which was not run.
#define SHARE_LOST 7
// Forwarded by lvs_xdp, to either side.
#define SHARE_XDP 8
#define SHARE_WORDS 16

// ---- this host's addresses that services have: lvs_local (local.bpf.c) ----

// Keys as those of lvs_services. With port and protocol 0: an address. Its value: what is looked for there.
// There are services with all ports of a protocol.
#define OWN_ANY_TCP 1
#define OWN_ANY_UDP 2
#define OWN_ANY_SCTP 4
// Packets to this address may be answers of servers on this host. In the last word of a key: such a server, not a service.
#define OWN_NODES 8
#define OWN_NODE 0x200000000ULL
// In the last word of a key: the address and port of a client on this host, not a service.
#define OWN_CLIENT 0x400000000ULL
