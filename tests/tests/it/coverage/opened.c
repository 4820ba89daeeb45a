/* Calls through a library that is opened with MODE. */
#include "layer.h"
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
