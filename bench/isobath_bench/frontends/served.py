"""Servers with a frontend that is no NBD: Isobath's, and qemu-storage-daemon's to the same images."""

import os
import signal
import stat
import subprocess
import time
from functools import cache
from pathlib import Path

from .. import servers, tools

ISOBATH = "isobath"


@cache
def qemu_name():
    return servers.qemu_name("qemu-storage-daemon")


@cache
def options():
    """The text of `isobath serve --help`."""
    return tools.run(tools.ISOBATH, "serve", "--help")


class Frontend(servers.Server):
    """A running server that is ready when `ready()` is true."""

    def __init__(self, name, command, place, ready, patience=120):
        self.name = name
        self.socket = Path(place)
        self.log = open(f"{place}.log", "w+")
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=subprocess.STDOUT)
        began = time.perf_counter()
        try:
            while not ready():
                status = self.process.poll()
                if status is not None and status < 0:
                    raise servers.Crashed(f"{name} crashed: {signal.Signals(-status).name}")
                if status is not None or time.perf_counter() - began > patience:
                    raise tools.Failed(f"{name} did not start: {self.state()}")
                time.sleep(0.002)
        except BaseException:
            self.__exit__()
            raise

    def check(self, error):
        """Raises that the server has crashed, if it has, in place of what its client says."""
        status = self.process.poll()
        if status is not None and status < 0:
            raise servers.Crashed(f"{self.name} crashed under load: signal {-status}") from error
        raise error

    def __exit__(self, *_):
        super().__exit__()
        # A server that was killed leaves its file system behind.
        if os.path.ismount(self.socket):
            subprocess.run(["umount", "--lazy", self.socket])


def listens(path):
    """Whether there is somebody behind a socket's name, without calling on them: a device serves one client."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        if line.endswith(f" {path}"):
            # Flags: SO_ACCEPTCON.
            return int(line.split()[3], 16) & 0x10000 != 0
    return False


def mounted(path):
    """Whether a file shows a disk."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def isobath(image, frontend, place, *, direct=False, writable=False, more=()):
    """`isobath serve` with one frontend: `vhost-user-blk` or `fuse`."""
    if f"--{frontend}" not in options():
        raise tools.Failed(f"this isobath has no `--{frontend}`")
    how = ["--cache", "none"] if direct else []
    how += [] if writable else ["--read-only"]
    address = f"unix:{place}" if frontend == "vhost-user-blk" else place
    return [tools.ISOBATH, "serve", f"--{frontend}", address, *how, *more, image]


def qemu(image, frontend, place, *, direct=False, writable=False, queues=1, poll=True):
    """qemu-storage-daemon with one export, in a thread of its own where that export can have one."""
    cache = "cache.direct=on" if direct else "cache.direct=off"
    read_only = "off" if writable else "on"
    form = image.suffix.lstrip(".")
    command = ["qemu-storage-daemon", "--object", f"iothread,id=thread{'' if poll else ',poll-max-ns=0'}"]
    command += [
        "--blockdev",
        f"driver=file,node-name=file,filename={image},aio=io_uring,{cache},read-only={read_only},discard=unmap",
    ]
    command += ["--blockdev", f"driver={form},node-name=disk,file=file,{cache},read-only={read_only},discard=unmap"]
    export = f"type={frontend},id=frontend,node-name=disk,writable={'on' if writable else 'off'}"
    if frontend == "vhost-user-blk":
        export += f",iothread=thread,addr.type=unix,addr.path={place},num-queues={queues}"
    else:
        export += f",mountpoint={place}"
    return [*command, "--export", export]


def vhost_user(name, image, *, poll=True, queues=1, **how):
    """A server behind a vhost-user-blk socket. Without `poll` it sleeps whenever there is nothing to do."""
    place = tools.WORK / "frontend.sock"
    place.unlink(missing_ok=True)
    if name == ISOBATH:
        more = [] if poll else ["--poll", "0"]
        command = isobath(image, "vhost-user-blk", place, more=more, **how)
    else:
        command = qemu(image, "vhost-user-blk", place, queues=queues, poll=poll, **how)
    return Frontend(name, command, place, lambda: listens(place))


def fuse(name, image, **how):
    """A server that shows the disk as a file."""
    place = tools.WORK / "frontend.img"
    place.unlink(missing_ok=True)
    place.touch()
    make = isobath if name == ISOBATH else qemu
    return Frontend(name, make(image, "fuse", place, **how), place, lambda: mounted(place))
