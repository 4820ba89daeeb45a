/* The libraries of a family with every function that the hook knows of it, and the program that
   calls each. `stubs.h` and `calls.h` are made from `rows.txt`: the functions of a library, which
   do nothing and succeed, and the calls. What is written out here is what the hook itself asks a
   library for. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void *P;
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { char internal[128]; } Id;

#ifdef LIBRARY
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define F(name) PASTE(DEVICE, name)
#ifdef DEVICE
int F(EventCreate)(P *event) { return *event = &event, 0; }
int F(EventCreateWithFlags)(P *event, unsigned flags) { return *event = &event, 0; }
int F(EventDestroy)(P event) { return 0; }
int F(EventDestroy_v2)(P event) { return 0; }
int F(EventRecord)(P event, P stream) { return 0; }
int F(EventQuery)(P event) { return 0; }
int F(EventElapsedTime)(float *ms, P start, P end) { return *ms = 1.5, 0; }
int F(StreamIsCapturing)(P stream, int *out) { return *out = 0, 0; }
int F(ThreadExchangeStreamCaptureMode)(int *mode) { return *mode = 0, 0; }
int F(GetDevice)(int *out) { return *out = 0, 0; }
int F(SetDevice)(int device) { return 0; }
int F(StreamGetDevice)(P stream, int *out) { return *out = 0, 0; }
int F(StreamGetCtx)(P stream, P *out) { return *out = &F(StreamGetCtx), 0; }
int F(CtxGetCurrent)(P *out) { return *out = &F(StreamGetCtx), 0; }
int F(CtxSetCurrent)(P context) { return 0; }
int F(CtxGetDevice)(int *out) { return *out = 0, 0; }
#endif
#ifdef COLLECTIVES
int PASTE(COLLECTIVES, CommCount)(P comm, int *out) { return *out = 2, 0; }
int PASTE(COLLECTIVES, CommUserRank)(P comm, int *out) { return *out = 1, 0; }
int PASTE(COLLECTIVES, GetVersion)(int *out) { return *out = 22907, 0; }
#endif
#ifdef BLAS
/* A handle is its stream. */
int PASTE(BLAS, GetStream)(P handle, P *stream) { return *stream = handle, 0; }
int PASTE(BLAS, GetStream_v2)(P handle, P *stream) { return *stream = handle, 0; }
/* A descriptor is its attributes by number. */
static int tell(const long *attributes, int number, void *place, size_t size, size_t *written) {
    memcpy(place, &attributes[number], size);
    return *written = size, 0;
}
int PASTE(BLAS, LtMatrixLayoutGetAttribute)(P layout, int number, void *place, size_t size, size_t *written) {
    return tell(layout, number, place, size, written);
}
int PASTE(BLAS, LtMatmulDescGetAttribute)(P product, int number, void *place, size_t size, size_t *written) {
    return tell(product, number, place, size, written);
}
#endif
#ifdef MPI
/* Two ranks, of which this is the second, by Open MPI's interface or by the standard's. */
#ifndef STANDARD
char ompi_mpi_comm_world[8], ompi_mpi_comm_null[8], ompi_request_null[8], ompi_mpi_float[8];
#endif
int PMPI_Comm_rank(P comm, int *out) { return *out = 1, 0; }
int PMPI_Comm_size(P comm, int *out) { return *out = 2, 0; }
int PMPI_Comm_test_inter(P comm, int *out) { return *out = 0, 0; }
int PMPI_Type_size(P type, int *out) { return *out = 4, 0; }
int PMPI_Comm_group(P comm, P *out) { return *out = out, 0; }
int PMPI_Comm_remote_group(P comm, P *out) { return *out = out, 0; }
int PMPI_Group_size(P group, int *out) { return *out = 2, 0; }
int PMPI_Group_rank(P group, int *out) { return *out = 1, 0; }
int PMPI_Group_translate_ranks(P group, int count, const int *ranks, P other, int *out) {
    return memcpy(out, ranks, count * sizeof *out), 0;
}
int PMPI_Group_free(P *group) { return 0; }
int PMPI_Initialized(int *flag) { return *flag = 1, 0; }
#endif
#define STUB(name) \
    __attribute__((weak)) long name(void) { return 0; }
#include "stubs.h"
#else
/* What the calls are given. A place for something new holds a handle of its own already: the
   functions write none. */
static char buffer[8192], root_info[4108];
static long handles = 0x7000, cell, world = 0x6000, child, windows[16], files[2], made_windows, made_files, yes = 1;
static long fresh(long *place) { return *place = ++handles, (long)place; }
static Id unique = {"id"};
static const Dim3 one = {1, 1, 1};
static struct { unsigned grid[3], block[3], shared; P stream; } driver_config = {{1, 1, 1}, {1, 1, 1}, 0, (P)0x50};
static struct { Dim3 grid, block; size_t shared; P stream; } runtime_config = {{1, 1, 1}, {1, 1, 1}, 0, (P)0x50};
/* Copies of three dimensions: arrays, places, pointers, and the extent. */
typedef struct { P array; size_t place[3]; P address; size_t pitch, size[2]; } End;
static struct { End from, to; size_t extent[3]; int kind; } layers = {.extent = {16, 8, 2}, .kind = 1};
static struct { End from; int from_device; End to; int to_device; size_t extent[3]; } peer_layers = {.extent = {16, 8, 2}};
/* Two groups of products that differ in m: 3 of 4 x 5 x 6 and 2 of 10 x 5 x 6. */
static const int none[2], transposed[2] = {1, 1}, m[2] = {4, 10}, n[2] = {5, 5}, k[2] = {6, 6}, counts[2] = {3, 2};
static const long long_m[2] = {4, 10}, long_n[2] = {5, 5}, long_k[2] = {6, 6}, long_counts[2] = {3, 2};
/* The attributes of cuBLASLt's layouts are type, order, rows, columns, leading dimension, batch;
   those of its products end with the transposes. hipBLASLt's are batch, stride, type, order, rows,
   columns. */
static const long lt_a[] = {14, 0, 4, 6, 4, 3}, lt_d[] = {14, 0, 4, 5, 4, 3}, lt_product[] = {0, 0, 0, 0, 1};
static const long hip_a[] = {3, 0, 14, 0, 4, 6}, hip_d[] = {3, 0, 14, 0, 4, 5}, hip_product[] = {111, 112};
static const struct { int count, peer, signal, context; } awaited[1] = {{1, 0, 3, 0}};
#ifdef STANDARD
#define WORLD 0x101
#define FLOAT 0x210
#else
extern char ompi_mpi_comm_world[] __attribute__((weak)), ompi_mpi_float[] __attribute__((weak));
#define WORLD AT(ompi_mpi_comm_world)
#define FLOAT AT(ompi_mpi_float)
#endif

#define ID unique
#define ONE one
#define AT(place) ((long)(place))
#define BF16 9
#define STREAM 0x50
#define COMM world
#define OUT AT(&cell)
#define YES AT(&yes)
#define BUFFER AT(buffer)
#define NEW fresh(&cell)
#define REQUEST AT(&cell)
/* The request of the call before once more. */
#define SAME AT(&cell)
/* The first one is used until all have been made; the calls that end one begin with the last. */
#define NEW_WINDOW fresh(&windows[made_windows++])
#define WINDOW windows[0]
#define OLD_WINDOW AT(&windows[--made_windows])
#define NEW_FILE fresh(&files[made_files++])
#define FIRST_FILE files[0]
#define OLD_FILE AT(&files[--made_files])

static FILE *times;
static void call(const char *name) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    fprintf(times, "%s %lld\n", name, now.tv_sec * 1000000000LL + now.tv_nsec);
}

#include "calls.h"

int main(int argc, char **argv) {
    times = fopen(argv[2], "w");
    if (calls())
        return 1;
    call("end");
    fclose(times);
    puts("called");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(1000);
    return 0;
}
#endif
