/* What strange programs do with processes, stacks and tables around their device calls; the first
   argument says which. Each prints "ok" when all went as it would without the hook. work.h stands
   in front of this. */
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>
#include <spawn.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096

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
    if (is("coroutines")) bad = switches();
    if (is("exec")) bad = again();
    if (bad == 2 && ncclCommInitRank(&comm, 4, id, 0)) return 3;
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
