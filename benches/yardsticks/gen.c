// gen: sends floods of UDP packets or SYNs of many flows, as fast as possible or at a given rate.
//
// live  frames that the kernel makes for BPF_PROG_TEST_RUN (a hand-assembled XDP program, so that no BPF compiler is
//       needed): several million a second
// send  sendmmsg on a packet socket: slower, but at an even rate, and with numbered contents that judge.c checks
//
// Flow i of F comes from address A + (i mod C) and port P + i / C, where C is a power of two. Consecutive packets
// are of flows that are the golden ratio apart, so that they do not use adjacent memory. With -R, the packets are replies
// to the clients' addresses and ports. With -S, they are TCP SYNs over IPv4 from source addresses that no host has.
#include "yardstick.h"
#include <linux/bpf.h>
#include <sys/syscall.h>

enum { FIRST_PORT = 1024, SIZE_MAX_ = 1514, HEAD = 64 };

struct options {
    const char *interface, *fixed, *clients;
    uint8_t to[6], from[6];
    unsigned seconds, port, size, bits;
    int live, replies, v6, numbered, syn, cpu;
    uint64_t flows, count;
    double rate;
};

// Offsets of the fields in a frame, and the checksums of the fields that do not change.
struct layout {
    int address, port, udp, check;
    uint32_t base;
    uint64_t ip_sum, udp_sum;
    uint8_t frame[SIZE_MAX_];
};

static uint64_t step_of(uint64_t flows) {
    uint64_t step = (uint64_t)((double)flows * 0.6180339887) | 1;
    for (;; step += 2) {
        uint64_t a = flows, b = step;
        while (b) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return step % flows;
    }
}

static void build(struct layout *l, const struct options *o) {
    uint8_t *ip = l->frame + 14, *udp = ip + (o->v6 ? 40 : 20);
    unsigned udp_length = o->syn ? 20 : o->size - (unsigned)(udp - l->frame), length = o->v6 ? 16 : 4;
    uint8_t *source = ip + (o->v6 ? 8 : 12), *target = source + length;
    memcpy(l->frame, o->to, 6);
    memcpy(l->frame + 6, o->from, 6);
    put16(l->frame + 12, o->v6 ? 0x86dd : 0x0800);
    if (o->v6) {
        ip[0] = 0x60;
        put16(ip + 4, udp_length);
        ip[6] = 17;
        ip[7] = 64;
    } else {
        ip[0] = 0x45;
        put16(ip + 2, 20 + udp_length);
        ip[6] = 0x40;
        ip[8] = 64;
        ip[9] = o->syn ? 6 : 17;
    }
    uint8_t *clients = o->replies ? target : source, *fixed = o->replies ? source : target;
    int family = o->v6 ? AF_INET6 : AF_INET;
    if (inet_pton(family, o->clients, clients) != 1 || inet_pton(family, o->fixed, fixed) != 1)
        DIE("%s or %s is not an address", o->clients, o->fixed);
    l->address = (int)(clients + length - 4 - l->frame);
    l->base = get32(l->frame + l->address);
    put32(l->frame + l->address, 0);
    put16(udp + (o->replies ? 0 : 2), o->port);
    l->check = (int)(udp - l->frame) + (o->syn ? 16 : 6);
    if (o->syn) {
        put32(udp + 4, 0x10203040);
        udp[12] = 5 << 4;
        udp[13] = 2;
        put16(udp + 14, 65535);
    } else {
        put16(udp + 4, udp_length);
        for (unsigned i = 8; i < udp_length; i++)
            udp[i] = (uint8_t)(i * 7);
    }
    l->port = (int)(udp + (o->replies ? 2 : 0) - l->frame);
    l->udp = (int)(udp - l->frame);
    l->ip_sum = o->v6 ? 0 : sum_of(ip, 20);
    l->udp_sum = sum_of(source, 2 * length) + (o->syn ? 6 : 17) + udp_length + sum_of(udp, udp_length);
}

// --- in the kernel ----------------------------------------------------------------------------------------------------

struct state {
    uint64_t n, sent, started, calls, behind, flows, step, mask, bits, base, ip_sum, udp_sum, rate, ifindex;
    uint8_t head[HEAD];
};

static struct bpf_insn program[256];
static int length;

static int op(uint8_t code, int dst, int src, int offset, int32_t imm) {
    program[length] = (struct bpf_insn){
        .code = code, .dst_reg = (uint8_t)dst & 15, .src_reg = (uint8_t)src & 15, .off = (int16_t)offset, .imm = imm};
    return length++;
}

// Registers: r6 is the frame, r7 the state.
#define LOAD(dst, field) op(BPF_LDX | BPF_MEM | BPF_DW, dst, 7, (int)offsetof(struct state, field), 0)
#define STORE(field, src) op(BPF_STX | BPF_MEM | BPF_DW, 7, src, (int)offsetof(struct state, field), 0)
#define REG(operation, dst, src) op(BPF_ALU64 | BPF_X | (operation), dst, src, 0, 0)
#define IMM(operation, dst, imm) op(BPF_ALU64 | BPF_K | (operation), dst, 0, 0, imm)
#define JUMP_REG(operation, dst, src) op(BPF_JMP | BPF_X | (operation), dst, src, 0, 0)
#define JUMP_IMM(operation, dst, imm) op(BPF_JMP | BPF_K | (operation), dst, 0, 0, imm)
#define PUT(width, offset, src) op(BPF_STX | BPF_MEM | (width), 6, src, offset, 0)
#define SWAP(dst, bits) op(BPF_ALU | BPF_END | BPF_TO_BE, dst, 0, 0, bits)
#define CALL(number) op(BPF_JMP | BPF_CALL, 0, 0, 0, number)

static void here(int jump) { program[jump].off = (int16_t)(length - jump - 1); }

// r5 = r5 folded twice and complemented, in network order, into the frame.
static void put_checksum(int offset) {
    for (int i = 0; i < 2; i++) {
        REG(BPF_MOV, 0, 5);
        IMM(BPF_RSH, 0, 16);
        IMM(BPF_AND, 5, 0xffff);
        REG(BPF_ADD, 5, 0);
    }
    IMM(BPF_XOR, 5, 0xffff);
    SWAP(5, 16);
    PUT(BPF_H, offset, 5);
}

static void assemble(const struct layout *l, const struct options *o, int map) {
    REG(BPF_MOV, 8, 1);
    op(BPF_LDX | BPF_MEM | BPF_W, 6, 8, offsetof(struct xdp_md, data), 0);
    op(BPF_LDX | BPF_MEM | BPF_W, 2, 8, offsetof(struct xdp_md, data_end), 0);
    op(BPF_LD | BPF_IMM | BPF_DW, 7, BPF_PSEUDO_MAP_VALUE, 0, map);
    op(0, 0, 0, 0, 0);
    REG(BPF_MOV, 1, 6);
    IMM(BPF_ADD, 1, HEAD);
    int too_short = JUMP_REG(BPF_JGT, 1, 2);
    // The program reads the clock for every 32nd frame. If the frames are ahead of the rate, it drops them unsent.
    LOAD(1, rate);
    int unpaced = JUMP_IMM(BPF_JEQ, 1, 0);
    LOAD(2, calls);
    REG(BPF_MOV, 3, 2);
    IMM(BPF_ADD, 3, 1);
    STORE(calls, 3);
    IMM(BPF_AND, 2, 31);
    int no_look = JUMP_IMM(BPF_JNE, 2, 0);
    CALL(BPF_FUNC_ktime_get_ns);
    LOAD(1, started);
    int begun = JUMP_IMM(BPF_JNE, 1, 0);
    STORE(started, 0);
    REG(BPF_MOV, 1, 0);
    here(begun);
    REG(BPF_SUB, 0, 1);
    IMM(BPF_RSH, 0, 10);
    LOAD(1, rate);
    REG(BPF_MUL, 0, 1);
    IMM(BPF_DIV, 0, 976562);
    LOAD(2, sent);
    IMM(BPF_MOV, 3, 0);
    int due = JUMP_REG(BPF_JLE, 2, 0);
    IMM(BPF_MOV, 3, 1);
    here(due);
    STORE(behind, 3);
    here(no_look);
    LOAD(1, behind);
    int not_yet = JUMP_IMM(BPF_JNE, 1, 0);
    here(unpaced);
    // The kernel reuses pages that the director has changed, so the program writes the headers again.
    for (int i = 0; i < HEAD; i += 8) {
        op(BPF_LDX | BPF_MEM | BPF_DW, 1, 7, (int)offsetof(struct state, head) + i, 0);
        PUT(BPF_DW, i, 1);
    }
    LOAD(1, n);
    LOAD(3, step);
    REG(BPF_MOV, 2, 1);
    REG(BPF_ADD, 2, 3);
    LOAD(3, flows);
    int within = JUMP_REG(BPF_JLT, 2, 3);
    REG(BPF_SUB, 2, 3);
    here(within);
    STORE(n, 2);
    LOAD(2, sent);
    IMM(BPF_ADD, 2, 1);
    STORE(sent, 2);
    // r4: the address; r1: the port; r2: the checksum of the address.
    LOAD(2, mask);
    REG(BPF_AND, 2, 1);
    LOAD(4, base);
    REG(BPF_ADD, 4, 2);
    LOAD(2, bits);
    REG(BPF_RSH, 1, 2);
    IMM(BPF_ADD, 1, FIRST_PORT);
    REG(BPF_MOV, 2, 4);
    IMM(BPF_RSH, 2, 16);
    REG(BPF_MOV, 3, 4);
    IMM(BPF_AND, 3, 0xffff);
    REG(BPF_ADD, 2, 3);
    if (!o->v6) {
        LOAD(5, ip_sum);
        REG(BPF_ADD, 5, 2);
        put_checksum(24);
    }
    LOAD(5, udp_sum);
    REG(BPF_ADD, 5, 2);
    REG(BPF_ADD, 5, 1);
    put_checksum(l->check);
    SWAP(4, 32);
    PUT(BPF_W, l->address, 4);
    SWAP(1, 16);
    PUT(BPF_H, l->port, 1);
    LOAD(1, ifindex);
    IMM(BPF_MOV, 2, 0);
    CALL(BPF_FUNC_redirect);
    op(BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
    here(too_short);
    here(not_yet);
    IMM(BPF_MOV, 0, XDP_DROP);
    op(BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
}

static int sys_bpf(int command, union bpf_attr *attr) { return (int)syscall(SYS_bpf, command, attr, sizeof *attr); }

static uint64_t run_live(const struct layout *l, const struct options *o) {
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_MEMLOCK, &all);
    union bpf_attr attr = {.map_type = BPF_MAP_TYPE_ARRAY,
                           .key_size = 4,
                           .value_size = sizeof(struct state),
                           .max_entries = 1,
                           .map_flags = BPF_F_MMAPABLE};
    int map = sys_bpf(BPF_MAP_CREATE, &attr);
    if (map < 0)
        DIE("cannot create a BPF map");
    struct state *state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, map, 0);
    if (state == MAP_FAILED)
        DIE("cannot map a BPF map into memory");
    state->flows = o->flows;
    state->step = step_of(o->flows);
    state->bits = o->bits;
    state->mask = (1ull << o->bits) - 1;
    state->base = l->base;
    state->ip_sum = l->ip_sum;
    state->udp_sum = l->udp_sum;
    state->rate = (uint64_t)o->rate;
    state->ifindex = ifindex_of(o->interface);
    memcpy(state->head, l->frame, HEAD);
    assemble(l, o, map);
    static char log[65536];
    memset(&attr, 0, sizeof attr);
    attr.prog_type = BPF_PROG_TYPE_XDP;
    attr.insns = (uint64_t)(uintptr_t)program;
    attr.insn_cnt = (uint32_t)length;
    attr.license = (uint64_t)(uintptr_t) "Dual MIT/GPL";
    attr.log_buf = (uint64_t)(uintptr_t)log;
    attr.log_size = sizeof log;
    attr.log_level = 1;
    int fd = sys_bpf(BPF_PROG_LOAD, &attr);
    if (fd < 0)
        DIE("%s\ncannot load the BPF program", log);
    struct xdp_md context = {.data_end = o->size};
    memset(&attr, 0, sizeof attr);
    attr.test.prog_fd = (uint32_t)fd;
    attr.test.data_in = (uint64_t)(uintptr_t)l->frame;
    attr.test.data_size_in = o->size;
    attr.test.ctx_in = (uint64_t)(uintptr_t)&context;
    attr.test.ctx_size_in = sizeof context;
    attr.test.repeat = 1u << 30;
    attr.test.flags = BPF_F_TEST_XDP_LIVE_FRAMES;
    attr.test.batch_size = 64;
    ready();
    // The kernel needs some 20 ms to start each call, so there is only one call, which a signal ends.
    if (!stopping && sys_bpf(BPF_PROG_TEST_RUN, &attr) && errno != EINTR)
        DIE("BPF_PROG_TEST_RUN with live frames failed");
    return state->sent;
}

// --- by a packet socket -----------------------------------------------------------------------------------------------

static void set_flow(uint8_t *frame, const struct layout *l, const struct options *o, uint64_t flow, uint64_t number) {
    uint32_t address = l->base + (uint32_t)(flow & ((1ull << o->bits) - 1));
    uint32_t port = FIRST_PORT + (uint32_t)(flow >> o->bits);
    uint64_t sum = (address >> 16) + (address & 0xffff);
    if (!o->v6)
        put16(frame + 24, (uint16_t)~fold(l->ip_sum + sum));
    put32(frame + l->address, address);
    put16(frame + l->port, port);
    uint64_t udp_sum = l->udp_sum + sum + port;
    if (o->numbered) {
        uint8_t *payload = frame + l->udp + 8;
        udp_sum -= sum_of(l->frame + l->udp + 8, 12);
        memcpy(payload, "LVSb", 4);
        put32(payload + 4, (uint32_t)flow);
        put32(payload + 8, (uint32_t)number);
        udp_sum += sum_of(payload, 12);
    }
    uint32_t check = (uint16_t)~fold(udp_sum);
    put16(frame + l->check, check ? check : 0xffff);
}

static uint64_t run_send(const struct layout *l, const struct options *o) {
    enum { BATCH = 16 };
    static uint8_t buffers[BATCH][SIZE_MAX_];
    int fd = socket(AF_PACKET, SOCK_RAW, 0), one = 1, room = 8 << 20;
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_ifindex = (int)ifindex_of(o->interface)};
    if (fd < 0 || setsockopt(fd, SOL_PACKET, PACKET_QDISC_BYPASS, &one, sizeof one) ||
        bind(fd, (void *)&address, sizeof address))
        DIE("cannot open the packet socket");
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    struct mmsghdr messages[BATCH] = {0};
    struct iovec vectors[BATCH];
    for (int i = 0; i < BATCH; i++) {
        memcpy(buffers[i], l->frame, o->size);
        vectors[i] = (struct iovec){buffers[i], o->size};
        messages[i].msg_hdr.msg_iov = &vectors[i];
        messages[i].msg_hdr.msg_iovlen = 1;
    }
    uint64_t flow = 0, step = step_of(o->flows), sent = 0, start = now_ns();
    ready();
    while (!stopping && (!o->count || sent < o->count)) {
        if (o->rate > 0) {
            uint64_t due = start + (uint64_t)((double)sent * 1e9 / o->rate);
            struct timespec until = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        }
        for (int i = 0; i < BATCH; i++) {
            set_flow(buffers[i], l, o, flow, sent + (uint64_t)i);
            flow = (flow + step) % o->flows;
        }
        for (int done = 0; done < BATCH && !stopping;) {
            int n = sendmmsg(fd, messages + done, (unsigned)(BATCH - done), 0);
            if (n < 0 && errno != ENOBUFS && errno != EINTR && errno != EAGAIN)
                DIE("sendmmsg failed");
            if (n < 0 && !o->numbered)
                break;
            done += n > 0 ? n : 0;
            sent += n > 0 ? (uint64_t)n : 0;
        }
    }
    return sent;
}

int main(int count, char **arguments) {
    struct options o = {.interface = "c0", .seconds = 5, .port = 80, .size = 64, .flows = 1, .live = 1, .cpu = -1};
    for (int option; (option = getopt(count, arguments, "i:m:t:f:b:s:d:e:p:a:v:r:n:c:R6NS")) != -1;)
        switch (option) {
        case 'i': o.interface = optarg; break;
        case 'm': o.live = !strcmp(optarg, "live"); break;
        case 't': o.seconds = (unsigned)atoi(optarg); break;
        case 'f': o.flows = strtoull(optarg, NULL, 10); break;
        case 'b': o.bits = (unsigned)atoi(optarg); break;
        case 's': o.size = (unsigned)atoi(optarg); break;
        case 'd': read_mac(optarg, o.to); break;
        case 'e': read_mac(optarg, o.from); break;
        case 'p': o.port = (unsigned)atoi(optarg); break;
        case 'a': o.clients = optarg; break;
        case 'v': o.fixed = optarg; break;
        case 'r': o.rate = atof(optarg); break;
        case 'n': o.count = strtoull(optarg, NULL, 10); break;
        case 'c': o.cpu = atoi(optarg); break;
        case 'R': o.replies = 1; break;
        case '6': o.v6 = 1; break;
        case 'N': o.numbered = 1; break;
        case 'S': o.syn = 1; break;
        default: return 2;
        }
    if (o.size < HEAD || o.size > SIZE_MAX_ || !o.flows || !o.clients || !o.fixed || (o.syn && (o.v6 || o.replies || o.numbered)))
        return 2;
    static struct layout l;
    build(&l, &o);
    pin(o.cpu);
    bound(o.seconds);
    uint64_t start = now_ns(), sent = o.live ? run_live(&l, &o) : run_send(&l, &o);
    printf("{\"sent\":%lu,\"seconds\":%.3f}\n", sent, (double)(now_ns() - start) / 1e9);
    return 0;
}
