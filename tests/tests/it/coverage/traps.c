/* The programs and libraries of `traps.rs`. -D with the name of a part selects it. */
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
#endif
