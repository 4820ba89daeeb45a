/* Huawei's collective library by its public names, and Cambricon's: every call succeeds at once. */
#include <stdint.h>
typedef void *P;
static int calls;
int HcclCommInitRootInfo(uint32_t size, const void *root, uint32_t rank, P *out) { return *out = (P)0x10, 0; }
int HcclCreateSubCommConfig(P *comm, uint32_t size, uint32_t *ranks, uint64_t id, uint32_t rank, P config, P *out) {
    return *out = (P)0x20, 0;
}
int HcclAllReduce(P send, P recv, uint64_t count, int type, int op, P comm, P stream) { return calls++, 0; }
int HcclBroadcast(P buffer, uint64_t count, int type, uint32_t root, P comm, P stream) { return calls++, 0; }
int HcclGetRankSize(P comm, uint32_t *out) { return *out = 2, 0; }
int HcclGetRankId(P comm, uint32_t *out) { return *out = 1, 0; }
int HcclCommDestroy(P comm) { return 0; }
int cnclInitComms(P *comms, int count, const int *devices, const int *ranks, int size, const void *clique) {
    return *comms = (P)0x30, 0;
}
int cnclAllReduce(P send, P recv, uint64_t count, int type, int op, P comm, P queue) { return calls++, 0; }
int cnclFreeComm(P comm) { return 0; }
int called(void) { return calls; }
