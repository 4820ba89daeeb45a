/* The address from dlsym; PLACE says where it looks. */
#include "layer.h"
int main(int argc, char **argv) {
    P library = dlopen(SONAME, RTLD_NOW | RTLD_GLOBAL);
    ready();
    calls(dlsym(PLACE, TEXT(TARGET)));
    finish(argv);
}
