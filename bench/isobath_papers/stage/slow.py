"""Slow disks, simulated, with a file system on them: the same to all servers.

A raw file in memory is served as a file by `isobath serve --slow-disk`, and a loop device without the page cache is on
that file.
"""

import contextlib
from pathlib import Path

from isobath_bench import tools
from isobath_bench.flush import counts, mounts
from isobath_bench.frontends import served

from . import disks

# Of `--slow-disk`: bytes a second, µs a request, requests at a time, µs a flush.
KINDS = {
    # A file server over a network: 10 Gbit/s, half a millisecond for any request.
    "nfs": "1250000000,500,64,0",
    # A SATA SSD: 250 MB/s, 80 µs a request, 500 µs a flush.
    "ssd": "ssd",
    # A disk of 7,200 turns a minute, 100 MB/s, with a write cache of 8 MiB.
    "hdd": "hdd",
}
ABOUT = {
    "nfs": "1.25 GB/s, 0.5 ms a request, 64 requests at a time",
    "ssd": "250 MB/s, 80 µs a request, 32 at a time, 500 µs a flush",
    "hdd": "100 MB/s, 7,200 turns a minute, 8.9 ms for a third of the way, 8 MiB of write cache",
}


class Device(mounts.FileSystem):
    """A file system on a slow disk."""

    def __init__(self, kind, system, directory, device, server):
        super().__init__(system, directory, device)
        self.disk = kind
        self.server = server

    def requests(self):
        """What the disk was sent so far: reads, writes, sectors of both, flushes."""
        fields = Path(f"/sys/block/{self.device.name}/stat").read_text().split()
        found = counts.Counts(counts.requests(self.device))
        return counts.Counts({**found, "reads": int(fields[0]), "sectors_read": int(fields[2])})


def served_raw(image, kind):
    """A raw file on a slow disk, shown as a file."""
    place = image.with_name("served.raw")
    place.touch()
    more = ["--format", "raw", "--slow-disk", KINDS[kind]]
    return served.Frontend(
        f"{kind} disk",
        served.isobath(image, "fuse", place, writable=True, more=more),
        place,
        lambda: served.mounted(place),
    )


@contextlib.contextmanager
def device(kind, size, make=disks.MAKE):
    """A slow disk of some bytes with an empty file system on it, an ext4 unless `make` makes another; gone
    afterwards."""
    with tools.in_memory("papers") as directory:
        image = directory / "disk.raw"
        tools.run("truncate", f"--size={size}", image)
        tools.run(*make, image)
        with served_raw(image, kind) as server, mounts.attached(server.socket, direct=True) as (loop, mount):
            yield Device(kind, make[0].removeprefix("mkfs."), mount, loop, server)
