/* A library that needs another one, which is opened by OPEN: both are this file. */
#define _GNU_SOURCE
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
