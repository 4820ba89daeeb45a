/* Starts and ends, as bash, git and gcc do under a preloaded hook. With an argument it prints how many threads it has. */
#include <dirent.h>
#include <stdio.h>

int main(int count, char **arguments) {
    (void)arguments;
    if (count > 1) {
        int threads = -2;
        DIR *tasks = opendir("/proc/self/task");
        while (tasks && readdir(tasks)) threads++;
        printf("%d\n", threads);
    }
    return 0;
}
