"""Steps of a training loop in blocks, on demand of who measures them.

Whoever measures listens at the socket LOOP_CONTROL. Each line from there is a block: how many steps, and the microseconds that each is
to be burdened with on top. The answer is the milliseconds of a step of this rank, wall time and processor time.
"""

import os
import socket
import time


def before_others():
    """What else the machine does has to wait, for this job as for the one that it is compared with. All threads inherit it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        pass


def burden(seconds):
    """Keeps a processor busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def serve(meet, step):
    """Runs `step(burden_s)` as often as it is told, until nobody is there any more; all ranks begin a block together by `meet()`."""
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
