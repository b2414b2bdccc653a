"""Servers under test: started on an image, stopped afterwards, their CPU time and memory read."""

import os
import signal
import socket as sockets
import subprocess
import time
from functools import cache
from pathlib import Path

from . import tools

TICK = os.sysconf("SC_CLK_TCK")


class Crashed(tools.Failed):
    """A program that a signal has ended."""


def greets(path):
    """Whether an NBD server on a unix socket greets whoever connects."""
    with sockets.socket(sockets.AF_UNIX) as client:
        try:
            client.connect(str(path))
            client.settimeout(60)
            return client.recv(8) == b"NBDMAGIC"
        except (FileNotFoundError, ConnectionError):
            return False


class Server:
    """A running NBD server on a unix socket.

    `ready` are the seconds from its start until it greeted a client, `said` is what it had logged when
    it had ended.
    """

    def __init__(self, name, command, socket, export="", patience=60, environment=None):
        self.name = name
        self.socket = Path(socket)
        self.uri = f"nbd+unix:///{export}?socket={socket}"
        self.socket.unlink(missing_ok=True)
        self.log = open(f"{socket}.log", "w+")
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=self.log, stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
        )  # fmt: skip
        try:
            while not greets(self.socket):
                status = self.process.poll()
                if status is not None and status < 0:
                    raise Crashed(f"{name} crashed: {signal.Signals(-status).name}")
                if status is not None or time.perf_counter() - began > patience:
                    self.log.seek(0)
                    raise tools.Failed(f"{name} did not start: {self.log.read()[-2000:]}")
                time.sleep(0.0002)
        except BaseException:
            self.__exit__()
            raise
        self.ready = time.perf_counter() - began

    def cpu(self):
        """Seconds of CPU used so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def peak_rss(self):
        """The most memory it has taken, in bytes."""
        return self._status("VmHWM:")

    def rss(self):
        """The memory it has, in bytes."""
        return self._status("VmRSS:")

    def state(self):
        """Whether it runs, and the last that it has logged."""
        status = self.process.poll()
        self.log.flush()
        said = Path(self.log.name).read_text()[-500:]
        return f"{self.name} {'runs' if status is None else f'has ended with {status}'}: {said}"

    def _status(self, name):
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.seek(0)
        self.said = self.log.read()
        self.log.close()
        self.socket.unlink(missing_ok=True)


def isobath(image, *options, log="warn", socket="isobath", patience=60, listen=None, environment=None):
    socket = tools.WORK / f"{socket}.sock"
    command = [tools.ISOBATH, "serve", image, *(listen or ["--nbd", f"unix:{socket}"]), *options]
    environment = {"ISOBATH_LOG": log} | (environment or {})
    return Server("isobath", command, socket, patience=patience, environment=environment)


def qemu_nbd(image, *options, name="qemu-nbd", program="qemu-nbd", patience=60, form="qcow2"):
    socket = tools.WORK / "qemu-nbd.sock"
    command = [program, "--persistent", "--shared=16", f"--format={form}", "--aio=io_uring"]
    command += ["--cache=writeback", f"--socket={socket}", *options, image]
    return Server(name, command, socket, patience=patience)


def nbdkit(raw, *options):
    socket = tools.WORK / "nbdkit.sock"
    command = ["nbdkit", "--foreground", f"--unix={socket}", *options, "file", raw]
    return Server("nbdkit raw", command, socket)


@cache
def qemus():
    """The installed QEMU and, where it is unpacked, QEMU 10: names to directories, "" for `PATH`."""
    found = {qemu_name("qemu-img"): ""}
    if (tools.QEMU10 / "qemu-nbd").exists():
        found[qemu_name(tools.QEMU10 / "qemu-img")] = str(tools.QEMU10) + "/"
    return found


def qemu_name(program):
    version = tools.version(program, "--version").split("version ")[1].split()[0]
    return "QEMU " + ".".join(version.split(".")[:2])
