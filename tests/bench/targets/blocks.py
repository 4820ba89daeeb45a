"""Steps of a training loop in blocks, on request of the benchmark.

The benchmark listens at the socket LOOP_CONTROL. Each line that it sends is a block: the number of
steps, and the microseconds of additional load in each. The response is the milliseconds of a step
of this rank, wall time and CPU time.
"""

import os
import socket
import time


def before_others():
    """Gives this job, and the one that it is compared with, priority over all other processes.

    All threads inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        pass


def burden(seconds):
    """Keeps a processor busy for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def serve(meet, step):
    """Runs `step(burden_s)` as often as requested, until the connection is closed.

    All ranks begin a block together, with `meet()`.
    """
    control = socket.socket(socket.AF_UNIX)
    control.connect(os.environ["LOOP_CONTROL"])
    lines = control.makefile("rw")
    for line in lines:
        steps, burden_us = map(int, line.split())
        meet()
        start, used = time.monotonic(), time.process_time()
        for _ in range(steps):
            step(burden_us / 1e6)
        wall, processor = time.monotonic() - start, time.process_time() - used
        print(wall * 1000 / steps, processor * 1000 / steps, file=lines, flush=True)
