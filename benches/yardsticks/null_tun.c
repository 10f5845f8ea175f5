// null_tun: a minimal forwarder on a TUN device: the host routes packets into the device, the program replaces one address by
// another, and the host routes the resulting packets. Uses the virtio_net_hdr and super-packets of 64 KiB.
//
// null_tun -i DEVICE -v VIP -s SERVER
#include "yardstick.h"
#include <fcntl.h>
#include <linux/if_tun.h>

static void update(uint8_t *at, uint32_t old, uint32_t new, int unfinished) {
    uint32_t sum = get16(at);
    uint32_t away = (0xffff & ~old) + (0xffff & ~(old >> 16)), here = (new & 0xffff) + (new >> 16);
    // A partial checksum contains the sum of the pseudo-header, not its complement.
    put16(at, unfinished ? fold(sum + away + here) : (uint16_t)~fold((uint16_t)~sum + away + here));
}

int main(int count, char **arguments) {
    const char *device = "tunp", *vip_text = "10.73.0.1", *server_text = "10.72.0.11";
    unsigned seconds = 3600;
    int cpu = -1;
    for (int option; (option = getopt(count, arguments, "i:v:s:c:t:")) != -1;)
        switch (option) {
        case 'i': device = optarg; break;
        case 'v': vip_text = optarg; break;
        case 's': server_text = optarg; break;
        case 'c': cpu = atoi(optarg); break;
        case 't': seconds = (unsigned)atoi(optarg); break;
        default: return 2;
        }
    uint32_t vip = ntohl(inet_addr(vip_text)), server = ntohl(inet_addr(server_text));
    pin(cpu);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", device);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6))
        DIE("cannot open the TUN device %s", device);
    bound(seconds);
    ready();
    static uint8_t buffer[VNET + FRAME_MAX];
    struct pollfd wait = {fd, POLLIN, 0};
    uint64_t forwarded = 0;
    while (!stopping) {
        ssize_t length = read(fd, buffer, sizeof buffer);
        if (length < 0) {
            poll(&wait, 1, -1);
            continue;
        }
        uint8_t *ip = buffer + VNET, *field;
        uint32_t old, new;
        if (length < VNET + 28 || ip[0] != 0x45)
            continue;
        if (get32(ip + 16) == vip)
            field = ip + 16, old = vip, new = server;
        else if (get32(ip + 12) == server)
            field = ip + 12, old = server, new = vip;
        else
            continue;
        put32(field, new);
        update(ip + 10, old, new, 0);
        if (ip[9] == 6)
            update(ip + 36, old, new, buffer[0] & 1);
        else if (ip[9] == 17 && get16(ip + 26))
            update(ip + 26, old, new, buffer[0] & 1);
        forwarded += write(fd, buffer, (size_t)length) > 0;
    }
    printf("{\"forwarded\":%lu}\n", forwarded);
    return 0;
}
