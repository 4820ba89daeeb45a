/* Opens a library that only its own RUNPATH finds. */
#include "layer.h"
P inner(void) { return dlopen("libinner.so", RTLD_NOW); }
