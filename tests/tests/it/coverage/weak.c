/* Who refers weakly to functions asks whether its library has them. LIBRARY is who asks; it is both linked to the program and opened by
   it. HAS is a library that has one of them. */
#include <dlfcn.h>
#include <stdio.h>

#ifdef HAS
int MPI_Bcast(void) { return 0; }
#elif defined LIBRARY
int ncclCommGrow(void) __attribute__((weak));
int MPI_Isendrecv(void) __attribute__((weak));
int MPI_Bcast(void) __attribute__((weak));
static int (*const in_data)(void) = MPI_Isendrecv;
int LIBRARY(void) { return (ncclCommGrow != 0) + 2 * (MPI_Isendrecv != 0) + 4 * (MPI_Bcast != 0) + 8 * (*(int (*volatile const *)(void))&in_data != 0); }
#else
int linked(void);
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    int (*opened)(void) = library ? (int (*)(void))dlsym(library, "opened") : NULL;
    printf("%d %d\n", linked(), opened ? opened() : -1);
    return 0;
}
#endif
