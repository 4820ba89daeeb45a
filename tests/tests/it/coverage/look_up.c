/* The address from dlsym, or from dlvsym by VERSION in a library that has versions; PLACE says where it looks. */
#include "layer.h"
#ifdef VERSION
#define LIBRARY argv[2]
#define LOOK_UP(place, name) dlvsym(place, name, VERSION)
#else
#define LIBRARY SONAME
#define LOOK_UP(place, name) dlsym(place, name)
#endif
int main(int argc, char **argv) {
    P library = dlopen(LIBRARY, RTLD_NOW | RTLD_GLOBAL), other = dlopen("libm.so.6", RTLD_NOW), target;
    ready();
    says(dlopen("/nowhere/library.so", RTLD_NOW), "/nowhere/library.so");
    says(LOOK_UP(PLACE, "no_such_function"), "no_such_function");
    says(LOOK_UP(other, TEXT(TARGET)), TEXT(TARGET));
    dlopen("/nowhere/library.so", RTLD_NOW);
    target = LOOK_UP(PLACE, TEXT(TARGET));
    says(target, TEXT(TARGET));
    calls(target);
    finish(argv);
}
