// SPDX-License-Identifier: MIT OR Apache-2.0
// The memory that the dataplane shares with its programs in the kernel: numbers, not types, because the dataplane writes the
// same memory as 64-bit words. `lvs-dataplane/src/fast_path/layout.rs` has the other half, and a test compares the two.
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
// An IPv4 address and a port.
#define PEER 0x0000ffffffffffffULL

// Words of a narrow slot. From HOT on, the words of the second line of a wide slot have the same numbers.
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

// The way of a connection: its forwarding method, and which ends have IPv6 addresses.
#define WAY_METHOD 7
#define WAY_CLIENT_V6 8
#define WAY_SERVER_V6 16
#define METHOD_NAT 0
#define METHOD_TUNNEL 2
#define METHOD_ROUTE 3
#define METHOD_FULL_NAT 5

// Flags of connections whose packets may change more than counters and the deadline.
#define FLAGS_UP 0x6e083e00U
#define FLAG_NO_OUTPUT 0x80U
#define STATE_TCP_ESTABLISHED 1
#define STATE_NONE 0

// A word of tags.
#define TAG_OVERFLOWED 0x80ULL
// Bits of the hash above the tag: the preferred slot of an entry in its first bucket.
#define HOME 7

// ---- settings of the dataplane: words of the only entry of lvs_conf ----

#define CONF_KEY0 0
#define CONF_KEY1 1
#define CONF_NARROW_BUCKETS 2
#define CONF_WIDE_BUCKETS 3
// CLOCK_MONOTONIC, in nanoseconds, at time 0 of the dataplane.
#define CONF_BASE 4
// The epoch in which offloaded connections are valid; 0 if none is.
#define CONF_EPOCH 5
// The time, on the clock of the dataplane, until which connections continue without a dataplane.
#define CONF_ALIVE 6
// Frames with this mark are reinjected into the host; 0: none.
#define CONF_MARK 7
// The number of servers for which each CPU has counters in lvs_counts.
#define CONF_SERVERS 8
// Not 0 if lvs_ingress did not run for a frame that lvs_filter had left to it: a program of another owner precedes it, or it
// is detached. From then on, all frames continue to the dataplane. The programs set this word, and the dataplane clears it.
#define CONF_MISSED 9
// The last epoch that was started, whether valid or not.
#define CONF_NUMBER 10
// Not 0 while a dataplane takes over: its packet sockets receive the packets, but no shield hides them from the host yet.
#define CONF_TAKING_OVER 11
// Whether the preferred slot is searched first: 1 for IPv4 entries, 2 for IPv6 entries.
#define CONF_HOMES 12
// Number of dataplanes that took over and exited soon afterwards. The programs ignore it.
#define CONF_TRIES 13
// Number of packet workers. Each map of the connection table has as many regions of equal length, one after the other.
#define CONF_WORKERS 14
// Not 0 if the client's address alone selects the worker.
#define CONF_BY_ADDRESS 15
// The keys of the hash that selects the worker (lvs-packet/src/steer.rs), two in a word, the low half first: factors of the
// words of an IPv6 address; the summand and the factor before the port; the factors after the port.
#define CONF_STEER 16
#define CONF_STEER_WORDS 4
#define CONF_WORDS 24

// ---- next hops: lvs_hops ----

// Words: interface | MTU << 32; 6 bytes of destination, 6 of source, 4 unused; 1 if lvs_xdp may send there.
#define HOP_WORDS 4
#define HOP_LINK 0
#define HOP_MACS 1
#define HOP_XDP 3

// ---- servers, by record: lvs_servers ----

// One word: hop | epoch << 16.

// ---- paths through tunnels, by record of the server: lvs_tunnels ----

#define TUNNEL_WORDS 16
// Hop | epoch << 16 | version of the following words << 32. A reader reads this word again after the others.
#define TUNNEL_WAY 0
// Length of the outer headers in bytes, and their kinds.
#define TUNNEL_SHAPE 1
#define TUNNEL_LEN 0xff
#define TUNNEL_V6 0x100
#define TUNNEL_GRE 0x200
#define TUNNEL_GUE 0x400
// The outer header forbids fragmentation if the inner header does.
#define TUNNEL_DF 0x800
// The outer headers, without the fields that depend on the packet.
#define TUNNEL_OUTER 2
#define TUNNEL_OUTER_WORDS 7
// Number of identifications that were used, in a cache line of its own.
#define TUNNEL_IDS 15

// ---- the decision of lvs_filter for lvs_ingress: lvs_told ----

#define TOLD_BYTES 760

// ---- programs that continue other programs: lvs_next ----

#define NEXT_ALONE 0
#define NEXT_INGRESS 1
#define NEXT_HELD 2
#define NEXT_PROGRAMS 3

// ---- virtual services, used while no dataplane runs: lvs_services ----

// Key: address (IPv4 in the first 4 bytes), port (0: all ports), protocol. The value has no meaning. With SERVICE_DATA in
// the last word of the key, clients of the service open data connections to other ports (FTP).
#define SERVICE_WORDS 3
#define SERVICE_DATA 0x100000000ULL

// ---- rules for marks, used while no dataplane runs: the only entry of lvs_rules ----

// The first rule that matches decides. The first rule without an action ends the list.
#define RULES 1024
#define RULE_WORDS 16
// Addresses as in a key of lvs_services, and their masks.
#define RULE_DST 0
#define RULE_DST_MASK 2
#define RULE_SRC 4
#define RULE_SRC_MASK 6
// First port; last port.
#define RULE_FIRST 8
#define RULE_LAST 9
// Interface; its mask: all bits or none.
#define RULE_LINK 10
#define RULE_LINK_MASK 11
// Protocol << 16 | 1 for IPv6; its mask.
#define RULE_KIND 12
#define RULE_KIND_MASK 13
// The action.
#define RULE_WHAT 14
#define RULE_ACTION 0xff
// Drop the packet: it is for a service, or a rule drops it.
#define RULE_HOLD 1
#define RULE_HOST 2
// No service has the mark: look up a service by the address.
#define RULE_LOOK 3
// The rule matches packets to services only.
#define RULE_TO_SERVICE 0x100

// ---- local addresses and ports of full NAT connections: the map in lvs_locals, if it exists ----

// Key of a reply: source (the server), then destination; three words each: word 0 as for a client in a slot, IPv6 address.
// Key of a request: the slot, 1 << 32 if it is a wide slot, and zeros.
#define LOCAL_KEY_WORDS 6
// Words: local address, with the layout of an end (IPv4 in the first 4 bytes); port | slot << 32.
#define LOCAL_WORDS 3
#define LOCAL_ADDR 0
#define LOCAL_PORT 2

// ---- link-layer addresses of interfaces with lvs_xdp: lvs_macs ----

// By the interface index, modulo the number of entries. Words: interface; address in the first 6 bytes.
#define MAC_WORDS 2
#define MAC_LINK 0
#define MAC_ADDR 1
#define MAC_PLACES 4096

// ---- counters for each server and CPU: lvs_counts ----

#define COUNT_IN_PACKETS 0
#define COUNT_IN_BYTES 1
#define COUNT_OUT_PACKETS 2
#define COUNT_OUT_BYTES 3
#define COUNT_WORDS 4

// ---- fates of frames for each CPU: lvs_shares ----

#define SHARE_REQUESTS 0
#define SHARE_REPLIES 1
// The frame belongs to no connection, or to a connection that only the dataplane can look up.
#define SHARE_UNKNOWN 2
// The frame belongs to a connection that is not offloaded in this epoch.
#define SHARE_UNPUBLISHED 3
// The packet may change the state of its connection, or exceeds the MTU.
#define SHARE_UNFIT 4
// The packet is neither TCP nor UDP, has IP options, is a fragment, has a VLAN tag or an expiring TTL, is damaged, or is for another host.
#define SHARE_OTHER 5
// While no dataplane runs, the packet belongs to a known connection or is for a service: dropped; the sender repeats it.
#define SHARE_WAITING 6
// Lost: dropped for lack of memory, or lvs_filter refused it for lvs_ingress, which did not run.
#define SHARE_LOST 7
// Forwarded by lvs_xdp, in either direction.
#define SHARE_XDP 8
#define SHARE_WORDS 16

// ---- addresses of this host that services use: lvs_local (local.bpf.c) ----

// Keys have the format of lvs_services. A key with port and protocol 0 is an address; the bits of its value are below.
// The address has services with all ports of this protocol.
#define OWN_ANY_TCP 1
#define OWN_ANY_UDP 2
#define OWN_ANY_SCTP 4
// Packets to this address may be answers of servers on this host. In the last word of a key: the key is such a server.
#define OWN_NODES 8
#define OWN_NODE 0x200000000ULL
// In the last word of a key: the key is the address and port of a client on this host, not a service.
#define OWN_CLIENT 0x400000000ULL
