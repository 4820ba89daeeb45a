/* Calls a driver and a collective library that do nothing, under the hook, and counts what its own
   threads allocate meanwhile: this program's allocator stands in front of the C library's for every
   library of the process, the hook included. */
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
int ncclGroupStart(void), ncclGroupEnd(void);
int ncclSend(const void *, size_t, int, int, void *, void *);
int ncclRecv(void *, size_t, int, int, void *, void *);
int cuGraphLaunch(void *, void *);
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
extern char ompi_mpi_comm_world[], ompi_mpi_int[];
int MPI_Allreduce(const void *, void *, int, void *, void *, void *);
int MPI_Barrier(void *);
int MPI_Send(const void *, int, void *, int, int, void *);
int MPI_Irecv(void *, int, void *, int, int, void *, void **);
int MPI_Wait(void **, void *);

static void launches(int number, int kernels) {
    for (int index = 0; index < number; index++)
        cuLaunchKernel((void *)(uintptr_t)(0x500000 + 64 * (index % kernels)), 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL);
}

static void reduces(int number, void *comm) {
    for (int index = 0; index < number; index++) ncclAllReduce(comm, comm, 8, 7, 0, comm, comm);
}

static void groups(int number, void *comm) {
    for (int index = 0; index < number; index++) {
        ncclGroupStart();
        for (int peer = 0; peer < 4; peer++) {
            ncclSend(comm, 8, 7, peer, comm, comm);
            ncclRecv(comm, 8, 7, peer, comm, comm);
        }
        ncclGroupEnd();
    }
}

static void graphs(int number, void *comm) {
    for (int index = 0; index < number; index++) cuGraphLaunch((void *)(uintptr_t)(0x900000 + 64 * (index % 8)), comm);
}

/* One of them is timed every 20 milliseconds. */
static void products(int number, void *comm) {
    float one = 1;
    for (int index = 0; index < number; index++) cublasSgemm_v2(comm, 0, 1, 64, 32, 16, &one, &one, 64, &one, 32, &one, &one, 64);
}

static void messages(int number, void *comm) {
    for (int index = 0; index < number; index++) {
        void *request;
        MPI_Allreduce(&index, comm, 1, ompi_mpi_int, comm, ompi_mpi_comm_world);
        MPI_Barrier(ompi_mpi_comm_world);
        MPI_Send(&index, 1, ompi_mpi_int, 1, index, ompi_mpi_comm_world);
        MPI_Irecv(comm, 1, ompi_mpi_int, 1, index, ompi_mpi_comm_world, &request);
        MPI_Wait(&request, NULL);
    }
}

/* What calls allocate after the first of them. */
static long allocated(void (*calls)(int, void *), int number, void *comm) {
    long sum = 0;
    calls(8, comm);
    for (int round = 0; round < 20; round++) {
        /* The watcher takes the slots back; with none left the way would be another one. */
        usleep(20000);
        long before = used;
        calls(number, comm);
        sum += used - before;
    }
    return sum;
}

static void *thread(void *name) {
    void *comm = NULL;
    Id id = {{0}};
    long before = used;
    launches(1, 1);
    long start = used - before;
    ncclCommInitRank(&comm, 4, id, 0);
    before = used;
    launches(100000, 40);
    long launching = used - before;
    printf("%s %ld %ld", (char *)name, start, launching);
    printf(" %ld %ld %ld", allocated(reduces, 500, comm), allocated(groups, 50, comm), allocated(graphs, 100, comm));
    printf(" %ld %ld\n", allocated(products, 500, comm), allocated(messages, 500, comm));
    return NULL;
}

int main(void) {
    pthread_t second;
    thread("first");
    pthread_create(&second, NULL, thread, "second");
    pthread_join(second, NULL);
    return 0;
}
