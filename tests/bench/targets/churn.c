// Sixteen threads repeatedly start, call through known chains of functions, and end. A table in a
// shared file has the current chain of each thread, so that a checker knows which stacks are right.
// src/churn.rs is the checker.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ENTRIES = 65536, FUNCTIONS = 8, THREADS = 16 };
static _Atomic uint64_t *table;

static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return x ^ (x >> 16);
}
static uint32_t seed(uint32_t tid, uint32_t generation) { return mix(tid ^ generation * 0x9e3779b1u); }
static uint32_t depth_of(uint32_t seed) { return 8 + mix(seed + 1000) % 16; }

struct call { uint32_t seed, depth; };
typedef long function(const struct call *, uint32_t);
static function *const functions[FUNCTIONS];

static __attribute__((noinline, noclone)) long churn_leaf(const struct call *call) {
    // Most of the time asleep, sometimes running: both ways of capturing a thread are tried.
    if (call->seed % 4) {
        struct timespec pause = {.tv_nsec = 200000 + call->seed % 2000000};
        nanosleep(&pause, NULL);
    } else {
        for (volatile unsigned i = 0; i < 20000 + call->seed % 100000; i++) {}
    }
    return call->depth;
}

// Frames of different sizes: a stack put together from two moments does not fit.
#define FUNCTION(number)                                                                                                       \
    static __attribute__((noinline, noclone)) long churn_f##number(const struct call *call, uint32_t level) {                  \
        volatile char locals[24 * (number + 1)];                                                                               \
        locals[number] = (char)level;                                                                                          \
        level++;                                                                                                               \
        long result = level == call->depth ? churn_leaf(call) : functions[mix(call->seed + level) % FUNCTIONS](call, level);   \
        return result + locals[number];                                                                                        \
    }
FUNCTION(0) FUNCTION(1) FUNCTION(2) FUNCTION(3) FUNCTION(4) FUNCTION(5) FUNCTION(6) FUNCTION(7)
static function *const functions[FUNCTIONS] = {churn_f0, churn_f1, churn_f2, churn_f3, churn_f4, churn_f5, churn_f6, churn_f7};

static void *churn_thread(void *unused);

static void start(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, churn_thread, NULL)) abort();
    pthread_attr_destroy(&attributes);
}

static __attribute__((noinline, noclone)) void *churn_thread(void *unused) {
    uint32_t tid = (uint32_t)syscall(SYS_gettid), last = 5 + mix(tid) % 40;
    volatile long sum = 0;
    for (uint32_t generation = 1; generation <= last; generation++) {
        struct call call = {.seed = seed(tid, generation)};
        call.depth = depth_of(call.seed);
        atomic_store(&table[tid % ENTRIES], (uint64_t)tid << 32 | generation);
        sum += functions[mix(call.seed) % FUNCTIONS](&call, 0);
    }
    // The highest bit: this thread is about to end.
    atomic_store(&table[tid % ENTRIES], (uint64_t)tid << 32 | 0x80000000u | last);
    start();
    return unused;
}

int main(int count, char **arguments) {
    int file = count > 1 ? open(arguments[1], O_RDWR) : -1;
    table = file < 0 ? MAP_FAILED : mmap(NULL, ENTRIES * sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (table == MAP_FAILED) return 1;
    for (int i = 0; i < THREADS; i++) start();
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
