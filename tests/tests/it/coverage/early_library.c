/* Has the address before main, and before any device call. */
#include "layer.h"
Target *early;
__attribute__((constructor)) static void before(void) { early = helper(SONAME, TEXT(TARGET)); }
