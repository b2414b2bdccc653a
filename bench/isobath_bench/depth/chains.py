"""The chains that are measured: made once, kept in the work directory, used again."""

import json
import os
import shutil
import statistics
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
    active = directory / f"layer-{layers - 1:05}.qcow2"
    # The mark stands beside the chain, and is made last.
    done = tools.WORK / f"{name}.done"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        if indexed:
            index(make(layers, size=size, data=data, fill=fill), active)
        else:
            tools.run(
                tools.ISOBATH, "chain", "generate", "--layers", layers, "--size", size,
                "--fill", fill, "--data", data, "--seed", 1, directory,
            )  # fmt: skip
        done.touch()
    return active


def index(plain, active):
    """Makes a chain beside `plain` whose active layer has an index; the layers below are the same files."""
    active.parent.mkdir()
    for layer in plain.parent.iterdir():
        if layer.name != plain.name:
            os.link(layer, active.with_name(layer.name))
    shutil.copyfile(plain, active)
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


def server(name, active):
    """Starts a server by its name in the tables on a chain, read-only."""
    if name in (ISOBATH, INDEXED):
        return servers.isobath(active, "--read-only")
    program = chains_program(name, "qemu-nbd")
    return servers.qemu_nbd(active, "--read-only", name=name, program=program, patience=180)


def chains_program(name, program):
    """A program of one of the QEMUs."""
    return qemus()[name] + program


def names():
    """All that are measured side by side."""
    return [ISOBATH, *([INDEXED] if can_index() else []), *qemus()]


def no_index_note():
    return [] if can_index() else ["Without an index: this isobath has no command `index`."]


class Samples(dict):
    """Samples by key; a crash stays on record in place of them."""

    def add(self, key, sample):
        self.setdefault(key, []).append(sample)

    def attempt(self, key, measure):
        """Adds what `measure` gives, or that it failed; does not repeat what crashed."""
        if self.failure(key):
            return
        try:
            self.add(key, measure())
        except tools.Failed as error:
            what = "crashed" if isinstance(error, servers.Crashed) else "failed"
            self.add(key, {"failed": what, "why": str(error)})

    def failure(self, key):
        return next((sample["failed"] for sample in self.get(key, ()) if "failed" in sample), None)

    def median(self, key, field):
        """The median of a field; `None` where nothing was measured."""
        values = [sample[field] for sample in self.get(key, ()) if sample.get(field) is not None]
        return statistics.median(values) if values and not self.failure(key) else None

    def text(self, key, field, form="{:,.0f}", factor=1.0):
        """The median for a table, or what became of it."""
        value = self.median(key, field)
        return self.failure(key) or "-" if value is None else form.format(value * factor)

    def raw(self):
        """As JSON keeps them."""
        return {" / ".join(map(str, key if isinstance(key, tuple) else (key,))): each for key, each in self.items()}


def rotated(items, number):
    """The items in another order each round."""
    number %= max(len(items), 1)
    return items[number:] + items[:number]
