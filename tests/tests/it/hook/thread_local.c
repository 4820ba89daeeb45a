/* Trains with BYTES of thread-local variables, which the C library takes from the stack of each thread.
 * usage: thread_local FOLDER; it ends when FOLDER has a file `go`, with status 7 when each thread got a stack beside them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static __thread volatile char variables[BYTES];

static int is_short;

/* In place of the C library's, for the hook too. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    size_t stack = 0;
    if (attributes == NULL || pthread_attr_getstacksize(attributes, &stack) != 0 || stack < BYTES + 128 * 1024) is_short = 1;
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attributes, run, argument);
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    char path[4096];
    snprintf(path, sizeof path, "%s/go", arguments[1]);
    Id id = {{0}};
    void *comm;
    if (ncclCommInitRank(&comm, 4, id, 0) != 0) abort();
    while (access(path, F_OK) != 0) {
        if (cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0) abort();
        if (ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100) != 0) abort();
        usleep(1000);
    }
    variables[BYTES - 1] = is_short ? 8 : 7;
    return variables[BYTES - 1];
}
