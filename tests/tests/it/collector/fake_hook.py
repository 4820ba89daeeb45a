"""A process that plays a hook: it does what it is told, line by line, and answers each line with
`ok` or `error …`.

The messages themselves are made by the test. A thread turns like the watcher does and keeps the
heartbeat of the ring fresh.
"""

import os
import signal
import socket
import struct
import sys
import threading
import time

HEARTBEAT, LAST_LAUNCH = int(sys.argv[1]), int(sys.argv[2])
RING_BYTES = int(sys.argv[3])


class Hook:
    def __init__(self):
        self.ring = os.memfd_create("xpu_timer_ring", os.MFD_CLOEXEC)
        os.ftruncate(self.ring, RING_BYTES)
        self.socket = None
        self.beating = True
        self.launching = False
        self.young = None
        threading.Thread(target=self.watch, name="watcher", daemon=True).start()

    def watch(self):
        while True:
            if self.beating:
                self.word(HEARTBEAT, time.monotonic_ns())
            if self.launching:
                self.word(LAST_LAUNCH, time.monotonic_ns())
            if self.young is not None:
                self.word(self.young, time.monotonic_ns())
            time.sleep(0.05)

    def word(self, index, value):
        os.pwrite(self.ring, struct.pack("<Q", int(value)), int(index) * 8)

    def now(self):
        return time.monotonic_ns()

    def connect(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect(path)
        return self.socket.recv(65536).hex()

    def hello(self, message):
        socket.send_fds(self.socket, [bytes.fromhex(message)], [self.ring])

    def hello_with(self, message, path):
        with open(path, "rb") as file:
            socket.send_fds(self.socket, [bytes.fromhex(message)], [file.fileno()])

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
        self.word(LAST_LAUNCH, time.monotonic_ns())
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
            other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            other.settimeout(60)
            other.connect(path)
            self.others.append(other)
        for other in self.others:
            try:
                other.recv(65536)
            except ConnectionResetError:
                pass
            other.close()


def main():
    hook = Hook()
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(hook, command)(*arguments)
        except OSError as error:
            print(f"error {error}", flush=True)
        else:
            print(f"ok {answer or ''}", flush=True)


main()
