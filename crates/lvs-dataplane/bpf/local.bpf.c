// SPDX-License-Identifier: MIT OR Apache-2.0
// Packets from this host to services on its own addresses. The kernel looks up its own addresses before all routes, and sends
// such packets over lo. At the egress of lo, lvs_local redirects them to a device of the dataplane. The dataplane sends packets
// for the host through the same device, on which the host receives them; they do not pass lo again.
//
// A killed dataplane may leave the program for a successor. The device does not exist then, and the program drops the packets of
// known clients, so that the host does not reset their connections. It passes all other packets on.
#include <linux/bpf.h>
#include "layout.h"

#define INLINE static inline __attribute__((always_inline))
#define SEC(name) __attribute__((section(name), used))

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The dataplane creates these maps and finds their names here. The kernel empties lvs_device when the device is removed.
extern char lvs_local, lvs_device, lvs_conf;

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static u64 (*ktime)(void) = (void *)160;
static long (*redirect)(u32 ifindex, u64 flags) = (void *)23;
static long (*pull_data)(struct __sk_buff *, u32 len) = (void *)39;

#define NEXT (-1)
#define SHOT 2
#define ETH 14
#define IPV4 0x0800
#define IPV6 0x86dd
#define TCP 6
#define UDP 17
#define SCTP 132
// Mask of the fragment offset and the flag "more fragments" in the second word of an IPv4 header.
#define FRAGMENT 0xff3f0000
#define LOOPBACK 127

struct flow {
	u64 src[2], dst[2];
	u16 sport, dport;
	u8 proto, v6;
};

INLINE u16 swap(u16 x) { return x >> 8 | x << 8; }

// Reads the headers of a frame. Returns 0 if the linear part of the buffer does not contain them, if the packet has no ports, or if its destination is in 127.0.0.0/8.
INLINE int read_flow(struct __sk_buff *skb, struct flow *f)
{
	u8 *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	u32 *ip = (u32 *)(data + ETH);
	u32 l4 = ETH + 40;
	if (data + ETH + 20 > end) return 0;
	if (skb->protocol == swap(IPV4)) {
		if ((u8)ip[4] == LOOPBACK || ip[1] & FRAGMENT) return 0;
		f->proto = data[ETH + 9];
		f->src[0] = ip[3];
		f->dst[0] = ip[4];
		f->src[1] = f->dst[1] = 0;
		f->v6 = 0;
		l4 = ETH + (data[ETH] & 15) * 4;
	} else if (skb->protocol == swap(IPV6)) {
		if (data + ETH + 40 > end) return 0;
		f->proto = data[ETH + 6];
		f->src[0] = (u64)ip[2] | (u64)ip[3] << 32;
		f->src[1] = (u64)ip[4] | (u64)ip[5] << 32;
		f->dst[0] = (u64)ip[6] | (u64)ip[7] << 32;
		f->dst[1] = (u64)ip[8] | (u64)ip[9] << 32;
		f->v6 = 1;
	} else {
		return 0;
	}
	if (f->proto != TCP && f->proto != UDP && f->proto != SCTP) return 0;
	u16 *ports = (u16 *)(data + l4);
	if ((u8 *)(ports + 2) > end) return 0;
	f->sport = ports[0];
	f->dport = ports[1];
	return 1;
}

INLINE int is_known(const u64 *addr, u64 rest)
{
	u64 key[SERVICE_WORDS] = { addr[0], addr[1], rest };
	return map_lookup(&lvs_local, key) != 0;
}

SEC("local") int lvs_local_out(struct __sk_buff *skb)
{
	struct flow f;
	// Headers are usually in the linear part of the buffer; a sender of raw packets may have put them into fragments.
	if ((void *)(long)skb->data + ETH + 20 > (void *)(long)skb->data_end && pull_data(skb, ETH + 20)) return NEXT;
	if (!read_flow(skb, &f)) return NEXT;
	u64 family = (u64)f.v6 << 24, rest = family | (u64)f.proto << 16;
	u64 key[SERVICE_WORDS] = { f.dst[0], f.dst[1], family };
	u64 *found = map_lookup(&lvs_local, key);
	if (!found) return NEXT;
	u64 about = *found;
	u64 any = f.proto == TCP ? OWN_ANY_TCP : f.proto == UDP ? OWN_ANY_UDP : OWN_ANY_SCTP;
	// Packets from a source in 127.0.0.0/8 cannot leave this host, so they are not redirected to services.
	int leaves = f.v6 || (u8)f.src[0] != LOOPBACK;
	if (leaves && (about & any || is_known(f.dst, rest | f.dport))) goto redirected;
	if (!(about & OWN_NODES)) return NEXT;
	rest |= OWN_NODE;
	if (!is_known(f.src, rest | f.sport) && !is_known(f.src, rest)) return NEXT;
redirected:;
	u32 zero = 0, *device = map_lookup(&lvs_device, &zero);
	if (device) return redirect(*device, 0);
	u64 *conf = map_lookup(&lvs_conf, &zero);
	if (!conf || ktime() - conf[CONF_BASE] > conf[CONF_ALIVE]) return NEXT;
	return is_known(f.src, family | (u64)f.proto << 16 | f.sport | OWN_CLIENT) ? SHOT : NEXT;
}
