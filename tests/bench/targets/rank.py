"""An artificial rank: 64 Python threads with deep stacks and 36 native ones.

It runs on every CPython from 3.8 on.

Arguments: the library made of rank.c, and the two named pipes of its spinning thread.
"""

import ctypes
import sys
import threading

NATIVE_THREADS = 36
PYTHON_THREADS = 64

never = threading.Event()
started = threading.Semaphore(0)


class Layer:
    """One layer of a deep call chain.

    Every fourth call goes through C, so that the interpreter nests on the native stack.
    """

    def __init__(self, depth):
        self.depth = depth

    def forward(self, value):
        if self.depth == 0:
            started.release()
            never.wait()
        elif self.depth % 4 == 0:
            return list(map(Layer(self.depth - 1), [value]))[0]
        return self.call_next(value)

    def call_next(self, value):
        return Layer(self.depth - 1).forward(value)

    __call__ = forward


def loader(depth):
    # A generator and a lambda on the way down, as real programs have them.
    def batches():
        yield (lambda: Layer(depth).forward(1))()

    for batch in batches():
        return batch


library = ctypes.CDLL(sys.argv[1])
if library.start_threads(ctypes.c_long(NATIVE_THREADS), sys.argv[2].encode(), sys.argv[3].encode()):
    sys.exit("threads cannot be started")
threading.stack_size(1 << 20)
for number in range(1, PYTHON_THREADS):
    threading.Thread(target=loader, args=(40 + number,), name="worker-%d" % number, daemon=True).start()
for _ in range(1, PYTHON_THREADS):
    started.acquire()
print("ready", flush=True)
loader(40)
