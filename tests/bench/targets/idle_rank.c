/* A rank that launches ten thousand kernels a second, some every millisecond, and reduces ten times a second, on a driver that does
 * nothing, until its standard input ends. */
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclCommInitRank(void **, int, Id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(void) {
    static int kernels[32], stream;
    Id id;
    void *comm = NULL;
    memset(&id, 7, sizeof id);
    ncclCommInitRank(&comm, 4, id, 0);
    const double begun = now();
    for (long launched = 0, reduced = 0;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (poll(&input, 1, 1) != 0)
            return 0;
        const double passed = now() - begun;
        for (; launched < (long)(passed * 10000); launched++)
            cuLaunchKernel(&kernels[launched & 31], 1, 1, 1, 1, 1, 1, 0, &stream, NULL, NULL);
        for (; reduced < (long)(passed * 10); reduced++)
            ncclAllReduce(NULL, NULL, 1 << 20, 7, 0, comm, &stream);
    }
}
