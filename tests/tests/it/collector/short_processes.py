"""Many processes that each play a hook for a moment: `COUNT` of them for every line on standard
input, one after the other, each with a path of its own for incidents. Every third one connects and
says nothing. Prints `done` after each line.
"""

import array
import os
import socket
import struct
import sys

PATH, HELLO, GOODBYE = sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
RING_BYTES, VERSION, MAGIC = int(sys.argv[4]), sys.argv[5].split(":"), sys.argv[6].split(":")
COUNT, MARK = int(sys.argv[7]), b"00000000"


def short(number):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(PATH)
    connection.recv(65536)
    if number % 3 == 0:
        return
    ring = os.memfd_create("xpu_timer_ring", os.MFD_CLOEXEC)
    os.ftruncate(ring, RING_BYTES)
    for index, value in (VERSION, MAGIC):
        os.pwrite(ring, struct.pack("<Q", int(value)), int(index) * 8)
    hello = HELLO.replace(MARK, b"%08d" % number)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ring]))]
    connection.sendmsg([hello], rights)
    # Every other one dies without a word.
    if number % 2 == 0:
        connection.send(GOODBYE)


def main():
    number = 0
    for _ in sys.stdin:
        for _ in range(COUNT):
            number += 1
            child = os.fork()
            if child == 0:
                try:
                    short(number)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        print("done", flush=True)


main()
