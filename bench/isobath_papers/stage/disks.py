"""A disk in use: an image served as a file by FUSE, and a file system on it, alike for every server."""

import contextlib
import itertools

from isobath_bench import servers, tools
from isobath_bench.doors import served
from isobath_bench.flush import mounts

from . import chain

MAKE = ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"]
_numbers = itertools.count()


class Disk(served.Door):
    """A server, and the file that shows its disk."""

    @property
    def file(self):
        return self.socket


def _start(name, command_for):
    """Starts a server whose command depends on where the disk is to be seen."""
    place = tools.WORK / f"disk-{next(_numbers)}.img"
    place.unlink(missing_ok=True)
    place.touch()
    return Disk(name, command_for(place), place, lambda: served.mounted(place), patience=600)


def isobath(image, *options, cache="writeback", writable=True, name="isobath"):
    """`isobath serve --fuse`; `cache`: `writeback` is the page cache, `none` is O_DIRECT."""
    how = [*options, "--cache", cache, *([] if writable else ["--read-only"])]
    return _start(name, lambda place: [tools.ISOBATH, "serve", "--fuse", place, *how, image])


def raw(image, *options, cache="writeback", name="raw"):
    """A raw file as a disk, served by isobath."""
    return isobath(image, "--format", "raw", *options, cache=cache, name=name)


def qemu(image, *, cache="writeback", l2_cache=None, writable=True, program="qemu-storage-daemon", name="QEMU"):
    """qemu-storage-daemon. `l2_cache`: bytes of L2 cache for each layer; `None` is what QEMU chooses."""
    devices = chain.qemu_blockdevs(image, l2_cache, direct=cache == "none", writable=writable)
    export = f"type=fuse,id=door,node-name=disk,writable={'on' if writable else 'off'}"
    return _start(name, lambda place: [program, *devices, "--export", f"{export},mountpoint={place}"])


def serve(contender, image, *options, cache="writeback", writable=True):
    """Serves an image by a contender's name: `isobath`, with `--metadata` after a blank, `raw`, or a QEMU (without options)."""
    if contender == "raw":
        return raw(image, *options, cache=cache)
    if contender.startswith("isobath"):
        mode = contender.partition(" ")[2]
        return isobath(image, *(["--metadata", mode] if mode else []), *options, cache=cache, writable=writable, name=contender)
    directory = servers.qemus()[contender] if contender in servers.qemus() else ""
    return qemu(image, cache=cache, writable=writable, program=f"{directory}qemu-storage-daemon", name=contender)


@contextlib.contextmanager
def mounted(disk, make=MAKE, options="noatime"):
    """A file system on a disk, by a loop device without the page cache; `make` makes it first, unless that is `None`.
    Gives a `mounts.FileSystem`."""
    with mounts.attached(disk.file, make=make or (), options=options, direct=True) as (device, directory):
        yield mounts.FileSystem(make[0].removeprefix("mkfs.") if make else "ext4", directory, device)
