/* The address from cuGetProcAddress, with FLAGS. */
#include "layer.h"
int main(int argc, char **argv) {
    int (*get)(const char *, P *, int, unsigned long, int *) = helper(SONAME, "cuGetProcAddress_v2");
    Target *target = NULL;
    int status;
    ready();
    check(get("cuLaunchKernel", (P *)&target, 12000, FLAGS, &status), "cuGetProcAddress_v2");
    calls(target);
    finish(argv);
}
