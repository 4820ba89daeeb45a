"""A server without a rank: it answers a request on the device twenty times a second, until it is
told to end."""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples"))
import cuda  # noqa: E402

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
buffer = cuda.Buffer(1024)
while True:
    buffer.fill(1.0)
    cuda.synchronize()
    time.sleep(0.05)
