// null_packet: forwards all frames between two interfaces by packet sockets, with the virtio_net_hdr of super-packets of 64 KiB
// and partial checksums. It writes the link-layer addresses, and reads nothing.
//
// null_packet -a IF -b IF -r v2|v3|mmsg (how it receives) -x mmsg|ring (how it sends)
//             -A, -B: link-layer addresses of the interfaces a and b; -P, -Q: those of the neighbours there
#include "yardstick.h"

enum {
    BATCH = 64,
    BLOCK = 1 << 20,
    BLOCKS = 32,
    // Not a power of two: otherwise the first cache lines of all slots would use the same few cache sets.
    SLOT = 17 * 4096,
    SLOTS = 256,
    // Slots of the V2 receive ring, as in the dataplane: an odd number of cache lines, and blocks of whole pages.
    V2_SLOT = 27 * 64,
    V2_BLOCK = 64 * V2_SLOT,
    V2_BLOCKS = 128,
    V2_SLOTS = 64 * V2_BLOCKS,
    V2_RESERVE = 62,
};

struct way {
    int in, out;
    uint8_t head[12];
    // Receiving.
    uint8_t *ring, *buffers;
    unsigned block;
    // Sending.
    uint8_t *slots;
    unsigned slot;
    struct iovec vectors[BATCH];
    struct mmsghdr messages[BATCH];
    unsigned queued;
    uint64_t forwarded, refused;
};

static int by_v3 = 1, by_v2, by_ring;

static int packet_socket(void) {
    int fd = socket(AF_PACKET, SOCK_RAW, 0), one = 1;
    if (fd < 0 || setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one) ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one))
        DIE("cannot open the packet socket");
    return fd;
}

static void attach(int fd, const char *interface, int protocol) {
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons((uint16_t)protocol), .sll_ifindex = (int)ifindex_of(interface)};
    if (bind(fd, (void *)&address, sizeof address))
        DIE("cannot bind to %s", interface);
}

static uint8_t *map(int fd, size_t size) {
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED)
        DIE("cannot map memory");
    return memory;
}

static void set_up(struct way *w, const char *in, const char *out, const char *own, const char *neighbour) {
    read_mac(neighbour, w->head);
    read_mac(own, w->head + 6);
    w->in = packet_socket();
    w->out = packet_socket();
    int v2 = TPACKET_V2, v3 = TPACKET_V3, room = 32 << 20, one = 1;
    if (by_v3) {
        struct tpacket_req3 request = {.tp_block_size = BLOCK,
                                       .tp_block_nr = BLOCKS,
                                       .tp_frame_size = 2048,
                                       .tp_frame_nr = BLOCKS * (BLOCK / 2048),
                                       .tp_retire_blk_tov = 1};
        if (setsockopt(w->in, SOL_PACKET, PACKET_VERSION, &v3, sizeof v3) ||
            setsockopt(w->in, SOL_PACKET, PACKET_RX_RING, &request, sizeof request))
            DIE("cannot create the receive ring");
        w->ring = map(w->in, (size_t)BLOCK * BLOCKS);
    } else if (by_v2) {
        // A frame that is longer than a slot would wait in the socket's queue; no measurement with this ring sends such frames.
        struct tpacket_req request = {
            .tp_block_size = V2_BLOCK, .tp_block_nr = V2_BLOCKS, .tp_frame_size = V2_SLOT, .tp_frame_nr = V2_SLOTS};
        int reserve = V2_RESERVE;
        if (setsockopt(w->in, SOL_PACKET, PACKET_VERSION, &v2, sizeof v2) ||
            setsockopt(w->in, SOL_PACKET, PACKET_RESERVE, &reserve, sizeof reserve) ||
            setsockopt(w->in, SOL_PACKET, PACKET_RX_RING, &request, sizeof request))
            DIE("cannot create the receive ring");
        w->ring = map(w->in, (size_t)V2_BLOCK * V2_BLOCKS);
    } else {
        setsockopt(w->in, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
        w->buffers = map(-1, (size_t)SLOT * BATCH);
    }
    if (by_ring) {
        struct tpacket_req request = {
            .tp_block_size = SLOT, .tp_block_nr = SLOTS, .tp_frame_size = SLOT, .tp_frame_nr = SLOTS};
        if (setsockopt(w->out, SOL_PACKET, PACKET_VERSION, &v2, sizeof v2) ||
            setsockopt(w->out, SOL_PACKET, PACKET_TX_RING, &request, sizeof request) ||
            setsockopt(w->out, SOL_PACKET, PACKET_QDISC_BYPASS, &one, sizeof one))
            DIE("cannot create the send ring");
        w->slots = map(w->out, (size_t)SLOT * SLOTS);
    } else {
        setsockopt(w->out, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
        for (int i = 0; i < BATCH; i++) {
            w->messages[i].msg_hdr.msg_iov = &w->vectors[i];
            w->messages[i].msg_hdr.msg_iovlen = 1;
        }
    }
    attach(w->in, in, ETH_P_ALL);
    attach(w->out, out, 0);
}

static void flush(struct way *w) {
    if (by_ring && w->queued && send(w->out, NULL, 0, 0) >= 0)
        w->forwarded += w->queued;
    for (unsigned done = 0; !by_ring && done < w->queued;) {
        int n = sendmmsg(w->out, w->messages + done, w->queued - done, 0);
        if (n < 0) {
            // The first frame could not be sent.
            w->refused++;
            n = 1;
        } else {
            w->forwarded += (uint64_t)n;
        }
        done += (unsigned)n;
    }
    w->queued = 0;
}

// `start`: the virtio_net_hdr, followed by the frame.
static void forward(struct way *w, uint8_t *start, size_t length) {
    if (by_ring) {
        struct tpacket2_hdr *slot = (void *)(w->slots + (size_t)w->slot * SLOT);
        if (*(volatile uint32_t *)&slot->tp_status != TP_STATUS_AVAILABLE)
            flush(w);
        if (*(volatile uint32_t *)&slot->tp_status != TP_STATUS_AVAILABLE) {
            w->refused++;
            return;
        }
        uint8_t *data = (uint8_t *)slot + TPACKET2_HDRLEN - sizeof(struct sockaddr_ll);
        memcpy(data, start, length);
        memcpy(data + VNET, w->head, sizeof w->head);
        slot->tp_len = (uint32_t)length;
        __atomic_store_n(&slot->tp_status, TP_STATUS_SEND_REQUEST, __ATOMIC_RELEASE);
        w->slot = (w->slot + 1) % SLOTS;
    } else {
        memcpy(start + VNET, w->head, sizeof w->head);
        w->vectors[w->queued] = (struct iovec){start, length};
    }
    if (++w->queued == BATCH)
        flush(w);
}

static unsigned receive_v3(struct way *w) {
    struct tpacket_block_desc *block = (void *)(w->ring + (size_t)w->block * BLOCK);
    if (!(__atomic_load_n(&block->hdr.bh1.block_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER))
        return 0;
    unsigned frames = block->hdr.bh1.num_pkts;
    struct tpacket3_hdr *frame = (void *)((uint8_t *)block + block->hdr.bh1.offset_to_first_pkt);
    for (unsigned i = 0; i < frames; i++) {
        forward(w, (uint8_t *)frame + frame->tp_mac - VNET, frame->tp_snaplen + VNET);
        frame = (void *)((uint8_t *)frame + frame->tp_next_offset);
    }
    flush(w);
    __atomic_store_n(&block->hdr.bh1.block_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    w->block = (w->block + 1) % BLOCKS;
    return frames;
}

static unsigned receive_v2(struct way *w) {
    struct tpacket2_hdr *taken[BATCH];
    unsigned frames = 0;
    for (; frames < BATCH; frames++) {
        struct tpacket2_hdr *frame = (void *)(w->ring + (size_t)w->block * V2_SLOT);
        if (!(__atomic_load_n(&frame->tp_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER))
            break;
        forward(w, (uint8_t *)frame + frame->tp_mac - VNET, frame->tp_snaplen + VNET);
        taken[frames] = frame;
        w->block = (w->block + 1) % V2_SLOTS;
    }
    if (frames)
        flush(w);
    for (unsigned i = 0; i < frames; i++)
        __atomic_store_n(&taken[i]->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
    return frames;
}

static unsigned receive_mmsg(struct way *w) {
    struct iovec vectors[BATCH];
    struct mmsghdr messages[BATCH] = {0};
    for (int i = 0; i < BATCH; i++) {
        vectors[i] = (struct iovec){w->buffers + (size_t)i * SLOT, SLOT};
        messages[i].msg_hdr.msg_iov = &vectors[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    int frames = recvmmsg(w->in, messages, BATCH, MSG_DONTWAIT, NULL);
    for (int i = 0; i < frames; i++)
        forward(w, vectors[i].iov_base, messages[i].msg_len);
    flush(w);
    return frames > 0 ? (unsigned)frames : 0;
}

int main(int count, char **arguments) {
    const char *a = "d0", *b = "e0", *macs[4] = {0};
    unsigned seconds = 3600;
    int cpu = -1;
    for (int option; (option = getopt(count, arguments, "a:b:r:x:A:B:P:Q:c:t:")) != -1;)
        switch (option) {
        case 'a': a = optarg; break;
        case 'b': b = optarg; break;
        case 'r': by_v3 = !strcmp(optarg, "v3"), by_v2 = !strcmp(optarg, "v2"); break;
        case 'x': by_ring = !strcmp(optarg, "ring"); break;
        case 'A': macs[0] = optarg; break;
        case 'B': macs[1] = optarg; break;
        case 'P': macs[2] = optarg; break;
        case 'Q': macs[3] = optarg; break;
        case 'c': cpu = atoi(optarg); break;
        case 't': seconds = (unsigned)atoi(optarg); break;
        default: return 2;
        }
    for (int i = 0; i < 4; i++)
        if (!macs[i])
            return 2;
    pin(cpu);
    static struct way ways[2];
    set_up(&ways[0], a, b, macs[1], macs[3]);
    set_up(&ways[1], b, a, macs[0], macs[2]);
    bound(seconds);
    ready();
    struct pollfd waits[2] = {{ways[0].in, POLLIN, 0}, {ways[1].in, POLLIN, 0}};
    while (!stopping) {
        unsigned frames = 0;
        for (int i = 0; i < 2; i++)
            frames += by_v3 ? receive_v3(&ways[i]) : by_v2 ? receive_v2(&ways[i]) : receive_mmsg(&ways[i]);
        if (!frames)
            poll(waits, 2, -1);
    }
    printf("{\"forwarded\":%lu,\"refused\":%lu}\n", ways[0].forwarded + ways[1].forwarded,
           ways[0].refused + ways[1].refused);
    return 0;
}
