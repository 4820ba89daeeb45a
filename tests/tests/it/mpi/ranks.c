// Four ranks on the public MPI interface: rounds of every kind of call with checked results, then
// one fault.
//
//     ranks FAULT [RANK]
//
// The fault happens on RANK (2 when it is not given); `none` ends in order. `sessions` has rounds
// of its own.
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
    // Messages that are found before they are received, and requests that are asked for in every
    // way.
    MPI_Message message;
    MPI_Isend(&out, 1, MPI_INT, right, 9, comm, &requests[1]);
    MPI_Mprobe(left, 9, comm, &message, &status);
    in = -1;
    MPI_Mrecv(&in, 1, MPI_INT, &message, MPI_STATUS_IGNORE);
    CHECK(in == left && status.MPI_SOURCE == left);
    for (flag = 0; !flag;) MPI_Testany(1, &requests[1], &index, &flag, MPI_STATUS_IGNORE);
    MPI_Isend(&out, 1, MPI_INT, right, 10, comm, &requests[1]);
    for (flag = 0; !flag;) MPI_Improbe(left, 10, comm, &flag, &message, MPI_STATUS_IGNORE);
    in = -1;
    MPI_Imrecv(&in, 1, MPI_INT, &message, &requests[0]);
    for (int done = 0; done < 2; done += finished)
        MPI_Testsome(2, requests, &finished, indices, statuses);
    CHECK(in == left);
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

#if MPI_VERSION < 4
#include <mpi-ext.h>
#define MPI_Allreduce_init MPIX_Allreduce_init
#define MPI_Barrier_init MPIX_Barrier_init
#endif

// A collective that is prepared once, neighbours on a ring, and messages and collectives between
// two halves.
static void rarer(void) {
    const int dims[1] = {size}, periodic[1] = {1};
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    int one = 1, sum = 0, in = -1, around[2] = {-1, -1};
    MPI_Request requests[2];
    MPI_Allreduce_init(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[0]);
    MPI_Barrier_init(MPI_COMM_WORLD, MPI_INFO_NULL, &requests[1]);
    for (int again = 0; again < 3; again++) {
        sum = 0;
        MPI_Start(&requests[0]);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        CHECK(sum == size);
        MPI_Startall(1, &requests[1]);
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
    }
    MPI_Request_free(&requests[0]);
    MPI_Request_free(&requests[1]);

    // Two that are made at once, and are done in the other order.
    MPI_Comm copies[2];
    for (int copy = 0; copy < 2; copy++) MPI_Comm_idup(MPI_COMM_WORLD, &copies[copy], &requests[copy]);
    MPI_Wait(&requests[rank % 2], MPI_STATUS_IGNORE);
    MPI_Wait(&requests[1 - rank % 2], MPI_STATUS_IGNORE);
    for (int copy = 0; copy < 2; copy++) {
        MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, copies[copy]);
        CHECK(sum == size);
        MPI_Comm_free(&copies[copy]);
    }

    MPI_Comm ring, half, between;
    MPI_Cart_create(MPI_COMM_WORLD, 1, dims, periodic, 0, &ring);
    MPI_Neighbor_allgather(&rank, 1, MPI_INT, around, 1, MPI_INT, ring);
    CHECK(around[0] == left && around[1] == right);
    MPI_Comm_free(&ring);

    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &between);
    // Each half sends to the member of the other one that has the same number.
    MPI_Sendrecv(&rank, 1, MPI_INT, rank / 2, 6, &in, 1, MPI_INT, rank / 2, 6, between, MPI_STATUS_IGNORE);
    CHECK(in == (rank ^ 1));
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, between);
    CHECK(sum == (rank % 2 ? 2 : 4));
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
}

#if MPI_VERSION >= 4
// Messages in two parts each, along a ring.
static void partitioned(void) {
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    int out[2] = {rank, -rank}, in[2] = {-1, -1}, flag = 0;
    MPI_Request requests[2];
    MPI_Psend_init(out, 2, 1, MPI_INT, right, 8, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[0]);
    MPI_Precv_init(in, 2, 1, MPI_INT, left, 8, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[1]);
    for (int again = 0; again < 2; again++) {
        MPI_Startall(2, requests);
        for (int part = 0; part < 2; part++) MPI_Pready(part, requests[0]);
        while (!flag) MPI_Parrived(requests[1], 1, &flag);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
        CHECK(in[0] == left && in[1] == -left);
    }
    MPI_Request_free(&requests[0]);
    MPI_Request_free(&requests[1]);
}
#endif

// One-sided communication in its three ways. Debian's MPICH 4.0.2 on UCX puts to wrong addresses,
// also without the hook.
static __attribute__((unused)) void windows(void) {
    const int right = (rank + 1) % size, left = (rank + size - 1) % size;
    int own = -1, *memory = &own;
    MPI_Win window;
    MPI_Group world, from, to;
    MPI_Win_create(memory, sizeof *memory, sizeof *memory, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_fence(0, window);
    MPI_Put(&rank, 1, MPI_INT, right, 0, 1, MPI_INT, window);
    MPI_Win_fence(0, window);
    CHECK(*memory == left);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, left, 0, window);
    MPI_Put(&rank, 1, MPI_INT, left, 0, 1, MPI_INT, window);
    MPI_Win_flush(left, window);
    MPI_Win_unlock(left, window);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
    CHECK(*memory == right);
    MPI_Win_unlock(rank, window);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_incl(world, 1, &left, &from);
    MPI_Group_incl(world, 1, &right, &to);
    MPI_Win_post(from, 0, window);
    MPI_Win_start(to, 0, window);
    MPI_Put(&rank, 1, MPI_INT, right, 0, 1, MPI_INT, window);
    MPI_Win_complete(window);
    MPI_Win_wait(window);
    CHECK(*memory == left);
    MPI_Group_free(&from);
    MPI_Group_free(&to);
    MPI_Group_free(&world);
    MPI_Win_free(&window);
}

// A file that all ranks write, and each a part of it.
static void files(const char *path) {
    MPI_File file;
    int back = -1;
    CHECK(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file) == MPI_SUCCESS);
    MPI_File_set_view(file, (MPI_Offset)(rank * sizeof rank), MPI_INT, MPI_INT, "native", MPI_INFO_NULL);
    MPI_File_write_at_all(file, 0, &rank, 1, MPI_INT, MPI_STATUS_IGNORE);
    MPI_File_sync(file);
    MPI_File_read_at_all(file, 0, &back, 1, MPI_INT, MPI_STATUS_IGNORE);
    CHECK(back == rank);
    MPI_File_close(&file);
}

#if MPI_VERSION >= 4
// MPI without MPI_Init: sessions, and communicators of all ranks and of pairs. Rank 2 stays away in
// the end.
static int sessions(void) {
    MPI_Session session;
    MPI_Group group, two;
    MPI_Comm all, pair;
    int one = 1, sum = 0;
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
    if (rank == 2) stay_away();
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, all);
    return 0;
}
#endif

int main(int count, char **arguments) {
    const char *fault = count > 1 ? arguments[1] : "none";
    const int culprit = count > 2 ? atoi(arguments[2]) : 2;
    const char *name = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
#define FAULT(text) (strcmp(fault, text) == 0)
    if (FAULT("init") && name && atoi(name) == culprit) stay_away();
#if MPI_VERSION >= 4
    if (FAULT("sessions")) return sessions();
#endif
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int round = 0; round < 20; round++) {
        collectives(MPI_COMM_WORLD, rank, size);
        transfers(MPI_COMM_WORLD, rank, size);
        communicators();
        if (round % 5 != 0) continue;
        rarer();
#if MPI_VERSION >= 4
        partitioned();
#endif
#ifdef OPEN_MPI
        windows();
#endif
        files(getenv("XPU_TEST_FILE"));
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
    if (FAULT("waitsome") || FAULT("testany") || FAULT("testsome")) {
        // One of two is enough, and none comes.
        MPI_Request both[2];
        MPI_Status statuses[2];
        int values[2], flag = 0, index, finished = 0, indices[2];
        if (guilty) stay_away();
        for (int i = 0; i < 2; i++) MPI_Irecv(&values[i], 1, MPI_INT, culprit, i, MPI_COMM_WORLD, &both[i]);
        if (FAULT("waitsome")) MPI_Waitsome(2, both, &finished, indices, statuses);
        while (FAULT("testany") && !flag) MPI_Testany(2, both, &index, &flag, MPI_STATUS_IGNORE);
        while (FAULT("testsome") && !finished) MPI_Testsome(2, both, &finished, indices, statuses);
    }
    if (FAULT("mprobe") && guilty) stay_away();
    if (FAULT("mprobe") && rank == other) {
        MPI_Message message;
        MPI_Mprobe(culprit, 0, MPI_COMM_WORLD, &message, MPI_STATUS_IGNORE);
        MPI_Mrecv(&value, 1, MPI_INT, &message, MPI_STATUS_IGNORE);
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
    if (FAULT("fence") || FAULT("lock") || FAULT("expose")) {
        MPI_Win window;
        MPI_Group world, to;
        MPI_Win_create(&value, sizeof value, sizeof value, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        MPI_Comm_group(MPI_COMM_WORLD, &world);
        MPI_Group_incl(world, 1, &culprit, &to);
        if (FAULT("lock") && guilty) MPI_Win_lock(MPI_LOCK_EXCLUSIVE, other, 0, window);
        if (FAULT("lock") && guilty) MPI_Win_flush(other, window);
        if (FAULT("lock")) MPI_Barrier(MPI_COMM_WORLD);
        if (guilty) stay_away();
        if (FAULT("lock")) MPI_Win_lock(MPI_LOCK_EXCLUSIVE, other, 0, window), MPI_Win_flush(other, window);
        if (FAULT("fence")) MPI_Win_fence(0, window);
        // Waits for the culprit to expose its part of the window.
        if (FAULT("expose")) MPI_Win_start(to, 0, window), MPI_Win_complete(window);
    }
    if (FAULT("write")) {
        MPI_File file;
        MPI_File_open(MPI_COMM_WORLD, getenv("XPU_TEST_FILE"), MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
        if (guilty) stay_away();
        MPI_File_set_size(file, 4096);
    }
    if (FAULT("between")) {
        MPI_Comm between;
        MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
        MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &between);
        if (guilty) stay_away();
        // Rank 3 waits for a message of rank 2, which is member 1 of the other half.
        if (rank == 3) MPI_Recv(&value, 1, MPI_INT, 1, 6, between, MPI_STATUS_IGNORE);
    }
    if (FAULT("idup")) {
        if (guilty) stay_away();
        MPI_Comm_idup(MPI_COMM_WORLD, &copy, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    if (FAULT("test") || FAULT("probe")) {
        // Waiting by asking: at once, with a pause, or for a message.
        int flag = 0;
        if (guilty) stay_away();
        if (FAULT("test")) MPI_Irecv(&value, 1, MPI_INT, culprit, 0, MPI_COMM_WORLD, &request);
        while (!flag) {
            if (FAULT("probe")) MPI_Iprobe(culprit, 0, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
            else MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
            if (rank == other) usleep(20000);
        }
    }
#if MPI_VERSION >= 4
    if (FAULT("part") && guilty) stay_away();
    if (FAULT("part") && rank == other) {
        int flag = 0;
        MPI_Precv_init(&value, 1, 1, MPI_INT, culprit, 0, MPI_COMM_WORLD, MPI_INFO_NULL, &request);
        MPI_Start(&request);
        while (!flag) MPI_Parrived(request, 0, &flag);
    }
#endif
    if (FAULT("tag")) {
        if (guilty) MPI_Ssend(&value, 1, MPI_INT, other, 7, MPI_COMM_WORLD);
        if (rank == other) MPI_Recv(&value, 1, MPI_INT, culprit, 8, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (FAULT("any")) {
        if (guilty) stay_away();
        if (rank == other) MPI_Recv(&value, 1, MPI_INT, MPI_ANY_SOURCE, 8, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    if (FAULT("prepared")) {
        MPI_Barrier_init(MPI_COMM_WORLD, MPI_INFO_NULL, &request);
        for (int again = 0; again < 5; again++) {
            if (again == 4 && guilty) stay_away();
            MPI_Start(&request);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
        }
    }
    if (FAULT("asking")) {
        // Asks now and then whether to stop while it works, and is never told to: no hang.
        int flag = 0;
        MPI_Irecv(&value, 1, MPI_INT, other, 99, MPI_COMM_WORLD, &request);
        for (double end = MPI_Wtime() + 8; MPI_Wtime() < end && !flag;) {
            for (volatile int work = 0; work < 1000000;) work++;
            MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
        }
        for (double end = MPI_Wtime() + 0.5; MPI_Wtime() < end;) MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
        // And a long piece of work after it has asked for a while.
        sleep(8);
        MPI_Cancel(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (FAULT("finalize") && guilty) stay_away();
    MPI_Finalize();
    printf("rank %d done\n", rank);
    return 0;
}
