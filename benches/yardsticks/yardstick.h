// Declarations that all yardsticks use. Each yardstick is one C file without libraries, built when the bench starts.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define DIE(...)                                                               \
    do {                                                                       \
        fprintf(stderr, __VA_ARGS__);                                          \
        fprintf(stderr, ": %s\n", strerror(errno));                            \
        exit(1);                                                               \
    } while (0)

// A virtio_net_hdr, which precedes each received or sent frame with PACKET_VNET_HDR.
enum { VNET = 10 };
// Maximum length in bytes of a super-packet, with its headers.
enum { FRAME_MAX = 65549 };

static volatile sig_atomic_t stopping;

static void on_signal(int number) {
    (void)number;
    stopping = 1;
}

// Ends the program at a signal, or in any case after this many seconds. System calls are interrupted.
static inline void bound(unsigned seconds) {
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGALRM, &action, NULL);
    alarm(seconds);
}

static inline void ready(void) {
    puts("ready");
    fflush(stdout);
}

static inline uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (cpu >= 0 && sched_setaffinity(0, sizeof set, &set))
        DIE("cannot run on CPU %d", cpu);
}

// RFC 1071: ones' complement sum of 16-bit words, folded.
static inline uint16_t fold(uint64_t sum) {
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

static inline uint64_t sum_of(const uint8_t *bytes, size_t length) {
    uint64_t sum = 0;
    for (; length > 1; bytes += 2, length -= 2)
        sum += (uint64_t)(bytes[0] << 8 | bytes[1]);
    return length ? sum + (uint64_t)(bytes[0] << 8) : sum;
}

static inline void put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static inline void put32(uint8_t *at, uint32_t value) {
    put16(at, value >> 16);
    put16(at + 2, value);
}

static inline uint32_t get16(const uint8_t *at) { return (uint32_t)(at[0] << 8 | at[1]); }
static inline uint32_t get32(const uint8_t *at) { return get16(at) << 16 | get16(at + 2); }

static inline void read_mac(const char *text, uint8_t mac[6]) {
    if (sscanf(text, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) != 6)
        DIE("%s is not a link-layer address", text);
}

static inline unsigned ifindex_of(const char *name) {
    unsigned index = if_nametoindex(name);
    if (!index)
        DIE("cannot find the interface %s", name);
    return index;
}
