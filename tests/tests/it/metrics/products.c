/* Matrix products and copies on the simulated device, until it is killed. */
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

int cudaMalloc(void **, size_t);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamSynchronize(void *);
int cublasCreate_v2(void **);
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);

int main(void) {
    enum { SIZE = 48 };
    static float host[SIZE * SIZE];
    void *handle, *a, *b, *c;
    float one = 1, zero = 0;
    int code = cublasCreate_v2(&handle) | cudaMalloc(&a, sizeof host) | cudaMalloc(&b, sizeof host) | cudaMalloc(&c, sizeof host);
    for (int step = 0; code == 0; step++) {
        code |= cudaMemcpyAsync(a, host, sizeof host, 1, NULL);
        code |= cublasSgemm_v2(handle, 0, 1, SIZE, SIZE, SIZE, &one, a, SIZE, b, SIZE, &zero, c, SIZE);
        code |= cudaMemcpyAsync(host, c, sizeof host, 2, NULL) | cudaStreamSynchronize(NULL);
        if (step == 20) puts("step 20"), fflush(stdout);
        usleep(2000);
    }
    printf("failed with %d\n", code);
    return 1;
}
