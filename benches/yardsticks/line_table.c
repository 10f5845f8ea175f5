// line_table: parses, looks up and rewrites 64-byte frames in a loop, with a minimal table: read-only entries of 32 bytes, two
// in a cache line, on huge pages. The lines of 32 packets are prefetched. No entry expires, is deleted or has a state.
//
// line_table -f FLOWS -b BITS: as in gen.c, 2^BITS client addresses. Each line of input starts one measurement, which prints
// nanoseconds per packet.
#include "yardstick.h"

enum { PACKETS = 1 << 20, FRAMES = 256, BATCH = 32 };

struct key {
    uint64_t a, b;
};
struct entry {
    struct key key;
    uint32_t address;
    uint16_t port, mac;
    uint32_t stamp, spare;
};
static struct entry (*table)[2];
static uint64_t mask;
static uint8_t frames[FRAMES][64], macs[4][12];
static uint64_t base = 0x0a800000;
static unsigned bits;

static uint64_t mix(struct key key) {
    __uint128_t product = (__uint128_t)(key.a ^ 0x9E3779B97F4A7C15) * (key.b ^ 0xD6E8FEB86659FD93);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline void write_flow(uint8_t *frame, uint64_t flow) {
    put32(frame + 26, (uint32_t)(base + (flow & ((1ull << bits) - 1))));
    put16(frame + 34, 1024 + (uint32_t)(flow >> bits));
    put32(frame + 30, 0x0a490001);
    put16(frame + 36, 80);
}

static inline int parse(const uint8_t *frame, struct key *key) {
    if (frame[12] != 8 || frame[13] || frame[14] != 0x45 || (frame[23] != 6 && frame[23] != 17) || (frame[20] & 0x3f) ||
        frame[21])
        return 0;
    uint32_t ports;
    memcpy(&key->a, frame + 26, 8);
    memcpy(&ports, frame + 34, 4);
    key->b = (uint64_t)ports << 32 | frame[23];
    return 1;
}

static inline uint16_t finish(uint32_t sum) {
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~((sum & 0xffff) + (sum >> 16));
}

static inline void rewrite(uint8_t *frame, const struct entry *entry) {
    memcpy(frame, macs[entry->mac & 3], 12);
    uint32_t old, new = entry->address;
    uint16_t port, sum;
    memcpy(&old, frame + 30, 4);
    memcpy(&port, frame + 36, 2);
    uint32_t change = (~old & 0xffff) + (~old >> 16) + (new & 0xffff) + (new >> 16);
    memcpy(&sum, frame + 24, 2);
    sum = finish((uint16_t)~sum + change);
    memcpy(frame + 24, &sum, 2);
    memcpy(frame + 30, &new, 4);
    uint8_t *at = frame + (frame[23] == 17 ? 40 : 50);
    memcpy(&sum, at, 2);
    if (sum || frame[23] == 6) {
        sum = finish((uint16_t)~sum + change + (uint16_t)~port + entry->port);
        memcpy(at, &sum, 2);
    }
    memcpy(frame + 36, &entry->port, 2);
    frame[22]--;
}

static void insert(uint64_t flow) {
    struct key key;
    write_flow(frames[0], flow);
    parse(frames[0], &key);
    for (uint64_t line = mix(key) & mask;; line = (line + 1) & mask)
        for (int i = 0; i < 2; i++)
            if (!table[line][i].key.b) {
                table[line][i] = (struct entry){
                    .key = key, .address = htonl(0x0a48000b + (flow & 3)), .port = htons(80), .mac = flow & 3};
                return;
            }
}

static inline struct entry *look_up(struct key key, uint64_t line) {
    for (line &= mask;; line = (line + 1) & mask)
        for (int i = 0; i < 2; i++) {
            struct entry *entry = &table[line][i];
            if (entry->key.a == key.a && entry->key.b == key.b)
                return entry;
            if (!entry->key.b)
                return NULL;
        }
}

static uint64_t run(const uint32_t *order, uint32_t *stamp) {
    uint64_t hits = 0, lines[BATCH];
    struct key keys[BATCH];
    for (unsigned at = 0; at < PACKETS; at += BATCH) {
        uint8_t (*batch)[64] = frames + at % FRAMES;
        for (unsigned i = 0; i < BATCH; i++) {
            write_flow(batch[i], order[at + i]);
            __asm__ volatile("" : : "r"(batch[i]) : "memory");
            if (!parse(batch[i], &keys[i]))
                continue;
            lines[i] = mix(keys[i]);
            __builtin_prefetch(table[lines[i] & mask]);
        }
        ++*stamp;
        for (unsigned i = 0; i < BATCH; i++) {
            struct entry *entry = look_up(keys[i], lines[i]);
            if (!entry)
                continue;
            entry->stamp = *stamp;
            hits++;
            rewrite(batch[i], entry);
        }
    }
    return hits;
}

int main(int count, char **arguments) {
    uint64_t flows = 1000000;
    int cpu = -1;
    bits = 10;
    for (int option; (option = getopt(count, arguments, "f:b:c:")) != -1;)
        switch (option) {
        case 'f': flows = strtoull(optarg, NULL, 10); break;
        case 'b': bits = (unsigned)atoi(optarg); break;
        case 'c': cpu = atoi(optarg); break;
        default: return 2;
        }
    pin(cpu);
    uint64_t lines = 64;
    while (lines < flows)
        lines *= 2;
    mask = lines - 1;
    size_t huge = 2 << 20, size = lines * 64;
    uint8_t *memory = mmap(NULL, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        DIE("cannot allocate the table");
    table = (void *)(((uintptr_t)memory + huge - 1) & ~(huge - 1));
    madvise(table, size, MADV_HUGEPAGE);
    for (int i = 0; i < FRAMES; i++) {
        uint8_t *frame = frames[i];
        frame[12] = 8;
        frame[14] = 0x45;
        frame[20] = 0x40;
        frame[22] = 64;
        frame[23] = 17;
        frame[40] = 1;
    }
    for (uint64_t flow = 0; flow < flows; flow++)
        insert(flow);
    static uint32_t order[PACKETS];
    uint64_t random = 88172645463325252u;
    for (int i = 0; i < PACKETS; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order[i] = (uint32_t)(random % flows);
    }
    ready();
    uint32_t stamp = 0;
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        uint64_t start = now_ns(), hits = run(order, &stamp), end = now_ns();
        if (hits != PACKETS)
            return 1;
        printf("%.2f\n", (double)(end - start) / PACKETS);
        fflush(stdout);
    }
    return 0;
}
