/* Calls a driver and a collective library that do nothing, under the hook, and counts what its own threads allocate meanwhile:
 * this program's allocator stands in front of the C library's for every library of the process, the hook included. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static __thread long used;

void *malloc(size_t size) { used++; return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { used++; return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { used++; return __libc_realloc(old, size); }
void *memalign(size_t align, size_t size) { used++; return __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { used++; return __libc_memalign(align, size); }
int posix_memalign(void **out, size_t align, size_t size) { used++; *out = __libc_memalign(align, size); return 0; }
void free(void *old) { if (old) used++; __libc_free(old); }

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static void launches(int number, int kernels) {
    for (int index = 0; index < number; index++)
        cuLaunchKernel((void *)(uintptr_t)(0x500000 + 64 * (index % kernels)), 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL);
}

static void *thread(void *name) {
    void *comm = NULL;
    Id id = {{0}};
    long before = used;
    launches(1, 1);
    long start = used - before;
    ncclCommInitRank(&comm, 4, id, 0);
    ncclAllReduce(comm, comm, 8, 7, 0, comm, comm);
    before = used;
    launches(100000, 40);
    long launching = used - before;
    long reducing = 0;
    for (int round = 0; round < 20; round++) {
        /* The watcher takes the slots back; with none left the way would be another one. */
        usleep(20000);
        before = used;
        for (int index = 0; index < 500; index++) ncclAllReduce(comm, comm, 8, 7, 0, comm, comm);
        reducing += used - before;
    }
    printf("%s %ld %ld %ld\n", (char *)name, start, launching, reducing);
    return NULL;
}

int main(void) {
    pthread_t second;
    thread("first");
    pthread_create(&second, NULL, thread, "second");
    pthread_join(second, NULL);
    return 0;
}
