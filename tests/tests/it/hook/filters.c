/* Trains on a device that does nothing, shuts itself in by a filter of system calls, and goes on.
   usage: filters HOW kill|kill-thread|errno|trap FOLDER
   HOW: prctl|seccomp|tsync|handle|locks|strict|inline|inline-tsync|early|refused|exec|executed
   A call that is not in the list ends the program (kill) or its
   thread (kill-thread), raises SIGSYS (trap), or fails and is counted by nobody (errno). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);
extern char ompi_mpi_comm_world[], ompi_mpi_int[];
int MPI_Irecv(void *, int, void *, int, int, void *, void **);
int MPI_Test(void **, int *, void *);

/* Whether the linker, with its lock, has entered a slow function of libnccl.so.2 for another
   thread. */
static volatile int *is_resolving;

static void *comm;
static void *request;

static void train(int times) {
    for (int index = 0; index < times; index++) {
        if (cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0) abort();
        if (ncclAllReduce(comm, comm, 8, 7, 0, comm, (void *)0x100) != 0) abort();
    }
}

/* Asks for a message that never comes. Between two polls the program sleeps, so the hook has to
   learn what the thread did meanwhile. */
static void poll_mpi(void) {
    int flag = 1;
    if (MPI_Test(&request, &flag, NULL) != 0 || flag) abort();
}

/* Waits for a file, and trains slowly meanwhile, if asked to. */
static void await(const char *folder, const char *name, int trains) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    while (access(path, F_OK) != 0) {
        if (trains) train(1);
        usleep(trains ? 50 * 1000 : 1000);
    }
}

/* A byte of a file that another process writes; after the filter the program cannot open anything.
   */
static volatile char *file_of(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, 1) != 0) abort();
    volatile char *byte = mmap(NULL, 1, PROT_READ, MAP_SHARED, file, 0);
    if (byte == MAP_FAILED) abort();
    return byte;
}

static long bare(long number, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
}

#define ALLOW(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
/* On other threads than this program's own, only what a thread that sleeps cannot do without. */
#define ALLOW_IF(number, allowed) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, allowed)

static void shut_in(const char *how, unsigned action) {
    int may_sleep = strcmp(how, "inline-tsync") == 0 && action != SECCOMP_RET_KILL_THREAD;
    unsigned sleeps = may_sleep ? SECCOMP_RET_ALLOW : action;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_write), ALLOW(SYS_exit_group), ALLOW(SYS_exit), ALLOW(SYS_clock_nanosleep), ALLOW(SYS_nanosleep),
        ALLOW(SYS_brk), ALLOW(SYS_mmap), ALLOW(SYS_munmap), ALLOW(SYS_rt_sigreturn), ALLOW_IF(SYS_futex, sleeps),
        BPF_STMT(BPF_RET | BPF_K, action),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    long result = -1;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) abort();
    /* The hook's watcher has just taken the linker's lock. */
    while (strcmp(how, "locks") == 0 && !*is_resolving) usleep(1000);
    errno = 77;
    int by_prctl = strcmp(how, "prctl") == 0 || strcmp(how, "early") == 0 || strcmp(how, "locks") == 0;
    if (by_prctl) result = prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    if (strcmp(how, "handle") == 0) {
        /* As programs in Python do. */
        int (*found)(int, ...) = dlsym(dlopen("libc.so.6", RTLD_NOW), "prctl");
        errno = 77;
        result = found(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    }
    if (strcmp(how, "strict") == 0) result = prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    /* libseccomp asks for the flags that the kernel knows, and then installs. */
    if (strcmp(how, "seccomp") == 0 || strcmp(how, "tsync") == 0) {
        unsigned flags = strcmp(how, "tsync") == 0 ? SECCOMP_FILTER_FLAG_TSYNC : 0;
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, NULL) != -1 || errno != EFAULT) abort();
        errno = 77;
        result = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
    }
    if (strcmp(how, "inline") == 0) result = bare(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, (long)&program, 0, 0);
    if (strcmp(how, "inline-tsync") == 0)
        result = bare(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, (long)&program, 0, 0);
    if (strcmp(how, "refused") == 0) {
        /* A flag that no kernel knows: there is no filter after all. */
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 1UL << 30 | SECCOMP_FILTER_FLAG_TSYNC, &program) != -1) abort();
        if (errno != EINVAL) abort();
        result = 0;
        errno = 77;
    }
    if (result != 0 || errno != 77) abort();
}

/* Forbids what the linker and a program that trains have no need of, and executes this program
   again. With debug assertions, Rust's standard library asks by fcntl whether a file that it closes
   is open. */
static void execute(char **arguments, unsigned action) {
    static const int forbidden[] = {
        SYS_prctl, SYS_socket, SYS_connect, SYS_sendmsg, SYS_recvmsg, SYS_memfd_create, SYS_eventfd2, SYS_poll, SYS_ppoll,
        SYS_sched_yield, SYS_gettid, SYS_getpid, SYS_ftruncate, SYS_fallocate, SYS_clone, SYS_clone3, SYS_madvise,
    };
    struct sock_filter filter[2 * sizeof forbidden / sizeof *forbidden + 2];
    int length = 0;
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned index = 0; index < sizeof forbidden / sizeof *forbidden; index++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[index], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    }
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {length, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) abort();
    arguments[1] = "executed";
    execv(arguments[0], arguments);
    abort();
}

static pthread_t first;

/* Names the call that the filter trapped, for whoever reads the failure of a test. */
static void trapped(int signal, siginfo_t *info, void *unused) {
    (void)signal, (void)unused;
    char text[] = "trapped: system call 0000 of the first thread\n";
    for (int digit = 3, left = info->si_syscall; digit >= 0; digit--, left /= 10) text[21 + digit] = '0' + left % 10;
    if (!pthread_equal(pthread_self(), first)) memcpy(text + 33, "other", 5);
    if (write(2, text, sizeof text - 1) < 0) _exit(9);
    _exit(10);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    first = pthread_self();
    struct sigaction action_of_trap = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSYS, &action_of_trap, NULL) != 0) abort();
    unsigned action = SECCOMP_RET_ERRNO | EPERM;
    if (strcmp(arguments[2], "kill") == 0) action = SECCOMP_RET_KILL_PROCESS;
    if (strcmp(arguments[2], "kill-thread") == 0) action = SECCOMP_RET_KILL_THREAD;
    if (strcmp(arguments[2], "trap") == 0) action = SECCOMP_RET_TRAP;
    if (strcmp(arguments[1], "locks") == 0 && !(is_resolving = dlsym(RTLD_DEFAULT, "is_resolving"))) abort();
    Id id = {{0}};
    if (strcmp(arguments[1], "exec") == 0) execute(arguments, action);
    int is_executed = strcmp(arguments[1], "executed") == 0;
    volatile char *seen = is_executed ? NULL : file_of(arguments[3], "seen");
    int early = strcmp(arguments[1], "early") == 0;
    if (early) shut_in(arguments[1], action);
    if (ncclCommInitRank(&comm, 4, id, 0) != 0) abort();
    train(10);
    int buffer = 0;
    if (MPI_Irecv(&buffer, 1, ompi_mpi_int, 1, 5, ompi_mpi_comm_world, &request) != 0) abort();
    int bare_instruction = strncmp(arguments[1], "inline", 6) == 0;
    if (!early && !is_executed) {
        await(arguments[3], "go", bare_instruction);
        shut_in(arguments[1], action);
    }
    /* The program's own sleep is allowed. */
    struct timespec pause = {0, 10 * 1000 * 1000};
    /* Nobody sees a bare instruction before the collector has looked. Until then the program does
       what a job does in its steady state: a burst would wake the watcher, by a call. So would many
       operations after the filter has ended the watcher, so they are few: on a busy machine the
       collector may look late. */
    while (bare_instruction && *seen == 0) {
        train(1);
        for (int rest = 0; rest < 5; rest++) clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
    /* More than the ring holds, and longer than the collector takes to look. */
    for (int round = 0; round < 300; round++) {
        train(100);
        poll_mpi();
        /* Nor may it sleep in the strict mode. */
        int is_strict = strcmp(arguments[1], "strict") == 0;
        for (volatile int index = 0; is_strict && index < 3000000;) index++;
        if (!is_strict) clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
    static const char done[] = "went on\n";
    int status = write(1, done, sizeof done - 1) == sizeof done - 1 ? 7 : 8;
    if (strcmp(arguments[1], "strict") == 0) bare(SYS_exit, status, 0, 0, 0, 0);
    return status;
}
