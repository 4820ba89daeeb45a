// The native half of the artificial rank: threads that block deep in C, each in another system
// call, and one thread that spins on demand and tells the longest time for which it did not get on.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static sem_t never;
static int silent_pipe[2];

static void block(long kind) {
    char byte;
    struct epoll_event event;
    struct pollfd poll_one = {.fd = silent_pipe[0], .events = POLLIN};
    struct timespec long_time = {.tv_sec = 1000000};
    switch (kind % 5) {
    case 0: while (sem_wait(&never)) {} break;
    case 1: while (read(silent_pipe[0], &byte, 1) < 0) {} break;
    case 2: while (poll(&poll_one, 1, -1) < 0) {} break;
    case 3: {
        int set = epoll_create1(EPOLL_CLOEXEC);
        while (epoll_wait(set, &event, 1, -1) < 0) {}
        break;
    }
    default: while (nanosleep(&long_time, NULL)) {} break;
    }
}

// Deep enough to be interesting, with locals that the compiler cannot drop.
static __attribute__((noinline)) long descend(long kind, long depth) {
    volatile char locals[128];
    memset((void *)locals, (int)depth, sizeof locals);
    if (depth == 0) block(kind);
    else depth += descend(kind, depth - 1);
    return depth + locals[5];
}

static void *blocked(void *kind) {
    descend((long)kind, 20 + (long)kind % 30);
    return NULL;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct spinner { char commands[256]; char answers[256]; };

// For each line "milliseconds" on the pipe of commands: spins that long and answers "start end
// longest_gap tid", in nanoseconds.
static void *spin(void *argument) {
    struct spinner *names = argument;
    // Without a real-time priority an ordinary preemption looks like a stop; where that is not
    // permitted, the comparison with windows without a capture still holds.
    struct sched_param priority = {.sched_priority = 10};
    pthread_setschedparam(pthread_self(), SCHED_FIFO, &priority);
    FILE *commands = fopen(names->commands, "r");
    FILE *answers = fopen(names->answers, "w");
    char line[64];
    while (commands && answers && fgets(line, sizeof line, commands)) {
        uint64_t start = now_ns(), last = start, longest = 0, end = start + strtoull(line, NULL, 10) * 1000000u;
        while (last < end) {
            uint64_t now = now_ns();
            if (now - last > longest) longest = now - last;
            last = now;
        }
        fprintf(answers, "%llu %llu %llu %d\n", (unsigned long long)start, (unsigned long long)last,
                (unsigned long long)longest, gettid());
        fflush(answers);
    }
    return NULL;
}

int start_threads(long count, const char *commands, const char *answers) {
    pthread_t thread;
    static struct spinner names;
    if (pipe(silent_pipe) || sem_init(&never, 0, 0)) return -1;
    snprintf(names.commands, sizeof names.commands, "%s", commands);
    snprintf(names.answers, sizeof names.answers, "%s", answers);
    if (pthread_create(&thread, NULL, spin, &names)) return -1;
    for (long kind = 1; kind < count; kind++)
        if (pthread_create(&thread, NULL, blocked, (void *)kind)) return -1;
    return 0;
}
