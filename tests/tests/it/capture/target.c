/* The program whose stacks the capture tests know: `target MODE [N]`. It prints "ready" and then
   does what MODE says. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))
/* Keeps a call from becoming a jump, which would take the caller off the stack. */
#define KEEP __asm__ volatile("" ::: "memory")

static sem_t never;
static volatile unsigned long counter;
static void (*volatile leaf)(void);

static void ready(void) {
  printf("ready\n");
  fflush(stdout);
}

static void forever(void) {
  for (;;) pause();
}

NOINLINE static void in_futex(void) {
  sem_wait(&never);
  KEEP;
}
NOINLINE static void in_poll(void) {
  struct pollfd none = {.fd = -1};
  poll(&none, 1, -1);
  KEEP;
}
NOINLINE static void in_nanosleep(void) {
  struct timespec long_time = {.tv_sec = 100000};
  nanosleep(&long_time, NULL);
  KEEP;
}
NOINLINE static void in_spin(void) {
  for (;;) counter++;
}
NOINLINE static void in_vfork(void) {
  if (vfork() == 0) {
    /* The child goes with the parent, which cannot be killed before it. */
    for (;;) pause();
  }
  KEEP;
}

NOINLINE static void level_three(void) {
  leaf();
  KEEP;
}
NOINLINE static void level_two(void) {
  level_three();
  KEEP;
}
NOINLINE static void level_one(void) {
  level_two();
  KEEP;
}

NOINLINE static int recurse(int depth) {
  if (depth == 0) {
    leaf();
    return 1;
  }
  int below = recurse(depth - 1);
  KEEP;
  return below + depth;
}

static void on_signal(int signal) {
  (void)signal;
  ready();
  level_one();
  KEEP;
}

static void *thread_main(void *unused) {
  (void)unused;
  level_one();
  return NULL;
}

static void *become_alone(void *unused) {
  (void)unused;
  ready();
  level_one();
  return NULL;
}

/* Threads that come and go, each with one of two chains of calls; the test knows which frames
   belong together. */
#define CHAIN(letter)                                        \
  NOINLINE static void letter##_three(int us) {              \
    usleep(us);                                              \
    KEEP;                                                    \
  }                                                          \
  NOINLINE static void letter##_two(int us) {                \
    letter##_three(us);                                      \
    KEEP;                                                    \
  }                                                          \
  NOINLINE static void letter##_one(int us) {                \
    letter##_two(us);                                        \
    KEEP;                                                    \
  }                                                          \
  static void *letter##_root(void *us) {                     \
    for (int turn = 0; turn < 4; turn++) {                   \
      letter##_one((int)(long)us);                           \
      for (int i = 0; i < 1000; i++) counter++;              \
    }                                                        \
    return NULL;                                             \
  }
CHAIN(left)
CHAIN(right)

static void churn(void) {
  pthread_t threads[16];
  unsigned long round = 0;
  ready();
  for (;; round++) {
    for (int i = 0; i < 16; i++)
      pthread_create(&threads[i], NULL, (i + round) % 2 ? left_root : right_root, (void *)(50L + 37 * i));
    for (int i = 0; i < 16; i++) pthread_join(threads[i], NULL);
  }
}

static void spawn(void *(*function)(void *), const char *name) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 256 * 1024);
  if (pthread_create(&thread, &attributes, function, NULL)) abort();
  pthread_setname_np(thread, name);
}

int main(int count, char **words) {
  const char *mode = count > 1 ? words[1] : "";
  int number = count > 2 ? atoi(words[2]) : 0;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sem_init(&never, 0, 0);
  leaf = in_futex;
  if (!strcmp(mode, "poll")) leaf = in_poll;
  if (!strcmp(mode, "nanosleep")) leaf = in_nanosleep;
  if (!strcmp(mode, "spin")) leaf = in_spin;
  if (!strcmp(mode, "vfork")) leaf = in_vfork;
  if (!strcmp(mode, "deep")) {
    ready();
    int depth = recurse(number);
    KEEP;
    return depth != number;
  }
  if (!strcmp(mode, "signal") || !strcmp(mode, "siginfo") || !strcmp(mode, "sigaltstack")) {
    struct sigaction action = {.sa_handler = on_signal};
    if (!strcmp(mode, "siginfo")) {
      /* The further arguments are not looked at. */
      action.sa_sigaction = (void (*)(int, siginfo_t *, void *))on_signal;
      action.sa_flags = SA_SIGINFO | SA_NODEFER;
    }
    if (!strcmp(mode, "sigaltstack")) {
      stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
      sigaltstack(&stack, NULL);
      action.sa_flags = SA_ONSTACK;
    }
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
    return 0;
  }
  if (!strcmp(mode, "threads") || !strcmp(mode, "spin_threads")) {
    if (!strcmp(mode, "spin_threads")) leaf = in_spin;
    for (int i = 0; i < number; i++) {
      char name[16];
      snprintf(name, sizeof name, "pool-%d", i);
      spawn(thread_main, name);
    }
    ready();
    forever();
  }
  if (!strcmp(mode, "newborn")) {
    /* On one processor the creator goes on, and stops the process before most of the new threads
       ran. */
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    ready();
    for (int i = 0; i < number; i++) spawn(thread_main, "newborn");
    raise(SIGSTOP);
  }
  if (!strcmp(mode, "zombie_leader")) {
    spawn(become_alone, "survivor");
    pthread_exit(NULL);
  }
  if (!strcmp(mode, "churn")) churn();
  ready();
  level_one();
  return 0;
}
