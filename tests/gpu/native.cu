// A CUDA program without ranks and without Python, and ways in which its device hangs it.
//
//     nvcc -o native native.cu [-cudart shared]; native MODE
//
// Modes: `healthy` ends by itself and prints what it computed; the others wait for a kernel that does
// not end: in `sync` (the device), `stream`, `event`, `copy` (back to the host), `free`, `queue` (until
// the launch queue is full), `graph` (the kernel is a node of a graph), `query` (it polls), or for a
// host function (`host`).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

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
