"""Who is measured: isobath's ways of writing metadata, QEMU, and a raw file, all on one disk.

On a simulated disk QEMU has its image in a raw export of that disk, over NBD; isobath is there itself.
"""

import contextlib
import re
import subprocess
from functools import cache

from .. import servers, tools

GOAL = "isobath embedded"
JOURNAL, ORDERED, RAW = "isobath journal", "isobath ordered", "raw by isobath"
# What `qemu-img create` is told.
CONFIGURATIONS = {
    "default": "",
    "lazy, preallocated": "lazy_refcounts=on,preallocation=metadata",
}
# The simulated disk's trace event.
COUNTS = re.compile(r"(reads|writes|bytes_written|flushes|others)=(\d+)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COUNTING = "warn,isobath_storage_test::slow=trace"


@cache
def has(*options):
    """Whether this isobath's `serve` knows options and their values."""
    said = subprocess.run([tools.ISOBATH, "serve", *options, "/nonexistent"], capture_output=True, text=True)
    return "cannot open" in said.stderr or "No such file" in said.stderr


def missing_note():
    return [] if has("--metadata", "embedded") else ["Without `--metadata embedded`: this isobath has no such mode."]


def requests(server):
    """What the simulated disk of a server had been sent at its last flush."""
    server.log.flush()
    with open(server.log.name) as log:
        lines = [line for line in log if "the simulated disk's requests" in line]
    if not lines:
        return dict.fromkeys(("reads", "writes", "bytes_written", "flushes", "others"), 0)
    return {name: int(count) for name, count in COUNTS.findall(COLOUR.sub("", lines[-1]))}


class Contender:
    """A way to keep a disk, with a new image for each measurement."""

    def __init__(self, name):
        self.name = name

    def image(self, place, size, content=None):
        """A new image; or one of a raw file's content, zeroes unallocated."""
        path = place.directory / "disk"
        path.unlink(missing_ok=True)
        self.make(path, place, size, content)
        return path

    @contextlib.contextmanager
    def fresh(self, place, size, log="warn", content=None):
        """Serves a new image: the server, and the one that counts what the simulated disk is sent."""
        path = self.image(place, size, content)
        place.settle()
        try:
            with self.serve(path, place, log) as served:
                yield served
        finally:
            path.unlink()


def make_qcow2(path, size, content, options=""):
    told = ["-f", "raw", "-O", "qcow2", *(["-o", options] if options else [])]
    if content:
        tools.run("qemu-img", "convert", *told, content, path)
    else:
        tools.run("qemu-img", "create", "-q", "-f", *told[3:], path, size)


class Isobath(Contender):
    def __init__(self, mode):
        super().__init__(f"isobath {mode}")
        self.mode = mode

    def make(self, path, place, size, content=None):
        del place
        make_qcow2(path, size, content)

    @contextlib.contextmanager
    def serve(self, path, place, log="warn", options=()):
        with servers.isobath(path, "--metadata", self.mode, *place.options(), *options, log=log) as server:
            yield server, server


class Raw(Contender):
    """A raw file; on a file system all of it written."""

    def make(self, path, place, size, content=None):
        if content:
            tools.run("cp", f"--sparse={'always' if place.slow else 'never'}", content, path)
        elif place.slow:
            tools.run("truncate", f"--size={size}", path)
        else:
            tools.run("dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={-(-size // (4 << 20))}")

    @contextlib.contextmanager
    def serve(self, path, place, log="warn"):
        with servers.isobath(path, "--format=raw", *place.options(), log=log) as server:
            yield server, server


class Qemu(Contender):
    def __init__(self, name, options, directory="", hop=None):
        super().__init__(name)
        self.options = options
        self.program = f"{directory}qemu-nbd"
        # Whether the image is in an export also where the disk is not simulated.
        self.hop = hop

    def make(self, path, place, size, content=None):
        make_qcow2(path, size, content, self.options)
        if self.through_nbd(place):
            # The export is as long as any image of that disk becomes.
            tools.run("truncate", f"--size={size * 2 + (64 << 20)}", path)

    def through_nbd(self, place):
        return place.slow is not None if self.hop is None else self.hop

    @contextlib.contextmanager
    def serve(self, path, place, log="warn"):
        nbd = {"program": self.program, "name": self.name}
        if not self.through_nbd(place):
            with servers.qemu_nbd(path, "--shared=128", **nbd) as server:
                yield server, None
            return
        with servers.isobath(path, "--format=raw", *place.options(), log=log, socket="device") as device:
            with servers.qemu_nbd(device.uri, "--shared=128", **nbd) as server:
                yield server, device


@cache
def everybody():
    """All contenders, by name."""
    found = [Isobath(mode) for mode in ("embedded", "journal", "ordered") if has("--metadata", mode)]
    version, directory = next(iter(servers.qemus().items()))
    found += [Qemu(f"{version} {what}", options, directory) for what, options in CONFIGURATIONS.items()]
    found.append(Raw(RAW))
    return {contender.name: contender for contender in found}


def qemu_names():
    return [name for name in everybody() if name.startswith("QEMU")]
