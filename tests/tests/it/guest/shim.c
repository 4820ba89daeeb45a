/* Another tool that is preloaded and wraps what dlsym gives out. It asks the C library past every library between. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

typedef int Launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

int passed;
static Launch *next;

static int launch(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned shared,
                  void *stream, void **parameters, void **extra) {
    passed++;
    return next(function, a, b, c, d, e, f, shared, stream, parameters, extra);
}

void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = real(handle, name);
    if (!found || strcmp(name, "cuLaunchKernel") != 0) return found;
    next = (Launch *)found;
    return (void *)launch;
}
