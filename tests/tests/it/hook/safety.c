/* Programs that end, fork, cancel threads and ask the linker in ways of their own, with a driver
   and a collective library that do nothing. usage: safety CASE FOLDER; the test and the program
   tell each other by files in that folder how far they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static const char *folder;
static void *comm;

#define MUST(condition)                                                                                                          \
    do {                                                                                                                         \
        if (!(condition)) {                                                                                                      \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                                              \
            abort();                                                                                                             \
        }                                                                                                                        \
    } while (0)

static const char *path(const char *name) {
    static char text[4096];
    snprintf(text, sizeof text, "%s/%s", folder, name);
    return text;
}

static void say(const char *name) { close(open(path(name), O_CREAT | O_WRONLY, 0600)); }

static void await(const char *name) {
    while (access(path(name), F_OK) != 0) usleep(1000);
}

static void reduce(int times) {
    for (int index = 0; index < times; index++) ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100);
}

static void init(void) {
    Id id = {{0}};
    MUST(ncclCommInitRank(&comm, 4, id, 0) == 0);
}

static void begin(void) {
    init();
    reduce(1);
    say("begun");
    await("go");
}

static void late(void) {
    say("late");
    await("leave");
}

static void steady(void) {
    while (access(path("enough"), F_OK) != 0) {
        reduce(1);
        usleep(5000);
    }
}

/* A clone that no library sees. */
static pid_t clone_by_instruction(void) {
    long child;
    register long child_id __asm__("r10") = 0, storage __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(child)
                     : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(child_id), "r"(storage)
                     : "rcx", "r11", "memory");
    return child;
}

/* A child that no fork handler hears of, which calls what it must not call. */
static void bare_fork(pid_t child, int leaves_by_exit) {
    MUST(child >= 0);
    if (child == 0) {
        for (int index = 0; index < 100; index++) cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        reduce(50);
        if (leaves_by_exit) exit(0);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
}

/* Of a library that is opened late. */
__attribute__((weak)) int cublasSgemm_v2(void);

static void *opens_blas(void *unused) {
    MUST(dlopen(path("libcublas.so.12"), RTLD_NOW | RTLD_GLOBAL) != NULL);
    return unused;
}

/* Its constructor waits, so the linker's lock is held for as long. */
static void forks_while_a_library_is_opened(void) {
    pthread_t opener;
    MUST(pthread_create(&opener, NULL, opens_blas, NULL) == 0);
    await("in constructor");
    pid_t child = clone_by_instruction();
    MUST(child >= 0);
    if (child == 0) {
        alarm(20);
        _exit(cublasSgemm_v2() != 7);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    say("forked");
    MUST(pthread_join(opener, NULL) == 0);
}

static void *cancels_itself(void *unused) {
    pthread_cancel(pthread_self());
    init();
    reduce(1);
    pthread_testcancel();
    return unused;
}

static void *reduces_until_cancelled(void *running) {
    for (;;) {
        reduce(1);
        __atomic_store_n((int *)running, 1, __ATOMIC_RELAXED);
        pthread_testcancel();
    }
}

static void cancelled(void) {
    pthread_t thread;
    void *result;
    MUST(pthread_create(&thread, NULL, cancels_itself, NULL) == 0);
    MUST(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    for (int round = 0; round < 100; round++) {
        int running = 0;
        MUST(pthread_create(&thread, NULL, reduces_until_cancelled, &running) == 0);
        while (!__atomic_load_n(&running, __ATOMIC_RELAXED)) usleep(100);
        MUST(pthread_cancel(thread) == 0);
        MUST(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
}

static void linker_errors(void) {
    dlerror();
    errno = 77;
    init();
    MUST(dlerror() == NULL && errno == 77);
    reduce(1);
    cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    MUST(dlerror() == NULL && errno == 77);
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    MUST(library != NULL && dlerror() == NULL);
    const char *names[] = {"ncclAllReduce", "ncclCommInitRank"};
    for (int index = 0; index < 2; index++) {
        MUST(dlsym(library, names[index]) != NULL && dlerror() == NULL);
        MUST(dlsym(RTLD_DEFAULT, names[index]) != NULL && dlerror() == NULL);
        MUST(dlsym(RTLD_NEXT, names[index]) != NULL && dlerror() == NULL);
    }
    MUST(dlsym(library, "ncclCommSplit") == NULL && dlerror() != NULL);
    MUST(dlsym(RTLD_DEFAULT, "cudaLaunchKernel") == NULL && dlerror() != NULL);
    MUST(dlopen("no such library", RTLD_NOW) == NULL && dlerror() != NULL);
}

/* A device that accepts any address, and then a pipe that does not. */
static void writes_nowhere(void) {
    int null = open("/dev/null", O_WRONLY), ends[2], saved = dup(STDERR_FILENO);
    dup2(null, STDERR_FILENO);
    errno = EDOM;
    long accepted = write(STDERR_FILENO, (void *)8, 4096);
    int kept = errno;
    MUST(pipe(ends) == 0);
    dup2(ends[1], STDERR_FILENO);
    long refused = write(STDERR_FILENO, (void *)8, 4096);
    int wrong = errno;
    dup2(saved, STDERR_FILENO);
    MUST(accepted == 4096 && kept == EDOM && refused == -1 && wrong == EFAULT);
}

static atomic_int calls_of_hook;

/* Replaces that of the C library, which crashes while another thread moves the environment. */
char *getenv(const char *name) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "xpu_timer_hook")) calls_of_hook++;
    const size_t length = strlen(name);
    for (char **entry = environ; *entry != NULL; entry++) {
        if (strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') return *entry + length + 1;
    }
    return NULL;
}

/* Moves the environment all the time, and gives its old memory back to the system. */
static void *moves_environment(void *unused) {
    const size_t bytes = 1 << 20;
    for (char *old = NULL;; usleep(300)) {
        char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(block != MAP_FAILED);
        char **array = (char **)block, *text = block + bytes / 2;
        for (char **entry = environ; *entry != NULL; entry++) {
            MUST(text + strlen(*entry) < block + bytes && (char *)(array + 1) < block + bytes / 2);
            *array++ = strcpy(text, *entry);
            text += strlen(text) + 1;
        }
        environ = (char **)block;
        if (old != NULL) munmap(old, bytes);
        old = block;
    }
    return unused;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    const char *what = arguments[1];
    folder = arguments[2];
#define IS(name) (strcmp(what, name) == 0)
    if (IS("late")) atexit(late);
    if (IS("linker errors")) linker_errors();
    if (IS("cancelled")) cancelled();
    pthread_t thread;
    if (IS("environment")) MUST(pthread_create(&thread, NULL, moves_environment, NULL) == 0);
    begin();
    if (IS("environment")) {
        usleep(1500000);
        MUST(calls_of_hook == 0);
    }
    if (IS("steady")) steady();
    if (IS("bursts")) {
        for (int burst = 0; burst < 20; burst++) {
            reduce(2000);
            usleep(20000);
        }
    }
    if (IS("bare fork")) {
        bare_fork(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), 0);
        bare_fork(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0), 1);
        bare_fork(syscall(SYS_fork), 1);
        bare_fork(clone_by_instruction(), 0);
        say("forked");
        await("leave");
    }
    if (IS("fork in a constructor")) forks_while_a_library_is_opened();
    if (IS("writes nowhere")) writes_nowhere();
    reduce(3);
    if (IS("_exit")) _exit(0);
    if (IS("_exit 3")) _exit(3);
    if (IS("quick_exit")) quick_exit(0);
    if (IS("quick_exit 3")) quick_exit(3);
    return 0;
}
