// Four ranks that use MPI without MPI_Init: sessions, and communicators of all ranks and of pairs.
// Rank 2 stays away in the end.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), abort()))

int main(void) {
    MPI_Session session;
    MPI_Group group, two;
    MPI_Comm all, pair;
    int rank, size, one = 1, sum = 0;
    CHECK(MPI_Session_init(MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &session) == MPI_SUCCESS);
    CHECK(MPI_Group_from_session_pset(session, "mpi://WORLD", &group) == MPI_SUCCESS);
    CHECK(MPI_Comm_create_from_group(group, "all", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &all) == MPI_SUCCESS);
    MPI_Comm_rank(all, &rank);
    MPI_Comm_size(all, &size);
    const int first = rank / 2 * 2, members[2] = {first, first + 1};
    MPI_Group_incl(group, 2, members, &two);
    CHECK(MPI_Comm_create_from_group(two, "pair", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &pair) == MPI_SUCCESS);
    for (int round = 0; round < 5; round++) {
        MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, pair);
        CHECK(sum == 2);
        MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, all);
        CHECK(sum == size);
    }
    if (rank == 2)
        for (;;) pause();
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, all);
    return 0;
}
