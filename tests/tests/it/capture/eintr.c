/* Threads that wait in calls which a stop would end with EINTR. Each counts how often that
   happened; SIGUSR1 has the counts printed. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
#define COUNT(call) while ((call) < 0 && errno == EINTR) __atomic_fetch_add(interrupted, 1, __ATOMIC_SEQ_CST)

static int semaphores;

NOINLINE static int in_epoll_wait(int *interrupted) {
  int epoll = epoll_create1(0);
  struct epoll_event event;
  COUNT(epoll_wait(epoll, &event, 1, 100000000));
  return errno;
}
NOINLINE static int in_recv(int *interrupted) {
  int pair[2];
  struct timeval timeout = {.tv_sec = 100000};
  char byte;
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
  setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  COUNT(recv(pair[0], &byte, 1, 0));
  return errno;
}
NOINLINE static int in_accept(int *interrupted) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct timeval timeout = {.tv_sec = 100000};
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1)) abort();
  COUNT(accept(listener, NULL, NULL));
  return errno;
}
NOINLINE static int in_semop(int *interrupted) {
  struct sembuf take = {.sem_op = -1};
  COUNT(semop(semaphores, &take, 1));
  return errno;
}
NOINLINE static int in_sigtimedwait(int *interrupted) {
  struct timespec timeout = {.tv_sec = 100000};
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  COUNT(sigtimedwait(&set, NULL, &timeout));
  return errno;
}
NOINLINE static int in_nanosleep(int *interrupted) {
  struct timespec timeout = {.tv_sec = 100000};
  COUNT(nanosleep(&timeout, NULL));
  return errno;
}
NOINLINE static int in_poll(int *interrupted) {
  struct pollfd none = {.fd = -1};
  COUNT(poll(&none, 1, 100000000));
  return errno;
}
NOINLINE static int in_select(int *interrupted) {
  struct timeval timeout = {.tv_sec = 100000};
  COUNT(select(0, NULL, NULL, NULL, &timeout));
  return errno;
}
NOINLINE static int in_futex(int *interrupted) {
  static int word;
  struct timespec timeout = {.tv_sec = 100000};
  COUNT(syscall(SYS_futex, &word, FUTEX_WAIT, 0, &timeout, NULL, 0));
  return errno;
}

static struct {
  const char *name;
  int (*function)(int *);
  int interrupted;
} calls[] = {
    {"epoll_wait", in_epoll_wait}, {"recv", in_recv},         {"accept", in_accept},
    {"semop", in_semop},           {"sigtimedwait", in_sigtimedwait},
    {"nanosleep", in_nanosleep},   {"poll", in_poll},         {"select", in_select},
    {"futex", in_futex},
};
enum { CALLS = sizeof calls / sizeof *calls };

/* Set before the semaphore goes, whose waiter would otherwise end the program first. */
static atomic_int ending;

static void *run(void *index) {
  long call = (long)index;
  prctl(PR_SET_NAME, calls[call].name);
  int error = calls[call].function(&calls[call].interrupted);
  while (ending) pause();
  fprintf(stderr, "%s ended with %s\n", calls[call].name, strerror(error));
  exit(1);
}

int main(void) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  semaphores = semget(IPC_PRIVATE, 1, 0600);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigaddset(&set, SIGUSR2);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  for (long call = 0; call < CALLS; call++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, (void *)call)) abort();
  }
  printf("ready\n");
  fflush(stdout);
  sigdelset(&set, SIGUSR2);
  for (int round = 1;; round++) {
    int signal = 0;
    sigwait(&set, &signal);
    if (signal == SIGTERM) {
      ending = 1;
      semctl(semaphores, 0, IPC_RMID);
      _exit(0);
    }
    printf("round %d:", round);
    for (int call = 0; call < CALLS; call++)
      printf(" %s=%d", calls[call].name, __atomic_load_n(&calls[call].interrupted, __ATOMIC_SEQ_CST));
    printf(" end\n");
    fflush(stdout);
  }
}
