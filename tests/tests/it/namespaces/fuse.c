// A file system with one file, whose server answers everything but reads; and threads that hang in
// it. The mount lies in a namespace of this program, and the server dies with it, so nothing is
// left behind.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIZE = 1 << 20, FILE_NODE = 2 };

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void answer(int device, uint64_t unique, int error, const void *body, size_t length) {
    char packet[4096];
    struct fuse_out_header head = {.len = sizeof head + length, .error = error, .unique = unique};
    memcpy(packet, &head, sizeof head);
    if (length) memcpy(packet + sizeof head, body, length);
    if (write(device, packet, head.len) < 0) die("answer");
}

static struct fuse_attr attributes(uint64_t node) {
    struct fuse_attr attr = {.ino = node, .nlink = 1};
    attr.mode = node == FILE_NODE ? S_IFREG | 0644 : S_IFDIR | 0755;
    attr.size = node == FILE_NODE ? SIZE : 0;
    return attr;
}

static void serve(int device) {
    static char packet[FUSE_MIN_READ_BUFFER + SIZE];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        if (read(device, packet, sizeof packet) < 0) _exit(0);
        const struct fuse_in_header *head = (const void *)packet;
        switch (head->opcode) {
        case FUSE_INIT: {
            struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = 4096};
            // Reads that the kernel does not wait for itself: the threads wait for a locked page,
            // which no signal ends.
            out.flags = FUSE_ASYNC_READ;
            out.max_readahead = 1 << 17;
            answer(device, head->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_LOOKUP: {
            struct fuse_entry_out out = {.nodeid = FILE_NODE, .entry_valid = 1000, .attr_valid = 1000};
            out.attr = attributes(FILE_NODE);
            answer(device, head->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_GETATTR: {
            struct fuse_attr_out out = {.attr_valid = 1000, .attr = attributes(head->nodeid)};
            answer(device, head->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_OPEN: {
            struct fuse_open_out out = {.fh = 1};
            answer(device, head->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_READ: break; // No answer, ever.
        case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: break; // None is expected.
        // Above all FUSE_FLUSH, for which the end of a process waits.
        default: answer(device, head->unique, -ENOSYS, NULL, 0);
        }
    }
}

static char path[4096];
static pid_t tids[2];
static pthread_barrier_t known;

static int open_file(void) {
    int file = open(path, O_RDONLY);
    if (file < 0) die(path);
    return file;
}

static __attribute__((noinline)) long read_for_ever(int file) {
    char byte;
    return read(file, &byte, 1) + 1;
}

static __attribute__((noinline)) long touch_for_ever(const volatile char *page) { return page[0] + 1; }

static void *reader(void *unused) {
    int file = open_file();
    tids[0] = (pid_t)syscall(SYS_gettid);
    pthread_barrier_wait(&known);
    return (void *)read_for_ever(file) + (long)unused;
}

static void *toucher(void *unused) {
    // Far from what the other thread reads, so that it waits for a page of its own.
    char *pages = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, open_file(), 0);
    if (pages == MAP_FAILED) die("mmap");
    tids[1] = (pid_t)syscall(SYS_gettid);
    pthread_barrier_wait(&known);
    return (void *)touch_for_ever(pages + SIZE / 2) + (long)unused;
}

static __attribute__((noinline)) int sleep_as_usual(void) { return pause() + 1; }

int main(int count, char **arguments) {
    if (count < 2 || unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("namespace");
    int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    char options[256];
    snprintf(options, sizeof options, "fd=%d,rootmode=40755,user_id=0,group_id=0", device);
    if (device < 0 || mount("never", arguments[1], "fuse", MS_NOSUID | MS_NODEV, options)) die("mount");
    if (fork() == 0) serve(device);
    close(device);
    // With a third word the file system is to be seen there as well.
    if (count > 2 && mount(arguments[1], arguments[2], NULL, MS_BIND, NULL)) die("bind");
    snprintf(path, sizeof path, "%s/file", arguments[count > 2 ? 2 : 1]);
    pthread_barrier_init(&known, NULL, 3);
    pthread_t thread;
    if (pthread_create(&thread, NULL, reader, NULL) || pthread_create(&thread, NULL, toucher, NULL)) die("thread");
    pthread_barrier_wait(&known);
    printf("threads %d %d ready\n", tids[0], tids[1]);
    fflush(stdout);
    if (count == 2) return sleep_as_usual() + 1;
    // Code made at run time: push %rbp; mov %rsp,%rbp; call *%rdi; pop %rbp; ret
    char *made = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) die("mmap");
    memcpy(made, "\x55\x48\x89\xe5\xff\xd7\x5d\xc3", 8);
    return ((int (*)(int (*)(void)))made)(sleep_as_usual) + 1;
}
