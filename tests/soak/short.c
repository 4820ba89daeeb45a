/* Starts short processes, RATE a second, each of which launches a kernel on a device that does
   nothing and ends: one half in order, the other half at once. At most AT_ONCE of them run at one
   time, so that a machine that cannot keep up is not flooded.

   Prints every second how many it has started and how many of these made their call and ended well.

   usage: short RATE AT_ONCE */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void end_after_a_launch(int in_order) {
    int code = cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    if (in_order) exit(code);
    _exit(code);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    double rate = atof(arguments[1]), begun = now(), printed = begun;
    long at_once = atol(arguments[2]), started = 0, ended = 0, well = 0;
    for (;;) {
        while (started < (now() - begun) * rate && started - ended < at_once) {
            pid_t child = fork();
            if (child < 0) break;
            if (child == 0) end_after_a_launch(started % 2);
            started++;
        }
        int status;
        while (waitpid(-1, &status, WNOHANG) > 0) {
            ended++;
            well += status == 0;
        }
        if (now() > printed + 1) {
            printed = now();
            printf("%ld %ld\n", started, well);
            fflush(stdout);
        }
        usleep(2000);
    }
}
