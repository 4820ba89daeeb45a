/* A library that calls the target; with COPY it brings its own. */
#include "layer.h"
#ifdef COPY
#include "copy.h"
#endif
#include "through.h"
