/* Calls a function of the driver or of the collective library under its own name, which the hook sees, and under its other name,
 * which it does not, in turn, from several threads at once. Prints one line a thread and round: nanoseconds of CPU time a call,
 * bare and hooked.
 *
 * `record` times the bare event record. `memory` launches and reduces, and prints the bytes that are resident at the end.
 *
 * usage: hook_calls launch|collective|record|memory THREADS ROUNDS CALLS */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int bare_cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuEventRecord(void *, void *);
int bare_cuEventRecord(void *, void *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int bare_ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static int rounds, calls;
static pthread_barrier_t line;
typedef struct { int number; double *bare, *hooked; } Thread;
static const char *what;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

#define BATCH(call)                                                                                                              \
    ({                                                                                                                           \
        double start = now();                                                                                                    \
        for (int index = 0; index < calls; index++) call;                                                                        \
        (now() - start) / calls;                                                                                                 \
    })

static void *run(void *argument) {
    Thread *thread = argument;
    void *stream = (void *)(uintptr_t)(0x10000 + 0x100 * thread->number);
    /* A model launches a few dozen different kernels, in the same order each step. */
    void *kernels[32];
    for (int index = 0; index < 32; index++) kernels[index] = (void *)(uintptr_t)(0x500000 + 0x40 * index);
    void *comm = NULL;
    Id id = {{0}};
    id.internal[0] = (char)thread->number;
    if (strcmp(what, "collective") == 0 || strcmp(what, "memory") == 0) ncclCommInitRank(&comm, 4, id, 0);
    for (int round = -3; round < rounds; round++) {
        double bare, hooked;
        pthread_barrier_wait(&line);
        if (strcmp(what, "launch") == 0) {
            bare = BATCH(bare_cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
            hooked = BATCH(cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        } else if (strcmp(what, "record") == 0) {
            bare = BATCH((void)0);
            hooked = BATCH(bare_cuEventRecord(stream, stream));
        } else if (strcmp(what, "memory") == 0) {
            bare = BATCH(cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
            hooked = BATCH(ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream));
            usleep(10000);
        } else {
            bare = BATCH(bare_ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream));
            hooked = BATCH(ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream));
            /* The watcher needs a moment to empty the ring: a full one would make the calls cheap. */
            usleep(30000);
        }
        if (round >= 0) thread->bare[round] = bare, thread->hooked[round] = hooked;
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    what = arguments[1];
    int threads = atoi(arguments[2]);
    rounds = atoi(arguments[3]), calls = atoi(arguments[4]);
    pthread_barrier_init(&line, NULL, threads);
    pthread_t ids[threads];
    Thread work[threads];
    for (int number = 0; number < threads; number++) {
        work[number] = (Thread){number, calloc(rounds, sizeof(double)), calloc(rounds, sizeof(double))};
        if (pthread_create(&ids[number], NULL, run, &work[number]) != 0) return 1;
    }
    for (int number = 0; number < threads; number++) pthread_join(ids[number], NULL);
    if (strcmp(what, "memory") == 0) {
        long pages = 0, resident = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        if (!file || fscanf(file, "%ld %ld", &pages, &resident) != 2) return 1;
        printf("%ld\n", resident * sysconf(_SC_PAGESIZE));
        return 0;
    }
    for (int number = 0; number < threads; number++)
        for (int round = 0; round < rounds; round++)
            printf("%.2f %.2f\n", work[number].bare[round], work[number].hooked[round]);
    return 0;
}
