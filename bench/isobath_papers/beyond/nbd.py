"""An NBD server whose disk is in memory and whose changes are recorded, and a client that keeps several requests in
flight. Both are of the simple kind: fixed newstyle negotiation, simple replies, one export.

The server stands for the disk below an image. What it was sent, and in which order, is its log: a state that a power
loss may leave is made of that.
"""

import contextlib
import os
import socket as sockets
import struct
import threading
from dataclasses import dataclass, field

MAGIC, OPTION, OPTION_REPLY, REQUEST, REPLY = (
    b"NBDMAGIC",
    b"IHAVEOPT",
    0x3E889045565A9,
    0x25609513,
    0x67446698,
)
SECTOR = 512
FIXED_NEWSTYLE, NO_ZEROES = 1, 2
HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES = 1, 4, 8, 32, 64
EXPORT_NAME, ABORT, INFO, GO = 1, 2, 6, 7
ACK, SERVER_INFO, UNSUPPORTED = 1, 3, 0x80000001
INFO_EXPORT, INFO_BLOCK_SIZE = 0, 3
READ, WRITE, DISCONNECT, FLUSH, TRIM, WRITE_ZEROES = 0, 1, 2, 3, 4, 6
FUA = 1
EINVAL = 22
# Of one request, and of an option.
MAX_LENGTH, MAX_OPTION = 64 << 20, 4096


class Ended(Exception):
    """The peer has closed the connection."""


class Refused(Exception):
    """The peer does not speak the protocol, or has refused a request."""


def receive(connection, length):
    """Exactly so many bytes. Raises `Ended`."""
    parts = bytearray(length)
    view = memoryview(parts)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise Ended
        view = view[count:]
    return bytes(parts)


@dataclass(frozen=True)
class Write:
    """A write that the disk has completed; zeroes where a request has zeroed or discarded."""

    offset: int
    data: bytes
    # Whether it was durable when it was completed.
    fua: bool


@dataclass(frozen=True)
class Flush:
    """All writes before it are durable."""


@dataclass(frozen=True)
class Mark:
    """What the guest knows at this place of the log: a request was sent (`begun`), or was answered."""

    request: int
    begun: bool


@dataclass
class Log:
    """What happened, in order."""

    entries: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self, request, begun):
        with self.lock:
            self.entries.append(Mark(request, begun))


class Recorder:
    """The server: a disk of whole sectors in memory. Requests of one connection are carried out in their order."""

    def __init__(self, contents, path):
        self.disk = bytearray(contents)
        if len(self.disk) % SECTOR:
            raise ValueError(f"a disk of {len(self.disk)} bytes is not one of whole sectors")
        self.path = path
        self.log = Log()
        self.listener = sockets.socket(sockets.AF_UNIX)
        self.connections = []

    @property
    def uri(self):
        return f"nbd+unix:///?socket={self.path}"

    def __enter__(self):
        self.listener.bind(str(self.path))
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        # A thread that waits in `accept` is not woken by `close`.
        self.listener.shutdown(sockets.SHUT_RDWR)
        self.listener.close()
        for each in self.connections:
            with contextlib.suppress(OSError):
                each.shutdown(sockets.SHUT_RDWR)
        os.unlink(self.path)

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        with connection, contextlib.suppress(Ended, ConnectionError, Refused):
            if self._negotiate(connection):
                while self._request(connection):
                    pass

    def _negotiate(self, connection):
        """Whether the client has chosen the export."""
        connection.sendall(MAGIC + OPTION + struct.pack(">H", FIXED_NEWSTYLE | NO_ZEROES))
        (flags,) = struct.unpack(">I", receive(connection, 4))
        export = struct.pack(">QH", len(self.disk), HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES)
        while True:
            magic, option, length = struct.unpack(">8sII", receive(connection, 16))
            if magic != OPTION or length > MAX_OPTION:
                raise Refused(f"option {option} of {length} bytes")
            receive(connection, length)
            if option == EXPORT_NAME:
                connection.sendall(export + bytes(0 if flags & NO_ZEROES else 124))
                return True
            if option in (INFO, GO):
                sizes = struct.pack(">HIII", INFO_BLOCK_SIZE, SECTOR, 4096, 32 << 20)
                for about in (struct.pack(">H", INFO_EXPORT) + export, sizes):
                    self._option_reply(connection, option, SERVER_INFO, about)
            supported = option in (INFO, GO, ABORT)
            self._option_reply(connection, option, ACK if supported else UNSUPPORTED)
            if option in (GO, ABORT):
                return option == GO

    def _option_reply(self, connection, option, kind, data=b""):
        connection.sendall(struct.pack(">QIII", OPTION_REPLY, option, kind, len(data)) + data)

    def _request(self, connection):
        """Carries out a request; whether there may be a further one."""
        magic, flags, kind, handle, offset, length = struct.unpack(">IHHQQI", receive(connection, 28))
        if magic != REQUEST or length > MAX_LENGTH:
            raise Refused(f"request {kind} of {length} bytes")
        if kind == DISCONNECT:
            return False
        data = receive(connection, length) if kind == WRITE else b""
        fits = offset + length <= len(self.disk) and offset % SECTOR == 0 and length % SECTOR == 0
        error = 0 if fits and kind in (READ, WRITE, FLUSH, TRIM, WRITE_ZEROES) else EINVAL
        answer = b""
        if not error:
            with self.log.lock:
                answer = self._carry_out(kind, flags, offset, length, data)
        connection.sendall(struct.pack(">IIQ", REPLY, error, handle) + answer)
        return True

    def _carry_out(self, kind, flags, offset, length, data):
        if kind == READ:
            return bytes(self.disk[offset : offset + length])
        if kind == FLUSH:
            self.log.entries.append(Flush())
            return b""
        written = data if kind == WRITE else bytes(length)
        self.disk[offset : offset + length] = written
        self.log.entries.append(Write(offset, written, bool(flags & FUA)))
        return b""


class Client:
    """A client of an export of a server on a socket file, which carries out some requests at a time."""

    def __init__(self, path, export=""):
        self.connection = sockets.socket(sockets.AF_UNIX)
        self.connection.connect(str(path))
        magic, option, flags = struct.unpack(">8s8sH", receive(self.connection, 18))
        if magic != MAGIC or option != OPTION or not flags & FIXED_NEWSTYLE:
            raise Refused("the server does not negotiate")
        name = export.encode()
        chosen = struct.pack(">I", flags & NO_ZEROES) + struct.pack(">8sII", OPTION, EXPORT_NAME, len(name)) + name
        self.connection.sendall(chosen)
        self.size, self.flags = struct.unpack(">QH", receive(self.connection, 10))
        if not flags & NO_ZEROES:
            receive(self.connection, 124)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def send(self, handle, kind, offset=0, length=0, data=b"", fua=False):
        """Sends a request. The server is not waited for."""
        header = struct.pack(">IHHQQI", REQUEST, FUA if fua else 0, kind, handle, offset, length or len(data))
        self.connection.sendall(header + data)

    def answered(self):
        """The handle of a request that was answered: not a read. Raises `Refused` if it has failed."""
        magic, error, handle = struct.unpack(">IIQ", receive(self.connection, 16))
        if magic != REPLY or error:
            raise Refused(f"request {handle} has failed with {error}")
        return handle
