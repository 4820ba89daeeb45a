/* Starts and ends, as bash, git and gcc do under a preloaded hook. With an argument, it prints its
 * number of threads. */
#include <dirent.h>
#include <stdio.h>

/* With -DLARGE, it has a symbol table of 24 megabytes and as many megabytes of names, and loads
 * libraries by name, like a program into which everything is linked. */
#ifdef LARGE
#include <dlfcn.h>
__asm__(".altmacro\n.macro one n\n.set a_function_of_a_large_program_\\n, 1\n.endm\n"
        ".set i, 0\n.rept 1000000\none %i\n.set i, i + 1\n.endr\n.noaltmacro");
#else
#define dlopen(name, mode) 0
#endif

int main(int count, char **arguments) {
    if (count > 9 && dlopen(arguments[1], RTLD_NOW)) return 1;
    if (count > 1) {
        int threads = -2;
        DIR *tasks = opendir("/proc/self/task");
        while (tasks && readdir(tasks)) threads++;
        printf("%d\n", threads);
    }
    return 0;
}
