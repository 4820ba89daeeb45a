/* Its first thread trains and ends before the process does.
 * usage: last_thread exit|raw. `exit`: by pthread_exit, while another thread trains. `raw`: by the bare system call, with status 5. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static void *comm;

static void *train(void *unused) {
    for (int index = 0; index < 300; index++) {
        if (cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0) abort();
        if (ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100) != 0) abort();
        usleep(1000);
    }
    return unused;
}

static void say(void) {
    if (write(1, "ended\n", 6) != 6) abort();
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    Id id = {{0}};
    if (ncclCommInitRank(&comm, 4, id, 0) != 0) abort();
    atexit(say);
    train(NULL);
    if (strcmp(arguments[1], "raw") == 0) syscall(SYS_exit, 5);
    pthread_t thread;
    if (pthread_create(&thread, NULL, train, NULL) != 0) abort();
    pthread_exit(NULL);
}
