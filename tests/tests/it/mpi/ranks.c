// Four ranks on the public MPI interface: rounds of every kind of call with checked results, then one fault.
//
//     ranks FAULT [RANK]
//
// The fault happens on RANK (2 when it is not given); `none` ends in order.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, size;

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "rank %d: line %d: %s\n", rank, __LINE__, #what), abort()))

static __attribute__((noinline)) void stay_away(void) {
    for (;;) pause();
}

static void collectives(MPI_Comm comm, int me, int members) {
    int one = me + 1, sum = 0, all[8], back[8], counts[8], offsets[8];
    double value = me == 0 ? 2.5 : 0;
    const int total = members * (members + 1) / 2;
    for (int i = 0; i < members; i++) counts[i] = 1, offsets[i] = i;
    MPI_Barrier(comm);
    MPI_Bcast(&value, 1, MPI_DOUBLE, 0, comm);
    CHECK(value == 2.5);
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == total);
    sum = one;
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == total);
    MPI_Reduce(&one, &sum, 1, MPI_INT, MPI_SUM, 1, comm);
    CHECK(me != 1 || sum == total);
    MPI_Allgather(&one, 1, MPI_INT, all, 1, MPI_INT, comm);
    for (int i = 0; i < members; i++) CHECK(all[i] == i + 1);
    MPI_Allgatherv(&one, 1, MPI_INT, back, counts, offsets, MPI_INT, comm);
    for (int i = 0; i < members; i++) CHECK(back[i] == i + 1);
    MPI_Gather(&one, 1, MPI_INT, back, 1, MPI_INT, 0, comm);
    MPI_Gatherv(&one, 1, MPI_INT, back, counts, offsets, MPI_INT, 0, comm);
    MPI_Scatter(all, 1, MPI_INT, &sum, 1, MPI_INT, 0, comm);
    CHECK(sum == one);
    MPI_Scatterv(all, counts, offsets, MPI_INT, &sum, 1, MPI_INT, 0, comm);
    CHECK(sum == one);
    MPI_Alltoall(all, 1, MPI_INT, back, 1, MPI_INT, comm);
    for (int i = 0; i < members; i++) CHECK(back[i] == one);
    MPI_Alltoallv(all, counts, offsets, MPI_INT, back, counts, offsets, MPI_INT, comm);
    MPI_Datatype types[8];
    int places[8];
    for (int i = 0; i < members; i++) types[i] = MPI_INT, places[i] = i * (int)sizeof(int);
    MPI_Alltoallw(all, counts, places, types, back, counts, places, types, comm);
    for (int i = 0; i < members; i++) CHECK(back[i] == one);
    MPI_Reduce_scatter(all, &sum, counts, MPI_INT, MPI_SUM, comm);
    CHECK(sum == members * one);
    MPI_Reduce_scatter_block(all, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == members * one);
    MPI_Scan(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == one * (one + 1) / 2);
    MPI_Exscan(&one, &sum, 1, MPI_INT, MPI_SUM, comm);

    MPI_Request requests[4];
    MPI_Status statuses[4];
    MPI_Iallreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm, &requests[0]);
    MPI_Ibcast(&value, 1, MPI_DOUBLE, 0, comm, &requests[1]);
    MPI_Ibarrier(comm, &requests[2]);
    MPI_Iallgather(&one, 1, MPI_INT, all, 1, MPI_INT, comm, &requests[3]);
    MPI_Waitall(4, requests, statuses);
    CHECK(sum == total && requests[0] == MPI_REQUEST_NULL);
}

static void transfers(MPI_Comm comm, int me, int members) {
    int right = (me + 1) % members, left = (me + members - 1) % members, in = -1, out = me, flag = 0;
    MPI_Status status;
    MPI_Sendrecv(&out, 1, MPI_INT, right, 7, &in, 1, MPI_INT, left, 7, comm, &status);
    CHECK(in == left && status.MPI_SOURCE == left);
    MPI_Sendrecv_replace(&out, 1, MPI_INT, right, 7, left, 7, comm, MPI_STATUS_IGNORE);
    CHECK(out == left);
    out = me;
    if (me % 2 == 0) {
        MPI_Ssend(&out, 1, MPI_INT, right, 1, comm);
        MPI_Recv(&in, 1, MPI_INT, MPI_ANY_SOURCE, 1, comm, MPI_STATUS_IGNORE);
    } else {
        MPI_Probe(left, 1, comm, &status);
        MPI_Recv(&in, 1, MPI_INT, left, 1, comm, MPI_STATUS_IGNORE);
        MPI_Send(&out, 1, MPI_INT, right, 1, comm);
    }
    CHECK(in == left);
    MPI_Recv(&in, 1, MPI_INT, MPI_PROC_NULL, 1, comm, MPI_STATUS_IGNORE);
    CHECK(in == left);

    MPI_Request requests[2];
    MPI_Status statuses[2];
    int index, finished, indices[2];
    MPI_Irecv(&in, 1, MPI_INT, left, 2, comm, &requests[0]);
    MPI_Isend(&out, 1, MPI_INT, right, 2, comm, &requests[1]);
    MPI_Waitany(2, requests, &index, MPI_STATUS_IGNORE);
    while (!flag) MPI_Testall(2, requests, &flag, statuses);
    CHECK(in == left);
    MPI_Irecv(&in, 1, MPI_INT, left, 3, comm, &requests[0]);
    MPI_Isend(&out, 1, MPI_INT, right, 3, comm, &requests[1]);
    for (int done = 0; done < 2; done += finished)
        MPI_Waitsome(2, requests, &finished, indices, statuses);
    MPI_Recv_init(&in, 1, MPI_INT, left, 4, comm, &requests[0]);
    MPI_Send_init(&out, 1, MPI_INT, right, 4, comm, &requests[1]);
    for (int round = 0; round < 3; round++) {
        MPI_Startall(2, requests);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
    }
    MPI_Request_free(&requests[0]);
    MPI_Request_free(&requests[1]);
}

static void communicators(void) {
    MPI_Comm copy, half, pair, ring, line;
    MPI_Group world, two;
    const int dims[1] = {size}, periodic[1] = {1}, keep[1] = {1}, members[2] = {0, 1};
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    MPI_Comm_split(copy, rank % 2, rank, &half);
    MPI_Cart_create(MPI_COMM_WORLD, 1, dims, periodic, 0, &ring);
    MPI_Cart_sub(ring, keep, &line);
    MPI_Barrier(line);
    collectives(half, rank / 2, size / 2);
    transfers(ring, rank, size);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, 2, members, &two);
    if (rank < 2) {
        MPI_Comm_create_group(MPI_COMM_WORLD, two, 0, &pair);
        collectives(pair, rank, 2);
        MPI_Comm_free(&pair);
    }
    MPI_Comm_create(MPI_COMM_WORLD, two, &pair);
    CHECK((pair == MPI_COMM_NULL) == (rank >= 2));
    if (pair != MPI_COMM_NULL) MPI_Comm_free(&pair);
    MPI_Barrier(MPI_COMM_SELF);
    MPI_Group_free(&two);
    MPI_Group_free(&world);
    MPI_Comm_free(&line);
    MPI_Comm_free(&ring);
    MPI_Comm_free(&half);
    MPI_Comm_free(&copy);
}

int main(int count, char **arguments) {
    const char *fault = count > 1 ? arguments[1] : "none";
    const int culprit = count > 2 ? atoi(arguments[2]) : 2;
    const char *name = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
#define FAULT(text) (strcmp(fault, text) == 0)
    if (FAULT("init") && name && atoi(name) == culprit) stay_away();
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int round = 0; round < 20; round++) {
        collectives(MPI_COMM_WORLD, rank, size);
        transfers(MPI_COMM_WORLD, rank, size);
        communicators();
    }
    const int guilty = rank == culprit, other = (culprit + 3) % 4;
    int value = rank, sum = 0;
    MPI_Request request;
    MPI_Comm half, copy;
    if (FAULT("allreduce") && guilty) stay_away();
    if (FAULT("allreduce")) MPI_Allreduce(&value, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (FAULT("barrier") && guilty) stay_away();
    if (FAULT("bcast") && guilty) stay_away();
    if (FAULT("bcast")) MPI_Bcast(&value, 1, MPI_INT, culprit, MPI_COMM_WORLD);
    if (FAULT("recv") && guilty) stay_away();
    if (FAULT("recv")) {
        // A chain: one waits for the culprit, and the others for that one.
        MPI_Recv(&value, 1, MPI_INT, rank == other ? culprit : other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (FAULT("send") && guilty) stay_away();
    if (FAULT("send") && rank == other) MPI_Ssend(&value, 1, MPI_INT, culprit, 0, MPI_COMM_WORLD);
    if (FAULT("wait") && guilty) stay_away();
    if (FAULT("wait") && rank == other) {
        MPI_Irecv(&value, 1, MPI_INT, culprit, 0, MPI_COMM_WORLD, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    if (FAULT("iallreduce") && guilty) stay_away();
    if (FAULT("iallreduce")) {
        MPI_Iallreduce(&value, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    if (FAULT("half")) {
        // The other half has nothing to wait for until the barrier.
        MPI_Comm_dup(MPI_COMM_WORLD, &copy);
        MPI_Comm_split(copy, rank % 2, -rank, &half);
        if (guilty) stay_away();
        MPI_Allreduce(&value, &sum, 1, MPI_INT, MPI_SUM, half);
    }
    if (FAULT("split") && guilty) stay_away();
    if (FAULT("split")) MPI_Comm_split(MPI_COMM_WORLD, 0, 0, &half);
    if (FAULT("cycle")) {
        MPI_Ssend(&value, 1, MPI_INT, (rank + 1) % size, 0, MPI_COMM_WORLD);
        MPI_Recv(&value, 1, MPI_INT, (rank + 3) % size, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (FAULT("forgotten")) {
        // A receive that nobody waits for is no hang, however long it stays.
        MPI_Irecv(&value, 1, MPI_INT, other, 99, MPI_COMM_WORLD, &request);
        for (int second = 0; second < 12; second++) sleep(1), MPI_Barrier(MPI_COMM_WORLD);
        MPI_Cancel(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    if (FAULT("fence")) {
        // One-sided communication is not hooked: nothing is pending, and only stacks and idleness tell.
        MPI_Win window;
        MPI_Win_create(&value, sizeof value, sizeof value, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        if (guilty) stay_away();
        MPI_Win_fence(0, window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (FAULT("finalize") && guilty) stay_away();
    MPI_Finalize();
    printf("rank %d done\n", rank);
    return 0;
}
