"""Starts short processes, `RATE` a second, each of which makes a device call and ends: one half in
order, the other half at once.

Prints every second how many it has started and how many of these made their call and ended well.
"""

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples"))
import cuda  # noqa: E402

rate = float(sys.argv[1])
children = {}
started = well = told = 0
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
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            well += code == 0
            children.pop(pid, None)
    except ChildProcessError:
        pass
    if time.monotonic() - begun > told + 1:
        told += 1
        print(started, well, flush=True)
    time.sleep(0.005)
