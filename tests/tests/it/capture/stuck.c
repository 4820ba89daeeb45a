/* A library on a file system that hangs after it was loaded, as network file systems do: `stuck
   MOUNTPOINT LIBRARY`. The mount lies in a namespace of this program, and the server dies with it,
   so nothing is left behind. Only pages that were touched are in the page cache. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_NODE = 2, PAGE = 4096, MOST = 128 * PAGE };

static char *library;
static size_t size;
static volatile sig_atomic_t hangs;

static void die(const char *what) {
  perror(what);
  exit(1);
}

static void answer(int device, unsigned long unique, int error, const void *body, size_t length) {
  static char packet[MOST + 4096];
  struct fuse_out_header head = {.len = sizeof head + length, .error = error, .unique = unique};
  memcpy(packet, &head, sizeof head);
  if (length) memcpy(packet + sizeof head, body, length);
  if (write(device, packet, head.len) < 0 && errno != ENOENT) die("answer");
}

static struct fuse_attr attributes(unsigned long node) {
  struct fuse_attr attr = {.ino = node, .nlink = 1};
  attr.mode = node == FILE_NODE ? S_IFREG | 0755 : S_IFDIR | 0755;
  attr.size = node == FILE_NODE ? size : 0;
  return attr;
}

static void on_hang(int signal) {
  (void)signal;
  hangs = 1;
}

static void serve(int device) {
  static char packet[FUSE_MIN_READ_BUFFER + MOST];
  struct sigaction action = {.sa_handler = on_hang};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigaction(SIGUSR1, &action, NULL);
  for (;;) {
    while (hangs) pause();
    if (read(device, packet, sizeof packet) < 0) {
      if (errno == EINTR || errno == ENOENT) continue;
      _exit(0);
    }
    const struct fuse_in_header *head = (const void *)packet;
    switch (head->opcode) {
      case FUSE_INIT: {
        struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = PAGE};
        answer(device, head->unique, 0, &out, sizeof out);
        break;
      }
      case FUSE_LOOKUP: {
        struct fuse_entry_out out = {.nodeid = FILE_NODE};
        out.attr = attributes(FILE_NODE);
        answer(device, head->unique, 0, &out, sizeof out);
        break;
      }
      case FUSE_GETATTR: {
        struct fuse_attr_out out = {.attr = attributes(head->nodeid)};
        answer(device, head->unique, 0, &out, sizeof out);
        break;
      }
      case FUSE_OPEN: {
        struct fuse_open_out out = {.fh = 1};
        answer(device, head->unique, 0, &out, sizeof out);
        break;
      }
      case FUSE_READ: {
        const struct fuse_read_in *in = (const void *)(packet + sizeof *head);
        size_t start = in->offset < size ? in->offset : size;
        size_t length = in->size < size - start ? in->size : size - start;
        answer(device, head->unique, 0, library + start, length);
        break;
      }
      case FUSE_FORGET: case FUSE_BATCH_FORGET: case FUSE_INTERRUPT: break; /* None is expected. */
      default: answer(device, head->unique, -ENOSYS, NULL, 0);
    }
  }
}

static __attribute__((noinline)) int sleep_as_usual(void) { return pause() + 1; }
static void *second_thread(void *unused) { return (void *)(long)(sleep_as_usual() + (unused != NULL)); }

static int server;

/* Called by the library, so that it is on the stack. */
static int in_callback(void) {
  /* The server takes no request after this; what it was about to answer is not needed. */
  kill(server, SIGUSR1);
  printf("ready\n");
  fflush(stdout);
  return pause() + 1;
}

int main(int count, char **words) {
  if (count < 3) return 2;
  FILE *file = fopen(words[2], "r");
  library = malloc(64 << 20);
  size = file ? fread(library, 1, 64 << 20, file) : 0;
  if (!size) die(words[2]);
  fclose(file);
  if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) die("namespace");
  int device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  char text[4096];
  snprintf(text, sizeof text, "fd=%d,rootmode=40755,user_id=0,group_id=0", device);
  if (device < 0 || mount("hangs", words[1], "fuse", MS_NOSUID | MS_NODEV, text)) die("mount");
  if ((server = fork()) == 0) serve(device);
  close(device);
  pthread_t thread;
  pthread_create(&thread, NULL, second_thread, NULL);
  snprintf(text, sizeof text, "%s/libstuck.so", words[1]);
  void *handle = dlopen(text, RTLD_NOW);
  if (!handle) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int (*enter)(int (*)(void)) = (int (*)(int (*)(void)))dlsym(handle, "enter_library");
  return enter(in_callback) + 1;
}
