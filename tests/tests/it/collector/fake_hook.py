"""Processes that play a hook.

    fake_hook.py play HEARTBEAT LAST_LAUNCH RING_BYTES
    fake_hook.py short SOCKET HELLO GOODBYE RING_BYTES VERSION:VALUE MAGIC:VALUE COUNT

`play` follows commands, line by line, and answers each line with `ok` or `error …`. The
messages themselves are made by the test. A thread turns like the watcher does and keeps the
heartbeat of the ring fresh.

`short` has COUNT processes for every line on standard input, one after the other, that each play a
hook for a moment, each with a path of its own for incidents. Every third one connects and says
nothing. Prints `done` after each line.
"""

import array
import os
import signal
import socket
import struct
import sys
import threading
import time

MARK = b"00000000"


def connection_to(path):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(path)
    return connection


def new_ring(size):
    ring = os.memfd_create("xpu_timer_ring", os.MFD_CLOEXEC)
    os.ftruncate(ring, size)
    return ring


def set_word(ring, index, value):
    os.pwrite(ring, struct.pack("<Q", int(value)), int(index) * 8)


class Hook:
    def __init__(self, heartbeat, last_launch, ring_bytes):
        self.heartbeat, self.last_launch = int(heartbeat), int(last_launch)
        self.ring = new_ring(int(ring_bytes))
        self.socket = None
        self.beating = True
        self.launching = False
        self.young = None
        threading.Thread(target=self.watch, name="watcher", daemon=True).start()

    def watch(self):
        while True:
            if self.beating:
                self.word(self.heartbeat, time.monotonic_ns())
            if self.launching:
                self.word(self.last_launch, time.monotonic_ns())
            if self.young is not None:
                self.word(self.young, time.monotonic_ns())
            time.sleep(0.05)

    def word(self, index, value):
        set_word(self.ring, index, value)

    def now(self):
        return time.monotonic_ns()

    def connect(self, path):
        self.socket = connection_to(path)
        return self.socket.recv(65536).hex()

    def hello(self, message):
        socket.send_fds(self.socket, [bytes.fromhex(message)], [self.ring])

    def hello_with(self, message, path):
        with open(path, "rb") as file:
            socket.send_fds(self.socket, [bytes.fromhex(message)], [file.fileno()])

    def wait_word(self, index):
        """Waits until the collector has written this word."""
        deadline = time.monotonic() + 50
        while os.pread(self.ring, 8, int(index) * 8) == bytes(8):
            if time.monotonic() > deadline:
                raise OSError("the collector has not written it")
            time.sleep(0.002)

    def send(self, message):
        self.socket.send(bytes.fromhex(message))

    def closed(self):
        """Waits until the collector has closed the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass

    def disconnect(self):
        self.socket.close()

    def beat(self, on):
        self.beating = on == "on"

    def launch(self, on):
        # At once as well: the thread may not have its turn before the next command.
        self.word(self.last_launch, time.monotonic_ns())
        self.launching = on == "on"

    def keep_young(self, index):
        """The operation that was entered at this word is a moment old from now on."""
        self.word(index, time.monotonic_ns())
        self.young = int(index)

    def grow_old(self, seconds):
        """It is as old as that, and grows older."""
        index, self.young = self.young, None
        # The thread may be writing it.
        time.sleep(0.2)
        self.word(index, time.monotonic_ns() - int(seconds) * 10**9)

    def polite(self):
        """Takes SIGTERM for success."""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

    def flood(self, path, count):
        """Opens many connections at once and keeps those that are taken."""
        self.others = []
        for _ in range(int(count)):
            self.others.append(connection_to(path))
        for other in self.others:
            try:
                other.recv(65536)
            except ConnectionResetError:
                pass
            other.close()


def play(*words):
    hook = Hook(*words)
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(hook, command)(*arguments)
        except OSError as error:
            print(f"error {error}", flush=True)
        else:
            print(f"ok {answer or ''}", flush=True)


def short_one(number, path, hello, goodbye, ring_bytes, *words):
    connection = connection_to(path)
    connection.recv(65536)
    if number % 3 == 0:
        return
    ring = new_ring(int(ring_bytes))
    for word in words:
        set_word(ring, *word.split(":"))
    hello = bytes.fromhex(hello).replace(MARK, b"%08d" % number)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ring]))]
    connection.sendmsg([hello], rights)
    # Every other one dies without a word.
    if number % 2 == 0:
        connection.send(bytes.fromhex(goodbye))


def short(*words):
    *settings, count = words
    number = 0
    for _ in sys.stdin:
        for _ in range(int(count)):
            number += 1
            child = os.fork()
            if child == 0:
                try:
                    short_one(number, *settings)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        print("done", flush=True)


{"play": play, "short": short}[sys.argv[1]](*sys.argv[2:])
