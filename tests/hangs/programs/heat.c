// A heat equation on a ring of MPI ranks: each step exchanges the borders with both neighbours and
// sums the residual; every few steps the even and the odd ranks agree among themselves, and rank 0
// collects and writes the field.
//
//     mpirun -n 4 heat FAULT RANK
//
// FAULT begins on RANK in step 12: mutex, read, spin, sleep, pause, no_residual, late_halo (sends
// to one side only), swap_groups (world before the half), probe (waits for a message that nobody
// sends); or none.
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CELLS 256
#define FAULT_STEP 12

static int rank, size;
static double cells[CELLS + 2];
static const char *fault = "none";

static int is(const char *name)
{
    return strcmp(fault, name) == 0;
}

static void diffuse(void)
{
    double next[CELLS];
    for (int i = 0; i < CELLS; i++)
        next[i] = cells[i + 1] + 0.2 * (cells[i] - 2 * cells[i + 1] + cells[i + 2]);
    memcpy(cells + 1, next, sizeof next);
}

static void exchange_borders(void)
{
    int left = (rank + size - 1) % size, right = (rank + 1) % size, count = 0;
    MPI_Request requests[4];
    MPI_Irecv(&cells[0], 1, MPI_DOUBLE, left, 1, MPI_COMM_WORLD, &requests[count++]);
    MPI_Irecv(&cells[CELLS + 1], 1, MPI_DOUBLE, right, 2, MPI_COMM_WORLD, &requests[count++]);
    MPI_Isend(&cells[CELLS], 1, MPI_DOUBLE, right, 1, MPI_COMM_WORLD, &requests[count++]);
    if (!is("late_halo"))
        MPI_Isend(&cells[1], 1, MPI_DOUBLE, left, 2, MPI_COMM_WORLD, &requests[count++]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
}

static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;

static void update_table(void)
{
    pthread_mutex_lock(&table);
    pthread_mutex_lock(&table);
}

static void read_parameters(void)
{
    int ends[2];
    char byte;
    if (pipe(ends) != 0 || read(ends[0], &byte, 1) != 1)
        abort();
}

static volatile double converged;

static void converge(void)
{
    while (converged < 1)
        converged = converged / 2;
}

static void begin_fault(void)
{
    if (is("mutex"))
        update_table();
    if (is("read"))
        read_parameters();
    if (is("spin"))
        converge();
    if (is("sleep"))
        for (;;)
            sleep(3600);
    if (is("pause"))
        kill(getpid(), SIGSTOP);
    if (is("probe"))
        MPI_Probe(MPI_ANY_SOURCE, 99, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (is("ends")) {
        MPI_Finalize();
        exit(0);
    }
}

/* Once, and not on the rank that leaves it out. */
static void divide(long step, const char *wanted_anywhere)
{
    MPI_Comm part;
    if (step == FAULT_STEP && strcmp(wanted_anywhere, "no_split") == 0 && !is("no_split"))
        MPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, &part);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm half;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    const char *wanted = argc > 2 && atoi(argv[2]) == rank ? argv[1] : "none";
    long steps = argc > 3 ? atol(argv[3]) : 1000000;
    double *field = calloc((size_t)size * CELLS, sizeof *field);
    for (long step = 0; step < steps; step++) {
        fault = step == FAULT_STEP ? wanted : "none";
        begin_fault();
        divide(step, argc > 1 ? argv[1] : "none");
        if (is("own_message"))
            MPI_Ssend(cells, 1, MPI_DOUBLE, (rank + 1) % size, 99, MPI_COMM_WORLD);
        diffuse();
        exchange_borders();
        double residual = cells[1], all, of_half;
        if (step % 4 == 0 && is("swap_groups")) {
            MPI_Allreduce(&residual, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            MPI_Allreduce(&residual, &of_half, 1, MPI_DOUBLE, MPI_SUM, half);
        } else {
            if (step % 4 == 0)
                MPI_Allreduce(&residual, &of_half, 1, MPI_DOUBLE, MPI_SUM, half);
            if (!is("no_residual"))
                MPI_Allreduce(&residual, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        }
        MPI_Gather(cells + 1, CELLS, MPI_DOUBLE, field, CELLS, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        usleep(20000);
    }
    MPI_Finalize();
    return 0;
}
