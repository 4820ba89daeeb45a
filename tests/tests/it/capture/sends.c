/* A thread that writes more than a pipe holds, below a frame that only its own register finds. On SIGUSR1 the pipe is read to the end. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LENGTH (1 << 20)

static int ends[2];
static ssize_t written;

__attribute__((noinline, noclone, optimize("no-omit-frame-pointer"))) static ssize_t in_write(size_t length) {
  char *bytes = __builtin_alloca(length);
  for (size_t at = 0; at < length; at++) bytes[at] = (char)at;
  ssize_t count = write(ends[1], bytes, length);
  return bytes[length / 2] == (char)(length / 2) ? count : -1;
}

static void *run(void *unused) {
  pthread_setname_np(pthread_self(), "writer");
  written = in_write(LENGTH);
  close(ends[1]);
  return unused;
}

int main(void) {
  static char read_back[LENGTH];
  pthread_t writer;
  sigset_t set;
  int number;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  if (pipe(ends) || pthread_create(&writer, NULL, run, NULL)) abort();
  puts("ready");
  fflush(stdout);
  sigwait(&set, &number);
  while (read(ends[0], read_back, sizeof read_back) > 0) continue;
  pthread_join(writer, NULL);
  printf("wrote %zd of %d\n", written, LENGTH);
  return 0;
}
