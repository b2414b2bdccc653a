"""What the experiments on chains share: contenders, chains on any directory, passes over a disk, single reads of it."""

import contextlib
import json
import os
import random
import time
from functools import cache

from isobath_bench import servers, tools
from isobath_bench.depth import chains
from isobath_bench.live.control import Qmp

from . import nbd

ISOBATH, INDEXED = "isobath", "isobath indexed"
# What the paper calls SVD holds its index in the chain: isobath with the index.
ABOUT_CONTENDERS = (
    "*isobath indexed* is a chain whose active layer holds the direct-access index, as `isobath create` and `isobath"
    " index` make it; *isobath* is the same chain without it, as QEMU makes it."
)
BLOCK = 4096
CLUSTER = 65536
REQUEST = 1 << 20
# One L2 table of 64 KiB maps so much of the disk; QEMU reads it as a whole where its cache can hold all tables.
TABLE_SPAN = 512 << 20


def qemu():
    """The installed QEMU's name."""
    return next(iter(servers.qemus()))


def names():
    """Who is compared."""
    return [ISOBATH, INDEXED, qemu()]


def own(contender):
    return contender in (ISOBATH, INDEXED)


def chain(contender, layers, size, *, data="zero", fill="90%"):
    """A contender's chain, in the work directory."""
    return chains.make(layers, size=size, data=data, fill=fill, indexed=contender == INDEXED)


def chain_at(directory, contender, layers, size, *, fill="90%"):
    """The same chain, its clusters holes in the files, in another directory; made unless it is there."""
    place = directory / f"{layers}-layers{'-indexed' * (contender == INDEXED)}"
    if not place.exists():
        indexed = ["--indexed"] if contender == INDEXED and layers > 1 else []
        chains.generate(place, layers, "--size", size, "--fill", fill, "--data", "zero", *indexed)
    return chains.active_of(place, layers)


@contextlib.contextmanager
def served(contender, active, *, cache="writeback", aio="io_uring"):
    """The disk over NBD, read-only: a server, which of isobath also has a control socket, `qmp`. QEMU has caches for
    all tables of every layer, as it makes them for disks up to 256 GiB, and reads all layers by `aio`."""
    if own(contender):
        control = tools.WORK / f"svd-{os.getpid()}.qmp"
        options = ["--read-only", "--cache", cache, "--qmp", f"unix:{control}"]
        with servers.isobath(active, *options, socket=f"svd-{os.getpid()}") as server, Qmp(control) as server.qmp:
            yield server
    else:
        socket = tools.WORK / f"svd-{os.getpid()}.sock"
        command = [
            "qemu-nbd",
            "--persistent",
            "--read-only",
            "--format=qcow2",
            f"--aio={aio}",
            f"--cache={cache}",
            f"--socket={socket}",
            active,
        ]
        with servers.Server(contender, command, socket, patience=180) as server:
            yield server


def map_of(server):
    """Isobath's counts of look-ups, and their times."""
    return server.qmp.do("x-isobath-query-disks")["disks"][0]["map"]


def one_pass(server):
    """Reads the whole disk in order, 1 MiB at a time, as dd does."""
    with contextlib.closing(nbd.Client(server.socket)) as client:
        for place in range(0, client.size, REQUEST):
            client.timed_read(place, min(REQUEST, client.size - place))


def dd(server, seconds):
    """Goes on reading the disk in order for some seconds; gives bytes a second and the server's µs of CPU for 1 MiB."""
    with contextlib.closing(nbd.Client(server.socket)) as client:
        cpu, began, requests = server.cpu(), time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            client.timed_read(requests * REQUEST % client.size, REQUEST)
            requests += 1
        return {"bytes_per_second": requests * REQUEST / took, "cpu_us": (server.cpu() - cpu) / requests * 1e6}


@cache
def holes(size, fill):
    """The clusters that no layer has, in the order of the disk: the same for any number of layers."""
    extents = json.loads(
        tools.run(tools.ISOBATH, "map", "--output", "json", chains.make(1, size=size, data="zero", fill=fill))
    )
    return [
        place for extent in extents if not extent["present"]
        for place in range(extent["start"], extent["start"] + extent["length"], CLUSTER)
    ]  # fmt: skip


def walks(size, seed, *, span=TABLE_SPAN, fill="90%"):
    """Places for which a whole chain is asked, as no layer has them: one in each part of the disk that has an L2 table
    of its own, or in each of `span` bytes, in random order."""
    choice = random.Random(seed)
    places = choice.sample(holes(size, fill), len(holes(size, fill)))
    first = {place // span: place for place in places}
    return [first[part] for part in choice.sample(sorted(first), len(first))]


def regions(size, seed, span=TABLE_SPAN):
    """A place in each part of a disk that has an L2 table of its own, in random order."""
    choice = random.Random(seed)
    places = [start + choice.randrange(min(span, size - start) // BLOCK) * BLOCK for start in range(0, size, span)]
    choice.shuffle(places)
    return places


def anywhere(size, count, seed):
    """Random places of a disk."""
    choice = random.Random(seed)
    return [choice.randrange(size // BLOCK) * BLOCK for _ in range(count)]


def single_reads(server, places):
    """Reads 4 KiB at each place, one after another; gives the µs that each took."""
    with contextlib.closing(nbd.Client(server.socket)) as client:
        return [client.timed_read(place, BLOCK) for place in places]
