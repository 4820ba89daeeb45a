/* Programs that open and close the driver and the collective library themselves, from the folder of
   the second argument. Each prints "ok" when all went as it would without the hook. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
typedef int Launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int AllReduce(const void *, void *, size_t, int, int, void *, void *);
typedef int InitRank(void **, int, Id, int);

static const char *folder;

static void *open_library(const char *name, int mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    void *library = dlopen(path, RTLD_NOW | mode);
    if (!library) abort();
    return library;
}

/* Launches, and closes everything while nobody has yet seen the last operation end; then the
   addresses are somebody else's. */
static int closes(void) {
    for (int round = 0; round < 30; round++) {
        void *driver = open_library("libcuda.so.1", RTLD_LOCAL), *library = open_library("libnccl.so.2", RTLD_LOCAL);
        Launch *launch = (Launch *)dlsym(driver, "cuLaunchKernel");
        AllReduce *all_reduce = (AllReduce *)dlsym(library, "ncclAllReduce");
        InitRank *init = (InitRank *)dlsym(library, "ncclCommInitRank");
        Id id = {{1}};
        void *comm;
        if (init(&comm, 4, id, 0)) return 1;
        for (int call = 0; call < 50; call++)
            if (launch(driver, 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL) || all_reduce(0, 0, 8, 7, 0, comm, (void *)0x100)) return 1;
        if (dlclose(library) || dlclose(driver)) return 1;
        usleep(round * 1000);
    }
    return 0;
}

/* Finds a function in the default scope, and closes the library that it came from: who looked it up
   there keeps it. */
static int closes_global(void) {
    void *library = open_library("libnccl.so.2", RTLD_GLOBAL), *driver = open_library("libcuda.so.1", RTLD_GLOBAL);
    AllReduce *all_reduce = (AllReduce *)dlsym(RTLD_DEFAULT, "ncclAllReduce");
    Launch *launch = (Launch *)dlsym(RTLD_DEFAULT, "cuLaunchKernel");
    if (!all_reduce || !launch) return 1;
    if (dlclose(library) || dlclose(driver)) return 1;
    for (int call = 0; call < 50; call++)
        if (launch(library, 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL) || all_reduce(0, 0, 8, 7, 0, NULL, (void *)0x100)) return 1;
    return 0;
}

/* Asks for functions without calling one, closes, and asks again; what was found the first time is
   not there any more. */
static int asks_and_closes(void) {
    for (int round = 0; round < 30; round++) {
        void *driver = open_library("libcuda.so.1", RTLD_LOCAL);
        Launch *launch = (Launch *)dlsym(driver, "cuLaunchKernel");
        if (!launch) return 1;
        if (round % 3 == 2 && launch(driver, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL)) return 1;
        if (dlclose(driver)) return 1;
        /* So that the next one does not come to the same place. */
        if (mmap(NULL, 65536 << (round % 4), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) return 1;
    }
    return 0;
}

extern int passed __attribute__((weak));

/* Beside another tool that wraps dlsym: each call passes it. */
static int passes_shim(void) {
    Launch *launch = (Launch *)dlsym(open_library("libcuda.so.1", RTLD_LOCAL), "cuLaunchKernel");
    for (int call = 0; call < 200; call++)
        if (!launch || launch(&folder, 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL)) return 1;
    return !&passed || passed != 200;
}

#ifdef OWN_DLSYM
/* The program's own, which everything in the process is bound to. */
void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return real(handle, name);
}
#endif

int main(int count, char **arguments) {
    if (count < 3) return 2;
    folder = arguments[2];
    int is(const char *name) { return strcmp(arguments[1], name) == 0; }
    int bad = 2;
    if (is("closes")) bad = closes();
    if (is("global")) bad = closes_global();
    if (is("asks")) bad = asks_and_closes();
    if (is("shim")) bad = passes_shim();
    if (!bad) {
        usleep(300000);
        puts("ok");
        fflush(stdout);
    }
    return bad;
}
