/* A driver, a collective library and an MPI that do nothing, under the names that the hook looks
 * for. The cost of the hook is the difference between a call under its own name and a call under
 * its other name, `bare_…`. Compiled with -DDRIVER, -DCOLLECTIVES, -DBLAS or -DMPI; the latter has
 * the interface of Open MPI and a message that never arrives. With -DSLOW_COLLECTIVES the linker
 * spends a while in a function of the library when another than the first thread looks it up. */
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default"), noinline))

/* With -DCANCELLATION_POINTS a thread can be cancelled inside the driver. */
#ifdef CANCELLATION_POINTS
extern void pthread_testcancel(void);
#else
#define pthread_testcancel() ((void)0)
#endif

#ifdef DRIVER
static int context;
#define LAUNCH(name)                                                                                                             \
    EXPORT int name(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
                    unsigned shared, void *stream, void **parameters, void **extra) {                                            \
        __asm__ volatile("" ::: "memory");                                                                                       \
        return 0;                                                                                                                \
    }
LAUNCH(cuLaunchKernel)
LAUNCH(bare_cuLaunchKernel)
#define RECORD(name)                                                                                                             \
    EXPORT int name(void *event, void *stream) {                                                                                 \
        pthread_testcancel();                                                                                                    \
        __asm__ volatile("" ::: "memory");                                                                                       \
        return 0;                                                                                                                \
    }
EXPORT int cuGraphLaunch(void *graph, void *stream) { return 0; }
RECORD(cuEventRecord)
RECORD(bare_cuEventRecord)
EXPORT int cuEventCreate(void **event, unsigned flags) {
    static size_t last = 0x1000;
    *event = (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
    return 0;
}
EXPORT int cuEventQuery(void *event) { return 0; }
EXPORT int cuEventElapsedTime(float *ms, void *start, void *end) { *ms = 0.01f; return 0; }
EXPORT int cuEventDestroy_v2(void *event) { return 0; }
EXPORT int cuStreamIsCapturing(void *stream, int *status) { pthread_testcancel(); *status = 0; return 0; }
EXPORT int cuStreamGetCtx(void *stream, void **out) { *out = &context; return 0; }
EXPORT int cuCtxGetCurrent(void **out) { *out = &context; return 0; }
EXPORT int cuCtxSetCurrent(void *to) { return 0; }
EXPORT int cuCtxGetDevice(int *device) { *device = 0; return 0; }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
EXPORT int cuFuncGetName(const char **name, void *function) { *name = "kernel"; return 0; }
#endif

#ifdef SLOW_COLLECTIVES
#define COLLECTIVES
EXPORT volatile int is_resolving;
static int do_nothing(void) { return 0; }
static void *resolve_slowly(void) {
    if (gettid() != getpid()) {
        is_resolving = 1;
        usleep(200 * 1000);
    }
    return do_nothing;
}
EXPORT int ncclReduceScatter(void) __attribute__((ifunc("resolve_slowly")));
#endif

#ifdef COLLECTIVES
typedef struct { char internal[128]; } Id;
static char comms[64];
static int made;
#define ALL_REDUCE(name)                                                                                                         \
    EXPORT int name(const void *send, void *receive, size_t count, int type, int op, void *comm, void *stream) {                 \
        __asm__ volatile("" ::: "memory");                                                                                       \
        return 0;                                                                                                                \
    }
ALL_REDUCE(ncclAllReduce)
ALL_REDUCE(pncclAllReduce)
ALL_REDUCE(bare_ncclAllReduce)
EXPORT int ncclGroupStart(void) { return 0; }
EXPORT int ncclGroupEnd(void) { return 0; }
EXPORT int ncclSend(const void *buffer, size_t count, int type, int peer, void *comm, void *stream) { return 0; }
EXPORT int ncclRecv(void *buffer, size_t count, int type, int peer, void *comm, void *stream) { return 0; }
EXPORT int ncclGetUniqueId(Id *id) { memset(id, ++made, sizeof *id); return 0; }
EXPORT int pncclCommInitRank(void **comm, int size, Id id, int rank) { *comm = &comms[__atomic_fetch_add(&made, 1, __ATOMIC_RELAXED) % 64]; return 0; }
EXPORT int ncclCommInitRank(void **comm, int size, Id id, int rank) { return pncclCommInitRank(comm, size, id, rank); }
EXPORT int ncclCommCount(void *comm, int *count) { *count = 4; return 0; }
EXPORT int ncclCommUserRank(void *comm, int *rank) { *rank = 0; return 0; }
EXPORT int ncclCommCuDevice(void *comm, int *device) { *device = 0; return 0; }
EXPORT int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
#endif

#ifdef BLAS
EXPORT int cublasGetStream_v2(void *handle, void **stream) { *stream = handle; return 0; }
EXPORT int cublasSgemm_v2(void *handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b,
                          int ldb, const float *beta, float *c, int ldc) {
    return 0;
}
#endif

#ifdef MPI
char ompi_mpi_comm_world[8], ompi_mpi_comm_null[8], ompi_request_null[8], ompi_mpi_int[8];
static char message[8];
#define TEST(name)                                                                                                               \
    EXPORT int name(void **request, int *flag, void *status) {                                                                   \
        *flag = 0;                                                                                                               \
        __asm__ volatile("" ::: "memory");                                                                                       \
        return 0;                                                                                                                \
    }
TEST(MPI_Test)
TEST(bare_MPI_Test)
#define PROBE(name)                                                                                                              \
    EXPORT int name(int peer, int tag, void *comm, int *flag, void *status) {                                                    \
        *flag = 0;                                                                                                               \
        __asm__ volatile("" ::: "memory");                                                                                       \
        return 0;                                                                                                                \
    }
PROBE(MPI_Iprobe)
PROBE(bare_MPI_Iprobe)
EXPORT int MPI_Allreduce(const void *from, void *to, int count, void *type, void *op, void *comm) { return 0; }
EXPORT int MPI_Barrier(void *comm) { return 0; }
EXPORT int MPI_Send(const void *buffer, int count, void *type, int peer, int tag, void *comm) { return 0; }
EXPORT int MPI_Wait(void **request, void *status) { return 0; }
EXPORT int MPI_Irecv(void *buffer, int count, void *type, int peer, int tag, void *comm, void **request) {
    *request = message;
    return 0;
}
EXPORT int PMPI_Comm_rank(void *comm, int *rank) { *rank = 0; return 0; }
EXPORT int PMPI_Comm_size(void *comm, int *size) { *size = 4; return 0; }
EXPORT int PMPI_Comm_test_inter(void *comm, int *flag) { *flag = 0; return 0; }
EXPORT int PMPI_Type_size(void *type, int *size) { *size = 4; return 0; }
EXPORT int PMPI_Comm_group(void *comm, void **group) { *group = comm; return 0; }
EXPORT int PMPI_Group_size(void *group, int *size) { *size = 4; return 0; }
EXPORT int PMPI_Group_translate_ranks(void *group, int count, const int *ranks, void *other, int *out) {
    return memcpy(out, ranks, count * sizeof *ranks), 0;
}
EXPORT int PMPI_Group_free(void **group) { return 0; }
EXPORT int PMPI_Comm_remote_group(void *comm, void **group) { *group = comm; return 0; }
EXPORT int PMPI_Group_rank(void *group, int *rank) { *rank = 0; return 0; }
EXPORT int PMPI_Initialized(int *flag) { *flag = 1; return 0; }
#endif
