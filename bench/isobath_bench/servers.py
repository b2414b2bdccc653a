"""Servers under test: started on an image, stopped afterwards, their CPU time and memory read."""

import os
import subprocess
import time
from pathlib import Path

from . import tools

TICK = os.sysconf("SC_CLK_TCK")


class Server:
    """A running NBD server on a unix socket."""

    def __init__(self, name, command, socket, export=""):
        self.name = name
        self.socket = Path(socket)
        self.uri = f"nbd+unix:///{export}?socket={socket}"
        self.socket.unlink(missing_ok=True)
        began = time.monotonic()
        self.log = open(f"{socket}.log", "w+")
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=self.log, stderr=subprocess.STDOUT
        )
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() - began > 60:
                self.log.seek(0)
                raise RuntimeError(f"{name} did not start: {self.log.read()}")
            time.sleep(0.005)
        self.ready = time.monotonic() - began

    def cpu(self):
        """Seconds of CPU used so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def peak_rss(self):
        """The most memory it has taken, in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
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
        self.log.close()
        self.socket.unlink(missing_ok=True)


def isobath(image, *options):
    socket = tools.WORK / "isobath.sock"
    command = [tools.ISOBATH, "serve", image, "--nbd", f"unix:{socket}", *options]
    return Server("isobath", command, socket)


def qemu_nbd(image, *options):
    socket = tools.WORK / "qemu-nbd.sock"
    command = ["qemu-nbd", "--persistent", "--shared=16", "--format=qcow2", "--aio=io_uring"]
    command += ["--cache=writeback", f"--socket={socket}", *options, image]
    return Server("qemu-nbd", command, socket)


def nbdkit(raw, *options):
    socket = tools.WORK / "nbdkit.sock"
    command = ["nbdkit", "--foreground", f"--unix={socket}", *options, "file", raw]
    return Server("nbdkit raw", command, socket)
