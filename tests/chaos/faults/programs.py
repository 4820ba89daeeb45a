"""Programs that do unusual things. Under the hook they behave as without it."""

import functools
import os
import subprocess
import sys

from kit import (
    DIR, DUMP, Proc, add, compiled, ends_well, must, promises, ranks, wait_for,
)

HEAD = """
import ctypes, gc, os, resource, signal, socket, subprocess, sys, threading, time, cuda
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cuda.set_device(rank)
world, stream, buffer = cuda.Communicator.create("w", rank, size), cuda.Stream(), cuda.Buffer(256)
kernel = cuda.Kernel("k", 100)
def step(times=1):
    for _ in range(times):
        kernel.launch(stream)
        world.all_reduce(buffer, stream)
        stream.synchronize()
step(3)
"""
TAIL = """
step(20)
sys.stdout.write(f"rank {rank} done\\n")
sys.stdout.flush()
"""
ENDS = "all ranks complete with status 0, and nothing is printed into the job"

BODIES = {
    "forks": ("forks two hundred children, which end at once", "for _ in range(200):\n    pid = os.fork()\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)"),
    "forks_that_sum": ("forks a child, and makes device calls afterwards", "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\nstep()"),
    "execs": ("replaces itself by another program that trains", "if 'AGAIN' not in os.environ:\n    world.destroy(); os.environ['AGAIN'] = '1'; os.environ['XPU_EXAMPLE_RENDEZVOUS'] += '/again'; os.makedirs(os.environ['XPU_EXAMPLE_RENDEZVOUS'], exist_ok=True); os.execv(sys.executable, [sys.executable] + sys.argv)"),
    "closes_descriptors": ("closes every descriptor above 2", "os.closerange(3, 4096)"),
    "reuses_descriptors": ("closes the descriptors of xpu_timer, and opens its own with the same numbers", "for fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\nfiles = [open('/dev/null') for _ in range(30)]"),
    "no_descriptors": ("lowers its descriptor limit to the descriptors it has", "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))), 4096))"),
    "five_hundred_threads": ("has five hundred threads", "many = [threading.Thread(target=time.sleep, args=(3,), daemon=True) for _ in range(500)]\n[one.start() for one in many]"),
    "threads_come_and_go": ("starts and ends a thousand threads", "for _ in range(1000):\n    one = threading.Thread(target=int)\n    one.start(); one.join()"),
    "blocks_signals": ("blocks every signal", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"),
    "signal_storm": ("handles a thousand signals a second", "signal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nstep(200)\nsignal.setitimer(signal.ITIMER_REAL, 0)"),
    "changes_environment": ("removes and changes our variables", "[os.environ.pop(name) for name in list(os.environ) if name.startswith('XPU_TIMER')]\nos.environ['XPU_TIMER_SOCKET'] = '/nowhere'"),
    "changes_folder": ("changes to a folder and removes it", "gone = f'gone{os.getpid()}'; os.mkdir(gone); os.chdir(gone); os.rmdir('../' + gone)"),
    "no_dump": ("makes itself undumpable", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"),
    "no_memory": ("may map only 8 MB more memory", "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + (8 << 20),) * 2)"),
    "locks_memory": ("locks all its memory", "ctypes.CDLL(None).mlockall(3)"),
    "loads_libraries": ("loads and unloads libraries all the time", "import _ctypes\nfor _ in range(300):\n    _ctypes.dlclose(ctypes.CDLL('libm.so.6')._handle)"),
    "many_communicators": ("creates and destroys sixty communicators", "for index in range(60):\n    one = world.split(0)\n    one.all_reduce(buffer, stream); stream.synchronize(); one.destroy()"),
    "many_streams": ("creates five hundred streams", "streams = [cuda.Stream() for _ in range(500)]\n[kernel.launch(one) for one in streams]\n[one.synchronize() for one in streams]"),
    "burst": ("launches twenty thousand kernels at once", "fast = cuda.Kernel('f', 0)\nfor _ in range(20000): fast.launch(stream)\nstream.synchronize()"),
    "device_errors": ("makes device calls that fail", "for _ in range(100):\n    try: cuda._cuda('cudaSetDevice', 99)\n    except cuda.CudaError: pass"),
    "another_name": ("renames itself", "ctypes.CDLL(None).prctl(15, b'somebody', 0, 0, 0)"),
    "subprocesses": ("runs pipelines in shells", "for _ in range(20): subprocess.run('echo a | cat | cat > /dev/null', shell=True, check=True)"),
    "daemon": ("leaves a daemon behind", "subprocess.Popen(['sleep', '30'], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"),
    "multiprocessing": ("has worker processes, created by fork", "import concurrent.futures as f, multiprocessing as m\nfor kind in ('fork',):\n    with f.ProcessPoolExecutor(3, mp_context=m.get_context(kind)) as pool: assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]"),
    "recursion": ("calls a collective ten thousand frames deep", "sys.setrecursionlimit(100000)\nthreading.stack_size(512 << 20)\ndef deep(n):\n    if n: return deep(n - 1)\n    step(5)\none = threading.Thread(target=deep, args=(10000,)); one.start(); one.join()"),
    "garbage": ("collects garbage between steps", "for _ in range(30):\n    heap = [[i] for i in range(20000)]; gc.collect(); step()"),
    "preload_changed": ("starts children with another LD_PRELOAD", "subprocess.run(['true'], env={**os.environ, 'LD_PRELOAD': '/nowhere.so'}, stderr=subprocess.DEVNULL, check=True)\nsubprocess.run(['/bin/true'], env={}, check=True)"),
    "clock_of_its_own": ("runs with a profiling timer (SIGPROF)", "signal.signal(signal.SIGPROF, lambda *_: None)\nsignal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)\nstep(100)\nsignal.setitimer(signal.ITIMER_PROF, 0)"),
    "exits_in_thread": ("ends with os._exit in a thread", "if rank >= 0:\n    step(20)\n    sys.stdout.write(f'rank {rank} done\\n'); sys.stdout.flush()\n    threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(9)"),
}


def program(name):
    script = DIR / "program.py"
    script.write_text(HEAD + BODIES[name][1] + TAIL)
    ends_well(ranks(script, cwd=DIR))


for _name, _row in BODIES.items():
    add(f"program_{_name}", f"A rank {_row[0]}.", ENDS, functools.partial(program, _name))

C_LOOP = """#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#define LOOP(body) for (;;) { errno = 0; body; __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); if (errno == EINTR) { __atomic_fetch_add(&interrupted, 1, __ATOMIC_RELAXED); } } return 0
static long calls, interrupted, cut;
static void *epolls(void *x) { int fd = epoll_create1(0); struct epoll_event e; LOOP(epoll_wait(fd, &e, 1, 1)); }
static void *polls(void *x) { LOOP(poll(0, 0, 1)); }
static void *waits(void *x) { sigset_t set; sigemptyset(&set); sigaddset(&set, SIGUSR2); struct timespec t = {0, 700000}; LOOP(sigtimedwait(&set, 0, &t)); }
static void *semaphores(void *x) { int id = semget(IPC_PRIVATE, 1, 0600); struct sembuf b = {0, -1, 0}; struct timespec t = {0, 600000}; LOOP(semtimedop(id, &b, 1, &t)); }
static void *receives(void *x) { int p[2]; socketpair(1, 1, 0, p); struct timeval t = {0, 900}; setsockopt(p[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t); char c; LOOP(recv(p[0], &c, 1, 0)); }
static void *sleeps(void *x) { struct timespec t = {0, 400000}; LOOP(nanosleep(&t, 0)); }
static int pair[2];
static void *reads(void *x) { char buffer[3000]; for (;;) { if (read(pair[1], buffer, sizeof buffer) < 0) break; usleep(30); } return 0; }
static void *sends(void *x) { static char buffer[300000]; for (;;) { long n = send(pair[0], buffer, sizeof buffer, 0); calls++; if (n != sizeof buffer) __atomic_fetch_add(&cut, 1, __ATOMIC_RELAXED); } return 0; }
int main(void) {
    void *(*all[])(void *) = {epolls, polls, waits, semaphores, receives, sleeps, reads, sends};
    socketpair(1, 1, 0, pair);
    sigset_t set; sigemptyset(&set); sigaddset(&set, SIGUSR2); pthread_sigmask(SIG_BLOCK, &set, 0);
    for (int i = 0; i < 8; i++) { pthread_t t; pthread_create(&t, 0, all[i], 0); }
    puts("ready"); fflush(stdout);
    char line[8]; fgets(line, 8, stdin);
    printf("%ld calls, %ld interrupted, %ld cut\\n", calls, interrupted, cut);
    return interrupted || cut;
}
"""


@promises("no system call returns EINTR or a short count because of the captures")
def captures_of_system_calls():
    """A program in eight kinds of waiting calls is captured two hundred times, while both cores are
    busy."""
    program_ = compiled("calls", C_LOOP, "-O1", "-pthread")
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        reading, writing = os.pipe()
        job = Proc([program_], stdin=reading)
        wait_for("it is ready", lambda: "ready" in job.out(), 20)
        for _ in range(200):
            subprocess.run([DUMP, "--pid", str(job.pid), "--native"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.write(writing, b"end\n")
        code = job.wait(30)
        must(code == 0, job.out().splitlines()[-1])
    finally:
        for hog in hogs:
            hog.kill()
    return job.out().splitlines()[-1]
