// Preloaded into the capturing process: notes when each thread was asked to stop and when it had been let go, from outside of
// the code that is measured. A stop counts from before PTRACE_INTERRUPT to after PTRACE_DETACH, so it is an upper bound.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <time.h>

struct event { uint64_t ns; int tid; char what; };
static struct event events[1 << 16];
static atomic_uint used;

static void note(int tid, char what) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    unsigned index = atomic_fetch_add(&used, 1);
    if (index < sizeof events / sizeof *events)
        events[index] = (struct event){(uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, tid, what};
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
    unsigned count = atomic_load(&used);
    for (unsigned i = 0; log && i < count && i < sizeof events / sizeof *events; i++)
        fprintf(log, "%c %d %llu\n", events[i].what, events[i].tid, (unsigned long long)events[i].ns);
    if (log && fclose(log)) abort();
}
