/* What strange programs do around their device calls; the first argument says which. Each prints
   "ok" when all went as it would without the hook. work.h stands in front of this. */
#include <errno.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

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

static int closing(void) {
    work(10);
    usleep(100000);
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
    if (bad == 2 && ncclCommInitRank(&comm, 4, id, 0)) return 3;
    if (is("fork")) bad = forks();
    if (is("vfork")) bad = vforks();
    if (is("signals")) bad = signals();
    if (is("threads")) bad = threads(10000, 0);
    if (is("cancelled")) bad = cancelled();
    if (is("closing")) bad = closing();
    if (!bad) {
        puts("ok");
        fflush(stdout);
        /* The watcher sees the last ones end. */
        usleep(300000);
    }
    return bad;
}
