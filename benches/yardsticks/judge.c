// judge: checks the numbered frames of `gen -N` at the receiver, and reports whether any was lost, changed or reordered.
//
// judge -i INTERFACE -d PREFIX (of the destination addresses) -f PREFIX (of the source addresses)
// Packets in IPIP tunnels are decapsulated first. A signal ends the program.
#include "yardstick.h"

enum { FLOWS = 1 << 16 };

struct prefix {
    int family;
    uint8_t address[16];
    unsigned bits;
};

static struct {
    uint64_t received, bytes, checksum, address, order;
} found;
static uint32_t last[FLOWS];

static struct prefix read_prefix(const char *text) {
    struct prefix prefix = {.family = strchr(text, ':') ? AF_INET6 : AF_INET};
    char copy[64];
    snprintf(copy, sizeof copy, "%s", text);
    char *slash = strchr(copy, '/');
    if (slash) {
        *slash = 0;
        prefix.bits = (unsigned)atoi(slash + 1);
    }
    if (!slash || inet_pton(prefix.family, copy, prefix.address) != 1)
        DIE("%s is not a prefix", text);
    return prefix;
}

static int is_in(const struct prefix *prefix, const uint8_t *address) {
    for (unsigned bit = 0; bit < prefix->bits; bit++)
        if ((address[bit / 8] ^ prefix->address[bit / 8]) >> (7 - bit % 8) & 1)
            return 0;
    return 1;
}

static void judge(const uint8_t *frame, size_t length, const struct prefix *to, const struct prefix *from) {
    if (length < 62)
        return;
    const uint8_t *ip = frame + 14, *end = frame + length;
    int v6 = get16(frame + 12) == 0x86dd;
    if (!v6 && get16(frame + 12) != 0x0800)
        return;
    if (!v6 && ip[9] == 4) {
        found.checksum += fold(sum_of(ip, 20)) != 0xffff;
        ip += 20;
    }
    size_t head = v6 ? 40 : 20, wide = v6 ? 16 : 4;
    const uint8_t *source = ip + (v6 ? 8 : 12), *udp = ip + head;
    if (udp + 20 > end || (v6 ? ip[6] : ip[9]) != 17 || memcmp(udp + 8, "LVSb", 4))
        return;
    size_t udp_length = get16(udp + 4);
    if (udp_length < 20 || udp + udp_length > end) {
        found.bytes++;
        return;
    }
    uint32_t flow = get32(udp + 12) % FLOWS, number = get32(udp + 16) + 1;
    int changed = 0;
    for (size_t i = 20; i < udp_length; i++)
        changed |= udp[i] != (uint8_t)(i * 7);
    found.received++;
    found.bytes += (uint64_t)changed;
    found.checksum += (!v6 && fold(sum_of(ip, 20)) != 0xffff) ||
                      fold(sum_of(source, 2 * wide) + 17 + udp_length + sum_of(udp, udp_length)) != 0xffff;
    found.address += !is_in(from, source) || !is_in(to, source + wide);
    found.order += number <= last[flow];
    last[flow] = number;
}

int main(int count, char **arguments) {
    const char *interface = "s0", *to_text = "0.0.0.0/0", *from_text = "0.0.0.0/0";
    unsigned seconds = 30;
    for (int option; (option = getopt(count, arguments, "i:d:f:t:")) != -1;)
        switch (option) {
        case 'i': interface = optarg; break;
        case 'd': to_text = optarg; break;
        case 'f': from_text = optarg; break;
        case 't': seconds = (unsigned)atoi(optarg); break;
        default: return 2;
        }
    struct prefix to = read_prefix(to_text), from = read_prefix(from_text);
    int fd = socket(AF_PACKET, SOCK_RAW, 0), room = 64 << 20, one = 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)ifindex_of(interface)};
    if (fd < 0 || bind(fd, (void *)&address, sizeof address))
        DIE("cannot open the packet socket");
    bound(seconds);
    ready();
    static uint8_t frame[2048];
    while (!stopping) {
        ssize_t length = recv(fd, frame, sizeof frame, 0);
        if (length > 0)
            judge(frame, (size_t)length, &to, &from);
    }
    printf("{\"received\":%lu,\"bytes\":%lu,\"checksum\":%lu,\"address\":%lu,\"order\":%lu}\n", found.received,
           found.bytes, found.checksum, found.address, found.order);
    return 0;
}
