// A ring of MPI ranks that hand blocks on by requests which are made once and started in every
// turn; the sum of all is checked now and then.
//
//     ring MISTAKE RANK [TURNS]
//
// RANK makes MISTAKE in turn 25: no_start (of its send), no_start_recv, no_wait (starts its sum and
// never waits for it); or none.
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 32768, MISTAKE_TURN = 25, CHECKED_EVERY = 5 };

static int makes(const char *mistake, const char *name)
{
    return strcmp(mistake, name) == 0;
}

static void check_sum(const double *block, const char *mistake)
{
    double sum = block[0], all;
    MPI_Request request;
    if (makes(mistake, "no_wait")) {
        MPI_Iallreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &request);
        for (;;)
            pause();
    }
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *wanted = argc > 2 && atoi(argv[2]) == rank ? argv[1] : "none";
    int turns = argc > 3 ? atoi(argv[3]) : 1 << 30;
    double *mine = calloc(BLOCK, sizeof *mine), *next = calloc(BLOCK, sizeof *next);
    MPI_Request requests[2];
    MPI_Recv_init(next, BLOCK, MPI_DOUBLE, (rank + size - 1) % size, 3, MPI_COMM_WORLD, &requests[0]);
    MPI_Send_init(mine, BLOCK, MPI_DOUBLE, (rank + 1) % size, 3, MPI_COMM_WORLD, &requests[1]);
    for (int turn = 0; turn < turns; turn++) {
        const char *mistake = turn == MISTAKE_TURN ? wanted : "none";
        if (!makes(mistake, "no_start_recv"))
            MPI_Start(&requests[0]);
        if (!makes(mistake, "no_start"))
            MPI_Start(&requests[1]);
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
        memcpy(mine, next, BLOCK * sizeof *mine);
        if (turn % CHECKED_EVERY == 0)
            check_sum(mine, mistake);
        usleep(10000);
    }
    MPI_Request_free(&requests[0]);
    MPI_Request_free(&requests[1]);
    MPI_Finalize();
    return 0;
}
