"""A disk in use: an image served over NBD and shown as a file by libnbd's nbdfuse, and a file system on it. All servers
are reached in the same way. (QEMU's own FUSE export, of 7.2 and 10.0, damages data that is written by several requests
at a time.)
"""

import contextlib
import itertools
import os
import subprocess
import time
from pathlib import Path

from isobath_bench import servers, tools
from isobath_bench.flush import mounts
from isobath_bench.frontends import served

from . import chain

MAKE = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"]
EXPORT = "disk"
_numbers = itertools.count()


class Disk(servers.Server):
    """An NBD server, and the file that shows its disk for as long as it is entered."""

    bridge = None

    @property
    def file(self):
        return self.socket.with_suffix(".img")

    def __enter__(self):
        self.file.touch()
        self.bridge = subprocess.Popen(["nbdfuse", self.file, self.uri], stdout=self.log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 60
            while not served.mounted(self.file):
                if self.bridge.poll() is not None or time.monotonic() > until:
                    raise tools.Failed(f"nbdfuse does not show the disk: {self.state()}")
                time.sleep(0.002)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.bridge:
            # What nbdfuse has left behind by dying is no mount to the kernel's `stat`, and is one all the same.
            subprocess.run(["umount", "--lazy", self.file], stderr=subprocess.DEVNULL)
            try:
                self.bridge.wait(30)
            except subprocess.TimeoutExpired:
                self.bridge.kill()
                self.bridge.wait()
            self.file.unlink()
        super().__exit__()
        os.unlink(self.log.name)


def _socket():
    return tools.WORK / f"disk-{os.getpid()}-{next(_numbers)}.sock"


def isobath(image, *options, cache="writeback", writable=True, name="isobath", log="warn"):
    """`isobath serve`; `cache`: `writeback` is the page cache, `none` is O_DIRECT."""
    socket = _socket()
    how = ["--export-name", EXPORT, *options, "--cache", cache, *([] if writable else ["--read-only"])]
    command = [tools.ISOBATH, "serve", "--nbd", f"unix:{socket}", *how, image]
    return Disk(name, command, socket, EXPORT, patience=600, environment={"ISOBATH_LOG": log})


def raw(image, *options, cache="writeback", name="raw"):
    """A raw file as a disk, served by isobath."""
    return isobath(image, "--format", "raw", *options, cache=cache, name=name)


def qemu(image, *options, cache="writeback", l2_cache=None, writable=True, program="qemu-storage-daemon", name="QEMU"):
    """qemu-storage-daemon. `l2_cache`: bytes of L2 cache for each layer; `None` is what QEMU chooses. `options` are the
    program's."""
    socket = _socket()
    devices = chain.qemu_blockdevs(image, l2_cache, direct=cache == "none", writable=writable, node=EXPORT)
    export = f"type=nbd,id=frontend,node-name={EXPORT},name={EXPORT},writable={'on' if writable else 'off'}"
    command = [
        "env",
        f"--chdir={Path(image).parent}",
        program,
        *devices,
        "--nbd-server",
        f"addr.type=unix,addr.path={socket}",
        "--export",
        export,
        *options,
    ]
    return Disk(name, command, socket, EXPORT, patience=600)


def serve(contender, image, *options, cache="writeback", writable=True):
    """Serves an image by a contender's name: `isobath`, with `--metadata` after a blank, `raw`, or a QEMU; `options`
    are the program's."""
    if contender == "raw":
        return raw(image, *options, cache=cache)
    if contender.startswith("isobath"):
        mode = contender.partition(" ")[2]
        return isobath(
            image, *(["--metadata", mode] if mode else []), *options, cache=cache, writable=writable, name=contender
        )
    directory = servers.qemus()[contender] if contender in servers.qemus() else ""
    return qemu(
        image, *options, cache=cache, writable=writable, program=f"{directory}qemu-storage-daemon", name=contender
    )


@contextlib.contextmanager
def looped(disk):
    """A loop device, without the page cache below it, on a disk."""
    device = tools.run("losetup", "--find", "--show", "--direct-io=on", disk.file).strip()
    try:
        yield device
    finally:
        tools.run("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(disk, make=MAKE, options="noatime"):
    """A file system on a disk, by a loop device without the page cache; `make` makes it first, unless that is `None`.
    Gives a `mounts.FileSystem`."""
    with mounts.attached(disk.file, make=make or (), options=options, direct=True) as (device, directory):
        yield mounts.FileSystem(make[0].removeprefix("mkfs.") if make else "ext4", directory, device)
