"""Starts short processes, `RATE` a second, each of which makes a device call and ends: one half in order, the other half at once."""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples"))
import cuda  # noqa: E402

rate = float(sys.argv[1])
children = {}
started = 0
begun = time.monotonic()
while True:
    due = int((time.monotonic() - begun) * rate)
    # A machine that cannot keep up is not flooded.
    while started < due and len(children) < 64:
        started += 1
        child = os.fork()
        if child == 0:
            cuda.Buffer(16).fill(1.0)
            if started % 2:
                sys.exit(0)
            os._exit(0)
        children[child] = None
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.pop(pid, None)
    except ChildProcessError:
        pass
    time.sleep(0.005)
