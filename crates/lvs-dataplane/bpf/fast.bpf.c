// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernel fast path: forwards packets of established connections. The dataplane decides: it offloads a connection by marking it
// in the table that both read (layout.h). A packet may change only the deadline and the counters of its connection. All other
// packets continue to the dataplane.
//
//   lvs_filter   socket filter of the dataplane's packet socket, which receives a frame before tc: looks up the connection, refuses
//                the frames that lvs_ingress is going to forward, and stores the result for lvs_ingress
//   lvs_xdp      runs before both, if the operator requires it: forwards packets before the kernel allocates a socket buffer
//   lvs_ingress  tc ingress of the same interface: carries out the decision of lvs_filter
//   lvs_alone    continues lvs_ingress if no filter has read the frame, because the dataplane is dead: looks up the connection, and
//                lets lvs_ingress forward. As one program, the two would double the time of the kernel's verifier
//   lvs_held     continues lvs_alone if no connection is found: drops packets to services, so that the host does not reset them
//
// All of them run for one frame on one CPU, with no other frame in between. So each frame has one decision, however the dataplane
// changes the table in the meantime.
#include <linux/bpf.h>
#include "layout.h"

#define INLINE static inline __attribute__((always_inline))
#define SEC(name) __attribute__((section(name), used))
// The compiler must not add to a pointer before it is checked: the verifier would refuse the program.
#define CHECKED(p) __asm__ volatile("" : "+r"(p))
#define READ(x) (*(volatile __typeof__(x) *)&(x))
// Makes later reads happen after earlier reads, by an atomic operation on the stack. If the processor reads in order anyway,
// the loader removes the operation (fast_path/open.rs).
#define IN_ORDER() do { \
		u64 cell = 0, old = __sync_fetch_and_add((volatile u64 *)&cell, 0); \
		__asm__ volatile("" : : "r"(old)); \
	} while (0)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The dataplane creates these maps and finds their names here.
extern char lvs_conf, lvs_narrow, lvs_narrow_tags, lvs_wide, lvs_wide_tags, lvs_hops, lvs_servers, lvs_tunnels, lvs_counts, lvs_shares, lvs_told, lvs_met, lvs_services, lvs_rules, lvs_macs, lvs_locals, lvs_next;

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
// The time of the last tick, which is precise enough for deadlines and does not read the clock of the processor.
static u64 (*ktime)(void) = (void *)160;
static u32 (*processor)(void) = (void *)8;
static long (*store_bytes)(struct __sk_buff *, u32 offset, const void *from, u32 len, u64 flags) = (void *)9;
static long (*l4_csum_replace)(struct __sk_buff *, u32 offset, u64 from, u64 to, u64 flags) = (void *)11;
static long (*tail_call)(void *ctx, void *programs, u32 which) = (void *)12;
static long (*vlan_pop)(struct __sk_buff *) = (void *)19;
static long (*redirect)(u32 ifindex, u64 flags) = (void *)23;
static long (*load_bytes)(const struct __sk_buff *, u32 offset, void *to, u32 len) = (void *)26;
static long (*csum_diff)(u32 *from, u32 from_size, u32 *to, u32 to_size, u32 seed) = (void *)28;
static long (*change_tail)(struct __sk_buff *, u32 len, u64 flags) = (void *)38;
static long (*pull_data)(struct __sk_buff *, u32 len) = (void *)39;
static long (*csum_update)(struct __sk_buff *, u32 csum) = (void *)40;
static long (*xdp_adjust_tail)(struct xdp_md *, int delta) = (void *)65;
static long (*adjust_room)(struct __sk_buff *, int len, u32 mode, u64 flags) = (void *)50;

#define NEXT (-1)
#define SHOT 2
#define PASS 0x7fffffff

#define ETH 14
// `PACKET_OUTGOING`.
#define OUTGOING 4
#define IPV4 0x0800
#define IPV6 0x86dd
// The VLAN number in a tag; it is 0 in a tag that only sets a priority.
#define VLAN_NUMBER 0xfff
#define TCP 6
#define UDP 17
#define SCTP 132
// FTP's control port, its data port, and the first port that its passive data connections may use.
#define FTP 21
#define FTP_DATA 20
#define UNPRIVILEGED 1024
#define FIN_SYN_RST 7
#define ACK 16
// The dataplane decides on super-packets with segments smaller than this.
#define SEGMENT_MIN 256
// The dataplane also decides on super-packets with more datagrams than this, and on those for tunnels: the kernel does not
// put all of them into tunnels.
#define DATAGRAMS_MOST 127
// In the field `flags` of a datagram, which has no TCP flags: the datagram has no checksum.
#define ABSENT 1
// Words of a datagram without a checksum that are summed up at a time, and the maximum number of times: longer datagrams
// continue to the dataplane.
#define SUMMED_WORDS 128
#define SUMMED_PIECES 18

INLINE u16 swap(u16 x) { return x >> 8 | x << 8; }
INLINE u16 fold(u64 x)
{
	x = (x & 0xffffffff) + (x >> 32);
	x = (x & 0xffff) + (x >> 16);
	x = (x & 0xffff) + (x >> 16);
	x = (x & 0xffff) + (x >> 16);
	return x;
}

// ---- look-up -------------------------------------------------------------------------------------------------------------

#define ROTL(x, b) ((x) << (b) | (x) >> (64 - (b)))
INLINE void round_of(u64 *v)
{
	v[0] += v[1]; v[1] = ROTL(v[1], 13) ^ v[0]; v[0] = ROTL(v[0], 32);
	v[2] += v[3]; v[3] = ROTL(v[3], 16) ^ v[2];
	v[0] += v[3]; v[3] = ROTL(v[3], 21) ^ v[0];
	v[2] += v[1]; v[1] = ROTL(v[1], 17) ^ v[2]; v[2] = ROTL(v[2], 32);
}

// SipHash-1-3 of one word, or of three.
INLINE u64 hash(const u64 *conf, u64 a, u64 b, u64 c, int words)
{
	u64 k0 = conf[CONF_KEY0], k1 = conf[CONF_KEY1];
	u64 v[4] = { k0 ^ 0x736f6d6570736575ULL, k1 ^ 0x646f72616e646f6dULL, k0 ^ 0x6c7967656e657261ULL, k1 ^ 0x7465646279746573ULL };
	v[3] ^= a; round_of(v); v[0] ^= a;
	if (words == 3) {
		v[3] ^= b; round_of(v); v[0] ^= b;
		v[3] ^= c; round_of(v); v[0] ^= c;
	}
	u64 length = (u64)words * 8 << 56;
	v[3] ^= length; round_of(v); v[0] ^= length;
	v[2] ^= 0xff;
	round_of(v); round_of(v); round_of(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

// One end of a packet. IPv4: `id` is the whole word 0, followed by zeros. IPv6: `id` and the address.
struct end {
	u64 id;
	u64 addr[2];
};

// The required fields of a frame. The structure is in a map, so that the verifier does not know its content: otherwise the
// verifier would follow the look-up for each protocol and family.
struct packet {
	struct end src, dst;   // with the layout of a key of lvs_locals
	u32 len;       // of the IP packet
	u32 headers;   // IP and transport
	u8 proto, flags;   // flags of TCP; ABSENT
};

// Number of 32-bit words, from the IP header on, that are read and compared.
#define HEAD_V4 7
#define HEAD_V6 12

// The decision about a frame, and the packet that it is about.
struct told {
	u64 memo[4];   // the last receiver of frames: the hashed words, and the hash
	u32 head[HEAD_V6];
	u32 handle;
	u32 reply;
	u32 hop;
	u32 valid;
	u32 len;
	u32 shape;     // of the outer headers
	u32 record;    // record of the server, if outer headers exist
	u8 proto, v6;
	u16 port;      // port and address of the other end, if both ends are translated
	u32 other[4];
	u32 outer[TUNNEL_OUTER_WORDS * 2];
	struct packet packet;
	u32 summed[SUMMED_WORDS];
};
_Static_assert(sizeof(struct told) == TOLD_BYTES, "layout.h");

// Values of `valid`: no frame was read; the dataplane receives this frame; lvs_ingress forwards this frame.
#define TOLD_NOTHING 0
#define TOLD_LEAVE 1
#define TOLD_TAKE 2

#define HANDLE_NONE 0xffffffffU
#define HANDLE_UP 0xfffffffeU    // the dataplane has to look it up

// Whether the entry at `slot` belongs to the packet.
INLINE int matches(const u64 *slot, const struct packet *p, const int v6, int reply)
{
	const struct end *client = reply ? &p->dst : &p->src, *peer = reply ? &p->src : &p->dst;
	u64 word = READ(slot[0]);
	u64 kinds = reply ? KIND_TEMPLATE : KIND_DISTINCT;
	if ((word & (IDENTITY | kinds)) != client->id) return 0;
	// Collects the differences without jumps: the verifier would follow each jump for each entry.
	u64 way, differ = 0, virt, server;
	if (v6) {
		u64 ends = READ(slot[WIDE_ENDS]), port = peer->id >> 32 & 0xffff;
		way = ends >> 48;
		differ = (READ(slot[WIDE_CLIENT]) ^ client->addr[0]) | (READ(slot[WIDE_CLIENT + 1]) ^ client->addr[1]) | (~way & WAY_CLIENT_V6);
		virt = ((ends & 0xffff) ^ port) | (READ(slot[WIDE_VIRT]) ^ peer->addr[0]) | (READ(slot[WIDE_VIRT + 1]) ^ peer->addr[1]);
		server = ((ends >> 16 & 0xffff) ^ port) | (READ(slot[WIDE_SERVER]) ^ peer->addr[0]) | (READ(slot[WIDE_SERVER + 1]) ^ peer->addr[1]);
	} else {
		u64 at = READ(slot[NARROW_VIRT]), from = READ(slot[NARROW_SERVER]), ip = peer->id & PEER;
		way = at >> 48;
		virt = (at & PEER) ^ ip;
		server = (from & PEER) ^ ip;
	}
	if (!reply) return !(differ | virt);
	// Replies of full NAT are addressed to a local port.
	if ((way & WAY_METHOD) == METHOD_FULL_NAT) return 0;
	return !(differ | ((way & WAY_METHOD) == METHOD_NAT ? server : virt));
}

// The kind of an entry that another connection shadows: replies with NAT come from the server; all other packets have the
// virtual address as destination or source.
INLINE u64 shadowed(u32 method, int reply)
{
	return reply && method == METHOD_NAT ? KIND_SHADOWED_OUT : KIND_SHADOWED_IN;
}

// The first lane with this tag whose slot belongs to the packet; WAYS if there is none.
INLINE u32 in_bucket(u32 bucket, u64 tags, u8 tag, const struct packet *p, const int v6, int reply)
{
	u64 differ = (tags & 0x7f7f7f7f7f7f7f7fULL) ^ tag * 0x0101010101010101ULL;
	if (!(~(differ + 0x7f7f7f7f7f7f7f7fULL) & 0x8080808080808080ULL)) return WAYS;
	u64 *slots = v6 ? map_lookup(&lvs_wide, &bucket) : map_lookup(&lvs_narrow, &bucket);
	if (!slots) return WAYS;
	CHECKED(slots);
#pragma clang loop unroll(disable)
	for (u32 lane = 0; lane < WAYS; lane++, tags >>= 8) {
		if ((tags & 0x7f) != tag) continue;
		if (matches(slots + lane * (v6 ? WIDE_BYTES : NARROW_BYTES) / 8, p, v6, reply)) return lane;
	}
	return WAYS;
}

// The region of the table for the connections of a client: the region of its packet worker (Steering::of_client, in
// lvs-packet/src/steer.rs). Only this region is searched: packets of other workers' connections continue to the dataplane.
INLINE u32 region_of(const u64 *conf, const struct end *client, const int v6)
{
	u32 workers = conf[CONF_WORKERS], sum;
	if (workers < 2) return 0;
	const u64 *keys = conf + CONF_STEER;
	if (v6) {
		sum = __builtin_bswap32(client->addr[0]) * (u32)keys[0];
		sum += __builtin_bswap32(client->addr[0] >> 32) * (u32)(keys[0] >> 32);
		sum += __builtin_bswap32(client->addr[1]) * (u32)keys[1];
		sum += __builtin_bswap32(client->addr[1] >> 32) * (u32)(keys[1] >> 32);
	} else {
		sum = __builtin_bswap32(client->id);
	}
	u32 port = conf[CONF_BY_ADDRESS] ? 0 : swap(client->id >> 32);
	sum = (sum + (u32)keys[2]) * (u32)(keys[2] >> 32);
	sum ^= sum >> 16;
	sum = (sum + port) * (u32)keys[3];
	sum ^= sum >> 15;
	sum *= (u32)(keys[3] >> 32);
	sum ^= sum >> 16;
	return sum % workers;
}

// The slot of the packet's connection, if the packet has this direction.
INLINE u32 find(const u64 *conf, const struct packet *p, const int v6, int reply, u64 *memo)
{
	const struct end *client = reply ? &p->dst : &p->src;
	u64 h, key = client->id | (u64)v6 << 63;
	// Each frame is first looked up as a reply, by its destination. Requests have few destinations: the last hash is stored.
	if (reply && memo[0] == key && (!v6 || (memo[1] == client->addr[0] && memo[2] == client->addr[1]))) {
		h = memo[3];
	} else {
		h = v6 ? hash(conf, client->addr[0], client->addr[1], client->id >> 32, 3) : hash(conf, client->id, 0, 0, 1);
		if (reply) {
			memo[0] = key;
			memo[1] = v6 ? client->addr[0] : 0;
			memo[2] = v6 ? client->addr[1] : 0;
			memo[3] = h;
		}
	}
	u64 buckets = conf[v6 ? CONF_WIDE_BUCKETS : CONF_NARROW_BUCKETS], overflowed = 0;
	u32 first = region_of(conf, client, v6) * (u32)buckets;
	if (READ(conf[CONF_HOMES]) & (v6 ? 2 : 1)) {
		u32 home = first + (u32)((h & 0xffffffff) * buckets >> 32), at = h >> HOME & (WAYS - 1);
		u64 *slots = v6 ? map_lookup(&lvs_wide, &home) : map_lookup(&lvs_narrow, &home);
		if (!slots) return HANDLE_UP;
		CHECKED(slots);
		if (matches(slots + at * (v6 ? WIDE_BYTES : NARROW_BYTES) / 8, p, v6, reply)) return home * WAYS + at;
	}
	u64 low = h & 0x7f;
	CHECKED(low);
	// Replaces 0 by 1 without a jump: the verifier would follow both branches.
	u8 tag = low + ((low - 1) >> 63);
#pragma clang loop unroll(disable)
	for (int turn = 0; turn < 2; turn++) {
		u32 bucket = first + (u32)((h & 0xffffffff) * buckets >> 32);
		u64 *tags = v6 ? map_lookup(&lvs_wide_tags, &bucket) : map_lookup(&lvs_narrow_tags, &bucket);
		if (!tags) return HANDLE_UP;
		u64 word = READ(*tags);
		u32 lane = in_bucket(bucket, word, tag, p, v6, reply);
		if (lane < WAYS) return bucket * WAYS + lane;
		if (!turn) overflowed = word & TAG_OVERFLOWED;
		h >>= 32;
	}
	return overflowed ? HANDLE_UP : HANDLE_NONE;
}

// The slot of the full NAT connection to which the reply belongs.
INLINE u32 find_local(const struct packet *p)
{
	u32 zero = 0;
	void *locals = map_lookup(&lvs_locals, &zero);
	if (!locals) return HANDLE_NONE;
	u64 *found = map_lookup(locals, &p->src);
	return found ? READ(found[LOCAL_PORT]) >> 32 : HANDLE_NONE;
}

// The local address and port that replace the client towards the server. `key` is overwritten.
INLINE u64 *local_of(u32 handle, const int v6, u32 *key)
{
	u32 zero = 0;
	void *locals = map_lookup(&lvs_locals, &zero);
	if (!locals) return 0;
	key[0] = handle;
	key[1] = v6;
	for (int i = 2; i < LOCAL_KEY_WORDS * 2; i++) key[i] = 0;
	return map_lookup(locals, key);
}

INLINE u64 *slot_of(u32 handle, const int v6)
{
	u32 bucket = handle / WAYS;
	u64 *slots = v6 ? map_lookup(&lvs_wide, &bucket) : map_lookup(&lvs_narrow, &bucket);
	if (!slots) return 0;
	CHECKED(slots);
	return slots + (handle & (WAYS - 1)) * (v6 ? WIDE_BYTES : NARROW_BYTES) / 8;
}

// ---- parser --------------------------------------------------------------------------------------------------------------

// The bytes of a packet from its IP header on, as far as they are read.
union head {
	u32 w[12];
	u8 b[48];
};

// Fills in `p` from the first 28 (IPv6: 48) bytes; returns whether the packet can be forwarded here.
INLINE int read_v4(const union head *h, struct packet *p)
{
	if (h->b[0] != 0x45 || (h->w[1] & 0xffff0000) & ~0x00400000u) return 0;   // options, fragments; "don't fragment" is fine
	u64 sum = (u64)h->w[0] + h->w[1] + h->w[2] + h->w[3] + h->w[4];
	if (fold(sum) != 0xffff) return 0;
	p->proto = h->b[9];
	u64 proto = (u64)p->proto << 48;
	p->src.id = h->w[3] | (u64)(h->w[5] & 0xffff) << 32 | proto;
	p->dst.id = h->w[4] | (u64)(h->w[5] >> 16) << 32 | proto;
	p->src.addr[0] = p->src.addr[1] = p->dst.addr[0] = p->dst.addr[1] = 0;
	p->len = h->b[2] << 8 | h->b[3];
	p->headers = 20;
	return h->b[8] > 1;
}

INLINE int read_v6(const union head *h, struct packet *p)
{
	if (h->b[0] >> 4 != 6) return 0;
	p->proto = h->b[6];
	p->src.addr[0] = (u64)h->w[2] | (u64)h->w[3] << 32;
	p->src.addr[1] = (u64)h->w[4] | (u64)h->w[5] << 32;
	p->dst.addr[0] = (u64)h->w[6] | (u64)h->w[7] << 32;
	p->dst.addr[1] = (u64)h->w[8] | (u64)h->w[9] << 32;
	u64 proto = (u64)p->proto << 48, src = p->src.addr[0] ^ p->src.addr[1], dst = p->dst.addr[0] ^ p->dst.addr[1];
	p->src.id = ((src ^ src >> 32) & 0xffffffff) | (u64)(h->w[10] & 0xffff) << 32 | proto;
	p->dst.id = ((dst ^ dst >> 32) & 0xffffffff) | (u64)(h->w[10] >> 16) << 32 | proto;
	p->len = 40 + (h->b[4] << 8 | h->b[5]);
	p->headers = 40;
	return h->b[7] > 1;
}

// Reads a frame, its first bytes into `words`. Returns its IP version; 0 if the frame cannot be forwarded here.
INLINE int read_packet(struct __sk_buff *skb, struct packet *p, u32 *words)
{
	union head h;
	int version;
	if (skb->pkt_type || (skb->vlan_present && skb->vlan_tci & VLAN_NUMBER)) return 0;
	if (skb->protocol == swap(IPV4)) {
		if (load_bytes(skb, ETH, &h, HEAD_V4 * 4) || !read_v4(&h, p)) return 0;
		for (int i = 0; i < HEAD_V4; i++) words[i] = h.w[i];
		version = 4;
	} else if (skb->protocol == swap(IPV6)) {
		if (load_bytes(skb, ETH, &h, HEAD_V6 * 4) || !read_v6(&h, p)) return 0;
		for (int i = 0; i < HEAD_V6; i++) words[i] = h.w[i];
		version = 6;
	} else {
		return 0;
	}
	u32 l4 = p->headers;
	if (p->len > skb->len - ETH) return 0;
	if (p->proto == UDP) {
		p->headers += 8;
		u32 word = version == 6 ? h.w[11] : h.w[6];
		p->flags = word >> 16 ? 0 : ABSENT;
		// IPv6 has no datagrams without a checksum.
		return p->len >= p->headers && (version == 4 || !p->flags) ? version : 0;
	}
	if (p->proto != TCP || p->len < p->headers + 20) return 0;
	u8 rest[8];
	if (load_bytes(skb, ETH + l4 + 8, rest, 8)) return 0;
	u32 header = rest[4] >> 4 << 2;
	p->flags = rest[5];
	p->headers += header;
	return header >= 20 && p->len >= p->headers ? version : 0;
}

// ---- decision ------------------------------------------------------------------------------------------------------------

INLINE void share(u32 what)
{
	u32 at = processor();
	u64 *all = map_lookup(&lvs_shares, &at);
	if (all) all[what & (SHARE_WORDS - 1)]++;
}

// Whether the method changes addresses and ports.
INLINE int translates(u32 method)
{
	return method == METHOD_NAT || method == METHOD_FULL_NAT;
}

// Writes a number to a map and reads it again, so that the verifier does not know its value: otherwise the verifier would
// repeat the following code for each possible value.
INLINE u32 forgotten(u32 *cell, u32 number)
{
	*cell = number;
	return READ(*cell);
}

// Returns SHARE_REQUESTS or SHARE_REPLIES if the packet is forwarded here, and stores the decision in `t`; otherwise returns
// the reason.
INLINE int decide_for(const u64 *conf, const struct packet *p, const int v6, u32 gso, struct told *t)
{
	t->reply = 1;
	u32 handle = find_local(p);
	const int local = handle != HANDLE_NONE;
	if (!local) {
		handle = find(conf, p, v6, 1, t->memo);
		if (handle == HANDLE_NONE) {
			t->reply = 0;
			if (!(p->src.id >> 32 & 0xffff)) return SHARE_UNKNOWN;
			handle = find(conf, p, v6, 0, t->memo);
		}
	}
	if (handle == HANDLE_NONE || handle == HANDLE_UP) return SHARE_UNKNOWN;
	// The following code does not depend on the result of the look-up.
	handle = forgotten(&t->handle, handle);
	u64 *slot = slot_of(handle, v6);
	if (!slot) return SHARE_UNKNOWN;
	u64 *hot = v6 ? slot + WIDE_HOT : slot;
	u64 word = READ(slot[0]), state = READ(hot[HOT_STATE]), flags = READ(hot[HOT_FLAGS]) >> 32;
	u64 epoch = READ(conf[CONF_EPOCH]) & 0xffff;
	if (!epoch || (state >> 16 & 0xffff) != epoch) return SHARE_UNPUBLISHED;
	// The dataplane writes the next hop to the client before the epoch.
	IN_ORDER();
	u64 way = (v6 ? READ(slot[WIDE_ENDS]) : READ(slot[NARROW_VIRT])) >> 48;
	u32 method = way & WAY_METHOD;
	if (!(word & KIND_LIVE) || (!local && word & shadowed(method, t->reply))) return SHARE_UNPUBLISHED;
	if (flags & FLAGS_UP) return SHARE_UNFIT;
	if (v6 && !(way & WAY_SERVER_V6) && method != METHOD_TUNNEL) return SHARE_UNFIT;
	if (local && method != METHOD_FULL_NAT) return SHARE_UNPUBLISHED;
	if (translates(method)) {
		if (flags & FLAG_NO_OUTPUT) return SHARE_UNFIT;
	} else if ((method != METHOD_ROUTE && method != METHOD_TUNNEL) || t->reply) {
		return SHARE_UNFIT;
	}
	if (p->proto == TCP) {
		if ((state & 0xff) != STATE_TCP_ESTABLISHED || (p->flags & (FIN_SYN_RST | ACK)) != ACK) return SHARE_UNFIT;
	} else if ((state & 0xff) != STATE_NONE) {
		return SHARE_UNFIT;
	} else if (p->flags && (gso || (translates(method) && p->len > SUMMED_WORDS * 4 * SUMMED_PIECES))) {
		return SHARE_UNFIT;
	}
	if (method == METHOD_FULL_NAT) {
		u64 addr, more;
		if (t->reply) {
			addr = v6 ? READ(slot[WIDE_CLIENT]) : word & 0xffffffff;
			more = v6 ? READ(slot[WIDE_CLIENT + 1]) : 0;
			t->port = word >> 32;
		} else {
			u64 *end = local_of(handle, v6, t->outer);
			if (!end) return SHARE_UNPUBLISHED;
			addr = READ(end[LOCAL_ADDR]);
			more = READ(end[LOCAL_ADDR + 1]);
			t->port = READ(end[LOCAL_PORT]);
		}
		t->other[0] = addr;
		t->other[1] = addr >> 32;
		t->other[2] = more;
		t->other[3] = more >> 32;
	}
	u32 hop;
	t->shape = 0;
	if (method == METHOD_TUNNEL) {
		u32 record = READ(hot[HOT_SERVER]) >> 32;
		u64 *tunnel = map_lookup(&lvs_tunnels, &record);
		if (!tunnel) return SHARE_UNPUBLISHED;
		t->record = record;
		u64 known = READ(tunnel[TUNNEL_WAY]);
		if ((known >> 16 & 0xffff) != epoch) return SHARE_UNPUBLISHED;
		hop = known & 0xffff;
		IN_ORDER();
		t->shape = READ(tunnel[TUNNEL_SHAPE]);
		for (int i = 0; i < TUNNEL_OUTER_WORDS; i++) {
			u64 word = READ(tunnel[TUNNEL_OUTER + i]);
			t->outer[i * 2] = word;
			t->outer[i * 2 + 1] = word >> 32;
		}
		IN_ORDER();
		if (READ(tunnel[TUNNEL_WAY]) != known) return SHARE_UNPUBLISHED;
	} else if (t->reply) {
		hop = (v6 ? READ(slot[WIDE_ENDS]) >> 32 : READ(slot[NARROW_SERVER]) >> 48) & 0xffff;
	} else {
		u32 record = READ(hot[HOT_SERVER]) >> 32;
		u64 *server = map_lookup(&lvs_servers, &record);
		if (!server) return SHARE_UNPUBLISHED;
		u64 known = READ(*server);
		if ((known >> 16 & 0xffff) != epoch) return SHARE_UNPUBLISHED;
		hop = known & 0xffff;
	}
	if (!hop) return SHARE_UNPUBLISHED;
	u64 *out = map_lookup(&lvs_hops, &hop);
	if (!out) return SHARE_UNPUBLISHED;
	u32 mtu = READ(out[HOP_LINK]) >> 32;
	if (gso) {
		if (gso < SEGMENT_MIN || p->headers + gso > mtu) return SHARE_UNFIT;
		if (p->proto == UDP && (t->shape || p->len > gso * DATAGRAMS_MOST)) return SHARE_UNFIT;
	} else if (p->len > mtu) {
		return SHARE_UNFIT;
	}
	t->hop = hop;
	t->len = p->len;
	t->proto = p->proto;
	t->v6 = v6;
	return t->reply ? SHARE_REPLIES : SHARE_REQUESTS;
}

INLINE int decide(const u64 *conf, int version, u32 gso, struct told *t)
{
	return version == 6 ? decide_for(conf, &t->packet, 1, gso, t) : decide_for(conf, &t->packet, 0, gso, t);
}

SEC("socket") int lvs_filter(struct __sk_buff *skb)
{
	// Skip the frames that this host sends.
	if (skb->pkt_type == OUTGOING) return 0;
	u32 zero = 0;
	u64 *conf = map_lookup(&lvs_conf, &zero);
	struct told *t = map_lookup(&lvs_told, &zero);
	if (!conf || !t) return PASS;
	if (t->valid == TOLD_TAKE) {
		// lvs_ingress did not receive the previous frame. No other frame may be lost in the same way.
		conf[CONF_MISSED] = 1;
		share(SHARE_LOST);
	}
	t->valid = TOLD_NOTHING;
	// A frame of the dataplane, which is reinjected into the host.
	if (skb->mark && skb->mark == conf[CONF_MARK]) return 0;
	int what = SHARE_OTHER, version = read_packet(skb, &t->packet, t->head);
	if (version) what = decide(conf, version, skb->gso_size, t);
	if ((what == SHARE_REQUESTS || what == SHARE_REPLIES) && !READ(conf[CONF_MISSED])) {
		t->valid = TOLD_TAKE;
		return 0;
	}
	t->valid = TOLD_LEAVE;
	share(what == SHARE_REQUESTS || what == SHARE_REPLIES ? SHARE_UNPUBLISHED : what);
	return PASS;
}

// ---- forwarding --------------------------------------------------------------------------------------------------------

// The time on the dataplane's clock; 0 if the dataplane has started after the last tick.
INLINE u64 dataplane_time(const u64 *conf)
{
	long long now = ktime() - conf[CONF_BASE];
	return now > 0 ? now : 0;
}

INLINE void account(const u64 *conf, u64 *hot, const struct told *t, u32 len, u64 now)
{
	u64 server = READ(hot[HOT_SERVER]), until = now + (u64)(u32)server * 1000000000ULL;
	u32 record = server >> 32, at = processor() * (u32)conf[CONF_SERVERS] + record;
	u64 *counts = map_lookup(&lvs_counts, &at);
	// Both atomic operations have results, which makes them barriers.
	if (t->reply) {
		u64 before = __sync_lock_test_and_set(&hot[HOT_DEADLINE], until);
		__asm__ volatile("" : : "r"(before));
		if (counts) {
			counts[COUNT_OUT_PACKETS]++;
			counts[COUNT_OUT_BYTES] += len;
		}
	} else {
		*(volatile u64 *)&hot[HOT_DEADLINE] = until;
		u32 before = __sync_fetch_and_add((u32 *)&hot[HOT_FLAGS], 1);
		__asm__ volatile("" : : "r"(before));
		if (counts) {
			counts[COUNT_IN_PACKETS]++;
			counts[COUNT_IN_BYTES] += len;
		}
	}
	// The dataplane may have seen a FIN in the meantime, on another CPU. It writes the timeout first and the deadline
	// afterwards, so at least one side reads the value that the other side has written.
	u32 timeout = READ(hot[HOT_SERVER]);
	if (timeout != (u32)server) *(volatile u64 *)&hot[HOT_DEADLINE] = now + (u64)timeout * 1000000000ULL;
}

// Writes new addresses and decrements the TTL of an IPv4 header.
INLINE void rewrite_v4(u32 *ip, u32 src, u32 dst)
{
	u32 hop = ip[2] & 0xffff;
	u64 sum = (u16)~(ip[2] >> 16);
	sum += (u64)(u32)~ip[3] + src + (u32)~ip[4] + dst + (u16)~hop;
	u32 less = (hop & 0xff00) | ((hop - 1) & 0xff);
	sum += less;
	ip[3] = src;
	ip[4] = dst;
	ip[2] = less | (u32)(u16)~fold(sum) << 16;
}

// A checksum after changes of 16-bit words, whose differences are in `sum` (RFC 1624).
INLINE u16 changed(u16 check, u64 sum)
{
	return ~fold((u64)(u16)~check + sum);
}

// Whether the checksum of a datagram is finished; `pseudo` is the sum over its pseudo-header. The checksum of an inner
// packet may be unfinished, as in VXLAN. An unfinished checksum equals `pseudo`; so does one of 65,535 finished ones.
INLINE int is_finished(u32 word, u64 pseudo)
{
	return word >> 16 != fold(pseudo);
}

// Changes the finished checksum of a datagram for new addresses, whose differences are in `sum`, and for new ports. `udp`:
// the header in the frame, which already contains the new ports. `old`: the header as it arrived.
INLINE void change_datagram(struct __sk_buff *skb, u32 *udp, const u32 *old, u64 sum, const int v4)
{
	u32 ports = udp[0];
	u16 check = changed(old[1] >> 16, sum + (u32)~old[0] + ports);
	// 0 would mean "no checksum".
	if (!check) check = 0xffff;
	u32 word = (old[1] & 0xffff) | (u32)check << 16;
	udp[1] = word;
	if (!v4) return;
	// Update the sum of the network card, if there is one. The IPv4 header checksum compensates for the change of the addresses.
	u64 diff = (u64)(u32)~old[0] + ports + (u32)~old[1] + word;
	diff = (u32)diff + (diff >> 32);
	csum_update(skb, (u32)diff + (u32)(diff >> 32));
}

// Computes the checksum of a datagram that has none and gets other addresses or ports, as the kernel's IPVS does. The
// checksum stays absent if the checksum of an inner packet is unfinished, as in VXLAN.
INLINE int finish_datagram(struct __sk_buff *skb, struct told *t, u32 src, u32 dst, u32 ports)
{
	u32 left = t->len - 20, at = ETH + 20, field = at + 6, old_ports = t->head[5];
	u64 sum = (u64)src + dst + swap(left) + swap(UDP);
#pragma clang loop unroll(disable)
	for (int i = 0; i < SUMMED_PIECES && left; i++) {
		u64 bytes = left < SUMMED_WORDS * 4 ? left : SUMMED_WORDS * 4;
		CHECKED(bytes);
		if (bytes < 1 || bytes > SUMMED_WORDS * 4) return -1;
		// The sum is taken over whole words.
		t->summed[(bytes - 1) >> 2 & (SUMMED_WORDS - 1)] = 0;
		if (load_bytes(skb, at, t->summed, bytes)) return -1;
		u64 whole = (bytes + 3) & ~3ULL;
		CHECKED(whole);
		if (whole > SUMMED_WORDS * 4) return -1;
		sum += (u32)csum_diff(0, 0, t->summed, whole, 0);
		at += bytes;
		left -= bytes;
	}
	// A sum of the network card includes the ports and the checksum, too.
	csum_update(skb, csum_diff(&old_ports, 4, &ports, 4, (u16)~fold(sum)));
	// Neither helper changes an unfinished checksum. The first helper makes the checksum other than 0; the second helper
	// would leave a 0 unchanged, because 0 means "no checksum".
	if (l4_csum_replace(skb, field, 0, 1, 0)) return -1;
	return l4_csum_replace(skb, field, 0, fold(sum + 0xfffe), BPF_F_MARK_MANGLED_0);
}

INLINE int forward_v4(struct __sk_buff *skb, const u64 *slot, struct told *t, u8 proto, const u8 *macs)
{
	u8 *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (data + ETH + 28 > end) return -1;
	__builtin_memcpy(data, macs, 12);
	u32 *ip = (u32 *)(data + ETH);
	u64 at = READ(slot[NARROW_VIRT]);
	u32 method = at >> 48 & WAY_METHOD;
	if (!translates(method)) {
		rewrite_v4(ip, ip[3], ip[4]);
		return 0;
	}
	const int both = method == METHOD_FULL_NAT;
	u64 to = t->reply ? at : READ(slot[NARROW_SERVER]);
	u32 addr = to, old = t->reply ? ip[3] : ip[4], other = t->reply ? ip[4] : ip[3], new_other = both ? t->other[0] : other;
	u16 port = to >> 32, old_port, other_port, *ports = (u16 *)(ip + 5);
	if (t->reply) {
		rewrite_v4(ip, addr, new_other);
		old_port = ports[0];
		other_port = ports[1];
		ports[0] = port;
		if (both) ports[1] = t->port;
	} else {
		rewrite_v4(ip, new_other, addr);
		old_port = ports[1];
		other_port = ports[0];
		ports[1] = port;
		if (both) ports[0] = t->port;
	}
	if (proto == UDP) {
		if (t->packet.flags) return finish_datagram(skb, t, ip[3], ip[4], ip[5]);
		u64 bare = (u64)t->head[3] + t->head[4] + swap(t->len - 20) + swap(UDP);
		u64 sum = (u64)(u32)~old + addr + (u32)~other + new_other;
		if (is_finished(t->head[6], bare)) {
			change_datagram(skb, ip + 5, t->head + 5, sum, 1);
			return 0;
		}
	}
	// These helpers recognise an unfinished checksum.
	u32 field = ETH + 20 + (proto == TCP ? 16 : 6), zero = proto == TCP ? 0 : BPF_F_MARK_MANGLED_0;
	if (l4_csum_replace(skb, field, old, addr, zero | BPF_F_PSEUDO_HDR | 4)) return -1;
	if (port != old_port && l4_csum_replace(skb, field, old_port, port, zero | 2)) return -1;
	if (!both) return 0;
	if (l4_csum_replace(skb, field, other, new_other, zero | BPF_F_PSEUDO_HDR | 4)) return -1;
	if (t->port != other_port && l4_csum_replace(skb, field, other_port, t->port, zero | 2)) return -1;
	return 0;
}

INLINE int forward_v6(struct __sk_buff *skb, const u64 *slot, struct told *t, u8 proto, const u8 *macs)
{
	u8 *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	if (data + ETH + 48 > end) return -1;
	__builtin_memcpy(data, macs, 12);
	u32 *ip = (u32 *)(data + ETH), hops[2] = { ip[1] };
	data[ETH + 7]--;
	hops[1] = ip[1];
	// A sum over the whole packet from the network card (CHECKSUM_COMPLETE) changes with the hop limit, which no checksum
	// covers. It does not change with the addresses, because the transport checksum compensates them. Kernels before 6.16 do
	// not support this for IPv6, and would change the sum with BPF_F_PSEUDO_HDR, which only unfinished checksums need.
	u32 pseudo = csum_update(skb, csum_diff(&hops[0], 4, &hops[1], 4, 0)) < 0 ? BPF_F_PSEUDO_HDR : 0;
	u64 ends = READ(slot[WIDE_ENDS]);
	u32 method = ends >> 48 & WAY_METHOD;
	if (!translates(method)) return 0;
	const int both = method == METHOD_FULL_NAT;
	u64 to[2] = { READ(slot[t->reply ? WIDE_VIRT : WIDE_SERVER]), READ(slot[t->reply ? WIDE_VIRT + 1 : WIDE_SERVER + 1]) };
	u32 old[4];
	u32 *addr = t->reply ? ip + 2 : ip + 6;
	for (int i = 0; i < 4; i++) old[i] = addr[i];
	addr[0] = to[0]; addr[1] = to[0] >> 32; addr[2] = to[1]; addr[3] = to[1] >> 32;
	u16 *ports = (u16 *)(ip + 10), port, old_port, other_port;
	if (t->reply) {
		port = ends;
		old_port = ports[0];
		other_port = ports[1];
		ports[0] = port;
		if (both) ports[1] = t->port;
	} else {
		port = ends >> 16;
		old_port = ports[1];
		other_port = ports[0];
		ports[1] = port;
		if (both) ports[0] = t->port;
	}
	long diff = csum_diff(old, 16, (u32 *)to, 16, 0);
	if (both) {
		addr = t->reply ? ip + 6 : ip + 2;
		for (int i = 0; i < 4; i++) {
			old[i] = addr[i];
			addr[i] = t->other[i];
		}
		diff = csum_diff(old, 16, t->other, 16, diff);
	}
	if (proto == UDP) {
		u64 bare = (u64)swap(t->len - 40) + swap(UDP);
		for (int i = 2; i < 10; i++) bare += t->head[i];
		if (is_finished(t->head[11], bare)) {
			change_datagram(skb, ip + 10, t->head + 10, (u32)diff, 0);
			return 0;
		}
	}
	u32 field = ETH + 40 + (proto == TCP ? 16 : 6), zero = proto == TCP ? 0 : BPF_F_MARK_MANGLED_0;
	if (l4_csum_replace(skb, field, 0, diff, zero | pseudo)) return -1;
	if (port != old_port && l4_csum_replace(skb, field, old_port, port, zero | 2)) return -1;
	if (both && t->port != other_port && l4_csum_replace(skb, field, other_port, t->port, zero | 2)) return -1;
	return 0;
}

// The source port of GUE for the packet's flow (lvs-packet/src/rewrite/tunnel.rs).
INLINE u32 mixed(u32 hash, u32 word)
{
	hash = (hash ^ word) * 0x9e3779b1U;
	return hash ^ hash >> 15;
}

INLINE u16 source_port(const struct told *t, const int v6)
{
	const int words = v6 ? 10 : 5;
	u32 ports = t->head[words];
	u32 hash = t->proto ^ ((u32)swap(ports) << 16 | swap(ports >> 16));
#pragma clang loop unroll(full)
	for (int i = v6 ? 2 : 3; i < words; i++) hash = mixed(hash, __builtin_bswap32(t->head[i]));
	return 32768 + ((u64)hash * (60999 - 32768) >> 32);
}

// Puts outer headers in front of a packet whose own headers are already changed.
INLINE int encapsulate(struct __sk_buff *skb, struct told *t, const int v6)
{
	u32 *o = t->outer, shape = t->shape, len = shape & TUNNEL_LEN, between = len - (shape & TUNNEL_V6 ? 40 : 20), class, ttl, df = 0;
	u8 *data = (void *)(long)skb->data;
	if (data + ETH + 20 > (u8 *)(long)skb->data_end) return -1;
	if (v6) {
		class = (data[ETH] << 4 & 0xf0) | data[ETH + 1] >> 4;
		ttl = data[ETH + 7];
	} else {
		class = data[ETH + 1];
		ttl = data[ETH + 8];
		df = shape & TUNNEL_DF && data[ETH + 6] & 0x40;
	}
	// A packet with a congestion mark does not get a second mark (RFC 3168 section 9.1.1).
	if ((class & 3) == 3) class &= ~1U;
	u32 inner = t->len + between;
	u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	if (shape & TUNNEL_GUE) flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	if (shape & TUNNEL_GRE) flags |= BPF_F_ADJ_ROOM_ENCAP_L4_GRE;
	if (shape & TUNNEL_V6) {
		flags |= BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
		o[0] = 0x60 | class >> 4 | (class & 0xf) << 12;
		o[1] = (o[1] & 0x00ff0000) | swap(inner) | ttl << 24;
		if (shape & TUNNEL_GUE) {
			o[10] = (o[10] & 0xffff0000) | swap(source_port(t, v6));
			o[11] = swap(inner);
		}
	} else {
		flags |= BPF_F_ADJ_ROOM_ENCAP_L3_IPV4;
		u32 id = 0;
		if (!df) {
			u32 record = t->record, count = skb->gso_segs;
			u64 *tunnel = map_lookup(&lvs_tunnels, &record);
			if (tunnel) id = __sync_fetch_and_add(&tunnel[TUNNEL_IDS], count ? count : 1);
		}
		o[0] = 0x45 | class << 8 | (u32)swap(inner + 20) << 16;
		o[1] = swap(id) | (df ? 0x0040 << 16 : 0);
		o[2] = ttl | (o[2] & 0xff00);
		o[2] |= (u32)(u16)~fold((u64)o[0] + o[1] + o[2] + o[3] + o[4]) << 16;
		if (shape & TUNNEL_GUE) {
			o[5] = (o[5] & 0xffff0000) | swap(source_port(t, v6));
			o[6] = swap(inner);
		}
	}
	if (len < 20 || len > TUNNEL_OUTER_WORDS * 8 || adjust_room(skb, len, BPF_ADJ_ROOM_MAC, flags)) return -1;
	// Before Linux 6.2, the verifier forgets the limits of a number that was stored on the stack in between.
	u64 bytes = len;
	CHECKED(bytes);
	if (bytes < 20 || bytes > TUNNEL_OUTER_WORDS * 8 || store_bytes(skb, ETH, o, bytes, 0)) return -1;
	// A sum of the network card now includes the outer headers. The sum over an IPv4 header is 0, and so is the sum over the
	// bytes after the headers.
	if (shape & (TUNNEL_V6 | TUNNEL_GUE | TUNNEL_GRE)) csum_update(skb, csum_diff(0, 0, o, sizeof t->outer, 0));
	u16 type = shape & TUNNEL_V6 ? swap(IPV6) : swap(IPV4);
	return store_bytes(skb, 12, &type, 2, 0);
}

// Whether the frame is the one that `t` describes; its headers are then writable.
INLINE int is_told(struct __sk_buff *skb, const struct told *t, const int v6)
{
	const u32 words = v6 ? HEAD_V6 : HEAD_V4;
	if ((void *)(long)skb->data + ETH + words * 4 > (void *)(long)skb->data_end && pull_data(skb, ETH + words * 4)) return 0;
	u8 *data = (void *)(long)skb->data;
	if (data + ETH + words * 4 > (u8 *)(long)skb->data_end) return 0;
	u32 differ = 0;
	for (u32 i = 0; i < words; i++) differ |= ((u32 *)(data + ETH))[i] ^ t->head[i];
	return !differ;
}

// Carries out the decision in `t`.
INLINE int forward(struct __sk_buff *skb, const u64 *conf, struct told *t, const int v6, u64 now)
{
	u64 *slot = slot_of(t->handle, v6);
	u64 *out = map_lookup(&lvs_hops, &t->hop);
	if (!slot || !out) return NEXT;
	u32 ifindex = READ(out[HOP_LINK]);
	// A priority tag applies only to the link on which it arrived.
	if (skb->vlan_present && vlan_pop(skb)) goto lost;
	// Ethernet pads short frames, and senders may do so as well.
	if (skb->len > ETH + t->len && !skb->gso_size && change_tail(skb, ETH + t->len, 0)) goto lost;
	u32 headers = ETH + (v6 ? 48 : 28);
	if ((void *)(long)skb->data + headers > (void *)(long)skb->data_end && pull_data(skb, headers)) goto lost;
	account(conf, v6 ? slot + WIDE_HOT : slot, t, t->len, now);
	u8 *macs = (u8 *)(out + HOP_MACS);
	if (v6 ? forward_v6(skb, slot, t, t->proto, macs) : forward_v4(skb, slot, t, t->proto, macs)) goto lost;
	if (t->shape && encapsulate(skb, t, v6)) goto lost;
	share(t->reply ? SHARE_REPLIES : SHARE_REQUESTS);
	return redirect(ifindex, 0);
lost:
	share(SHARE_LOST);
	return SHOT;
}

// Whether the deadline of a connection has not passed yet.
INLINE int lives(u32 handle, const int v6, u64 now)
{
	u64 *slot = slot_of(handle, v6);
	if (!slot) return 0;
	u64 *hot = v6 ? slot + WIDE_HOT : slot;
	CHECKED(hot);
	return now <= READ(hot[HOT_DEADLINE]);
}

SEC("tc") int lvs_ingress(struct __sk_buff *skb)
{
	u32 zero = 0;
	u64 *conf = map_lookup(&lvs_conf, &zero);
	struct told *told = map_lookup(&lvs_told, &zero);
	if (!conf || !told) return NEXT;
	u32 seen = told->valid;
	told->valid = TOLD_NOTHING;
	if (skb->mark && skb->mark == conf[CONF_MARK]) return NEXT;
	// The dataplane has received this frame.
	if (seen == TOLD_LEAVE && !READ(conf[CONF_TAKING_OVER])) return NEXT;
	u64 now = dataplane_time(conf);
	if (seen == TOLD_TAKE) {
		if (told->v6 ? is_told(skb, told, 1) : is_told(skb, told, 0)) {
			return told->v6 ? forward(skb, conf, told, 1, now) : forward(skb, conf, told, 0, now);
		}
		// Another program has changed the frame between lvs_filter and lvs_ingress.
		conf[CONF_MISSED] = 1;
	}
	// No filter has read the frame: no dataplane runs, or one has just started.
	if (now > READ(conf[CONF_ALIVE])) return NEXT;
	told->valid = seen;
	tail_call(skb, &lvs_next, NEXT_ALONE);
	told->valid = TOLD_NOTHING;
	return NEXT;
}

// Destination and source of a packet that may open a connection. The structure is in a map, so that the verifier does not
// know its content: otherwise the verifier would follow all rules for each protocol.
struct flow {
	u64 src[2], dst[2];   // as in a key of lvs_services
	u16 port;             // port of the destination
	u8 proto, v6;
	u32 before;           // action of a rule for packets to services
	u32 next;             // the first rule that was not compared yet; 0 before the frame was read
};
_Static_assert(sizeof(struct flow) <= sizeof ((struct told *)0)->outer, "it has the place of outer headers");

SEC("alone") int lvs_alone(struct __sk_buff *skb)
{
	u32 zero = 0;
	u64 *conf = map_lookup(&lvs_conf, &zero);
	struct told *told = map_lookup(&lvs_told, &zero);
	if (!conf || !told) return NEXT;
	u32 seen = told->valid;
	int version = read_packet(skb, &told->packet, told->head);
	if (!version) goto held;
	told->valid = TOLD_NOTHING;
	told->handle = 0;
	int what = decide(conf, version, skb->gso_size, told);
	int forwards = what == SHARE_REQUESTS || what == SHARE_REPLIES;
	u64 now = dataplane_time(conf);
	if (what == SHARE_UNKNOWN || !(version == 6 ? lives(told->handle, 1, now) : lives(told->handle, 0, now))) goto held;
	if (seen == TOLD_LEAVE) return SHOT;
	if (!forwards) {
		share(SHARE_WAITING);
		return SHOT;
	}
	told->valid = TOLD_TAKE;
	tail_call(skb, &lvs_next, NEXT_INGRESS);
	told->valid = TOLD_NOTHING;
	share(SHARE_LOST);
	return SHOT;
held:
	told->valid = seen;
	((struct flow *)told->outer)->next = 0;
	tail_call(skb, &lvs_next, NEXT_HELD);
	told->valid = TOLD_NOTHING;
	return NEXT;
}

// Reads the flow of a frame; returns 0 if there are no ports: other protocols, and fragments after the first.
INLINE int read_flow(struct __sk_buff *skb, struct flow *f)
{
	union head h;
	u32 l4 = ETH + 40;
	u16 ports[2];
	if (skb->pkt_type || (skb->vlan_present && skb->vlan_tci & VLAN_NUMBER)) return 0;
	__builtin_memset(f, 0, sizeof *f);
	if (skb->protocol == swap(IPV4)) {
		if (load_bytes(skb, ETH, &h, 20) || h.b[0] >> 4 != 4 || h.w[1] & 0xff1f0000) return 0;
		f->proto = h.b[9];
		f->src[0] = h.w[3];
		f->dst[0] = h.w[4];
		l4 = ETH + (h.b[0] & 15) * 4;
	} else if (skb->protocol == swap(IPV6)) {
		if (load_bytes(skb, ETH, &h, 40) || h.b[0] >> 4 != 6) return 0;
		f->proto = h.b[6];
		f->v6 = 1;
		f->src[0] = (u64)h.w[2] | (u64)h.w[3] << 32;
		f->src[1] = (u64)h.w[4] | (u64)h.w[5] << 32;
		f->dst[0] = (u64)h.w[6] | (u64)h.w[7] << 32;
		f->dst[1] = (u64)h.w[8] | (u64)h.w[9] << 32;
	} else {
		return 0;
	}
	if (f->proto != TCP && f->proto != UDP && f->proto != SCTP) return 0;
	if (load_bytes(skb, l4, ports, 4)) return 0;
	f->port = ports[1];
	return 1;
}

// Whether a service exists at the destination of the packet.
INLINE int is_service(const struct flow *f)
{
	u64 rest = (u64)f->proto << 16 | (u64)f->v6 << 24;
	u64 key[SERVICE_WORDS] = { f->dst[0], f->dst[1], rest | f->port };
	if (map_lookup(&lvs_services, key)) return 1;
	key[2] = rest;
	if (map_lookup(&lvs_services, key)) return 1;
	u16 port = swap(f->port);
	if (f->proto != TCP || (port != FTP_DATA && port < UNPRIVILEGED)) return 0;
	key[2] = rest | swap(FTP) | SERVICE_DATA;
	return map_lookup(&lvs_services, key) != 0;
}

// Returns 0 if the packet matches a rule for marks. Without jumps: the verifier would follow each jump for each rule.
INLINE u64 differs(const u64 *rule, const struct flow *f, u64 link)
{
	u64 port = swap(f->port), kind = (u64)f->proto << 16 | f->v6;
	return ((f->dst[0] ^ rule[RULE_DST]) & rule[RULE_DST_MASK]) | ((f->dst[1] ^ rule[RULE_DST + 1]) & rule[RULE_DST_MASK + 1])
		| ((f->src[0] ^ rule[RULE_SRC]) & rule[RULE_SRC_MASK]) | ((f->src[1] ^ rule[RULE_SRC + 1]) & rule[RULE_SRC_MASK + 1])
		| (port - rule[RULE_FIRST]) >> 63 | (rule[RULE_LAST] - port) >> 63
		| ((link ^ rule[RULE_LINK]) & rule[RULE_LINK_MASK]) | ((kind ^ rule[RULE_KIND]) & rule[RULE_KIND_MASK]);
}

// Number of rules that one run of lvs_held compares before it runs again: the kernel would need 0.1 s to verify a loop over
// all rules.
#define RULES_AT_ONCE 64
_Static_assert(RULES % RULES_AT_ONCE == 0 && RULES / RULES_AT_ONCE <= 16, "a frame is given to 33 programs in turn at most");

SEC("held") int lvs_held(struct __sk_buff *skb)
{
	u32 zero = 0, action = 0, i;
	struct told *told = map_lookup(&lvs_told, &zero);
	if (!told) return NEXT;
	u32 seen = told->valid;
	told->valid = TOLD_NOTHING;
	struct flow *f = (struct flow *)told->outer;
	u32 first = f->next;
	f->next = 0;
	if (!first && !read_flow(skb, f)) return NEXT;
	u64 *rule = map_lookup(&lvs_rules, &zero), link = skb->ifindex;
	if (!rule || first > RULES - RULES_AT_ONCE) return NEXT;
	rule += first * RULE_WORDS;
#pragma clang loop unroll(disable)
	for (i = 0; i < RULES_AT_ONCE; i++, rule += RULE_WORDS) {
		u64 what = rule[RULE_WHAT];
		if (!what) break;
		if (differs(rule, f, link)) continue;
		if (!(what & RULE_TO_SERVICE)) {
			action = what & RULE_ACTION;
			break;
		}
		if (!f->before) f->before = what & RULE_ACTION;
	}
	if (i == RULES_AT_ONCE && first + RULES_AT_ONCE < RULES) {
		f->next = first + RULES_AT_ONCE;
		told->valid = seen;
		tail_call(skb, &lvs_next, NEXT_HELD);
		told->valid = TOLD_NOTHING;
		f->next = 0;
		return NEXT;
	}
	if (!action || action == RULE_LOOK) action = is_service(f) ? RULE_HOLD : RULE_HOST;
	if (f->before && action == RULE_HOLD) action = f->before;
	if (action != RULE_HOLD) return NEXT;
	if (seen != TOLD_LEAVE) share(SHARE_WAITING);
	return SHOT;
}

// ---- before the kernel allocates a socket buffer (XDP) -------------------------------------------------------------------

// Reads a frame. Returns its IP version; 0 if the frame cannot be forwarded here.
INLINE int read_frame(struct xdp_md *ctx, struct packet *p)
{
	u8 *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end, *l4;
	union head h;
	int version;
	if (data + ETH + 40 > end) return 0;
	u16 type = *(u16 *)(data + 12), check;
	u64 sum = 0;
	u32 link = ctx->ingress_ifindex, place = link % MAC_PLACES;
	u64 *mac = map_lookup(&lvs_macs, &place);
	if (!mac || READ(mac[MAC_LINK]) != link || READ(mac[MAC_ADDR]) != (*(u32 *)data | (u64)*(u16 *)(data + 4) << 32)) return 0;
	if (type == swap(IPV4)) {
		__builtin_memcpy(&h, data + ETH, HEAD_V4 * 4);
		if (!read_v4(&h, p)) return 0;
		sum = (u64)h.w[3] + h.w[4];
		l4 = data + ETH + 20;
		version = 4;
	} else if (type == swap(IPV6)) {
		if (data + ETH + HEAD_V6 * 4 > end) return 0;
		__builtin_memcpy(&h, data + ETH, HEAD_V6 * 4);
		if (!read_v6(&h, p)) return 0;
		for (int i = 2; i < 10; i++) sum += h.w[i];
		l4 = data + ETH + 40;
		version = 6;
	} else {
		return 0;
	}
	if (p->len > (u64)(end - data) - ETH) return 0;
	// A neighbouring virtual host may leave the checksum unfinished: it is then the sum of the pseudo-header. A socket
	// buffer marks this; XDP cannot distinguish it from one of 65,535 finished checksums, and passes both on.
	u16 unfinished = fold(sum + swap(p->len - p->headers) + swap(p->proto));
	if (p->proto == UDP) {
		if (l4 + 8 > end) return 0;
		p->headers += 8;
		check = *(u16 *)(l4 + 6);
		p->flags = check ? 0 : ABSENT;
		return p->len >= p->headers && check != unfinished && (version == 4 || check) ? version : 0;
	}
	if (p->proto != TCP || l4 + 20 > end || p->len < p->headers + 20 || *(u16 *)(l4 + 16) == unfinished) return 0;
	u32 header = l4[12] >> 4 << 2;
	p->flags = l4[13];
	p->headers += header;
	return header >= 20 && p->len >= p->headers ? version : 0;
}

// Rewrites the packet for its path in place. Returns 0 if the packet is too short, which was already checked.
INLINE int rewrite(struct xdp_md *ctx, const u64 *slot, const struct told *t, const int v6, const u8 *macs)
{
	const u32 l4 = ETH + (v6 ? 40 : 20);
	u8 *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	if (data + l4 + 8 > end) return 0;
	__builtin_memcpy(data, macs, 12);
	u32 *ip = (u32 *)(data + ETH);
	u64 at = READ(slot[v6 ? WIDE_ENDS : NARROW_VIRT]);
	u32 method = at >> 48 & WAY_METHOD;
	int nat = translates(method), both = method == METHOD_FULL_NAT;
	u64 sum = 0;
	u16 port = 0;
	if (v6) {
		data[ETH + 7]--;
		if (nat) {
			u32 *addr = t->reply ? ip + 2 : ip + 6;
			u64 to[2] = { READ(slot[t->reply ? WIDE_VIRT : WIDE_SERVER]), READ(slot[t->reply ? WIDE_VIRT + 1 : WIDE_SERVER + 1]) };
			u32 new[4] = { to[0], to[0] >> 32, to[1], to[1] >> 32 };
			for (int i = 0; i < 4; i++) {
				sum += (u64)(u32)~addr[i] + new[i];
				addr[i] = new[i];
			}
			port = t->reply ? at : at >> 16;
			addr = t->reply ? ip + 6 : ip + 2;
			for (int i = 0; both && i < 4; i++) {
				sum += (u64)(u32)~addr[i] + t->other[i];
				addr[i] = t->other[i];
			}
		}
	} else if (nat) {
		u64 to = t->reply ? at : READ(slot[NARROW_SERVER]);
		u32 old = t->reply ? ip[3] : ip[4], other = t->reply ? ip[4] : ip[3], new_other = both ? t->other[0] : other;
		rewrite_v4(ip, t->reply ? (u32)to : new_other, t->reply ? new_other : (u32)to);
		sum = (u64)(u32)~old + (u32)to + (u32)~other + new_other;
		port = to >> 32;
	} else {
		rewrite_v4(ip, ip[3], ip[4]);
	}
	if (!nat) return 1;
	u16 *ports = (u16 *)(data + l4), *mine = t->reply ? ports : ports + 1;
	sum += (u64)(u16)~*mine + port;
	*mine = port;
	if (both) {
		u16 *others = t->reply ? ports + 1 : ports;
		sum += (u64)(u16)~*others + t->port;
		*others = t->port;
	}
	u16 *check = (u16 *)(data + l4 + (t->proto == TCP ? 16 : 6));
	if ((u8 *)(check + 1) > end) return 0;
	u16 new = changed(*check, sum);
	*check = t->proto == UDP && !new ? 0xffff : new;
	return 1;
}

INLINE int forward_frame(struct xdp_md *ctx, const u64 *conf, struct told *t, const int v6, u64 now)
{
	u64 *slot = slot_of(t->handle, v6);
	u64 *out = map_lookup(&lvs_hops, &t->hop);
	if (!slot || !out || !READ(out[HOP_XDP])) return XDP_PASS;
	// lvs_ingress computes a missing checksum.
	if (t->proto == UDP && t->packet.flags && translates(READ(slot[v6 ? WIDE_ENDS : NARROW_VIRT]) >> 48 & WAY_METHOD)) return XDP_PASS;
	u32 ifindex = READ(out[HOP_LINK]), length = (u64)ctx->data_end - ctx->data;
	if (length > ETH + t->len && xdp_adjust_tail(ctx, (int)(ETH + t->len) - (int)length)) return XDP_PASS;
	account(conf, v6 ? slot + WIDE_HOT : slot, t, t->len, now);
	if (!rewrite(ctx, slot, t, v6, (u8 *)(out + HOP_MACS))) {
		share(SHARE_LOST);
		return XDP_DROP;
	}
	share(SHARE_XDP);
	return redirect(ifindex, 0);
}

SEC("xdp") int lvs_xdp(struct xdp_md *ctx)
{
	u32 zero = 0;
	u64 *conf = map_lookup(&lvs_conf, &zero);
	struct told *t = map_lookup(&lvs_met, &zero);
	if (!conf || !t) return XDP_PASS;
	u64 now = dataplane_time(conf);
	// Without a dataplane, connections continue for a limited time.
	if (now > READ(conf[CONF_ALIVE])) return XDP_PASS;
	int version = read_frame(ctx, &t->packet);
	if (!version) return XDP_PASS;
	int what = decide(conf, version, 0, t);
	// lvs_ingress sends packets into tunnels.
	if ((what != SHARE_REQUESTS && what != SHARE_REPLIES) || t->shape) return XDP_PASS;
	return version == 6 ? forward_frame(ctx, conf, t, 1, now) : forward_frame(ctx, conf, t, 0, now);
}
