"""Sixteen Python threads that repeatedly start, call through known chains of functions, and end.

A table in a shared file contains the state of each thread, as in churn.c.
"""

import ctypes
import mmap
import sys
import threading
import time

ENTRIES, FUNCTIONS, THREADS = 65536, 8, 16
ALL = 0xFFFFFFFF

with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), ENTRIES * 8)
# An item of this array is written in one piece.
table = (ctypes.c_uint64 * ENTRIES).from_buffer(memory)


def mix(x):
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & ALL
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & ALL
    return x ^ (x >> 16)


def plan(tid, generation):
    seed = mix(tid ^ (generation * 0x9E3779B1 & ALL))
    depth = 8 + mix((seed + 1000) & ALL) % 16
    return seed, [functions[mix((seed + level) & ALL) % FUNCTIONS] for level in range(depth)] + [churn_leaf]


def churn_leaf(chain, seed, level):
    if seed % 4:
        time.sleep((200 + seed % 2000) / 1e6)
    else:
        for _ in range(seed % 4000):
            pass


functions = []
for number in range(FUNCTIONS):
    text = "def churn_f%d(chain, seed, level):\n    %s\n    chain[level](chain, seed, level + 1)\n"
    padding = "; ".join("local%d = level" % local for local in range(number + 1))
    exec(text % (number, padding))
    functions.append(globals()["churn_f%d" % number])


def churn_thread():
    tid = threading.get_native_id()
    last = 5 + mix(tid) % 40
    for generation in range(1, last + 1):
        seed, chain = plan(tid, generation)
        table[tid % ENTRIES] = tid << 32 | generation
        chain[0](chain, seed, 1)
    table[tid % ENTRIES] = tid << 32 | 0x80000000 | last
    start()


def start():
    threading.Thread(target=churn_thread, daemon=True).start()


for _ in range(THREADS):
    start()
print("ready", flush=True)
threading.Event().wait()
