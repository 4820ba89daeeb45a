#include "layer.h"
extern Target *early;
int main(int argc, char **argv) {
    ready();
    calls(early);
    finish(argv);
}
