/* What strange programs do around their device calls, and with processes, stacks and tables; the
   first argument says which. Each prints "ok" when all went as it would without the hook. The
   device calls are those of a driver and a collective library that do nothing. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);

static void *comm;
static Id id = {{1}};
static volatile sig_atomic_t stop;

/* Four kernels and a collective, so many times. */
static void work(int times) {
    for (int time = 0; time < times; time++) {
        for (int kernel = 0; kernel < 4; kernel++)
            if (cuLaunchKernel((void *)(uintptr_t)(0x500000 + 64 * kernel), 1, 1, 1, 1, 1, 1, 0, (void *)0x100, NULL, NULL)) abort();
        if (ncclAllReduce(&id, &id, 8, 7, 0, comm, (void *)0x100)) abort();
    }
}

static void *work_once(void *times) {
    work((int)(intptr_t)times);
    return NULL;
}

static void *work_on(void *unused) {
    while (!stop) work(10);
    return unused;
}

static int limited(int resource, rlim_t value) {
    struct rlimit limit = {value, value};
    return setrlimit(resource, &limit);
}

/* Bytes of address space that are in use. */
static rlim_t mapped(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    if (!file || fscanf(file, "%lu", &pages) != 1) return 0;
    fclose(file);
    return (rlim_t)pages * sysconf(_SC_PAGESIZE);
}

static void on_alarm(int number) {
    int saved = errno;
    work(1);
    errno = saved;
}

/* Forks while three other threads launch; the children launch as well. */
static int forks(void) {
    pthread_t threads[3];
    int bad = 0;
    for (int number = 0; number < 3; number++) pthread_create(&threads[number], NULL, work_on, NULL);
    for (int number = 0; number < 60; number++) {
        pid_t child = fork();
        if (child == 0) {
            work(5);
            if (number % 2) _exit(0);
            exit(0);
        }
        int status = -1;
        bad |= waitpid(child, &status, 0) != child || status != 0;
    }
    stop = 1;
    for (int number = 0; number < 3; number++) pthread_join(threads[number], NULL);
    return bad;
}

/* A child that shares the parent's memory until it becomes another program. */
static int vforks(void) {
    for (int number = 0; number < 50; number++) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(9);
        }
        int status = -1;
        if (waitpid(child, &status, 0) != child || status != 0) return 1;
        work(1);
    }
    return 0;
}

static int signals(void) {
    signal(SIGALRM, on_alarm);
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    for (int round = 0; round < 200; round++) {
        errno = 77;
        work(100);
        if (errno != 77) return 1;
    }
    return setitimer(ITIMER_REAL, &never, NULL);
}

static int threads(int number, size_t stack) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (stack) pthread_attr_setstacksize(&attributes, stack);
    for (int thread = 0; thread < number; thread++) {
        pthread_t other;
        if (pthread_create(&other, &attributes, work_once, (void *)1) || pthread_join(other, NULL)) return 1;
    }
    return 0;
}

static int cancelled(void) {
    for (int number = 0; number < 100; number++) {
        pthread_t thread;
        stop = 0;
        if (pthread_create(&thread, NULL, work_on, NULL)) return 1;
        usleep(100);
        pthread_cancel(thread);
        stop = 1;
        pthread_join(thread, NULL);
    }
    return 0;
}

static int communicators(int number) {
    for (int made = 0; made < number; made++) {
        memcpy(id.internal, &made, sizeof made);
        /* The library's handle is an address; so many different ones it does not have. */
        if (ncclCommInitRank(&comm, 4, id, 0)) return 1;
        comm = (char *)0x10000 + 64 * made;
        work(1);
    }
    return 0;
}

/* From now on the kernel answers so to what the hook would like to have. */
static int filtered(unsigned answer) {
    int unwanted[] = {SYS_memfd_create, SYS_socket, SYS_fallocate, SYS_clone3, SYS_tgkill};
    struct sock_filter filter[16] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    int length = 1, count = sizeof unwanted / sizeof *unwanted;
    for (int index = 0; index < count; index++)
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unwanted[index], count - index, 0);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    struct sock_fprog program = {length, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static int within(const char *folder) {
    if (chdir(folder) || chroot(folder)) return 1;
    work(100);
    usleep(200000);
    return 0;
}

static int closing(const char *delivered) {
    work(10);
    while (access(delivered, F_OK)) usleep(1000);
    if (syscall(SYS_close_range, 3u, ~0u, 0)) return 1;
    for (int round = 0; round < 30; round++) {
        /* The numbers are the program's own again. */
        int own = dup(1);
        work(10);
        usleep(10000);
        if (own != 3 || close(own)) return 1;
    }
    return 0;
}

/* Memory with a page in front of it that nobody may touch. */
static char *guarded(size_t bytes) {
    char *memory = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + PAGE, bytes, PROT_READ | PROT_WRITE)) abort();
    return memory + PAGE;
}

static ucontext_t main_stack, coroutines[2];
static int alive;

static void coroutine(int number) {
    for (int turn = 0; turn < 50; turn++) {
        work(2);
        swapcontext(&coroutines[number], &main_stack);
    }
    alive--;
}

/* Two stacks of 16 KiB that take turns on one thread; the first device call is made on one of them.
   */
static int switches(void) {
    for (int number = 0; number < 2; number++) {
        getcontext(&coroutines[number]);
        coroutines[number].uc_stack.ss_sp = guarded(16384);
        coroutines[number].uc_stack.ss_size = 16384;
        coroutines[number].uc_link = &main_stack;
        makecontext(&coroutines[number], (void (*)(void))coroutine, 1, number);
        alive++;
    }
    for (int turn = 0; turn < 51; turn++)
        for (int number = 0; number < 2; number++) swapcontext(&main_stack, &coroutines[number]);
    return alive;
}

static volatile sig_atomic_t handled;

static void on_signal(int number) {
    work(1);
    handled++;
}

/* Handlers that launch, on a stack of 4 KiB beside what the kernel itself needs of it. */
static int small_signal_stack(void) {
    size_t bytes = (getauxval(AT_MINSIGSTKSZ) + 4096 + PAGE - 1) / PAGE * PAGE;
    stack_t stack = {.ss_sp = guarded(bytes), .ss_size = bytes};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&stack, NULL) || sigaction(SIGUSR1, &action, NULL)) return 1;
    for (int round = 0; round < 1000; round++)
        if (raise(SIGUSR1)) return 1;
    return handled != 1000;
}

extern char **environ;

/* Children by posix_spawn, while three other threads launch. */
static int spawns(void) {
    pthread_t threads[3];
    int bad = 0;
    char *words[] = {"true", NULL};
    for (int number = 0; number < 3; number++) pthread_create(&threads[number], NULL, work_on, NULL);
    for (int number = 0; number < 60; number++) {
        pid_t child;
        int status = -1;
        bad |= posix_spawn(&child, "/bin/true", NULL, NULL, words, environ) != 0;
        bad |= waitpid(child, &status, 0) != child || status != 0;
        work(1);
    }
    stop = 1;
    for (int number = 0; number < 3; number++) pthread_join(threads[number], NULL);
    return bad;
}

static int in_clone(void *unused) {
    work(20);
    _exit(0);
}

/* Another process with the same memory, the same thread-local memory included, that launches. */
static int shares_memory(void) {
    for (int number = 0; number < 20; number++) {
        pid_t child = clone(in_clone, guarded(65536) + 65536, CLONE_VM | SIGCHLD, NULL);
        int status = -1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return 1;
        work(1);
    }
    return 0;
}

/* A daemon: two forks, a session of its own, no descriptor that it does not know; it launches
   before and after. */
static int daemonises(void) {
    volatile int *done = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    work(10);
    pid_t child = fork();
    if (child == 0) {
        if (setsid() < 0) _exit(1);
        work(10);
        if (fork() != 0) _exit(0);
        for (int fd = 0; fd < 1024; fd++) close(fd);
        int first = open("/dev/null", O_RDWR);
        for (int round = 0; round < 20; round++) {
            work(10);
            usleep(5000);
        }
        /* What it opens next has the number that it expects. */
        *done = first == 0 && dup(0) == 1 && dup(0) == 2 ? 1 : 2;
        _exit(0);
    }
    int status = -1;
    if (waitpid(child, &status, 0) != child || status != 0) return 1;
    for (int turn = 0; turn < 3000 && *done == 0; turn++) usleep(10000);
    work(10);
    return *done != 1;
}

/* Children that end in an orderly way, after device calls of the parent. */
static int children_end(void) {
    for (int number = 0; number < 20; number++) {
        work(20);
        pid_t child = fork();
        if (child == 0) exit(0);
        int status = -1;
        if (waitpid(child, &status, 0) != child || status != 0) return 1;
        usleep(3000);
    }
    return 0;
}

/* The same program again in this process. */
static int again(void) {
    work(10);
    execl("/proc/self/exe", "again", "spawn", NULL);
    return 1;
}

static int (*behind)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int passed;

static int between(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    passed++;
    return behind(function, a, b, c, d, e, f, shared, stream, parameters, extra);
}

/* Another tool that puts itself into the program's table of addresses, in front of whatever is
   there. */
static int patched(void) {
    work(1);
    ElfW(Addr) strings = 0, symbols = 0, relocations = 0, bytes = 0;
    for (ElfW(Dyn) *entry = _r_debug.r_map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = entry->d_un.d_ptr;
        if (entry->d_tag == DT_JMPREL) relocations = entry->d_un.d_ptr;
        if (entry->d_tag == DT_PLTRELSZ) bytes = entry->d_un.d_val;
    }
    for (ElfW(Rela) *entry = (void *)relocations; (ElfW(Addr))entry < relocations + bytes; entry++) {
        ElfW(Sym) *symbol = (ElfW(Sym) *)symbols + ELF64_R_SYM(entry->r_info);
        if (strcmp((char *)strings + symbol->st_name, "cuLaunchKernel") != 0) continue;
        void **place = (void *)(_r_debug.r_map->l_addr + entry->r_offset);
        if (mprotect((void *)((uintptr_t)place / PAGE * PAGE), PAGE, PROT_READ | PROT_WRITE)) return 1;
        behind = *place;
        *place = between;
    }
    work(50);
    return passed != 200;
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    int is(const char *name) { return strcmp(arguments[1], name) == 0; }
    int bad = 2;
    if (is("file size")) bad = limited(RLIMIT_FSIZE, 4096) || (work(100), 0);
    if (is("address space")) bad = limited(RLIMIT_AS, mapped() + ((rlim_t)atoi(arguments[2]) << 20)) || (work(100), 0);
    if (is("locked memory")) bad = limited(RLIMIT_MEMLOCK, 65536) || (mlockall(MCL_FUTURE), work(100), 0);
    /* A container's filter is there before its programs are. */
    if (is("container")) bad = filtered(SECCOMP_RET_ERRNO | EPERM) || execl("/proc/self/exe", "guest", "sandboxed", NULL);
    if (is("sandboxed")) bad = (work(100), 0);
    if (is("shut in")) bad = filtered(SECCOMP_RET_KILL_PROCESS) || (work(100), 0);
    if (is("chroot")) bad = within(arguments[2]);
    if (is("small stack")) bad = threads(3, PTHREAD_STACK_MIN);
    if (is("communicators")) bad = communicators(1500);
    if (is("coroutines")) bad = switches();
    if (is("exec")) bad = again();
    if (bad == 2 && ncclCommInitRank(&comm, 4, id, 0)) return 3;
    if (is("fork")) bad = forks();
    if (is("vfork")) bad = vforks();
    if (is("signals")) bad = signals();
    if (is("threads")) bad = threads(10000, 0);
    if (is("cancelled")) bad = cancelled();
    if (is("closing")) bad = closing(arguments[2]);
    if (is("signal stack")) bad = (work(1), small_signal_stack());
    if (is("spawn")) bad = spawns();
    if (is("shared memory")) bad = shares_memory();
    if (is("daemon")) bad = daemonises();
    if (is("children end")) bad = children_end();
    if (is("table")) bad = patched();
    if (!bad) {
        puts("ok");
        fflush(stdout);
        /* The watcher sees the last ones end. */
        usleep(300000);
    }
    return bad;
}
