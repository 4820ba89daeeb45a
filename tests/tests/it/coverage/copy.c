#include "layer.h"
#include "copy.h"
#include "through.h"
int main(int argc, char **argv) {
    ready();
    calls(through);
    finish(argv);
}
