/* Calls a function of the driver, of the collective library or of MPI from several threads at once:
 * under its own name, which the hook sees, and under its other name, which the hook does not see.
 *
 * A round of a thread counts if the thread was not switched out in it (getrusage) and if as many
 * other threads as the machine has processors for were calling at the same time, because only then
 * can threads disturb each other. Where the system permits it, the program runs at a real-time
 * priority, so that the figures hold on a busy machine.
 *
 * A virtual machine does not see that another one uses the other half of a core. A control loop,
 * which calls nothing and keeps a whole core busy, detects this because it takes longer. If it took
 * SHARED times its shortest time before or after a round, the round was on a shared core.
 *
 * The program ends when WANTED rounds on full cores have counted, or after SECONDS. It prints
 * `total HOOKED_CALLS ROUNDS`, which includes the rounds that did not count, and a line for each
 * round that counted: nanoseconds a call, bare and hooked, and `full` or `shared`.
 *
 * `test` and `probe` poll MPI for a message that does not arrive. `record` times the bare event
 * record. `memory` launches and reduces, and prints the resident bytes at the end.
 *
 * usage: hook_calls launch|collective|test|probe|record|memory THREADS WANTED CALLS SECONDS */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int bare_cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int bare_cuEventRecord(void *, void *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int bare_ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommInitRank(void **, int, Id, int);
extern char ompi_mpi_comm_world[], ompi_mpi_int[];
int MPI_Irecv(void *, int, void *, int, int, void *, void **);
int MPI_Test(void **, int *, void *);
int bare_MPI_Test(void **, int *, void *);
int MPI_Iprobe(int, int, void *, int *, void *);
int bare_MPI_Iprobe(int, int, void *, int *, void *);

enum { WARM_UP = 32 };
static const double GATE_NS = 3e6;
static const double OVERLAP = 0.8;
static const double SHARED = 1.2;

typedef struct { double from, to; int switched; } Phase;
typedef struct { double bare, hooked, control; } Row;
typedef struct {
    int number;
    Phase hooked;
    double control;
    char apart[128];
} Thread;

static const char *what;
static int threads, together, wanted, calls;
static double deadline;
static Thread *work;
static pthread_barrier_t line;
static atomic_int arrived, counted, ended;
/* The control loop's shortest time of all threads, in picoseconds. */
static atomic_long shortest = LONG_MAX;
/* As many as fit; what comes after is not printed. */
enum { MOST_ROWS = 1 << 16 };
static Row rows[MOST_ROWS];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static long switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

/* Spins until its companions run too, for some milliseconds at most. */
static void gate(void) {
    int target = (atomic_fetch_add(&arrived, 1) / together + 1) * together;
    for (double from = now(); atomic_load(&arrived) < target && now() - from < GATE_NS;) {}
}

/* Nanoseconds of a loop that keeps a whole core busy with several independent chains. */
static double control(void) {
    unsigned long a = 1, b = 2, c = 3, d = 4, e = 5, f = 6;
    double from = now();
    for (int index = 0; index < 20000; index++)
        __asm__ volatile("add %0, %0; lea 3(%1), %1; xor $5, %2; add $7, %3; lea 9(%4), %4; sub $2, %5"
                         : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    double took = now() - from;
    for (long now = took * 1e3, before = atomic_load(&shortest); now < before;)
        if (atomic_compare_exchange_weak(&shortest, &before, now)) break;
    return took;
}

static int is_at_full_speed(const Row *row) { return row->control * 1e3 < SHARED * atomic_load(&shortest); }

static const Row *end_of_rows(void) { return rows + (counted < MOST_ROWS ? counted : MOST_ROWS); }

/* A shorter time of the control loop may come late, so all rows are judged again. */
static int enough(void) {
    int full = 0;
    for (const Row *row = rows; row < end_of_rows(); row++) full += is_at_full_speed(row);
    return full >= wanted;
}

static int is(const char *name) { return strcmp(what, name) == 0; }

#define PHASE(call)                                                                                                              \
    ({                                                                                                                           \
        long before = switches();                                                                                                \
        double from = now();                                                                                                     \
        for (int index = 0; index < calls; index++) call;                                                                        \
        double to = now();                                                                                                       \
        (Phase){from, to, switches() != before};                                                                                 \
    })
#define ROUND(bare_call, hooked_call)                                                                                            \
    do {                                                                                                                         \
        double control_before = control();                                                                                       \
        alone = PHASE(bare_call);                                                                                                \
        long before = switches();                                                                                                \
        for (int index = 0; index < WARM_UP; index++) hooked_call;                                                               \
        gate();                                                                                                                  \
        thread->hooked = PHASE(hooked_call);                                                                                     \
        /* A thread that was switched out returns to cold caches. */                                                             \
        thread->hooked.switched = switches() != before;                                                                          \
        double control_after = control();                                                                                        \
        thread->control = control_after > control_before ? control_after : control_before;                                       \
    } while (0)

/* Whether enough others were calling during nearly all of a thread's phase. */
static int was_together(const Thread *thread) {
    int companions = 0;
    for (const Thread *other = work; other < work + threads; other++) {
        double from = other->hooked.from > thread->hooked.from ? other->hooked.from : thread->hooked.from;
        double to = other->hooked.to < thread->hooked.to ? other->hooked.to : thread->hooked.to;
        int overlap = to - from >= OVERLAP * (thread->hooked.to - thread->hooked.from);
        companions += other != thread && !other->hooked.switched && overlap;
    }
    return companions >= together - 1;
}

static void *run(void *argument) {
    Thread *thread = argument;
    void *stream = (void *)(uintptr_t)(0x10000 + 0x100 * thread->number);
    /* A model launches a few dozen different kernels, in the same order each step. */
    void *kernels[32];
    for (int index = 0; index < 32; index++) kernels[index] = (void *)(uintptr_t)(0x500000 + 0x40 * index);
    void *comm = NULL;
    Id id = {{0}};
    id.internal[0] = (char)thread->number;
    if (is("collective") || is("memory")) ncclCommInitRank(&comm, 4, id, 0);
    void *request = NULL;
    int flag = 0;
    if (is("test")) MPI_Irecv(&flag, 1, ompi_mpi_int, 1, thread->number, ompi_mpi_comm_world, &request);
    if (is("memory")) {
        for (int round = 0; round < wanted; round++) {
            for (int index = 0; index < calls; index++) {
                cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
                ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream);
            }
            usleep(10000);
        }
        return NULL;
    }
    for (int round = 0;; round++) {
        Phase alone;
        if (pthread_barrier_wait(&line) == PTHREAD_BARRIER_SERIAL_THREAD) atomic_store(&arrived, 0);
        pthread_barrier_wait(&line);
        if (is("launch"))
            ROUND(bare_cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL),
                  cuLaunchKernel(kernels[index & 31], 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
        else if (is("test"))
            ROUND(bare_MPI_Test(&request, &flag, NULL), MPI_Test(&request, &flag, NULL));
        else if (is("probe"))
            ROUND(bare_MPI_Iprobe(1, 5, ompi_mpi_comm_world, &flag, NULL), MPI_Iprobe(1, 5, ompi_mpi_comm_world, &flag, NULL));
        else if (is("record"))
            ROUND((void)0, bare_cuEventRecord(stream, stream));
        else
            ROUND(bare_ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream),
                  ncclAllReduce(stream, stream, 1024, 7, 0, comm, stream));
        pthread_barrier_wait(&line);
        /* The first rounds initialize things. */
        int good = round >= 3 && !alone.switched && !thread->hooked.switched && was_together(thread);
        int place = good ? atomic_fetch_add(&counted, 1) : MOST_ROWS;
        if (place < MOST_ROWS)
            rows[place] = (Row){(alone.to - alone.from) / calls, (thread->hooked.to - thread->hooked.from) / calls, thread->control};
        /* The watcher needs a moment to empty the ring, because a full ring would make the calls
         * cheap. The pause also spreads the rounds, so that a short disturbance of the core, such
         * as another virtual machine, affects few of them. */
        usleep(30000);
        if (pthread_barrier_wait(&line) == PTHREAD_BARRIER_SERIAL_THREAD)
            atomic_store(&ended, enough() || now() > deadline ? round + 1 : 0);
        pthread_barrier_wait(&line);
        if (atomic_load(&ended)) return NULL;
    }
}

int main(int count, char **arguments) {
    if (count != 6) return 2;
    what = arguments[1], threads = atoi(arguments[2]), wanted = atoi(arguments[3]), calls = atoi(arguments[4]);
    cpu_set_t processors;
    if (threads < 1 || sched_getaffinity(0, sizeof processors, &processors) != 0) return 2;
    together = CPU_COUNT(&processors) < threads ? CPU_COUNT(&processors) : threads;
    deadline = now() + atof(arguments[5]) * 1e9;
    /* The threads inherit it, the hook's own as well. */
    if (!is("memory")) sched_setscheduler(0, SCHED_RR, &(struct sched_param){1});
    /* The first call starts the hook, and calls of other threads meanwhile would go past it. */
    if (is("launch")) cuLaunchKernel(&line, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    usleep(100000);
    pthread_barrier_init(&line, NULL, threads);
    pthread_t ids[threads];
    work = calloc(threads, sizeof *work);
    for (int number = 0; number < threads; number++) {
        work[number] = (Thread){.number = number};
        if (pthread_create(&ids[number], NULL, run, &work[number]) != 0) return 1;
    }
    for (int number = 0; number < threads; number++) pthread_join(ids[number], NULL);
    if (is("memory")) {
        long pages = 0, resident = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        if (!file || fscanf(file, "%ld %ld", &pages, &resident) != 2) return 1;
        printf("%ld\n", resident * sysconf(_SC_PAGESIZE));
        return 0;
    }
    printf("total %lld %d\n", (long long)ended * threads * (WARM_UP + calls) + is("launch"), (int)ended * threads);
    for (const Row *row = rows; row < end_of_rows(); row++)
        printf("%.2f %.2f %s\n", row->bare, row->hooked, is_at_full_speed(row) ? "full" : "shared");
    return 0;
}
