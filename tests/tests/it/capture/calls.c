/* Threads in every kind of system call that a stop or a signal would end early: calls that the
   kernel restarts, calls that it does not, and calls that return what they have done so far. They
   wake and enter again at short intervals, and each checks what its call returned: EINTR, a short
   count and an early timeout are odd. SIGUSR1 has the counts printed. With an argument that many
   threads compute besides. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct count {
  unsigned long turns, odd, skipped;
};
#define BIG (1 << 20)
static char file_path[] = "/tmp/xpu_timer_calls_XXXXXX";
static struct timespec of_us(long us) { return (struct timespec){us / 1000000, us % 1000000 * 1000}; }
static long now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}
static void turn(struct count *count, int fine) {
  __atomic_fetch_add(&count->turns, 1, __ATOMIC_SEQ_CST);
  if (!fine) __atomic_fetch_add(&count->odd, 1, __ATOMIC_SEQ_CST);
}
static void skip(struct count *count) {
  count->skipped = 1;
  for (;;) sleep(1000);
}
/* A timeout of `us` microseconds is to end with this result and errno, and no earlier. */
#define TIMES_OUT(us, call, result, error)                                                   \
  for (;;) {                                                                                 \
    long start = now_us();                                                                   \
    errno = 0;                                                                               \
    long got = (call);                                                                       \
    int why = errno;                                                                         \
    turn(count, got == (result) && (got >= 0 || why == (error)) && now_us() - start >= (us)); \
  }
#define RETURNS(call, result) \
  for (;;) turn(count, (long)(call) == (long)(result))

static void in_epoll_wait(struct count *count) {
  int epoll = epoll_create1(0);
  struct epoll_event event;
  TIMES_OUT(2000, epoll_wait(epoll, &event, 1, 2), 0, 0)
}
static void in_epoll_pwait2(struct count *count) {
  int epoll = epoll_create1(0);
  struct epoll_event event;
  struct timespec time = of_us(1500);
  if (syscall(SYS_epoll_pwait2, epoll, &event, 1, &time, NULL, 0) < 0 && errno == ENOSYS) skip(count);
  TIMES_OUT(1500, syscall(SYS_epoll_pwait2, epoll, &event, 1, &time, NULL, 0), 0, 0)
}
static void in_poll(struct count *count) { TIMES_OUT(3000, poll(NULL, 0, 3), 0, 0) }
static void in_ppoll(struct count *count) {
  struct timespec time = of_us(700);
  TIMES_OUT(700, ppoll(NULL, 0, &time, NULL), 0, 0)
}
static void in_select(struct count *count) {
  TIMES_OUT(1000, select(0, NULL, NULL, NULL, &(struct timeval){.tv_usec = 1000}), 0, 0)
}
static void in_pselect(struct count *count) {
  struct timespec time = of_us(2500);
  TIMES_OUT(2500, pselect(0, NULL, NULL, NULL, &time, NULL), 0, 0)
}
static void in_nanosleep(struct count *count) {
  struct timespec time = of_us(300);
  TIMES_OUT(300, nanosleep(&time, NULL), 0, 0)
}
static void in_clock_nanosleep(struct count *count) {
  struct timespec time = of_us(900);
  TIMES_OUT(900, clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL), 0, 0)
}
static void in_sigtimedwait(struct count *count) {
  sigset_t set;
  struct timespec time = of_us(1200);
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  TIMES_OUT(1200, sigtimedwait(&set, NULL, &time), -1, EAGAIN)
}
static void in_futex(struct count *count) {
  static int word;
  struct timespec time = of_us(800);
  TIMES_OUT(800, syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time, NULL, 0), -1, ETIMEDOUT)
}
static void in_semtimedop(struct count *count) {
  int semaphores = semget(IPC_PRIVATE, 1, 0600);
  struct sembuf take = {.sem_op = -1};
  struct timespec time = of_us(1100);
  if (semaphores < 0) skip(count);
  /* It is gone for everybody else, and for this one once the process has ended: the kernel keeps it
     for a while only. */
  extern int semaphore_of_all;
  semaphore_of_all = semaphores;
  TIMES_OUT(1100, semtimedop(semaphores, &take, 1, &time), -1, EAGAIN)
}
int semaphore_of_all = -1, messages = -1;
static void *send_messages(void *unused) {
  struct { long type; char text[8]; } message = {1, "message"};
  for (;;) {
    usleep(700);
    msgsnd(messages, &message, sizeof message.text, 0);
  }
  return unused;
}
static pthread_t start(void *(*function)(void *), void *argument) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, function, argument)) abort();
  return thread;
}
static void in_msgrcv(struct count *count) {
  struct { long type; char text[8]; } message;
  messages = msgget(IPC_PRIVATE, 0600);
  if (messages < 0) skip(count);
  start(send_messages, NULL);
  RETURNS(msgrcv(messages, &message, sizeof message.text, 0, 0), sizeof message.text);
}
static void in_mq_receive(struct count *count) {
  char name[40], text[64];
  struct mq_attr attributes = {.mq_maxmsg = 1, .mq_msgsize = sizeof text};
  snprintf(name, sizeof name, "/xpu_timer_calls_%d", getpid());
  mqd_t queue = mq_open(name, O_CREAT | O_RDWR, 0600, &attributes);
  if (queue < 0) skip(count);
  mq_unlink(name);
  for (;;) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1300000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    turn(count, mq_timedreceive(queue, text, sizeof text, NULL, &until) == -1 && errno == ETIMEDOUT);
  }
}
/* The kernel rounds this timeout to its clock ticks, and the first tick may come at once. */
static void limit(int socket, int option, long us) {
  struct timeval time = {.tv_usec = us};
  setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
}
static void in_recv(struct count *count) {
  int pair[2];
  char byte;
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
  limit(pair[0], SO_RCVTIMEO, 4000);
  TIMES_OUT(0, recv(pair[0], &byte, 1, 0), -1, EAGAIN)
}
static void in_recvmsg(struct count *count) {
  int pair[2];
  char byte;
  struct iovec piece = {&byte, 1};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
  if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair)) abort();
  limit(pair[0], SO_RCVTIMEO, 8000);
  TIMES_OUT(0, recvmsg(pair[0], &message, 0), -1, EAGAIN)
}
static struct sockaddr_in listen_on(int *listener) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  *listener = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(*listener, (void *)&address, sizeof address) || listen(*listener, 0)) abort();
  getsockname(*listener, (void *)&address, &length);
  return address;
}
static void in_accept(struct count *count) {
  int listener;
  listen_on(&listener);
  limit(listener, SO_RCVTIMEO, 4000);
  TIMES_OUT(0, accept(listener, NULL, NULL), -1, EAGAIN)
}
static void in_connect(struct count *count) {
  int listener;
  struct sockaddr_in address = listen_on(&listener);
  /* Nobody accepts: once the queue is full, a connection waits. */
  for (int filled = 0; filled < 2; filled++) {
    int filler = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    connect(filler, (void *)&address, sizeof address);
  }
  usleep(50000);
  for (;;) {
    int caller = socket(AF_INET, SOCK_STREAM, 0);
    limit(caller, SO_SNDTIMEO, 4000);
    turn(count, connect(caller, (void *)&address, sizeof address) == -1 && errno == EINPROGRESS);
    close(caller);
  }
}
/* Reads slowly, so that whoever sends much waits again and again in the middle of it. */
static void *drain(void *descriptor) {
  static __thread char bytes[1 << 15];
  while (read((int)(long)descriptor, bytes, sizeof bytes) > 0) usleep(150);
  return NULL;
}
static char *big(void) { return calloc(1, BIG); }
static int slow_socket(void) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
  start(drain, (void *)(long)pair[1]);
  return pair[0];
}
static int slow_pipe(void) {
  int ends[2];
  if (pipe(ends)) abort();
  start(drain, (void *)(long)ends[0]);
  return ends[1];
}
static int slow_tcp(void) {
  int listener, caller = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = listen_on(&listener);
  if (connect(caller, (void *)&address, sizeof address)) abort();
  start(drain, (void *)(long)accept(listener, NULL, NULL));
  return caller;
}
static void in_send(struct count *count) {
  int end = slow_socket();
  char *bytes = big();
  RETURNS(send(end, bytes, BIG, 0), BIG);
}
static void in_send_tcp(struct count *count) {
  int end = slow_tcp();
  char *bytes = big();
  RETURNS(send(end, bytes, BIG, 0), BIG);
}
static void in_sendmsg(struct count *count) {
  struct iovec piece = {big(), BIG};
  struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
  int end = slow_socket();
  RETURNS(sendmsg(end, &message, 0), BIG);
}
static void in_write(struct count *count) {
  int end = slow_pipe();
  char *bytes = big();
  RETURNS(write(end, bytes, BIG), BIG);
}
static void in_writev(struct count *count) {
  struct iovec pieces[2] = {{big(), BIG}, {big(), BIG}};
  int end = slow_pipe();
  RETURNS(writev(end, pieces, 2), 2 * BIG);
}
static void in_sendfile(struct count *count) {
  int end = slow_tcp(), file = memfd_create("calls", 0);
  if (ftruncate(file, BIG)) abort();
  for (;;) {
    off_t from = 0;
    turn(count, sendfile(end, file, &from, BIG) == BIG);
  }
}
static void in_splice(struct count *count) {
  int end = slow_pipe(), file = memfd_create("calls", 0);
  if (ftruncate(file, BIG)) abort();
  for (;;) {
    loff_t from = 0;
    turn(count, splice(file, &from, end, NULL, 1 << 16, 0) > 0);
  }
}
static void *ring(void *descriptor) {
  uint64_t one = 1;
  for (;;) {
    usleep(600);
    if (write((int)(long)descriptor, &one, sizeof one) < 0) return NULL;
  }
}
static void in_eventfd(struct count *count) {
  int event = eventfd(0, EFD_SEMAPHORE);
  uint64_t value;
  start(ring, (void *)(long)event);
  RETURNS(read(event, &value, sizeof value), sizeof value);
}
static void in_read(struct count *count) {
  int ends[2];
  uint64_t value;
  if (pipe(ends)) abort();
  start(ring, (void *)(long)ends[1]);
  RETURNS(read(ends[0], &value, sizeof value), sizeof value);
}
static void in_timerfd(struct count *count) {
  int timer = timerfd_create(CLOCK_MONOTONIC, 0);
  struct itimerspec every = {of_us(900), of_us(900)};
  uint64_t value;
  timerfd_settime(timer, 0, &every, NULL);
  RETURNS(read(timer, &value, sizeof value), sizeof value);
}
static void *touch(void *unused) {
  for (;;) {
    usleep(800);
    int file = open(file_path, O_WRONLY);
    if (file >= 0) close(file);
  }
  return unused;
}
static void in_inotify(struct count *count) {
  char events[4096];
  int notify = inotify_init1(0);
  if (notify < 0 || inotify_add_watch(notify, file_path, IN_OPEN) < 0) skip(count);
  start(touch, NULL);
  for (;;) turn(count, read(notify, events, sizeof events) > 0);
}
static void *hold_lock(void *unused) {
  int file = open(file_path, O_RDWR);
  for (;;) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    fcntl(file, F_OFD_SETLKW, &lock);
    usleep(500);
    lock.l_type = F_UNLCK;
    fcntl(file, F_OFD_SETLKW, &lock);
    usleep(50);
  }
  return unused;
}
static void in_fcntl_lock(struct count *count) {
  int file = open(file_path, O_RDWR);
  start(hold_lock, NULL);
  for (;;) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    turn(count, fcntl(file, F_OFD_SETLKW, &lock) == 0);
    lock.l_type = F_UNLCK;
    fcntl(file, F_OFD_SETLKW, &lock);
  }
}
static void *hold_flock(void *unused) {
  int file = open(file_path, O_RDWR);
  for (;;) {
    flock(file, LOCK_EX);
    usleep(500);
    flock(file, LOCK_UN);
    usleep(50);
  }
  return unused;
}
static void in_flock(struct count *count) {
  int file = open(file_path, O_RDWR);
  start(hold_flock, NULL);
  for (;;) {
    turn(count, flock(file, LOCK_EX) == 0);
    flock(file, LOCK_UN);
  }
}
static void in_wait4(struct count *count) {
  for (;;) {
    pid_t child = fork();
    if (child == 0) {
      usleep(20000);
      _exit(0);
    }
    if (child > 0) turn(count, wait4(child, NULL, 0, NULL) == child);
    usleep(5000);
  }
}
static void in_io_uring(struct count *count) {
  struct io_uring_params parameters = {0};
  int ring = syscall(SYS_io_uring_setup, 4, &parameters);
  if (ring < 0) skip(count);
  char *queue = mmap(NULL, parameters.sq_off.array + 4 * sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
  char *done = mmap(NULL, parameters.cq_off.cqes + 8 * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_CQ_RING);
  struct io_uring_sqe *entries = mmap(NULL, 4 * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
  if (queue == MAP_FAILED || done == MAP_FAILED || entries == MAP_FAILED) skip(count);
  struct { int64_t seconds, nanoseconds; } time = {0, 1400000};
  for (;;) {
    unsigned *tail = (unsigned *)(queue + parameters.sq_off.tail), mask = *(unsigned *)(queue + parameters.sq_off.ring_mask);
    unsigned place = *tail & mask;
    entries[place] = (struct io_uring_sqe){.opcode = IORING_OP_TIMEOUT, .fd = -1, .addr = (uintptr_t)&time, .len = 1};
    ((unsigned *)(queue + parameters.sq_off.array))[place] = place;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    long start = now_us();
    int entered = syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    unsigned *head = (unsigned *)(done + parameters.cq_off.head);
    unsigned ready = __atomic_load_n((unsigned *)(done + parameters.cq_off.tail), __ATOMIC_ACQUIRE) - *head;
    turn(count, entered == 1 && ready == 1 && now_us() - start >= 1400);
    if (ready == 0) { /* It was cut short: the entry is still to come. */
      while (__atomic_load_n((unsigned *)(done + parameters.cq_off.tail), __ATOMIC_ACQUIRE) == *head) usleep(100);
    }
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
  }
}
static void in_pause(struct count *count) {
  for (;;) {
    pause();
    turn(count, 0);
  }
}
static void in_sigsuspend(struct count *count) {
  sigset_t all;
  sigfillset(&all);
  for (;;) {
    sigsuspend(&all);
    turn(count, 0);
  }
}
static void in_compute(struct count *count) {
  for (;;) {
    for (volatile long i = 0; i < 100000; i++) continue;
    turn(count, 1);
  }
}

static struct {
  const char *name;
  void (*function)(struct count *);
  struct count count;
} calls[] = {
#define CALL(name) {#name, in_##name, {0, 0, 0}}
    CALL(epoll_wait), CALL(epoll_pwait2), CALL(poll), CALL(ppoll), CALL(select), CALL(pselect), CALL(nanosleep),
    CALL(clock_nanosleep), CALL(sigtimedwait), CALL(futex), CALL(semtimedop), CALL(msgrcv), CALL(mq_receive), CALL(recv),
    CALL(recvmsg), CALL(accept), CALL(connect), CALL(send), CALL(send_tcp), CALL(sendmsg), CALL(write), CALL(writev),
    CALL(sendfile), CALL(splice), CALL(eventfd), CALL(read), CALL(timerfd), CALL(inotify), CALL(fcntl_lock), CALL(flock),
    CALL(wait4), CALL(io_uring), CALL(pause), CALL(sigsuspend), CALL(compute), CALL(compute), CALL(compute), CALL(compute),
};
enum { SPINNERS = 4, CALLS = sizeof calls / sizeof *calls - SPINNERS };

static void *run(void *index) {
  long call = (long)index;
  prctl(PR_SET_NAME, calls[call].name);
  calls[call].function(&calls[call].count);
  return NULL;
}

int main(int count, char **words) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int file = mkstemp(file_path), spinners = count > 1 ? atoi(words[1]) : 0;
  if (file < 0) abort();
  sigset_t set;
  sigfillset(&set);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  for (long call = 0; call < CALLS + (spinners < SPINNERS ? spinners : SPINNERS); call++) start(run, (void *)call);
  printf("ready\n");
  fflush(stdout);
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  sigaddset(&set, SIGTERM);
  for (int round = 1;; round++) {
    int signal = 0;
    sigwait(&set, &signal);
    if (signal == SIGTERM) {
      unlink(file_path);
      if (semaphore_of_all >= 0) semctl(semaphore_of_all, 0, IPC_RMID);
      if (messages >= 0) msgctl(messages, IPC_RMID, NULL);
      _exit(0);
    }
    printf("round %d:", round);
    for (int call = 0; call < CALLS; call++)
      if (!calls[call].count.skipped)
        printf(" %s=%lu/%lu", calls[call].name, __atomic_load_n(&calls[call].count.odd, __ATOMIC_SEQ_CST),
               __atomic_load_n(&calls[call].count.turns, __ATOMIC_SEQ_CST));
    printf(" end\n");
    fflush(stdout);
  }
}
