// Sorts numbers that are spread over the ranks, again and again: samples are gathered, splitters
// broadcast, parts exchanged, sums compared.
//
//     sort MISTAKE RANK [ROUNDS]
//
// RANK makes MISTAKE in round 30: other_root, other_type, swapped (two collectives in the other
// order), extra_recv, any_recv, other_tag, polls (tests a receive again and again), extra_barrier,
// other_group (a barrier of half of the ranks where all meet), dup_alone (makes another
// communicator), never_waits (its sum is one that it never waits for), skips_round (from there on
// it is a round ahead, and at the end one is missing); or none.
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUMBERS = 512, SAMPLES = 4, MISTAKE_ROUND = 30 };

static int rank, size;
static const char *mistake = "none";

static int makes(const char *name)
{
    return strcmp(mistake, name) == 0;
}

static int ascending(const void *one, const void *other)
{
    int a = *(const int *)one, b = *(const int *)other;
    return (a > b) - (a < b);
}

static void choose_splitters(const int *numbers, int *splitters)
{
    int samples[SAMPLES], *all = malloc(sizeof(int) * SAMPLES * size);
    for (int i = 0; i < SAMPLES; i++)
        samples[i] = numbers[i * NUMBERS / SAMPLES];
    MPI_Gather(samples, SAMPLES, MPI_INT, all, SAMPLES, MPI_INT, makes("other_root") ? rank : 0, MPI_COMM_WORLD);
    qsort(all, SAMPLES * (rank == 0 ? size : 0), sizeof(int), ascending);
    for (int i = 0; rank == 0 && i < size - 1; i++)
        splitters[i] = all[(i + 1) * SAMPLES];
    free(all);
    if (makes("other_type"))
        MPI_Bcast(splitters, size - 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    else
        MPI_Bcast(splitters, size - 1, MPI_INT, 0, MPI_COMM_WORLD);
}

static void exchange(const int *numbers, const int *splitters, int *mine)
{
    int *counts = calloc(4 * size, sizeof(int)), *from = counts + size, *to = from + size, *expected = to + size;
    for (int i = 0, part = 0; i < NUMBERS; i++) {
        while (part < size - 1 && numbers[i] >= splitters[part])
            part++;
        counts[part]++;
    }
    MPI_Alltoall(counts, 1, MPI_INT, expected, 1, MPI_INT, MPI_COMM_WORLD);
    for (int i = 1; i < size; i++) {
        from[i] = from[i - 1] + counts[i - 1];
        to[i] = to[i - 1] + expected[i - 1];
    }
    MPI_Alltoallv(numbers, counts, from, MPI_INT, mine, expected, to, MPI_INT, MPI_COMM_WORLD);
    free(counts);
}

static void receive(int source, int tag)
{
    int number;
    MPI_Recv(&number, 1, MPI_INT, source, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

// Every rank tells its right neighbour its largest number.
static void compare_borders(const int *mine)
{
    int right = (rank + 1) % size, left = (rank + size - 1) % size, largest = mine[0], other;
    MPI_Request request;
    MPI_Isend(&largest, 1, MPI_INT, right, makes("other_tag") ? 8 : 7, MPI_COMM_WORLD, &request);
    MPI_Recv(&other, 1, MPI_INT, left, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (makes("extra_recv"))
        receive(left, 9);
    if (makes("any_recv"))
        receive(MPI_ANY_SOURCE, 9);
    if (makes("polls")) {
        int number, there = 0;
        MPI_Irecv(&number, 1, MPI_INT, right, 11, MPI_COMM_WORLD, &request);
        while (!there) {
            MPI_Test(&request, &there, MPI_STATUS_IGNORE);
            usleep(500);
        }
    }
}

static void sum_up(const int *mine, MPI_Comm half)
{
    long sum = mine[0], all, largest;
    MPI_Comm copy;
    MPI_Request request;
    if (makes("extra_barrier"))
        MPI_Barrier(MPI_COMM_WORLD);
    if (makes("other_group"))
        MPI_Barrier(half);
    if (makes("dup_alone"))
        MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    if (makes("swapped")) {
        MPI_Scan(&sum, &largest, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD);
        MPI_Allreduce(&sum, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    } else {
        if (makes("never_waits"))
            MPI_Iallreduce(&sum, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, &request);
        else
            MPI_Allreduce(&sum, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        MPI_Scan(&sum, &largest, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int rounds = argc > 3 ? atoi(argv[3]) : 1 << 30, here = argc > 2 && atoi(argv[2]) == rank;
    MPI_Comm half;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    int *numbers = malloc(sizeof(int) * NUMBERS), *mine = calloc(NUMBERS * size, sizeof(int)), splitters[64] = {0};
    srand(rank + 1);
    for (int round = 0; round < rounds; round++) {
        mistake = here && round == MISTAKE_ROUND ? argv[1] : "none";
        if (makes("skips_round"))
            continue;
        for (int i = 0; i < NUMBERS; i++)
            numbers[i] = rand() % 100000;
        qsort(numbers, NUMBERS, sizeof(int), ascending);
        choose_splitters(numbers, splitters);
        exchange(numbers, splitters, mine);
        compare_borders(mine);
        sum_up(mine, half);
        usleep(10000);
    }
    MPI_Finalize();
    return 0;
}
