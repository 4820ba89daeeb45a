/* The programs of the coverage tests, and the libraries that they call through. -D with the name of
   a part selects it. The first four parts are those of single tests of `probes.rs`; the rest is the
   matrix. */
#define _GNU_SOURCE

#if defined NAMESPACE
/* A library that needs another one, which is opened by OPEN: both are this file. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
#if defined INNER
int ncclAllReduce(void *send, void *receive, size_t count, int type, int op, void *communicator, void *stream) { return 0; }
#elif defined OUTER
int ncclAllReduce(void *send, void *receive, size_t count, int type, int op, void *communicator, void *stream);
int through(void) { return ncclAllReduce(NULL, NULL, 1, 7, 0, (void *)0x10, NULL); }
#else
int main(int argc, char **argv) {
    void *library = OPEN(argv[2]);
    int (*through)(void) = library ? dlsym(library, "through") : NULL;
    if (!through || through() || through() || through())
        return puts(dlerror()), 1;
    puts("called");
    fflush(stdout);
    while (access(argv[1], F_OK))
        usleep(1000);
    return 0;
}
#endif

#elif defined WEAK
/* A library that finds out by weak references whether functions exist. LIBRARY is its own function;
   it is both linked to the program and opened by it. HAS makes a library that has one of them. */
#include <dlfcn.h>
#include <stdio.h>

#ifdef HAS
int MPI_Bcast(void) { return 0; }
#elif defined LIBRARY
int ncclCommGrow(void) __attribute__((weak));
int MPI_Isendrecv(void) __attribute__((weak));
int MPI_Bcast(void) __attribute__((weak));
static int (*const in_data)(void) = MPI_Isendrecv;
int LIBRARY(void) { return (ncclCommGrow != 0) + 2 * (MPI_Isendrecv != 0) + 4 * (MPI_Bcast != 0) + 8 * (*(int (*volatile const *)(void))&in_data != 0); }
#else
int linked(void);
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    int (*opened)(void) = library ? (int (*)(void))dlsym(library, "opened") : NULL;
    printf("%d %d\n", linked(), opened ? opened() : -1);
    return 0;
}
#endif

#elif defined WATCHES
/* Watches the linker as a debugger does: by a breakpoint on the function that it calls at every
   change of its list. */
#include <link.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

/* The function only returns, and so does this in its place. */
static void stopped(int signal, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    registers[REG_RIP] = *(greg_t *)registers[REG_RSP];
    registers[REG_RSP] += 8;
}

__attribute__((constructor)) static void watch(void) {
    const struct sigaction action = {.sa_sigaction = stopped, .sa_flags = SA_SIGINFO};
    unsigned char *code = (unsigned char *)_r_debug.r_brk;
    void *page = (void *)((unsigned long)code & -4096ul);
    if (sigaction(SIGTRAP, &action, NULL) || mprotect(page, 4096, PROT_READ | PROT_WRITE | PROT_EXEC))
        abort();
    *code = 0xcc;
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
}

#elif defined FORBIDS
/* Becomes PROGRAM where the system refuses code that can be written, as SELinux does without
   `execmod`. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, PROT_WRITE | PROT_EXEC),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PROT_WRITE | PROT_EXEC, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EACCES),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
        return 3;
    execv(PROGRAM, argv);
    return 4;
}

#else
/* The matrix: its parts are at the end. LAYER_… selects the layer, and SONAME is its library. All
   have in common one layer's target function, what must be there before it can be called, and a
   call. Each comes to the target by another way. */
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

/* What dlerror says after a look-up is what the C library's own says: nothing after one that
   succeeded, else what was not there. */
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

#if defined COPY
/* The target as a copy of the layer's library would have it that was linked statically: defined
   here, and doing its work with functions that are in no row of the hook, or with the driver. */
static int launch(void) {
    static int (*get)(const char *, P *, int, unsigned long, int *);
    static int (*kernel_launch)(P, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, P, P *, P *);
    static P kernel;
    int status;
    if (!kernel) {
        int (*load)(P *, const char *) = helper("libcuda.so.1", "cuModuleLoadData");
        int (*function)(P *, P, const char *) = helper("libcuda.so.1", "cuModuleGetFunction");
        P module;
        get = helper("libcuda.so.1", "cuGetProcAddress_v2");
        if (driver_ready() || get("cuLaunchKernel", (P *)&kernel_launch, 4000, 0, &status) || load(&module, "any image"))
            return 1;
        if (function(&kernel, module, "a_kernel"))
            return 1;
    }
    return kernel_launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

__attribute__((noinline)) int TARGET PROTOTYPE {
#if defined LAYER_NCCL
    static Target *real;
    if (!real)
        real = helper(SONAME, "pncclAllReduce");
    return real ARGUMENTS;
#else
    return launch();
#endif
}
#endif

#if defined CALLER_LIBRARY || defined PLT
/* A library and a program that call the target plainly, as the compiler makes it. */
extern Target TARGET;
int through PROTOTYPE { return TARGET ARGUMENTS; }
#endif

#if defined PLT
int main(int argc, char **argv) {
    ready();
    calls(through);
    finish(argv);
}

#elif defined EARLY
extern Target *early;
int main(int argc, char **argv) {
    ready();
    calls(early);
    finish(argv);
}

#elif defined EARLY_LIBRARY
/* Has the address before main, and before any device call. */
Target *early;
__attribute__((constructor)) static void before(void) { early = helper(SONAME, TEXT(TARGET)); }

#elif defined OUTER_LIBRARY
/* Opens a library that only its own RUNPATH finds. */
P inner(void) { return dlopen("libinner.so", RTLD_NOW); }

#elif defined PROC_ADDRESS
/* The address from cuGetProcAddress, with FLAGS. */
int main(int argc, char **argv) {
    int (*get)(const char *, P *, int, unsigned long, int *) = helper(SONAME, "cuGetProcAddress_v2");
    Target *target = NULL;
    int status;
    ready();
    check(get("cuLaunchKernel", (P *)&target, 12000, FLAGS, &status), "cuGetProcAddress_v2");
    calls(target);
    finish(argv);
}

#elif defined LOOK_UP
/* The address from dlsym, or from dlvsym by VERSION in a library that has versions; PLACE says
   where it looks. */
#ifdef VERSION
#define LIBRARY argv[2]
#define FIND(place, name) dlvsym(place, name, VERSION)
#else
#define LIBRARY SONAME
#define FIND(place, name) dlsym(place, name)
#endif
int main(int argc, char **argv) {
    P library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL), other = dlopen("libm.so.6", RTLD_NOW), target;
    ready();
    says(dlopen("/nowhere/library.so", RTLD_NOW), "/nowhere/library.so");
    says(FIND(PLACE, "no_such_function"), "no_such_function");
    says(FIND(other, TEXT(TARGET)), TEXT(TARGET));
    dlopen("/nowhere/library.so", RTLD_NOW);
    target = FIND(PLACE, TEXT(TARGET));
    says(target, TEXT(TARGET));
    calls(target);
    finish(argv);
}

#elif defined OWN_LOOK_UP
/* The address from the library's symbol table in memory, past the linker. */
#include <link.h>
int main(int argc, char **argv) {
    struct link_map *map = dlopen(SONAME, RTLD_NOW);
    const char *strings = NULL;
    const ElfW(Sym) *symbols = NULL;
    const unsigned *hash = NULL;
    Target *target = NULL;
    ready();
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            strings = (const char *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_GNU_HASH)
            hash = (const unsigned *)entry->d_un.d_ptr;
    }
    /* Four words, the filter, the buckets, and for every symbol from hash[1] on its hash, whose
       lowest bit ends a chain. */
    const unsigned *buckets = hash + 4 + 2 * hash[2], *chains = buckets + hash[0] - hash[1];
    for (unsigned bucket = 0; bucket < hash[0]; bucket++) {
        unsigned index = buckets[bucket];
        do {
            if (index && !strcmp(strings + symbols[index].st_name, TEXT(TARGET)))
                target = (Target *)(map->l_addr + symbols[index].st_value);
        } while (index && !(chains[index++] & 1));
    }
    calls(target);
    finish(argv);
}

#elif defined OPENED
/* Calls through a library that is opened with MODE. */
int main(int argc, char **argv) {
    P library = dlopen(argv[2], MODE | RTLD_NOW);
    if (!library)
        puts(dlerror());
    ready();
#ifdef PAUSE
    /* The library is loaded and seen by the hook; now the test does something to it. */
    puts("loaded");
    fflush(stdout);
    while (access(PAUSE, F_OK))
        usleep(1000);
#endif
#if defined RUNPATH
    P (*inner)(void) = dlsym(library, "inner");
    library = inner();
    if (!library)
        puts(dlerror());
#elif defined RELOAD
    for (int i = 1; i < CALLS; i++) {
        check(call(dlsym(library, "through")), TEXT(TARGET));
        check(dlclose(library), "dlclose");
        if (dlopen(argv[2], RTLD_NOW | RTLD_NOLOAD))
            puts("still loaded");
        library = dlopen(argv[2], RTLD_NOW);
    }
    check(call(dlsym(library, "through")), TEXT(TARGET));
#endif
#if !defined RELOAD
    calls(dlsym(library, "through"));
#endif
    finish(argv);
}
#endif
#endif
