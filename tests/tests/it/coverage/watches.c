/* Watches the linker as a debugger does: by a breakpoint on the function that it calls at every change of its list. */
#define _GNU_SOURCE
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
