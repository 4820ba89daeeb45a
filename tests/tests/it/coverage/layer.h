/* What the programs of the coverage matrix have in common: one layer's target function, what must be there before it can be
   called, and a call. LAYER_… selects the layer, SONAME its library; the program says by which way it comes to the target. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *P;
typedef struct { unsigned x, y, z; } Dim3;
typedef struct { char internal[128]; } Id;

#if defined LAYER_DRIVER
#define TARGET cuLaunchKernel
#define PROTOTYPE (P function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
                   P stream, P *parameters, P *extra)
#define ARGUMENTS (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
#elif defined LAYER_RUNTIME
#define TARGET cudaLaunchKernel
#define PROTOTYPE (const void *stub, Dim3 grid, Dim3 block, P *parameters, unsigned long shared, P stream)
#define ARGUMENTS (stub, grid, block, parameters, shared, stream)
#elif defined LAYER_NCCL
#define TARGET ncclAllReduce
#define PROTOTYPE (const void *send, void *receive, size_t count, int type, int op, P communicator, P stream)
#define ARGUMENTS (send, receive, count, type, op, communicator, stream)
#elif defined LAYER_CUBLAS
#define TARGET cublasSgemm_v2
#define PROTOTYPE (P handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, const float *b, \
                   int ldb, const float *beta, float *c, int ldc)
#define ARGUMENTS (handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
#elif defined LAYER_CUBLASLT
#define TARGET cublasLtMatmul
#define PROTOTYPE (P handle, P product, const void *alpha, const void *a, P a_layout, const void *b, P b_layout, const void *beta, \
                   const void *c, P c_layout, void *d, P d_layout, const void *algorithm, P workspace, size_t bytes, P stream)
#define ARGUMENTS (handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, bytes, stream)
#endif

typedef int Target PROTOTYPE;
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static void check(int code, const char *what) {
    if (code) {
        printf("%s: %d\n", what, code);
        exit(1);
    }
}

/* What dlerror says after a look-up is what the C library's own says: nothing after one that succeeded, else what was not there. */
static void says(P found, const char *missing) {
    const char *error = dlerror();
    if (found ? error != NULL : !error || !strstr(error, missing)) {
        printf("%s %s: dlerror says %s\n", missing, found ? "found" : "not found", error ? error : "nothing");
        exit(1);
    }
}

/* A function that is in no row of the hook: it is had like any program would have it. */
static P helper(const char *soname, const char *name) {
    P library = dlopen(soname, RTLD_NOW), function = library ? dlsym(library, name) : NULL;
    if (!function) {
        printf("%s: %s\n", name, dlerror());
        exit(1);
    }
    says(function, name);
    return function;
}

static int driver_ready(void) {
    int (*init)(unsigned) = helper("libcuda.so.1", "cuInit");
    int (*retain)(P *, int) = helper("libcuda.so.1", "cuDevicePrimaryCtxRetain");
    int (*current)(P) = helper("libcuda.so.1", "cuCtxSetCurrent");
    P context;
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    return current(context);
}

#if defined LAYER_DRIVER
static P kernel;
static void ready(void) {
    int (*load)(P *, const char *) = helper(SONAME, "cuModuleLoadData");
    int (*get)(P *, P, const char *) = helper(SONAME, "cuModuleGetFunction");
    P module;
    check(driver_ready(), "context");
    check(load(&module, "any image"), "cuModuleLoadData");
    check(get(&kernel, module, "a_kernel"), "cuModuleGetFunction");
}
static int call(Target *target) { return target(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL); }
#elif defined LAYER_RUNTIME
static void stub(void) {}
static void ready(void) {
    static const struct { int magic, version; const void *data; P unused; } wrapper = {0x466243b1, 1, "any image", 0};
    P *(*begin)(const void *) = helper(SONAME, "__cudaRegisterFatBinary");
    void (*add)(P *, const char *, char *, const char *, int, P, P, P, P, P) = helper(SONAME, "__cudaRegisterFunction");
    P *binary = begin(&wrapper);
    add(binary, (const char *)stub, "stub", "stub", -1, 0, 0, 0, 0, 0);
}
static int call(Target *target) {
    Dim3 one = {1, 1, 1};
    return target((P)stub, one, one, NULL, 0, NULL);
}
#elif defined LAYER_NCCL
static P communicator;
static void ready(void) {
    int (*id)(Id *) = helper(SONAME, "ncclGetUniqueId");
    int (*init)(P *, int, Id, int) = helper(SONAME, "ncclCommInitRank");
    Id unique;
    check(driver_ready(), "context");
    check(id(&unique), "ncclGetUniqueId");
    check(init(&communicator, 1, unique, 0), "ncclCommInitRank");
}
static float buffer[16];
static int call(Target *target) { return target(buffer, buffer, 16, 7, 0, communicator, NULL); }
#elif defined LAYER_CUBLAS
static P handle;
static float matrix[4] = {1, 2, 3, 4}, result[4];
static void ready(void) {
    int (*create)(P *) = helper(SONAME, "cublasCreate_v2");
    check(driver_ready(), "context");
    check(create(&handle), "cublasCreate_v2");
}
static int call(Target *target) {
    static const float one = 1, zero = 0;
    return target(handle, 0, 1, 2, 2, 2, &one, matrix, 2, matrix, 2, &zero, result, 2);
}
#elif defined LAYER_CUBLASLT
static P handle, product, layout;
static float matrix[4] = {1, 2, 3, 4}, result[4];
static void ready(void) {
    int (*create)(P *) = helper(SONAME, "cublasLtCreate");
    int (*describe)(P *, int, int) = helper(SONAME, "cublasLtMatmulDescCreate");
    int (*set)(P, int, const void *, size_t) = helper(SONAME, "cublasLtMatmulDescSetAttribute");
    int (*lay_out)(P *, int, unsigned long, unsigned long, long) = helper(SONAME, "cublasLtMatrixLayoutCreate");
    int transposed = 1;
    check(driver_ready(), "context");
    check(create(&handle), "cublasLtCreate");
    check(describe(&product, 68, 0), "cublasLtMatmulDescCreate");
    check(set(product, 4, &transposed, sizeof transposed), "cublasLtMatmulDescSetAttribute");
    check(lay_out(&layout, 0, 2, 2, 2), "cublasLtMatrixLayoutCreate");
}
static int call(Target *target) {
    static const float one = 1, zero = 0;
    return target(handle, product, &one, matrix, layout, matrix, layout, &zero, result, layout, result, layout, NULL, NULL, 0, NULL);
}
#endif

#define CALLS 3
static void calls(Target *target) {
    if (!target) {
        printf("no " TEXT(TARGET) "\n");
        exit(1);
    }
    for (int i = 0; i < CALLS; i++)
        check(call(target), TEXT(TARGET));
}

/* Lives until the test has seen it. */
static void finish(char **argv) {
    int (*synchronize)(void) = helper("libcuda.so.1", "cuCtxSynchronize");
    check(synchronize(), "cuCtxSynchronize");
    puts("called");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(1000);
}
