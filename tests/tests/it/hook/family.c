/* The libraries of a family whose runtime is the lowest layer, made from one source: FAMILY is the
   prefix of its functions, and RUNTIME, COLLECTIVES or BLAS says which library this is. Everything
   completes at once, except what the variable FAMILY_NEVER names, whose events stay "not ready". */
#include <stdlib.h>
#include <string.h>

typedef void *P;
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { char internal[128]; } Id;
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define F(name) PASTE(FAMILY, name)
#define C(name) PASTE(COLLECTIVES, name)

#if defined RUNTIME
static __thread int device;
static int launches, calls;
int F(GetDevice)(int *out) { return *out = device, 0; }
int F(SetDevice)(int number) { return device = number, 0; }
int F(StreamGetDevice)(P stream, int *out) { return *out = 0, 0; }
int F(StreamIsCapturing)(P stream, int *out) { return *out = 0, 0; }
int F(ThreadExchangeStreamCaptureMode)(int *mode) { return *mode = 0, 0; }
int F(EventCreate)(P *event) { return *event = calloc(1, 8), 0; }
int F(EventCreateWithFlags)(P *event, unsigned flags) { return *event = calloc(1, 8), 0; }
int F(EventDestroy)(P event) { return free(event), 0; }
int F(EventRecord)(P event, P stream) { return *(long *)event = (long)stream, 0; }
int F(EventQuery)(P event) { return getenv("FAMILY_NEVER") && *(long *)event == atol(getenv("FAMILY_NEVER")) ? 600 : 0; }
int F(EventElapsedTime)(float *ms, P start, P end) { return *ms = 1.5, 0; }
int F(LaunchKernel)(const void *stub, Dim3 grid, Dim3 block, P *arguments, size_t shared, P stream) { return launches++, 0; }
int F(ModuleLaunchKernel)(P function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, P stream, P *parameters, P *extra) { return launches++, 0; }
/* As HIP and MACA have it: a configuration in front, with CUDA's fields. */
typedef struct { unsigned grid[3], block[3], shared; P stream; } Config;
static int launch_by(const Config *config, P function) { return launches += config && function, 0; }
int hipDrvLaunchKernelEx(const Config *config, P function, P *parameters, P *extra) { return launch_by(config, function); }
int mcModuleLaunchKernelEx(const Config *config, P function, P *parameters, P *extra) { return launch_by(config, function); }
int F(GraphLaunch)(P graph, P stream) { return launches++, 0; }
int launched(void) { return launches; }
#elif defined COLLECTIVES
static int sizes[64], ranks[64], made;
static int init(P *out, int size, int rank) {
    sizes[made] = size, ranks[made] = rank;
    *out = (P)(long)++made;
    return 0;
}
int C(CommInitRank)(P *out, int size, Id id, int rank) { return init(out, size, rank); }
int C(CommSplit)(P parent, int color, int key, P *out, P config) { return init(out, 1, 0); }
int C(CommCount)(P comm, int *out) { return *out = sizes[(long)comm - 1], 0; }
int C(CommUserRank)(P comm, int *out) { return *out = ranks[(long)comm - 1], 0; }
int C(CommDestroy)(P comm) { return 0; }
static int reduced;
int C(AllReduce)(const void *send, void *receive, size_t count, int type, int op, P comm, P stream) { return reduced++, 0; }
int PASTE(p, C(AllReduce))(const void *send, void *receive, size_t count, int type, int op, P comm, P stream) {
    return reduced++, 0;
}
int C(AllReduceWithBias)(const void *send, void *receive, size_t count, int type, int op, P comm, P stream, const void *bias) { return 0; }
int C(AllReduceExt)(const void *send, void *receive, size_t count, int type, int op, P comm, P stream) { return 0; }
int C(AllToAll)(const void *send, void *receive, size_t count, int type, P comm, P stream) { return 0; }
int C(AllToAllv)(const void *send, const size_t *counts, const size_t *places, void *receive, const size_t *receives,
                 const size_t *to, int type, P comm, P stream) { return 0; }
int reductions(void) { return reduced; }
#elif defined BLAS
int F(blasGetStream)(P handle, P *stream) { return *stream = handle, 0; }
int F(blasSgemm)(P handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b,
                 int ldb, const float *beta, float *c, int ldc) { return 0; }
int hipblasGemmEx_v2(P handle, int ta, int tb, int m, int n, int k, P alpha, P a, int a_type, int lda, P b, int b_type, int ldb,
                     P beta, P c, int c_type, int ldc, int compute, int algorithm) { return 0; }
/* A layout is its attributes by hipBLASLt's numbers: batch, stride, type, order, rows, columns; a
   product's are the transposes. */
static int tell(const long *attributes, int number, int count, size_t bytes, void *place, size_t size, size_t *written) {
    if (number < 0 || number >= count || size != bytes)
        return 3;
    memcpy(place, &attributes[number], size);
    return *written = size, 0;
}
int hipblasLtMatrixLayoutGetAttribute(P layout, int number, void *place, size_t size, size_t *written) {
    return tell(layout, number, 6, number == 1 || number > 3 ? 8 : 4, place, size, written);
}
int hipblasLtMatmulDescGetAttribute(P product, int number, void *place, size_t size, size_t *written) {
    return tell(product, number, 2, 4, place, size, written);
}
int hipblasLtMatmul(P handle, P what, P alpha, P a, P a_layout, P b, P b_layout, P beta, P c, P c_layout, P d, P d_layout,
                    P algorithm, P workspace, size_t bytes, P stream) { return 0; }
#endif
