/* What the guests share: device calls of a driver and a collective library that do nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static void *comm;
static Id id = {{1}};
static volatile sig_atomic_t stop;

/* Four kernels and a collective, so many times. */
static void work(int times) {
    for (int time = 0; time < times; time++) {
        for (int kernel = 0; kernel < 4; kernel++)
            if (cuLaunchKernel((void *)(uintptr_t)(0x500000 + 64 * kernel), 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL)) abort();
        if (ncclAllReduce(&id, &id, 8, 7, 0, comm, (void *)0x100)) abort();
    }
}

__attribute__((unused)) static void *work_once(void *times) {
    work((int)(intptr_t)times);
    return NULL;
}

static void *work_on(void *unused) {
    while (!stop) work(10);
    return unused;
}

