"""A client of NBD that reads one block after another, and knows how long each takes.

It takes simple replies only. To a client that takes structured ones QEMU tells of holes, for which it asks the whole
chain about each request once more; a guest has no part in that.
"""

import contextlib
import socket
import struct
import time

from isobath_bench import tools

OPTION, EXPORT_NAME, FIXED_NO_ZEROES = b"IHAVEOPT", 1, 3
REQUEST, REPLY = 0x25609513, 0x67446698
# Seconds; QEMU with 1,000 layers takes long.
PATIENCE = 180


@contextlib.contextmanager
def patience():
    """Says of a server that does not answer for long what it is."""
    try:
        yield
    except TimeoutError as error:
        raise tools.Failed("the server does not answer") from error


class Client:
    """A connection to the server of a unix socket, and its first export."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        with patience():
            self.socket.connect(str(path))
            # "NBDMAGIC", "IHAVEOPT", flags.
            self._receive(18)
            self.socket.sendall(struct.pack(">I8sII", FIXED_NO_ZEROES, OPTION, EXPORT_NAME, 0))
            self.size, _ = struct.unpack(">QH", self._receive(10))

    def timed_read(self, place, length):
        """Reads, and gives the µs that it took."""
        with patience():
            began = time.perf_counter_ns()
            self.socket.sendall(struct.pack(">IHHQQI", REQUEST, 0, 0, place, place, length))
            magic, error, cookie = struct.unpack(">IIQ", self._receive(16))
            self._receive(length)
            took = time.perf_counter_ns() - began
        if (magic, error, cookie) != (REPLY, 0, place):
            raise tools.Failed(f"the server gave no block at {place}: error {error}")
        return took / 1000

    def _receive(self, length):
        received, at = bytearray(length), 0
        while at < length:
            more = self.socket.recv_into(memoryview(received)[at:])
            if not more:
                raise tools.Failed("the server has closed the connection")
            at += more
        return received

    def close(self):
        self.socket.close()
