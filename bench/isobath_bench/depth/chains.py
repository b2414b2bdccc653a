"""The chains that are measured: made once, kept in the work directory, used again."""

import json
import os
import shutil
from functools import cache

from .. import servers, tools

ISOBATH, INDEXED = "isobath", "isobath, indexed"


def disk_size():
    """The disk whose data is read: its chains together must fit the page cache."""
    return 256 << 20 if tools.QUICK else 2 << 30


def make(layers, *, size=None, data="random", fill="90%", indexed=False):
    """The active layer of a chain; made unless it is there. Ownership is uniform."""
    size = size or disk_size()
    # The index is of the layers below.
    indexed = indexed and layers > 1
    kind = f"{layers}-layers-{size >> 20}M-{fill.replace('%', 'pct')}-{data}"
    name = f"chain-{kind}-indexed" if indexed else f"chain-{kind}"
    directory = tools.WORK / name

    def new():
        if indexed:
            index(make(layers, size=size, data=data, fill=fill), active_of(directory, layers))
        else:
            generate(directory, layers, "--size", size, "--fill", fill, "--data", data)

    return kept(directory, layers, new)


def active_of(directory, layers):
    """The active layer of a generated chain."""
    return directory / f"layer-{layers - 1:05}.qcow2"


def generate(directory, layers, *options):
    """Generates a chain of so many layers in a new directory; `options` are those of `isobath chain generate`."""
    tools.run(tools.ISOBATH, "chain", "generate", "--layers", layers, *options, "--seed", 1, directory)


def kept(directory, layers, new):
    """The active layer of a chain that is kept for later runs; `new()` makes the chain unless it is there."""
    # The mark stands beside the chain, and is made last.
    done = directory.with_name(f"{directory.name}.done")
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        new()
        done.touch()
    return active_of(directory, layers)


def index(plain, active):
    """Makes a chain beside `plain` whose active layer has an index; the layers below are the same files."""
    active.parent.mkdir()
    for layer in plain.parent.iterdir():
        if layer.name != plain.name:
            os.link(layer, active.with_name(layer.name))
    # Holes stay holes.
    tools.run("cp", plain, active)
    tools.run(tools.ISOBATH, "index", active)


def warm(active):
    """Reads a chain's files into the page cache."""
    for path in active.parent.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


@cache
def can_index():
    """Whether this isobath has the command `index`."""
    try:
        tools.run(tools.ISOBATH, "index", "--help")
    except tools.Failed:
        return False
    return True


def index_bytes(image):
    """What an image's index takes, in bytes; `None` where it has none."""
    information = json.loads(tools.run(tools.ISOBATH, "info", "--output", "json", image))
    data = information.get("format-specific", {}).get("data", {})
    return data.get("direct-access-index", {}).get("bytes")


def server(name, active):
    """Starts a server by its name in the tables on a chain, read-only."""
    if name in (ISOBATH, INDEXED):
        return servers.isobath(active, "--read-only")
    program = chains_program(name, "qemu-nbd")
    return servers.qemu_nbd(active, "--read-only", name=name, program=program, patience=180)


def chains_program(name, program):
    """A program of one of the QEMUs."""
    return servers.qemus()[name] + program


def names():
    """All that are measured side by side."""
    return [ISOBATH, *([INDEXED] if can_index() else []), *servers.qemus()]


def no_index_note():
    return [] if can_index() else ["Without an index: this isobath has no command `index`."]
