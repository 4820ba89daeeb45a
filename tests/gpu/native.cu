// A CUDA program without ranks and without Python, and ways in which its device hangs it.
//
//     nvcc -o native native.cu [-cudart shared]; native MODE
//
// Modes: `healthy` ends by itself and prints what it computed; the others wait for a kernel that
// does not end: in `sync` (the device), `stream`, `event`, `copy` (back to the host), `free`,
// `queue` (until the launch queue is full), `graph` (the kernel is a node of a graph), `query` (it
// polls), or for a host function (`host`). Two measure: `clock SECONDS` prints when kernels started
// and were allowed to end, and `paced SECONDS` what a launch costs if there are 10,000 a second.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                       \
    do {                                                                                  \
        cudaError_t code = (call);                                                        \
        if (code != cudaSuccess) {                                                        \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code));                 \
            exit(3);                                                                      \
        }                                                                                 \
    } while (0)

__global__ void wait_for_flag(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void add_one(float *values, int count) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) {
        values[index] += 1;
    }
}

// Tells the host that it runs, and ends as soon as the host says so.
__global__ void until_released(volatile int *started, volatile int *released, int number) {
    *started = number;
    __threadfence_system();
    while (*released != number) {
    }
}

static void never_return(void *) { pause(); }

static const int COUNT = 1 << 16;

static void launch(float *values, cudaStream_t stream) { add_one<<<COUNT / 256, 256, 0, stream>>>(values, COUNT); }

static void healthy(float *values, float *host, cudaStream_t stream) {
    for (int step = 0; step < 1000; step++) {
        launch(values, stream);
    }
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launch(values, stream);
    launch(values, stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int step = 0; step < 100; step++) {
        CHECK(cudaGraphLaunch(executable, stream));
    }
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaMemcpyAsync(host, values, COUNT * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    printf("values %g %g\n", host[0], host[COUNT - 1]);
}

static long long now_ns(clockid_t id) {
    timespec time;
    clock_gettime(id, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Prints lines "KERNEL A B C D", in nanoseconds of the realtime clock: the kernel started between A
// and B and ended between C and D, or a little later, because the bus takes a microsecond.
static void clock_of_kernels(double seconds, cudaStream_t stream) {
    volatile int *started, *released;
    CHECK(cudaHostAlloc((void **)&started, sizeof(int), cudaHostAllocMapped));
    CHECK(cudaHostAlloc((void **)&released, sizeof(int), cudaHostAllocMapped));
    *started = *released = 0;
    long long until = now_ns(CLOCK_MONOTONIC) + (long long)(seconds * 1e9);
    for (int number = 1; now_ns(CLOCK_MONOTONIC) < until; number++) {
        long long before, seen, asked = now_ns(CLOCK_REALTIME);
        until_released<<<1, 1, 0, stream>>>(started, released, number);
        do {
            before = asked;
            asked = now_ns(CLOCK_REALTIME);
        } while (*started != number);
        seen = now_ns(CLOCK_REALTIME);
        usleep(100 + number * 37 % 900);
        long long release = now_ns(CLOCK_REALTIME);
        *released = number;
        CHECK(cudaStreamSynchronize(stream));
        printf("KERNEL %lld %lld %lld %lld\n", before, seen, release, now_ns(CLOCK_REALTIME));
        fflush(stdout);
        usleep(5000 + number * 7919 % 9000);
    }
}

// Prints the median and the mean of the time that a launch takes on the host.
static void paced(double seconds, float *values, cudaStream_t stream) {
    std::vector<long long> taken;
    long long next = now_ns(CLOCK_MONOTONIC), until = next + (long long)(seconds * 1e9), total = 0;
    while (next < until) {
        while (now_ns(CLOCK_MONOTONIC) < next) {
        }
        next += 100000;
        long long start = now_ns(CLOCK_MONOTONIC);
        launch(values, stream);
        taken.push_back(now_ns(CLOCK_MONOTONIC) - start);
        total += taken.back();
    }
    CHECK(cudaStreamSynchronize(stream));
    std::sort(taken.begin(), taken.end());
    printf("MEASURED ns_a_paced_launch %lld\n", taken[taken.size() / 2]);
    printf("MEASURED mean_ns_a_paced_launch %lld\n", total / (long long)taken.size());
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "healthy";
    float *values, *host = (float *)malloc(COUNT * sizeof(float));
    int *flag;
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaMalloc(&values, COUNT * sizeof(float)));
    CHECK(cudaMalloc(&flag, sizeof(int)));
    CHECK(cudaMemset(flag, 0, sizeof(int)));
    CHECK(cudaMemset(values, 0, COUNT * sizeof(float)));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&event));
    healthy(values, host, stream);
    if (strcmp(mode, "healthy") == 0) {
        CHECK(cudaDeviceReset());
        CHECK(cudaMalloc(&values, COUNT * sizeof(float)));
        CHECK(cudaMemset(values, 0, COUNT * sizeof(float)));
        launch(values, 0);
        CHECK(cudaMemcpy(host, values, COUNT * sizeof(float), cudaMemcpyDeviceToHost));
        printf("after a reset %g\n", host[COUNT - 1]);
        return 0;
    }
    if (strcmp(mode, "clock") == 0) {
        clock_of_kernels(atof(arguments[2]), stream);
        return 0;
    }
    if (strcmp(mode, "paced") == 0) {
        paced(atof(arguments[2]), values, stream);
        return 0;
    }
    if (strcmp(mode, "graph") == 0) {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        launch(values, stream);
        wait_for_flag<<<1, 1, 0, stream>>>(flag);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        CHECK(cudaGraphLaunch(executable, stream));
    } else if (strcmp(mode, "host") == 0) {
        CHECK(cudaLaunchHostFunc(stream, never_return, nullptr));
        launch(values, stream);
    } else {
        wait_for_flag<<<1, 1, 0, stream>>>(flag);
    }
    CHECK(cudaEventRecord(event, stream));
    if (strcmp(mode, "stream") == 0) {
        CHECK(cudaStreamSynchronize(stream));
    } else if (strcmp(mode, "event") == 0) {
        CHECK(cudaEventSynchronize(event));
    } else if (strcmp(mode, "copy") == 0) {
        CHECK(cudaMemcpyAsync(host, values, COUNT * sizeof(float), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
    } else if (strcmp(mode, "free") == 0) {
        CHECK(cudaFree(values));
    } else if (strcmp(mode, "queue") == 0) {
        for (;;) {
            launch(values, stream);
        }
    } else if (strcmp(mode, "query") == 0) {
        while (cudaStreamQuery(stream) == cudaErrorNotReady) {
            usleep(1000);
        }
    } else {
        CHECK(cudaDeviceSynchronize());
    }
    return 0;
}
