// Preloaded into the capturing process: notes when each thread was asked to stop and when it had
// been let go, from outside of the code that is measured. A stop counts from before
// PTRACE_INTERRUPT to after PTRACE_DETACH, so it is an upper bound.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <time.h>

struct event { uint64_t ns; int tid; char what; };
/* Shared with the child process that stops the threads. The parent ends last and writes the log. */
static struct log { atomic_uint used; struct event events[1 << 16]; } *shared;

static __attribute__((constructor)) void share(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) abort();
}

static void note(int tid, char what) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    unsigned index = atomic_fetch_add(&shared->used, 1);
    if (index < sizeof shared->events / sizeof *shared->events)
        shared->events[index] = (struct event){(uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, tid, what};
}

long ptrace(enum __ptrace_request request, ...) {
    static long (*_Atomic real)(enum __ptrace_request, ...);
    va_list arguments;
    va_start(arguments, request);
    int tid = va_arg(arguments, int);
    void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
    va_end(arguments);
    if (!real) real = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
    if (request == PTRACE_INTERRUPT || request == PTRACE_ATTACH) note(tid, 'S');
    long result = real(request, tid, address, data);
    if (request == PTRACE_DETACH) note(tid, 'C');
    return result;
}

static __attribute__((destructor)) void write_log(void) {
    const char *path = getenv("XPU_BENCH_PTRACE_LOG");
    FILE *log = path ? fopen(path, "w") : NULL;
    unsigned count = atomic_load(&shared->used);
    for (unsigned i = 0; log && i < count && i < sizeof shared->events / sizeof *shared->events; i++) {
        struct event *event = &shared->events[i];
        fprintf(log, "%c %d %llu\n", event->what, event->tid, (unsigned long long)event->ns);
    }
    if (log && fclose(log)) abort();
}
